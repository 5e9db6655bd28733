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
from fl_lightning.utils.own_generators import OwnGenerator, generators_in, key_generators
from fl_lightning.utils.staging import Staging, fits, staging_for

Array = np.ndarray[Any, Any]

PROBED = 256
"""Most samples in memory that are looked at to tell how the net reads them."""


class Transform(Protocol):
    """Turns a batch of stored samples into the net's input, on the samples' device."""

    def __call__(self, x: Tensor, generator: torch.Generator | None) -> Tensor:
        """Transform samples.

        Args:
            x: Samples (B, ...).
            generator: The generator of random draws. None draws nothing, as in evaluation.
        """


class Split(ABC):
    """Holds samples 0 ... n-1 of a training or test split."""

    labels: Tensor | None
    """The class of each sample, (n,) int64 on the CPU. None: samples have no class."""

    augments = False
    """Whether training batches are drawn with random augmentation."""

    loader_sizes: tuple[int, ...] = ()
    """Number of samples of each of several loaders, one after the other. Empty if one loader gives all samples."""

    digest: str | None = ""
    """Digest of the samples. Empty until the samples were read for it, and None if they have none."""

    @property
    def known_labels(self) -> Tensor | None:
        """The labels if they are known without a pass over the samples. None: they are not."""
        return self.labels

    def forget_labels(self) -> None:
        """Treat the labels as values that are no classes."""
        self.labels = None

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def batches(self, indices: Iterable[Tensor], generator: torch.Generator | None) -> Iterator[Batch]:
        """Make one batch for each index tensor.

        Args:
            indices: Positions of the samples of each batch, (B,) int64.
            generator: The generator of the augmentation. None: there is none.
        """

    def all(self) -> Batch:
        """Read the whole split as one batch, without augmentation."""
        return next(iter(self.batches([torch.arange(len(self))], None)))

    def by_loader(self, positions: Tensor) -> list[Tensor]:
        """Divide samples by the loaders that give them, in order. A loader may have none of them.

        Args:
            positions: Positions of the samples in the split, (k,) int64 on the CPU.
        """
        if not self.loader_sizes:
            return [positions]
        ends = torch.tensor(self.loader_sizes).cumsum(0)
        loaders = torch.searchsorted(ends, positions, right=True)
        return [positions[loaders == loader_idx] for loader_idx in range(len(ends))]

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
        """Copy indices of many batches to the device on which `batches` reads them, in one copy."""
        return indices

    @abstractmethod
    def subset(self, indices: Tensor) -> "Split":
        """Make a split of some samples.

        Args:
            indices: The samples' positions, (k,) int64.
        """

    @property
    def may_transform(self) -> bool:
        """Tell whether samples may be transformed in another way than those of another split."""
        return False

    @property
    def own_generators(self) -> list[OwnGenerator]:
        """The random generators that code of the user's keeps, by which samples are read."""
        return []

    def key_own_generators(self, generator: torch.Generator | None) -> None:
        """Seed the user's own generators for a pass over samples.

        Args:
            generator: The generator of the pass. None: the pass is an evaluation, and all passes have one seed.
        """
        if self.own_generators:
            seed = 0 if generator is None else int(torch.randint(2**31, (), generator=generator))
            key_generators(self.own_generators, seed)

    def seen_as(self, other: "Split") -> tuple["Split", list[str]]:
        """Make a split of the same samples that are transformed as those of another split.

        Args:
            other: The split whose transforms are wanted.

        Returns:
            The split, and why its samples may be transformed otherwise all the same: clauses about the other samples.
        """
        return self, []

    def look_at(self, indices: Tensor) -> Batch:
        """Read samples as one batch, without augmentation, processes or copies to a device.

        Args:
            indices: The samples' positions, (k,) int64.
        """
        return next(iter(self.batches([indices], None)))

    def through(self, seen: Transform) -> "Split":
        """Make a split of the same samples, to which a transform is applied last.

        Args:
            seen: The transform.

        Raises:
            ValueError: The samples are not in memory.
        """
        raise ValueError(
            f"data.feature_shift and data.scenario change samples in memory, and those of a {type(self).__name__} are "
            f"read by code of their own; change them there, or give tensors"
        )

    def has_samples_of(self, other: "Split") -> bool:
        """Return True if a split that was made of another one still reads its samples, which may have been moved.

        Args:
            other: The other split.
        """
        return True

    def column(self, name: str) -> Array:
        """Read the value of every sample in a column, (n,).

        Args:
            name: The name of the column.

        Raises:
            ValueError: The samples have no such column.
        """
        raise ValueError(
            f"the samples have no column {name!r}; name an attribute of the dataset that has one value per sample, or "
            f"a key of its items"
        )

    @property
    def input_shape(self) -> tuple[int, ...] | None:
        """The shape of one sample as the net reads it, without the batch dimension. None: it is not known."""
        return None

    @property
    def num_bytes(self) -> int | None:
        """The bytes of the samples as they are stored, without labels. None: they are not known."""
        return None

    def to(self, device: torch.device) -> None:  # noqa: B027 - most splits hold nothing in memory
        """Move the samples in memory to a device, in place, if they fit there.

        Args:
            device: The device.
        """

    def stage(self, device: torch.device, early: bool) -> None:  # noqa: B027 - samples in memory are there already
        """Prepare batches that are read from outside for a device.

        Args:
            device: The device on which they will be used.
            early: Whether they may be copied as they are read. Otherwise the user's own hooks see them first.
        """


class LoadedSplit(Split):
    """Reads samples on demand, for a GPU through pinned memory.

    Attributes:
        staging: Copies batches to the device as they are read. None: others copy them.
        pins: Whether a DataLoader gives batches in pinned memory.
    """

    staging: Staging | None = None
    pins = False

    def stage(self, device: torch.device, early: bool) -> None:
        self.staging = staging_for(device) if early else None
        self.pins = device.type == "cuda"


class TensorSplit(Split):
    """Holds samples in memory, which are transformed a batch at a time.

    Args:
        x: Samples (n, ...), uint8 or float.
        y: Targets (n, ...), such as int64 classes.
        transform: The transform of the samples of a batch. None: there is none.
        labelled: Whether whole numbers in y are classes.
        columns: Further values (n,) by name, to divide the samples by.

    Raises:
        ValueError: There are not as many targets as samples.
    """

    def __init__(
        self,
        x: Tensor,
        y: Tensor,
        transform: Transform | None = None,
        *,
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
        self.labels = None
        if labelled and y.ndim == 1 and not y.is_floating_point():
            self.labels = class_labels(y).cpu()
        self._staging: Staging | None = None
        """Copies batches of samples that do not fit on the device."""
        self._searched: Transform | None = None
        """The transform that was searched for random generators."""
        self._own_generators: list[OwnGenerator] = []

    def __len__(self) -> int:
        return len(self.x)

    @property
    def input_shape(self) -> tuple[int, ...] | None:
        return tuple(self.x.shape[1:])

    @property
    def num_bytes(self) -> int:
        return self.x.numel() * self.x.element_size()

    def subset(self, indices: Tensor) -> "TensorSplit":
        rows = indices.cpu().numpy()
        columns = {name: values[rows] for name, values in self.columns.items()}
        indices = indices.to(self.x.device)
        return TensorSplit(
            self.x[indices],
            self.y[indices],
            self.transform,
            labelled=self.labels is not None,
            columns=columns,
        )

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
    def may_transform(self) -> bool:
        return self.transform is not None

    @property
    def own_generators(self) -> list[OwnGenerator]:
        if self._searched is not self.transform:
            self._searched = self.transform
            self._own_generators = generators_in(self.transform)
        return self._own_generators

    def seen_as(self, other: Split) -> tuple["Split", list[str]]:
        if not isinstance(other, TensorSplit):
            return self, ["they are no tensors in memory"]
        split = copy(self)
        split.transform = other.transform
        split.augments = other.augments
        return split, []

    def column(self, name: str) -> Array:
        if not self.columns:
            return super().column(name)
        if name not in self.columns:
            raise ValueError(f"the samples have no column {name!r}; there are {', '.join(self.columns)}")
        return self.columns[name]

    def through(self, seen: Transform) -> "TensorSplit":
        """Make a split of the same samples, without a copy of them, to which a transform is applied last."""
        split = copy(self)
        split.augments = self.augments or getattr(seen, "augments", True)
        if self.transform is None:
            split.transform = seen
        else:
            split.transform = partial(after, self.transform, seen)
        return split

    def has_samples_of(self, other: Split) -> bool:
        return isinstance(other, TensorSplit) and self.x is other.x and self._staging is other._staging

    def to(self, device: torch.device) -> None:
        if self._staging is not None and self._staging.device == device:
            return
        on_host = self.x.device.type == "cpu"
        num_bytes = self.num_bytes + self.y.numel() * self.y.element_size()
        if on_host and not fits(num_bytes, device):
            self._staging = staging_for(device)
            return
        self.x = self.x.to(device)
        self.y = self.y.to(device)
        self._staging = None

    def placed(self, indices: Tensor) -> Tensor:
        if indices.device == self.x.device:
            return indices
        return copy_to_device(indices, self.x.device)

    def batches(self, indices: Iterable[Tensor], generator: torch.Generator | None) -> Iterator[Batch]:
        self.key_own_generators(generator)
        x = self.x
        y = self.y
        transform = self.transform
        gathered: Iterator[Any] = (
            (x.index_select(0, index), y.index_select(0, index)) for index in map(self.placed, indices)
        )
        if self._staging is not None:
            gathered = self._staging.one_ahead(gathered)
        for batch, targets in gathered:
            # As the batches of a DataLoader, pairs are lists, in which a hook of the user may replace an item.
            if transform is None:
                yield [batch, targets]
            else:
                yield [transform(batch, generator), targets]

    def together(self, indices: Tensor, generators: Sequence[torch.Generator | None]) -> list[Tensor]:
        """Make the batches of several clients as one pair, (K, B, ...) and (K, B).

        Args:
            indices: Positions of the samples of each client, (K, B) int64.
            generators: The generator of each client's augmentation. None: the client has none.
        """
        whole = self.placed(indices.reshape(-1))
        x = self.x.index_select(0, whole).view(indices.shape + self.x.shape[1:])
        y = self.y.index_select(0, whole).view(indices.shape + self.y.shape[1:])
        if self._staging is not None:
            x, y = self._staging((x, y))
        if self.transform is not None:
            seen = [self.transform(samples, draws) for samples, draws in zip(x, generators, strict=True)]
            x = torch.stack(seen)
        return [x, y]


def after(first: Transform, then: Transform, x: Tensor, generator: torch.Generator | None) -> Tensor:
    """Transform samples by two transforms, one after the other, on the same generator.

    Args:
        first: The first transform.
        then: The second transform.
        x: Samples (B, ...).
        generator: The generator of random draws. None draws nothing.
    """
    return then(first(x, generator), generator)
