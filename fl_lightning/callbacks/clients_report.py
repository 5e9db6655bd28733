"""Callback that prints and writes the values of each client after an evaluation outside of a fit."""

from collections.abc import Iterable, Mapping
from pathlib import Path

from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.utilities import rank_zero_info

from fl_lightning.federation.clients_table import unseen_cell
from fl_lightning.federation.loop import FederatedLoop
from fl_lightning.reports.terminal import print_table
from fl_lightning.utils.files import write_table
from fl_lightning.utils.settings import check_at_least

Row = Mapping[str, float | None]
"""Numbers of a client by column. None is a value that is not defined."""


class ClientsReport(Callback):
    """Prints a row for each client after `test` and `validate`, and writes it to a file.

    The rows have the values of what each client would deploy on its own test samples. They are there after
    `loop.deploy("all")`, and in every evaluation of clients that share no weights. The file is `clients-test.csv` or
    `clients-validate.csv`.

    Args:
        dirpath: Folder of the file. None writes no file.
        max_rows: Largest number of rows that are printed, ≥ 1.
    """

    def __init__(self, dirpath: str | Path | None = None, max_rows: int = 40) -> None:
        check_at_least(1, max_rows=max_rows)
        self.dirpath = dirpath
        self.max_rows = max_rows

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == "validate":
            self._report(trainer, pl_module, "validate")

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._report(trainer, pl_module, "test")

    def _report(self, trainer: Trainer, pl_module: LightningModule, verb: str) -> None:
        """Print and write the rows, if there are any."""
        if not isinstance(pl_module, FederatedLoop) or not trainer.is_global_zero:
            return
        # Otherwise the values of the clients are those of an earlier evaluation.
        rows = rows_of(pl_module) if pl_module.evaluates_clients_too else {}
        if not rows:
            return
        owners = pl_module.data.client_names
        columns = columns_of(rows.values())
        printed: list[list[str]] = []
        written: list[list[object]] = [["client", "owner", *columns]]
        for client_id, row in rows.items():
            owner = owners[client_id]
            texts = [text_of(row.get(name)) for name in columns]
            printed.append([owner, *texts])
            cells = [row.get(name, "") for name in columns]
            written.append([client_id, owner, *cells])
        below = f"{self.max_rows} of {len(rows)} clients are shown" if len(rows) > self.max_rows else ""
        print_table(
            "Models of the clients, each on its own test samples",
            header=["client", *columns],
            rows=printed[: self.max_rows],
            below=below,
        )
        if self.dirpath is not None:
            path = Path(self.dirpath, f"clients-{verb}.csv")
            write_table(path, written)
            rank_zero_info(f"Clients: {path}")


def columns_of(rows: Iterable[Row]) -> list[str]:
    """Return the names of all columns, in the order in which the rows have them."""
    names: dict[str, None] = {}
    for row in rows:
        names |= dict.fromkeys(row)
    return list(names)


def rows_of(loop: FederatedLoop) -> dict[int, Row]:
    """Return the test samples and the values of each client of the last evaluation, by its id."""
    unseen = loop.data.unseen_clients
    rows: dict[int, Row] = {}
    for client_id, values in sorted(loop.recorder.client_values.items()):
        samples = loop.data.view(client_id, loop.last_round).size("test")
        rows[client_id] = {**unseen_cell(client_id, unseen), "samples": samples, **values}
    return rows


def text_of(value: float | None) -> str:
    """Write a value for the terminal, and one that is not defined as a dash."""
    return "-" if value is None else f"{value:.6g}"
