"""The taking over of runs from the folders of other machines."""

import os
import shutil
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path

from fl_lightning.experiments.cell import Cell
from fl_lightning.experiments.cell_files import CellFiles, located


def check_source(source: Path) -> None:
    """Refuse a folder without runs that could be merged.

    Raises:
        ValueError: Neither `reproduce` nor `compare` wrote the folder.
    """
    if not (source / "cells").is_dir():
        raise ValueError(f"--merge takes folders that reproduce or compare wrote, and {source} is none")


def merge(cells: Iterable[Cell], source: Path, folder: Path) -> int:
    """Copy the runs of cells of which another folder has more.

    Args:
        cells: The cells.
        source: Folder from which runs are copied.
        folder: Folder to which they are copied.

    Returns:
        The number of copied runs.

    Raises:
        ValueError: `source` has no runs, or another process is at a run.
    """
    check_source(source)
    copied = 0
    for cell in cells:
        (named,) = located([cell], source)
        there = CellFiles(source, named.name)
        here = CellFiles(folder, cell.name)
        if length_of(there) <= length_of(here):
            continue
        with here.claimed() as is_free_here, claimed_at(source, there) as is_free_there:
            if not (is_free_here and is_free_there):
                busy = there.parent if is_free_here else here.parent
                raise ValueError(f"--merge needs runs that no process is at, and another one has {busy}; merge later")
            copy_run(there, here)
        copied += 1
    return copied


def length_of(files: CellFiles) -> tuple[int, bool]:
    """Return the number of a run's complete rounds, and whether the run is done. The longer of two is greater."""
    return files.rounds, files.done is not None


def claimed_at(source: Path, files: CellFiles) -> AbstractContextManager[bool]:
    """Claim a cell of another folder, unless the folder cannot be written and no process has claimed the cell."""
    if files.log.is_file() or os.access(source, os.W_OK):
        return files.claimed()
    return nullcontext(enter_result=True)


def copy_run(there: CellFiles, here: CellFiles) -> None:
    """Replace a run by the run of another folder. The copy counts only once it is whole."""
    part = here.parent.with_name(f"{here.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    shutil.copytree(there.parent, part)
    shutil.rmtree(here.parent, ignore_errors=True)
    part.rename(here.parent)
    with suppress(OSError):
        shutil.copyfile(there.log, here.log)
