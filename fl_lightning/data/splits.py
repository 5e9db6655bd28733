"""Samples of a split, how batches are made of them, and one client's view of its own samples in one round."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from fl_lightning.types import Batch
from fl_lightning.utils.keyed import keyed_generator


class Transform(Protocol):
    """Turns stored samples into what the net reads, a whole batch at a time, on the samples' device."""

    def __call__(self, x: Tensor, generator: torch.Generator | None) -> Tensor:
        """Transform x (B, ...); `generator` None: evaluation, nothing is drawn."""


class Split(ABC):
    """Samples 0 ... n-1 of a train or test split."""

    labels: Tensor | None
    """(n,) int64 on the CPU, or None where samples have no class."""

    augments = False
    """True where training batches are drawn with random augmentation."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def batches(self, indices: Iterable[Tensor], generator: torch.Generator | None) -> Iterator[Batch]:
        """Make one batch for each index tensor (B,) int64; `generator` None: without augmentation."""

    def all(self) -> Batch:
        """The whole split as one batch, without augmentation."""
        return next(iter(self.batches([torch.arange(len(self))], None)))

    @abstractmethod
    def subset(self, indices: Tensor) -> "Split":
        """The samples at `indices` (k,) int64 as a split of their own."""

    def column(self, name: str) -> np.ndarray[Any, Any]:
        """The value of every sample in a column, (n,).

        Raises:
            ValueError: the samples have no such column.
        """
        raise ValueError(
            f"the samples have no column {name!r}; name an attribute of the dataset that has one value per sample, or "
            f"a key of its items"
        )

    def has_column(self, name: str) -> bool:
        """True where `column` gives values."""
        try:
            self.column(name)
        except ValueError:
            return False
        return True

    @property
    def input_shape(self) -> tuple[int, ...] | None:
        """Shape of one sample as the net reads it, without the batch dimension; None where it is not known."""
        return None

    @property
    def num_bytes(self) -> int | None:
        """Bytes of the samples as they are stored, without labels; None where it is not known."""
        return None

    def to(self, device: torch.device) -> None:  # noqa: B027 - most splits hold nothing in memory
        """Move the samples in memory to `device`, in place."""


class TensorSplit(Split):
    """Samples in memory: x (n, ...) uint8 or float, y (n,) int64; transformed a batch at a time."""

    def __init__(self, x: Tensor, y: Tensor, transform: Transform | None = None) -> None:
        if len(x) != len(y):
            raise ValueError(f"a split needs one label per sample, got {len(x)} samples and {len(y)} labels")
        self.x, self.y, self.transform = x, y, transform
        self.augments = getattr(transform, "augments", transform is not None)
        self.labels = y.cpu() if not y.is_floating_point() and y.ndim == 1 else None

    def __len__(self) -> int:
        return len(self.x)

    @property
    def input_shape(self) -> tuple[int, ...] | None:
        return tuple(self.x.shape[1:])

    @property
    def num_bytes(self) -> int:
        return self.x.numel() * self.x.element_size()

    def drop_labels(self) -> None:
        """Forget the labels, which are no classes."""
        self.labels = None

    def subset(self, indices: Tensor) -> "TensorSplit":
        indices = indices.to(self.x.device)
        part = TensorSplit(self.x[indices], self.y[indices], self.transform)
        if self.labels is None:
            part.drop_labels()
        return part

    def to(self, device: torch.device) -> None:
        self.x, self.y = self.x.to(device), self.y.to(device)

    def batches(self, indices: Iterable[Tensor], generator: torch.Generator | None) -> Iterator[Batch]:
        x, y, transform = self.x, self.y, self.transform
        for index in indices:
            there = index if index.device == x.device else index.to(x.device)
            batch = x.index_select(0, there)
            yield (batch if transform is None else transform(batch, generator)), y.index_select(0, there)


class FederatedData(Protocol):
    """The part of the data module that a client's view asks."""

    num_clients: int
    batch_size: int | Literal["full"]
    shuffle: bool
    batch_seed: int

    def split(self, name: str) -> Split:
        """The samples of a split."""

    def client_indices(self, split: str, client_id: int) -> Tensor:
        """A client's samples, as int64 indices (n,) into the split."""

    def count_labels(self, parts: Sequence[Tensor]) -> Tensor:
        """Training samples of each class, (len(parts), C) int64, for index tensors into the training split."""


class ClientIndices(dict[str, Tensor]):
    """One client's samples as int64 indices (n,) by split; a split that is not known is looked up at its first use."""

    def __init__(self, data: FederatedData, client_id: int, known: Mapping[str, Tensor]) -> None:
        super().__init__(known)
        self.data, self.client_id = data, client_id

    def __missing__(self, split: str) -> Tensor:
        self[split] = self.data.client_indices(split, self.client_id)
        return self[split]


class ClientView:
    """One client's data in one round: its own samples, in its own keyed order (the `ClientData` protocol).

    Args:
        data: the data module, for its settings and the splits besides `train`.
        client_id: 0 ... N-1.
        round_idx: communication round, from 0.
        train: the training split of all clients.
        indices: the client's samples by split, int64 indices (n,) into it, `train` at least.
    """

    def __init__(
        self, data: FederatedData, client_id: int, round_idx: int, train: Split, indices: Mapping[str, Tensor]
    ) -> None:
        self.client_id, self.round_idx = client_id, round_idx
        self._data, self._train = data, train
        self._indices = ClientIndices(data, client_id, indices)

    @property
    def num_clients(self) -> int:
        return self._data.num_clients

    @property
    def batch_size(self) -> int | Literal["full"]:
        return self._data.batch_size

    @property
    def label_counts(self) -> Tensor:
        return self._data.count_labels([self._indices["train"]])[0]

    def size(self, split: str = "train") -> int:
        return self._indices[split].shape[0]

    def samples_per_batch(self, split: str, given: int | Literal["full"] | None = None) -> int:
        """Samples per batch of a split: those given, else the data module's; `full` is the whole split."""
        chosen = self._data.batch_size if given is None else given
        return max(1, self.size(split)) if chosen == "full" else chosen

    def num_batches(self, split: str, batch_size: int) -> int:
        """Batches of one pass, with the last, smaller one."""
        return -(-self._indices[split].shape[0] // batch_size)

    def augments(self, split: str = "train") -> bool:
        """True where a sample differs from one local epoch to the next: only training samples do."""
        return split == "train" and self._train.augments

    def all(self, split: str = "train") -> Batch:
        own = self._indices[split]
        return next(iter(self._data.split(split).batches([own], None)))

    def batches(
        self,
        split: str = "train",
        epoch: int | None = None,
        batch_size: int | None = None,
        shuffle: bool | None = None,
        with_index: bool = False,
    ) -> Iterator[Batch]:
        own = self._indices[split]
        n = own.shape[0]
        size = self.samples_per_batch(split) if batch_size is None else batch_size
        if not n:
            return iter(())
        source = self._train if split == "train" else self._data.split(split)
        order: Tensor | None = None
        draws: torch.Generator | None = None
        if epoch is not None:
            if self._data.shuffle if shuffle is None else shuffle:
                order = torch.randperm(n, generator=self.generator(f"batches/{split}/{epoch}"))
                own = own[order]
            if split == "train" and source.augments:
                draws = self.generator(f"augment/{split}/{epoch}")
        batches = source.batches([own] if n <= size else torch.split(own, size), draws)
        if not with_index:
            return batches
        return zip(batches, torch.split(torch.arange(n) if order is None else order, size), strict=True)

    def restricted(self, split: str, positions: Tensor) -> "ClientView":
        """The same client with only the samples at `positions` (k,) int64 within a split.

        Raises:
            ValueError: positions of another type, or outside [0, n).
        """
        own, positions = self._indices[split], positions.cpu()
        n, whole = own.shape[0], positions.dtype == torch.int64
        if not whole or (len(positions) and not 0 <= int(positions.min()) <= int(positions.max()) < n):
            got = positions.dtype if not whole else f"{int(positions.min())} ... {int(positions.max())}"
            raise ValueError(f"positions must be int64 in [0, {n}), the client's {split} samples, got {got}")
        indices = {**self._indices, split: own[positions]}
        return ClientView(self._data, self.client_id, self.round_idx, self._train, indices)

    def generator(self, purpose: str, per_round: bool = True) -> torch.Generator:
        return keyed_generator(self._data.batch_seed, purpose, self.round_idx if per_round else -1, self.client_id)
