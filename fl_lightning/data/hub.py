"""Data sets of Hugging Face's `datasets`, as pairs of input and label in memory."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fl_lightning.data.images import eight_bits_as_floats, error_line, is_deep, loaded
from fl_lightning.data.limiting import stratified
from fl_lightning.data.schema import pixel_scale
from fl_lightning.data.sources import Source, labelled_split
from fl_lightning.data.splits import Array, Split, TensorSplit
from fl_lightning.data.transforms import Scale

LARGEST_EXACT = 2**53
"""From here on float64 does not tell whole numbers apart."""


class HuggingFace(Source):
    """Splits of a `datasets.DatasetDict`, kept in memory: images and uint8 scaled to [0, 1], other numbers as they are.

    Pictures of 16 bits, and of floats in [0, 1], are scaled by what their type can hold and kept as floats.

    Every other column may be named by `data.by`. Data that need a tokenizer, or do not fit in memory, are given to
    `FederatedDataModule.from_datasets`, which reads items one by one. Formats such as `numpy` make no difference.

    Args:
        data: a folder that `save_to_disk` wrote, with `download` the name of a data set on the Hub, a DatasetDict, or a
            Dataset, which is the training split.
        input: column that the net reads: images, numbers, or lists of numbers of one length.
        label: column of the target.
        train: name of the training split.
        test: name of the test split; where there is none, there are no test samples.
        validation: name of the validation split, which is evaluated every round; where there is none, or None: no.
        name: of the configuration on the Hub; None: the only one.
        download: fetch the data set from the Hub, into Hugging Face's own cache.
        limit: most samples of each split, drawn by class; None: all. No others are decoded.

    Raises:
        ModuleNotFoundError: without the package `datasets`.
        FileNotFoundError: without such a folder.
        TypeError: a stream.
        ValueError: naming a split or column that is missing, or in which splits differ.
    """

    def __init__(
        self,
        data: Any,
        input: str = "image",
        label: str = "label",
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
        wanted = [self.train, *([self.validation_name] if self.validation_name else [])]
        for name in wanted:
            if name not in splits:
                raise ValueError(f"the data set must have the split {name!r}, it has {', '.join(splits)}")
        named = {name: getattr(split.features.get(self.label), "names", None) for name, split in splits.items()}
        if names := named[self.train]:
            self.num_classes = len(names)
            self.class_names = tuple(names)
        others = [self.test, *wanted[1:]]
        if different := [name for name in others if name in splits and named[name] != names]:
            raise ValueError(
                f"the classes of all splits must be numbered alike, got {names} in {self.train} and "
                f"{named[different[0]]} in {different[0]}; cast the column {self.label!r} of both to one ClassLabel"
            )
        train = self._split(splits[self.train], "train")
        test, self.validation = (
            self._split(splits[name], which) if name is not None and name in splits else None
            for which, name in (("test", self.test), ("val", self.validation_name))
        )
        for which, split in (("test", test), ("val", self.validation)):
            if split is not None and split.input_shape != train.input_shape:
                raise ValueError(
                    f"column {self.input!r} must have one shape in all splits, got {train.input_shape} in train and "
                    f"{split.input_shape} in {which}; resize or convert it first"
                )
            if split is not None and kinds_of(split) != kinds_of(train):
                raise ValueError(
                    f"columns {self.input!r} and {self.label!r} must have the types of the training rows "
                    f"({' and '.join(kinds_of(train))}) in all splits, got {' and '.join(kinds_of(split))} in {which}; "
                    f"cast them to one type"
                )
        return train, test

    def _splits(self) -> Mapping[str, Any]:
        """Open the data set."""
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
        try:
            import datasets  # type: ignore[import-not-found,unused-ignore] # noqa: PLC0415 - an extra
        except ModuleNotFoundError:
            raise ModuleNotFoundError("HuggingFace needs datasets: pip install datasets") from None
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
        """Read a split."""
        for column in (self.input, self.label):
            if column not in dataset.column_names:
                raise ValueError(f"the data set must have the column {column!r}, it has {dataset.column_names}")
        if not len(dataset):
            raise ValueError(f"the {which} split of the data set must have samples, got none; name another")
        # a format changes how values are given, not what they are; a transform of the user's changes what they are
        plain = dataset if dataset.format["type"] == "custom" else dataset.with_format(None)
        y = stack_values(plain[self.label][:], self.label)
        y = y.float() if y.is_floating_point() else y.long()
        if self.num_classes is None and which == "train" and not y.is_floating_point() and y.ndim == 1:
            self.counts_classes = True
            self.num_classes = int(y.max()) + 1
        if self.limit is not None:
            classes = y.numpy() if y.ndim == 1 and y.dtype == torch.int64 and int(y.min()) >= 0 else None
            rows = stratified(classes, len(y), self.limit)
            plain = plain.select(rows)
            y = y[torch.from_numpy(rows)]
        values = self._values(plain)
        x = as_input(stack_values(values, self.input), declared(dataset.features[self.input]))
        is_scaled = x.dtype == torch.uint8 or are_pictures(values)
        scale = pixel_scale(self.leader) or Scale()
        split = labelled_split(x, y, self.num_classes, scale if is_scaled else None, which)
        kinds = {name for name, kind in dataset.features.items() if type(kind).__name__ in ("Value", "ClassLabel")}
        split.columns = {name: as_column(plain[name][:]) for name in sorted(kinds)}
        return split

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


def kinds_of(split: TensorSplit) -> tuple[str, str]:
    """Tell what the samples and the targets of a split are, alike for pictures of 8 and of more bits."""
    if split.transform is not None:
        samples = "scaled"
    elif split.x.is_floating_point():
        samples = "numbers"
    else:
        samples = "whole numbers"
    return samples, "numbers" if split.y.is_floating_point() else "classes"


def stack_values(values: Sequence[Any], column: str) -> Tensor:
    """Stack the values of a column: images of Pillow's to (n, C, H, W), numbers and lists of them as they are.

    Raises:
        ValueError: a value that is missing, values of different shapes, or no numbers.

    >>> stack_values([[1, 2], [3, 4]], "x").shape
    torch.Size([2, 2])
    """
    if missing := sum(value is None for value in values):
        raise ValueError(
            f"column {column!r} must have a value in every row, got none in {missing} of {len(values)}: filter them out"
        )
    pictures = are_pictures(values)
    if pictures and any(is_deep(value) for value in values):
        values = [eight_bits_as_floats(value, f"row {row} of column {column!r}") for row, value in enumerate(values)]
    arrays = [np.asarray(value) for value in (as_pictures(values) if pictures else values)]
    if len({array.shape for array in arrays}) != 1 or {array.dtype.kind for array in arrays} - {*"iufb"}:
        raise ValueError(
            f"the values in column {column!r} must be images or numbers of one shape, got "
            f"{', '.join(sorted({f'{a.shape} {a.dtype}' for a in arrays})[:3])}; resize or encode them first "
            f"(class_encode_column numbers words)"
        )
    x = torch.from_numpy(np.stack(arrays))
    if x.is_floating_point() and not (finite := x.isfinite().view(len(x), -1).all(1)).all():
        raise ValueError(
            f"column {column!r} must hold finite numbers, got {x[~finite][0].tolist()} as the first of "
            f"{int((~finite).sum())} in {len(x)} rows: fill in what is missing, or filter them out"
        )
    if pictures:
        return x[:, None] if x.ndim == 3 else x.permute(0, 3, 1, 2)
    return x


def are_pictures(values: Sequence[Any]) -> bool:
    """Tell whether the values of a column are pictures of Pillow's."""
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
        x: values (n, ...); single numbers (n,) become (n, 1).
        kind: type that the data set declares.

    >>> as_input(torch.tensor([1, 2]), "int64").tolist(), as_input(torch.tensor([[0, 255]]), "uint8").dtype
    ([[1.0], [2.0]], torch.uint8)
    """
    if x.ndim == 1:
        return x.float()[:, None]
    if x.dtype == torch.uint8 or kind == "uint8":
        return x.to(torch.uint8)
    return x.long() if x.dtype in (torch.int8, torch.int16, torch.int32, torch.int64) else x.float()


def declared(feature: Any) -> str:
    """Tell the type that a feature declares for its numbers, such as `uint8`."""
    while (inner := getattr(feature, "feature", None)) is not None:
        feature = inner
    return str(getattr(feature, "dtype", ""))


def as_column(values: Sequence[Any]) -> Array:
    """Make a column by which samples may be divided, blank where a word and NaN where a number is missing.

    Words are kept as objects: in an array of characters each would take as much as the longest text.
    """
    words = any(isinstance(value, str) for value in values)
    filled = [("" if words else np.nan) if value is None else value for value in values]
    # As floats, long whole numbers would no longer be told apart.
    long = any(isinstance(value, int) and abs(value) >= LARGEST_EXACT for value in values)
    return np.array(filled, dtype=object if words or long else None)
