"""Metrics of a model over the rounds (or epochs, or tasks) of a run, which are updated in each and not reset."""

import math
from typing import Any, Literal

import torch
from torch import Tensor
from torchmetrics.utilities import dim_zero_cat

from fl_lightning.functional.accuracy import class_accuracy, class_counts, prediction_consistency
from fl_lightning.functional.forgetting import forgetting
from fl_lightning.functional.summary import rounds_to_target, speed_up
from fl_lightning.metrics.base import ClassMetric, FederatedMetric
from fl_lightning.utils.settings import check_at_least, check_choice


class _ClassesByRound(ClassMetric):
    """Keeps the table A^(t)_c of class-wise accuracies by round. It is the base of metrics of this table.

    Args:
        num_classes: Number C of classes, ≥ 1.
        kwargs: Arguments of `torchmetrics.Metric`.
    """

    round_rows: list[Tensor]

    def __init__(self, num_classes: int, **kwargs: Any) -> None:
        super().__init__(num_classes, **kwargs)
        # A process without samples gathers an empty tensor of this type.
        self.set_dtype(torch.float64)
        # A row has the round, the hits of C classes and the samples of C classes. Rows have one dimension, so that a
        # process without rows can gather as well.
        self.add_state("round_rows", [], dist_reduce_fx="cat")

    def update(self, preds: Tensor, target: Tensor, round_idx: int) -> None:
        counts = class_counts(preds, target, num_classes=self.num_classes)
        row = torch.cat([counts.new_tensor([round_idx]), counts.flatten()])
        self.round_rows.append(row)

    def table(self) -> Tensor:
        """Lay out A^(t)_c, (T, C) float64, a row for each round in their order."""
        width = 2 * self.num_classes + 1
        values = torch.empty(0, dtype=torch.float64)
        if len(self.round_rows):
            values = dim_zero_cat(self.round_rows)
        rows = values.view(-1, width)
        rounds, places = torch.unique(rows[:, 0], return_inverse=True)
        counts = rows.new_zeros(len(rounds), width - 1)
        counts.index_add_(0, places, rows[:, 1:])
        return class_accuracy(counts.view(-1, 2, self.num_classes))


class Forgetting(_ClassesByRound):
    r"""Measures forgetting $F = \frac{1}{C} \sum_c [ \max_t A_c^{(t)} - A_c^{(T)} ]$, mean peak minus last accuracy.

    Source: Lee et al. 2022, arXiv:2106.03097, Eq. 5, and for `exclude_final` Chaudhry et al. 2018, arXiv:1801.10112.
    `update` takes `preds`, scores (B, C, ...) or classes (B, ...), `target` (B, ...) and `round_idx`, the round, epoch
    or task. Batches of one round add up. `compute` gives () float64 in [0, 1]. The metric must not be reset between
    rounds, so log its value, and keep it apart from metrics of one round. In a `MetricCollection` `round_idx` is given
    by name.

    Args:
        num_classes: Number C of classes, ≥ 1.
        exclude_final: Whether the peak is taken over the rounds before the last. F is then in [-1, 1].
        kwargs: Arguments of `torchmetrics.Metric`.

    >>> metric = Forgetting(num_classes=2)
    >>> target = torch.tensor([0, 1])
    >>> metric.update(torch.tensor([0, 0]), target, round_idx=0)
    >>> metric.update(torch.tensor([1, 1]), target, round_idx=1)
    >>> metric.compute()
    tensor(0.5000, dtype=torch.float64)
    """

    higher_is_better = False

    def __init__(self, num_classes: int, exclude_final: bool = False, **kwargs: Any) -> None:
        super().__init__(num_classes, **kwargs)
        self.exclude_final = exclude_final

    def compute(self) -> Tensor:
        return forgetting(self.table(), exclude_final=self.exclude_final)


class PredictionConsistency(_ClassesByRound):
    r"""Measures the prediction consistency $\cos(A^{(t-1)}, A^{(t)})$ of the class-wise accuracies of two rounds.

    Source: Lee et al. 2022, arXiv:2106.03097, Fig. 2b. `update` is that of `Forgetting`. `compute` gives () float64 in
    [0, 1], or (T − 1,) with `reduction="none"`. It is NaN if a round recognizes no sample, or there are not two rounds.

    Args:
        num_classes: Number C of classes, ≥ 1.
        reduction: Value that is computed. `last`: that of the last two rounds. `mean`: the mean over all rounds.
            `none`: all values.
        kwargs: Arguments of `torchmetrics.Metric`.

    >>> metric = PredictionConsistency(num_classes=2)
    >>> target = torch.tensor([0, 1])
    >>> metric.update(torch.tensor([0, 0]), target, round_idx=0)
    >>> metric.update(torch.tensor([0, 1]), target, round_idx=1)
    >>> metric.compute()
    tensor(0.7071, dtype=torch.float64)
    """

    higher_is_better = True

    def __init__(self, num_classes: int, reduction: Literal["last", "mean", "none"] = "last", **kwargs: Any) -> None:
        super().__init__(num_classes, **kwargs)
        check_choice(("last", "mean", "none"), reduction=reduction)
        self.reduction = reduction

    def compute(self) -> Tensor:
        values = prediction_consistency(self.table())
        if self.reduction == "none":
            return values
        if self.reduction == "last":
            values = values[-1:]
        return values.mean()


class RoundsToTarget(FederatedMetric):
    """Counts the rounds until a value reaches the target.

    Source: FedKA, Table 2. `update` takes a number `value` and its `round_idx`, from 0. `compute` gives () float64, at
    least 1, or NaN if no value reaches the target.

    Args:
        target: Value to be reached, such as FedAvg's accuracy after its last round.
        kwargs: Arguments of `torchmetrics.Metric`.

    >>> metric = RoundsToTarget(target=0.5)
    >>> for round_idx, accuracy in enumerate([0.2, 0.5, 0.4]):
    ...     metric.update(accuracy, round_idx)
    >>> metric.compute()
    tensor(2., dtype=torch.float64)
    """

    higher_is_better: bool | None = False
    plot_upper_bound = None
    curve_points: list[Tensor]

    def __init__(self, target: float, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.target = target
        self.set_dtype(torch.float64)
        # The state has the values and not the round, so that metrics of other targets can share it in a collection.
        self.add_state("curve_points", [], dist_reduce_fx="cat")

    def update(self, value: float | Tensor, round_idx: int) -> None:
        value = torch.as_tensor(value, dtype=torch.float64)
        self.curve_points.append(torch.stack([value.new_tensor(float(round_idx)), value.reshape(())]))

    def rounds(self) -> int | None:
        """Return the number of rounds, or None if no value reaches the target."""
        points: list[tuple[float, float]] = []
        if len(self.curve_points):
            points = dim_zero_cat(self.curve_points).view(-1, 2).tolist()
        # Points of several processes are not in the order of the rounds. Of one round the last value counts. A value
        # before the first round, such as at index -1, is reached in no round.
        curve = {int(round_idx): value for round_idx, value in points if round_idx >= 0}
        return rounds_to_target(dict(sorted(curve.items())), self.target)

    def compute(self) -> Tensor:
        return as_tensor(self.rounds())


class SpeedUp(RoundsToTarget):
    """Measures the speed-up: the baseline's rounds until the target, divided by the rounds of `RoundsToTarget`.

    Source: FedKA, Table 2. `update` is that of `RoundsToTarget`. `compute` gives () float64, NaN if no value reaches
    the target.

    Args:
        target: Value to be reached.
        baseline_rounds: Number of rounds after which the baseline has the value, ≥ 1.
        kwargs: Arguments of `torchmetrics.Metric`.

    >>> metric = SpeedUp(target=0.5, baseline_rounds=5)
    >>> metric.update(0.6, round_idx=1)
    >>> metric.compute()
    tensor(2.5000, dtype=torch.float64)
    """

    higher_is_better = True

    def __init__(self, target: float, baseline_rounds: int, **kwargs: Any) -> None:
        super().__init__(target, **kwargs)
        check_at_least(1, baseline_rounds=baseline_rounds)
        self.baseline_rounds = baseline_rounds

    def compute(self) -> Tensor:
        return as_tensor(speed_up(self.rounds(), baseline_rounds=self.baseline_rounds))


def as_tensor(value: float | None) -> Tensor:
    """Convert a number to a 0-d float64 tensor, and None to NaN."""
    return torch.tensor(math.nan if value is None else value, dtype=torch.float64)
