"""The progress of many cells on the console."""

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from fl_lightning.experiments.cell import Cell
from fl_lightning.experiments.cell_files import CellFiles
from fl_lightning.experiments.run import Outcome
from fl_lightning.utils.text import printable

MINUTE = 60.0
"""Seconds between two lines without a terminal."""


class CellProgress:
    """Tells how far the cells are: by bars on a terminal, else by a line a minute.

    Args:
        cells: Cells that must be run.
        total: Number of all cells, with the cells that are done.
        folder: Folder of their files.
    """

    def __init__(self, cells: Sequence[Cell], total: int, folder: Path) -> None:
        self.console = Console(file=sys.stdout, highlight=False, markup=False, emoji=False)
        self.total = total
        self.folder = folder
        self.ended = total - len(cells)
        self.ended_before = self.ended
        self.rounds = {cell.name: 0 if cell.has_open_end else cell.max_rounds for cell in cells}
        """Number of rounds of each cell, 0 if it is open."""
        self.done = dict.fromkeys(self.rounds, 0)
        """Number of complete rounds of each cell."""
        self.first: dict[str, int] = {}
        """Number of complete rounds of each cell when this session began with it."""
        self.began = time.monotonic()
        self.printed = self.began
        self.progress = Progress(  # style: ok, rich takes any number of columns
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("rounds"),
            TimeRemainingColumn(),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        all_rounds = None if self.is_open else sum(self.rounds.values())
        self.task = self.progress.add_task(f"{total} runs", total=all_rounds)
        self.tasks = {}
        for name, rounds in self.rounds.items():
            self.tasks[name] = self.progress.add_task(f"  {name}", total=rounds or None, visible=False)
        if self.ended:
            self.print(f"{self.ended} of {total} runs in {folder} are done already")

    def print(self, line: str) -> None:
        """Print a line above the bars."""
        self.console.print(printable(line), soft_wrap=True)

    def on_round(self, files: CellFiles, done: int) -> None:
        """Take the number of complete rounds of a cell."""
        self.first.setdefault(files.name, done)
        self.done[files.name] = done
        self.progress.update(self.tasks[files.name], completed=done, visible=True)
        self.progress.update(self.task, completed=sum(self.done.values()))
        self.tick()

    def tick(self) -> None:
        """Print a line a minute after the line before, if there is no terminal."""
        if not self.console.is_terminal and time.monotonic() - self.printed > MINUTE:
            self.printed = time.monotonic()
            self.print(self.line())

    def on_end(self, files: CellFiles, outcome: Outcome) -> None:
        """Take the end of a cell."""
        self.ended += 1
        if not outcome.error:
            self.done[files.name] = self.rounds[files.name]
        self.progress.update(self.tasks[files.name], visible=False)
        self.print(f"[{self.ended}/{self.total}] {files.name}: {outcome.error or 'done'}")

    @property
    def is_open(self) -> bool:
        """Whether some cell has an open number of rounds."""
        return not all(self.rounds.values())

    def line(self) -> str:
        """Describe what is done, what is left, and how long that takes at the pace so far."""
        if self.is_open:
            return self._line_of_runs()
        done = sum(self.done.values())
        all_rounds = sum(self.rounds.values())
        made = sum(self.done[name] - first for name, first in self.first.items())
        estimate = self._estimate(made, all_rounds - done)
        return f"{self._runs_text()}, {done} of {all_rounds} rounds of this session{estimate}"

    def _line_of_runs(self) -> str:
        """Describe the same if the number of rounds is open: by runs."""
        under_way = sum(self.done[name] for name in self.first if not self.rounds[name])
        estimate = self._estimate(self.ended - self.ended_before, self.total - self.ended)
        return f"{self._runs_text()}, {under_way} rounds of those under way{estimate}"

    def _runs_text(self) -> str:
        """Write the time, and how many runs are done."""
        return f"{time.strftime('%H:%M')} {self.ended} of {self.total} runs"

    def _estimate(self, made: int, left: int) -> str:
        """Write how long the rest takes, nothing before this session has made something.

        Args:
            made: Number of rounds, or runs, that this session has made.
            left: Number of rounds, or runs, that are left.
        """
        if not made:
            return ""
        pace = (time.monotonic() - self.began) / made
        return f", about {duration(pace * left)} left"


def duration(seconds: float) -> str:
    """Write a duration in minutes, of more than an hour in hours and minutes, of more than a day in hours.

    >>> duration(40), duration(3000), duration(8000), duration(5e6)
    ('1 min', '50 min', '2 h 13 min', '1,389 h')
    """
    hours, minutes = divmod(max(1, round(seconds / 60)), 60)
    if hours >= 24:
        return f"{seconds / 3600:,.0f} h"
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"
