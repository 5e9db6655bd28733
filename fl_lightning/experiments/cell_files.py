"""The files of a cell in the folder of an experiment, and what they tell about its run."""

import json
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from fl_lightning.experiments.cell import Cell, most_rounds
from fl_lightning.experiments.naming import StoredCells, limits_of
from fl_lightning.federation.code import changed_code
from fl_lightning.federation.files import INITIAL_WEIGHTS, changed_files
from fl_lightning.federation.horizon import round_limit
from fl_lightning.metrics.keys import Directions
from fl_lightning.reports.saved import DONE, MAX_SECONDS, SavedRun, ends_by, read_run
from fl_lightning.runs.folder import Keep, checkpoint_of, identity_in, identity_of, runs
from fl_lightning.runs.loggers import RoundCSVLogger
from fl_lightning.utils.files import lock_path, write_file

MAX_TIME = "max_time"
"""Limit that counts the time of the machine, so that no two runs have the same rounds."""


@dataclass(frozen=True)
class CellFiles:
    """Names the files of a cell, and can be pickled.

    Attributes:
        folder: Folder of the experiment's runs.
        name: Name of the cell.
        test: Whether the model of the run may be evaluated on the test split.
        limits: Limits that end the run, by the names in `ALL_LIMITS`. Other cells may ask for the same run with other
            limits.
        starts: Whether the run ends where its first round would begin.
        keep: Checkpoints that stay when the run is complete.
    """

    folder: Path
    name: str
    test: bool = True
    limits: tuple[tuple[str, Any], ...] = ()
    starts: bool = False
    keep: Keep = "all"

    @classmethod
    def of(cls, cell: Cell, folder: Path, test: bool = True, keep: Keep = "all") -> "CellFiles":
        """Name the files of a cell that asks for its own rounds."""
        return cls(folder=folder, name=cell.name, test=test, limits=tuple(cell.limits.items()), keep=keep)

    @property
    def config(self) -> Path:
        """The file with the configuration."""
        return self.folder / "cells" / f"{self.name}.yaml"

    @property
    def log(self) -> Path:
        """The file with what the run has printed. A lock on it claims the cell."""
        return self.folder / "logs" / f"{self.name}.log"

    @property
    def parent(self) -> Path:
        """The folder of the cell's run folders, of which the last one counts."""
        return self.folder / "runs" / self.name

    @property
    def run(self) -> Path | None:
        """The run folder, None if the run has not begun."""
        return next(reversed(runs(self.parent).values()), None)

    @property
    def begun_run(self) -> Path:
        """The run folder of a cell that has begun.

        Raises:
            FileNotFoundError: The cell has no run folder any more.
        """
        run = self.run
        if run is None:
            raise FileNotFoundError(f"{self.parent} has no run; run the cell {self.name} again")
        return run

    @property
    def done(self) -> dict[str, Any] | None:
        """Limits of a complete run by the names in `ALL_LIMITS`, with its `rounds` and `name`. Else None."""
        run = self.run
        if run is None or not (run / DONE).is_file():
            return None
        return dict(json.loads((run / DONE).read_text(encoding="utf-8")))

    @property
    def identity(self) -> dict[str, Any]:
        """The identity in the last checkpoint of the run, empty without one."""
        run = self.run
        if run is None:
            return {}
        checkpoint = checkpoint_of(run, "last")
        identity = None if checkpoint is None else identity_in(checkpoint)
        return identity or identity_of(run)

    @property
    def planned_rounds(self) -> int | None:
        """The number of rounds for which the run is planned, None if no part of the run has asked for it."""
        return round_limit(*self.identity.get("horizon", {}).values())

    @property
    def changed(self) -> dict[str, str]:
        """The user's classes, functions, sources and files that have changed since the run began.

        Each name has the beginning of a sentence: "the source has" for a class or function, "the files have" for a
        source of samples, and "the file has" for the initial weights.
        """
        identity = self.identity
        subjects = dict.fromkeys(changed_code(identity.get("code", {})), "the source has")
        for name in changed_files(identity.get("files", {}), identity.get("config", {})):
            subjects[name] = "the file has" if name == INITIAL_WEIGHTS else "the files have"
        return subjects

    @property
    def rounds(self) -> int:
        """The number of complete rounds of the run, which may have been continued and stopped after it was done."""
        on_disk = max(self.rows, default=-1) + 1
        done = self.done
        return max(on_disk, int(done["rounds"])) if done else on_disk

    @property
    def rows(self) -> dict[int, dict[str, float]]:
        """The values on disk by round, each by log key. Empty if the run has not begun."""
        run = self.run
        return {} if run is None else RoundCSVLogger(run).rows_on_disk()

    def is_complete(self) -> bool:
        """Return True if the run has as many rounds as its limits ask for, or more."""
        limits = dict(self.limits)
        done = self.done
        if done is not None and limits_of(done) == limits:
            return True
        if self.has_used_budget():
            return True
        most = most_rounds(limits)
        if most <= 0:
            return False
        if done is not None and most <= int(done["rounds"]):
            return True
        # A run that was stopped after exactly these rounds may lack its test.
        return most < self.rounds

    def has_used_budget(self) -> bool:
        """Return True if the run has all rounds that end within the simulated seconds that its limits ask for.

        Then a later round ends after them, or the run was done with limits that are nowhere tighter: its next round
        would have ended later, or it ended by itself.
        """
        limits = dict(self.limits)
        if MAX_SECONDS not in limits:
            return False
        if not all(ends_by(row, limits[MAX_SECONDS]) for row in self.rows.values()):
            return True
        done = self.done
        return done is not None and are_within(limits, limits_of(done))

    def has_rounds(self) -> bool:
        """Return False if no round ends within the simulated seconds that the limits ask for."""
        seconds = dict(self.limits).get(MAX_SECONDS)
        return seconds is None or any(ends_by(row, seconds) for row in self.rows.values())

    @contextmanager
    def claimed(self) -> Iterator[bool]:
        """Claim the cell for this process within the block, which gets False if another process has the cell."""
        # A finished run may lie in a folder that cannot be written.
        if not self.log.is_file():
            self.log.parent.mkdir(parents=True, exist_ok=True)
            self.log.touch()
        try:
            descriptor = lock_path(self.log)
        except BlockingIOError:
            yield False
            return
        if descriptor is None:
            warnings.warn(
                f"files in {self.log.parent} cannot be locked, so that a second process would run the same cells; "
                f"start one only, or take a folder on a disk that knows flock",
                stacklevel=2,
            )
        try:
            yield True
        finally:
            if descriptor is not None:
                os.close(descriptor)

    def read(self, max_rounds: int = -1, directions: Directions | None = None) -> SavedRun:
        """Read the run up to a number of rounds, and up to the simulated seconds of its limits.

        Args:
            max_rounds: Number of rounds. -1 reads all of them.
            directions: Directions of keys that win over the directions in the run folder. None means none.
        """
        return read_run(
            self.begun_run,
            rounds=None if max_rounds < 0 else max_rounds,
            directions=directions,
            seconds=dict(self.limits).get(MAX_SECONDS),
        )


def are_within(limits: Mapping[str, Any], others: Mapping[str, Any]) -> bool:
    """Return True if a run that ended with other limits is the whole run with these limits, or longer.

    >>> are_within({"max_seconds": 300}, {"max_seconds": 600}), are_within({"max_seconds": 300}, {"max_epochs": 50})
    (True, False)
    """
    for name, other in others.items():
        if name not in limits:
            return False
        if name == MAX_TIME and limits[name] != other:
            return False
        if name != MAX_TIME and limits[name] > other:
            return False
    return MAX_TIME in others or MAX_TIME not in limits


def located(cells: Iterable[Cell], folder: Path) -> list[Cell]:
    """Give each cell the name that its run has in a folder already, or that an equal cell before it has."""
    stored = StoredCells(folder)
    return [replace(cell, name=stored.name_of(cell.name, cell.settings)) for cell in cells]


def files_in(cell: Cell, folders: Iterable[Path]) -> list[CellFiles]:
    """Name the files of a cell in each of some folders, by the name that the cell has there."""
    found = []
    for folder in folders:
        (named,) = located([cell], folder)
        found.append(CellFiles.of(named, folder))
    return found


def prepare(cell: Cell, folder: Path) -> bool:
    """Write a cell's configuration, and return True if the cell must still be run."""
    files = CellFiles.of(cell, folder)
    write_file(files.config, yaml.safe_dump(dict(cell.config), sort_keys=False))
    return not files.is_complete()
