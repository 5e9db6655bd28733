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
"""Splits for evaluation only, which keep their labels."""


def flipped(batch: Batch, num_classes: int) -> Batch:
    """Turn class y into C − 1 − y in a batch (x, y), or ((x, y), positions). A skipped batch stays None."""
    if batch is None:
        return None
    first, second = batch
    if first is None:
        return batch
    if isinstance(first, tuple | list):
        return flipped(first, num_classes), second
    return first, num_classes - 1 - second


class FlippedData:
    """A client's data with flipped labels, in every split but those of `EVALUATED` (the `ClientData` protocol).

    Args:
        local: the client's data.
        num_classes: C.
    """

    def __init__(self, local: ClientData, num_classes: int) -> None:
        self.local = local
        self.num_classes = num_classes

    def __getattr__(self, name: str) -> Any:
        if name in ("local", "num_classes"):  # not there yet: this is being copied
            raise AttributeError(name)
        return getattr(self.local, name)

    @property
    def label_counts(self) -> Tensor:
        """Samples of each class, (C,) int64."""
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
        """Yield batches of a split."""
        batches = self.local.batches(split, *args, **settings)
        return batches if split in EVALUATED else (flipped(batch, self.num_classes) for batch in batches)

    def restricted(self, split: str, positions: Tensor) -> "FlippedData":
        """Restrict the client to some samples of a split."""
        return FlippedData(self.local.restricted(split, positions), self.num_classes)


class LabelFlip(Attack):
    """Trains on class C − 1 − y in place of y, in all sets that it has, and counts its classes so."""

    def receive(self, broadcast: Broadcast, local: ClientData) -> None:
        super().receive(broadcast, self._seen(local))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return super().training_step(flipped(batch, self._known_classes) if self.is_attacker else batch, batch_idx)

    def reply(self, exchange: str, local: ClientData) -> dict[str, Any]:
        return super().reply(exchange, self._seen(local))

    def answer(self, inquiry: Inquiry, broadcast: Broadcast, local: ClientData) -> dict[str, Any]:
        return super().answer(inquiry, broadcast, self._seen(local))

    def _seen(self, local: ClientData) -> ClientData:
        return cast(ClientData, FlippedData(local, self._known_classes)) if self.is_attacker else local

    @property
    def _known_classes(self) -> int:
        """C, once the net is built for the data."""
        if self.num_classes is None:
            raise RuntimeError("LabelFlip knows the number of classes once its net is built for the data")
        return self.num_classes


def label_flip(client: LightningModule | TrainableModule, attackers: list[int]) -> ClientModule:
    """Make some clients train on class C − 1 − y in place of y.

    Args:
        client: of any method, built with `net=`.
        attackers: ids of the malicious clients.

    Raises:
        ValueError: if the client is built around a module, whose batches may be anything.
    """
    if not isinstance(client, ClientModule) or client.module is not None:
        raise ValueError("label_flip needs a client built with net=, whose batches are (x, y); flip your own data")
    return attacked(client, LabelFlip, attackers)
