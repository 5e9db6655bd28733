"""Adds the finished runs of a folder to the stored results, and writes docs/results.md anew.

    fl-lightning reproduce feded/table1 --cases 'MNIST, β = 0.1' --seeds 1 2
    python -m tools.add_results reproduced feded/table1

A run counts if it has all rounds of its cell, or as many as `--rounds` says. It is found by its configuration, as in
`reproduce`, whatever name an older version gave it. A stored seed of a cell stays as it is, with its commit and
machine, unless it has fewer rounds or lacks a log key. The csv that `reproduce` left in the folder has the errors of
failed runs. Seconds are those of the whole run, even if it had more rounds.
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
    """Read the finished runs of an experiment, of any seed.

    Args:
        experiment: The experiment.
        folder: Folder that `reproduce` wrote.
        rounds: Number of rounds of a finished run. None is all rounds of its cell.
    """
    stored = {path.stem for path in (folder / "cells").glob("*.yaml")}
    seeds = set[int]()
    for name in stored:
        seed, _, _ = identity_of_name(name).partition("-")
        seeds.add(int(seed.removeprefix("seed")))
    request = Request(seeds=sorted(seeds), rounds=rounds)
    cells = located(Cells(experiment, request).all(), folder)
    return series_of([cell for cell in cells if cell.name in stored], folder, {})


def key(row: Row) -> Key:
    """Return the case, the method and the seed of a row."""
    return row["case"], row["method"], row["seed"]


def add(
    experiment: Experiment,
    drawn: Mapping[str, PaperTable],
    folder: Path,
    path: Path,
    *,
    rounds: float | None = None,
) -> list[Key]:
    """Add a folder's runs, and the errors of those that failed, to a file of results in the order of its table.

    Args:
        experiment: The experiment.
        drawn: Its tables.
        folder: Folder that `reproduce` wrote.
        path: File of the results.
        rounds: Number of rounds of a finished run. None is all rounds of its cell.

    Returns:
        The keys of the runs that were added.
    """
    with TemporaryDirectory() as temporary:
        found = Path(temporary) / "new.csv"
        write_stored(found, finished(experiment, folder, rounds), stored_keys(drawn))
        new = csv_rows(found)
    stored = csv_rows(path)
    added = runs_with_more(new, stored)
    values = [row for row in stored if not row["error"] and key(row) not in added]
    values += [row for row in new if key(row) in added]
    of_folder = csv_rows(folder / path.parent.name / path.name)
    failed = failed_rows([*stored, *of_folder], values)
    added = unique([*added, *(run for run, row in failed.items() if row not in stored)])
    if added:
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = in_order_of_table([*values, *failed.values()], experiment)
        columns = [*COLUMNS, *further_columns(rows)]
        write_table(path, [columns, *([row.get(name, "") for name in columns] for row in rows)])
    return added


def runs_with_more(new: Sequence[Row], stored: Sequence[Row]) -> list[Key]:
    """Return the keys of the new runs that have more rounds than the stored ones, or another log key."""
    rounds_of_run = {key(row): int(row["rounds"]) for row in stored if not row["error"]}
    rounds_of_metric = {(*key(row), row["metric"]): int(row["rounds"]) for row in stored if not row["error"]}
    more = []
    for row in new:
        known = rounds_of_metric.get((*key(row), row["metric"]))
        if known is None:
            # A new log key counts if the run has as many rounds as the stored one.
            known = rounds_of_run.get(key(row), 0) - 1
        if int(row["rounds"]) > known:
            more.append(key(row))
    return unique(more)


def failed_rows(rows: Sequence[Row], values: Sequence[Row]) -> dict[Key, Row]:
    """Return the last row with an error of each run that is not whole among the values."""
    whole = set[Key]()
    for row in values:
        if row["rounds"] == row["all_rounds"] or row.get(STOPPED) or row.get(SPENT):
            whole.add(key(row))
    return {key(row): row for row in rows if row["error"] and key(row) not in whole}


def in_order_of_table(rows: Sequence[Row], experiment: Experiment) -> list[Row]:
    """Sort rows by method and case, in the order of the experiment, and by seed."""
    cases = list[str]()
    methods = list[str]()
    for runs in experiment.runs:
        cases += [*experiment.cases, *experiment.cases_of(runs)]
        methods += [runs.label or method for method in runs.methods]

    def place(row: Row) -> tuple[int, int, int]:
        return methods.index(row["method"]), cases.index(row["case"]), int(row["seed"])

    return sorted(rows, key=place)


def further_columns(rows: Sequence[Row]) -> list[str]:
    """Name the columns besides `COLUMNS` in which some row has a value.

    >>> further_columns([{"max_seconds": "600", "stopped_early": ""}, {}])
    ['max_seconds']
    """
    return [name for name in (STOPPED, SPENT) if any(row.get(name) for row in rows)]


def made_by_reproduce(text: str) -> Path:
    """Read the path of a folder that `reproduce` wrote.

    Raises:
        ArgumentTypeError: `reproduce` did not write the folder.
    """
    folder = Path(text)
    if not (folder / "cells").is_dir():
        raise ArgumentTypeError(f"{text} is no folder that reproduce wrote")
    return folder


def check_names(parser: ArgumentParser, names: Sequence[str], known: Sequence[str]) -> None:
    """End the command if a name of the command line is not known."""
    for name in names:
        if name not in known:
            parser.error(f"names must be of {', '.join(known)}, got {name}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Add the finished runs that the command line names."""
    parser = ArgumentParser(prog="python -m tools.add_results", description="Adds finished runs to the stored results.")
    parser.add_argument("folder", type=made_by_reproduce, help="of `reproduce`")
    parser.add_argument("names", nargs="*", help="of tables; none: all that are stored")
    parser.add_argument("--rounds", type=float, help="of a run that counts, as given to `reproduce`; none: all")
    asked = parser.parse_args(arguments)
    check_names(parser, asked.names, [name for name, _, _ in tables()])
    changed = set[str]()
    for name, experiment, drawn in tables():
        path = ROOT / "results" / f"{name}.csv"
        if name in asked.names or (not asked.names and path.is_file()):
            added = add(experiment, drawn=drawn, folder=asked.folder, path=path, rounds=asked.rounds)
            for case, method, seed in added:
                print(f"{name}: {case}, {method}, seed {seed}")
                changed.add(name)
    write(changed)


if __name__ == "__main__":
    main()
