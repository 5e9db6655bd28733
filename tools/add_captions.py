"""Stores the captions of small figures in results/figures.csv; docs/figures.md has their numbers.

    fl-lightning reproduce fedntd/2 fedntd/6
    python -m tools.add_captions reproduced fedntd/2 fedntd/6

Without names it stores the captions of all figures whose runs the folder has. They replace the older captions of a
figure.
"""

from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path

from fl_lightning.experiments import experiment_files as files
from fl_lightning.experiments.cell_files import CellFiles
from fl_lightning.experiments.cells import Cells, Request
from fl_lightning.experiments.results import draw, series_of
from fl_lightning.papers import Series
from fl_lightning.papers.drawing import unique
from fl_lightning.papers.stored import csv_rows, made
from fl_lightning.reports.result_tables import Table
from fl_lightning.reports.saved import SavedRun
from fl_lightning.utils.files import write_table
from tools.add_results import Row, check_names, made_by_reproduce
from tools.write_results import ROOT

CAPTIONS = ROOT / "results" / "figures.csv"
SOURCE = ("commit", "machine")
COLUMNS = ("figure", "panel", "caption", "seeds", *SOURCE)


def figures() -> list[str]:
    """List the experiments with a small form."""
    return [name for name in files.experiment_names() if files.read_experiment(files.shipped_path(name)).full]


def captions_of(name: str, folder: Path) -> list[Row]:
    """Draw a figure of the runs in a folder and return its captions. There are none if runs are missing.

    Raises:
        ValueError: The figure cannot be drawn.
    """
    experiment = files.read_experiment(files.shipped_path(name))
    _, cells = Cells(experiment, Request()).in_folder(folder)
    if not all(CellFiles.of(cell, folder).is_complete() for cell in cells):
        return []
    series = series_of(cells, folder, {})
    contents, problems = draw(experiment.draw, series)
    if problems:
        raise ValueError(f"{name}: {'; '.join(problems)}")
    source = source_of(series)
    rows = []
    for panel, (content, caption) in contents.items():
        rows.append({"figure": name, "panel": panel, "caption": text_of(content, caption), **source})
    return rows


def source_of(series: Sequence[Series]) -> Row:
    """Name the commits, the machines and the seeds of all runs."""
    runs = list[SavedRun]()
    for each in series:
        runs += each.group.runs
    of_runs = [made(run, None) for run in runs]
    source = {key: "; ".join(unique(of_run[key] for of_run in of_runs)) for key in SOURCE}
    source["seeds"] = " ".join(unique(run.seed for run in runs))
    return source


def text_of(content: object, caption: str) -> str:
    """Return a caption. That of a table is followed by its cells."""
    if not isinstance(content, Table):
        return caption
    rows = [content.header, *([cell.text for cell in row] for row in content.rows)]
    lines = [" | ".join(row) for row in rows]
    return f"{caption} {'; '.join(lines)}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Store the captions of the figures that the command line names."""
    parser = ArgumentParser(prog="python -m tools.add_captions", description="Stores the captions of small figures.")
    parser.add_argument("folder", type=made_by_reproduce, help="of `reproduce`")
    parser.add_argument("names", nargs="*", help="of figures; none: those whose runs the folder has")
    asked = parser.parse_args(arguments)
    known = figures()
    check_names(parser, asked.names, known)
    rows = csv_rows(CAPTIONS)
    for name in asked.names or known:
        new = captions_of(name, asked.folder)
        if not new and asked.names:
            parser.error(f"{asked.folder} lacks runs of {name}; fl-lightning reproduce {name} makes them")
        for row in new:
            print(f"{name}{row['panel']}: {row['caption']}")
        if new:
            rows = [row for row in rows if row["figure"] != name] + new
    rows = [row for row in rows if row["figure"] in known]
    rows.sort(key=lambda row: known.index(row["figure"]))
    write_table(CAPTIONS, [COLUMNS, *([row[name] for name in COLUMNS] for row in rows)])


if __name__ == "__main__":
    main()
