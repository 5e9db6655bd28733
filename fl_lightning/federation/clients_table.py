"""The table `clients.csv` with the values of each client, in rounds after which the clients were evaluated."""

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

from pytorch_lightning import Trainer

from fl_lightning.utils.round_table import RoundTable
from fl_lightning.utils.run_folder import run_folder

NAME = "clients.csv"
"""Name of the file."""

ClientValues = Mapping[int, Mapping[str, float | None]]
"""Values of clients by client id and log key. None is a value that is not defined."""


class ClientsTable:
    """Writes the values of the clients in a run, unless a callback writes a table of the clients that has them."""

    def __init__(self) -> None:
        self._table: RoundTable | None = None

    def begin_fit(self, trainer: Trainer, pending_round: int | None, *, evaluates: bool) -> None:
        """Find the folder of the run. Every process must call it.

        Args:
            trainer: The Trainer of the run.
            pending_round: Index of a round of the run that is continued whose rows are written again, or None.
            evaluates: Whether the run evaluates its clients.

        Raises:
            ValueError: The run evaluates its clients, and a file of that name is another table.
        """
        self._table = None
        folder = run_folder(trainer)
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        is_written = any(getattr(callback, "writes_client_values", False) for callback in callbacks)
        if folder is None or is_written or not trainer.is_global_zero:
            return
        table = RoundTable(folder / NAME, ("round", "client", "owner"), grows=True)
        first_round = trainer.current_epoch
        if pending_round is not None:
            first_round = min(first_round, pending_round)
        if not evaluates:
            # The run may have evaluated its clients before, but a file of that name may also be the user's.
            with suppress(ValueError):
                table.begin(first_round)
            return
        table.begin(first_round)
        self._table = table

    def write(
        self, round_idx: int, values: ClientValues, owners: Sequence[str], *, unseen: Collection[int] = ()
    ) -> None:
        """Add a row for each client that has values.

        Args:
            round_idx: Index of the round.
            values: The values of the clients. Without any nothing is written.
            owners: Names of the owners of all clients' samples, by client id.
            unseen: Ids of the clients that never train. If there are any, a column says which clients these are.
        """
        if self._table is None:
            return
        rows: list[dict[str, Any]] = []
        for client_id, of_client in sorted(values.items()):
            if of_client:
                who = {"round": round_idx, "client": client_id, "owner": owners[client_id]}
                rows.append({**who, **unseen_cell(client_id, unseen), **of_client})
        self._table.append_by_name(rows)


def unseen_cell(client_id: int, unseen: Collection[int]) -> dict[str, int]:
    """Return the cell of a client's row that says whether the client never trains. Empty if all clients train.

    >>> unseen_cell(3, unseen=[3, 4]), unseen_cell(0, unseen=[3, 4]), unseen_cell(0, unseen=[])
    ({'unseen': 1}, {'unseen': 0}, {})
    """
    return {"unseen": int(client_id in unseen)} if unseen else {}
