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
from pytorch_lightning import Callback, Trainer
from pytorch_lightning.cli import LightningArgumentParser
from pytorch_lightning.loggers import Logger
from pytorch_lightning.utilities import rank_zero_info

import fl_lightning
from fl_lightning.cli.adopt import adopt, adopted_file, being_parsed
from fl_lightning.cli.adopt_files import FROM
from fl_lightning.cli.configs import config_name, locate, path_of
from fl_lightning.cli.errors import PROG, RefusedTogetherError, format_error
from fl_lightning.cli.wrappers import Merge, check_options, files_recorded
from fl_lightning.cli.yaml_keys import check_keys
from fl_lightning.types import AnyCallback, AnyLogger
from fl_lightning.utils.text import printable

NO_VALUE = re.compile(r"argument (\S+): expected (one|at least one) argument")
CLASS_PATH = re.compile(r"(?<=class_path: )[\w.]+$", flags=re.MULTILINE)
FILE_ENDINGS = (".yaml", ".yml", ".json", ".conf")
OF_BOTH_PACKAGES: dict[str, Any] = {
    "logger": Logger | AnyLogger | Iterable[Logger | AnyLogger] | bool | None,
    "callbacks": list[Callback | AnyCallback] | Callback | AnyCallback | None,
}
"""Arguments of the Trainer that take objects of `lightning.pytorch`, too, which their own types leave out."""


class CommandParser(ArgumentParser):
    """Parses a command line without abbreviations, and reports an error in one sentence.

    Attributes:
        kinds: The classes whose arguments the parser has, by the prefix of their options.
        words: The words of the command line. One of their options may be that of a class within a class.
        further: The options that the command of the parser takes besides.
    """

    further: Iterable[str] = ()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        settings: dict[str, Any] = {"allow_abbrev": False, "prog": PROG}
        super().__init__(*args, **(settings | kwargs))
        self.kinds: dict[str, type] = {}
        self.words: list[str] = []

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        parser = getattr(ex, "subcommand_parser", None) or self
        lacks_value = NO_VALUE.fullmatch(message)
        if lacks_value:
            option, count = lacks_value.groups()
            message = no_value(self.words or parser.words, option, count)
        sentence = format_error(
            message,
            ex,
            options=list(parser.get_defaults().keys()),
            kinds=parser.kinds,
            nested=not self.exit_on_error,
            further=getattr(parser, "further", ()),
        )
        if not self.exit_on_error or os.environ.get("FL_LIGHTNING_DEBUG"):
            raise ArgumentError(None, sentence) from ex
        sys.stderr.write(f"{PROG}: error: {printable(sentence)}\n")
        sys.exit(2)


class NamedConfigFile(ActionConfigFile):
    """Reads the value of `-c`: a file, the name of one or several files of the package, or YAML."""

    def __call__(self, parser: Any, cfg: Any, values: Any, option_string: str | None = None) -> None:
        adopted = adopted_file(values)
        if adopted is not None:
            self._merge(parser, cfg, part=adopted.text, is_file=False, option_string=option_string)
            # The names that were given name the folder of the run.
            cfg[self.dest][-1:] = [Path(name) for name in adopted.files]
            return
        is_file = ":" not in values
        try:
            parts = [str(path) for path in locate(values)] if is_file else [values]
            for part in parts:
                check_option(part, option_string or "-c", is_file=is_file, is_yaml=True)
        except ValueError as error:
            # jsonargparse reports a TypeError as an error of the command line.
            raise TypeError(f'Parser key "{self.dest}": {error}') from None
        for part in parts:
            self._merge(parser, cfg, part=part, is_file=is_file, option_string=option_string)
        if len(parts) > 1:
            # The name that was given, which has no file, names the folder of the run.
            cfg[self.dest][-len(parts) :] = [path_of(config_name(values))]

    def _merge(self, parser: Any, cfg: Any, *, part: str, is_file: bool, option_string: str | None) -> None:
        """Merge one file, or YAML, into a configuration, whose wrappers of the client stay."""
        try:
            merge = Merge(cfg, part, is_file=is_file)
        except ValueError as error:
            parser.error(str(error), error)
        super().__call__(parser, cfg, part, option_string=option_string)  # type: ignore[no-untyped-call]
        try:
            merge.finish()
        except ValueError as error:
            parser.error(str(error), error)


def check_option(value: str, option: str, *, is_file: bool = False, is_yaml: bool = False) -> None:
    """Refuse a key that stands twice in the value of an option, or in the YAML or JSON file that it names.

    Args:
        value: The value.
        option: The name of the option.
        is_file: Whether the value can only be the name of a file.
        is_yaml: Whether the value, or the file, can only be YAML.

    Raises:
        ValueError: A key stands twice.
    """
    path: Path | None = None
    if is_file or value.lower().endswith(FILE_ENDINGS):
        path = Path(value)
    if path is not None and path.is_file():
        with suppress(UnicodeDecodeError, OSError):  # The reader of the file reports these.
            check_keys(path.read_text(encoding="utf-8"), value, is_yaml)
    elif "{" in value or "\n" in value or is_yaml:
        check_keys(value, option, is_yaml)


def no_value(words: Sequence[str], option: str, count: str) -> str:
    """Return the sentence about an option that has no value.

    jsonargparse names the outermost option of a class, and this sentence the option that was typed.

    Args:
        words: The words of the command line.
        option: The option that the parser names, perhaps in several ways.
        count: The number of values that the option needs, `one` or `at least one`.

    >>> no_value(["--model.client", "FedProx", "--model.client.mu"], "--model.client", "one")
    '--model.client.mu needs a value, got none; write --model.client.mu VALUE'
    """
    ways = option.split("/")
    nested = tuple(f"{way}." for way in ways)
    name = ways[-1]
    for word, following in pairwise([*words, "-"]):
        has_value = "=" in word or not following.startswith("-")
        if not has_value and (word in ways or word.startswith(nested)):
            name = word
            break
    values = "VALUE" if count == "one" else "VALUE ..."
    return f"{name} needs a value, got none; write {name} {values}"


def home_path(path: str) -> str:
    """Return the import path of a class in its room, given its path at the top of the package.

    jsonargparse prefers the path at the top.

    >>> home_path("fl_lightning.FedProx"), home_path("fl_lightning.Aggregator"), home_path("my_task.FedProx")
    ('fl_lightning.methods.FedProx', 'fl_lightning.Aggregator', 'my_task.FedProx')
    """
    package, _, name = path.rpartition(".")
    if package != fl_lightning.__name__ or name in fl_lightning.__all__ or name not in fl_lightning.HOMES:
        return path
    return f"{package}.{fl_lightning.HOMES[name]}.{name}"


def move_home(value: Any) -> None:
    """Replace every `class_path` of a configuration by its `home_path`, so that an import path does not matter."""
    if isinstance(value, list):
        for item in value:
            move_home(item)
        return
    if not isinstance(value, Namespace | dict):
        return
    names = vars(value) if isinstance(value, Namespace) else value
    for name in list(names):
        if name == "class_path" and isinstance(value[name], str):
            value[name] = home_path(value[name])
        move_home(value[name])


class FederatedParser(CommandParser, LightningArgumentParser):
    """Parses the command line of LightningCLI."""

    def parse_args(self, *args: Any, **kwargs: Any) -> Any:
        given = args[0] if args else None
        self.words = list(sys.argv[1:] if given is None else given)
        self._check_words()
        try:
            adopted = adopt(self.words)
        except RefusedTogetherError:
            raise
        except ValueError as error:
            self.error(str(error), error)
        if adopted is not None:
            args = (adopted.words, *args[1:])
            for note in adopted.notes:
                rank_zero_info(f"{' and '.join(adopted.files)}: {note}")
        with files_recorded() as files, being_parsed(adopted):
            config = super().parse_args(*args, **kwargs)
        try:
            check_options(files, config)
        except ValueError as error:
            self.error(str(error), error)
        if config.get(FROM) is not None:
            self.error(f"{FROM} is an option of the command line, got it in a file; write --{FROM} {config[FROM]}")
        move_home(config)
        return config

    def _check_words(self) -> None:
        """Refuse a key that stands twice in a value of the command line."""
        for before, word in pairwise(["", *self.words]):
            name, has_value, value = word.partition("=")
            try:
                if not has_value:
                    check_option(word, before)
                else:
                    check_option(value if name.startswith("--") else word, name)
            except ValueError as error:
                self.error(str(error), error)

    def dump(self, *args: Any, **kwargs: Any) -> str:
        text: str = super().dump(*args, **kwargs)
        return CLASS_PATH.sub(lambda path: home_path(path[0]), text)

    def add_argument(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("action") is ActionConfigFile:
            kwargs["action"] = NamedConfigFile
        return super().add_argument(*args, **kwargs)

    def add_class_arguments(self, kind: type, nested_key: str | None = None, *args: Any, **kwargs: Any) -> list[str]:
        self.kinds[nested_key or ""] = get_origin(kind) or kind
        if kind is not Trainer:
            return list(super().add_class_arguments(kind, nested_key, *args, **kwargs))
        added = list(super().add_class_arguments(kind, nested_key, *args, skip=set(OF_BOTH_PACKAGES), **kwargs))
        for name, values in OF_BOTH_PACKAGES.items():
            option = f"{nested_key}.{name}"
            self.add_argument(f"--{option}", type=values, default=None, help="of either package of Lightning")
            added.append(option)
        return added

    def add_method_arguments(self, *args: Any, **kwargs: Any) -> list[str]:
        added: list[str] = super().add_method_arguments(*args, **kwargs)
        if "verbose" in added:
            # Of validate and test. The class-wise report says it all.
            self.set_defaults(verbose=False)
        return added
