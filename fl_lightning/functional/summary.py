"""Summaries of runs and clients: mean and deviation, fairness, rounds to a target value, speed-up."""

import math
from collections.abc import Mapping, Sequence
from math import ceil
from typing import NamedTuple

from torch import Tensor

from fl_lightning.functional.state import to_float32


class MeanStd(NamedTuple):
    """Holds a mean and a sample standard deviation."""

    mean: Tensor
    std: Tensor


def mean_std(values: Tensor) -> MeanStd:
    """Compute mean and sample standard deviation (divisor n − 1), over clients or over seeds.

    Args:
        values: Floats (n, ...), one entry for each client or seed.

    Returns:
        Both (...), in float32 or better. The deviation of one value is NaN. Without values both are NaN.

    >>> import torch
    >>> mean_std(torch.tensor([0.5, 0.7, 0.9]))
    MeanStd(mean=tensor(0.7000), std=tensor(0.2000))
    """
    values = to_float32(values)
    mean = values.mean(0)
    squares = (values - mean).square().sum(0)
    return MeanStd(mean, (squares / squares.new_tensor(max(len(values) - 1, 0))).sqrt())


class Spread(NamedTuple):
    """Holds the standard deviation of a value over clients, and its mean over the clients with the lowest values."""

    std: Tensor
    worst: Tensor


def fairness(values: Tensor, worst_share: float = 0.1) -> Spread:
    """Measure how unevenly clients are served: deviation of their accuracies, and the mean of the worst share of them.

    Args:
        values: Accuracy of each client, (n,). NaN is left out, such as that of a client without test samples.
        worst_share: Share of the clients that count as the worst, in (0, 1]. It is rounded up to whole clients.

    Returns:
        Both (). The sample standard deviation (divisor n − 1) is NaN for fewer than two clients, and the mean over the
        worst clients is NaN without a client.

    Source:
        Li et al. 2020, arXiv:1905.10497, Sec. 5 (variance, worst 10 %).

    >>> import torch
    >>> fairness(torch.tensor([0.5, 0.9, 0.7]), worst_share=0.5)
    Spread(std=tensor(0.2000), worst=tensor(0.6000))
    """
    values = values[~values.isnan()]
    worst = values.sort().values[: ceil(worst_share * len(values) - 1e-9)]
    return Spread(mean_std(values).std, mean_std(worst).mean)


class Interval(NamedTuple):
    """Holds a mean and the ends of its confidence interval."""

    mean: float
    low: float
    high: float

    @classmethod
    def around(cls, mean: float, half: float) -> "Interval":
        """Return the interval of a mean with `half` of its length on each side."""
        return cls(mean=mean, low=mean - half, high=mean + half)


def paired_difference(values: Sequence[float], baseline: Sequence[float], level: float = 0.95) -> Interval:
    """Average the differences of pairs, with Student's interval: d̄ ± t_{n−1} · s_d / √n.

    Both values of a pair depend on the same seed, clients and cohorts, so that their difference shows the method alone.

    Args:
        values: Values of a method, one for each seed.
        baseline: Values of the method that it is compared with, for the same seeds in the same order.
        level: Share of such intervals that hold the true difference if the differences are normal, in (0, 1).

    Returns:
        The mean of values − baseline and its interval. The ends are NaN for one pair, and all three for none.

    >>> [round(value, 3) for value in paired_difference([0.8, 0.7, 0.9], [0.7, 0.7, 0.7])]
    [0.1, -0.148, 0.348]
    """
    from scipy.special import stdtrit  # noqa: PLC0415 - slow to import

    differences = [value - other for value, other in zip(values, baseline, strict=True)]
    n = len(differences)
    if not n:
        return Interval.around(math.nan, half=math.nan)
    mean = math.fsum(differences) / n
    if n == 1:
        return Interval.around(mean, half=math.nan)
    std = math.sqrt(math.fsum((difference - mean) ** 2 for difference in differences) / (n - 1))
    half = float(stdtrit(n - 1, (1 + level) / 2)) * std / math.sqrt(n)
    return Interval.around(mean, half=half)


def welch_difference(  # noqa: PLR0917 - called by position
    values: Sequence[float], mean: float, std: float | None, count: int, level: float = 0.95
) -> Interval:
    """Subtract a published mean from the mean of values, with Welch's interval.

    Args:
        values: Own values, one for each seed.
        mean: Published mean.
        std: Published sample standard deviation. None takes the mean as exact.
        count: Number of runs behind the published mean, ≥ 2.
        level: Share of such intervals that hold the true difference if both samples are normal, in (0, 1).

    Returns:
        The difference and its interval. The ends are NaN for one value, and all three for none.

    Source:
        Welch 1947, Biometrika 34; degrees of freedom by Satterthwaite.

    >>> [round(value, 3) for value in welch_difference([0.8, 0.7, 0.9], 0.7, 0.1, count=3)]
    [0.1, -0.127, 0.327]
    """
    from scipy.special import stdtrit  # noqa: PLC0415 - slow to import

    n = len(values)
    if not n:
        return Interval.around(math.nan, half=math.nan)
    average = math.fsum(values) / n
    difference = average - mean
    if n == 1:
        return Interval.around(difference, half=math.nan)
    ours = math.fsum((value - average) ** 2 for value in values) / (n - 1) / n
    theirs = 0.0 if std is None else std**2 / count
    if not ours + theirs:
        return Interval.around(difference, half=0.0)
    freedom = (ours + theirs) ** 2 / (ours**2 / (n - 1) + theirs**2 / (count - 1))
    half = float(stdtrit(freedom, (1 + level) / 2)) * math.sqrt(ours + theirs)
    return Interval.around(difference, half=half)


def rounds_to_target(curve: Sequence[float] | Mapping[int, float], target: float) -> int | None:
    """Return the number of rounds until a value reaches the target.

    Args:
        curve: Value after each round, such as the accuracy, or values by the index of the round, in order. A value that
            is not finite reaches nothing.
        target: Value to be reached, such as FedAvg's accuracy after its last round.

    Returns:
        The number of rounds, at least 1, or None if the target is never reached.

    Source:
        FedKA, Table 2.

    >>> rounds_to_target([0.2, 0.5, 0.4, 0.6], target=0.5), rounds_to_target([0.2, 0.5], target=0.9)
    (2, None)
    """
    values = curve.items() if isinstance(curve, Mapping) else enumerate(curve)
    for round_idx, value in values:
        if math.isfinite(value) and value >= target:
            return round_idx + 1
    return None


def speed_up(rounds: float | None, baseline_rounds: float) -> float | None:
    """Divide the baseline's rounds by a method's, baseline_rounds / rounds. None if the target is never reached.

    Args:
        rounds: Number of rounds, as `rounds_to_target` gives it, or of seconds, > 0.
        baseline_rounds: Number of rounds, or of seconds, after which the baseline has the target value, > 0.

    Source:
        FedKA, Table 2.

    >>> speed_up(36, baseline_rounds=100)
    2.7777777777777777
    """
    return None if rounds is None else baseline_rounds / rounds
