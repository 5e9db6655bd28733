"""Callback that evaluates the global model on groups of clients."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pytorch_lightning import LightningModule, Trainer
from torchmetrics import MetricCollection

from fl_lightning.client.checks import check_outputs
from fl_lightning.data.schema import shown
from fl_lightning.distributed import current_communicator
from fl_lightning.engines.deployed import PassLoader, own_step
from fl_lightning.federation.loop import FederatedLoop
from fl_lightning.metrics.user_metrics import Metrics, alone, as_collection, update, values_of
from fl_lightning.monitors.monitor import Monitor, add_to_row
from fl_lightning.reports.terminal import print_table
from fl_lightning.types import Batch
from fl_lightning.utils.batches import batch_length
from fl_lightning.utils.settings import find_client


class GroupMetrics(Monitor):
    """Evaluates torchmetrics objects on the test samples of groups of clients, with the global model of every round.

    The callback logs `global/NAME/GROUP`, beside the `global/NAME` of all samples that `model.metrics` gives, of the
    same weights. `groups.csv` has a row for each evaluated round and group: its test samples and every value. The test
    samples of a client are those of its own test split.

    Args:
        groups: The clients by name of a group. Whole numbers are ids, and texts are names of owners (`data.by`).
        metrics: Metrics of predictions and targets. None is `model.metrics`. Without these it is the own
            `validation_step` of a user's module, whose values are `global/KEY/GROUP`.
        every: Number of rounds from one measured round to the next.
        dirpath: Folder of the table. None is the folder of the Trainer's first logger, and no folder without a logger.
    """

    def __init__(
        self,
        groups: dict[str, list[str | int]],
        metrics: Metrics | None = None,
        every: int = 1,
        dirpath: str | Path | None = None,
    ) -> None:
        super().__init__(every=every, dirpath=dirpath)
        self.groups = groups
        self.metrics = as_collection(metrics)
        self._clients: dict[str, list[int]] = {}
        self._last: dict[str, dict[str, float]] = {}

    def begin(self, trainer: Trainer, loop: FederatedLoop) -> None:
        """Check groups and metrics.

        Raises:
            ValueError: A group has no clients or an unknown one, there are no metrics, outputs or test samples.
        """
        names = loop.data.client_names
        self._clients = {name: client_ids(clients, names, group=name) for name, clients in self.groups.items()}
        if self._collection(loop) is not None:
            check_outputs(loop.client, "GroupMetrics", remedy="leave the monitor out")
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
        everywhere: dict[str, dict[str, float]] = {}
        for part in parts:
            everywhere |= part
        self._last = {name: everywhere[name] for name in self.groups}
        self._add_table_rows(trainer)
        for name, values in self._last.items():
            add_to_row(pl_module, {f"global/{key}/{name}": v for key, v in values.items() if key != SAMPLES})
        pl_module.recorder.keep_round(trainer.current_epoch)

    def _add_table_rows(self, trainer: Trainer) -> None:
        """Add the last values of all groups to the table."""
        columns = self._columns()
        if self._table is None:
            self.open_table(trainer, "groups.csv", ("group", *columns))
        rows: list[list[Any]] = []
        for name, values in self._last.items():
            rows.append([name, *map(values.get, columns)])
        self.add_rows(trainer, rows)

    def _columns(self) -> list[str]:
        """Return the names of the last values. A group without test samples lacks some."""
        columns: list[str] = []
        for values in self._last.values():
            columns += [column for column in values if column not in columns]
        return columns

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._last and trainer.is_global_zero:
            names = self._columns()
            rows: list[list[str]] = []
            for group, values in self._last.items():
                rows.append([group, *(f"{values[name]:.6g}" if name in values else "" for name in names)])
            print_table("Groups of clients, global model", ["group", *names], rows)

    def _evaluated(self, loop: FederatedLoop, clients: Sequence[int]) -> dict[str, float]:
        """Evaluate the global model on the test samples of these clients."""
        metrics = self._collection(loop)
        if metrics is None:
            return self._of_own_steps(loop, clients)
        return self._of_metrics(loop, clients, alone(metrics).to(loop.device))

    def _of_metrics(self, loop: FederatedLoop, clients: Sequence[int], metrics: MetricCollection) -> dict[str, float]:
        """Return the number of samples and the values of metrics."""
        inspection = loop.evaluation.inspection

        def counted(batch: Any) -> int:
            update(metrics, batch, loop.client)
            return batch_length(batch)

        samples = sum(inspection.over(batches_of(loop, clients), counted))
        found = {SAMPLES: float(samples)}
        if samples:
            for name, value in values_of(metrics.compute(), "", inspection.class_names).items():
                found[name.removeprefix("/")] = value
        return found

    def _of_own_steps(self, loop: FederatedLoop, clients: Sequence[int]) -> dict[str, float]:
        """Return the number of samples and what the module's own step and hooks log."""
        how = loop.evaluation.of_clients.how("validation")
        num_loaders = max(1, len(loop.data.split("test").loader_sizes))
        loaders = [loader_of(loop, clients, loader_idx) for loader_idx in range(num_loaders)]
        with loop.evaluation.inspection.look():
            score = loop.engine.own_steps.score(client_id=clients[0], loaders=loaders, how=how)
        if SAMPLES in score.logged:
            raise ValueError(
                f"GroupMetrics counts samples under {SAMPLES!r}, which the module logs too; log it by another name"
            )
        samples = float(score.num_samples)
        return {SAMPLES: samples, **score.logged} if samples else {SAMPLES: samples}

    def _collection(self, loop: FederatedLoop) -> MetricCollection | None:
        """Return the metrics, or None if the module's own step is taken.

        Raises:
            ValueError: There is neither.
        """
        chosen = loop.metrics if self.metrics is None else self.metrics
        if chosen is None and own_step(loop.client.module, "validation") is None:
            raise ValueError(
                "GroupMetrics needs metrics or a module with a validation_step, got none; give it metrics=, or set "
                "model.metrics"
            )
        return chosen


def loader_of(loop: FederatedLoop, clients: Sequence[int], loader_idx: int) -> PassLoader:
    """Return a loader of the test samples of some clients, one client after the other.

    Args:
        loop: The federation.
        clients: Ids of the clients.
        loader_idx: Index of the loader of the data whose samples are taken.
    """

    def read() -> Iterator[Batch]:
        return loop.engine.local.transfer.each(batches_of(loop, clients, loader_idx), loader_idx)

    sizes: list[int] = []
    for client_id in clients:
        view = loop.data.view(client_id, loop.server.round_idx)
        sizes.append(view.by_loader("test")[loader_idx].size("test"))
    return PassLoader(read, sizes=sizes, batch_size=loop.data.eval_batch_size)


def batches_of(loop: FederatedLoop, clients: Sequence[int], loader_idx: int | None = None) -> Iterator[Batch]:
    """Yield the batches of test samples of some clients, one client after the other.

    Args:
        loop: The federation.
        clients: Ids of the clients.
        loader_idx: Index of the loader whose samples are taken. None takes those of all loaders.
    """
    for client_id in clients:
        view = loop.data.view(client_id, loop.server.round_idx)
        if loader_idx is not None:
            view = view.by_loader("test")[loader_idx]
        yield from view.batches("test", batch_size=loop.data.eval_batch_size)


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
    found: list[int] = []
    for client in clients:
        client_id = find_client(client, names, len(names)) if isinstance(client, str) else client
        found.append(-1 if client_id is None else client_id)
    if not found or any(not 0 <= client_id < len(names) for client_id in found):
        has_owners = names != [str(client_id) for client_id in range(len(names))]
        known = f" or of {shown(names)}" if has_owners else ""
        raise ValueError(f"a group of clients must name some in [0, {len(names)}){known}, got {clients} for {group!r}")
    return found


SAMPLES = "samples"
"""Name of the column of the number of samples."""
