"""Comparisons of groups of runs as tables for readers, and as csv."""

import io
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from fl_lightning.functional.summary import Interval
from fl_lightning.metrics.keys import (
    SCOPES,
    Unit,
    direction_of,
    is_in_percent,
    percent_factor,
    scope_of,
    unknown_direction,
)
from fl_lightning.reports.result_tables import Mark, Table, TableCell
from fl_lightning.reports.results import (
    AFTER,
    COSTS,
    COUNTS,
    HEADINGS,
    INTRANSIGENCE,
    SIMULATED,
    STATISTICS,
    TABLES_OF_TASKS,
    Comparison,
    Result,
    paired,
)
from fl_lightning.utils.text import write_cells


def comparison_table(comparison: Comparison) -> Table:
    """Lay a comparison out: a row for each group, the best mean of each statistic marked."""
    names = column_names(comparison)
    columns = {name: column_cells(comparison, name) for name in names}
    rows = []
    for label in comparison.results:
        row = [TableCell(label)]
        for name in names:
            row.append(columns[name][label])
            if has_difference(comparison, name):
                row.append(TableCell(difference_cell(comparison, label, name)))
        rows.append(row)
    header = ["method"]
    for name in names:
        header.append(heading(comparison, name))
        if has_difference(comparison, name):
            header.append(f"final − {comparison.baseline}'s")
    return Table(comparison_title(comparison), header=header, rows=rows, note=note_of(comparison))


def column_names(comparison: Comparison) -> list[str]:
    """Return the names of the columns that some group has, in their order."""
    names: dict[str, None] = {}
    for by_name in comparison.results.values():
        names |= dict.fromkeys(by_name)
    return sorted(names, key=column_order)


def has_difference(comparison: Comparison, name: str) -> bool:
    """Return True for the column beside which the differences to the baseline stand."""
    return name == "final" and len(comparison.results) > 1


def difference_cell(comparison: Comparison, label: str, name: str) -> str:
    """Write the difference of a group to the baseline."""
    result = comparison.results[label].get(name)
    difference = None if result is None else result.difference
    return difference_text(difference, writer_of(comparison, "final"))


def column_cells(comparison: Comparison, name: str) -> dict[str, TableCell]:
    """Write the cells of a column by the label of the group, with equal decimals and the marks of the best means.

    Args:
        comparison: The comparison by one metric.
        name: Name of the column.
    """
    ranks = ranks_of(comparison, name) if is_statistic(name) else Ranks()
    cells: dict[str, TableCell] = {}
    for label in comparison.results:
        mark: Mark = ""
        if label in ranks.best:
            mark = "bold"
        elif label in ranks.second:
            mark = "underlined"
        text = cell_text(comparison, label, name)
        cells[label] = TableCell(text, mark=mark, star=ranks.is_clear and label in ranks.best)
    return cells


def is_statistic(name: str) -> bool:
    """Return True for a column with values in the unit of the metric."""
    return name in STATISTICS or name == INTRANSIGENCE or name.startswith(AFTER)


def is_after_seconds(name: str) -> bool:
    """Return True for the column of values after some simulated seconds."""
    return name.startswith(AFTER) and name.endswith(SIMULATED)


def column_order(name: str) -> tuple[int, float]:
    """Return a key that sorts columns: statistics, intransigence, values after rounds and seconds, further columns."""
    if name in STATISTICS:
        return 0, STATISTICS.index(name)
    if name == INTRANSIGENCE:
        return 0, len(STATISTICS)
    if is_after_seconds(name):
        return 2, float(name.removeprefix(AFTER).removesuffix(SIMULATED))
    if name.startswith(AFTER):
        return 1, int(name.removeprefix(AFTER))
    return 3, [*COUNTS, *COSTS].index(name)


TO_TARGET = {"rounds": "rounds to", "time": "seconds to"}
"""Beginnings of the headings of what a run takes to reach the target, by column."""

SPEED_UPS = {"speed_up": "speed-up", "time_speed_up": "speed-up in time"}
"""Headings of the speed-ups, by column."""


def heading(comparison: Comparison, name: str) -> str:
    """Name a column for a reader."""
    if name in TO_TARGET:
        return f"{TO_TARGET[name]} {number(comparison.unit, comparison.target or 0.0)}"
    if name in SPEED_UPS:
        return SPEED_UPS[name]
    if name in COSTS:
        return COSTS[name].heading
    if name in HEADINGS:
        return HEADINGS[name]
    if name == INTRANSIGENCE:
        return INTRANSIGENCE
    if is_after_seconds(name):
        return name
    return f"{name} round" if name == f"{AFTER}1" else f"{name} rounds"


def cell_text(comparison: Comparison, label: str, name: str) -> str:
    """Write the cell of a group: mean ± deviation, and what a round costs beside the baseline's."""
    result = comparison.results[label].get(name)
    if result is None:
        return "–"
    if name not in COSTS:
        write: Writer = digits if name == "time" else decimal
        if is_statistic(name):
            write = writer_of(comparison, name)
        return spread(list(result.values.values()), write, counts=result.counts)
    base = comparison.results.get(comparison.baseline, {}).get(name)
    if base is None or not base.mean or label == comparison.baseline:
        return digits(result.mean)
    return f"{digits(result.mean)} (×{result.mean / base.mean:.2f})"


class Ranks(NamedTuple):
    """Names the best groups of a column.

    Args:
        best: Labels of the groups with the best mean.
        second: Labels of the groups with the next best mean. Several groups with the best mean leave none.
        is_clear: Whether the 95 % interval of the difference between the best and the second leaves out 0.
    """

    best: Sequence[str] = ()
    second: Sequence[str] = ()
    is_clear: bool = False


def ranks_of(comparison: Comparison, name: str) -> Ranks:
    """Find the best and the second best means of a column.

    A mean that is not finite is never the best one. None is the best if nobody tells whether lower or higher is better,
    or if there is only one.
    """
    direction = direction_of(name) if name == INTRANSIGENCE else comparison.direction
    if direction is None:
        return Ranks()
    column: dict[str, Result] = {}
    for label, stats in comparison.results.items():
        if name in stats and math.isfinite(stats[name].mean):
            column[label] = stats[name]
    means = sorted({result.mean for result in column.values()}, reverse=direction == "max")
    if len(column) < 2:
        return Ranks()
    best = [label for label, result in column.items() if result.mean == means[0]]
    if len(best) > 1:
        return Ranks(best)
    second = [label for label, result in column.items() if result.mean == means[1]]
    difference = paired(column[best[0]].values, column[second[0]].values)
    is_clear = difference is not None and (difference.low > 0 or difference.high < 0)
    return Ranks(best, second, is_clear)


MARKS_TEXT = (
    "The best mean is bold, with a star if the 95 % interval of its paired difference to the second best leaves out 0; "
    "the second best is underlined."
)
"""Sentence on the marks of a table."""


def comparison_title(comparison: Comparison) -> str:
    """Name metric, scope, unit and case."""
    unit = ", %" if is_in_percent(comparison.unit) else ""
    return "; ".join(filter(None, (scope_of(comparison.key) + unit, comparison.case)))


def note_of(comparison: Comparison) -> str:
    """Describe the columns in sentences."""
    columns = column_names(comparison)
    note = seeds_text(comparison)
    if comparison.rounds:
        note += f" {comparison.rounds}"
    if comparison.direction is None:
        note += f" No value is marked as the best: {unknown_direction(comparison.key)}."
    if "best" in columns:
        chosen = "lowest" if comparison.direction == "min" else "highest"
        note += f" The best over rounds is the {chosen} value of each run, which no one knows before its end."
    if INTRANSIGENCE in columns:
        note += intransigence_text(comparison)
    moments = [name.removeprefix(AFTER) for name in columns if is_after_seconds(name)]
    if moments:
        note += (
            f" After {', '.join(moments)}: the last value that a run had when so many simulated seconds had passed. A "
            f"dash stands for a run that had no value yet, or ended before."
        )
    if "rounds" in columns:
        note += " Rounds to the target: the mean over the seeds that reach it, and how many do."
    if "time" in columns:
        note += " Seconds to the target: simulated ones, the mean over the seeds that reach it, and how many do."
    if "speed_up" in columns:
        note += f" Speed-up: {comparison.baseline}'s rounds to the target with the same seed, divided by the method's."
    if "time_speed_up" in columns:
        note += (
            f" Speed-up in time: {comparison.baseline}'s simulated seconds to the target with the same seed, divided "
            f"by the method's."
        )
    if any(name in COSTS for name in columns):
        note += f" {costs_text(columns, baseline=comparison.baseline)}"
    if len(comparison.results) > 1:
        note += f" Differences to {comparison.baseline} are paired by seed, with Student's 95 % interval. {MARKS_TEXT}"
    return note


def costs_text(columns: Sequence[str], *, baseline: str) -> str:
    """Describe columns of costs.

    Args:
        columns: Names of the columns of the table.
        baseline: Name of the row to which costs are compared.
    """
    text = f"Costs of a round are those of its whole cohort; × is the ratio to {baseline}'s."
    if "memory" in columns:
        text += " Memory is the peak of the process up to then; the process makes one run after another."
    return text


def intransigence_text(comparison: Comparison) -> str:
    """Describe the column of intransigence in a sentence that follows others."""
    title = "Intransigence"
    tasks = "the tasks"
    if TABLES_OF_TASKS[comparison.key] == "clients":
        title = "Intransigence of the clients' own models"
        tasks = "the clients and the tasks of each"
    return (
        f" {title}: the mean over {tasks} of the accuracy of {comparison.reference} with the same seed, minus "
        f"that of the method, when a task is new. Lower is better."
    )


def seed_counts(comparison: Comparison) -> set[int]:
    """Return the numbers of seeds over which the values of a comparison are."""
    counts: set[int] = set()
    for by_name in comparison.results.values():
        counts |= {len(result.values) for result in by_name.values()}
    return counts


def seeds_text(comparison: Comparison) -> str:
    """Describe over how many seeds the values are."""
    counts = seed_counts(comparison)
    if max(counts, default=0) <= 1:
        return "One seed."
    seeds = " or ".join(str(count) for count in sorted(counts))
    return f"Mean ± sample standard deviation over {seeds} seeds."


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


def writer_of(comparison: Comparison, name: str) -> Writer:
    """Choose how the values of a column are written: all with the same number of decimals.

    Args:
        comparison: The comparison by one metric.
        name: Name of a column with values in the unit of the metric.
    """
    if is_in_percent(comparison.unit):
        return writer(comparison.unit)
    means: list[float] = []
    deviations: list[float] = []
    for by_name in comparison.results.values():
        if name in by_name:
            means.append(by_name[name].mean)
            deviations.append(by_name[name].std)
    return writer_with(decimals_for(means, deviations))


def writer_with(decimals: int | None) -> Writer:
    """Return a function that writes values with a number of decimals. None means four significant digits each.

    >>> write = writer_with(2)
    >>> write(-0.501), write(-0.004), write(0.5, sign=True)
    ('−0.50', '0.00', '+0.50')
    """
    if decimals is None:
        return digits

    def write(value: float, sign: bool = False) -> str:
        # With "z" a value that is rounded to 0 has no minus.
        form = f"{'+' if sign else ''}z.{decimals}f"
        return f"{value:{form}}".replace("-", "−", 1)

    return write


MOST_DECIMALS = 6
"""Largest number of decimals in a column. Smaller values are written with four significant digits each."""

LARGEST_FIXED = 1e6
"""Largest magnitude that is written without a power of ten."""


def decimals_for(means: Sequence[float], deviations: Sequence[float]) -> int | None:
    """Return the number of decimals with which the median deviation has two significant digits.

    Without deviations the largest mean has four. None means that a value is too large or too small for decimals.

    >>> decimals_for([2.947, 3.1], [0.09936, 0.2]), decimals_for([0.98681], [float("nan")]), decimals_for([3e8], [1.0])
    (2, 4, None)
    """
    known = [abs(mean) for mean in means if math.isfinite(mean)]
    largest = max(known, default=0.0)
    if largest >= LARGEST_FIXED:
        return None
    spreads = sorted(value for value in deviations if math.isfinite(value) and value > 0)
    if spreads:
        decimals = 1 - math.floor(math.log10(spreads[len(spreads) // 2]))
    elif largest > 0:
        decimals = 3 - math.floor(math.log10(largest))
    else:
        return 1
    decimals = max(decimals, 0)
    return decimals if decimals <= MOST_DECIMALS else None


def writer(unit: Unit) -> Writer:
    """Choose how values of a unit are written: shares in percent."""
    return lambda value, sign=False: number(unit, value, sign)


def number(unit: Unit, value: float, sign: bool = False) -> str:
    """Write a value: percent with one decimal, others with four digits.

    >>> number("share", 0.7531), number("share", -0.01, sign=True), number("percent", 75.31), number("", 1.23456)
    ('75.3', '−1.0', '75.3', '1.235')
    >>> number("share", math.nan), number("", -math.inf)
    ('nan', '−inf')
    """
    if is_in_percent(unit):
        return decimal(percent_factor(unit) * value, sign)
    return digits(value, sign)


def spread(values: Sequence[float], write: Writer, *, counts: bool = False) -> str:
    """Write mean ± sample standard deviation of the finite values, and what the others are.

    Args:
        values: The values by seed.
        write: Writes one value.
        counts: Whether the values are counts, which are infinite if a target is not reached.

    >>> spread([70.0, 72.0], decimal), spread([70.0], decimal), spread([], decimal)
    ('71.0 ± 1.4', '70.0', '–')
    >>> spread([12.0, math.inf], digits, counts=True), spread([math.inf], digits, counts=True)
    ('12 (1 of 2)', 'never')
    >>> spread([70.0, math.nan], decimal), spread([math.inf, math.inf], decimal)
    ('70.0 (1 of 2, else nan)', 'inf')
    """
    if not values:
        return "–"
    finite = [value for value in values if math.isfinite(value)]
    others = [value for value in values if not math.isfinite(value)]
    words = ", ".join(dict.fromkeys(write(value) for value in others))
    if counts:
        words = "never" if any(map(math.isinf, others)) else "nan"
    if not finite:
        return words
    result = Result({(str(index),): value for index, value in enumerate(finite)})
    text = write(result.mean)
    if len(finite) > 1:
        text += f" ± {write(result.std)}"
    if not others:
        return text
    if counts:
        return f"{text} ({len(finite)} of {len(values)})"
    return f"{text} ({len(finite)} of {len(values)}, else {words})"


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
        named = {name: f"{beginning} {comparison.target!r}" for name, beginning in TO_TARGET.items()}
        for label, by_name in comparison.results.items():
            for name, result in by_name.items():
                seeds = len(result.known) if result.counts else len(result.values)
                # A mean that is NaN is a value, unless no run reaches the target.
                mean = "" if result.counts and math.isnan(result.mean) else result.mean
                difference = result.difference or ("", "", "")
                row = [
                    comparison.case,
                    comparison.key,
                    SCOPES.get(comparison.key, ""),
                    label,
                    named.get(name, name),
                    seeds,
                    mean,
                    empty_if_nan(result.std),
                    comparison.baseline,
                    *(empty_if_nan(value) for value in difference),
                ]
                rows.append(row)
    out = io.StringIO()
    write_cells(out, rows)
    return out.getvalue()


def empty_if_nan(value: Any) -> Any:
    """Return a value, or an empty text for NaN, which stands for a value that is not defined."""
    return "" if isinstance(value, float) and math.isnan(value) else value
