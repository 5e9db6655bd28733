"""The run of one cell by the command line's own `fit` and `test`."""

import gc
import json
import os
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

from fl_lightning.cli.console import quiet_lightning
from fl_lightning.cli.errors import one_line
from fl_lightning.cli.main import FederatedCLI
from fl_lightning.experiments.cell_files import CellFiles
from fl_lightning.experiments.naming import LIMITS, limits_in
from fl_lightning.experiments.times import Times
from fl_lightning.reports.saved import DONE, MAX_SECONDS, TEST
from fl_lightning.runs.best import BestCheckpoint
from fl_lightning.runs.folder import Keep, LastCheckpoint, checkpoint_of, discard, drop_checkpoints, find_checkpoint
from fl_lightning.utils.files import write_file
from fl_lightning.utils.packages import is_of_lightning
from fl_lightning.utils.tracebacks import place_of, raised_by_check

NONE = {"max_epochs": "null", "max_steps": "-1", "max_time": "null"}
"""Values of settings that are no limits."""

SILENT = ("--trainer.logger", "null", "--trainer.logger", "pytorch_lightning.loggers.logger.DummyLogger")
"""Options of a fit whose logger takes every call and does nothing; null drops the arguments of the one before."""

ONE_DEVICE = ("--trainer.devices", "1", "--trainer.num_nodes", "1")
"""Options of a fit that begins no further processes."""


@dataclass(frozen=True)
class Outcome:
    """Describes the end of a cell.

    Attributes:
        error: Sentence about the failure. Empty if the cell is done.
        memory: Whether memory ran out, so that the cell may succeed alone.
        claimed: Whether another process is at the cell.
    """

    error: str = ""
    memory: bool = False
    claimed: bool = False


class RoundCounter(Callback):
    """Tells how many rounds are complete.

    Args:
        tell: Function that is called with their number at the start, and after each round.
    """

    def __init__(self, tell: Callable[[int], None]) -> None:
        self.tell = tell

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.tell(trainer.current_epoch)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            self.tell(trainer.current_epoch + 1)


class StartedError(Exception):
    """Ends a fit whose first round would begin."""


class StopBeforeFirstRound(Callback):
    """Ends a fit where its first round would begin, by `StartedError`, which no callback takes for a failure."""

    def on_train_epoch_start(self, trainer: Any, pl_module: LightningModule) -> None:
        for callback in trainer.callbacks:
            callback.teardown(trainer, pl_module, "fit")
        # Some callbacks send a message, or write a checkpoint, when a fit fails.
        trainer.callbacks = []
        raise StartedError


def run_cell(files: CellFiles, tell: Callable[[int], None]) -> Outcome:
    """Run a cell, or the rest of its rounds, and write what it prints to its log.

    Args:
        files: Files of the cell.
        tell: Function that is called with the number of complete rounds at the start, and after each round.

    Raises:
        KeyboardInterrupt: The run was interrupted.
    """
    with files.claimed() as free, files.log.open("a", encoding="utf-8", buffering=1) as log, printing_to(log):
        if not free:
            return Outcome(claimed=True)
        try:
            # Another process may have completed the run in the meantime.
            if files.is_complete():
                return Outcome()
            with quiet_lightning():
                if files.starts:
                    start(files)
                else:
                    fit(files, tell)
            return Outcome()
        except SystemExit as stop:
            return Outcome(stopped(stop))
        except Exception as error:
            traceback.print_exc()
            memory = isinstance(error, MemoryError | torch.OutOfMemoryError)
            return Outcome(reason_of(error), memory=memory)
        finally:
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()


def reason_of(error: Exception) -> str:
    """Describe an error in a sentence, with its kind and place unless a check raised it."""
    text = one_line(str(error))
    kind = type(error).__name__
    place, _ = place_of(error)
    if raised_by_check(error) or not place:
        return text or kind
    named = f"{kind}: {text}" if text else kind
    return f"{named} ({place})"


def stopped(stop: BaseException) -> str:
    """Return the sentence about a cell that was stopped."""
    return f"it stopped ({one_line(str(stop)) or 'interrupted'})"


@contextmanager
def printing_to(log: TextIO) -> Iterator[None]:
    """Send what is printed within the block to a file, also what libraries in C print."""
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


def words_of(files: CellFiles) -> list[str]:
    """Return the options of a cell's commands."""
    words = ["-c", str(files.config), "--trainer.default_root_dir", str(files.parent.parent)]
    # The report draws the other pictures.
    return [*words, "--trainer.enable_progress_bar", "false", "--plots.format", "metrics"]


def limits_asked(files: CellFiles) -> list[str]:
    """Return the options that end a cell's fit. The cell's file may lack them, because other cells write it as well."""
    limits = dict(files.limits)
    none = dict(NONE)
    if MAX_SECONDS in limits:
        # Without a limit of rounds, fit asks for one.
        none["max_epochs"] = "-1"
    words = []
    for name in LIMITS:
        words += [f"--trainer.{name}", str(limits.get(name, none[name]))]
    config = yaml.safe_load(files.config.read_text(encoding="utf-8"))
    if MAX_SECONDS in limits or MAX_SECONDS in limits_in(config):
        words += [f"--model.{MAX_SECONDS}", str(limits.get(MAX_SECONDS, "null"))]
    return words


def start(files: CellFiles) -> None:
    """Begin a cell's fit on one device, without the user's loggers, and end it where the first round would begin."""
    logger = yaml.safe_load(files.config.read_text(encoding="utf-8"))["trainer"]["logger"]
    silent = SILENT if isinstance(logger, dict | list) else ()
    words = ["fit", *words_of(files), *limits_asked(files), *ONE_DEVICE, *silent]
    with suppress(StartedError):
        command(words=words, callbacks=[StopBeforeFirstRound()])


def fit(files: CellFiles, tell: Callable[[int], None]) -> None:
    """Fit from the beginning or the last checkpoint, and test unless the rounds are evaluated on the test split.

    Args:
        files: Files of the cell.
        tell: Function that is called with the number of complete rounds at the start, and after each round.

    Raises:
        ValueError: The fit has made no run folder.
    """
    config = yaml.safe_load(files.config.read_text(encoding="utf-8"))
    words = words_of(files)
    asked = ["fit", *words, *limits_asked(files)]
    was_complete = files.done is not None
    if files.run is not None:
        try:
            asked += ["--ckpt_path", str(find_checkpoint("last", files.parent, config))]
        except (ValueError, FileNotFoundError):
            # Killed before its first round was complete, or its checkpoints are gone. Rows that were written stay.
            discard(files.run)
    cli = command(words=asked, callbacks=[RoundCounter(tell), Times()])
    run = files.run
    if run is None or cli.folder is None:
        raise ValueError("a cell needs a run folder; unset trainer.fast_dev_run and trainer.barebones")
    if files.test and cli.datamodule.evaluated == "val":
        evaluate(run, words, cli.datamodule)
    write_json(run / DONE, {**dict(files.limits), "rounds": cli.trainer.global_step})
    if cli.trainer.is_global_zero:
        continued = was_complete and cli.trainer.ckpt_path is not None
        drop_checkpoints(run, keep=kept_of(files, cli.trainer, continued=continued))


def kept_of(files: CellFiles, trainer: Trainer, *, continued: bool) -> Keep:
    """Return which checkpoints of a complete run stay.

    Args:
        files: Files of the cell.
        trainer: The run's Trainer. A `ModelCheckpoint` of the user asks for its files, so that all stay.
        continued: Whether the run was complete before, with fewer rounds, and had kept its last checkpoint.
    """
    for callback in trainer.checkpoint_callbacks:
        is_own = isinstance(callback, BestCheckpoint | LastCheckpoint)
        if is_of_lightning(callback, "ModelCheckpoint") and not is_own:
            return "all"
    return "last" if continued and files.keep == "none" else files.keep


def evaluate(run: Path, words: list[str], data: Any) -> None:
    """Test the last model, and the best model on the validation split, if there is a test split.

    Args:
        run: Run folder, in which the values are written.
        words: Options of the cell's commands.
        data: Data module of the run.
    """
    try:
        data.split("test")
    except ValueError:
        # There is no test split.
        return
    values: dict[str, float] = {}
    for kind, suffix in (("last", ""), ("best", "_best")):
        path = checkpoint_of(run, kind)
        if path is None:
            continue
        asked = ["test", *words, "--ckpt_path", str(path)]
        tested = command(words=asked, callbacks=[])
        for key, value in tested.trainer.callback_metrics.items():
            if key.startswith("test/"):
                values[f"{key}{suffix}"] = float(value)
        values[f"round{suffix}"] = float(tested.model.recorder.trained_rounds - 1)
    write_json(run / TEST, values)


def command(words: list[str], callbacks: list[Callback]) -> FederatedCLI:
    """Run a command of the command line. Processes that it starts by script see the command as their own.

    Args:
        words: The command and its options.
        callbacks: Callbacks of the Trainer besides the user's.
    """
    before = sys.argv
    sys.argv = [sys.argv[0], *words]
    try:
        return FederatedCLI(callbacks=callbacks)
    finally:
        sys.argv = before


def write_json(path: Path, content: Any) -> None:
    """Write plain values as JSON in one move."""
    write_file(path, json.dumps(content, indent=1) + "\n")
