"""The table of a run's partition."""

from collections.abc import Sequence
from pathlib import Path

from fl_lightning.utils.files import write_table

PARTITION = "partition.csv"
"""Name of the table."""

UNSEEN = "data.unseen"
"""Last column of the table if there are clients that never train: 1 for such a client, 0 for all others."""


def write_partition(
    path: Path,
    counts: Sequence[Sequence[int]],
    names: Sequence[str],
    clients: Sequence[str],
    *,
    unseen: Sequence[int] = (),
) -> None:
    """Write the training samples of each client (row) and class (column), under the names of both.

    Args:
        path: The file.
        counts: Number of samples of each client and class, N rows of C.
        names: Names of the C classes.
        clients: Names of the N clients.
        unseen: Ids of the clients that never train.
    """
    header = ["client", *names]
    rows: list[list[str | int]] = []
    for name, of_client in zip(clients, counts, strict=True):
        rows.append([name, *of_client])
    if unseen:
        header.append(UNSEEN)
        for client_id, row in enumerate(rows):
            row.append(int(client_id in unseen))
    write_table(path, [header, *rows])
