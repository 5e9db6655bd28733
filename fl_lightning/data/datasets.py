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
from fl_lightning.data.loader_settings import LoaderSpec
from fl_lightning.data.partitions import PartitionInput
from fl_lightning.data.schema import Schema, shown
from fl_lightning.data.seen import may_transform, seen_as
from fl_lightning.data.sources import Source, check_labels
from fl_lightning.data.splits import Array, LoadedSplit, Split, TensorSplit
from fl_lightning.data.streams import Stream, StreamSplit, are_streams
from fl_lightning.types import Batch, DataModule
from fl_lightning.utils.keyed import keyed_globals
from fl_lightning.utils.own_generators import OwnGenerator, generators_in
from fl_lightning.utils.settings import described
from fl_lightning.utils.signatures import checks_arguments

LABELS = ("targets", "labels", "target", "label", "y")
"""Names under which a dataset keeps the class of its samples: an attribute of the dataset, or a key of its items."""


class DatasetSplit(LoadedSplit):
    """Reads a map-style dataset item by item.

    Args:
        dataset: Dataset with `__len__` and `__getitem__`.
        loader_spec: Settings of the loader that makes batches of the items. None: the defaults.
        columns: Values (n,) by name, besides the values that the dataset has itself.
        whole: Split of which this split is a part, and the samples' indices there, int64 (n,). None: it is no part.

    Raises:
        TypeError: The dataset has no length or no index.
    """

    # The transforms of a user's dataset may draw.
    augments = True

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
        """The class of every sample, (n,), read at the first access, perhaps in a pass over the dataset."""
        if self.loader_spec.reads_batches:
            return self.known_labels
        if self._whole is None:
            return labels_of(self.dataset)
        split, indices = self._whole
        return None if split.labels is None else split.labels[indices]

    @cached_property
    def known_labels(self) -> Tensor | None:
        # Labels that were read, or forgotten, lie in the dictionary of the split.
        is_without = "labels" in vars(self) and self.labels is None
        if is_without:
            return None
        return as_classes(attribute_of(self.dataset, LABELS))

    def column(self, name: str) -> Array:
        values = self.columns.get(name)
        if values is None:
            values = attribute_of(self.dataset, (name,))
        if values is None and self._first_item is not None:
            key = key_of(self._first_item, name)
            if key is not None:
                values = items_at(self.dataset, key)
        if values is None:
            return super().column(name)
        return values

    @property
    def input_shape(self) -> tuple[int, ...] | None:
        item = self._first_item
        if not isinstance(item, list | tuple) or not item:
            return None
        x = item[0]
        return tuple(x.shape) if isinstance(x, Tensor) else None

    @property
    def is_in_memory(self) -> bool:
        return not may_transform(self.dataset)

    def probe(self) -> Batch | None:
        item = self._first_item
        if self.loader_spec.collate_fn is not default_collate or not isinstance(item, list | tuple):
            return None
        try:
            return default_collate([item])
        except (TypeError, RuntimeError) as error:
            raise ValueError(
                f"items of {type(self.dataset).__name__} cannot be joined to a batch ({error}); return tensors, arrays "
                f"or Python numbers, or give the train_dataloader a collate_fn"
            ) from None

    @cached_property
    def _first_item(self) -> Any:
        """The first item, read once. None: there is none, or the dataset reads batches only."""
        if not len(self) or self.loader_spec.reads_batches:
            return None
        return first_item(self.dataset)

    def relabelled(self, labels: Tensor) -> "DatasetSplit":
        if self.loader_spec.reads_batches:
            raise ValueError(
                f"the classes of {type(self.dataset).__name__}, which reads whole batches, cannot be numbered anew; "
                f"number them in the dataset as the training samples do"
            )
        relabelled = RelabelledDataset(self.dataset, labels)
        return DatasetSplit(relabelled, loader_spec=self.loader_spec, columns=self.columns)

    def subset(self, indices: Tensor) -> "DatasetSplit":
        return DatasetSplit(
            dataset=Subset(self.dataset, indices.tolist()),
            loader_spec=self.loader_spec,
            columns={name: values[indices.numpy()] for name, values in self.columns.items()},
            whole=(self, indices),
        )

    @property
    def may_transform(self) -> bool:
        return self.loader_spec.collate_fn is not default_collate or may_transform(self.dataset)

    @cached_property
    def own_generators(self) -> list[OwnGenerator]:
        return generators_in(self.dataset, self.loader_spec.collate_fn)

    def seen_as(self, other: Split) -> tuple[Split, list[str]]:
        """Make a split of the same samples with the transforms and batches of another dataset."""
        if not isinstance(other, DatasetSplit):
            return self, ["they are tensors in memory"]
        seen = seen_as(self.dataset, other.dataset)
        split = DatasetSplit(
            dataset=seen.dataset,
            loader_spec=other.loader_spec,
            columns=self.columns,
            whole=self._whole,
        )
        return split, seen.doubts

    def look_at(self, indices: Tensor) -> Batch:
        chosen = indices.tolist()
        items = self.dataset[chosen] if self.loader_spec.reads_batches else [self.dataset[index] for index in chosen]
        return self.loader_spec.collate_fn(items)

    def batches(self, indices: Iterable[Tensor], generator: torch.Generator | None) -> Iterator[Batch]:
        self.key_own_generators(generator)
        spec = self.loader_spec
        staging = self.staging
        if spec.num_workers:
            chosen = [positions.tolist() for positions in indices]
            batching = {"sampler": chosen, "batch_size": None} if spec.reads_batches else {"batch_sampler": chosen}
            loader = spec.loader(self.dataset, generator=generator, pins=self.pins, **batching)
            return iter(loader) if staging is None else staging.one_ahead(iter(loader))
        # The loop keys torch's own generator. Transforms may draw from the generators of Python and NumPy, too.
        if generator is not None:
            seed = int(torch.randint(2**31, (), generator=generator))
            random.seed(seed)
            np.random.seed(seed)
        made = (self._made(positions.tolist()) for positions in indices)
        # Batches are made in order, one at a time, because the net draws from the same generators.
        return made if staging is None else map(staging, made)

    def _made(self, chosen: list[int]) -> Batch:
        """Make a batch of the samples at these positions."""
        if self.loader_spec.reads_batches:
            return self.loader_spec.collate_fn(self.dataset[chosen])
        read_many = getattr(self.dataset, "__getitems__", None)
        items = read_many(chosen) if read_many else [self.dataset[index] for index in chosen]
        return self.loader_spec.collate_fn(items)


class RelabelledDataset(Dataset[Any]):
    """Gives the items of a dataset with other classes.

    Args:
        dataset: Dataset of items (x, class, ...), or of mappings with a key of `LABELS`.
        labels: Class of each item, (n,) int64.
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
        kind = type(item)
        is_named_tuple = hasattr(item, "_fields")
        return kind(*values) if is_named_tuple else kind(values)


KnownSplit = TensorSplit | DatasetSplit | StreamSplit
"""A split of a user's data."""


def plain(value: Any) -> Any:
    """Convert a 0-d tensor or array to a Python number, and leave all else as it is."""
    if isinstance(value, Tensor | np.generic | np.ndarray) and value.ndim == 0:
        return value.item()
    return value


def key_of(item: Any, name: str) -> Any:
    """Return the key or position of a value in an item, a mapping or a named tuple. None: it has no such value.

    Args:
        item: The item.
        name: Name of the value.
    """
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
        values = [plain(dataset[index][key]) for index in range(len(dataset))]
        return np.asarray(values)


def attribute_of(dataset: Any, names: Sequence[str]) -> Array | None:
    """Read one value per sample from the first of these attributes that the dataset has.

    The function looks through `Subset` and `ConcatDataset`, reads columns of Hugging Face's datasets, and takes the
    second tensor of a `TensorDataset` for its labels.

    Args:
        dataset: The dataset.
        names: Names of the attributes. The second tensor of a `TensorDataset` is read only for `LABELS` itself.

    Returns:
        The values, (n, ...). None: the dataset has none of the attributes.
    """
    if isinstance(dataset, Subset):
        values = attribute_of(dataset.dataset, names)
        return None if values is None else values[np.asarray(dataset.indices, dtype=np.int64)]
    if isinstance(dataset, ConcatDataset):
        parts = [attribute_of(part, names) for part in dataset.datasets]
        known = [part for part in parts if part is not None]
        return np.concatenate(known) if len(known) == len(parts) else None
    if isinstance(dataset, TensorDataset) and names is LABELS and len(dataset.tensors) > 1:
        return np.asarray(dataset.tensors[1].cpu())
    # A dataset of Hugging Face reads a column without the others.
    columns = getattr(dataset, "column_names", None)
    for name in names:
        value: Any = getattr(dataset, name, None)
        if isinstance(columns, list) and name in columns:
            value = dataset[name][:]
        if hasattr(value, "__len__") and len(value) == len(dataset):
            return np.asarray(value.cpu() if isinstance(value, Tensor) else value)
    return None


def labels_of(dataset: Any) -> Tensor | None:
    """Read the class of every sample, (n,) int64, from the dataset's attributes, else from its items.

    None: the samples have no classes.

    >>> labels_of(TensorDataset(torch.zeros(3, 2), torch.tensor([2, 0, 1])))
    tensor([2, 0, 1])
    """
    labels = attribute_of(dataset, LABELS)
    if labels is None and len(dataset):
        item = first_item(dataset)
        key = label_key(item)
        if key is not None and isinstance(plain(item[key]), int):
            labels = items_at(dataset, key)
    return as_classes(labels)


def label_key(item: Any) -> Any:
    """Return the key of `LABELS`, or the position 1, at which an item has its class. None: it has no such value."""
    if isinstance(item, Mapping):
        return next((name for name in LABELS if name in item), None)
    return 1 if isinstance(item, list | tuple) and len(item) > 1 else None


def as_classes(labels: Array | None) -> Tensor | None:
    """Convert labels to (n,) int64. None: they are neither whole numbers nor truth values.

    Args:
        labels: The labels, (n,). Arrays of other shapes are no classes. None: there are none.
    """
    if labels is None or labels.ndim != 1:
        return None
    if labels.dtype == object and all(isinstance(label, Integral | np.bool_) for label in labels):
        labels = labels.astype(np.int64)
    if labels.dtype.kind not in "iub":
        return None
    return torch.from_numpy(labels.astype(np.int64))


class DatasetSource(Source):
    """Reads a user's own datasets.

    Args:
        train: The training samples, or a stream for each client, by client id.
        test: The test samples. None: there are none.
        val: The samples that the server evaluates every round. None: the test samples, or a part of the training
            samples.
        num_classes: Number C of classes. None: the largest label + 1, if there are labels.
        loader_spec: Settings of the loader that makes batches of the items. None: the defaults.
        columns: Values (n,) of the training samples by name, by which they can be divided. None: there are none.

    Raises:
        TypeError: `train`, `test` or `val` is no dataset.
    """

    @checks_arguments
    def __init__(
        self,
        train: Dataset[Any] | Mapping[int, IterableDataset[Any]],
        test: Dataset[Any] | None = None,
        val: Dataset[Any] | None = None,
        num_classes: int | None = None,
        *,
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
        # A second load counts again if the first did.
        self.counts_classes = self.num_classes is None or self.counts_classes
        stated = None if self.counts_classes else self.num_classes
        self.num_classes, self.classes = count_known(splits, stated)
        self.validation = splits.get("val")
        return splits["train"], splits.get("test")

    def described(self, train: Split) -> Schema:
        return described_by_dataset(super().described(train), train)


def described_by_dataset(schema: Schema, train: Split) -> Schema:
    """Return a schema with the class names that the dataset of the training samples knows, if it has no others.

    Args:
        schema: The schema.
        train: The training samples.
    """
    if schema.class_names is not None:
        return schema
    return schema._replace(class_names=known_names(train))


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
    """Refuse objects that are given in place of datasets.

    Args:
        wrong: Classes that are refused.
        datasets: Objects by the name of their argument.

    Raises:
        TypeError: An object is of one of the `wrong` classes.
    """
    for name, given in datasets.items():
        if isinstance(given, wrong):
            remedy = f"give its dataset, {name}=loader.dataset" if isinstance(given, DataLoader) else "give a dataset"
            raise TypeError(f"{name} must be a torch Dataset, got {described(given)}; {remedy}")


def users_as_clients(source: DatasetSource, by: str | Sequence[Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Complete a data module's settings: each user is a client, or users are dealt to `num_clients` if it is set.

    Args:
        source: Source of the samples.
        by: Column of the users, or the user of each sample, which the source has as the column `by`.
        settings: Settings that were given.

    Returns:
        The settings with `num_clients` and `partition`.

    Raises:
        ValueError: The source has streams, `settings` have a `partition`, or `by` has another length than the samples.
    """
    if isinstance(source.train, Mapping):
        raise ValueError("from_datasets takes by= or a stream for each client, got both; leave by= out")
    if settings.get("partition") is not None:
        raise ValueError("from_datasets takes by= or partition=, got both; by= gives each user a client")
    split = DatasetSplit(source.train, source.loader_spec, source.columns)
    if not isinstance(by, str) and len(by) != len(split):
        raise ValueError(f"by= needs one value for each training sample, got {len(by)} for {len(split)} samples")
    column = by if isinstance(by, str) else "by"
    partition = ColumnPartition(column)
    samples = PartitionInput(len(split), split.column(partition.column))
    users = partition.count_owners(samples)
    return {"num_clients": users, **settings, "partition": partition}


def make_split(
    dataset: Dataset[Any] | Mapping[int, IterableDataset[Any]],
    loader_spec: LoaderSpec,
    columns: Mapping[str, Array] | None = None,
) -> KnownSplit:
    """Make a split of a dataset: two plain tensors are kept on the device, anything else is read item by item.

    Args:
        dataset: The dataset, or a stream for each client, by client id.
        loader_spec: Settings of the loader that makes batches of the items.
        columns: Values (n,) of the samples by name. None: there are none besides the dataset's own.

    Raises:
        TypeError: A mapping holds anything but streams.
    """
    if isinstance(dataset, Mapping):
        if not are_streams(dataset):
            kinds = ", ".join(sorted({type(value).__name__ for value in dataset.values()}))
            raise TypeError(
                f"a mapping of clients must hold an IterableDataset for each, got {kinds or 'none'}; join map-style "
                f"datasets by ConcatDataset, and give by= the client of every sample"
            )
        streams = {client_id: Stream(stream, loader_spec) for client_id, stream in dataset.items()}
        return StreamSplit(streams)
    is_pair = type(dataset) is TensorDataset and len(dataset.tensors) == 2
    if is_pair and loader_spec.collate_fn is default_collate and not columns:
        x, y = dataset.tensors  # type: ignore[attr-defined]
        return TensorSplit(x, y, columns=columns_of(dataset))
    return DatasetSplit(dataset, loader_spec, columns)


def columns_of(dataset: Dataset[Any]) -> dict[str, Array]:
    """Return the attributes of a dataset that have one value per sample, (n,), by name."""
    columns: dict[str, Array] = {}
    for name, given in vars(dataset).items():
        is_of_pandas = hasattr(given, "to_numpy") and hasattr(given, "__len__")
        has_values = is_of_pandas or isinstance(given, list | tuple | np.ndarray | Tensor)
        if name == "tensors" or not has_values:
            continue
        # A list of lists of several lengths raises a ValueError.
        with suppress(ValueError):
            values = attribute_of(dataset, (name,))
            if values is not None and values.ndim == 1:
                columns[name] = values
    return columns


def count_known(
    splits: Mapping[str, KnownSplit], num_classes: int | None
) -> tuple[int | None, Callable[[], int | None] | None]:
    """Count the classes at once if that takes no pass over the samples.

    Args:
        splits: Splits by name, `train` among them.
        num_classes: Number C of classes. None: it is not known.

    Returns:
        C, or None without classes, and a function that counts the classes, which is None if they are counted.
    """
    known: dict[str, KnownSplit] = {}
    for name, split in splits.items():
        if not isinstance(split, DatasetSplit) or split.known_labels is not None:
            known[name] = split
    if num_classes is not None or len(known) == len(splits):
        return count_classes(known, num_classes), None
    return None, partial(count_classes, splits, None)


def count_classes(splits: Mapping[str, KnownSplit], num_classes: int | None) -> int | None:
    """Count the classes of these splits, and drop labels that are no classes, because some are below 0.

    Args:
        splits: Splits by name, `train` among them.
        num_classes: Number C of classes. None: it is not known.

    Returns:
        C. If it was not known, the largest label + 1. None: the training samples have no classes.

    Raises:
        ValueError: A label is outside [0, C).

    >>> count_classes({"train": TensorSplit(torch.zeros(3, 1), torch.tensor([2, 0, 1]))}, None)
    3
    """
    labelled: dict[str, Tensor] = {}
    for name, split in splits.items():
        labels = split.labels
        if labels is not None and len(labels):
            labelled[name] = labels
    if num_classes is not None:
        for name, y in labelled.items():
            check_labels(y, num_classes, name)
        return num_classes
    if any(bool((y < 0).any()) for y in labelled.values()):
        for split in splits.values():
            split.forget_labels()
        return None
    if splits["train"].labels is None or not labelled:
        return None
    return max(int(y.max()) for y in labelled.values()) + 1
