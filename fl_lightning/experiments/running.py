"""The run of many cells by this process or others."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from fl_lightning.experiments.cell import Cell
from fl_lightning.experiments.cell_files import CellFiles, prepare
from fl_lightning.experiments.cells import is_planned
from fl_lightning.experiments.progress import CellProgress
from fl_lightning.experiments.run import Outcome
from fl_lightning.experiments.workers import run_all
from fl_lightning.federation.configured import planned_rounds
from fl_lightning.runs.folder import Keep, checkpoint_of

POLL = 2.0
"""Seconds between two looks at the cells that other processes are at."""

Failures = dict[str, str]
"""The sentences of the cells that failed, by name."""


def run_cells(
    cells: Iterable[Cell],
    processes: int,
    folder: Path,
    *,
    test: bool = True,
    on_seed: Callable[[Failures], None] | None = None,
    keep: Keep = "all",
) -> Failures:
    """Run the cells that are not done, and wait for the cells that other processes are at.

    Args:
        cells: The cells. Equal cells are run once, as long as the longest.
        processes: Number of cells at once. 0 runs them in this process.
        folder: Folder of their files.
        test: Whether the test split may be evaluated.
        on_seed: Function that is called with the failures whenever all cells of a further seed have ended.
        keep: Checkpoints that stay when a cell is complete.

    Returns:
        The sentences of the cells that failed, by name.

    Raises:
        KeyboardInterrupt: The runs were interrupted. The sentence tells how to go on.
    """
    cells = list(cells)
    by_name = longest_by_name(cells)
    waiting = {name: cell for name, cell in by_name.items() if prepare(cell, folder)}
    progress = CellProgress(list(waiting.values()), len(by_name), folder)
    done = [CellFiles.of(cell, folder, test) for name, cell in by_name.items() if name not in waiting]
    for sentence in sentences_on_changes(done):
        progress.print(sentence)
    for sentence in sentences_on_restarts(waiting.values(), folder):
        progress.print(sentence)
    ends = Ends(progress, waiting, on_seed)
    left = [CellFiles.of(cell, folder, test=test, keep=kept_by(cell, keep)) for cell in waiting.values()]
    with progress.progress:
        try:
            while left:
                run_all(left, processes, on_round=progress.on_round, on_end=ends.on_end)
                left = free_again(ends.elsewhere, progress)
                ends.elsewhere.clear()
        except KeyboardInterrupt:
            raise KeyboardInterrupt(
                f"interrupted; {progress.ended} of {len(by_name)} runs in {folder} are done, and the same command "
                f"goes on with the others"
            ) from None
    for sentence in sentences_on_plans(cells, folder, test):
        progress.print(sentence)
    return ends.failed


def kept_by(cell: Cell, keep: Keep) -> Keep:
    """Return which checkpoints of a cell stay. If only its first rounds are run, a later command continues them."""
    is_part = 0 < cell.max_rounds < cell.all_rounds
    return "last" if is_part and keep == "none" else keep


def sentences_on_restarts(waiting: Iterable[Cell], folder: Path) -> list[str]:
    """Return a sentence for each complete run that more rounds are asked of and that kept no checkpoint.

    Args:
        waiting: The cells that must be run.
        folder: Folder of their files.
    """
    sentences = []
    for cell in waiting:
        files = CellFiles.of(cell, folder)
        if files.done is not None and checkpoint_of(files.begun_run, "last") is None:
            sentences.append(f"{cell.name} begins again, because its checkpoints were not kept")
    return sentences


def longest_by_name(cells: Iterable[Cell]) -> dict[str, Cell]:
    """Return a cell of each name: the longest, which has the rounds of the others with this name."""
    by_name: dict[str, Cell] = {}
    for cell in cells:
        other = by_name.setdefault(cell.name, cell)
        if cell.length > other.length:
            by_name[cell.name] = cell
    return by_name


class Ends:
    """Takes the ends of cells.

    Args:
        progress: Progress on the console.
        waiting: Cells that must be run, by name.
        on_seed: Function that is called with the failures whenever all cells of a further seed have ended, or None.

    Attributes:
        failed: Sentences of the cells that failed, by name.
        elsewhere: Files of the cells that other processes are at.
    """

    def __init__(
        self,
        progress: CellProgress,
        waiting: Mapping[str, Cell],
        on_seed: Callable[[Failures], None] | None,
    ) -> None:
        self.progress = progress
        self.waiting = waiting
        self.on_seed = on_seed
        self.failed: Failures = {}
        self.elsewhere: list[CellFiles] = []
        self._left: dict[int, set[str]] = {}
        """Names of the cells that have not ended, by seed."""
        for name, cell in waiting.items():
            self._left.setdefault(cell.seed, set()).add(name)

    def on_end(self, files: CellFiles, outcome: Outcome) -> None:
        """Take the end of a cell."""
        if outcome.claimed:
            self.elsewhere.append(files)
            return
        if outcome.error:
            self.failed[files.name] = outcome.error
        self.progress.on_end(files, outcome)
        left = self._left[self.waiting[files.name].seed]
        left.discard(files.name)
        if self.on_seed is not None and not left and len(self._left) > 1:
            self.on_seed(self.failed)


def sentences_on_plans(cells: Iterable[Cell], folder: Path, test: bool) -> list[str]:
    """Return a sentence for each number of rounds that is read off runs of another plan.

    A module or data that ask for the planned rounds are known only once they have run. Cells of fewer rounds were then
    taken for the first rounds of a longer run.

    Args:
        cells: The cells, which have run.
        folder: Folder of their files.
        test: Whether the test split may be evaluated.
    """
    plans: set[tuple[int, int]] = set()
    for cell in cells:
        if is_planned(cell.config):
            continue
        planned = CellFiles.of(cell, folder, test).planned_rounds
        if planned is None or not 0 <= cell.max_rounds < planned:
            continue
        if planned != planned_rounds(cell.config):
            plans.add((cell.max_rounds, planned))
    return [
        f"trainer.max_epochs: runs asked for with {rounds} rounds show the first rounds of runs planned for {planned}, "
        f"whose module or data ask for the plan; give another folder for runs of {rounds} rounds"
        for rounds, planned in sorted(plans)
    ]


def sentences_on_changes(done: Iterable[CellFiles]) -> list[str]:
    """Return a sentence for each class and source of the user that has changed since runs that are done were begun."""
    counts: dict[tuple[str, str], int] = {}
    for files in done:
        for change in files.changed.items():
            counts[change] = counts.get(change, 0) + 1
    sentences = []
    for (name, subject), count in counts.items():
        sentences.append(
            f"{name}: {subject} changed since {count} of the runs that are done were begun, whose values are those of "
            f"before; give another folder to run them again"
        )
    return sentences


def free_again(elsewhere: Sequence[CellFiles], progress: CellProgress) -> list[CellFiles]:
    """Wait until another process leaves one of its cells, and return all of the cells for another try.

    Args:
        elsewhere: Files of the cells that other processes are at. Without cells nothing is waited for.
        progress: Progress on the console.
    """
    if not elsewhere:
        return []
    progress.print(f"other processes are at {len(elsewhere)} runs in {progress.folder}; waiting for their end")
    while True:
        for files in elsewhere:
            with files.claimed() as free:
                if free:
                    return list(elsewhere)
        time.sleep(POLL)
        progress.tick()
