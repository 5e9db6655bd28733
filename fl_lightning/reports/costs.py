"""The table of what a round of each method costs: bytes, local steps, seconds and memory, in the units of people."""

from collections.abc import Sequence

from fl_lightning.reports.comparison_tables import digits
from fl_lightning.reports.result_tables import Table, TableCell
from fl_lightning.reports.results import MEGABYTE, bytes_by_round, mean_of, runs_of
from fl_lightning.reports.saved import Group, SavedRun

OF_A_ROUND: dict[str, tuple[str, float]] = {
    "comm/bytes_down": ("to the clients, MB a round", MEGABYTE),
    "comm/bytes_up": ("to the server, MB a round", MEGABYTE),
    "cost/steps": ("local steps a round", 1.0),
    "cost/seconds": ("ms a round", 1e-3),
}
"""Headings and units of the costs whose mean over the rounds counts, by log key."""

SETS = "comm/bytes_sets"
MEMORY = "cost/memory"


def costs_of(groups: Sequence[Group]) -> list[Table]:
    """Return the table of costs, mean over rounds and seeds. Without a value there is none.

    A method that costs the same in all cases has one row.
    """
    by_label: dict[str, dict[str, float]] = {}
    by_method: dict[str, list[dict[str, float]]] = {}
    for group in groups:
        costs = costs_of_group(group)
        if costs:
            by_label[group.label] = costs
            by_method.setdefault(group.row, []).append(costs)
    if not by_label:
        return []
    if all(len({tuple(costs.items()) for costs in alike}) == 1 for alike in by_method.values()):
        by_label = {method: alike[0] for method, alike in by_method.items()}
    columns: dict[str, None] = {}
    for costs in by_label.values():
        columns |= dict.fromkeys(costs)
    rows = []
    for label, costs in by_label.items():
        texts = [digits(costs[name]) if name in costs else "–" for name in columns]
        rows.append([TableCell(label), *map(TableCell, texts)])
    note = "Mean over the rounds and seeds. A round costs what its whole cohort does."
    if any(name.endswith("MB once") for name in columns):
        note += " Sets are the samples that every client receives once."
    if any("MB a round" in name for name in columns):
        note += " Bytes are those of the values in the messages, as they are sent."
    if any(run.is_unprotected("comm/bytes_down") for run in runs_of(groups)):
        note += " Of private runs they are unprotected: they tell how many clients took part."
    if "memory, MB" in columns:
        note += " Memory is the most that the process has had."
    return [Table("", header=["method", *columns], rows=rows, note=note)]


def costs_of_group(group: Group) -> dict[str, float]:
    """Return what a round of a group costs, mean over its runs, by the heading of the column."""
    costs: dict[str, float] = {}
    for key, (heading, unit) in OF_A_ROUND.items():
        means = [mean_of(list(curve.values())) for curve in curves_of_key(group.runs, key)]
        if means:
            costs[heading] = mean_of(means) / unit
    sets = [sum(curve.values()) for curve in curves_of_key(group.runs, SETS)]
    if sets:
        costs["sets, MB once"] = mean_of(sets) / MEGABYTE
    totals = [sum(bytes_by_round(run).values()) for run in group.runs if run.history.curve("comm/bytes_down")]
    if totals:
        costs["in all, MB"] = mean_of(totals) / MEGABYTE
    peaks = [max(curve.values()) for curve in curves_of_key(group.runs, MEMORY)]
    if peaks:
        costs["memory, MB"] = mean_of(peaks) / MEGABYTE
    return costs


def curves_of_key(runs: Sequence[SavedRun], key: str) -> list[dict[int, float]]:
    """Return the curves of a key of the runs that have it."""
    curves = [run.history.curve(key) for run in runs]
    return [curve for curve in curves if curve]
