"""The parser of a command line, and its loop and data, without a run of them."""

from typing import Any

from pytorch_lightning import Trainer
from pytorch_lightning.cli import ArgsType, LightningArgumentParser

from fl_lightning.cli.main import FederatedCLI

ONLY_SERVERS = ("logger", "callbacks", "profiler", "plugins", "strategy")
"""Settings of the Trainer that only a server makes."""


class BuiltError(Exception):
    """Carries the parser out of a command line that has not read its arguments."""


class ParserOnly(FederatedCLI):
    """Stops when its parser is built, with `BuiltError`."""

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        raise BuiltError(parser)


def fit_parser() -> LightningArgumentParser:
    """Build the parser of a command line with the command `fit`."""
    try:
        ParserOnly(["fit"])
    except BuiltError as built:
        parser: LightningArgumentParser = built.args[0]
    return parser


class MadeError(Exception):
    """Carries loop and data out of a command line that runs nothing."""


class PartsOnly(FederatedCLI):
    """Makes loop and data of a command line, and stops with `MadeError` before it would make a Trainer."""

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        self.config = parser.parse_args(self._argv)
        for name in ONLY_SERVERS:
            self.config.fit.trainer[name] = "auto" if name == "strategy" else None

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        self.model.identity.configure(self.config.fit.as_dict())
        raise MadeError(self)


def parts_of(arguments: list[str]) -> PartsOnly:
    """Make loop and data of a command line, which runs nothing."""
    try:
        PartsOnly(arguments)
    except MadeError as made:
        parts: PartsOnly = made.args[0]
    return parts
