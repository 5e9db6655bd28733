"""One client's data in one round."""

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from fl_lightning.types import Batch
from fl_lightning.utils.keyed import keyed_generator

if TYPE_CHECKING:
    from fl_lightning.data.module import FederatedDataModule


class ClientView:
    """What a client sees of the data: its own samples, in its own keyed order (the `ClientData` protocol)."""

    def __init__(self, data: "FederatedDataModule", client_id: int, round_idx: int) -> None:
        self.data, self.client_id, self.round_idx = data, client_id, round_idx

    @property
    def label_counts(self) -> Tensor:
        return self.data.label_counts[self.client_id]

    def size(self, split: str = "train") -> int:
        return self.data.client_indices(split, self.client_id).shape[0]

    def batch_size(self, split: str, batch_size: int | Literal["full"] | None = None) -> int:
        """The number of samples per batch: that given, else the data module's; `full` is the whole split."""
        chosen = self.data.batch_size if batch_size is None else batch_size
        return max(1, self.size(split)) if chosen == "full" else int(chosen)

    def num_batches(self, split: str, batch_size: int) -> int:
        """Batches of one pass, with the last, smaller one."""
        return -(-self.size(split) // batch_size)

    def augments(self, split: str = "train") -> bool:
        """Whether a sample differs from one local epoch to the next."""
        return split == "train" and self.data.split(split).augments

    def all(self, split: str = "train") -> Batch:
        own = self.data.client_indices(split, self.client_id)
        return next(iter(self.data.split(split).batches([own], None)))

    def batches(
        self,
        split: str = "train",
        epoch: int | None = None,
        batch_size: int | None = None,
        shuffle: bool | None = None,
        with_index: bool = False,
    ) -> Iterator[Batch]:
        own = self.data.client_indices(split, self.client_id)
        n, size = own.shape[0], self.batch_size(split, batch_size)
        if not n:
            return iter(())
        train = epoch is not None
        order: Tensor | None = None
        if train and (self.data.shuffle if shuffle is None else shuffle):
            order = torch.randperm(n, generator=self.generator(f"batches/{split}/{epoch}"))
            own = own[order]
        source = self.data.split(split)
        augments = train and split == "train" and source.augments  # row i of what everyone holds stays sample i
        draws = self.generator(f"augment/{split}/{epoch}") if augments else None
        batches = source.batches([own] if n <= size else torch.split(own, size), draws)
        if not with_index:
            return batches
        return zip(batches, torch.split(torch.arange(n) if order is None else order, size), strict=True)

    def generator(self, purpose: str) -> torch.Generator:
        return keyed_generator(self.data.seed_of_batches, purpose, self.round_idx, self.client_id)


class NoBatch:
    """Stands for the batch of a process that has none: its loop must run all the same."""


NO_BATCH = NoBatch()


class EvaluationBatches:
    """The batches of a split in order, for Lightning's evaluation loops; each process has its own, nothing is padded.

    Args:
        data: the data module.
        split: name of the split.
        batch_size: samples per batch, the same for any number of processes.
    """

    def __init__(self, data: "FederatedDataModule", split: str, batch_size: int) -> None:
        self.data, self.name, self.batch_size = data, split, batch_size
        trainer = data.trainer
        self.rank, self.world = (0, 1) if trainer is None else (trainer.global_rank, trainer.world_size)

    @cached_property
    def _indices(self) -> list[Tensor]:
        everything = torch.split(torch.arange(len(self.data.split(self.name))), self.batch_size)
        return list(everything[self.rank :: self.world])

    def __len__(self) -> int:
        return max(1, len(self._indices))

    def __iter__(self) -> Iterator[Any]:
        if not self._indices:
            return iter([NO_BATCH])
        return self.data.split(self.name).batches(self._indices, None)


class CohortPlaces:
    """The train "dataloader": one batch an epoch, the number of places in the cohort.

    Who stands there is asked by the loop in its step: on resume Lightning makes the iterator before the epoch advances.
    """

    def __init__(self, cohort_size: int) -> None:
        self.cohort_size = cohort_size

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[int]:
        yield self.cohort_size


def check_cohort(cohort: Sequence[int], num_clients: int) -> None:
    """Refuse a scheduled cohort that is empty, repeats a client or names one that does not exist.

    Raises:
        ValueError: naming the cohort.
    """
    wrong = [client_id for client_id in cohort if not 0 <= client_id < num_clients]
    if not cohort or wrong or len(set(cohort)) < len(cohort):
        raise ValueError(
            f"a scheduled cohort must name different clients in [0, {num_clients}), got {list(cohort)}; mend "
            f"data.schedule"
        )
