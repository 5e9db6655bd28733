"""The start of every setting of an experiment, before any of them is trained."""

import tempfile
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import yaml  # type: ignore[import-untyped]

from fl_lightning.experiments.cells import Cell, CellFiles, Cells, files_in, located, started
from fl_lightning.experiments.composing import settings_text
from fl_lightning.experiments.run import Outcome
from fl_lightning.experiments.tuning import cells_of, tried_of
from fl_lightning.experiments.workers import run_all
from fl_lightning.metrics.keys import direction_of
from fl_lightning.papers.drawing import check_target_key
from fl_lightning.reports.saved import TUNING
from fl_lightning.utils.files import write_file


def check_starts(experiments: Iterable[Cells], processes: int, folders: Sequence[Path]) -> None:
    """Begin one run of each setting of which none has begun, as its fit would up to the first round.

    Nothing of it stays. A setting is a method in a case, with one choice of what is tuned; its seeds start alike.

    Args:
        experiments: whose settings these are.
        processes: cells at once; 0: in this process.
        folders: of runs: that of the experiments, and those whose runs are taken over.

    Raises:
        ValueError: naming all settings that do not start, with the reasons.
    """
    first = dict[tuple[int, str], Cell]()
    begun = set[tuple[int, str]]()
    for number, cells in enumerate(experiments):
        check_targets(cells)
        for cell, has_rounds in runs_of(cells, folders):
            label = ", ".join(filter(None, (cell.method, cell.case, settings_text(cell.tuned))))
            first.setdefault((number, label), cell)
            begun |= {(number, label)} if has_rounds else set()
    left = {place: cell for place, cell in first.items() if place not in begun}
    left = dict(zip(left, located(left.values(), folders[0]), strict=True))  # the same run has one name
    errors = dict[str, str]()
    if left:  # of which reading the data may take long
        print(f"beginning {len(left)} setting{'s' * (len(left) != 1)} before any is trained", flush=True)
        errors = errors_of(left.values(), processes)
    failed = {place: cell for place, cell in left.items() if cell.name in errors}
    if failed:
        reasons = dict[str, dict[str, None]]()
        for (_, label), cell in failed.items():
            alike = [other for other in left.values() if other.method == cell.method]
            of_all = len(alike) > 1 and {errors.get(other.name) for other in alike} == {errors[cell.name]}
            reasons.setdefault(errors[cell.name], {})[cell.method if of_all else label] = None
        named = ". ".join(f"{' and '.join(names)}: {reason}" for reason, names in reasons.items())
        raise ValueError(
            f"{len(failed)} of {len(first)} setting{'s' * (len(first) != 1)} cannot be run, so that nothing was "
            f"trained. {named}"
        )


def check_targets(cells: Cells) -> None:
    """Refuse drawings that count rounds until a value that is better when lower, as far as is known before the runs.

    Raises:
        ValueError: Lower is better.
    """
    for drawing in cells.experiment.draw.values():
        for key in drawing.target_keys():
            for cell in cells.all():
                check_target_key(key, direction_of(key, cell.directions))


def errors_of(cells: Collection[Cell], processes: int) -> dict[str, str]:
    """Begin runs in a folder that is deleted, each once, and give the sentences of those that do not start by name."""
    errors = dict[str, str]()
    apart = 0
    if processes and torch.cuda.is_available() and any(c.config["trainer"]["accelerator"] != "cpu" for c in cells):
        apart = 1  # what a process has on a GPU stays there until it ends

    def on_round(files: CellFiles, rounds: int) -> None:
        """Take a number of rounds, of which there are none."""

    def on_end(files: CellFiles, outcome: Outcome) -> None:
        if outcome.error:
            errors[files.name] = outcome.error

    with tempfile.TemporaryDirectory(prefix="fl_lightning-") as folder:
        jobs = {cell.name: replace(CellFiles.of(cell, Path(folder)), starts=True) for cell in cells}
        for cell in cells:
            write_file(jobs[cell.name].config, yaml.safe_dump(dict(cell.config), sort_keys=False))
        run_all(jobs.values(), apart, on_round, on_end)
    return errors


def runs_of(cells: Cells, folders: Sequence[Path]) -> Iterator[tuple[Cell, bool]]:
    """Compose the runs of an experiment, of what is tuned those of the candidates, and whether each has begun."""
    tried = tried_of(cells, folders[0])
    for cell in cells_of(tried):
        yield cell, has_begun(cell, [folder / TUNING for folder in folders])
    starts = cells.starts()
    every = cells.all()
    for cell in starts:
        yield cell, has_begun(cell, folders)
    for cell, named in zip(every, started(every, located(starts, folders[0]), folders[0]), strict=True):
        if (cell.method, cell.case) not in tried:
            yield cell, has_begun(named, folders)


def has_begun(cell: Cell, folders: Iterable[Path]) -> bool:
    """Return True where one of the folders has rounds of a cell."""
    return any(files.rounds for files in files_in(cell, folders))
