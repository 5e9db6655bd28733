"""Taking over the runs of other machines' folders."""

import os
import shutil
from collections.abc import Iterable
from contextlib import nullcontext, suppress
from pathlib import Path

from fl_lightning.experiments.cells import Cell, CellFiles, located


def check_source(source: Path) -> None:
    """Refuse a folder without runs to be merged.

    Raises:
        ValueError: naming it.
    """
    if not (source / "cells").is_dir():
        raise ValueError(f"--merge takes folders that reproduce or compare wrote, and {source} is none")


def merge(cells: Iterable[Cell], source: Path, folder: Path) -> int:
    """Copy the runs of cells that another folder has, or has more rounds of, and return their number."""
    check_source(source)
    copied = 0
    for cell in cells:
        (other,) = located([cell], source)
        there = CellFiles(source, other.name)
        here = CellFiles(folder, cell.name)
        if (there.rounds, there.done is not None) <= (here.rounds, here.done is not None):
            continue
        at_source = there.claimed() if there.log.is_file() or os.access(source, os.W_OK) else nullcontext(True)
        with here.claimed() as free, at_source as still:
            if not (free and still):
                busy = there.parent if free else here.parent
                raise ValueError(f"--merge needs runs that no process is at, and another one has {busy}; merge later")
            part = here.parent.with_name(f"{here.name}.part")  # whole before it counts
            shutil.rmtree(part, ignore_errors=True)
            shutil.copytree(there.parent, part)
            shutil.rmtree(here.parent, ignore_errors=True)
            part.rename(here.parent)
            with suppress(OSError):
                shutil.copyfile(there.log, here.log)
        copied += 1
    return copied
