"""Sources of samples: the base class, scikit-learn's digits, a user's tensors, and a new split of another source."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from pytorch_lightning import Trainer
from torch import Tensor

from fl_lightning.data.files import PUBLISHED, files_digest
from fl_lightning.data.limiting import stratified
from fl_lightning.data.loader_settings import LoaderSpec
from fl_lightning.data.new_samples import NewSamples
from fl_lightning.data.schema import Schema, check_alike, inputs_of, read_by, scale_of, targets_of
from fl_lightning.data.splits import Array, Split, TensorSplit, Transform
from fl_lightning.data.transforms import Scale
from fl_lightning.utils.keyed import keyed_globals
from fl_lightning.utils.settings import check_above, check_below, check_count, check_kind, check_whole, described
from fl_lightning.utils.signatures import check_overrides

AUTHORS = "the authors of the published files"
"""Who has decided the classes of a published data set."""


class Predicted(NamedTuple):
    """Holds the samples of a loader that are predicted.

    Args:
        samples: The samples, or any iterable over their batches.
        batch_size: Number of samples per batch. None: that of evaluations, or as the batches come.
    """

    samples: Split | Iterable[Any]
    batch_size: int | None = None


class Source(ABC):
    """Reads samples: a training split and, if there are any, a test split and validation splits."""

    places: ClassVar[tuple[str, ...]] = ()
    """Names of the arguments that say where the samples lie, not which samples they are."""

    is_published: ClassVar[bool] = False
    """Whether the class and the arguments that are not in `places` name the samples, wherever these lie."""

    class_names: tuple[str, ...] | None = None
    """The names of the classes, known after `load`. None: classes are printed as numbers."""

    num_classes: int | None = None
    """The number of classes, known after `load`. None: the samples have no classes."""

    classes: Callable[[], int | None] | None = None
    """Counts the classes by a pass over the samples, known after `load`. None: `num_classes` is all that is known."""

    classes_by: ClassVar[str] = ""
    """Who has decided the classes, where neither the training samples nor the user do."""

    validation: Split | None = None
    """The source's own validation samples, known after `load`."""

    further_validation: tuple[Split, ...] = ()
    """The validation samples of further loaders, known after `load`."""

    loader_spec = LoaderSpec()
    """The settings of the source's own loader, known after `load`. They are the defaults if it has none."""

    limit: int | None = None
    """The most samples of the training and of the test split that are read, drawn by class. None: all."""

    left_out: Mapping[str, int] = MappingProxyType({})
    """The samples of each split that `limit` left out, known after `read`."""

    data_seed: int = 0
    """The key of what the source draws from the generators of Python, NumPy and torch: the data module's seed."""

    schema: Schema | None = None
    """What the training samples decide about all samples, known after `read`."""

    leader: Schema | None = None
    """The schema of the training data, by which this source of a further split is read. None: this one decides."""

    place: str = "data.source"
    """The setting that names the source, for errors."""

    takes_other_classes: bool = False
    """Whether its samples may be of classes that the training data do not have."""

    counts_classes: bool = False
    """Whether `num_classes` is the largest label + 1 of its own samples, which says nothing of other samples."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        check_overrides(cls)

    @classmethod
    def fingerprint(cls, arguments: Mapping[str, Any]) -> str | None:
        """Return what tells which samples these arguments name, without loading the samples.

        Two runs whose arguments differ in `places` only are one run if the fingerprints are equal. A source that has
        `root` in `places` is known by the names, sizes and contents of the files below `root`. Override this method for
        a source with other places.

        Args:
            arguments: Arguments of the source by name.

        Returns:
            The fingerprint. None: nothing tells, so that other places are other samples.
        """
        if cls.is_published:
            return PUBLISHED
        if "root" not in cls.places:
            return None
        return files_digest(arguments["root"])

    def keyed(self, hook: str) -> AbstractContextManager[None]:
        """Key the generators of Python, NumPy and torch for a hook of the source, and put them back afterwards.

        Args:
            hook: The name of the hook.
        """
        return keyed_globals(self.data_seed, f"data/{hook}")

    def attach(self, trainer: Trainer | None) -> None:  # noqa: B027 - most sources need no Trainer
        """Take the Trainer before `load` is called.

        Args:
            trainer: The Trainer. None: there is none.
        """

    def teardown(self, stage: str) -> None:  # noqa: B027 - most sources hold nothing open
        """Clean up when the Trainer is done.

        Args:
            stage: What the Trainer did, as Lightning names it.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return what checkpoints keep of the source. Most sources keep nothing."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:  # noqa: B027 - most sources keep nothing
        """Take what a checkpoint has kept of the source.

        Args:
            state_dict: What `state_dict` has returned.
        """

    def predicted(self) -> "Split | Sequence[Predicted] | None":
        """Give the samples to be predicted, of one loader or of several. None: the test samples are predicted."""
        return None

    @property
    def gives_predicted(self) -> bool:
        """Whether `predicted` gives samples, in place of the test samples."""
        return type(self).predicted is not Source.predicted

    @property
    def predicts_alone(self) -> bool:
        """Whether `predicted` gives samples though nothing else was loaded."""
        return False

    def read_new(self, path: Path, schema: Schema) -> NewSamples:
        """Read new samples, which need no targets, by the schema of the training samples (`predict --new`).

        A source that reads new samples overrides this method. It must not load the training samples.

        Args:
            path: The file or folder of the new samples, which exists.
            schema: The schema of the training samples, from a checkpoint.

        Raises:
            ValueError: The source reads no new samples, or the samples do not fit the schema.
        """
        raise ValueError(
            f"--new needs a source that reads new samples, such as TableSource, ImageFolder or HuggingFace, got "
            f"{type(self).__name__}; leave --new out, or define {type(self).__name__}.read_new"
        )

    def tested(self, counted: bool = False) -> Split | None:
        """Give test samples that `load` has left out. None: there are none.

        Args:
            counted: Whether their classes are counted with the classes of the other splits, as long as `num_classes`
                was not read.
        """
        return None

    def prepare(self) -> None:  # noqa: B027 - most sources have nothing to fetch
        """Fetch the data that `load` will read.

        Called on one process only, so it keeps nothing in the object.
        """

    @abstractmethod
    def load(self) -> tuple[Split, Split | None]:
        """Load the training and the test split."""

    def read(self) -> tuple[Split, Split | None]:
        """Load the training and the test split, each with at most `limit` samples, by the schema of the training data.

        Raises:
            ValueError: `limit` is below 1, or the samples do not fit the schema.
        """
        check_count(1, "leave it out for all samples", limit=self.limit)
        self.left_out = {}
        with self.keyed("load"):
            train, test = self.load()
        train = self._limited(train, "train")
        if test is not None:
            test = self._limited(test, "test")
        own = self.described(train)
        self.schema = own
        for name, split in (("test", test), ("val", self.validation)):
            # Items that code of the user's makes are not read before they are needed.
            if split is not None and split.is_in_memory:
                check_alike(own, split, f"the {name} samples of {self.place}")
        if self.leader is None:
            return train, test
        self.schema = self.leader
        read = partial(read_by, self.leader, own, name=self.place, takes_other_classes=self.takes_other_classes)
        train = read(train)
        if test is not None:
            test = read(test)
        return train, test

    def limited_rows(self, split: str, labels: Array | None, size: int) -> Array:
        """Draw the samples of a split that `limit` leaves, and note how many it leaves out.

        Args:
            split: The split's name.
            labels: The class of each sample, (size,). None: the samples have no classes.
            size: The number of samples.

        Returns:
            Ascending int64 indices.
        """
        rows = np.arange(size)
        if self.limit is not None:
            rows = stratified(labels, size, self.limit)
        before = self.left_out.get(split, 0)
        self.left_out = {**self.left_out, split: before + size - len(rows)}
        return rows

    def _limited(self, samples: Split, split: str) -> Split:
        """Leave at most `limit` samples of a split."""
        if self.limit is None or len(samples) <= self.limit:
            return samples
        labels = None
        if samples.labels is not None:
            labels = samples.labels.numpy()
        rows = self.limited_rows(split, labels=labels, size=len(samples))
        return samples.subset(torch.from_numpy(rows))

    def follow(self, schema: Schema | None, place: str, *, takes_other_classes: bool = False) -> None:
        """Read the samples by the schema of the training data from now on.

        Args:
            schema: The schema of the training data. None: its own samples decide.
            place: The setting that names this source, for errors.
            takes_other_classes: Whether samples may be of classes that the training data do not have.
        """
        self.leader = schema
        self.place = place
        self.takes_other_classes = takes_other_classes

    def described(self, train: Split) -> Schema:
        """Return what the training samples decide.

        Args:
            train: The training samples.
        """
        return Schema(
            class_names=None if self.class_names is None else tuple(str(name) for name in self.class_names),
            num_classes=self.num_classes,
            counts_classes=self.counts_classes,
            targets=targets_of(train),
            scale=scale_of(train),
            inputs=inputs_of(train),
        )


class Splits(dict[str, Split]):
    """Holds splits by name, and asks the source for test samples that `load` has left out once somebody looks for them.

    Args:
        splits: The splits that are known.
        source: The source that may have left out test samples. None: no source has.
    """

    def __init__(self, splits: Mapping[str, Split] = MappingProxyType({}), source: Source | None = None) -> None:
        super().__init__(splits)
        self._source = source

    def __contains__(self, name: object) -> bool:
        if name == "test" and not super().__contains__(name):
            self._ask_for_test()
        return super().__contains__(name)

    def _ask_for_test(self) -> None:
        """Ask the source for the test samples, once. A split without samples is none."""
        source = self._source
        if source is None:
            return
        self._source = None
        with source.keyed("tested"):
            test = source.tested()
        if test is not None and len(test):
            self["test"] = test


def labelled_split(
    x: Tensor, y: Tensor, num_classes: int | None, *, transform: Transform | None = None, name: str = "train"
) -> TensorSplit:
    """Make a split whose labels are checked against the number of classes.

    Args:
        x: Samples (n, ...).
        y: Labels (n,) of any integer type, kept as int64. Float targets and label maps are not checked.
        num_classes: The number of classes C. None: there are no classes.
        transform: The transform of stored samples into the net's input.
        name: The name of the split, for the error.

    Raises:
        ValueError: A label lies outside [0, C), or there are not as many labels as samples.
    """
    if not y.is_floating_point():
        y = y.long()
        if num_classes is not None and y.ndim == 1:
            check_labels(y, num_classes, name)
    return TensorSplit(x, y, transform)


def check_labels(y: Tensor, num_classes: int, name: str = "train") -> None:
    """Refuse labels that are no classes.

    Args:
        y: Labels (n,).
        num_classes: The number of classes C.
        name: The name of the split, for the error.

    Raises:
        ValueError: A label lies outside [0, C). The error names the first one.
    """
    outside = (y < 0) | (y >= num_classes)
    if outside.any():
        index = int(outside.int().argmax())
        raise ValueError(
            f"labels must lie in [0, {num_classes}), got {int(y[index])} at index {index} of "
            f"the {name} split: number the classes from 0 or raise num_classes"
        )


class Digits(Source):
    """Gives scikit-learn's 1,797 handwritten digits of 8×8 pixels, as (1, 8, 8) in [0, 1], without a download.

    The first 1,437 in file order are the training split, the last 360 the test split.

    Args:
        limit: The most samples of each split, drawn by class. None: all.
    """

    num_classes = 10
    classes_by = AUTHORS

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit

    def load(self) -> tuple[Split, Split]:
        from sklearn.datasets import load_digits  # noqa: PLC0415 - slow to import

        images, labels = load_digits(return_X_y=True)
        x = torch.as_tensor(images).to(torch.uint8).view((-1, 1, 8, 8))
        y = torch.as_tensor(labels)
        source = TensorSource(
            train=(x[:-360], y[:-360]),
            test=(x[-360:], y[-360:]),
            num_classes=self.num_classes,
            transform=Scale(16),
        )
        return source.load()


class TensorSource(Source):
    """Gives tensors in memory.

    Args:
        train: Samples (n, ...) and labels (n,), or float targets (n, ...).
        test: The samples and labels, or targets, of the test split.
        num_classes: The number of classes C. None: the largest label of both splits plus 1 if labels are (n,) integers,
            else there are no classes.
        transform: The transform of every batch of both splits. None: samples stay as they are, in their own type
            (uint8 images need `Scale` or `Normalize`).

    Raises:
        TypeError: `train` or `test` is no pair of tensors.
        ValueError: The samples, or the labels, of the two splits are of different shapes or kinds.
    """

    def __init__(
        self,
        train: tuple[Tensor, Tensor],
        test: tuple[Tensor, Tensor],
        num_classes: int | None = None,
        transform: Transform | None = None,
    ) -> None:
        for name, pair in (("train", train), ("test", test)):
            is_pair = isinstance(pair, tuple | list) and len(pair) == 2
            if not is_pair or not all(isinstance(part, Tensor) for part in pair):
                raise TypeError(
                    f"{name} must be a pair (samples, labels) of tensors, got {described(pair)}; datasets are given by "
                    f"FederatedDataModule.from_datasets(train, test)"
                )
        x, y = train
        x_test, y_test = test
        if x.shape[1:] != x_test.shape[1:]:
            raise ValueError(
                "samples of the train and the test split must have the same shape, "
                f"got {tuple(x.shape[1:])} and {tuple(x_test.shape[1:])}"
            )
        if y.is_floating_point() != y_test.is_floating_point() or y.shape[1:] != y_test.shape[1:]:
            raise ValueError(
                "labels of the train and the test split must be of one kind, "
                f"got {y.dtype} {tuple(y.shape[1:])} and {y_test.dtype} {tuple(y_test.shape[1:])}"
            )
        if num_classes is None and not y.is_floating_point() and y.ndim == 1 and len(y) + len(y_test):
            self.counts_classes = True
            num_classes = int(torch.cat([y.long(), y_test.long()]).max()) + 1
        self.num_classes = num_classes
        self.train = train
        self.test = test
        self.transform = transform

    def load(self) -> tuple[Split, Split]:
        x, y = self.train
        train = labelled_split(x, y, self.num_classes, transform=self.transform)
        x, y = self.test
        test = labelled_split(x, y, self.num_classes, transform=self.transform, name="test")
        return train, test


class PooledSource(Source):
    """Pools the training and test samples of a source, and splits them anew at random.

    FedED's code does so with MNIST, but divides the pool among the clients first and then splits each client's samples.
    New training samples are transformed as the source's training samples, with its augmentation. New test samples are
    transformed as its test samples.

    Args:
        source: A source with samples in memory, such as `MNIST`.
        test_share: The share of all samples in the new test split, in (0, 1).
        seed: The seed of the draw, which is the same in runs with other seeds.
        limit: The most samples of each new split, drawn by class. None: all.
    """

    def __init__(self, source: Source, test_share: float = 0.25, seed: int = 0, limit: int | None = None) -> None:
        check_kind(Source, "a source of fl_lightning.data", "give such as MNIST()", source=source)
        check_above(0, test_share=test_share)
        check_below(1, test_share=test_share)
        check_whole(seed=seed)
        self.source = source
        self.test_share = test_share
        self.seed = seed
        self.limit = limit

    def prepare(self) -> None:
        self.source.data_seed = self.data_seed
        self.source.prepare()

    def follow(self, schema: Schema | None, place: str, *, takes_other_classes: bool = False) -> None:
        super().follow(schema, place, takes_other_classes=takes_other_classes)
        self.source.follow(schema, place, takes_other_classes=takes_other_classes)

    def described(self, train: Split) -> Schema:
        return super().described(train) if self.source.schema is None else self.source.schema

    def read_new(self, path: Path, schema: Schema) -> NewSamples:
        self.source.data_seed = self.data_seed
        return self.source.read_new(path, schema)

    def load(self) -> tuple[Split, Split]:
        self.source.data_seed = self.data_seed
        train, test = self.source.read()
        if not (isinstance(train, TensorSplit) and isinstance(test, TensorSplit)):
            raise TypeError(
                f"PooledSource needs a training and a test split in memory, which {type(self.source).__name__} does "
                f"not give; use a source such as MNIST or TensorSource"
            )
        self.left_out = {"train": sum(self.source.left_out.values())}
        self.num_classes = self.source.num_classes
        self.class_names = self.source.class_names
        x = torch.cat([train.x, test.x])
        y = torch.cat([train.y, test.y])
        columns = {}
        for name, values in train.columns.items():
            if name in test.columns:
                columns[name] = joined_columns(values, test.columns[name])
        is_labelled = train.labels is not None
        as_train = TensorSplit(x, y, train.transform, labelled=is_labelled, columns=columns)
        as_test = TensorSplit(x, y, test.transform, labelled=is_labelled, columns=columns)
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(self.seed))
        new_test, new_train = order.tensor_split([round(self.test_share * len(x))])
        return as_train.subset(new_train), as_test.subset(new_test)


def joined_columns(first: Array, second: Array) -> Array:
    """Join the values of a column. They become text if the two parts are of different kinds.

    Args:
        first: The values of the first samples.
        second: The values of the further samples.

    >>> joined_columns(np.array([7, 8]), np.array([7, "007"], dtype=object)).tolist()
    ['7', '8', '7', '007']
    """
    if first.dtype.kind != second.dtype.kind:
        first = first.astype(np.str_)
        second = second.astype(np.str_)
    return np.concatenate([first, second])
