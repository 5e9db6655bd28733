"""Fewer samples of a split, drawn by class."""

import numpy as np

from fl_lightning.data.partitioning import by_class, cut, largest_remainder
from fl_lightning.data.splits import Array
from fl_lightning.utils.keyed import keyed_numpy


def stratified(labels: Array | None, size: int, limit: int) -> Array:
    """Draw at most `limit` of `size` samples with the class proportions of all, the same ones in every run.

    Args:
        labels: The class of each sample, (size,) integers ≥ 0. None: there are none.
        size: The number of samples.
        limit: The most samples that are left.

    Returns:
        Ascending int64 indices, (min(size, limit),).

    >>> labels = np.repeat([0, 1], [80, 20])
    >>> np.bincount(labels[stratified(labels, 100, limit=10)]).tolist()
    [8, 2]
    """
    if size <= limit:
        return np.arange(size)
    generator = keyed_numpy(0, "limit")
    if labels is None:
        return np.sort(generator.permutation(size)[:limit])
    pools = by_class(labels, int(labels.max()) + 1)
    counts = largest_remainder([len(pool) for pool in pools], limit)
    drawn = []
    for pool, count in zip(pools, counts, strict=True):
        (kept,) = cut(generator.permutation(pool), [count])
        drawn.append(kept)
    return np.sort(np.concatenate(drawn))
