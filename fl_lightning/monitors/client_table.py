"""Callback that writes a table with a row for every client of every round."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from pytorch_lightning import Trainer

from fl_lightning.distributed import current_communicator
from fl_lightning.engines.inspection import DEPLOYED, Moment
from fl_lightning.federation.loop import FederatedLoop
from fl_lightning.monitors.drift import length, record_exchange
from fl_lightning.monitors.monitor import Measurements, Monitor, ended, value_or_none
from fl_lightning.types import ClientUpdate

MEASURED = ("samples", "steps", "loss_before", "loss_after", "acc_own_before", "acc_own", "acc_global_before")
COLUMNS = ("client", *MEASURED, "acc_global", "drift", "bytes_down", "bytes_up", "skipped", "owner")


class ClientTable(Monitor):
    """Writes `clients.csv`: a row for each round and client of its cohort.

    Columns: training samples; optimizer steps, over all exchanges and phases; mean local loss on its own training
    samples, before and after local training; accuracy on its own test samples and on the global test split, before and
    after; the distance ‖w_i − w‖₂ over the shared trainable weights, of its moves in all exchanges, empty without
    samples; bytes down and up, which add up to those of the round, failed clients and repeated attempts included; why
    the client was skipped; the name of the owner of its samples (`data.by`), else its number. Before: of the weights as
    it received them; after: of what it would deploy. A cell without a value is empty.

    Args:
        loss: measure the losses, which costs two passes over the client's training samples.
        accuracy: measure the accuracies, which costs passes over the test samples.
        every: measure every so many rounds.
        dirpath: folder of the table; None: that of the Trainer's first logger (no logger: none).
    """

    def __init__(
        self, loss: bool = True, accuracy: bool = True, every: int = 1, dirpath: str | Path | None = None
    ) -> None:
        super().__init__(every, None, dirpath)
        self.loss = loss
        self.accuracy = accuracy

    def begin(self, trainer: Trainer, loop: FederatedLoop) -> None:
        if self.accuracy and loop.data.num_classes is not None:
            loop.data.measured_split()  # refused here, and not in a client's name
        self.open_table(trainer, "clients.csv", COLUMNS)

    # --- one client ----------------------------------------------------------------------------------------------

    def start(self, loop: FederatedLoop, client_id: int) -> Measurements:
        measured = self._evaluated(loop, client_id, loop.evaluation.inspection.received, "_before")
        return {"samples": loop.server.size(client_id), **measured}

    def exchange_end(self, loop: FederatedLoop, update: ClientUpdate, measured: Measurements) -> None:
        record_exchange(loop, update, measured)

    def end(self, loop: FederatedLoop, update: ClientUpdate, measured: Measurements) -> None:
        measured |= self._evaluated(loop, update.client_id, ended(loop, update.client_id, DEPLOYED), "")
        measured["loss_after"] = measured.pop("loss", None)
        measured["drift"] = length(measured.pop("move"), 2)

    def _evaluated(self, loop: FederatedLoop, client_id: int, moment: Moment, suffix: str) -> Measurements:
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

    # --- the round -----------------------------------------------------------------------------------------------

    def round_end(self, trainer: Trainer, loop: FederatedLoop, measured: Mapping[int, Measurements]) -> None:
        """Write the round's rows, once it is known who was skipped."""
        rows = {client_id: {"client": client_id, **values} for client_id, values in measured.items()}
        for fault in loop.skipped:
            rows.setdefault(fault.client_id, {"client": fault.client_id})["skipped"] = fault.reason
        names = loop.data.client_names
        for client_id, row in rows.items():
            row["owner"] = names[client_id]
        counted = Counter[tuple[str, int]]()
        for of_process in current_communicator(loop.device).gather(loop.recorder.traffic.by_client):
            counted.update(of_process)
        for client_id, row in rows.items():
            for way in ("down", "up"):
                row[f"bytes_{way}"] = counted[f"comm/bytes_{way}", client_id]
        self.add_rows(trainer, ([row.get(name) for name in COLUMNS] for _, row in sorted(rows.items())))
