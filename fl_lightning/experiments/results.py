"""Files that are written of the runs of an experiment: drawings with their page, and the tables of a comparison."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Literal

from fl_lightning.experiments.cell import Cell
from fl_lightning.experiments.cell_files import CellFiles
from fl_lightning.experiments.experiment import Tables
from fl_lightning.metrics.history import plain_key
from fl_lightning.metrics.keys import own_key, unknown_direction
from fl_lightning.papers import Drawing, Drawn, PaperTable, Series
from fl_lightning.papers.drawing import unique
from fl_lightning.papers.stored import write_stored
from fl_lightning.reports.comparison_tables import as_csv, comparison_table
from fl_lightning.reports.page import Page, Picture, Section, drawn, write_page
from fl_lightning.reports.report import write_report
from fl_lightning.reports.result_tables import LATEX_HEAD, Table, TableCell, as_latex, as_markdown
from fl_lightning.reports.results import COUNTS, INTRANSIGENCE, Comparison, compare, keys_in, known_metrics
from fl_lightning.reports.saved import DONE, Group, SavedRun
from fl_lightning.reports.summary import costs_table, summary_table
from fl_lightning.utils.files import write_file
from fl_lightning.utils.suggestions import suggestion
from fl_lightning.utils.text import printable

PictureFormat = Literal["png", "pdf", "svg"]
WIDE = 6.5
"""Width in inches. A wider picture has the whole width of the page."""


def series_of(cells: Sequence[Cell], folder: Path, failed: Mapping[str, str]) -> list[Series]:
    """Read the complete runs, with the seeds of one method and case together, and the reasons of failed runs.

    Args:
        cells: Cells of the experiment.
        folder: Folder of their files.
        failed: Reasons of failures, by the name of the cell.
    """
    cells_of: dict[tuple[str, str], list[Cell]] = {}
    for cell in cells:
        cells_of.setdefault((cell.method, cell.case), []).append(cell)
    series = []
    for (method, case), seeds in cells_of.items():
        runs: list[SavedRun] = []
        errors: dict[str, str] = {}
        for cell in seeds:
            files = CellFiles.of(cell, folder)
            if cell.name in failed:
                errors[str(cell.seed)] = failed[cell.name]
            elif files.is_complete() and not files.has_rounds():
                errors[str(cell.seed)] = f"no round ends within {cell.max_seconds:.12g} simulated seconds"
            elif files.is_complete():
                runs.append(files.read(cell.max_rounds, cell.directions))
        all_rounds = seeds[0].all_rounds
        series.append(
            Series(
                method=method,
                case=case,
                group=Group("", runs),
                failed=errors,
                all_rounds=all_rounds if all_rounds > 0 else None,
            )
        )
    return series


def name_runs(cells: Sequence[Cell], folder: Path) -> None:
    """Give complete runs the names that they have in the tables. `report` knows the runs by these names.

    Args:
        cells: Cells of the experiment. A run that several cells share has the name of the first cell.
        folder: Folder of their files.
    """
    named = set[str]()
    for cell in cells:
        files = CellFiles.of(cell, folder)
        if files.name in named:
            continue
        named.add(files.name)
        name = ", ".join(filter(None, (cell.method, cell.case)))
        done = files.done
        content = {**(done or {}), "name": name, "case": cell.case}
        if done is not None and done != content:
            write_file(files.begun_run / DONE, json.dumps(content, indent=1) + "\n")


# --- drawings -------------------------------------------------------------------------------------


def draw(
    drawings: Mapping[str, Drawing], series: Sequence[Series], notes: Sequence[str] = ()
) -> tuple[dict[str, Drawn], list[str]]:
    """Draw every drawing that has runs, by the letter of the panel, without tables that have no rows.

    Args:
        drawings: Drawings by the letter of the panel.
        series: Runs of all methods and cases.
        notes: Sentences at the end of the captions of tables.

    Returns:
        The contents by letter, and the reasons why other drawings have none.
    """
    contents: dict[str, Drawn] = {}
    problems: list[str] = []
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
        sentences = [caption, *unknown_keys(drawing, shown)]
        if isinstance(content, Table):
            if not content.rows:
                continue
            sentences += notes
        contents[letter] = Drawn(content, " ".join(sentences))
    return contents, problems


def unknown_keys(drawing: Drawing, series: Sequence[Series]) -> list[str]:
    """Return a sentence for each log key of a drawing that no run has, once there is a whole run.

    Before that later rounds may log the key.
    """
    if not any(each.group.runs and each.is_whole for each in series):
        return []
    runs: list[SavedRun] = []
    for each in series:
        runs += each.group.runs
    logged = keys_in(runs)
    unknown = [key for key in drawing.log_keys() if plain_key(key) not in logged]
    return [f"No run has {key!r}{suggestion(key, logged)}." for key in unknown]


def write_drawings(
    name: str,
    heading: str,
    contents: Mapping[str, Drawn],
    *,
    output: Path,
    forms: Sequence[PictureFormat],
) -> list[Path]:
    """Write the pictures and tables of an experiment, each in its own file, and a page with all of them.

    Args:
        name: Name of the experiment, `paper/number`.
        heading: Heading of the page.
        contents: Pictures and tables by the letter of the panel.
        output: Folder of the files.
        forms: Formats of the pictures.

    Returns:
        The files, the page last.
    """
    files: dict[Path, str | bytes] = {}
    parts: list[Picture | Table | str] = []
    for letter, (content, caption) in contents.items():
        stem = f"{name}{letter}"
        if isinstance(content, Table):
            table = replace(content, title=content.title or heading, note=caption)
            files[output / f"{stem}.md"] = as_markdown(table)
            files[output / f"{stem}.tex"] = as_latex(table)
            parts.append(table)
        else:
            for form in forms:
                files[output / f"{stem}.{form}"] = drawn(content, form)
            picture = Picture(
                name=stem.replace("/", "-"),
                figure=content,
                caption=f"({letter}) {caption}" if len(contents) > 1 else caption,
                wide=bool(content.get_figwidth() > WIDE),
            )
            parts.append(picture)
    for path, data in files.items():
        write_file(path, data)
    page = output / f"{name}.html"
    write_page(page, Page(heading, sections=[Section(name, parts)]))
    return [*files, page]


def stored_keys(drawings: Mapping[str, Drawing]) -> list[str]:
    """List the log keys that the papers' tables among the drawings need or keep. Without such tables there are none."""
    keys: list[str] = []
    for drawing in drawings.values():
        if isinstance(drawing, PaperTable):
            keys += drawing.log_keys()
            keys += drawing.beside
    return unique(keys)


# --- comparisons ----------------------------------------------------------------------------------


def write_tables(
    folder: Path,
    series: Sequence[Series],
    tables: Tables,
    *,
    notes: Sequence[str],
    report: bool,
    command: str = "",
) -> None:
    """Write the tables of a comparison, and its report.

    Args:
        folder: Folder of the experiment.
        series: Runs of all methods and cases.
        tables: Settings of the tables.
        notes: Sentences that the tables need.
        report: Whether the report is written and everything printed.
        command: The command that makes the comparison again. Empty: the report shows none.

    Raises:
        ValueError: A column needs the direction of a metric and nobody tells it, no run has a metric, or no run has
            intransigence against the reference. The tables have been written before.
    """
    by_case = {case: groups_of(series, case) for case in unique(each.case for each in series)}
    groups = list(chain.from_iterable(by_case.values()))
    logged = keys_in(chain.from_iterable(group.runs for group in groups))
    asked = [plain_key(key) for key in tables.metrics]
    keys = known_metrics(groups, asked, with_tasks=tables.reference is not None)
    baseline = tables.baseline or series[0].method
    comparisons: dict[str, list[Comparison]] = {}
    laid_out: list[Table] = []
    for case, of_case in by_case.items():
        failed = [each for each in series if each.case == case and each.failed]
        comparisons[case] = []
        if of_case:
            comparisons[case] = compare_keys(of_case, keys, tables, baseline=baseline, case=case)
        laid_out += [with_failed(comparison_table(each), failed) for each in comparisons[case]]
        if failed and not of_case:
            empty = Table(title=case, header=["method", "final"], rows=[])
            laid_out.append(with_failed(empty, failed))
    compared = list(chain.from_iterable(comparisons.values()))
    answer = answer_of(comparisons, series)
    costs = costs_table(comparisons)
    first = [*answer, costs] if costs is not None else answer
    markdown = [as_markdown(table) for table in [*first, *laid_out]]
    comments = "".join(map(latex_comment, notes))
    write_file(folder / "results.csv", as_csv(compared))
    write_file(folder / "results.md", joined(notes, markdown))
    write_file(folder / "results.tex", LATEX_HEAD + comments + "\n" + "\n".join(map(as_latex, first)))
    write_file(folder / "results-by-metric.tex", LATEX_HEAD + "\n" + "\n".join(map(as_latex, laid_out)))
    write_stored(folder / "cells.csv", series, keys)
    if not report or not groups:
        return
    page = write_report(report_groups(series), folder, answer=answer, tables=laid_out, notes=notes, command=command)
    shown = markdown if len(by_case) == 1 else markdown[: len(first)]
    print(printable("\n".join(shown), keep="\n"))
    print(printable(f"{page}, results.csv, results.md, results.tex, results-by-metric.tex, cells.csv"))
    if {*COUNTS} & {*tables.columns}:
        for comparison in compared:
            if comparison.direction is None:
                raise ValueError(unknown_direction(comparison.key))
    if tables.reference is not None:
        check_measured(compared, tables.reference)
    unknown = [key for key in asked if key not in keys]
    if unknown:
        raise ValueError(f"metrics are log keys, and no run has {unknown[0]!r}{absent(unknown[0], logged)}")


def absent(key: str, logged: Iterable[str]) -> str:
    """Return the end of a sentence about a key that no run has: what may be the reason.

    Args:
        key: The key that was asked for.
        logged: All keys of the runs.

    >>> absent("global/accc", ["global/acc"])
    "; the nearest is 'global/acc'"
    >>> absent("global/forgetting_tasks", ["global/forgetting"])
    '; runs have it after more rounds, or with the setting that docs/measuring.md names'
    """
    if own_key(key) is not None:
        return "; runs have it after more rounds, or with the setting that docs/measuring.md names"
    return suggestion(key, logged)


def latex_comment(note: str) -> str:
    """Write a note as a comment of LaTeX, with a mark in each line."""
    return "".join(f"% {line}\n" for line in note.splitlines())


def answer_of(comparisons: Mapping[str, Sequence[Comparison]], series: Sequence[Series]) -> list[Table]:
    """Lay the final values of all methods and cases out in one table, none without a value.

    Args:
        comparisons: The comparisons of each case, one for each metric.
        series: Runs of all methods and cases.
    """
    if not any(comparisons.values()):
        return []
    table = summary_table(comparisons, methods=unique(each.method for each in series))
    sentences = [table.note] if table.note else []
    sentences += [f"{each.name}: {'; '.join(each.failures)}." for each in series if each.failed]
    return [replace(table, note=" ".join(sentences))]


def check_measured(comparisons: Sequence[Comparison], reference: str) -> None:
    """Refuse a reference against which no run has intransigence, if there are runs besides its own.

    Args:
        comparisons: All comparisons.
        reference: Name of the row.

    Raises:
        ValueError: No run has it.
    """
    labels: set[str] = set()
    for comparison in comparisons:
        labels |= set(comparison.results)
    if labels <= {reference}:
        return
    for comparison in comparisons:
        if any(INTRANSIGENCE in columns for columns in comparison.results.values()):
            return
    raise ValueError(
        f"reference must name a row that has tables of tasks of the others' seeds, and no run has intransigence "
        f"against {reference}; give another row the seeds of {reference}, and evaluate the global model"
    )


def compare_keys(
    groups: Sequence[Group],
    keys: Sequence[str],
    tables: Tables,
    *,
    baseline: str,
    case: str,
) -> list[Comparison]:
    """Compare the methods of a case by each metric.

    Args:
        groups: Runs of the methods of the case.
        keys: Log keys of the metrics.
        tables: Settings of the tables.
        baseline: Name of the method with which the others are compared.
        case: Name of the case.
    """
    comparisons = []
    for key in keys:
        comparison = compare(
            groups,
            key,
            baseline,
            target=tables.target,
            case=case,
            at=tables.at,
            at_seconds=tables.at_seconds,
            columns=tables.columns,
            reference=tables.reference,
        )
        comparisons.append(comparison)
    return comparisons


def joined(notes: Iterable[str], tables: Iterable[str]) -> str:
    """Join notes and tables to the text of a file, each note as a paragraph of its own."""
    paragraphs = [f"{note}\n" for note in notes]
    return "\n".join([*paragraphs, *tables])


def with_failed(table: Table, failed: Sequence[Series]) -> Table:
    """Add failures to a table: a row for a method without runs, else a sentence.

    Args:
        table: Table of the methods that have runs.
        failed: Series with failures in the table's case.
    """
    rows = [*table.rows]
    sentences = [table.note] if table.note else []
    dashes = [TableCell("–")] * (len(table.header) - 2)
    for each in failed:
        reasons = "; ".join(each.failures)
        if each.group.runs:
            sentences.append(f"{each.method}: {reasons}.")
        else:
            rows.append([TableCell(each.method), TableCell(reasons), *dashes])
    return replace(table, rows=rows, note=" ".join(sentences))


def groups_of(series: Sequence[Series], case: str) -> list[Group]:
    """Group the runs of each method in a case."""
    return [Group(each.method, each.group.runs) for each in series if each.case == case and each.group.runs]


def report_groups(series: Sequence[Series]) -> list[Group]:
    """Group the runs of each method and case for the report. Runs that several cases share are in a group of each."""
    groups = []
    for each in series:
        if each.group.runs:
            groups.append(Group(each.name, each.group.runs, case=each.case, method=each.method))
    return groups
