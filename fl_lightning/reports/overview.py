"""One table of all metrics of a comparison: a row for each method, the final value of each metric, and costs."""

from collections.abc import Sequence

from fl_lightning.metrics.keys import is_in_percent, unknown_direction
from fl_lightning.reports.comparison_tables import (
    cell_text,
    column_names,
    heading,
    intransigence_text,
    marks_of,
    seeds_text,
)
from fl_lightning.reports.result_tables import Table, TableCell
from fl_lightning.reports.results import COSTS, INTRANSIGENCE, Comparison

FINAL = "final"
"""Name of the column of final values."""


def overview_table(comparisons: Sequence[Comparison]) -> Table:
    """Lay the final values of all metrics of one case out beside each other, the best mean of each marked.

    Args:
        comparisons: The comparisons of the case, one for each metric, at least one.
    """
    first = comparisons[0]
    header = ["method"]
    header += [metric_heading(comparison) for comparison in comparisons]
    measured = [comparison for comparison in comparisons if INTRANSIGENCE in column_names(comparison)]
    header += intransigence_headings(measured)
    costs = [name for name in column_names(first) if name in COSTS]
    header += [heading(first, name) for name in costs]
    rows: list[list[TableCell]] = []
    for label in first.results:
        row = [TableCell(label)]
        row += [marked_cell(comparison, label, FINAL) for comparison in comparisons]
        row += [marked_cell(comparison, label, INTRANSIGENCE) for comparison in measured]
        row += [TableCell(cell_text(first, label, name)) for name in costs]
        rows.append(row)
    return Table(title_of(first), header=header, rows=rows, note=note_of_overview(comparisons, costs))


def metric_heading(comparison: Comparison) -> str:
    """Name a metric by its log key, with its unit if values are shown in percent."""
    if is_in_percent(comparison.unit):
        return f"{comparison.key}, %"
    return comparison.key


def intransigence_headings(measured: Sequence[Comparison]) -> list[str]:
    """Name the columns of intransigence. Several columns have the log keys beside which they stand.

    Args:
        measured: The comparisons with such a column.
    """
    if len(measured) <= 1:
        return [f"{heading(comparison, INTRANSIGENCE)}, %" for comparison in measured]
    return [f"{heading(comparison, INTRANSIGENCE)} ({comparison.key}), %" for comparison in measured]


def marked_cell(comparison: Comparison, label: str, name: str) -> TableCell:
    """Write a column's value of a group, mean ± deviation, a dash if the group has no such value.

    Args:
        comparison: The comparison by one metric.
        label: Label of the group.
        name: Name of the column.
    """
    marks = marks_of(comparison, name)
    text = cell_text(comparison, label, name)
    return TableCell(text, marks.get(label, ""))


def title_of(comparison: Comparison) -> str:
    """Name the overview and its case."""
    title = "Final values of all metrics"
    if comparison.case:
        title += f"; {comparison.case}"
    return title


def note_of_overview(comparisons: Sequence[Comparison], costs: Sequence[str]) -> str:
    """Describe the columns in sentences.

    Args:
        comparisons: The comparisons of the case, at least one.
        costs: The names of the columns of costs.
    """
    first = comparisons[0]
    note = seeds_text(first)
    if first.rounds:
        note += f" {first.rounds}"
    for comparison in comparisons:
        if comparison.direction is None:
            note += f" No value of {comparison.key} is marked as the best: {unknown_direction(comparison.key)}."
    measured = [comparison for comparison in comparisons if INTRANSIGENCE in column_names(comparison)]
    # The tables of a test split and of a validation split have the same sentence.
    sentences = dict.fromkeys(intransigence_text(comparison) for comparison in measured)
    note += "".join(sentences)
    if costs:
        note += f" What a round costs is that of its whole cohort, and × that of {first.baseline}."
    if len(first.results) > 1:
        note += (
            " The best mean is bold if the interval of its difference to the next best leaves out 0, else underlined."
        )
    return note
