"""Base class of callbacks that measure the clients of a round."""

import math
from collections.abc import Iterable, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from pytorch_lightning import Callback, LightningModule, Trainer

from fl_lightning.client.checks import check_outputs
from fl_lightning.distributed import current_communicator
from fl_lightning.engines.inspection import Inspection, Moment
from fl_lightning.federation.loop import FederatedLoop
from fl_lightning.functional.summary import mean_std
from fl_lightning.runs.plain_fit import warn_of_plain_fit
from fl_lightning.types import ClientUpdate
from fl_lightning.utils.files import write_file
from fl_lightning.utils.round_table import RoundTable
from fl_lightning.utils.run_folder import run_folder
from fl_lightning.utils.settings import check_at_least

Measurements = dict[str, Any]
"""Values of one client: numbers, strings and tensors on the CPU, by name."""


class Monitor(Callback):
    """Measures clients before and after their local training, and never changes a weight.

    A subclass measures one client in `start`, `epoch_end` and `end`. In `summarise` it makes the values of the round
    from those of all clients, on every process. In `round_end` it measures the new global model. A client that fails is
    left out.

    Args:
        every: Number of rounds from one measured round to the next.
        clients: Ids of the clients that are measured. None is the whole cohort.
        dirpath: Folder of the monitor's files. None is the folder of the Trainer's first logger, and no folder without
            a logger.

    Attributes:
        folder: The folder of the files, or None on a process that writes no files.
        exchange: Number of exchanges of the round that are over.
        under_way: By client what has been measured in this process.
        ended: The same for clients that have ended their training.
        measured: The same for the clients of all processes, once the exchanges are over.
        measures_any_fit: Whether the monitor measures the fit of a module without a federation, too.
        instead: Words for what to take where the clients are no classifiers, as the end of a sentence.
    """

    measures_any_fit: ClassVar[bool] = False
    instead: ClassVar[str] = "leave the monitor out"

    def __init__(self, every: int = 1, clients: Sequence[int] | None = None, dirpath: str | Path | None = None) -> None:
        check_at_least(1, every=every)
        self.every = every
        self.clients = clients
        self.dirpath = dirpath
        self.folder: Path | None = None
        self.exchange = 0
        self.under_way: dict[int, Measurements] = {}
        self.ended: dict[int, Measurements] = {}
        self.measured: Mapping[int, Measurements] = {}
        self._table: RoundTable | None = None

    # --- for subclasses ---

    def begin(self, trainer: Trainer, loop: FederatedLoop) -> None:
        """Prepare for a fit: refuse what cannot be measured, and open the monitor's table."""

    def start(self, loop: FederatedLoop, client_id: int) -> Measurements:
        """Measure a client with the weights it received, before local training."""
        return {}

    def epoch_end(self, loop: FederatedLoop, client_id: int, epoch: int, measured: Measurements) -> None:
        """Measure a client after one of its local epochs, numbered through the round from 0."""

    def exchange_end(self, loop: FederatedLoop, update: ClientUpdate, measured: Measurements) -> None:
        """Measure a client at the end of each exchange of the round. The last call comes before `end`."""

    def end(self, loop: FederatedLoop, update: ClientUpdate, measured: Measurements) -> None:
        """Measure a client after its local training, at the end of the last exchange, and add to what was measured."""

    def summarise(self, trainer: Trainer, loop: FederatedLoop, measured: Mapping[int, Measurements]) -> None:
        """Take the measurements of the round's clients, by client id, ascending, the same on all processes."""

    def round_end(self, trainer: Trainer, loop: FederatedLoop, measured: Mapping[int, Measurements]) -> None:
        """Measure the new global model at the end of a measured round, with the measurements of its clients."""

    # --- hooks ---

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        folder = run_folder(trainer, self.dirpath)
        self.folder = folder if trainer.is_global_zero else None
        self._table = None
        if isinstance(pl_module, FederatedLoop):
            self.begin(trainer, pl_module)
        elif not self.measures_any_fit:
            warn_of_plain_fit(self, pl_module)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.exchange = 0
        self.under_way = {}
        self.ended = {}
        self.measured = {}

    def on_client_start(self, trainer: Trainer, loop: FederatedLoop, client_id: int) -> None:
        """Measure a client before its training, by `start`."""
        is_chosen = self.clients is None or client_id in self.clients
        if is_chosen and self.exchange == 0 and self.measures(trainer):
            self.under_way[client_id] = {"epochs": 0, **self.start(loop, client_id)}

    def on_client_epoch_end(self, trainer: Trainer, loop: FederatedLoop, client_id: int, epoch: int) -> None:
        """Measure a client after a local epoch, by `epoch_end`."""
        measured = self.under_way.get(client_id)
        if measured is None:
            return
        epoch_of_round = measured["epochs"]
        # A subclass may give the arguments other names.
        self.epoch_end(loop, client_id, epoch_of_round, measured)  # style: ok, a subclass names them
        measured["epochs"] += 1

    def on_client_end(self, trainer: Trainer, loop: FederatedLoop, update: ClientUpdate) -> None:
        """Measure a client after an exchange, by `exchange_end`, and after its training, by `end`."""
        measured = self.under_way.get(update.client_id)
        # In an exchange of the server module nothing is trained.
        is_asked = self.exchange >= len(loop.client.exchanges)
        if measured is None or is_asked:
            return
        self.exchange_end(loop, update, measured)
        if self.exchange == len(loop.client.exchanges) - 1:
            self.end(loop, update, measured)
            self.ended[update.client_id] = measured

    def on_round_repeat(self, trainer: Trainer, loop: FederatedLoop) -> None:
        """Begin the round anew, which is run again without the clients that have failed."""
        self.on_train_epoch_start(trainer, loop)
        loop.evaluation.inspection.forget()
        if self._table is not None:
            self._table.begin(trainer.current_epoch)

    def on_exchange_end(self, trainer: Trainer, loop: FederatedLoop, exchange: str) -> None:
        """Gather what was measured of all clients once their own last exchange is over, for `summarise`."""
        self.exchange += 1
        if self.exchange == len(loop.client.exchanges) and self.measures(trainer):
            parts = current_communicator(loop.device).gather(self.ended)
            everywhere: dict[int, Measurements] = {}
            for part in parts:
                everywhere |= part
            self.measured = {client_id: everywhere[client_id] for client_id in sorted(everywhere)}
            self.summarise(trainer, loop, self.measured)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if isinstance(pl_module, FederatedLoop) and self.measures(trainer):
            measured = self.measured
            self.measured = {}
            self.round_end(trainer, pl_module, measured)

    # --- helpers ---

    def check_classes(self, loop: FederatedLoop) -> Inspection:
        """Return the loop's inspection if the clients are classifiers.

        Raises:
            ValueError: The data have no classes, or the user's module has no outputs for samples.
        """
        if loop.data.num_classes is None:
            raise ValueError(
                f"{type(self).__name__} needs data with classes, and these have none; set data.num_classes if "
                f"the samples have classes, else {self.instead}"
            )
        check_outputs(loop.client, type(self).__name__, remedy=self.instead)
        return loop.evaluation.inspection

    def measures(self, trainer: Trainer) -> bool:
        """Return True in a round that is measured."""
        return (trainer.current_epoch + 1) % self.every == 0

    def open_table(self, trainer: Trainer, name: str, columns: Sequence[str], *, grows: bool = False) -> None:
        """Open the monitor's table if this process has a folder.

        Args:
            trainer: The Trainer of the run.
            name: Name of the file.
            columns: Names of the columns after the round.
            grows: Whether rows that are added by name may have further columns.
        """
        if self.folder is not None:
            self._table = RoundTable(self.folder / name, ("round", *columns), grows=grows)
            self._table.begin(trainer.current_epoch)

    def add_rows(self, trainer: Trainer, rows: Iterable[Sequence[Any]]) -> None:
        """Add rows of the round to the table if this process has it."""
        if self._table is not None:
            self._table.append([trainer.current_epoch, *row] for row in rows)

    def add_rows_by_name(self, trainer: Trainer, rows: Iterable[Mapping[str, Any]]) -> None:
        """Add rows of the round by the names of columns to the table if this process has it."""
        if self._table is not None:
            self._table.append_by_name([{"round": trainer.current_epoch, **row} for row in rows])


def steps_of(update: ClientUpdate) -> int:
    """Return the number of all optimizer steps of an exchange, also of steps that count in no method's K."""
    return update.num_steps + update.uncounted_steps


def ended(loop: FederatedLoop, client_id: int, what: str = "trained") -> Moment:
    """Return the moment after the training of a client.

    Args:
        loop: The federation.
        client_id: The id of the client.
        what: `trained`, words for an epoch, or `DEPLOYED` for what the client would deploy.
    """
    return (what, loop.server.round_idx, client_id)


def value_or_none(number: float) -> float | None:
    """Return None for NaN, for a measure that is NaN only where it has no value, such as an accuracy.

    >>> value_or_none(0.5), value_or_none(math.nan)
    (0.5, None)
    """
    return None if math.isnan(number) else number


def log_means(loop: FederatedLoop, values: Mapping[str, Sequence[float | None]], *, deviations: bool = True) -> None:
    """Log the mean of values over the clients that have one, and their deviation as `KEY/std`.

    Args:
        loop: The federation.
        values: The values of all clients by log key. None is a client without a value. NaN is a value.
        deviations: Whether the deviation is logged, of two values or more.
    """
    for name, column in values.items():
        known = [value for value in column if value is not None]
        if not known:
            continue
        summary = mean_std(torch.tensor(known, dtype=torch.float64))
        log_known(loop, {name: float(summary.mean)})
        if deviations and len(known) > 1:
            log_known(loop, {f"{name}/std": float(summary.std)})


def log_known(loop: FederatedLoop, values: Mapping[str, float | None]) -> None:
    """Log the values of `known_values` once. All processes have the same values."""
    for name, value in known_values(loop, values).items():
        if loop.trainer.is_global_zero:
            loop.log(name, value)


def add_to_row(loop: FederatedLoop, values: Mapping[str, float | None]) -> None:
    """Add the values of `known_values` to the row of the round after its training."""
    loop.add_to_row(loop.parts.marked(known_values(loop, values)))


def known_values(loop: FederatedLoop, values: Mapping[str, float | None]) -> dict[str, float]:
    """Leave out None, and values of clients (`local/…`) if all samples are in one place. NaN is a value."""
    known: dict[str, float] = {}
    for name, value in values.items():
        is_of_clients = loop.data.pooled and name.startswith("local/")
        if value is not None and not is_of_clients:
            known[name] = value
    return known


def write_arrays(path: Path, arrays: Mapping[str, Any]) -> None:
    """Write arrays by name as an npz file, whole or not at all."""
    file = BytesIO()
    np.savez_compressed(file, **arrays)
    write_file(path, file.getvalue())
