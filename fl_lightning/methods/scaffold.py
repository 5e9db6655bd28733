"""SCAFFOLD: cancel the drift of local training by one control variate per client and one on the server.

Source: Karimireddy et al., ICML 2020, arXiv:1910.06378, Algorithm 1. The paper weighs clients equally
(`Aggregator(weighting="uniform")`). Its server lr η_g is the lr of a server optimizer (torch.optim.SGD), else 1.
Note: the paper divides by K · lr. The accumulated lr (K · lr for plain SGD) is right under momentum and schedules, too.
"""

from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.func import grad
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from fl_lightning.aggregation import ServerModule, StateBuffers
from fl_lightning.client import ClientModule
from fl_lightning.client.optimizers import parse_optimizers
from fl_lightning.functional import state as S
from fl_lightning.types import Batch, Broadcast, ClientData, ClientUpdate, State
from fl_lightning.utils.batches import batch_length
from fl_lightning.utils.settings import check_choice, is_plain_sgd


def control_change(received: State, trained: State, control: State, accumulated_lr: float | Tensor) -> State:
    """Compute c_i⁺ − c_i = (x − y_i) / E_i − c, option II (line 12): three states of the same names -> a state.

    Args:
        received: x.
        trained: y_i.
        control: c.
        accumulated_lr: E_i.

    >>> control_change({"w": torch.tensor([3.0])}, {"w": torch.tensor([1.0])}, {"w": torch.tensor([0.5])}, 2.0)
    {'w': tensor([0.5000])}
    """
    return {name: (value - trained[name]) / accumulated_lr - control[name] for name, value in received.items()}


def mean_gradient(loss: Callable[[State, Any], Tensor], params: State, batches: Iterable[Any]) -> State:
    """Compute c_i⁺ of option I, the gradient of the mean loss over all samples of the batches.

    Args:
        loss: Function `(params, batch) -> ()`, the mean loss of a batch.
        params: Parameters at which the gradient is taken, by name.
        batches: Batches with at least one sample in all.

    >>> w, x = {"w": torch.tensor([1.0, 2.0])}, torch.tensor([[3.0, -1.0], [-1.0, 0.0], [1.0, 1.0]])
    >>> mean_gradient(lambda p, x: (x @ p["w"]).mean(), w, [x[:2], x[2:]])
    {'w': tensor([1., 0.])}
    """
    params = S.clone(params)
    total = S.StateSum()
    for batch in batches:
        total.add(grad(loss)(params, batch), batch_length(batch))
    return S.mean_of(total)


class SCAFFOLDServer(ServerModule):
    """Takes c ← c + (1/N) Σ (c_i⁺ − c_i) over the cohort (line 17), where N counts all clients.

    Attributes:
        control: c, float64.
    """

    control: StateBuffers
    takes_stale = True

    def setup(self) -> None:
        self.client_of(SCAFFOLD)
        self.control = self.server_state(self.server.trainable)

    def check_server_optimizer(self, optimizer: Optimizer) -> None:
        if not is_plain_sgd(optimizer):
            raise ValueError(
                f"SCAFFOLD's server step is x + lr · (mean − x), which keeps the clients near the weights that their "
                f"control variates are of: model.server_optimizer must be torch.optim.SGD without momentum and weight "
                f"decay, got {type(optimizer).__name__}; set that, or leave it unset"
            )

    def broadcast(self, exchange: str, client_id: int) -> Broadcast:
        return self.sends(exchange, control=self.control)

    def add(self, update: ClientUpdate) -> None:
        self.sum("control", update.extras["control_change"])

    def finish(self, exchange: str, aggregate: State | None) -> State | None:
        for name, change in self.summed("control").items():
            self.control[name].add_(change, alpha=1 / self.server.num_clients)
        return aggregate


class SCAFFOLD(ClientModule):
    """Trains with the loss L + ⟨c − c_i, θ⟩, whose gradient is line 10's g − c_i + c.

    θ are the shared trainable parameters.

    Args:
        option: Form of c_i⁺. `II`: (x − y_i) / E_i − c + c_i, with the accumulated lr E_i. `I`: the gradient of the
            mean loss over all samples of the client at the received model, in eval mode, a further pass over the data.
        where: Place of the correction. `grad` adds it to the gradient, inside momentum and with E_i = lr · ‖a_i‖₁.
            `param` adds it to the parameters after each step, outside momentum and with E_i = Σ lr, as some codes do.
            With momentum `param` is biased.
        base: Arguments of `ClientModule`, whose optimizer must be one SGD with one learning rate.
    """

    server_class = SCAFFOLDServer
    needs = frozenset({"accumulated_lr"})
    stackable = True
    sends = frozenset({"weights", "control"})
    changes = frozenset({"control_change"})

    def __init__(
        self, option: Literal["I", "II"] = "II", where: Literal["grad", "param"] = "grad", **base: Any
    ) -> None:
        super().__init__(**base)
        check_choice(("I", "II"), option=option)
        check_choice(("grad", "param"), where=where)
        self.option = option
        self.where = where
        if option == "I":
            self.reads = frozenset({"batches"})
        self._after_step: RemovableHandle | None = None

    def receive(self, broadcast: Broadcast, local: ClientData) -> None:
        control = broadcast.extras["control"]
        self.round_buffer("c", control)
        self.round_buffer("c_i", self.memory.get("control") or S.zeros_like(control))
        self.round_buffer("correction", S.sub(self.round["c"], self.round["c_i"]))
        self.round["travelled"] = 0.0
        if self.option == "I" and local.size():
            with self.evaluation_mode():
                batches = self.transfer_each(local.batches())
                self.round_buffer("gradient", mean_gradient(self.loss_at, self.received, batches))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = self.local_loss(batch, batch_idx)
        if self.where == "param":
            return loss
        return loss + S.inner(self.round["correction"], self.params())

    def why_not_stacked(self) -> str | None:
        return "SCAFFOLD with where=param corrects one client after each step" if self.where == "param" else None

    def configure_optimizers(self) -> Any:
        configured = super().configure_optimizers()
        if self.where == "grad":
            return configured
        if self._after_step is not None:
            # A module may give the same optimizer again.
            self._after_step.remove()
        owner = type(self if self.module is None else self.module).__name__
        optimizers, _ = parse_optimizers(configured, owner)
        self._after_step = optimizers[0].register_step_post_hook(self._correct)
        return configured

    @torch.no_grad()
    def _correct(self, optimizer: Optimizer, *_: Any) -> None:
        """Take θ ← θ − lr (c − c_i), after a step in a round."""
        if "correction" not in self.round:
            # The step is one of the fine-tuning before a test.
            return
        lr = float(optimizer.param_groups[0]["lr"]) * self.context.progress.share
        S.add_(self.params(), self.round["correction"], -lr)
        self.round["travelled"] += lr

    @property
    def travelled(self) -> float:
        """The length E_i of option II so far."""
        return self.accumulated_lr if self.where == "grad" else float(self.round["travelled"])

    def reply(self, exchange: str, local: ClientData) -> dict[str, State]:
        client_control = self.round["c_i"]
        has_moved = self.option == "I" or bool(self.travelled)
        if not self.num_steps or not has_moved:
            # Without samples, or with a learning rate of 0, c_i stays.
            return {"control_change": S.zeros_like(self.received)}
        if self.option == "I":
            change = S.sub(self.round["gradient"], client_control)
        else:
            change = control_change(
                received=self.received,
                trained=S.clone(self.params()),
                control=self.round["c"],
                accumulated_lr=self.travelled,
            )
        change = {name: value.to(self.received[name].dtype) for name, value in change.items()}
        self.memory["control"] = S.add(client_control, change)
        return {"control_change": change}
