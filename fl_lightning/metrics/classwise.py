"""Metrics of one model's class-wise accuracies."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fl_lightning.functional.accuracy import (
    answers_and_samples,
    class_accuracy,
    class_counts,
    class_weighted_accuracy,
    confusion_counts,
    distribution_distance,
    group_means,
    normalised_class_accuracy,
)
from fl_lightning.functional.classes import class_split, in_local, out_local
from fl_lightning.functional.state import to_float32
from fl_lightning.metrics.base import ClassMetric


class ClasswiseAccuracy(ClassMetric):
    r"""Accuracy of each class, $A_c = \mathrm{hits}_c / \mathrm{samples}_c$, NaN for a class without samples.

    `update` takes `preds`, scores (B, C, ...) or classes (B, ...), and `target` (B, ...); `compute` gives (C,) float64.
    The class-wise metrics share their states in a `MetricCollection`; `ClasswiseWrapper` names the classes.

    Args:
        num_classes: C ≥ 1.
        kwargs: of `torchmetrics.Metric`.

    >>> metric = ClasswiseAccuracy(num_classes=3)
    >>> metric.update(torch.tensor([0, 0, 1]), torch.tensor([0, 1, 1]))
    >>> metric.compute()
    tensor([1.0000, 0.5000,    nan], dtype=torch.float64)
    """

    higher_is_better: bool | None = True
    plot_legend_name = "class"
    class_counts: Tensor

    def __init__(self, num_classes: int, **kwargs: Any) -> None:
        super().__init__(num_classes, **kwargs)
        self.add_state("class_counts", torch.zeros(2, num_classes, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, preds: Tensor, target: Tensor) -> None:
        self.class_counts += class_counts(preds, target, self.num_classes)

    def compute(self) -> Any:
        return class_accuracy(self.class_counts)


class NormalisedClassAccuracy(ClasswiseAccuracy):
    r"""Class-wise accuracy as a distribution, $\tilde A_c = A_c / \sum_c A_c$.

    Source: Lee et al. 2022, arXiv:2106.03097, Fig. 10. `update` and arguments are those of
    `ClasswiseAccuracy`; `compute` gives (C,) float64, NaN without samples.

    >>> metric = NormalisedClassAccuracy(num_classes=2)
    >>> metric.update(torch.tensor([0, 0, 1]), torch.tensor([0, 1, 1]))
    >>> metric.compute()
    tensor([0.6667, 0.3333], dtype=torch.float64)
    """

    higher_is_better = None

    def compute(self) -> Any:
        return normalised_class_accuracy(super().compute())


class _OfClients(ClasswiseAccuracy):
    """A metric of class-wise accuracies and of clients' training samples by class.

    Args:
        label_counts: training samples of each class: of one client (C,), or of several (N, C).
        kwargs: of `torchmetrics.Metric`.
    """

    plot_legend_name = "client"
    label_counts: Tensor

    def __init__(self, label_counts: Tensor, **kwargs: Any) -> None:
        label_counts = torch.as_tensor(label_counts)
        super().__init__(label_counts.shape[-1], **kwargs)
        self.register_buffer("label_counts", label_counts, persistent=False)


class InLocalAccuracy(_OfClients):
    r"""In-local accuracy $\sum_c p_c A_c$, $p_c = n_c / n$: accuracy on the classes as the client has them.

    Source: Lee et al. 2022, arXiv:2106.03097, Definition 1. `update` is that of `ClasswiseAccuracy`, on samples of all
    classes; `compute` gives () float64, or (N,) for several clients.

    Args:
        label_counts: training samples of each class: of one client (C,), or of several (N, C).
        kwargs: of `torchmetrics.Metric`.

    >>> metric = InLocalAccuracy(torch.tensor([9, 1]))
    >>> metric.update(torch.tensor([0, 0]), torch.tensor([0, 1]))
    >>> metric.compute()
    tensor(0.9000, dtype=torch.float64)
    """

    def compute(self) -> Any:
        return class_weighted_accuracy(super().compute(), in_local(self.label_counts))


class OutLocalAccuracy(_OfClients):
    r"""Out-local accuracy $\sum_c \tilde p_c A_c$, $\tilde p_c = (1 - p_c) / (C - 1)$, on what a client lacks.

    Source: Lee et al. 2022, arXiv:2106.03097, Definition 1. Arguments, `update` and `compute` are those of
    `InLocalAccuracy`.

    >>> metric = OutLocalAccuracy(torch.tensor([9, 1]))
    >>> metric.update(torch.tensor([0, 0]), torch.tensor([0, 1]))
    >>> metric.compute()
    tensor(0.1000, dtype=torch.float64)
    """

    def compute(self) -> Any:
        return class_weighted_accuracy(super().compute(), out_local(self.label_counts))


class DistributionDistance(_OfClients):
    r"""Distance $\lVert \tilde A - p \rVert_1$ of normalised class-wise accuracies from a client's classes, in [0, 2].

    Source: Lee et al. 2022, arXiv:2106.03097, Sec. 5.2. Arguments, `update` and `compute` are those of
    `InLocalAccuracy`.

    >>> metric = DistributionDistance(torch.tensor([[1, 1], [0, 2]]))
    >>> metric.update(torch.tensor([0, 0]), torch.tensor([0, 1]))
    >>> metric.compute()
    tensor([1., 2.], dtype=torch.float64)
    """

    higher_is_better = False
    plot_upper_bound = 2.0

    def compute(self) -> Any:
        return distribution_distance(super().compute(), in_local(self.label_counts))


class ClassGroupAccuracy(_OfClients):
    """Mean accuracy of the missing, the non-dominant and the dominant classes of a client.

    Source: FedKA's classes; FedED calls them empty, minority and majority (`names`). `update` is that of
    `ClasswiseAccuracy`; `compute` gives a dict of () float64, or (N,) for several clients; NaN for a group without
    classes.

    Args:
        label_counts: training samples of each class: of one client (C,), or of several (N, C).
        gamma: least share of a dominant class, ≥ 0; None: 0.5 / C.
        names: of the three groups.
        kwargs: of `torchmetrics.Metric`.

    >>> metric = ClassGroupAccuracy(torch.tensor([0, 1, 99]), gamma=0.05, names=("empty", "minority", "majority"))
    >>> metric.update(torch.tensor([0, 2, 2]), torch.tensor([0, 1, 2]))
    >>> {name: value.item() for name, value in metric.compute().items()}
    {'empty': 1.0, 'minority': 0.0, 'majority': 1.0}
    """

    plot_legend_name = None  # type: ignore[assignment]

    def __init__(
        self,
        label_counts: Tensor,
        gamma: float | None = None,
        names: tuple[str, str, str] = ("missing", "non_dominant", "dominant"),
        **kwargs: Any,
    ) -> None:
        super().__init__(label_counts, **kwargs)
        self.gamma = 0.5 / self.num_classes if gamma is None else gamma
        self.names = names

    def compute(self) -> Any:
        means = group_means(super().compute(), class_split(self.label_counts, self.gamma))
        return dict(zip(self.names, means, strict=True))


class ClassifierScores(ClassMetric):
    """Class-wise accuracies, the accuracy and the mean cross-entropy, in one pass over the logits.

    `update` takes `logits` (B, C) and `target` (B,); `compute` gives (C + 2,) float64: A_c (NaN without samples), the
    share of all samples that is recognised, and the mean cross-entropy in nats.

    Args:
        num_classes: C ≥ 1.
        confusion: whether to count as which class the samples of each class are taken. The state then grows with C².
        kwargs: of `torchmetrics.Metric`.

    Attributes:
        class_samples: samples of each class over all processes, (C,), once the values are computed.
        confusion: (C, C + 1) float64 as `confusion_counts` gives it, over all processes, once the values are computed.
            None without the argument of this name.

    >>> metric = ClassifierScores(num_classes=2)
    >>> metric.update(torch.zeros(4, 2), torch.tensor([0, 0, 0, 1]))
    >>> metric.compute()
    tensor([1.0000, 0.0000, 0.7500, 0.6931], dtype=torch.float64)
    """

    plot_upper_bound = None
    scores: Tensor
    class_samples: Tensor

    def __init__(self, num_classes: int, confusion: bool = False, **kwargs: Any) -> None:
        super().__init__(num_classes, **kwargs)
        self.confusion: Tensor | None = None
        self._counts_confusion = confusion
        num_counts = num_classes * (num_classes + 1) if confusion else 2 * num_classes
        self.add_state("scores", torch.zeros(num_counts + 1, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, logits: Tensor, target: Tensor) -> None:
        logits = to_float32(logits)
        count = confusion_counts if self._counts_confusion else class_counts
        self.scores[:-1] += count(logits, target, self.num_classes).view(-1)
        self.scores[-1] += F.cross_entropy(logits, target, reduction="sum")

    def compute(self) -> Tensor:
        if self._counts_confusion:
            self.confusion = self.scores[:-1].view(self.num_classes, -1).clone()
            counts = answers_and_samples(self.confusion)
        else:
            counts = self.scores[:-1].view(2, -1)
        self.class_samples = counts[1].clone()
        overall = torch.stack([counts[0].sum(), self.scores[-1]]) / counts[1].sum()
        return torch.cat([class_accuracy(counts), overall])
