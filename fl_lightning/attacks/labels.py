"""Attack by training on wrong labels."""

from collections.abc import Iterator
from typing import Any, cast

from pytorch_lightning import LightningModule
from torch import Tensor

from fl_lightning.aggregation import Inquiry
from fl_lightning.attacks.attack import Attack, attacked
from fl_lightning.client import ClientModule
from fl_lightning.types import Batch, Broadcast, ClientData, TrainableModule

EVALUATED = ("test", "val")
"""The splits for evaluation only, which keep their labels."""


def flipped(batch: Batch, num_classes: int) -> Batch:
    """Turn class y into C − 1 − y in a batch (x, y), or ((x, y), positions). A skipped batch stays as it is.

    Args:
        batch: The batch. None, or None in the place of (x, y), is a skipped one.
        num_classes: The number of classes C.
    """
    if batch is None:
        return None
    first, second = batch
    if first is None:
        return batch
    if isinstance(first, tuple | list):
        return flipped(first, num_classes), second
    return first, num_classes - 1 - second


class FlippedData:
    """Flips the labels of a client's data in every split except those of `EVALUATED` (the `ClientData` protocol).

    Args:
        local: The client's data.
        num_classes: The number of classes C.
    """

    def __init__(self, local: ClientData, num_classes: int) -> None:
        self.local = local
        self.num_classes = num_classes

    def __getattr__(self, name: str) -> Any:
        # A copy asks before it has these attributes.
        if name in ("local", "num_classes"):
            raise AttributeError(name)
        return getattr(self.local, name)

    @property
    def label_counts(self) -> Tensor:
        """The number of samples of each class, (C,) int64."""
        return self.local.label_counts.flip(0)

    def all(self, split: str = "train") -> Batch:
        """Read the whole split as one batch."""
        batch = self.local.all(split)
        return batch if split in EVALUATED else flipped(batch, self.num_classes)

    def labels(self, split: str = "train") -> Tensor:
        """Read the classes of a split's samples, (n,) int64 on the CPU."""
        labels = self.local.labels(split)
        return labels if split in EVALUATED else self.num_classes - 1 - labels

    def batches(self, split: str = "train", *args: Any, **settings: Any) -> Iterator[Batch]:
        """Return the batches of a split."""
        batches = self.local.batches(split, *args, **settings)
        if split in EVALUATED:
            return batches
        return (flipped(batch, self.num_classes) for batch in batches)

    def restricted(self, split: str, positions: Tensor) -> "FlippedData":
        """Restrict the client to some samples of a split."""
        return FlippedData(self.local.restricted(split, positions), self.num_classes)


class LabelFlip(Attack):
    """Trains on class C − 1 − y in place of y, in all splits for training, and counts its classes so."""

    def receive(self, broadcast: Broadcast, local: ClientData) -> None:
        super().receive(broadcast, self._seen(local))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        if self.is_attacker:
            batch = flipped(batch, self._known_classes)
        return super().training_step(batch, batch_idx)

    def reply(self, exchange: str, local: ClientData) -> dict[str, Any]:
        return super().reply(exchange, self._seen(local))

    def answer(self, inquiry: Inquiry, broadcast: Broadcast, local: ClientData) -> dict[str, Any]:
        return super().answer(inquiry, broadcast, self._seen(local))

    def _seen(self, local: ClientData) -> ClientData:
        """Return the data as the client sees them."""
        if not self.is_attacker:
            return local
        return cast(ClientData, FlippedData(local, self._known_classes))

    @property
    def _known_classes(self) -> int:
        """The number of classes C, once the net is built for the data."""
        if self.num_classes is None:
            raise RuntimeError("LabelFlip knows the number of classes once its net is built for the data")
        return self.num_classes


def label_flip(client: LightningModule | TrainableModule, attackers: list[int]) -> ClientModule:
    """Make some clients train on class C − 1 − y in place of y.

    Args:
        client: The client of any method, built with `net=`.
        attackers: The ids of the malicious clients.

    Raises:
        ValueError: The client is built around a module, whose batches may be anything.
    """
    if not isinstance(client, ClientModule) or client.module is not None:
        raise ValueError("label_flip needs a client built with net=, whose batches are (x, y); flip your own data")
    return attacked(client, LabelFlip, attackers)
