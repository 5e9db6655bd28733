"""Reduction of a client's samples of some classes."""

from collections.abc import Mapping

import torch
from torch import Tensor

from fl_lightning.utils.keyed import keyed_generator


def reduce_classes(part: Tensor, labels: Tensor, counts: Mapping[int, int], seed: int, client_id: int) -> Tensor:
    """Keep so many of a client's samples of some classes.

    Fewer samples are a part of more: what is kept does not depend on earlier counts.

    Args:
        part: the client's samples as they were dealt, (n,) int64 into the split.
        labels: of the split, (N,) int64.
        counts: samples to be kept, by class.
        seed: of the draw.
        client_id: 0 ... N-1.

    Returns:
        (n',) int64, in the order of `part`.

    >>> labels = torch.tensor([0, 1, 1, 1, 0])
    >>> few, none = (reduce_classes(torch.arange(5), labels, {1: n}, 0, 0) for n in (2, 0))
    >>> len(few), none
    (4, tensor([0, 4]))
    """
    keeps = torch.ones(len(part), dtype=torch.bool)
    for class_idx, count in counts.items():
        rows = (labels[part] == class_idx).nonzero().flatten()
        order = torch.randperm(len(rows), generator=keyed_generator(seed, f"class_count/{class_idx}", -1, client_id))
        keeps[rows[order[count:]]] = False
    return part[keeps]
