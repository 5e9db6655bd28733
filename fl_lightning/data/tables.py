"""Tables: CSV files and pandas' DataFrames, a column of which may name the owners of the rows."""

import csv
import math
from collections.abc import Mapping, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from fl_lightning.data.images import error_line
from fl_lightning.data.sources import Source
from fl_lightning.data.splits import Array, Split, TensorSplit
from fl_lightning.utils.keyed import keyed_numpy
from fl_lightning.utils.settings import check_choice, check_inside

TableColumns = Mapping[str, Array]
"""Columns (n,) by name."""

Task = Literal["auto", "classification", "regression"]

MISSING = ("None", "nan", "NaT", "<NA>")
"""Texts that missing values of a DataFrame are printed as."""

LARGEST_ONE_HOT = 1 << 32
"""Most bytes that a column of words may take one-hot."""

UNKNOWN = ("", "?", "na", "n/a", "nan", "null", "none")
"""Texts, in small letters, that stand for a missing number in a file."""


class TableSource(Source):
    """Rows of a table: numbers standardised by the training rows, words one-hot, and a column as target.

    Classes are numbered in sorted order, and numbers to be regressed are (n, 1). Every column may be named by
    `data.by`. Dates are words, and so are the values of a DataFrame's categorical columns.

    Args:
        train: a CSV file with a header, a Parquet file (read by pandas), or a pandas DataFrame.
        label: column of the target.
        test: the same of the test rows; None: a share of `train`.
        features: columns that the net reads; None: all but the target and the `ignored`.
        ignored: columns that the net does not read, such as that of the owners.
        test_share: of the rows that become the test split where there is no `test`, in (0, 1), drawn by a seed of 0.
        limit: most samples of each split, drawn by class; None: all.
        task: `classification` into the words or whole numbers of the target; `regression` of its numbers, whole ones
            too; `auto`: a target with decimals is regressed, words and whole numbers are classes.

    Raises:
        FileNotFoundError: without such a file.
        ValueError: naming the column, its rule and the value.
    """

    def __init__(
        self,
        train: Any,
        label: str,
        test: Any = None,
        features: Sequence[str] | None = None,
        ignored: Sequence[str] = (),
        test_share: float = 0.2,
        limit: int | None = None,
        task: Task = "auto",
    ) -> None:
        check_inside(0, 1, test_share=test_share)
        check_choice(get_args(Task), task=task)
        self.train = train
        self.label = label
        self.test = test
        self.features = features
        self.ignored = tuple(ignored)
        self.test_share = test_share
        self.limit = limit
        self.task = task

    def load(self) -> tuple[Split, Split]:
        train: TableColumns = read_table(self.train, "train")
        test: TableColumns
        if self.test is None:
            n = len(next(iter(train.values())))
            order = keyed_numpy(0, "test rows").permutation(n)
            rows, held = (np.sort(part) for part in np.split(order, [n - round(self.test_share * n)]))
            test = {name: column[held] for name, column in train.items()}
            train = {name: column[rows] for name, column in train.items()}
        else:
            test = read_table(self.test, "test")
        names = [name for name in train if name != self.label and name not in self.ignored]
        names = names if self.features is None else list(self.features)
        if self.label in names:
            raise ValueError(f"features must not hold the target, got {self.label!r}; leave it out")
        words = {name for name, column in train.items() if column.dtype.kind == "U"}
        test = {name: column.astype(str) if name in words else column for name, column in test.items()}
        for name in (*names, *self.ignored, self.label):
            if missing := [which for which, table in (("train", train), ("test", test)) if name not in table]:
                raise ValueError(f"the {missing[0]} table must have the column {name!r}, it has {', '.join(train)}")
        y, y_test = self._targets(train[self.label], test[self.label])
        training, testing = (
            TensorSplit(torch.from_numpy(x), target, columns=table)
            for x, target, table in zip(numbers(train, test, names), (y, y_test), (train, test), strict=True)
        )
        return training, testing

    def _targets(self, train: Array, test: Array) -> tuple[Tensor, Tensor]:
        """Number the classes, or keep numbers that are to be regressed.

        Raises:
            ValueError: a row without a target, one that the task does not take, or a class that no training row has.
        """
        regressed = self.task == "regression" or (self.task == "auto" and "f" in (train.dtype.kind, test.dtype.kind))
        wanted = "a finite number" if regressed else "a class (a word or whole number)"
        other = "classification" if regressed else "regression"
        for which, column in (("train", train), ("test", test)):
            if lacking := [value for value in column.tolist() if not is_target(value, regressed)]:
                holds = is_target(lacking[0], not regressed)
                remedy = f"set task: {other}" if holds else "fill in what is missing, or leave the row out"
                raise ValueError(
                    f"column {self.label!r} must hold {wanted} in every row, got {lacking[0]!r} in {which}; {remedy}"
                )
        if regressed:
            y, y_test = (torch.from_numpy(column.astype(np.float32))[:, None] for column in (train, test))
            return y, y_test
        train, test = (column.astype(np.int64) if column.dtype.kind == "f" else column for column in (train, test))
        if test.dtype.kind == "U":
            train = train.astype(str)
        values = np.unique(train)
        if outside := sorted({*test.tolist()} - {*values.tolist()}, key=str):
            remedy = "" if train.dtype.kind == "U" else ", or set task: regression where they are no classes"
            raise ValueError(
                f"classes in column {self.label!r} must stand in training rows, got {outside[0]!r} in test; leave such "
                f"rows out{remedy}"
            )
        self.num_classes = len(values)
        self.class_names = tuple(map(str, values))
        y, y_test = (torch.from_numpy(np.searchsorted(values, column)) for column in (train, test))
        return y, y_test


def read_table(given: Any, which: str) -> TableColumns:
    """Read a CSV or Parquet file, or take the columns of a DataFrame.

    Raises:
        FileNotFoundError: without such a file.
        ModuleNotFoundError: a Parquet file without pandas.
        ValueError: a table without rows, a row with another number of values than the header, two columns of one name,
            or a file that is not UTF-8.
        TypeError: neither of both.
    """
    if hasattr(given, "columns") and hasattr(given, "to_numpy"):
        return columns_of(given, f"the {which} table")
    if not isinstance(given, str | Path):
        raise TypeError(f"{which} must be a CSV file or a pandas DataFrame, got {type(given).__name__}")
    path = Path(given).expanduser()
    if not path.is_file():
        raise FileNotFoundError(
            f"{which} must be a CSV file, got {given}, which does not exist; mend data.source.{which}"
        )
    if path.suffix == ".parquet":
        return columns_of(read_parquet(path), str(path))
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            header, *rows = [row for row in csv.reader(file) if row] or [[]]
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} must be text in UTF-8, which byte {error.start} is not: save it as UTF-8") from error
    check_names(header, str(path))
    for number, row in enumerate(rows, 2):
        if len(row) != len(header):
            raise ValueError(f"row {number} of {path} must have {len(header)} values as the header, got {len(row)}")
    if not rows:
        raise ValueError(f"{path} must have a header and rows, got {len(header)} columns and no row")
    return {name: typed(column) for name, column in zip(header, zip(*rows, strict=True), strict=True)}


def read_parquet(path: Path) -> Any:
    """Read a Parquet file as a DataFrame.

    Raises:
        ModuleNotFoundError: without pandas and a package by which it reads the format.
        ValueError: a file of another format.
    """
    try:
        import pandas  # type: ignore[import-untyped,import-not-found,unused-ignore] # noqa: PLC0415 - not required

        return pandas.read_parquet(path)
    except ImportError:
        raise ModuleNotFoundError("Parquet files need pandas and pyarrow: pip install pandas pyarrow") from None
    except Exception as error:  # pyarrow raises all kinds
        raise ValueError(f"{path} could not be read ({error_line(error)}): write it again") from error


def columns_of(frame: Any, table: str) -> TableColumns:
    """Take the columns of a DataFrame, those of categories as words.

    Args:
        frame: of pandas, or another with `columns`.
        table: its name, for the error.

    Raises:
        ValueError: no row, or two columns of one name.
    """
    check_names([*map(str, frame.columns)], table)
    if not len(frame):
        raise ValueError(f"{table} must have rows, got {len(frame.columns)} columns and no row")
    return {str(name): column_of(frame[name]) for name in frame.columns}


def column_of(series: Any) -> Array:
    """Make a column of one of a DataFrame: numbers as they stand, categories as words, other values by `typed`."""
    dtype = series.dtype
    if str(dtype) == "category":
        return words([*series])
    if isinstance(dtype, np.dtype) and dtype.kind in "bif":
        return np.asarray(series, np.float64 if dtype.kind == "f" else np.int64)
    return typed([*series])


def words(values: Sequence[Any]) -> Array:
    """Make a column of words of any values, blank where they are missing."""
    return np.array(["" if str(value) in MISSING else str(value) for value in values])


def check_names(names: Sequence[str], table: str) -> None:
    """Refuse two columns of one name.

    Raises:
        ValueError: naming it.
    """
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"{table} must name each of its columns once, got {twice[0]!r} twice; rename one of them")


def typed(values: Sequence[Any]) -> Array:
    """Make a column of whole numbers, else of numbers, where blank or `UNKNOWN` ones are NaN, else of words.

    >>> typed(["1", "2"]).dtype.kind, typed(["1", "2.5"]).dtype.kind, typed(["1", "x"]).dtype.kind
    ('i', 'f', 'U')
    >>> typed(["1", "", "2"]).tolist(), typed(["x", None]).tolist()
    ([1.0, nan, 2.0], ['x', ''])
    >>> typed(["1", "NA"]).tolist(), typed(["x", "NA"]).tolist(), typed(["1_0", "10"]).tolist()
    ([1.0, nan], ['x', 'NA'], ['1_0', '10'])
    """
    values = ["" if not isinstance(value, str) and str(value) in MISSING else value for value in values]
    texts = [value for value in values if isinstance(value, str)]
    if not any("_" in text for text in texts):  # which Python takes for a separator of digits, and files do not
        if all(isinstance(value, str | Integral | np.bool_) for value in values):
            try:
                return np.array([int(value) for value in values], np.int64)
            except (ValueError, OverflowError):
                pass
        try:
            return np.array([math.nan if is_unknown(value) else float(value) for value in values], np.float64)
        except (ValueError, TypeError):
            pass
    return np.array([str(value) for value in values])


def is_unknown(value: Any) -> bool:
    """Tell whether a cell says that its number is missing."""
    return isinstance(value, str) and value.strip().lower() in UNKNOWN


def is_blank(value: Any) -> bool:
    """Tell whether a cell is empty."""
    return isinstance(value, str) and not value.strip()


def is_target(value: Any, regressed: bool) -> bool:
    """Tell whether a cell can be a target: a finite number to be regressed, else a word or a whole number.

    >>> is_target(0.5, True), is_target("low", True), is_target(0.5, False), is_target("low", False)
    (True, False, False, True)
    """
    if isinstance(value, str) and not regressed:
        return not is_blank(value)
    try:
        return math.isfinite(float(value)) and (regressed or value == int(value))
    except ValueError:
        return False


def numbers(train: TableColumns, test: TableColumns, names: Sequence[str]) -> tuple[Array, Array]:
    """Make the net's inputs, (n, D) float32, of columns of both tables.

    Raises:
        ValueError: no column, a number that is missing, a word in a column of numbers, or more words than fit.
    """
    made: list[tuple[Array, Array]] = []
    for name in names:
        column = train[name]
        other = test[name]
        if column.dtype.kind == "U":
            values = np.unique(column)
            rows = len(column) + len(other)
            if (size := 4 * len(values) * rows) > LARGEST_ONE_HOT:
                raise ValueError(
                    f"column {name!r} must hold fewer different words, got {len(values):,} in {rows:,} rows, which "
                    f"take {size / 1e9:,.0f} GB one-hot; ignore it, or make numbers of it"
                )
            made += [(column == value, other == value) for value in values]
            continue
        if other.dtype.kind == "U" or not (np.isfinite(column).all() and np.isfinite(other).all()):
            raise ValueError(f"column {name!r} must hold a number in every row; fill in what is missing, or ignore it")
        mean = column.mean()
        std = column.std() or 1.0
        made.append(((column - mean) / std, (other - mean) / std))
    if not made:
        raise ValueError("a table must have a column that the net reads; name it in features")
    train_x, test_x = (np.stack(columns, 1).astype(np.float32) for columns in zip(*made, strict=True))
    return train_x, test_x
