"""FedPAC: features that agree on the classes' prototypes, and for each client a head combined of all clients'.

Source: Xu et al., ICLR 2023, arXiv:2306.11867, Algorithm 1 and Eqs. 6-11. Server: FedAvg of the body.
Note: a class without a prototype yet is aligned to the client's own mean. A class that nobody has in a round keeps its
prototype. A client without data keeps its head and is no candidate.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fl_lightning.aggregation import PrototypeServer
from fl_lightning.client import PersonalHeadClient
from fl_lightning.functional.class_means import ClassMeans
from fl_lightning.functional.losses import cross_entropy
from fl_lightning.functional.simplex import semidefinite, simplex_minimum
from fl_lightning.functional.state import clone, to_float32, weighted_mean
from fl_lightning.types import Batch, Broadcast, ClientData, ClientUpdate, Phase, State
from fl_lightning.utils.settings import check_above, check_at_least


class Statistics(NamedTuple):
    """Holds class means μ_c (C, d), h = p_c μ_c (C, d), and v (), the variance of a head's risk, of one client."""

    means: Tensor
    h: Tensor
    v: Tensor


class FeatureSums(ClassMeans):
    """Accumulates Σ ‖f‖² over all samples, (), besides the class means."""

    def __init__(self, num_classes: int, width: int, device: torch.device | None = None) -> None:
        super().__init__(num_classes, width, device)
        self.squares = torch.zeros((), dtype=torch.float64, device=device)

    def add(self, features: Tensor, labels: Tensor) -> None:
        super().add(features, labels)
        self.squares += features.double().square().sum()

    @property
    def statistics(self) -> Statistics:
        """The class means, h and v = (mean ‖f‖² − Σ_c p_c² ‖μ_c‖²) / n so far, float64. An absent class has 0."""
        n = self.counts.sum().clamp(min=1)
        h = self.totals / n
        v = (self.squares / n - h.square().sum()) / n
        return Statistics(means=self.means, h=h, v=v)


def feature_statistics(features: Tensor, labels: Tensor, num_classes: int) -> Statistics:
    """Compute the statistics of the features of all samples at once: (n, d), (n,) -> float64."""
    sums = FeatureSums(num_classes, width=features.shape[1], device=features.device)
    sums.add(features, labels)
    return sums.statistics


def discrepancies(h: Tensor, v: Tensor, i: int) -> Tensor:
    """Compute P = diag(v) + [⟨h_i − h_j, h_i − h_k⟩] of client i (Eq. 10): (m, C, d), (m,) -> (m, m).

    Args:
        h: h of all m clients.
        v: v of all m clients.
        i: Place of the client among them.
    """
    away = (h[i] - h).flatten(1)
    return v.diag() + away @ away.T


def head_weights(matrix: Tensor) -> Tensor | None:
    """Minimize αᵀ P α over the simplex (Eq. 11), and set weights below 0.001 to 0: (m, m) -> (m,).

    It is None if there is no solution, or if all weights are solutions: P is 0 if all features are 0.
    """
    weights = simplex_minimum(semidefinite(matrix, least=0.01))
    if weights is None or not bool(matrix.any()):
        return None
    kept = torch.where(weights < 1e-3, 0.0, weights)
    return kept / kept.sum()


def combinations(h: Tensor, v: Tensor) -> Tensor:
    """Compute the weights of all heads in the head of each client: (m, C, d), (m,) -> (m, m).

    Without a solution the client takes its own head alone.
    """
    own = torch.eye(len(h)).to(h)
    rows: list[Tensor] = []
    for i in range(len(h)):
        weights = head_weights(discrepancies(h, v, i))
        rows.append(own[i] if weights is None else weights)
    return torch.stack(rows)


class FedPACServer(PrototypeServer):
    """Averages prototypes by class counts, and combines a head for each participant.

    Attributes:
        combined: Weights of the heads of the last round by client, each (m,) float64 over the participants with data.
    """

    def __init__(self) -> None:
        super().__init__()
        self.combined: dict[int, Tensor] = {}
        self._heads: dict[int, State] = {}

    def setup(self) -> None:
        self.allocate_prototypes(self.client_of(FedPAC).head)

    def broadcast(self, exchange: str, client_id: int) -> Broadcast:
        if exchange == "heads":
            head: dict[str, Any] = {}
            # A client that was skipped for an update that is not finite gets no head.
            if client_id in self._heads:
                head["head"] = self._heads[client_id]
            return Broadcast(
                round_idx=self.server.round_idx,
                exchange=exchange,
                weights=None,
                extras=head,
                uploads=False,
            )
        if not self.server.round_idx:
            return self.sends(exchange)
        return self.sends(exchange, prototypes=self.prototypes, seen=self.seen)

    def add(self, update: ClientUpdate) -> None:
        if "h" in update.extras:
            self.sum_prototypes(
                means=update.extras["prototypes"],
                weights=update.extras["counts"],
                included=update.included,
            )
            self.gather(update, weights=False)

    def finish(self, exchange: str, aggregate: State | None) -> State | None:
        if exchange == "train":
            self.renew_prototypes()
            self._combine()
        return aggregate

    def _combine(self) -> None:
        """Combine the heads of the participants with data for each of them, and leave the others their own."""
        self._heads = {client_id: row.extras["head"] for client_id, row in self.rows_with("included").items()}
        self.combined = {}
        rows = self.rows_with("num_samples")
        if not rows:
            return
        # The small programs are solved on the host, which reads the stacked values at once.
        h = torch.stack([row.extras["h"].double() for row in rows.values()]).cpu()
        v = torch.stack([row.extras["v"].double() for row in rows.values()]).cpu()
        self.combined = dict(zip(rows, combinations(h, v), strict=True))
        heads = [row.extras["head"] for row in rows.values()]
        for client_id, weights in self.combined.items():
            self._heads[client_id] = weighted_mean(heads, weights.tolist())


class FedPAC(PersonalHeadClient):
    """Trains the head alone, then the body alone with cross-entropy + lam · mean squared distance to the prototypes.

    The prototypes serve from round 1 on.

    Args:
        lam: Weight λ of the alignment, >= 0. 0 leaves it out.
        head_epochs: Number of passes that train the head, >= 0. The body takes the loop's `local_epochs`.
        head_lr: Learning rate of the head before the loop's `lr_decay`, > 0. The body has the optimizer's.
        base: Arguments of `ClientModule`, which must include `net`.
    """

    server_class = FedPACServer
    exchanges = ("train", "heads")
    reads = frozenset({"batches", "label counts"})
    stackable = False  # the phases train different parts of the net
    sends = frozenset({"weights", "statistics", "prototypes", "label counts", "personal means"})

    def __init__(self, lam: float = 1.0, head_epochs: int = 1, head_lr: float = 0.1, **base: Any) -> None:
        super().__init__(**base)
        check_at_least(0, "0 leaves its part out", lam=lam, head_epochs=head_epochs)
        check_above(0, head_lr=head_lr)
        self.lam = lam
        self.head_epochs = head_epochs
        self.head_lr = head_lr

    def statistics(self, local: ClientData) -> Statistics:
        """Compute the statistics of the client's samples under the body as it is, in eval mode."""
        head = self.head
        sums = FeatureSums(head.out_features, head.in_features, device=head.weight.device)
        self.features_over(local, sums.add)
        return sums.statistics

    def receive(self, broadcast: Broadcast, local: ClientData) -> None:
        if broadcast.exchange == "heads":
            self.head.load_state_dict(broadcast.extras.get("head", self.head.state_dict()))
            return
        statistics = self.statistics(local)
        self.round_buffer("own", statistics._asdict())
        if "prototypes" in broadcast.extras and self.lam:
            seen = broadcast.extras["seen"][:, None]
            self.round_buffer("targets", torch.where(seen, broadcast.extras["prototypes"], statistics.means))

    def phases(self, exchange: str) -> Iterator[Phase]:
        if exchange == "train":
            yield Phase(epochs=self.head_epochs, trains=self.head_names(), lr=self.head_lr)
            self.round["in_body"] = True
            yield Phase(trains=self.body_names())

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        x, y = batch
        features = self.features(x)
        with self.forward_context():
            loss = cross_entropy(self.head(features), y)
        self.log("train/ce", loss)
        if "targets" not in self.round or "in_body" not in self.round:
            return loss
        distance = F.mse_loss(to_float32(features), self.round["targets"][y])
        self.log("train/alignment", distance)
        return loss + self.lam * distance

    def reply(self, exchange: str, local: ClientData) -> dict[str, Any]:
        if exchange == "heads":
            return {}
        before = self.round["own"]
        after = self.statistics(local).means
        return {
            "h": before["h"],
            "v": before["v"],
            "prototypes": after.to(before["h"].dtype),
            "counts": local.label_counts.to(after.device),
            "head": clone(self.head.state_dict()),
        }
