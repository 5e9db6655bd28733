"""Results of groups of runs: final, mean of the last five and best values, rounds to a target, paired differences."""

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from fl_lightning.functional.summary import Interval, mean_std, paired_difference
from fl_lightning.reports.result_tables import Cell, Table
from fl_lightning.reports.saved import Group, SavedRun
from fl_lightning.runs.value_names import is_accuracy, is_lower_better
from fl_lightning.utils.text import write_cells

HEADINGS = {"final": "final", "last five": "mean of last five", "best": "best over rounds"}
STATISTICS = tuple(HEADINGS)
LAST = 5

SCOPES = {
    "global/acc": "accuracy of the global model on the test split",
    "val/acc": "accuracy of the global model on the server's validation split",
    "test/acc": "accuracy of the last round's global model on the test split",
    "test/acc_best": "accuracy on the test split of the global model that is best on the validation split",
    "local/alma": "mean over the clients of the accuracy of their own models on their own test splits (ALMA)",
    "global/forgetting": "forgetting F of the global model on the test split, the mean over classes of best − last "
    "accuracy",
    "val/forgetting": "forgetting F of the global model on the server's validation split, the mean over classes of "
    "best − last accuracy",
}
"""Metric and scope of what is compared unless others are asked for, by log key, in the order of the tables."""


class Result(NamedTuple):
    """One statistic of a metric for one group.

    Attributes:
        values: by seed.
        mean: over the seeds.
        std: sample standard deviation over the seeds; NaN for one.
        difference: paired over the seeds with the baseline's, and its 95 % interval; None without one.
    """

    values: dict[str, float]
    mean: float
    std: float
    difference: Interval | None


@dataclass(frozen=True)
class Comparison:
    """Results of one metric for groups of runs with the same data.

    Attributes:
        key: of the metric.
        case: the settings that all of its groups share and other comparisons do not, as text.
        results: of each group by its label, by statistic; empty where the group has no such metric.
        baseline: label of the group that the others are compared with.
        target: value of which the rounds are counted until it is reached; None: they are not.
        rounds: until then, of each group by its label, by seed; None: not reached.
    """

    key: str
    case: str
    results: Mapping[str, Mapping[str, Result]]
    baseline: str
    target: float | None
    rounds: Mapping[str, Mapping[str, int | None]]


# --- numbers --------------------------------------------------------------------------------------


SHARES = ("forgetting", "acc_in_local", "acc_out_local", "local/train")
"""Ends of keys whose values are shares, besides those of accuracies."""

ALIGNMENTS = ("local/weight_alignment", "global/weight_alignment")
"""Beginnings of keys whose values are shares of neurons; they end with the monitor's name."""

KINDS = ("/std", "/weighted", "/received")
"""Ends of keys that monitors log beside a value, in its unit."""


def in_percent(key: str) -> bool:
    """True for a key whose values are shares that are printed in percent.

    >>> in_percent("local/acc_in_local/received/std"), in_percent("local/drift/std")
    (True, False)
    >>> in_percent("global/weight_alignment/first")
    True
    """
    while key.endswith(KINDS):
        key = key.rpartition("/")[0]
    return is_accuracy(key) or key.endswith(SHARES) or key.startswith(ALIGNMENTS)


def known_metrics(groups: Sequence[Group]) -> list[str]:
    """List the keys of `SCOPES` that some run has."""
    known = {name for group in groups for run in group.runs for name in (*run.history.names, *run.test)}
    return [key for key in SCOPES if key in known]


def statistics_of(run: SavedRun, key: str) -> dict[str, float]:
    """Compute the statistics of a run's metric over the rounds that have it, none where no round has.

    `best` is the lowest value where lower is better. What `test` gave is a final value only.
    """
    if key in run.test:
        return {"final": run.test[key]}
    values = list(run.history.curve(key).values())
    if not values:
        return {}
    last = values[-LAST:]
    try:
        mean = math.fsum(last) / len(last)
    except (ValueError, OverflowError):  # infinite, or too large to be added
        mean = sum(last) / len(last)
    statistics = {"final": values[-1], "last five": mean}
    if key.endswith("forgetting"):  # 0 before anything was learnt
        return statistics
    return statistics | {"best": min(values) if is_lower_better(key) else max(values)}


def compare(
    groups: Sequence[Group], key: str, baseline: str, target: float | None = None, case: str = ""
) -> Comparison:
    """Compare the groups by one metric.

    Args:
        groups: of runs with the same data.
        key: of the metric.
        baseline: label of the group that the others are compared with.
        target: whose rounds are counted; None: the baseline's mean over the last five rounds, where a round is
            evaluated and higher is better.
        case: the settings that these groups share.
    """
    values: dict[str, dict[str, dict[str, float]]] = {group.label: {} for group in groups}
    for group in groups:
        for run in group.runs:
            for name, value in statistics_of(run, key).items():
                values[group.label].setdefault(name, {})[run.seed] = value
    results = {}
    for label, by_name in values.items():
        base = {} if label == baseline else values.get(baseline, {})
        results[label] = {name: result(by_seed, base.get(name, {})) for name, by_seed in by_name.items()}
    if target is None and "last five" in results.get(baseline, {}):
        target = results[baseline]["last five"].mean
    if target is None or is_lower_better(key) or not any("last five" in by_name for by_name in results.values()):
        return Comparison(key, case, results, baseline, None, {})
    rounds = {group.label: {run.seed: rounds_until(run, key, target) for run in group.runs} for group in groups}
    return Comparison(key, case, results, baseline, target, rounds)


def result(values: Mapping[str, float], baseline: Mapping[str, float]) -> Result:
    """Summarise the values of the seeds, and compare those that the baseline has, too."""
    mean, std = mean_std(torch.tensor(list(values.values()), dtype=torch.float64))
    shared = [seed for seed in values if seed in baseline]
    difference = paired_difference([values[seed] for seed in shared], [baseline[seed] for seed in shared])
    return Result(dict(values), float(mean), float(std), difference if shared else None)


def rounds_until(run: SavedRun, key: str, target: float) -> int | None:
    """Count the rounds of a run until its metric reaches the target, None where it does not."""
    return next((round_idx + 1 for round_idx, value in run.history.curve(key).items() if value >= target), None)


# --- tables ---------------------------------------------------------------------------------------


def table_of(comparison: Comparison) -> Table:
    """Lay a comparison out: a row for each group, the best mean of each column marked."""
    key, results = comparison.key, comparison.results
    columns = [name for name in STATISTICS if any(name in stats for stats in results.values())]
    choose = min if is_lower_better(key) else max
    best = {name: choose(stats[name].mean for stats in results.values() if name in stats) for name in columns}
    rows = []
    for label, stats in results.items():
        cells = (Cell(spread(key, stats[n]), stats[n].mean == best[n]) if n in stats else Cell("–") for n in columns)
        row = [Cell(label), *cells]
        if comparison.rounds:
            row.append(Cell(rounds_text(list(comparison.rounds[label].values()))))
        if len(results) > 1:
            row.append(Cell(difference_text(key, stats.get("final"))))
        rows.append(row)
    header = ["method", *(HEADINGS[name] if len(columns) > 1 else "final" for name in columns)]
    if comparison.target is not None:
        header.append(f"rounds to {number(key, comparison.target)}")
    if len(results) > 1:
        header.append(f"final − {comparison.baseline}'s")
    return Table(title_of(comparison), header, rows, note_of(comparison))


def title_of(comparison: Comparison) -> str:
    """Name metric, scope, unit and case."""
    key, scope = comparison.key, SCOPES.get(comparison.key)
    named = f"{scope[0].upper()}{scope[1:]} ({key})" if scope else key
    return named + ", %" * in_percent(key) + (f"; {comparison.case}" if comparison.case else "")


def note_of(comparison: Comparison) -> str:
    """Describe the columns in sentences."""
    counts = sorted({len(r.values) for by_name in comparison.results.values() for r in by_name.values()})
    seeds = " or ".join(map(str, counts))
    note = f"Mean ± sample standard deviation over {seeds} seeds." if counts[-1:] > [1] else "One seed."
    if any("best" in by_name for by_name in comparison.results.values()):
        chosen = "lowest" if is_lower_better(comparison.key) else "highest"
        note += f" The best over rounds is the {chosen} value of each run, which no one knows before its end."
    if comparison.target is not None:
        note += " Rounds to the target: the mean over the seeds that reach it, and how many do."
    if len(comparison.results) > 1:
        note += f" Differences to {comparison.baseline} are paired by seed, with Student's 95 % interval."
    return note


def number(key: str, value: float, sign: bool = False) -> str:
    """Write a value: percent with one decimal, others with four digits.

    >>> number("global/acc", 0.7531), number("global/acc", -0.01, sign=True), number("train/loss", 1.23456)
    ('75.3', '−1.0', '1.235')
    """
    plus = "+" if sign else ""
    text = f"{100 * value:{plus}.1f}" if in_percent(key) else f"{value:{plus}.4g}"
    return text.replace("-", "−", 1) if text.startswith("-") else text


def spread(key: str, summary: Result) -> str:
    """Write mean ± standard deviation, or the mean alone for one seed."""
    mean = number(key, summary.mean)
    return mean if math.isnan(summary.std) else f"{mean} ± {number(key, summary.std)}"


def rounds_text(rounds: Sequence[int | None]) -> str:
    """Write the mean of the rounds, and how many seeds reach the target where not all do.

    >>> rounds_text([4, 5]), rounds_text([4, None]), rounds_text([None])
    ('4.5', '4 (1 of 2)', '–')
    """
    reached = [r for r in rounds if r is not None]
    if not reached:
        return "–"
    mean = f"{sum(reached) / len(reached):.1f}".removesuffix(".0")
    return mean if len(reached) == len(rounds) else f"{mean} ({len(reached)} of {len(rounds)})"


def difference_text(key: str, summary: Result | None) -> str:
    """Write a paired difference with its interval."""
    if summary is None or summary.difference is None:
        return "–"
    mean, low, high = (number(key, value, sign=True) for value in summary.difference)
    return mean if math.isnan(summary.difference.low) else f"{mean} [{low}, {high}]"


def as_csv(comparisons: Sequence[Comparison]) -> str:
    """Write a line for each case, metric, group and statistic, in which fractions stay fractions."""
    names = ("case", "metric", "scope", "method", "statistic", "seeds", "mean", "std", "baseline")
    rows: list[Sequence[Any]] = [(*names, "difference", "difference_low", "difference_high")]
    for comparison in comparisons:
        for label, by_name in comparison.results.items():
            results = dict(by_name)
            if comparison.target is not None:
                reached = {seed: float(r) for seed, r in comparison.rounds[label].items() if r is not None}
                results[f"rounds to {comparison.target!r}"] = result(reached, {})
            for name, summary in results.items():
                cells: list[Any] = [comparison.case, comparison.key, SCOPES.get(comparison.key, ""), label, name]
                cells += [len(summary.values), summary.mean, summary.std, comparison.baseline]
                cells += summary.difference or ("", "", "")
                rows.append(["" if isinstance(cell, float) and math.isnan(cell) else cell for cell in cells])
    out = io.StringIO()
    write_cells(out, rows)
    return out.getvalue()
