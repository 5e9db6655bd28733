"""Splits: samples, and the batches made of them."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from fl_lightning.functional.classes import class_labels
from fl_lightning.types import Batch
from fl_lightning.utils.devices import copy_to_device
from fl_lightning.utils.staging import Staging, fits, staging_for

Array = np.ndarray[Any, Any]

PROBED = 256
"""Most samples in memory that are looked at to tell how the net reads them."""


class Transform(Protocol):
    """Turns a batch of stored samples into the net's input, on the samples' device."""

    def __call__(self, x: Tensor, generator: torch.Generator | None) -> Tensor:
        """Transform x (B, ...), without random draws (evaluation) where `generator` is None."""


class Split(ABC):
    """Samples 0 ... n-1 of a train or test split."""

    labels: Tensor | None
    """(n,) int64 on the CPU, or None where samples have no class."""

    augments = False
    """True where training batches are drawn with random augmentation."""

    @property
    def known_labels(self) -> Tensor | None:
        """The labels where they are known without a pass over the samples."""
        return self.labels

    def forget_labels(self) -> None:
        """Take the labels for values that are no classes."""
        self.labels = None

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def batches(self, indices: Iterable[Tensor], generator: torch.Generator | None) -> Iterator[Batch]:
        """Make one batch for each index tensor (B,) int64, without augmentation where `generator` is None."""

    def all(self) -> Batch:
        """Read the whole split as one batch, without augmentation."""
        return next(iter(self.batches([torch.arange(len(self))], None)))

    @property
    def is_in_memory(self) -> bool:
        """Tell whether samples are read without code of the user's."""
        return False

    def probe(self) -> Batch | None:
        """Read a few samples as the net reads them, without augmentation. None: that is not known."""
        return None

    def relabelled(self, labels: Tensor) -> "Split":
        """Make a split of the same samples with other classes.

        Args:
            labels: class of each sample, (n,) int64.
        """
        raise ValueError(f"samples of a {type(self).__name__} have no classes; give samples with labels")

    def placed(self, indices: Tensor) -> Tensor:
        """Put indices of many batches where `batches` wants them, in one copy."""
        return indices

    @abstractmethod
    def subset(self, indices: Tensor) -> "Split":
        """Make a split of its own of the samples at `indices` (k,) int64."""

    @property
    def is_transformed(self) -> bool:
        """Tell whether samples are transformed in a way that `seen_as` may replace."""
        return False

    def seen_as(self, other: "Split") -> "Split":
        """Make a split of the same samples that are transformed as those of another split, where that is known."""
        return self

    def through(self, seen: Transform) -> "Split":
        """Make a split of the same samples that `seen` changes last.

        Raises:
            ValueError: the samples are not in memory.
        """
        raise ValueError(
            f"data.feature_shift changes samples in memory, and those of a {type(self).__name__} are read by code of "
            f"their own; shift them there, or give tensors"
        )

    def column(self, name: str) -> Array:
        """Read the value of every sample in a column, (n,).

        Raises:
            ValueError: the samples have no such column.
        """
        raise ValueError(
            f"the samples have no column {name!r}; name an attribute of the dataset that has one value per sample, or "
            f"a key of its items"
        )

    @property
    def input_shape(self) -> tuple[int, ...] | None:
        """Shape of one sample as the net reads it, without the batch dimension, or None where it is not known."""
        return None

    @property
    def num_bytes(self) -> int | None:
        """Bytes of the samples as they are stored, without labels, or None where that is not known."""
        return None

    def to(self, device: torch.device) -> None:  # noqa: B027 - most splits hold nothing in memory
        """Move the samples in memory to `device`, in place, where they fit."""

    def stage(self, device: torch.device, early: bool) -> None:  # noqa: B027 - samples in memory are there already
        """Prepare batches that are read from outside for a device.

        Args:
            device: where they will be used.
            early: whether they may be copied as they are read; else the user's own hooks see them first.
        """


class LoadedSplit(Split):
    """Samples that are read on demand, for a GPU through pinned memory.

    Attributes:
        staging: copies batches to the device as they are read; None: that is left to others.
        pins: whether a DataLoader gives batches in pinned memory.
    """

    staging: Staging | None = None
    pins = False

    def stage(self, device: torch.device, early: bool) -> None:
        self.staging = staging_for(device) if early else None
        self.pins = device.type == "cuda"


class TensorSplit(Split):
    """Samples in memory: x (n, ...) uint8 or float, y (n,) int64, transformed a batch at a time.

    Args:
        x: samples.
        y: targets.
        transform: of the samples of a batch; or None.
        labelled: whether whole numbers in y are classes.
        columns: further values (n,) by name, to divide the samples by.

    Raises:
        ValueError: not as many targets as samples.
    """

    def __init__(
        self,
        x: Tensor,
        y: Tensor,
        transform: Transform | None = None,
        labelled: bool = True,
        columns: Mapping[str, Array] | None = None,
    ) -> None:
        if len(x) != len(y):
            raise ValueError(f"a split needs one label per sample, got {len(x)} samples and {len(y)} labels")
        self.columns = dict(columns or {})
        self.x = x
        # Truth values stay as they are: code of the user's may choose samples by them.
        self.y = y if y.dtype == torch.bool or y.ndim != 1 else class_labels(y)
        self.transform = transform
        self.augments = getattr(transform, "augments", transform is not None)
        self.labels = class_labels(y).cpu() if labelled and not y.is_floating_point() and y.ndim == 1 else None
        self._staging: Staging | None = None  # of the batches of samples that do not fit on the device

    def __len__(self) -> int:
        return len(self.x)

    @property
    def input_shape(self) -> tuple[int, ...] | None:
        return tuple(self.x.shape[1:])

    @property
    def num_bytes(self) -> int:
        return self.x.numel() * self.x.element_size()

    def subset(self, indices: Tensor) -> "TensorSplit":
        columns = {name: values[indices.cpu().numpy()] for name, values in self.columns.items()}
        indices = indices.to(self.x.device)
        return TensorSplit(self.x[indices], self.y[indices], self.transform, self.labels is not None, columns)

    @property
    def is_in_memory(self) -> bool:
        return True

    def probe(self) -> Batch | None:
        if not len(self):
            return None
        positions = torch.linspace(0, len(self) - 1, min(len(self), PROBED)).long()
        return next(iter(self.batches([positions], None)))

    def relabelled(self, labels: Tensor) -> "TensorSplit":
        split = copy(self)
        split.y = labels.to(self.y.device)
        split.labels = labels.cpu()
        return split

    @property
    def is_transformed(self) -> bool:
        return self.transform is not None

    def seen_as(self, other: Split) -> "TensorSplit":
        if not isinstance(other, TensorSplit):
            return self
        split = copy(self)
        split.transform = other.transform
        split.augments = other.augments
        return split

    def column(self, name: str) -> Array:
        if self.columns and name not in self.columns:
            raise ValueError(f"the samples have no column {name!r}; there are {', '.join(self.columns)}")
        return self.columns[name] if self.columns else super().column(name)

    def through(self, seen: Transform) -> "TensorSplit":
        """Make a split of the same samples, without a copy, that `seen` changes last."""
        split = copy(self)
        first = self.transform
        split.transform = seen if first is None else partial(after, first, seen)
        split.augments = True
        return split

    def to(self, device: torch.device) -> None:
        if self._staging is not None and self._staging.device == device:
            return
        on_host = self.x.device.type == "cpu"
        if on_host and not fits(self.num_bytes + self.y.numel() * self.y.element_size(), device):
            self._staging = staging_for(device)
        else:
            self.x, self.y, self._staging = self.x.to(device), self.y.to(device), None

    def placed(self, indices: Tensor) -> Tensor:
        return indices if indices.device == self.x.device else copy_to_device(indices, self.x.device)

    def batches(self, indices: Iterable[Tensor], generator: torch.Generator | None) -> Iterator[Batch]:
        x = self.x
        y = self.y
        transform = self.transform
        gathered = ((x.index_select(0, index), y.index_select(0, index)) for index in map(self.placed, indices))
        for batch, targets in gathered if self._staging is None else self._staging.one_ahead(gathered):
            yield (batch if transform is None else transform(batch, generator)), targets

    def together(self, indices: Tensor, generators: Sequence[torch.Generator | None]) -> tuple[Tensor, Tensor]:
        """Make the batches of several clients as one, (K, B, ...) and (K, B).

        Args:
            indices: (K, B) int64.
            generators: of each client's augmentation; None: none.
        """
        whole = self.placed(indices.reshape(-1))
        x, y = (of.index_select(0, whole).view(*indices.shape, *of.shape[1:]) for of in (self.x, self.y))
        if self._staging is not None:
            x, y = self._staging((x, y))
        if self.transform is not None:
            x = torch.stack([self.transform(samples, draws) for samples, draws in zip(x, generators, strict=True)])
        return x, y


def after(first: Transform, then: Transform, x: Tensor, generator: torch.Generator | None) -> Tensor:
    """Transform x by two transforms, one after the other, on the same generator."""
    return then(first(x, generator), generator)
