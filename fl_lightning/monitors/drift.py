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
        self._moves: MetricCollection | None = None

    def begin(self, trainer: Trainer, loop: FederatedLoop) -> None:
        self.open_table(trainer, "drift.csv", ("client", "drift", "weight_divergence", "distribution_distance"))
        size = sum(value.numel() for value in loop.global_weights.live(loop.global_weights.trainable).values())
        kinds = {"train/drift_diversity": DriftDiversity, "train/gradient_diversity": GradientDiversity}
        self._moves = MetricCollection({n: kind(size) for n, kind in kinds.items()}).to(loop.device) if size else None

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_epoch_start(trainer, pl_module)
        if self._moves is not None:
            self._moves.reset()

    def exchange_end(self, loop: FederatedLoop, update: ClientUpdate, measured: Measurements) -> None:
        record_exchange(loop, update, measured)

    def end(self, loop: FederatedLoop, update: ClientUpdate, measured: Measurements) -> None:
        view = loop.data.view(update.client_id, loop.server.round_idx)
        move = measured.pop("move")
        for name, order in ("drift", 2), ("weight_divergence", 1):
            measured[name] = length(move, order)
        measured["counts"] = None if loop.data.num_classes is None else view.label_counts
        if self._moves is not None and move:
            self._moves.update(move)

    def summarise(self, trainer: Trainer, loop: FederatedLoop, measured: Mapping[int, Measurements]) -> None:
        names = ("drift", "weight_divergence")
        log_means(loop, {f"local/{name}": [values[name] for values in measured.values()] for name in names})
        if self._moves is None:
            return
        diversities = computed(self._moves)  # All processes must take part.
        if any(values["drift"] is not None for values in measured.values()):
            log_known(loop, {name: float(value) for name, value in diversities.items()})

    def round_end(self, trainer: Trainer, loop: FederatedLoop, measured: Mapping[int, Measurements]) -> None:
        """Write the round's rows, since the new global model is evaluated by now."""
        distances: list[float | None] = [None] * len(measured)
        accuracy = loop.recorder.class_accuracy
        if measured and accuracy is not None and loop.recorder.evaluated_rounds == trainer.current_epoch + 1:
            counts = torch.stack([values["counts"] for values in measured.values()])
            of_clients = distribution_distance(accuracy, in_local(counts)).double()
            distances = [value_or_none(distance) for distance in of_clients.tolist()]
            add_to_row(loop, {"local/distribution_distance": value_or_none(float(of_clients.nanmean()))})
        rows = zip(measured.items(), distances, strict=True)
        self.add_rows(trainer, ((i, v["drift"], v["weight_divergence"], distance) for (i, v), distance in rows))


def record_exchange(loop: FederatedLoop, update: ClientUpdate, measured: Measurements) -> None:
    """Add an exchange to the record of a client's round, which all tables and values of its work are made of.

    `steps` counts all optimizer steps. `move` is how far the client has moved, empty for a client without samples,
    which does not train.
    """
    measured["steps"] = measured.get("steps", 0) + steps_of(update)
    measured["move"] = measured.get("move", {})
    if loop.data.view(update.client_id, loop.server.round_idx).size():
        measured["move"] = moved(loop.client, measured["move"])


@torch.no_grad()
def moved(client: ClientModule, before: State) -> State:
    """Add how far the client in the module itself has moved in an exchange to its moves in those before.

    Args:
        client: at the end of the exchange; where it received no weights nothing is added.
        before: sum of its moves, float64 by name; empty in the first exchange.
    """
    params = client.params()
    move = {name: params[name].double() - value.double() for name, value in client.received.items()}
    return add(before, move) if before and move else move or before


def length(move: State, order: float) -> float | None:
    """Return the norm of a move, or None without a move."""
    if not move:
        return None
    return float(weight_divergence(move, zeros_like(move), order))
