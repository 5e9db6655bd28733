"""Runs the command line within the test's process."""

import contextlib
import io
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import pytorch_lightning as pl
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from fl_lightning.__main__ import main
from fl_lightning.callbacks import plots
from fl_lightning.experiments.cell_files import CellFiles

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
EXPERIMENT = f"-c {CONFIGS}/experiment/digits_fedntd.yaml"
TINY = (
    f"{EXPERIMENT} --model.local_epochs 1 --model.max_local_steps 1 --data.num_clients 4 --data.partition.min_samples 1"
)
"""Two clients a round, one step each."""


@contextlib.contextmanager
def working_in(folder: Path, own: str) -> Iterator[Path]:
    """Work in a folder with a user's module `own.py` in it."""
    (folder / "own.py").write_text(own)
    try:
        with contextlib.chdir(folder):
            yield folder
    finally:
        sys.modules.pop("own", None)


@contextlib.contextmanager
def empty_pictures() -> Iterator[None]:
    """Draw nothing within the block, since that is most of a short run's time. Files and loggers get empty ones."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("accuracy", "classwise", "partition", "sizes", "values"):
            patch.setattr(plots, f"plot_{name}", lambda *_, **__: Figure(figsize=(1, 1)))
        patch.setattr(Figure, "draw", lambda figure, renderer: None)
        patch.setattr(ConstrainedLayoutEngine, "execute", lambda engine, figure: None)
        yield


class StopAfterRound(pl.Callback):
    """Ends a run after its first round, whatever is planned."""

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        trainer.should_stop = True


def cell_files(folder: str | Path, name: str) -> CellFiles:
    """Find the files of a cell by its name without identity."""
    (path,) = Path(folder, "cells").glob(f"{name}-????????.yaml")
    return CellFiles(Path(folder), path.stem)


class Said(NamedTuple):
    """Holds the exit code and the two streams of a command."""

    code: int
    out: str
    err: str


def say(line: str) -> Said:
    """Run `fl-lightning line`."""
    out = io.StringIO()
    err = io.StringIO()
    code = 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(shlex.split(line))
        except SystemExit as stop:
            code = int(stop.code or 0)
    return Said(code, out.getvalue(), err.getvalue())


def refusal(line: str, code: int) -> str:
    """Return the sentence with which a command ends. Nothing else may stand on standard error."""
    said = say(line)
    assert said.code == code, said
    assert said.err.startswith("fl-lightning: error: "), said.err
    assert said.err.count("\n") == 1, said.err
    return said.err.strip()


def run_in(folder: Path, number: int = 0, stem: str = "digits_fedntd") -> Path:
    """Return the folder of a run by its number. Its overrides are part of its name."""
    folders = (folder / "runs" / stem).iterdir()
    (found,) = [path for path in folders if path.name.partition("-")[0] == str(number)]
    return found
