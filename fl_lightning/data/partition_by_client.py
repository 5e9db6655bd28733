"""Parts of the partitions that go client by client: its class proportions, its size, its number of classes."""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fl_lightning.data.partition_by_class import Indices, by_class

Shares = NDArray[np.float64]


def largest_remainder(shares: ArrayLike, size: int) -> Indices:
    """Round shares · size to whole numbers that sum to size: floors, the rest one each to the largest fractions.

    Args:
        shares: (C,) ≥ 0 with a positive sum; scaled to sum to 1.
        size: ≥ 0.

    Returns:
        (C,) int64; equal fractions go to the lowest index.

    >>> largest_remainder([0.5, 0.3, 0.2], 4)
    array([2, 1, 1])
    """
    wanted = np.asarray(shares, dtype=np.float64)
    wanted = wanted / wanted.sum() * size
    counts: Indices = np.floor(wanted).astype(np.int64)
    first = np.argsort(counts - wanted, kind="stable")[: size - int(counts.sum())]
    counts[first] += 1
    return counts


def class_counts(shares: ArrayLike, size: int, available: ArrayLike) -> Indices:
    """Number of samples of each class that make up `size` with these shares, when some classes run out.

    A class that cannot give its part gives all it has and is dropped; the shares of the others are scaled up for what
    is missing. Where no class that is left has a share, they are taken by what they have.

    Args:
        shares: q, (C,) ≥ 0 with a positive sum.
        size: at most Σ available.
        available: samples left of each class, (C,) int64.

    Returns:
        (C,) int64, summing to size, none above `available`.

    >>> class_counts([0.8, 0.2, 0.0], size=10, available=[5, 3, 9])
    array([5, 3, 2])
    """
    q, left = np.array(shares, dtype=np.float64), np.array(available, dtype=np.int64)
    counts = np.zeros_like(left)
    while missing := size - int(counts.sum()):  # every pass ends it or uses up a class
        q[left == 0] = 0
        take = np.minimum(largest_remainder(q if q.any() else left, missing), left)
        counts += take
        left -= take
    return counts


def client_proportions(num_clients: int, num_classes: int, alpha: float, generator: np.random.Generator) -> Shares:
    """Each client's class proportions q_i ~ Dir(α · 1_C): (N, C); alpha inf: 1/C each.

    >>> client_proportions(2, 4, float("inf"), np.random.default_rng(0))
    array([[0.25, 0.25, 0.25, 0.25],
           [0.25, 0.25, 0.25, 0.25]])
    """
    if alpha == float("inf"):
        return np.full((num_clients, num_classes), 1 / num_classes)
    return generator.dirichlet(np.full(num_classes, min(alpha, 1e100)), size=num_clients)


def draw_by_proportions(
    labels: ArrayLike, proportions: ArrayLike, size: int, generator: np.random.Generator
) -> list[Indices]:
    """Draw for every client at most `size` samples with its class proportions: test sets.

    Clients may hold the same sample. Of a class with too few samples all are taken and nothing makes up for the rest,
    so nobody is tested on a class that is not its own.

    Args:
        labels: (n,) integers in 0 ... C-1.
        proportions: q, (N, C), ≥ 0, each row with a positive sum.
        size: of each client.
        generator: draws the samples.

    Returns:
        N index arrays, in order of the classes.

    >>> parts = draw_by_proportions([0, 0, 0, 1], [[1, 0], [1, 1]], size=4, generator=np.random.default_rng(0))
    >>> [sorted(part.tolist()) for part in parts][0], 3 in parts[1], len(parts[1])
    ([0, 1, 2], True, 3)
    """
    q = np.asarray(proportions, dtype=np.float64)
    pools = by_class(labels, q.shape[1])
    wanted = [largest_remainder(row, size) for row in q]
    return [
        np.concatenate(
            [generator.choice(pool, min(n, len(pool)), replace=False) for pool, n in zip(pools, row, strict=True)]
        )
        for row in wanted
    ]


def choose_clients(quota: Indices, count: int, generator: np.random.Generator | None) -> Indices:
    """The clients that get a class: the first with quota left, or (shuffled) those with the most of it left."""
    if generator is None:
        return np.flatnonzero(quota)[:count]
    order = generator.permutation(len(quota))
    return order[np.argsort(-quota[order], kind="stable")[:count]]  # the most left: then no class is ever short


def draw_sizes(total: int, count: int, least: float, upper: str, generator: np.random.Generator) -> Indices | None:
    """Random sizes that sum to `total`, all but the last in [max(ν/10, least), upper); None: they exceed it."""
    mean = total / count
    low = min(int(np.ceil(max(mean / 10, least))), int(mean))
    high = max(int(np.ceil(mean if upper == "mean" else total)), low + 1)
    drawn = generator.integers(low, high, size=count - 1)
    rest = total - int(drawn.sum())
    return None if rest < 0 else np.append(drawn, rest).astype(np.int64)
