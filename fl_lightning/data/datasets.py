"""Sources made of the user's own datasets and LightningDataModules, read as outside a federation."""

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial
from numbers import Integral
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    Subset,
    TensorDataset,
    default_collate,
)

from fl_lightning.data.column_partition import ColumnPartition
from fl_lightning.data.loaders import LoaderSpec
from fl_lightning.data.partitions import PartitionInput
from fl_lightning.data.schema import Schema, shown
from fl_lightning.data.seen import may_transform, seen_as
from fl_lightning.data.sources import Source, check_labels
from fl_lightning.data.splits import Array, LoadedSplit, Split, TensorSplit
from fl_lightning.data.streams import Stream, StreamSplit, are_streams
from fl_lightning.types import Batch, DataModule
from fl_lightning.utils.keyed import keyed_globals
from fl_lightning.utils.settings import described
from fl_lightning.utils.signatures import checks_arguments

LABELS = ("targets", "labels", "target", "label", "y")
"""Names under which a dataset keeps the class of its samples: an attribute of it, or a key of its items."""


class DatasetSplit(LoadedSplit):
    """A map-style dataset, read item by item.

    Args:
        dataset: with `__len__` and `__getitem__`.
        loader_spec: makes batches of its items; None: the defaults.
        columns: values (n,) by name, besides those that the dataset has itself.
        whole: the split that this one is a part of, and its samples' indices there, int64 (n,); None: it is no part.

    Raises:
        TypeError: the dataset has no length or no index.
    """

    augments = True  # its transforms may draw

    def __init__(
        self,
        dataset: Dataset[Any],
        loader_spec: LoaderSpec | None = None,
        columns: Mapping[str, Array] | None = None,
        whole: "tuple[DatasetSplit, Tensor] | None" = None,
    ) -> None:
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
            raise TypeError(
                f"samples are divided by their index, so a dataset needs __len__ and __getitem__, got "
                f"{type(dataset).__name__}; give a map-style dataset, or a stream for each client "
                f"({{client_id: dataset}})"
            )
        self.dataset: Any = dataset
        self.loader_spec = loader_spec or LoaderSpec()
        self.columns = dict(columns or {})
        self._whole = whole

    def __len__(self) -> int:
        return len(self.dataset)

    @cached_property
    def labels(self) -> Tensor | None:  # type: ignore[override]
        """Class of every sample, (n,), read at the first access, perhaps in a pass over the dataset."""
        if self._whole is None:
            return labels_of(self.dataset)
        split, indices = self._whole
        return None if split.labels is None else split.labels[indices]

    @cached_property
    def known_labels(self) -> Tensor | None:
        return None if vars(self).get("labels", ...) is None else as_classes(attribute_of(self.dataset, LABELS))

    def column(self, name: str) -> Array:
        values = self.columns.get(name)
        if values is None:
            values = attribute_of(self.dataset, (name,))
        if values is None and len(self):
            key = key_of(self._first_item, name)
            values = None if key is None else items_at(self.dataset, key)
        return super().column(name) if values is None else values

    @property
    def input_shape(self) -> tuple[int, ...] | None:
        item = self._first_item
        x = item[0] if isinstance(item, list | tuple) and item else None
        return tuple(x.shape) if isinstance(x, Tensor) else None

    @property
    def is_in_memory(self) -> bool:
        return not may_transform(self.dataset)

    def probe(self) -> Batch | None:
        item = self._first_item
        if self.loader_spec.collate_fn is not default_collate or not isinstance(item, list | tuple):
            return None
        with suppress(TypeError):  # of items that need a collate_fn
            return default_collate([item])
        return None

    @cached_property
    def _first_item(self) -> Any:
        """The first item, read once. None: there is none."""
        if not len(self):
            return None
        return first_item(self.dataset)

    def relabelled(self, labels: Tensor) -> "DatasetSplit":
        return DatasetSplit(RelabelledDataset(self.dataset, labels), self.loader_spec, self.columns)

    def subset(self, indices: Tensor) -> "DatasetSplit":
        columns = {name: values[indices.numpy()] for name, values in self.columns.items()}
        return DatasetSplit(Subset(self.dataset, indices.tolist()), self.loader_spec, columns, (self, indices))

    @property
    def may_transform(self) -> bool:
        return self.loader_spec.collate_fn is not default_collate or may_transform(self.dataset)

    def seen_as(self, other: Split) -> tuple[Split, list[str]]:
        """Make a split of the same samples with the transforms and batches of another dataset."""
        if not isinstance(other, DatasetSplit):
            return self, ["they are tensors in memory"]
        seen = seen_as(self.dataset, other.dataset)
        return DatasetSplit(seen.dataset, other.loader_spec, self.columns, self._whole), seen.doubts

    def look_at(self, indices: Tensor) -> Batch:
        return self.loader_spec.collate_fn([self.dataset[index] for index in indices.tolist()])

    def batches(self, indices: Iterable[Tensor], generator: torch.Generator | None) -> Iterator[Batch]:
        chosen = (index.tolist() for index in indices)
        spec = self.loader_spec
        staging = self.staging
        if spec.num_workers:
            loader = spec.loader(self.dataset, generator, self.pins, batch_sampler=list(chosen))
            return iter(loader) if staging is None else staging.one_ahead(iter(loader))
        if generator is not None:  # torch's own generator is keyed by the loop, these are used by transforms too
            seed = int(torch.randint(2**31, (), generator=generator))
            random.seed(seed)
            np.random.seed(seed)
        many = getattr(self.dataset, "__getitems__", None)
        made = (spec.collate_fn(many(index) if many else [self.dataset[i] for i in index]) for index in chosen)
        return made if staging is None else map(staging, made)  # in order: the net draws from the same generators


class RelabelledDataset(Dataset[Any]):
    """The items of a dataset with other classes.

    Args:
        dataset: gives items (x, class, ...), or mappings with a key of `LABELS`.
        labels: class of each item, (n,) int64.
    """

    def __init__(self, dataset: Any, labels: Tensor) -> None:
        self.dataset = dataset
        self.targets = labels

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        item = self.dataset[index]
        label = self.targets[index]
        if isinstance(item, Mapping):
            key = next(name for name in LABELS if name in item)
            return {**item, key: label}
        values = [item[0], label, *item[2:]]
        return type(item)(*values) if hasattr(item, "_fields") else type(item)(values)


KnownSplit = TensorSplit | DatasetSplit | StreamSplit
"""A split of a user's data."""


def plain(value: Any) -> Any:
    """Convert a 0-d tensor or array to a Python number, and leave all else as it is."""
    return value.item() if isinstance(value, Tensor | np.generic | np.ndarray) and value.ndim == 0 else value


def key_of(item: Any, name: str) -> Any:
    """Return the key or position of a value in an item, a mapping or a named tuple. None: it has no such value."""
    if isinstance(item, Mapping):
        return name if name in item else None
    fields: tuple[str, ...] = getattr(item, "_fields", ())
    return fields.index(name) if name in fields else None


def first_item(dataset: Any) -> Any:
    """Read the first item of a dataset, whose items may draw."""
    with keyed_globals(0, "items"):
        return dataset[0]


def items_at(dataset: Any, key: Any) -> Array:
    """Read the value of every item at a key or position, (n, ...), in a pass over the dataset, whose items may draw."""
    with keyed_globals(0, "items"):
        return np.asarray([plain(dataset[i][key]) for i in range(len(dataset))])


def attribute_of(dataset: Any, names: Sequence[str]) -> Array | None:
    """Read one value per sample, (n, ...), from the first of these attributes that the dataset has.

    Looks through `Subset` and `ConcatDataset`, reads columns of Hugging Face's datasets, and takes the second tensor of
    a `TensorDataset` for its labels.
    """
    if isinstance(dataset, Subset):
        values = attribute_of(dataset.dataset, names)
        return None if values is None else values[np.asarray(dataset.indices, dtype=np.int64)]
    if isinstance(dataset, ConcatDataset):
        parts = [attribute_of(part, names) for part in dataset.datasets]
        return None if any(part is None for part in parts) else np.concatenate(parts)  # type: ignore[arg-type]
    if isinstance(dataset, TensorDataset) and names is LABELS and len(dataset.tensors) > 1:
        return np.asarray(dataset.tensors[1].cpu())
    columns = getattr(dataset, "column_names", None)  # of Hugging Face, where a column is read without the others
    for name in names:
        value: Any = getattr(dataset, name, None)
        if isinstance(columns, list) and name in columns:
            value = dataset[name][:]
        if hasattr(value, "__len__") and len(value) == len(dataset):
            return np.asarray(value.cpu() if isinstance(value, Tensor) else value)
    return None


def labels_of(dataset: Any) -> Tensor | None:
    """Read the class of every sample, (n,) int64, from the dataset's attributes, else its items, else None.

    >>> labels_of(TensorDataset(torch.zeros(3, 2), torch.tensor([2, 0, 1])))
    tensor([2, 0, 1])
    """
    labels = attribute_of(dataset, LABELS)
    if labels is None and len(dataset):
        item = first_item(dataset)
        keys: list[Any] = [name for name in LABELS if name in item] if isinstance(item, Mapping) else []
        keys += [1] if isinstance(item, list | tuple) and len(item) > 1 else []
        if keys and isinstance(plain(item[keys[0]]), int):
            labels = items_at(dataset, keys[0])
    return as_classes(labels)


def as_classes(labels: Array | None) -> Tensor | None:
    """Convert labels to (n,) int64, or None where they are neither whole numbers nor truth values."""
    if labels is None or labels.ndim != 1:
        return None
    if labels.dtype == object and all(isinstance(label, Integral | np.bool_) for label in labels):
        labels = labels.astype(np.int64)
    if labels.dtype.kind not in "iub":
        return None
    return torch.from_numpy(labels.astype(np.int64))


class DatasetSource(Source):
    """A source of a user's own datasets.

    Args:
        train: the training samples; or by client id a stream for each client.
        test: the test samples; None: there are none.
        val: what the server evaluates every round; None: the test samples, or a part of the training samples.
        num_classes: C; None: the largest label + 1 where there are labels.
        loader_spec: makes batches of the items; None: the defaults.
        columns: values (n,) of the training samples by name, to divide them by.
    """

    @checks_arguments
    def __init__(
        self,
        train: Dataset[Any] | Mapping[int, IterableDataset[Any]],
        test: Dataset[Any] | None = None,
        val: Dataset[Any] | None = None,
        num_classes: int | None = None,
        loader_spec: LoaderSpec | None = None,
        columns: Mapping[str, Array] | None = None,
    ) -> None:
        check_datasets((DataLoader, type), train=train, val=val, test=test)
        self.train = train
        self.val = val
        self.test = test
        self.num_classes = num_classes
        self.columns = columns
        self.loader_spec = loader_spec or LoaderSpec()

    def load(self) -> tuple[Split, Split | None]:
        check_datasets((Source, DataModule), train=self.train, val=self.val, test=self.test)
        splits = {"train": make_split(self.train, self.loader_spec, self.columns)}
        for name, dataset in (("val", self.val), ("test", self.test)):
            if dataset is not None:
                splits[name] = make_split(dataset, self.loader_spec)
        check_class_names(splits)
        self.counts_classes = self.num_classes is None or self.counts_classes
        self.num_classes, self.classes = count_known(splits, None if self.counts_classes else self.num_classes)
        self.validation = splits.get("val")
        return splits["train"], splits.get("test")

    def described(self, train: Split) -> Schema:
        return described_by_dataset(super().described(train), train)


def described_by_dataset(schema: Schema, train: Split) -> Schema:
    """Return a schema with the class names that the dataset of the training samples knows, where nothing else does."""
    return schema if schema.class_names is not None else schema._replace(class_names=known_names(train))


def known_names(split: Split) -> tuple[str, ...] | None:
    """Return the class names that a dataset knows, as torchvision's `ImageFolder` does. None: it knows none."""
    dataset: Any = getattr(split, "dataset", None)
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    if isinstance(dataset, ConcatDataset):
        found = {known_names(DatasetSplit(part)) for part in dataset.datasets}
        return found.pop() if len(found) == 1 else None
    names = getattr(dataset, "classes", None)
    if isinstance(names, list | tuple) and names and all(isinstance(name, str) for name in names):
        return tuple(names)
    return None


def check_class_names(splits: Mapping[str, Split]) -> None:
    """Refuse datasets that number their classes in another way than the training samples.

    Args:
        splits: The splits by name, `train` among them.

    Raises:
        ValueError: Names the split and the classes of both.
    """
    names = known_names(splits["train"])
    for name, split in splits.items():
        others = known_names(split)
        if names is not None and others is not None and others != names:
            raise ValueError(
                f"the {name} samples must number their classes as the training samples ({shown(names)}), got "
                f"{shown(others)}; give both datasets the same classes"
            )


def check_datasets(wrong: tuple[type, ...], **datasets: object) -> None:
    """Refuse anything but datasets.

    Raises:
        TypeError: a dataset that is one of the `wrong` kinds.
    """
    for name, given in datasets.items():
        if isinstance(given, wrong):
            remedy = f"give its dataset, {name}=loader.dataset" if isinstance(given, DataLoader) else "give a dataset"
            raise TypeError(f"{name} must be a torch Dataset, got {described(given)}; {remedy}")


def users_as_clients(source: DatasetSource, by: str | Sequence[Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Complete a data module's settings: each user is a client, or users are dealt to `num_clients` where it is set.

    Args:
        source: of the samples.
        by: the column of the users, or the users, which the source has as the column `by`.
        settings: given so far.

    Raises:
        ValueError: together with streams or a `partition`, or of another length than the samples.
    """
    if isinstance(source.train, Mapping):
        raise ValueError("from_datasets takes by= or a stream for each client, got both; leave by= out")
    if settings.get("partition") is not None:
        raise ValueError("from_datasets takes by= or partition=, got both; by= gives each user a client")
    split = DatasetSplit(source.train, source.loader_spec, source.columns)
    if not isinstance(by, str) and len(by) != len(split):
        raise ValueError(f"by= needs one value for each training sample, got {len(by)} for {len(split)} samples")
    partition = ColumnPartition(by if isinstance(by, str) else "by")
    users = partition.count_owners(PartitionInput(len(split), split.column(partition.column)))
    return {"num_clients": users, **settings, "partition": partition}


def make_split(
    dataset: Dataset[Any] | Mapping[int, IterableDataset[Any]],
    loader_spec: LoaderSpec,
    columns: Mapping[str, Array] | None = None,
) -> KnownSplit:
    """Make a split of a dataset: two plain tensors are kept on the device, anything else is read item by item.

    Raises:
        TypeError: a mapping of clients to something else than streams.
    """
    if isinstance(dataset, Mapping):
        if not are_streams(dataset):
            kinds = ", ".join(sorted({type(value).__name__ for value in dataset.values()}))
            raise TypeError(
                f"a mapping of clients must hold an IterableDataset for each, got {kinds or 'none'}; join map-style "
                f"datasets by ConcatDataset, and give by= the client of every sample"
            )
        return StreamSplit({client_id: Stream(stream, loader_spec) for client_id, stream in dataset.items()})
    pair = type(dataset) is TensorDataset and len(dataset.tensors) == 2
    if pair and loader_spec.collate_fn is default_collate and not columns:
        x, y = dataset.tensors  # type: ignore[attr-defined]
        return TensorSplit(x, y, columns=columns_of(dataset))
    return DatasetSplit(dataset, loader_spec, columns)


def columns_of(dataset: Dataset[Any]) -> dict[str, Array]:
    """Return the attributes of a dataset that have one value per sample, (n,), by name."""
    columns: dict[str, Array] = {}
    for name, given in vars(dataset).items():
        is_series = hasattr(given, "to_numpy") and hasattr(given, "__len__")  # of pandas
        if name == "tensors" or not (is_series or isinstance(given, list | tuple | np.ndarray | Tensor)):
            continue
        with suppress(ValueError):  # a list of lists that differ in length
            values = attribute_of(dataset, (name,))
            if values is not None and values.ndim == 1:
                columns[name] = values
    return columns


def count_known(
    splits: Mapping[str, KnownSplit], num_classes: int | None
) -> tuple[int | None, Callable[[], int | None] | None]:
    """Count the classes at once where that takes no pass over the samples, else give a function that counts them."""
    known = {name: s for name, s in splits.items() if not isinstance(s, DatasetSplit) or s.known_labels is not None}
    if num_classes is not None or len(known) == len(splits):
        return count_classes(known, num_classes), None
    return None, partial(count_classes, splits, None)


def count_classes(splits: Mapping[str, KnownSplit], num_classes: int | None) -> int | None:
    """Count the classes of these splits, and drop labels that are no classes, since some are below 0.

    Args:
        splits: by name, `train` among them.
        num_classes: C where it is known, else None.

    Returns:
        C, the largest label + 1 where it was not known; None: the training samples have no classes.

    Raises:
        ValueError: a label outside [0, C).

    >>> count_classes({"train": TensorSplit(torch.zeros(3, 1), torch.tensor([2, 0, 1]))}, None)
    3
    """
    labels = {name: split.labels for name, split in splits.items()}
    labelled = {name: y for name, y in labels.items() if y is not None and len(y)}
    if num_classes is not None:
        for name, y in labelled.items():
            check_labels(y, num_classes, name)
        return num_classes
    if any(bool((y < 0).any()) for y in labelled.values()):
        for split in splits.values():
            split.forget_labels()
        return None
    return None if labels["train"] is None or not labelled else max(int(y.max()) for y in labelled.values()) + 1
