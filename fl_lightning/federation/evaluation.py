"""Evaluation of the global model: class by class for a classifier, by the module's own steps otherwise."""

import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torchmetrics import MetricCollection

from fl_lightning.client.checks import num_arguments
from fl_lightning.client.hooks import hooks, overridden
from fl_lightning.client.services import ClientServices, attach_services
from fl_lightning.data import FederatedDataModule
from fl_lightning.data.loaders import EMPTY_BATCH
from fl_lightning.distributed import Communicator
from fl_lightning.engines.deployed import laid_out
from fl_lightning.engines.inspection import Inspection, class_names
from fl_lightning.engines.sequential import SequentialEngine
from fl_lightning.federation.recorder import Recorder
from fl_lightning.federation.server import Server
from fl_lightning.functional.accuracy import class_accuracy
from fl_lightning.functional.state import to_float32, to_host
from fl_lightning.members.structure import HeldEntries
from fl_lightning.metrics import ClassifierScores
from fl_lightning.metrics.reported import alone, computed, update, values_of
from fl_lightning.types import Broadcast, ClientJob, ClientScore, Engine, State

PASS_HOOKS = frozenset(f"on_{kind}_{end}" for kind in ("validation", "test", "predict") for end in ("start", "end"))
"""A module's first and last hook of a pass of the Trainer's."""


class Evaluation:
    """Evaluates the global model, one pass over a split at a time.

    Args:
        engine: has the client module, the global weights in it and the transfer of batches.
        clients: tests what clients would deploy.
        evaluated: `weights -> ` those that are evaluated in their place.
        data: of the federation.
        services: attached to the client's modules; they take what is logged in evaluation.
        recorder: is told the class accuracies.
        communicator: to add up the processes' counts.
        metrics: the user's own, evaluated besides; or None.
        channels_last: whether batches of images (B, C, H, W) are laid out so for the net.

    Attributes:
        before: all entries while a pass is under way, else None.
        inspection: evaluates clients in the middle of a round, for monitors.
    """

    def __init__(
        self,
        engine: SequentialEngine,
        clients: Engine,
        evaluated: Callable[[State], State],
        data: FederatedDataModule,
        services: ClientServices,
        recorder: Recorder,
        communicator: Communicator,
        metrics: MetricCollection | None = None,
        channels_last: bool = False,
    ) -> None:
        self.clients, self.client, self.weights, self.modules = clients, engine.client, engine.weights, engine.modules
        self.evaluated, self.data, self.transfer = evaluated, data, engine.local.transfer
        self.services, self.recorder, self.communicator = services, recorder, communicator
        self.metrics, self.inspection = metrics, Inspection(engine, data)
        self.before: HeldEntries | None = None
        self._left: tuple[HeldEntries, HeldEntries] | None = None
        """All entries as a pass has left them, and as they were before it, until the module's last hook of it."""
        self._put_generators_back: Callable[[], None] = nothing
        self._channels_last = channels_last
        classifies = self.client.module is None and data.num_classes is not None
        self._several = bool(data.further_validation)
        device = communicator.device
        self._accuracy = ClassifierScores(data.num_classes or 0).to(device) if classifies else None

    def start(self) -> None:
        """Begin a pass: load the weights that are evaluated, if they are not the global ones."""
        weights = self.weights
        self.hold()
        weights.non_persistent.set_back({})
        self.data.to(self.communicator.device, early=not self.transfer.moves)
        self.recorder.evaluated(None)
        self.services.logged.clear()
        if self._accuracy is not None:
            self._accuracy.reset()
        if self.metrics is not None:
            self.metrics.reset()
        self._load_evaluated()

    def _load_evaluated(self) -> None:
        """Load the weights that are evaluated, if they are not the global ones.

        `restore` takes them back.
        """
        weights = self.weights
        if not weights.shared:
            return  # there is no global model
        live = weights.live(weights.shared)
        evaluated = self.evaluated(live)
        if evaluated is not live:
            weights.load(evaluated)

    @contextmanager
    def evaluated_model(self) -> Iterator[None]:
        """Context in which the module is the global model as it is evaluated.

        A pass may still want its last hook.
        """
        before, put_generators_back = HeldEntries(self.weights), keep_generators(self.communicator.device)
        try:
            self._load_evaluated()
            yield
        finally:
            before.restore()
            put_generators_back()

    def hold(self) -> None:
        """Record what `finish` puts back: all entries, and the random generators."""
        self.restore()
        if not self.weights.shared and self.client.module is None:
            return  # nothing is evaluated
        self.before = HeldEntries(self.weights)
        own = self.client.module is not None or self.metrics is not None or self.transfer.hooked
        self._put_generators_back = keep_generators(self.communicator.device, own)

    def step(self, kind: str, batch: Any, batch_idx: int, dataloader_idx: int) -> Any:
        """Evaluate one batch, by the net's logits or by the module's own `validation_step` or `test_step`."""
        if batch is EMPTY_BATCH or not self.weights.shared:
            return None
        batch, module = self.transfer(batch), self.client.module
        if self._accuracy is not None:
            x, y = batch
            logits = self.client(laid_out(x, self._channels_last))
            self._accuracy.update(logits, y)
            if self.metrics is not None:
                self.metrics.update(to_float32(logits), y)
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
            return self.client(laid_out(batch[0], self._channels_last))
        return self._call(module.predict_step, batch, batch_idx, dataloader_idx)

    def _call(self, step: Callable[..., Any], *arguments: Any) -> Any:
        """Call a step of the wrapped module with as many of the arguments as it takes, and logging attached."""
        with attach_services(self.modules, self.services.methods):
            return step(*arguments[: num_arguments(step)])

    def restore(self) -> None:
        """Put the entries back that a pass has changed (also one that was broken off)."""
        if self.before is not None:
            self.before.restore()
        self.before = self._left = None

    def finish(self) -> None:
        """Put everything back that a pass has changed.

        Its metric objects have been computed.
        """
        self.restore()
        self._put_generators_back()
        self._put_generators_back = nothing

    @contextmanager
    def around(self, hook: str) -> Iterator[None]:
        """Context of the module's first and last hook of a pass.

        The last one may undo what the first did, so that it finds the entries as the pass has left them.
        """
        first = hook.endswith("_start")
        if first and hook != "on_predict_start":
            self.start()
        elif first:
            self.hold()
        elif self._left is not None:
            left, self.before = self._left
            left.restore()
        yield
        if not first:
            self.finish()

    @cached_property
    def class_names(self) -> list[str]:
        """Names of the classes, for log keys and pictures."""
        return class_names(self.data)

    def end(self, prefix: str, last_hook: str) -> dict[str, float]:
        """End a pass: put back what it has changed and return its values by log key.

        Args:
            prefix: of the keys.
            last_hook: name of the module's hook that follows within `around`.
        """
        values, before = self._values(prefix), self.before
        if before is not None and hooks(self.modules, last_hook):
            left = HeldEntries(self.weights)
            self.finish()
            self._left = left, before
        else:
            self.finish()
        return values

    def _values(self, prefix: str) -> dict[str, float]:
        """Values of a pass by log key."""
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
        metrics = None if self.metrics is None else alone(self.metrics)
        jobs = self._deployed_jobs(round_idx, server, initial_personal)
        put_generators_back = keep_generators(self.communicator.device)
        scores, values = list[ClientScore](), list[dict[str, float]]()
        try:
            how = self.data.eval_batch_size, metrics, self._channels_last
            with closing(self.clients.evaluate(jobs, *how)) as found:
                for score in found:
                    scores.append(score)
                    values.append(values_of(score.metrics, "local", self.class_names))
        finally:
            put_generators_back()
        counts = to_host([torch.as_tensor(n) for score in scores for n in (score.correct, score.num_samples)])
        mine = [(score.client_id, *counts[2 * i : 2 * i + 2]) for i, score in enumerate(scores)]
        everywhere = self.communicator.gather((mine, values))
        hits = torch.zeros(2, server.num_clients, dtype=torch.float64)
        for client_id, *count in (one for part, _ in everywhere for one in part):
            hits[:, client_id] = torch.tensor(count, dtype=torch.float64)
        means = mean_values(one for _, part in everywhere for one in part)
        return {"local/alma": float(class_accuracy(hits).nanmean()), **means}

    def _deployed_jobs(
        self, round_idx: int, server: Server, initial_personal: Callable[[int], State | None]
    ) -> Iterator[ClientJob]:
        """Make the job of every client of this process that has test samples."""
        store, start = server.store, self.weights.snapshot(self.weights.shared)
        for client_id in self.communicator.assign_clients(range(server.num_clients), server.size, store.owners):
            local = self.data.view(client_id, round_idx)
            if local.size("test"):
                memory, personal = store.record(client_id)
                personal = initial_personal(client_id) if personal is None else personal
                yield ClientJob(client_id, Broadcast(round_idx, "deployed", None), local, memory, personal, start)


def mean_values(rows: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Take the mean of each name's values.

    A value that is not defined for a client is left out.

    >>> mean_values([{"recall": 0.5}, {"recall": math.nan}, {"recall": 1.0}])
    {'recall': 0.75}
    """
    columns: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        for name, value in row.items():
            columns[name] += [] if math.isnan(value) else [value]
    return {name: math.fsum(column) / len(column) if column else math.nan for name, column in columns.items()}


def nothing() -> None:
    """Put no random generator back."""


def keep_generators(device: torch.device, all_of_them: bool = True) -> Callable[[], None]:
    """Record the states of the global random generators.

    Returns what puts them back.

    Args:
        device: whose generator of torch is noted, besides the CPU's.
        all_of_them: numpy's and Python's as well, which takes some 80 µs.
    """
    states: list[tuple[Callable[[Any], Any], Any]] = [(torch.set_rng_state, torch.get_rng_state())]
    if device.type == "cuda":
        states.append((partial(torch.cuda.set_rng_state, device=device), torch.cuda.get_rng_state(device)))
    if all_of_them:
        states += [(random.setstate, random.getstate()), (np.random.set_state, np.random.get_state())]

    def put_back() -> None:
        for put, state in states:
            put(state)

    return put_back
