"""Loss terms used by more than one paper, in float32 for half types and in float64 for float64."""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from fl_lightning.functional.state import to_float32


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """Average −log softmax(logits)[target] over the batch.

    Args:
        logits: raw scores, (B, C).
        target: class of each sample, (B,) int64 in 0 ... C-1.

    Returns:
        (), ≥ 0, in nats; float32 or better.

    Raises:
        IndexError: a class outside 0 ... C-1 (on the CPU; on a GPU the device asserts).

    >>> cross_entropy(torch.zeros(3, 4), torch.tensor([0, 1, 3]))
    tensor(1.3863)
    """
    return F.cross_entropy(to_float32(logits), target)


def calibrated_cross_entropy(logits: Tensor, target: Tensor, shift: Tensor) -> Tensor:
    """Compute the cross-entropy of logits + shift, without the classes whose shift is −inf.

    With shift = log p, p the client's class prior, it is the balanced softmax. For training only: a target of a class
    that is left out gives +inf.

    Args:
        logits: raw scores, (B, C).
        target: class of each sample, (B,) int64 in 0 ... C-1.
        shift: added to every row, (C,), below +inf.

    Returns:
        (), in nats; the gradient in a left-out logit is exactly 0; float32 or better.

    Source:
        Ren et al. 2020, arXiv:2007.10740, Eq. 4; FedED's L_cal and FedLC's margins are of this form.

    >>> calibrated_cross_entropy(torch.zeros(2, 3), torch.tensor([0, 1]), torch.tensor([0.0, 0.0, -torch.inf]))
    tensor(0.6931)
    """
    left_out = shift == -torch.inf
    logits = to_float32(logits) + shift.masked_fill(left_out, 0.0)
    return F.cross_entropy(logits.masked_fill(left_out, -torch.inf), target)


def kl_divergence(local: Tensor, teacher: Tensor, temperature: float = 1.0, exclude: Tensor | None = None) -> Tensor:
    """Compute τ² · batch mean of KL(softmax(teacher/τ) ‖ softmax(local/τ)) over the classes left in.

    Shapes stay fixed whatever is excluded, so the term runs under `torch.func.vmap`. A row with fewer than
    two classes left gives 0 and no gradient. The gradient in an excluded logit is exactly 0.

    Args:
        local: logits of the model in training, (B, C).
        teacher: logits to be matched, (B, C); taken as constants.
        temperature: τ > 0; the factor τ² keeps the size of the gradient independent of it.
        exclude: True where a class is left out of both softmaxes, bool, (B, C) or (C,); None: no class.

    Returns:
        (), ≥ 0, in nats; 0 where both softmaxes agree; float32 or better.

    Raises:
        ValueError: the temperature is not positive.

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
    drop = drop & ~few  # a softmax over nothing would be NaN: such rows keep all classes here, and are zeroed below

    log_local, log_teacher = (
        F.log_softmax(z.masked_fill(drop, -torch.inf), -1).masked_fill(drop, 0.0) for z in (local, teacher)
    )
    terms = log_teacher.exp() * (log_teacher - log_local)
    return temperature**2 * terms.masked_fill(few, 0.0).sum(-1).mean()


def true_class(target: Tensor, num_classes: int) -> Tensor:
    """Mask each sample's own class, also under `torch.func.vmap`, where `one_hot` does not run.

    Args:
        target: classes, (B,) integers; one outside 0 ... C-1 is nowhere true.
        num_classes: C.

    Returns:
        bool, (B, C).

    >>> true_class(torch.tensor([2, 0]), 3)
    tensor([[False, False,  True],
            [ True, False, False]])
    """
    return target.unsqueeze(-1) == torch.arange(num_classes, device=target.device)


def proximal(params: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> Tensor:
    """Compute the proximal term ½ Σ ‖θ − x‖² over all tensors of `params`, whose gradient is θ − x.

    Args:
        params: trainable parameters θ, by name, any shapes; of none the result is 0.
        reference: x, the same names and shapes (further entries are ignored); taken as constants.

    Returns:
        (), ≥ 0, exactly 0 with zero gradient at θ = x; float32 or better.

    Raises:
        KeyError: the reference lacks a parameter.

    Source:
        Li et al. 2020, arXiv:1812.06127, Eq. 2, without its coefficient μ.

    >>> proximal({"w": torch.tensor([3.0, 1.0])}, {"w": torch.tensor([0.0, 1.0])})
    tensor(4.5000)
    """
    # mse_loss goes over θ three times in both directions, the terms of (θ − x).square().sum() seven times
    terms = [
        F.mse_loss(to_float32(p), to_float32(reference[name].detach()), reduction="sum") for name, p in params.items()
    ]
    return torch.stack(terms).sum() / 2 if terms else torch.zeros(())
