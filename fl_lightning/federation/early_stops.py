"""Callbacks that stop a run early count a value once, and not again in rounds without a new one."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from pytorch_lightning import Callback, Trainer

HOOKS = ("on_validation_end", "on_train_epoch_end")
"""Hooks in which EarlyStopping looks at its value."""


class EarlyStops:
    """Lets Lightning's EarlyStopping look at its value only when there is a new one.

    `trainer.callback_metrics` keeps the values of earlier rounds. Some values are not measured in every round.
    """

    def __init__(self) -> None:
        self._published: dict[str, int] = {}
        """How often each key got a value in the present fit."""
        self._seen: dict[tuple[int, str], int] = {}
        """By callback and hook how many of these values were looked at."""
        self._watched: list[Callback] = []
        self._first_round = 0
        self._completed_round = -1
        """The round that a continued run has completed."""
        self._period = 1
        """Number of rounds within which every value is measured once."""

    def publish(self, keys: Iterable[str]) -> None:
        """Count a new value of each key."""
        for key in keys:
            self._published[key] = self._published.get(key, 0) + 1

    def know(self, keys: Iterable[str], round_idx: int) -> None:
        """Take keys whose values are of a round that a continued run has completed.

        In later rounds the callbacks know these values already.
        """
        self._completed_round = round_idx
        for key in keys:
            self._published.setdefault(key, 0)

    def begin_fit(self, trainer: Trainer, evaluate_clients_every: int | None) -> None:
        """Watch the callbacks of a fit.

        Args:
            trainer: The Trainer.
            evaluate_clients_every: Number of rounds after which clients are evaluated, or None.
        """
        self.end_fit()
        self._published = {}
        self._seen = {}
        self._first_round = trainer.current_epoch
        self._completed_round = -1
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        periods = [evaluate_clients_every or 1, trainer.check_val_every_n_epoch or 1]
        periods += [getattr(callback, "every", 1) for callback in callbacks]
        self._period = max(periods)
        for callback in callbacks:
            give_back(callback)
            if any(base.__name__ == "EarlyStopping" for base in type(callback).__mro__):
                self._watched.append(callback)
                for name in HOOKS:
                    hook = getattr(callback, name)
                    look = partial(self._look, callback=callback, name=name, hook=hook)
                    setattr(callback, name, look)

    def end_fit(self) -> None:
        """Give the callbacks their own hooks again."""
        for callback in self._watched:
            give_back(callback)
        self._watched = []

    def _look(self, trainer: Trainer, loop: Any, *, callback: Any, name: str, hook: Callable[..., None]) -> None:
        """Call a hook of a callback if its value is new.

        A value that nobody has measured yet is waited for. After some rounds, and in the last round, Lightning says
        that there is none.
        """
        count = self._published.get(callback.monitor)
        if count is None:
            rounds = trainer.current_epoch - self._first_round + 1
            is_missing = callback.monitor not in trainer.callback_metrics
            is_last_round = trainer.current_epoch + 1 == trainer.max_epochs
            is_waited_for = is_missing and self._period > 1 and rounds <= self._period and not is_last_round
            if not is_waited_for:
                hook(trainer, loop)
            return
        key = (id(callback), name)
        is_completed_now = trainer.current_epoch == self._completed_round and key not in self._seen
        if is_completed_now or self._seen.get(key, 0) < count:
            self._seen[key] = count
            hook(trainer, loop)


def give_back(callback: Callback) -> None:
    """Give a callback its own hooks again, including hooks that another loop has replaced in a failed fit."""
    for name in HOOKS:
        replaced = vars(callback).get(name)
        if isinstance(replaced, partial) and isinstance(getattr(replaced.func, "__self__", None), EarlyStops):
            del vars(callback)[name]
