"""The settings that the objects of a run hold."""

import inspect
from argparse import Namespace
from collections.abc import Mapping
from enum import Enum
from functools import partial
from pathlib import PurePath
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fl_lightning.client import ClientModule
from fl_lightning.data import Source
from fl_lightning.federation.configured import cosine_rounds
from fl_lightning.federation.values import Settings, class_name, digest_of, is_plain, joined, shortened
from fl_lightning.types import TrainableModule
from fl_lightning.utils.plain import plain_scalar, plain_value

MAX_DEPTH = 8
"""Maximal depth of a value in a pytree. Deeper values are not described."""


def described_federation(
    client: ClientModule, parts: Mapping[str, Any], precision: str, planned: int | None
) -> Settings:
    """Return the settings of a federation, without those of its data.

    Args:
        client: The client module.
        parts: The other parts and settings, by their names in the configuration.
        precision: The precision of the Trainer.
        planned: The planned rounds of the run. None means no limit.
    """
    settings: Settings = {"trainer.precision": precision}
    settings |= described_value("model.client", client)
    settings |= cosine_rounds(parts, planned)
    if client.module is None or client.has_given_optimizer:
        settings |= described_optimizer("model.client.optimizer", client.optimizer_factory)
    if client.scheduler_factory is not None:
        settings |= described_value("model.client.lr_scheduler", client.scheduler_factory)
    for name, value in parts.items():
        describe = described_optimizer if name == "server_optimizer" else described_value
        settings |= describe(f"model.{name}", value)
    return settings


def described_value(name: str, value: Any, depth: int = 0) -> Settings:
    """Return the classes and plain arguments of a value, with the names that a configuration file gives them.

    Args:
        name: Dotted name of the value.
        value: A plain value, a tensor, a path, a pytree of such values, a factory, a function or another object.
        depth: Depth of the value in its pytree, from 0.
    """
    single = described_single(value)
    if single is not None:
        return {name: single[0]}
    if isinstance(value, Namespace | SimpleNamespace):
        return described_value(name, vars(value), depth)
    if depth > MAX_DEPTH:
        return {name: shortened(value)} if is_plain(value) else {}
    if isinstance(value, Mapping):
        items = [described_value(f"{name}.{key}", item, depth + 1) for key, item in value.items()]
        return joined(items) if items else {name: {}}
    if isinstance(value, set | frozenset):
        return described_items(name, sorted(value, key=str), depth)
    if isinstance(value, list | tuple):
        return described_items(name, list(value), depth)
    if isinstance(value, partial):
        positional = {str(index): item for index, item in enumerate(value.args)}
        return {name: class_name(value.func), **described_arguments(name, {**positional, **value.keywords}, depth)}
    arguments = arguments_of(value)
    if not arguments and tells_itself(value):
        return {name: f"{class_name(type(value))} {shortened(repr(value))}"}
    places = places_of(type(value))
    compared = {key: item for key, item in arguments.items() if key not in places}
    return {name: class_name(type(value)), **described_arguments(name, compared, depth)}


def described_single(value: Any) -> tuple[Any] | None:
    """Return the one value that stands for a number, a text, a path, a tensor, a class or a function, or None."""
    value = plain_scalar(value)
    if isinstance(value, Enum):
        return (value.name,)
    if isinstance(value, PurePath):
        return (str(value),)
    if value is None or isinstance(value, bool | int | float | str):
        return (shortened(value),)
    if isinstance(value, Tensor):
        return (digest_of([value]),)
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return (digest_of([torch.as_tensor(plain_value(value))]),)
    if isinstance(value, partial):
        return None
    if inspect.isclass(value) or inspect.isroutine(value):
        return (class_name(value),)
    return None


def tells_itself(value: Any) -> bool:
    """Return True for an object without known arguments whose text tells what it is, such as a dtype or a date."""
    if isinstance(value, nn.Module) and not isinstance(value, nn.Sequential | nn.ModuleList | nn.ModuleDict):
        return False
    text = repr(value)
    return " at 0x" not in text and " object at " not in text


def described_items(name: str, items: list[Any], depth: int) -> Settings:
    """Return the settings of a list: one of plain values, else those of each object."""
    if is_plain(items):
        return {name: shortened(items)}
    return joined(described_value(f"{name}.{index}", item, depth + 1) for index, item in enumerate(items))


def described_arguments(name: str, arguments: Mapping[str, Any], depth: int) -> Settings:
    """Return the settings of the arguments of an object."""
    return joined(described_value(f"{name}.{key}", item, depth + 1) for key, item in arguments.items())


def described_optimizer(name: str, factory: Any) -> Settings:
    """Return the class and the param-group values of the optimizer that a factory makes.

    Args:
        name: Dotted name of the factory.
        factory: A factory of an optimizer, or None.
    """
    if factory is None:
        return {name: None}
    try:
        optimizer = factory([nn.Parameter(torch.zeros(1))])
        values = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
        return {name: class_name(type(optimizer)), **described_arguments(name, values, depth=1)}
    except Exception:
        # A factory of the user's may need the parameters of the client.
        return described_value(name, factory)


def arguments_of(value: Any) -> Mapping[str, Any]:
    """Return the init arguments of an object: its `hparams`, or the arguments that it keeps as attributes."""
    hparams: Mapping[str, Any] = {}
    if isinstance(value, TrainableModule):
        hparams = getattr(value, "hparams", {})
    names: set[str] = set()
    for kind in type(value).__mro__:
        init = vars(kind).get("__init__")
        if inspect.isfunction(init):
            names.update(inspect.signature(init).parameters)
    attributes: dict[str, Any] = getattr(value, "__dict__", {})
    attributes = {**attributes, **attributes.get("_modules", {})}
    found = {name: attributes[name] for name in sorted(names & attributes.keys())}
    return {**found, **hparams}


def places_of(kind: Any) -> tuple[str, ...]:
    """Return the names of the arguments of a class that only say where samples lie, as sources do."""
    if inspect.isclass(kind) and issubclass(kind, Source):
        return kind.places
    return ()
