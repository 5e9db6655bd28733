"""`fl-lightning compare`: the grid of methods, settings and seeds that a paper's table is."""

from fl_lightning.cli.compare.command import command_parser as command_parser
from fl_lightning.cli.compare.command import run as run
