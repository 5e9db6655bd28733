"""Results of groups of runs: final, mean of the last five and best values, rounds to a target, paired differences."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from fl_lightning.functional.summary import Interval, mean_std, paired_difference, speed_up
from fl_lightning.reports.saved import Group, SavedRun
from fl_lightning.runs.value_names import is_accuracy, is_lower_better

HEADINGS = {"final": "final", "last five": "mean of last five", "best": "best over rounds"}
STATISTICS = tuple(HEADINGS)
LAST_ROUNDS = 5
AFTER = "after "
"""Beginning of the name of a statistic: the value after some rounds."""

Column = Literal["rounds", "speed_up", "bytes", "steps", "seconds", "memory"]
"""Further columns: rounds to a target and the speed-up that they are, and what a round costs."""


class Cost(NamedTuple):
    """Names what a round costs: the heading of its column, the log keys that are added up, and its unit."""

    heading: str
    keys: tuple[str, ...]
    unit: float = 1.0


COSTS: dict[str, Cost] = {
    "bytes": Cost("MB a round", ("comm/bytes_down", "comm/bytes_up"), 1e6),
    "steps": Cost("local steps a round", ("cost/steps",)),
    "seconds": Cost("seconds a round", ("cost/seconds",)),
    "memory": Cost("memory, MB", ("cost/memory",), 1e6),
}
MEASURED = frozenset({"steps", "seconds", "memory"})
"""Those that a run knows with a `CostMonitor` only."""

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


FURTHER = {
    "global/loss": "loss of the global model on the test split",
    "val/loss": "loss of the global model on the server's validation split",
    "cost/steps": "optimizer steps of all clients of a round",
    "cost/seconds": "seconds of a round",
    "cost/memory": "memory at most so far, in bytes",
    "comm/bytes_down": "bytes of a round to the clients",
    "comm/bytes_up": "bytes of a round to the server",
}
"""Likewise, of what has a table only where it is asked for."""

OWNERS = {
    "global": "of the global model on the test split",
    "val": "of the global model on the server's validation split",
    "test": "of the last round's global model on the test split",
    "train": "of the clients in training",
    "local": "of the clients, the mean over them",
}
"""Whose values those of other keys are, by the beginning of the key."""


@dataclass(frozen=True)
class Result:
    """One statistic of a metric for one group.

    Attributes:
        values: by seed; infinite where a target was not reached.
        difference: paired over the seeds with the baseline's, and its 95 % interval; None without one.
    """

    values: Mapping[str, float]
    difference: Interval | None = None

    @property
    def known(self) -> list[float]:
        """The finite values."""
        return [value for value in self.values.values() if math.isfinite(value)]

    @property
    def mean(self) -> float:
        """Mean over the seeds with a finite value, NaN without one."""
        return float(mean_std(torch.tensor(self.known, dtype=torch.float64)).mean)

    @property
    def std(self) -> float:
        """Sample standard deviation over these seeds, NaN for fewer than two."""
        return float(mean_std(torch.tensor(self.known, dtype=torch.float64)).std)


@dataclass(frozen=True)
class Comparison:
    """Results of one metric for groups of runs with the same data.

    Attributes:
        key: of the metric.
        case: the settings that all of its groups share and other comparisons do not, as text.
        results: of each group by its label, by the name of the column; empty where the group has no such metric.
        baseline: label of the group that the others are compared with.
        target: value of which the rounds are counted until it is reached; None: they are not.
    """

    key: str
    case: str
    results: Mapping[str, Mapping[str, Result]]
    baseline: str
    target: float | None


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


def scope_of(key: str) -> str:
    """Describe a key at the beginning of a sentence: by its scope, else by its name and whose it is.

    >>> scope_of("cost/steps"), scope_of("train/ce"), scope_of("val_f1")
    ('Optimizer steps of all clients of a round', 'ce of the clients in training', 'val_f1')
    """
    owner, _, name = key.partition("/")
    if scope := (SCOPES | FURTHER).get(key):
        return f"{scope[0].upper()}{scope[1:]}"
    return f"{name.replace('_', ' ')} {OWNERS[owner]}" if name and owner in OWNERS else key


def known_metrics(groups: Sequence[Group]) -> list[str]:
    """List the keys of `SCOPES` that some run has."""
    known = {name for group in groups for run in group.runs for name in (*run.history.names, *run.test)}
    return [key for key in SCOPES if key in known]


def statistics_of(run: SavedRun, key: str) -> dict[str, float]:
    """Compute the statistics of a run's metric over the rounds that have it, none where no round has.

    `best` is the lowest value where lower is better; `last five` needs five values. What `test` gave is a final value
    only.
    """
    if key in run.test:
        return {"final": run.test[key]}
    values = list(run.history.curve(key).values())
    if not values:
        return {}
    statistics = {"final": values[-1]}
    if len(values) >= LAST_ROUNDS:
        statistics["last five"] = mean_of_last(values)
    if key.endswith("forgetting"):  # 0 before anything was learnt
        return statistics
    return statistics | {"best": min(values) if is_lower_better(key) else max(values)}


def mean_of_last(values: Sequence[float]) -> float:
    """Average the last five values, or all where there are fewer."""
    last = values[-LAST_ROUNDS:]
    try:
        return math.fsum(last) / len(last)
    except (ValueError, OverflowError):  # infinite, or too large to be added
        return sum(last) / len(last)


def compare(
    groups: Sequence[Group],
    key: str,
    baseline: str,
    target: float | None = None,
    case: str = "",
    at: Sequence[int] = (),
    columns: Sequence[Column] = (),
) -> Comparison:
    """Compare the groups by one metric.

    Args:
        groups: of runs with the same data.
        key: of the metric.
        baseline: label of the group that the others are compared with.
        target: whose rounds are counted where they are asked for; None: the baseline's mean over the last five rounds.
        case: the settings that these groups share.
        at: rounds after which the value is a statistic, too.
        columns: further ones; those of a target only where a round is evaluated and higher is better.
    """
    values: dict[str, dict[str, dict[str, float]]] = {group.label: {} for group in groups}
    for group in groups:
        for run in group.runs:
            curve = run.history.curve(key)
            after = {f"{AFTER}{rounds}": curve[rounds - 1] for rounds in at if rounds - 1 in curve}
            for name, value in (statistics_of(run, key) | after).items():
                values[group.label].setdefault(name, {})[run.seed] = value
    reached = values.get(baseline, {})
    if target is None and reached:
        target = Result(reached.get("last five", reached["final"])).mean
    curves = any(run.history.curve(key) for group in groups for run in group.runs)
    if not {"rounds", "speed_up"} & {*columns} or is_lower_better(key) or not curves:
        target = None
    if target is not None:
        count_rounds(values, groups, key, baseline, target, columns)
    for name in columns:
        for group in groups if name in COSTS else ():
            costs = {run.seed: cost for run in group.runs if (cost := cost_of(run, COSTS[name])) is not None}
            values[group.label] |= {name: costs} if costs else {}
    results = {
        label: {
            name: Result(by_seed, paired(by_seed, reached.get(name, {}), label != baseline))
            for name, by_seed in v.items()
        }
        for label, v in values.items()
    }
    return Comparison(key, case, results, baseline, target)


def count_rounds(
    values: Mapping[str, dict[str, dict[str, float]]],
    groups: Sequence[Group],
    key: str,
    baseline: str,
    target: float,
    columns: Sequence[Column],
) -> None:
    """Add the rounds until a target, and the speed-up over the baseline with the same seed, to the values."""
    rounds = {
        group.label: {run.seed: rounds_until(run, key, target) for run in group.runs if run.history.curve(key)}
        for group in groups
    }
    base = rounds.get(baseline, {})
    for label, by_seed in rounds.items():
        if by_seed and "rounds" in columns:
            values[label]["rounds"] = {seed: math.inf if r is None else float(r) for seed, r in by_seed.items()}
        if by_seed and "speed_up" in columns:
            both = {seed: (r, base.get(seed)) for seed, r in by_seed.items()}
            ratios = {seed: speed_up(r, first) for seed, (r, first) in both.items() if first is not None}
            values[label]["speed_up"] = {seed: -math.inf if r is None else r for seed, r in ratios.items()}


def cost_of(run: SavedRun, cost: Cost) -> float | None:
    """Average over the rounds what one costs, None where the run does not tell."""
    curves = [list(run.history.curve(key).values()) for key in cost.keys]
    if not all(curves):
        return None
    return sum(math.fsum(curve) / len(curve) for curve in curves) / cost.unit


def paired(values: Mapping[str, float], baseline: Mapping[str, float], compared: bool = True) -> Interval | None:
    """Average the differences of the seeds that both have, None where there are none."""
    seeds = [
        seed for seed in values if seed in baseline and math.isfinite(values[seed]) and math.isfinite(baseline[seed])
    ]
    if not seeds or not compared:
        return None
    return paired_difference([values[seed] for seed in seeds], [baseline[seed] for seed in seeds])


def rounds_until(run: SavedRun, key: str, target: float) -> int | None:
    """Count the rounds of a run until its metric reaches the target, None where it does not."""
    return next((round_idx + 1 for round_idx, value in run.history.curve(key).items() if value >= target), None)
