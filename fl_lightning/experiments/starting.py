"""The start of every setting of an experiment, before any of them is trained."""

import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import yaml  # type: ignore[import-untyped]

from fl_lightning.experiments.cell import Cell
from fl_lightning.experiments.cell_files import CellFiles, files_in, located
from fl_lightning.experiments.cells import Cells, started
from fl_lightning.experiments.overrides import settings_text
from fl_lightning.experiments.run import Outcome
from fl_lightning.experiments.tuning import cells_of, tried_of
from fl_lightning.experiments.workers import run_all
from fl_lightning.metrics.keys import direction_of
from fl_lightning.papers.drawing import check_target_key
from fl_lightning.reports.saved import TUNING
from fl_lightning.utils.files import write_file

Place = tuple[int, str]
"""Number of an experiment, and the name of one of its settings: method, case and what is tuned."""


def check_starts(experiments: Iterable[Cells], processes: int, folders: Sequence[Path]) -> None:
    """Begin one run of each setting of which none has begun, as its fit would up to the first round.

    Nothing of such a run stays. A setting is a method in a case, with one choice of what is tuned; its seeds start
    alike.

    Args:
        experiments: Cells of the experiments.
        processes: Number of cells at once. 0 runs them in this process.
        folders: Folders of runs: the folder of the experiments, and the folders whose runs are taken over.

    Raises:
        ValueError: Settings do not start. The sentence names all of them, with the reasons.
    """
    first: dict[Place, Cell] = {}
    begun: set[Place] = set()
    for number, cells in enumerate(experiments):
        check_targets(cells)
        for cell, has_rounds in cells_to_begin(cells, folders):
            place = (number, name_of_setting(cell))
            first.setdefault(place, cell)
            if has_rounds:
                begun.add(place)
    places = [place for place in first if place not in begun]
    if not places:
        return
    # Equal runs have one name, and are begun once.
    named = located([first[place] for place in places], folders[0])
    # Reading the data may take long.
    print(f"beginning {settings_count(len(places))} before any is trained", flush=True)
    errors = errors_of(named, processes)
    failed = {place: cell for place, cell in zip(places, named, strict=True) if cell.name in errors}
    if failed:
        raise ValueError(
            f"{len(failed)} of {settings_count(len(first))} cannot be run, so that nothing was trained. "
            f"{reasons_text(failed, named, errors)}"
        )


def name_of_setting(cell: Cell) -> str:
    """Name the setting of a cell: its method, its case and what is tuned."""
    return ", ".join(filter(None, (cell.method, cell.case, settings_text(cell.tuned))))


def settings_count(count: int) -> str:
    """Write a number of settings."""
    return "1 setting" if count == 1 else f"{count} settings"


def reasons_text(failed: Mapping[Place, Cell], begun: Sequence[Cell], errors: Mapping[str, str]) -> str:
    """Write each reason once, with the names of the settings that do not start.

    A method stands alone if all its settings fail by one reason.

    Args:
        failed: A cell of each setting that does not start.
        begun: The cells of all settings that were begun.
        errors: Sentences of the cells that do not start, by name.
    """
    names_by_reason: dict[str, dict[str, None]] = {}
    for (_, name), cell in failed.items():
        reason = errors[cell.name]
        of_method = [errors.get(other.name) for other in begun if other.method == cell.method]
        is_of_all = len(of_method) > 1 and set(of_method) == {reason}
        names_by_reason.setdefault(reason, {})[cell.method if is_of_all else name] = None
    return ". ".join(f"{' and '.join(names)}: {reason}" for reason, names in names_by_reason.items())


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
    """Begin runs in a folder that is deleted, each once.

    Args:
        cells: Cells of the runs. Equal runs have one name.
        processes: Number of cells at once of the experiment. 0 begins them in this process, even on a GPU.

    Returns:
        The sentences of the cells that do not start, by name.
    """
    errors: dict[str, str] = {}

    def on_round(files: CellFiles, rounds: int) -> None:
        """Take a number of rounds, of which there are none."""

    def on_end(files: CellFiles, outcome: Outcome) -> None:
        if outcome.error:
            errors[files.name] = outcome.error

    with tempfile.TemporaryDirectory(prefix="fl_lightning-") as folder:
        jobs = {cell.name: replace(CellFiles.of(cell, Path(folder)), starts=True) for cell in cells}
        for cell in cells:
            write_file(jobs[cell.name].config, yaml.safe_dump(dict(cell.config), sort_keys=False))
        run_all(jobs.values(), processes_of_starts(cells, processes), on_round=on_round, on_end=on_end)
    return errors


def processes_of_starts(cells: Iterable[Cell], processes: int) -> int:
    """Return 1 if the runs may use a GPU, whose memory a process keeps until it ends, else 0 for this process."""
    if not processes or not torch.cuda.is_available():
        return 0
    may_use_gpu = any(cell.config["trainer"]["accelerator"] != "cpu" for cell in cells)
    return 1 if may_use_gpu else 0


def cells_to_begin(cells: Cells, folders: Sequence[Path]) -> Iterator[tuple[Cell, bool]]:
    """Compose the runs of an experiment, with the candidates of what is tuned.

    Args:
        cells: Cells of the experiment.
        folders: Folders of runs, the folder of the experiment first.

    Yields:
        A cell, and whether one of the folders has rounds of its run.
    """
    tried = tried_of(cells, folders[0])
    for cell in cells_of(tried):
        yield cell, has_begun(cell, [folder / TUNING for folder in folders])
    starts = cells.starts()
    every = cells.all()
    for cell in starts:
        yield cell, has_begun(cell, folders)
    named = started(every, located(starts, folders[0]), folders[0])
    for cell, run in zip(every, named, strict=True):
        if (cell.method, cell.case) not in tried:
            yield cell, has_begun(run, folders)


def has_begun(cell: Cell, folders: Iterable[Path]) -> bool:
    """Return True if one of the folders has rounds of a cell."""
    return any(files.rounds for files in files_in(cell, folders))
