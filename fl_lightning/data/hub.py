"""Data sets of Hugging Face's `datasets`, as pairs of input and label in memory."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fl_lightning.data.sources import Source, labelled_split
from fl_lightning.data.splits import Split
from fl_lightning.data.transforms import Scale


class HuggingFace(Source):
    """Splits of a `datasets.DatasetDict`, kept in memory: images as uint8 scaled to [0, 1], numbers as they are.

    Every other column may be named by `data.by`. Data that need a tokenizer, or do not fit in memory, are given to
    `FederatedDataModule.from_datasets`, which reads items one by one.

    Args:
        data: a folder that `save_to_disk` wrote, with `download` the name of a data set on the Hub, or a DatasetDict.
        input: column that the net reads: images, numbers, or lists of numbers of one length.
        label: column of the target.
        train: name of the training split.
        test: name of the test split; where there is none, there are no test samples.
        validation: name of the validation split, which is evaluated every round; where there is none, or None: no.
        name: of the configuration on the Hub; None: the only one.
        download: fetch the data set from the Hub, into Hugging Face's own cache.
        limit: most samples of each split, drawn by class; None: all.

    Raises:
        ModuleNotFoundError: without the package `datasets`.
        FileNotFoundError: without such a folder.
        ValueError: naming a split or column that is missing.
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
        self.data, self.input, self.label, self.limit = data, input, label, limit
        self.train, self.test, self.validation_name = train, test, validation
        self.name, self.download = name, download
        self.validates = validation is not None

    def prepare(self) -> None:
        if self.download:
            self._splits()

    def load(self) -> tuple[Split, Split | None]:
        splits = self._splits()
        wanted = [self.train, *([self.validation_name] if self.validation_name else [])]
        for name in wanted:
            if name not in splits:
                raise ValueError(f"the data set must have the split {name!r}, it has {', '.join(splits)}")
        names = getattr(splits[self.train].features.get(self.label), "names", None)
        if names:
            self.num_classes, self.class_names = len(names), tuple(names)
        train = self._split(splits[self.train], "train")
        test, self.validation = (
            self._split(splits[name], which) if name is not None and name in splits else None
            for which, name in (("test", self.test), ("val", self.validation_name))
        )
        return train, test

    def _splits(self) -> Mapping[str, Any]:
        """Open the data set."""
        if isinstance(self.data, Mapping):
            return self.data
        try:
            import datasets  # type: ignore[import-not-found,unused-ignore] # noqa: PLC0415 - an extra
        except ModuleNotFoundError:
            raise ModuleNotFoundError("HuggingFace needs datasets: pip install datasets") from None
        if self.download:
            opened: Mapping[str, Any] = datasets.load_dataset(self.data, self.name)
        elif not Path(self.data).expanduser().is_dir():
            raise FileNotFoundError(
                f"data must be a folder that save_to_disk wrote, got {self.data}, which does not exist; set "
                f"`download: true` to fetch {self.data} from the Hub"
            )
        else:
            opened = datasets.load_from_disk(str(Path(self.data).expanduser()))
        if not isinstance(opened, Mapping):
            raise ValueError(f"data must hold splits by name (a DatasetDict), got a {type(opened).__name__}")
        return opened

    def _split(self, dataset: Any, which: str) -> Split:
        """Read a split."""
        for column in (self.input, self.label):
            if column not in dataset.column_names:
                raise ValueError(f"the data set must have the column {column!r}, it has {dataset.column_names}")
        x, y = as_tensor(dataset[self.input][:], self.input), as_tensor(dataset[self.label][:], self.label)
        if self.num_classes is None and which == "train" and not y.is_floating_point() and y.ndim == 1:
            self.num_classes = int(y.max()) + 1
        split = labelled_split(x, y, self.num_classes, Scale() if x.dtype == torch.uint8 else None, which)
        plain = [name for name, kind in dataset.features.items() if type(kind).__name__ in ("Value", "ClassLabel")]
        split.columns = {name: np.asarray(dataset[name][:]) for name in plain}
        return split


def as_tensor(values: list[Any], column: str) -> Tensor:
    """Stack the values of a column: images to (n, C, H, W) uint8, numbers and lists of them as they are.

    Raises:
        ValueError: values of different shapes, or no numbers.
    """
    arrays = [np.asarray(value) for value in values]
    if len({array.shape for array in arrays}) != 1 or arrays[0].dtype.kind not in "iufb":
        raise ValueError(
            f"the values in column {column!r} must be images or numbers of one shape, got "
            f"{', '.join(sorted({f'{a.shape} {a.dtype}' for a in arrays})[:3])}; resize or encode them first"
        )
    x = torch.from_numpy(np.stack(arrays))
    if hasattr(values[0], "getbands"):  # a picture of Pillow's
        return x[:, None] if x.ndim == 3 else x.permute(0, 3, 1, 2)
    return x.float() if x.dtype == torch.float64 else x
