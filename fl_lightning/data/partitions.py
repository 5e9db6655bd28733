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
    """Describes the samples that a partition divides.

    Args:
        size: The number of samples n.
        labels: The class of each sample, (n,) integers, or its value in the partition's column. None: there are none.
        num_classes: The number of classes C. None: the largest label + 1.
        classes: The class of each sample, (n,), if `labels` are values of a column that the test samples lack.

    Raises:
        ValueError: There is not one label per sample.
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
    """Holds a training split as it was dealt, from which `Partition.partition_test` deals the test split.

    Args:
        parts: The training samples of each client.
        samples: The training samples that were dealt.
        generator: A generator in the state in which the call of the partition found it.
    """

    parts: list[Array]
    samples: PartitionInput
    generator: np.random.Generator


class Partition(ABC):
    """Deals the samples of a split to the clients, equally for equal states of the generator."""

    column: str | None = None
    """The column whose values are handed over as labels. None: the labels are the samples' classes."""

    needs_labels: ClassVar[bool] = True
    """Whether labels are needed to deal samples. Otherwise they are not read."""

    stores_positions: ClassVar[bool] = False
    """Whether the indices are stored: they number the training samples as given, before any is held out."""

    counts_owners: ClassVar[bool] = False
    """Whether the samples tell how many clients there are, by `count_owners`."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        check_overrides(cls)

    def count_owners(self, samples: PartitionInput) -> int:
        """Count the clients that the samples belong to, if `counts_owners`.

        Args:
            samples: The training samples.
        """
        raise NotImplementedError

    @abstractmethod
    def __call__(self, samples: PartitionInput, num_clients: int, generator: np.random.Generator) -> list[Array]:
        """Deal samples 0 ... n-1.

        Args:
            samples: The samples to be dealt.
            num_clients: The number of clients N.
            generator: The generator of every random draw.

        Returns:
            N index arrays, int64.

        Raises:
            ValueError: The partition cannot be made with these settings.
        """

    def partition_test(self, dealt: Dealt, test: PartitionInput, size: int | None = None) -> list[Array]:
        """Deal the test split: each client's own test set.

        By default samples are drawn by the class proportions of the client in `dealt`, without labels uniformly.
        Several clients may have the same sample.

        Args:
            dealt: The training split.
            test: The m samples of the test split.
            size: The number of samples of a test set. None: as the partition says, here m // N, at least one.

        Returns:
            N index arrays into the test split, int64.
        """
        labels = dealt.samples.labels
        num_classes = dealt.samples.num_classes
        size = size or max(1, test.size // len(dealt.parts))
        if labels is None or test.labels is None or num_classes is None:
            size = min(size, test.size)
            return [dealt.generator.choice(test.size, size, replace=False) for _ in dealt.parts]
        counts = np.stack([np.bincount(labels[part], minlength=num_classes) for part in dealt.parts])
        # A client without samples is tested on all classes.
        counts[counts.sum(1) == 0] = 1
        return draw_by_proportions(test.labels, proportions=counts, size=size, generator=dealt.generator)

    def _labels(self, samples: PartitionInput) -> Array:
        """Return the labels.

        Raises:
            ValueError: There are no labels.
        """
        if samples.labels is None:
            raise ValueError(f"{type(self).__name__} needs the labels of the samples, got none: use IIDPartition")
        return samples.labels

    def _labelled(self, samples: PartitionInput, num_clients: int) -> tuple[Array, int]:
        """Return the labels and the number of classes.

        Raises:
            ValueError: There are no labels, or more clients than samples.
        """
        labels = self._labels(samples)
        check_clients(samples.size, num_clients)
        if samples.num_classes is not None:
            return labels, samples.num_classes
        return labels, int(np.max(labels, initial=0)) + 1


class IIDPartition(Partition):
    """Shuffles the samples and cuts them into equal parts, without labels. The first parts take the remainder.

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
    """Draws shares from a Dirichlet distribution over the clients, as base of partitions.

    Args:
        alpha: The concentration, > 0.
        min_samples: The least number of samples of a client. 0 allows empty clients.
    """

    @checks_arguments
    def __init__(self, alpha: float, min_samples: int = 10) -> None:
        check_alpha(alpha)
        check_count(0, "0 allows empty clients", min_samples=min_samples)
        self.alpha = alpha
        self.min_samples = min_samples


class DirichletPartition(DirichletSkew):
    """Skews labels: each class is shared out by its own draw π ~ Dir(α · 1_N).

    The proportions of all classes are drawn until every client gets `min_samples`, with two limits:

    - at most `partitioning.MAX_DRAWS` draws, and at most `partitioning.MAX_SHARES` shares in all draws;
    - `partitioning.FIRST_DRAWS` draws, if these leave so many clients with fewer that no draw can be expected to fit.

    Args:
        alpha: The concentration, > 0. 0.1 gives each client few classes, inf (`.inf` in YAML) equal shares.
        min_samples: The least number of samples of a client. 0 allows empty clients.

    Source:
        Yurochkin et al. 2019, arXiv:1905.12022. `lda_counts` has the shares and their cap.

    >>> samples = PartitionInput(500, np.repeat(np.arange(5), 100))
    >>> parts = DirichletPartition(alpha=0.5)(samples, 4, np.random.default_rng(0))
    >>> bool((np.sort(np.concatenate(parts)) == np.arange(500)).all()), min(map(len, parts)) >= 10
    (True, True)
    """

    def __call__(self, samples: PartitionInput, num_clients: int, generator: np.random.Generator) -> list[Array]:
        min_samples = self.min_samples
        labels, num_classes = self._labelled(samples, num_clients)
        pools = by_class(labels, num_classes)
        if samples.size < num_clients * min_samples:
            raise ValueError(
                f"min_samples · num_clients must not exceed the number of samples, got {min_samples} · "
                f"{num_clients} for {samples.size} samples: lower min_samples or num_clients, or use more data"
            )
        counts = draw_lda_counts(
            class_sizes=[len(pool) for pool in pools],
            num_clients=num_clients,
            alpha=self.alpha,
            min_samples=min_samples,
            generator=generator,
        )
        dealt: list[list[Array]] = [[] for _ in range(num_clients)]
        for pool, sizes in zip(pools, counts, strict=True):
            for client_id, part in enumerate(cut(generator.permutation(pool), sizes)):
                dealt[client_id].append(part)
        return [generator.permutation(np.concatenate(parts)) for parts in dealt]


class ShardPartition(Partition):
    """Skews labels: each class is cut into equal shards, and every client gets the same number of shards.

    Args:
        shards_per_client: The number of shards s ≥ 1 of a client, the greatest number of its classes. s · num_clients
            must be a multiple of the number of classes.

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
        classes = shard_classes(
            num_clients=num_clients,
            num_classes=num_classes,
            shards_per_client=self.shards_per_client,
            generator=generator,
        )
        if classes.size > samples.size:
            # Most shards would be empty.
            raise ValueError(
                f"shards_per_client · num_clients must be at most the number of samples, got "
                f"{self.shards_per_client} · {num_clients} shards of {samples.size} samples: lower shards_per_client, "
                f"which is the greatest number of classes of a client"
            )
        return deal_shards(labels, classes, generator)

    def partition_test(self, dealt: Dealt, test: PartitionInput, size: int | None = None) -> list[Array]:
        """Deal the test split by the same classes of shards, each sample once, if no size is asked.

        A client whose training shard of a class is empty is not tested on this class.
        """
        labels = dealt.samples.labels
        if size is not None or test.labels is None or test.num_classes is None or labels is None:
            return super().partition_test(dealt, test, size)
        classes = shard_classes(
            num_clients=len(dealt.parts),
            num_classes=test.num_classes,
            shards_per_client=self.shards_per_client,
            generator=dealt.generator,
        )
        shards = deal_shards(test.labels, classes, dealt.generator)
        kept = []
        for trained, tested in zip(dealt.parts, shards, strict=True):
            has_class = np.isin(test.labels[tested], labels[trained])
            kept.append(tested[has_class])
        return kept


class ClientDirichletPartition(Partition):
    """Skews labels at equal sizes: each client has its own draw of class proportions from a Dirichlet distribution.

    A client's test set has the class proportions of its samples.

    Args:
        alpha: The concentration per class, > 0. 0.1 gives each client few classes, inf (`.inf` in YAML) equal shares.
        samples_per_client: The number of samples of every client, and of its test set. None: n // num_clients, and
            m // num_clients of its test set.
        overlap: Whether clients may hold the same sample. Otherwise samples that do not divide are left out.

    Source:
        Hsu et al. 2019, arXiv:1909.06335. `counts_for_shares` says how sizes are equal, and what becomes of classes
        that run out.

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
        proportions = client_proportions(
            num_clients=num_clients,
            num_classes=num_classes,
            alpha=self.alpha,
            generator=generator,
        )
        size = self.samples_per_client or samples.size // num_clients
        pools = [generator.permutation(pool) for pool in by_class(labels, num_classes)]
        sizes = np.array([len(pool) for pool in pools], dtype=np.int64)
        needed = size if self.overlap else size * num_clients
        if needed > samples.size:
            raise ValueError(
                f"the samples of the clients must be at most those of the split, got {size} for each of {num_clients} "
                f"clients and {samples.size} samples: lower samples_per_client or num_clients, or let clients overlap"
            )
        used = np.zeros_like(sizes)
        parts = []
        for row in proportions:
            counts = counts_for_shares(row, size, sizes - used, alpha=self.alpha, generator=generator)
            drawn = []
            for pool, first, count in zip(pools, used, counts, strict=True):
                if self.overlap:
                    drawn.append(generator.choice(pool, count, replace=False))
                else:
                    drawn.append(pool[first : first + count])
            if not self.overlap:
                used += counts
            parts.append(generator.permutation(np.concatenate(drawn)))
        return parts

    def partition_test(self, dealt: Dealt, test: PartitionInput, size: int | None = None) -> list[Array]:
        """Draw each test set by the class proportions of the client's samples."""
        return super().partition_test(dealt, test, size or self.samples_per_client)


class QuantityPartition(Partition):
    """Skews labels and sizes: every client has the same number of classes, and a random part of each of them.

    A class is dealt to k = s·N/C clients that still lack classes. All but the last of them get a random number of its
    n_c samples, uniform in [max(ν/10, 10/C), ν) with ν = n_c/k. The last client gets the rest.

    Args:
        classes_per_client: The number of classes s ≥ 1 of a client. s · num_clients must be a multiple of the number of
            classes.
        upper: The upper end of the drawn sizes of a client's part of a class: the `mean` part ν, or the whole `class`
            n_c (as printed for CIFAR-10).
        shuffle_clients: Whether the clients that share a class are drawn. Otherwise they are neighbours with equal
            classes.

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
        self._check_numbers(num_clients, num_classes)
        clients_per_class = self.classes_per_client * num_clients // num_classes
        quota = np.full(num_clients, self.classes_per_client, dtype=np.int64)
        dealt: list[list[Array]] = [[] for _ in range(num_clients)]
        for class_idx, pool in enumerate(by_class(labels, num_classes)):
            chosen = choose_clients(quota, clients_per_class, generator if self.shuffle_clients else None)
            quota[chosen] -= 1
            sizes = draw_sizes(
                total=len(pool),
                count=clients_per_class,
                class_idx=class_idx,
                least=10 / num_classes,
                upper=self.upper,
                generator=generator,
            )
            for client_id, part in zip(chosen, cut(generator.permutation(pool), sizes), strict=True):
                dealt[client_id].append(part)
        return [generator.permutation(np.concatenate(parts)) for parts in dealt]

    def _check_numbers(self, num_clients: int, num_classes: int) -> None:
        """Refuse numbers of clients and classes that cannot be divided.

        Args:
            num_clients: Number N of clients.
            num_classes: Number C of classes.

        Raises:
            ValueError: The numbers do not divide, or a client would have more classes than there are.
        """
        classes_per_client = self.classes_per_client
        if not 1 <= classes_per_client <= num_classes:
            raise ValueError(f"classes_per_client must lie in 1 ... {num_classes}, got {classes_per_client}")
        divides = (classes_per_client * num_clients) % num_classes == 0
        has_blocks = num_classes % classes_per_client == 0 and num_clients % (num_classes // classes_per_client) == 0
        if divides and (has_blocks or self.shuffle_clients):
            return
        rule = ""
        remedy = "change one of them"
        if not self.shuffle_clients:
            rule = " (and in id order num_clients one of classes / classes_per_client)"
            remedy = "change one of them or set shuffle_clients to true"
        raise ValueError(
            f"classes_per_client · num_clients must be a multiple of the number of classes{rule}, got "
            f"{classes_per_client} · {num_clients} for {num_classes} classes: {remedy}"
        )


class FixedPartition(Partition):
    """Deals the samples of explicit lists, one per client, which may overlap, be empty or leave samples out.

    Args:
        indices: The indices of each client's samples, from 0 to n-1, in the training split as the source gives it.
            Samples that are held out, such as by `val_fraction`, are left out of the lists.

    Raises:
        ValueError: A client's indices are no flat list of whole numbers.
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
