"""Hyper-parameters of client and federation, handed to the loggers as Lightning hands those of a fitted module."""

from collections.abc import Iterable, Mapping
from inspect import signature
from typing import Any

from pytorch_lightning import LightningModule

from fl_lightning.federation.identity import Settings

DIGESTS = ("data.labels", "data.clients")
"""Settings of a run's identity that are digests."""

FINAL = "hp_metric"
"""Lightning's name of the metric that TensorBoard shows beside hyper-parameters."""


def hyperparameters(settings: Settings, modules: Iterable[LightningModule]) -> dict[str, Any]:
    """Join what the modules saved (`save_hyperparameters`) by its own names and the settings by their dotted ones."""
    saved = {key: value for module in modules for key, value in module.hparams_initial.items() if key != "_class_path"}
    return {**{key: value for key, value in settings.items() if key not in DIGESTS}, **saved}


def summary_key(keys: Iterable[str]) -> str | None:
    """Choose the key that sums up an evaluation: an accuracy, else the first one; None of none.

    >>> summary_key(["val/loss", "val/acc"]), summary_key(["val_mse", "val_mae"])
    ('val/acc', 'val_mse')
    """
    found = list(keys)
    return next((key for key in found if key.lower().endswith(("acc", "accuracy"))), next(iter(found), None))


def log_final(loggers: Iterable[Any], params: Mapping[str, Any], value: float, round_idx: int) -> None:
    """Log the run's last value with the hyper-parameters, to loggers that take both (TensorBoard)."""
    for logger in loggers:
        takes = signature(logger.log_hyperparams).parameters
        if {"metrics", "step"} <= takes.keys():
            logger.log_hyperparams(dict(params), metrics={FINAL: value}, step=round_idx)
