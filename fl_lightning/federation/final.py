"""The value that sums up a run, for loggers that show it beside the hyper-parameters."""

import inspect
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from fl_lightning.metrics.keys import is_accuracy

FINAL = "hp_metric"
"""Lightning's name of the metric that TensorBoard shows beside the hyper-parameters."""


def summary_key(keys: Collection[str]) -> str | None:
    """Return the key of an evaluation that summarizes it: an accuracy, else the first key.

    None if there is no key.

    >>> summary_key(["val/loss", "val/acc"]), summary_key(["val_mse", "val_mae"])
    ('val/acc', 'val_mse')
    """
    for key in keys:
        if is_accuracy(key):
            return key
    return next(iter(keys), None)


def log_final(loggers: Iterable[Any], params: Mapping[str, Any], value: float, round_idx: int) -> None:
    """Log the last value of a run with the hyper-parameters, to loggers that take both, such as TensorBoard.

    Args:
        loggers: The loggers of the Trainer.
        params: The hyper-parameters, by name.
        value: The last value.
        round_idx: Index of the last round.
    """
    for logger in loggers:
        arguments = inspect.signature(logger.log_hyperparams).parameters
        if "metrics" in arguments and "step" in arguments:
            logger.log_hyperparams(dict(params), metrics={FINAL: value}, step=round_idx)
