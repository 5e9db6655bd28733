"""Loss terms used by more than one paper, in float32 for half types and in float64 for float64."""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from fl_lightning.functional.state import to_float32


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """Average −log softmax(logits)[target] over the batch.

    Args:
        logits: Raw scores, (B, C).
        target: Class of each sample, (B,) int64 in 0 ... C-1.

    Returns:
        (), ≥ 0, in nats, in float32 or better.

    Raises:
        IndexError: A class lies outside 0 ... C-1. On a GPU the device asserts instead.

    >>> cross_entropy(torch.zeros(3, 4), torch.tensor([0, 1, 3]))
    tensor(1.3863)
    """
    return F.cross_entropy(to_float32(logits), target)


def calibrated_cross_entropy(logits: Tensor, target: Tensor, shift: Tensor) -> Tensor:
    """Compute the cross-entropy of logits + shift, without the classes whose shift is −inf.

    With shift = log p, p the client's class prior, it is the balanced softmax. It serves training only, because a
    target of a class that is left out gives +inf.

    Args:
        logits: Raw scores, (B, C).
        target: Class of each sample, (B,) int64 in 0 ... C-1.
        shift: Terms that are added to every row, (C,), below +inf.

    Returns:
        (), in nats, in float32 or better. The gradient in a left-out logit is exactly 0.

    Source:
        Ren et al. 2020, arXiv:2007.10740, Eq. 4. FedED's L_cal and FedLC's margins have this form.

    >>> calibrated_cross_entropy(torch.zeros(2, 3), torch.tensor([0, 1]), torch.tensor([0.0, 0.0, -torch.inf]))
    tensor(0.6931)
    """
    left_out = shift == -torch.inf
    logits = to_float32(logits) + shift.masked_fill(left_out, 0.0)
    return F.cross_entropy(logits.masked_fill(left_out, -torch.inf), target)


def kl_divergence(local: Tensor, teacher: Tensor, temperature: float = 1.0, exclude: Tensor | None = None) -> Tensor:
    """Compute τ² · batch mean of KL(softmax(teacher/τ) ‖ softmax(local/τ)) over the classes left in.

    The shapes do not depend on what is excluded, so that the term runs under `torch.func.vmap`. A row with fewer than
    two classes left gives 0 and no gradient. The gradient in an excluded logit is exactly 0.

    Args:
        local: Logits of the model in training, (B, C).
        teacher: Logits to be matched, (B, C), as constants.
        temperature: Softmax temperature τ > 0. The factor τ² keeps the size of the gradient independent of τ.
        exclude: Whether a class is left out of both softmaxes, bool, (B, C) or (C,). None leaves out no class.

    Returns:
        (), ≥ 0, in nats, in float32 or better. 0 where both softmaxes agree.

    Raises:
        ValueError: The temperature is not positive.

    Source:
        Hinton et al. 2015, arXiv:1503.02531 (τ²); Lee et al. 2022, arXiv:2106.03097, Eqs. 4 and 11.

    >>> z, teacher = torch.tensor([[2.0, 0.0, 0.0]]), torch.tensor([[-5.0, 1.0, 0.0]])
    >>> kl_divergence(z, z, temperature=3.0)
    tensor(0.)
    >>> kl_divergence(z, teacher, exclude=torch.tensor([[True, False, False]]))
    tensor(0.1109)
    """
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    local = to_float32(local) / temperature
    teacher = to_float32(teacher.detach()) / temperature
    drop = torch.zeros_like(local, dtype=torch.bool) if exclude is None else exclude.expand_as(local)
    few = (~drop).sum(-1, keepdim=True) < 2
    # A softmax over no class would be NaN. Such rows keep all classes here and are set to 0 below.
    drop = drop & ~few
    log_local = _log_softmax_without(drop, local)
    log_teacher = _log_softmax_without(drop, teacher)
    terms = log_teacher.exp() * (log_teacher - log_local)
    return temperature**2 * terms.masked_fill(few, 0.0).sum(-1).mean()


def _log_softmax_without(drop: Tensor, logits: Tensor) -> Tensor:
    """Return the log-softmax over the classes that are not dropped, and 0 at the others: (B, C), (B, C) -> (B, C)."""
    return F.log_softmax(logits.masked_fill(drop, -torch.inf), -1).masked_fill(drop, 0.0)


def true_class(target: Tensor, num_classes: int) -> Tensor:
    """Return the mask of each sample's own class, also under `torch.func.vmap`, where `one_hot` does not run.

    Args:
        target: Classes, (B,) integers. The row of a class outside 0 ... C-1 is False.
        num_classes: Number of classes C.

    Returns:
        (B, C) bool.

    >>> true_class(torch.tensor([2, 0]), 3)
    tensor([[False, False,  True],
            [ True, False, False]])
    """
    return target.unsqueeze(-1) == torch.arange(num_classes, device=target.device)


def proximal(params: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> Tensor:
    """Compute the proximal term ½ Σ ‖θ − x‖² over all tensors of `params`, whose gradient is θ − x.

    Args:
        params: Trainable parameters θ, by name, of any shapes. Without parameters the result is 0.
        reference: Parameters x of the same names and shapes, as constants. Further entries are ignored.

    Returns:
        (), ≥ 0, in float32 or better. Exactly 0 with zero gradient at θ = x.

    Raises:
        KeyError: The reference lacks a parameter.

    Source:
        Li et al. 2020, arXiv:1812.06127, Eq. 2, without its coefficient μ.

    >>> proximal({"w": torch.tensor([3.0, 1.0])}, {"w": torch.tensor([0.0, 1.0])})
    tensor(4.5000)
    """
    if not params:
        return torch.zeros(())
    terms: list[Tensor] = []
    for name, value in params.items():
        # mse_loss passes over θ three times in both directions, (θ − x).square().sum() seven times.
        terms.append(F.mse_loss(to_float32(value), to_float32(reference[name].detach()), reduction="sum"))
    return torch.stack(terms).sum() / 2
