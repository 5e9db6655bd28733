"""FedNova: a rule that divides every client's update by the length of its local training, so that all count alike.

Source: Wang et al., NeurIPS 2020, arXiv:2007.07481, Eq. 5. Clients: any with SGD; FedProx's term is in their length.
The length is the accumulated lr E_i: how far the local optimizer would have moved a scalar whose gradient is 1 (the
paper's ‖a_i‖₁ times the learning rate). A client that did not move (no step, or a learning rate of 0) is left out.
Note: τ_eff Σ p_i / E_i may exceed 1, the more so the more unequal the lengths are. With momentum they are more unequal
than the numbers of steps. Training then needs smaller learning rates than FedAvg's.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import compress
from typing import Any, Literal

import torch
from pytorch_lightning.utilities import rank_zero_warn
from torch import nn

from fl_lightning.aggregation import Aggregator
from fl_lightning.client.optimizers import parse_optimizers
from fl_lightning.functional import state as S
from fl_lightning.types import ClientUpdate, State
from fl_lightning.utils.settings import check_choice

LARGEST_WEIGHT = 5.0
"""Weight τ_eff p_i / E_i of a single update above which the rule warns."""


def effective_length(lengths: Sequence[float], sizes: Sequence[float]) -> float:
    """Compute τ_eff = Σ p_i E_i with p_i = n_i / Σ n_j.

    Args:
        lengths: Lengths E_i of the clients.
        sizes: Weights n_i of the clients.

    >>> effective_length([1.0, 4.0], sizes=[2, 1])
    2.0
    """
    return sum(n * length for n, length in zip(sizes, lengths, strict=True)) / sum(sizes)


class FedNovaAggregator(Aggregator):
    """Takes w ← w + τ_eff Σ p_i Δ_i / E_i over the trainable weights, and the mean for the rest.

    Args:
        tau_eff: Form of τ_eff. `accumulated_lr`: Σ p_i E_i, with which clients that train alike give FedAvg. `steps`:
            η Σ p_i K_i, as the authors' code has with a proximal term. It needs one local learning rate η.
        base: Arguments of `Aggregator`.
    """

    needs = frozenset({"accumulated_lr", "start"})

    def __init__(self, tau_eff: Literal["accumulated_lr", "steps"] = "accumulated_lr", **base: Any) -> None:
        super().__init__(**base)
        check_choice(("accumulated_lr", "steps"), tau_eff=tau_eff)
        self.counts_steps = tau_eff == "steps"
        self.tau_eff = nn.Buffer(torch.zeros((), dtype=torch.float64))
        """τ_eff of the last round: a length, or a number of steps with `steps`."""

    def setup(self) -> None:
        if not self.counts_steps:
            return
        client: Any = self.server.module
        _, schedulers = parse_optimizers(client.configure_optimizers(), type(client).__name__)
        if schedulers:
            raise ValueError(
                "tau_eff=steps needs one local learning rate in a round, but the local optimizer has a scheduler; set "
                "tau_eff to accumulated_lr, which follows it"
            )

    def client_statistics(self, update: ClientUpdate) -> dict[str, Any]:
        if update.weights is None:
            return {}
        if not self.counts_steps or not update.accumulated_lr:
            return {"length": update.accumulated_lr}
        return {"length": update.accumulated_lr / update.lr, "steps": update.num_steps - update.idle_steps}

    def add(self, update: ClientUpdate) -> None:
        super().add(update)
        if update.weights is None or not update.accumulated_lr:
            return
        extras = {name: update.extras[name] for name in ("length", "steps") if name in update.extras}
        length = extras["length"]
        start = self.server.weights
        moved: State = {}
        for name in self.server.trainable:
            moved[name] = (update.weights[name].double() - start[name].double()) / length
        self.sum("moved", moved, self.weight(update))
        self.gather(replace(update, extras=extras), weights=False)

    def finish(self) -> State | None:
        mean = super().finish()
        gathered = [row for _, row in sorted(self.rows.items())]
        weights = S.to_host([torch.as_tensor(self.weight(row)) for row in gathered])
        rows = list(compress(gathered, weights))
        sizes = [weight for weight in weights if weight]
        if mean is None or not rows:
            return mean
        lengths = [row.extras["length"] for row in rows]
        # With `steps` these are K_i, and the lengths above are E_i / η.
        counted = [row.extras["steps"] for row in rows] if self.counts_steps else lengths
        tau_eff = effective_length(counted, sizes=sizes)
        self.tau_eff.fill_(tau_eff)
        shares = [tau_eff * n / (sum(sizes) * length) for n, length in zip(sizes, lengths, strict=True)]
        self._warn_of_largest(shares, rows)
        start = self.server.weights
        step = S.scale(self.summed("moved"), tau_eff / sum(sizes))
        return self.moved(mean, {name: start[name].double() + value for name, value in step.items()})

    def _warn_of_largest(self, shares: Sequence[float], rows: Sequence[ClientUpdate]) -> None:
        """Warn if a single update has a very large weight.

        Args:
            shares: Weight τ_eff p_i / E_i of each update.
            rows: The updates.
        """
        largest = max(shares)
        if largest > LARGEST_WEIGHT:
            client_id = rows[shares.index(largest)].client_id
            rank_zero_warn(
                f"FedNova weighs the update of client {client_id} by {largest:.1f} in round {self.server.round_idx}, "
                f"because it trained far less than the others; give clients work of like length"
            )
