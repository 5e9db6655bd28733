"""A progress bar over rounds and the clients of the round under way, drawn by `rich.progress`."""

import logging
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from datetime import timedelta
from time import monotonic
from typing import Any, TextIO

from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.callbacks import ProgressBar
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn
from rich.table import Column

from fl_lightning.engines.cohort import ignores_module
from fl_lightning.federation.loop import FederatedLoop
from fl_lightning.metrics.history import EPSILON, EPSILON_LOCAL, EPSILON_SAMPLES, plain_key
from fl_lightning.metrics.keys import is_value, percent_factor, unit_of
from fl_lightning.runs.plain_fit import warn_of_plain_fit
from fl_lightning.utils.settings import check_at_least

LOGGERS = (None, "pytorch_lightning", "lightning_fabric", "lightning.pytorch", "lightning.fabric", "py.warnings")
"""Loggers whose handlers may hold a stream from before the bar, which rich does not redirect. None is the root."""

SHARES = {"global/acc": "acc", "val/acc": "acc", "global/forgetting": "F", "val/forgetting": "F", "local/alma": "alma"}
"""Names on the line of values in [0, 1], by log key. The line shows the first two values of a round, in percent."""


class RoundProgressBar(ProgressBar):
    """Shows the round, its clients, the accuracy and forgetting of the round before, and the time, on one line.

    On a terminal the bar redraws the line in place, below the output of others. Elsewhere the bar prints a plain line
    now and then, and one at the end. Rounds are counted from 0, as epochs are in Lightning's bars: the last round of 30
    is `Round 29/29`.

    Args:
        refresh_rate: Largest number of redrawings per second on a terminal, ≥ 0. 0 shows no bar.
        log_every: Least number of seconds between two printed lines elsewhere, ≥ 0. In a long run it is 1 % of the time
            so far.

    Attributes:
        is_enabled: Whether a bar is shown. `LightningModule.print` reads it.
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
        self.first = 0
        self.rounds = 0
        self.exchanges = 0
        self.clients = 0
        self.num_exchanges = 1
        self.cohort_size = 1
        self.phase = ""
        self.values = ""
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
        """Begin a round. Lightning does not call `on_train_epoch_start` in a round that is continued."""
        if self.is_enabled and isinstance(pl_module, FederatedLoop):
            self.cohort_size = shown_cohort_size(pl_module, trainer.current_epoch)
            own = pl_module.client.exchanges
            self.num_exchanges = len(pl_module.server_module.exchanges_of(trainer.current_epoch, own))
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
        self.exchanges += 1
        self.clients = 0

    @ignores_module
    def on_round_repeat(self, trainer: Trainer, loop: FederatedLoop) -> None:
        """Count exchanges and clients anew."""
        self.exchanges = 0
        self.clients = 0

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
        """Begin the line. From now on the output of others to a terminal appears above it."""
        limits = [limit for limit in (trainer.max_epochs, trainer.max_steps) if limit is not None]
        total = min((limit for limit in limits if limit >= 0), default=None)
        self.first = trainer.current_epoch
        self.values = ""
        out = sys.stdout
        err = sys.stderr
        progress = new_progress(has_bar=total is not None)
        progress.add_task("", total=total, completed=self.first, visible=False)
        self.progress = progress
        self.due = monotonic() + self.log_every
        # FORCE_COLOR makes a file interactive.
        if progress.console.is_interactive and progress.console.file.isatty():
            self.due = 0.0
            self.borrowed.enter_context(progress)
            # A killed process would leave the cursor hidden.
            progress.console.show_cursor()
            self._redirect_handlers(old=out, new=sys.stdout)
            self._redirect_handlers(old=err, new=sys.stderr)

    def _redirect_handlers(self, *, old: TextIO, new: TextIO) -> None:
        """Let the handlers of loggers write to the stream that rich has put in place of `old`, until the bar ends."""
        for name in LOGGERS:
            for handler in logging.getLogger(name).handlers:
                if isinstance(handler, logging.StreamHandler) and handler.stream is old:
                    handler.setStream(new)
                    self.borrowed.callback(handler.setStream, old)

    def _enter(self, phase: str, rounds: int, loop: FederatedLoop) -> None:
        """Begin a round, or the time until the next round.

        Args:
            phase: Name of the phase on the line. It is empty between two rounds.
            rounds: Number of rounds that are over.
            loop: The federation.
        """
        self.phase = phase
        self.rounds = rounds
        self.exchanges = 0
        self.clients = 0
        self.values = headline(loop.round_metrics) or self.values
        self._show()

    def _show(self, *, at_once: bool = False) -> None:
        """Draw the line if a redrawing is due, or at once."""
        now = monotonic()
        progress = self.progress
        if progress is None or (now < self.due and not at_once):
            return
        (task,) = progress.tasks
        done = self.rounds + (self.exchanges + self.clients / self.cohort_size) / self.num_exchanges
        seconds = task.elapsed or 0.0
        text = self._text(done=done, seconds=seconds, total=task.total)
        progress.update(task.id, description=text, completed=done, visible=True, refresh=True)
        if progress.live.is_started:
            self.due = now + 1 / self.refresh_rate
        else:
            self.print(text, flush=True)
            self.due = now + max(self.log_every, seconds / 100)

    def _text(self, *, done: float, seconds: float, total: float | None) -> str:
        """Return the text beside the bar.

        Args:
            done: Number of rounds that are over, with the part of the round under way.
            seconds: Time so far, in seconds.
            total: Number of rounds of the run. None is not limited.
        """
        # Between two rounds the line shows the round before.
        round_idx = self.rounds if self.phase else self.rounds - 1
        number = f"Round {round_idx}"
        if total is not None:
            number += f"/{int(total) - 1}"
        phase = self.phase
        if phase == "client":
            width = len(str(self.cohort_size))
            phase = f"client {self.clients:>{width}}/{self.cohort_size}"
        time = str(timedelta(seconds=int(seconds)))
        # rich has no estimate before its second step.
        if total is not None and self.first < done < total:
            seconds_left = int(seconds / (done - self.first) * (total - done)) + 1
            time += f", {timedelta(seconds=seconds_left)} left"
        return "  ".join(filter(None, (number, phase, self.values, time)))


def shown_cohort_size(loop: FederatedLoop, round_idx: int) -> int:
    """Return the number of clients that the line shows for a round, ≥ 1. A private run shows its expected number."""
    if loop.aggregator.is_private:
        return loop.data.cohort.size
    least, most = loop.parts.cohort_bounds(loop.data)
    if least == most:
        return most
    return max(1, len(loop.cohort_of(round_idx)))


def new_progress(*, has_bar: bool) -> Progress:
    """Make the line of rich, with a bar if the number of rounds is known. It does not redirect output to a file."""
    text = TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, overflow="crop"))
    columns: list[ProgressColumn] = [text]
    if has_bar:
        columns.append(BarColumn())
    return Progress(  # style: ok, rich takes columns one by one
        *columns,
        auto_refresh=False,
        redirect_stdout=sys.stdout.isatty(),
        redirect_stderr=sys.stderr.isatty(),
    )


def headline(row: Mapping[str, float]) -> str:
    """Choose the values of a round for the line: every ε, then the first two of `SHARES`, or of all values without any.

    Args:
        row: Values of the round by log key.
    """
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
