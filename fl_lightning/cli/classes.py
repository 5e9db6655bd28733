"""The classes that options name, their arguments, and the classes of import paths."""

import ast
import inspect
import sys
from collections.abc import Iterable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from inspect import isabstract
from pathlib import Path
from types import ModuleType
from typing import Any

import pytorch_lightning as pl
from torch import nn, optim

from fl_lightning import aggregation, callbacks, data, methods, monitors, nets
from fl_lightning.utils.signatures import parameters_by_name

HOMES = (methods, nets, data, aggregation, callbacks, monitors, pl.callbacks, pl.loggers, optim)
"""Modules whose classes can be given by their short names."""


def classes_of(homes: Iterable[ModuleType]) -> frozenset[type]:
    """Return the public classes of modules."""
    found = set[type]()
    for home in homes:
        members = [getattr(home, name) for name in dir(home)]
        found.update(member for member in members if isinstance(member, type))
    return frozenset(found)


# jsonargparse finds a class by its short name only if the class is imported, which this does.
CLASSES = classes_of(HOMES)
"""Classes that can be given by their short names."""

OPTIONS: dict[str, type] = {
    "data.partition": data.Partition,
    "data.source": data.Source,
    "model.client": pl.LightningModule,
    "model.client.net": nets.Backbone,
    "model.client.optimizer": optim.Optimizer,
    "model.aggregator": aggregation.Aggregator,
    "model.server_module": aggregation.ServerModule,
    "model.server_optimizer": optim.Optimizer,
    "model.transforms": aggregation.UpdateTransform,
    "model.codec": aggregation.Codec,
    "model.pacing": aggregation.Pacing,
    "trainer.callbacks": pl.Callback,
    "trainer.logger": pl.loggers.Logger,
}
"""Options whose values are classes, with their base class."""

SETTINGS = {
    "data.devices": tuple(inspect.signature(data.Devices).parameters),
    "data.feature_shift": tuple(inspect.signature(data.FeatureShift).parameters),
}
"""Options whose values are settings by name, which are no classes to choose from."""

BASES = {option.rpartition(".")[2]: base for option, base in OPTIONS.items()}
"""Base classes by the options' last parts."""

EMPTY = (optim.Optimizer, pl.Callback, aggregation.UpdateTransform, aggregation.NonFiniteGuard, nn.Module)
"""Classes that can be created, but do nothing, or are there already."""


def subclasses(base: type) -> list[type]:
    """Return the public subclasses of `base` that can be created, by name."""
    kinds: list[type] = []
    for kind in CLASSES:
        is_usable = kind not in EMPTY and not isabstract(kind)
        if is_usable and issubclass(kind, base):
            kinds.append(kind)
    return sorted(kinds, key=lambda kind: kind.__name__)


def same_name(name: str, base: type) -> list[str]:
    """List the import paths of all classes with a short name that derive from `base`, also of a user's own classes."""
    paths = set[str]()
    waiting = [base]
    while waiting:
        kind = waiting.pop()
        waiting += kind.__subclasses__()
        if kind.__name__ == name:
            paths.add(f"{kind.__module__}.{kind.__qualname__}")
    return sorted(paths)


def subclass_names(base: type) -> list[str]:
    """Return the short names of the public subclasses of `base`."""
    return [kind.__name__ for kind in subclasses(base)]


def taken(base: type) -> type:
    """Return the class of which a value must be a subclass where `base` is offered. A net may be any module."""
    return nn.Module if base is nets.Backbone else base


def offered(kind: type) -> type:
    """Return the class whose subclasses are offered if the subclasses of `kind` are taken."""
    return nets.Backbone if kind is nn.Module else kind


def choice(base: type) -> str:
    """Return the end of a sentence that lists the values of an option for a subclass of `base`."""
    return f"; it takes {', '.join(subclass_names(base))} or the import path of a class"


@cache
def arguments(base: type) -> tuple[str, ...]:
    """Return the names of all arguments of subclasses of `base`, also of arguments that they hand on to their bases."""
    names = set[str]()
    for kind in subclasses(base):
        # The last parent is `object`.
        for parent in kind.__mro__[:-1]:
            init = vars(parent).get("__init__")
            if init is not None:
                names.update(parameters_by_name(init))
    return tuple(sorted(names - {"self"}))


def find_class(path: str) -> type | None:
    """Find the class of an import path. None means that there is no such module, or no such class in it.

    Raises:
        Exception: The import of the module raises it. It may be of any kind.
    """
    found = find_object(path)
    return found if isinstance(found, type) else None


def find_object(path: str) -> Any:
    """Find what an import path names. None means that there is no such module, or nothing of that name in it.

    Raises:
        Exception: The import of the module raises it. It may be of any kind.

    >>> find_object("collections.Counter.fromkeys").__name__, find_object("collections.no_such")
    ('fromkeys', None)
    """
    place: object = None
    parts = path.split(".")
    remaining = parts
    for count in range(1, len(parts)):
        name = ".".join(parts[:count])
        try:
            place = import_module(name)
        except ModuleNotFoundError as error:
            if error.name != name:
                raise
            # The rest are classes, one within the other.
            break
        remaining = parts[count:]
    if place is None:
        return None
    for part in remaining:
        place = getattr(place, part, None)
    return place


def classes_beside(path: str) -> list[str]:
    """List the import paths of the classes in the module of an import path, if the module was imported before."""
    name = path.rpartition(".")[0]
    entries = vars(sys.modules[name]) if name in sys.modules else {}
    return [f"{name}.{key}" for key, value in entries.items() if isinstance(value, type)]


def missing_module(path: str) -> str:
    """Name the first package or module of a class's import path that is missing. The text is empty if none is."""
    parts = path.split(".")[:-1]
    for count in range(1, len(parts) + 1):
        name = ".".join(parts[:count])
        try:
            if find_spec(name) is None:
                return name
        except ModuleNotFoundError:
            # The part before is no package, but may be a class.
            return ""
    return ""


def classes_in(file: Path) -> list[str]:
    """List the classes that a file of Python defines, without running it."""
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (SyntaxError, ValueError, OSError):
        return []
    return [node.name for node in tree.body if isinstance(node, ast.ClassDef)]


def may_log_metric_objects(client: Any) -> bool:
    """Return True if a client has code of the user's, whose metric objects may tell the direction of a key.

    Args:
        client: The settings of `model.client`, with `class_path` and `init_args`.

    >>> may_log_metric_objects({"class_path": "fl_lightning.methods.FedProx", "init_args": {"mu": 0.1}})
    False
    >>> may_log_metric_objects({"class_path": "fl_lightning.methods.FedProx", "init_args": {"module": "my.Module"}})
    True
    """
    is_own_class = not str(client.get("class_path")).startswith("fl_lightning.")
    arguments = client.get("init_args") or {}
    return is_own_class or arguments.get("module") is not None
