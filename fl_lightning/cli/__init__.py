"""The command line: commands, parser, errors in one sentence, what the console shows."""

from fl_lightning.cli.main import FederatedCLI as FederatedCLI
