"""FedCurv: pull each parameter towards the other clients' weights, as strongly as their Fisher information says.

Source: Shoham et al. 2019, arXiv:1910.07796, Eqs. 3-5. The mean of the clients is FedAvg's.
The server keeps only U = Σ u_j and V = Σ v_j. u_j is the diagonal of the Fisher information at the trained weights θ_j,
and v_j = u_j θ_j. A client subtracts its own pair, and uploads how the pair has changed. The sum in the paper is
`scope: last_round`.
"""

from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from fl_lightning.aggregation import ServerModule, StateBuffers
from fl_lightning.client import ClientModule
from fl_lightning.client.fisher import Fisher, fisher_information
from fl_lightning.functional import state as S
from fl_lightning.types import Batch, Broadcast, ClientData, ClientUpdate, State
from fl_lightning.utils.settings import check_at_least, check_choice, is_plain_sgd


def curvature_penalty(params: State, curvature: State, pull: State) -> Tensor:
    """Compute Σ_k P_k θ_k² − 2 Q_k θ_k: three states of the same names -> ().

    With P = Σ_{j≠i} u_j and Q = Σ_{j≠i} v_j it is Σ_{j≠i} (θ − θ_j)ᵀ diag(u_j) (θ − θ_j) less a constant.

    Args:
        params: The parameters θ.
        curvature: P.
        pull: Q.
    """
    squares = {name: S.to_float32(value).square() for name, value in params.items()}
    return S.inner(curvature, squares) - 2 * S.inner(pull, params)


class FedCurvServer(ServerModule):
    """Keeps U and V of all clients seen, or of the clients of the last round, and sends them.

    Attributes:
        u: U, float64.
        v: V, float64.
        made: The round in which U and V were made, with `scope: last_round`. An aborted round makes none.
    """

    u: StateBuffers
    v: StateBuffers
    made: Tensor | None
    stale_reason = "with scope=last_round compares the rounds of client and server"

    @property
    def takes_stale(self) -> bool:  # type: ignore[override]
        """Whether updates may be of earlier rounds. With `seen` a client subtracts what it was sent itself."""
        return self.client_of(FedCurv).scope == "seen"

    def setup(self) -> None:
        client = self.client_of(FedCurv)
        names = () if client.is_fedavg_equivalent else self.server.trainable
        self.u = self.server_state(names)
        self.v = self.server_state(names)
        made: Tensor | None = None
        if names and client.scope == "last_round":
            made = torch.tensor(-1, device=self.server.weights[names[0]].device)
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
        extras: dict[str, Any] = {"u": self.u, "v": self.v}
        if self.made is not None:
            extras["made"] = int(self.made)
        return self.sends(exchange, **extras)

    def add(self, update: ClientUpdate) -> None:
        if "u" in update.extras:
            self.sum("u", update.extras["u"])
            self.sum("v", update.extras["v"])

    def finish(self, exchange: str, aggregate: State | None) -> State | None:
        keeps = self.client_of(FedCurv).scope == "seen"
        for name, kept in {"u": self.u, "v": self.v}.items():
            for entry, change in self.summed(name).items():
                if not keeps:
                    kept[entry].zero_()
                kept[entry].add_(change)
        if self.made is not None:
            self.made.fill_(self.server.round_idx)
        return aggregate


class FedCurv(ClientModule):
    """Trains with the loss L + λ Σ_{j≠i} (θ − θ_j)ᵀ diag(F_j) (θ − θ_j), less a constant.

    θ are the shared trainable parameters.

    Args:
        lam: Weight λ >= 0. 0 is FedAvg, and nothing is estimated or sent. With SGD lr · λ · max(U) must stay well below
            1.
        fisher: Squared gradients whose mean is F_j: of every `sample`, or of every `batch` of the first local epoch,
            whose mean is up to the batch size times smaller, so that λ means something else.
        fisher_samples: Number of samples with `fisher: batch`. The batch that passes it is the last.
        scope: Clients j. `seen`: all so far, each with its latest F_j. `last_round`: the clients of the last round.
        base: Arguments of `ClientModule`.
    """

    server_class = FedCurvServer
    fedavg_equivalent = {"lam": 0}
    stackable = True
    sends = frozenset({"weights", "importance"})
    reads = frozenset({"batches"})

    def __init__(
        self,
        lam: float = 1.0,
        fisher: Fisher = "sample",
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
        """Return the client's own part of U or V, 0 if the server's sum has none of this client.

        Args:
            name: `u` or `v`.
            broadcast: The message of the server.
        """
        total: State = broadcast.extras[name]
        is_counted = self.scope == "seen" or self.memory.get("round") == broadcast.extras.get("made")
        own: State | None = self.memory.get(name) if is_counted else None
        return own or S.zeros_like(total)

    def receive(self, broadcast: Broadcast, local: ClientData) -> None:
        for name in ("u", "v"):
            own = self.own(name, broadcast)
            self.round_buffer(f"own_{name}", own)
            self.round_buffer(name, S.sub(broadcast.extras[name], own))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = self.local_loss(batch, batch_idx)
        penalty = curvature_penalty(self.params(), curvature=self.round["u"], pull=self.round["v"])
        self.log("train/penalty", penalty)
        return loss + self.lam * penalty

    def nonfinite_hint(self) -> str:
        return f"FedCurv needs lr · lam · max(U) well below 1: lower lam ({self.lam}); else {super().nonfinite_hint()}"

    def reply(self, exchange: str, local: ClientData) -> dict[str, State]:
        params = S.clone(self.params())
        if self.is_fedavg_equivalent or not params:
            return {}
        if not self.num_steps:
            # Without samples the pair stays.
            none = S.zeros_like(params)
            return {"u": none, "v": none}
        u = fisher_information(self, params, local=local, kind=self.fisher, max_samples=self.fisher_samples)
        v = {name: value * params[name] for name, value in u.items()}
        self.memory.update(u=u, v=v, round=local.round_idx)
        if self.scope == "last_round":
            return {"u": u, "v": v}
        return {"u": S.sub(u, self.round["own_u"]), "v": S.sub(v, self.round["own_v"])}
