"""FedCurv: pull each parameter towards the other clients' weights, as strongly as their Fisher information says.

Source: Shoham et al. 2019, arXiv:1910.07796, Eqs. 3-5. The mean of the clients is FedAvg's.
The server keeps only U = Σ u_j and V = Σ v_j, u_j the diagonal of the Fisher information at the trained weights θ_j and
v_j = u_j θ_j: a client subtracts its own pair, and uploads how it has changed. `scope: last_round` is the paper's sum.
"""

from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from fl_lightning.aggregation import ServerModule, StateBuffers
from fl_lightning.client import ClientModule
from fl_lightning.functional import state as S
from fl_lightning.functional.importance import batch_fisher, importance, samples_at_once
from fl_lightning.types import Batch, Broadcast, ClientData, ClientUpdate, State
from fl_lightning.utils.settings import check_at_least, check_choice, is_plain_sgd


def curvature_penalty(params: State, curvature: State, pull: State) -> Tensor:
    """Compute Σ_k P_k θ_k² − 2 Q_k θ_k: three states of the same names -> ().

    With P = Σ_{j≠i} u_j and Q = Σ_{j≠i} v_j it is Σ_{j≠i} (θ − θ_j)ᵀ diag(u_j) (θ − θ_j) less a constant.
    """
    squares = {name: S.to_float32(value).square() for name, value in params.items()}
    return S.inner(curvature, squares) - 2 * S.inner(pull, params)


class FedCurvServer(ServerModule):
    """FedCurv's server, which keeps U and V of all clients seen, or of the last round's, and sends them.

    Attributes:
        made: with `scope: last_round` the round that U and V are of: not the last one where that was aborted.
    """

    u: StateBuffers
    v: StateBuffers
    made: Tensor | None
    stale_reason = "with scope=last_round compares the rounds of client and server"

    @property
    def takes_stale(self) -> bool:  # type: ignore[override]
        """Whether updates may be of earlier rounds: what a client was sent, it subtracts itself."""
        return self.client_of(FedCurv).scope == "seen"

    def setup(self) -> None:
        client = self.client_of(FedCurv)
        names = () if client.is_fedavg_equivalent else self.server.trainable
        self.u, self.v = self.server_state(names), self.server_state(names)
        of_round = bool(names) and client.scope == "last_round"
        made = torch.tensor(-1, device=self.server.weights[names[0]].device) if of_round else None
        self.register_buffer("made", made)

    def check_server_optimizer(self, optimizer: Optimizer) -> None:
        if not self.client_of(FedCurv).is_fedavg_equivalent and not is_plain_sgd(optimizer):
            raise ValueError(
                f"FedCurv's Fisher information is of the weights that the clients sent, and the global weights must "
                f"stay among these: model.server_optimizer must be torch.optim.SGD without momentum and weight decay, "
                f"got {type(optimizer).__name__}; set that, or leave it unset"
            )

    def broadcast(self, exchange: str, client_id: int) -> Broadcast:
        if self.client_of(FedCurv).is_fedavg_equivalent:
            return self.sends(exchange)
        made = {} if self.made is None else {"made": int(self.made)}
        return self.sends(exchange, u=self.u, v=self.v, **made)

    def add(self, update: ClientUpdate) -> None:
        if "u" in update.extras:
            self.sum("u", update.extras["u"])
            self.sum("v", update.extras["v"])

    def finish(self, exchange: str, aggregate: State | None) -> State | None:
        keeps = self.client_of(FedCurv).scope == "seen"
        for name, kept in (("u", self.u), ("v", self.v)):
            for entry, change in self.summed(name).items():
                kept[entry].mul_(keeps).add_(change)
        if self.made is not None:
            self.made.fill_(self.server.round_idx)
        return aggregate


class FedCurv(ClientModule):
    """Local loss L + λ Σ_{j≠i} (θ − θ_j)ᵀ diag(F_j) (θ − θ_j) over the shared trainable parameters, less a constant.

    Args:
        lam: λ >= 0; 0 is FedAvg, and nothing is estimated or sent. With SGD lr · λ · max(U) must stay well below 1.
        fisher: F_j as mean of squared gradients: of every `sample`, or of every `batch` (up to the batch size times
            smaller, so that λ means something else), the batches being those of the first local epoch.
        fisher_samples: with `fisher: batch`, the batch that passes this number of samples is the last.
        scope: the clients j: all `seen` so far, each with its latest F_j, or those of the `last_round`.
        base: of `ClientModule`.
    """

    server_class = FedCurvServer
    fedavg_equivalent = {"lam": 0}
    stackable = True
    sends = frozenset({"weights", "importance"})
    reads = frozenset({"batches"})

    def __init__(
        self,
        lam: float = 1.0,
        fisher: Literal["sample", "batch"] = "sample",
        fisher_samples: int = 500,
        scope: Literal["seen", "last_round"] = "seen",
        **base: Any,
    ) -> None:
        super().__init__(**base)
        check_at_least(0, "0 is FedAvg", lam=lam)
        check_choice(("sample", "batch"), fisher=fisher)
        check_at_least(1, fisher_samples=fisher_samples)
        check_choice(("seen", "last_round"), scope=scope)
        self.lam = lam
        self.fisher = fisher
        self.fisher_samples = fisher_samples
        self.scope = scope

    def own(self, name: str, broadcast: Broadcast) -> State:
        """Give the client's pair (`u` or `v`) as far as it is in the server's sum, with zeros where it is not."""
        like: State = broadcast.extras[name]
        counts = self.scope == "seen" or self.memory.get("round") == broadcast.extras.get("made")
        return (self.memory.get(name) if counts else None) or S.zeros_like(like)

    def receive(self, broadcast: Broadcast, local: ClientData) -> None:
        for name in ("u", "v"):
            pair = self.own(name, broadcast)
            self.round_buffer(f"own_{name}", pair)
            self.round_buffer(name, S.sub(broadcast.extras[name], pair))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = self.local_loss(batch, batch_idx)
        penalty = curvature_penalty(self.params(), self.round["u"], self.round["v"])
        self.log("train/penalty", penalty)
        return loss + self.lam * penalty

    def nonfinite_hint(self) -> str:
        return f"FedCurv needs lr · lam · max(U) well below 1: lower lam ({self.lam}); else {super().nonfinite_hint()}"

    def information(self, params: State, local: ClientData) -> State:
        """Estimate F_i with the model as it is, in eval mode."""
        samples = self.fisher == "sample"
        batches = local.batches(batch_size=samples_at_once(params)) if samples else local.batches(epoch=0)
        with self.evaluation_mode():
            given = self.transfer_each(batches)
            if samples:
                return importance(self.loss_at, params, given, "square")
            return batch_fisher(self.loss_at, params, given, self.fisher_samples)

    def reply(self, exchange: str, local: ClientData) -> dict[str, State]:
        params = S.clone(self.params())
        if self.is_fedavg_equivalent or not params:
            return {}
        known = {name: self.round[f"own_{name}"] for name in ("u", "v")}
        if not self.num_steps:  # no data: the pair stays
            none = S.zeros_like(params)
            return {"u": none, "v": none}
        u = self.information(params, local)
        pair = {"u": u, "v": {name: value * params[name] for name, value in u.items()}}
        self.memory.update(pair, round=local.round_idx)
        return {name: S.sub(new, known[name]) if self.scope == "seen" else new for name, new in pair.items()}
