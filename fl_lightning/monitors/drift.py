"""Monitor of client drift: how far and in which directions clients move."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning import LightningModule, Trainer
from torchmetrics import Metric, MetricCollection

from fl_lightning.client import ClientModule
from fl_lightning.federation.loop import FederatedLoop
from fl_lightning.functional.accuracy import distribution_distance
from fl_lightning.functional.classes import in_local
from fl_lightning.functional.drift import weight_divergence
from fl_lightning.functional.state import State, add, zeros_like
from fl_lightning.metrics import DriftDiversity, GradientDiversity
from fl_lightning.metrics.user_metrics import computed
from fl_lightning.monitors.monitor import (
    Measurements,
    Monitor,
    add_to_row,
    log_known,
    log_means,
    steps_of,
    value_or_none,
)
from fl_lightning.types import ClientUpdate


class DriftMonitor(Monitor):
    r"""Measures distance and diversity of the clients' moves m_i = w_i − w from the weights that they received.

    The moves are of the shared trainable weights as they were trained, summed over the exchanges of a round. The
    monitor logs these values:

    - `local/drift`, the mean of ‖m_i‖₂, and `local/weight_divergence`, the mean of ‖m_i‖₁, each with `/std`.
    - `train/gradient_diversity` Λ and `train/drift_diversity` of the m_i.
    - `local/distribution_distance`, the mean of ‖Ã_G − p_i‖₁ for the new global model, in rounds that evaluate it.

    `drift.csv` has a row for each round and client. A client without samples has no value.

    Source: Lee et al. 2022, arXiv:2106.03097, Definition 2, Sec. 5.2 and Fig. 8.

    Args:
        every: Number of rounds from one measured round to the next.
        clients: Ids of the clients that are measured. None is the whole cohort.
        dirpath: Folder of the table. None is the folder of the Trainer's first logger, and no folder without a logger.
    """

    def __init__(self, every: int = 1, clients: Sequence[int] | None = None, dirpath: str | Path | None = None) -> None:
        super().__init__(every, clients, dirpath)
        self._moves: MetricCollection | None = None

    def begin(self, trainer: Trainer, loop: FederatedLoop) -> None:
        self.open_table(trainer, "drift.csv", ("client", "drift", "weight_divergence", "distribution_distance"))
        trainable = loop.global_weights.live(loop.global_weights.trainable)
        size = sum(value.numel() for value in trainable.values())
        self._moves = None
        if size:
            diversities: dict[str, Metric | MetricCollection] = {
                "train/drift_diversity": DriftDiversity(size),
                "train/gradient_diversity": GradientDiversity(size),
            }
            self._moves = MetricCollection(diversities).to(loop.device)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_epoch_start(trainer, pl_module)
        if self._moves is not None:
            self._moves.reset()

    def exchange_end(self, loop: FederatedLoop, update: ClientUpdate, measured: Measurements) -> None:
        record_exchange(loop, update, measured)

    def end(self, loop: FederatedLoop, update: ClientUpdate, measured: Measurements) -> None:
        view = loop.data.view(update.client_id, loop.server.round_idx)
        move = measured.pop("move")
        measured["drift"] = length(move, order=2)
        measured["weight_divergence"] = length(move, order=1)
        measured["counts"] = None if loop.data.num_classes is None else view.label_counts
        if self._moves is not None and move:
            self._moves.update(move)

    def summarise(self, trainer: Trainer, loop: FederatedLoop, measured: Mapping[int, Measurements]) -> None:
        for name in ("drift", "weight_divergence"):
            log_means(loop, {f"local/{name}": [values[name] for values in measured.values()]})
        if self._moves is None:
            return
        diversities = computed(self._moves)  # All processes must take part.
        if any(values["drift"] is not None for values in measured.values()):
            log_known(loop, {name: float(value) for name, value in diversities.items()})

    def round_end(self, trainer: Trainer, loop: FederatedLoop, measured: Mapping[int, Measurements]) -> None:
        """Write the rows of the round, whose global model is evaluated by now."""
        distances: list[float | None] = [None] * len(measured)
        accuracy = loop.recorder.class_accuracy
        if measured and accuracy is not None and loop.recorder.evaluated_rounds == trainer.current_epoch + 1:
            counts = torch.stack([values["counts"] for values in measured.values()])
            of_clients = distribution_distance(accuracy, in_local(counts)).double()
            distances = [value_or_none(distance) for distance in of_clients.tolist()]
            add_to_row(loop, {"local/distribution_distance": value_or_none(float(of_clients.nanmean()))})
        rows: list[list[Any]] = []
        for (client_id, values), distance in zip(measured.items(), distances, strict=True):
            rows.append([client_id, values["drift"], values["weight_divergence"], distance])
        self.add_rows(trainer, rows)


def record_exchange(loop: FederatedLoop, update: ClientUpdate, measured: Measurements) -> None:
    """Add an exchange to the record of a client's round, from which all tables and values of its work are made.

    The record has `steps`, the number of all optimizer steps, and `move`, how far the client has moved. The move is
    empty for a client without samples, which does not train.
    """
    measured["steps"] = measured.get("steps", 0) + steps_of(update)
    measured["move"] = measured.get("move", {})
    if loop.data.view(update.client_id, loop.server.round_idx).size():
        measured["move"] = moved(loop.client, measured["move"])


@torch.no_grad()
def moved(client: ClientModule, before: State) -> State:
    """Return the sum of a client's moves in the exchanges so far.

    Args:
        client: The client at the end of an exchange. If it received no weights, nothing is added.
        before: The sum of the moves in earlier exchanges, float64 by name. Empty in the first exchange.
    """
    params = client.params()
    move = {name: params[name].double() - value.double() for name, value in client.received.items()}
    if not move:
        return before
    return add(before, move) if before else move


def length(move: State, order: float) -> float | None:
    """Return the norm of a move, or None without a move."""
    if not move:
        return None
    return float(weight_divergence(move, zeros_like(move), order))
