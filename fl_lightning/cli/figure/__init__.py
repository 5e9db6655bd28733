"""`fl-lightning figure`: the figures of the papers, each from one file in `configs/figure`."""

from fl_lightning.cli.figure.command import command_parser as command_parser
from fl_lightning.cli.figure.command import run as run
