"""Iterables that Lightning reads in place of DataLoaders, and the settings of a user's DataLoader."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from fl_lightning.data.splits import Split

SMALL = 512
"""Numbers in a sample below which it is small."""


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
        reads_batches: whether the dataset makes a batch of a list of indices, and `collate_fn` converts the batch.
    """

    collate_fn: Callable[[list[Any]], Any] = default_collate
    num_workers: int = 0
    worker_init_fn: Callable[[int], None] | None = None
    batch_size: int | None = None
    shuffle: bool | None = None
    drop_last: bool = False
    reads_batches: bool = False

    def loader(
        self, dataset: Dataset[Any], generator: torch.Generator | None, pins: bool, **batching: Any
    ) -> DataLoader[Any]:
        """Make a DataLoader with these settings.

        Args:
            dataset: its samples.
            generator: of its order and of its workers' seeds; None: torch's own.
            pins: whether batches come in pinned memory.
            batching: arguments of a DataLoader that say which samples make a batch.
        """
        return DataLoader(
            dataset,
            collate_fn=self.collate_fn,
            num_workers=self.num_workers,
            worker_init_fn=self.worker_init_fn,
            generator=generator,
            pin_memory=pins,
            **batching,
        )


def evaluation_batch_size(device: torch.device, input_shape: Sequence[int] | None) -> int:
    """Choose the number of samples per batch in evaluation.

    On a CPU activations of 125 images stay in its cache (1,000 took 1.3 times as long), and so many batches divide
    evenly among processes; small samples stay there anyway, and every batch has a fixed cost.

    Args:
        device: that evaluates.
        input_shape: of one sample; None: not known.

    >>> cpu, cuda = map(torch.device, ("cpu", "cuda"))
    >>> [evaluation_batch_size(cpu, (3, 32, 32)), evaluation_batch_size(cpu, (64,)), evaluation_batch_size(cuda, None)]
    [125, 1000, 1000]
    """
    small = input_shape is not None and math.prod(input_shape) < SMALL
    return 125 if device.type == "cpu" and not small else 1000


BATCHING = ("__iter__", "__len__", "_get_iterator", "_index_sampler")
"""Methods of DataLoader by which a subclass makes batches in a way of its own."""


def check_loader_class(loader: DataLoader[Any]) -> None:
    """Refuse a DataLoader whose class makes batches in a way of its own, which its settings do not say.

    Raises:
        ValueError: The class overrides such a method.
    """
    kind = type(loader)
    for name in BATCHING:
        if getattr(kind, name) is not getattr(DataLoader, name):
            raise ValueError(
                f"{kind.__name__} overrides DataLoader.{name}, and the batches of clients are made by torch's own "
                f"DataLoader of its dataset and settings; return a DataLoader, and do this work in the dataset or in "
                f"collate_fn"
            )


def without_none(batches: Iterable[Any]) -> Iterator[Any]:
    """Yield the batches that are not None, which a `collate_fn` returns to skip a batch.

    >>> list(without_none([1, None, 2]))
    [1, 2]
    """
    return (batch for batch in batches if batch is not None)


class EmptyBatch:
    """Placeholder of a batch for a process that has none, whose loop must run all the same, or of a batch of None."""


EMPTY_BATCH = EmptyBatch()


class EvaluationBatches:
    """Batches of a split in order, without padding, for Lightning's evaluation loops in each process.

    Args:
        split: the samples.
        batch_size: samples per batch, the same for any number of processes.
        rank: this process, 0 ... world-1.
        world: number of processes.
        positions: of the samples in the split, (n,) int64; None: all.
    """

    def __init__(
        self, split: Split, batch_size: int, rank: int = 0, world: int = 1, positions: Tensor | None = None
    ) -> None:
        self.split = split
        chosen = torch.arange(len(split)) if positions is None else positions
        self._indices = torch.split(chosen, batch_size)[rank::world] if len(chosen) else ()
        self.batch_size = batch_size
        self.dataset: Any = (
            range(len(chosen)) if positions is not None else getattr(split, "dataset", range(len(split)))
        )
        """What a module finds as the dataset of the loader: the user's own, or something of the same length."""

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
    """Batches of a loader of the user's as they come, which the processes take in turn.

    Args:
        loader: The loader, any iterable over batches.
        rank: This process, 0 ... world-1.
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
        for batch in islice(self.loader, self._rank, None, self._world):
            is_empty = False
            yield EMPTY_BATCH if batch is None else batch
        if is_empty:
            yield EMPTY_BATCH


class RoundLoader:
    """The "dataloader" of training, with one batch an epoch: the number of clients in the cohort.

    The loop itself asks which clients they are: on resume Lightning makes the iterator before the epoch advances.
    """

    def __init__(self, cohort_size: int) -> None:
        self.cohort_size = cohort_size

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[int]:
        yield self.cohort_size
