"""The plan of an experiment: its runs, and how many rounds of each a folder has."""

from collections.abc import Sequence
from pathlib import Path

from fl_lightning.experiments.cell import Cell
from fl_lightning.experiments.cell_files import CellFiles, files_in
from fl_lightning.experiments.cells import Cells
from fl_lightning.experiments.overrides import settings_text
from fl_lightning.experiments.progress import duration
from fl_lightning.experiments.tuning import cells_of, choose_candidates, tried_of
from fl_lightning.reports.saved import TUNING

HEADER = ("seed", "case", "method", "rounds", "run")


def plan(name: str, cells: Cells, folders: Sequence[Path]) -> str:
    """List the runs of an experiment: seed, case, method, rounds that are done and asked for.

    Args:
        name: Name of the experiment, `paper/number`.
        cells: Cells of the experiment. Tuned settings have their values if a folder has all runs of their candidates.
        folders: Folders of runs: the folder of the experiment, and the folders whose runs are taken over.

    Raises:
        ValueError: A setting must not be tuned, or cannot be tuned.
    """
    lines: list[Sequence[str]] = [HEADER]
    left: dict[str, tuple[int, float]] = {}
    unfinished: set[str] = set()
    for cell, part in cells_in(cells, folders):
        files = files_in(cell, [folder / part for folder in folders])
        done = max(each.rounds for each in files)
        method = ", ".join(filter(None, (cell.method, part and settings_text(cell.tuned), part)))
        lines.append((str(cell.seed), cell.case, method, progress_text(cell, done), cell.name))
        # A run of several cells is as long as the longest.
        run = f"{part}/{cell.name}"
        left[run] = max(left.get(run, (0, 0.0)), left_of(cell, files, done))
        if cell.has_open_end and not any(each.is_complete() for each in files):
            unfinished.add(run)
    rounds = sum(rounds for rounds, _ in left.values())
    hours = sum(hours for _, hours in left.values())
    total = f"{name}: {len(left)} runs, {left_text(rounds, len(unfinished))}"
    if hours:
        total += f", which take about {duration(3600 * hours / 2)} on two cores"
    return "\n".join([*padded(lines), total])


def progress_text(cell: Cell, done: int) -> str:
    """Write how many rounds of a cell are done, and its limits."""
    text = f"{done} of {cell.max_rounds}" if cell.max_rounds > 0 else str(done)
    if cell.max_seconds is not None:
        return f"{text}, at most {cell.max_seconds:.12g} simulated seconds"
    return text if cell.max_rounds > 0 else f"{text}, no limit"


def padded(lines: Sequence[Sequence[str]]) -> list[str]:
    """Write lines of equally many texts with the texts below each other."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    written = []
    for line in lines:
        texts = [f"{text:{width}}" for text, width in zip(line, widths, strict=True)]
        written.append("  ".join(texts).rstrip())
    return written


def left_text(rounds: int, unfinished: int) -> str:
    """Write what is left of all runs.

    Args:
        rounds: Number of rounds of the runs that end by rounds.
        unfinished: Number of unfinished runs whose number of rounds is known only at their end.

    >>> left_text(18, 0), left_text(0, 72)
    ('18 rounds left', '72 of them unfinished, whose number of rounds is open')
    >>> left_text(18, 2)
    '18 rounds left, 2 more of them unfinished, whose number of rounds is open'
    """
    if not unfinished:
        return f"{rounds} rounds left"
    of_rounds = f"{rounds} rounds left, " if rounds else ""
    more = " more" if rounds else ""
    return f"{of_rounds}{unfinished}{more} of them unfinished, whose number of rounds is open"


def cells_in(cells: Cells, folders: Sequence[Path]) -> list[tuple[Cell, str]]:
    """Compose all cells, the cells of tuning first, each with the part of a folder that has its run.

    Args:
        cells: Cells of the experiment, whose `chosen` is filled if a folder has all runs of the candidates.
        folders: Folders of runs, the folder of the experiment first.
    """
    for folder in folders:
        tried = tried_of(cells, folder)
        tuning = cells_of(tried)
        if tuning and all(CellFiles.of(cell, folder / TUNING).is_complete() for cell in tuning):
            choose_candidates(cells, tried, folder / TUNING, failed={})
            break
    starts, begun = cells.in_folder(folders[0])
    return [*((cell, TUNING) for cell in tuning), *((cell, "") for cell in (*starts, *begun))]


def left_of(cell: Cell, files: Sequence[CellFiles], done: int) -> tuple[int, float]:
    """Compute what a run still takes.

    Args:
        cell: Cell of the run.
        files: Files of the cell in each folder.
        done: Number of rounds that are done.

    Returns:
        The number of rounds that the run lacks, 0 if it is open, and the hours of one core that they take.
    """
    rounds = 0 if cell.has_open_end else max(cell.max_rounds - done, 0)
    if not cell.has_open_end and cell.own_rounds > 0:
        return rounds, cell.core_hours * rounds / cell.own_rounds
    if any(each.is_complete() for each in files):
        return rounds, 0.0
    return rounds, cell.core_hours
