"""Accuracy of every class, with the overall accuracy and mean cross-entropy, in one pass."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torchmetrics import Metric

from fl_lightning.functional.state import raised


def count_classes(counts: Tensor, logits: Tensor, target: Tensor) -> None:
    """Add a batch to `counts` in place.

    Args:
        counts: (2C + 1,) float64: right answers by class, samples by class, and the sum of cross-entropies.
        logits: (B, C).
        target: (B,) int64.
    """
    logits = raised(logits)
    classes = logits.shape[1]
    hit = (logits.argmax(1) == target).double()
    counts[:classes].index_add_(0, target, hit)
    counts[classes:-1].index_add_(0, target, torch.ones_like(hit))
    counts[-1] += F.cross_entropy(logits, target, reduction="sum")


def class_accuracies(counts: Tensor) -> Tensor:
    """Compute the accuracy of every class (NaN without samples), the overall one, the mean loss: (C + 2,) float64.

    >>> class_accuracies(torch.tensor([1, 3, 2, 3, 4.0], dtype=torch.float64))
    tensor([0.5000, 1.0000, 0.8000, 0.8000], dtype=torch.float64)
    """
    correct, total = counts[:-1].view(2, -1)
    overall = torch.stack([correct.sum(), counts[-1]]) / total.sum()
    return torch.cat([correct / total, overall])


class ClasswiseAccuracy(Metric):
    """A_c, the share of class c's samples that are recognised, the accuracy, and the mean cross-entropy.

    Args:
        num_classes: C.
        kwargs: of `torchmetrics.Metric`.
    """

    is_differentiable = False
    higher_is_better = True
    full_state_update = False
    counts: Tensor

    def __init__(self, num_classes: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_state("counts", torch.zeros(2 * num_classes + 1, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, logits: Tensor, target: Tensor) -> None:
        """Take a batch: logits (B, C), target (B,)."""
        count_classes(self.counts, logits, target)

    def compute(self) -> Tensor:
        """Compute the values as `class_accuracies` does: (C + 2,) float64."""
        return class_accuracies(self.counts)
