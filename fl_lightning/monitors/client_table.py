"""Callback that writes a table with a row for every client of every round."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pytorch_lightning import LightningModule, Trainer

from fl_lightning.client.checks import check_outputs
from fl_lightning.distributed import current_communicator
from fl_lightning.engines.inspection import DEPLOYED, Moment
from fl_lightning.federation.clients_table import NAME, unseen_cell
from fl_lightning.federation.loop import FederatedLoop
from fl_lightning.monitors.drift import length, record_exchange
from fl_lightning.monitors.monitor import Measurements, Monitor, ended, value_or_none
from fl_lightning.types import ClientUpdate

MEASURED = ("samples", "steps", "loss_before", "loss_after", "acc_own_before", "acc_own", "acc_global_before")
COLUMNS = ("client", *MEASURED, "acc_global", "drift", "bytes_down", "bytes_up", "skipped", "owner")


class ClientTable(Monitor):
    """Writes `clients.csv`: a row for each round and client of its cohort.

    The columns are:

    - `samples`: the training samples.
    - `steps`: the optimizer steps, over all exchanges and phases.
    - `loss_before`, `loss_after`: the mean local loss on the client's own training samples.
    - `acc_own_before`, `acc_own`, `acc_global_before`, `acc_global`: the accuracy on the client's own test samples, and
      on the global test split.
    - `drift`: the distance ‖w_i − w‖₂ over the shared trainable weights, of the moves in all exchanges.
    - `bytes_down`, `bytes_up`: the bytes, also of failed clients and repeated attempts. They add up to the round's.
    - `skipped`: why the client was skipped.
    - `owner`: the name of the owner of the client's samples (`data.by`), else the client's number.
    - `unseen`: 1 for a client that never trains (`data.unseen`), else 0. The column is there if there are such clients.
    - `local/KEY`, and after fine-tuning `local/tuned/KEY`: the values of an evaluation of the clients
      (`model.evaluate_clients_every`), after all others. These are values of all clients, and rounds with an evaluation
      have a row for each client with test samples.

    Values with `before` are of the weights as the client received them, and the others of what it would deploy. A cell
    without a value is empty, such as the drift of a client without samples.

    Args:
        loss: Whether the losses are measured, which takes two passes over the client's training samples.
        accuracy: Whether the accuracies are measured, which takes passes over the test samples.
        every: Number of rounds from one measured round to the next.
        dirpath: Folder of the table. None is the folder of the Trainer's first logger, and no folder without a logger.
    """

    writes_client_values = True
    """Whether the table has the values of an evaluation of the clients."""

    def __init__(
        self, loss: bool = True, accuracy: bool = True, every: int = 1, dirpath: str | Path | None = None
    ) -> None:
        super().__init__(every=every, dirpath=dirpath)
        self.loss = loss
        self.accuracy = accuracy

    def begin(self, trainer: Trainer, loop: FederatedLoop) -> None:
        if self.accuracy and loop.data.num_classes is not None:
            # What is missing is refused here, and not in a client's name.
            loop.data.measured_split()
            check_outputs(loop.client, type(self).__name__, remedy="set accuracy to false")
        self.open_table(trainer, NAME, COLUMNS, grows=True)

    # --- one client ---

    def start(self, loop: FederatedLoop, client_id: int) -> Measurements:
        received = loop.evaluation.inspection.received
        measured = self._evaluated(loop, client_id, moment=received, suffix="_before")
        return {"samples": loop.server.size(client_id), **measured}

    def exchange_end(self, loop: FederatedLoop, update: ClientUpdate, measured: Measurements) -> None:
        record_exchange(loop, update, measured)

    def end(self, loop: FederatedLoop, update: ClientUpdate, measured: Measurements) -> None:
        deployed = ended(loop, update.client_id, DEPLOYED)
        measured |= self._evaluated(loop, update.client_id, moment=deployed, suffix="")
        measured["loss_after"] = measured.pop("loss", None)
        measured["drift"] = length(measured.pop("move"), order=2)

    def _evaluated(self, loop: FederatedLoop, client_id: int, *, moment: Moment, suffix: str) -> Measurements:
        """Return the losses and accuracies of a client at a moment, under names with a suffix."""
        inspection = loop.evaluation.inspection
        measured = Measurements()
        if self.loss:
            measured[f"loss{suffix}"] = inspection.own_loss(moment, client_id)
        if self.accuracy and loop.data.num_classes is not None:
            own = inspection.own_scores(moment, client_id)
            everywhere = inspection.scores(moment, loop.data.measured_split())
            measured[f"acc_own{suffix}"] = value_or_none(float(own[-2]))
            measured[f"acc_global{suffix}"] = value_or_none(float(everywhere[-2]))
        return measured

    # --- the round ---

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_epoch_end(trainer, pl_module)
        is_measured = self.measures(trainer)
        if isinstance(pl_module, FederatedLoop) and not is_measured:
            # The clients may be evaluated in rounds that are not measured.
            self._write(trainer, pl_module, {})

    def round_end(self, trainer: Trainer, loop: FederatedLoop, measured: Mapping[int, Measurements]) -> None:
        """Write the rows of the round, when it is known who was skipped."""
        rows: dict[int, Measurements] = {client_id: dict(values) for client_id, values in measured.items()}
        for fault in loop.skipped:
            rows.setdefault(fault.client_id, {})["skipped"] = fault.reason
        counted = Counter[tuple[str, int]]()
        for of_process in current_communicator(loop.device).gather(loop.recorder.traffic.by_client):
            counted.update(of_process)
        for client_id, row in rows.items():
            for way in ("down", "up"):
                row[f"bytes_{way}"] = counted[f"comm/bytes_{way}", client_id]
        self._write(trainer, loop, rows)

    def complete_round(self, loop: FederatedLoop, round_idx: int) -> None:
        """Write the values of the evaluation of a round that was completed when the run went on in another folder.

        What was measured in the training of the round is in the table of the earlier folder only.

        Args:
            loop: The federation.
            round_idx: Index of the round.
        """
        if self._table is not None and not self._table.has_round(round_idx):
            self._table.append_by_name([{"round": round_idx, **row} for row in self._rows(loop, {})])

    def _write(self, trainer: Trainer, loop: FederatedLoop, measured: Mapping[int, Measurements]) -> None:
        """Write a row for each client that was measured or evaluated.

        Args:
            trainer: The Trainer of the run.
            loop: The federation.
            measured: What was measured, by client id.
        """
        self.add_rows_by_name(trainer, self._rows(loop, measured))

    def _rows(self, loop: FederatedLoop, measured: Mapping[int, Measurements]) -> list[dict[str, Any]]:
        """Return a row for each client that was measured or evaluated, by the names of columns.

        Args:
            loop: The federation.
            measured: What was measured, by client id.
        """
        names = loop.data.client_names
        evaluated = loop.recorder.client_values
        rows: list[dict[str, Any]] = []
        for client_id in sorted(measured.keys() | evaluated.keys()):
            known = measured.get(client_id, {})
            cells = {name: known[name] for name in COLUMNS if name in known}
            values = evaluated.get(client_id, {})
            unseen = unseen_cell(client_id, loop.data.unseen_clients)
            rows.append({"client": client_id, "owner": names[client_id], **cells, **unseen, **values})
        return rows
