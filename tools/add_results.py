"""Adds the finished runs of a folder to the stored results, and writes docs/results.md anew.

    fl-lightning reproduce feded/table1 --cases 'MNIST, β = 0.1' --seeds 1 2
    python -m tools.add_results reproduced feded/table1

A run counts where it has all rounds of its cell, or with `--rounds` so many. It is found by its configuration, as in
`reproduce`, whatever name an older version gave it. A cell's seed that is stored already stays as it is, with its
commit and machine, unless it has fewer rounds or lacks a log key. Why a run failed is taken from the csv that
`reproduce` left in the folder. Seconds are those of the whole run, also where it had more rounds.
"""

from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from fl_lightning.experiments.cell_files import located
from fl_lightning.experiments.cells import Cells, Request
from fl_lightning.experiments.experiment import Experiment
from fl_lightning.experiments.naming import identity_of_name
from fl_lightning.experiments.results import series_of, stored_keys
from fl_lightning.papers import PaperTable, Series
from fl_lightning.papers.drawing import unique
from fl_lightning.papers.stored import COLUMNS, SPENT, STOPPED, csv_rows, write_stored
from fl_lightning.utils.files import write_table
from tools.write_results import ROOT, tables, write

Row = dict[str, str]
Key = tuple[str, str, str]


def finished(experiment: Experiment, folder: Path, rounds: float | None = None) -> list[Series]:
    """Read the runs of an experiment that have all their rounds, or so many, whatever their seeds."""
    stored = {path.stem for path in (folder / "cells").glob("*.yaml")}
    seeds = {int(identity_of_name(name).partition("-")[0].removeprefix("seed")) for name in stored}
    request = Request(seeds=sorted(seeds), rounds=rounds)
    cells = located(Cells(experiment, request).all(), folder)
    return series_of([cell for cell in cells if cell.name in stored], folder, {})


def key(row: Row) -> Key:
    """Key of the run that a row is of."""
    return row["case"], row["method"], row["seed"]


def add(
    experiment: Experiment, drawn: Mapping[str, PaperTable], folder: Path, path: Path, rounds: float | None = None
) -> list[Key]:
    """Add a folder's runs, and why some failed, to a file of results in the order of its table; return their keys."""
    with TemporaryDirectory() as temporary:
        found = finished(experiment, folder, rounds)
        write_stored(Path(temporary) / "new.csv", found, stored_keys(drawn))
        new = csv_rows(Path(temporary) / "new.csv")
    stored = csv_rows(path)
    of_run = {key(row): int(row["rounds"]) for row in stored if not row["error"]}
    of_metric = {(*key(row), row["metric"]): int(row["rounds"]) for row in stored if not row["error"]}

    def is_more(row: Row) -> bool:
        known = of_metric.get((*key(row), row["metric"]), of_run.get(key(row), 0) - 1)  # a new log key: as many rounds
        return int(row["rounds"]) > known

    added = unique(key(row) for row in new if is_more(row))
    values = [row for row in stored if not row["error"] and key(row) not in added]
    values += [row for row in new if key(row) in added]
    whole = {key(row) for row in values if row["rounds"] == row["all_rounds"] or row.get(STOPPED) or row.get(SPENT)}
    told = [*stored, *csv_rows(folder / path.parent.name / path.name)]  # the later one counts
    failed = {key(row): row for row in told if row["error"] and key(row) not in whole}
    added = unique([*added, *(run for run, row in failed.items() if row not in stored)])
    rows = [*values, *failed.values()]
    cases = unique(case for runs in experiment.runs for case in (*experiment.cases, *experiment.cases_of(runs)))
    methods = unique(runs.label or method for runs in experiment.runs for method in runs.methods)
    rows.sort(key=lambda row: (methods.index(row["method"]), cases.index(row["case"]), int(row["seed"])))
    if added:
        path.parent.mkdir(parents=True, exist_ok=True)
        columns = [*COLUMNS, *further_columns(rows)]
        write_table(path, [columns, *([row.get(name, "") for name in columns] for row in rows)])
    return added


def further_columns(rows: Sequence[Row]) -> list[str]:
    """Name the columns besides `COLUMNS` that some row has a value of.

    >>> further_columns([{"max_seconds": "600", "stopped_early": ""}, {}])
    ['max_seconds']
    """
    return [name for name in (STOPPED, SPENT) if any(row.get(name) for row in rows)]


def made_by_reproduce(text: str) -> Path:
    """Read the path of a folder that `reproduce` wrote.

    Raises:
        ArgumentTypeError: it is none.
    """
    if not (Path(text) / "cells").is_dir():
        raise ArgumentTypeError(f"{text} is no folder that reproduce wrote")
    return Path(text)


def main(arguments: Sequence[str] | None = None) -> None:
    """Add the finished runs that the command line names."""
    parser = ArgumentParser(prog="python -m tools.add_results", description="Adds finished runs to the stored results.")
    parser.add_argument("folder", type=made_by_reproduce, help="of `reproduce`")
    parser.add_argument("names", nargs="*", help="of tables; none: all that are stored")
    parser.add_argument("--rounds", type=float, help="of a run that counts, as given to `reproduce`; none: all")
    asked = parser.parse_args(arguments)
    known = [name for name, _, _ in tables()]
    if unknown := [name for name in asked.names if name not in known]:
        parser.error(f"names must be of {', '.join(known)}, got {unknown[0]}")
    changed = set[str]()
    for name, experiment, drawn in tables():
        path = ROOT / "results" / f"{name}.csv"
        if name in asked.names or (not asked.names and path.is_file()):
            for case, method, seed in add(experiment, drawn, asked.folder, path, asked.rounds):
                print(f"{name}: {case}, {method}, seed {seed}")
                changed.add(name)
    write(changed)


if __name__ == "__main__":
    main()
