"""Measures of client drift: diversity of gradients, distance of weights, disagreement of neurons."""

import torch
from torch import Tensor

from fl_lightning.functional.losses import true_class
from fl_lightning.functional.state import StateLike


def drift_diversity(squares: Tensor, total: Tensor) -> Tensor:
    """Compute the drift diversity Σ_k ‖m_k‖² / ‖Σ_k m_k‖² from sums over K clients.

    K times the drift diversity is the gradient diversity Λ.

    Args:
        squares: Sum of squared lengths Σ_k ‖m_k‖², (). m_k = w_k − w is the move of a client, or any other vector.
        total: Sum of the vectors Σ_k m_k, (D,).

    Returns:
        (), ≥ 1/K, and 1/K only if all vectors are equal. +inf if they cancel or are all 0.

    Source:
        Reported by FedVLS (AAAI 2025); Λ: Lee et al. 2022, arXiv:2106.03097, Definition 2.

    >>> moves = torch.eye(2)
    >>> drift_diversity(moves.square().sum(), moves.sum(0))
    tensor(1.)
    """
    whole = total.square().sum()
    return (squares / whole).masked_fill(whole == 0, torch.inf)


def weight_divergence(weights: StateLike, other: StateLike, order: float = 1) -> Tensor:
    """Compute the distance ‖w − w_k‖ between two states, over all entries of `weights`.

    Args:
        weights: State w, at least one tensor by name, of any shapes.
        other: State w_k of the same names and shapes. Further entries are ignored.
        order: Order of the norm, ≥ 1. 1 is the sum of absolute differences, 2 the Euclidean distance.

    Returns:
        (), float64, ≥ 0.

    Raises:
        KeyError: `other` lacks an entry.

    Source:
        Lee et al. 2022, arXiv:2106.03097, Sec. 5.2 (order 1).

    >>> w, w_k = {"a": torch.tensor([3.0, 1.0]), "b": torch.tensor(0.0)}, {"a": torch.zeros(2), "b": torch.tensor(2.0)}
    >>> weight_divergence(w, w_k), weight_divergence({"a": w["a"][:1]}, {"a": w_k["a"][:1]}, order=2)
    (tensor(6., dtype=torch.float64), tensor(3., dtype=torch.float64))
    """
    norms = [torch.linalg.vector_norm(w.double() - other[name].double(), order) for name, w in weights.items()]
    whole: Tensor = torch.linalg.vector_norm(torch.stack(norms), order)
    return whole


def activation_sums(activations: Tensor, target: Tensor, num_classes: int) -> tuple[Tensor, Tensor]:
    """Sum activations over the samples of each class, for `preferred_by_sums`.

    Sums of several batches add up.

    Args:
        activations: Outputs of n neurons, (..., B, n).
        target: Class of each sample, (B,) int64 in 0 ... C-1.
        num_classes: Number of classes C.

    Returns:
        The sums (..., C, n), and the number of samples of each class (C,), both float64.

    >>> activation_sums(torch.tensor([[1.0], [2.0], [4.0]]), torch.tensor([0, 1, 1]), num_classes=2)[0].tolist()
    [[1.0], [6.0]]
    """
    members = true_class(target, num_classes).T.double()
    return members @ activations.double(), members.sum(1)


def preferred_by_sums(sums: Tensor, samples: Tensor) -> Tensor:
    """Find the class on whose samples each neuron is most active on average, argmax_c h_c.

    Args:
        sums: Sums of a layer's outputs after its ReLU over the samples of each class, as `activation_sums` gives them,
            (C, n).
        samples: Number of samples of each class, (C,).

    Returns:
        (n,) int64 in 0 ... C-1, never a class without samples. Of equal classes it is the lowest, so that a dead neuron
        (`dead_neurons`) prefers the lowest class.

    Source:
        Lee et al. 2022, arXiv:2106.03097, Eq. 19.

    >>> preferred_by_sums(torch.tensor([[3.0, 1.0], [2.0, 2.0]]), torch.tensor([3.0, 1.0]))
    tensor([1, 1])
    """
    return (sums / samples[:, None]).nan_to_num(nan=-torch.inf).argmax(0)


def dead_neurons(activations: Tensor) -> Tensor:
    """Find the neurons that no sample activates. They prefer the same class in any two models.

    Args:
        activations: Outputs of a layer after its ReLU, (B, n), or their sums, (C, n).

    Returns:
        (n,) bool, True for a dead neuron.

    >>> dead_neurons(torch.tensor([[1.0, 0.0], [0.0, 0.0]]))
    tensor([False,  True])
    """
    return (activations == 0).all(0)


def weight_alignment(first: Tensor, second: Tensor) -> Tensor:
    """Compute the share of a layer's neurons that prefer the same class in two models.

    Args:
        first: Preferred classes in one model, as `preferred_by_sums` gives them, (n,) int64, n ≥ 1.
        second: Preferred classes in the other model, on the same samples, (n,) int64.

    Returns:
        (), float64, in [0, 1].

    Source:
        Lee et al. 2022, arXiv:2106.03097, Eq. 19 and Table 2.

    >>> weight_alignment(torch.tensor([0, 2, 1, 1]), torch.tensor([0, 2, 1, 0]))
    tensor(0.7500, dtype=torch.float64)
    """
    return (first == second).double().mean()
