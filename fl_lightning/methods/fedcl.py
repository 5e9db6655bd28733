"""FedCL: penalise local changes of the weights that matter on the server's proxy data.

Source: Yao and Sun, ICIP 2020, arXiv:2005.12657, Eqs. 1-3, Alg. 1. Server: FedAvg, and Ω every `interval` rounds.
Two further Ω that the paper names: `importance: mas`, Memory Aware Synapses (Aljundi et al., ECCV 2018,
arXiv:1711.09601, Eq. 2 with the squared norm of the outputs), and `importance: si`, Synaptic Intelligence (Zenke et
al., ICML 2017, arXiv:1703.04200, Eqs. 3 and 5).
Note: the released code squares gradients of batch means and keeps one number for each tensor (`importance: tensor`). It
has the clients estimate Ω on their own data in rounds that send none (`when_missing: local`). The defaults here are the
paper's. The code's `mas` is of batch means and one number for each tensor, too, divided by the number of logits. Ours
is the source's. `si` is defined along a training, and no source says how a server that does not train finds it: the
walk is ours.
"""

from collections.abc import Iterable
from math import ceil
from typing import Any, Literal

import torch
from torch import Tensor
from torch.func import functional_call

from fl_lightning.aggregation import ServerModule
from fl_lightning.client import ClientModule
from fl_lightning.functional.importance import importance as estimated
from fl_lightning.functional.importance import importance_penalty, path_importance, samples_at_once
from fl_lightning.functional.state import to_float32
from fl_lightning.types import Batch, Broadcast, ClientData, State
from fl_lightning.utils.settings import check_above, check_at_least, check_choice


def extra_communication(rounds: int, interval: int) -> float:
    """Compute the extra traffic over FedAvg's: Ω, as large as the model, goes down in ⌈T/interval⌉ of T rounds (§2.3).

    >>> extra_communication(rounds=100, interval=10)
    0.05
    """
    return ceil(rounds / interval) / (2 * rounds)


def with_mean_one(omega: State, weights: State) -> State:
    """Divide Ω by its mean over all parameters. An Ω of 0 stays 0.

    Args:
        omega: Ω by name, shaped as the weights, or 0-d for a whole tensor.
        weights: The weights by name, whose numbers count.

    >>> with_mean_one({"w": torch.tensor([1.0, 3.0])}, {"w": torch.zeros(2)})
    {'w': tensor([0.5000, 1.5000])}
    """
    sizes = {name: weights[name].numel() / value.numel() for name, value in omega.items()}
    total = torch.stack([value.sum(dtype=torch.float64) * sizes[name] for name, value in omega.items()]).sum()
    mean = total / sum(value.numel() for value in weights.values())
    mean = torch.where(mean > 0, mean, 1.0)
    return {name: (value / mean).to(value.dtype) for name, value in omega.items()}


class FedCLServer(ServerModule):
    """Estimates Ω on the proxy set in rounds 0, interval, 2 · interval and so on, and sends it."""

    needs = frozenset({"proxy", "labels"})
    takes_stale = True

    def __init__(self) -> None:
        super().__init__()
        self.importance: State = {}

    def setup(self) -> None:
        self.client_of(FedCL)

    def begin_round(self, cohort: list[int]) -> None:
        client = self.client_of(FedCL)
        self.importance = {}
        if client.is_fedavg_equivalent or self.server.round_idx % client.interval:
            return
        weights = {name: self.server.weights[name] for name in self.server.trainable}
        if weights:
            proxy = self.server.data("proxy")
            indices = torch.split(torch.arange(len(proxy)), client.samples_at_once(weights))
            self.importance = client.importance_of(weights, proxy.batches(indices, None))

    def broadcast(self, exchange: str, client_id: int) -> Broadcast:
        if not self.importance:
            return self.sends(exchange)
        return self.sends(exchange, importance=self.importance)


class FedCL(ClientModule):
    """Trains with the loss L + strength · Σ_j Ω_j (w_j − w_g,j)² over the shared trainable parameters (Eq. 3).

    Args:
        strength: Weight λ ≥ 0. 0 is FedAvg, and nothing is estimated or sent.
        interval: Number of rounds from one Ω to the next, from round 0 on.
        importance: Form of Ω. `abs` or `square` of per-sample gradients of the loss. `tensor`: one number for each
            tensor. `mas`: as `abs`, of ‖f(x)‖² in place of the loss, where f are the net's logits, without labels.
            `si`: the contribution of each parameter to the fall of the loss in one pass of plain SGD over the proxy
            set, in its order and in eval mode (`path_importance`). The pass does not change the model.
        when_missing: Ω of the client in a round that sends none. `identity`: all ones, which is FedProx with μ = 2λ.
            `cached`: the last Ω that the client got, ones if it got none. `local`: Ω that the client estimates on its
            own data with the received weights.
        normalization: `none`, or `mean_one`: Ω is divided by its mean over all parameters.
        importance_batch: Number of samples in a batch with `importance: tensor` or `si`.
        importance_lr: Learning rate of the pass of `importance: si`, > 0, the same in all rounds.
        base: Arguments of `ClientModule`.
    """

    server_class = FedCLServer
    fedavg_equivalent = {"strength": 0}
    stackable = True

    def __init__(  # noqa: PLR0917 - called by position
        self,
        strength: float = 0.5,
        interval: int = 1,
        importance: Literal["abs", "square", "tensor", "mas", "si"] = "abs",
        when_missing: Literal["identity", "cached", "local"] = "identity",
        normalization: Literal["none", "mean_one"] = "none",
        importance_batch: int = 64,
        importance_lr: float = 0.01,
        **base: Any,
    ) -> None:
        super().__init__(**base)
        check_at_least(0, "0 is FedAvg", strength=strength)
        check_at_least(1, interval=interval, importance_batch=importance_batch)
        check_above(0, importance_lr=importance_lr)
        check_choice(("abs", "square", "tensor", "mas", "si"), importance=importance)
        check_choice(("identity", "cached", "local"), when_missing=when_missing)
        check_choice(("none", "mean_one"), normalization=normalization)
        if importance == "mas" and self.module is not None:
            raise ValueError(
                f"importance=mas needs the logits of a net, got module={type(self.module).__name__}; give FedCL "
                f"net= (a factory of a classifier), or set importance to abs, square, tensor or si"
            )
        self.strength = strength
        self.interval = interval
        self.importance = importance
        self.when_missing = when_missing
        self.normalization = normalization
        self.importance_batch = importance_batch
        self.importance_lr = importance_lr

    def samples_at_once(self, weights: State) -> int:
        """Return the number of samples whose gradients are taken together."""
        if self.importance in ("tensor", "si"):
            return self.importance_batch
        return samples_at_once(weights)

    def squared_norm_at(self, params: State, batch: Batch) -> Tensor:
        """Compute the mean ‖f(x)‖² of a batch at other values of some parameters, by name, in full precision."""
        x, *_ = batch
        entries = {name.removeprefix("net."): value for name, value in params.items()}
        logits = functional_call(self.built_net, entries, (x,))
        return to_float32(logits).square().sum(1).mean()

    def importance_of(self, weights: State, batches: Iterable[Batch]) -> State:
        """Estimate Ω with the net in eval mode.

        Args:
            weights: The shared trainable weights at which Ω is estimated, by name.
            batches: The samples, on any device.
        """
        with self.evaluation_mode():
            given = self.transfer_each(batches)
            if self.importance == "si":
                omega = path_importance(self.loss_at, weights, given, lr=self.importance_lr)
            elif self.importance == "mas":
                omega = estimated(self.squared_norm_at, weights, given, kind="abs")
            else:
                omega = estimated(self.loss_at, weights, given, kind=self.importance)
        return omega if self.normalization == "none" else with_mean_one(omega, weights)

    def receive(self, broadcast: Broadcast, local: ClientData) -> None:
        weights = self.received
        omega = self._omega(broadcast, local)
        if omega is None:
            omega = {name: torch.ones_like(value) for name, value in weights.items()}
        else:
            entries = sum(value.numel() for value in weights.values())
            total = torch.stack([value.expand_as(weights[name]).sum() for name, value in omega.items()]).sum()
            self.log("train/importance", total / entries, batch_size=1)
        self.round_buffer("importance", dict(omega))

    def _omega(self, broadcast: Broadcast, local: ClientData) -> State | None:
        """Return the client's Ω in a round, as `when_missing` asks if the server sends none. None is all ones."""
        weights = self.received
        omega: State | None = broadcast.extras.get("importance")
        if self.when_missing == "cached":
            if omega is not None:
                self.memory["importance"] = omega
            return self.memory.get("importance")
        if omega is None and self.when_missing == "local" and local.size() and weights:
            return self.importance_of(weights, local.batches(batch_size=self.samples_at_once(weights)))
        return omega

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = self.local_loss(batch, batch_idx)
        penalty = importance_penalty(self.params(), self.received, self.round["importance"])
        self.log("train/penalty", penalty)
        return loss + self.strength * penalty
