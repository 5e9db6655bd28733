"""Tables of a run with several rows a round. They are read even if a killed process has cut them."""

import csv
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fl_lightning.utils.files import write_table
from fl_lightning.utils.text import of_cell, write_cells


@contextmanager
def reading(path: Path, content: str) -> Iterator[None]:
    """Name a file, and what must be in it, in the error of a block that reads it.

    Args:
        path: The file.
        content: What must be in the file.

    Raises:
        OSError: The file cannot be opened or read.
        ValueError: The block raises any other error.
    """
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        # YAML has errors of its own, and the values that its tags make may raise any.
        raise ValueError(f"{path} must be {content} ({type(error).__name__}); move it away") from None


def read_cells(path: Path) -> dict[str, list[str]]:
    """Read a csv file by column, without lines that were cut.

    Args:
        path: The file.

    Returns:
        The cells of each column, by the name of the column.
    """
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        # The reader gives a row with too many cells None as a key, and one with too few None as a value.
        rows = [row for row in reader if None not in row and None not in row.values()]
        names = reader.fieldnames or ()
        return {of_cell(name): [row[name] for row in rows] for name in names}


class RoundTable:
    """Adds the rows of each round at once to a csv file whose first column is the round.

    Args:
        path: Path of the file, which is made with the first row.
        columns: Names of the columns, the first one `round`.
        grows: Whether a row may have further columns. They stand after the others, in the order in which they came.
    """

    def __init__(self, path: Path, columns: Sequence[str], *, grows: bool = False) -> None:
        self.path = path
        self.columns = tuple(columns)
        self.grows = grows

    def begin(self, first_round: int) -> None:
        """Drop the rows of rounds that are run again, one that was cut, and all of a table with other columns.

        The rows of a table without the last columns stay: an earlier version wrote it. A table that grows keeps all
        rows, and further columns.

        Args:
            first_round: Index of the first round that is run now.

        Raises:
            ValueError: The file is no text in UTF-8, no csv file, or a table of something else than rounds.
        """
        if not self.path.is_file():
            return
        header, rows = self._read()
        if rows and header[:1] != ["round"]:
            raise ValueError(
                f"{self.path} must be a table with a row for each round, got one with the columns {', '.join(header)}; "
                f"move it away"
            )
        if self.grows:
            self.columns += tuple(name for name in header if name not in self.columns)
        kept: list[list[str]] = []
        if self._knows(header):
            for row in rows:
                if len(row) != len(header) or not is_before(row[0], first_round):
                    continue
                values = dict(zip(header, row, strict=True))
                kept.append([values.get(name, "") for name in self.columns])
        write_table(self.path, [self.columns, *kept])

    def _knows(self, header: Sequence[str]) -> bool:
        """Return True if a file with these columns is an earlier form of this table."""
        if self.grows:
            return list(header[:1]) == ["round"]
        return bool(header) and list(header) == list(self.columns[: len(header)])

    def _read(self) -> tuple[list[str], list[list[str]]]:
        """Return the names of the columns and the rows of the file."""
        with (
            reading(self.path, "a table with a row for each round, and cannot be read as one"),
            self.path.open(newline="", encoding="utf-8") as file,
        ):
            lines = [list(map(of_cell, row)) for row in csv.reader(file)]
        if not lines:
            return [], []
        header, *rows = lines
        return header, rows

    def has_round(self, round_idx: int) -> bool:
        """Return True if the file has rows of a round.

        Args:
            round_idx: Index of the round.
        """
        if not self.path.is_file():
            return False
        _, rows = self._read()
        return any(row[:1] == [str(round_idx)] for row in rows)

    def append(self, rows: Iterable[Sequence[Any]]) -> None:
        """Add rows. None leaves a cell empty, and NaN is a value."""
        cells: list[list[Any]] = []
        for row in rows:
            cells.append(["" if value is None else value for value in row])
        if not cells:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", newline="", encoding="utf-8") as file:
            is_new = file.tell() == 0
            if is_new:
                write_cells(file, [self.columns])
            write_cells(file, cells)

    def append_by_name(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Add rows by the names of columns. A name that is new becomes a column, which is empty in earlier rows.

        Args:
            rows: The rows of one round, each with the entry `round`.
        """
        names: dict[str, None] = {}
        for row in rows:
            names |= dict.fromkeys(row)
        new = tuple(name for name in names if name not in self.columns)
        if new and not self.path.is_file():
            self.columns += new
        elif new:
            header, earlier = self._read()
            self.columns = (*header, *new)
            empty = [""] * len(new)
            write_table(self.path, [self.columns, *([*row, *empty] for row in earlier)])
        self.append([row.get(name) for name in self.columns] for row in rows)


def is_before(cell: str, round_idx: int) -> bool:
    """Return True if a cell is the number of an earlier round, False for a later round and for other text.

    >>> is_before("3", 4), is_before("4", 4), is_before("3.", 4)
    (True, False, False)
    """
    try:
        return int(cell) < round_idx
    except ValueError:
        return False
