"""`fl-lightning report`: runs as one HTML page, and their figures."""

import sys
from pathlib import Path
from typing import Literal

from fl_lightning.cli.errors import PROG, one_line
from fl_lightning.cli.parser import CommandParser
from fl_lightning.metrics.keys import parse_directions
from fl_lightning.reports.page import WARNING
from fl_lightning.reports.report import left_out_of, write_report
from fl_lightning.reports.saved import SavedRun, find_runs, grouped, read_run
from fl_lightning.utils.files import check_output
from fl_lightning.utils.settings import check_above
from fl_lightning.utils.text import printable

DESCRIPTION = (
    "Write a report of one run or several as one HTML file that needs no network, and its figures. Runs that differ in "
    "the seed only are one curve with a band."
)


def run(argv: list[str]) -> None:
    """Write the report.

    Args:
        argv: options of the command.

    Raises:
        SystemExit: with 2 for a wrong option, 0 after the help; with 1, after the report of the others, where a path
            holds no run, or one that cannot be read.
        ValueError: no run can be read.
    """
    given = command_parser().parse_args(argv)
    if given.output:
        check_output(given.output)
    for seconds in given.at_seconds:
        check_above(0, "it is a number of simulated seconds", at_seconds=seconds)
    directions = parse_directions(given.direction)
    read = dict[Path, SavedRun]()
    left_out = dict[str, str]()
    for path in given.runs:
        try:
            folders = find_runs([path])
        except OSError as error:
            left_out[path] = str(error)
            folders = []
        for folder in folders:
            try:
                read[folder] = read.get(folder) or read_run(folder, directions=directions)
            except (ValueError, OSError) as error:
                left_out[str(folder)] = str(error)
    refusals = [printable(f"{path} is left out: {one_line(reason)}") for path, reason in left_out.items()]
    if not read:
        raise ValueError("; ".join(map(one_line, left_out.values())))
    output = given.output or (next(iter(read)) if len(read) == 1 else Path("reports"))
    forms = [form for form in given.format if form != "html"]
    groups = grouped(read.values())
    warnings = [WARNING + sentence for sentence in refusals]
    page = write_report(groups, output, forms, notes=warnings, at_seconds=given.at_seconds)
    for sentence in left_out_of(groups):
        print(printable(sentence))
    print(printable(page))
    for sentence in refusals:
        sys.stderr.write(f"{PROG}: error: {sentence}\n")
    if refusals:
        sys.exit(1)


def command_parser() -> CommandParser:
    """Build the parser of the command."""
    parser = CommandParser(prog=f"{PROG} report", description=DESCRIPTION)
    parser.add_argument("runs", nargs="+", type=str, help="run folders, or folders with runs in them or below")
    folder = "folder of the report; None: that of the run, reports/ of several"
    parser.add_argument("--output", type=Path | None, default=None, help=folder)
    forms = "html: the page alone; svg, png, pdf: each figure in a file of its own, too; several may be given"
    kinds = Literal["html", "svg", "png", "pdf"]
    parser.add_argument("--format", nargs="+", type=kinds, default=["html"], help=forms)
    better = "KEY=min or KEY=max: whether values are better when lower or higher, if the key's name does not tell"
    parser.add_argument("--direction", nargs="+", type=str, default=[], help=better)
    moments = "simulated seconds after which the values have a column, too, of runs with data.devices"
    parser.add_argument("--at_seconds", "--at-seconds", nargs="+", type=float, default=[], help=moments)
    return parser
