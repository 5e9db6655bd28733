"""Comparisons of groups of runs as tables for readers, and as csv."""

import io
import math
from collections.abc import Callable, Sequence
from typing import Any

from fl_lightning.functional.summary import Interval
from fl_lightning.reports.result_tables import Mark, Table, TableCell
from fl_lightning.reports.results import (
    AFTER,
    COSTS,
    HEADINGS,
    SCOPES,
    STATISTICS,
    Comparison,
    Result,
    in_percent,
    paired,
    scope_of,
)
from fl_lightning.runs.value_names import is_lower_better
from fl_lightning.utils.text import write_cells


def comparison_table(comparison: Comparison) -> Table:
    """Lay a comparison out: a row for each group, the best mean of each statistic marked."""
    results = comparison.results
    names = list(dict.fromkeys(name for stats in results.values() for name in stats))
    names.sort(key=column_order)
    marks = {name: marks_of(comparison, name) for name in names if is_statistic(name)}
    rows = []
    for label, stats in results.items():
        row = [TableCell(label)]
        for name in names:
            row.append(TableCell(cell_text(comparison, label, name), marks.get(name, {}).get(label, "")))
            if name == "final" and len(results) > 1:
                row.append(TableCell(difference_text(stats.get(name, Result({})).difference, writer(comparison.key))))
        rows.append(row)
    header = ["method"]
    for name in names:
        header.append(heading(comparison, name))
        header += [f"final − {comparison.baseline}'s"] * (name == "final" and len(results) > 1)
    return Table(comparison_title(comparison), header, rows, note_of(comparison))


def is_statistic(name: str) -> bool:
    """Return True for a column with values of the metric."""
    return name in STATISTICS or name.startswith(AFTER)


def column_order(name: str) -> tuple[int, int]:
    """Key that sorts columns: statistics, values after some rounds, further columns."""
    if name.startswith(AFTER):
        return 1, int(name.removeprefix(AFTER))
    return (0, STATISTICS.index(name)) if name in STATISTICS else (2, ["rounds", "speed_up", *COSTS].index(name))


def heading(comparison: Comparison, name: str) -> str:
    """Name a column for a reader."""
    if name == "rounds":
        return f"rounds to {number(comparison.key, comparison.target or 0.0)}"
    if name in COSTS:
        return COSTS[name].heading
    return {"speed_up": "speed-up", **HEADINGS}.get(name, f"{name} round{'s' * (name != 'after 1')}")


def cell_text(comparison: Comparison, label: str, name: str) -> str:
    """Write the cell of a group: mean ± deviation, and what a round costs beside the baseline's."""
    result = comparison.results[label].get(name)
    if result is None:
        return "–"
    values = list(result.values.values())
    if name not in COSTS:
        return spread(values, writer(comparison.key) if is_statistic(name) else decimal)
    base = comparison.results.get(comparison.baseline, {}).get(name)
    beside = f" (×{result.mean / base.mean:.2f})" if base and base.mean and label != comparison.baseline else ""
    return digits(result.mean) + beside


def marks_of(comparison: Comparison, name: str) -> dict[str, Mark]:
    """Mark the best means of a column: bold where the difference to the next best is clear, else underlined."""
    column = {label: stats[name] for label, stats in comparison.results.items() if name in stats}
    column = {label: result for label, result in column.items() if not math.isnan(result.mean)}
    ranked = sorted(column, key=lambda label: column[label].mean, reverse=not is_lower_better(comparison.key))
    if len(ranked) < 2:
        return {}
    best = column[ranked[0]]
    second = column[ranked[1]]
    difference = paired(best.values, second.values)
    is_clear = difference is not None and (difference.low > 0 or difference.high < 0)
    return {label: "bold" if is_clear else "underlined" for label in ranked if column[label].mean == best.mean}


def comparison_title(comparison: Comparison) -> str:
    """Name metric, scope, unit and case."""
    unit = ", %" if in_percent(comparison.key) else ""
    return "; ".join(filter(None, (scope_of(comparison.key) + unit, comparison.case)))


def note_of(comparison: Comparison) -> str:
    """Describe the columns in sentences."""
    columns = {name: result for by_name in comparison.results.values() for name, result in by_name.items()}
    counts = sorted({len(r.values) for by_name in comparison.results.values() for r in by_name.values()})
    seeds = " or ".join(map(str, counts))
    note = f"Mean ± sample standard deviation over {seeds} seeds." if counts[-1:] > [1] else "One seed."
    if "best" in columns:
        chosen = "lowest" if is_lower_better(comparison.key) else "highest"
        note += f" The best over rounds is the {chosen} value of each run, which no one knows before its end."
    if comparison.target is not None:
        note += " Rounds to the target: the mean over the seeds that reach it, and how many do."
    if "speed_up" in columns:
        note += f" Speed-up: {comparison.baseline}'s rounds to the target with the same seed, divided by the method's."
    if any(name in COSTS for name in columns):
        note += f" What a round costs is that of its whole cohort, and × that of {comparison.baseline}."
    if "memory" in columns:
        note += " Memory is the most that the process has had, which makes one run after the other."
    if len(comparison.results) > 1:
        note += (
            f" Differences to {comparison.baseline} are paired by seed, with Student's 95 % interval. The best mean is "
            f"bold where the interval of its difference to the next best leaves out 0, else underlined."
        )
    return note


Writer = Callable[..., str]
"""Writes a value, with its sign where `sign` is True."""


def decimal(value: float, sign: bool = False) -> str:
    """Write a value with one decimal.

    >>> decimal(-0.54), decimal(2, sign=True)
    ('−0.5', '+2.0')
    """
    return f"{value:{'+' if sign else ''}.1f}".replace("-", "−", 1)


def digits(value: float, sign: bool = False) -> str:
    """Write a value with four significant digits.

    >>> digits(1.23456), digits(-12, sign=True)
    ('1.235', '−12')
    """
    text = f"{value:{'+' if sign else ''}.4g}"
    return text.replace("-", "−", 1) if text.startswith("-") else text


def writer(key: str) -> Writer:
    """Choose how values of a key are written: shares in percent."""
    return lambda value, sign=False: number(key, value, sign)


def number(key: str, value: float, sign: bool = False) -> str:
    """Write a value: percent with one decimal, others with four digits.

    >>> number("global/acc", 0.7531), number("global/acc", -0.01, sign=True), number("train/loss", 1.23456)
    ('75.3', '−1.0', '1.235')
    """
    return decimal(100 * value, sign) if in_percent(key) else digits(value, sign)


def spread(values: Sequence[float], write: Writer) -> str:
    """Write mean ± sample standard deviation, and how many seeds reach a target where not all do.

    >>> spread([70.0, 72.0], decimal), spread([70.0], decimal), spread([], decimal), spread([12.0, math.inf], digits)
    ('71.0 ± 1.4', '70.0', '–', '12 (1 of 2)')
    """
    if not values:
        return "–"
    result = Result(dict(zip(map(str, range(len(values))), values, strict=True)))
    count = len(result.known)
    if not count:
        return "never" if any(map(math.isinf, values)) else "nan"
    text = write(result.mean) + (f" ± {write(result.std)}" if count > 1 else "")
    return text if count == len(values) else f"{text} ({count} of {len(values)})"


def difference_text(difference: Interval | None, write: Writer) -> str:
    """Write a difference with its interval.

    >>> difference_text(Interval(-0.54, -1.7, 0.62), decimal)
    '−0.5 [−1.7, +0.6]'
    >>> difference_text(Interval(2.0, math.nan, math.nan), decimal)
    '+2.0'
    """
    if difference is None or not math.isfinite(difference.mean):
        return "–"
    mean, low, high = (write(value, sign=True) for value in difference)
    return mean if math.isnan(difference.low) else f"{mean} [{low}, {high}]"


def as_csv(comparisons: Sequence[Comparison]) -> str:
    """Write a line for each case, metric, group and statistic, in which fractions stay fractions."""
    names = ("case", "metric", "scope", "method", "statistic", "seeds", "mean", "std", "baseline")
    rows: list[Sequence[Any]] = [(*names, "difference", "difference_low", "difference_high")]
    for comparison in comparisons:
        named = {"rounds": f"rounds to {comparison.target!r}"}
        for label, by_name in comparison.results.items():
            for name, result in by_name.items():
                cells: list[Any] = [comparison.case, comparison.key, SCOPES.get(comparison.key, ""), label]
                cells += [named.get(name, name), len(result.known), result.mean, result.std, comparison.baseline]
                cells += result.difference or ("", "", "")
                rows.append(["" if isinstance(cell, float) and math.isnan(cell) else cell for cell in cells])
    out = io.StringIO()
    write_cells(out, rows)
    return out.getvalue()
