"""The parsers of the command line."""

import os
import re
import sys
from argparse import ArgumentError
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn, get_origin

from jsonargparse import ActionConfigFile, ArgumentParser, Namespace  # type: ignore[attr-defined]
from pytorch_lightning.cli import LightningArgumentParser

import fl_lightning
from fl_lightning.cli.configs import locate
from fl_lightning.cli.errors import PROG, format_error
from fl_lightning.cli.yaml_keys import check_keys
from fl_lightning.utils.text import printable

NO_VALUE = re.compile(r"argument (\S+): expected (one|at least one) argument")


class CommandParser(ArgumentParser):
    """A parser without abbreviations, with its errors in one sentence.

    Attributes:
        kinds: classes whose arguments it has, by the prefix of the options.
        words: of a command line in which an option may be that of a class within a class.
        further: options that its command takes besides.
    """

    further: Iterable[str] = ()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, "prog": PROG, **kwargs})
        self.kinds: dict[str, type] = {}
        self.words: list[str] = []

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        parser = getattr(ex, "subcommand_parser", None) or self
        options = list(parser.get_defaults().keys())
        if wants := NO_VALUE.fullmatch(message):
            message = no_value(self.words or parser.words, *wants.groups())
        nested = not self.exit_on_error
        further = getattr(parser, "further", ())
        sentence = format_error(message, ex, options, parser.kinds, nested, further)
        if not self.exit_on_error or os.environ.get("FL_LIGHTNING_DEBUG"):
            raise ArgumentError(None, sentence) from ex
        sys.stderr.write(f"{PROG}: error: {printable(sentence)}\n")
        sys.exit(2)


class NamedConfigFile(ActionConfigFile):
    """`-c`: a file, the name of one that comes with the package, or YAML."""

    def __call__(self, parser: Any, cfg: Any, values: Any, option_string: str | None = None) -> None:
        try:
            if ":" not in values:  # else it is YAML
                values = str(locate(values))
            check_option(values, option_string or "-c", is_file=":" not in values, is_yaml=True)
        except ValueError as error:
            raise TypeError(f'Parser key "{self.dest}": {error}') from None  # what jsonargparse reports as an error
        super().__call__(parser, cfg, values, option_string)  # type: ignore[no-untyped-call]


def check_option(value: str, option: str, is_file: bool = False, is_yaml: bool = False) -> None:
    """Refuse a key that stands twice in an option's value, or in the file of YAML or JSON that it names.

    Args:
        value: of the option.
        option: its name.
        is_file: whether the value can only be a file's name.
        is_yaml: whether that file, or the value, can be nothing but YAML.

    Raises:
        ValueError: as `check_keys`.
    """
    path = Path(value) if is_file or value.lower().endswith((".yaml", ".yml", ".json", ".conf")) else None
    if path is not None and path.is_file():
        with suppress(UnicodeDecodeError, OSError):  # whose reader says so
            check_keys(path.read_text(encoding="utf-8"), value, is_yaml)
    elif "{" in value or "\n" in value or is_yaml:
        check_keys(value, option, is_yaml)


def no_value(words: Sequence[str], option: str, count: str) -> str:
    """Name the option of a command line that has no value: jsonargparse names the outermost option of a class.

    Args:
        words: of the command line.
        option: that the parser names, perhaps in several ways.
        count: of the values that it needs.

    >>> no_value(["--model.client", "FedProx", "--model.client.mu"], "--model.client", "one")
    '--model.client.mu needs a value, got none; write --model.client.mu VALUE'
    """
    ways = option.split("/")
    bare = [a for a, b in pairwise([*words, "-"]) if b.startswith("-") and "=" not in a]
    name = next((word for word in bare if word in ways or word.startswith(tuple(f"{way}." for way in ways))), ways[-1])
    return f"{name} needs a value, got none; write {name} VALUE{' ...' * (count != 'one')}"


def home_path(path: str) -> str:
    """Give the import path of a class in its room for the one at the top of the package, which jsonargparse prefers.

    >>> home_path("fl_lightning.FedProx"), home_path("fl_lightning.Aggregator"), home_path("my_task.FedProx")
    ('fl_lightning.methods.FedProx', 'fl_lightning.Aggregator', 'my_task.FedProx')
    """
    package, _, name = path.rpartition(".")
    moves = package == fl_lightning.__name__ and name not in fl_lightning.__all__ and name in fl_lightning.HOMES
    return f"{package}.{fl_lightning.HOMES[name]}.{name}" if moves else path


def move_home(value: Any) -> None:
    """Let every `class_path` of a configuration be as `home_path`, whichever way a class is imported."""
    if isinstance(value, list):
        for item in value:
            move_home(item)
    elif isinstance(value, Namespace | dict):
        for key in list(vars(value) if isinstance(value, Namespace) else value):
            if key == "class_path" and isinstance(value[key], str):
                value[key] = home_path(value[key])
            move_home(value[key])


class FederatedParser(CommandParser, LightningArgumentParser):
    """LightningCLI's parser."""

    def parse_args(self, *args: Any, **kwargs: Any) -> Any:
        self.words = list(sys.argv[1:] if not args or args[0] is None else args[0])
        for option, value in pairwise(["", *self.words]):
            name, given, beside = value.partition("=")
            try:
                check_option(beside if given and name.startswith("--") else value, name if given else option)
            except ValueError as error:
                self.error(str(error), error)
        config = super().parse_args(*args, **kwargs)
        move_home(config)
        return config

    def dump(self, *args: Any, **kwargs: Any) -> str:
        text: str = super().dump(*args, **kwargs)
        return re.sub(r"(?<=class_path: )[\w.]+$", lambda path: home_path(path[0]), text, flags=re.MULTILINE)

    def add_argument(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("action") is ActionConfigFile:
            kwargs["action"] = NamedConfigFile
        return super().add_argument(*args, **kwargs)

    def add_class_arguments(self, kind: type, nested_key: str | None = None, *args: Any, **kwargs: Any) -> list[str]:
        self.kinds[nested_key or ""] = get_origin(kind) or kind
        return list(super().add_class_arguments(kind, nested_key, *args, **kwargs))

    def add_method_arguments(self, *args: Any, **kwargs: Any) -> list[str]:
        added: list[str] = super().add_method_arguments(*args, **kwargs)
        if "verbose" in added:  # of validate and test: the class-wise report says it all
            self.set_defaults(verbose=False)
        return added
