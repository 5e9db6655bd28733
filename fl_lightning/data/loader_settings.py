"""Settings of a user's DataLoader that are kept when its dataset is divided."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, default_collate

BATCHING = ("__iter__", "__len__", "_get_iterator", "_index_sampler")
"""Methods of DataLoader by which a subclass makes batches in a way of its own."""


@dataclass(frozen=True)
class LoaderSpec:
    """Holds the settings of a DataLoader that are kept when its dataset is divided.

    Args:
        collate_fn: Function that makes a batch of a list of items.
        num_workers: Number of processes that read ahead, started for every pass over a client's samples.
        worker_init_fn: Function that each of these processes calls first. None: there is none.
        batch_size: Number of samples per batch. None: it is not set.
        shuffle: Whether the loader shuffles. None: it is not set.
        drop_last: Whether training leaves out a last batch of fewer samples.
        reads_batches: Whether the dataset makes a batch of a list of indices, which `collate_fn` then converts.
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
            dataset: The samples.
            generator: Generator of the order and of the workers' seeds. None: torch's own.
            pins: Whether batches come in pinned memory.
            batching: Arguments of a DataLoader that say which samples make a batch.
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


def check_loader_class(loader: DataLoader[Any]) -> None:
    """Refuse a DataLoader whose class makes batches in a way of its own, which its settings do not say.

    Args:
        loader: The user's loader.

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
