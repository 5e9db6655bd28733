"""Parser errors in one sentence: what is expected, what was given, the nearest right name."""

import re
from argparse import ArgumentError
from collections.abc import Iterable

import yaml  # type: ignore[import-untyped]
from pytorch_lightning.cli import LightningCLI

from fl_lightning.cli import classes
from fl_lightning.cli.class_errors import class_not_named, import_path, no_class
from fl_lightning.cli.meant_options import meant
from fl_lightning.cli.wrappers import is_lightning_module
from fl_lightning.cli.yaml_keys import not_yaml
from fl_lightning.utils.renamed import instead_of
from fl_lightning.utils.suggestions import suggestion

PROG = "fl-lightning"
COMMANDS = ("methods", "new", "configs", "check", "split", "partition", "compare", "reproduce", "report")
"""Commands besides LightningCLI's, dispatched in `__main__`."""

# jsonargparse tells these things in its messages only. Everything else comes from its exceptions and from the parser.
KEY = re.compile(r'Parser key "([\w.]+)"[^:]*:\s*|--([\w.]+)\.help: ')
VALUE = re.compile(r"(?:Got|Given) value: (.+)")
TYPE = re.compile(r"Expected a (<class '(?!NoneType)[\w.]+'>|typing\.Literal\[.+?\])")
TYPE_NAME = re.compile(r"[\w-]+(?=[',\]])")
"""A type or a word within what `TYPE` has found."""
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
DECIMAL = re.compile(r"([-+]?\d*),(\d+)")
NOTHING = "nothing"
LISTS = {"Sequence", "list", "tuple"}
NUMBERS = {"float": "write a number, such as 0.01", "int": "write a whole number, such as 3"}
CLASS_NOT_NAMED = re.compile(r"NestedArg\(key='(?!class_path|init_args)(\w+)'")
NESTED = "\0"
"""Markers around the message of a class's parser, which jsonargparse puts into that of the parser around it."""


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
    *,
    nested: bool = False,
    further: Iterable[str] = (),
) -> str:
    r"""Format in one sentence what a parser refuses.

    Args:
        message: The message of the parser.
        error: The error that the parser caught.
        options: The options of the parser.
        kinds: The classes whose arguments the options are, by the options' prefix.
        nested: Whether the parser is that of a class, whose message the parser around it will format again.
        further: Options that a command takes besides the options of its parser.

    >>> format_error("Option 'betta' is not accepted", None, options=["beta", "temperature"], kinds={})
    "unknown option 'betta'; the nearest is 'beta'; there are beta, temperature"
    >>> message = 'Parser key "data.num_clients":\n  Expected a <class \'int\'>. Got value: five'
    >>> format_error(message, None, options=[], kinds={})
    'data.num_clients must be int, got five; write a whole number, such as 3'
    """
    key = key_in(message)
    if NESTED in message:
        inner_key, reason = message.split(NESTED)[1:3]
        key = f"{key}.{inner_key}".strip(".")
    elif unknown := UNKNOWN.search(message):
        reason = unknown_option(unknown[1], unknown[2], options, kinds=kinds, further=further)
    elif isinstance(error, ArgumentError) and error.argument_name == "subcommand":
        key = "the command"
        reason = expected([*LightningCLI.subcommands(), *COMMANDS], message.split("'")[1])
    else:
        reason = wrong_value(key, message, error)
    if nested:
        return f"{NESTED}{key}{NESTED}{reason}{NESTED}"
    needed = NEEDED.fullmatch(reason)
    if needed is not None:
        return missing_options(key, needed[1])
    if not key:
        return reason
    return f"{key} {reason}" if reason.startswith("must ") else f"{key}: {reason}"


def key_in(message: str) -> str:
    """Return the name of the option that a message of the parser is about. The text is empty if it names none."""
    named = KEY.match(message)
    if named is None:
        return ""
    return named[1] or named[2]


def missing_options(key: str, names: str) -> str:
    """Ask for the options that a class or a command lacks.

    Args:
        key: Name of the option whose value the class is. Empty for a command.
        names: The names of what is missing, with commas between them.
    """
    several = names.split(", ")
    verb = "has" if len(several) == 1 else "have"
    first = f"{key}.{several[0]}".strip(".")
    return f"{key or 'the command'} needs {names}, which {verb} no default; write --{first} VALUE"


def wrong_value(key: str, message: str, error: BaseException | None) -> str:
    """Describe what is wrong with the value of an option.

    Args:
        key: Name of the option.
        message: The message of the parser.
        error: The error that the parser caught.
    """
    while error is not None and error.__cause__ is not None:
        error = error.__cause__
    if name := NO_NAME.search(message):
        return f"a key in a file must be a name, got {name[1]}; a comma ends a value: write numbers with a point, 0.01"
    values = VALUE.findall(message)
    value = values[-1].strip() if values else ""
    problem = broken_yaml(error, value)
    if problem is not None:
        return not_yaml(problem)
    settings = classes.SETTINGS.get(key)
    if settings and IMPORT_PATH.search(message):
        listed = f"must have its settings by name ({', '.join(settings)}), got {value or 'nothing'}"
        return f"{listed}; write --{key}.{settings[0]} VALUE"
    names = types_in(message)
    is_number = not NUMBERS.keys().isdisjoint(names)
    base = classes.BASES.get(key.rpartition(".")[2])
    if base is not None and not is_number:
        reason = wrong_class(value, message, base)
        if reason:
            return reason
    if named := NO_FILE.search(message):
        return f"must be the name of a file, got {named[1]}; a class is given by {PART_OF.get(key, 'a longer option')}"
    if option := CLASS_NOT_NAMED.search(message):
        return f"must be the path of a class to take the option {option[1]!r}, got a name; give the path of the class"
    if names:
        return expected(names, value or NOTHING)
    return one_line(KEY.sub("", str(error) if key and error else message))


def types_in(message: str) -> list[str]:
    """Return the types and words that a message of the parser says it expected.

    >>> types_in("Expected a <class 'int'>. Expected a typing.Literal['mean', 'sum']")
    ['int', 'mean', 'sum']
    """
    names: list[str] = []
    for kind in TYPE.findall(message):
        names += TYPE_NAME.findall(kind)
    return names


def wrong_class(value: str, message: str, base: type) -> str:
    """Describe what is wrong with a value that must be a class. The text is empty if the class is right.

    Args:
        value: The value.
        message: The message of the parser.
        base: The class of which a subclass is needed.
    """
    if not value and IMPORT_PATH.search(message):
        return f"must be the name of a class, got nothing{classes.choice(base)}"
    form = import_path(value)
    if form:
        return form
    if option := CLASS_NOT_NAMED.search(message):
        return class_not_named(option[1], base)
    given = CLASS.search(message)
    return "" if given is None else no_class(given[1], base)


def broken_yaml(error: BaseException | None, given: str) -> yaml.MarkedYAMLError | None:
    """Find why a value, which may be that of a class, cannot be read as YAML, None if it can be read."""
    if isinstance(error, yaml.MarkedYAMLError):
        return error
    if not given.startswith(("{", "[")):
        return None
    try:
        yaml.compose(given)
    except yaml.MarkedYAMLError as problem:
        return problem
    return None


def one_line(text: str) -> str:
    """Put a text into one line. If a value fits none of several types, only the refusals of these stay, each once."""
    joined = " ".join(text.split())
    if "Union subtypes" not in text:
        return joined
    sentences = list(dict.fromkeys(ALTERNATIVE.findall(text)))
    refusals = [sentence for sentence in sentences if not FORM.match(sentence)]
    return "; ".join(refusals or sentences) or joined


def expected(names: list[str], given: str) -> str:
    """Demand that a value be one of `names`, which are words or the types of numbers.

    Args:
        names: The names.
        given: The value.

    >>> expected(["float"], "0,01")
    'must be float, got 0,01; numbers are written with a point: 0.01'
    """
    remedies = [remedy for kind, remedy in NUMBERS.items() if kind in names]
    near = suggestion(given, [name for name in names if name not in NUMBERS])
    if remedies and not near:
        near = f"; {remedies[0]}"
    elif LISTS.issuperset(names) and given != NOTHING:
        near = f"; write a list, such as [{given}]"
    decimal = DECIMAL.fullmatch(given.strip())
    if decimal is not None and names == ["int"]:
        near += ", several with spaces between them"
    if decimal is not None and "float" in names:
        near = f"; numbers are written with a point: {decimal[1] or 0}.{decimal[2]}"
    return f"must be {' or '.join(dict.fromkeys(names))}, got {given}{near}"


def unknown_option(
    option: str | None, argument: str, options: list[str], *, kinds: dict[str, type], further: Iterable[str] = ()
) -> str:
    """Refuse an option that a class or the command line does not have.

    Args:
        option: The option, if the parser of a class or of a file names it.
        argument: The word of the command line, if the parser names no option.
        options: The options of the parser.
        kinds: The classes whose arguments the options are, by the options' prefix.
        further: Options that a command takes besides the options of its parser.
    """
    name = option or argument.lstrip("-").partition("=")[0]
    gone = gone_option(name, kinds)
    if gone:
        return gone
    kind = kinds.get(name.rpartition(".")[0], object)
    if kind in classes.EMPTY:
        return class_not_named(name, classes.offered(kind))
    if not option and not argument.startswith("-"):
        is_file = argument.endswith((".yaml", ".yml")) or "/" in argument
        remedy = f"a file is given by -c {name}" if is_file else "options begin with --"
        return f"unexpected argument {name!r}; {remedy}"
    if not option and not argument.startswith("--") and len(name) > 1:
        return f"unknown option {argument!r}; options begin with two hyphens: --{name}"
    if name == "class_path":
        return "the options of a class belong under init_args, beside its class_path"
    if options == SUBCOMMANDS_ONLY:
        return f"unknown option {name!r}{suggestion(name, ('version', 'help', 'print_shtab'))}; {PROG} --help lists all"
    known = [option.removesuffix(".class_path") for option in options if ".init_args." not in option]
    near = meant(name, [*known, *further])
    hint = f"; the nearest is {near!r}" if near else suggestion(name, known)
    is_wrapper = kind is object or is_lightning_module(kind)
    if is_wrapper and "client" in options and "ckpt_path" not in options:
        # The name may be an option of the client in it.
        hint = f"; write client.{name} for an option of the client in it"
    if len(options) <= 20:
        all_options = f"there are {', '.join(options) or 'none'}"
    else:
        all_options = f"{PROG} fit --help all lists them"
    return f"unknown option {name!r}{hint}; {all_options}"


def gone_option(name: str, kinds: dict[str, type]) -> str:
    """Refuse an option that an earlier version had, and name its replacement. The text is empty for other options.

    Args:
        name: The option. Each key of a nested value is an option, such as `data`, `data.sets`, `data.sets.proxy`.
        kinds: The classes whose arguments the options are, by the options' prefix.
    """
    parts = name.split(".")
    for place, part in enumerate(parts):
        before = parts[:place]
        kind = kinds.get(".".join(before), object)
        remedy = instead_of(kind, part, ".".join([*before, ""]))
        if remedy:
            return f"the option {'.'.join([*before, part])!r} is gone; {remedy}"
    return ""
