"""A client's data in batches that hold each sample with one probability, as DP-SGD requires."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fl_lightning.types import Batch, ClientData
from fl_lightning.utils.batches import batch_length, some_samples


class PoissonSamples:
    """Gives a client's data in training batches that hold each sample with one probability. It is a `ClientData`.

    An epoch has 1 / `rate` batches, however many samples there are.

    Args:
        local: The client's data.
        rate: Probability q of a sample, in (0, 1].
        exchange: Name of the exchange under way, by which the draws are keyed, too.
    """

    def __init__(self, local: ClientData, rate: float, exchange: str) -> None:
        self.local = local
        self.rate = rate
        self.exchange = exchange
        self._epochs = 0
        """The number of training epochs that were begun."""

    def __getattr__(self, name: str) -> Any:
        # While this object is copied, its own attributes are not there yet.
        if name in ("local", "rate", "exchange"):
            raise AttributeError(name)
        return getattr(self.local, name)

    def size(self, split: str = "train") -> int:
        """Return the number of samples of a split. For training it is that of the batches of an epoch.

        Args:
            split: The split. A client without training samples has 0 batches.
        """
        size = self.local.size(split)
        if split == "train" and size:
            return max(1, round(1 / self.rate))
        return size

    def all(self, split: str = "train") -> Batch:
        """Return all samples of a split that is not trained on.

        Args:
            split: The split.

        Raises:
            ValueError: The samples are the training samples.
        """
        return self._outside_training(split, "samples").all(split)

    def labels(self, split: str = "train") -> Tensor:
        """Return the labels of a split that is not trained on.

        Args:
            split: The split.

        Raises:
            ValueError: The labels are those of the training samples.
        """
        return self._outside_training(split, "labels").labels(split)

    @property
    def label_counts(self) -> Tensor:
        """The numbers of training samples by class, which are always refused.

        Raises:
            ValueError: The numbers are read.
        """
        return self._outside_training("train", "label counts").label_counts

    def samples_per_batch(self, split: str, given: Any = None) -> int:
        """Return the number of samples in a batch. In training `size` counts batches, so that each counts as one.

        Args:
            split: The split.
            given: Number of samples that is asked for. None: the run's.
        """
        return 1 if split == "train" else self.local.samples_per_batch(split, given)

    def augments(self, split: str = "train") -> bool:
        """Return True if no epoch is like the one before, which holds in training.

        Args:
            split: The split.
        """
        return split == "train" or self.local.augments(split)

    def restricted(self, split: str, positions: Tensor) -> ClientData:
        """Return data with some samples only of a split that is not trained on.

        Args:
            split: The split.
            positions: Positions of the samples among the client's, (n,) int64.

        Raises:
            ValueError: The samples are training samples, whose draws then had another probability.
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

        Args:
            split: The split.
            epoch: Number of the epoch. None: the samples are read once, outside training.
            batch_size: Number of samples in a batch. None: the run's. Training batches have as many as are drawn.
            settings: Further arguments of the client's data.

        Raises:
            ValueError: Training samples are read outside an epoch, or a batch has not one row for each sample.
        """
        if split != "train" or epoch is None:
            local = self._outside_training(split, "batches")
            yield from local.batches(split, epoch, batch_size, **settings)
            return
        number = self._epochs
        steps = self.size()
        self._epochs += 1
        draws = self.local.noise_generator(f"dp_sgd/batches/{self.exchange}/{number}")
        for step in range(steps):
            is_drawn = draws.random(self.local.size()) < self.rate
            positions = torch.from_numpy(is_drawn).nonzero().flatten()
            if len(positions):
                yield self._batch(positions, epoch=number * steps + step, **settings)
            else:
                # An empty batch has the form of a batch of the first sample.
                first = self._batch(torch.zeros(1, dtype=torch.int64), epoch=number * steps + step, **settings)
                yield some_samples(first, slice(0, 0))

    def _batch(self, positions: Tensor, *, epoch: int, **settings: Any) -> Batch:
        """Read some training samples as one batch.

        Args:
            positions: Positions of the samples among the client's, (n,) int64, n ≥ 1.
            epoch: Number by which their augmentation is drawn.
            settings: Further arguments of the client's data.

        Raises:
            ValueError: The batch has not one row for each sample.
        """
        some = self.local.restricted("train", positions)
        (batch,) = some.batches("train", epoch, len(positions), shuffle=False, **settings)
        if batch is not None:
            check_rows(batch, len(positions))
        return batch

    def _outside_training(self, split: str, what: str) -> ClientData:
        """Return the client's data, to read something outside training steps.

        Args:
            split: The split that is read.
            what: Name of what is read, for the error.

        Raises:
            ValueError: The split is that of the training samples.
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
