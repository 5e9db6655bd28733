"""Class-wise accuracies: counts, shape, change over the rounds, and fit to a class distribution."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fl_lightning.functional.classes import ClassSplit


def class_counts(preds: Tensor, target: Tensor, num_classes: int) -> Tensor:
    """Count right answers and samples of each class.

    Args:
        preds: Scores (B, C, ...), whose largest along dimension 1 is the answer, or classes (B, ...), integers.
        target: Class of each sample, (B, ...) integers in 0 ... C-1.
        num_classes: Number of classes C.

    Returns:
        (2, C) float64: hits, samples. Counts of several batches add up.

    Raises:
        IndexError: A class lies outside 0 ... C-1. On a GPU the device asserts instead.
        ValueError: There are not as many answers as targets.

    >>> class_counts(torch.tensor([0, 2, 2, 1]), torch.tensor([0, 2, 1, 1]), num_classes=3)
    tensor([[1., 1., 1.],
            [1., 2., 1.]], dtype=torch.float64)
    """
    answers = checked_answers(preds, target)
    target = target.flatten()
    hit = (answers.flatten() == target).double()
    counts = torch.zeros(2, num_classes, dtype=torch.float64, device=target.device)
    counts[0].index_add_(0, target, hit)
    counts[1].index_add_(0, target, torch.ones_like(hit))
    return counts


def confusion_counts(preds: Tensor, target: Tensor, num_classes: int) -> Tensor:
    """Count for each class as which class its samples are taken.

    Args:
        preds: Answers, as in `class_counts`.
        target: Class of each sample, as in `class_counts`.
        num_classes: Number of classes C.

    Returns:
        (C, C + 1) float64: a row for each class of a sample, a column for each answer. The last column counts the
        answers that are none of the C classes. Counts of several batches add up.

    Raises:
        IndexError: A class lies outside 0 ... C-1. On a GPU the device asserts instead.
        ValueError: There are not as many answers as targets.

    >>> confusion_counts(torch.tensor([0, 2, 1, 1]), torch.tensor([0, 0, 1, 1]), num_classes=2)
    tensor([[1., 0., 1.],
            [0., 2., 0.]], dtype=torch.float64)
    """
    answers = checked_answers(preds, target).flatten()
    target = target.flatten().long()
    columns = num_classes + 1
    is_none = (answers < 0) | (answers >= num_classes)
    cells = target * columns + answers.masked_fill(is_none, num_classes)
    counts = torch.zeros(num_classes * columns, dtype=torch.float64, device=target.device)
    counts.index_add_(0, cells, torch.ones_like(cells, dtype=torch.float64))
    return counts.view(num_classes, columns)


def answers_and_samples(confusion: Tensor) -> Tensor:
    """Return right answers and samples of each class, from `confusion_counts`.

    Args:
        confusion: The counts, (C, C + 1).

    Returns:
        (2, C): hits, samples, as `class_counts` gives them.

    >>> answers_and_samples(torch.tensor([[1.0, 0.0, 1.0], [0.0, 2.0, 0.0]]))
    tensor([[1., 2.],
            [2., 2.]])
    """
    return torch.stack([confusion.diagonal(), confusion.sum(1)])


def checked_answers(preds: Tensor, target: Tensor) -> Tensor:
    """Return the answer for each target.

    Args:
        preds: Answers, as in `class_counts`.
        target: Class of each sample, as in `class_counts`.

    Raises:
        ValueError: There are not as many answers as targets.
    """
    answers = preds.argmax(1) if preds.is_floating_point() else preds
    if answers.shape != target.shape:
        raise ValueError(
            f"preds must be scores (B, C, ...) or integer classes (B, ...) of the targets' shape "
            f"{tuple(target.shape)}, got {tuple(preds.shape)}"
        )
    return answers


def answer_counts(preds: Tensor, target: Tensor) -> Tensor:
    """Count right answers and samples of all classes together.

    Args:
        preds: Answers, as in `class_counts`.
        target: Class of each sample, as in `class_counts`.

    Returns:
        (2,) float64: hits, samples.

    Raises:
        ValueError: There are not as many answers as targets.

    >>> answer_counts(torch.tensor([0, 2, 2]), torch.tensor([0, 1, 2]))
    tensor([2., 3.], dtype=torch.float64)
    """
    is_right = checked_answers(preds, target) == target
    counts = class_counts(is_right.long(), torch.ones_like(target), num_classes=2)
    return counts[:, 1]


def class_accuracy(counts: Tensor) -> Tensor:
    """Compute the accuracy of each class, A_c = hits_c / samples_c.

    Args:
        counts: Hits and samples, (..., 2, C), as `class_counts` gives them.

    Returns:
        (..., C), in [0, 1]. NaN for a class without samples.

    >>> class_accuracy(torch.tensor([[1.0, 0.0, 2.0], [2.0, 0.0, 2.0]]))
    tensor([0.5000,    nan, 1.0000])
    """
    hits, samples = counts.unbind(-2)
    return hits / samples


def group_means(values: Tensor, groups: ClassSplit) -> ClassSplit:
    """Average a value over the missing, the non-dominant and the dominant classes of a client.

    FedED calls these classes empty, minority and majority.

    Args:
        values: Values of the classes, (..., C), such as A_c or τ_c. NaN is left out.
        groups: Masks (..., C) bool, as `class_split` gives them.

    Returns:
        Three means (...). NaN for a group without a defined value.

    >>> from fl_lightning.functional.classes import class_split
    >>> split = class_split(torch.tensor([0, 0, 4, 96]), gamma=0.05)
    >>> [round(float(mean), 2) for mean in group_means(torch.tensor([0.1, 0.3, 0.4, 0.8]), split)]
    [0.2, 0.4, 0.8]
    """
    means = [values.masked_fill(~mask, torch.nan).nanmean(-1) for mask in groups]
    return ClassSplit(*means)


def _over_defined(weights: Tensor, accuracy: Tensor) -> Tensor:
    """Scale weights to the sum 1 over the classes whose accuracy is defined, and set the others to 0: (..., C)."""
    weights = weights.masked_fill(accuracy.isnan(), 0.0)
    return weights / weights.sum(-1, keepdim=True)


def class_weighted_accuracy(accuracy: Tensor, weights: Tensor) -> Tensor:
    """Compute the accuracy on a test set whose classes have the given shares, Σ_c p_c A_c.

    With the in-local distribution of a client it is the in-local accuracy, with the out-local one the out-local.

    Args:
        accuracy: Accuracies A, (..., C), fractions in [0, 1]. A class without test samples is NaN.
        weights: Shares p, (..., C), ≥ 0, as `in_local` or `out_local` gives them. They are renormalized over the
            classes whose accuracy is defined.

    Returns:
        (...), in [0, 1]. NaN if the defined classes have no weight, and for a client without samples.

    Source:
        Lee et al. 2022, arXiv:2106.03097, Sec. 2.2 and Definition 1.

    >>> class_weighted_accuracy(torch.tensor([0.9, 0.5, torch.nan]), torch.tensor([0.2, 0.6, 0.2]))
    tensor(0.6000)
    """
    return (_over_defined(weights, accuracy) * accuracy.nan_to_num()).sum(-1)


def normalised_class_accuracy(accuracy: Tensor) -> Tensor:
    """Normalize class-wise accuracies to a distribution over the classes, Ã_c = A_c / Σ_c A_c.

    Args:
        accuracy: Accuracies A, (..., C), fractions in [0, 1]. A class without test samples is NaN.

    Returns:
        (..., C), whose defined entries sum to 1. NaN where the class is NaN, and everywhere if no sample is recognized.

    Source:
        Lee et al. 2022, arXiv:2106.03097, Fig. 10 and Sec. 5.2.

    >>> normalised_class_accuracy(torch.tensor([0.6, 0.2, 0.0]))
    tensor([0.7500, 0.2500, 0.0000])
    """
    return accuracy / accuracy.nansum(-1, keepdim=True)


def distribution_distance(accuracy: Tensor, distribution: Tensor) -> Tensor:
    """Compute the L1 distance between normalized class accuracies and a class distribution, ‖Ã − p‖₁.

    Args:
        accuracy: Accuracies A, (..., C), fractions in [0, 1]. A class without test samples is NaN and left out of both.
        distribution: Shares p, (..., C), ≥ 0, with the sum 1, as `in_local` gives them.

    Returns:
        (...), in [0, 2]. NaN if no sample is recognized, and for a client without samples.

    Source:
        Lee et al. 2022, arXiv:2106.03097, Sec. 5.2 (Fig. 8).

    >>> distribution_distance(torch.tensor([0.6, 0.2]), torch.tensor([0.5, 0.5]))
    tensor(0.5000)
    """
    undefined = accuracy.isnan()
    difference = normalised_class_accuracy(accuracy) - _over_defined(distribution, accuracy)
    return difference.masked_fill(undefined & ~undefined.all(-1, keepdim=True), 0.0).abs().sum(-1)


def prediction_consistency(accuracy: Tensor) -> Tensor:
    """Compute the cosine between class-wise accuracies of successive rounds, cos(A^(t−1), A^(t)).

    Args:
        accuracy: Accuracies A, (T, C), fractions in [0, 1], one row for each round. A class without test samples is
            NaN in every row and left out.

    Returns:
        (T − 1,), in [0, 1]. 1 means that the same classes are recognized. NaN where a round recognizes no sample.

    Source:
        Lee et al. 2022, arXiv:2106.03097, Fig. 2b.

    >>> prediction_consistency(torch.tensor([[0.6, 0.0], [0.3, 0.0], [0.0, 0.8], [0.0, 0.0]]))
    tensor([1., 0., nan])
    """
    accuracy = accuracy.nan_to_num()
    norms = torch.linalg.vector_norm(accuracy, dim=-1)
    cosines: Tensor = (accuracy[:-1] * accuracy[1:]).sum(-1) / (norms[:-1] * norms[1:])
    return cosines.clamp(max=1.0)


def answers_among(logits: Tensor, classes: Sequence[int]) -> Tensor:
    """Set the logits of all classes except some to −inf, so that only these are answers.

    Args:
        logits: Logits, (B, C, ...).
        classes: The classes that are answers.

    >>> answers_among(torch.tensor([[3.0, 1.0, 2.0]]), classes=[1, 2])
    tensor([[-inf, 1., 2.]])
    """
    is_left_out = torch.ones(logits.shape[1], dtype=torch.bool, device=logits.device)
    is_left_out[list(classes)] = False
    shape = [1, -1, *[1] * (logits.ndim - 2)]
    return logits.masked_fill(is_left_out.view(shape), -math.inf)
