"""Tables and report of a grid."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from fl_lightning.cli.compare.cells import CellFiles
from fl_lightning.cli.compare.grid import Case, Cell, described
from fl_lightning.reports.report import write_report
from fl_lightning.reports.result_tables import as_latex, as_markdown
from fl_lightning.reports.results import STATISTICS, as_csv, compare, known_metrics, statistics_of, table_of
from fl_lightning.reports.saved import Group, SavedRun
from fl_lightning.utils.files import write_file, write_table
from fl_lightning.utils.text import printable


def write_results(
    folder: Path,
    cells: Mapping[Case, Sequence[Cell]],
    baseline: str,
    metrics: Sequence[str],
    target: float | None,
    notes: Sequence[str],
) -> None:
    """Write the tables and the report of the cells that are done.

    Args:
        folder: of the grid.
        cells: of each case.
        baseline: method that the others are compared with.
        metrics: log keys; none: those that are known.
        target: of the rounds to it.
        notes: sentences that the tables need.
    """
    every = {cell.name: cell for group in cells.values() for cell in group}
    runs = {name: run for name in every if (run := CellFiles(folder, name).read()) is not None}
    by_case = {case: grouped(group, runs) for case, group in cells.items()}
    keys = list(metrics) or known_metrics([group for groups in by_case.values() for group in groups])
    compared = [(case, key) for case, groups in by_case.items() if groups for key in keys]
    comparisons = [compare(by_case[case], key, baseline, target, described(case)) for case, key in compared]
    tables = list(map(table_of, comparisons))
    write_file(folder / "results.csv", as_csv(comparisons))
    write_file(folder / "results.md", "\n".join([*(f"{note}\n" for note in notes), *map(as_markdown, tables)]))
    write_file(folder / "results.tex", "\n".join(map(as_latex, tables)))
    rows = []
    for name, run in runs.items():
        start = [name, every[name].method, described(every[name].settings), every[name].seed]
        for key in keys:
            values = statistics_of(run, key)
            rows += [[*start, key, *(values.get(statistic, "") for statistic in STATISTICS)]] if values else []
    write_table(folder / "cells.csv", [["cell", "method", "settings", "seed", "metric", *STATISTICS], *rows])
    groups = grouped(every.values(), runs, with_settings=len(cells) > 1)
    if groups:
        page = write_report(groups, folder, tables=tables, notes=notes)
        print(printable("\n".join(map(as_markdown, tables)), keep="\n"))
        print(printable(f"{page}, results.csv, results.md, results.tex, cells.csv"))


def grouped(cells: Iterable[Cell], runs: Mapping[str, SavedRun], with_settings: bool = False) -> list[Group]:
    """Put the runs of each method, and with `with_settings` of each of its settings, together."""
    members: dict[str, list[SavedRun]] = {}
    for cell in cells:
        if cell.name in runs:
            label = ", ".join(filter(None, [cell.method, described(cell.settings) if with_settings else ""]))
            members.setdefault(label, []).append(runs[cell.name])
    return [Group(label, group) for label, group in members.items()]
