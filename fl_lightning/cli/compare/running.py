"""A grid as it was asked for, and the run of its cells, with their progress on the console."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from fl_lightning.cli.compare.cells import CellFiles, Outcome, prepare
from fl_lightning.cli.compare.grid import Case, Cell, Composer, Held, cells_of, check_names
from fl_lightning.cli.compare.workers import run_all
from fl_lightning.utils.text import printable


@dataclass
class Grid:
    """A grid as it was asked for.

    Attributes:
        composer: has the base.
        output: folder.
        methods: names.
        seeds: of each method.
        hold: what a seed must not vary.
        processes: cells at once; 0: in this process.
        chosen: settings that were tuned, by method and case.
    """

    composer: Composer
    output: Path
    methods: Sequence[str]
    seeds: Sequence[int]
    hold: Sequence[Held]
    processes: int
    chosen: dict[tuple[str, Case], Case] = field(default_factory=dict)

    def cells(self, case: Case) -> list[Cell]:
        """Compose the cells of all methods in a case."""
        cells = []
        for method in self.methods:
            tuned = self.chosen.get((method, case), ())
            cells += cells_of(self.composer, method, [*case, *tuned], self.seeds, self.hold)
        return cells


def run_cells(cells: Iterable[Cell], processes: int, folder: Path, test: bool = True) -> dict[str, str]:
    """Run the cells that are not done.

    Args:
        cells: equal ones are run once.
        processes: cells at once.
        folder: of their files.
        test: whether the test split may be evaluated.

    Returns:
        The sentences of those that failed, by name.

    Raises:
        ValueError: two cells that differ have one name, or one of them cannot be continued.
        KeyboardInterrupt: naming how to go on.
    """
    cells = check_names(cells).values()
    left = [cell for cell in cells if prepare(cell, folder)]
    console = Console(highlight=False, markup=False, emoji=False)
    failed, ended = dict[str, str](), len(cells) - len(left)
    if ended:
        console.print(printable(f"{ended} of {len(cells)} cells in {folder} are done already"))
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TextColumn("rounds"))
    with Progress(*columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal) as progress:
        rounds = {cell.name: max(cell.max_rounds, 0) for cell in left}
        total = progress.add_task(f"{len(cells)} cells", total=sum(rounds.values()))
        tasks = {name: progress.add_task(f"  {name}", total=most, visible=False) for name, most in rounds.items()}

        def on_round(files: CellFiles, done: int) -> None:
            progress.update(tasks[files.name], completed=done, visible=True)
            progress.update(total, completed=sum(task.completed for task in progress.tasks if task.id != total))

        def on_end(files: CellFiles, outcome: Outcome) -> None:
            nonlocal ended
            ended += 1
            progress.update(tasks[files.name], visible=False)
            if outcome.error:
                failed[files.name] = outcome.error
            line = f"[{ended}/{len(cells)}] {files.name}: {outcome.error or 'done'}"
            console.print(printable(line), soft_wrap=True)

        try:
            run_all([CellFiles(folder, cell.name, test) for cell in left], processes, on_round, on_end)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(
                f"interrupted; {ended} of {len(cells)} cells in {folder} are done, and the same command goes on with "
                f"the others"
            ) from None
    return failed
