"""Metrics of what clients and server exchange: knowledge and bytes."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fl_lightning.functional.classes import estimated_distribution
from fl_lightning.functional.state import to_float32
from fl_lightning.functional.traffic import traffic
from fl_lightning.metrics.base import ClassMetric, FederatedMetric


class EstimatedDistribution(ClassMetric):
    r"""Measures the estimated class distribution (EPD) of a model, $p = \frac{1}{K} \sum_i \mathrm{softmax}(f(x_i))$.

    Source: Seyedmohammadi et al. 2024, arXiv:2403.11892 (KnFu), Eq. 5. `update` takes logits (B, C). `compute` gives
    (C,) float64, NaN without samples.

    Args:
        num_classes: Number C of classes, ≥ 1.
        logits: Whether `update` is given logits. Otherwise it is given probabilities.
        kwargs: Arguments of `torchmetrics.Metric`.

    >>> metric = EstimatedDistribution(num_classes=2, logits=False)
    >>> metric.update(torch.tensor([[0.9, 0.1], [0.5, 0.5]]))
    >>> metric.compute()
    tensor([0.7000, 0.3000], dtype=torch.float64)
    """

    higher_is_better = None
    plot_legend_name = "class"
    probability_sums: Tensor
    num_predictions: Tensor

    def __init__(self, num_classes: int, logits: bool = True, **kwargs: Any) -> None:
        super().__init__(num_classes, **kwargs)
        self.logits = logits
        self.add_state("probability_sums", torch.zeros(num_classes, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("num_predictions", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, preds: Tensor) -> None:
        if not len(preds):
            return
        probabilities = to_float32(preds).softmax(1) if self.logits else preds
        self.probability_sums += len(preds) * estimated_distribution(probabilities)
        self.num_predictions += len(preds)

    def compute(self) -> Tensor:
        return self.probability_sums / self.num_predictions


class CommunicationCost(FederatedMetric):
    """Counts the bytes that went down to clients and up from them, by the types of the values (`functional.traffic`).

    `update` takes the content of a message, `down` or `up` or both: tensors, numbers, and nested dicts or lists of
    them, by name. `compute` gives a dict `{"bytes_down": (), "bytes_up": ()}`, float64.

    Args:
        kwargs: Arguments of `torchmetrics.Metric`.

    >>> metric = CommunicationCost()
    >>> metric.update(down={"weight": torch.zeros(10), "num_batches_tracked": torch.tensor(3)})
    >>> metric.update(up={"weight": torch.zeros(10), "norm": 0.5})
    >>> {name: value.item() for name, value in metric.compute().items()}
    {'bytes_down': 48.0, 'bytes_up': 48.0}
    """

    higher_is_better = False
    plot_upper_bound = None
    bytes_moved: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_state("bytes_moved", torch.zeros(2, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, down: Mapping[str, Any] | None = None, up: Mapping[str, Any] | None = None) -> None:
        bytes_down = traffic(None, down or {})
        bytes_up = traffic(None, up or {})
        self.bytes_moved += self.bytes_moved.new_tensor([bytes_down, bytes_up])

    def compute(self) -> dict[str, Tensor]:
        down, up = self.bytes_moved
        return {"bytes_down": down, "bytes_up": up}
