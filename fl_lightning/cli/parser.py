"""The parsers of the command line."""

import os
import sys
from argparse import ArgumentError
from typing import Any, NoReturn, get_origin

from jsonargparse import ActionConfigFile, ArgumentParser  # type: ignore[attr-defined]
from pytorch_lightning.cli import LightningArgumentParser

from fl_lightning.cli.configs import locate
from fl_lightning.cli.errors import PROG, format_error
from fl_lightning.utils.text import printable


class CommandParser(ArgumentParser):
    """A parser without abbreviations, with its errors in one sentence.

    Attributes:
        kinds: classes whose arguments it has, by the prefix of the options.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, "prog": PROG, **kwargs})
        self.kinds: dict[str, type] = {}

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        parser = getattr(ex, "subcommand_parser", None) or self
        options = list(parser.get_defaults().keys())
        sentence = format_error(message, ex, options, parser.kinds, nested=not self.exit_on_error)
        if not self.exit_on_error or os.environ.get("FL_LIGHTNING_DEBUG"):
            raise ArgumentError(None, sentence) from ex
        sys.stderr.write(f"{PROG}: error: {printable(sentence)}\n")
        sys.exit(2)


class NamedConfigFile(ActionConfigFile):
    """`-c`: a file, the name of one that comes with the package, or YAML."""

    def __call__(self, parser: Any, cfg: Any, values: Any, option_string: str | None = None) -> None:
        if ":" not in values:  # else it is YAML
            try:
                values = str(locate(values))
            except ValueError as error:
                raise TypeError(f'Parser key "{self.dest}": {error}') from None  # what jsonargparse reports as an error
        super().__call__(parser, cfg, values, option_string)  # type: ignore[no-untyped-call]


class FederatedParser(CommandParser, LightningArgumentParser):
    """LightningCLI's parser."""

    def add_argument(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("action") is ActionConfigFile:
            kwargs["action"] = NamedConfigFile
        return super().add_argument(*args, **kwargs)

    def add_class_arguments(self, kind: type, nested_key: str | None = None, *args: Any, **kwargs: Any) -> list[str]:
        self.kinds[nested_key or ""] = get_origin(kind) or kind
        added: list[str] = super().add_class_arguments(kind, nested_key, *args, **kwargs)
        return added

    def add_method_arguments(self, *args: Any, **kwargs: Any) -> list[str]:
        added: list[str] = super().add_method_arguments(*args, **kwargs)
        if "verbose" in added:  # of validate and test: the class-wise report says it all
            self.set_defaults(verbose=False)
        return added
