"""The parser of LightningCLI, without what follows the parsing."""

from pytorch_lightning.cli import ArgsType, LightningArgumentParser

from fl_lightning.cli.main import FederatedCLI


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
