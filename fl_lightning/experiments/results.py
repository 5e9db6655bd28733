"""Files that are written of the runs of an experiment: drawings with their page, and the tables of a comparison."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from fl_lightning.experiments.cells import Cell, CellFiles
from fl_lightning.experiments.experiment import Tables
from fl_lightning.metrics.history import plain_key
from fl_lightning.metrics.keys import unknown_direction
from fl_lightning.papers import Drawing, Drawn, PaperTable, Series
from fl_lightning.papers.drawing import unique
from fl_lightning.papers.stored import write_stored
from fl_lightning.reports.comparison_tables import as_csv, comparison_table
from fl_lightning.reports.page import Picture, Section, drawn, write_page
from fl_lightning.reports.report import write_report
from fl_lightning.reports.result_tables import Table, TableCell, as_latex, as_markdown, latex
from fl_lightning.reports.results import Comparison, compare, keys_in, known_metrics
from fl_lightning.reports.saved import DONE, Group, SavedRun
from fl_lightning.utils.files import write_file
from fl_lightning.utils.suggestions import suggestion
from fl_lightning.utils.text import printable

PictureFormat = Literal["png", "pdf", "svg"]
WIDE = 6.5
"""Inches; a wider picture has the whole width of the page."""


def series_of(cells: Sequence[Cell], folder: Path, failed: Mapping[str, str]) -> list[Series]:
    """Read the complete runs, those of the seeds of one method and case together, and take why others failed.

    Args:
        cells: of the experiment.
        folder: of their files.
        failed: sentences by the names of cells.
    """
    series = dict[tuple[str, str], tuple[list[SavedRun], dict[str, str], int | None]]()
    for cell in cells:
        all_rounds = cell.all_rounds if cell.all_rounds > 0 else None
        runs, errors, _ = series.setdefault((cell.method, cell.case), ([], {}, all_rounds))
        files = CellFiles.of(cell, folder)
        if cell.name in failed:
            errors[str(cell.seed)] = failed[cell.name]
        elif files.is_complete():
            runs.append(files.read(cell.max_rounds, cell.directions))
    return [Series(*key, Group("", runs), errors, rounds) for key, (runs, errors, rounds) in series.items()]


def name_runs(cells: Sequence[Cell], folder: Path) -> None:
    """Give complete runs the names that they have in the tables, by which `report` knows them."""
    named = set[str]()
    for cell in cells:
        files = CellFiles.of(cell, folder)
        name = ", ".join(filter(None, (cell.method, cell.case)))
        done = files.done if files.name not in named else None  # the first of several names counts
        if done is not None and done.get("name") != name:
            write_file(files.begun_run / DONE, json.dumps({**done, "name": name}, indent=1) + "\n")
        named.add(files.name)


# --- drawings -------------------------------------------------------------------------------------


def draw(
    drawings: Mapping[str, Drawing], series: Sequence[Series], notes: Sequence[str] = ()
) -> tuple[dict[str, Drawn], list[str]]:
    """Draw everything that there are runs for, by the letter of the panel, without tables of other columns.

    Args:
        drawings: by letter.
        series: runs.
        notes: sentences that end the captions of tables.

    Returns:
        What was drawn, and why other drawings were not.
    """
    contents = dict[str, Drawn]()
    problems = list[str]()
    for letter, drawing in drawings.items():
        name = f"drawing {letter}".strip()
        shown = [each for each in series if drawing.shows_missing or each.group.runs]
        if not shown:
            problems.append(f"{name} needs runs, and none is complete")
            continue
        try:
            content, caption = drawing.draw(shown)
        except ValueError as error:
            problems.append(f"{name}: {error}")
            continue
        if not isinstance(content, Table) or content.rows:
            further = [*unknown_keys(drawing, shown), *(notes if isinstance(content, Table) else ())]
            contents[letter] = Drawn(content, " ".join([caption, *further]))
    return contents, problems


def unknown_keys(drawing: Drawing, series: Sequence[Series]) -> list[str]:
    """Tell which log keys of a drawing no run has, once there is a whole one: later rounds may have others."""
    if not any(each.group.runs and each.is_whole for each in series):
        return []
    logged = keys_in(run for each in series for run in each.group.runs)
    return [
        f"No run has {key!r}{suggestion(key, logged)}." for key in drawing.log_keys() if plain_key(key) not in logged
    ]


def write_drawings(
    name: str, heading: str, contents: Mapping[str, Drawn], output: Path, forms: Sequence[PictureFormat]
) -> list[Path]:
    """Write the pictures and tables of an experiment, each in its own file, and a page with all of them.

    Args:
        name: of the experiment, `paper/number`.
        heading: of the page.
        contents: by the letter of the panel.
        output: folder.
        forms: of the pictures.

    Returns:
        The files, the page last.
    """
    files = dict[Path, str | bytes]()
    parts = list[Picture | Table | str]()
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


def stored_keys(drawings: Mapping[str, Drawing]) -> list[str]:
    """List the log keys that the papers' tables among the drawings need or keep, none where there is no such table."""
    tables = [drawing for drawing in drawings.values() if isinstance(drawing, PaperTable)]
    return unique(key for table in tables for key in (*table.log_keys(), *table.beside))


# --- comparisons ----------------------------------------------------------------------------------


def write_tables(folder: Path, series: Sequence[Series], tables: Tables, notes: Sequence[str], report: bool) -> None:
    """Write the tables of a comparison, and its report.

    Args:
        folder: of the experiment.
        series: of all methods and cases.
        tables: settings.
        notes: sentences that the tables need.
        report: whether the report is written and everything printed.

    Raises:
        ValueError: a metric that no run has, after the tables were written.
    """
    by_case = {name: groups_of(series, name) for name in unique(each.case for each in series)}
    groups = [group for of_case in by_case.values() for group in of_case]
    runs = [run for group in groups for run in group.runs]
    logged = keys_in(runs)
    asked = [plain_key(key) for key in tables.metrics]
    keys = [key for key in asked if key in logged] or known_metrics(groups)
    baseline = tables.baseline or series[0].method
    compared = list[Comparison]()
    laid_out = list[Table]()
    for case, of_case in by_case.items():
        failed = [each for each in series if each.case == case and each.failed]
        columns: dict[str, Any] = {"case": case, "at": tables.at, "columns": tables.columns}
        comparisons = [compare(of_case, key, baseline, target=tables.target, **columns) for key in keys if of_case]
        compared += comparisons
        laid_out += [with_failed(comparison_table(each), failed) for each in comparisons]
        if failed and not of_case:
            laid_out.append(with_failed(Table(case, ["method", "final"], []), failed))
    write_file(folder / "results.csv", as_csv(compared))
    write_file(folder / "results.md", "\n".join([*(f"{note}\n" for note in notes), *map(as_markdown, laid_out)]))
    write_file(folder / "results.tex", "\n".join([*(f"{latex(note)}\n" for note in notes), *map(as_latex, laid_out)]))
    write_stored(folder / "cells.csv", series, keys)
    if report and groups:
        page = write_report(report_groups(series), folder, tables=laid_out, notes=notes)
        print(printable("\n".join(map(as_markdown, laid_out)), keep="\n"))
        print(printable(f"{page}, results.csv, results.md, results.tex, cells.csv"))
        counts_rounds = bool({"rounds", "speed_up"} & {*tables.columns})
        for comparison in compared:
            if counts_rounds and comparison.direction is None:
                raise ValueError(unknown_direction(comparison.key))
        if unknown := [key for key in asked if key not in keys]:
            raise ValueError(f"metrics are log keys, and no run has {unknown[0]!r}{suggestion(unknown[0], logged)}")


def with_failed(table: Table, failed: Sequence[Series]) -> Table:
    """Add what failed to a table: a row where a method has no runs, else a sentence.

    Args:
        table: of the methods that have runs.
        failed: series with failures, of the table's case.
    """
    lacking = [each for each in failed if not each.group.runs]
    dashes = [TableCell("–")] * (len(table.header) - 2)
    rows = [[TableCell(each.method), TableCell("; ".join(each.failures)), *dashes] for each in lacking]
    some = [f"{each.method}: {'; '.join(each.failures)}." for each in failed if each.group.runs]
    return replace(table, rows=[*table.rows, *rows], note=" ".join(filter(None, [table.note, *some])))


def groups_of(series: Sequence[Series], case: str) -> list[Group]:
    """Group the runs of each method in a case."""
    return [Group(each.method, each.group.runs) for each in series if each.case == case and each.group.runs]


def report_groups(series: Sequence[Series]) -> list[Group]:
    """Group the runs of each method and case for the report, those that stand in several cases once."""
    groups = dict[tuple[Path, ...], Group]()
    for each in series:
        if each.group.runs:
            folders = tuple(run.folder for run in each.group.runs)
            groups.setdefault(folders, Group(each.name, each.group.runs))
    return list(groups.values())
