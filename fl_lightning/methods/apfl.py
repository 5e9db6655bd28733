"""APFL: besides the global model every client trains one of its own, and deploys a mixture of both.

Source: Deng et al. 2020, arXiv:2003.13461, Algorithm 1, Eq. 10. Server: FedAvg, which the own models do not touch.
Note: w and v step from the values before the step, on the same batch: w with ∇f(w), v with α∇f(v̄), v̄ = αv + (1 − α)w.
One optimizer holds both, fresh each round. v begins as the initial model, whenever the client comes first. v̄ has
BatchNorm statistics of its own, and draws the numbers that w's pass draws. α steps with the first step of a round, by
the derivative ⟨v − w, ∇f(v̄)⟩ of its first batch. The released code mixes logits, lets v see the stepped w, and takes
another derivative, half as long at α = ½.
"""

from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fl_lightning.aggregation.guard import all_finite, extremes_in
from fl_lightning.client import InitialModelClient, OwnModelClient
from fl_lightning.client.optimizers import parse_optimizers
from fl_lightning.client.personal import OWN
from fl_lightning.client.progress import common_group
from fl_lightning.client.side_passes import SidePasses
from fl_lightning.functional import state as S
from fl_lightning.types import Batch, Broadcast, ClientData, Phase, State
from fl_lightning.utils.settings import check_above, check_at_least, check_at_most

IS_TWIN = "is_twin"
"""Attribute of v's parameters, by which they are found in an optimizer that a module gives out again."""


def mixture(own: S.StateLike, shared: S.StateLike, alpha: Tensor) -> State:
    """Compute v̄ = αv + (1 − α)w, entry by entry, with w as a constant.

    >>> mixture({"w": torch.tensor([4.0])}, {"w": torch.tensor([0.0])}, torch.tensor(0.25))
    {'w': tensor([1.])}
    """
    return {name: alpha * v + (1 - alpha) * shared[name].detach() for name, v in own.items()}


def slope_of_alpha(own: S.StateLike, shared: S.StateLike, gradient: S.StateLike) -> Tensor:
    """Compute the derivative ⟨v − w, ∇f(v̄)⟩ of f(αv + (1 − α)w) in α: (), float64.

    >>> slope_of_alpha({"w": torch.tensor([4.0])}, {"w": torch.tensor([1.0])}, {"w": torch.tensor([2.0])})
    tensor(6., dtype=torch.float64)
    """
    away = {name: v.detach().double() - shared[name].detach().double() for name, v in own.items()}
    return S.inner(away, {name: gradient[name].double() for name in own}).double()


def stepped(alpha: Tensor, slope: Tensor, lr: float) -> Tensor:
    """Take a step α ← α − lr · slope, and stay in [0, 1].

    >>> stepped(torch.tensor(0.5), torch.tensor(1.0), 0.1), stepped(torch.tensor(0.5), torch.tensor(-9.0), 0.1)
    (tensor(0.4000), tensor(1.))
    """
    return (alpha - lr * slope).clamp(0, 1)


@dataclass
class OwnSide:
    """Holds what a client trains besides w in a round.

    Args:
        twins: v, by the names of w.
        statistics: Buffers of v̄'s passes by name, moved in place.
        alpha: α, (), float64.
        passes: Makes v̄'s passes.
        may_step: Whether α may still step in this round.
        mixed: v̄ in the last pass, until its gradient is read. Empty after α's step.
        unit: A number whose gradient in the last pass was 1 before it was scaled. None before the first pass.
        slope: The derivative of α at the first batch of the step, None before.
    """

    twins: dict[str, nn.Parameter]
    statistics: State
    alpha: Tensor
    passes: SidePasses
    may_step: bool
    mixed: State = field(default_factory=dict)
    unit: Tensor | None = None
    slope: Tensor | None = None


class APFL(InitialModelClient):
    """Trains with the loss f(w) for the global model, and f(αv + (1 − α)w) for the client's own v.

    Args:
        alpha: α, the share of v in the mixture before a client's first round, in [0, 1]. 0 deploys the global model, 1
            the own model alone.
        adaptive: Whether every client's α takes a step in each of its rounds.
        alpha_lr: Learning rate of α, > 0, the same in all rounds. None takes the rate of the optimizer in the round,
            which must be SGD with one rate.
        base: Arguments of `ClientModule`.

    Raises:
        ValueError: α adapts without `alpha_lr`, and the optimizer is not SGD with one rate. The error comes at the
            start.
    """

    stackable = False  # the optimizer steps parameters that are no entries of the module
    own_gradients = True

    def __init__(self, alpha: float = 0.5, adaptive: bool = True, alpha_lr: float | None = None, **base: Any) -> None:
        super().__init__(**base)
        check_at_least(0, "0 deploys the global model", alpha=alpha)
        check_at_most(1, "1 deploys the own model alone", alpha=alpha)
        check_above(0, "adaptive=false keeps alpha", alpha_lr=alpha_lr)
        self.alpha = alpha
        self.adaptive = adaptive
        self.alpha_lr = alpha_lr

    def receive(self, broadcast: Broadcast, local: ClientData) -> None:
        if not local.size():
            return
        own = self.own_model() or self.context.start
        passes = SidePasses(self)
        device = next(self.parameters()).device
        alpha: Tensor | float = self.memory.get("alpha", self.alpha)
        self.round["own"] = OwnSide(
            twins={name: twin_of(w, own.get(name)) for name, w in self.trained().items()},
            statistics=with_values(passes.buffers(), own),
            alpha=torch.as_tensor(alpha, dtype=torch.float64).to(device),
            passes=passes,
            may_step=self.adaptive,
        )

    @property
    def own_side(self) -> OwnSide | None:
        """The parts that the client trains besides w in this round. None without samples, and outside of a round."""
        side: OwnSide | None = self.round.get("own")
        return side

    def configure_optimizers(self) -> Any:
        configured = super().configure_optimizers()
        owner = type(self.lightning_modules()[-1]).__name__
        optimizers, _ = parse_optimizers(configured, owner)
        if self.adaptive and self.alpha_lr is None and common_group(optimizers) is None:
            kinds = ", ".join(type(optimizer).__name__ for optimizer in optimizers) or "no optimizer"
            raise ValueError(
                f"{type(self).__name__} steps alpha with the learning rate of torch.optim.SGD if it has one for all "
                f"parameters, got {kinds}; set alpha_lr to a number such as 0.01, or adaptive to false"
            )
        side = self.own_side
        join(optimizers, params=self.trained(), twins={} if side is None else side.twins)
        return configured

    def phases(self, exchange: str) -> Iterator[Phase]:
        yield Phase()
        side = self.own_side
        if side is None or not self.num_steps:
            return
        entries = self.entries()
        own = {name: twin.detach() for name, twin in side.twins.items()}
        own |= {name: value for name, value in side.statistics.items() if name in entries}
        self.memory[OWN] = [own]
        self.memory["alpha"] = side.alpha
        # They are never sent, and so are checked here.
        finite = all_finite(extremes_in([*side.twins.values(), side.alpha]))
        self.load_model({name: torch.where(finite, w.detach(), torch.nan) for name, w in self.trained().items()})

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        side = self.own_side
        if side is None:
            return self.local_loss(batch, batch_idx)
        mixed = mixture(own=side.twins, shared=self.trained(), alpha=side.alpha)
        with side.passes.aside():
            own_loss: Tensor = side.passes.loss_at({**mixed, **side.statistics}, batch, batch_idx)
        loss = self.local_loss(batch, batch_idx)
        self.log_dict({"train/personal": own_loss, "train/alpha": side.alpha})
        if side.may_step:
            for value in mixed.values():
                value.retain_grad()
            side.mixed = mixed
            # The value is 0, and its gradient is the factor by which a gradient scaler and an accumulation scale.
            side.unit = torch.zeros((), device=own_loss.device, requires_grad=True)
            own_loss = own_loss + side.unit
        return loss + own_loss

    def on_before_zero_grad(self, optimizer: Any) -> None:
        """Forget the derivative of a step that a gradient scaler has skipped."""
        side = self.own_side
        if side is not None:
            side.slope = None

    def on_after_backward(self) -> None:
        """Take the derivative of α of a step's first batch, before w and v step."""
        side = self.own_side
        if side is None or not side.may_step or side.slope is not None or side.unit is None:
            return
        gradients = {name: value.grad for name, value in side.mixed.items() if value.grad is not None}
        own = {name: side.twins[name] for name in gradients}
        slope = slope_of_alpha(own=own, shared=self.trained(), gradient=gradients)
        if side.unit.grad is not None:
            slope = slope / side.unit.grad.double()
        side.slope = slope
        side.mixed = {}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Step α after the first step of the round. A step that a scaler skips does not count."""
        side = self.own_side
        if side is None or not side.may_step or side.slope is None or not self.num_steps:
            return
        lr = self.context.progress.lr if self.alpha_lr is None else self.alpha_lr
        side.alpha = stepped(side.alpha, slope=side.slope, lr=lr)
        side.may_step = False
        side.mixed = {}

    def deployed(self) -> Any:
        """Return the module with the client's mixture, or as it is if the client has no own model."""
        own = OwnModelClient.own_model(self)
        if own is None:
            return self
        trained = self.trained()
        alpha = self.memory["alpha"]
        twins = {name: own[name].to(w.device) for name, w in trained.items()}
        device = next(iter(trained.values())).device
        mixed = mixture(own=twins, shared=trained, alpha=alpha.to(device))
        self.load_model({**own, **mixed})
        return self

    def reply(self, exchange: str, local: ClientData) -> dict[str, Any]:
        return {}


@torch.no_grad()
def twin_of(w: Tensor, value: Tensor | None) -> nn.Parameter:
    """Return a parameter in the memory layout of another one, with values of its own.

    Args:
        w: The other parameter.
        value: The values. None takes those of w.
    """
    start = w.detach().clone()
    if value is not None:
        start.copy_(value)
    twin = nn.Parameter(start)
    setattr(twin, IS_TWIN, True)
    return twin


@torch.no_grad()
def with_values(buffers: State, own: State) -> State:
    """Write a model's values into buffers in place, and return the buffers. Buffers that the model lacks stay."""
    for name, buffer in buffers.items():
        if name in own:
            buffer.copy_(own[name])
    return buffers


def join(optimizers: Sequence[Optimizer], params: State, twins: dict[str, nn.Parameter]) -> None:
    """Add the parameters of v to the groups of w's parameters, and remove the v of an earlier round.

    Args:
        optimizers: The optimizers, which are new or begin anew.
        params: The parameters of w, by name.
        twins: The parameters of v, by the same names. If it is empty, the earlier v is only removed.
    """
    names = {id(w): name for name, w in params.items()}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            leave(optimizer, group)
            for w in [*group["params"]]:
                name = names.get(id(w))
                if name not in twins:
                    continue
                twin = twins[name]
                group["params"].append(twin)
                if "param_names" in group:
                    group["param_names"].append(f"own.{name}")
                if w in optimizer.state:
                    # Some optimizers, such as Adagrad, begin with a state.
                    optimizer.state[twin] = deepcopy(optimizer.state[w])


def leave(optimizer: Optimizer, group: dict[str, Any]) -> None:
    """Remove the parameters of an earlier v from a group of an optimizer, in place."""
    stay = [place for place, parameter in enumerate(group["params"]) if not hasattr(parameter, IS_TWIN)]
    if len(stay) == len(group["params"]):
        return
    for twin in group["params"]:
        if hasattr(twin, IS_TWIN):
            optimizer.state.pop(twin, None)
    for key in ("params", "param_names"):
        if key in group:
            group[key][:] = [group[key][place] for place in stay]
