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
from fl_lightning.experiments.cells import CellFiles
from fl_lightning.experiments.naming import LIMITS, limits_in
from fl_lightning.experiments.times import Times
from fl_lightning.reports.saved import DONE, MAX_SECONDS, TEST
from fl_lightning.runs.folder import checkpoint_of, discard, find_checkpoint
from fl_lightning.utils.files import write_file
from fl_lightning.utils.tracebacks import place_of, raised_by_check

NONE = {"max_epochs": "null", "max_steps": "-1", "max_time": "null"}
"""Values of settings that are no limits."""

SILENT = ("--trainer.logger", "null", "--trainer.logger", "pytorch_lightning.loggers.logger.DummyLogger")
"""Options of a fit whose logger takes every call and does nothing; null drops the arguments of the one before."""

ONE_DEVICE = ("--trainer.devices", "1", "--trainer.num_nodes", "1")
"""Options of a fit that begins no further processes."""


@dataclass(frozen=True)
class Outcome:
    """End of a cell.

    Attributes:
        error: a sentence; empty: it is done.
        memory: whether memory ran out, so that it may succeed alone.
        claimed: whether another process is at it.
    """

    error: str = ""
    memory: bool = False
    claimed: bool = False


class RoundCounter(Callback):
    """Tells how many rounds are complete."""

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
        trainer.callbacks = []  # some send a message, or write a checkpoint, when a fit fails
        raise StartedError


def run_cell(files: CellFiles, tell: Callable[[int], None]) -> Outcome:
    """Run a cell, or what is left of it, and write what it prints to its log.

    Args:
        files: of the cell.
        tell: is called with the number of complete rounds after each of them.

    Raises:
        KeyboardInterrupt: it was interrupted.
    """
    with files.claimed() as free, files.log.open("a", encoding="utf-8", buffering=1) as log, printing_to(log):
        if not free:
            return Outcome(claimed=True)
        try:
            if not files.is_complete():  # else another process has made it in the meantime
                with quiet_lightning():
                    start(files) if files.starts else fit(files, tell)
            return Outcome()
        except SystemExit as stop:
            return Outcome(stopped(stop))
        except Exception as error:
            traceback.print_exc()
            memory = isinstance(error, MemoryError | torch.OutOfMemoryError)
            return Outcome(reason_of(error), memory)
        finally:
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()


def reason_of(error: Exception) -> str:
    """Describe an error in a sentence, one that is no check's by its kind and place, too."""
    text = one_line(str(error))
    place, _ = place_of(error)
    if raised_by_check(error) or not place:
        return text or type(error).__name__
    return f"{type(error).__name__}{': ' * bool(text)}{text} ({place})"


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


def words_of(files: CellFiles) -> list[str]:
    """Write the options of a cell's commands."""
    words = ["-c", str(files.config), "--trainer.default_root_dir", str(files.parent.parent)]
    # The report draws the other pictures.
    return [*words, "--trainer.enable_progress_bar", "false", "--plots.format", "metrics"]


def limits_asked(files: CellFiles) -> list[str]:
    """Write the options that end a cell's fit, which its file, that others write as well, may not have."""
    limits = dict(files.limits)
    none = {**NONE, "max_epochs": "-1"} if MAX_SECONDS in limits else NONE  # without a limit fit asks for one
    words = [word for name in LIMITS for word in (f"--trainer.{name}", str(limits.get(name, none[name])))]
    config = yaml.safe_load(files.config.read_text(encoding="utf-8"))
    if MAX_SECONDS in limits or MAX_SECONDS in limits_in(config):
        words += [f"--model.{MAX_SECONDS}", str(limits.get(MAX_SECONDS, "null"))]
    return words


def start(files: CellFiles) -> None:
    """Begin a cell's fit on one device, without the user's loggers, and end it where the first round would begin."""
    logger = yaml.safe_load(files.config.read_text(encoding="utf-8"))["trainer"]["logger"]
    silent = SILENT if isinstance(logger, dict | list) else ()
    with suppress(StartedError):
        command(["fit", *words_of(files), *limits_asked(files), *ONE_DEVICE, *silent], [StopBeforeFirstRound()])


def fit(files: CellFiles, tell: Callable[[int], None]) -> None:
    """Fit from the beginning or the last checkpoint, and test where the rounds are not evaluated on the test split."""
    config = yaml.safe_load(files.config.read_text(encoding="utf-8"))
    words = words_of(files)
    asked = ["fit", *words, *limits_asked(files)]
    if files.run is not None:
        try:
            asked += ["--ckpt_path", str(find_checkpoint("last", files.parent, config))]
        except (ValueError, FileNotFoundError):
            # Killed before its first round was complete, or its checkpoints are gone. Rows that were written stay.
            discard(files.run)
    cli = command(asked, [RoundCounter(tell), Times()])
    run = files.run
    if run is None or cli.folder is None:
        raise ValueError("a cell needs a run folder; unset trainer.fast_dev_run and trainer.barebones")
    if files.test and cli.datamodule.evaluated == "val":
        evaluate(run, words, cli.datamodule)
    write_json(run / DONE, {**dict(files.limits), "rounds": cli.trainer.global_step})


def evaluate(run: Path, words: list[str], data: Any) -> None:
    """Test the last model, and the one that is best on the validation split."""
    with suppress(ValueError):  # there is no test split
        data.split("test")
        values: dict[str, float] = {}
        for kind, suffix in (("last", ""), ("best", "_best")):
            path = checkpoint_of(run, kind)
            if path is not None:
                tested = command(["test", *words, "--ckpt_path", str(path)], [])
                metrics = tested.trainer.callback_metrics
                values |= {f"{key}{suffix}": float(v) for key, v in metrics.items() if key.startswith("test/")}
                values[f"round{suffix}"] = float(tested.model.recorder.trained_rounds - 1)
        write_json(run / TEST, values)


def command(words: list[str], callbacks: list[Callback]) -> FederatedCLI:
    """Run a command of the command line, which the processes that it starts by script see as theirs."""
    before = sys.argv
    sys.argv = [sys.argv[0], *words]
    try:
        return FederatedCLI(callbacks=callbacks)
    finally:
        sys.argv = before


def write_json(path: Path, content: Any) -> None:
    """Write plain values, in one move."""
    write_file(path, json.dumps(content, indent=1) + "\n")
