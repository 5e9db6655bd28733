"""CCVR: the server trains the head anew on features that it draws from Gaussians, one for each class.

Source: Luo et al., NeurIPS 2021, arXiv:2106.05001. Virtual features, passes and the learning rate are fluke's, whose
SGD has no momentum.
Clients and rule: any that share a head and have no server side of their own; set as `model.server_module`.
Note: the calibrated model is evaluated and never fed back, so that training is that of the clients' own method. The
cohort of the round is asked, not all clients. A class that none of these has is left out of the softmax. A client with
personal entries, such as FedBN's, takes its features under them.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Optimizer

from fl_lightning.aggregation import Aggregator, Inquiry, ServerModule, StateBuffers
from fl_lightning.client import ClientModule
from fl_lightning.functional.class_means import ClassCovariances
from fl_lightning.functional.state import to_float32
from fl_lightning.types import Broadcast, ClientData, ClientUpdate, Read, Sent, State
from fl_lightning.utils.life import heartbeat
from fl_lightning.utils.settings import check_above, check_at_least, check_choice, check_count

HEAD = "net.head."
"""First part of the names of the head's entries."""

WEIGHT = f"{HEAD}weight"
BIAS = f"{HEAD}bias"

SMALLEST_EIGENVALUE = 1e-12
"""Eigenvalues up to this share of the largest one are rounding errors."""


class ClassMoments(NamedTuple):
    """Holds the number of samples N_c (C,), mean μ_c (C, d) and unbiased covariance Σ_c of each class, float64.

    Σ_c is (C, d, d), or its diagonals (C, d). Mean and covariance are 0 without samples, and Σ_c is 0 for one sample.
    """

    counts: Tensor
    means: Tensor
    covariances: Tensor


def outer(means: Tensor, *, diagonal: bool) -> Tensor:
    """Compute μ_c μ_cᵀ, or the diagonals of these products: (C, d) -> (C, d, d) or (C, d)."""
    if diagonal:
        return means.square()
    return means[:, :, None] * means[:, None, :]


def symmetric_root(covariance: Tensor) -> Tensor:
    """Compute V √λ Vᵀ of a covariance that may be singular: (d, d) -> (d, d).

    Args:
        covariance: Symmetric matrix, whose eigenvalues λ ≤ 1e-12 λ_max count as 0.

    >>> symmetric_root(torch.tensor([[4.0, 0.0], [0.0, 0.0]], dtype=torch.float64)).tolist()
    [[2.0, 0.0], [0.0, 0.0]]
    """
    eigenvalues, vectors = torch.linalg.eigh(covariance)
    kept = torch.where(eigenvalues > SMALLEST_EIGENVALUE * eigenvalues[-1], eigenvalues, 0.0).clamp(min=0)
    root: Tensor = vectors * kept.sqrt() @ vectors.T
    return root


class ClassStatistics(Inquiry):
    """Sends the moments of a client's features under the new global model, in eval mode.

    Args:
        diagonal: Whether only the variances are sent.
    """

    exchange = "statistics"
    sends: frozenset[Sent] = frozenset({"statistics", "label counts"})
    reads: frozenset[Read] = frozenset({"batches"})

    def __init__(self, *, diagonal: bool) -> None:
        self.diagonal = diagonal

    def answer(self, client: ClientModule, broadcast: Broadcast, local: ClientData) -> dict[str, Any]:
        head = client.built_net.head
        classes = ClassCovariances(
            head.out_features,
            head.in_features,
            device=head.weight.device,
            diagonal=self.diagonal,
        )
        client.features_over(local, classes.add)
        dtype = to_float32(head.weight).dtype
        return {
            "counts": classes.counts.long(),
            "means": classes.means.to(dtype),
            "covariances": classes.covariances.to(dtype),
        }


class CCVRServer(ServerModule):
    """Calibrates the head of the new global model, after the last planned round or every so many rounds.

    Args:
        every: Number of rounds k from one calibration to the next, ≥ 1. The last planned round is calibrated, too. None
            calibrates after the last planned round only, as the paper does.
        samples_per_class: Number of virtual features M of each class that the cohort has, ≥ 1.
        covariance: Part of Σ_c that the clients send: `full` or `diagonal`.
        calibration_epochs: Number of passes E_c over the virtual features, ≥ 0. 0 leaves the head as it is.
        calibration_lr: Learning rate η_c of SGD, > 0.
        calibration_momentum: Momentum of SGD, in [0, 1).
        calibration_batch: Number of virtual features in a step, ≥ 1. `full` takes all.

    Attributes:
        calibrated: Entries of the calibrated head, float64.
        is_calibrated: Whether the last round was calibrated, () bool.
    """

    needs = frozenset({"logits"})
    stale_reason = "asks the clients of a round for statistics of the new model, in a further exchange"

    def __init__(  # noqa: PLR0917 - called by position
        self,
        every: int | None = None,
        samples_per_class: int = 1000,
        covariance: Literal["full", "diagonal"] = "full",
        calibration_epochs: int = 1,
        calibration_lr: float = 0.01,
        calibration_momentum: float = 0.9,
        calibration_batch: int | Literal["full"] = 64,
    ) -> None:
        super().__init__()
        check_count(1, "None is the last round", every=every)
        check_count(1, samples_per_class=samples_per_class)
        check_choice(("full", "diagonal"), covariance=covariance)
        check_count(0, "0 leaves the head as it is", calibration_epochs=calibration_epochs)
        check_above(0, calibration_lr=calibration_lr)
        check_at_least(0, calibration_momentum=calibration_momentum)
        if not calibration_momentum < 1:
            raise ValueError(f"calibration_momentum must lie in [0, 1), got {calibration_momentum}; set it to 0.9")
        if calibration_batch != "full":
            check_count(1, "'full' takes all virtual features", calibration_batch=calibration_batch)
        self.every = every
        self.samples_per_class = samples_per_class
        self.covariance = covariance
        self.calibration_epochs = calibration_epochs
        self.calibration_lr = calibration_lr
        self.calibration_momentum = calibration_momentum
        self.calibration_batch = calibration_batch
        self.inquiry = ClassStatistics(diagonal=self.is_diagonal)
        self.calibrated = StateBuffers({})
        self.is_calibrated = nn.Buffer(torch.zeros((), dtype=torch.bool))

    @classmethod
    def plans(cls, arguments: Mapping[str, Any]) -> bool:
        return arguments.get("every") != 1

    @property
    def is_diagonal(self) -> bool:
        """Whether clients send only the diagonals of the covariances."""
        return self.covariance == "diagonal"

    def inquires(self, round_idx: int) -> bool:
        """Return True in a round whose head is calibrated.

        Raises:
            ValueError: Only the last round is calibrated, and no number of rounds is planned.
        """
        number = round_idx + 1
        if self.every is not None and number % self.every == 0:
            return True
        planned = self.server.planned_rounds
        if planned is None and self.every is None:
            raise ValueError(
                "every=None of CCVRServer calibrates the head after the last planned round, and no number of rounds is "
                "planned; set trainer.max_epochs, or every"
            )
        return number == planned

    def setup(self) -> None:
        net = self.client_of(ClientModule).built_net
        head = getattr(net, "head", None)
        if not isinstance(head, nn.Linear) or not is_plain(head):
            raise ValueError(
                f"CCVRServer trains a torch.nn.Linear called head, the last layer of the net, and {type(net).__name__} "
                f"has {type(head).__name__} there; derive the net from fl_lightning.nets.Backbone, with such a head"
            )
        names = [f"{HEAD}{name}" for name, _ in head.named_parameters()]
        for name in names:
            if name not in self.server.weights:
                raise ValueError(
                    f"CCVRServer calibrates a head that the clients share, but {name!r} stays with each client; leave "
                    f"model.personal unset, or take a client that shares its head, such as FedAvg"
                )
        self.calibrated = self.server_state(names)
        self.inquires(0)

    def check_aggregator(self, aggregator: Aggregator) -> None:
        super().check_aggregator(aggregator)
        if aggregator.averages:
            raise ValueError(
                f"CCVRServer calibrates the head for the weights with which a round ends, and "
                f"{type(aggregator).__name__} evaluates averages of them; turn these off (average_last=false), or "
                f"take another rule"
            )

    def check_server_optimizer(self, optimizer: Optimizer) -> None:
        raise ValueError(
            f"a server_optimizer ({type(optimizer).__name__}) moves the weights after CCVRServer has asked for their "
            f"features; leave model.server_optimizer unset"
        )

    def begin_round(self, cohort: list[int]) -> None:
        if self.server.weights is not self.server.exact_weights:
            raise ValueError(
                "CCVRServer asks for features under the weights with which a round ends, and a codec that also codes "
                "what is sent down (down=True) changes them after that; leave down unset"
            )
        self.is_calibrated.fill_(value=False)

    def broadcast(self, exchange: str, client_id: int) -> Broadcast:
        message = self.sends(exchange)
        return replace(message, uploads=False) if exchange == ClassStatistics.exchange else message

    def add(self, update: ClientUpdate) -> None:
        if "covariances" not in update.extras:
            return
        counts = update.extras["counts"].double()
        means = update.extras["means"].double()
        covariances = update.extras["covariances"].double()
        between = outer(means, diagonal=self.is_diagonal)
        between = per_class(counts, between) * between
        # Two parts of half the digits each are summed without rounding, so that the order of clients does not matter.
        coarse = between.float().double()
        sums = {
            "counts": counts,
            "first": counts[:, None] * means,
            "within": per_class((counts - 1).clamp(min=0), covariances) * covariances,
            "between": coarse,
            "rest": between - coarse,
        }
        self.sum("moments", sums, 1.0 * update.included)

    def finish(self, exchange: str, aggregate: State | None) -> State | None:
        sums = self.summed("moments")
        if sums:
            moments = self.merged({name: value.cpu() for name, value in sums.items()})
            # The run ends by the name of the client whose features are not finite, once the round is judged.
            is_finite = all(bool(value.isfinite().all()) for value in moments)
            if is_finite and bool(moments.counts.any()):
                self._keep(self.calibrate(moments))
        return aggregate

    def merged(self, sums: State) -> ClassMoments:
        """Compute the moments over all clients of the cohort.

        Args:
            sums: The sums that `add` has made, by name.
        """
        counts = sums["counts"]
        means = sums["first"] / counts.clamp(min=1)[:, None]
        second = sums["within"] + (sums["between"] + sums["rest"])
        between = outer(means, diagonal=self.is_diagonal)
        scatter = second - per_class(counts, between) * between
        degrees = (counts - 1).clamp(min=1)
        return ClassMoments(counts=counts, means=means, covariances=scatter / per_class(degrees, scatter))

    def noise(self, width: int) -> Iterator[Tensor]:
        """Draw ε for the classes in turn, also for a class that nobody has, each (M, d) float64.

        Args:
            width: Number of features d.
        """
        generator = self.server.generator("virtual features")
        while True:
            yield torch.randn(self.samples_per_class, width, generator=generator, dtype=torch.float64)

    def virtual_features(self, moments: ClassMoments) -> tuple[Tensor, Tensor]:
        """Draw μ_c + Σ_c^½ ε for every class with samples: features (n, d) float64 and their classes (n,)."""
        features: list[Tensor] = []
        classes: list[int] = []
        noise_of_classes = self.noise(moments.means.shape[1])
        for c, count in enumerate(moments.counts.tolist()):
            noise = next(noise_of_classes)
            if not count:
                continue
            covariance = moments.covariances[c]
            if self.is_diagonal:
                spread = noise * covariance.clamp(min=0).sqrt()
            else:
                spread = noise @ symmetric_root(covariance)
            features.append(moments.means[c] + spread)
            classes.append(c)
        labels = torch.tensor(classes).repeat_interleave(self.samples_per_class)
        return torch.cat(features), labels

    def calibrate(self, moments: ClassMoments) -> State:
        """Train the head of the new global model on virtual features, on the CPU.

        Args:
            moments: Moments of the classes, at least one of which has samples.

        Returns:
            The entries of the head, by name, in float32 or better.
        """
        params: State = {}
        for name in self.calibrated:
            params[name] = to_float32(self.server.weights[name]).cpu().clone().requires_grad_()
        weight = params[WEIGHT]
        features, labels = self.virtual_features(moments)
        x = features.to(weight.dtype)
        present = moments.counts.nonzero().flatten()
        targets = torch.searchsorted(present, labels)
        optimizer = SGD(params.values(), lr=self.calibration_lr, momentum=self.calibration_momentum)
        for rows in self.order(len(x)):
            heartbeat()
            with torch.enable_grad():
                logits = F.linear(x[rows], weight, params.get(BIAS))
                loss = F.cross_entropy(logits[:, present], targets[rows])
                gradients = torch.autograd.grad(loss, list(params.values()))
            for parameter, gradient in zip(params.values(), gradients, strict=True):
                parameter.grad = gradient
            optimizer.step()
        return {name: value.detach() for name, value in params.items()}

    def order(self, num_features: int) -> Iterator[Tensor]:
        """Draw the virtual features of each step, (B,) int64, pass after pass in a new order.

        Args:
            num_features: Number of virtual features.
        """
        generator = self.server.generator("order of virtual features")
        size = num_features if self.calibration_batch == "full" else self.calibration_batch
        for _ in range(self.calibration_epochs):
            yield from torch.split(torch.randperm(num_features, generator=generator), size)

    def _keep(self, head: State) -> None:
        """Keep a calibrated head for the evaluation."""
        for name, value in head.items():
            self.calibrated[name].copy_(value)
        self.is_calibrated.fill_(value=True)

    def evaluation_weights(self, weights: State) -> State:
        """Return the weights with the calibrated head after a round that has one, else the weights themselves."""
        if not self.is_calibrated:
            return weights
        head = {name: value.to(weights[name].dtype, copy=True) for name, value in self.calibrated.items()}
        return {**weights, **head}


def is_plain(head: nn.Linear) -> bool:
    """Return True if a head computes W x + b from its own parameters, as torch's does."""
    names = {f"{HEAD}{name}" for name, _ in head.named_parameters()}
    return type(head).forward is nn.Linear.forward and names <= {WEIGHT, BIAS}


def per_class(numbers: Tensor, values: Tensor) -> Tensor:
    """Return numbers of the classes with the axes of values, to multiply both: (C,), (C, ...) -> (C, 1, ...)."""
    further_axes = (1,) * (values.dim() - 1)
    return numbers.reshape(numbers.shape + further_axes)
