"""Sources of tables, a column of which may name the owners of the rows."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np
from pytorch_lightning.utilities import rank_zero_warn

from fl_lightning.data.new_samples import NewSamples
from fl_lightning.data.schema import Schema, shown
from fl_lightning.data.sources import Source
from fl_lightning.data.splits import Split, TensorSplit
from fl_lightning.data.table_files import Compression, CSVFormat, TableCells, read_table, row_numbers
from fl_lightning.data.table_schema import NEW, TableSchema, Task, unknown_words
from fl_lightning.utils.keyed import keyed_numpy
from fl_lightning.utils.settings import check_choice, check_inside

LARGEST_ONE_HOT = 1 << 32
"""Most bytes that a column of words may take one-hot."""


class TableSource(Source):
    """Reads rows of a table: numbers are standardized, words become one-hot, and one column is the target.

    The rows of `train` decide the types of the columns, their words and scales, and the classes with their numbers.
    All other rows are read in the same way, and a row that does not fit is refused. Classes are numbered in sorted
    order, and numbers to be regressed are (n, 1). Dates are words, and so are texts and categories of a DataFrame.

    `data.by` may name every column. It tells values apart as they are written: `007` and `7` are two owners.

    Args:
        train: A CSV file with a header, a Parquet file (read by pandas), or a pandas DataFrame.
        label: The column of the target.
        test: The test rows, in the forms of `train`. None: a share of `train`.
        features: The columns that the net reads. None: all except the target and the `ignored` ones.
        ignored: The columns that the net does not read, such as the column of the owners.
        test_share: The share of the rows that become the test split if there is no `test`, in (0, 1), drawn by a seed
            of 0.
        limit: The most samples of each split, drawn by class. None: all.
        task: `classification` into the words or whole numbers of the target. `regression` of its numbers, whole ones
            too. `auto`: a target with decimals is regressed, words and whole numbers are classes.
        sep: The character between two columns of a CSV file.
        decimal: The character before the decimals of a number in a CSV file.
        encoding: The encoding of a CSV file.
        compression: How a CSV file is compressed: `gzip`, `bz2`, `xz` or `zip`. `infer` reads the ending of its name.
            None: not compressed.
        schema_file: A JSON file with the schema of other training rows, by which all rows are read. One party of a
            federation writes it by `source.schema.table.write(path)`. None: the rows of `train` decide.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: A column breaks a rule. The error names the column, the rule and the value.
    """

    def __init__(
        self,
        train: Any,
        label: str,
        test: Any = None,
        features: Sequence[str] | None = None,
        *,
        ignored: Sequence[str] = (),
        test_share: float = 0.2,
        limit: int | None = None,
        task: Task = "auto",
        sep: str = ",",
        decimal: str = ".",
        encoding: str = "utf-8",
        compression: Compression | None = "infer",
        schema_file: str | Path | None = None,
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
        self.sep = sep
        self.decimal = decimal
        self.encoding = encoding
        self.compression = compression
        self.schema_file = schema_file
        self._format = CSVFormat(sep=sep, decimal=decimal, encoding=encoding, compression=compression)
        self.table: TableSchema | None = None

    def load(self) -> tuple[Split, Split]:
        given = read_table(self.train, "train", self._format)
        training, testing = self._divided(given)
        leading = self._leading()
        names = self._names(given, leading)
        for name in (*names, *self.ignored, self.label):
            for which, rows in (("train", training), ("test", testing)):
                if name not in rows:
                    raise ValueError(
                        f"the {which} table must have the column {name!r}, it has {', '.join(rows)}; name one "
                        f"of these, or write a header"
                    )
        if leading is None:
            self.table = TableSchema.of(given=given, training=training, label=self.label, names=names, task=self.task)
        else:
            self.table = leading
        table = self.table
        check_one_hot(table, len(row_numbers(training)) + len(row_numbers(testing)))
        self.class_names = table.class_names
        self.num_classes = None if table.classes is None else len(table.classes)
        return self._split(table, training, "train"), self._split(table, testing, "test")

    def _divided(self, given: TableCells) -> tuple[TableCells, TableCells]:
        """Return the training rows and the test rows."""
        if self.test is not None:
            return given, read_table(self.test, "test", self._format)
        num_rows = len(row_numbers(given))
        order = keyed_numpy(0, "test rows").permutation(num_rows)
        num_training = num_rows - round(self.test_share * num_rows)
        training = np.sort(order[:num_training])
        testing = np.sort(order[num_training:])
        return (
            {name: cells.at(training) for name, cells in given.items()},
            {name: cells.at(testing) for name, cells in given.items()},
        )

    def _leading(self) -> TableSchema | None:
        """Return the schema of the training data or of the file. None: the rows of `train` decide."""
        if self.leader is not None and self.leader.table is not None:
            return self.leader.table
        if self.schema_file is not None:
            return TableSchema.from_file(self.schema_file)
        return None

    def _names(self, given: TableCells, leading: TableSchema | None) -> list[str]:
        """Return the columns that the net reads.

        Raises:
            ValueError: There are none, the target is one of them, or the schema has others.
        """
        if leading is not None:
            names = [feature.name for feature in leading.features]
            if self.features is not None and list(self.features) != names:
                raise ValueError(
                    f"features must be those of the training data ({', '.join(names)}), got "
                    f"{', '.join(self.features)}; leave them out"
                )
        elif self.features is not None:
            names = list(self.features)
        else:
            names = [name for name in given if name != self.label and name not in self.ignored]
        if self.label in names:
            raise ValueError(f"features must not hold the target, got {self.label!r}; leave it out")
        if any(not name.strip() for name in names):
            raise ValueError(
                "a column that the net reads must have a name, got ''; name it, or set ignored: [''] for a column of "
                "row numbers"
            )
        if not names:
            raise ValueError("a table must have a column that the net reads; name it in features")
        return names

    def _split(self, table: TableSchema, rows: TableCells, which: str) -> TensorSplit:
        """Make a split of rows."""
        return TensorSplit(
            x=table.inputs(rows, which),
            y=table.targets(self.label, rows[self.label], which, takes_other_classes=self.takes_other_classes),
            columns=table.columns(rows),
        )

    def described(self, train: Split) -> Schema:
        return super().described(train)._replace(table=self.table)

    def read_new(self, path: Path, schema: Schema) -> NewSamples:
        """Read new rows of a file.

        The target and all columns that the net does not read may be missing. A word that no training row has, also a
        missing one, is none of the words, and a warning counts it. A missing number is refused. The name of a row is
        its number in the file, as in error sentences.
        """
        table = schema.table
        if table is None:
            raise ValueError(f"--new needs the schema of a table, which this checkpoint lacks, got {path}; train again")
        if path.is_dir():
            raise ValueError(f"--new must be a CSV or Parquet file, got the folder {path}; name a file in it")
        rows = read_table(path, NEW, self._format)
        lacks = [feature.name for feature in table.features if feature.name not in rows]
        if lacks:
            raise ValueError(
                f"{path} must have all columns that the net reads, and lacks {shown(lacks)}; it has "
                f"{shown(list(rows))}; add what is missing"
            )
        check_one_hot(table, len(row_numbers(rows)))
        tell_unknown_words(table, rows, path)
        return NewSamples.of(
            table.inputs(rows, NEW),
            names=row_numbers(rows).tolist(),
            column="row",
            schema=schema,
        )


def tell_unknown_words(table: TableSchema, rows: TableCells, path: Path) -> None:
    """Warn of words in new rows that no training row has, each column in one sentence."""
    for feature in table.features:
        cells = rows[feature.name]
        unknown = unknown_words(feature, cells)
        if unknown:
            words = shown(sorted(map(repr, set(unknown))))
            rank_zero_warn(
                f"column {feature.name!r} of {path} holds {words} in {len(unknown)} of {len(cells.rows)} rows, which "
                f"no training row holds; these rows have none of the words"
            )


def check_one_hot(table: TableSchema, num_rows: int) -> None:
    """Refuse a column of more words than fit into memory.

    Raises:
        ValueError: Names the column.
    """
    for feature in table.features:
        size = 4 * feature.width * num_rows
        if feature.words is not None and size > LARGEST_ONE_HOT:
            raise ValueError(
                f"column {feature.name!r} must hold fewer different words, got {feature.width:,} in {num_rows:,} rows, "
                f"which take {size / 1e9:,.0f} GB one-hot; ignore it, or make numbers of it"
            )
