"""One cell of a grid: its files, whether it is done, and its run by the command line's own `fit` and `test`."""

import gc
import json
import os
import shutil
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch
import yaml  # type: ignore[import-untyped]
from pytorch_lightning import Callback, LightningModule, Trainer

from fl_lightning.cli.compare.grid import Cell, limits_of
from fl_lightning.cli.console import quiet_lightning
from fl_lightning.cli.errors import one_line
from fl_lightning.cli.main import FederatedCLI
from fl_lightning.federation.identity import differences, flat
from fl_lightning.reports.saved import TEST, SavedRun, read_run
from fl_lightning.runs.folder import CHECKPOINTS, LAST, find_checkpoint, runs
from fl_lightning.utils.files import write_file

DONE = "done.json"
"""Name of the file that a cell's run has when it is complete."""

BEST = "best.ckpt"


@dataclass(frozen=True)
class CellFiles:
    """Names the files of a cell, and can be pickled.

    Attributes:
        folder: of the grid.
        name: of the cell.
        test: whether its model may be evaluated on the test split.
    """

    folder: Path
    name: str
    test: bool = True

    @property
    def config(self) -> Path:
        return self.folder / "cells" / f"{self.name}.yaml"

    @property
    def log(self) -> Path:
        return self.folder / "logs" / f"{self.name}.log"

    @property
    def parent(self) -> Path:
        """Folder of its run folders, of which the last one counts."""
        return self.folder / "runs" / self.name

    @property
    def run(self) -> Path | None:
        """Its run folder, None where it has not begun."""
        return next(reversed(runs(self.parent).values()), None)

    @property
    def begun_run(self) -> Path:
        """The run folder of a cell that has begun.

        Raises:
            FileNotFoundError: it has none any more.
        """
        if (run := self.run) is None:
            raise FileNotFoundError(f"{self.parent} has no run; run the cell {self.name} again")
        return run

    @property
    def done(self) -> dict[str, Any] | None:
        """The limits of a complete run, by the names in `LIMITS`, and its `rounds`, None where it is not complete."""
        marker = self.run and self.run / DONE
        if marker is None or not marker.is_file():
            return None
        return dict(json.loads(marker.read_text(encoding="utf-8")))

    def read(self) -> SavedRun | None:
        """Read its run, None where it is not complete."""
        return None if self.done is None else read_run(self.begun_run)


@dataclass(frozen=True)
class Outcome:
    """End of a cell.

    Attributes:
        error: a sentence; empty: it is done.
        memory: whether memory ran out, so that it may succeed alone.
    """

    error: str = ""
    memory: bool = False


def prepare(cell: Cell, folder: Path) -> bool:
    """Write a cell's configuration.

    Args:
        cell: of the grid.
        folder: of the grid.

    Returns:
        Whether the cell is left to be run.

    Raises:
        ValueError: its run was begun with other settings, or has more rounds than it is to have.
    """
    files = CellFiles(folder, cell.name)
    if files.run is not None and files.config.is_file():
        changed = differences(flat(yaml.safe_load(files.config.read_text(encoding="utf-8"))), flat(cell.config))
        if changed:
            raise ValueError(
                f"a grid is continued with the settings it was begun with, but of {cell.name} {changed[0]}; give it "
                f"those, or another --output than {folder}"
            )
    done = files.done
    if done is not None and 0 <= cell.max_rounds < done["rounds"]:
        name = next(name for name, value in cell.limits.items() if value == cell.max_rounds)
        raise ValueError(
            f"{cell.name} in {folder} has {done['rounds']} rounds already, and trainer.{name} is {cell.max_rounds}; "
            f"ask for at least as many, or give another --output"
        )
    write_file(files.config, yaml.safe_dump(dict(cell.config), sort_keys=False))
    return done is None or limits_of(done) != cell.limits


class Rounds(Callback):
    """Tells how many rounds are complete."""

    def __init__(self, tell: Callable[[int], None]) -> None:
        self.tell = tell

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.tell(trainer.current_epoch)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            self.tell(trainer.current_epoch + 1)


def run_cell(files: CellFiles, tell: Callable[[int], None]) -> Outcome:
    """Run a cell, or what is left of it, and write what it prints to its log.

    Args:
        files: of the cell.
        tell: is called with the number of complete rounds after each of them.

    Raises:
        KeyboardInterrupt: it was interrupted.
    """
    files.log.parent.mkdir(parents=True, exist_ok=True)
    with files.log.open("a", encoding="utf-8", buffering=1) as log, printing_to(log):
        try:
            with quiet_lightning():
                fit(files, tell)
            return Outcome()
        except SystemExit as stop:
            return Outcome(stopped(stop))
        except Exception as error:
            traceback.print_exc()
            memory = isinstance(error, MemoryError | torch.OutOfMemoryError)
            return Outcome(one_line(str(error)) or type(error).__name__, memory)
        finally:
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()


def stopped(stop: BaseException) -> str:
    """Sentence for a cell that was stopped."""
    return f"it stopped ({one_line(str(stop)) or 'interrupted'})"


@contextmanager
def printing_to(log: TextIO) -> Iterator[None]:
    """Send what is printed within the block to a file, also by libraries in C."""
    sys.stdout.flush()
    sys.stderr.flush()
    kept = [(stream, os.dup(stream)) for stream in (1, 2)]
    try:
        for stream, _ in kept:
            os.dup2(log.fileno(), stream)
        with redirect_stdout(log), redirect_stderr(log):
            yield
    finally:
        for stream, before in kept:
            os.dup2(before, stream)
            os.close(before)


def fit(files: CellFiles, tell: Callable[[int], None]) -> None:
    """Fit from the beginning or the last checkpoint, and test where the rounds are not evaluated on the test split."""
    config = yaml.safe_load(files.config.read_text(encoding="utf-8"))
    words = ["-c", str(files.config), "--trainer.default_root_dir", str(files.parent.parent)]
    words += ["--trainer.enable_progress_bar", "false", "--plots.format", "none"]  # the report has them
    start = ["fit", *words]
    if files.run is not None:
        try:
            start += ["--ckpt_path", str(find_checkpoint("last", files.parent, config))]
        except (ValueError, OSError):  # killed before its first round was complete, or nothing is left to continue from
            shutil.rmtree(files.parent)
    cli = command(start, [Rounds(tell)])
    run = files.run
    if run is None or cli.folder is None:
        raise ValueError("a cell needs a run folder; unset trainer.fast_dev_run and trainer.barebones")
    if files.test and cli.datamodule.evaluated == "val":
        evaluate(run, words, cli.datamodule)
    write_json(run / DONE, {**limits_of(config["trainer"]), "rounds": cli.trainer.global_step})


def evaluate(run: Path, words: list[str], data: Any) -> None:
    """Test the last model, and the one that is best on the validation split."""
    with suppress(ValueError):  # there is no test split
        data.split("test")
        values: dict[str, float] = {}
        for name, suffix in ((LAST, ""), (BEST, "_best")):
            path = run / CHECKPOINTS / name
            if path.is_file():
                metrics = command(["test", *words, "--ckpt_path", str(path)], []).trainer.callback_metrics
                values |= {f"{key}{suffix}": float(v) for key, v in metrics.items() if key.startswith("test/")}
        write_json(run / TEST, values)


def command(words: list[str], callbacks: list[Callback]) -> FederatedCLI:
    """Run a command of the command line, which the processes that it starts by script see as theirs."""
    before, sys.argv = sys.argv, [sys.argv[0], *words]
    try:
        return FederatedCLI(callbacks=callbacks)
    finally:
        sys.argv = before


def write_json(path: Path, content: Any) -> None:
    """Write plain values, in one move."""
    write_file(path, json.dumps(content, indent=1) + "\n")
