"""Cells of tables: CSV and Parquet files and DataFrames, read without a decision about the types of the columns."""

import bz2
import csv
import gzip
import io
import lzma
import math
import zipfile
import zlib
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

UNKNOWN = ("", "?", "na", "n/a", "nan", "null", "none", "<na>", "#n/a", "nat")
"""Texts, in small letters, that stand for a missing number in a file."""

BYTE_ORDER_MARK = "\ufeff"
"""First character of some files, which is no part of the name of the first column."""

WIDE_MARKS: Mapping[bytes, str] = {
    b"\xff\xfe\x00\x00": "utf-32",
    b"\x00\x00\xfe\xff": "utf-32",
    b"\xff\xfe": "utf-16",
    b"\xfe\xff": "utf-16",
}
"""First bytes of files whose characters have several bytes, the longer mark first, and the names of their encodings."""

ENDINGS: Mapping[str, Compression] = {".gz": "gzip", ".bz2": "bz2", ".xz": "xz", ".zip": "zip"}
"""Endings of names that tell how a file is compressed, as pandas reads them."""

BEGINNINGS: Mapping[bytes, Compression] = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bz2",
    b"\xfd7zXZ\x00": "xz",
    b"PK\x03\x04": "zip",
}
"""First bytes of compressed files."""

OTHER_FILES: Mapping[bytes, str] = {
    b"\x28\xb5\x2f\xfd": "is compressed by zstd; unpack it",
    b"\xd0\xcf\x11\xe0": "is an Excel workbook; save it as CSV",
    b"PAR1": "is a Parquet file; name it .parquet",
}
"""First bytes of files that are no CSV files, and what to do with them."""

WORKBOOKS = (".xlsx", ".xlsm", ".xls", ".ods")
"""Endings of the names of workbooks."""

SEPARATORS = {";": "';'", "\t": "'\\t'", "|": "'|'", ":": "':'", " ": "' '"}
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
        rows: The number of each row in its table, (n,), for errors: the line of a file, or the row of a DataFrame.
        path: The name of the file, for errors. Empty: the values are of a DataFrame.
    """

    values: Sequence[Any] | Array
    decimal: str | None
    rows: Array
    path: str = ""

    def at(self, chosen: Array) -> "Cells":
        """Return the cells of some rows.

        Args:
            chosen: Positions of the cells, (k,) int64.
        """
        if isinstance(self.values, np.ndarray):
            return self._replace(values=self.values[chosen], rows=self.rows[chosen])
        values = [self.values[position] for position in chosen.tolist()]
        return self._replace(values=values, rows=self.rows[chosen])

    def place(self, position: int, which: str) -> str:
        """Return the place of a cell in a sentence.

        Args:
            position: The position of the cell.
            which: The name of the table.
        """
        named = f" ({self.path})" if self.path else ""
        return f"row {self.rows[position]} of the {which} table{named}"


TableCells = Mapping[str, Cells]
"""Cells of the columns of a table, by the names of the columns."""


def row_numbers(table: TableCells) -> Array:
    """Return the number of each row of a table in its file, (n,) int64, as error sentences name rows.

    Args:
        table: The cells. All columns have the same rows.
    """
    first_column = next(iter(table.values()))
    return first_column.rows


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
    check_kind_of_file(path)
    try:
        with open_text(path, style) as file:
            lines = numbered_rows(csv.reader(file, delimiter=separator))
    except UnicodeError as error:
        raise ValueError(
            f"{path} must be text in {style.encoding.upper()}, which {wrong_byte(error)} is not: save it as UTF-8, or "
            f"set encoding: {encoding_of(path, error)}"
        ) from error
    except LookupError as error:
        raise ValueError(
            f"encoding must be one that Python knows, got {style.encoding!r}; set encoding: utf-8"
        ) from error
    except (OSError, EOFError, lzma.LZMAError, zipfile.BadZipFile, zlib.error, csv.Error) as error:
        raise ValueError(f"{path} could not be read ({error_line(error)}); {remedy_of_file(path, style)}") from error
    first_line, header = lines[0] if lines else (1, [])
    header = [header[0].removeprefix(BYTE_ORDER_MARK), *header[1:]] if header else []
    check_zeros(header, path)
    check_separator(header, path, separator)
    rows = [row for _, row in lines[1:]]
    for (number, _), row in zip(lines[1:], rows, strict=True):
        while len(row) > len(header) and not row[-1].strip():
            row.pop()  # what follows a separator at the end of a line
        if len(row) != len(header):
            raise ValueError(
                f"row {number} of {path} must have {len(header)} values as the header, got {len(row)}; put quotes "
                f"around a value that holds {separator!r}, or set sep"
            )
    if not rows:
        raise ValueError(f"{path} must have a header and rows, got {len(header)} columns and no row")
    numbers = np.array([number for number, _ in lines[1:]])
    columns = dict(enumerate(zip(*rows, strict=True)))
    while len(header) > 1 and not header[-1].strip() and all(is_blank(cell) for cell in columns[len(header) - 1]):
        header.pop()
    check_header(header, path, first_line)
    check_names(header, str(path))
    cells: dict[str, Cells] = {}
    for position, name in enumerate(header):
        cells[name] = Cells(values=columns[position], decimal=style.decimal, rows=numbers, path=str(path))
    return cells


def numbered_rows(reader: Any) -> list[tuple[int, list[str]]]:
    """Read the rows of a CSV file that are not empty, each with the number of its first line.

    Args:
        reader: A reader of Python's `csv`.
    """
    rows = []
    line = 1
    for row in reader:
        is_empty = not row or (len(row) == 1 and not row[0].strip())
        if not is_empty:
            rows.append((line, row))
        line = reader.line_num + 1
    return rows


def check_kind_of_file(path: Path) -> None:
    """Refuse a file that is no CSV file.

    Raises:
        ValueError: Says what the file is, and what to do.
    """
    if path.suffix.lower() in WORKBOOKS:
        raise ValueError(f"{path} must be a CSV file, and is a workbook; save it as CSV")
    with path.open("rb") as file:
        beginning = file.read(4)
    for mark, what in OTHER_FILES.items():
        if beginning == mark:
            raise ValueError(f"{path} must be a CSV file, and {what}")


def check_zeros(header: Sequence[str], path: Path) -> None:
    """Refuse text in which zero bytes stand between the characters.

    Raises:
        ValueError: Names the encoding that has such bytes.
    """
    if any("\0" in name for name in header):
        first = header[0]
        encoding = "utf-16-be" if first.startswith("\0") else "utf-16-le"
        raise ValueError(f"{path} must be text, and its characters have several bytes; set encoding: {encoding}")


def check_header(header: Sequence[str], path: Path, line: int) -> None:
    """Refuse a first row that holds values in place of names.

    Raises:
        ValueError: Names the value.
    """
    numbers = [number_in_text(name, ".") for name in header]
    found = [number for number in numbers if number is not None and math.isfinite(number)]
    if len(found) == len(header) and not all(number.is_integer() for number in found):
        raise ValueError(
            f"{path} must begin with the names of its columns, got the number {header[0]!r} in row {line}; "
            f"write a header"
        )


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
        # macOS adds a folder of its own to each archive.
        names = [name for name in archive.namelist() if not name.endswith("/") and not name.startswith("__MACOSX/")]
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


def remedy_of_file(path: Path, style: CSVFormat) -> str:
    """Return what to type for a file that could not be decompressed or parsed."""
    found = compression_of(path)
    used = ENDINGS.get(path.suffix.lower()) if style.compression == "infer" else style.compression
    if found == used:
        return "write it again"
    return "set compression: null" if found is None else f"write it again, or set compression: {found}"


def encoding_of(path: Path, error: UnicodeError) -> str:
    """Return the encoding that a text may have that was not read in another one.

    Args:
        path: The file.
        error: The error of the first byte that is no text.
    """
    with path.open("rb") as file:
        beginning = file.read(4)
    for mark, encoding in WIDE_MARKS.items():
        if beginning.startswith(mark):
            return encoding
    # These bytes are letters and signs of Windows, such as the euro, and no letters in Latin-1.
    bad = error.object if isinstance(error, UnicodeDecodeError) else b""
    return "cp1252" if any(0x80 <= byte < 0xA0 for byte in bad) else "latin-1"


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
    columns = {str(name): values_of_series(frame[name]) for name in frame.columns}
    for name, values in columns.items():
        check_single(name, values, table)
    return {name: Cells(values, None, rows) for name, values in columns.items()}


def check_single(name: str, values: Sequence[Any] | Array, table: str) -> None:
    """Refuse cells that hold several values.

    Raises:
        ValueError: Names the column, the row and the value.
    """
    if isinstance(values, np.ndarray):
        return
    for row, value in enumerate(values, 1):
        if isinstance(value, list | tuple | dict | set | np.ndarray):
            raise ValueError(
                f"column {name!r} must hold one value in every row, got {value!r} in row {row} of {table}; make a "
                f"column of each part, or ignore the column"
            )


def values_of_series(series: Any) -> Sequence[Any] | Array:
    """Return the values of a column of a DataFrame: numbers as an array, categories as texts, others as they are."""
    dtype = series.dtype
    if str(dtype) == "category":
        return [word_of(value) for value in series]
    if isinstance(dtype, np.dtype) and dtype.kind in "bif":
        return np.asarray(series, np.float64 if dtype.kind == "f" else np.int64)
    return list(series)


# --- single cells


def truth_of(text: str) -> str | None:
    """Return `True` or `False` for a truth value in any spelling, and None for what is none.

    >>> truth_of("TRUE"), truth_of("false"), truth_of("yes")
    ('True', 'False', None)
    """
    return {"true": "True", "false": "False"}.get(text.strip().lower())


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
