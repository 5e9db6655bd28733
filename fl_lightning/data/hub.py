"""Data sets of Hugging Face's `datasets`, kept in memory as pairs of input and label."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fl_lightning.data.images import eight_bits_as_floats, error_line, is_deep, loaded
from fl_lightning.data.new_samples import NewSamples
from fl_lightning.data.schema import Schema, pixel_scale
from fl_lightning.data.sources import Source, labelled_split
from fl_lightning.data.splits import Array, Split, TensorSplit
from fl_lightning.data.transforms import Scale

LARGEST_EXACT = 2**53
"""From here on float64 does not tell whole numbers apart."""


class HuggingFace(Source):
    """Keeps splits of a `datasets.DatasetDict` in memory: images and uint8 scaled to [0, 1], other numbers as they are.

    Pictures of 16 bits, and of floats in [0, 1], are scaled by what their type can hold and kept as floats.

    `data.by` may name every other column. Data that need a tokenizer, or do not fit in memory, are given to
    `FederatedDataModule.from_datasets`, which reads items one by one. Formats such as `numpy` make no difference.

    Args:
        data: A folder that `save_to_disk` wrote, with `download` the name of a data set on the Hub, a DatasetDict, or a
            Dataset, which is the training split.
        input: The column that the net reads: images, numbers, or lists of numbers of one length.
        label: The column of the target.
        train: Name of the training split.
        test: Name of the test split. There are no test samples if the data set has no such split.
        validation: Name of the validation split, which is evaluated every round. None: there is none.
        name: Name of the configuration on the Hub. None: the only one.
        download: Whether the data set is fetched from the Hub into Hugging Face's own cache.
        limit: Most samples of each split, drawn by class. None: all. No others are decoded.

    Raises:
        ModuleNotFoundError: The package `datasets` is not installed.
        FileNotFoundError: There is no such folder.
        TypeError: The data are a stream.
        ValueError: A split or a column is missing, or splits differ.
    """

    places = ("download",)
    is_published = True

    def __init__(
        self,
        data: Any,
        input: str = "image",
        label: str = "label",
        *,
        train: str = "train",
        test: str = "test",
        validation: str | None = None,
        name: str | None = None,
        download: bool = False,
        limit: int | None = None,
    ) -> None:
        self.data = data
        self.input = input
        self.label = label
        self.limit = limit
        self.train = train
        self.test = test
        self.validation_name = validation
        self.name = name
        self.download = download

    def prepare(self) -> None:
        if self.download:
            self._splits()

    def load(self) -> tuple[Split, Split | None]:
        splits = self._splits()
        wanted = [self.train]
        if self.validation_name:
            wanted.append(self.validation_name)
        for name in wanted:
            if name not in splits:
                raise ValueError(f"the data set must have the split {name!r}, it has {', '.join(splits)}")
        self._take_names(splits, [self.test, *wanted[1:]])
        train = self._split(splits[self.train], "train")
        test = self._further(splits, name=self.test, which="test", train=train)
        self.validation = self._further(splits, name=self.validation_name, which="val", train=train)
        return train, test

    def _take_names(self, splits: Mapping[str, Any], others: Sequence[str]) -> None:
        """Take the class names of the training split, which all splits must have.

        Args:
            splits: The splits of the data set, by name.
            others: Names of the further splits, which the data set may lack.

        Raises:
            ValueError: A further split has other class names.
        """
        named = {name: getattr(split.features.get(self.label), "names", None) for name, split in splits.items()}
        names = named[self.train]
        if names:
            self.num_classes = len(names)
            self.class_names = tuple(names)
        for name in others:
            if name in splits and named[name] != names:
                raise ValueError(
                    f"the classes of all splits must be numbered alike, got {names} in {self.train} and {named[name]} "
                    f"in {name}; cast the column {self.label!r} of both to one ClassLabel"
                )

    def _further(
        self, splits: Mapping[str, Any], *, name: str | None, which: str, train: TensorSplit
    ) -> TensorSplit | None:
        """Read a further split, or return None without one.

        Args:
            splits: The splits of the data set, by name.
            name: Name of the split.
            which: What the split is, for errors.
            train: The training samples.

        Raises:
            ValueError: The samples have another shape or type than the training samples.
        """
        if name is None or name not in splits:
            return None
        split = self._split(splits[name], which)
        if split.input_shape != train.input_shape:
            raise ValueError(
                f"column {self.input!r} must have one shape in all splits, got {train.input_shape} in train and "
                f"{split.input_shape} in {which}; resize or convert it first"
            )
        if kinds_of(split) != kinds_of(train):
            raise ValueError(
                f"columns {self.input!r} and {self.label!r} must have the types of the training rows "
                f"({' and '.join(kinds_of(train))}) in all splits, got {' and '.join(kinds_of(split))} in {which}; "
                f"cast them to one type"
            )
        return split

    def _splits(self) -> Mapping[str, Any]:
        """Open the data set, and return its splits by name.

        Raises:
            TypeError: A split is no Dataset.
        """
        opened = self._opened() if isinstance(self.data, str | Path) else self.data
        splits = opened if isinstance(opened, Mapping) else {self.train: opened}
        for split in splits.values():
            if not (hasattr(split, "column_names") and hasattr(split, "__len__")):
                raise TypeError(
                    f"data must be a Dataset or a DatasetDict, got {type(split).__name__}; a stream for each client is "
                    f"given to FederatedDataModule.from_datasets"
                )
        return splits

    def _opened(self) -> Any:
        """Open what `data` names."""
        datasets = datasets_package()
        if self.download:
            return datasets.load_dataset(self.data, self.name)
        folder = Path(self.data).expanduser()
        if not folder.is_dir():
            raise FileNotFoundError(
                f"data must be a folder that save_to_disk wrote, got {self.data}, which does not exist; set "
                f"`download: true` to fetch {self.data} from the Hub"
            )
        return datasets.load_from_disk(str(folder))

    def _split(self, dataset: Any, which: str) -> TensorSplit:
        """Read a split.

        Args:
            dataset: The rows.
            which: What the split is: `train`, `test` or `val`.

        Raises:
            ValueError: There are no rows, a column is missing, or its values cannot be read.
        """
        for column in (self.input, self.label):
            self._check_column(dataset, column)
        if not len(dataset):
            raise ValueError(f"the {which} split of the data set must have samples, got none; name another")
        plain = plain_format(dataset)
        y = self._targets(plain)
        may_be_classes = y.ndim == 1 and not y.is_floating_point()
        if self.num_classes is None and which == "train" and may_be_classes:
            self.counts_classes = True
            self.num_classes = int(y.max()) + 1
        if self.limit is not None:
            classes: Array | None = None
            if may_be_classes and int(y.min()) >= 0:
                classes = y.numpy()
            rows = self.limited_rows(which, labels=classes, size=len(y))
            plain = plain.select(rows)
            y = y[torch.from_numpy(rows)]
        values = self._values(plain)
        x = as_input(stack_values(values, self.input), declared(dataset.features[self.input]))
        is_scaled = x.dtype == torch.uint8 or are_pictures(values)
        scale = pixel_scale(self.leader) or Scale()
        split = labelled_split(
            x=x,
            y=y,
            num_classes=self.num_classes,
            transform=scale if is_scaled else None,
            name=which,
        )
        simple = [name for name, kind in dataset.features.items() if type(kind).__name__ in ("Value", "ClassLabel")]
        split.columns = {name: as_column(plain[name][:]) for name in sorted(simple)}
        return split

    def _targets(self, dataset: Any) -> Tensor:
        """Read the targets of a split, (n, ...): floats, or whole numbers as int64."""
        y = stack_values(dataset[self.label][:], self.label)
        return y.float() if y.is_floating_point() else y.long()

    def read_new(self, path: Path, schema: Schema) -> NewSamples:
        """Read new rows of a folder that `save_to_disk` wrote: a Dataset, or a DatasetDict of one split.

        Only the column of the inputs is read. The name of a row is its index, from 0.
        """
        if path.is_file():
            raise ValueError(f"--new must be a folder that save_to_disk wrote, got the file {path}; name its folder")
        try:
            opened = datasets_package().load_from_disk(str(path))
        except FileNotFoundError as error:
            raise ValueError(
                f"--new must be a folder that save_to_disk wrote, got {path}; name such a folder"
            ) from error
        dataset = opened
        if isinstance(opened, Mapping):
            if len(opened) != 1:
                first = next(iter(opened), "test")
                raise ValueError(
                    f"--new must be one split, got {path} with {', '.join(opened) or 'none'}; name one: {path / first}"
                )
            (dataset,) = opened.values()
        self._check_column(dataset, self.input)
        if not len(dataset):
            raise ValueError(f"--new must have rows, got none in {path}; name another folder")
        values = self._values(plain_format(dataset))
        x = as_input(stack_values(values, self.input), declared(dataset.features[self.input]))
        return NewSamples.of(x, names=range(len(x)), column="row", schema=schema)

    def _check_column(self, dataset: Any, column: str) -> None:
        """Refuse a data set without a column."""
        if column not in dataset.column_names:
            raise ValueError(f"the data set must have the column {column!r}, it has {dataset.column_names}")

    def _values(self, dataset: Any) -> Sequence[Any]:
        """Read the inputs of a split, whose pictures are decoded now.

        Raises:
            ValueError: A picture cannot be decoded.
        """
        try:
            values: Sequence[Any] = dataset[self.input][:]
        except Exception as error:  # Pillow raises all kinds
            raise ValueError(
                f"column {self.input!r} could not be read ({error_line(error)}); filter out the rows that are no images"
            ) from error
        for row, value in enumerate(values):
            if hasattr(value, "getbands") and hasattr(value, "load"):
                loaded(value, f"row {row} of column {self.input!r}")
        return values


def datasets_package() -> Any:
    """Import the package `datasets`.

    Raises:
        ModuleNotFoundError: It is not installed.
    """
    try:
        import datasets  # type: ignore[import-not-found,unused-ignore] # noqa: PLC0415 - an extra
    except ModuleNotFoundError:
        raise ModuleNotFoundError("HuggingFace needs datasets: pip install datasets") from None
    return datasets


def plain_format(dataset: Any) -> Any:
    """Return a data set that gives plain values, unless a transform of the user's changes what the values are."""
    # A format changes how values are given, not what they are.
    return dataset if dataset.format["type"] == "custom" else dataset.with_format(None)


def kinds_of(split: TensorSplit) -> tuple[str, str]:
    """Return what the samples and the targets of a split are, alike for pictures of 8 and of more bits."""
    if split.transform is not None:
        samples = "scaled"
    elif split.x.is_floating_point():
        samples = "numbers"
    else:
        samples = "whole numbers"
    return samples, "numbers" if split.y.is_floating_point() else "classes"


def stack_values(values: Sequence[Any], column: str) -> Tensor:
    """Stack the values of a column: images of Pillow's to (n, C, H, W), numbers and lists of them as they are.

    Args:
        values: The values, n of them.
        column: Name of the column, for errors.

    Raises:
        ValueError: A value is missing or is no number, or values differ in shape.

    >>> stack_values([[1, 2], [3, 4]], "x").shape
    torch.Size([2, 2])
    """
    missing = sum(value is None for value in values)
    if missing:
        raise ValueError(
            f"column {column!r} must have a value in every row, got none in {missing} of {len(values)}: filter them out"
        )
    pictures = are_pictures(values)
    if pictures and any(is_deep(value) for value in values):
        values = [eight_bits_as_floats(value, f"row {row} of column {column!r}") for row, value in enumerate(values)]
    if pictures:
        values = as_pictures(values)
    arrays = [np.asarray(value) for value in values]
    shapes = {array.shape for array in arrays}
    kinds = {array.dtype.kind for array in arrays}
    if len(shapes) != 1 or not kinds <= set("iufb"):
        found = sorted({f"{array.shape} {array.dtype}" for array in arrays})
        raise ValueError(
            f"the values in column {column!r} must be images or numbers of one shape, got {', '.join(found[:3])}; "
            f"resize or encode them first (class_encode_column numbers words)"
        )
    x = torch.from_numpy(np.stack(arrays))
    check_finite(x, column)
    if pictures:
        return x[:, None] if x.ndim == 3 else x.movedim(-1, 1)
    return x


def check_finite(x: Tensor, column: str) -> None:
    """Refuse numbers that are not finite.

    Raises:
        ValueError: Names the first row that has such a number.
    """
    if not x.is_floating_point():
        return
    is_finite = x.isfinite().view(len(x), -1).all(1)
    if not is_finite.all():
        raise ValueError(
            f"column {column!r} must hold finite numbers, got {x[~is_finite][0].tolist()} as the first of "
            f"{int((~is_finite).sum())} in {len(x)} rows: fill in what is missing, or filter them out"
        )


def are_pictures(values: Sequence[Any]) -> bool:
    """Return True if the values of a column are pictures of Pillow's."""
    return all(hasattr(value, "getbands") for value in values)


def as_pictures(images: Sequence[Any]) -> list[Any]:
    """Make pictures of one mode: grey ones as they are, all others in RGB, and all floats if one is of floats."""
    modes = {image.mode for image in images}
    if len(modes) == 1 and modes <= {"L", "RGB", "F"}:
        return list(images)
    if "F" in modes and modes <= {"1", "L", "F"}:
        return [image.convert("F") for image in images]
    if "F" in modes:
        return [as_rgb_floats(image) for image in images]
    return [image.convert("L" if modes == {"1"} else "RGB") for image in images]


def as_rgb_floats(image: Any) -> Array:
    """Return a picture as floats, (H, W, 3), grey ones three times."""
    if image.mode == "F":
        return np.repeat(np.asarray(image)[:, :, None], 3, axis=2)
    return np.asarray(image.convert("RGB")).astype(np.float32)


def as_input(x: Tensor, kind: str) -> Tensor:
    """Make inputs of a net: float32, whole numbers in lists int64, and those that are declared as uint8 uint8.

    Args:
        x: Values (n, ...). Single numbers (n,) become (n, 1).
        kind: The type that the data set declares.

    >>> as_input(torch.tensor([1, 2]), "int64").tolist(), as_input(torch.tensor([[0, 255]]), "uint8").dtype
    ([[1.0], [2.0]], torch.uint8)
    """
    if x.ndim == 1:
        return x.float()[:, None]
    if x.dtype == torch.uint8 or kind == "uint8":
        return x.to(torch.uint8)
    return x.long() if x.dtype in (torch.int8, torch.int16, torch.int32, torch.int64) else x.float()


def declared(feature: Any) -> str:
    """Return the type that a feature declares for its numbers, such as `uint8`."""
    while (inner := getattr(feature, "feature", None)) is not None:
        feature = inner
    return str(getattr(feature, "dtype", ""))


def as_column(values: Sequence[Any]) -> Array:
    """Make a column by which samples may be divided.

    Missing words are blank, and missing numbers are NaN. Words are kept as objects: in an array of characters each
    would take as much as the longest text.
    """
    has_words = any(isinstance(value, str) for value in values)
    missing = "" if has_words else np.nan
    filled = [missing if value is None else value for value in values]
    # As floats, long whole numbers would no longer be told apart.
    has_long = any(isinstance(value, int) and abs(value) >= LARGEST_EXACT for value in values)
    return np.array(filled, dtype=object if has_words or has_long else None)
