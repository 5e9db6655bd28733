"""Callback that prints and writes the values of each client after an evaluation outside of a fit."""

from collections.abc import Mapping
from pathlib import Path

from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.utilities import rank_zero_info

from fl_lightning.federation.clients_table import unseen_cell
from fl_lightning.federation.loop import FederatedLoop
from fl_lightning.reports.terminal import print_table
from fl_lightning.utils.files import write_table
from fl_lightning.utils.settings import check_at_least

Row = Mapping[str, float | int | str | None]
"""The cells of a client by column. None is a value that is not defined."""


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
        rows = rows_of(pl_module) if pl_module.evaluates_clients_too else []
        if not rows:
            return
        columns = list(dict.fromkeys(name for row in rows for name in row))
        header = ["client", *(name for name in columns if name not in ("client", "owner"))]
        lines = []
        for row in rows[: self.max_rows]:
            values = [text_of(row.get(name)) for name in header[1:]]
            lines.append([str(row["owner"]), *values])
        below = f"{self.max_rows} of {len(rows)} clients are shown" if len(rows) > self.max_rows else ""
        print_table("Models of the clients, each on its own test samples", header=header, rows=lines, below=below)
        if self.dirpath is not None:
            path = Path(self.dirpath, f"clients-{verb}.csv")
            write_table(path, [columns, *([row.get(name, "") for name in columns] for row in rows)])
            rank_zero_info(f"Clients: {path}")


def rows_of(loop: FederatedLoop) -> list[Row]:
    """Return a row for each client of the last evaluation: its id, the name of its owner, its samples and values."""
    owners = loop.data.client_names
    unseen = loop.data.unseen_clients
    rows: list[Row] = []
    for client_id, values in sorted(loop.recorder.client_values.items()):
        row: dict[str, float | int | str | None] = {"client": client_id, "owner": owners[client_id]}
        row |= unseen_cell(client_id, unseen)
        row["samples"] = loop.data.view(client_id, 0).size("test")
        row |= values
        rows.append(row)
    return rows


def text_of(value: float | str | None) -> str:
    """Write a value for the terminal, and one that is not defined as a dash."""
    if value is None:
        return "-"
    return value if isinstance(value, str) else f"{value:.6g}"
