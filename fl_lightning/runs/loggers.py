"""Loggers of a run folder: one table with a row per round, and TensorBoard events beside it."""

import csv
import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from pytorch_lightning.loggers import TensorBoardLogger
from pytorch_lightning.loggers.logger import Logger
from pytorch_lightning.utilities import rank_zero_only


class RoundCSVLogger(Logger):
    """Writes `metrics.csv`: one row per round, on disk as soon as it is logged.

    Values of the same round that are logged at different times share its row, and a new key widens the table.
    A run that continues removes the rows from its first round on. Evaluations outside a fit leave no row.

    Args:
        save_dir: folder of the file; made when the first row is written.
        filename: of the table.
    """

    def __init__(self, save_dir: str | Path, filename: str = "metrics.csv") -> None:
        super().__init__()
        self.path = Path(save_dir) / filename
        self._keys: list[str] = []
        self._row: dict[str, Any] = {}
        self._row_start = 0
        self._waiting: dict[int, dict[str, float]] = {}
        self._file: BinaryIO | None = None

    @property
    def name(self) -> str:
        return ""

    @property
    def version(self) -> str:
        return ""

    @property
    def save_dir(self) -> str:
        return str(self.path.parent)

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Hyper-parameters are in the run's config.yaml."""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Add values to the row of round `step`; None: to the last one."""
        round_idx = self._row.get("round", 0) if step is None else int(step)
        values = {key: float(value) for key, value in metrics.items() if key != "epoch"}
        if self._file is None:
            if step is None or "epoch" in metrics:  # of Lightning, perhaps an evaluation: waits for a round
                self._waiting.setdefault(round_idx, {}).update(values)
                return
            self._open(round_idx)
            values = self._waiting.pop(round_idx, {}) | values
        last = self._row.get("round", -1)
        if round_idx < last:
            self._amend(round_idx, values)
        elif new := [key for key in values if key not in self._keys]:
            rows = self._rows()
            own = self._row if round_idx == last else {}
            earlier = [row for row in rows if int(row["round"]) < round_idx]
            self._rewrite([*self._keys, *new], earlier, {"round": round_idx, **own, **values})
        else:
            self._write(round_idx, values)

    @rank_zero_only
    def finalize(self, status: str) -> None:
        if self._file is not None:
            self._file.close()
        self._file, self._row = None, {}
        self._waiting.clear()

    def _open(self, first_round: int) -> None:
        """Continue the table from `first_round` on."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        rows = self._rows() if self.path.is_file() else []
        keys = list(rows[0]) if rows else ["round"]
        self._rewrite(keys, [row for row in rows if int(row["round"]) < first_round], {})

    def _write(self, round_idx: int, values: dict[str, float]) -> None:
        """Append the round's row, or replace it where it is the last one."""
        assert self._file is not None
        again = round_idx == self._row.get("round")
        if again:
            self._row |= values
            self._file.seek(self._row_start)
        else:
            self._row = {"round": round_idx, **values}
            self._row_start = self._file.seek(0, os.SEEK_END)
        line = io.StringIO()
        csv.writer(line, lineterminator="\n").writerow([self._row.get(key, "") for key in self._keys])
        self._file.write(line.getvalue().encode())
        if again:
            self._file.truncate()
        self._file.flush()

    def _amend(self, round_idx: int, values: dict[str, float]) -> None:
        """Add values to the row of an earlier round."""
        rows: dict[int, dict[str, Any]] = {int(row["round"]): dict(row) for row in self._rows()}
        rows.setdefault(round_idx, {"round": round_idx}).update(values)
        last = self._row["round"]
        keys = [*self._keys, *(key for key in values if key not in self._keys)]
        self._rewrite(keys, [rows[r] for r in sorted(rows) if r < last], self._row)

    def _rows(self) -> list[dict[str, Any]]:
        """The rows on disk; one that was cut in the middle is left out."""
        with self.path.open(newline="", encoding="utf-8") as file:
            return [row for row in csv.DictReader(file) if None not in row.values()]

    def _rewrite(self, keys: list[str], earlier: Sequence[Mapping[str, Any]], row: dict[str, Any]) -> None:
        """Replace the table in one move: a reader finds the old one or the new one."""
        if self._file is not None:
            self._file.close()
        partial = self.path.with_name(f"{self.path.name}.part")
        with partial.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, keys, lineterminator="\n")
            writer.writeheader()
            writer.writerows(earlier)
            self._row_start = file.tell()
            if row:
                writer.writerow(row)
        os.replace(partial, self.path)
        self._keys, self._row = keys, row
        self._file = self.path.open("r+b")
        self._file.seek(0, os.SEEK_END)


class RunTensorBoard(TensorBoardLogger):
    """TensorBoard events directly in a folder, without a sub-folder per version and without `hparams.yaml`.

    Args:
        folder: of the event files.
        first_round: when a run continues: what older files hold from this round on is not shown any more.
    """

    def __init__(self, folder: str | Path, first_round: int | None = None) -> None:
        super().__init__(folder, name="", version="", default_hp_metric=False, purge_step=first_round)

    @rank_zero_only
    def save(self) -> None:
        self.experiment.flush()
