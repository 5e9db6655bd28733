"""Evaluation of the global model: class by class for a classifier, by the module's own steps otherwise."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torchmetrics import MetricCollection

from fl_lightning.client.checks import num_arguments
from fl_lightning.client.hooks import overridden
from fl_lightning.client.services import ClientServices, attach_services
from fl_lightning.data import FederatedDataModule
from fl_lightning.data.loaders import EMPTY_BATCH
from fl_lightning.distributed import Communicator
from fl_lightning.federation.engine import SequentialEngine
from fl_lightning.federation.inspection import Inspection, class_names
from fl_lightning.federation.recorder import Recorder
from fl_lightning.federation.reported import alone, computed, update, values_of
from fl_lightning.federation.server import Server
from fl_lightning.functional.state import raised
from fl_lightning.metrics import ALMA, ClassifierScores
from fl_lightning.types import Broadcast, ClientJob, State

IMAGES = 4
"""Dimensions of a batch of images."""


class Evaluation:
    """Evaluates the global model, one pass over a split at a time.

    Args:
        engine: has the client module, the global weights in it and the transfer of batches.
        evaluated: `weights -> ` those that are evaluated in their place.
        data: of the federation.
        services: attached to the client's modules; they take what is logged in evaluation.
        recorder: is told the class accuracies.
        communicator: to add up the processes' counts.
        metrics: the user's own, evaluated besides; or None.
        channels_last: whether batches of images (B, C, H, W) are laid out so for the net.

    Attributes:
        before: the global weights while others are evaluated in their place, else None.
        inspection: evaluates clients in the middle of a round, for monitors.
    """

    def __init__(
        self,
        engine: SequentialEngine,
        evaluated: Callable[[State], State],
        data: FederatedDataModule,
        services: ClientServices,
        recorder: Recorder,
        communicator: Communicator,
        metrics: MetricCollection | None = None,
        channels_last: bool = False,
    ) -> None:
        self.engine, self.client, self.weights, self.modules = engine, engine.client, engine.weights, engine.modules
        self.evaluated, self.data, self.transfer = evaluated, data, engine.local.transfer
        self.services, self.recorder, self.communicator = services, recorder, communicator
        self.metrics, self.inspection = metrics, Inspection(engine, data)
        self.before: State | None = None
        self._channels_last = channels_last
        classifies = self.client.module is None and data.num_classes is not None
        self._several = bool(data.further_validation)
        device = communicator.device
        self._accuracy = ClassifierScores(data.num_classes or 0).to(device) if classifies else None

    def start(self) -> None:
        """Begin a pass: load the weights that are evaluated, if they are not the global ones."""
        weights = self.weights
        self.restore()
        weights.transient.load({})
        self.data.to(self.communicator.device, early=not self.transfer.moves)
        self.recorder.evaluated(None)
        self.services.logged.clear()
        if self._accuracy is not None:
            self._accuracy.reset()
        if self.metrics is not None:
            self.metrics.reset()
        self._load_evaluated()

    def _load_evaluated(self) -> None:
        """Load the weights that are evaluated, if they are not the global ones; `restore` takes them back."""
        weights = self.weights
        if not weights.shared:
            return  # there is no global model
        live = weights.live(weights.shared)
        evaluated = self.evaluated(live)
        if evaluated is not live:
            self.before = weights.snapshot(weights.shared)
            weights.load(evaluated)

    @contextmanager
    def evaluated_model(self) -> Iterator[None]:
        """Context in which the module is the global model as it is evaluated."""
        try:
            self._load_evaluated()
            yield
        finally:
            self.restore()

    def step(self, kind: str, batch: Any, batch_idx: int, dataloader_idx: int) -> Any:
        """Evaluate one batch, by the net's logits or by the module's own `validation_step` or `test_step`."""
        if batch is EMPTY_BATCH or not self.weights.shared:
            return None
        batch, module = self.transfer(batch), self.client.module
        if self._accuracy is not None:
            x, y = batch
            logits = self.client(self._laid_out(x))
            self._accuracy.update(logits, y)
            if self.metrics is not None:
                self.metrics.update(raised(logits), y)
            return None
        if self.metrics is not None:
            update(self.metrics, batch, self.client)
        if module is not None and overridden(module, f"{kind}_step"):
            self.services.begin_batch(batch)
            if self._several:
                self.services.begin_loader(f"/dataloader_idx_{dataloader_idx}" if kind == "validation" else "")
            return self._call(getattr(module, f"{kind}_step"), batch, batch_idx, dataloader_idx)
        return None

    def predict(self, batch: Any, batch_idx: int, dataloader_idx: int) -> Any:
        """Predict one batch: its logits, or what the module's own `predict_step` gives.

        Raises:
            ValueError: where the clients share no weights.
        """
        if not self.weights.shared:
            raise ValueError(
                f"predict needs a global model, but the clients of this {type(self.client).__name__} share no weights; "
                f"run test, which gives the mean accuracy of their own"
            )
        if batch is EMPTY_BATCH:
            return None
        batch, module = self.transfer(batch), self.client.module
        if module is None:
            return self.client(self._laid_out(batch[0]))
        return self._call(module.predict_step, batch, batch_idx, dataloader_idx)

    def _laid_out(self, x: Any) -> Any:
        """Lay out images (B, C, H, W) as they are evaluated; anything else stays as it is."""
        images = self._channels_last and isinstance(x, Tensor) and x.ndim == IMAGES
        return x.contiguous(memory_format=torch.channels_last) if images else x

    def _call(self, step: Callable[..., Any], *arguments: Any) -> Any:
        """Call a step of the wrapped module with as many of the arguments as it takes, and logging attached."""
        with attach_services(self.modules, self.services.methods):
            return step(*arguments[: num_arguments(step)])

    def restore(self) -> None:
        """Load the global weights again, after a pass with others (also one that was broken off)."""
        if self.before is not None:
            self.weights.load(self.before)
            self.before = None

    @cached_property
    def class_names(self) -> list[str]:
        """Names of the classes, for log keys and pictures."""
        return class_names(self.data)

    def end(self, prefix: str) -> dict[str, float]:
        """End a pass: load the global weights again and return the pass's values by log key."""
        self.restore()
        logged = self.services.logged
        gathered = self.communicator.gather((logged.drain()[1], logged.metric_paths(self.client)))
        values = logged.reduce([rows for rows, _ in gathered], [paths for _, paths in gathered], self.client)
        if not self.weights.shared:
            return values
        if self.metrics is not None:
            values |= values_of(computed(self.metrics), prefix, self.class_names)
        if self._accuracy is None:
            return values
        result = computed(self._accuracy).cpu()
        self.recorder.evaluated(result[:-2])
        *by_class, accuracy, loss = result.tolist()
        own = {f"{prefix}/acc": accuracy, f"{prefix}/loss": loss}
        own |= {f"{prefix}/acc_class/{n}": v for n, v in zip(self.class_names, by_class, strict=True)}
        return own | values

    @torch.no_grad()
    def alma(self, round_idx: int, server: Server, initial_personal: Callable[[int], State | None]) -> dict[str, float]:
        """Evaluate, on each client's own test split, what it would deploy.

        Args:
            round_idx: of the round.
            server: has the store of the clients' memory and personal entries.
            initial_personal: `client_id -> ` its personal entries before its first training.

        Returns:
            Means over all clients by log key: `local/alma` of the accuracy, `local/NAME` of the user's own metrics.
        """
        store, device = server.store, self.communicator.device
        mine = self.communicator.assign_clients(range(server.num_clients), server.size, store.owners)
        before = self.weights.snapshot(self.weights.entries)
        start = {name: before[name] for name in self.weights.shared}
        accuracy, own = ALMA(server.num_clients).to(device), None if self.metrics is None else alone(self.metrics)
        found: dict[int, dict[str, float]] = {}
        try:
            for client_id in mine:
                local = self.data.view(client_id, round_idx)
                if not local.size("test"):
                    continue
                memory, personal = store.record(client_id)
                personal = initial_personal(client_id) if personal is None else personal
                sent = Broadcast(round_idx, "deployed", None)
                self.engine.load_client(ClientJob(client_id, sent, local, memory, personal, start))
                self.client.eval()
                predict = self.client.deployed()
                for x, y in map(self.transfer, local.batches("test", batch_size=self.data.eval_batch_size)):
                    logits = predict(self._laid_out(x))
                    accuracy.update(logits, y, client_id)
                    if own is not None:
                        own.update(raised(logits), y)
                if own is not None:
                    found[client_id] = values_of(own.compute(), "local", self.class_names)
                    own.reset()
        finally:
            self.weights.load(before)
            self.engine.local.restore_modes()
        values = {"local/alma": float(computed(accuracy))}
        return values if own is None else values | self._means(found)

    def _means(self, found: dict[int, dict[str, float]]) -> dict[str, float]:
        """Mean over the clients of all processes, by name; a value that is not defined for a client is left out."""
        columns: dict[str, list[float]] = defaultdict(list)
        for values in (values for part in self.communicator.gather(found) for values in part.values()):
            for name, value in values.items():
                columns[name] += [] if math.isnan(value) else [value]
        return {name: math.fsum(column) / len(column) if column else math.nan for name, column in columns.items()}
