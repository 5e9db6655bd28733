"""Metrics of a model over the rounds (or epochs, or tasks) of a run, updated in each and not reset."""

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
    """A metric of the table A^(t)_c of class-wise accuracies by round.

    Args:
        num_classes: C ≥ 1.
        kwargs: of `torchmetrics.Metric`.
    """

    round_rows: list[Tensor]

    def __init__(self, num_classes: int, **kwargs: Any) -> None:
        super().__init__(num_classes, **kwargs)
        self.set_dtype(torch.float64)  # a process without samples gathers an empty tensor of this type
        # 1-d rows (round, hits of C classes, samples of C classes): processes without rows gather as well
        self.add_state("round_rows", [], dist_reduce_fx="cat")

    def update(self, preds: Tensor, target: Tensor, round_idx: int) -> None:
        counts = class_counts(preds, target, self.num_classes)
        row = torch.cat([counts.new_tensor([round_idx]), counts.flatten()])
        self.round_rows.append(row)

    def table(self) -> Tensor:
        """Lay out A^(t)_c, (T, C) float64, a row for each round in their order."""
        width = 2 * self.num_classes + 1
        rows = dim_zero_cat(self.round_rows) if len(self.round_rows) else torch.empty(0, dtype=torch.float64)
        rounds, at = torch.unique(rows.view(-1, width)[:, 0], return_inverse=True)
        counts = rows.new_zeros(len(rounds), width - 1).index_add_(0, at, rows.view(-1, width)[:, 1:])
        return class_accuracy(counts.view(-1, 2, self.num_classes))


class Forgetting(_ClassesByRound):
    r"""Forgetting $F = \frac{1}{C} \sum_c \left[ \max_t A_c^{(t)} - A_c^{(T)} \right]$: mean peak minus last accuracy.

    Source: Lee et al. 2022, arXiv:2106.03097, Eq. 5; `exclude_final`: Chaudhry et al. 2018, arXiv:1801.10112. `update`
    takes `preds`, scores (B, C, ...) or classes (B, ...), `target` (B, ...) and `round_idx`, the round, epoch or task;
    batches of one round add up. `compute` gives () float64 in [0, 1]. It is not to be reset between rounds, so
    log its value, and keep it apart from metrics of one round. In a `MetricCollection` `round_idx` is given by name.

    Args:
        num_classes: C ≥ 1.
        exclude_final: the peak is taken over the rounds before the last; F is in [-1, 1] then.
        kwargs: of `torchmetrics.Metric`.

    >>> metric, target = Forgetting(num_classes=2), torch.tensor([0, 1])
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
        return forgetting(self.table(), self.exclude_final)


class PredictionConsistency(_ClassesByRound):
    r"""Prediction consistency $\cos(A^{(t-1)}, A^{(t)})$ of the class-wise accuracies of two rounds in a row.

    Source: Lee et al. 2022, arXiv:2106.03097, Fig. 2b. `update` is that of `Forgetting`. `compute` gives () float64 in
    [0, 1], or (T − 1,) with `reduction="none"`; NaN where a round recognises no sample, or there are not two.

    Args:
        num_classes: C ≥ 1.
        reduction: `last`: of the last two rounds; `mean`: over all; `none`: all.
        kwargs: of `torchmetrics.Metric`.

    >>> metric, target = PredictionConsistency(num_classes=2), torch.tensor([0, 1])
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
        return (values[-1:] if self.reduction == "last" else values).mean()


class RoundsToTarget(FederatedMetric):
    """First round whose value reaches the target, counted from 1, NaN if none does.

    Source: FedKA, Table 2. `update` takes a number `value` and its 0-based `round_idx`; `compute` gives () float64.

    Args:
        target: value to be reached, such as FedAvg's accuracy after its last round.
        kwargs: of `torchmetrics.Metric`.

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
        # the values, not the round that is looked for: metrics of other targets may share them in a collection
        self.add_state("curve_points", [], dist_reduce_fx="cat")

    def update(self, value: float | Tensor, round_idx: int) -> None:
        value = torch.as_tensor(value, dtype=torch.float64)
        self.curve_points.append(torch.stack([value.new_tensor(float(round_idx)), value.reshape(())]))

    def rounds(self) -> int | None:
        """Give the round, counted from 1, or None."""
        points = dim_zero_cat(self.curve_points).view(-1, 2).tolist() if len(self.curve_points) else []
        values = {int(round_idx): value for round_idx, value in points}
        curve = [values.get(round_idx, math.nan) for round_idx in range(max(values, default=-1) + 1)]
        return rounds_to_target(curve, self.target)

    def compute(self) -> Tensor:
        return as_tensor(self.rounds())


class SpeedUp(RoundsToTarget):
    """Speed-up: the baseline's rounds over those that reach the target, NaN if none does.

    Source: FedKA, Table 2. `update` is that of `RoundsToTarget`; `compute` gives () float64.

    Args:
        target: value to be reached.
        baseline_rounds: rounds after which the baseline has it, ≥ 1.
        kwargs: of `torchmetrics.Metric`.

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
        return as_tensor(speed_up(self.rounds(), self.baseline_rounds))


def as_tensor(value: float | None) -> Tensor:
    """Convert a number to a 0-d float64 tensor, and None to NaN."""
    return torch.tensor(math.nan if value is None else value, dtype=torch.float64)
