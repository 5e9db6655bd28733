"""FedDyn: a linear and a quadratic term per client, so that clients and server agree on one optimum.

Source: Acar et al., ICLR 2021, arXiv:2111.04263, Algorithm 1. The paper weighs clients equally
(`Aggregator(weighting="uniform")`).
Note: the authors' code evaluates the mean of the clients, not the server's weights: `evaluates: active_mean`.
h is the mean of all g_i as long as the server gets y_i as it was trained; `NormClip` and the like end that.
"""

from typing import Any, Literal

from torch import Tensor
from torch.optim import Optimizer

from fl_lightning.aggregation import ServerModule, StateBuffers
from fl_lightning.client import ClientModule
from fl_lightning.functional import state as S
from fl_lightning.functional.losses import proximal
from fl_lightning.types import Batch, Broadcast, ClientData, ClientUpdate, State
from fl_lightning.utils.settings import check_above, check_choice


def dynamic_regularizer(params: State, received: State, gradient: State, alpha: float) -> Tensor:
    """Compute −⟨g_i, θ⟩ + (α/2) ‖θ − x‖²: three states of the same names -> ().

    Args:
        params: The parameters θ.
        received: The received parameters x.
        gradient: The client's gradient g_i.
        alpha: α.
    """
    return alpha * proximal(params, received) - S.inner(gradient, params)


class FedDynServer(ServerModule):
    """Takes h ← h − (α/N) Σ (y_i − x) over the cohort, then x ← mean − h/α, with the mean's buffers.

    Attributes:
        correction: h, float64.
    """

    correction: StateBuffers
    takes_stale = "unscaled"
    stale_reason = "keeps h, the mean of the clients' gradients, for which it would take less than their whole moves"

    def setup(self) -> None:
        self.client_of(FedDyn)
        self.correction = self.server_state(self.server.trainable)

    def check_server_optimizer(self, optimizer: Optimizer) -> None:
        raise ValueError(
            f"FedDyn takes its own server step, x = mean − h/alpha, at which h is the mean of the clients' gradients, "
            f"and a server optimizer would stop elsewhere, got {type(optimizer).__name__}; leave "
            f"model.server_optimizer unset"
        )

    def add(self, update: ClientUpdate) -> None:
        if update.weights is not None:
            start = self.server.weights
            self.sum("moved", {name: update.weights[name] - start[name] for name in self.server.trainable})

    def finish(self, exchange: str, aggregate: State | None) -> State | None:
        alpha = self.client_of(FedDyn).alpha
        for name, moved in self.summed("moved").items():
            self.correction[name].sub_(moved, alpha=alpha / self.server.num_clients)
        return None if aggregate is None else self.moved(aggregate, self.shifted(aggregate, -1))

    def shifted(self, weights: State, sign: int) -> State:
        """Compute the trainable entries of weights ± h/α, float64.

        Args:
            weights: The weights, by name.
            sign: +1 or −1.
        """
        scale = sign / self.client_of(FedDyn).alpha
        return {name: weights[name].double() + scale * value for name, value in self.correction.items()}

    @property
    def averages(self) -> bool:
        return self.client_of(FedDyn).evaluates == "active_mean"

    def evaluation_weights(self, weights: State) -> State:
        if self.client_of(FedDyn).evaluates == "server":
            return weights
        return self.moved(weights, self.shifted(weights, +1))


class FedDyn(ClientModule):
    """Trains with the loss L − ⟨g_i, θ⟩ + (α/2) ‖θ − x‖², then takes g_i ← g_i − α (y_i − x).

    θ are the shared trainable parameters.

    Args:
        alpha: α > 0.
        evaluates: Weights that are evaluated: those of the `server`, or the clients' last mean (`active_mean`).
        base: Arguments of `ClientModule`.
    """

    server_class = FedDynServer
    stackable = True

    def __init__(self, alpha: float = 0.1, evaluates: Literal["server", "active_mean"] = "server", **base: Any) -> None:
        super().__init__(**base)
        check_above(0, "FedAvg is the method without these terms", alpha=alpha)
        check_choice(("server", "active_mean"), evaluates=evaluates)
        self.alpha = alpha
        self.evaluates = evaluates

    def receive(self, broadcast: Broadcast, local: ClientData) -> None:
        self.round_buffer("gradient", self.memory.get("gradient") or S.zeros_like(self.received))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = self.local_loss(batch, batch_idx)
        term = dynamic_regularizer(
            params=self.params(),
            received=self.received,
            gradient=self.round["gradient"],
            alpha=self.alpha,
        )
        self.log("train/dynamic", term)
        return loss + term

    def accumulated_lr_slope(self, accumulated_lr: float) -> float:
        return 1.0 - self.alpha * accumulated_lr

    def reply(self, exchange: str, local: ClientData) -> dict[str, State]:
        if self.num_steps:
            moved = S.sub(S.clone(self.params()), self.received)
            self.memory["gradient"] = S.add(self.round["gradient"], moved, alpha=-self.alpha)
        return {}
