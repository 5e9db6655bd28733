"""Prototypes of the classes at the server: means of the clients' class means, which outlast rounds without a class."""

import torch
from torch import Tensor, nn

from fl_lightning.aggregation.server_parts import ServerModule


class PrototypeServer(ServerModule):
    """Keeps a prototype for each class, which is a weighted mean of the class means of the clients of a round.

    A class that no client of the round has keeps its prototype. A subclass calls `allocate_prototypes` in `setup`,
    `sum_prototypes` in `add` and `renew_prototypes` in `finish`.

    Attributes:
        prototypes: The prototypes, (C, d) float64. A class without a prototype has 0.
        seen: Whether a class has a prototype, (C,) bool.
    """

    stale_reason = "keeps prototypes of the features of the present model, which a client that is late has not"

    def __init__(self) -> None:
        super().__init__()
        self.prototypes = nn.Buffer(torch.empty(0, 0, dtype=torch.float64))
        self.seen = nn.Buffer(torch.empty(0, dtype=torch.bool))

    def allocate_prototypes(self, head: nn.Linear) -> None:
        """Allocate the prototypes of the features that a head reads, before there are any.

        Args:
            head: The head, from d features to C classes.
        """
        weight = head.weight
        self.prototypes = nn.Buffer(torch.zeros_like(weight, dtype=torch.float64))
        self.seen = nn.Buffer(torch.zeros(len(weight), dtype=torch.bool, device=weight.device))

    def sum_prototypes(self, means: Tensor, weights: Tensor, included: bool | Tensor = True) -> None:
        """Add the class means of a client to the sums of the exchange.

        Args:
            means: The class means of the client, (C, d).
            weights: The weight of the client in each class, ≥ 0, (C,). It must be 0 in a class that the client lacks.
            included: `ClientUpdate.included` of the client's update.
        """
        weights = weights.double()
        sums = {"total": weights[:, None] * means.double(), "counts": weights}
        self.sum("classes", sums, 1.0 * included)

    def renew_prototypes(self) -> None:
        """Replace the prototypes of the classes that the clients of the exchange have, all clients added up."""
        classes = self.summed("classes")
        if not classes:
            return
        weights = classes["counts"][:, None]
        has_any = weights > 0
        means = classes["total"] / torch.where(has_any, weights, 1)
        self.prototypes.copy_(torch.where(has_any, means, self.prototypes))
        self.seen.logical_or_(has_any[:, 0])
