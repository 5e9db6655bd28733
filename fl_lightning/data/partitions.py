"""Partitions: which client owns which training samples."""

from abc import ABC, abstractmethod
from typing import Any

import numpy as np

from fl_lightning.functional import partition as P

Array = np.ndarray[Any, Any]


class Partition(ABC):
    """Deals the samples of a split to the clients; the same generator state gives the same parts."""

    @abstractmethod
    def __call__(
        self,
        labels: Array | None,
        num_samples: int,
        num_clients: int,
        num_classes: int | None,
        generator: np.random.Generator,
    ) -> list[Array]:
        """Deal samples 0 ... n-1.

        Args:
            labels: class of each sample, (n,) integers, or None where samples have none.
            num_samples: n.
            num_clients: N.
            num_classes: C; None: the largest label + 1.
            generator: every random draw.

        Returns:
            N index arrays, int64.

        Raises:
            ValueError: the partition cannot be made with these settings.
        """

    def _labelled(self, labels: Array | None, num_samples: int, num_classes: int | None) -> tuple[Array, int]:
        """Labels and the number of classes, or an error that says what to use instead."""
        name = type(self).__name__
        if labels is None:
            raise ValueError(f"{name} needs the labels of the samples, got none: use IIDPartition")
        if len(labels) != num_samples:
            raise ValueError(f"{name} needs one label per sample, got {len(labels)} labels for {num_samples}")
        return labels, num_classes if num_classes is not None else int(np.max(labels, initial=0)) + 1


class IIDPartition(Partition):
    """Shuffled and cut into equal parts; needs no labels."""

    def __call__(
        self,
        labels: Array | None,
        num_samples: int,
        num_clients: int,
        num_classes: int | None,
        generator: np.random.Generator,
    ) -> list[Array]:
        return list(P.iid(num_samples, num_clients, generator))


class DirichletPartition(Partition):
    """Label skew: each class shared out by its own draw from a symmetric Dirichlet distribution.

    Args:
        alpha: concentration > 0: 0.1 = few classes per client, inf = equal shares.
        min_samples: least number of samples of a client; 0 allows empty clients.
    """

    def __init__(self, alpha: float, min_samples: int = 10) -> None:
        P.check_dirichlet(alpha, min_samples)
        self.alpha, self.min_samples = alpha, min_samples

    def __call__(
        self,
        labels: Array | None,
        num_samples: int,
        num_clients: int,
        num_classes: int | None,
        generator: np.random.Generator,
    ) -> list[Array]:
        labels, num_classes = self._labelled(labels, num_samples, num_classes)
        return list(P.dirichlet(labels, num_clients, num_classes, self.alpha, generator, self.min_samples))


class ShardPartition(Partition):
    """Label skew: each class cut into equal shards, the same number of shards to every client.

    Args:
        shards_per_client: s ≥ 1, the greatest number of classes of a client; s · num_clients must be a
            multiple of the number of classes.
    """

    def __init__(self, shards_per_client: int) -> None:
        if shards_per_client < 1:
            raise ValueError(f"shards_per_client must be at least 1, got {shards_per_client}")
        self.shards_per_client = shards_per_client

    def __call__(
        self,
        labels: Array | None,
        num_samples: int,
        num_clients: int,
        num_classes: int | None,
        generator: np.random.Generator,
    ) -> list[Array]:
        return list(self._deal(labels, num_samples, num_clients, num_classes, generator).indices)

    def with_test(
        self,
        labels: Array | None,
        test_labels: Array,
        num_clients: int,
        num_classes: int | None,
        generator: np.random.Generator,
    ) -> tuple[list[Array], list[Array]]:
        """Deal a train split (n,) and a test split (m,) so that a client has the same classes in both.

        The train part is what a call gives from the same generator state.
        """
        train = self._deal(labels, 0 if labels is None else len(labels), num_clients, num_classes, generator)
        return list(train.indices), list(P.deal_shards(test_labels, train.classes, generator))

    def _deal(
        self,
        labels: Array | None,
        num_samples: int,
        num_clients: int,
        num_classes: int | None,
        generator: np.random.Generator,
    ) -> P.Shards:
        labels, num_classes = self._labelled(labels, num_samples, num_classes)
        return P.shards(labels, num_clients, num_classes, self.shards_per_client, generator)


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

    def __call__(
        self,
        labels: Array | None,
        num_samples: int,
        num_clients: int,
        num_classes: int | None,
        generator: np.random.Generator,
    ) -> list[Array]:
        if len(self.indices) != num_clients:
            raise ValueError(
                f"FixedPartition needs one index list per client, got {len(self.indices)} lists for "
                f"{num_clients} clients: set num_clients to {len(self.indices)}"
            )
        for client_id, part in enumerate(self.indices):
            wrong = part[(part < 0) | (part >= num_samples)]
            if wrong.size:
                raise ValueError(
                    f"FixedPartition indices must lie in 0 ... {num_samples - 1}, got {wrong[0]} for client "
                    f"{client_id}: indices count the samples of the train split from 0"
                )
        return [part.copy() for part in self.indices]
