"""Callback that names the clients which a run left out."""

from pathlib import Path
from typing import Any

from pytorch_lightning import Callback, LightningModule, Trainer

from fl_lightning.federation.loop import FederatedLoop
from fl_lightning.runs.plain_fit import warn_of_plain_fit
from fl_lightning.utils.round_table import RoundTable

COLUMNS = ("round", "client", "reason", "owner")


class SkippedClients(Callback):
    """Writes `skipped.csv`: round, client, reason and owner of every client that was left out. None left out: no file.

    The owner is the name of the owner of the client's samples (`data.by`), else the client's number.

    Args:
        dirpath: Folder of the file. None is `trainer.default_root_dir`.
        filename: Name of the file.
    """

    def __init__(self, dirpath: str | Path | None = None, filename: str = "skipped.csv") -> None:
        self.dirpath = dirpath
        self.filename = filename
        self._written = -1
        """The last round whose clients are written."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not isinstance(pl_module, FederatedLoop):
            warn_of_plain_fit(self, pl_module)
        self._written = trainer.current_epoch - 1
        if trainer.is_global_zero:
            self._table(trainer).begin(trainer.current_epoch)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._write(trainer, pl_module)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Name the clients of the round that ended the run, too."""
        self._write(trainer, pl_module)

    def _write(self, trainer: Trainer, loop: Any) -> None:
        """Write the clients of the round, once."""
        skipped = getattr(loop, "skipped", None)
        if not skipped or not trainer.is_global_zero:
            return
        round_idx = skipped[0].round_idx
        if round_idx > self._written:
            self._written = round_idx
            names = loop.data.client_names
            rows = [(*fault, names[fault.client_id]) for fault in skipped]
            self._table(trainer).append(rows)

    def _table(self, trainer: Trainer) -> RoundTable:
        """Return the table of a run."""
        return RoundTable(Path(self.dirpath or trainer.default_root_dir, self.filename), COLUMNS)
