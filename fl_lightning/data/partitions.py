"""Partitions: the division of the training samples among the clients."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np

from fl_lightning.data.partitioning import (
    by_class,
    check_alpha,
    check_clients,
    choose_clients,
    client_proportions,
    counts_for_shares,
    cut,
    deal_shards,
    draw_by_proportions,
    draw_lda_counts,
    draw_sizes,
    equal_sizes,
    shard_classes,
)
from fl_lightning.data.splits import Array
from fl_lightning.utils.settings import check_choice, check_count
from fl_lightning.utils.signatures import check_overrides, checks_arguments


@dataclass(frozen=True)
class PartitionInput:
    """The samples that a partition divides.

    Args:
        size: number of samples n.
        labels: class of each, (n,) integers (or its value in the partition's column), or None.
        num_classes: C; None: the largest label + 1.
        classes: class of each, (n,), where `labels` are values of a column and the test samples do not have it.

    Raises:
        ValueError: without one label per sample.
    """

    size: int
    labels: Array | None = None
    num_classes: int | None = None
    classes: Array | None = None

    def by_class(self) -> "PartitionInput":
        """Describe the same samples by their classes in place of their values in a column."""
        return PartitionInput(self.size, self.classes, self.num_classes)

    def __post_init__(self) -> None:
        if self.labels is not None and len(self.labels) != self.size:
            raise ValueError(f"there must be one label per sample, got {len(self.labels)} labels for {self.size}")


class Dealt(NamedTuple):
    """A training split as it was dealt, from which `Partition.partition_test` deals the test split.

    Args:
        parts: what the call of the partition returned.
        samples: those that it dealt.
        generator: in the state that the call found it in.
    """

    parts: list[Array]
    samples: PartitionInput
    generator: np.random.Generator


class Partition(ABC):
    """Deals the samples of a split to the clients, equally for equal states of the generator."""

    column: str | None = None
    """The column whose values are handed over as labels; None: the samples' classes."""

    needs_labels: ClassVar[bool] = True
    """False where samples are dealt without labels, which are then not read."""

    stores_positions: ClassVar[bool] = False
    """True where the indices are stored: they number the training samples as given, before any is held out."""

    counts_owners: ClassVar[bool] = False
    """True where the samples tell how many clients there are, by `count_owners`."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        check_overrides(cls)

    def count_owners(self, samples: PartitionInput) -> int:
        """Count the clients that the samples belong to, where `counts_owners`."""
        raise NotImplementedError

    @abstractmethod
    def __call__(self, samples: PartitionInput, num_clients: int, generator: np.random.Generator) -> list[Array]:
        """Deal samples 0 ... n-1.

        Args:
            samples: to be dealt.
            num_clients: N.
            generator: every random draw.

        Returns:
            N index arrays, int64.

        Raises:
            ValueError: the partition cannot be made with these settings.
        """

    def partition_test(self, dealt: Dealt, test: PartitionInput, size: int | None = None) -> list[Array]:
        """Deal the test split: each client's own test set.

        By default drawn by the client's class proportions in `dealt` (without labels uniformly), so that several
        clients may have the same sample.

        Args:
            dealt: the training split.
            test: the samples of the test split, m of them.
            size: samples of a test set; None: as the partition says, here m // N, at least one.

        Returns:
            N index arrays into the test split, int64.
        """
        train, samples, generator = dealt
        size = size or max(1, test.size // len(train))
        if samples.labels is None or test.labels is None or samples.num_classes is None:
            return [generator.choice(test.size, min(size, test.size), replace=False) for _ in train]
        counts = np.stack([np.bincount(samples.labels[part], minlength=samples.num_classes) for part in train])
        counts[counts.sum(1) == 0] = 1  # a client without samples is tested on all classes
        return draw_by_proportions(test.labels, counts, size, generator)

    def _labels(self, samples: PartitionInput) -> Array:
        """Get the labels, or raise an error that tells what to use instead."""
        if samples.labels is None:
            raise ValueError(f"{type(self).__name__} needs the labels of the samples, got none: use IIDPartition")
        return samples.labels

    def _labelled(self, samples: PartitionInput, num_clients: int) -> tuple[Array, int]:
        """Get labels and the number of classes, or raise an error that tells what to use instead."""
        labels = self._labels(samples)
        num_classes = samples.num_classes
        check_clients(samples.size, num_clients)
        return labels, num_classes if num_classes is not None else int(np.max(labels, initial=0)) + 1


class IIDPartition(Partition):
    """Shuffled and cut into equal parts, without labels, of which the first take one more each of the remainder.

    >>> parts = IIDPartition()(PartitionInput(7), 3, np.random.default_rng(0))
    >>> [len(p) for p in parts], sorted(np.concatenate(parts).tolist())
    ([3, 2, 2], [0, 1, 2, 3, 4, 5, 6])
    """

    needs_labels = False

    def __call__(self, samples: PartitionInput, num_clients: int, generator: np.random.Generator) -> list[Array]:
        check_clients(samples.size, num_clients)
        order = generator.permutation(samples.size).astype(np.int64, copy=False)
        return cut(order, equal_sizes(samples.size, num_clients))


class DirichletSkew(Partition):
    """Base of partitions whose shares are drawn from a Dirichlet distribution over the clients.

    Args:
        alpha: concentration > 0.
        min_samples: least number of samples of a client; 0 allows empty clients.
    """

    @checks_arguments
    def __init__(self, alpha: float, min_samples: int = 10) -> None:
        check_alpha(alpha)
        check_count(0, "0 allows empty clients", min_samples=min_samples)
        self.alpha = alpha
        self.min_samples = min_samples


class DirichletPartition(DirichletSkew):
    """Label skew: each class shared out by its own draw π ~ Dir(α · 1_N).

    Draws the proportions of all classes until every client gets `min_samples`, at most `partitioning.MAX_DRAWS`
    times (fewer where these were more than `partitioning.MAX_SHARES` shares), and `partitioning.FIRST_DRAWS` times
    where these leave so many clients with fewer that no draw can be expected to fit.

    Args:
        alpha: concentration > 0: 0.1 = few classes per client, inf (`.inf` in YAML) = equal shares.
        min_samples: least number of samples of a client; 0 allows empty clients.

    Source:
        Yurochkin et al. 2019, arXiv:1905.12022; the shares and their cap: `lda_counts`.

    >>> samples = PartitionInput(500, np.repeat(np.arange(5), 100))
    >>> parts = DirichletPartition(alpha=0.5)(samples, 4, np.random.default_rng(0))
    >>> bool((np.sort(np.concatenate(parts)) == np.arange(500)).all()), min(map(len, parts)) >= 10
    (True, True)
    """

    def __call__(self, samples: PartitionInput, num_clients: int, generator: np.random.Generator) -> list[Array]:
        total = samples.size
        min_samples = self.min_samples
        pools = by_class(*self._labelled(samples, num_clients))
        if total < num_clients * min_samples:
            raise ValueError(
                f"min_samples · num_clients must not exceed the number of samples, got {min_samples} · "
                f"{num_clients} for {total} samples: lower min_samples or num_clients, or use more data"
            )
        counts = draw_lda_counts([len(pool) for pool in pools], num_clients, self.alpha, min_samples, generator)
        dealt = [cut(generator.permutation(pool), sizes) for pool, sizes in zip(pools, counts, strict=True)]
        return [generator.permutation(np.concatenate(parts)) for parts in zip(*dealt, strict=True)]


class ShardPartition(Partition):
    """Label skew: each class cut into equal shards, the same number of shards to every client.

    Args:
        shards_per_client: s ≥ 1, the greatest number of classes of a client; s · num_clients must be a
            multiple of the number of classes.

    Source:
        Lee et al. 2022, arXiv:2106.03097, App. B, and its code.

    >>> samples = PartitionInput(40, np.repeat(np.arange(4), 10))
    >>> [len(part) for part in ShardPartition(2)(samples, 4, np.random.default_rng(0))]
    [10, 10, 10, 10]
    """

    @checks_arguments
    def __init__(self, shards_per_client: int) -> None:
        check_count(1, shards_per_client=shards_per_client)
        self.shards_per_client = shards_per_client

    def __call__(self, samples: PartitionInput, num_clients: int, generator: np.random.Generator) -> list[Array]:
        labels, num_classes = self._labelled(samples, num_clients)
        classes = shard_classes(num_clients, num_classes, self.shards_per_client, generator)
        if classes.size > samples.size:  # most of these would be empty
            raise ValueError(
                f"shards_per_client · num_clients must be at most the number of samples, got "
                f"{self.shards_per_client} · {num_clients} shards of {samples.size} samples: lower shards_per_client, "
                f"which is the greatest number of classes of a client"
            )
        return deal_shards(labels, classes, generator)

    def partition_test(self, dealt: Dealt, test: PartitionInput, size: int | None = None) -> list[Array]:
        """Deal the test split by the same classes of shards, each sample once, where no size is asked.

        A client whose training shard of a class is empty is not tested on this class.
        """
        labels = dealt.samples.labels
        if size is not None or test.labels is None or test.num_classes is None or labels is None:
            return super().partition_test(dealt, test, size)
        classes = shard_classes(len(dealt.parts), test.num_classes, self.shards_per_client, dealt.generator)
        shards = deal_shards(test.labels, classes, dealt.generator)
        kept = []
        for trained, tested in zip(dealt.parts, shards, strict=True):
            has_class = np.isin(test.labels[tested], labels[trained])
            kept.append(tested[has_class])
        return kept


class ClientDirichletPartition(Partition):
    """Label skew, equal sizes: each client has its own draw of class proportions from a Dirichlet distribution.

    Args:
        alpha: concentration > 0 per class: 0.1 = few classes per client, inf (`.inf` in YAML) = equal shares.
        samples_per_client: samples of every client, and of its test set; unset: n // num_clients, and m // num_clients
            of its test set, which has the class proportions of the client's samples.
        overlap: whether clients may hold the same sample; else what does not divide is left out.

    Source:
        Hsu et al. 2019, arXiv:1909.06335; equal sizes and classes that run out: as `counts_for_shares`.

    >>> samples = PartitionInput(90, np.arange(90) % 3)
    >>> parts = ClientDirichletPartition(alpha=0.5)(samples, 4, np.random.default_rng(0))
    >>> [len(part) for part in parts], len(set(np.concatenate(parts).tolist()))
    ([22, 22, 22, 22], 88)
    """

    @checks_arguments
    def __init__(self, alpha: float, samples_per_client: int | None = None, overlap: bool = False) -> None:
        check_alpha(alpha)
        check_count(1, "unset: n // num_clients", samples_per_client=samples_per_client)
        self.alpha = alpha
        self.samples_per_client = samples_per_client
        self.overlap = overlap

    def __call__(self, samples: PartitionInput, num_clients: int, generator: np.random.Generator) -> list[Array]:
        labels, num_classes = self._labelled(samples, num_clients)
        proportions = client_proportions(num_clients, num_classes, self.alpha, generator)
        size = self.samples_per_client or samples.size // num_clients
        pools = [generator.permutation(pool) for pool in by_class(labels, num_classes)]
        sizes = np.array([len(pool) for pool in pools], dtype=np.int64)
        if (size if self.overlap else size * num_clients) > samples.size:
            raise ValueError(
                f"the samples of the clients must be at most those of the split, got {size} for each of {num_clients} "
                f"clients and {samples.size} samples: lower samples_per_client or num_clients, or let clients overlap"
            )
        used = np.zeros_like(sizes)
        parts = []
        for row in proportions:
            counts = counts_for_shares(row, size, sizes - used, alpha=self.alpha, generator=generator)
            if self.overlap:
                drawn = [generator.choice(pool, n, replace=False) for pool, n in zip(pools, counts, strict=True)]
            else:
                drawn = [pool[a : a + n] for pool, a, n in zip(pools, used, counts, strict=True)]
                used += counts
            parts.append(generator.permutation(np.concatenate(drawn)))
        return parts

    def partition_test(self, dealt: Dealt, test: PartitionInput, size: int | None = None) -> list[Array]:
        """Draw by the class proportions of the client's samples: the drawn ones, as long as no class runs out."""
        return super().partition_test(dealt, test, size or self.samples_per_client)


class QuantityPartition(Partition):
    """Label and quantity skew: every client has the same number of classes, and a random part of each of them.

    A class is dealt to k = s·N/C clients with classes still to get. All but the last of them get a random number of
    its n_c samples, uniform in [max(ν/10, 10/C), ν) with ν = n_c/k, and the last what is left.

    Args:
        classes_per_client: s ≥ 1; s · num_clients must be a multiple of the number of classes.
        upper: upper end of the drawn sizes of a client's part of a class: the `mean` part ν or the whole `class` n_c
            (as printed for CIFAR-10).
        shuffle_clients: draw the clients that share a class; else they are neighbours with equal classes.

    Source:
        Code of Guo et al. 2025 (FedVLS, the successor of FedED), as described in its text.

    >>> samples = PartitionInput(500, np.repeat(np.arange(10), 50))
    >>> parts = QuantityPartition(classes_per_client=2)(samples, 10, np.random.default_rng(0))
    >>> [np.unique(samples.labels[part]).tolist() for part in parts[:4]]
    [[0, 1], [0, 1], [2, 3], [2, 3]]
    """

    @checks_arguments
    def __init__(
        self, classes_per_client: int, upper: Literal["mean", "class"] = "mean", shuffle_clients: bool = False
    ) -> None:
        check_count(1, classes_per_client=classes_per_client)
        check_choice(("mean", "class"), upper=upper)
        self.classes_per_client = classes_per_client
        self.upper = upper
        self.shuffle_clients = shuffle_clients

    def __call__(self, samples: PartitionInput, num_clients: int, generator: np.random.Generator) -> list[Array]:
        labels, num_classes = self._labelled(samples, num_clients)
        classes_per_client = self.classes_per_client
        shuffle = self.shuffle_clients
        pools = by_class(labels, num_classes)
        if not 1 <= classes_per_client <= num_classes:
            raise ValueError(f"classes_per_client must lie in 1 ... {num_classes}, got {classes_per_client}")
        blocks = num_classes % classes_per_client == 0 and num_clients % (num_classes // classes_per_client) == 0
        if (classes_per_client * num_clients) % num_classes or not (blocks or shuffle):
            remedy = "change one of them" + ("" if shuffle else " or set shuffle_clients to true")
            raise ValueError(
                f"classes_per_client · num_clients must be a multiple of the number of classes"
                f"{'' if shuffle else ' (and in id order num_clients one of classes / classes_per_client)'}, got "
                f"{classes_per_client} · {num_clients} for {num_classes} classes: {remedy}"
            )
        count = classes_per_client * num_clients // num_classes
        quota = np.full(num_clients, classes_per_client, dtype=np.int64)
        result: list[list[Array]] = [[] for _ in range(num_clients)]
        for c, pool in enumerate(pools):
            chosen = choose_clients(quota, count, generator if shuffle else None)
            quota[chosen] -= 1
            sizes = draw_sizes(len(pool), c, count, 10 / num_classes, self.upper, generator)
            for client_id, part in zip(chosen, cut(generator.permutation(pool), sizes), strict=True):
                result[client_id].append(part)
        return [generator.permutation(np.concatenate(parts)) for parts in result]


class FixedPartition(Partition):
    """Explicit index lists, one per client, which may overlap, be empty or leave samples out.

    Args:
        indices: for each client the indices of its samples, each from 0 to n-1, in the training split as the source
            gives it. Samples that are held out, such as by `val_fraction`, are left out of the lists.
    """

    needs_labels = False
    stores_positions = True
    counts_owners = True

    @checks_arguments
    def __init__(self, indices: list[list[int]]) -> None:
        arrays = [np.asarray(part) for part in indices]
        for client_id, array in enumerate(arrays):
            if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
                raise ValueError(
                    f"FixedPartition needs one flat list of whole numbers per client, got shape {array.shape} of "
                    f"{array.dtype} for client {client_id}"
                )
        self.indices = [array.astype(np.int64) for array in arrays]

    def count_owners(self, samples: PartitionInput) -> int:
        return len(self.indices)

    def __call__(self, samples: PartitionInput, num_clients: int, generator: np.random.Generator) -> list[Array]:
        if len(self.indices) != num_clients:
            raise ValueError(
                f"FixedPartition needs one index list per client, got {len(self.indices)} lists for "
                f"{num_clients} clients: set num_clients to {len(self.indices)}"
            )
        for client_id, part in enumerate(self.indices):
            wrong = part[(part < 0) | (part >= samples.size)]
            if wrong.size:
                raise ValueError(
                    f"FixedPartition indices must lie in 0 ... {samples.size - 1}, got {wrong[0]} for client "
                    f"{client_id}: indices count the samples of the train split from 0"
                )
        return [part.copy() for part in self.indices]
