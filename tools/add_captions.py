"""Stores the captions of small figures in results/figures.csv; docs/figures.md has their numbers.

    fl-lightning reproduce fedntd/2 fedntd/6
    python -m tools.add_captions reproduced fedntd/2 fedntd/6

Without names: the figures whose runs the folder has. A figure's captions take the place of its older ones.
"""

from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path

from fl_lightning.experiments import experiment_files as files
from fl_lightning.experiments.cell_files import CellFiles
from fl_lightning.experiments.cells import Cells, Request
from fl_lightning.experiments.results import draw, series_of
from fl_lightning.papers.drawing import unique
from fl_lightning.papers.stored import csv_rows, made
from fl_lightning.reports.result_tables import Table
from fl_lightning.utils.files import write_table
from tools.add_results import Row, made_by_reproduce
from tools.write_results import ROOT

CAPTIONS = ROOT / "results" / "figures.csv"
SOURCE = ("commit", "machine")
COLUMNS = ("figure", "panel", "caption", "seeds", *SOURCE)


def figures() -> list[str]:
    """List the experiments with a small form."""
    return [name for name in files.experiment_names() if files.read_experiment(files.shipped_path(name)).full]


def captions_of(name: str, folder: Path) -> list[Row]:
    """Draw a figure of the runs in a folder and return its captions, none where runs are missing."""
    experiment = files.read_experiment(files.shipped_path(name))
    _, cells = Cells(experiment, Request()).in_folder(folder)
    if not all(CellFiles.of(cell, folder).is_complete() for cell in cells):
        return []
    series = series_of(cells, folder, {})
    runs = [run for each in series for run in each.group.runs]
    sources = [made(run, None) for run in runs]
    source = {key: "; ".join(unique(each[key] for each in sources)) for key in SOURCE}
    source["seeds"] = " ".join(unique(run.seed for run in runs))
    contents, problems = draw(experiment.draw, series)
    if problems:
        raise ValueError(f"{name}: {'; '.join(problems)}")
    return [
        {"figure": name, "panel": at, "caption": text_of(content, caption), **source}
        for at, (content, caption) in contents.items()
    ]


def text_of(content: object, caption: str) -> str:
    """Return a caption, of a table with its cells."""
    if not isinstance(content, Table):
        return caption
    rows = [content.header, *([cell.text for cell in row] for row in content.rows)]
    return f"{caption} {'; '.join(' | '.join(row) for row in rows)}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Store the captions of the figures that the command line names."""
    parser = ArgumentParser(prog="python -m tools.add_captions", description="Stores the captions of small figures.")
    parser.add_argument("folder", type=made_by_reproduce, help="of `reproduce`")
    parser.add_argument("names", nargs="*", help="of figures; none: those whose runs the folder has")
    asked = parser.parse_args(arguments)
    known = figures()
    if unknown := [name for name in asked.names if name not in known]:
        parser.error(f"names must be of {', '.join(known)}, got {unknown[0]}")
    rows = csv_rows(CAPTIONS)
    for name in asked.names or known:
        new = captions_of(name, asked.folder)
        if not new and asked.names:
            parser.error(f"{asked.folder} lacks runs of {name}; fl-lightning reproduce {name} makes them")
        print(*(f"{name}{row['panel']}: {row['caption']}" for row in new), sep="\n", end="\n" * bool(new))
        rows = [row for row in rows if not new or row["figure"] != name] + new
    rows = sorted((row for row in rows if row["figure"] in known), key=lambda row: known.index(row["figure"]))
    write_table(CAPTIONS, [COLUMNS, *([row[name] for name in COLUMNS] for row in rows)])


if __name__ == "__main__":
    main()
