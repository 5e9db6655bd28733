"""Means and covariances of features by class, accumulated batch by batch in float64."""

import torch
from torch import Tensor

from fl_lightning.functional.drift import activation_sums


class ClassMeans:
    """Accumulates the number and the mean of the samples' features of each class, without keeping the features.

    >>> classes = ClassMeans(num_classes=3, width=1)
    >>> classes.add(torch.tensor([[1.0], [2.0]]), torch.tensor([0, 2]))
    >>> classes.add(torch.tensor([[4.0]]), torch.tensor([2]))
    >>> classes.counts.tolist(), classes.means.tolist()
    ([1.0, 0.0, 2.0], [[1.0], [0.0], [3.0]])

    Args:
        num_classes: Number of classes C.
        width: Number of features d of a sample.
        device: Device of the sums, which is that of the features. None is torch's default.

    Attributes:
        counts: Number of samples of each class so far, (C,) float64.
        totals: Sum of the features of each class so far, (C, d) float64.
    """

    def __init__(self, num_classes: int, width: int, device: torch.device | None = None) -> None:
        self.counts = torch.zeros(num_classes, dtype=torch.float64, device=device)
        self.totals = torch.zeros(num_classes, width, dtype=torch.float64, device=device)

    def add(self, features: Tensor, labels: Tensor) -> None:
        """Add the samples of a batch.

        Args:
            features: Features of the samples, (B, d), of any floating-point type.
            labels: Class of each sample, (B,) integers in 0 ... C-1.
        """
        totals, counts = activation_sums(features, labels, len(self.counts))
        self.totals += totals
        self.counts += counts

    @property
    def means(self) -> Tensor:
        """The mean of the features of each class so far, (C, d) float64. A class without a sample has 0."""
        return self.totals / self.counts.clamp(min=1)[:, None]


class ClassCovariances(ClassMeans):
    """Accumulates the covariance of the features of each class, too.

    The batches' scatter matrices are joined about the joint mean (Chan et al. 1979), so that features far from 0 lose
    no digits.

    >>> classes = ClassCovariances(num_classes=2, width=1)
    >>> classes.add(torch.tensor([[1.0], [2.0]]), torch.tensor([0, 1]))
    >>> classes.add(torch.tensor([[4.0]]), torch.tensor([1]))
    >>> classes.covariances.tolist()
    [[[0.0]], [[2.0]]]

    Args:
        num_classes: Number of classes C.
        width: Number of features d of a sample.
        device: Device of the sums, which is that of the features. None is torch's default.
        diagonal: Whether only the diagonals are accumulated, which are the variances.

    Attributes:
        scatter: Sum of (f − μ_c)(f − μ_c)ᵀ over the samples of each class so far, (C, d, d) float64, or its diagonals
            (C, d).
    """

    def __init__(
        self, num_classes: int, width: int, device: torch.device | None = None, *, diagonal: bool = False
    ) -> None:
        super().__init__(num_classes, width, device)
        self.diagonal = diagonal
        shape = (num_classes, width) if diagonal else (num_classes, width, width)
        self.scatter = torch.zeros(shape, dtype=torch.float64, device=device)

    def add(self, features: Tensor, labels: Tensor) -> None:
        for class_idx in sorted(set(labels.tolist())):
            self._add_class(class_idx, features[labels == class_idx].double())
        super().add(features, labels)

    def _add_class(self, class_idx: int, rows: Tensor) -> None:
        """Add the scatter of a batch's samples of one class, before they are added to the class's sum."""
        mean = rows.mean(0)
        away = rows - mean
        self.scatter[class_idx] += self._products(away)
        before = self.counts[class_idx]
        step = mean - self.totals[class_idx] / before.clamp(min=1)
        self.scatter[class_idx] += self._products(step[None]) * (before * len(rows) / (before + len(rows)))

    def _products(self, rows: Tensor) -> Tensor:
        """Sum the products of the features of each row: (B, d) -> (d, d), or (d,) of a diagonal."""
        return rows.square().sum(0) if self.diagonal else rows.T @ rows

    @property
    def covariances(self) -> Tensor:
        """The unbiased covariance of each class so far, (C, d, d) float64, or its diagonals (C, d).

        Classes of fewer than two samples have 0.
        """
        degrees = (self.counts - 1).clamp(min=1)
        return (self.scatter.movedim(0, -1) / degrees).movedim(-1, 0)
