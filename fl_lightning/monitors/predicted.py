"""Monitor of the class distributions that a server reads from its clients' predictions."""

from collections.abc import Mapping
from typing import Any

import torch
from pytorch_lightning import Trainer
from torch import Tensor

from fl_lightning.federation.loop import FederatedLoop
from fl_lightning.functional.classes import estimated_distribution
from fl_lightning.functional.state import to_float32
from fl_lightning.monitors.monitor import Measurements, Monitor
from fl_lightning.types import ClientUpdate


class PredictedDistribution(Monitor):
    r"""Writes the mean prediction $p = \frac{1}{K} \sum_i \mathrm{softmax}(f(x_i))$ of each client on the transfer set.

    The predictions (EPD) are of the weights after local training, before they learn from the others.
    `predicted_distribution.csv` has a row for each round and client, with a column for each class.

    Source: Seyedmohammadi et al. 2024, arXiv:2403.11892 (KnFu), Eq. 5 and Fig. 1.

    Args:
        every: Number of rounds from one measured round to the next.
        clients: Ids of the clients that are measured. None is the whole cohort.
        dirpath: Folder of the table. None is the folder of the Trainer's first logger, and no folder without a logger.
    """

    instead = "take model.metrics with an object that keeps the outputs"

    def begin(self, trainer: Trainer, loop: FederatedLoop) -> None:
        names = self.check_classes(loop).class_names
        loop.data.measured_split("transfer")
        self.open_table(trainer, "predicted_distribution.csv", ("client", *names))

    def on_client_end(self, trainer: Trainer, loop: FederatedLoop, update: ClientUpdate) -> None:
        """Measure a client when its first exchange ends."""
        measured = self.under_way.get(update.client_id)
        if measured is not None and not self.exchange:
            inspection = loop.evaluation.inspection

            def probabilities(batch: Any) -> Tensor:
                return to_float32(loop.client(batch[0])).softmax(1).cpu()

            parts = inspection.over_split("transfer", None, probabilities)
            measured["predictions"] = torch.cat(parts)
        super().on_client_end(trainer, loop, update)

    def summarise(self, trainer: Trainer, loop: FederatedLoop, measured: Mapping[int, Measurements]) -> None:
        rows: list[list[float]] = []
        for client_id, values in measured.items():
            rows.append([client_id, *estimated_distribution(values["predictions"]).tolist()])
        self.add_rows(trainer, rows)
