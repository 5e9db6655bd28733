"""Callbacks that monitor a value look at it once, and not again in rounds without a new one."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from pytorch_lightning import Callback, Trainer

HOOKS = ("on_validation_end", "on_train_epoch_end")
"""Hooks in which EarlyStopping and ModelCheckpoint look at their value."""

ALWAYS_KNOWN = (None, "epoch", "step")
"""What ModelCheckpoint may monitor without a logged value."""


def is_kind(callback: Callback, name: str) -> bool:
    """Tell whether a callback is of a class of this name, of whichever package of Lightning.

    Args:
        callback: The callback.
        name: Name of the class or of one that it extends.
    """
    return name in {base.__name__ for base in type(callback).__mro__}


class FreshValues:
    """Lets Lightning's EarlyStopping and ModelCheckpoint look at their value only when there is a new one.

    `trainer.callback_metrics` keeps the values of earlier rounds. Some values are not measured in every round.
    EarlyStopping counts a value once, in the round that measured it or later. ModelCheckpoint compares a value only in
    the round that measured it, because it saves the model of the present round.
    """

    def __init__(self) -> None:
        self._published: dict[str, int] = {}
        """How often each key got a value in the present fit."""
        self._round_of: dict[str, int] = {}
        """The round of each key's last value."""
        self._seen: dict[tuple[int, str], int] = {}
        """By callback and hook how many of these values were looked at."""
        self._late: dict[int, Callable[..., None]] = {}
        """By ModelCheckpoint the hook that found no new value in the present round."""
        self._watched: list[Callback] = []
        self._first_round = 0
        self._completed_round = -1
        """The round that a continued run has completed."""
        self._period = 1
        """Number of rounds within which every value is measured once."""

    def publish(self, keys: Iterable[str], round_idx: int) -> None:
        """Count a new value of each key, which was measured in a round."""
        for key in keys:
            self._published[key] = self._published.get(key, 0) + 1
            self._round_of[key] = round_idx

    def know(self, keys: Iterable[str], round_idx: int) -> None:
        """Take keys whose values are of a round that a continued run has completed.

        In later rounds the callbacks know these values already.
        """
        self._completed_round = round_idx
        for key in keys:
            self._published.setdefault(key, 0)
            self._round_of[key] = round_idx

    def begin_fit(self, trainer: Trainer, evaluated_every: Iterable[int | None]) -> None:
        """Watch the callbacks of a fit.

        Args:
            trainer: The Trainer.
            evaluated_every: Numbers of rounds from one evaluation of a kind to the next. None is no evaluation.
        """
        self.end_fit()
        self._published = {}
        self._round_of = {}
        self._seen = {}
        self._late = {}
        self._first_round = trainer.current_epoch
        self._completed_round = -1
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        periods = [trainer.check_val_every_n_epoch or 1, *(every or 1 for every in evaluated_every)]
        periods += [getattr(callback, "every", 1) for callback in callbacks]
        self._period = max(periods)
        for callback in callbacks:
            give_back(callback)
            if is_kind(callback, "EarlyStopping"):
                self._watch(callback, self._look)
            elif is_kind(callback, "ModelCheckpoint"):
                self._watch(callback, self._look_now)

    def _watch(self, callback: Callback, look: Callable[..., None]) -> None:
        """Replace the hooks of a callback by a function that may call them."""
        self._watched.append(callback)
        for name in HOOKS:
            setattr(callback, name, partial(look, callback=callback, name=name, hook=getattr(callback, name)))

    def end_fit(self) -> None:
        """Give the callbacks their own hooks again."""
        for callback in self._watched:
            give_back(callback)
        self._watched = []

    def _look(self, trainer: Trainer, loop: Any, *, callback: Any, name: str, hook: Callable[..., None]) -> None:
        """Call a hook of EarlyStopping if its value is new."""
        count = self._published.get(callback.monitor)
        if count is None:
            if not self._waits_for(callback.monitor, trainer):
                hook(trainer, loop)
            return
        key = (id(callback), name)
        is_completed_now = trainer.current_epoch == self._completed_round and key not in self._seen
        if is_completed_now or self._seen.get(key, 0) < count:
            self._seen[key] = count
            hook(trainer, loop)

    def _look_now(self, trainer: Trainer, loop: Any, *, callback: Any, name: str, hook: Callable[..., None]) -> None:
        """Call a hook of ModelCheckpoint if its value is of the present round.

        A value that comes after the validation is compared at the end of the round.
        """
        late = self._late.pop(id(callback), None)
        if not self._is_of_now(callback.monitor, trainer):
            if name != HOOKS[-1]:
                self._late[id(callback)] = hook
            return
        if late is not None and name == HOOKS[-1]:
            late(trainer, loop)
        hook(trainer, loop)

    def _is_of_now(self, key: str | None, trainer: Trainer) -> bool:
        """Return True if the value of a key is of the present round, or if it is not of the federation."""
        if key in ALWAYS_KNOWN:
            return True
        if key not in self._round_of:
            return not self._waits_for(key, trainer)
        return self._round_of[key] == trainer.current_epoch

    def _waits_for(self, key: str | None, trainer: Trainer) -> bool:
        """Return True if nobody has measured a value yet, and it may still come.

        After some rounds, and in the last round, Lightning says that there is none.
        """
        rounds = trainer.current_epoch - self._first_round + 1
        is_missing = key not in trainer.callback_metrics
        is_last_round = trainer.current_epoch + 1 == trainer.max_epochs
        return is_missing and self._period > 1 and rounds <= self._period and not is_last_round


def give_back(callback: Callback) -> None:
    """Give a callback its own hooks again, including hooks that another loop has replaced in a failed fit."""
    for name in HOOKS:
        replaced = vars(callback).get(name)
        if isinstance(replaced, partial) and isinstance(getattr(replaced.func, "__self__", None), FreshValues):
            del vars(callback)[name]
