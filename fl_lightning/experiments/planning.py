"""The plan of an experiment: its runs, and how many rounds of each a folder has."""

from collections.abc import Sequence
from pathlib import Path

from fl_lightning.experiments.cells import Cell, CellFiles, Cells, files_in
from fl_lightning.experiments.composing import settings_text
from fl_lightning.experiments.running import duration
from fl_lightning.experiments.tuning import cells_of, choose_candidates, tried_of
from fl_lightning.reports.saved import TUNING


def plan(name: str, cells: Cells, folders: Sequence[Path]) -> str:
    """List the runs of an experiment: seed, case, method, rounds that are done and asked for.

    Args:
        name: `paper/number`.
        cells: of the experiment; what is tuned has its values where a folder has all runs that these are chosen by.
        folders: of runs: that of the experiment, and those whose runs are taken over.

    Raises:
        ValueError: what is to be tuned cannot be.
    """
    lines = list[Sequence[str]]()
    left = dict[str, tuple[int, float]]()
    unfinished = set[str]()
    for cell, part in cells_in(cells, folders):
        files = files_in(cell, [folder / part for folder in folders])
        done = max(each.rounds for each in files)
        method = ", ".join(filter(None, (cell.method, part and settings_text(cell.tuned), part)))
        rounds = f"{done} of {cell.max_rounds}" if cell.max_rounds > 0 else f"{done}, no limit"
        if cell.max_seconds is not None:
            rounds = f"{rounds.removesuffix(', no limit')}, at most {cell.max_seconds:.12g} simulated seconds"
        lines.append((str(cell.seed), cell.case, method, rounds, cell.name))
        run = f"{part}/{cell.name}"  # of several cells it is as long as the longest
        left[run] = max(left.get(run, (0, 0.0)), left_of(cell, files, done))
        if cell.has_open_end and not any(each.is_complete() for each in files):
            unfinished.add(run)
    table = [("seed", "case", "method", "rounds", "run"), *lines]
    widths = [max(len(line[i]) for line in table) for i in range(len(table[0]))]
    padded = ("  ".join(f"{text:{width}}" for text, width in zip(line, widths, strict=True)) for line in table)
    hours = sum(each for _, each in left.values())
    total = f"{name}: {len(left)} runs, {left_text(sum(rounds for rounds, _ in left.values()), len(unfinished))}"
    takes = f", which take about {duration(3600 * hours / 2)} on two cores" if hours else ""
    return "\n".join([*map(str.rstrip, padded), total + takes])


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
    """Compose all cells, those of tuning first, each with the part of a folder that has its run."""
    for folder in folders:
        tried = tried_of(cells, folder)
        tuning = cells_of(tried)
        if tuning and all(CellFiles.of(cell, folder / TUNING).is_complete() for cell in tuning):
            choose_candidates(cells, tried, folder / TUNING, {})
            break
    starts, begun = cells.in_folder(folders[0])
    return [*((cell, TUNING) for cell in tuning), *((cell, "") for cell in (*starts, *begun))]


def left_of(cell: Cell, files: Sequence[CellFiles], done: int) -> tuple[int, float]:
    """Compute the rounds that a run lacks, 0 if nobody knows them, and the hours of one core that they take."""
    rounds = 0 if cell.has_open_end else max(cell.max_rounds - done, 0)
    if not cell.has_open_end and cell.own_rounds > 0:
        return rounds, cell.core_hours * rounds / cell.own_rounds
    return rounds, 0.0 if any(each.is_complete() for each in files) else cell.core_hours
