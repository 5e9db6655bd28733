"""The table of a run's partition."""

from collections.abc import Sequence
from pathlib import Path

from fl_lightning.utils.files import write_table

PARTITION = "partition.csv"


def write_partition(path: Path, counts: Sequence[Sequence[int]], names: Sequence[str], clients: Sequence[str]) -> None:
    """Write the training samples of each client (row) and class (column), under the names of both."""
    write_table(path, [["client", *names], *([name, *row] for name, row in zip(clients, counts, strict=True))])
