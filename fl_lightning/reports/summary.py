"""The table that answers a comparison: a row for each method, the final value of each metric, and each setting."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

from fl_lightning.metrics.keys import SCOPES, is_in_percent, scope_of, unknown_direction
from fl_lightning.reports.comparison_tables import (
    MARKS_TEXT,
    column_cells,
    column_names,
    costs_text,
    heading,
    intransigence_text,
    seed_counts,
    seeds_text,
)
from fl_lightning.reports.result_tables import Span, Table, TableCell
from fl_lightning.reports.results import COSTS, INTRANSIGENCE, Comparison

NO_VALUE = TableCell("–")
"""Cell of a row that has no value in a column."""

FINAL = "final"
"""Name of the column of final values."""

MOST_COLUMNS = 6
"""Largest number of columns of values in a table. The settings of a wider one stand below each other."""

WORDS = {
    "acc": "accuracy",
    "acc_best": "accuracy of the best round",
    "alma": "ALMA",
    "tuned/alma": "ALMA, tuned",
    "forgetting": "forgetting",
    "loss": "loss",
    "acc_tasks": "accuracy over tasks",
    "forgetting_tasks": "forgetting of tasks",
    "backward_transfer": "backward transfer",
    "forward_transfer": "forward transfer",
    "learning_accuracy": "learning accuracy",
}
"""Headings of metrics by the log key without its beginning. Any other metric has its whole log key."""

BEGINNINGS = {"global": "test split", "val": "validation", "test": "test", "local": "clients"}
"""Words for the beginning of a log key, where two metrics of a table would have the same heading."""


class Block(NamedTuple):
    """Holds the columns of one setting: the metrics, and intransigence where it is measured.

    Attributes:
        case: The setting, empty if there is only one.
        columns: Cells of each column, by heading and by row.
    """

    case: str
    columns: dict[str, dict[str, TableCell]]

    def cells(self, row: str, headings: Iterable[str]) -> list[TableCell]:
        """Return the cells of a row below some headings, a dash where the row has none."""
        return [self.columns.get(heading, {}).get(row, NO_VALUE) for heading in headings]


def summary_table(cases: Mapping[str, Sequence[Comparison]], *, methods: Iterable[str] = ()) -> Table:
    """Lay the final values of all metrics and settings out in one table, the best means of each column marked.

    Settings are groups of columns. If there are more than `MOST_COLUMNS` columns, the settings stand below each other.

    Args:
        cases: The comparisons of each setting, one for each metric, at least one in all. A setting is a text, and empty
            if there is only one.
        methods: Names of the rows, in their order. Empty: they are those of the comparisons.
    """
    every = list(chain.from_iterable(cases.values()))
    compared = chain.from_iterable(comparison.results for comparison in every)
    rows = list(dict.fromkeys([*methods, *compared]))
    blocks = [block_of(case, comparisons) for case, comparisons in cases.items() if comparisons]
    num_columns = sum(len(block.columns) for block in blocks)
    if len(blocks) == 1 or num_columns <= MOST_COLUMNS:
        table = beside_each_other(blocks, rows)
    else:
        table = below_each_other(blocks, rows)
    title = title_of(every)
    if len(blocks) == 1 and blocks[0].case:
        title = f"{title}; {blocks[0].case}"
    return replace(table, title=title, note=note_of_summary(every), label="results")


def beside_each_other(blocks: Sequence[Block], rows: Sequence[str]) -> Table:
    """Lay the settings out as groups of columns, with a heading above each if there are several."""
    header = ["method"]
    for block in blocks:
        header += block.columns
    lines: list[list[TableCell]] = []
    for row in rows:
        line = [TableCell(row)]
        for block in blocks:
            line += block.cells(row, block.columns)
        lines.append(line)
    spans = [Span(block.case, len(block.columns)) for block in blocks] if len(blocks) > 1 else []
    return Table("", header=header, rows=lines, spans=spans)


def below_each_other(blocks: Sequence[Block], rows: Sequence[str]) -> Table:
    """Lay the settings out below each other, with a heading above the rows of each."""
    headings = list(dict.fromkeys(chain.from_iterable(block.columns for block in blocks)))
    lines: list[list[TableCell]] = []
    for block in blocks:
        lines.append([TableCell(block.case)])
        lines += [[TableCell(row), *block.cells(row, headings)] for row in rows]
    return Table("", header=["method", *headings], rows=lines)


def block_of(case: str, comparisons: Sequence[Comparison]) -> Block:
    """Write the columns of one setting."""
    columns = [column_cells(comparison, FINAL) for comparison in comparisons]
    columns += [column_cells(comparison, INTRANSIGENCE) for comparison in measured_in(comparisons)]
    return Block(case, columns=dict(zip(column_headings(comparisons), columns, strict=True)))


def title_of(comparisons: Sequence[Comparison]) -> str:
    """Name the values and over how many seeds they are."""
    counts: set[int] = set()
    for comparison in comparisons:
        counts |= seed_counts(comparison)
    if max(counts, default=0) <= 1:
        return "Final values"
    seeds = " or ".join(str(count) for count in sorted(counts))
    return f"Final values, mean ± sample standard deviation over {seeds} seeds"


def measured_in(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """Return the comparisons with a column of intransigence."""
    return [comparison for comparison in comparisons if INTRANSIGENCE in column_names(comparison)]


def column_headings(comparisons: Sequence[Comparison]) -> list[str]:
    """Name the columns of one setting in words, with the split where two would have the same name."""
    words = [words_of(comparison.key) for comparison in comparisons]
    headings = []
    for comparison, name in zip(comparisons, words, strict=True):
        beginning, _, _ = comparison.key.partition("/")
        split = f" ({BEGINNINGS.get(beginning, beginning)})" if words.count(name) > 1 else ""
        unit = ", %" if is_in_percent(comparison.unit) else ""
        headings.append(f"{name}{split}{unit}")
    measured = measured_in(comparisons)
    for comparison in measured:
        name = heading(comparison, INTRANSIGENCE)
        headings.append(f"{name}, %" if len(measured) == 1 else f"{name} ({comparison.key}), %")
    return headings


def words_of(key: str) -> str:
    """Name a metric in few words, and one that is not the package's by its log key.

    >>> words_of("global/acc"), words_of("local/tuned/alma"), words_of("val/MeanSquaredError")
    ('accuracy', 'ALMA, tuned', 'val/MeanSquaredError')
    """
    beginning, _, name = key.partition("/")
    return WORDS.get(name, key) if beginning in BEGINNINGS else key


def note_of_summary(comparisons: Sequence[Comparison]) -> str:
    """Describe the columns in sentences, each once.

    Args:
        comparisons: The comparisons of all settings.
    """
    keys = dict.fromkeys(comparison.key for comparison in comparisons)
    sentences = [f"{scope_of(key)}." for key in keys if key in SCOPES]
    sentences += [comparison.rounds for comparison in comparisons]
    if all(seeds_text(comparison) == "One seed." for comparison in comparisons):
        sentences.append("One seed.")
    for comparison in comparisons:
        if comparison.direction is None:
            sentences.append(
                f"No value of {comparison.key} is marked as the best: {unknown_direction(comparison.key)}."
            )
    # The tables of a test split and of a validation split have the same sentence.
    sentences += [intransigence_text(comparison).strip() for comparison in measured_in(comparisons)]
    if any(len(comparison.results) > 1 for comparison in comparisons):
        sentences.append(MARKS_TEXT)
    return " ".join(dict.fromkeys(filter(None, sentences)))


def costs_table(cases: Mapping[str, Sequence[Comparison]]) -> Table | None:
    """Lay the columns of costs out that were asked for, the settings below each other. None without such columns.

    Args:
        cases: The comparisons of each setting.
    """
    first = {case: comparisons[0] for case, comparisons in cases.items() if comparisons}
    names = [name for name in COSTS if any(name in column_names(comparison) for comparison in first.values())]
    if not names:
        return None
    lines: list[list[TableCell]] = []
    for case, comparison in first.items():
        if len(first) > 1:
            lines.append([TableCell(case)])
        columns = [column_cells(comparison, name) for name in names]
        for row in comparison.results:
            lines.append([TableCell(row), *(column.get(row, NO_VALUE) for column in columns)])
    baseline = next(iter(first.values())).baseline
    return Table(
        title="Costs",
        header=["method", *(COSTS[name].heading for name in names)],
        rows=lines,
        note=costs_text(names, baseline=baseline),
    )
