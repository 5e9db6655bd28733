"""Monitor of client drift: how far and in which directions clients move."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from pytorch_lightning import LightningModule, Trainer
from torchmetrics import MetricCollection

from fl_lightning.client import ClientModule
from fl_lightning.federation.loop import FederatedLoop
from fl_lightning.functional.accuracy import distribution_distance
from fl_lightning.functional.classes import in_local
from fl_lightning.functional.drift import weight_divergence
from fl_lightning.functional.state import State, add, zeros_like
from fl_lightning.metrics import DriftDiversity, GradientDiversity
from fl_lightning.metrics.reported import computed
from fl_lightning.monitors.monitor import Found, Monitor, add_to_row, log_defined, log_means, stacked
from fl_lightning.runs.round_table import RoundTable
from fl_lightning.types import ClientUpdate


class DriftMonitor(Monitor):
    r"""Distance and diversity of the clients' moves m_i = w_i − w from the weights they received.

    Over the shared trainable weights as they were trained, summed over the exchanges of a round. Logged: `local/drift`,
    the mean of ‖m_i‖₂, and `local/weight_divergence`, the mean of ‖m_i‖₁, each with `/std`; `train/gradient_diversity`
    Λ and `train/drift_diversity` of the m_i; and `local/distribution_distance`, the mean of ‖Ã_G − p_i‖₁ for the new
    global model, in rounds that evaluate it. `drift.csv` has a row for each round and client.

    Source: Lee et al. 2022, arXiv:2106.03097, Definition 2, Sec. 5.2 and Fig. 8.

    Args:
        every: measure every so many rounds.
        clients: measure these only; None: the whole cohort.
        dirpath: folder of the table; None: that of the Trainer's first logger (no logger: none).
    """

    def __init__(self, every: int = 1, clients: Sequence[int] | None = None, dirpath: str | Path | None = None) -> None:
        super().__init__(every, clients, dirpath)
        self._table: RoundTable | None = None
        self._moves: MetricCollection | None = None
        self._own = OwnMoves()
        self._found: Mapping[int, Found] = {}

    def begin(self, trainer: Trainer, loop: FederatedLoop) -> None:
        columns = ("round", "client", "drift", "weight_divergence", "distribution_distance")
        self._table = self.table(trainer, "drift.csv", columns)
        trainable = loop.weights.live(loop.weights.trainable)
        size = sum(value.numel() for value in trainable.values())
        kinds = {"train/drift_diversity": DriftDiversity, "train/gradient_diversity": GradientDiversity}
        moves = MetricCollection({name: kind(size) for name, kind in kinds.items()}) if size else None
        self._moves = moves and moves.to(loop.device)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_epoch_start(trainer, pl_module)
        self._found = {}
        self._own.clear()
        if self._moves is not None:
            self._moves.reset()

    def exchange_end(self, loop: FederatedLoop, update: ClientUpdate, found: Found) -> None:
        self._own.add(loop.client, update.client_id)

    def end(self, loop: FederatedLoop, update: ClientUpdate, found: Found) -> None:
        view, move = loop.data.view(update.client_id, loop.server.round_idx), self._own.take(update.client_id)
        for name, order in ("drift", 2), ("weight_divergence", 1):
            found[name] = length(move, order) if view.size() else float("nan")
        found["counts"] = None if loop.data.num_classes is None else view.label_counts
        if self._moves is not None and move and view.size():
            self._moves.update(move)

    def summarise(self, trainer: Trainer, loop: FederatedLoop, found: Mapping[int, Found]) -> None:
        self._found = found
        names = ("drift", "weight_divergence")
        log_means(loop, {f"local/{name}": [values[name] for values in found.values()] for name in names})
        if self._moves is not None:
            log_defined(loop, {name: float(value) for name, value in computed(self._moves).items()})

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the round's rows; the new global model is evaluated by now."""
        found, self._found = self._found, {}
        if not found or not isinstance(pl_module, FederatedLoop):
            return
        distances = [float("nan")] * len(found)
        accuracy = pl_module.recorder.class_accuracy
        if accuracy is not None and pl_module.recorder.evaluated_rounds == trainer.current_epoch + 1:
            distances = distribution_distance(accuracy, in_local(stacked(found, "counts"))).tolist()
            defined = torch.tensor(distances, dtype=torch.float64)
            add_to_row(pl_module, {"local/distribution_distance": float(defined.nanmean())})
        if self._table is not None:
            rows = zip(found.items(), distances, strict=True)
            self._table.append(
                (trainer.current_epoch, client_id, values["drift"], values["weight_divergence"], distance)
                for (client_id, values), distance in rows
            )


class OwnMoves:
    """Sums how far each client itself moves in the exchanges of a round, not what the server moves between them."""

    def __init__(self) -> None:
        self._sums: dict[int, State] = {}

    def clear(self) -> None:
        """Begin a round."""
        self._sums = {}

    @torch.no_grad()
    def add(self, client: ClientModule, client_id: int) -> None:
        """Add w_i − w of the client in the module, at the end of an exchange in which it received weights."""
        if received := client.received:
            params = client.params()
            move = {name: params[name].double() - value.double() for name, value in received.items()}
            before = self._sums.get(client_id)
            self._sums[client_id] = move if before is None else add(before, move)

    def take(self, client_id: int) -> State:
        """Give the sum of a client, float64 by name, and forget it; empty where it received no weights."""
        return self._sums.pop(client_id, {})


def length(move: State, order: float) -> float:
    """Norm of a move; NaN where there is none."""
    return float(weight_divergence(move, zeros_like(move), order)) if move else float("nan")
