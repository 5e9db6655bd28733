"""Tables of a run are read back, though a killed process may have cut their last lines."""

import csv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fl_lightning.utils.text import of_cell


@contextmanager
def reading(path: Path, content: str) -> Iterator[None]:
    """Name the file, and what must be in it, where it cannot be read within the block.

    Raises:
        ValueError: in place of any error but the operating system's.
    """
    try:
        yield
    except OSError:
        raise
    except Exception as error:  # YAML's own, and those of the values that its tags make
        raise ValueError(f"{path} must be {content} ({type(error).__name__}); move it away") from None


def read_cells(path: Path) -> dict[str, list[str]]:
    """Read a csv file by column, without lines that were cut."""
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        rows = [row for row in reader if None not in row and None not in row.values()]
        return {of_cell(name): [row[name] for row in rows] for name in reader.fieldnames or ()}
