"""A progress bar over rounds and the clients of the round under way."""

from collections.abc import Mapping
from time import monotonic
from typing import Any

from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.callbacks import ProgressBar

from fl_lightning.callbacks.status_line import StatusLine
from fl_lightning.federation.loop import FederatedLoop
from fl_lightning.utils.settings import check_at_least

LONGEST_BAR = 30


class RoundProgressBar(ProgressBar):
    """Shows the round, its clients, and the accuracy and forgetting of the round before, on one line.

    On a terminal the line is redrawn in place; elsewhere a line is printed now and then, and one at the end.

    Args:
        refresh_rate: redrawings per second on a terminal at most; 0 shows no bar.
        log_every: seconds between two printed lines elsewhere at least.
    """

    def __init__(self, refresh_rate: float = 10.0, log_every: float = 5.0) -> None:
        super().__init__()
        check_at_least(0, "0 shows no bar", refresh_rate=refresh_rate)
        check_at_least(0, "it is in seconds", log_every=log_every)
        self.refresh_rate, self.log_every = refresh_rate, log_every
        self.line: StatusLine | None = None
        self._enabled = True
        self.first = self.rounds = self.clients = self.cohort_size = 0
        self.total: int | None = None
        self.phase: str | None = None
        self.values = ""

    @property
    def is_enabled(self) -> bool:
        """Read by `LightningModule.print`."""
        return self._enabled and self.refresh_rate > 0

    def enable(self) -> None:
        self._enabled = True

    def disable(self) -> None:
        self._enabled = False

    # --- hooks ------------------------------------------------------------------------------------

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self.is_enabled or not isinstance(pl_module, FederatedLoop):
            return
        self.first = self.rounds = trainer.current_epoch
        limits = [limit for limit in (trainer.max_epochs, trainer.max_steps) if limit is not None]
        self.total = min((limit for limit in limits if limit >= 0), default=None)
        self.values = headline(pl_module.round_metrics)
        self.line = StatusLine(1 / self.refresh_rate, self.log_every)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.line is not None and isinstance(pl_module, FederatedLoop):
            data = pl_module.data
            schedule, round_idx = data.schedule, trainer.current_epoch
            self.rounds, self.clients, self.phase = round_idx, 0, None
            self.cohort_size = len(schedule[round_idx]) if schedule else data.cohort_size
            self.line.update(self.text)

    def on_client_end(self, trainer: Trainer, loop: FederatedLoop, update: Any) -> None:
        if self.line is not None:
            self.clients += 1
            self.line.update(self.text)

    def on_exchange_end(self, trainer: Trainer, loop: FederatedLoop, exchange: str) -> None:
        exchanges = loop.client.exchanges
        if exchange != exchanges[-1]:
            self.clients = 0

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.line is not None:
            self.phase = "evaluation"
            self.line.update(self.text)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.line is not None and isinstance(pl_module, FederatedLoop):
            self.values = headline(pl_module.round_metrics) or self.values
            self.rounds, self.clients, self.phase = trainer.current_epoch + 1, 0, ""
            self.line.update(self.text)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._close()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._close()

    def _close(self) -> None:
        line, self.line = self.line, None
        if line is not None:
            line.close(self.text(line))

    # --- the line ---------------------------------------------------------------------------------

    def text(self, line: StatusLine | None = None) -> str:
        """What is shown now, no wider than the terminal."""
        line = line or self.line
        assert line is not None
        under_way = self.phase != ""
        number = self.rounds + under_way
        head = f"Round {number}" if self.total is None else f"Round {number:>{len(str(self.total))}}/{self.total}"
        tail = "  ".join(filter(None, (self._clients(), self.values, self._time(line))))
        if self.total is None:
            return f"{head}  {tail}"[: line.width]
        room = min(LONGEST_BAR, line.width - len(head) - len(tail) - 2)
        if room < 5:
            return f"{head}  {tail}"[: line.width]
        return f"{head} {self._bar(room, line)} {tail}"

    def _clients(self) -> str:
        size = str(self.cohort_size)
        text = f"client {self.clients:>{len(size)}}/{size}"
        if self.phase is None:
            return text
        return self.phase.ljust(len(text)) if self.phase else ""

    def _bar(self, room: int, line: StatusLine) -> str:
        assert self.total is not None
        part = min(1.0, self.clients / self.cohort_size) if self.cohort_size else 0.0
        full = round(room * min(1.0, (self.rounds + part) / max(1, self.total)))
        filled, empty = ("━", "─") if line.unicode else ("#", "-")
        if line.colour:
            return f"\x1b[36m{filled * full}\x1b[90m{filled * (room - full)}\x1b[0m"
        return filled * full + empty * (room - full)

    def _time(self, line: StatusLine) -> str:
        seconds = monotonic() - line.start
        done = self.rounds - self.first
        if self.total is None or self.rounds >= self.total or not done:
            return clock(seconds)
        return f"{clock(seconds)}, {clock(seconds / done * (self.total - self.rounds))} left"


def headline(row: Mapping[str, float]) -> str:
    """A round's values for the line: accuracy and F, else ALMA, else the first two."""
    for prefix in ("global", "val"):
        if f"{prefix}/acc" in row:
            text = f"acc {100 * row[f'{prefix}/acc']:.1f} %"
            lost = row.get(f"{prefix}/forgetting")
            return text if lost is None else f"{text}  F {100 * lost:.1f} %"
    if "local/alma" in row:
        return f"alma {100 * row['local/alma']:.1f} %"
    others = [name for name in row if not name.startswith("comm/")]
    return "  ".join(f"{name} {row[name]:.4g}" for name in others[:2])


def clock(seconds: float) -> str:
    """Seconds as m:ss or h:mm:ss.

    >>> clock(75.4), clock(3600)
    ('1:15', '1:00:00')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
