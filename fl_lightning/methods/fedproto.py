"""FedProto: own models whose features are pulled to class prototypes, which are all that is exchanged.

Source: Tan et al., AAAI 2022, arXiv:2105.00243, Algorithm 1 and Eqs. 6-9. Server: means of the clients' class means.
Note: Eq. 6 divides the mean, which is weighted by the numbers of samples, by the number of clients once more, so that
clients that agree on 4 would get 1. That division is left out. The authors' code takes the plain mean over clients
(`weighting: uniform`), and gathers features during the last epoch. Here a pass after training gathers them in eval
mode, so that they depend neither on the order of the samples nor on augmentation.
"""

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fl_lightning.aggregation import Aggregator, PrototypeServer
from fl_lightning.client import ClientModule, check_features, heads_of
from fl_lightning.functional.class_means import ClassMeans
from fl_lightning.functional.losses import cross_entropy
from fl_lightning.functional.state import clone, to_float32
from fl_lightning.types import Batch, Broadcast, ClientData, ClientUpdate, State
from fl_lightning.utils.settings import check_at_least, check_choice

PROTOTYPES = "prototypes"
"""Key of the prototypes (C, d) and of the flags of the classes that have one, (C,), in a client's memory."""


def distance_to_prototypes(features: Tensor, labels: Tensor, prototypes: Tensor, seen: Tensor) -> Tensor:
    """Compute 1/(B·d) Σ_b s(y_b) ‖f_b − C̄(y_b)‖², where s is 1 for a class with a prototype, else 0.

    Args:
        features: Features f that the head reads, (B, d).
        labels: Class y of each sample, (B,) int64.
        prototypes: Prototypes C̄, (C, d).
        seen: Whether a class has a prototype, (C,) bool.

    Returns:
        (), >= 0, in float32 or better.

    >>> prototypes, seen = torch.tensor([[1.0, 0.0], [0.0, 0.0]]), torch.tensor([True, False])
    >>> distance_to_prototypes(torch.tensor([[3.0, 0.0], [5.0, 5.0]]), torch.tensor([0, 1]), prototypes, seen)
    tensor(1.)
    """
    away = to_float32(features) - prototypes[labels]
    return torch.where(seen[labels].unsqueeze(-1), away, 0.0).square().mean()


def prototype_logits(features: Tensor, prototypes: Tensor, seen: Tensor) -> Tensor:
    """Compute −‖f − C̄(c)‖² / d for each class (Eq. 9), −inf for a class without a prototype: (B, d) -> (B, C).

    Args:
        features: Features f, (B, d).
        prototypes: Prototypes C̄, (C, d).
        seen: Whether a class has a prototype, (C,) bool.

    >>> prototypes, seen = torch.tensor([[1.0, 0.0], [0.0, 0.0]]), torch.tensor([True, False])
    >>> prototype_logits(torch.tensor([[3.0, 0.0]]), prototypes, seen)
    tensor([[-2., -inf]])
    """
    features = to_float32(features)
    prototypes = prototypes.to(features.dtype)
    # Differences, because products of near vectors would lose digits.
    distances = torch.cdist(features, prototypes, compute_mode="donot_use_mm_for_euclid_dist")
    logits = -distances.square() / prototypes.shape[1]
    return logits.masked_fill(~seen, -torch.inf)


class FedProtoServer(PrototypeServer):
    """Averages the prototypes of the clients of a round, and sends them from round 1 on, without weights."""

    def setup(self) -> None:
        self.allocate_prototypes(self.client_of(FedProto).built_net.head)

    def check_aggregator(self, aggregator: Aggregator) -> None:
        super().check_aggregator(aggregator)
        if aggregator.weighting != "samples":
            raise ValueError(
                f"model.aggregator.weighting weighs the weights of clients, which those of FedProto keep, got "
                f"{aggregator.weighting!r}; set model.client.weighting={aggregator.weighting}"
            )

    def broadcast(self, exchange: str, client_id: int) -> Broadcast:
        extras: dict[str, Any] = {}
        if self.server.round_idx:
            head = self.client_of(FedProto).built_net.head
            extras["prototypes"] = self.prototypes.to(to_float32(head.weight).dtype)
            extras["seen"] = self.seen
        return Broadcast(
            round_idx=self.server.round_idx,
            exchange=exchange,
            weights=None,
            extras=extras,
            uploads=False,
        )

    def add(self, update: ClientUpdate) -> None:
        weights = update.extras["counts"]
        if self.client_of(FedProto).weighting == "uniform":
            weights = weights > 0
        self.sum_prototypes(means=update.extras["prototypes"], weights=weights, included=update.included)

    def finish(self, exchange: str, aggregate: State | None) -> State | None:
        self.renew_prototypes()
        return aggregate


class FedProto(ClientModule):
    """Trains with the loss CE + lam · mean squared distance of the features to the prototypes, from round 1 on.

    The nets of the clients may differ except in the number of features that their heads read.

    Args:
        lam: Weight λ of the distance, >= 0. 0 trains as Local.
        weighting: Weight of a client in the prototype of a class. `samples` is its number of samples of the class,
            `uniform` is 1 for a client that has the class.
        predicts: What a client deploys. `prototypes`: the class of the nearest prototype, and its head until it has
            received any. `head`: its head.
        base: Arguments of `ClientModule`, which must include `net`.

    Raises:
        ValueError: The heads of the clients' nets read features of different numbers. The error comes when the nets
            are built.
    """

    server_class = FedProtoServer
    needs = frozenset({"logits", "clients"})
    stackable = True
    sends = frozenset({"prototypes", "label counts"})
    reads = frozenset({"batches"})

    def __init__(
        self,
        lam: float = 1.0,
        weighting: Literal["samples", "uniform"] = "samples",
        predicts: Literal["prototypes", "head"] = "prototypes",
        **base: Any,
    ) -> None:
        super().__init__(**base)
        check_at_least(0, "0 trains as Local", lam=lam)
        check_choice(("samples", "uniform"), weighting=weighting)
        check_choice(("prototypes", "head"), predicts=predicts)
        self.lam = lam
        self.weighting = weighting
        self.predicts = predicts

    def build(self, num_classes: int | None, input_shape: tuple[int, ...] | None) -> None:
        super().build(num_classes, input_shape)
        check_features(self, type(self).__name__)
        check_widths(self)

    def is_personal(self, name: str, owner: nn.Module) -> bool:
        return True

    def receive(self, broadcast: Broadcast, local: ClientData) -> None:
        if "prototypes" not in broadcast.extras:
            return
        received = {name: broadcast.extras[name] for name in ("prototypes", "seen")}
        self.memory[PROTOTYPES] = clone(received)
        for name, value in received.items():
            self.round_buffer(name, value)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        if "prototypes" not in self.round or not self.lam:
            return self.local_loss(batch, batch_idx)
        x, y = batch
        features = self.features(x)
        with self.forward_context():
            logits = self.built_net.head(features)
        ce = cross_entropy(logits, y)
        distance = distance_to_prototypes(features, y, prototypes=self.round["prototypes"], seen=self.round["seen"])
        self.log_dict({"train/ce": ce, "train/distance": distance})
        return ce + self.lam * distance

    def reply(self, exchange: str, local: ClientData) -> dict[str, Any]:
        head = self.built_net.head
        classes = ClassMeans(head.out_features, head.in_features, device=head.weight.device)
        self.features_over(local, classes.add)
        means = classes.means.to(to_float32(head.weight).dtype)
        return {"prototypes": means, "counts": classes.counts.long()}

    def deployed(self) -> Callable[[Tensor], Tensor]:
        received = self.memory.get(PROTOTYPES)
        if self.predicts == "head" or received is None or not received["seen"].any():
            return self
        return self.nearest_prototypes

    def nearest_prototypes(self, x: Tensor) -> Tensor:
        """Return the logits of the prototypes that the client received last: (B, ...) -> (B, C).

        Args:
            x: The inputs.
        """
        received = self.memory[PROTOTYPES]
        return prototype_logits(self.features(x), prototypes=received["prototypes"], seen=received["seen"])


def check_widths(client: ClientModule) -> None:
    """Refuse nets whose heads read features of different numbers, between which no mean can be taken.

    Args:
        client: A client whose nets are built.

    Raises:
        ValueError: The numbers differ, or a net has no head.
    """
    widths = sorted({head.in_features for head in heads_of(client)})
    if len(widths) > 1:
        raise ValueError(
            f"{type(client).__name__} needs nets whose heads read equally many features, got "
            f"{' and '.join(map(str, widths))}; give all nets the same width before the head"
        )
