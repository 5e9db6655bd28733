"""The division of the samples by a column that names their owners, the natural clients."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from pytorch_lightning.utilities import rank_zero_warn

from fl_lightning.data.partitioning import at_most
from fl_lightning.data.partitions import Dealt, Partition, PartitionInput
from fl_lightning.data.splits import Array
from fl_lightning.utils.signatures import checks_arguments


class ColumnPartition(Partition):
    """Keeps samples with the same value in a column together, as those of natural clients.

    The values in sorted order are dealt to the clients in turn. With as many clients as values, each client has one.

    Args:
        column: Name of an attribute of the dataset with one value per sample, or a key of its items.
    """

    counts_owners = True

    @checks_arguments
    def __init__(self, column: str) -> None:
        self.column: str = column

    def count_owners(self, samples: PartitionInput) -> int:
        return len(self._values(samples))

    def __call__(self, samples: PartitionInput, num_clients: int, generator: np.random.Generator) -> list[Array]:
        values = self._values(samples)
        if len(values) < num_clients:
            raise ValueError(
                f"num_clients must be at most the number of values in column {self.column!r} ({len(values)}), got "
                f"{num_clients}"
            )
        return self._deal(values, column=self._labels(samples), num_clients=num_clients)

    def partition_test(self, dealt: Dealt, test: PartitionInput, size: int | None = None) -> list[Array]:
        """Deal test samples by the same values if they have the column, else draw them by class proportions."""
        if test.labels is None:
            by_class = dealt._replace(samples=dealt.samples.by_class())
            return super().partition_test(by_class, test.by_class(), size)
        dealt_rows = np.concatenate(dealt.parts)
        known = set(self._labels(dealt.samples)[dealt_rows].tolist())
        left = [owner for owner in test.labels.tolist() if owner not in known]
        if left:
            rank_zero_warn(
                f"owners in column {self.column!r} that have test samples only: {len(set(map(str, left)))}, with "
                f"{len(left)} of {test.size} test samples; no client is tested on these, the server's model is"
            )
        parts = self._deal(sorted(known), column=test.labels, num_clients=len(dealt.parts))
        return at_most(parts, size, dealt.generator)

    def _values(self, samples: PartitionInput) -> list[Any]:
        """List the owners of the samples in sorted order.

        Raises:
            ValueError: A sample has no owner: its value is blank, NaN or None.
        """
        return owners_in(self.column, self._labels(samples))

    @staticmethod
    def _deal(values: Sequence[Any], column: Array, num_clients: int) -> list[Array]:
        """Deal the values to the clients in turn, and return the indices of each client's samples.

        Args:
            values: The values, sorted. Samples of other values are dealt to nobody.
            column: Value of each sample, (n,).
            num_clients: Number N of clients.
        """
        client_of = {value: turn % num_clients for turn, value in enumerate(values)}
        # A dict is as fast for values of any kind.
        clients = np.array([client_of.get(value, -1) for value in column.tolist()])
        return [np.flatnonzero(clients == client_id) for client_id in range(num_clients)]


def owners_in(column: str, owners: Array) -> list[Any]:
    """List the owners that a column names, in sorted order.

    Args:
        column: Name of the column, for the error.
        owners: Owner of every training sample, (n,).

    Raises:
        ValueError: A sample has no owner: its value is blank, NaN or None.

    >>> owners_in("site", np.array(["b", "a", "b"]))
    ['a', 'b']
    """
    kind = owners.dtype.kind
    missing = np.zeros(len(owners), bool)
    if kind == "U":
        missing = owners == ""
    elif kind in "Mm":
        missing = np.isnat(owners)
    elif kind == "f":
        missing = np.isnan(owners)
    elif kind == "O":
        missing = np.array([str(owner) in {"", "None", "nan"} for owner in owners], bool)
    if missing.any():
        raise ValueError(
            f"column {column!r} must name the owner of every training sample, got none for {missing.sum()} of "
            f"{len(owners)}; fill them in, or leave these samples out"
        )
    return sorted(set(owners.tolist()))
