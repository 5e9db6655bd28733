"""Reduction of a client's samples of some classes."""

from collections.abc import Mapping

import torch
from torch import Tensor

from fl_lightning.utils.keyed import keyed_generator


def kept_of_classes(labels: Tensor, counts: Mapping[int, int], seed: int, client_id: int) -> Tensor:
    """Choose so many of a client's samples of some classes, and all samples of the other classes.

    The samples of a smaller count are among those of a larger one. They do not depend on earlier counts.

    Args:
        labels: Classes of the client's samples as they were dealt, (n,) int64.
        counts: Number of samples to be kept, by class.
        seed: Seed of the draw.
        client_id: Id of the client, 0 ... N-1.

    Returns:
        Whether each sample is kept, (n,) bool.

    >>> labels = torch.tensor([0, 1, 1, 1, 0])
    >>> kept_of_classes(labels, {1: 0}, seed=0, client_id=0)
    tensor([ True, False, False, False,  True])
    >>> int(kept_of_classes(labels, {1: 2}, seed=0, client_id=0).sum())
    4
    """
    keeps = torch.ones(len(labels), dtype=torch.bool)
    for class_idx, count in counts.items():
        rows = (labels == class_idx).nonzero().flatten()
        generator = keyed_generator(seed, f"class_count/{class_idx}", client_id=client_id)
        order = torch.randperm(len(rows), generator=generator)
        taken = order[count:]
        keeps[rows[taken]] = False
    return keeps
