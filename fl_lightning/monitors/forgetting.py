"""Monitors of what clients learn and forget in local training."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning import LightningModule, Trainer
from torch import Tensor

from fl_lightning.engines.inspection import DEPLOYED, Moment
from fl_lightning.federation.loop import FederatedLoop
from fl_lightning.functional.accuracy import class_weighted_accuracy, group_means
from fl_lightning.functional.classes import class_split, in_local, out_local
from fl_lightning.functional.forgetting import forgetting_degree
from fl_lightning.monitors.monitor import Measurements, Monitor, add_to_row, ended, log_known, log_means, value_or_none
from fl_lightning.types import ClientUpdate
from fl_lightning.utils.settings import check_at_least


class ForgettingMonitor(Monitor):
    r"""Measures the class-wise accuracies of every client before and after local training, and what they forget.

    The monitor logs these means over the clients of a round:

    - `local/forgetting_degree`: the forgetting degree τ, the mean over the classes where it is defined, and
      `local/forgetting_degree/missing`, … over each client's missing, non-dominant and dominant classes.
    - `local/acc_in_local` and `local/acc_out_local`: the in- and out-local accuracy of the trained model, also `…/std`
      and `…/weighted` by samples, and `…/received` of the received model.
    - `global/acc_in_local`, …: the same of the new global model, for the pooled classes of the round's clients.

    `client_classwise.csv` has A_c in a row for each round, client and moment: `received`, `trained`, and with `epochs`
    the number of each local epoch.

    The trained model is what the client would deploy after its training. That is the trained weights w_i, as in both
    papers, except for methods that deploy something else (`ClientModule.deployed`: FedRoD both heads, Ditto its own
    model). The received model and the models of the epochs are the client's weights at that moment.

    Source: FedKA, Eq. 1 (τ); Lee et al. 2022, arXiv:2106.03097, Definition 1, Figs. 4 and 6.

    Args:
        split: Name of the split of the accuracies. None is `test`, or `val` without test samples.
        samples: Number of samples of the split that are measured, drawn once for the run. None is all.
        epochs: Whether the clients are measured after every local epoch, too.
        gamma: Least share of a dominant class, ≥ 0. None is 0.5 / C.
        every: Number of rounds from one measured round to the next.
        clients: Ids of the clients that are measured. None is the whole cohort.
        dirpath: Folder of the table. None is the folder of the Trainer's first logger, and no folder without a logger.
    """

    instead = "take GroupMetrics, which takes your validation_step, or local/KEY (model.evaluate_clients_every)"

    def __init__(
        self,
        split: str | None = None,
        samples: int | None = None,
        *,
        epochs: bool = False,
        gamma: float | None = None,
        every: int = 1,
        clients: Sequence[int] | None = None,
        dirpath: str | Path | None = None,
    ) -> None:
        super().__init__(every=every, clients=clients, dirpath=dirpath)
        check_at_least(1, "None measures on all", samples=samples)
        check_at_least(0, gamma=gamma)
        self.split = split
        self._split = ""
        self.samples = samples
        self.epochs = epochs
        self.gamma = gamma
        self._pooled: Tensor | None = None

    def begin(self, trainer: Trainer, loop: FederatedLoop) -> None:
        names = self.check_classes(loop).class_names
        self._split = loop.data.measured_split(self.split)
        self.open_table(trainer, "client_classwise.csv", ("client", "moment", *names))

    def start(self, loop: FederatedLoop, client_id: int) -> Measurements:
        counts = loop.data.view(client_id, loop.server.round_idx).label_counts
        received = self._by_class(loop, loop.evaluation.inspection.received)
        return {"counts": counts, "moments": {"received": received}}

    def epoch_end(self, loop: FederatedLoop, client_id: int, epoch: int, measured: Measurements) -> None:
        if self.epochs:
            measured["moments"][epoch] = self._by_class(loop, ended(loop, client_id, f"epoch {epoch}"))

    def end(self, loop: FederatedLoop, update: ClientUpdate, measured: Measurements) -> None:
        measured["moments"]["trained"] = self._by_class(loop, ended(loop, update.client_id, DEPLOYED))

    def _by_class(self, loop: FederatedLoop, moment: Moment) -> Tensor:
        """Return the accuracies of the classes at a moment, (C,)."""
        return loop.evaluation.inspection.scores(moment, self._split, self.samples)[:-2]

    def summarise(self, trainer: Trainer, loop: FederatedLoop, measured: Mapping[int, Measurements]) -> None:
        if not measured:
            return
        self._add_table_rows(trainer, measured)
        counts = torch.stack([values["counts"] for values in measured.values()])
        received = torch.stack([values["moments"]["received"] for values in measured.values()])
        trained = torch.stack([values["moments"]["trained"] for values in measured.values()])
        self._log_degrees(loop, counts=counts, received=received, trained=trained)
        self._log_local_accuracies(loop, counts=counts, received=received, trained=trained)
        self._pooled = counts.sum(0)

    def _add_table_rows(self, trainer: Trainer, measured: Mapping[int, Measurements]) -> None:
        """Add the accuracies of all clients and moments to the table."""
        rows: list[list[Any]] = []
        for client_id, values in measured.items():
            for moment, by_class in values["moments"].items():
                rows.append([client_id, moment, *values_or_none(by_class)])
        self.add_rows(trainer, rows)

    def _log_degrees(self, loop: FederatedLoop, *, counts: Tensor, received: Tensor, trained: Tensor) -> None:
        """Log the forgetting degrees of the clients.

        Args:
            loop: The federation.
            counts: The training samples of each class, (K, C).
            received: The accuracies of the received model, (K, C).
            trained: The accuracies of the trained models, (K, C).
        """
        degree = forgetting_degree(received, trained).masked_fill(received == 0, torch.nan)
        # A client without samples did not train.
        degree = degree.masked_fill(counts.sum(1, keepdim=True) == 0, torch.nan)
        gamma = 0.5 / counts.shape[1] if self.gamma is None else self.gamma
        key = "local/forgetting_degree"
        log_means(loop, {key: values_or_none(degree.nanmean(1))}, deviations=False)
        for name, of_clients in group_means(degree, class_split(counts, gamma))._asdict().items():
            log_means(loop, {f"{key}/{name}": values_or_none(of_clients)}, deviations=False)

    def _log_local_accuracies(self, loop: FederatedLoop, *, counts: Tensor, received: Tensor, trained: Tensor) -> None:
        """Log the in- and out-local accuracies of the clients, with the arguments of `_log_degrees`."""
        for side, weights in (("in", in_local(counts)), ("out", out_local(counts))):
            name = f"local/acc_{side}_local"
            now = class_weighted_accuracy(trained, weights)
            before = class_weighted_accuracy(received, weights)
            log_means(loop, {name: values_or_none(now), f"{name}/received": values_or_none(before)})
            sizes = counts.sum(1).double().masked_fill(now.isnan(), 0.0)
            weighted = float(now.nan_to_num() @ sizes / sizes.sum())
            log_known(loop, {f"{name}/weighted": value_or_none(weighted)})

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_epoch_start(trainer, pl_module)
        self._pooled = None

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Add the new global model's accuracies for the pooled classes to the round's row."""
        if self._pooled is None or not isinstance(pl_module, FederatedLoop) or trainer.sanity_checking:
            return
        accuracy = pl_module.recorder.class_accuracy
        if accuracy is None:
            return
        scope = pl_module.data.evaluated_prefix
        for side, weights in (("in", in_local(self._pooled)), ("out", out_local(self._pooled))):
            value = float(class_weighted_accuracy(accuracy, weights))
            add_to_row(pl_module, {f"{scope}/acc_{side}_local": value_or_none(value)})


class PersonalisedAccuracy(Monitor):
    """Measures the accuracy on each client's own test samples before local training (initial) and after it.

    The monitor logs means over the clients of a round, each with `/std`: `local/initial` of the received model, and
    `local/personalised` of what the client would deploy after its training (`ClientModule.deployed`, for most methods
    the trained weights). With `train` it logs `local/train`, the accuracy of the latter on the client's own training
    samples.

    Source: Yao and Sun 2020, arXiv:2005.12657, Table 1; Lee et al. 2022, arXiv:2106.03097, App. H (`local/train`).

    Args:
        train: Whether the accuracy on the clients' training samples is measured, too.
        every: Number of rounds from one measured round to the next.
        clients: Ids of the clients that are measured. None is the whole cohort.
    """

    instead = "take local/KEY and local/tuned/KEY (model.evaluate_clients_every, model.fine_tuning)"

    def __init__(self, train: bool = False, every: int = 1, clients: Sequence[int] | None = None) -> None:
        super().__init__(every=every, clients=clients)
        self.train = train

    def begin(self, trainer: Trainer, loop: FederatedLoop) -> None:
        self.check_classes(loop)

    def start(self, loop: FederatedLoop, client_id: int) -> Measurements:
        inspection = loop.evaluation.inspection
        return {"initial": float(inspection.own_scores(inspection.received, client_id)[-2])}

    def end(self, loop: FederatedLoop, update: ClientUpdate, measured: Measurements) -> None:
        inspection = loop.evaluation.inspection
        moment = ended(loop, update.client_id, DEPLOYED)
        measured["personalised"] = float(inspection.own_scores(moment, update.client_id)[-2])
        if self.train:
            measured["train"] = float(inspection.own_scores(moment, update.client_id, "train")[-2])

    def summarise(self, trainer: Trainer, loop: FederatedLoop, measured: Mapping[int, Measurements]) -> None:
        names = ["initial", "personalised"]
        if self.train:
            names.append("train")
        for name in names:
            log_means(loop, {f"local/{name}": [value_or_none(values[name]) for values in measured.values()]})


def values_or_none(numbers: Tensor) -> list[float | None]:
    """Return accuracies or what is made of them, (n,), with None for NaN, which has no value."""
    return [value_or_none(number) for number in numbers.tolist()]
