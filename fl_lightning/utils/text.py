r"""Text that others chose, such as names of files, classes and metrics, made safe for a terminal, a page or a table."""

import csv
import re
from collections.abc import Iterable
from typing import Any, TextIO

UNSEEN = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff\u2028\u2029\u202a-\u202e\u2066-\u2069]")
"""Letters that move a terminal's cursor, turn the direction of what follows, or that UTF-8 cannot write."""

LONGEST = 200
"""Characters of a text that are drawn."""

FORMULA = re.compile(r"'*[=+\-@\t\r\n＝＋－＠]")
"""Beginning of a cell that a spreadsheet would run, after any number of the marks that keep it from that."""


def printable(text: object, keep: str = "") -> str:
    r"""Escape characters that a terminal or a page must not get, such as `\x1b`.

    Args:
        text: Any value, as `str` gives it.
        keep: Letters that stay.

    >>> print(printable("a\x1b[2J\n"), printable("two\nlines", keep="\n"))
    a\x1b[2J\n two
    lines
    """

    def escaped(found: re.Match[str]) -> str:
        letter = found[0]
        return letter if letter in keep else letter.encode("unicode_escape").decode()

    return UNSEEN.sub(escaped, str(text))


def drawable(text: str) -> str:
    """Make a text drawable: without invisible characters, and not too long."""
    seen = printable(text, keep="\n")
    return seen if len(seen) <= LONGEST else f"{seen[: LONGEST - 1]}…"


def as_cell(text: str) -> str:
    """Put a `'` before a name that a spreadsheet would run as a formula, but not before numbers and other names.

    >>> [as_cell(text) for text in ("=1+1", "'=1", "-1.5", "loss")]
    ["'=1+1", "''=1", '-1.5', 'loss']
    """
    return f"'{text}" if FORMULA.match(text) and not is_number(text) else text


def write_cells(file: TextIO, rows: Iterable[Iterable[Any]]) -> None:
    """Write rows of a csv file, with marks before names that a spreadsheet would run.

    Args:
        file: The file.
        rows: The rows of cells.
    """
    for row in rows:
        cells = [as_cell(cell) if isinstance(cell, str) else cell for cell in row]
        # csv does not quote a carriage return by itself.
        has_return = any(isinstance(cell, str) and "\r" in cell for cell in cells)
        writer = csv.writer(file, lineterminator="\n", quoting=csv.QUOTE_ALL if has_return else csv.QUOTE_MINIMAL)
        writer.writerow(cells)


def of_cell(cell: str) -> str:
    """Read back the name that `as_cell` was given.

    >>> [of_cell(cell) for cell in ("'=1+1", "''=1", "-1.5", "loss", "'loss'")]
    ['=1+1', "'=1", '-1.5', 'loss', "'loss'"]
    """
    return cell[1:] if cell.startswith("'") and FORMULA.match(cell) else cell


def is_number(text: str) -> bool:
    """Return True if a text is a number, without spaces around it."""
    try:
        float(text)
    except ValueError:
        return False
    return text == text.strip()


def folded(name: str) -> str:
    """Drop what is only a way of writing: case, hyphens and underscores.

    >>> folded("LG-FedAvg"), folded("geometric_median")
    ('lgfedavg', 'geometricmedian')
    """
    return name.casefold().replace("-", "").replace("_", "")


def slug(text: str) -> str:
    """Write text so that it can name a file.

    >>> slug("FedED+SAM-schedule=[[0, 1]]")
    'FedED+SAM-schedule=_0_1_'
    """
    return re.sub(r"[^\w.+=-]+", "_", text)
