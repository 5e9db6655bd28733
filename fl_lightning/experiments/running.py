"""The run of many cells, with their progress on the console."""

import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from fl_lightning.experiments.cells import Cell, CellFiles, is_planned, prepare
from fl_lightning.experiments.run import Outcome
from fl_lightning.experiments.workers import run_all
from fl_lightning.federation.configured import planned_rounds
from fl_lightning.utils.text import printable

MINUTE = 60.0
POLL = 2.0
"""Seconds between two looks at the cells that other processes are at."""


class CellProgress:
    """Tells how far the cells are: by bars on a terminal, else by a line a minute.

    Args:
        cells: that are to be run.
        total: number of all cells, with those that are done.
        folder: of their files.
    """

    def __init__(self, cells: Sequence[Cell], total: int, folder: Path) -> None:
        self.console = Console(file=sys.stdout, highlight=False, markup=False, emoji=False)
        self.total = total
        self.folder = folder
        self.ended = total - len(cells)
        self.ended_before = self.ended
        self.rounds = {cell.name: 0 if cell.has_open_end else cell.max_rounds for cell in cells}
        self.done = dict.fromkeys(self.rounds, 0)
        self.first: dict[str, int] = {}
        self.began = self.printed = time.monotonic()
        columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn())
        last = (TextColumn("rounds"), TimeRemainingColumn())
        self.progress = Progress(*columns, *last, console=self.console, disable=not self.console.is_terminal)
        all_rounds = None if self.is_open else sum(self.rounds.values())
        self.task = self.progress.add_task(f"{total} runs", total=all_rounds)
        self.tasks = {
            name: self.progress.add_task(f"  {name}", total=most or None, visible=False)
            for name, most in self.rounds.items()
        }
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
        """Print a line, where there is no terminal, a minute after the one before."""
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
        """Whether some cell has an open number of rounds, which is 0 in `rounds`."""
        return not all(self.rounds.values())

    def line(self) -> str:
        """Describe what is done, what is left, and how long that takes at the pace so far."""
        if self.is_open:
            return self._line_of_runs()
        done = sum(self.done.values())
        left = sum(self.rounds.values()) - sum(self.done.values())
        made = sum(self.done[name] - first for name, first in self.first.items())
        pace = (time.monotonic() - self.began) / made if made else 0.0
        estimate = f", about {duration(pace * left)} left" if made else ""
        return (
            f"{time.strftime('%H:%M')} {self.ended} of {self.total} runs, "
            f"{done} of {done + left} rounds of this session{estimate}"
        )

    def _line_of_runs(self) -> str:
        """Describe the same where the number of rounds is open: by runs."""
        under_way = sum(self.done[name] for name in self.first if not self.rounds[name])
        ended_here = self.ended - self.ended_before
        pace = (time.monotonic() - self.began) / ended_here if ended_here else 0.0
        estimate = f", about {duration(pace * (self.total - self.ended))} left" if ended_here else ""
        moment = time.strftime("%H:%M")
        return f"{moment} {self.ended} of {self.total} runs, {under_way} rounds of those under way{estimate}"


def duration(seconds: float) -> str:
    """Write a duration in minutes, of more than an hour in hours and minutes, of more than a day in hours.

    >>> duration(40), duration(3000), duration(8000), duration(5e6)
    ('1 min', '50 min', '2 h 13 min', '1,389 h')
    """
    hours, minutes = divmod(max(1, round(seconds / 60)), 60)
    if hours >= 24:
        return f"{seconds / 3600:,.0f} h"
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"


def run_cells(
    cells: Iterable[Cell],
    processes: int,
    folder: Path,
    test: bool = True,
    on_seed: Callable[[dict[str, str]], None] | None = None,
) -> dict[str, str]:
    """Run the cells that are not done, and wait for those that other processes are at.

    Args:
        cells: equal ones are run once, as long as the longest.
        processes: cells at once; 0: in this process.
        folder: of their files.
        test: whether the test split may be evaluated.
        on_seed: is called with the sentences of those that failed whenever all cells of a further seed have ended.

    Returns:
        The sentences of those that failed, by name.

    Raises:
        KeyboardInterrupt: naming how to go on.
    """
    cells = list(cells)
    by_name = dict[str, Cell]()
    for cell in cells:
        other = by_name.setdefault(cell.name, cell)
        if cell.length > other.length:
            by_name[cell.name] = cell  # the longer one has the rounds of both
    waiting = [cell for cell in by_name.values() if prepare(cell, folder)]
    cell_progress = CellProgress(waiting, len(by_name), folder)
    left_names = {cell.name for cell in waiting}
    done = [CellFiles.of(cell, folder, test) for cell in by_name.values() if cell.name not in left_names]
    for sentence in sentences_on_changes(done):
        cell_progress.print(sentence)
    failed = dict[str, str]()
    of_seed: dict[int, set[str]] = {}
    for cell in waiting:
        of_seed.setdefault(cell.seed, set()).add(cell.name)
    elsewhere: list[CellFiles] = []

    def on_end(files: CellFiles, outcome: Outcome) -> None:
        if outcome.claimed:
            elsewhere.append(files)
            return
        if outcome.error:
            failed[files.name] = outcome.error
        cell_progress.on_end(files, outcome)
        left = of_seed[by_name[files.name].seed]
        left.discard(files.name)
        if on_seed is not None and not left and len(of_seed) > 1:
            on_seed(failed)

    left = [CellFiles.of(cell, folder, test) for cell in waiting]
    with cell_progress.progress:
        try:
            while left:
                run_all(left, processes, cell_progress.on_round, on_end)
                left = free_again(elsewhere, cell_progress)
                elsewhere.clear()
        except KeyboardInterrupt:
            raise KeyboardInterrupt(
                f"interrupted; {cell_progress.ended} of {len(by_name)} runs in {folder} are done, and the same command "
                f"goes on with the others"
            ) from None
    for sentence in sentences_on_plans(cells, folder, test):
        cell_progress.print(sentence)
    return failed


def sentences_on_plans(cells: Iterable[Cell], folder: Path, test: bool) -> list[str]:
    """Return a sentence for each number of rounds that is read off runs of another plan.

    A module or data that ask for the planned rounds are known once they have run only. Cells of fewer rounds were then
    taken for the first rounds of a longer run.
    """
    plans: set[tuple[int, int]] = set()
    for cell in cells:
        planned = None if is_planned(cell.config) else CellFiles.of(cell, folder, test).planned_rounds
        if planned is not None and 0 <= cell.max_rounds < planned != planned_rounds(cell.config):
            plans.add((cell.max_rounds, planned))
    return [
        f"trainer.max_epochs: runs asked for with {rounds} rounds show the first rounds of runs planned for {planned}, "
        f"whose module or data ask for the plan; give another folder for runs of {rounds} rounds"
        for rounds, planned in sorted(plans)
    ]


def sentences_on_changes(done: Iterable[CellFiles]) -> list[str]:
    """Return a sentence for each class and source of the user that has changed since runs that are done were begun."""
    runs_of: dict[tuple[str, str], int] = {}
    for files in done:
        for change in files.changed.items():
            runs_of[change] = runs_of.get(change, 0) + 1
    sentences = []
    for (name, subject), count in runs_of.items():
        sentences.append(
            f"{name}: {subject} changed since {count} of the runs that are done were begun, whose values are those of "
            f"before; give another folder to run them again"
        )
    return sentences


def free_again(elsewhere: Sequence[CellFiles], cell_progress: CellProgress) -> list[CellFiles]:
    """Wait until a process is gone that is at one of the cells, and return all of them, for another try."""
    if elsewhere:
        cell_progress.print(
            f"other processes are at {len(elsewhere)} runs in {cell_progress.folder}; waiting for their end"
        )
    while elsewhere:
        for files in elsewhere:
            with files.claimed() as free:
                if free:
                    return list(elsewhere)
        time.sleep(POLL)
        cell_progress.tick()
    return []
