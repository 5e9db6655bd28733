"""Callback that evaluates the global model on groups of clients."""

from collections.abc import Sequence
from pathlib import Path

from pytorch_lightning import LightningModule, Trainer
from torchmetrics import MetricCollection

from fl_lightning.data.schema import shown
from fl_lightning.distributed import current_communicator
from fl_lightning.federation.loop import FederatedLoop
from fl_lightning.metrics.user_metrics import Metrics, alone, as_collection, update, values_of
from fl_lightning.monitors.monitor import Monitor, add_to_row
from fl_lightning.reports.terminal import print_table


class GroupMetrics(Monitor):
    """Evaluates torchmetrics objects on the test samples of groups of clients, with the global model of every round.

    Logged: `global/NAME/GROUP`, beside the `global/NAME` of all samples that `model.metrics` gives, of the same weights
    (with FedEXP the mean of the last two rounds'). `groups.csv` has a row for each evaluated round and group: its test
    samples and every value. A client's test samples are those of its own test split.

    Args:
        groups: clients by name of a group: whole numbers are ids, and texts are names of owners (`data.by`).
        metrics: of predictions and targets; None: `model.metrics`.
        every: measure every so many rounds.
        dirpath: folder of the table; None: that of the Trainer's first logger (no logger: none).
    """

    def __init__(
        self,
        groups: dict[str, list[str | int]],
        metrics: Metrics | None = None,
        every: int = 1,
        dirpath: str | Path | None = None,
    ) -> None:
        super().__init__(every, None, dirpath)
        self.groups = groups
        self.metrics = as_collection(metrics)
        self._clients: dict[str, list[int]] = {}
        self._last: dict[str, dict[str, float]] = {}

    def begin(self, trainer: Trainer, loop: FederatedLoop) -> None:
        """Check groups and metrics.

        Raises:
            ValueError: a group without clients or with one that there is not, no metrics, or no test samples.
        """
        names = loop.data.client_names
        self._clients = {name: client_ids(clients, names, group=name) for name, clients in self.groups.items()}
        self._collection(loop)
        loop.data.split("test")
        self._last = {}

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Evaluate the groups, each on one process."""
        if not isinstance(pl_module, FederatedLoop) or not self.measures(trainer):
            return
        if trainer.sanity_checking or trainer.state.fn != "fit":
            return
        processes = current_communicator(pl_module.device)
        mine = list(self.groups)[processes.rank :: processes.world]
        with pl_module.evaluation.evaluated_model():
            parts = processes.gather({name: self._evaluated(pl_module, self._clients[name]) for name in mine})
        values_by_key = {name: values for part in parts for name, values in part.items()}
        self._last = {name: values_by_key[name] for name in self.groups}
        columns = list(dict.fromkeys(column for values in self._last.values() for column in values))
        if self._table is None:
            self.open_table(trainer, "groups.csv", ("group", *columns))
        self.add_rows(trainer, ([name, *map(values.get, columns)] for name, values in self._last.items()))
        for name, values in self._last.items():
            add_to_row(pl_module, {f"global/{key}/{name}": v for key, v in values.items() if key != SAMPLES})
        pl_module.recorder.keep_round(trainer.current_epoch)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._last and trainer.is_global_zero:
            names = list(next(iter(self._last.values())))
            rows = [[group, *(f"{values[name]:.6g}" for name in names)] for group, values in self._last.items()]
            print_table("Groups of clients, global model", ["group", *names], rows)

    def _evaluated(self, loop: FederatedLoop, clients: Sequence[int]) -> dict[str, float]:
        """Evaluate the global model on the test samples of these clients."""
        inspection = loop.evaluation.inspection
        metrics = alone(self._collection(loop)).to(loop.device)
        samples = 0
        for client_id in clients:
            view = loop.data.view(client_id, loop.server.round_idx)
            batches = view.batches("test", batch_size=loop.data.eval_batch_size)
            inspection.over(batches, lambda batch: update(metrics, batch, loop.client))
            samples += view.size("test")
        values = values_of(metrics.compute(), "", inspection.class_names) if samples else {}
        return {SAMPLES: float(samples), **{name.removeprefix("/"): value for name, value in values.items()}}

    def _collection(self, loop: FederatedLoop) -> MetricCollection:
        chosen = loop.metrics if self.metrics is None else self.metrics
        if chosen is None:
            raise ValueError("GroupMetrics needs metrics, got none; give it metrics=, or set model.metrics")
        return chosen


def client_ids(clients: Sequence[int | str], names: Sequence[str], *, group: str) -> list[int]:
    """Return the ids of clients that are given by id or by the name of their owner.

    Args:
        clients: The clients.
        names: Names of all clients, by id.
        group: The name of the group, for errors.

    Raises:
        ValueError: There are no clients, or there is no such client.

    >>> client_ids([1, "Aachen"], ["Aachen", "Bonn"], group="west")
    [1, 0]
    """
    numbers = {name: client_id for client_id, name in enumerate(names)}
    found = [client if isinstance(client, int) else numbers.get(client, -1) for client in clients]
    if not found or any(not 0 <= client_id < len(names) for client_id in found):
        known = "" if names == [str(client_id) for client_id in range(len(names))] else f" or of {shown(names)}"
        raise ValueError(f"a group of clients must name some in [0, {len(names)}){known}, got {clients} for {group!r}")
    return found


SAMPLES = "samples"
"""Name of the column of the number of samples."""
