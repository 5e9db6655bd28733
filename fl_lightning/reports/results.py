"""Results of groups of runs: final, mean of the last five and best values, rounds to a target, paired differences."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from fl_lightning.functional.summary import Interval, mean_std, paired_difference, rounds_to_target, speed_up
from fl_lightning.metrics.history import BY_CLASS
from fl_lightning.metrics.keys import (
    ACC_TASKS,
    SCOPES,
    Direction,
    Unit,
    best_of,
    describe,
    is_of_task,
    tuned_key,
    unit_of,
)
from fl_lightning.reports.saved import Group, SavedRun, Seeds
from fl_lightning.reports.tasks import intransigence_of
from fl_lightning.runs.tasks import Model

HEADINGS = {"final": "final", "last five": "mean of last five", "best": "best over rounds"}
STATISTICS = tuple(HEADINGS)
LAST_ROUNDS = 5
MOST_EVALUATED = 4
"""Largest number of a user's values that are compared if no metric of the package is logged."""

AFTER = "after "
"""Beginning of the name of a statistic: the value after some rounds, or after some simulated seconds."""

SIMULATED = " s"
"""End of the name of a statistic: the value after some simulated seconds."""

INTRANSIGENCE = "intransigence"
"""Name of a column: what a method lacks on new tasks against a reference. Lower is better."""

TABLES_OF_TASKS: Mapping[str, Model] = {
    f"global/{ACC_TASKS}": "global",
    f"val/{ACC_TASKS}": "global",
    f"local/{ACC_TASKS}": "clients",
}
"""Whose table of tasks it is, by the log key of the average accuracy over tasks, beside which intransigence stands."""

Column = Literal["rounds", "speed_up", "time", "time_speed_up", "bytes", "steps", "seconds", "memory"]
"""Further columns: rounds and simulated seconds to a target, the speed-ups that they are, and what a round costs."""


class Cost(NamedTuple):
    """Names what a round costs: the heading of its column, the log keys that are added up, and its unit."""

    heading: str
    keys: tuple[str, ...]
    unit: float = 1.0


BYTES = ("comm/bytes_down", "comm/bytes_up", "comm/bytes_sets")
"""Log keys of all bytes that are moved. The sets that every client receives once count in the round that logs them."""

MEGABYTE = 1e6

COSTS: dict[str, Cost] = {
    "bytes": Cost("MB a round", BYTES, MEGABYTE),
    "steps": Cost("local steps a round", ("cost/steps",)),
    "seconds": Cost("seconds a round", ("cost/seconds",)),
    "memory": Cost("memory, MB", ("cost/memory",), MEGABYTE),
}
MEASURED = frozenset({"steps", "seconds", "memory"})
"""Those that a run knows with a `CostMonitor` only."""


@dataclass(frozen=True)
class Result:
    """One statistic of a metric for one group.

    Attributes:
        values: The values by the seeds of the run.
        difference: Paired over the seeds with the baseline's, with its 95 % interval. None without one.
        counts: Whether the values are rounds to a target or speed-ups, which are infinite if it was not reached.
    """

    values: Mapping[Seeds, float]
    difference: Interval | None = None
    counts: bool = False

    @property
    def known(self) -> list[float]:
        """The finite values."""
        return [value for value in self.values.values() if math.isfinite(value)]

    @property
    def mean(self) -> float:
        """Mean over the seeds, NaN without any.

        A count is the mean over the seeds that reach the target. Any other mean is not finite if one value is not.
        """
        if not self.counts and len(self.known) < len(self.values):
            return sum(self.values.values()) / len(self.values)
        return float(mean_std(torch.tensor(self.known, dtype=torch.float64)).mean)

    @property
    def std(self) -> float:
        """Sample standard deviation over these seeds, NaN for fewer than two or if the mean is not finite."""
        if not self.counts and len(self.known) < len(self.values):
            return math.nan
        return float(mean_std(torch.tensor(self.known, dtype=torch.float64)).std)


@dataclass(frozen=True)
class Comparison:
    """Results of one metric for groups of runs with the same data.

    Attributes:
        key: Log key of the metric.
        case: The settings that all of its groups share and other comparisons do not, as text.
        results: By label of the group, the results by the name of the column. Empty if the group has no such metric.
        baseline: Label of the group that the others are compared with.
        target: Value of which the rounds are counted until it is reached. None: they are not counted.
        direction: Whether values are better when lower or higher, or None if nobody tells.
        unit: Unit of the values.
        rounds: A sentence with the rounds of the runs, if these have different numbers or stopped early. Else empty.
        reference: Label of the group against which intransigence is measured. Empty: it is not.
    """

    key: str
    case: str
    results: Mapping[str, Mapping[str, Result]]
    baseline: str
    target: float | None
    direction: Direction | None = None
    unit: Unit = ""
    rounds: str = ""
    reference: str = ""


# --- numbers --------------------------------------------------------------------------------------


def known_metrics(groups: Sequence[Group], asked: Sequence[str] = (), *, with_tasks: bool = False) -> list[str]:
    """List the keys of the metrics that are compared, in the order of their tables.

    They are the keys that were asked for, else those of `SCOPES`, which some run has, under a private name too. Without
    any of these they are the values of evaluations of which somebody tells whether lower or higher is better, such as
    the error of a regression. Beside what clients deploy stands the value after fine-tuning, if some run has it.

    Args:
        groups: Groups of runs.
        asked: Log keys that were asked for. Empty, or keys that no run has, mean those of `SCOPES`.
        with_tasks: Whether the average accuracy over tasks is compared, though others were asked for.
    """
    logged = set(keys_in(runs_of(groups)))
    keys = [key for key in asked if key in logged] or [key for key in SCOPES if key in logged]
    if not keys:
        keys = evaluated_keys(groups)
    if with_tasks and not any(map(has_intransigence, keys)):
        keys += [key for key in SCOPES if key in logged and has_intransigence(key)]
    compared: dict[str, None] = {}
    for key in keys:
        compared[key] = None
        tuned = tuned_key(key)
        if tuned in logged:
            compared[tuned] = None
    return list(compared)


def evaluated_keys(groups: Sequence[Group]) -> list[str]:
    """List the keys of evaluations of which somebody tells whether lower or higher is better, the first ones.

    Args:
        groups: Groups of runs.
    """
    runs = runs_of(groups)
    keys = []
    for key in keys_in(runs):
        is_evaluated = describe(key).split in ("test", "val", "clients")
        is_single = BY_CLASS not in key and not is_of_task(key)
        if is_evaluated and is_single and direction_in(runs, key) is not None:
            keys.append(key)
    return keys[:MOST_EVALUATED]


def runs_of(groups: Sequence[Group]) -> list[SavedRun]:
    """Return the runs of all groups."""
    runs: list[SavedRun] = []
    for group in groups:
        runs += group.runs
    return runs


def keys_in(runs: Iterable[SavedRun]) -> list[str]:
    """List the log keys that one of the runs has, without the mark of unprotected values, each once."""
    keys: dict[str, None] = {}
    for run in runs:
        keys |= dict.fromkeys(run.keys)
    return list(keys)


def direction_in(runs: Iterable[SavedRun], key: str) -> Direction | None:
    """Return the direction of a key in some runs, or None if nobody tells it or the runs contradict each other."""
    directions = {run.direction(key) for run in runs} - {None}
    return directions.pop() if len(directions) == 1 else None


def unit_in(runs: Iterable[SavedRun], key: str) -> Unit:
    """Return the unit of a key in some runs, which are shown in one."""
    values: list[float] = []
    for run in runs:
        values += run.history.curve(key).values()
        if key in run.test:
            values.append(run.test[key])
    return unit_of(key, values)


def statistics_of(run: SavedRun, key: str, direction: Direction | None = None) -> dict[str, float]:
    """Compute the statistics of a run's metric over the rounds that have it, none where no round has.

    A value that is not finite is a value: it may be `final`, and makes `last five` NaN or infinite. `best` is the best
    finite value. It is left out if nobody tells whether lower or higher is better. `last five` needs five values. What
    `test` gave is a final value only.

    Args:
        run: The run.
        key: Log key of the metric.
        direction: Whether lower or higher is better. None asks the run.
    """
    if key in run.test:
        return {"final": run.test[key]}
    values = list(run.history.curve(key).values())
    if not values:
        return {}
    statistics = {"final": values[-1]}
    if len(values) >= LAST_ROUNDS:
        statistics["last five"] = mean_of_last(values)
    direction = direction or run.direction(key)
    if direction is None or not describe(key).has_best:
        return statistics
    return statistics | {"best": best_of(values, direction)}


def after_seconds(seconds: float) -> str:
    """Return the name of a statistic: the value after some simulated seconds.

    >>> after_seconds(600.0), after_seconds(0.25)
    ('after 600 s', 'after 0.25 s')
    """
    return f"{AFTER}{seconds:.12g}{SIMULATED}"


def value_after_seconds(run: SavedRun, key: str, seconds: float) -> float | None:
    """Return the last value that a run had when some simulated seconds had passed.

    Args:
        run: The run.
        key: Log key of the metric.
        seconds: Simulated seconds since the start of the run, ≥ 0.

    Returns:
        The value of the last evaluated round that had ended by then. None without such a round, and for a run that
        ended before and whose next round might have ended in time.
    """
    if run.seconds is None or seconds > run.seconds:
        return None
    found: float | None = None
    for end, value in run.timed_curve(key).items():
        if end <= seconds:
            found = value
    return found


def mean_of_last(values: Sequence[float], count: int = LAST_ROUNDS) -> float:
    """Average the last values, or all if there are fewer."""
    return mean_of(values[-count:])


def mean_of(values: Sequence[float]) -> float:
    """Average values, of which there is one at least. The mean is not finite if one of them is not."""
    try:
        return math.fsum(values) / len(values)
    except (ValueError, OverflowError):  # infinite, or too large to be added
        return sum(values) / len(values)


Values = dict[str, dict[str, dict[Seeds, float]]]
"""Values by the label of the group, the name of the column and the seeds of the run."""


def compare(
    groups: Sequence[Group],
    key: str,
    baseline: str,
    *,
    target: float | None = None,
    case: str = "",
    at: Sequence[int] = (),
    at_seconds: Sequence[float] = (),
    columns: Sequence[Column] = (),
    reference: str | None = None,
) -> Comparison:
    """Compare the groups by one metric.

    Args:
        groups: Groups of runs with the same data.
        key: Log key of the metric.
        baseline: Label of the group that the others are compared with.
        target: Value whose rounds are counted on request. None: the baseline's mean over the last five rounds.
        case: The settings that these groups share.
        at: Rounds after which the value is a statistic, too.
        at_seconds: Simulated seconds after which the value is a statistic, too.
        columns: Further columns. Those of a target are left out unless a round is evaluated and higher is better.
        reference: Label of the group against which intransigence is measured, beside the average accuracy over tasks.
            None: it is not.
    """
    runs = runs_of(groups)
    direction = direction_in(runs, key)
    values: Values = {group.label: {} for group in groups}
    for group in groups:
        for run in group.runs:
            statistics = statistics_at(run, key=key, direction=direction, at=at, at_seconds=at_seconds)
            for name, value in statistics.items():
                values[group.label].setdefault(name, {})[run.seeds] = value
    reached = values.get(baseline, {})
    has_curves = any(run.history.curve(key) for run in runs)
    if not {*COUNTS} & {*columns} or direction != "max" or not has_curves:
        target = None
    elif target is None and reached:
        mean = Result(reached.get("last five", reached["final"])).mean
        target = mean if math.isfinite(mean) else None
    if target is not None:
        for of_target in TARGETED:
            count_to_target(values, groups, of_target, key=key, baseline=baseline, target=target, columns=columns)
    for name in columns:
        if name in COSTS:
            add_costs(values, groups, name)
    is_measured = reference is not None and has_intransigence(key)
    if reference is not None and is_measured:
        add_intransigence(values, groups, reference=reference, model=TABLES_OF_TASKS[key])
    results: dict[str, dict[str, Result]] = {}
    for label, by_name in values.items():
        results[label] = {}
        for name, by_seeds in by_name.items():
            difference = paired(by_seeds, reached.get(name, {}), label != baseline)
            results[label][name] = Result(by_seeds, difference, counts=name in COUNTS)
    return Comparison(
        key=key,
        case=case,
        results=results,
        baseline=baseline,
        target=target,
        direction=direction,
        unit=unit_in(runs, key),
        rounds=rounds_text(groups),
        reference=reference if reference is not None and is_measured else "",
    )


COUNTS = ("rounds", "speed_up", "time", "time_speed_up")
"""Columns of a target, whose values are infinite if it is not reached."""

TIMED = ("time", "time_speed_up")
"""Those that only runs with simulated devices have."""


def statistics_at(
    run: SavedRun,
    key: str,
    direction: Direction | None,
    *,
    at: Sequence[int],
    at_seconds: Sequence[float] = (),
) -> dict[str, float]:
    """Return the statistics of a run's metric, and its values after some rounds and after some simulated seconds."""
    statistics = statistics_of(run, key, direction)
    curve = run.history.curve(key)
    for rounds in at:
        if rounds - 1 in curve:
            statistics[f"{AFTER}{rounds}"] = curve[rounds - 1]
    for seconds in at_seconds:
        value = value_after_seconds(run, key, seconds)
        if value is not None:
            statistics[after_seconds(seconds)] = value
    return statistics


def has_unequal_rounds(runs: Sequence[SavedRun]) -> bool:
    """Return True if some runs have fewer rounds than others, or fewer than they were asked for."""
    if len({run.num_rounds for run in runs}) > 1:
        return True
    return any(run.planned is not None and run.num_rounds < run.planned for run in runs)


def rounds_text(groups: Sequence[Group]) -> str:
    """Return a sentence with the rounds of each run, or an empty text if all runs have all of the same number."""
    if not has_unequal_rounds(runs_of(groups)):
        return ""
    parts = []
    for group in groups:
        counts = []
        for run in group.runs:
            asked = "" if run.planned in (None, run.num_rounds) or run.budget is not None else f" of {run.planned}"
            counts.append(f"{run.num_rounds}{asked}")
        parts.append(f"{group.label} {', '.join(counts)}")
    budgets = {run.budget for run in runs_of(groups)}
    if len(budgets) == 1 and None not in budgets:
        return f"Rounds of the runs within {budgets.pop():.12g} simulated seconds: {'; '.join(parts)}."
    return f"Rounds of the runs, which count to their own ends: {'; '.join(parts)}."


def add_costs(values: Values, groups: Sequence[Group], name: str) -> None:
    """Add what a round costs to the values of the groups whose runs tell."""
    for group in groups:
        costs: dict[Seeds, float] = {}
        for run in group.runs:
            cost = cost_of(run, COSTS[name])
            if cost is not None:
                costs[run.seeds] = cost
        if costs:
            values[group.label][name] = costs


def has_intransigence(key: str) -> bool:
    """Return True for the average accuracy over tasks, beside which intransigence stands.

    >>> has_intransigence("global/acc_tasks"), has_intransigence("local/acc_tasks"), has_intransigence("global/acc")
    (True, True, False)
    """
    return key in TABLES_OF_TASKS


def add_intransigence(values: Values, groups: Sequence[Group], *, reference: str, model: Model) -> None:
    """Add intransigence against the reference's run with the same seeds to the values of the other groups.

    Args:
        values: The values of all groups.
        groups: The groups.
        reference: Label of the group of the reference.
        model: Whose intransigence it is.
    """
    of_reference: dict[Seeds, SavedRun] = {}
    for group in groups:
        if group.label == reference:
            of_reference = {run.seeds: run for run in group.runs}
    for group in groups:
        if group.label == reference:
            continue
        by_seeds: dict[Seeds, float] = {}
        for run in group.runs:
            if run.seeds in of_reference:
                value = intransigence_of(run, of_reference[run.seeds], model=model)
                if value is not None:
                    by_seeds[run.seeds] = value
        if by_seeds:
            values[group.label][INTRANSIGENCE] = by_seeds


class Targeted(NamedTuple):
    """Names two columns of a target: what a run takes to reach it, and the speed-up that this is.

    Attributes:
        column: Name of the column of what a run takes.
        speed_up: Name of the column of the speed-up.
        taken: Returns what a run takes until its metric reaches the target, or None if it does not.
        needs_clock: Whether only runs with simulated devices tell.
    """

    column: Column
    speed_up: Column
    taken: Callable[[SavedRun, str, float], float | None]
    needs_clock: bool


def count_to_target(
    values: Values,
    groups: Sequence[Group],
    of_target: Targeted,
    *,
    key: str,
    baseline: str,
    target: float,
    columns: Sequence[Column],
) -> None:
    """Add what runs take until a target, and the speed-up over the baseline with the same seeds, to the values."""
    taken: dict[str, dict[Seeds, float | None]] = {}
    for group in groups:
        taken[group.label] = {}
        for run in group.runs:
            if run.history.curve(key) and (run.clock or not of_target.needs_clock):
                taken[group.label][run.seeds] = of_target.taken(run, key, target)
    base = taken.get(baseline, {})
    for label, by_seeds in taken.items():
        if by_seeds and of_target.column in columns:
            values[label][of_target.column] = {
                seeds: math.inf if count is None else float(count) for seeds, count in by_seeds.items()
            }
        if by_seeds and of_target.speed_up in columns:
            ratios: dict[Seeds, float] = {}
            for seeds, count in by_seeds.items():
                first = base.get(seeds)
                if first is not None and count != 0:
                    ratio = speed_up(count, first)
                    ratios[seeds] = -math.inf if ratio is None else ratio
            values[label][of_target.speed_up] = ratios


def cost_of(run: SavedRun, cost: Cost) -> float | None:
    """Average over the rounds what one costs, None if the run does not tell.

    Args:
        run: The run.
        cost: The keys that are added up. A key that only some rounds have, such as the bytes of sets, counts in these.
    """
    curves = [run.history.curve(key) for key in cost.keys]
    most = max(len(curve) for curve in curves)
    always = [curve for key, curve in zip(cost.keys, curves, strict=True) if key not in ONCE]
    if not most or not all(always):
        return None
    return math.fsum(math.fsum(curve.values()) for curve in curves) / most / cost.unit


ONCE = ("comm/bytes_sets",)
"""Keys that one round alone has, and only some methods."""


def bytes_by_round(run: SavedRun) -> dict[int, float]:
    """Return all bytes that each round moves in both directions, sets included. Empty if the run does not tell."""
    moved: dict[int, float] = {}
    for key in BYTES:
        for round_idx, value in run.history.curve(key).items():
            moved[round_idx] = moved.get(round_idx, 0.0) + value
    return dict(sorted(moved.items()))


def paired(values: Mapping[Seeds, float], baseline: Mapping[Seeds, float], compared: bool = True) -> Interval | None:
    """Average the differences of the seeds that both have with finite values, None if there are none."""
    first: list[float] = []
    second: list[float] = []
    for seeds, value in values.items():
        other = baseline.get(seeds, math.nan)
        if math.isfinite(value) and math.isfinite(other):
            first.append(value)
            second.append(other)
    if not first or not compared:
        return None
    return paired_difference(first, second)


def rounds_until(run: SavedRun, key: str, target: float) -> int | None:
    """Count the rounds of a run until its metric reaches the target with a finite value, None if it does not."""
    return rounds_to_target(run.history.curve(key), target)


def seconds_until(run: SavedRun, key: str, target: float) -> float | None:
    """Return the simulated seconds of a run until its metric reaches the target, None if it does not."""
    rounds = rounds_until(run, key, target)
    return None if rounds is None else run.clock.get(rounds - 1)


TARGETED = (
    Targeted("rounds", "speed_up", taken=rounds_until, needs_clock=False),
    Targeted("time", "time_speed_up", taken=seconds_until, needs_clock=True),
)
"""Columns of a target, in rounds and in simulated seconds."""
