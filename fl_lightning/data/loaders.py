"""Iterables that Lightning reads in place of DataLoaders."""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fl_lightning.data.splits import Split

SMALL_SAMPLE = 512
"""Number of values in a sample, below which the sample is small."""

BATCH_SIZE_ON_CPU = 125
"""Number of samples in a batch of an evaluation on a CPU, if they are not small."""

BATCH_SIZE = 1000
"""Number of samples in a batch of any other evaluation."""


def evaluation_batch_size(device: torch.device, input_shape: Sequence[int] | None) -> int:
    """Choose the number of samples per batch in evaluation.

    The activations of a small batch stay in the cache of a CPU, and its many batches divide evenly among processes.
    Those of small samples stay there in any batch, and every batch has a fixed cost.

    Args:
        device: Device that evaluates.
        input_shape: Shape of one sample. None: it is not known.

    >>> evaluation_batch_size(torch.device("cpu"), (3, 32, 32)), evaluation_batch_size(torch.device("cpu"), (64,))
    (125, 1000)
    >>> evaluation_batch_size(torch.device("cuda"), None)
    1000
    """
    is_small = input_shape is not None and math.prod(input_shape) < SMALL_SAMPLE
    if device.type == "cpu" and not is_small:
        return BATCH_SIZE_ON_CPU
    return BATCH_SIZE


def without_none(batches: Iterable[Any]) -> Iterator[Any]:
    """Yield the batches that are not None, which a `collate_fn` returns to skip a batch.

    >>> list(without_none([1, None, 2]))
    [1, 2]
    """
    return (batch for batch in batches if batch is not None)


class EmptyBatch:
    """Stands in for a batch of None, and for the batch of a process that has none, whose loop must run all the same."""


EMPTY_BATCH = EmptyBatch()


class EvaluationBatches:
    """Gives Lightning's evaluation loop in each process its batches of a split, in order and without padding.

    Args:
        split: The samples.
        batch_size: Number of samples per batch, the same for any number of processes.
        rank: Number of this process, 0 ... world-1.
        world: Number of processes.
        positions: Positions of the samples in the split, (n,) int64. None: all.

    Attributes:
        dataset: The dataset that a module finds at the loader: the user's own, or an object of the same length.
    """

    def __init__(
        self, split: Split, batch_size: int, *, rank: int = 0, world: int = 1, positions: Tensor | None = None
    ) -> None:
        self.split = split
        self.batch_size = batch_size
        chosen = torch.arange(len(split)) if positions is None else positions
        self._indices: Sequence[Tensor] = ()
        if len(chosen):
            self._indices = torch.split(chosen, batch_size)[rank::world]
        self.dataset: Any = range(len(chosen))
        if positions is None:
            self.dataset = getattr(split, "dataset", self.dataset)

    def __len__(self) -> int:
        return max(1, len(self._indices))

    def __iter__(self) -> Iterator[Any]:
        if not self._indices:
            yield EMPTY_BATCH
            return
        for batch in self.split.batches(self._indices, None):
            # Lightning's loops count on every batch of the length.
            yield EMPTY_BATCH if batch is None else batch


class BatchesInTurn:
    """Gives each process its batches of a user's loader, as they come. The processes take them in turn.

    Args:
        loader: The loader, any iterable over batches.
        rank: Number of this process, 0 ... world-1.
        world: Number of processes.
    """

    def __init__(self, loader: Iterable[Any], rank: int = 0, world: int = 1) -> None:
        self.loader = loader
        self._rank = rank
        self._world = world

    def __len__(self) -> int:
        """Count this process's batches.

        Raises:
            TypeError: The loader has no length.
        """
        total = len(self.loader)  # type: ignore[arg-type]
        return max(1, len(range(self._rank, total, self._world)))

    def __iter__(self) -> Iterator[Any]:
        is_empty = True
        for number, batch in enumerate(self.loader):
            if number % self._world != self._rank:
                continue
            is_empty = False
            yield EMPTY_BATCH if batch is None else batch
        if is_empty:
            yield EMPTY_BATCH


class RoundLoader:
    """Gives training one batch an epoch: the number of clients in the cohort.

    The loop itself asks which clients they are, because on resume Lightning makes the iterator before the epoch
    advances.

    Args:
        cohort_size: Number of clients in the cohort.
    """

    def __init__(self, cohort_size: int) -> None:
        self.cohort_size = cohort_size

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[int]:
        yield self.cohort_size
