"""FedALA: a client starts from its own model and the received one, mixed entry by entry with weights that it learns.

Source: Zhang et al., AAAI 2023, arXiv:2212.01197, Algorithm 1 and Eqs. 3-6, and its code. Server: FedAvg.
Note: the buffers are the client's own, because the authors' code copies parameters only. Layers below the mixed ones,
and entries that are not trained, are taken as received.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fl_lightning.client import OwnModelClient, check_loss_returned
from fl_lightning.functional import state as S
from fl_lightning.types import Batch, Broadcast, ClientData, State
from fl_lightning.utils.settings import check_above, check_at_least, check_at_most

WINDOW = 10
"""Number of passes whose losses show whether the first mixing has settled."""


def mixed(old: State, received: State, mixing: State) -> State:
    """Compute θ̂ = θ_i + (θ_g − θ_i) ⊙ A, entry by entry.

    Args:
        old: The client's own entries θ_i.
        received: The received entries θ_g.
        mixing: The weights A.

    >>> mixed({"w": torch.tensor([1.0])}, {"w": torch.tensor([3.0])}, {"w": torch.tensor([0.25])})
    {'w': tensor([1.5000])}
    """
    return {name: value + (received[name] - value) * mixing[name] for name, value in old.items()}


def stepped(  # noqa: PLR0917 - called by position
    mixing: State, gradients: State, old: State, received: State, eta: float
) -> State:
    """Compute A ← clip(A − η ∇_θ̂ L ⊙ (θ_g − θ_i), 0, 1), entry by entry.

    Args:
        mixing: The weights A.
        gradients: The gradient of the loss in θ̂.
        old: The client's own entries θ_i.
        received: The received entries θ_g.
        eta: The step size η.
    """
    moved = S.sub(received, old)
    return {name: (value - eta * gradients[name] * moved[name]).clamp(0, 1) for name, value in mixing.items()}


def settled(losses: Sequence[float], threshold: float) -> bool:
    """Return True after more than ten passes whose last ten losses have a std (divisor 10) below the threshold.

    >>> settled([5.0] * 10, 0.1), settled([5.0] * 11, 0.1)
    (False, True)
    """
    window = torch.tensor(losses[-WINDOW:], dtype=torch.float64)
    return len(losses) > WINDOW and bool(window.std(correction=0) < threshold)


class FedALA(OwnModelClient):
    """Trains with the loss as it is, from a mixture of the client's last model and the received one.

    The client's first participation starts from the received model.

    Args:
        layers: Number p of the last parameter tensors that are mixed, >= 0. 0 mixes all.
        eta: Step size η of the mixing weights, > 0. `lr_decay` does not touch it.
        share: Share of the client's samples on which the mixing weights are learned, in (0, 1]. The samples are drawn
            anew in every round.
        first_epochs: Number of passes of the first mixing, >= 1. None: until its loss has settled.
        epochs: Number of passes of every later mixing, >= 1.
        threshold: Standard deviation of the last ten losses below which the first mixing has settled, > 0.
        max_epochs: Largest number of passes of the first mixing, >= 1.
        base: Arguments of `ClientModule`.
    """

    stackable = False  # a client learns its starting point before it trains
    reads = frozenset({"batches"})

    def __init__(  # noqa: PLR0917 - called by position
        self,
        layers: int = 2,
        eta: float = 1.0,
        share: float = 0.8,
        first_epochs: int | None = None,
        epochs: int = 1,
        threshold: float = 0.1,
        max_epochs: int = 100,
        **base: Any,
    ) -> None:
        super().__init__(**base)
        check_loss_returned(self)
        check_at_least(0, "0 mixes all", layers=layers)
        check_at_least(1, first_epochs=first_epochs, epochs=epochs, max_epochs=max_epochs)
        check_above(0, eta=eta, threshold=threshold, share=share)
        check_at_most(1, share=share)
        self.layers = layers
        self.eta = eta
        self.share = share
        self.threshold = threshold
        self.first_epochs = first_epochs
        self.epochs = epochs
        self.max_epochs = max_epochs

    def drawn(self, local: ClientData) -> Tensor:
        """Draw this round's samples for the mixing, positions (k,) int64.

        A study may override it.
        """
        order = torch.randperm(local.size(), generator=local.generator("mixing"))
        return order[: max(1, int(self.share * len(order) + 1e-9))]

    def receive(self, broadcast: Broadcast, local: ClientData) -> None:
        model = self.own_model()
        if model is None or not local.size() or not self.received:
            return
        names = list(self.received)[-self.layers :]
        parameters = dict(self.named_parameters())
        self.load_model({name: value for name, value in model.items() if name not in parameters})
        old = {name: model[name] for name in names}
        received = {name: self.received[name] for name in names}
        learned: State = self.memory.get("mixing", {})
        mixing = {name: learned.get(name, torch.ones_like(value)) for name, value in old.items()}
        samples = local.restricted("train", self.drawn(local))
        losses: list[Tensor] = []
        while not self.finished(losses, first=not learned):
            mixing, loss = self.one_pass(mixing, old, received, local=samples)
            losses.append(loss)
        self.load_model(mixed(old=old, received=received, mixing=mixing))
        self.memory["mixing"] = mixing

    def finished(self, losses: Sequence[Tensor], first: bool) -> bool:
        """Return True if a mixing has had its last pass.

        Args:
            losses: The losses of its passes so far.
            first: Whether it is the first mixing of the client.
        """
        if not first:
            return len(losses) >= self.epochs
        if self.first_epochs is not None:
            return len(losses) >= self.first_epochs
        return len(losses) >= self.max_epochs or settled(S.to_host(losses), self.threshold)

    def one_pass(self, mixing: State, old: State, received: State, local: ClientData) -> tuple[State, Tensor]:
        """Step the mixing weights once a batch, and return them with the mean loss of the pass.

        Args:
            mixing: The mixing weights A.
            old: The client's own entries θ_i.
            received: The received entries θ_g.
            local: The samples of the pass.

        Returns:
            The mixing weights after the pass, and its mean loss, () float64. A batch counts with its loss before its
            step.
        """

        def step(batch: Batch) -> Tensor:
            nonlocal mixing
            start = mixed(old=old, received=received, mixing=mixing)
            params = {name: value.requires_grad_() for name, value in start.items()}
            loss = self.loss_at(params, batch)
            gradients = torch.autograd.grad(loss, [*params.values()], allow_unused=True, materialize_grads=True)
            mixing = stepped(
                mixing=mixing,
                gradients=dict(zip(params, gradients, strict=True)),
                old=old,
                received=received,
                eta=self.eta,
            )
            return loss

        loss = self.mean_over(local, step)
        return mixing, loss
