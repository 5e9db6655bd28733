"""Parser errors in one sentence: what is expected, what was given, the nearest right name."""

import re
from argparse import ArgumentError
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import yaml  # type: ignore[import-untyped]
from pytorch_lightning.cli import LightningCLI
from torch import nn

from fl_lightning.cli import classes
from fl_lightning.cli.suggestions import meant
from fl_lightning.cli.yaml_keys import not_yaml
from fl_lightning.types import AnyCallback, AnyLogger, TrainableModule
from fl_lightning.utils.renamed import instead_of
from fl_lightning.utils.suggestions import suggestion
from fl_lightning.utils.tracebacks import place_of

PROG = "fl-lightning"
COMMANDS = ("methods", "new", "configs", "check", "split", "partition", "compare", "reproduce", "report")
"""Commands besides LightningCLI's, dispatched in `__main__`."""

# What jsonargparse tells in its messages only. Everything else is taken from its exceptions and from the parser.
KEY = re.compile(r'Parser key "([\w.]+)"[^:]*:\s*|--([\w.]+)\.help: ')
VALUE = re.compile(r"(?:Got|Given) value: (.+)")
TYPE = re.compile(r"Expected a (<class '(?!NoneType)[\w.]+'>|typing\.Literal\[.+?\])")
CLASS = re.compile(r"(?:path string: |(?:a|config) path but |class_path'?[:= ]+'|value: )([\w.-]+)(?=['\s]|$)")
IMPORT_PATH = re.compile(r"Unexpected import path|Expected a dot import path")
UNKNOWN = re.compile(r"(?:[Oo]ption|[Kk]ey) '([\w.]+)'|nrecognized arguments: (\S+)")
ALTERNATIVE = re.compile(r"^\s*- (?!Expected a |Does not validate)(.+)", re.M)
FORM = re.compile(
    r"Not a valid subclass|a class path \(str\)|a dict with|Import path \S+ does not (?:correspond|implement protocol)"
)
"""Sentence of jsonargparse about the form of a value, which says nothing where a class refused its arguments."""
NEEDED = re.compile(r"the following arguments are required: (.+)")
NO_NAME = re.compile(r"Key must be a string, got: ([^\s.]+)")
FILE = re.compile(r"(?:\./)*([\w/\\.-]+?)(\.py)?(?:::?(\w+))?")
"""A class in the ways that other programs name it: `folder/module.py:Class`, `module:Class`, `module.py`."""
DECIMAL = re.compile(r"([-+]?\d*),(\d+)")
NOTHING = "nothing"
LISTS = {"Sequence", "list", "tuple"}
NUMBERS = {"float": "write a number, such as 0.01", "int": "write a whole number, such as 3"}
CLASS_NOT_NAMED = re.compile(r"NestedArg\(key='(?!class_path|init_args)(\w+)'")
NESTED = "\0"
"""Markers around the message of a class's parser, which jsonargparse puts into that of the parser around it."""


OF_BOTH_PACKAGES: dict[type, Any] = {
    pl.LightningModule: TrainableModule,
    pl.Callback: AnyCallback,
    pl.loggers.Logger: AnyLogger,
}
"""What matches classes of `lightning.pytorch`, too, by the base class of `pytorch_lightning`."""

NO_FILE = re.compile(r'Unable to load config "([^"]*)"')
"""jsonargparse's words for a value of `--model` or `--data` that is neither a file nor settings."""

PART_OF = {"model": "--model.client NAME", "data": "--data.source NAME", "trainer": "--trainer.NAME VALUE"}
SUBCOMMANDS_ONLY = ["config", "subcommand"]
"""Options of a parser that was given no command."""


class RefusedTogetherError(ValueError):
    """Refuses several settings at once.

    Args:
        heading: What is refused.
        sentences: A sentence for each setting.
    """

    def __init__(self, heading: str, sentences: Iterable[str]) -> None:
        self.sentences = list(sentences)
        super().__init__("\n  - ".join([f"{heading}:", *self.sentences]))


def sentence_of(error: Exception) -> str:
    """Return the sentence of an error in one line, or those of several refusals in a line each."""
    return str(error) if isinstance(error, RefusedTogetherError) else one_line(str(error))


def format_error(
    message: str,
    error: BaseException | None,
    options: list[str],
    kinds: dict[str, type],
    nested: bool = False,
    further: Iterable[str] = (),
) -> str:
    r"""Format in one sentence what a parser refuses.

    Args:
        message: of the parser.
        error: that the parser caught.
        options: of the parser.
        kinds: the classes whose arguments the options are, by the options' prefix.
        nested: for the parser of a class, whose message the parser around it will format again.
        further: options that a command takes besides those of its parser.

    >>> format_error("Option 'betta' is not accepted", None, ["beta", "temperature"], {})
    "unknown option 'betta'; the nearest is 'beta'; there are beta, temperature"
    >>> format_error('Parser key "data.num_clients":\n  Expected a <class \'int\'>. Got value: five', None, [], {})
    'data.num_clients must be int, got five; write a whole number, such as 3'
    """
    named = KEY.match(message)
    key = (named[1] or named[2]) if named else ""
    if NESTED in message:
        inner_key, reason = message.split(NESTED)[1:3]
        key = f"{key}.{inner_key}".strip(".")
    elif unknown := UNKNOWN.search(message):
        reason = unknown_option(unknown[1], unknown[2], options, kinds, further)
    elif isinstance(error, ArgumentError) and error.argument_name == "subcommand":
        key = "the command"
        reason = expected([*LightningCLI.subcommands(), *COMMANDS], message.split("'")[1])
    else:
        reason = wrong_value(key, message, error)
    if nested:
        return f"{NESTED}{key}{NESTED}{reason}{NESTED}"
    if needed := NEEDED.fullmatch(reason):
        names = needed[1].split(", ")
        first = f"{key}.{names[0]}".strip(".")
        verb = "has" if len(names) == 1 else "have"
        return f"{key or 'the command'} needs {needed[1]}, which {verb} no default; write --{first} VALUE"
    return key + (" " if reason.startswith("must ") else ": ") * bool(key) + reason


def wrong_value(key: str, message: str, error: BaseException | None) -> str:
    """Describe what is wrong with the value of an option."""
    while error is not None and error.__cause__ is not None:
        error = error.__cause__
    if name := NO_NAME.search(message):
        return f"a key in a file must be a name, got {name[1]}; a comma ends a value: write numbers with a point, 0.01"
    value = "".join(VALUE.findall(message)[-1:]).strip()
    if problem := broken_yaml(error, value):
        return not_yaml(problem)
    if (settings := classes.SETTINGS.get(key)) and IMPORT_PATH.search(message):
        listed = f"must have its settings by name ({', '.join(settings)}), got {value or 'nothing'}"
        return f"{listed}; write --{key}.{settings[0]} VALUE"
    names = [name for kind in TYPE.findall(message) for name in re.findall(r"[\w-]+(?=[',\]])", kind)]
    is_number = not NUMBERS.keys().isdisjoint(names)
    base = classes.BASES.get(key.rpartition(".")[2])
    if base and not is_number:
        if not value and IMPORT_PATH.search(message):
            return f"must be the name of a class, got nothing{classes.choice(base)}"
        if form := import_path(value):
            return form
        if option := CLASS_NOT_NAMED.search(message):
            return class_not_named(option[1], base)
        if (given := CLASS.search(message)) and (reason := no_class(given[1], base)):
            return reason
    if named := NO_FILE.search(message):
        return f"must be the name of a file, got {named[1]}; a class is given by {PART_OF.get(key, 'a longer option')}"
    if option := CLASS_NOT_NAMED.search(message):
        return f"must be the path of a class to take the option {option[1]!r}, got a name; give the path of the class"
    if names:
        return expected(names, value or NOTHING)
    return one_line(KEY.sub("", str(error) if key and error else message))


def broken_yaml(error: BaseException | None, given: str) -> yaml.MarkedYAMLError | None:
    """Find why a value, which may be that of a class, cannot be read as YAML, None where it can."""
    if isinstance(error, yaml.MarkedYAMLError):
        return error
    try:
        yaml.compose(given if given.startswith(("{", "[")) else "")
    except yaml.MarkedYAMLError as problem:
        return problem
    return None


def one_line(text: str) -> str:
    """Put a text into one line, of which the refusals stay, each once, where a value fits none of several types."""
    sentences = dict.fromkeys(ALTERNATIVE.findall(text) if "Union subtypes" in text else ())
    refusals = [sentence for sentence in sentences if not FORM.match(sentence)]
    return "; ".join(refusals or sentences) or " ".join(text.split())


def expected(names: list[str], given: str) -> str:
    """Demand that a value be one of `names`, which are words or the types of numbers.

    >>> expected(["float"], "0,01")
    'must be float, got 0,01; numbers are written with a point: 0.01'
    """
    numbers = [words for kind, words in NUMBERS.items() if kind in names]
    near = suggestion(given, [name for name in names if name not in NUMBERS])
    if numbers and not near:
        near = f"; {numbers[0]}"
    elif LISTS.issuperset(names) and given != NOTHING:
        near = f"; write a list, such as [{given}]"
    if names == ["int"] and DECIMAL.fullmatch(given.strip()):
        near += ", several with spaces between them"
    if "float" in names and (decimal := DECIMAL.fullmatch(given.strip())):
        near = f"; numbers are written with a point: {decimal[1] or 0}.{decimal[2]}"
    return f"must be {' or '.join(dict.fromkeys(names))}, got {given}{near}"


def unknown_option(
    option: str | None, argument: str, options: list[str], kinds: dict[str, type], further: Iterable[str] = ()
) -> str:
    """Refuse an option that a class or the command line does not have."""
    name = option or argument.lstrip("-").partition("=")[0]
    parts = name.split(".")
    for k, part in enumerate(parts):  # of a nested value each key is an option: `data.sets.proxy`
        if remedy := instead_of(kinds.get(".".join(parts[:k]), object), part, ".".join([*parts[:k], ""])):
            return f"the option {'.'.join(parts[: k + 1])!r} is gone; {remedy}"
    kind = kinds.get(name.rpartition(".")[0], object)
    if kind in classes.EMPTY:
        return class_not_named(name, classes.offered(kind))
    if not option and argument[0] != "-":
        of_file = argument.endswith((".yaml", ".yml")) or "/" in argument
        return (
            f"unexpected argument {name!r}; {f'a file is given by -c {name}' if of_file else 'options begin with --'}"
        )
    if not option and argument[:2] != "--" and len(name) > 1:
        return f"unknown option {argument!r}; options begin with two hyphens: --{name}"
    if name == "class_path":
        return "the options of a class belong under init_args, beside its class_path"
    if options == SUBCOMMANDS_ONLY:
        return f"unknown option {name!r}{suggestion(name, ('version', 'help', 'print_shtab'))}; {PROG} --help lists all"
    known = [option.removesuffix(".class_path") for option in options if ".init_args." not in option]
    near = meant(name, [*known, *further])
    hint = f"; the nearest is {near!r}" if near else suggestion(name, known)
    if "client" in options and "ckpt_path" not in options:
        # The options are those of a wrapper, and the name may be one of the client in it.
        hint = f"; write client.{name} for an option of the client in it"
    all_options = (
        f"there are {', '.join(options) or 'none'}" if len(options) <= 20 else f"{PROG} fit --help all lists them"
    )
    return f"unknown option {name!r}{hint}; {all_options}"


def class_not_named(option: str, base: type) -> str:
    """Refuse an option of a class that was given without the class."""
    return f"its class must be named before the option {option!r}{classes.choice(base)}"


def no_class(given: str, base: type) -> str:
    """Explain why `given` names no class, or one of another kind, by nothing where it is of the kind."""
    try:
        kind = classes.find_class(given)
    except Exception as error:  # whatever a module does when it is imported
        return import_error(given, error)
    if kind is None and given in classes.subclass_names(base):
        paths = classes.same_name(given, base)
        several = f"{given!r} names several classes: {', '.join(paths)}; write the import path of the one that is meant"
        return several if len(paths) > 1 else ""
    if kind is None:
        if missing := classes.missing_module(given):
            beside = [path.stem for path in Path().glob("*.py")]
            near = suggestion(missing, beside) or "; write the import path of the class, such as my_task.MyModule"
            return f"there is no class {given!r}: no module {missing!r} can be imported from {Path.cwd()}{near}"
        word = given.rpartition(".")[2]
        near = suggestion(given, classes.classes_beside(given)) or suggestion(word, classes.subclass_names(base))
        return import_path(given) or f"there is no class {given!r}{near or classes.choice(base)}"
    if issubclass(kind, classes.taken(base)) or issubclass(kind, OF_BOTH_PACKAGES.get(base, ())):
        return ""
    wanted = "torch.nn.Module" if classes.taken(base) is nn.Module else base.__name__
    return f"must be a subclass of {wanted}, and {given} is none{classes.choice(base)}"


def import_path(given: str) -> str:
    """Give the import path of a class that was named by its file or with a colon, nothing where it was not."""
    parts = FILE.fullmatch(given)
    path = Path(f"{parts[1]}.py") if parts else Path()
    if not parts or not (parts[2] or parts[3] or ("." not in given and path.is_file())):
        return ""
    names = classes.classes_in(path) if path.is_file() else []
    module = path.stem if path.is_absolute() else ".".join(path.with_suffix("").parts)
    name = parts[3] or (names[0] if len(names) == 1 else "CLASS")
    there = f"; there are {', '.join(names)}" * (name == "CLASS" and bool(names))
    return f"a class is named by its import path: write {module}.{name}, got {given}{there}"


def import_error(given: str, error: Exception) -> str:
    """Explain why the module of a class cannot be imported, and where."""
    if isinstance(error, ModuleNotFoundError) and error.name:
        reason = f"it needs {error.name}, which is not there; install that module"
    else:
        reason = f"its import raised {type(error).__name__}: {' '.join(str(error).split())}; mend that"
    place = f" ({place_of(error)[0]})" if not isinstance(error, SyntaxError) else ""  # which says it by itself
    return f"{given} cannot be imported{place}, {reason}"
