"""Loggers of a run folder: one table with a row per round, and TensorBoard events beside it."""

import csv
import json
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from pytorch_lightning.loggers import TensorBoardLogger
from pytorch_lightning.loggers.logger import DummyLogger, Logger
from pytorch_lightning.utilities import rank_zero_only

from fl_lightning.metrics.keys import Direction, Directions
from fl_lightning.utils.files import at_path, write_file, write_table
from fl_lightning.utils.round_table import read_cells, reading

MOST_ROUNDS = 2**53
"""Largest number of a round in a table."""

DIRECTIONS = "directions.json"
"""Name of the file beside `metrics.csv` that tells of some keys whether they are better when lower or higher."""

STATUS = "status.json"
"""Name of the file beside `metrics.csv` that tells whether the fit that wrote the last rows has ended by itself."""


def read_status(folder: Path) -> int | None:
    """Read the round after which the last fit of a run has ended by itself, early or not.

    Returns:
        The 0-based round. It is −1 if the fit goes on or was cut, and None if nobody tells, as in 0.2.0.

    Raises:
        ValueError: The file does not hold the status of a fit.
    """
    path = folder / STATUS
    if not path.is_file():
        return None
    with reading(path, "whether a fit has ended and after which round, and cannot be read as it"):
        found = json.loads(path.read_text(encoding="utf-8"))
        return int(found["round"]) if found["ended"] else -1


def read_directions(folder: Path) -> dict[str, Direction]:
    """Read the directions that a run's user or metric objects gave, by log key. Empty without a file.

    Raises:
        ValueError: The file does not hold directions by log key.
    """
    path = folder / DIRECTIONS
    if not path.is_file():
        return {}
    with reading(path, "directions (min or max) by log key, and cannot be read as them"):
        found = json.loads(path.read_text(encoding="utf-8"))
        directions: dict[str, Direction] = {}
        for key, word in found.items():
            directions[str(key)] = {"min": "min", "max": "max"}[word]  # type: ignore[assignment]
        return directions


class RoundCSVLogger(Logger):
    """Writes `metrics.csv`: one row per round, on disk as soon as it is logged.

    Values of the same round that are logged at different times share its row, and a new key widens the table.
    A run that continues removes the rows from its first round on. Evaluations outside a fit leave no row.
    `status.json` tells whether the fit has ended by itself: at its last round, or stopped early.

    Args:
        save_dir: Folder of the file. The logger makes the folder when it writes the first row.
        filename: Name of the table.
    """

    def __init__(self, save_dir: str | Path, filename: str = "metrics.csv") -> None:
        super().__init__()
        self.path = Path(save_dir) / filename
        self._file: TextIO | None = None
        self._keys: list[str] = []
        self._row: dict[str, Any] = {"round": 0}
        self._row_start = 0
        self._waiting: dict[int, dict[str, float]] = {}
        self._directions: Directions = {}

    @property
    def name(self) -> str:
        return ""

    @property
    def version(self) -> str:
        return ""

    @property
    def save_dir(self) -> str:
        return str(self.path.parent)

    @property
    def experiment(self) -> Any:
        """Return an object that takes every call and does nothing. A table has no place for images and text."""
        return DummyLogger().experiment

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Do nothing, because hyper-parameters are in the run's config.yaml."""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Add values to the row of round `step`. None is the last row.

        Args:
            metrics: Values by log key.
            step: Number of the round, from 0. None is the round of the last row.
        """
        round_idx = self._row["round"] if step is None else int(step)
        values = {key: float(value) for key, value in metrics.items() if key != "epoch"}
        is_from_lightning = step is None or "epoch" in metrics
        if self._file is None and is_from_lightning:
            # Such values may belong to an evaluation outside a fit.
            self._waiting.setdefault(round_idx, {}).update(values)
        elif self._file is None:
            self._begin(round_idx, values)
        elif round_idx < self._row["round"] or not values.keys() <= set(self._keys):
            self._rewrite(self._rows(), round_idx=round_idx, values=values)
        else:
            self._write(self._file, round_idx=round_idx, values=values)

    @rank_zero_only
    def log_directions(self, directions: Directions) -> None:
        """Write whether values are better when lower or higher, for readers of the table.

        Args:
            directions: Directions by log key.
        """
        if directions != self._directions:
            folder = self.path.parent
            known = {**read_directions(folder), **directions}
            write_file(folder / DIRECTIONS, json.dumps(known, indent=1) + "\n")
            self._directions = dict(directions)

    def rows_on_disk(self) -> dict[int, dict[str, float]]:
        """Return the values on disk by round, each by log key.

        Raises:
            ValueError: The file is no table of rounds.
        """
        rows: dict[int, dict[str, float]] = {}
        for round_idx, row in self._rows().items():
            del row["round"]
            rows[round_idx] = {key: float(value) for key, value in row.items() if value != ""}
        return rows

    @rank_zero_only
    def finalize(self, status: str) -> None:
        if self._file is not None:
            # The error of a full disk has been raised before.
            with suppress(OSError):
                self._file.close()
                if status == "success":
                    self._write_status(has_ended=True)
        self._file = None
        self._row = {"round": 0}
        self._waiting.clear()

    def _begin(self, round_idx: int, values: dict[str, float]) -> None:
        """Open the table with the first row of a fit, and remove rows of an earlier fit from this round on.

        Args:
            round_idx: Number of the round, from 0.
            values: Values of the round by log key.
        """
        rows = self._rows()
        self._keys = list(next(iter(rows.values()), ["round"]))
        earlier = {index: row for index, row in rows.items() if index < round_idx}
        waiting = self._waiting.pop(round_idx, {})
        self._write_status(has_ended=False)
        self._rewrite(earlier, round_idx=round_idx, values=waiting | values)

    def _write_status(self, *, has_ended: bool) -> None:
        """Write whether the fit has ended, and the round of the last row."""
        content = {"ended": has_ended, "round": self._row["round"]}
        write_file(self.path.with_name(STATUS), json.dumps(content) + "\n")

    def _write(self, file: TextIO, round_idx: int, values: dict[str, float]) -> None:
        """Append the row of a round, or replace the row if it is the last.

        Args:
            file: The table, open for writing.
            round_idx: Number of the round, from 0.
            values: Values of the round by log key.
        """
        if round_idx != self._row["round"]:
            self._row = {"round": round_idx}
            self._row_start = file.seek(0, os.SEEK_END)
        self._row |= values
        try:
            file.seek(self._row_start)
            csv.DictWriter(file, self._keys, lineterminator="\n").writerow(self._row)
            # This call writes the buffer, too.
            file.truncate()
        except OSError as error:
            raise at_path(error, self.path) from error

    def _rows(self) -> dict[int, dict[str, Any]]:
        """Read the rows on disk by round, without a row that was cut in the middle.

        Raises:
            ValueError: The file is no table of rounds.
        """
        if not self.path.is_file():
            return {}
        with reading(self.path, "a table of numbers with a row for each round, and cannot be read as one"):
            columns = read_cells(self.path)
            for column in columns.values():
                check_numbers(column)
            rows: dict[int, dict[str, Any]] = {}
            for cells in zip(*columns.values(), strict=True):
                row: dict[str, Any] = dict(zip(columns, cells, strict=True))
                round_idx = int(row["round"])
                if not 0 <= round_idx <= MOST_ROUNDS:
                    raise ValueError("no round has such a number")
                row["round"] = round_idx
                rows[round_idx] = row
            return rows

    def _rewrite(self, rows: dict[int, dict[str, Any]], round_idx: int, values: dict[str, float]) -> None:
        """Replace the table by rows with further values, in one move. A reader finds the old table or the new one.

        Args:
            rows: Rows by round. The method adds the values to them.
            round_idx: Number of the round of the values, from 0.
            values: Further values by log key.
        """
        rows.setdefault(round_idx, {"round": round_idx}).update(values)
        self._keys += [key for key in values if key not in self._keys]
        self._row = rows[max(rows)]
        if self._file is not None:
            self._file.close()
        table: list[list[Any]] = [self._keys]
        for index in sorted(rows):
            table.append([rows[index].get(key) for key in self._keys])
        write_table(self.path, table)
        self._row_start = self.path.read_bytes().rstrip(b"\n").rfind(b"\n") + 1
        self._file = self.path.open("r+", newline="", encoding="utf-8")


def check_numbers(cells: Iterable[str]) -> None:
    """Refuse a cell that is neither empty nor a number.

    Raises:
        ValueError: A cell is neither.
    """
    for cell in cells:
        if cell:
            float(cell)


class RunTensorBoard(TensorBoardLogger):
    """Writes TensorBoard events directly into a folder, without a sub-folder per version and without `hparams.yaml`.

    Args:
        folder: Folder of the event files.
        first_round: First round, from 0, of a run that continues. TensorBoard no longer shows older events from this
            round on. None is a new run.
    """

    def __init__(self, folder: str | Path, first_round: int | None = None) -> None:
        super().__init__(folder, name="", version="", default_hp_metric=False, purge_step=first_round)

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Write the numbers as one event, because every event wakes the thread that writes."""
        from tensorboard.compat.proto.summary_pb2 import Summary  # noqa: PLC0415 - as Lightning, only where it is used
        from torch.utils.tensorboard.writer import FileWriter  # noqa: PLC0415

        writer = getattr(self.experiment, "file_writer", None)
        are_numbers = all(isinstance(value, int | float) for value in metrics.values())
        if not isinstance(writer, FileWriter) or not are_numbers:
            super().log_metrics(metrics, step)
            return
        values = [Summary.Value(tag=key, simple_value=float(value)) for key, value in metrics.items()]
        writer.add_summary(Summary(value=values), step)

    @rank_zero_only
    def save(self) -> None:
        self.experiment.flush()
