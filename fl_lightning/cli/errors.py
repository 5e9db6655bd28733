"""Parser errors in one sentence: what is expected, what was given, the nearest right name."""

import re
from argparse import ArgumentError
from contextlib import suppress
from difflib import get_close_matches
from inspect import isabstract
from pkgutil import resolve_name

import pytorch_lightning as pl
from pytorch_lightning.cli import LightningCLI
from torch import optim

from fl_lightning import aggregation, callbacks, data, methods, nets
from fl_lightning.types import TrainableModule
from fl_lightning.utils.renamed import new_name

PROG = "fl-lightning"
COMMANDS = ("methods", "check", "report", "compare")
"""Commands besides LightningCLI's, dispatched in `__main__`."""

HOMES = (methods, nets, data, aggregation, callbacks, pl.callbacks, pl.loggers, optim)
CLASSES = [kind for home in HOMES for kind in vars(home).values() if isinstance(kind, type)]
"""Classes that can be given by their short names."""

BASES: dict[str, type] = {
    "client": pl.LightningModule,
    "net": nets.Backbone,
    "source": data.Source,
    "partition": data.Partition,
    "aggregator": aggregation.Aggregator,
    "server_module": aggregation.ServerModule,
    "transforms": aggregation.UpdateTransform,
    "optimizer": optim.Optimizer,
    "server_optimizer": optim.Optimizer,
    "callbacks": pl.Callback,
    "logger": pl.loggers.Logger,
}
"""Base class of the values of an option, by the option's last part."""

EMPTY = (optim.Optimizer, pl.Callback, aggregation.UpdateTransform, aggregation.NonFiniteGuard)
"""Classes that can be created, but do nothing, or are there already."""

# What jsonargparse tells in its messages only. Everything else is taken from its exceptions and from the parser.
KEY = re.compile(r'Parser key "([\w.]+)"[^:]*:\s*|--([\w.]+)\.help: ')
VALUE = re.compile(r"(?:Got|Given) value: (.+)")
TYPE = re.compile(r"Expected a (<class '(?!NoneType)[\w.]+'>|typing\.Literal\[.+?\])")
CLASS = re.compile(r"(?:path string: |(?:a|config) path but |class_path'?[:= ]+'|value: )([\w.]+)(?=['\s]|$)")
UNKNOWN = re.compile(r"(?:[Oo]ption|[Kk]ey) '([\w.]+)'|nrecognized arguments: (\S+)")
ALTERNATIVE = re.compile(r"^\s*- (?!Expected a |Does not validate)(.+)", re.M)
CLASS_NOT_NAMED = re.compile(r"NestedArg\(key='(?!class_path|init_args)(\w+)'")
NESTED = "\0"
"""Markers around the message of a class's parser, which jsonargparse puts into that of the parser around it."""


def format_error(
    message: str, error: BaseException | None, options: list[str], kinds: dict[str, type], nested: bool = False
) -> str:
    r"""Say in one sentence what a parser refuses.

    Args:
        message: of the parser.
        error: that the parser caught.
        options: of the parser.
        kinds: the classes whose arguments the options are, by the options' prefix.
        nested: for the parser of a class, whose message the parser around it will format again.

    >>> format_error("Option 'betta' is not accepted", None, ["beta", "temperature"], {})
    "unknown option 'betta'; the nearest is 'beta'; there are beta, temperature"
    >>> format_error('Parser key "data.num_clients":\n  Expected a <class \'int\'>. Got value: five', None, [], {})
    'data.num_clients must be int, got five'
    """
    found = KEY.match(message)
    key = (found[1] or found[2]) if found else ""
    if NESTED in message:
        inner_key, reason = message.split(NESTED)[1:3]
        key = f"{key}.{inner_key}".strip(".")
    elif unknown := UNKNOWN.search(message):
        reason = unknown_option(unknown[1], unknown[2], options, kinds)
    elif isinstance(error, ArgumentError) and error.argument_name == "subcommand":
        key, reason = "the command", expected([*LightningCLI.subcommands(), *COMMANDS], message.split("'")[1])
    else:
        reason = wrong_value(key, message, error)
    if nested:
        return f"{NESTED}{key}{NESTED}{reason}{NESTED}"
    return key + (" " if reason.startswith("must ") else ": ") * bool(key) + reason


def wrong_value(key: str, message: str, error: BaseException | None) -> str:
    """Say what is wrong with the value of an option."""
    while error is not None and error.__cause__ is not None:
        error = error.__cause__
    if base := BASES.get(key.rpartition(".")[2]):
        if option := CLASS_NOT_NAMED.search(message):
            return class_not_named(option[1], base)
        if (given := CLASS.search(message)) and (reason := no_class(given[1], base, error)):
            return reason
    if names := [name for kind in TYPE.findall(message) for name in re.findall(r"[\w-]+(?=[',\]])", kind)]:
        return expected(names, "".join(VALUE.findall(message)[-1:]))
    return one_line(KEY.sub("", str(error) if key and error else message))


def one_line(text: str) -> str:
    """Put a text into one line; where a value fits none of several types, keep what was found for each."""
    return "; ".join(ALTERNATIVE.findall(text) if "Union subtypes" in text else ()) or " ".join(text.split())


def expected(names: list[str], given: str) -> str:
    """Say that a value must be one of `names`."""
    return f"must be {' or '.join(dict.fromkeys(names))}, got {given}{nearest(given, names)}"


def nearest(name: str, names: list[str]) -> str:
    """Name the one of `names` that is meant; nothing where none is like it."""
    return "".join(f"; the nearest is {near!r}" for near in get_close_matches(name, names, 1))


def unknown_option(option: str | None, argument: str, options: list[str], kinds: dict[str, type]) -> str:
    """Say that a class or the command line has no such option."""
    name = option or argument.lstrip("-").partition("=")[0]
    parts = name.split(".")
    for k, part in enumerate(parts):  # of a nested value each key is an option: `data.sets.proxy`
        if new := new_name(kinds.get(".".join(parts[:k]), object), part):
            return f"the option {'.'.join(parts[: k + 1])!r} was renamed to {'.'.join([*parts[:k], new])!r}"
    kind = kinds.get(name.rpartition(".")[0], object)
    if kind in EMPTY:
        return class_not_named(name, kind)
    if not option and argument[0] != "-":
        return f"unexpected argument {name!r}; options begin with --"
    if name == "class_path":
        return "the options of a class belong under init_args, beside its class_path"
    all_options = f"there are {', '.join(options) or 'none'}" if len(options) <= 20 else f"{PROG} fit --help lists all"
    return f"unknown option {name!r}{nearest(name, options)}; {all_options}"


def class_not_named(option: str, base: type) -> str:
    """Say that an option of a class was given without the class."""
    return f"its class must be named before the option {option!r}{choice(base)}"


def no_class(given: str, base: type, error: object) -> str:
    """Say that `given` names no class, or one of another kind; nothing where it is of the kind."""
    if isinstance(error, ModuleNotFoundError) and error.name and not given.startswith(error.name):
        return f"{given} cannot be imported, it needs {error.name}, which is not there; install that module"
    found = None
    with suppress(Exception):  # whatever a module does when it is imported
        found = resolve_name(given) if "." in given else None
    if not isinstance(found, type):
        return f"there is no class {given!r}{nearest(given.rpartition('.')[2], class_names(base)) or choice(base)}"
    if issubclass(found, base) or (base is pl.LightningModule and issubclass(found, TrainableModule)):
        return ""
    twin = any(parent.__module__.startswith("lightning.") for parent in found.__mro__)
    origin = f"; it comes from the twin package `lightning`: take the {base.__name__} of pytorch_lightning"
    return f"must be a subclass of {base.__name__}, and {given} is none{origin if twin else choice(base)}"


def choice(base: type) -> str:
    """List what can be given where a subclass of `base` is asked for."""
    return f"; it takes {', '.join(class_names(base))} or the import path of a class"


def class_names(base: type) -> list[str]:
    """Return the short names of the public subclasses of `base`."""
    kinds = {kind for kind in CLASSES if issubclass(kind, base) and kind not in EMPTY and not isabstract(kind)}
    return sorted(kind.__name__ for kind in kinds)
