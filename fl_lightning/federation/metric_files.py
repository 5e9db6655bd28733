"""Files of metric values that are no numbers, such as a confusion matrix or a curve: one for each metric and round."""

from collections.abc import Iterator, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from pytorch_lightning import Trainer

from fl_lightning.utils.files import write_file
from fl_lightning.utils.plain import plain_value
from fl_lightning.utils.run_folder import run_folder
from fl_lightning.utils.text import slug

FOLDER = "metrics"
"""Folder of the files below that of the run."""

VALUE = "value"
"""Beginning of the names of the arrays in a file."""


class MetricFiles:
    """Writes `metrics/NAME-ROUND.npz` in the folder of a run."""

    def __init__(self) -> None:
        self._folder: Path | None = None

    def begin_fit(self, trainer: Trainer) -> None:
        """Find the folder of the run, and delete the files of rounds that are run again. Every process must call it.

        Args:
            trainer: The Trainer of the run.
        """
        folder = run_folder(trainer)
        self._folder = folder / FOLDER if folder is not None and trainer.is_global_zero else None
        if self._folder is None:
            return
        for path in self._folder.glob("*.npz"):
            _, round_idx = name_and_round(path)
            if round_idx is not None and round_idx >= trainer.current_epoch and is_own(path):
                path.unlink()

    def write(self, round_idx: int, values: Mapping[str, Any]) -> None:
        """Write the values of a round.

        Args:
            round_idx: Index of the round.
            values: The values by the names of the metrics: tensors, and lists and tuples of tensors.
        """
        if self._folder is None:
            return
        for name, value in values.items():
            self._folder.mkdir(parents=True, exist_ok=True)
            write_arrays(self._folder / f"{stem_of(name, round_idx)}.npz", value)


def stem_of(name: str, round_idx: int) -> str:
    """Return the name, without its ending, of a file about a metric's value after a round.

    Args:
        name: The name of the metric.
        round_idx: Index of the round.
    """
    return f"{slug(name)}-{round_idx}"


def name_and_round(path: Path) -> tuple[str, int | None]:
    """Return the name of a metric and the index of the round that a file is about. None is a file of no round.

    >>> name_and_round(Path("roc-12.npz")), name_and_round(Path("roc.png"))
    (('roc', 12), ('roc', None))
    """
    name, _, number = path.stem.rpartition("-")
    return (name, int(number)) if number.isdigit() else (path.stem, None)


def write_arrays(path: Path, value: Any) -> None:
    """Write the arrays of a value.

    Args:
        path: The file, which ends with .npz, in a folder that exists.
        value: A tensor, or a list or tuple of tensors or of such.
    """
    file = BytesIO()
    np.savez_compressed(file, **dict(arrays_in(value)))
    write_file(path, file.getvalue())


def is_own(path: Path) -> bool:
    """Return True for a file that `MetricFiles` has written, by the names of its arrays."""
    try:
        with np.load(path) as file:
            names = file.files
    except (OSError, ValueError, BadZipFile):
        return False
    return bool(names) and all(name.partition("_")[0] == VALUE for name in names)


def arrays_in(value: Any, name: str = VALUE) -> Iterator[tuple[str, Any]]:
    """Yield the arrays of a value, each with its name in the file.

    >>> [name for name, _ in arrays_in(np.zeros((2, 2)))]
    ['value']
    >>> [name for name, _ in arrays_in((np.zeros(2), [np.zeros(1)]))]
    ['value_0', 'value_1_0']

    Args:
        value: A tensor, or a list or tuple of tensors or of such.
        name: The name of the value.
    """
    if isinstance(value, list | tuple):
        for index, part in enumerate(value):
            yield from arrays_in(part, f"{name}_{index}")
    else:
        yield name, np.asarray(plain_value(value))
