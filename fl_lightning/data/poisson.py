"""A client's data in batches that hold each sample with one probability, as DP-SGD counts on."""

from collections.abc import Iterator
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from fl_lightning.types import Batch, ClientData


class PoissonSamples:
    """A client's data whose training batches hold each sample with one probability (the `ClientData` protocol).

    An epoch has 1 / `rate` batches, however many samples there are.

    Args:
        local: the client's data.
        rate: q in (0, 1].
        exchange: under way, which the draws are keyed by, too.
    """

    def __init__(self, local: ClientData, rate: float, exchange: str) -> None:
        self.local, self.rate, self.exchange = local, rate, exchange
        self._epochs = 0

    def __getattr__(self, name: str) -> Any:
        if name in ("local", "rate", "exchange"):  # not there yet: this is being copied
            raise AttributeError(name)
        return getattr(self.local, name)

    def size(self, split: str = "train") -> int:
        """Count the batches of an epoch as if they were samples, 0 of a client without samples."""
        size = self.local.size(split)
        return max(1, round(1 / self.rate)) if split == "train" and size else size

    def samples_per_batch(self, split: str, given: Any = None) -> int:
        """Take each of these as a batch of its own."""
        return 1 if split == "train" else self.local.samples_per_batch(split, given)

    def augments(self, split: str = "train") -> bool:
        """Tell that no epoch is like the one before."""
        return split == "train" or self.local.augments(split)

    def restricted(self, split: str, positions: Tensor) -> ClientData:
        """Restrict another split.

        Raises:
            ValueError: of the training samples, whose draws then had another probability.
        """
        if split == "train":
            raise ValueError(
                "dp_sgd draws from all training samples of a client, and a phase asks for some of them "
                "(Phase(indices=...)); train on all"
            )
        return self.local.restricted(split, positions)

    def batches(
        self, split: str = "train", epoch: int | None = None, batch_size: int | None = None, **settings: Any
    ) -> Iterator[Batch]:
        """Yield the batches of a training epoch, empty ones too, and those of another split as they are."""
        if split != "train" or epoch is None:
            yield from self.local.batches(split, epoch, batch_size, **settings)
            return
        number, steps, n = self._epochs, self.size(), self.local.size()
        self._epochs += 1
        draws = self.local.noise_generator(f"dp_sgd/batches/{self.exchange}/{number}")
        for index in range(steps):
            drawn = torch.nonzero(torch.rand(n, generator=draws, dtype=torch.float64) < self.rate).flatten()
            taken = drawn if len(drawn) else torch.zeros(1, dtype=torch.int64)
            some = self.local.restricted("train", taken)
            (batch,) = some.batches("train", number * steps + index, len(taken), shuffle=False, **settings)
            yield batch if len(drawn) else apply_to_collection(batch, Tensor, lambda t: t[:0])
