"""Metrics of a model that meets one task after another, updated by the accuracies on all tasks after each stage."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torchmetrics.utilities import dim_zero_cat

from fl_lightning.functional.continual import (
    backward_transfer,
    forward_transfer,
    intransigence,
    learning_accuracy,
    tasks_accuracy,
    tasks_forgetting,
)
from fl_lightning.metrics.base import FederatedMetric
from fl_lightning.utils.settings import check_at_least


class TaskRows(NamedTuple):
    """Holds the accuracies on K tasks in T rows, and when each task was trained on.

    Args:
        initial: Accuracies before training, (K,) float64. NaN where they were not given.
        table: Accuracies R, (T, K) float64.
        first: First row in which a task was trained on, (K,) int64, −1 for a task that never was.
        last: Last such row, (K,) int64.
    """

    initial: Tensor
    table: Tensor
    first: Tensor
    last: Tensor


def task_rows(accuracies: Tensor, trained: Tensor) -> TaskRows:
    """Find the rows in which tasks were trained on. Rows before any training are left out, and the last is `initial`.

    Args:
        accuracies: Accuracies in the order in which they were measured, (T', K).
        trained: Whether a task was trained on since the row before, (T', K) bool.

    >>> rows = task_rows(torch.tensor([[0.5, 0.5], [0.9, 0.4]]), torch.tensor([[False, False], [True, False]]))
    >>> rows.initial, rows.first, rows.last
    (tensor([0.5000, 0.5000]), tensor([ 0, -1]), tensor([ 0, -1]))
    """
    begun = trained.any(1).cumsum(0) > 0
    before = accuracies[~begun]
    table = accuracies[begun]
    is_trained = trained[begun].long()
    initial = torch.full_like(accuracies.sum(0), torch.nan)
    if len(before):
        initial = before[-1]
    never = torch.full((accuracies.shape[1],), -1)
    if not len(table):
        return TaskRows(initial=initial, table=table, first=never, last=never)
    met = is_trained.any(0)
    first = torch.where(met, is_trained.argmax(0), never)
    rows_after_last = is_trained.flip(0).argmax(0)
    last = torch.where(met, len(table) - 1 - rows_after_last, never)
    return TaskRows(initial=initial, table=table, first=first, last=last)


class TaskMetric(FederatedMetric):
    """Reads the table of the accuracies on K tasks after each stage. It is the base of the measures of tasks.

    `update` takes `accuracies`, (K,) in [0, 1] on all tasks, and `trained`, (K,) bool or the indices of the tasks that
    were trained on since the update before. Give the accuracies before training first, with `trained=[]`, if forward
    transfer is asked for. `stage`, a number, says which row it is: rows of several processes or parts are put in the
    order of their stages, and of equal stages the last row counts. Without stages rows keep the order of the updates.
    `compute` gives () float64, NaN where the measure is not defined. The metric is not to be reset between stages.

    Args:
        num_tasks: Number K of tasks, ≥ 1.
        kwargs: Arguments of `torchmetrics.Metric`.
    """

    higher_is_better: bool | None = True
    plot_lower_bound = -1.0
    rows: list[Tensor]

    def __init__(self, num_tasks: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        check_at_least(1, num_tasks=num_tasks)
        self.num_tasks = num_tasks
        self.set_dtype(torch.float64)
        self.add_state("rows", [], dist_reduce_fx="cat")

    def update(
        self,
        accuracies: Tensor | Sequence[float],
        trained: Tensor | Sequence[int] = (),
        stage: int | None = None,
    ) -> None:
        row = torch.as_tensor(accuracies, dtype=torch.float64, device=self.device)
        if row.shape != (self.num_tasks,):
            raise ValueError(f"accuracies must be ({self.num_tasks},), one for each task, got {tuple(row.shape)}")
        number = row.new_tensor([math.nan if stage is None else float(stage)])
        self.rows.append(torch.cat([number, row, self._flags(trained)]))

    def _flags(self, trained: Tensor | Sequence[int]) -> Tensor:
        """Mark the tasks that were trained on by 1, (K,) float64."""
        given = torch.as_tensor(trained, device=self.device)
        if given.dtype == torch.bool:
            return given.double()
        flags = torch.zeros(self.num_tasks, dtype=torch.float64, device=self.device)
        flags[given.long()] = 1
        return flags

    def table(self) -> TaskRows:
        """Lay out what was measured."""
        # A row has the stage, the K accuracies, and K marks of the tasks that were trained on.
        rows = torch.empty(0, 1 + 2 * self.num_tasks, dtype=torch.float64)
        if len(self.rows):
            rows = dim_zero_cat(self.rows).view(-1, 1 + 2 * self.num_tasks)
        values = in_order_of_stages(rows)[:, 1:]
        return task_rows(accuracies=values[:, : self.num_tasks], trained=values[:, self.num_tasks :] > 0)

    def measured(self, rows: TaskRows) -> Tensor:
        """Compute the measure, () float64.

        Args:
            rows: A table with at least one row.
        """
        raise NotImplementedError

    def compute(self) -> Tensor:
        rows = self.table()
        if not len(rows.table):
            return torch.tensor(torch.nan, dtype=torch.float64)
        return self.measured(rows)


def in_order_of_stages(rows: Tensor) -> Tensor:
    """Put rows in the order of their stages, the last one of each. Rows without stages stay as they are.

    Args:
        rows: The rows, (T, M) float64. The first column is the stage, NaN if it is not known.

    >>> in_order_of_stages(torch.tensor([[1.0, 0.5], [0.0, 0.25], [1.0, 0.75]]))
    tensor([[0.0000, 0.2500],
            [1.0000, 0.7500]])
    """
    stages = rows[:, 0]
    if not len(rows) or stages.isnan().any():
        return rows
    order = stages.argsort(stable=True)
    ordered = rows[order]
    is_last = torch.ones(len(rows), dtype=torch.bool, device=rows.device)
    is_last[:-1] = ordered[:-1, 0] != ordered[1:, 0]
    return ordered[is_last]


class TasksAccuracy(TaskMetric):
    r"""Measures the average accuracy on the tasks that were met, $\frac{1}{|M|} \sum_{k \in M} R_{T,k}$.

    Source: Lopez-Paz and Ranzato 2017, arXiv:1706.08840, Eq. 2. `update` is that of `TaskMetric`.

    Args:
        num_tasks: Number K of tasks, ≥ 1.
        kwargs: Arguments of `torchmetrics.Metric`.

    >>> metric = TasksAccuracy(num_tasks=2)
    >>> metric.update([0.9, 0.1], trained=[0])
    >>> metric.update([0.5, 0.8], trained=[1])
    >>> metric.compute()
    tensor(0.6500, dtype=torch.float64)
    """

    plot_lower_bound = 0.0

    def measured(self, rows: TaskRows) -> Tensor:
        return tasks_accuracy(rows.table, rows.first)


class LearningAccuracy(TaskMetric):
    r"""Measures learning accuracy, the mean over the tasks that were met of $R_{f_k,k}$, with task k new in row $f_k$.

    Source: Riemer et al. 2019, arXiv:1810.11910. `update` is that of `TaskMetric`.

    Args:
        num_tasks: Number K of tasks, ≥ 1.
        kwargs: Arguments of `torchmetrics.Metric`.

    >>> metric = LearningAccuracy(num_tasks=2)
    >>> metric.update([0.9, 0.1], trained=[0])
    >>> metric.update([0.5, 0.8], trained=[1])
    >>> metric.compute()
    tensor(0.8500, dtype=torch.float64)
    """

    plot_lower_bound = 0.0

    def measured(self, rows: TaskRows) -> Tensor:
        return learning_accuracy(rows.table, rows.first)


class TasksForgetting(TaskMetric):
    r"""Measures the forgetting of the tasks met before the last stage, the mean of $\max_{i<T} R_{i,k} - R_{T,k}$.

    Source: Chaudhry et al. 2018, arXiv:1801.10112, Eqs. 3 and 4. `update` is that of `TaskMetric`.

    Args:
        num_tasks: Number K of tasks, ≥ 1.
        kwargs: Arguments of `torchmetrics.Metric`.

    >>> metric = TasksForgetting(num_tasks=2)
    >>> metric.update([0.9, 0.1], trained=[0])
    >>> metric.update([0.5, 0.8], trained=[1])
    >>> metric.compute()
    tensor(0.4000, dtype=torch.float64)
    """

    higher_is_better = False

    def measured(self, rows: TaskRows) -> Tensor:
        return tasks_forgetting(rows.table, rows.first)


class BackwardTransfer(TaskMetric):
    r"""Measures backward transfer, the mean of $R_{T,k} - R_{l_k,k}$, with task k trained on in row $l_k < T$ last.

    Source: Lopez-Paz and Ranzato 2017, arXiv:1706.08840, Eq. 3. `update` is that of `TaskMetric`.

    Args:
        num_tasks: Number K of tasks, ≥ 1.
        kwargs: Arguments of `torchmetrics.Metric`.

    >>> metric = BackwardTransfer(num_tasks=2)
    >>> metric.update([0.9, 0.1], trained=[0])
    >>> metric.update([0.5, 0.8], trained=[1])
    >>> metric.compute()
    tensor(-0.4000, dtype=torch.float64)
    """

    def measured(self, rows: TaskRows) -> Tensor:
        return backward_transfer(rows.table, rows.last)


class ForwardTransfer(TaskMetric):
    r"""Measures forward transfer, the mean of $R_{f_k - 1,k} - b_k$, with task k trained on in row $f_k > 0$ first.

    b is the accuracy before training. Source: Lopez-Paz and Ranzato 2017, arXiv:1706.08840, Eq. 4. `update` is that of
    `TaskMetric`.

    Args:
        num_tasks: Number K of tasks, ≥ 1.
        kwargs: Arguments of `torchmetrics.Metric`.

    >>> metric = ForwardTransfer(num_tasks=2)
    >>> metric.update([0.1, 0.1])
    >>> metric.update([0.9, 0.3], trained=[0])
    >>> metric.update([0.5, 0.8], trained=[1])
    >>> metric.compute()
    tensor(0.2000, dtype=torch.float64)
    """

    def measured(self, rows: TaskRows) -> Tensor:
        return forward_transfer(rows.table, rows.initial, rows.first)


class Intransigence(TaskMetric):
    r"""Measures intransigence, the mean of $a^*_k - R_{f_k,k}$ over the tasks that were met.

    Source: Chaudhry et al. 2018, arXiv:1801.10112, Eq. 6. `update` is that of `TaskMetric`.

    Args:
        num_tasks: Number K of tasks, ≥ 1.
        reference: Accuracy a* on each task, when it is new, of a model that has all data up to then, (K,).
        kwargs: Arguments of `torchmetrics.Metric`.

    Raises:
        ValueError: There is not one reference for each task.

    >>> metric = Intransigence(num_tasks=2, reference=[1.0, 0.9])
    >>> metric.update([0.9, 0.1], trained=[0])
    >>> metric.update([0.5, 0.8], trained=[1])
    >>> metric.compute()
    tensor(0.1000, dtype=torch.float64)
    """

    higher_is_better = False

    def __init__(self, num_tasks: int, reference: Tensor | Sequence[float], **kwargs: Any) -> None:
        super().__init__(num_tasks, **kwargs)
        given = torch.as_tensor(reference, dtype=torch.float64)
        if given.shape != (num_tasks,):
            raise ValueError(f"reference must be ({num_tasks},), one for each task, got {tuple(given.shape)}")
        self.reference = given

    def measured(self, rows: TaskRows) -> Tensor:
        return intransigence(rows.table, self.reference.to(rows.table.device), rows.first)
