"""Metrics of client drift: diversity of moves, distance of weights, agreement of neurons."""

from typing import Any

import torch
from torch import Tensor

from fl_lightning.functional.drift import (
    activation_sums,
    drift_diversity,
    preferred_by_sums,
    weight_alignment,
    weight_divergence,
)
from fl_lightning.functional.state import StateLike
from fl_lightning.metrics.base import ClassMetric, FederatedMetric
from fl_lightning.utils.settings import check_at_least


class DriftDiversity(FederatedMetric):
    r"""Measures the drift diversity $\sum_k \lVert m_k \rVert^2 / \lVert \sum_k m_k \rVert^2$ of moves $m_k = w_k - w$.

    `update` takes the `move` of one client, (D,), those of several, (K, D), or one as tensors by name. `compute` gives
    () float64, ≥ 1/K. It is +inf if the moves cancel, and NaN if there are none.

    Args:
        size: Number D of entries of a move, ≥ 1.
        kwargs: Arguments of `torchmetrics.Metric`.

    >>> metric = DriftDiversity(size=2)
    >>> metric.update(torch.tensor([3.0, 0.0]))
    >>> metric.update({"weight": torch.tensor([[0.0]]), "bias": torch.tensor([3.0])})
    >>> metric.compute()
    tensor(1., dtype=torch.float64)
    """

    higher_is_better = False
    plot_upper_bound = None
    move_sum: Tensor
    move_squares: Tensor
    num_moves: Tensor

    def __init__(self, size: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        check_at_least(1, size=size)
        self.add_state("move_sum", torch.zeros(size, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("move_squares", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("num_moves", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, move: Tensor | StateLike) -> None:
        if not isinstance(move, Tensor):
            move = torch.cat([value.flatten() for value in move.values()])
        rows = move.double().view(-1, self.move_sum.shape[0])
        self.move_sum += rows.sum(0)
        self.move_squares += rows.square().sum()
        self.num_moves += len(rows)

    def compute(self) -> Tensor:
        diversity = drift_diversity(self.move_squares, self.move_sum)
        return diversity.masked_fill(self.num_moves == 0, torch.nan)


class GradientDiversity(DriftDiversity):
    r"""Measures the gradient diversity $\frac{1}{K} \sum_k \lVert \nabla f^k \rVert^2 / \lVert \nabla f \rVert^2$, ≥ 1.

    Source: Lee et al. 2022, arXiv:2106.03097, Definition 2 (Λ). `update` takes a client's gradient as `DriftDiversity`
    takes a move. `compute` gives () float64. It is +inf if the gradients cancel, and NaN if there are none.

    Args:
        size: Number D of entries of a gradient, ≥ 1.
        kwargs: Arguments of `torchmetrics.Metric`.

    >>> metric = GradientDiversity(size=2)
    >>> metric.update(torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
    >>> metric.compute()
    tensor(2., dtype=torch.float64)
    """

    def compute(self) -> Tensor:
        return self.num_moves * super().compute()


class WeightDivergence(FederatedMetric):
    r"""Measures the weight divergence $\lVert w - w_k \rVert$, the mean over pairs of states.

    Source: Lee et al. 2022, arXiv:2106.03097, Sec. 5.2 (order 1). `update` takes two states, tensors by name with equal
    names and shapes. `compute` gives () float64, NaN if there are no pairs.

    Args:
        order: Order of the norm, ≥ 1. 1 sums absolute differences, and 2 is the Euclidean distance.
        kwargs: Arguments of `torchmetrics.Metric`.

    >>> metric = WeightDivergence()
    >>> metric.update({"w": torch.tensor([3.0, 1.0])}, {"w": torch.zeros(2)})
    >>> metric.compute()
    tensor(4., dtype=torch.float64)
    """

    higher_is_better = False
    plot_upper_bound = None

    def __init__(self, order: float = 1, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        check_at_least(1, order=order)
        self.order = order
        # The state has the order in its name, because collections merge metrics whose states are equal after an update.
        self._state = f"divergence_{order:g}".replace(".", "_")
        self.add_state(self._state, torch.zeros(2, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, weights: StateLike, other: StateLike) -> None:
        distance = weight_divergence(weights, other, self.order)
        total: Tensor = getattr(self, self._state)
        total += torch.stack([distance, torch.ones_like(distance)]).to(total.device)

    def compute(self) -> Tensor:
        distance, pairs = getattr(self, self._state)
        return torch.as_tensor(distance / pairs)


class WeightAlignment(ClassMetric):
    r"""Measures the weight alignment of a layer: the share of neurons that prefer one class in two models.

    A neuron prefers the class $\arg\max_c h_c$. Source: Lee et al. 2022, arXiv:2106.03097, Eq. 19 and Table 2. `update`
    takes the layer's outputs after its ReLU in both models, `first` and `second` (B, n), and `target` (B,). `compute`
    gives () float64 in [0, 1].

    Args:
        num_classes: Number C of classes, ≥ 1.
        num_neurons: Number n of neurons, ≥ 1.
        kwargs: Arguments of `torchmetrics.Metric`.

    >>> metric = WeightAlignment(num_classes=2, num_neurons=2)
    >>> metric.update(torch.eye(2), torch.ones(2, 2).triu(), torch.tensor([0, 1]))
    >>> metric.compute()
    tensor(0.5000, dtype=torch.float64)
    """

    higher_is_better = True
    activation_sums: Tensor
    activation_samples: Tensor

    def __init__(self, num_classes: int, num_neurons: int, **kwargs: Any) -> None:
        super().__init__(num_classes, **kwargs)
        check_at_least(1, num_neurons=num_neurons)
        sums = torch.zeros(2, num_classes, num_neurons, dtype=torch.float64)
        self.add_state("activation_sums", sums, dist_reduce_fx="sum")
        self.add_state("activation_samples", torch.zeros(num_classes, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, first: Tensor, second: Tensor, target: Tensor) -> None:
        sums, samples = activation_sums(torch.stack([first, second]), target, num_classes=self.num_classes)
        self.activation_sums += sums
        self.activation_samples += samples

    def compute(self) -> Tensor:
        of_first, of_second = self.activation_sums
        first = preferred_by_sums(of_first, self.activation_samples)
        second = preferred_by_sums(of_second, self.activation_samples)
        return weight_alignment(first, second).masked_fill(self.activation_samples.sum() == 0, torch.nan)
