"""Callback that writes a table with a row for every client of every round."""

from collections.abc import Mapping
from pathlib import Path

from pytorch_lightning import LightningModule, Trainer

from fl_lightning.engines.inspection import DEPLOYED, Moment
from fl_lightning.federation.loop import FederatedLoop
from fl_lightning.monitors.drift import length, record_exchange
from fl_lightning.monitors.monitor import Measurements, Monitor, ended
from fl_lightning.types import ClientUpdate

MEASURED = ("samples", "steps", "loss_before", "loss_after", "acc_own_before", "acc_own", "acc_global_before")
COLUMNS = ("client", *MEASURED, "acc_global", "drift", "bytes_down", "bytes_up", "skipped")


class ClientTable(Monitor):
    """Writes `clients.csv`: a row for each round and client of its cohort.

    Columns: training samples; optimizer steps, over all exchanges and phases; mean local loss on its own training
    samples, before and after local training; accuracy on its own test samples and on the global test split, before and
    after; the distance ‖w_i − w‖₂ over the shared trainable weights, of its moves in all exchanges, empty without
    samples; bytes down and up; why the client was skipped. Before: of the weights as it received them; after: of what
    it would deploy. A cell without a value is empty.

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
        self._counted: dict[str, int] = {}

    def begin(self, trainer: Trainer, loop: FederatedLoop) -> None:
        self.open_table(trainer, "clients.csv", COLUMNS)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_epoch_start(trainer, pl_module)
        self._counted = {}

    # --- one client ----------------------------------------------------------------------------------------------

    def on_client_start(self, trainer: Trainer, loop: FederatedLoop, client_id: int) -> None:
        super().on_client_start(trainer, loop, client_id)
        self._count(loop, client_id, "down")

    def on_client_end(self, trainer: Trainer, loop: FederatedLoop, update: ClientUpdate) -> None:
        self._count(loop, update.client_id, "up")
        super().on_client_end(trainer, loop, update)

    def on_round_repeat(self, trainer: Trainer, loop: FederatedLoop) -> None:
        super().on_round_repeat(trainer, loop)
        self._counted = {way: loop.recorder.traffic.total(f"comm/bytes_{way}") for way in ("down", "up")}

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
            measured[f"acc_own{suffix}"] = float(inspection.own_scores(moment, client_id)[-2])
            measured[f"acc_global{suffix}"] = float(inspection.scores(moment, "test")[-2])
        return measured

    def _count(self, loop: FederatedLoop, client_id: int, way: str) -> None:
        """Add the bytes since the last client's to this one's."""
        total = loop.recorder.traffic.total(f"comm/bytes_{way}")
        if (measured := self.under_way.get(client_id)) is not None:
            measured[f"bytes_{way}"] = measured.get(f"bytes_{way}", 0) + total - self._counted.get(way, 0)
        self._counted[way] = total

    # --- the round -----------------------------------------------------------------------------------------------

    def round_end(self, trainer: Trainer, loop: FederatedLoop, measured: Mapping[int, Measurements]) -> None:
        """Write the round's rows, once it is known who was skipped."""
        rows = {client_id: {"client": client_id, **values} for client_id, values in measured.items()}
        for fault in loop.skipped:
            rows.setdefault(fault.client_id, {"client": fault.client_id})["skipped"] = fault.reason
        self.add_rows(trainer, ([row.get(name) for name in COLUMNS] for _, row in sorted(rows.items())))
