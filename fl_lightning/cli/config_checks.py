"""Checks of a parsed configuration that need nothing which it describes."""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import cuda, mps

from fl_lightning.cli.classes import may_log_metric_objects
from fl_lightning.metrics.keys import Direction, direction_of, given_direction, parse_directions, unknown_direction
from fl_lightning.runs import folder as runs


def check_limits(trainer: Any) -> None:
    """Refuse a fit whose length nobody said: Lightning would run 1,000 rounds.

    Args:
        trainer: The settings of the Trainer.

    Raises:
        ValueError: No setting limits the rounds.
    """
    has_limit = trainer.max_epochs is not None or trainer.max_steps != -1 or trainer.max_time is not None
    if not (has_limit or trainer.fast_dev_run):
        raise ValueError(
            "fit needs trainer.max_epochs, the number of rounds, trainer.max_steps or trainer.max_time, and got none "
            "(Lightning would run 1,000 rounds); add --trainer.max_epochs 30, or trainer: {max_epochs: 30} in a file"
        )


def check_devices(trainer: Any) -> None:
    """Refuse devices that are none, and a GPU where torch finds none, which Lightning does without a remedy.

    Args:
        trainer: The settings of the Trainer.

    Raises:
        ValueError: There are 0 devices, or no GPU.
    """
    if trainer.devices in (0, "0"):
        raise ValueError(f"trainer.devices must be at least 1, got {trainer.devices}; auto takes all that there are")
    needs_gpu = trainer.accelerator in ("gpu", "cuda")
    if needs_gpu and not cuda.is_available() and not mps.is_available():
        raise ValueError(
            f"trainer.accelerator={trainer.accelerator} needs a GPU, and torch {torch.__version__} finds none here; "
            f"auto takes what there is"
        )


def directions_in(config: Any) -> dict[str, Direction]:
    """Return the directions that a configuration gives, by log key: `direction`, and `best.mode` of its key.

    Args:
        config: The parsed configuration of a command.

    Raises:
        ValueError: A direction is not `KEY=min` or `KEY=max`.
    """
    directions = parse_directions(config.get("direction") or [])
    best = config.get("best")
    if best is not None and best.monitor is not None and best.mode is not None:
        directions.setdefault(best.monitor, best.mode)
    return directions


def check_best(config: Any, directions: Mapping[str, Direction]) -> None:
    """Refuse a best checkpoint by a key whose direction nobody tells, unless a metric object may tell it later.

    Args:
        config: The parsed configuration of a fit.
        directions: The directions that it gives, by log key.

    Raises:
        ValueError: Nobody tells whether lower or higher is better, or two options contradict each other.
    """
    monitor = config.best.monitor
    if monitor is None:
        return
    mode = config.best.mode
    told = given_direction(monitor, directions)
    if mode is not None and told is not None and mode != told:
        raise ValueError(
            f"best.mode must be the direction of {monitor} in --direction ({told}), got {mode}; leave out one of them"
        )
    if direction_of(monitor, directions) is not None or config.model.metrics:
        return
    if not may_log_metric_objects(config.model.client):
        raise ValueError(unknown_direction(monitor))


def missing_weights(command: str, parent: Path) -> str:
    """Return the sentence for an evaluation that names no trained weights, with the checkpoints of the newest run.

    Args:
        command: The command.
        parent: Folder of the runs.
    """
    paths: list[Path] = []
    for run in reversed(runs.runs(parent).values()):
        found = [runs.checkpoint_of(run, kind) for kind in ("last", "best")]
        paths = [path for path in found if path is not None]
        if paths:
            break
    options = " or ".join(f"--ckpt_path {shlex.quote(str(path))}" for path in paths)
    remedy = f"give {options}" if options else f"there is no run in {parent} with a checkpoint: fit first"
    return (
        f"{command} needs trained weights, and those of a new federation are drawn at random; {remedy}, or name a file "
        f"of weights by --model.initial_weights"
    )
