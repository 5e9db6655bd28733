"""Partitions: the division of the training samples among the clients."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

import fl_lightning.data.partition_by_class as P
import fl_lightning.data.partition_by_client as PC
from fl_lightning.utils.renamed import refuse_renamed_hooks
from fl_lightning.utils.settings import check_at_least, check_choice

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class PartitionInput:
    """The samples that a partition divides.

    Args:
        size: number of samples n.
        labels: class of each, (n,) integers (or its value in the partition's column), or None.
        num_classes: C; None: the largest label + 1.

    Raises:
        ValueError: without one label per sample.
    """

    size: int
    labels: Array | None = None
    num_classes: int | None = None

    def __post_init__(self) -> None:
        if self.labels is not None and len(self.labels) != self.size:
            raise ValueError(f"there must be one label per sample, got {len(self.labels)} labels for {self.size}")


class Partition(ABC):
    """Deals the samples of a split to the clients; the same generator state gives the same parts."""

    column: str | None = None
    """The column whose values are handed over as labels; None: the samples' classes."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        refuse_renamed_hooks(cls)

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

    def partition_test(
        self,
        train: list[Array],
        samples: PartitionInput,
        test: PartitionInput,
        generator: np.random.Generator,
        size: int | None = None,
    ) -> list[Array]:
        """Deal the test split: each client's own test set.

        As it stands: drawn by the client's class proportions in `train` (without labels uniformly), the same sample
        for several clients too.

        Args:
            train: parts that a call returned.
            samples: those that it dealt.
            test: those of the test split, m of them.
            generator: in the state that the call found it in.
            size: samples of a test set; None: as the partition says, here m // N, at least one.

        Returns:
            N index arrays into the test split, int64.
        """
        size = size or self._test_size(test.size, len(train))
        if samples.labels is None or test.labels is None or samples.num_classes is None:
            return [generator.choice(test.size, min(size, test.size), replace=False) for _ in train]
        counts = np.stack([np.bincount(samples.labels[part], minlength=samples.num_classes) for part in train])
        counts[counts.sum(1) == 0] = 1  # a client without samples is tested on all classes
        return list(PC.draw_by_proportions(test.labels, counts, size, generator))

    def _test_size(self, num_test: int, num_clients: int) -> int:
        return max(1, num_test // num_clients)

    def _labels(self, samples: PartitionInput) -> Array:
        """The labels, or an error that says what to use instead."""
        if samples.labels is None:
            raise ValueError(f"{type(self).__name__} needs the labels of the samples, got none: use IIDPartition")
        return samples.labels

    def _labelled(self, samples: PartitionInput) -> tuple[Array, int]:
        """Labels and the number of classes, or an error that says what to use instead."""
        labels, num_classes = self._labels(samples), samples.num_classes
        return labels, num_classes if num_classes is not None else int(np.max(labels, initial=0)) + 1


class IIDPartition(Partition):
    """Shuffled and cut into equal parts; needs no labels."""

    def __call__(self, samples: PartitionInput, num_clients: int, generator: np.random.Generator) -> list[Array]:
        return list(P.iid(samples.size, num_clients, generator))


class DirichletPartition(Partition):
    """Label skew: each class shared out by its own draw from a symmetric Dirichlet distribution.

    Args:
        alpha: concentration > 0: 0.1 = few classes per client, inf = equal shares.
        min_samples: least number of samples of a client; 0 allows empty clients.
    """

    def __init__(self, alpha: float, min_samples: int = 10) -> None:
        P.check_dirichlet(alpha, min_samples)
        self.alpha, self.min_samples = alpha, min_samples

    def __call__(self, samples: PartitionInput, num_clients: int, generator: np.random.Generator) -> list[Array]:
        labels, num_classes = self._labelled(samples)
        return list(P.dirichlet(labels, num_clients, num_classes, self.alpha, generator, self.min_samples))


class ShardPartition(Partition):
    """Label skew: each class cut into equal shards, the same number of shards to every client.

    Args:
        shards_per_client: s ≥ 1, the greatest number of classes of a client; s · num_clients must be a
            multiple of the number of classes.
    """

    def __init__(self, shards_per_client: int) -> None:
        check_at_least(1, shards_per_client=shards_per_client)
        self.shards_per_client = shards_per_client

    def __call__(self, samples: PartitionInput, num_clients: int, generator: np.random.Generator) -> list[Array]:
        labels, num_classes = self._labelled(samples)
        return list(P.shards(labels, num_clients, num_classes, self.shards_per_client, generator).indices)

    def partition_test(
        self,
        train: list[Array],
        samples: PartitionInput,
        test: PartitionInput,
        generator: np.random.Generator,
        size: int | None = None,
    ) -> list[Array]:
        """Deal the test split by the same classes of shards, each sample once, where no size is asked."""
        if size is not None or test.labels is None or test.num_classes is None:
            return super().partition_test(train, samples, test, generator, size)
        classes = P.shard_classes(len(train), test.num_classes, self.shards_per_client, generator)
        return list(P.deal_shards(test.labels, classes, generator))


class ClientDirichletPartition(Partition):
    """Label skew, equal sizes: each client has its own draw of class proportions from a Dirichlet distribution.

    Args:
        alpha: concentration > 0 per class: 0.1 = few classes per client, inf = equal shares.
        samples_per_client: samples of every client; unset: n // num_clients, and a client's test set has its drawn
            proportions and m // num_clients samples. Where set, a client's test set has the proportions of its
            samples, and as many.
        overlap: whether clients may hold the same sample.
    """

    def __init__(self, alpha: float, samples_per_client: int | None = None, overlap: bool = False) -> None:
        P.check_dirichlet(alpha, 0)
        check_at_least(1, "unset: n // num_clients", samples_per_client=samples_per_client)
        self.alpha, self.samples_per_client, self.overlap = alpha, samples_per_client, overlap

    def __call__(self, samples: PartitionInput, num_clients: int, generator: np.random.Generator) -> list[Array]:
        labels, num_classes = self._labelled(samples)
        size = self.samples_per_client
        return list(PC.client_dirichlet(labels, num_clients, num_classes, self.alpha, generator, size, self.overlap))

    def partition_test(
        self,
        train: list[Array],
        samples: PartitionInput,
        test: PartitionInput,
        generator: np.random.Generator,
        size: int | None = None,
    ) -> list[Array]:
        """Draw by the same proportions where the size of a client is not set, else by those of its samples."""
        if self.samples_per_client is not None or test.labels is None or test.num_classes is None:
            return super().partition_test(train, samples, test, generator, size)
        q = PC.client_proportions(len(train), test.num_classes, self.alpha, generator)
        return list(PC.draw_by_proportions(test.labels, q, size or self._test_size(test.size, len(train)), generator))

    def _test_size(self, num_test: int, num_clients: int) -> int:
        return self.samples_per_client or super()._test_size(num_test, num_clients)


class QuantityPartition(Partition):
    """Label and quantity skew: every client has the same number of classes, and a random part of each of them.

    Args:
        classes_per_client: s ≥ 1; s · num_clients must be a multiple of the number of classes.
        upper: upper end of the drawn sizes of a client's part of a class: the `mean` part or the whole `class`.
        shuffle_clients: draw the clients that share a class; else they are neighbours with equal classes.
    """

    def __init__(
        self, classes_per_client: int, upper: Literal["mean", "class"] = "mean", shuffle_clients: bool = False
    ) -> None:
        check_at_least(1, classes_per_client=classes_per_client)
        check_choice(("mean", "class"), upper=upper)
        self.classes_per_client, self.upper, self.shuffle_clients = classes_per_client, upper, shuffle_clients

    def __call__(self, samples: PartitionInput, num_clients: int, generator: np.random.Generator) -> list[Array]:
        labels, num_classes = self._labelled(samples)
        classes, upper, shuffle = self.classes_per_client, self.upper, self.shuffle_clients
        return list(PC.quantity(labels, num_clients, num_classes, classes, generator, upper, shuffle))


class ColumnPartition(Partition):
    """Natural users: samples with the same value in a column stay together.

    Values in sorted order are dealt to the clients in turn, so with as many clients as values each is one value.

    Args:
        column: an attribute of the dataset with one value per sample, or a key of its items.
    """

    def __init__(self, column: str) -> None:
        self.column: str = column

    def __call__(self, samples: PartitionInput, num_clients: int, generator: np.random.Generator) -> list[Array]:
        labels = self._labels(samples)
        values = np.unique(labels)
        if len(values) < num_clients:
            raise ValueError(
                f"num_clients must be at most the number of values in column {self.column!r} ({len(values)}), got "
                f"{num_clients}"
            )
        return self._deal(values, labels, num_clients)

    def partition_test(
        self,
        train: list[Array],
        samples: PartitionInput,
        test: PartitionInput,
        generator: np.random.Generator,
        size: int | None = None,
    ) -> list[Array]:
        """Deal by the same values where the test samples have the column, else draw uniformly."""
        if test.labels is None or size is not None:
            return super().partition_test(train, samples, PartitionInput(test.size), generator, size)
        values = np.unique(self._labels(samples)[np.concatenate(train)])
        return self._deal(values, test.labels, len(train))

    @staticmethod
    def _deal(values: Array, found: Array, num_clients: int) -> list[Array]:
        """Samples of each client, where the sorted `values` are dealt in turn; those of another value go to nobody."""
        owner = np.searchsorted(values, found) % num_clients
        known = np.isin(found, values)
        return [np.flatnonzero(known & (owner == client_id)) for client_id in range(num_clients)]


class FixedPartition(Partition):
    """Explicit index lists, one per client; they may overlap, be empty or leave samples out.

    Args:
        indices: for each client the indices of its samples, each from 0 to n-1.
    """

    def __init__(self, indices: list[list[int]]) -> None:
        self.indices = [self._parse(client_id, part) for client_id, part in enumerate(indices)]

    @staticmethod
    def _parse(client_id: int, part: list[int]) -> Array:
        array = np.asarray(part)
        if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
            raise ValueError(
                f"FixedPartition needs one flat list of whole numbers per client, got shape {array.shape} of "
                f"{array.dtype} for client {client_id}"
            )
        return array.astype(np.int64)

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
