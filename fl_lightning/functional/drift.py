"""Measures of client drift: diversity of gradients, distance of weights, disagreement of neurons."""

import torch
from torch import Tensor

from fl_lightning.functional.classes import complement
from fl_lightning.functional.losses import true_class
from fl_lightning.functional.state import StateLike, raised


def gradient_diversity(gradients: Tensor) -> Tensor:
    """Gradient diversity Λ = (1/K) Σ_k ‖∇f^k‖² / ‖∇f‖², with ∇f = (1/K) Σ_k ∇f^k.

    Args:
        gradients: one row per client, each laid end to end, (K, D).

    Returns:
        (), ≥ 1, and 1 only if all rows are equal; +inf if they cancel (or are all 0); float32 or better.

    Source:
        Lee et al. 2022, arXiv:2106.03097, Definition 2.

    >>> gradient_diversity(torch.eye(4)), gradient_diversity(torch.tensor([[1.0, 2.0], [-1.0, -2.0]]))
    (tensor(4.), tensor(inf))
    """
    gradients = raised(gradients)
    return len(gradients) * drift_diversity(gradients.square().sum(), gradients.sum(0))


def drift_diversity(squares: Tensor, total: Tensor) -> Tensor:
    """Drift diversity Σ_k ‖m_k‖² / ‖Σ_k m_k‖², of the sums over K clients; K times it is Λ of the m_k.

    Args:
        squares: Σ_k ‖m_k‖², ().
        total: Σ_k m_k, (D,); m_k = w_k − w, what the client moved, or any other vector.

    Returns:
        (), ≥ 1/K, and 1/K only if all are equal; +inf if they cancel (or are all 0).

    Source:
        Reported by FedVLS (AAAI 2025); for moves in place of gradients, Λ / K of `gradient_diversity`.

    >>> moves = torch.eye(2)
    >>> drift_diversity(moves.square().sum(), moves.sum(0))
    tensor(1.)
    """
    whole = total.square().sum()
    return (squares / whole).masked_fill(whole == 0, torch.inf)


def class_gradients(distributions: Tensor, beta: float = 0.0) -> Tensor:
    """Gradients p^k + β p̃^k of clients whose classes pull in orthogonal directions of length 1.

    Args:
        distributions: p^k, one row per client, (K, C), each sums to 1.
        beta: β ≥ 0, share of the out-local distribution, as a not-true distillation adds it.

    Returns:
        (K, C), for `gradient_diversity`.

    Source:
        Lee et al. 2022, arXiv:2106.03097, Proposition 1.

    >>> class_gradients(torch.eye(3), beta=1.0)[0]
    tensor([1.0000, 0.5000, 0.5000])
    """
    return distributions + beta * complement(distributions)


def class_gradient_diversity(distributions: Tensor, beta: float = 0.0) -> Tensor:
    """Gradient diversity of `class_gradients` in closed form.

    Λ = 1 + C (1 − b)² / (1 + β)² · (mean_k ‖p^k‖² − 1/C), b = β / (C − 1); for 0 ≤ β ≤ C/2 − 1 it falls with β
    unless every p^k is uniform.

    Args:
        distributions: p^k, one row per client, (K, C), each sums to 1, their mean uniform.
        beta: β ≥ 0.

    Returns:
        (), ≥ 1.

    Raises:
        ValueError: the mean of the rows is not uniform.

    Source:
        Derived from Lee et al. 2022, arXiv:2106.03097, Proposition 1.

    >>> [round(float(class_gradient_diversity(torch.eye(4), beta)), 4) for beta in (0.0, 0.5, 1.0)]
    [4.0, 1.9259, 1.3333]
    """
    classes = distributions.shape[1]
    mean = distributions.mean(0)
    if not torch.allclose(mean, torch.full_like(mean, 1 / classes), atol=1e-6):
        raise ValueError(
            f"the mean of the distributions must be uniform, got {mean.tolist()}; "
            "use gradient_diversity(class_gradients(...)) for others"
        )
    spread = distributions.square().sum(1).mean() - 1 / classes
    return 1 + classes * (1 - beta / (classes - 1)) ** 2 / (1 + beta) ** 2 * spread


def weight_divergence(weights: StateLike, other: StateLike, order: float = 1) -> Tensor:
    """Distance ‖w − w_k‖ between two states, over all entries of `weights`.

    Args:
        weights: w, tensors by name, any shapes; not empty.
        other: w_k, the same names and shapes (further entries are ignored).
        order: 1 for the sum of absolute differences, 2 for the Euclidean distance; any order ≥ 1.

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


def preferred_classes(activations: Tensor, target: Tensor, num_classes: int) -> Tensor:
    """Class on whose samples each neuron is most active on average, argmax_c h_c.

    Args:
        activations: outputs of a layer after its ReLU, (B, n).
        target: class of each sample, (B,) int64 in 0 ... C-1.
        num_classes: C.

    Returns:
        (n,) int64 in 0 ... C-1, never a class without samples; of equal ones the lowest, so that a dead neuron
        (`dead_neurons`) prefers the lowest class.

    Source:
        Lee et al. 2022, arXiv:2106.03097, Eq. 19.

    >>> preferred_classes(torch.tensor([[1.0, 0.0], [3.0, 0.0], [4.0, 0.0]]), torch.tensor([0, 0, 1]), num_classes=3)
    tensor([1, 0])
    """
    return preferred_by_sums(*activation_sums(activations, target, num_classes))


def activation_sums(activations: Tensor, target: Tensor, num_classes: int) -> tuple[Tensor, Tensor]:
    """Sum activations over the samples of each class, for `preferred_by_sums`; sums of several batches add up.

    Args:
        activations: (..., B, n).
        target: class of each sample, (B,) int64 in 0 ... C-1.
        num_classes: C.

    Returns:
        The sums (..., C, n), and the samples of each class (C,), both float64.

    >>> activation_sums(torch.tensor([[1.0], [2.0], [4.0]]), torch.tensor([0, 1, 1]), num_classes=2)[0].tolist()
    [[1.0], [6.0]]
    """
    own = true_class(target, num_classes).T.double()
    return own @ activations.double(), own.sum(1)


def preferred_by_sums(sums: Tensor, samples: Tensor) -> Tensor:
    """Find what `preferred_classes` does, where activations were summed over batches.

    Args:
        sums: over the samples of each class, (C, n).
        samples: of each class, (C,).

    Returns:
        (n,) int64.

    >>> preferred_by_sums(torch.tensor([[3.0, 1.0], [2.0, 2.0]]), torch.tensor([3.0, 1.0]))
    tensor([1, 1])
    """
    return (sums / samples[:, None]).nan_to_num(nan=-torch.inf).argmax(0)


def dead_neurons(activations: Tensor) -> Tensor:
    """Neurons that no sample activates: they prefer the same class in any two models.

    Args:
        activations: outputs of a layer after its ReLU, (B, n).

    Returns:
        (n,) bool, True for a dead neuron.

    >>> dead_neurons(torch.tensor([[1.0, 0.0], [0.0, 0.0]]))
    tensor([False,  True])
    """
    return (activations == 0).all(0)


def weight_alignment(first: Tensor, second: Tensor) -> Tensor:
    """Share of a layer's neurons that prefer the same class in two models.

    Args:
        first: `preferred_classes` of one model, (n,) int64, n ≥ 1.
        second: that of the other, on the same samples, (n,).

    Returns:
        (), float64, in [0, 1].

    Source:
        Lee et al. 2022, arXiv:2106.03097, Eq. 19 and Table 2.

    >>> weight_alignment(torch.tensor([0, 2, 1, 1]), torch.tensor([0, 2, 1, 0]))
    tensor(0.7500, dtype=torch.float64)
    """
    return (first == second).double().mean()
