"""Natural users: the division of the samples by a column that names their owners."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from pytorch_lightning.utilities import rank_zero_warn

from fl_lightning.data.partitioning import at_most
from fl_lightning.data.partitions import Dealt, Partition, PartitionInput
from fl_lightning.data.splits import Array
from fl_lightning.utils.signatures import checks_arguments


class ColumnPartition(Partition):
    """Natural users: samples with the same value in a column stay together.

    Values in sorted order are dealt to the clients in turn, so with as many clients as values each is one value.

    Args:
        column: an attribute of the dataset with one value per sample, or a key of its items.
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
        return self._deal(values, self._labels(samples), num_clients)

    def partition_test(self, dealt: Dealt, test: PartitionInput, size: int | None = None) -> list[Array]:
        """Deal by the same values where the test samples have the column, else draw by class proportions."""
        if test.labels is None:
            return super().partition_test(dealt._replace(samples=dealt.samples.by_class()), test.by_class(), size)
        known = {*self._labels(dealt.samples)[np.concatenate(dealt.parts)].tolist()}
        if left := [owner for owner in test.labels.tolist() if owner not in known]:
            rank_zero_warn(
                f"owners in column {self.column!r} that have test samples only: {len({*map(str, left)})}, with "
                f"{len(left)} of {test.size} test samples; no client is tested on these, the server's model is"
            )
        return at_most(self._deal(sorted(known), test.labels, len(dealt.parts)), size, dealt.generator)

    def _values(self, samples: PartitionInput) -> list[Any]:
        """List the owners of the samples in sorted order.

        Raises:
            ValueError: a sample without one, which is blank, NaN or None.
        """
        return owners_in(self.column, self._labels(samples))

    @staticmethod
    def _deal(values: Sequence[Any], column: Array, num_clients: int) -> list[Array]:
        """Deal the sorted `values` to the clients in turn, and give each its samples, those of others to nobody."""
        turns = {value: turn % num_clients for turn, value in enumerate(values)}
        owner = np.array([turns.get(value, -1) for value in column.tolist()])  # as fast whatever the values are
        return [np.flatnonzero(owner == client_id) for client_id in range(num_clients)]


def owners_in(column: str, owners: Array) -> list[Any]:
    """List the owners that a column names, in sorted order.

    Args:
        column: its name, for the error.
        owners: the owner of every training sample, (n,).

    Raises:
        ValueError: a sample without an owner, which is blank, NaN or None.

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
    return sorted({*owners.tolist()})
