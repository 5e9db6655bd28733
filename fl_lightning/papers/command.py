"""`fl-lightning figure`: lists the papers' figures, or runs what one needs and draws it."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

from fl_lightning.cli.compare.cells import CellFiles
from fl_lightning.cli.compare.command import locked
from fl_lightning.cli.compare.grid import Case, Cell, combinations, parse_settings
from fl_lightning.cli.compare.running import run_cells
from fl_lightning.cli.configs import title
from fl_lightning.cli.errors import PROG
from fl_lightning.cli.parser import CommandParser
from fl_lightning.papers import Drawn, Series, spec
from fl_lightning.papers.spec import FigureCell
from fl_lightning.reports.page import Picture, Section, drawn, write_page
from fl_lightning.reports.result_tables import Table, as_latex, as_markdown
from fl_lightning.reports.saved import Group, SavedRun, read_run
from fl_lightning.runs.folder import CHECKPOINTS, LAST
from fl_lightning.utils.files import write_file
from fl_lightning.utils.settings import check_at_least
from fl_lightning.utils.text import printable

DESCRIPTION = (
    "Draw a figure of a paper: run what it needs, on data at hand, and write its pictures and tables. Without a name: "
    "list all figures. Runs that are done are kept, and other figures use them too."
)
Form = Literal["png", "pdf", "svg"]
WIDE = 6.5
"""Inches; a wider picture has the whole width of the page."""


def run(argv: list[str]) -> None:
    """List the figures, or draw one.

    Args:
        argv: options of the command.

    Raises:
        SystemExit: with 2 for a wrong option, 0 after the help.
        ValueError: there is no such figure, a setting is wrong, or naming the runs that failed.
        KeyboardInterrupt: naming how to go on.
    """
    given = command_parser().parse_args(argv)
    check_at_least(0, "0 makes the runs in this process", processes=given.processes)
    if not given.names:
        print(listed())
        return
    (more,) = combinations(parse_settings(given.set, "--set"))
    wanted = [FigureRun(path, given.config or [], more, given.seeds) for path in spec.paths_of(given.names)]
    with locked(given.output):
        run_places([p for figure in wanted for p in figure.starts], given.output, given.processes)
        run_places([p for figure in wanted for p in figure.places(given.output)], given.output, given.processes)
        for figure in wanted:
            series = series_of(figure.places(given.output), given.output)
            contents = {letter: drawing.draw(series) for letter, drawing in figure.file.draw.items()}
            for letter, (_, caption) in contents.items():
                print(printable(f"{figure.name}{letter}: {caption}"))
            files = write_figure(figure.name, figure.heading, contents, given.output, given.format)
            print(*map(printable, files), sep="\n")


def command_parser() -> CommandParser:
    """Build the parser of the command."""
    parser = CommandParser(prog=f"{PROG} figure", description=DESCRIPTION)
    add = parser.add_argument
    add("names", nargs="*", type=str, help="paper/number, a paper for all of its figures, or a file; none: list all")
    add("-c", "--config", action="append", help="a YAML file over the figure's own, such as data/cifar10")
    add("--set", nargs="+", type=str, default=[], help="NAME=VALUE: a setting of all runs")
    add("--seeds", nargs="+", type=int | None, default=None, help="in place of the figure's")
    add("--output", type=Path, default=Path("figures"), help="folder of the runs and the pictures")
    add("--format", nargs="+", type=Form, default=["png"], help="of the pictures; several may be given")
    add("--processes", type=int, default=1, help="runs at once; 0: in this process")
    return parser


def listed() -> str:
    """List all figures: name, minutes, what each shows."""
    names = spec.names()
    width = max(map(len, names))
    minutes = (f"{name:{width}}  {spec.minutes_of(name):4.1f} min" for name in names)
    return "\n".join(f"{line}  {title(f'{spec.FOLDER}/{name}')}" for name, line in zip(names, minutes, strict=True))


# --- runs -----------------------------------------------------------------------------------------


class FigureRun:
    """A figure that is to be drawn, with its cells.

    Args:
        path: of its file.
        configs: of the user, over the file's.
        more: settings of the user, which win.
        seeds: in place of the file's; None: those.
    """

    def __init__(self, path: Path, configs: Sequence[str], more: Case, seeds: Sequence[int] | None) -> None:
        self.file = spec.read(path)
        self.heading = path.read_text(encoding="utf-8").split("\n", 1)[0].lstrip("# ")
        self.name = f"{path.parent.name}/{path.stem}"
        places_of = partial(spec.places_of, spec.composer_of(self.file, configs))
        self.starts = places_of(self.file.start, self.file, more, seeds) if self.file.start else []
        self._places = [place for runs in self.file.runs for place in places_of(runs, self.file, more, seeds)]

    def places(self, output: Path) -> list[FigureCell]:
        """Give its cells, each with the last weights of the start of its seed, if there are starts, which are done."""
        files = {place.cell.seed: CellFiles(output, place.cell.name) for place in self.starts}
        if not files:
            return self._places
        return [place._replace(cell=started(place.cell, files[place.cell.seed])) for place in self._places]


def run_places(places: Sequence[FigureCell], output: Path, processes: int) -> None:
    """Run the cells that are not done.

    Raises:
        ValueError: naming those that failed.
    """
    if failed := run_cells((place.cell for place in places), processes, output):
        named = "; ".join(f"{name}: {error}" for name, error in failed.items())
        raise ValueError(f"a figure needs all its runs, and {len(failed)} failed. {named}. {output}/logs has more")


def started(cell: Cell, start: CellFiles) -> Cell:
    """Let a cell begin with the last weights of another one, which is done."""
    model = {**cell.config["model"], "initial_weights": str(start.begun_run / CHECKPOINTS / LAST)}
    name = spec.name_of(cell.method, cell.seed, cell.config, start.name)
    return replace(cell, config={**cell.config, "model": model}, name=name)


def series_of(places: Sequence[FigureCell], output: Path) -> list[Series]:
    """Read the runs, those of the seeds of one method and case together."""
    alike: dict[tuple[str, str], list[SavedRun]] = {}
    for place in places:
        folder = CellFiles(output, place.cell.name).begun_run
        alike.setdefault((place.method, place.case), []).append(read_run(folder))
    return [Series(method, case, Group("", runs)) for (method, case), runs in alike.items()]


# --- files ----------------------------------------------------------------------------------------


def write_figure(
    name: str, heading: str, contents: Mapping[str, Drawn], output: Path, forms: Sequence[Form]
) -> list[Path]:
    """Write the pictures and tables of a figure, each in its own file, and a page with all of them.

    Args:
        name: of the figure, `paper/number`.
        heading: of the page.
        contents: by the letter of the panel.
        output: folder.
        forms: of the pictures.

    Returns:
        The files, the page last.
    """
    files, parts = dict[Path, str | bytes](), list[Picture | Table | str]()
    for letter, (content, caption) in contents.items():
        stem = f"{name}{letter}"
        if isinstance(content, Table):
            table = replace(content, title=content.title or heading, note=caption)
            files |= {output / f"{stem}.md": as_markdown(table), output / f"{stem}.tex": as_latex(table)}
            parts.append(table)
        else:
            files |= {output / f"{stem}.{form}": drawn(content, form) for form in forms}
            below = f"({letter}) {caption}" if len(contents) > 1 else caption
            parts.append(Picture(stem.replace("/", "-"), content, below, wide=bool(content.get_figwidth() > WIDE)))
    for path, data in files.items():
        write_file(path, data)
    page = output / f"{name}.html"
    write_page(page, heading, [Section(name, parts)])
    return [*files, page]
