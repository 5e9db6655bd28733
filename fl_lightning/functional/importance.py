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
        loss: Function `(params, batch) -> ()`, the mean loss of a batch. A batch is a pytree of tensors with the
            samples along dimension 0.
        params: Trainable parameters w, by name.
        batches: Samples P in batches whose samples' gradients fit in memory together. With `tensor` the result depends
            on the cut.
        kind: `abs` or `square` of per-sample gradients. `tensor`: squared gradients of batch means, summed over the
            batches and over all entries of a tensor.

    Returns:
        By name, ≥ 0, shaped as the parameters, or 0-d with `tensor`. In the parameters' types, summed in float64.

    Raises:
        ValueError: There is no sample.
        RuntimeError: torch.func cannot differentiate the loss of a sample, or of the batch.

    Source:
        Yao and Sun, ICIP 2020, arXiv:2005.12657, Eqs. 1-2 (`abs`), and its code (`tensor`).

    >>> w, x = {"w": torch.tensor([1.0, 2.0])}, torch.tensor([[3.0, -1.0], [-1.0, 0.0]])
    >>> importance(lambda p, x: (x @ p["w"]).mean(), w, [x])
    {'w': tensor([2.0000, 0.5000])}
    """
    point = {name: value.detach() for name, value in params.items()}
    total: State = {}
    for name, value in point.items():
        shape = () if kind == "tensor" else value.shape
        total[name] = torch.zeros(shape, dtype=torch.float64, device=value.device)
    num_samples = 0
    for batch in batches:
        size = batch_length(batch)
        num_samples += size
        for gradients in _gradients(loss, point, batch=batch, size=size, kind=kind):
            for name, gradient in gradients.items():
                total[name] += _summed(gradient, kind)
    if not num_samples:
        raise ValueError("importance needs at least one sample, got none; give a set with samples")
    return {name: (value / num_samples).to(point[name].dtype) for name, value in total.items()}


def _gradients(
    loss: Callable[[State, Any], Tensor], params: State, *, batch: Any, size: int, kind: Importance
) -> list[State]:
    """Return the gradient of a batch's mean loss with `tensor`, else those of its `size` samples, (B, ...) by name.

    Raises:
        RuntimeError: torch.func cannot differentiate the loss of a sample, or of the batch.
    """

    def of_one(state: State, sample: Any) -> Tensor:
        return to_float32(loss(state, sample))

    try:
        if kind == "tensor":
            return [grad(loss)(params, batch)]
        return list(sample_gradients(of_one, params, batch, at_once=max(1, size)))
    except RuntimeError as error:
        if kind == "tensor":
            taken = "the gradient of a batch is"
            remedy = "change the loss"
        else:
            taken = "gradients of single samples are"
            remedy = (
                "change the loss, or take the gradients of batches (FedCL: importance=tensor, FedCurv and FedEWC: "
                "fisher=batch)"
            )
        raise RuntimeError(
            f"{taken} taken by torch.func, whose rules the loss must keep (no .item(), no branch on a tensor's value), "
            f"got: {error}; {remedy}"
        ) from error


def _summed(gradient: Tensor, kind: Importance) -> Tensor:
    """Return what the gradients of a batch add to Ω of one tensor, in float64."""
    if kind == "tensor":
        return gradient.double().square().sum()
    sizes = gradient.abs() if kind == "abs" else gradient.square()
    return sizes.sum(0, dtype=torch.float64)


def batch_fisher(
    loss: Callable[[State, Any], Tensor], params: State, batches: Iterable[Any], max_samples: int | None = None
) -> State:
    """Average over batches the squared gradient of the batch's mean loss.

    Args:
        loss: Function `(params, batch) -> ()`, the mean loss of a batch.
        params: Parameters at which the gradients are taken, by name.
        batches: At least one batch.
        max_samples: Number of samples. The batch that passes it is the last. None takes all batches.

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


def path_importance(  # noqa: PLR0917 - called by position
    loss: Callable[[State, Any], Tensor],
    params: StateLike,
    batches: Iterable[Any],
    lr: float,
    damping: float = 1e-3,
) -> State:
    """Compute Synaptic Intelligence's Ω_j = ω_j / ((w_j(end) − w_j(start))² + ξ) along a walk by plain SGD.

    ω_j = −Σ_t g_j(t) · (w_j(t+1) − w_j(t)) = lr · Σ_t g_j(t)² is what w_j contributes to the fall of the loss. The
    walk takes one step t for each batch, in their order, and leaves `params` as they are.

    Args:
        loss: Function `(params, batch) -> ()`, the mean loss of a batch.
        params: Trainable parameters w(start), by name.
        batches: Batches of the walk. Without a batch Ω is 0.
        lr: Learning rate of the walk, > 0.
        damping: Damping ξ > 0. The source has 1e-3, and 0.1 on permuted MNIST.

    Returns:
        By name, ≥ 0, shaped as the parameters, in their types. The walk and its sums are in float64.

    Source:
        Zenke, Poole and Ganguli, ICML 2017, arXiv:1703.04200, Eqs. 3 and 5, for one task.

    Note:
        The source's walk is the training itself, by Adam. The separate walk by plain SGD is ours. On such a walk no
        ω_j is negative, so that Ω needs no cut at 0, which the source's code has.

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
    """Return how many samples' gradients in `params` are taken together, at least 1.

    >>> samples_at_once({"w": torch.zeros(2**22)})
    4
    """
    return max(1, GRADIENT_FLOATS // sum(value.numel() for value in params.values()))


class _Method(nn.Module):
    """Calls a method of another module as `forward`, because `functional_call` calls nothing else."""

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
        params: Parameters w, by name.
        reference: Parameters w' of the same names, as constants.
        omega: Importance Ω ≥ 0, by name. Further entries of the other two are ignored.

    Returns:
        (), ≥ 0, in float32 or better. Exactly 0 with zero gradient at w = w'.

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
        if weight.ndim:
            # These take half the passes over the parameters that (weight * (w - there).square()).sum() takes.
            squares = F.mse_loss(w, there, reduction="none")
            terms.append(torch.dot(weight.to(w.dtype).flatten(), squares.flatten()))
        else:
            terms.append(weight * F.mse_loss(w, there, reduction="sum"))
    return torch.stack(terms).sum() if terms else torch.zeros(())
