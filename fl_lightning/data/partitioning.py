"""Parts of the partitions: checks, indices of each class, sizes of shares, dealing of shards, draws by proportions."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fl_lightning.utils.settings import check_numbers

Indices = NDArray[np.int64]
Shares = NDArray[np.float64]

MAX_DRAWS = 1000
"""Attempts to draw sizes that fit."""

MAX_SHARES = 5 * 10**8
"""Shares of a class that are drawn in all attempts together: some 30 s, counted so that machines do not differ.
`FIRST_DRAWS` are made all the same."""

FIRST_DRAWS = 10
HOPELESS = 25
"""Attempts after which drawing ends if on average more than so many clients got too little: a draw that fits has a
probability of about e^-25."""


def check_clients(num_samples: int, num_clients: int) -> None:
    """Refuse fewer than one client, or more clients than samples.

    Raises:
        ValueError: naming both numbers.

    >>> check_clients(num_samples=10, num_clients=10)
    """
    if not 1 <= num_clients <= num_samples:
        raise ValueError(
            f"num_clients must lie between 1 and the number of samples, got {num_clients} clients for "
            f"{num_samples} samples: change num_clients, use more data, or list the indices in FixedPartition"
        )


def check_alpha(alpha: float | None) -> None:
    """Refuse an alpha that no Dirichlet distribution can be drawn with.

    Raises:
        ValueError: alpha is not positive.
        TypeError: alpha is no number.
    """
    check_numbers(alpha=alpha)
    if alpha is None or not alpha > 0:
        raise ValueError(
            f"alpha must be positive, got {alpha}: 0.1 gives each client few classes, 100 nearly equal shares"
        )


def by_class(labels: ArrayLike, num_classes: int) -> list[Indices]:
    """List the indices of each class in file order.

    Raises:
        ValueError: labels that are no integers in 0 ... C-1.

    >>> [pool.tolist() for pool in by_class([1, 0, 1], num_classes=2)]
    [[1], [0, 2]]
    """
    array = np.asarray(labels)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError(
            f"labels must be one integer per sample, got shape {array.shape} of {array.dtype}: "
            "for other targets use IIDPartition or FixedPartition"
        )
    if array.size and not 0 <= array.min() <= array.max() < num_classes:
        raise ValueError(
            f"labels must lie in 0 ... {num_classes - 1}, got {array.min()} ... {array.max()}: "
            "set num_classes to the number of classes of the data"
        )
    return cut(np.argsort(array, kind="stable").astype(np.int64), np.bincount(array, minlength=num_classes))


def cut(array: Indices, sizes: ArrayLike) -> list[Indices]:
    """Cut indices into parts of the given sizes, as views: `np.split` takes five times as long for 100,000.

    >>> [part.tolist() for part in cut(np.arange(4), [1, 0, 3])]
    [[0], [], [1, 2, 3]]
    """
    ends = np.cumsum(sizes, dtype=np.int64).tolist()
    return [array[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def equal_sizes(num_samples: int, num_parts: int) -> Indices:
    """Compute the sizes (num_parts,) of equal parts, of which the first take one more each of the remainder.

    >>> equal_sizes(7, 3).tolist()
    [3, 2, 2]
    """
    return num_samples // num_parts + (np.arange(num_parts) < num_samples % num_parts).astype(np.int64)


def lda_counts(
    class_sizes: ArrayLike, proportions: ArrayLike, alpha: float = 1.0, generator: np.random.Generator | None = None
) -> Indices:
    """Count the samples of each class for each client, from drawn proportions.

    Classes are dealt in order. A client that already holds n/N samples takes no share of the next class;
    the others' shares are scaled up to 1 and the class is cut at the floor of their running sum.

    Args:
        class_sizes: n_c, (C,), integers ≥ 0.
        proportions: π, (C, N), ≥ 0, each row summing to 1.
        alpha: concentration of the draw.
        generator: draws anew where the shares of a class are all 0 on the clients that still take samples.

    Returns:
        (C, N) int64, rows summing to n_c.

    Raises:
        ValueError: such a class without a generator.

    Source:
        Yurochkin et al. 2019, arXiv:1905.12022; the cap: code of Li et al. 2021, arXiv:2102.02079.

    Note:
        As in that code the last client takes what rounding leaves, at most one sample when it takes no share.

    >>> lda_counts([10, 10], [[0.25, 0.75, 0.0], [0.5, 0.4, 0.1]])
    array([[2, 8, 0],
           [8, 0, 2]])
    """
    sizes = np.asarray(class_sizes, dtype=np.int64)
    drawn = np.asarray(proportions, dtype=np.float64)
    counts = np.zeros(drawn.shape, dtype=np.int64)
    total = int(sizes.sum())
    num_clients = drawn.shape[1]
    held = np.zeros(num_clients, dtype=np.int64)
    for c, size in enumerate(sizes.tolist()):
        if not size:
            continue
        below = held * num_clients < total  # True somewhere as long as samples are left
        shares = drawn[c] * below
        if not shares.any():
            if generator is None:
                raise ValueError(f"the shares of class {c} are 0 for every client that still takes samples")
            # Dir(α) given the others' zeros is Dir(α) over those that are left: one draw is enough
            shares[below] = generator.dirichlet(np.full(below.sum(), alpha))
        cuts = (np.cumsum(shares / shares.sum()) * size).astype(np.int64)[:-1]
        counts[c] = np.diff(cuts, prepend=0, append=size)  # the last client takes the rest
        held += counts[c]
    return counts


def draw_lda_counts(
    class_sizes: Sequence[int], num_clients: int, alpha: float, min_samples: int, generator: np.random.Generator
) -> Indices:
    """Draw proportions, and count the samples by `lda_counts`, until every client gets `min_samples`.

    Args:
        class_sizes: n_c of each class.
        num_clients: N.
        alpha: concentration > 0, perhaps inf.
        min_samples: least number of samples of a client.
        generator: every random draw.

    Returns:
        (C, N) int64, rows summing to n_c.

    Raises:
        ValueError: no draw fits, of at most `MAX_DRAWS`, or none can be expected to fit.
    """
    alpha, best, short = min(alpha, 1e100), -1, 0  # beyond, the draw overflows; the shares are long equal
    draws = max(FIRST_DRAWS, min(MAX_DRAWS, MAX_SHARES // (num_clients * len(class_sizes))))
    for draw in range(1, draws + 1):
        proportions = generator.dirichlet(np.full(num_clients, alpha), size=len(class_sizes))
        counts = lda_counts(class_sizes, proportions, alpha, generator)
        sizes = counts.sum(0)
        if sizes.min() >= min_samples:
            return counts
        best = max(best, int(sizes.min()))
        short = short + int((sizes < min_samples).sum())
        if draw == FIRST_DRAWS and short > HOPELESS * draw:
            break
    raise ValueError(
        f"no Dirichlet split in {draw} draws gave every client min_samples={min_samples} "
        f"(alpha={alpha}, num_clients={num_clients}, {sum(class_sizes)} samples), the smallest share reached was "
        f"{best}: lower min_samples (0 allows empty clients) or num_clients, or raise alpha"
    )


def shard_classes(
    num_clients: int, num_classes: int, shards_per_client: int, generator: np.random.Generator
) -> Indices:
    """Deal the class of each shard: all classes equally often, s shards a client (one class twice may occur).

    Args:
        num_clients: N ≥ 1.
        num_classes: C ≥ 1.
        shards_per_client: s ≥ 1; s·N must be a multiple of C.
        generator: shuffles.

    Returns:
        (N, s) int64, each class s·N/C times.

    Raises:
        ValueError: s·N is not a multiple of C.

    Source:
        McMahan et al. 2017, arXiv:1602.05629; Lee et al. 2022, arXiv:2106.03097, App. B, and its code.

    >>> classes = shard_classes(4, 2, 2, np.random.default_rng(0))
    >>> classes.shape, np.bincount(classes.ravel()).tolist()
    ((4, 2), [4, 4])
    """
    total = shards_per_client * num_clients
    if total % num_classes:
        raise ValueError(
            f"shards_per_client · num_clients must be a multiple of the number of classes, got "
            f"{shards_per_client} · {num_clients} = {total} for {num_classes} classes: each is cut into "
            "equally many shards, so change shards_per_client or num_clients"
        )
    classes = np.repeat(np.arange(num_classes, dtype=np.int64), total // num_classes)
    return generator.permutation(classes).reshape(num_clients, shards_per_client)


def deal_shards(labels: ArrayLike, classes: ArrayLike, generator: np.random.Generator) -> list[Indices]:
    """Give each client one of the remaining shards of each class it was dealt, at random.

    Each class is cut in file order into as many equal shards as it was dealt; what does not divide goes one
    each to the first shards. A class with fewer samples than shards leaves some shards empty. With the
    `classes` of the train split, a client gets the same classes of the test split.

    Args:
        labels: (n,) integers in 0 ... C-1.
        classes: class of each shard, (N, s), as from `shard_classes`; every label must occur.
        generator: picks the shards.

    Returns:
        N index arrays, each shard after shard in file order.

    Raises:
        ValueError: a label that no shard has.

    >>> parts = deal_shards([0, 1, 0, 1, 1], [[0, 1], [1, 0]], np.random.default_rng(0))
    >>> sorted(np.concatenate(parts).tolist()), sorted(map(len, parts))
    ([0, 1, 2, 3, 4], [2, 3])
    """
    dealt = np.asarray(classes, dtype=np.int64)
    num_classes = int(dealt.max()) + 1
    result: list[list[Indices]] = [[] for _ in dealt]
    for c, pool in enumerate(by_class(labels, num_classes)):
        owners = np.nonzero(dealt == c)[0]
        if not owners.size:
            if pool.size:
                raise ValueError(f"every label needs a shard, got none for class {c} ({pool.size} samples)")
            continue
        shards = cut(pool, equal_sizes(pool.size, owners.size))
        for owner, shard in zip(owners, generator.permutation(owners.size), strict=True):
            result[owner].append(shards[shard])
    return [np.concatenate(parts) for parts in result]


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


def counts_for_shares(
    shares: ArrayLike,
    size: int,
    available: ArrayLike,
    *,
    alpha: float = 1.0,
    generator: np.random.Generator | None = None,
) -> Indices:
    """Count the samples of each class that make up `size` with these shares, when some classes run out.

    A class that cannot give its part gives all it has and is dropped; the shares of the others are scaled up for what
    is missing. Where no class that is left has a share, their shares are drawn anew, as `lda_counts` does.

    Args:
        shares: q, (C,) ≥ 0 with a positive sum.
        size: at most Σ available.
        available: samples left of each class, (C,) int64.
        alpha: concentration of the draw.
        generator: draws anew; None: classes without a share are taken by what they have.

    Returns:
        (C,) int64, summing to size, none above `available`.

    >>> counts_for_shares([0.8, 0.2, 0.0], size=10, available=[5, 3, 9])
    array([5, 3, 2])
    """
    q = np.array(shares, dtype=np.float64)
    left = np.array(available, dtype=np.int64)
    counts = np.zeros_like(left)
    while missing := size - int(counts.sum()):  # every pass ends it or uses up a class
        q[left == 0] = 0
        if not q.any() and generator is not None:
            # Dir(α) given the others' zeros is Dir(α) over the classes that are left.
            q[left > 0] = generator.dirichlet(np.full(int((left > 0).sum()), min(alpha, 1e100)))
        take = np.minimum(largest_remainder(q if q.any() else left, missing), left)
        counts += take
        left -= take
    return counts


def client_proportions(num_clients: int, num_classes: int, alpha: float, generator: np.random.Generator) -> Shares:
    """Draw each client's class proportions q_i ~ Dir(α · 1_C), (N, C), 1/C each at alpha inf.

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
    so no client is tested on a class that it does not have.

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


def at_most(parts: Sequence[Indices], size: int | None, generator: np.random.Generator) -> list[Indices]:
    """Draw at most `size` of each client's samples, in their order, all with None.

    >>> [len(part) for part in at_most([np.arange(5), np.arange(2)], 3, np.random.default_rng(0))]
    [3, 2]
    """
    drawn = []
    for part in parts:
        is_larger = size is not None and len(part) > size
        drawn.append(np.sort(generator.choice(part, size, replace=False)) if is_larger else part)
    return drawn


def choose_clients(quota: Indices, count: int, generator: np.random.Generator | None) -> Indices:
    """Choose the clients that get a class: the first with quota left, or (shuffled) those with the most of it left."""
    if generator is None:
        return np.flatnonzero(quota)[:count]
    order = generator.permutation(len(quota))
    return order[np.argsort(-quota[order], kind="stable")[:count]]  # the most left: then no class is ever short


def draw_sizes(total: int, c: int, count: int, least: float, upper: str, generator: np.random.Generator) -> Indices:
    """Draw random sizes that sum to the `total` of class c, all but the last in [max(ν/10, least), upper).

    Raises:
        ValueError: no draw within `MAX_DRAWS` fits.
    """
    mean = total / count
    low = min(int(np.ceil(max(mean / 10, least))), int(mean))
    high = max(int(np.ceil(mean if upper == "mean" else total)), low + 1)
    for _ in range(MAX_DRAWS):
        drawn = generator.integers(low, high, size=count - 1)
        rest = total - int(drawn.sum())
        if rest >= 0:
            return np.append(drawn, rest).astype(np.int64)
    raise ValueError(
        f"{MAX_DRAWS} draws of the sizes of {count} clients' parts all exceeded the {total} samples of class {c}: set "
        f"upper to mean, or lower classes_per_client or num_clients"
    )
