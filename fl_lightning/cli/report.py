"""`fl-lightning report`: runs as one HTML page, and their figures."""

from pathlib import Path
from typing import Literal

from fl_lightning.cli.errors import PROG
from fl_lightning.cli.parser import CommandParser
from fl_lightning.runs.report import write_report
from fl_lightning.runs.saved import find_runs, grouped, read_run

DESCRIPTION = (
    "Write a report of one run or several as one HTML file that needs no network, and its figures. Runs that differ in "
    "the seed only are one curve with a band."
)


def run(argv: list[str]) -> None:
    """Write the report.

    Args:
        argv: options of the command.

    Raises:
        SystemExit: with 2 for a wrong option, 0 after the help.
        FileNotFoundError: a path that holds no run.
    """
    given = command_parser().parse_args(argv)
    folders = find_runs(given.runs)
    output = given.output or (folders[0] if len(folders) == 1 else Path("reports"))
    page = write_report(grouped(map(read_run, folders)), output, [form for form in given.format if form != "html"])
    print(page)


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
    return parser
