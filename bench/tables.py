"""Tables of the benchmark: csv files, in which rows that are not measured again stay, and lines on the terminal."""

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path

Row = tuple[str, *tuple[float, ...]]
"""Name of what is measured, and its values."""


def print_and_write(path: Path, columns: Sequence[str], rows: Iterable[Row]) -> None:
    """Print and write each row of a table as it is measured.

    Args:
        path: The csv file.
        columns: Names of the columns.
        rows: The rows, told apart by their names.
    """
    headings = "".join(f"{name:>16}" for name in columns[1:])
    print(f"\n{columns[0]:26}{headings}")
    for name, *values in rows:
        shown = "".join(f"{value:16.4f}" for value in values)
        print(f"{name:26}{shown}", flush=True)
        cells = [f"{value:.4f}" for value in values]
        update(path, columns, [[name, *cells]], num_keys=1)


def update(path: Path, columns: Sequence[str], rows: Iterable[list[str]], *, num_keys: int) -> None:
    """Write rows into a csv file. Rows that are not measured now stay as they are.

    Args:
        path: The file. It is made if there is none.
        columns: Names of the columns.
        rows: The rows that are measured now.
        num_keys: Number of the first cells that tell rows apart.
    """
    table: dict[tuple[str, ...], list[str]] = {}
    for row in [*read_rows(path), *rows]:
        table[tuple(row[:num_keys])] = row
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows(table.values())


def read_rows(path: Path) -> list[list[str]]:
    """Read the rows of a csv file without its header, none if there is no file."""
    if not path.is_file():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.reader(file))
    return rows[1:]
