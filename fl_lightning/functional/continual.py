"""Measures of continual learning, from the accuracies on each task after each stage of a run.

In all of them R is the table of accuracies, (T, K): R[t, k] is the accuracy on task k in row t. First and last rows are
those in which a task was trained on, counted from 0, and −1 if it never was.
"""

import torch
from torch import Tensor


def tasks_accuracy(table: Tensor, first: Tensor) -> Tensor:
    """Average the accuracies of the last row over the tasks that were met: ACC = mean_k R[T, k].

    Args:
        table: R, (T, K), fractions in [0, 1], T ≥ 1.
        first: First row of each task, (K,) int64.

    Returns:
        (), in [0, 1]. NaN if no task was met.

    Source:
        Lopez-Paz and Ranzato 2017, arXiv:1706.08840, Eq. 2, over the tasks that were met.

    >>> tasks_accuracy(torch.tensor([[0.5, 0.0], [0.25, 0.75]]), first=torch.tensor([0, 1]))
    tensor(0.5000)
    """
    return mean_of_tasks(table[-1], first >= 0)


def learning_accuracy(table: Tensor, first: Tensor) -> Tensor:
    """Average the accuracies on tasks when they are new: LA = mean over met k of R[first_k, k].

    Args:
        table: R, (T, K), fractions in [0, 1], T ≥ 1.
        first: First row of each task, (K,) int64.

    Returns:
        (), in [0, 1]. NaN if no task was met.

    Source:
        Riemer et al. 2019, arXiv:1810.11910, learning accuracy (LA), over the tasks that were met.

    >>> learning_accuracy(torch.tensor([[0.5, 0.0], [0.25, 0.75]]), first=torch.tensor([0, 1]))
    tensor(0.6250)
    """
    return mean_of_tasks(at_rows(table, first), first >= 0)


def tasks_forgetting(table: Tensor, first: Tensor) -> Tensor:
    """Average best earlier accuracy minus the last: F = mean over k with first_k < T of max_{i<T} R[i, k] − R[T, k].

    Args:
        table: R, (T, K), fractions in [0, 1], T ≥ 1.
        first: First row of each task, (K,) int64.

    Returns:
        (), in [−1, 1]. NaN if no task was met before the last row.

    Source:
        Chaudhry et al. 2018, arXiv:1801.10112, Eqs. 3 and 4.

    >>> table = torch.tensor([[0.9, 0.2, 0.1], [0.6, 0.8, 0.3], [0.7, 0.5, 0.9]])
    >>> tasks_forgetting(table, first=torch.tensor([0, 1, 2]))
    tensor(0.2500)
    """
    if len(table) < 2:
        return table.new_tensor(torch.nan)
    fallen = table[:-1].amax(0) - table[-1]
    is_old = (first >= 0) & (first < len(table) - 1)
    return mean_of_tasks(fallen, is_old)


def backward_transfer(table: Tensor, last: Tensor) -> Tensor:
    """Average the gain since a task was trained on: BWT = mean over k with last_k < T of R[T, k] − R[last_k, k].

    Args:
        table: R, (T, K), fractions in [0, 1], T ≥ 1.
        last: Last row of each task, (K,) int64.

    Returns:
        (), in [−1, 1]. NaN if every task that was met is trained on in the last row.

    Source:
        Lopez-Paz and Ranzato 2017, arXiv:1706.08840, Eq. 3.

    >>> table = torch.tensor([[0.9, 0.2, 0.1], [0.6, 0.8, 0.3], [0.7, 0.5, 0.9]])
    >>> backward_transfer(table, last=torch.tensor([0, 1, 2]))
    tensor(-0.2500)
    """
    gained = table[-1] - at_rows(table, last)
    is_over = (last >= 0) & (last < len(table) - 1)
    return mean_of_tasks(gained, is_over)


def forward_transfer(table: Tensor, initial: Tensor, first: Tensor) -> Tensor:
    """Average what earlier tasks give: FWT = mean over k with first_k > 0 of R[first_k − 1, k] − b_k.

    Args:
        table: R, (T, K), fractions in [0, 1], T ≥ 1.
        initial: b, the accuracy on each task before training, (K,), fractions in [0, 1].
        first: First row of each task, (K,) int64.

    Returns:
        (), in [−1, 1]. NaN if no task was met after the first row.

    Source:
        Lopez-Paz and Ranzato 2017, arXiv:1706.08840, Eq. 4.

    >>> table = torch.tensor([[0.9, 0.2, 0.1], [0.6, 0.8, 0.3], [0.7, 0.5, 0.9]])
    >>> forward_transfer(table, initial=torch.full((3,), 0.3), first=torch.tensor([0, 1, 2]))
    tensor(-0.0500)
    """
    gained = at_rows(table, first - 1) - initial
    return mean_of_tasks(gained, first > 0)


def intransigence(table: Tensor, reference: Tensor, first: Tensor) -> Tensor:
    """Average what is missing when a task is new: I = mean over met k of a*_k − R[first_k, k].

    Args:
        table: R, (T, K), fractions in [0, 1], T ≥ 1.
        reference: a*, the accuracy on each task of a model that is trained on all tasks up to it together, in the row
            in which the task is new, (K,), fractions in [0, 1].
        first: First row of each task, (K,) int64.

    Returns:
        (), in [−1, 1]. NaN if no task was met.

    Source:
        Chaudhry et al. 2018, arXiv:1801.10112, Eq. 6.

    >>> table = torch.tensor([[0.9, 0.2, 0.1], [0.6, 0.8, 0.3], [0.7, 0.5, 0.9]])
    >>> intransigence(table, reference=torch.tensor([0.95, 0.9, 0.9]), first=torch.tensor([0, 1, 2]))
    tensor(0.0500)
    """
    missing = reference - at_rows(table, first)
    return mean_of_tasks(missing, first >= 0)


def at_rows(table: Tensor, rows: Tensor) -> Tensor:
    """Look up one row of each column, (K,). A row below 0 is taken as 0.

    >>> at_rows(torch.tensor([[0.1, 0.2], [0.3, 0.4]]), rows=torch.tensor([1, 0]))
    tensor([0.3000, 0.2000])
    """
    return table.gather(0, rows.clamp(min=0).unsqueeze(0))[0]


def mean_of_tasks(values: Tensor, chosen: Tensor) -> Tensor:
    """Average the values that are chosen and not NaN.

    >>> mean_of_tasks(torch.tensor([0.5, 0.25, 1.0]), chosen=torch.tensor([True, True, False]))
    tensor(0.3750)
    """
    return values[chosen].nanmean()
