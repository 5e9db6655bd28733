"""Forgetting, from class-wise accuracies: over the rounds, and from the global model to a local one."""

import torch
from torch import Tensor


def peak_accuracy(accuracy: Tensor) -> Tensor:
    """Find the best accuracy of each class over the rounds, max_t A_c^(t).

    Args:
        accuracy: Accuracies A, (T, C), fractions in [0, 1]. NaN is left out.

    Returns:
        (C,). NaN where no round is left.

    >>> peak_accuracy(torch.tensor([[0.5, torch.nan], [0.25, torch.nan]]))
    tensor([0.5000,    nan])
    """
    if not len(accuracy):
        return accuracy.new_full(accuracy.shape[1:], torch.nan)
    best = accuracy.masked_fill(accuracy.isnan(), -torch.inf).amax(0)
    return best.masked_fill(best.isinf(), torch.nan)


def forgetting_per_class(accuracy: Tensor, exclude_final: bool = False) -> Tensor:
    """Subtract each class's final accuracy from its peak: max_t A_c^(t) − A_c^(T).

    Args:
        accuracy: Accuracies A, (T, C), fractions in [0, 1], one row for each of the rounds 1 ... T, without the
            evaluation before training. A class without test samples is NaN. The rounds before the last may be given as
            one row, the best accuracy of each class.
        exclude_final: Whether the peak is taken over rounds 1 ... T-1, as in continual learning.

    Returns:
        (C,), in [0, 1], or in [-1, 1] with `exclude_final`. A round that is NaN is left out. NaN where the last round
        is NaN, or no other round is left.

    Source:
        Lee et al. 2022, arXiv:2106.03097, Eq. 5; `exclude_final`: Chaudhry et al. 2018, arXiv:1801.10112.

    >>> table = torch.tensor([[0.5, 0.2], [0.9, 0.3], [0.6, 0.4]])
    >>> forgetting_per_class(table)
    tensor([0.3000, 0.0000])
    >>> forgetting_per_class(table, exclude_final=True)
    tensor([ 0.3000, -0.1000])
    """
    best = peak_accuracy(accuracy[:-1] if exclude_final else accuracy)
    if not len(accuracy):
        return best
    return best - accuracy[-1]


def forgetting(accuracy: Tensor, exclude_final: bool = False) -> Tensor:
    """Average peak minus final accuracy over the classes, F = (1/C) Σ_c [max_t A_c^(t) − A_c^(T)].

    Args:
        accuracy: Accuracies A, (T, C), as in `forgetting_per_class`.
        exclude_final: Whether the peak is taken over rounds 1 ... T-1, as in continual learning.

    Returns:
        (), in [0, 1], or in [-1, 1] with `exclude_final`. 0 means that nothing was forgotten. Classes that are NaN are
        left out of the mean. NaN where no class or no round is left.

    Source:
        Lee et al. 2022, arXiv:2106.03097, Eq. 5.

    >>> nan = float("nan")
    >>> forgetting(torch.tensor([[0.5, 0.2, nan], [0.9, 0.3, nan], [0.6, 0.4, nan]]))
    tensor(0.1500)
    """
    return forgetting_per_class(accuracy, exclude_final=exclude_final).nanmean()


def forgetting_since(peak: Tensor, now: Tensor) -> Tensor:
    """Compute `forgetting` from the best accuracies: (1/C) Σ_c [peak_c − now_c].

    Args:
        peak: Best accuracy of each class, (C,), fractions in [0, 1].
        now: Final accuracy of each class, (C,).

    Returns:
        (), as `forgetting` returns it.

    >>> forgetting_since(torch.tensor([0.5, 0.25, torch.nan]), torch.tensor([0.5, 0.0, torch.nan]))
    tensor(0.1250)
    """
    return (peak - now).nanmean()


def forgetting_degree(global_accuracy: Tensor, local_accuracy: Tensor, xi: float = 1e-8) -> Tensor:
    """Compute the share of accuracy that local training loses, τ_c = (A_c(w_g) − A_c(w_i)) / (A_c(w_g) + ξ).

    Args:
        global_accuracy: Accuracies A(w_g) of the model that the client received, (..., C), fractions in [0, 1].
        local_accuracy: Accuracies A(w_i) of the client's model after training, on the same test set, (..., C).
        xi: Number ξ > 0 that keeps the quotient finite.

    Returns:
        (..., C), in (−∞, 1]. 1 means that all is forgotten, 0 nothing, and a negative value that the class is learned.
        The value has no meaning where `global_accuracy` is 0, so average over `global_accuracy > 0` only. NaN where an
        accuracy is NaN.

    Source:
        FedKA, Eq. 1.

    >>> forgetting_degree(torch.tensor([0.8, 0.8, 0.4]), torch.tensor([0.0, 0.6, 0.6]))
    tensor([ 1.0000,  0.2500, -0.5000])
    """
    return (global_accuracy - local_accuracy) / (global_accuracy + xi)
