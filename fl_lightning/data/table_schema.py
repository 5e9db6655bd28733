"""The schema of a table: types, words and scales of columns, and the classes, which its training rows decide."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from numbers import Integral
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import torch
from torch import Tensor

from fl_lightning.data.schema import UNKNOWN_CLASS
from fl_lightning.data.splits import Array
from fl_lightning.data.table_files import (
    Cells,
    TableCells,
    is_blank,
    number_in,
    number_in_text,
    numbers_in,
    row_numbers,
    truth_of,
    word_of,
)
from fl_lightning.utils.files import write_file

Kind = Literal["whole", "number", "text"]
"""Kind of the values by which rows are told apart: int64, float64, or text as it is written."""

Task = Literal["auto", "classification", "regression"]

LARGEST_EXACT = 2**53
"""From here on float64 does not tell whole numbers apart."""

A_CLASS = "a class (a word or whole number)"
"""What a target must hold, for errors."""

NEW = "new"
"""Name of the table of new rows, which are predicted."""

MOST_NUMBERS = 0.9
"""Share of numbers from which a word in a column stands for a missing number."""

WHOLE = re.compile(r"[+-]?[0-9]+")
PADDED = re.compile(r"[+-]?0[0-9]+")
AROUND_NUMBERS = re.compile(r"[\s%‰°$€£¥,.'’()<>≤≥~±_−-]")
FOREIGN_NUMBER = re.compile(
    r"""[+−-]?(?:
        [0-9]+(?:[.,][0-9]+)?                                    # another decimal point, or a sign of its own
        | [0-9]{1,3}(?:[,.'’_\s][0-9]{3})+(?:[.,][0-9]+)?        # groups of thousands
        | [0-9]+(?:[.,][0-9]+)?\s*(?:[%‰$€£¥]|EUR|USD|GBP|CHF|JPY|CNY)
        | (?:[$€£¥]|EUR|USD|GBP|CHF|JPY|CNY)\s*[0-9]+(?:[.,][0-9]+)?
    )""",
    re.VERBOSE,
)
RANGE = re.compile(r"[0-9]\s*[-:/–]\s*[0-9]")
"""A part of a range, date or time."""

WITH_UNIT = re.compile(r"[+-]?[0-9][0-9.,']*\s*[^\W\d_]+")
ERROR = re.compile(r"#[A-Z0-9/]+[!?]")
"""What a workbook writes in place of a number that it could not compute."""

THOUSANDS = re.compile(r"[+-]?[0-9]{1,3}(?:[,.][0-9]{3})+")

NO_CLASSES = ("nan", "<na>", "#n/a", "n/a", "nat")
"""Texts of files, in small letters, that stand for a missing class."""


@dataclass(frozen=True)
class Feature:
    """A column that the net reads.

    Args:
        name: The name of the column.
        words: The words that become one-hot, sorted. None: the column holds numbers.
        mean: The mean of the numbers.
        std: The standard deviation of the numbers, > 0.
    """

    name: str
    words: tuple[str, ...] | None
    mean: float = 0.0
    std: float = 1.0

    @property
    def width(self) -> int:
        """Number of inputs of the net."""
        return 1 if self.words is None else len(self.words)


@dataclass(frozen=True)
class TableSchema:
    """Holds what the training rows decide about all rows.

    Args:
        features: The columns that the net reads, in order.
        kind: The kind of the classes. `number` where numbers are regressed.
        classes: The classes, in the order of their numbers. None: the target is regressed.
        identifiers: The kind of every column, by name, as `data.by` reads it.
    """

    features: tuple[Feature, ...]
    kind: Kind
    classes: tuple[Any, ...] | None
    identifiers: Mapping[str, Kind]

    @classmethod
    def of(cls, *, given: TableCells, training: TableCells, label: str, names: Sequence[str], task: Task) -> Self:
        """Decide the types of columns by all rows that are given, and words, scales and classes by training rows.

        Args:
            given: All rows that are given as training rows.
            training: The rows that are trained on.
            label: The column of the target.
            names: The columns that the net reads.
            task: The task of `TableSource`.

        Raises:
            ValueError: A column has no clear type, or lacks a value.
        """
        kind, classes = decide_target(label, given=given[label], training=training[label], task=task)
        features = tuple(decide_feature(name, given[name], training[name]) for name in names)
        identifiers = {name: kind_of(cells) for name, cells in given.items()}
        return cls(features=features, kind=kind, classes=classes, identifiers=identifiers)

    @property
    def class_names(self) -> tuple[str, ...] | None:
        """Names of the classes. None: the target is regressed."""
        return None if self.classes is None else tuple(str(value) for value in self.classes)

    def inputs(self, table: TableCells, which: str) -> Tensor:
        """Make the inputs of the net, (n, D) float32.

        Args:
            table: The rows.
            which: The name of the table, for errors.

        Raises:
            ValueError: A column of numbers holds something else, or lacks a value.
        """
        num_rows = len(row_numbers(table))
        x = np.empty((num_rows, sum(feature.width for feature in self.features)), np.float32)
        at = 0
        for feature in self.features:
            cells = table[feature.name]
            if feature.words is None:
                x[:, at] = scaled(feature, cells, which)
            else:
                column = words_as(feature.words, cells)
                for place, word in enumerate(feature.words, at):
                    x[:, place] = column == word
            at += feature.width
        return torch.from_numpy(x)

    def targets(self, label: str, cells: Cells, which: str, *, takes_other_classes: bool = False) -> Tensor:
        """Return the classes (n,) int64, or the numbers (n, 1) float32 that are regressed.

        Args:
            label: The column of the target.
            cells: Its values.
            which: The name of the table, for errors.
            takes_other_classes: Whether a class that no training row has becomes -1, the unknown class.

        Raises:
            ValueError: A row has no target, one that the task does not take, or a class that no training row has.
        """
        if self.classes is None:
            return torch.from_numpy(regressed(label, cells, which).astype(np.float32))[:, None]
        numbered = {value: number for number, value in enumerate(self.classes)}
        values = class_values(label, kind=self.kind, cells=cells, which=which)
        outside = sorted({value for value in values if value not in numbered}, key=str)
        if outside and not takes_other_classes:
            remedy = "" if self.kind == "text" else ", or set task: regression where they are no classes"
            place = cells.place(values.index(outside[0]), which)
            raise ValueError(
                f"classes in column {label!r} must stand in training rows, got {outside[0]!r} in {which}; leave such "
                f"rows out, as {place}{remedy}"
            )
        return torch.tensor([numbered.get(value, UNKNOWN_CLASS) for value in values], dtype=torch.int64)

    def columns(self, table: TableCells) -> dict[str, Array]:
        """Return the values (n,) by which rows are divided, of the columns that the training rows have."""
        return {name: identifiers(kind, table[name]) for name, kind in self.identifiers.items() if name in table}

    def write(self, path: str | Path) -> None:
        """Write the schema as a JSON file, which `TableSource(schema_file=path)` reads."""
        write_file(Path(path), json.dumps(asdict(self), ensure_ascii=False, indent=1) + "\n")

    @classmethod
    def from_file(cls, path: str | Path) -> Self:
        """Read what `write` wrote.

        Raises:
            FileNotFoundError: There is no such file.
            ValueError: The file holds no schema.
        """
        path = Path(path).expanduser()
        if not path.is_file():
            raise FileNotFoundError(
                f"schema_file must be a JSON file, got {path}, which does not exist; write it by schema.write"
            )
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            return cls.of_content(content)
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path} must be a schema that schema.write wrote, and is not ({error}); write it again"
            ) from error

    @classmethod
    def of_content(cls, content: Mapping[str, Any]) -> Self:
        """Make a schema of plain values, as `dataclasses.asdict` gives them.

        Raises:
            KeyError: A value is missing.
            TypeError: A value is of another kind.
            ValueError: A number is none.
        """
        features = [
            Feature(
                name=feature["name"],
                words=None if feature["words"] is None else tuple(feature["words"]),
                mean=float(feature["mean"]),
                std=float(feature["std"]),
            )
            for feature in content["features"]
        ]
        return cls(
            features=tuple(features),
            kind=content["kind"],
            classes=None if content["classes"] is None else tuple(content["classes"]),
            identifiers=dict(content["identifiers"]),
        )


# --- columns that the net reads


def decide_feature(name: str, given: Cells, training: Cells) -> Feature:
    """Decide whether a column holds numbers or words, and its scale or its words.

    Raises:
        ValueError: A value is missing, or the column is neither of numbers nor of words.
    """
    if holds_numbers(name, given):
        finite_numbers(name, given, "train")
        values = finite_numbers(name, training, "train")
        return Feature(name=name, words=None, mean=float(values.mean()), std=float(values.std()) or 1.0)
    return Feature(name=name, words=tuple(np.unique(feature_words(training)).tolist()))


def holds_numbers(name: str, cells: Cells, remedy: str = "or ignore the column") -> bool:
    """Tell whether a column holds numbers.

    Args:
        name: The name of the column.
        cells: Its values.
        remedy: What to do with a column that holds words, for errors.

    Raises:
        ValueError: The column holds numbers, and a value that is none and is no word.
    """
    numbers = numbers_in(cells)
    others = [position for position, number in enumerate(numbers) if number is None]
    if not others:
        return True
    known = [number for number in numbers if number is not None and not math.isnan(number)]
    texts = [cells.values[position] for position in others]
    if known:
        odd = odd_cell(texts, known)
    else:
        odd = 0 if cells.decimal is not None and all(is_foreign_number(text) for text in texts) else None
    if odd is None:
        return False
    position = others[odd]
    raise ValueError(
        f"column {name!r} must hold a number in every row, got {cells.values[position]!r} in "
        f"{cells.place(position, 'train')} and {len(known)} numbers; "
        f"{remedy_of_number(cells.values[position], cells.decimal)}, {remedy}{remedy_of_words(name, cells)}"
    )


def remedy_of_words(name: str, cells: Cells) -> str:
    """Return how words are made of a column of a file that holds numbers, too."""
    if not cells.path:
        return f", or for words write frame[{name!r}].astype(str)"
    return f", or for words give pandas.read_csv(..., dtype={{{name!r}: str}}) in place of the file"


def odd_cell(others: Sequence[Any], known: Sequence[float]) -> int | None:
    """Return the position of a value that is no number in a column of numbers. None: the column holds words.

    A code such as `V27` makes words of a column. A value such as `-`, `1,234.5` or `45%` is no word. Another word is
    none where the numbers have decimals, or are nearly all of the values. A range, date or time is none where the
    numbers are nearly all of the values.

    Args:
        others: The values that are no numbers.
        known: The numbers.

    >>> odd_cell(["-"], [1.0, 2.0]), odd_cell(["V27"], [250.5, 8.0]), odd_cell(["x"], [1.0]), odd_cell(["x"], [1.5])
    (0, None, None, 0)
    """
    texts = [str(value).strip() for value in others]
    share = len(known) / (len(known) + len(others))
    codes = [text for text in texts if is_code(text)]
    if share >= MOST_NUMBERS:
        codes = [text for text in codes if not RANGE.search(text)]
    if codes:
        return None
    vague = [text for text in texts if any(letter.isalpha() for letter in text) and not ERROR.fullmatch(text)]
    measured = share >= MOST_NUMBERS or any(not number.is_integer() for number in known)
    return None if vague and not measured else 0


def is_foreign_number(text: str) -> bool:
    """Tell whether a text of a file is a number in another notation, and can be nothing else.

    >>> [is_foreign_number(text) for text in ("1,5", "1,234.5", "45 %", "$3.50", "12.05.2024", "1-3", "7,a")]
    [True, True, True, True, False, False, False]
    """
    return FOREIGN_NUMBER.fullmatch(text.strip()) is not None


def is_code(text: str) -> bool:
    """Tell whether a text is a code, a range or a date: it has digits, and is no number in another notation.

    >>> is_code("V27"), is_code("2024-01-05"), is_code("45%"), is_code("1,234.5"), is_code("12 kg"), is_code("low")
    (True, True, False, False, False, False)
    """
    if not any(letter.isdigit() for letter in text) or WITH_UNIT.fullmatch(text) or ERROR.fullmatch(text):
        return False
    if RANGE.search(text):
        return True
    return not AROUND_NUMBERS.sub("", text).isdigit()


def remedy_of_number(cell: Any, decimal: str | None) -> str:
    """Return what to do about a value that is no number in a column of numbers."""
    if not isinstance(cell, str) or decimal is None:
        return "write the number alone"
    text = cell.strip()
    other = "." if decimal == "," else ","
    if number_in_text(text, other) is None:
        return "write the number alone"
    if THOUSANDS.fullmatch(text):
        return f"write {text.replace(other, '')} for thousands, or set decimal: {other!r} for decimals"
    return f"set decimal: {other!r}"


def finite_numbers(name: str, cells: Cells, which: str) -> Array:
    """Return the numbers of a column, (n,) float64.

    Raises:
        ValueError: A number is missing or not finite, or a value is no number.
    """
    numbers = numbers_in(cells)
    for position, number in enumerate(numbers):
        if number is None or not math.isfinite(number):
            cell = cells.values[position]
            missing = number is not None
            remedy = "fill in what is missing" if missing else remedy_of_number(cell, cells.decimal)
            other = "leave out the row" if which == NEW else "ignore it"
            raise ValueError(
                f"column {name!r} must hold a number in every row, got {plain(cell)!r} in "
                f"{cells.place(position, which)}; {remedy}, or {other}"
            )
    return np.array(numbers, np.float64)


def scaled(feature: Feature, cells: Cells, which: str) -> Array:
    """Return the numbers of a column as training rows have decided their scale, (n,) float32.

    Raises:
        ValueError: A number is missing, a value is no number, or a number is too large for float32.
    """
    numbers = (finite_numbers(feature.name, cells, which) - feature.mean) / feature.std
    too_large = np.abs(numbers) > np.finfo(np.float32).max
    if too_large.any():
        position = int(too_large.argmax())
        remedy = "leave out the row" if which == NEW else "leave out the row, or ignore the column"
        raise ValueError(
            f"column {feature.name!r} must hold numbers that the net can read, got {plain(cells.values[position])!r} "
            f"in {cells.place(position, which)}; {remedy}"
        )
    return numbers.astype(np.float32)


def words_in(cells: Cells) -> Array:
    """Return the words of a column, (n,) text."""
    return np.array([word_of(cell) for cell in cells.values], dtype=np.str_)


def feature_words(cells: Cells) -> Array:
    """Return the words of a column that the net reads, (n,) text, truth values in one spelling."""
    words = words_in(cells)
    spellings = {word: truth_of(word) for word in np.unique(words).tolist()}
    if any(truth is None for truth in spellings.values()):
        return words
    return np.array([spellings[word] for word in words.tolist()], dtype=np.str_)


def words_as(known: Sequence[str], cells: Cells) -> Array:
    """Return the words of a column, (n,) text, as training rows have decided how truth values are spelled.

    >>> words_as(("False", "True"), Cells(["TRUE", "?"], ".", np.arange(2))).tolist()
    ['True', '?']
    >>> words_as(("true", "yes"), Cells(["true"], ".", np.arange(1))).tolist()
    ['true']
    """
    words = words_in(cells)
    if any(truth_of(word) != word for word in known):
        return words
    return np.array([truth_of(word) or word for word in words.tolist()], dtype=np.str_)


def unknown_words(feature: Feature, cells: Cells) -> list[str]:
    """Return the words of a column that no training row has, one for each row that holds one.

    Args:
        feature: The column, of numbers or of words.
        cells: Its values.
    """
    if feature.words is None:
        return []
    known = set(feature.words)
    return [word for word in words_as(feature.words, cells).tolist() if word not in known]


# --- identifiers: of owners, of classes


def kind_of(cells: Cells) -> Kind:
    """Choose a kind of values under which different cells stay different.

    >>> rows = np.arange(2)
    >>> kind_of(Cells(["1", "2"], ".", rows)), kind_of(Cells(["1", "2.5"], ".", rows))
    ('whole', 'number')
    >>> kind_of(Cells(["007", "7"], ".", rows)), kind_of(Cells(["1" * 20, "2"], ".", rows))
    ('text', 'text')
    """
    values = cells.values
    if isinstance(values, np.ndarray):
        return "number" if values.dtype.kind == "f" else "whole"
    if all_whole(cells):
        return "whole"
    texts = {value.strip() if isinstance(value, str) else value for value in values if not is_unknown(value)}
    numbers = [number_in(text, cells.decimal) for text in texts]
    exact = all(number is not None and abs(number) < LARGEST_EXACT for number in numbers)
    apart = len(set(numbers)) == len(numbers)
    padded = any(isinstance(text, str) and PADDED.fullmatch(text) for text in texts)
    return "number" if exact and apart and not padded else "text"


def all_whole(cells: Cells) -> bool:
    """Tell whether all cells are whole numbers of 64 bits, and texts of a file are written as Python writes these."""
    return all(whole_in(value, cells.decimal) is not None for value in cells.values)


def whole_in(cell: Any, decimal: str | None) -> int | None:
    """Return the whole number in a cell. None: there is none, or a text writes it in another way, as in `007`."""
    if isinstance(cell, str):
        text = cell.strip()
        if decimal is None or len(text) > 20 or not WHOLE.fullmatch(text) or str(int(text)) != text:
            return None
        number = int(text)
    elif isinstance(cell, Integral | np.bool_) or is_whole_float(cell):
        number = int(cell)
    else:
        return None
    return number if -(2**63) <= number < 2**63 else None


def is_whole_float(cell: Any) -> bool:
    """Tell whether a value is a float without decimals."""
    return isinstance(cell, float | np.floating) and float(cell).is_integer()


def is_unknown(cell: Any) -> bool:
    """Tell whether a cell holds no value."""
    number = number_in(cell, ".")
    return number is not None and math.isnan(number)


def identifiers(kind: Kind, cells: Cells) -> Array:
    """Return the values of a column, (n,), by a kind that training rows decided.

    A cell that is not of the kind stays text in an array of objects: it equals no value of a training row.

    >>> identifiers("whole", Cells(["7", "007"], ".", np.arange(2))).tolist()
    [7, '007']
    """
    values = cells.values
    if kind == "text":
        return words_in(cells)
    if isinstance(values, np.ndarray) and values.dtype.kind == ("f" if kind == "number" else "i"):
        return values
    read = whole_in if kind == "whole" else number_in
    found = [read(value, cells.decimal) for value in values]
    if all(value is not None for value in found):
        return np.array(found, np.int64 if kind == "whole" else np.float64)
    mixed = [word_of(cell) if value is None else value for cell, value in zip(values, found, strict=True)]
    return np.array(mixed, dtype=object)


# --- the target


def decide_target(label: str, *, given: Cells, training: Cells, task: Task) -> tuple[Kind, tuple[Any, ...] | None]:
    """Decide the kind of the target, and its classes, None where it is regressed.

    Raises:
        ValueError: A row has no target, or one that the task does not take.
    """
    measured = is_measured(given)
    if task == "regression" or (task == "auto" and measured):
        regressed(label, given, "train")
        return "number", None
    if task == "auto":
        holds_numbers(label, given, "or set task: classification where these are classes")
    kind = "number" if measured else kind_of(given)
    class_values(label, kind=kind, cells=given, which="train")
    values = class_values(label, kind=kind, cells=training, which="train")
    classes = tuple(sorted(set(values)))
    check_spelling(label, classes)
    return kind, classes


def check_spelling(label: str, classes: Sequence[Any]) -> None:
    """Refuse a truth value that is written in two ways, which would be two classes.

    Raises:
        ValueError: Names both spellings.
    """
    spellings: dict[str, str] = {}
    for value in classes:
        truth = truth_of(value) if isinstance(value, str) else None
        if truth is not None:
            other = spellings.setdefault(truth, value)
            if other != value:
                raise ValueError(
                    f"column {label!r} must write a class in one way, got {other!r} and {value!r} in train; write "
                    f"{truth!r} for both"
                )


def is_measured(cells: Cells) -> bool:
    """Tell whether a column holds numbers, not all of which are written as whole ones."""
    values = cells.values
    if isinstance(values, np.ndarray):
        return bool(values.dtype.kind == "f")
    if any(number is None for number in numbers_in(cells)):
        return False
    return not all(isinstance(value, Integral | np.bool_) or is_whole_text(value) for value in values)


def is_whole_text(cell: Any) -> bool:
    """Tell whether a cell is a whole number that is written as text, perhaps with zeros in front."""
    return isinstance(cell, str) and WHOLE.fullmatch(cell.strip()) is not None


def regressed(label: str, cells: Cells, which: str) -> Array:
    """Return the numbers of the target, (n,) float64.

    Raises:
        ValueError: A row has no finite number.
    """
    numbers = numbers_in(cells)
    for position, (cell, number) in enumerate(zip(cells.values, numbers, strict=True)):
        if number is None or not math.isfinite(number):
            words = number is None and not is_blank(cell)
            value = cell if number is None else number
            task = "classification" if words else ""
            place = cells.place(position, which)
            raise ValueError(unfit(label, wanted="a finite number", value=value, which=which, place=place, task=task))
    return np.array(numbers, np.float64)


def class_values(label: str, *, kind: Kind, cells: Cells, which: str) -> list[Any]:
    """Return the class of every row, a whole number or a word.

    Raises:
        ValueError: A row has no class.
    """
    values: list[Any] = []
    for position, value in enumerate(identifiers(kind, cells).tolist()):
        place = cells.place(position, which)
        if is_no_class(value):
            raise ValueError(unfit(label, wanted=A_CLASS, value=value, which=which, place=place))
        if isinstance(value, float) and not value.is_integer():
            task = "regression" if math.isfinite(value) else ""
            raise ValueError(unfit(label, wanted=A_CLASS, value=value, which=which, place=place, task=task))
        values.append(int(value) if isinstance(value, float) else value)
    return values


def is_no_class(value: Any) -> bool:
    """Tell whether a value of the target stands for a missing one. `none` and `NA` may be classes."""
    return is_blank(value) or (isinstance(value, str) and value.strip().lower() in NO_CLASSES)


def unfit(label: str, *, wanted: str, value: Any, which: str, place: str, task: str = "") -> str:
    """Return the sentence for a target that the task does not take.

    Args:
        label: The column of the target.
        wanted: What it must hold.
        value: What it holds.
        which: The name of the table.
        place: The row, with the name of its file.
        task: The task that takes the value. Empty: none does.
    """
    if task:
        remedy = f"set task: {task}, or leave out {place}"
    else:
        remedy = f"fill in what is missing, or leave out {place}"
    return f"column {label!r} must hold {wanted} in every row, got {plain(value)!r} in {which}; {remedy}"


def plain(value: Any) -> Any:
    """Return a value as a plain one of Python."""
    if isinstance(value, np.generic):
        return value.item()
    return value if isinstance(value, str | int | float) else word_of(value)
