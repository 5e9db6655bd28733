"""Class counts of clients: dominant and missing classes, in- and out-local distributions."""

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fl_lightning.utils.settings import check_at_least

WHOLE = frozenset(
    {
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.uint16,
        torch.uint32,
        torch.uint64,
    }
)
"""Types of labels besides int64, in which losses and metrics read them."""


class ClassSplit(NamedTuple):
    """Holds three masks (..., C) bool, of which exactly one is True for each class."""

    missing: Tensor
    non_dominant: Tensor
    dominant: Tensor


def class_labels(labels: Tensor) -> Tensor:
    """Return labels of any integer type or bool as int64, and other targets as they are.

    >>> class_labels(torch.tensor([True, False])), class_labels(torch.tensor([0.5]))
    (tensor([1, 0]), tensor([0.5000]))
    """
    return labels.long() if labels.dtype in WHOLE else labels


def unique_names(names: Sequence[Any] | None, num_classes: int | None) -> list[str]:
    """Return one name for each class, for keys of logged values and columns of tables.

    A slash would begin another part of a key and becomes `-`, and line breaks and tabs become spaces. A name that is
    not the only one of its kind then gets the number of its class. Classes without a name are numbered.

    Args:
        names: Names of the classes, in the order of their numbers. None: there are none.
        num_classes: Number of classes C. None: as many as there are names.

    >>> unique_names(["cat", "a/b", "a-b"], 4)
    ['cat', 'a-b (1)', 'a-b (2)', '03']
    """
    cleaned = [] if names is None else [clean_name(name) for name in names]
    count = len(cleaned) if num_classes is None else num_classes
    width = number_width(count)
    given: list[str] = []
    for class_idx in range(count):
        name = cleaned[class_idx] if class_idx < len(cleaned) else ""
        given.append(name or f"{class_idx:0{width}d}")
    found = Counter(given)
    unique: list[str] = []
    for class_idx, name in enumerate(given):
        if found[name] > 1:
            while name in found:
                name = f"{name} ({class_idx})"  # noqa: PLW2901 - a longer name until it is the only one
        unique.append(name)
    return unique


def shown_names(names: Sequence[str]) -> list[str]:
    """Return the names of classes as people write them: the number of a class without a name has no zeros before it.

    Keys keep the zeros, by which they are sorted.

    Args:
        names: Names of all classes, as of `unique_names`.

    >>> shown_names(["00", "01", "cat"]), shown_names(["007", "7"])
    (['0', '1', 'cat'], ['007', '7'])
    """
    width = number_width(len(names))
    shown = []
    for class_idx, name in enumerate(names):
        is_number = name == f"{class_idx:0{width}d}"
        shown.append(str(class_idx) if is_number else name)
    # A class may have been given the number of another one as its name.
    return shown if len(set(shown)) == len(set(names)) else list(names)


def number_width(num_classes: int) -> int:
    """Return the number of digits with which classes without names are numbered in keys."""
    return max(2, len(str(num_classes - 1)))


def clean_name(name: Any) -> str:
    r"""Return the name of a class without characters that keys do not hold, empty where there is none.

    >>> clean_name("a/b"), clean_name(" lung\n left "), clean_name(None), clean_name(0)
    ('a-b', 'lung left', '', '0')
    """
    return "" if name is None else " ".join(str(name).replace("/", "-").split())


def label_counts(labels: Tensor, indices_per_client: Sequence[Tensor | np.ndarray], num_classes: int) -> Tensor:
    """Count the samples of each class on each client.

    Args:
        labels: Class of each sample, (n,) int64 in 0 ... C-1.
        indices_per_client: N index arrays into `labels`, int64. They may be empty, and may overlap.
        num_classes: Number of classes C.

    Returns:
        (N, C) int64 on the CPU.

    Raises:
        ValueError: A label lies outside 0 ... C-1.

    >>> label_counts(torch.tensor([0, 2, 2, 1]), [np.array([0, 1, 2]), np.array([3])], num_classes=3)
    tensor([[1, 0, 2],
            [0, 1, 0]])
    """
    labels = labels.cpu()
    if labels.numel() and not 0 <= int(labels.min()) <= int(labels.max()) < num_classes:
        raise ValueError(
            f"labels must lie in 0 ... {num_classes - 1}, got {int(labels.min())} ... {int(labels.max())}: "
            "set num_classes to the number of classes of the data"
        )
    counts = torch.zeros(len(indices_per_client), num_classes, dtype=torch.int64)
    for client_id, indices in enumerate(indices_per_client):
        classes = labels[torch.as_tensor(indices, dtype=torch.int64)]
        counts[client_id] = torch.bincount(classes, minlength=num_classes)
    return counts


def class_split(counts: Tensor, gamma: float) -> ClassSplit:
    """Sort the classes of a client: missing n_c = 0, non-dominant 0 < n_c/n < γ, dominant n_c/n ≥ γ.

    Args:
        counts: Numbers of samples n_c, (..., C), integers ≥ 0. A client without samples misses every class.
        gamma: Least share of a dominant class, γ ≥ 0. A share equal to γ is dominant. The rounded quotient n_c/n is
            compared with γ, and not n_c with γ·n.

    Returns:
        Masks (..., C) bool.

    Raises:
        ValueError: γ is negative or NaN.

    Source:
        Missing, non-dominant and dominant classes as FedKA defines them.

    >>> split = class_split(torch.tensor([0, 7, 93]), gamma=0.07)
    >>> split.missing.tolist(), split.non_dominant.tolist(), split.dominant.tolist()
    ([True, False, False], [False, False, False], [False, True, True])
    """
    check_at_least(0, gamma=gamma)
    missing = counts == 0
    shares = counts.double() / counts.sum(-1, keepdim=True).clamp(min=1).double()
    dominant = ~missing & (shares >= gamma)
    return ClassSplit(missing=missing, non_dominant=~missing & ~dominant, dominant=dominant)


def in_local(counts: Tensor) -> Tensor:
    """Compute the in-local distribution p_c = n_c / n.

    Args:
        counts: Numbers of samples n_c, (..., C), integers ≥ 0.

    Returns:
        (..., C) float64, with the sum 1. NaN for a client without samples.

    Source:
        Lee et al. 2022, arXiv:2106.03097, Definition 1.

    >>> in_local(torch.tensor([1, 0, 3]))
    tensor([0.2500, 0.0000, 0.7500], dtype=torch.float64)
    """
    return counts.double() / counts.sum(-1, keepdim=True).double()


def out_local(counts: Tensor) -> Tensor:
    """Compute the out-local distribution p̃_c = (1 − p_c) / (C − 1), large where the client has few samples.

    Args:
        counts: Numbers of samples n_c, (..., C), integers ≥ 0.

    Returns:
        (..., C) float64, with the sum 1. NaN for a client without samples, and for C = 1.

    Source:
        Lee et al. 2022, arXiv:2106.03097, Definition 1.

    >>> out_local(torch.tensor([1, 0, 3]))
    tensor([0.3750, 0.5000, 0.1250], dtype=torch.float64)
    """
    return complement(in_local(counts))


def effective_classes(counts: Tensor) -> Tensor:
    """Compute how many equally frequent classes have the entropy of each client's p: exp of the entropy, in [1, C].

    Args:
        counts: Numbers of samples n_c, (..., C), integers ≥ 0.

    Returns:
        (...) float64. NaN for a client without samples.

    >>> effective_classes(torch.tensor([[5, 5, 0], [9, 0, 0]]))
    tensor([2., 1.], dtype=torch.float64)
    """
    entropy: Tensor = torch.special.entr(in_local(counts)).sum(-1)
    return entropy.exp()


def distance_from_uniform(counts: Tensor) -> Tensor:
    """Compute the total variation distance ½ Σ |p_c − 1/C| of each client, in [0, 1 − 1/C].

    Args:
        counts: Numbers of samples n_c, (..., C), integers ≥ 0.

    Returns:
        (...) float64. NaN for a client without samples.

    >>> distance_from_uniform(torch.tensor([[5, 5], [9, 0]]))
    tensor([0.0000, 0.5000], dtype=torch.float64)
    """
    return (in_local(counts) - 1 / counts.shape[-1]).abs().sum(-1) / 2


def complement(distribution: Tensor) -> Tensor:
    """Turn an in-local distribution into the out-local one, (1 − p_c) / (C − 1): (..., C) -> (..., C).

    >>> complement(torch.tensor([1.0, 0.0, 0.0]))
    tensor([0.0000, 0.5000, 0.5000])
    """
    return (1 - distribution) / (distribution.shape[-1] - 1)


def estimated_distribution(probabilities: Tensor) -> Tensor:
    """Estimate a model's class distribution (EPD): the mean of its predictions on the transfer set.

    Args:
        probabilities: Predictions, (..., K, C), ≥ 0, each with the sum 1.

    Returns:
        (..., C) float64, with the sum 1.

    Source:
        Seyedmohammadi et al. 2024, arXiv:2403.11892 (KnFu), Eq. 5.

    >>> estimated_distribution(torch.tensor([[0.9, 0.1], [0.5, 0.5]]))
    tensor([0.7000, 0.3000], dtype=torch.float64)
    """
    return probabilities.double().mean(-2)
