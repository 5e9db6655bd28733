"""The iterables that Lightning reads in place of DataLoaders, and the settings of a user's DataLoader."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import default_collate

from fl_lightning.data.splits import Split


@dataclass(frozen=True)
class LoaderSpec:
    """The settings of a DataLoader that are kept when its dataset is divided.

    Args:
        collate_fn: makes a batch of a list of items.
        num_workers: processes that read ahead, started for every pass over a client's samples.
        worker_init_fn: called in each of them.
        batch_size: samples per batch; None: not set.
        shuffle: whether the loader shuffles; None: not set.
        drop_last: whether a last batch of fewer samples is left out in training.
    """

    collate_fn: Callable[[list[Any]], Any] = default_collate
    num_workers: int = 0
    worker_init_fn: Callable[[int], None] | None = None
    batch_size: int | None = None
    shuffle: bool | None = None
    drop_last: bool = False


class EmptyBatch:
    """Placeholder of a batch for a process that has none: its loop must run all the same."""


EMPTY_BATCH = EmptyBatch()


class EvaluationBatches:
    """Batches of a split in order, for Lightning's evaluation loops; each process has its own, nothing is padded.

    Args:
        split: the samples.
        batch_size: samples per batch, the same for any number of processes.
        rank: this process, 0 ... world-1.
        world: number of processes.
    """

    def __init__(self, split: Split, batch_size: int, rank: int = 0, world: int = 1) -> None:
        self.split = split
        self._indices = torch.split(torch.arange(len(split)), batch_size)[rank::world]

    def __len__(self) -> int:
        return max(1, len(self._indices))

    def __iter__(self) -> Iterator[Any]:
        return self.split.batches(self._indices, None) if self._indices else iter([EMPTY_BATCH])


class RoundLoader:
    """The train "dataloader": one batch an epoch, the number of clients in the cohort.

    The loop itself asks which clients they are: on resume Lightning makes the iterator before the epoch advances.
    """

    def __init__(self, cohort_size: int) -> None:
        self.cohort_size = cohort_size

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[int]:
        yield self.cohort_size
