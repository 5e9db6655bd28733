"""A client's data in batches that hold each sample with one probability, as DP-SGD counts on."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fl_lightning.types import Batch, ClientData
from fl_lightning.utils.batches import batch_length, some_samples


class PoissonSamples:
    """A client's data whose training batches hold each sample with one probability (the `ClientData` protocol).

    An epoch has 1 / `rate` batches, however many samples there are.

    Args:
        local: the client's data.
        rate: q in (0, 1].
        exchange: under way, which the draws are keyed by, too.
    """

    def __init__(self, local: ClientData, rate: float, exchange: str) -> None:
        self.local = local
        self.rate = rate
        self.exchange = exchange
        self._epochs = 0

    def __getattr__(self, name: str) -> Any:
        if name in ("local", "rate", "exchange"):  # not there yet: this is being copied
            raise AttributeError(name)
        return getattr(self.local, name)

    def size(self, split: str = "train") -> int:
        """Count the batches of an epoch as if they were samples, 0 of a client without samples."""
        size = self.local.size(split)
        return max(1, round(1 / self.rate)) if split == "train" and size else size

    def all(self, split: str = "train") -> Batch:
        """Get all samples of another split.

        Raises:
            ValueError: of the training samples.
        """
        return self._besides(split, "samples").all(split)

    def labels(self, split: str = "train") -> Tensor:
        """Get the labels of another split.

        Raises:
            ValueError: of the training samples.
        """
        return self._besides(split, "labels").labels(split)

    @property
    def label_counts(self) -> Tensor:
        """Refuse the numbers of samples by class.

        Raises:
            ValueError: always.
        """
        return self._besides("train", "label counts").label_counts

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
        """Yield the batches of a training epoch, empty ones too, and those of another split as they are.

        Raises:
            ValueError: a pass over the training samples besides an epoch's, or a batch without a row for each sample.
        """
        if split != "train" or epoch is None:
            yield from self._besides(split, "batches").batches(split, epoch, batch_size, **settings)
            return
        number = self._epochs
        steps = self.size()
        n = self.local.size()
        self._epochs += 1
        draws = self.local.noise_generator(f"dp_sgd/batches/{self.exchange}/{number}")
        for index in range(steps):
            drawn = torch.from_numpy(draws.random(n) < self.rate).nonzero().flatten()
            taken = drawn if len(drawn) else torch.zeros(1, dtype=torch.int64)
            some = self.local.restricted("train", taken)
            (batch,) = some.batches("train", number * steps + index, len(taken), shuffle=False, **settings)
            if batch is not None:
                check_rows(batch, len(taken))
            yield batch if len(drawn) else some_samples(batch, slice(0, 0))

    def _besides(self, split: str, what: str) -> ClientData:
        """Give the client's data for what is read outside training steps.

        Raises:
            ValueError: of the training samples, naming what is read.
        """
        if split == "train":
            raise ValueError(
                f"dp_sgd hides samples in the gradients of training steps, and this client also reads {what} of its "
                f"data, which shows in what it sends; take another method, such as FedAvg, FedProx or FedNTD"
            )
        return self.local


def check_rows(batch: Batch, num_samples: int) -> None:
    """Refuse a batch that has not one row for each sample, so that gradients of rows are not those of samples.

    Args:
        batch: The batch.
        num_samples: Number of its samples, at least 1.

    Raises:
        ValueError: The batch has another number of rows.
    """
    num_rows = batch_length(batch)
    if num_rows != num_samples:
        raise ValueError(
            f"dp_sgd needs one row of the batch for each sample, got {num_rows} for {num_samples} samples; return "
            f"tensors (B, ...) in collate_fn"
        )
