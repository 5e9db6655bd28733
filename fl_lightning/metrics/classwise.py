"""Accuracy of every class, with the overall accuracy and mean cross-entropy, in one pass."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torchmetrics import Metric

from fl_lightning.functional.state import raised


class ClasswiseAccuracy(Metric):
    """Counts what is needed for A_c, the share of class c's samples that are recognised.

    Args:
        num_classes: C.
        kwargs: of `torchmetrics.Metric`.
    """

    is_differentiable = False
    higher_is_better = True
    full_state_update = False
    correct: Tensor
    total: Tensor
    loss: Tensor

    def __init__(self, num_classes: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.num_classes = num_classes
        self.add_state("correct", torch.zeros(num_classes, dtype=torch.int64), dist_reduce_fx="sum")
        self.add_state("total", torch.zeros(num_classes, dtype=torch.int64), dist_reduce_fx="sum")
        self.add_state("loss", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, logits: Tensor, target: Tensor) -> None:
        """Take a batch: logits (B, C), target (B,)."""
        logits = raised(logits)
        hit = logits.argmax(1) == target
        self.correct.index_add_(0, target, hit.to(self.correct.dtype))
        self.total.index_add_(0, target, torch.ones_like(target))
        self.loss += F.cross_entropy(logits, target, reduction="sum")

    def compute(self) -> Tensor:
        """(C + 2,) float64: the accuracy of every class (NaN without samples), the overall one, the mean loss."""
        n = self.total.sum()
        return torch.cat(
            [
                self.correct.double() / self.total,
                (self.correct.sum().double() / n).reshape(1),
                (self.loss / n).reshape(1),
            ]
        )
