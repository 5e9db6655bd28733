"""The parser of the command line, and its errors in one sentence: expected, given, nearest right name."""

import importlib
import inspect
import os
import re
import sys
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Any, NoReturn

from pytorch_lightning import Callback
from pytorch_lightning import callbacks as lightning_callbacks
from pytorch_lightning import loggers as lightning_loggers
from pytorch_lightning.cli import LightningArgumentParser
from pytorch_lightning.loggers import Logger
from torch.optim import Optimizer

from fl_lightning import aggregation, callbacks, data, methods, nets
from fl_lightning.aggregation import Aggregator
from fl_lightning.client import ClientModule
from fl_lightning.data import Partition, Source
from fl_lightning.nets import Backbone

PROG = "fl-lightning"
DEBUG = "FL_LIGHTNING_DEBUG"

BASES: dict[str, type] = {
    "client": ClientModule,
    "net": Backbone,
    "source": Source,
    "partition": Partition,
    "aggregator": Aggregator,
    "optimizer": Optimizer,
    "server_optimizer": Optimizer,
    "callbacks": Callback,
    "logger": Logger,
}
"""By the last part of an option: whose subclasses it takes."""

UNKNOWN = re.compile(r"Option '(.+?)' is not accepted|accept option '(.+?)'|unrecognized arguments: (\S+)")
NO_CLASS = re.compile(
    r"Expected a dot import path string: (\S+)|has no attribute '(\w+)'|Import path (\S+) does not correspond|"
    r"Expected '(\S+)' to be a subclass of|No module named '(\S+)'"
)
WRAPPING = re.compile(
    r"Problem with given class_path '.+?':|Type .+ expects a function or a callable class: |\.? ?Got value: Namespace.+"
)
UNNAMED = re.compile(
    r"(?:Dict must include a class_path|is abstract|class_path='torch\.optim\.Optimizer').+NestedArg\(key='(\w+)'", re.S
)
"""What is said where an option of a class comes before the class itself."""

NOISE = (
    "Expected a path but",
    "Expected a <class 'NoneType'>",
    "Does not validate",
    "Subtypes:",
    "Errors:",
    "Given",
)


class FederatedParser(LightningArgumentParser):
    """LightningCLI's parser without abbreviations, which says in one sentence what is wrong."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, "prog": PROG, **kwargs})

    def add_method_arguments(self, *args: Any, **kwargs: Any) -> list[str]:
        added: list[str] = super().add_method_arguments(*args, **kwargs)
        if "verbose" in added:  # of validate and test: the class-wise report says it all
            self.set_defaults(verbose=False)
        return added

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        parser = getattr(ex, "subcommand_parser", None) or self
        message = sentence(message, parser.get_defaults().keys())
        if not self.exit_on_error or os.environ.get(DEBUG):
            super().error(message, ex)
        sys.stderr.write(f"{PROG}: error: {message}\n")
        sys.exit(2)


def sentence(message: str, known: Iterable[str] = ()) -> str:
    r"""What a parser says, as one sentence.

    Args:
        message: of jsonargparse or argparse.
        known: names of the options that the parser has.

    >>> sentence("Option 'betta' is not accepted", ["beta", "temperature"])
    "unknown option 'betta'; the nearest is 'beta' (there are beta, temperature)"
    >>> sentence('Parser key "data.num_clients":\n  Expected a <class \'int\'>. Got value: five')
    'data.num_clients must be int, got five'
    """
    key, _, rest = message.partition('":')
    if rest and key.startswith("Parser key"):
        return _wrong_value(key.split('"')[1], rest)
    if unknown := UNKNOWN.search(message):
        return _unknown_option(next(filter(None, unknown.groups())), list(known))
    if missing := re.search(r"following arguments are required: (.+)", message):
        return f"{missing[1]} must be given and is not"
    if command := re.search(r"subcommand: invalid choice: '(.+?)' \(choose from (.+)\)", message):
        return _expected("the command", command[2].replace("'", "").split(", "), command[1])
    if asked := re.search(r"--([\w.]+)\.help: Expected a dot import path string: (\S+)", message):
        return _no_class(asked[1], asked[2], asked[2])
    return "; ".join(_told(message))


def _told(text: str) -> list[str]:
    """The lines that say something, each once, without the parser's own words around them."""
    lines = [WRAPPING.sub("", line.strip().removeprefix("- ")) for line in text.splitlines()]
    return [line for line in dict.fromkeys(lines) if line and not line.startswith(NOISE)] or [_one_line(text)]


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _list(names: Sequence[str]) -> str:
    return ", ".join(names)


def _nearest(name: str, names: Sequence[str]) -> str:
    found = get_close_matches(name, names, 1)
    return f"the nearest is {found[0]!r}" if found else ""


def _unknown_option(name: str, known: list[str]) -> str:
    if not name.startswith("-") and "." not in name and "config" in known:
        return f"unexpected argument {name!r}; options begin with --"
    name = name.lstrip("-").partition("=")[0]
    if name == "class_path":
        return "the options of a class belong under init_args, beside its class_path"
    parts = [f"unknown option {name!r}"]
    if near := _nearest(name, known):
        parts.append(near)
    elif len(known) > 20:
        parts.append(f"{PROG} fit --help lists all")
    listed = f" (there are {_list(known)})" if 0 < len(known) <= 20 else ""
    return "; ".join(parts) + listed


def _wrong_value(key: str, rest: str) -> str:
    """What is wrong with the value of `key`."""
    values = re.findall(r"Given value: (.+)|Got value: (.+)", rest)
    value = "".join(values[-1]).strip() if values else ""
    lines, part = _told(rest), key.rpartition(".")[2]
    if early := UNNAMED.search(rest):
        return f"{key}: its class must be named before the option {early[1]!r}; {_choice(part)}"
    if "Problem with given class_path" in rest:  # of the class that was taken, not of another that it could have been
        lines = [line for line in lines if not NO_CLASS.search(line)] or lines
    of_class = part in BASES or not any(map(_kinds, lines))
    if of_class and (found := next(filter(None, map(NO_CLASS.search, lines)), None)):
        name = next(filter(None, found.groups()))
        path = re.search(r"class_path'?(?:=|: | )'(.+?)'", rest)
        given = path[1] if path else value or name
        if found[5] and not given.startswith(found[5]):
            return f"{key}: {given} cannot be imported, it needs {found[5]}, which is not there; install that module"
        return _no_class(key, name, given)
    kinds = [_kinds(line) for line in lines]
    if all(kinds) or not of_class:
        return _expected(key, [name for kind in kinds for name in kind], value)
    told = "; ".join(line for line, kind in zip(lines, kinds, strict=True) if not kind)
    inner = re.match(r"[\w.]+(:| must )", told)  # a parameter of the class that `key` names
    return f"{key}.{told}" if inner else f"{key}: {told}"


def _expected(key: str, names: Sequence[str], value: str) -> str:
    names = list(dict.fromkeys(names))
    near = _nearest(value, names)
    either = f"{_list(names[:-1])} or {names[-1]}" if len(names) > 1 else names[0]
    return f"{key} must be {either}, got {value}" + (f"; {near}" if near else "")


def _kinds(line: str) -> list[str]:
    """`int` of "Expected a <class 'int'>…", `kl` and `mse` of a Literal; none of another line."""
    if found := re.match(r"Expected a <class '(?:[\w.]+\.)?(\w+)'>", line):
        return [found[1]]
    if found := re.match(r"Expected a typing\.Literal\[(.+?)\]", line):
        return [name.strip(" '\"") for name in found[1].split(",")]
    return []


def _no_class(key: str, name: str, given: str) -> str:
    """That `key` names no class, or a class of the wrong kind."""
    short, part = name.rpartition(".")[2], key.rpartition(".")[2]
    names = _names(part)
    found = _import(given)
    if inspect.isclass(found):
        return f"{key} must be a {_base_name(key)}, and {given} is none; {_remedy(found, names)}"
    return f"{key}: there is no class {given!r}; {_nearest(short, names) or _choice(part)}"


def _names(part: str) -> list[str]:
    """Short names of the classes that an option takes, by its last part."""
    return sorted(subclasses(BASES[part])) if part in BASES else []


def _choice(part: str) -> str:
    names = _names(part)
    return f"it takes {_list(names)} or the import path of a class" if names else "give its import path"


def _base_name(key: str) -> str:
    part = key.rpartition(".")[2]
    return "pytorch_lightning.LightningModule" if part in ("client", "module") else BASES.get(part, object).__name__


def _remedy(found: type, names: Sequence[str]) -> str:
    if any(base.__module__.startswith("lightning.") for base in found.__mro__):
        return "it comes from the twin package `lightning`: import LightningModule from pytorch_lightning"
    return f"take {_list(names)} or a subclass of your own" if names else "give a subclass of it"


def _import(path: str) -> Any:
    """What an import path names, or None."""
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name, None) if module else None
    except Exception:  # whatever a module does when it is imported
        return None


def subclasses(base: type) -> set[str]:
    """Short names of the public classes that can be given where `base` is asked for."""
    modules = (methods, nets, data, aggregation, callbacks, lightning_callbacks, lightning_loggers)
    found: list[tuple[str, Any]] = [pair for module in modules for pair in vars(module).items()]
    ours = {
        name
        for name, kind in found  # Any: a module holds anything
        if inspect.isclass(kind) and issubclass(kind, base) and not inspect.isabstract(kind) and name[0] != "_"
    }
    torchs: list[type] = base.__subclasses__()
    return ours | {kind.__name__ for kind in torchs if kind.__module__.startswith("torch.optim.")}
