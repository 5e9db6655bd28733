"""Callback that names the clients which a run left out."""

import csv
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from pytorch_lightning import Callback, LightningModule, Trainer

from fl_lightning.utils.files import write_atomically

COLUMNS = ("round", "client", "reason")


class SkippedClients(Callback):
    """Writes `skipped.csv`: round, client and reason of every client that was left out; no file where none was.

    Args:
        dirpath: folder of the file; None: `trainer.default_root_dir`.
        filename: of the table.
    """

    def __init__(self, dirpath: str | Path | None = None, filename: str = "skipped.csv") -> None:
        self.dirpath, self.filename = dirpath, filename
        self._written = -1

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Drop the rows of rounds that are run again, and one that was cut."""
        path, self._written = self._path(trainer), trainer.current_epoch - 1
        if not trainer.is_global_zero or not path.is_file():
            return
        kept = []
        with path.open(newline="", encoding="utf-8") as file:
            for row in csv.reader(file):
                with suppress(ValueError):
                    if len(row) == len(COLUMNS) and int(row[0]) < trainer.current_epoch:
                        kept.append(row)

        def write(part: Path) -> None:
            with part.open("w", newline="", encoding="utf-8") as file:
                add(file, [COLUMNS, *kept])

        write_atomically(path, write)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._write(trainer, pl_module)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Name those of the round that ended the run, too."""
        self._write(trainer, pl_module)

    def _write(self, trainer: Trainer, loop: Any) -> None:
        if (
            not getattr(loop, "skipped", None)
            or not trainer.is_global_zero
            or loop.skipped[0].round_idx <= self._written
        ):
            return
        path, self._written = self._path(trainer), loop.skipped[0].round_idx
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", newline="", encoding="utf-8") as file:
            add(file, [*([COLUMNS] if not file.tell() else []), *loop.skipped])

    def _path(self, trainer: Trainer) -> Path:
        return Path(self.dirpath or trainer.default_root_dir, self.filename)


def add(file: TextIO, rows: Sequence[Sequence[Any]]) -> None:
    """Add rows to a table."""
    csv.writer(file, lineterminator="\n").writerows(rows)
