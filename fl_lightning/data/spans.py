"""Spans of rounds in a csv file: who or what is there from the first to the last round."""

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from fl_lightning.utils.settings import described


class Line(NamedTuple):
    """A line of a file of spans.

    Attributes:
        number: Number of what is there, >= 0: a client or a sample.
        first: The first round, from 0.
        last: The last round, included. None: to the end.
    """

    number: int
    first: int
    last: int | None


def read_spans(path: Path, *, setting: str, column: str) -> list[Line]:
    """Read the lines of a csv file with the columns `first`, `last` and that of what is there.

    Args:
        path: The file.
        setting: The setting that names it, for errors.
        column: The column of what is there, such as `client`.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file is no text in UTF-8, a column or all lines are missing, or a line has something else. The
            sentence names the line.
    """
    if not path.is_file():
        reason = "which is no file" if path.exists() else "which does not exist"
        raise FileNotFoundError(
            f"{setting} must be a csv file with the columns {column}, first and last, got {path}, {reason}"
        )
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            lines = _lines_of(csv.DictReader(file, skipinitialspace=True), path=path, setting=setting, column=column)
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{setting} must be a csv file in UTF-8, got byte 0x{error.object[error.start]:02x} in {path}; save it as "
            f"UTF-8"
        ) from None
    except csv.Error as error:
        raise ValueError(f"{setting} must be a csv file, and {path} cannot be read as one ({error}); mend it") from None
    if not lines:
        raise ValueError(f"{setting} must name a {column}, and {path} has no line below its columns; add some")
    return lines


def _lines_of(reader: "csv.DictReader[str]", *, path: Path, setting: str, column: str) -> list[Line]:
    """Read the lines of an open file, with the arguments of `read_spans`.

    Raises:
        ValueError: A column is missing, or a line has something else.
    """
    columns = (column, "first", "last")
    reader.fieldnames = [name.strip() for name in reader.fieldnames or ()]
    missing = [name for name in columns if name not in reader.fieldnames]
    if missing:
        raise ValueError(
            f"{setting} must have the columns {column}, first and last, and {path} has no "
            f"{' and no '.join(missing)}; add it"
        )
    lines: list[Line] = []
    for row in reader:
        place = f"line {reader.line_num} of {path}"
        line = _line_of(row, columns, setting=setting, place=place)
        check_span(line.first, line.last, setting=setting, place=place)
        lines.append(line)
    return lines


def _line_of(row: Mapping[str, str | None], columns: tuple[str, str, str], *, setting: str, place: str) -> Line:
    """Return the numbers of a line.

    Args:
        row: The texts by column.
        columns: The columns of what is there, its first and its last round.
        setting: The setting that names the file, for the error.
        place: The line, for the error.

    Raises:
        ValueError: A text is no whole number, or what is there has a number below 0.
    """
    texts = [row[name] for name in columns]
    found = [text for text in row.values() if text is not None]
    # A DictReader gives None for a missing cell, and puts further cells under the key None.
    if None in texts or None in row:
        raise ValueError(
            f"a line of {setting} must have as many cells as the file has columns, and {place} has {found}; end it "
            f"with a comma where the last round is left out"
        )
    try:
        number, first, last = (str(text).strip() for text in texts)
        line = Line(number=int(number), first=int(first), last=int(last) if last else None)
    except ValueError:
        raise ValueError(
            f"a line of {setting} must have whole numbers, or an empty last round for one that stays, and {place} has "
            f"{found}; mend it"
        ) from None
    if line.number < 0:
        raise ValueError(
            f"a line of {setting} must have a {columns[0]} of at least 0, and {place} has {line.number}; mend it"
        )
    return line


def check_span(first: int, last: int | None, *, setting: str, place: str) -> None:
    """Refuse a span that no run has.

    Args:
        first: The first round.
        last: The last round. None: to the end.
        setting: The setting, for the errors.
        place: The client or line that has it, for the errors.

    Raises:
        TypeError: A round is no whole number.
        ValueError: A round is below 0, or the last one comes before the first.
    """
    rounds = [first] if last is None else [first, last]
    for value in rounds:
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{setting} must give rounds, from 0, got {described(value)} for {place}; give such as 10")
    if first < 0 or (last is not None and last < first):
        raise ValueError(
            f"{setting} must give rounds of at least 0, the first not after the last, got {[first, last]} for {place}; "
            f"mend it"
        )
