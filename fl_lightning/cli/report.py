"""`fl-lightning report`: runs as one HTML page, and their figures."""

import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from fl_lightning.cli.errors import PROG, one_line
from fl_lightning.cli.parser import CommandParser
from fl_lightning.metrics.keys import Direction, parse_directions
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
        argv: The options of the command.

    Raises:
        SystemExit: The exit status is 2 after a wrong option, and 0 after the help. It is 1, after the report of the
            other runs, if a path has no run, or a run that cannot be read.
        ValueError: No run can be read.
    """
    given = command_parser().parse_args(argv)
    if given.output:
        check_output(given.output)
    for seconds in given.at_seconds:
        check_above(0, "it is a number of simulated seconds", at_seconds=seconds)
    runs, left_out = read_runs(given.runs, parse_directions(given.direction))
    if not runs:
        raise ValueError("; ".join(map(one_line, left_out.values())))
    output = given.output
    if output is None:
        output = Path("reports") if len(runs) > 1 else next(iter(runs))
    groups = grouped(runs.values())
    refusals = [printable(f"{path} is left out: {one_line(reason)}") for path, reason in left_out.items()]
    page = write_report(
        groups,
        output,
        [form for form in given.format if form != "html"],
        notes=[WARNING + sentence for sentence in refusals],
        at_seconds=given.at_seconds,
        command=shlex.join([PROG, "report", *argv]),
    )
    for sentence in left_out_of(groups):
        print(printable(sentence))
    print(printable(page))
    for sentence in refusals:
        sys.stderr.write(f"{PROG}: error: {sentence}\n")
    if refusals:
        sys.exit(1)


def read_runs(paths: Sequence[str], directions: Mapping[str, Direction]) -> tuple[dict[Path, SavedRun], dict[str, str]]:
    """Read the runs in folders and below, and say why some cannot be read.

    Args:
        paths: The folders.
        directions: The directions of values, by log key.

    Returns:
        The runs by folder, each once, and the reason for each path that is left out.
    """
    runs: dict[Path, SavedRun] = {}
    left_out: dict[str, str] = {}
    for path in paths:
        try:
            folders = find_runs([path])
        except OSError as error:
            left_out[path] = str(error)
            continue
        for folder in folders:
            if folder in runs:
                continue
            try:
                runs[folder] = read_run(folder, directions=directions)
            except (ValueError, OSError) as error:
                left_out[str(folder)] = str(error)
    return runs, left_out


def command_parser() -> CommandParser:
    """Build the parser of the command."""
    parser = CommandParser(prog=f"{PROG} report", description=DESCRIPTION)
    parser.add_argument("runs", nargs="+", type=str, help="run folders, or folders with runs in them or below")
    parser.add_argument(
        "--output",
        type=Path | None,
        default=None,
        help="folder of the report; None: that of the run, reports/ of several",
    )
    parser.add_argument(
        "--format",
        nargs="+",
        type=Literal["html", "svg", "png", "pdf"],
        default=["html"],
        help="html: the page alone; svg, png, pdf: each figure in a file of its own, too; several may be given",
    )
    parser.add_argument(
        "--direction",
        nargs="+",
        type=str,
        default=[],
        help="KEY=min or KEY=max: whether values are better when lower or higher, if the key's name does not tell",
    )
    parser.add_argument(
        "--at_seconds",
        "--at-seconds",
        nargs="+",
        type=float,
        default=[],
        help="simulated seconds after which the values have a column, too, of runs with data.devices",
    )
    return parser
