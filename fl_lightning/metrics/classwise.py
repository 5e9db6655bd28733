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
    r"""Measures the accuracy of each class, $A_c = \mathrm{hits}_c / \mathrm{samples}_c$.

    `update` takes `preds`, scores (B, C, ...) or classes (B, ...), and `target` (B, ...). `compute` gives (C,) float64,
    NaN for a class without samples. The class-wise metrics share their states in a `MetricCollection`. torchmetrics'
    `ClasswiseWrapper` names the classes.

    Args:
        num_classes: Number C of classes, ≥ 1.
        kwargs: Arguments of `torchmetrics.Metric`.

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
    r"""Measures the class-wise accuracy as a distribution, $\tilde A_c = A_c / \sum_c A_c$.

    Source: Lee et al. 2022, arXiv:2106.03097, Fig. 10. Arguments and `update` are those of `ClasswiseAccuracy`.
    `compute` gives (C,) float64, NaN without samples.

    >>> metric = NormalisedClassAccuracy(num_classes=2)
    >>> metric.update(torch.tensor([0, 0, 1]), torch.tensor([0, 1, 1]))
    >>> metric.compute()
    tensor([0.6667, 0.3333], dtype=torch.float64)
    """

    higher_is_better = None

    def compute(self) -> Any:
        return normalised_class_accuracy(super().compute())


class _OfClients(ClasswiseAccuracy):
    """Keeps the clients' training samples by class. It is the base of metrics that weigh classes by them.

    Args:
        label_counts: Number of training samples of each class: (C,) of one client, or (N, C) of several.
        kwargs: Arguments of `torchmetrics.Metric`.
    """

    plot_legend_name = "client"
    label_counts: Tensor

    def __init__(self, label_counts: Tensor, **kwargs: Any) -> None:
        label_counts = torch.as_tensor(label_counts)
        super().__init__(label_counts.shape[-1], **kwargs)
        self.register_buffer("label_counts", label_counts, persistent=False)


class InLocalAccuracy(_OfClients):
    r"""Measures the in-local accuracy $\sum_c p_c A_c$, $p_c = n_c / n$, on the classes as the client has them.

    Source: Lee et al. 2022, arXiv:2106.03097, Definition 1. `update` is that of `ClasswiseAccuracy`, on samples of all
    classes. `compute` gives () float64, or (N,) for several clients.

    Args:
        label_counts: Number of training samples of each class: (C,) of one client, or (N, C) of several.
        kwargs: Arguments of `torchmetrics.Metric`.

    >>> metric = InLocalAccuracy(torch.tensor([9, 1]))
    >>> metric.update(torch.tensor([0, 0]), torch.tensor([0, 1]))
    >>> metric.compute()
    tensor(0.9000, dtype=torch.float64)
    """

    def compute(self) -> Any:
        return class_weighted_accuracy(super().compute(), in_local(self.label_counts))


class OutLocalAccuracy(_OfClients):
    r"""Measures the out-local accuracy $\sum_c \tilde p_c A_c$, on the classes that a client lacks.

    The weights are $\tilde p_c = (1 - p_c) / (C - 1)$. Source: Lee et al. 2022, arXiv:2106.03097, Definition 1.
    Arguments, `update` and `compute` are those of `InLocalAccuracy`.

    >>> metric = OutLocalAccuracy(torch.tensor([9, 1]))
    >>> metric.update(torch.tensor([0, 0]), torch.tensor([0, 1]))
    >>> metric.compute()
    tensor(0.1000, dtype=torch.float64)
    """

    def compute(self) -> Any:
        return class_weighted_accuracy(super().compute(), out_local(self.label_counts))


class DistributionDistance(_OfClients):
    r"""Measures the distance $\lVert \tilde A - p \rVert_1$ of normalised accuracies from a client's classes.

    It lies in [0, 2]. Source: Lee et al. 2022, arXiv:2106.03097, Sec. 5.2. Arguments, `update` and `compute` are those
    of `InLocalAccuracy`.

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
    """Measures the mean accuracy of the missing, the non-dominant and the dominant classes of a client.

    Source: FedKA's classes, which FedED calls empty, minority and majority (`names`). `update` is that of
    `ClasswiseAccuracy`. `compute` gives a dict of () float64, or (N,) for several clients, NaN for a group without
    classes.

    Args:
        label_counts: Number of training samples of each class: (C,) of one client, or (N, C) of several.
        gamma: Least share of a dominant class among the client's samples, ≥ 0. None: 0.5 / C.
        names: Names of the three groups.
        kwargs: Arguments of `torchmetrics.Metric`.

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
        groups = class_split(self.label_counts, self.gamma)
        means = group_means(super().compute(), groups)
        return dict(zip(self.names, means, strict=True))


class ClassifierScores(ClassMetric):
    """Measures class-wise accuracies, the accuracy and the mean cross-entropy, in one pass over the logits.

    `update` takes `logits` (B, C) and `target` (B,). `compute` gives (C + 2,) float64: A_c (NaN without samples), the
    share of all samples that is recognized, and the mean cross-entropy in nats.

    Args:
        num_classes: Number C of classes, ≥ 1.
        confusion: Whether to count as which class the samples of each class are taken. The state then grows with C².
        kwargs: Arguments of `torchmetrics.Metric`.

    Attributes:
        class_samples: Number of samples of each class over all processes, (C,). It is there once values are computed.
        confusion: Counts (C, C + 1) float64 over all processes, as `confusion_counts` gives them, once values are
            computed. None: they are not counted.

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
        # The counts, and the sum of the cross-entropy.
        self.add_state("scores", torch.zeros(num_counts + 1, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, logits: Tensor, target: Tensor) -> None:
        logits = to_float32(logits)
        if self._counts_confusion:
            counts = confusion_counts(logits, target, num_classes=self.num_classes)
        else:
            counts = class_counts(logits, target, num_classes=self.num_classes)
        self.scores[:-1] += counts.view(-1)
        self.scores[-1] += F.cross_entropy(logits, target, reduction="sum")

    def compute(self) -> Tensor:
        if self._counts_confusion:
            self.confusion = self.scores[:-1].view(self.num_classes, -1).clone()
            counts = answers_and_samples(self.confusion)
        else:
            counts = self.scores[:-1].view(2, -1)
        hits, samples = counts
        self.class_samples = samples.clone()
        overall = torch.stack([hits.sum(), self.scores[-1]]) / samples.sum()
        return torch.cat([class_accuracy(counts), overall])
