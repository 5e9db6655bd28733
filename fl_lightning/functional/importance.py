"""Importance of each parameter to a loss: sums of per-sample gradients, or of those along a walk, by `torch.func`."""

from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad
from torch.nn import functional as F

from fl_lightning.functional.sample_gradients import sample_gradients
from fl_lightning.functional.state import State, StateLike, StateSum, clone, mean_of, to_float32
from fl_lightning.utils.batches import batch_length

Importance = Literal["abs", "square", "tensor"]

GRADIENT_FLOATS = 2**24
"""Per-sample gradients held at a time: 64 MiB in float32."""


def importance(
    loss: Callable[[State, Any], Tensor], params: StateLike, batches: Iterable[Any], kind: Importance = "abs"
) -> State:
    """Compute Ω_j = (1/|P|) Σ over samples of |∂ℓ/∂w_j|, of its square, or one number for each tensor.

    Args:
        loss: `(params, batch) -> ()`, the mean loss of a batch (a pytree of tensors, samples along dimension 0).
        params: trainable parameters w, by name.
        batches: P, cut so that the gradients of one batch's samples fit in memory together; with `tensor` its cut
            matters.
        kind: `abs` or `square` of per-sample gradients; `tensor`: squared gradients of batch means, summed over the
            batches and over all entries of a tensor.

    Returns:
        By name, ≥ 0: shaped as the parameters; 0-d with `tensor`. In the parameters' types, summed in float64.

    Raises:
        ValueError: without a sample.

    Source:
        Yao and Sun, ICIP 2020, arXiv:2005.12657, Eqs. 1-2 (`abs`), and its code (`tensor`).

    >>> w, x = {"w": torch.tensor([1.0, 2.0])}, torch.tensor([[3.0, -1.0], [-1.0, 0.0]])
    >>> importance(lambda p, x: (x @ p["w"]).mean(), w, [x])
    {'w': tensor([2.0000, 0.5000])}
    """
    params = {name: value.detach() for name, value in params.items()}
    total = {
        name: torch.zeros(() if kind == "tensor" else value.shape, dtype=torch.float64, device=value.device)
        for name, value in params.items()
    }

    def of_one(state: State, sample: Any) -> Tensor:
        return to_float32(loss(state, sample))

    n = 0
    for batch in batches:
        size = batch_length(batch)
        n += size
        try:
            if kind == "tensor":
                found = [grad(loss)(params, batch)]
            else:
                found = list(sample_gradients(of_one, State(params), batch, at_once=max(1, size)))
        except RuntimeError as error:
            raise RuntimeError(
                f"gradients of single samples are taken by torch.func, whose rules the loss must keep (no .item(), no "
                f"branch on a tensor's value), got: {error}; change the loss, or take the gradients of "
                f"batches (FedCL: importance=tensor, FedCurv: fisher=batch)"
            ) from error
        for gradients in found:
            for name, gradient in gradients.items():
                if kind == "tensor":
                    total[name] += gradient.double().square().sum()
                else:
                    total[name] += (gradient.abs() if kind == "abs" else gradient.square()).sum(0, dtype=torch.float64)
    if not n:
        raise ValueError("importance needs at least one sample, got none; give a set with samples")
    return {name: (value / n).to(params[name].dtype) for name, value in total.items()}


def batch_fisher(
    loss: Callable[[State, Any], Tensor], params: State, batches: Iterable[Any], max_samples: int | None = None
) -> State:
    """Average over batches the squared gradient of the batch's mean loss.

    Args:
        loss: `(params, batch) -> ()`, the mean loss of a batch.
        params: where it is taken, by name.
        batches: at least one.
        max_samples: the batch that passes this number is the last; None: all batches count.

    >>> import torch
    >>> w, x = {"w": torch.tensor([1.0, 2.0])}, torch.tensor([[3.0, -1.0], [-1.0, 0.0], [2.0, 1.0]])
    >>> batch_fisher(lambda p, x: (x @ p["w"]).mean(), w, [x[:2], x[2:]])
    {'w': tensor([2.5000, 0.6250])}
    """
    params = clone(params)
    total = StateSum()
    seen = 0
    for batch in batches:
        total.add({name: gradient.square() for name, gradient in grad(loss)(params, batch).items()})
        seen += batch_length(batch)
        if max_samples is not None and seen > max_samples:
            break
    return mean_of(total)


def path_importance(
    loss: Callable[[State, Any], Tensor],
    params: StateLike,
    batches: Iterable[Any],
    lr: float,
    damping: float = 1e-3,
) -> State:
    """Compute Synaptic Intelligence's Ω_j = ω_j / ((w_j(end) − w_j(start))² + ξ) along a walk by plain SGD.

    ω_j = −Σ_t g_j(t) · (w_j(t+1) − w_j(t)) = lr · Σ_t g_j(t)² is what w_j contributes to the fall of the loss, one step
    t a batch, in their order. `params` stay as they are.

    Args:
        loss: `(params, batch) -> ()`, the mean loss of a batch.
        params: trainable parameters w(start), by name.
        batches: of the walk; none: Ω is 0.
        lr: of the walk, > 0.
        damping: ξ > 0; the source has 1e-3, 0.1 on permuted MNIST.

    Returns:
        By name, ≥ 0, shaped as the parameters, in their types; the walk and its sums are in float64.

    Source:
        Zenke, Poole and Ganguli, ICML 2017, arXiv:1703.04200, Eqs. 3 and 5, for one task.

    Note:
        The source's walk is the training itself, by Adam; a walk of its own by plain SGD is ours. On it no ω_j is
        negative, so that Ω needs no cut at 0, which the source's code has.

    >>> w, x = {"w": torch.tensor([1.0, 2.0])}, torch.tensor([[3.0, -1.0], [-1.0, 0.0]])
    >>> path_importance(lambda p, x: (x @ p["w"]).mean(), w, [x[:1], x[1:]], lr=0.5, damping=1.0)
    {'w': tensor([2.5000, 0.4000])}
    """
    start = {name: value.detach() for name, value in params.items()}
    moved = {name: torch.zeros_like(value, dtype=torch.float64) for name, value in start.items()}
    fall = {name: torch.zeros_like(value) for name, value in moved.items()}
    for batch in batches:
        w = {name: (value + moved[name]).to(value.dtype) for name, value in start.items()}
        for name, gradient in grad(loss)(w, batch).items():
            g = gradient.double()
            moved[name] -= lr * g
            fall[name] += lr * g.square()
    return {name: (fall[name] / (moved[name].square() + damping)).to(value.dtype) for name, value in start.items()}


def samples_at_once(params: StateLike) -> int:
    """Compute how many samples' gradients in `params` are taken together, at least 1.

    >>> samples_at_once({"w": torch.zeros(2**22)})
    4
    """
    return max(1, GRADIENT_FLOATS // sum(value.numel() for value in params.values()))


class _Method(nn.Module):
    """A module whose `forward` is a method of another module, since `functional_call` calls nothing else."""

    def __init__(self, module: nn.Module, name: str) -> None:
        super().__init__()
        self.module = module
        self.name = name

    def forward(self, *args: Any) -> Any:
        return getattr(self.module, self.name)(*args)


def as_function(module: nn.Module, method: str) -> Callable[..., Any]:
    """Make `module.method(*args)` a function `(params, *args)` of some of the module's parameters, by name.

    >>> linear = nn.Linear(1, 1, bias=False)
    >>> as_function(linear, "forward")({"weight": torch.tensor([[2.0]])}, torch.tensor([3.0]))
    tensor([6.])
    """
    inner = _Method(module, method)

    def function(params: StateLike, *args: Any) -> Any:
        return functional_call(inner, {f"module.{name}": value for name, value in params.items()}, args)

    return function


def importance_penalty(params: StateLike, reference: StateLike, omega: StateLike) -> Tensor:
    """Compute Σ_j Ω_j (w_j − w'_j)², without a factor ½, over the entries of Ω.

    A 0-d Ω_j holds for a whole tensor.

    Args:
        params: w, by name.
        reference: w', the same names; taken as constants.
        omega: Ω ≥ 0; further entries of the others are left alone.

    Returns:
        (), ≥ 0, exactly 0 with zero gradient at w = w'; float32 or better.

    Source:
        Yao and Sun, ICIP 2020, arXiv:2005.12657, Eq. 3, without its λ.

    >>> importance_penalty({"w": torch.tensor([3.0, 1.0])}, {"w": torch.zeros(2)}, {"w": torch.tensor([1.0, 2.0])})
    tensor(11.)
    """
    terms = []
    for name, each in omega.items():
        w = to_float32(params[name])
        there = to_float32(reference[name].detach())
        weight = to_float32(each.detach())
        if weight.ndim:  # half the passes over the parameters that (weight * (w - there).square()).sum() takes
            squares = F.mse_loss(w, there, reduction="none")
            terms.append(torch.dot(weight.to(w.dtype).flatten(), squares.flatten()))
        else:
            terms.append(weight * F.mse_loss(w, there, reduction="sum"))
    return torch.stack(terms).sum() if terms else torch.zeros(())
