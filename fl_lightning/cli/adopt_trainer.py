"""The settings of a Trainer in a file of LightningCLI, and what becomes of them in a federation."""

import inspect
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from math import ceil
from typing import Any

from pytorch_lightning import Trainer

from fl_lightning.cli.adopt_files import content_of
from fl_lightning.cli.adoption import Adoption, with_known_paths
from fl_lightning.cli.classes import find_class
from fl_lightning.federation.checks import HALF_PRECISIONS, REFUSED
from fl_lightning.utils.packages import LIGHTNING
from fl_lightning.utils.settings import as_list
from fl_lightning.utils.suggestions import suggestion

LIMITS = ("trainer.max_epochs", "trainer.max_steps", "trainer.max_time", "trainer.fast_dev_run")
"""Settings that limit the rounds of a fit."""

SHARDING = ("fsdp", "deepspeed", "model_parallel", "modelparallel")
"""Beginnings of the names of strategies that spread one model over devices."""

STARTS = ("spawn", "fork", "notebook")
"""Ways to start processes that the names of strategies end with."""

UNTIL_ROUND = {
    "every_n_train_steps": "counts batches, of which a round has one",
    "train_time_interval": "is no number of rounds",
}
"""Arguments of ModelCheckpoint that never write in a federation, with the reason."""


def read_trainer(adoption: Adoption, value: Any) -> None:
    """Find an answer for each setting of the Trainer."""
    if isinstance(value, str):
        value = content_of(str(adoption.folder / value))
    if not isinstance(value, dict | None):
        adoption.refusals.append(
            f"trainer must be settings by name, got {value}; write such as max_epochs: 30 below it"
        )
        return
    settings: dict[str, Any] = {}
    for name, setting in (value or {}).items():
        if f"trainer.{name}" not in adoption.given:
            settings[name] = setting
    read_settings(adoption, settings)
    spread_clients(adoption, settings)
    check_rounds(adoption)


def read_settings(adoption: Adoption, settings: Mapping[str, Any]) -> None:
    """Find an answer for each setting of the Trainer that is not at its default.

    Args:
        adoption: The adoption.
        settings: The settings that nothing replaces.
    """
    parameters = inspect.signature(Trainer.__init__).parameters
    # How many batches a step takes comes before the limit of steps.
    for name in sorted(settings, key=lambda name: name != "accumulate_grad_batches"):
        setting = settings[name]
        if name not in parameters:
            adoption.refusals.append(
                f"trainer.{name} must be a setting of the Trainer, which has none of that name"
                f"{suggestion(name, list(parameters))}; remove it from a copy of the file"
            )
        elif setting is not None and setting != parameters[name].default:
            answer = TRAINER.get(name, keep)
            answer(adoption, name, setting)


def check_rounds(adoption: Adoption) -> None:
    """Refuse a fit whose length nobody says, unless its number of steps was refused."""
    kept = {f"trainer.{name}" for name in adoption.settings.get("trainer", {})}
    has_limit = not kept.isdisjoint(LIMITS) or not set(adoption.given).isdisjoint(LIMITS)
    is_refused = any(sentence.startswith("trainer.max_steps") for sentence in adoption.refusals)
    if not has_limit and not is_refused:
        adoption.refusals.append(
            "trainer.max_epochs must be the number of rounds, got none; add --trainer.max_epochs 30"
        )


Answer = Callable[[Adoption, str, Any], None]
"""Finds out what becomes of a setting of the Trainer, given its name and its value, which is not the default."""


def keep(adoption: Adoption, name: str, value: Any) -> None:
    """Keep a setting that has the same meaning in a federation, with paths under which the Trainer knows classes."""
    adoption.put(f"trainer.{name}", with_known_paths(adoption, f"trainer.{name}", value))


def keep_for_rounds(adoption: Adoption, name: str, value: Any) -> None:
    """Keep a setting that counts epochs, which are rounds."""
    adoption.put(f"trainer.{name}", value)
    adoption.notes.append(f"trainer.{name}: kept; {value} is a number of communication rounds")


def drop(adoption: Adoption, name: str, value: Any, *, why: str) -> None:
    """Drop a setting without which the run measures and does the same, or more."""
    adoption.notes.append(f"trainer.{name}: {value} dropped; {why}")


def refuse(adoption: Adoption, name: str, value: Any, *, why: str, instead: str) -> None:
    """Refuse a setting that would be another one in a federation."""
    adoption.refusals.append(f"trainer.{name} {why}, got {value}; add {instead}")


def move(adoption: Adoption, name: str, value: Any, *, to: str) -> None:
    """Move a setting of the Trainer's optimizer to the clients'."""
    adoption.put(to, value)
    adoption.notes.append(f"trainer.{name}: moved to {to}, {value}")


def clip(adoption: Adoption, name: str, value: Any) -> None:
    """Move the largest norm of gradients, of which Lightning takes 0 for none."""
    if value:
        move(adoption, name, value, to="model.clip_norm")


def limit_steps(adoption: Adoption, name: str, value: Any) -> None:
    """Move a number of batches to the clients' steps, and a share of them to the clients' work."""
    if not is_number(value):
        keep(adoption, name, value)
    elif isinstance(value, float):
        # A share of 1.0 is all batches.
        if value < 1:
            move(adoption, name, value, to="data.local_work")
    elif value < 1:
        refuse(adoption, name, value, why="must leave batches to train on", instead=f"--trainer.{name} null")
    else:
        accumulated = adoption.settings.get("model", {}).get("accumulate_grad_batches", 1)
        steps = ceil(value / accumulated) if is_number(accumulated) else value
        move(adoption, name, steps, to="model.max_local_steps")


def limit_rounds(adoption: Adoption, name: str, value: Any) -> None:
    """Drop a number of optimizer steps if the command line gives the rounds, else refuse it."""
    if set(LIMITS) & set(adoption.given):
        drop(adoption, name, value, why="it counts optimizer steps")
    else:
        why = "counts optimizer steps, and the length of a federation is a number of rounds"
        refuse(adoption, name, value, why=why, instead="--trainer.max_epochs ROUNDS")


def evaluate(adoption: Adoption, name: str, value: Any) -> None:
    """Drop an interval within an epoch: the global model exists once a round."""
    if value != 1.0 or not isinstance(value, float):
        drop(adoption, name, value, why="the global model is evaluated once a round, after it")


def clip_by_norm(adoption: Adoption, name: str, value: Any) -> None:
    """Refuse to clip by value."""
    if value != "norm":
        why = "must be norm, by which clients clip their gradients"
        refuse(adoption, name, value, why=why, instead=f"--trainer.{name} norm")


def use_precision(adoption: Adoption, name: str, value: Any) -> None:
    """Keep a precision in which weights are float32 or better."""
    if value in HALF_PRECISIONS:
        why = "must keep the weights in single precision, which small updates need"
        refuse(adoption, name, value, why=why, instead=f"--trainer.{name} bf16-mixed")
    else:
        keep(adoption, name, value)


def spread(adoption: Adoption, name: str, value: Any) -> None:
    """Spread clients over processes in place of batches."""
    path = str(value)
    arguments: Mapping[str, Any] = {}
    if isinstance(value, dict):
        path = str(value.get("class_path"))
        arguments = value.get("init_args") or {}
    kind = path.rpartition(".")[2].lower()
    if kind.startswith(SHARDING):
        why = "must leave the model whole on a device, where a client is trained"
        refuse(adoption, name, path, why=why, instead=f"--trainer.{name} client_parallel")
    elif kind.startswith("ddp"):
        started = f"{kind}_{arguments.get('start_method', '')}"
        ending = "".join(f"_{start}" for start in STARTS if start in started)
        adoption.put(f"trainer.{name}", f"client_parallel{ending}")
        adoption.notes.append(f"trainer.{name}: {path} is client_parallel{ending}; processes train different clients")
    else:
        keep(adoption, name, value)


def spread_clients(adoption: Adoption, settings: Mapping[str, Any]) -> None:
    """Spread clients over the devices of a file that leaves the strategy to Lightning, which would take DDP.

    Args:
        adoption: The adoption.
        settings: The settings of the Trainer in the file.
    """
    is_open = settings.get("strategy") in (None, "auto") and "trainer.strategy" not in adoption.given
    has_several = is_several(settings.get("devices")) or is_several(settings.get("num_nodes"))
    if is_open and has_several:
        adoption.put("trainer.strategy", "client_parallel")
        adoption.notes.append("trainer.strategy: auto is client_parallel; processes train different clients")


def is_several(devices: Any) -> bool:
    """Return True for a number above 1, for such a number as text, and for a list of several.

    >>> is_several([0, 1]), is_several("2"), is_several("auto"), is_several(None)
    (True, True, False, False)
    """
    count = str(len(devices) if isinstance(devices, list) else devices)
    return count.isdecimal() and int(count) > 1


def is_number(value: Any) -> bool:
    """Return True for a number. The parser reports another value where a number is needed."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def use_callbacks(adoption: Adoption, name: str, value: Any) -> None:
    """Keep callbacks that have a meaning in a federation."""
    kept = []
    for callback in as_list(value):
        path = str(callback.get("class_path") if isinstance(callback, dict) else callback)
        kinds = lightning_names(path)
        refused = sorted(kinds & REFUSED.keys())
        for kind in refused:
            adoption.refusals.append(f"trainer.callbacks must be without {path}: it {REFUSED[kind]}")
        if refused:
            continue
        has_intervals = "ModelCheckpoint" in kinds and isinstance(callback, dict)
        settings = without_steps(adoption, callback) if has_intervals else callback
        kept.append(with_known_paths(adoption, f"trainer.{name}", settings))
    adoption.put(f"trainer.{name}", kept)


def without_steps(adoption: Adoption, callback: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a ModelCheckpoint without intervals that no round reaches."""
    arguments = dict(callback.get("init_args") or {})
    for name, why in UNTIL_ROUND.items():
        if arguments.get(name):
            adoption.notes.append(f"trainer.callbacks.{name}: {arguments[name]} dropped; it {why}")
        arguments.pop(name, None)
    return {**callback, "init_args": arguments}


def lightning_names(path: str) -> set[str]:
    """Return the names of Lightning's own classes that a class derives from, given its import path or short name.

    >>> sorted(lightning_names("lightning.pytorch.callbacks.EarlyStopping")), lightning_names("EarlyStopping")
    (['Callback', 'EarlyStopping'], {'EarlyStopping'})
    """
    kind = None
    if "." in path:
        # The parser reports a module that cannot be imported.
        with suppress(Exception):
            kind = find_class(path)
    if kind is None:
        return {path.rpartition(".")[2]}
    return {base.__name__ for base in kind.__mro__ if base.__module__.startswith(LIGHTNING)}


EVERY_ROUND = "every round is logged"

DRAWN = "the batches of each client are drawn for it"

OWN_STATISTICS = "a client is trained in one process, with its own statistics"

TRAINER: dict[str, Answer] = {
    "accelerator": keep,
    "strategy": spread,
    "devices": keep,
    "num_nodes": keep,
    "precision": use_precision,
    "logger": keep,
    "callbacks": use_callbacks,
    "fast_dev_run": keep,
    "max_epochs": keep_for_rounds,
    "min_epochs": keep_for_rounds,
    "max_steps": limit_rounds,
    "min_steps": partial(drop, why="it counts optimizer steps; trainer.min_epochs counts rounds"),
    "max_time": keep,
    "limit_train_batches": limit_steps,
    "limit_val_batches": keep,
    "limit_test_batches": keep,
    "limit_predict_batches": keep,
    "overfit_batches": partial(
        refuse, why="has no meaning for samples that are divided", instead="--trainer.overfit_batches 0"
    ),
    "val_check_interval": evaluate,
    "check_val_every_n_epoch": keep_for_rounds,
    "num_sanity_val_steps": keep,
    "log_every_n_steps": partial(drop, why=EVERY_ROUND),
    "enable_checkpointing": keep,
    "enable_progress_bar": keep,
    "enable_model_summary": keep,
    "accumulate_grad_batches": partial(move, to="model.accumulate_grad_batches"),
    "gradient_clip_val": clip,
    "gradient_clip_algorithm": clip_by_norm,
    "deterministic": keep,
    "benchmark": keep,
    "inference_mode": keep,
    "use_distributed_sampler": partial(drop, why=DRAWN),
    "profiler": keep,
    "detect_anomaly": keep,
    "barebones": keep,
    "plugins": keep,
    "sync_batchnorm": partial(drop, why=OWN_STATISTICS),
    "reload_dataloaders_every_n_epochs": partial(
        refuse,
        why="must be 0, since the samples are divided once",
        instead="--trainer.reload_dataloaders_every_n_epochs 0",
    ),
    "default_root_dir": keep,
    "enable_autolog_hparams": keep,
    "model_registry": keep,
}
"""What becomes of each setting of the Trainer that is not at its default."""
