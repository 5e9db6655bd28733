"""Evaluates the global model: class by class where the client is a classifier, by its own steps where it is not."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fl_lightning.data.client_data import NO_BATCH
from fl_lightning.functional.forgetting import forgetting
from fl_lightning.functional.state import StateSum
from fl_lightning.local.hooks import overridden
from fl_lightning.local.lending import Desk, LogBook, lend, reduced
from fl_lightning.metrics import class_accuracies, count_classes
from fl_lightning.modules import num_arguments
from fl_lightning.strategy import Ranks
from fl_lightning.types import Broadcast, State

if TYPE_CHECKING:
    from fl_lightning.loop import FederatedLoop


class Evaluation:
    """One pass over an evaluation split at a time.

    Attributes:
        class_accuracy: A_c of the last pass, (C,) float64 on the CPU, or None.
        peak: each class's best accuracy over the rounds so far, (C,), or None.
    """

    def __init__(self, loop: FederatedLoop) -> None:
        self.loop = loop
        self.book = LogBook()
        self.desk = Desk(self.book, trains=False)
        self.class_accuracy: Tensor | None = None
        self.peak: Tensor | None = None
        self._counts: Tensor | None = None
        self._names: list[str] = []
        self._before: State | None = None

    @property
    def class_names(self) -> list[str]:
        """Names of the classes as log keys carry them: the data's, else their numbers."""
        data = self.loop.data
        names = getattr(data.source, "class_names", None)
        count = data.num_classes or 0
        width = max(2, len(str(count - 1)))
        return [str(name).replace("/", "-") for name in names or [f"{c:0{width}d}" for c in range(count)]]

    def start(self) -> None:
        """Before the first batch: load the weights that are evaluated, if they are not the global ones."""
        loop = self.loop
        weights, data = loop.weights, loop.data
        assert weights is not None
        self.restore()
        data.to(loop.device)
        self.class_accuracy = self._counts = None
        self.book.clear()
        if not weights.shared:
            return  # there is no global model
        if loop.client.module is None and data.num_classes is not None:
            self._counts = torch.zeros(2 * data.num_classes + 1, dtype=torch.float64, device=loop.device)
            self._names = self._names or self.class_names
        self._placed = loop.placement()
        live = weights.live(weights.shared)
        evaluated = loop.aggregator.evaluation_weights(live)
        if evaluated is not live:
            self._before = weights.snapshot(weights.shared)
            loop.round_start = weights.saved(self._before)
            weights.load(evaluated)

    def step(self, kind: str, batch: Any, batch_idx: int, dataloader_idx: int) -> Any:
        """One batch, by the net's logits or by the module's own `validation_step` or `test_step`."""
        client, weights = self.loop.client, self.loop.weights
        assert weights is not None
        if batch is NO_BATCH or not weights.shared:
            return None
        batch = self._placed(batch)
        if client.module is None:
            x, y = batch
            assert self._counts is not None
            count_classes(self._counts, client(x), y)
            return None
        module = client.module
        if not overridden(module, f"{kind}_step"):
            return None
        self.desk.note_batch(batch)
        return self._call(getattr(module, f"{kind}_step"), batch, batch_idx, dataloader_idx)

    def predict(self, batch: Any, batch_idx: int, dataloader_idx: int) -> Any:
        """The logits of one batch, or what the module's own `predict_step` gives.

        Raises:
            ValueError: where the clients share no weights.
        """
        client, weights = self.loop.client, self.loop.weights
        if weights is not None and not weights.shared:
            raise ValueError(
                f"predict needs a global model, but the clients of this {type(client).__name__} share no weights; run "
                f"test, which gives the mean accuracy of their own"
            )
        if batch is NO_BATCH:
            return None
        batch = self.loop.placement()(batch)
        if client.module is None:
            return client(batch[0])
        return self._call(client.module.predict_step, batch, batch_idx, dataloader_idx)

    def _call(self, step: Callable[..., Any], *arguments: Any) -> Any:
        """A step of the wrapped module with as many of the arguments as it takes, and logging lent."""
        with lend(self.loop.client_modules(), self.desk):
            return step(*arguments[: num_arguments(step)])

    def restore(self) -> None:
        """The global weights again, after a pass over others (also one that was broken off)."""
        if self._before is not None:
            assert self.loop.weights is not None
            self.loop.weights.load(self._before)
            self._before, self.loop.round_start = None, {}

    def end(self, prefix: str) -> dict[str, float]:
        """After the last batch: the global weights again, and the pass's values by log key."""
        loop = self.loop
        self.restore()
        ranks = Ranks(loop.device)
        gathered = ranks.gather((self.book.drain()[1], self.book.metric_paths(loop.client)))
        logged = reduced([rows for rows, _ in gathered])
        logged |= self.book.compute_metrics(loop.client, [paths for _, paths in gathered])
        if self._counts is None:
            return logged
        if ranks.world > 1:
            total = StateSum()
            total.add({"counts": self._counts})
            merged = ranks.merge({"counts": total}, [{"counts": total.layout}])
            self._counts = merged["counts"].state()["counts"]
        result = class_accuracies(self._counts).cpu()
        self.class_accuracy = result[:-2]
        *by_class, accuracy, loss = result.tolist()
        values = {f"{prefix}/acc": accuracy, f"{prefix}/loss": loss}
        values |= {f"{prefix}/acc_class/{n}": v for n, v in zip(self._names, by_class, strict=True)}
        return values | logged

    def forgetting(self) -> float:
        """F of FedNTD after this round."""
        assert self.class_accuracy is not None
        now = self.class_accuracy
        self.peak = now if self.peak is None else torch.fmax(self.peak, now)
        return float(forgetting(torch.stack([self.peak, now])))

    @torch.no_grad()
    def alma(self, round_idx: int) -> float:
        """Mean over all clients of the accuracy, on its own test split, of what each would deploy."""
        loop = self.loop
        weights, client, runner = loop.weights, loop.client, loop.runner
        assert weights is not None
        before = weights.snapshot(list(weights.entries))
        self._placed = loop.placement()
        ranks = Ranks(loop.device)
        accuracies = {}
        try:
            loop.server.weights = {name: before[name] for name in weights.shared}
            for client_id in range(loop.data.num_clients):
                if loop.store.owners.get(client_id, client_id % ranks.world) != ranks.rank:
                    continue
                local = loop.data.view(client_id, round_idx)
                if not local.size("test"):
                    continue
                client.switch(runner.load(client_id, Broadcast(round_idx, "deployed", None), {}))
                client.eval()
                predict = client.deployed()
                batches = map(self._placed, local.batches("test", batch_size=loop.data.eval_batch_size))
                hits = [predict(x).argmax(1) == y for x, y in batches]
                accuracies[client_id] = torch.cat(hits).double().mean()
        finally:
            loop.server.weights = None
            weights.load(before)
            runner.local.restore_modes()
        found = [float(a) for part in ranks.gather({c: float(a) for c, a in accuracies.items()}) for a in part.values()]
        return math.fsum(found) / len(found) if found else float("nan")
