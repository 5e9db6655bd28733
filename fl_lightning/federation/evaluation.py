"""Evaluation of the global model: class by class for a classifier, by the module's own steps otherwise."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from typing import Any

import torch
from pytorch_lightning.utilities.seed import isolate_rng

from fl_lightning.client.checks import num_arguments, runs_foreign_code
from fl_lightning.client.hooks import hooks, overridden
from fl_lightning.client.services import attach_services
from fl_lightning.data.loaders import EMPTY_BATCH
from fl_lightning.engines.deployed import laid_out
from fl_lightning.engines.execution import evaluates_channels_last
from fl_lightning.engines.held_entries import HeldEntries
from fl_lightning.engines.inspection import Inspection
from fl_lightning.federation.run import FederatedRun
from fl_lightning.functional.accuracy import class_accuracy
from fl_lightning.functional.state import to_float32, to_host
from fl_lightning.metrics import ClassifierScores
from fl_lightning.metrics.user_metrics import alone, computed, update, values_of
from fl_lightning.types import Broadcast, ClientJob
from fl_lightning.utils.life import heartbeat

PASS_HOOKS = frozenset(f"on_{kind}_{end}" for kind in ("validation", "test", "predict") for end in ("start", "end"))
"""A module's first and last hook of a pass of the Trainer's."""


class Evaluation:
    """Evaluates the global model, one pass over a split at a time.

    Args:
        run: has engines, data and all else of the run of a Trainer.

    Attributes:
        before: all entries while a pass is under way, else None.
        inspection: evaluates clients in the middle of a round, for monitors.
    """

    def __init__(self, run: FederatedRun) -> None:
        self._run = run
        self.parts = run.parts
        self.data = run.data
        self.communicator = run.communicator
        self.services = run.parts.evaluation_services
        self.metrics = run.parts.metrics
        engine = run.engine
        self.clients = run.clients_engine
        self.records = run.records
        self.client = engine.client
        self.weights = engine.weights
        self.modules = engine.modules
        self.transfer = engine.local.transfer
        self.inspection = Inspection(engine, run.data)
        elsewhere = self.weights.personal and getattr(self.clients, "is_remote", False)
        self._has_global = bool(self.weights.shared) and not elsewhere
        """True where there is a model to evaluate: with personal entries it needs the clients' own."""
        self.before: HeldEntries | None = None
        self._left: HeldEntries | None = None
        """All entries as a pass has left them, until the module's last hook of it."""
        self._generators = ExitStack()
        foreign = self.client.module is not None or runs_foreign_code(self.client)
        self._foreign = foreign or self.metrics is not None or self.transfer.hooked
        self._channels_last = evaluates_channels_last(self.client, self.client.device)
        classifies = self.client.module is None and self.data.num_classes is not None
        self._accuracy = ClassifierScores(self.data.num_classes or 0).to(self.client.device) if classifies else None

    def hold(self, evaluates: bool = True) -> None:
        """Begin a pass: record what its end puts back, and load the weights that are evaluated, where any are."""
        self.restore()
        if self.weights.shared or self.client.module is not None:  # else there is nothing
            self.before = HeldEntries(self.weights)
            self._generators = ExitStack()
            self._generators.enter_context(self._kept_generators(self._foreign))
        if not evaluates:
            return
        self.weights.non_persistent.set_back({})
        self.data.to(self.communicator.device, early=not self.transfer.moves)
        self.parts.recorder.evaluated(None)
        self.services.logged.clear()
        if self._accuracy is not None:
            self._accuracy.reset()
        if self.metrics is not None:
            self.metrics.reset()
        self._load_evaluated()

    def _kept_generators(self, foreign: bool = True) -> AbstractContextManager[None]:
        """Context that leaves the global random generators as they were.

        Those of NumPy and Python are among them where foreign code may draw from them: to keep them takes long.
        """
        device = self.communicator.device
        on_gpu = device.type == "cuda"
        return isolate_rng(include_cuda=on_gpu) if foreign else torch.random.fork_rng([device] if on_gpu else [])

    def _load_evaluated(self) -> None:
        """Load the weights that are evaluated, if there is a global model, and they are not its own.

        `restore` takes them back.
        """
        live = self.weights.live(self.weights.shared)
        evaluated = self.parts.evaluated_weights(live) if live else live
        if evaluated is not live:
            self.weights.load(evaluated)

    @contextmanager
    def evaluated_model(self) -> Iterator[None]:
        """Context in which the module is the global model as it is evaluated.

        A pass may still want its last hook. At the end of a fit Lightning has moved all parts off the samples' device.
        """
        left_on = self.client.device
        with ExitStack() as held:
            for part in (self.client, self.parts.aggregator, self.parts.server_module):
                held.callback(part.to, left_on)
                part.to(self.communicator.device)
            held.callback(HeldEntries(self.weights).restore)
            held.enter_context(self._kept_generators())
            self._load_evaluated()
            yield

    def step(self, kind: str, batch: Any, batch_idx: int, dataloader_idx: int) -> Any:
        """Evaluate one batch, by the net's logits or by the module's own `validation_step` or `test_step`."""
        heartbeat()
        if batch is EMPTY_BATCH or not self._has_global:
            return None
        batch = self.transfer(batch)
        module = self.client.module
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
            if self.data.further_validation:
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
        heartbeat()
        if batch is EMPTY_BATCH:
            return None
        batch = self.transfer(batch)
        module = self.client.module
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

    @contextmanager
    def around(self, hook: str) -> Iterator[None]:
        """Context of the module's first and last hook of a pass.

        The last one may undo what the first did, so that it finds the entries as the pass has left them.
        """
        if hook.endswith("_start"):
            self.hold(hook != "on_predict_start")
            yield
            return
        if self._left is not None:
            self._left.restore()
        yield
        self.restore()
        self._generators.close()

    def end(self, prefix: str, last_hook: str) -> dict[str, float]:
        """End a pass: put back what it has changed and return its values by log key.

        Args:
            prefix: of the keys.
            last_hook: name of the module's hook that follows within `around`.
        """
        values = self._values(prefix)
        if self.before is not None and hooks(self.modules, last_hook):
            self._left = HeldEntries(self.weights)
            self.before.restore()
        else:
            self.restore()
        self._generators.close()
        return values

    def _values(self, prefix: str) -> dict[str, float]:
        """Values of a pass by log key."""
        logged = self.services.logged
        gathered = self.communicator.gather((logged.drain()[1], logged.metric_paths(self.client)))
        values = logged.reduce([rows for rows, _ in gathered], [paths for _, paths in gathered], self.client)
        if not self._has_global:
            return values
        if self.metrics is not None:
            values |= values_of(computed(self.metrics), prefix, self.inspection.class_names)
        if self._accuracy is None:
            return values
        result = computed(self._accuracy).cpu()
        self.parts.recorder.evaluated(result[:-2])
        *by_class, accuracy, loss = result.tolist()
        scores = {f"{prefix}/acc": accuracy, f"{prefix}/loss": loss}
        scores |= {f"{prefix}/acc_class/{n}": v for n, v in zip(self.inspection.class_names, by_class, strict=True)}
        return scores | values

    @torch.no_grad()
    def alma(self, round_idx: int) -> dict[str, float]:
        """Evaluate, on each client's own test split, what it would deploy.

        Args:
            round_idx: of the round.

        Returns:
            Means over all clients by log key: `local/alma` of the accuracy, `local/NAME` of the user's own metrics.
        """
        metrics = None if self.metrics is None else alone(self.metrics)
        jobs = self._deployed_jobs(round_idx)
        settings = (self.data.eval_batch_size, metrics, self._channels_last)
        with self._kept_generators(), closing(self.clients.evaluate(jobs, *settings)) as results:
            scores = list(results)
        values = [values_of(score.metrics, "local", self.inspection.class_names) for score in scores]
        counts = to_host([torch.as_tensor(n) for score in scores for n in (score.correct, score.num_samples)])
        mine = [(score.client_id, *counts[2 * i : 2 * i + 2]) for i, score in enumerate(scores)]
        everywhere = self.communicator.gather((mine, values))
        hits = torch.zeros(2, self.data.num_clients, dtype=torch.float64)
        for client_id, *count in (counted for part, _ in everywhere for counted in part):
            hits[:, client_id] = torch.tensor(count, dtype=torch.float64)
        means = mean_values(row for _, part in everywhere for row in part)
        return {"local/alma": float(class_accuracy(hits).nanmean()), **means}

    def _deployed_jobs(self, round_idx: int) -> Iterator[ClientJob]:
        """Make the job of every client of this process that has test samples."""
        start = self.weights.snapshot(self.weights.shared)
        clients = range(self.data.num_clients)
        ranks = self.communicator.assign_clients(clients, work=self._run.work, owners=self.parts.store.owners)
        mine = [client_id for client_id in clients if ranks[client_id] == self.communicator.rank]
        for client_id in mine:
            local = self.data.view(client_id, round_idx)
            if local.size("test"):
                broadcast = Broadcast(round_idx, "deployed", None)
                yield ClientJob(client_id, broadcast, local, *self.records.of(client_id), start)


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
