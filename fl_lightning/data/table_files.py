"""Cells of tables: CSV and Parquet files and DataFrames, read without a decision about the types of the columns."""

import bz2
import csv
import gzip
import io
import lzma
import math
import zipfile
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple, get_args

import numpy as np

from fl_lightning.data.images import error_line
from fl_lightning.data.splits import Array
from fl_lightning.utils.settings import check_choice

Compression = Literal["infer", "gzip", "bz2", "xz", "zip"]
"""How a CSV file is compressed. `infer` reads the ending of its name."""

MISSING = ("None", "nan", "NaT", "<NA>")
"""Texts that missing values of a DataFrame are printed as."""

UNKNOWN = ("", "?", "na", "n/a", "nan", "null", "none")
"""Texts, in small letters, that stand for a missing number in a file."""

ENDINGS: Mapping[str, Compression] = {".gz": "gzip", ".bz2": "bz2", ".xz": "xz", ".zip": "zip"}
"""Endings of names that tell how a file is compressed, as pandas reads them."""

BEGINNINGS: Mapping[bytes, Compression] = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bz2",
    b"\xfd7zXZ\x00": "xz",
    b"PK\x03\x04": "zip",
}
"""First bytes of compressed files."""

SEPARATORS = {";": "';'", "\t": "'\\t'", "|": "'|'"}
"""Separators of columns besides the comma, as a user types them."""


@dataclass(frozen=True)
class CSVFormat:
    """Holds how a CSV file is written. The names are those of pandas' `read_csv`.

    Args:
        sep: The character between two columns.
        decimal: The character before the decimals of a number.
        encoding: The encoding of the text.
        compression: `infer` by the ending of the name, or `gzip`, `bz2`, `xz`, `zip`. None: not compressed.

    Raises:
        ValueError: A setting is out of its range.
    """

    sep: str = ","
    decimal: str = "."
    encoding: str = "utf-8"
    compression: Compression | None = "infer"

    def __post_init__(self) -> None:
        for name, value in (("sep", self.separator), ("decimal", self.decimal)):
            if not isinstance(value, str) or len(value) != 1 or value.isalnum() or value in '"\r\n':
                raise ValueError(
                    f"{name} must be one character that is no letter or digit, got {value!r}; set {name}: ';'"
                )
        if self.decimal == self.separator:
            raise ValueError(f"decimal must not be the character of sep, got {self.decimal!r}; set sep: ';'")
        if self.compression is not None:
            check_choice(get_args(Compression), compression=self.compression)

    @property
    def separator(self) -> str:
        """The character between two columns. A backslash and a `t` are a tab."""
        return "\t" if self.sep == "\\t" else self.sep


class Cells(NamedTuple):
    """The values of a column, as they were given.

    Args:
        values: The values (n,): texts of a file; numbers, texts and other values of a DataFrame.
        decimal: The decimal point of numbers that are written as text. None: text stays text.
        rows: The number of each row in its table, (n,), for errors.
    """

    values: Sequence[Any] | Array
    decimal: str | None
    rows: Array

    def at(self, chosen: Array) -> "Cells":
        """Return the cells of some rows.

        Args:
            chosen: Positions of the cells, (k,) int64.
        """
        if isinstance(self.values, np.ndarray):
            return Cells(self.values[chosen], self.decimal, self.rows[chosen])
        return Cells([self.values[position] for position in chosen.tolist()], self.decimal, self.rows[chosen])


TableCells = Mapping[str, Cells]
"""Cells of the columns of a table, by the names of the columns."""


def read_table(given: Any, which: str, style: CSVFormat) -> TableCells:
    """Read a CSV or Parquet file, or take the columns of a DataFrame.

    Args:
        given: The name of a file, or a DataFrame.
        which: The name of the table.
        style: How a CSV file is written.

    Raises:
        FileNotFoundError: There is no such file.
        ModuleNotFoundError: pandas is not installed, and the file is a Parquet file.
        ValueError: The table has no rows, or is not written as `style` says.
        TypeError: The table is neither a file nor a DataFrame.
    """
    if hasattr(given, "columns") and hasattr(given, "to_numpy"):
        return cells_of_frame(given, f"the {which} table")
    if not isinstance(given, str | Path):
        raise TypeError(f"{which} must be a CSV file or a pandas DataFrame, got {type(given).__name__}")
    path = Path(given).expanduser()
    if not path.is_file():
        raise FileNotFoundError(
            f"{which} must be a CSV file, got {given}, which does not exist; mend data.source.{which}"
        )
    if path.suffix == ".parquet":
        return cells_of_frame(read_parquet(path), str(path))
    return read_csv(path, style)


def read_csv(path: Path, style: CSVFormat) -> TableCells:
    """Read the texts of a CSV file.

    Raises:
        ValueError: The file is not written as `style` says, or has no rows.
    """
    separator = style.separator
    try:
        with open_text(path, style) as file:
            rows = [row for row in csv.reader(file, delimiter=separator) if row]
    except UnicodeError as error:
        raise ValueError(
            f"{path} must be text in {style.encoding.upper()}, which {wrong_byte(error)} is not: save it as UTF-8, or "
            f"set encoding: latin-1"
        ) from error
    except LookupError as error:
        raise ValueError(
            f"encoding must be one that Python knows, got {style.encoding!r}; set encoding: utf-8"
        ) from error
    except (OSError, EOFError, lzma.LZMAError, zipfile.BadZipFile, csv.Error) as error:
        raise ValueError(f"{path} could not be read ({error_line(error)}); {remedy_of_compression(path)}") from error
    header = rows[0] if rows else []
    check_separator(header, path, separator)
    check_names(header, str(path))
    for number, row in enumerate(rows[1:], 2):
        if len(row) != len(header):
            raise ValueError(
                f"row {number} of {path} must have {len(header)} values as the header, got {len(row)}; put quotes "
                f"around a value that holds {separator!r}, or set sep"
            )
    if len(rows) < 2:
        raise ValueError(f"{path} must have a header and rows, got {len(header)} columns and no row")
    numbers = np.arange(2, len(rows) + 1)
    return {
        name: Cells(column, style.decimal, numbers)
        for name, column in zip(header, zip(*rows[1:], strict=True), strict=True)
    }


def open_text(path: Path, style: CSVFormat) -> AbstractContextManager[IO[str]]:
    """Open the text of a CSV file, which may be compressed.

    Raises:
        ValueError: The file is compressed in another way than `style` says.
    """
    compression = ENDINGS.get(path.suffix.lower()) if style.compression == "infer" else style.compression
    found = compression_of(path)
    if compression is None and found is not None:
        raise ValueError(f"{path} must be text, and it is compressed; set compression: {found}")
    # The mark at the beginning of a file in UTF-8 is no part of the name of the first column.
    encoding = "utf-8-sig" if style.encoding.lower().replace("_", "-") in ("utf-8", "utf8") else style.encoding
    if compression == "gzip":
        return gzip.open(path, "rt", encoding=encoding, newline="")
    if compression == "bz2":
        return bz2.open(path, "rt", encoding=encoding, newline="")
    if compression == "xz":
        return lzma.open(path, "rt", encoding=encoding, newline="")
    if compression == "zip":
        return open_member(path, encoding)
    return path.open(newline="", encoding=encoding)


def open_member(path: Path, encoding: str) -> IO[str]:
    """Open the only file of a zip file.

    Raises:
        ValueError: The zip file holds no file, or several.
    """
    with zipfile.ZipFile(path) as archive:
        names = [name for name in archive.namelist() if not name.endswith("/")]
        if len(names) != 1:
            raise ValueError(f"{path} must hold one CSV file, got {len(names)}; unpack it, and name one")
        content = archive.read(names[0])
    return io.TextIOWrapper(io.BytesIO(content), encoding=encoding, newline="")


def compression_of(path: Path) -> Compression | None:
    """Return how a file is compressed by its first bytes, or None."""
    with path.open("rb") as file:
        beginning = file.read(8)
    for mark, compression in BEGINNINGS.items():
        if beginning.startswith(mark):
            return compression
    return None


def remedy_of_compression(path: Path) -> str:
    """Return what to type for a file that could not be decompressed or parsed."""
    found = compression_of(path)
    return "set compression: null" if found is None else f"write it again, or set compression: {found}"


def wrong_byte(error: UnicodeError) -> str:
    """Return which byte is no text, where that is known."""
    return f"byte {error.start}" if isinstance(error, UnicodeDecodeError) else "the content"


def check_separator(header: Sequence[str], path: Path, separator: str) -> None:
    """Refuse a header of one column that holds another separator.

    Raises:
        ValueError: Names the separator that the header holds.
    """
    if len(header) != 1:
        return
    others = {**SEPARATORS, ",": "','"}
    for other, typed in others.items():
        if other != separator and other in header[0]:
            raise ValueError(
                f"{path} must have its columns between {separator!r}, got one column {header[0]!r}; set sep: {typed}"
            )


def check_names(names: Sequence[str], table: str) -> None:
    """Refuse two columns of one name.

    Raises:
        ValueError: Names the column.
    """
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise ValueError(f"{table} must name each of its columns once, got {twice[0]!r} twice; rename one of them")


def read_parquet(path: Path) -> Any:
    """Read a Parquet file as a DataFrame.

    Raises:
        ModuleNotFoundError: pandas is not installed, or a package by which it reads the format.
        ValueError: The file is not a Parquet file.
    """
    try:
        import pandas  # type: ignore[import-untyped,import-not-found,unused-ignore] # noqa: PLC0415 - not required

        return pandas.read_parquet(path)
    except ImportError:
        raise ModuleNotFoundError("Parquet files need pandas and pyarrow: pip install pandas pyarrow") from None
    except Exception as error:  # pyarrow raises all kinds
        raise ValueError(f"{path} could not be read ({error_line(error)}): write it again") from error


def cells_of_frame(frame: Any, table: str) -> TableCells:
    """Take the columns of a DataFrame.

    Args:
        frame: A DataFrame of pandas, or another object with `columns`.
        table: The name of the table, for errors.

    Raises:
        ValueError: The table has no rows, or two columns of one name.
    """
    names = [str(name) for name in frame.columns]
    check_names(names, table)
    if not len(frame):
        raise ValueError(f"{table} must have rows, got {len(names)} columns and no row")
    rows = np.arange(1, len(frame) + 1)
    return {str(name): Cells(values_of_series(frame[name]), None, rows) for name in frame.columns}


def values_of_series(series: Any) -> Sequence[Any] | Array:
    """Return the values of a column of a DataFrame: numbers as an array, categories as texts, others as they are."""
    dtype = series.dtype
    if str(dtype) == "category":
        return [word_of(value) for value in series]
    if isinstance(dtype, np.dtype) and dtype.kind in "bif":
        return np.asarray(series, np.float64 if dtype.kind == "f" else np.int64)
    return list(series)


# --- single cells


def is_missing(cell: Any) -> bool:
    """Tell whether a value of a DataFrame is missing."""
    return not isinstance(cell, str) and str(cell) in MISSING


def is_blank(cell: Any) -> bool:
    """Tell whether a cell is empty."""
    return isinstance(cell, str) and not cell.strip()


def word_of(cell: Any) -> str:
    """Return a cell as a word, blank where it is missing. A whole number is written without a point.

    >>> word_of("007"), word_of(7), word_of(7.0), word_of(None)
    ('007', '7', '7', '')
    """
    if is_missing(cell):
        return ""
    if isinstance(cell, float | np.floating) and float(cell).is_integer():
        return str(int(cell))
    return str(cell)


def number_in(cell: Any, decimal: str | None) -> float | None:
    """Return the number in a cell, NaN where it is missing, and None for what is no number.

    Args:
        cell: A value of a column.
        decimal: The decimal point of numbers that are written as text. None: text is no number.

    >>> number_in("1,5", ","), number_in("1.5", "."), number_in("1.5", ","), number_in("NA", "."), number_in("7", None)
    (1.5, 1.5, None, nan, None)
    """
    if isinstance(cell, str):
        return None if decimal is None else number_in_text(cell, decimal)
    if is_missing(cell):
        return math.nan
    try:
        return float(cell)
    except (TypeError, ValueError, OverflowError):
        return None


def number_in_text(text: str, decimal: str) -> float | None:
    """Return the number in a text of a file, NaN for one of `UNKNOWN`, and None for what is no number."""
    text = text.strip()
    if text.lower() in UNKNOWN:
        return math.nan
    # Python takes an underscore for a separator of digits, and files do not.
    if "_" in text or (decimal != "." and "." in text):
        return None
    try:
        return float(text.replace(decimal, "."))
    except ValueError:
        return None


def numbers_in(cells: Cells) -> list[float | None]:
    """Return the number in each cell of a column, as `number_in` does."""
    values = cells.values
    if isinstance(values, np.ndarray):
        numbers: list[float | None] = values.astype(np.float64).tolist()
        return numbers
    if cells.decimal == "." and not any("_" in text for text in values):
        try:
            return [float(text) for text in values]
        except ValueError:
            pass
    return [number_in(cell, cells.decimal) for cell in values]
