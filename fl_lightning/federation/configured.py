"""The settings that a parsed configuration holds."""

import inspect
from collections.abc import Collection, Mapping
from dataclasses import asdict
from enum import Enum
from typing import Any

from fl_lightning.aggregation.server_parts import ServerPart
from fl_lightning.engines.settings import cosine_of
from fl_lightning.federation.horizon import PLANNED, round_limit
from fl_lightning.federation.values import Settings, below_of, class_name, is_number, is_plain, resolved, shortened
from fl_lightning.members.faults import FaultPolicy
from fl_lightning.utils.plain import plain_scalar

SAME_SEEDS = {"data.sampling_seed": "data.seed", "model.seed": "seed_everything"}
"""Settings that without a value have the value of another setting."""

SERVER_PARTS = ("model.aggregator", "model.server_module")
"""Names of the settings of the parts of the server that may depend on the number of planned rounds."""

COSINE_ROUNDS = "model.lr_decay.rounds"
"""Name of the rounds over which a cosine learning rate falls: those of `lr_decay`, else `trainer.max_epochs`."""


def flat(config: Mapping[str, Any]) -> Settings:
    """Return all settings of a parsed configuration, by dotted names without `class_path` and `init_args`.

    A setting that stands for another one has the value of that one: `data.sampling_seed` without a value has that of
    `data.seed`, and `model.seed` has that of `seed_everything`.

    Args:
        config: The configuration.
    """
    settings = cosine_rounds(config.get("model"), planned_rounds(config))
    settings |= flat_part(config, "")
    if any(part_plans(settings, name) for name in SERVER_PARTS):
        settings[PLANNED] = planned_rounds(config)
        settings.pop(f"model.{PLANNED}", None)  # which the other one tells
    return in_one_form(settings)


def part_plans(settings: Settings, name: str) -> bool:
    """Return True if a part of the server depends on the number of planned rounds.

    Args:
        settings: The settings.
        name: Name of the setting of the part.
    """
    part = resolved(settings.get(name))
    return inspect.isclass(part) and issubclass(part, ServerPart) and part.plans(below_of(settings, name))


def in_one_form(settings: Settings, names: Collection[str] = ()) -> Settings:
    """Return settings in which a setting that stands for another one has its value.

    Args:
        settings: The settings.
        names: Names that the settings get if they lack them.
    """
    settings = dict(settings)
    for name, other in SAME_SEEDS.items():
        is_asked = name in settings or name in names
        if is_asked and settings.get(name) is None and is_number(settings.get(other)):
            settings[name] = settings[other]
    size = settings.get("data.cohort_size")
    clients = settings.get("data.num_clients")
    # Of clients that never train no cohort has a share.
    has_unseen = settings.get("data.unseen") is not None
    if is_number(size) and is_number(clients) and clients and not has_unseen:
        settings |= {"data.cohort_size": None, "data.participation": size / clients}
    return settings


def planned_rounds(config: Mapping[str, Any]) -> int | None:
    """Return the rounds that a configuration plans, or None without a limit."""
    trainer = config.get("trainer")
    model = config.get("model")
    given = model.get(PLANNED) if isinstance(model, Mapping) else None
    if given is not None or not isinstance(trainer, Mapping):
        return given
    return round_limit(trainer.get("max_epochs"), trainer.get("max_steps"))


def flat_part(config: Mapping[str, Any], prefix: str) -> Settings:
    """Return all settings of a part of a configuration.

    Args:
        config: The part.
        prefix: Dotted name of the part. Empty for the whole configuration.
    """
    settings: Settings = {}
    for key, value in config.items():
        name = prefix if key in ("class_path", "init_args") else f"{prefix}.{key}".lstrip(".")
        if key == "class_path" and isinstance(value, str):
            settings[name] = class_name(value)
        elif key != "init_args" or value:
            settings |= flat_value(name, value)
    return settings


def flat_value(name: str, value: Any) -> Settings:
    """Return the settings of a value of a configuration.

    Args:
        name: Dotted name of the value.
        value: The value.
    """
    if name == "model.faults" and isinstance(value, str):
        # The word stands for a policy.
        return flat_part(asdict(FaultPolicy.of(value)), name)
    if isinstance(value, Mapping):
        return flat_part(value, name) if value else {name: {}}
    written = as_written(value)
    if isinstance(written, list) and any(isinstance(item, Mapping) for item in written):
        return flat_part({str(index): item for index, item in enumerate(value)}, name)
    return {name: shortened(written)}


def as_written(value: Any) -> Any:
    """Write the values of a parsed configuration as a file has them, within a pytree.

    A class or a function is its import path, and a member of an Enum its name. Other objects, such as a path or a span
    of time, are their texts.

    >>> import math
    >>> from pathlib import PurePath
    >>> as_written({"act": math.sqrt, "folder": PurePath("a/b"), "names": {"b", "a"}, "widths": (8, 8)})
    {'act': 'math.sqrt', 'folder': 'a/b', 'names': ['a', 'b'], 'widths': [8, 8]}
    """
    if isinstance(value, Mapping):
        return {key: as_written(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_written(item) for item in value]
    if isinstance(value, set | frozenset):
        return [as_written(item) for item in sorted(value, key=str)]
    if isinstance(value, Enum):
        return value.name
    if inspect.isclass(value) or inspect.isroutine(value):
        return class_name(value)
    return plain_scalar(value) if is_plain(value) else str(value)


def cosine_rounds(model: Any, planned: int | None) -> Settings:
    """Return the settings of a cosine learning rate, or an empty dict for another one.

    They fix the planned rounds, which are free otherwise.

    Args:
        model: The settings of the loop.
        planned: The planned rounds of the run. None means no limit.
    """
    cosine = cosine_of(model.get("lr_decay")) if isinstance(model, Mapping) else None
    if cosine is None:
        return {}
    settings: Settings = {"model.lr_decay": "cosine"}
    rounds = cosine.get("rounds", planned)
    if rounds is not None:
        settings[COSINE_ROUNDS] = rounds
    return settings
