"""A progress bar over rounds and the clients of the round under way, drawn by `rich.progress`."""

import logging
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from datetime import timedelta
from time import monotonic
from typing import Any

from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.callbacks import ProgressBar
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column

from fl_lightning.engines.cohort import ignores_module
from fl_lightning.federation.loop import FederatedLoop
from fl_lightning.metrics.history import EPSILON, EPSILON_LOCAL, EPSILON_SAMPLES, plain_key
from fl_lightning.metrics.keys import is_value, percent_factor, unit_of
from fl_lightning.runs.plain_fit import warn_of_plain_fit
from fl_lightning.utils.settings import check_at_least

LOGGERS = (None, "pytorch_lightning", "lightning_fabric", "lightning.pytorch", "py.warnings")
"""Loggers whose handlers may hold a stream from before the bar, which rich does not redirect; None is the root."""

SHARES = {"global/acc": "acc", "val/acc": "acc", "global/forgetting": "F", "val/forgetting": "F", "local/alma": "alma"}
"""Names on the line of values in [0, 1], by log key; the first two that a round has are shown in percent."""


class RoundProgressBar(ProgressBar):
    """Shows the round, its clients, the accuracy and forgetting of the round before, and the time, on one line.

    On a terminal the line is redrawn in place, below what others print; elsewhere a plain line is printed now and then,
    and one at the end. Rounds are counted from 0, as epochs are in Lightning's bars: the last of 30 is `Round 29/29`.

    Args:
        refresh_rate: redrawings per second on a terminal at most; 0 shows no bar.
        log_every: seconds between two printed lines elsewhere at least; in a long run 1 % of the time so far.

    Attributes:
        is_enabled: whether a bar is shown; `LightningModule.print` reads it.
    """

    def __init__(self, refresh_rate: float = 10.0, log_every: float = 5.0) -> None:
        super().__init__()
        check_at_least(0, "0 shows no bar", refresh_rate=refresh_rate)
        check_at_least(0, "it is in seconds", log_every=log_every)
        self.refresh_rate = refresh_rate
        self.log_every = log_every
        self.is_enabled = refresh_rate > 0
        self.progress: Progress | None = None
        self.borrowed = ExitStack()
        self.first = self.rounds = self.exchanges = self.clients = 0
        self.num_exchanges = self.cohort_size = 1
        self.phase = self.values = ""
        self.due = 0.0

    def enable(self) -> None:
        self.is_enabled = self.refresh_rate > 0

    def disable(self) -> None:
        self.is_enabled = False

    # --- hooks ------------------------------------------------------------------------------------

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not isinstance(pl_module, FederatedLoop):
            warn_of_plain_fit(self, pl_module)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Begin a round: in one that is continued Lightning does not call `on_train_epoch_start`."""
        if self.is_enabled and isinstance(pl_module, FederatedLoop):
            data = pl_module.data
            least, most = data.cohort.bounds
            self.cohort_size = data.cohort.size if pl_module.aggregator.is_private else most  # hidden if it is private
            if least != most and not pl_module.aggregator.is_private:
                self.cohort_size = max(1, len(data.cohort(trainer.current_epoch)))
            self.num_exchanges = len(pl_module.client.exchanges)
            if self.progress is None:
                self._open(trainer)
            self._enter("client", trainer.current_epoch, pl_module)

    @ignores_module
    def on_client_end(self, trainer: Trainer, loop: FederatedLoop, update: Any) -> None:
        """Count a client that has trained."""
        self.clients += 1
        self._show()

    @ignores_module
    def on_exchange_end(self, trainer: Trainer, loop: FederatedLoop, exchange: str) -> None:
        """Count an exchange, whose clients are counted anew."""
        self.exchanges = self.exchanges + 1
        self.clients = 0

    @ignores_module
    def on_round_repeat(self, trainer: Trainer, loop: FederatedLoop) -> None:
        """Count exchanges and clients anew."""
        self.exchanges = self.clients = 0

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.phase = "evaluation"
        self._show()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if isinstance(pl_module, FederatedLoop):
            self._enter("", trainer.current_epoch + 1, pl_module)

    def on_train_end(self, *_: Any, **__: Any) -> None:
        with self.borrowed:
            self._show(at_once=True)
            self.progress = None

    on_exception = on_train_end

    # --- the line ---------------------------------------------------------------------------------

    def _open(self, trainer: Trainer) -> None:
        """Begin the line, above which there appears from now on what others write to a terminal."""
        limits = (n for n in (trainer.max_epochs, trainer.max_steps) if n is not None and n >= 0)
        self.first = trainer.current_epoch
        self.values = ""
        total = min(limits, default=None)
        text = TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, overflow="crop"))
        columns = [text] if total is None else [text, BarColumn()]
        out, err = sys.stdout, sys.stderr  # output to a file is not redirected
        progress = Progress(*columns, auto_refresh=False, redirect_stdout=out.isatty(), redirect_stderr=err.isatty())
        progress.add_task("", total=total, completed=self.first, visible=False)
        self.progress = progress
        self.due = monotonic() + self.log_every
        if progress.console.is_interactive and progress.console.file.isatty():  # by FORCE_COLOR a file is interactive
            self.due = 0.0
            self.borrowed.enter_context(progress)
            progress.console.show_cursor()  # a process that is killed would leave it hidden
            for old, new in (out, sys.stdout), (err, sys.stderr):
                for handler in (handler for name in LOGGERS for handler in logging.getLogger(name).handlers):
                    if isinstance(handler, logging.StreamHandler) and handler.stream is old:
                        handler.setStream(new)
                        self.borrowed.callback(handler.setStream, old)

    def _enter(self, phase: str, rounds: int, loop: FederatedLoop) -> None:
        """Begin a round, or the time until the next."""
        self.phase = phase
        self.rounds = rounds
        self.exchanges = 0
        self.clients = 0
        self.values = headline(loop.round_metrics) or self.values
        self._show()

    def _show(self, at_once: bool = False) -> None:
        """Draw the line if a redrawing is due."""
        now = monotonic()
        progress = self.progress
        if progress is not None and (at_once or now >= self.due):
            (task,) = progress.tasks
            done = self.rounds + (self.exchanges + self.clients / self.cohort_size) / self.num_exchanges
            seconds = task.elapsed or 0.0
            text = self._text(done, seconds, task.total)
            progress.update(task.id, description=text, completed=done, visible=True, refresh=True)
            if not progress.live.is_started:
                self.print(text, flush=True)
            self.due = now + (1 / self.refresh_rate if progress.live.is_started else max(self.log_every, seconds / 100))

    def _text(self, done: float, seconds: float, total: float | None) -> str:
        """Text beside the bar after `done` of `total` rounds and `seconds` seconds."""
        round_idx = self.rounds if self.phase else self.rounds - 1  # between two rounds the one before is shown
        number = f"Round {round_idx}" + (f"/{int(total) - 1}" if total is not None else "")
        client = f"client {self.clients:>{len(str(self.cohort_size))}}/{self.cohort_size}"
        time = str(timedelta(seconds=int(seconds)))
        if total is not None and self.first < done < total:  # rich has no estimate before its second step
            time += f", {timedelta(seconds=int(seconds / (done - self.first) * (total - done)) + 1)} left"
        phase = client if self.phase == "client" else self.phase
        return "  ".join(filter(None, (number, phase, self.values, time)))


def headline(row: Mapping[str, float]) -> str:
    """Choose a round's values for the line: the first two of `SHARES` that it has, or of all where it has none."""
    values = {plain_key(name): value for name, value in row.items()}
    budget = [f"ε {values[key]:.3g}" for key in (EPSILON, EPSILON_SAMPLES, EPSILON_LOCAL) if key in values]
    shares = [f"{name} {percent_text(key, values[key])}" for key, name in SHARES.items() if key in values]
    others = [f"{key} {value:.4g}" for key, value in row.items() if is_value(key)]
    return "  ".join([*budget, *(shares or others)[:2]])


def percent_text(key: str, value: float) -> str:
    """Write a share in percent. A module of the user may have logged it in percent already.

    >>> percent_text("val/acc", 0.853), percent_text("val/acc", 85.3)
    ('85.3 %', '85.3 %')
    """
    return f"{percent_factor(unit_of(key, [value])) * value:.1f} %"
