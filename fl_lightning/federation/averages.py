"""Callbacks that average weights at the end of an epoch take a round's weights before the round is evaluated."""

from functools import partial
from typing import Any

from pytorch_lightning import Callback, Trainer

from fl_lightning.federation.checks import averaging_callbacks


class EpochAverages:
    """Lets Lightning's WeightAveraging end its epoch once a round is trained, and not again after the evaluation.

    A round is one epoch. Lightning ends the epoch after the validation, so that the values of the round would be of
    other weights than its checkpoint.
    """

    def __init__(self) -> None:
        self._is_asking = False
        self._callbacks: list[Callback] = []
        """The callbacks of the fit that average weights."""

    def begin_fit(self, trainer: Trainer) -> None:
        """Answer the callbacks' questions about epochs from now on."""
        self.end_fit()
        self._callbacks = averaging_callbacks(trainer)
        for callback in self._callbacks:
            give_back(callback)
            own: Any = callback
            own.should_update = partial(self._should_update, ask=own.should_update)

    def end_fit(self) -> None:
        """Give the callbacks their own answers again."""
        for callback in self._callbacks:
            give_back(callback)
        self._callbacks = []

    def end_training(self, trainer: Trainer, loop: Any) -> None:
        """End the epoch of the callbacks, whose averages are then those of the trained round."""
        self._is_asking = True
        try:
            for callback in self._callbacks:
                # What a subclass does at the end of an epoch besides belongs to the real end.
                averaging: Any = next(base for base in type(callback).__mro__ if base.__name__ == "WeightAveraging")
                averaging.on_train_epoch_end(callback, trainer, loop)
        finally:
            self._is_asking = False

    def _should_update(self, step_idx: int | None = None, epoch_idx: int | None = None, *, ask: Any) -> bool:
        """Answer a callback whether to update its averages: at the end of an epoch only if the round was just trained.

        Args:
            step_idx: Index of the last step, or None at the end of an epoch.
            epoch_idx: Index of the last epoch, or None after a step.
            ask: The callback's own answer.
        """
        if epoch_idx is not None and not self._is_asking:
            return False
        return bool(ask(step_idx=step_idx, epoch_idx=epoch_idx))


def give_back(callback: Callback) -> None:
    """Give a callback its own answer again, including an answer that another loop has replaced in a failed fit."""
    replaced = vars(callback).get("should_update")
    if isinstance(replaced, partial) and isinstance(getattr(replaced.func, "__self__", None), EpochAverages):
        del vars(callback)["should_update"]
