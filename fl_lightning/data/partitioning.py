"""Parts of the partitions: checks, indices of each class, sizes of shares, dealing of shards, draws by proportions."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fl_lightning.utils.settings import check_numbers

Indices = NDArray[np.int64]
Shares = NDArray[np.float64]

MAX_DRAWS = 1000
"""The most attempts to draw sizes that fit."""

MAX_SHARES = 5 * 10**8
"""The most shares of a class that are drawn in all attempts together, some 30 s. They are counted instead of timed so
that machines do not differ. `FIRST_DRAWS` attempts are made in any case."""

MAX_ALPHA = 1e100
"""The largest concentration with which shares are drawn. The draw overflows beyond it, where shares are long equal."""

FIRST_DRAWS = 10
HOPELESS = 25
"""Drawing ends after `FIRST_DRAWS` attempts if on average more than `HOPELESS` clients got too little: a draw that fits
has a probability of about e^-25."""


def check_clients(num_samples: int, num_clients: int) -> None:
    """Refuse fewer than one client, or more clients than samples.

    Raises:
        ValueError: `num_clients` is below 1, or above `num_samples`.

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
        ValueError: `alpha` is not positive.
        TypeError: `alpha` is no number.
    """
    check_numbers(alpha=alpha)
    if alpha is None or not alpha > 0:
        raise ValueError(
            f"alpha must be positive, got {alpha}: 0.1 gives each client few classes, 100 nearly equal shares"
        )


def by_class(labels: ArrayLike, num_classes: int) -> list[Indices]:
    """List the indices of each class in file order.

    Args:
        labels: Class of each sample, (n,) integers in 0 ... C-1.
        num_classes: Number C of classes.

    Raises:
        ValueError: The labels are no integers in 0 ... C-1.

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
    order = np.argsort(array, kind="stable").astype(np.int64)
    return cut(order, np.bincount(array, minlength=num_classes))


def cut(array: Indices, sizes: ArrayLike) -> list[Indices]:
    """Cut indices into parts of the given sizes, as views.

    `np.split` would take five times as long for 100,000 parts.

    Args:
        array: Indices, (n,).
        sizes: Size of each part, integers ≥ 0.

    >>> [part.tolist() for part in cut(np.arange(4), [1, 0, 3])]
    [[0], [], [1, 2, 3]]
    """
    ends = np.cumsum(sizes, dtype=np.int64).tolist()
    return [array[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def equal_sizes(num_samples: int, num_parts: int) -> Indices:
    """Return the sizes of equal parts, (num_parts,), of which the first take one more each of the remainder.

    >>> equal_sizes(num_samples=7, num_parts=3).tolist()
    [3, 2, 2]
    """
    takes_one_more = np.arange(num_parts) < num_samples % num_parts
    return num_samples // num_parts + takes_one_more.astype(np.int64)


def lda_counts(
    class_sizes: ArrayLike,
    proportions: ArrayLike,
    alpha: float = 1.0,
    generator: np.random.Generator | None = None,
) -> Indices:
    """Count the samples of each class for each client, from drawn proportions.

    Classes are dealt in order. A client that already holds n/N samples takes no share of the next class. The shares
    of the other clients are scaled up to 1, and the class is cut at the floor of their running sum.

    Args:
        class_sizes: Number n_c of samples of each class, (C,), integers ≥ 0.
        proportions: Proportions π of the clients in each class, (C, N), ≥ 0. Each row sums to 1.
        alpha: Concentration of the draw, > 0.
        generator: Generator that draws the shares of a class anew if they are all 0 for the clients that still take
            samples. None: they are not drawn anew.

    Returns:
        The counts, (C, N) int64. Row c sums to n_c.

    Raises:
        ValueError: The shares of a class would have to be drawn anew, and there is no generator.

    Source:
        Yurochkin et al. 2019, arXiv:1905.12022; the cap: code of Li et al. 2021, arXiv:2102.02079.

    Note:
        As in that code the last client takes the rest of the rounding, at most one sample if it takes no share.

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
    for class_idx, size in enumerate(sizes.tolist()):
        if not size:
            continue
        # Some client is below its share as long as samples are left.
        below = held * num_clients < total
        shares = drawn[class_idx] * below
        if not shares.any():
            if generator is None:
                raise ValueError(f"the shares of class {class_idx} are 0 for every client that still takes samples")
            # Dir(α) given the others' zeros is Dir(α) over the clients that are left: one draw is enough.
            shares[below] = generator.dirichlet(np.full(below.sum(), alpha))
        cuts = (np.cumsum(shares / shares.sum()) * size).astype(np.int64)[:-1]
        # The last client takes the rest.
        counts[class_idx] = np.diff(cuts, prepend=0, append=size)
        held += counts[class_idx]
    return counts


def draw_lda_counts(
    class_sizes: Sequence[int],
    num_clients: int,
    *,
    alpha: float,
    min_samples: int,
    generator: np.random.Generator,
) -> Indices:
    """Draw proportions, and count the samples by `lda_counts`, until every client gets `min_samples`.

    Args:
        class_sizes: Number n_c of samples of each class, (C,).
        num_clients: Number N of clients.
        alpha: Concentration > 0, perhaps inf.
        min_samples: Least number of samples of a client.
        generator: Generator of every random draw.

    Returns:
        The counts, (C, N) int64. Row c sums to n_c.

    Raises:
        ValueError: None of at most `MAX_DRAWS` draws fits, or no draw can be expected to fit.
    """
    alpha = min(alpha, MAX_ALPHA)
    best = -1
    short = 0
    affordable = MAX_SHARES // (num_clients * len(class_sizes))
    draws = max(FIRST_DRAWS, min(MAX_DRAWS, affordable))
    for draw in range(1, draws + 1):
        proportions = generator.dirichlet(np.full(num_clients, alpha), size=len(class_sizes))
        counts = lda_counts(class_sizes=class_sizes, proportions=proportions, alpha=alpha, generator=generator)
        sizes = counts.sum(0)
        if sizes.min() >= min_samples:
            return counts
        best = max(best, int(sizes.min()))
        short += int((sizes < min_samples).sum())
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
    """Deal the class of each shard: all classes equally often, s shards a client.

    A client may get two shards of one class.

    Args:
        num_clients: Number N of clients, ≥ 1.
        num_classes: Number C of classes, ≥ 1.
        shards_per_client: Number s of shards of a client, ≥ 1. s·N must be a multiple of C.
        generator: Generator of the order.

    Returns:
        The class of each shard, (N, s) int64. Each class occurs s·N/C times.

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

    Each class is cut in file order into as many equal shards as it was dealt. The remainder goes one each to the first
    shards. A class with fewer samples than shards leaves some shards empty. With the `classes` of the train split, a
    client gets the same classes of the test split.

    Args:
        labels: Class of each sample, (n,) integers in 0 ... C-1.
        classes: Class of each shard, (N, s), as from `shard_classes`. Every label must occur.
        generator: Generator that picks the shards.

    Returns:
        The indices of each client, N arrays: shard after shard, each in file order.

    Raises:
        ValueError: No shard has the class of a sample.

    >>> parts = deal_shards([0, 1, 0, 1, 1], [[0, 1], [1, 0]], np.random.default_rng(0))
    >>> sorted(np.concatenate(parts).tolist()), sorted(map(len, parts))
    ([0, 1, 2, 3, 4], [2, 3])
    """
    dealt = np.asarray(classes, dtype=np.int64)
    num_classes = int(dealt.max()) + 1
    result: list[list[Indices]] = [[] for _ in dealt]
    for class_idx, pool in enumerate(by_class(labels, num_classes)):
        owners = np.nonzero(dealt == class_idx)[0]
        if not owners.size:
            if pool.size:
                raise ValueError(f"every label needs a shard, got none for class {class_idx} ({pool.size} samples)")
            continue
        shards = cut(pool, equal_sizes(pool.size, owners.size))
        for owner, shard in zip(owners, generator.permutation(owners.size), strict=True):
            result[owner].append(shards[shard])
    return [np.concatenate(parts) for parts in result]


def largest_remainder(shares: ArrayLike, size: int) -> Indices:
    """Round shares · size to whole numbers that sum to size: floors, the rest one each to the largest fractions.

    Args:
        shares: Share of each class, (C,), ≥ 0 with a positive sum. They are scaled to sum to 1.
        size: Sum of the whole numbers, ≥ 0.

    Returns:
        The whole numbers, (C,) int64. Of equal fractions, the one with the lowest index comes first.

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

    A class that cannot give its part gives all its samples and is dropped. The shares of the other classes are scaled
    up for the missing samples. If no class with samples has a share, the shares are drawn anew, as in `lda_counts`.

    Args:
        shares: Share q of each class, (C,), ≥ 0 with a positive sum.
        size: Number of samples, at most Σ available.
        available: Number of samples left of each class, (C,) int64.
        alpha: Concentration of the draw, > 0.
        generator: Generator that draws shares anew. None: classes without a share give samples by their numbers of
            samples.

    Returns:
        The counts, (C,) int64. They sum to `size`, and none is above `available`.

    >>> counts_for_shares([0.8, 0.2, 0.0], size=10, available=[5, 3, 9])
    array([5, 3, 2])
    """
    q = np.array(shares, dtype=np.float64)
    remaining = np.array(available, dtype=np.int64)
    counts = np.zeros_like(remaining)
    # Every pass ends the loop or uses up a class.
    while missing := size - int(counts.sum()):
        q[remaining == 0] = 0
        if not q.any() and generator is not None:
            # Dir(α) given the others' zeros is Dir(α) over the classes that are left.
            num_left = int((remaining > 0).sum())
            q[remaining > 0] = generator.dirichlet(np.full(num_left, min(alpha, MAX_ALPHA)))
        wanted = largest_remainder(q if q.any() else remaining, missing)
        take = np.minimum(wanted, remaining)
        counts += take
        remaining -= take
    return counts


def client_proportions(num_clients: int, num_classes: int, alpha: float, generator: np.random.Generator) -> Shares:
    """Draw each client's class proportions q_i ~ Dir(α · 1_C).

    Args:
        num_clients: Number N of clients.
        num_classes: Number C of classes.
        alpha: Concentration α, > 0. At inf all proportions are 1/C.
        generator: Generator of the draw.

    Returns:
        The proportions, (N, C). Each row sums to 1.

    >>> client_proportions(2, 4, float("inf"), np.random.default_rng(0))
    array([[0.25, 0.25, 0.25, 0.25],
           [0.25, 0.25, 0.25, 0.25]])
    """
    if alpha == float("inf"):
        return np.full((num_clients, num_classes), 1 / num_classes)
    return generator.dirichlet(np.full(num_classes, min(alpha, MAX_ALPHA)), size=num_clients)


def draw_by_proportions(
    labels: ArrayLike, proportions: ArrayLike, size: int, generator: np.random.Generator
) -> list[Indices]:
    """Draw for every client at most `size` samples with its class proportions, as a test set.

    Clients may hold the same sample. A class with too few samples gives all of them, and nothing makes up for the
    rest, so no client is tested on a class that it does not have.

    Args:
        labels: Class of each sample, (n,) integers in 0 ... C-1.
        proportions: Class proportions q of each client, (N, C), ≥ 0. Each row has a positive sum.
        size: Number of samples of each client.
        generator: Generator that draws the samples.

    Returns:
        The indices of each client, N arrays, in order of the classes.

    >>> parts = draw_by_proportions([0, 0, 0, 1], [[1, 0], [1, 1]], size=4, generator=np.random.default_rng(0))
    >>> [sorted(part.tolist()) for part in parts][0], 3 in parts[1], len(parts[1])
    ([0, 1, 2], True, 3)
    """
    q = np.asarray(proportions, dtype=np.float64)
    pools = by_class(labels, q.shape[1])
    parts: list[Indices] = []
    for wanted in [largest_remainder(row, size) for row in q]:
        drawn: list[Indices] = []
        for pool, count in zip(pools, wanted, strict=True):
            drawn.append(generator.choice(pool, min(count, len(pool)), replace=False))
        parts.append(np.concatenate(drawn))
    return parts


def at_most(parts: Sequence[Indices], size: int | None, generator: np.random.Generator) -> list[Indices]:
    """Draw at most `size` of each client's samples, in their order.

    Args:
        parts: Indices of each client's samples.
        size: Most samples of a client. None: every client keeps all of its samples.
        generator: Generator of the draws.

    >>> [len(part) for part in at_most([np.arange(5), np.arange(2)], 3, np.random.default_rng(0))]
    [3, 2]
    """
    drawn: list[Indices] = []
    for part in parts:
        if size is None or len(part) <= size:
            drawn.append(part)
            continue
        chosen = generator.choice(part, size, replace=False)
        drawn.append(np.sort(chosen))
    return drawn


def choose_clients(quota: Indices, count: int, generator: np.random.Generator | None) -> Indices:
    """Choose the clients that get a class.

    Args:
        quota: Number of classes that each client has still to get, (N,).
        count: Number of clients that get the class.
        generator: Generator that shuffles the clients, of which those with the largest quota get the class. None: the
            first clients with a quota get the class.

    Returns:
        The ids of the clients, (count,).
    """
    if generator is None:
        return np.flatnonzero(quota)[:count]
    order = generator.permutation(len(quota))
    # The clients with the largest quota come first, so no class is ever short of clients.
    by_quota = np.argsort(-quota[order], kind="stable")
    return order[by_quota[:count]]


def draw_sizes(
    total: int,
    count: int,
    *,
    class_idx: int,
    least: float,
    upper: str,
    generator: np.random.Generator,
) -> Indices:
    """Draw random sizes of the parts of a class, all but the last in [max(ν/10, least), upper).

    Args:
        total: Number of samples of the class.
        count: Number of parts. ν is total / count.
        class_idx: The class, for the error.
        least: Least size of a part.
        upper: Upper bound of a part: `mean` for ν, else `total`.
        generator: Generator of the draws.

    Returns:
        The sizes, (count,) int64, which sum to `total`.

    Raises:
        ValueError: None of `MAX_DRAWS` draws fits.
    """
    mean = total / count
    bound = mean if upper == "mean" else total
    low = min(int(np.ceil(max(mean / 10, least))), int(mean))
    high = max(int(np.ceil(bound)), low + 1)
    for _ in range(MAX_DRAWS):
        drawn = generator.integers(low, high, size=count - 1)
        rest = total - int(drawn.sum())
        if rest >= 0:
            return np.append(drawn, rest).astype(np.int64)
    raise ValueError(
        f"{MAX_DRAWS} draws of the sizes of {count} clients' parts all exceeded the {total} samples of class "
        f"{class_idx}: set upper to mean, or lower classes_per_client or num_clients"
    )
