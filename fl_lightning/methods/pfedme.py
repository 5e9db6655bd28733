"""pFedMe: each client learns a model of its own near a local copy of the global one, which follows it.

Source: Dinh et al., NeurIPS 2020, arXiv:2006.08848, Algorithm 1; the personal model goes on from batch to batch as in
the authors' code. Server: FedAvg of the local copies w_i. The paper's β is the rate of a server optimizer SGD.
Note: only the clients of a round train, where the authors' code trains all and averages some. The statistics of
BatchNorm are those of the personal model's passes, for both models.
"""

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from fl_lightning.client import OwnModelClient
from fl_lightning.client.optimizers import SCHEDULER_SETTINGS, parse_optimizers, takes_closure
from fl_lightning.functional.losses import proximal
from fl_lightning.functional.state import clone
from fl_lightning.types import Batch, Broadcast, ClientData, State
from fl_lightning.utils.settings import check_above, check_at_least, check_at_most, check_choice

ANCHOR = "anchor"
"""Name of the round buffer with w, the client's copy of the global model."""


class PFedMeSteps(Optimizer):
    """Takes several steps of an optimizer on each batch, and lets the client's w follow them.

    They count as one step. Logged training losses are the mean of all passes. Outside a round it is the optimizer as
    it is, such as in the fine-tuning before a test.

    Args:
        base: The optimizer that takes the steps.
        client: The client whose parameters it steps.
    """

    def __init__(self, base: Optimizer, client: "PFedMe") -> None:
        self.base = base
        self.client = client
        super().__init__(base.param_groups, {})
        # They are the same objects, so that schedulers, resets and added groups reach the steps of `base`.
        self.defaults = base.defaults
        self.param_groups = base.param_groups
        self.state = base.state

    @torch.no_grad()
    def step(self, closure: Callable[[], Any]) -> Any:  # type: ignore[override]
        """Take the steps on one batch, and return the loss before the first.

        Args:
            closure: Zeroes the gradients, runs forward and backward, and returns the loss.
        """
        client = self.client
        if ANCHOR not in client.round:
            return self._step(closure)
        if client.start == "anchor":
            client.load_model(client.round[ANCHOR])
        first = self._step(closure)
        for _ in range(client.inner_steps - 1):
            self._step(closure)
        client.follow()
        return first

    def _step(self, closure: Callable[[], Any]) -> Any:
        """Take one step of the optimizer, and return the loss."""
        forward_and_backward = torch.enable_grad()(closure)
        if takes_closure(self.base):
            return self.base.step(forward_and_backward)
        loss = forward_and_backward()
        self.base.step()
        return loss


class PFedMe(OwnModelClient):
    """Trains the client's own θ with the loss L(θ) + (lam/2) ‖θ − w‖², and moves w ← w − eta·lam (w − θ) after a batch.

    The local optimizer takes inner_steps steps of θ on each batch, with its learning rate (0.09 in the paper). Keep
    rate · lam well below 2. The client sends w, and keeps and deploys θ. Before its first round it deploys the
    global model.

    Args:
        lam: Strength λ of the pull of θ to w, > 0. A large λ gives nearly the same model to all clients.
        eta: Step size η of w, > 0, with eta · lam <= 1. `lr_decay` does not touch it.
        inner_steps: Number K of steps of θ on each batch, >= 1.
        start: Start of θ on a batch: `last`, the θ after the batch before, or `anchor`, w.
        base: Arguments of `ClientModule`.
    """

    stackable = False  # the optimizer runs several passes on one batch

    def __init__(
        self,
        lam: float = 15.0,
        eta: float = 0.005,
        inner_steps: int = 5,
        start: Literal["last", "anchor"] = "last",
        **base: Any,
    ) -> None:
        super().__init__(**base)
        check_above(0, lam=lam, eta=eta)
        check_at_most(1, "lower eta, or w moves beyond the personal model", **{"eta * lam": eta * lam})
        check_at_least(1, inner_steps=inner_steps)
        check_choice(("last", "anchor"), start=start)
        self.lam = lam
        self.eta = eta
        self.inner_steps = inner_steps
        self.start = start

    def configure_optimizers(self) -> Any:
        owner = type(self if self.module is None else self.module).__name__
        optimizers, schedulers = parse_optimizers(super().configure_optimizers(), owner)
        wrapped = [PFedMeSteps(optimizer, self) for optimizer in optimizers]
        settings = [{name: getattr(entry, name) for name in SCHEDULER_SETTINGS} for entry in schedulers]
        return wrapped, settings

    def receive(self, broadcast: Broadcast, local: ClientData) -> None:
        # w is moved in place, and what was received serves other clients, too.
        self.round_buffer(ANCHOR, clone(self.received))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = self.local_loss(batch, batch_idx)
        if ANCHOR not in self.round:
            return loss
        pull = proximal(self.params(), self.round[ANCHOR])
        self.log("train/proximal", pull)
        return loss + self.lam * pull

    @torch.no_grad()
    def follow(self) -> None:
        """Move w towards the personal model: w ← w − ηλ (w − θ)."""
        anchor: State = self.round[ANCHOR]
        for name, value in self.params().items():
            anchor[name].lerp_(value.to(anchor[name].dtype), self.eta * self.lam)

    def reply(self, exchange: str, local: ClientData) -> dict[str, Any]:
        """Keep the personal model, and leave w in the module, whose shared entries are sent."""
        if self.num_steps:
            self.keep_model()
            self.load_model(self.round[ANCHOR])
        return {}

    def nonfinite_hint(self) -> str:
        return (
            f"pFedMe's personal models need rate · lam below 2: lower lam ({self.lam}) or the local optimizer's lr; "
            f"else {super().nonfinite_hint()}"
        )
