"""Metrics over clients: the accuracy of each client's model, and what local training forgets."""

from typing import Any, Literal

import torch
from torch import Tensor

from fl_lightning.functional.accuracy import answer_counts, class_accuracy, class_counts
from fl_lightning.functional.forgetting import forgetting_degree
from fl_lightning.functional.summary import fairness
from fl_lightning.metrics.base import ClassMetric, FederatedMetric
from fl_lightning.utils.settings import check_above, check_at_least, check_at_most, check_choice


class ClientAccuracy(FederatedMetric):
    """Measures the accuracy of every client's model on its own test samples.

    `update` takes `preds`, scores (B, C, ...) or classes (B, ...), `target` (B, ...) and `client_id`, one number for
    the batch. `compute` gives (N,) float64, NaN for a client without test samples. The metrics over clients share their
    states in a `MetricCollection`, where `client_id` is given by name.

    Args:
        num_clients: Number N of clients, ≥ 1.
        kwargs: Arguments of `torchmetrics.Metric`.

    >>> metric = ClientAccuracy(num_clients=2)
    >>> metric.update(torch.tensor([0, 1]), torch.tensor([0, 0]), client_id=1)
    >>> metric.compute()
    tensor([   nan, 0.5000], dtype=torch.float64)
    """

    higher_is_better: bool | None = True
    plot_legend_name = "client"
    client_counts: Tensor

    def __init__(self, num_clients: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        check_at_least(1, num_clients=num_clients)
        self.add_state("client_counts", torch.zeros(2, num_clients, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, preds: Tensor, target: Tensor, client_id: int) -> None:
        self.client_counts[:, client_id] += answer_counts(preds, target)

    def compute(self) -> Any:
        return class_accuracy(self.client_counts)


class ALMA(ClientAccuracy):
    r"""Measures the average local model accuracy $\frac{1}{N} \sum_n \mathrm{acc}(w_n, D_n^{test})$.

    The mean is over the clients with test samples. Source: Seyedmohammadi et al. 2024, arXiv:2403.11892 (KnFu).
    Arguments and `update` are those of `ClientAccuracy`. `compute` gives () float64.

    >>> metric = ALMA(num_clients=3)
    >>> metric.update(torch.tensor([0, 1]), torch.tensor([0, 0]), client_id=1)
    >>> metric.update(torch.tensor([0]), torch.tensor([0]), client_id=2)
    >>> metric.compute()
    tensor(0.7500, dtype=torch.float64)
    """

    plot_legend_name = None  # type: ignore[assignment]

    def compute(self) -> Any:
        return super().compute().nanmean()


class InitialAccuracy(ALMA):
    """Measures the initial accuracy: `ALMA` of the global model before local training.

    Source: Yao and Sun 2020, arXiv:2005.12657 (FedCL), Table 1.
    """


class PersonalisedAccuracy(ALMA):
    """Measures the personalised accuracy: `ALMA` of the participating clients' models after local training.

    Source: Yao and Sun 2020, arXiv:2005.12657 (FedCL), Table 1.
    """


class ClientFairness(ClientAccuracy):
    """Measures the standard deviation of the clients' accuracies (divisor n − 1), and the mean of the worst of them.

    Source: Li et al. 2020, arXiv:1905.10497, Sec. 5. `update` is that of `ClientAccuracy`. `compute` gives a dict
    `{"std": (), "worst": ()}`, float64.

    Args:
        num_clients: Number N of clients, ≥ 1.
        worst_share: Share of the clients in (0, 1] whose mean `worst` is, at least one client.
        kwargs: Arguments of `torchmetrics.Metric`.

    >>> metric = ClientFairness(num_clients=2)
    >>> for client_id, answer in enumerate([0, 1]):
    ...     metric.update(torch.tensor([answer]), torch.tensor([0]), client_id)
    >>> metric.compute()
    {'std': tensor(0.7071, dtype=torch.float64), 'worst': tensor(0., dtype=torch.float64)}
    """

    higher_is_better = None
    plot_legend_name = None  # type: ignore[assignment]

    def __init__(self, num_clients: int, worst_share: float = 0.1, **kwargs: Any) -> None:
        super().__init__(num_clients, **kwargs)
        check_above(0, worst_share=worst_share)
        check_at_most(1, worst_share=worst_share)
        self.worst_share = worst_share

    def compute(self) -> Any:
        return fairness(super().compute(), self.worst_share)._asdict()


class ForgettingDegree(ClassMetric):
    r"""Measures the forgetting degree $\tau_c = (A_c(w_g) - A_c(w_i)) / (A_c(w_g) + \xi)$ of local training.

    Source: FedKA, Eq. 1. `update` takes `global_preds` and `local_preds`, scores (B, C, ...) or classes (B, ...) of the
    received and of the trained model, and `target` (B, ...). `compute` gives (C,) float64 in (−∞, 1], or () with
    `average="macro"`. If the received model recognizes no sample of a class, τ has no meaning and is NaN, unless
    `keep_invalid` is set. The mean is over the classes whose τ is a number.

    Args:
        num_classes: Number C of classes, ≥ 1.
        average: Average that is computed. `none`: a value for every class. `macro`: the mean over the classes.
        xi: Constant ξ of the denominator, > 0.
        keep_invalid: Whether a class with A_c(w_g) = 0 has the value of the formula.
        kwargs: Arguments of `torchmetrics.Metric`.

    >>> metric = ForgettingDegree(num_classes=3)
    >>> metric.update(torch.tensor([0, 1, 1, 0]), torch.tensor([0, 0, 1, 2]), torch.tensor([0, 1, 1, 2]))
    >>> metric.compute()
    tensor([0.0000, 0.5000,    nan], dtype=torch.float64)
    """

    higher_is_better = False
    plot_lower_bound = None
    plot_legend_name = "class"
    degree_counts: Tensor

    def __init__(
        self,
        num_classes: int,
        average: Literal["none", "macro"] = "none",
        xi: float = 1e-8,
        keep_invalid: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(num_classes, **kwargs)
        check_choice(("none", "macro"), average=average)
        check_above(0, xi=xi)
        self.average = average
        self.xi = xi
        self.keep_invalid = keep_invalid
        self.add_state("degree_counts", torch.zeros(2, 2, num_classes, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, global_preds: Tensor, local_preds: Tensor, target: Tensor) -> None:
        received = class_counts(global_preds, target, num_classes=self.num_classes)
        trained = class_counts(local_preds, target, num_classes=self.num_classes)
        self.degree_counts += torch.stack([received, trained])

    def compute(self) -> Tensor:
        received, trained = class_accuracy(self.degree_counts)
        degree = forgetting_degree(received, trained, xi=self.xi)
        if not self.keep_invalid:
            degree = degree.masked_fill(received == 0, torch.nan)
        return degree if self.average == "none" else degree.nanmean()
