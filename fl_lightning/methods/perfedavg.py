"""Per-FedAvg: train a global model that is good after one step of gradient descent on a client's samples.

Source: Fallah et al., NeurIPS 2020, arXiv:2002.07948, Algorithm 1. Server: FedAvg.
Note: a batch is cut into the paper's two or three independent batches, so that an epoch is one pass over the samples.
The paper steps w by plain gradient descent and gives clients equal weights (`aggregator.weighting: uniform`). A client
that is tested takes its step by `model.fine_tuning: {max_steps: 1}`, whose learning rate is `inner_lr` here.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from fl_lightning.client import ClientModule
from fl_lightning.client.side_passes import SidePasses
from fl_lightning.functional import state as S
from fl_lightning.types import Batch, Broadcast, ClientData, Phase, State
from fl_lightning.utils.batches import some_samples, tensors_of
from fl_lightning.utils.settings import check_above, check_at_least, check_choice

Form = Literal["fo", "hf"]


def cut(batch: Batch, number: int) -> list[Batch]:
    """Cut a batch into nearly equal parts of consecutive samples, the first ones the larger.

    A batch with fewer than two samples for each part is each part.

    Args:
        batch: The batch, whose tensors have the samples along dimension 0.
        number: Number of parts.

    Raises:
        ValueError: The tensors do not have the same number of samples.

    >>> cut((torch.arange(5), torch.arange(5)), 2)
    [(tensor([0, 1, 2]), tensor([0, 1, 2])), (tensor([3, 4]), tensor([3, 4]))]
    """
    lengths = sorted({len(tensor) for tensor in tensors_of(batch)})
    if len(lengths) != 1:
        raise ValueError(
            f"PerFedAvg cuts each batch into parts, so that its tensors must have the samples along dimension 0, got "
            f"a {type(batch).__name__} with the lengths {lengths}; return such a batch in collate_fn"
        )
    size = lengths[0]
    if size < 2 * number:
        return [batch] * number
    parts: list[Batch] = []
    start = 0
    for place in range(number):
        end = start + size // number + int(place < size % number)
        parts.append(some_samples(batch, slice(start, end)))
        start = end
    return parts


def hessian_product(forward: S.StateLike, backward: S.StateLike, delta: float) -> State:
    """Estimate ∇²f(w)·G by [∇f(w + δG) − ∇f(w − δG)] / (2δ).

    >>> hessian_product({"w": torch.tensor([3.0])}, {"w": torch.tensor([1.0])}, 0.5)
    {'w': tensor([2.])}
    """
    return S.scale(S.sub(forward, backward), 1 / (2 * delta))


class PerFedAvg(ClientModule):
    """Steps w with the gradient at w̃, one step of gradient descent away, on other samples of the batch.

    The step to w̃ = w − α∇f(w) is on the first samples D of the batch.

    Args:
        inner_lr: Learning rate α of the step to w̃, >= 0, the same in all rounds. The paper's β is the learning rate of
            the optimizer.
        form: Gradient in w. `fo`: G = ∇f(w̃) on D′. `hf`: (I − α∇²f(w)) G, with a finite difference of gradients on D″
            in place of the product.
        delta: δ of the finite difference, > 0. Only `hf` reads it.
        base: Arguments of `ClientModule`.
    """

    stackable = False  # the step takes gradients itself
    own_gradients = True

    def __init__(self, inner_lr: float = 0.01, form: Form = "fo", delta: float = 1e-3, **base: Any) -> None:
        super().__init__(**base)
        check_at_least(0, "0 takes no step to another model", inner_lr=inner_lr)
        check_choice(("fo", "hf"), form=form)
        check_above(0, delta=delta)
        self.inner_lr = inner_lr
        self.form = form
        self.delta = delta

    def receive(self, broadcast: Broadcast, local: ClientData) -> None:
        self.round["passes"] = SidePasses(self)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        passes: SidePasses = self.round["passes"]
        parts = cut(batch, 2 if self.form == "fo" else 3)
        w = {name: value for name, value in self.trained().items() if value.requires_grad}
        with passes.aside(), self.in_full_precision():
            # This pass alone moves the statistics of the module. Every other one moves copies.
            inner = gradient(self.local_loss(parts[0], batch_idx), w)
        moved = S.add(w, inner, alpha=-self.inner_lr)
        if self.form == "fo":
            # The inner gradient is a constant, so that the gradient in w is the one at w̃.
            loss: Tensor = passes.loss_at({**moved, **passes.buffers()}, parts[1], batch_idx)
            return loss
        # A gradient scaler does not see these gradients, and their difference needs all digits.
        with self.in_full_precision():
            outer: Tensor = passes.loss_at({**moved, **passes.buffers()}, parts[1], batch_idx)
            outer_gradient = gradient(outer, w)
            ends: list[State] = []
            for delta in (self.delta, -self.delta):
                # Both ends draw the same numbers, because both are passes aside.
                with passes.aside():
                    values = S.add(w, outer_gradient, alpha=delta)
                    loss_at_end = passes.loss_at({**values, **passes.buffers()}, parts[2], batch_idx)
                    ends.append(gradient(loss_at_end, w))
        product = hessian_product(forward=ends[0], backward=ends[1], delta=self.delta)
        direction = S.add(outer_gradient, product, alpha=-self.inner_lr)
        # The value of the outer loss, with this direction as its gradient.
        return outer.detach() + S.inner(S.sub(w, S.clone(w)), direction)

    def fine_tuning(self, phase: Phase) -> Iterable[Phase]:
        return (replace(phase, lr=self.inner_lr if phase.lr is None else phase.lr),)


def gradient(loss: Tensor, params: State) -> State:
    """Return the gradient of a loss in parameters by name, 0 in a parameter that does not enter the loss."""
    values = torch.autograd.grad(loss, [*params.values()], materialize_grads=True)
    return dict(zip(params, values, strict=True))
