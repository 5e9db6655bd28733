"""Evaluates the global model: class by class where the client is a classifier, by its own steps where it is not."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fl_lightning.local.hooks import Placement, overridden
from fl_lightning.local.lending import Desk, LogBook, lend
from fl_lightning.metrics import ClasswiseAccuracy
from fl_lightning.types import Broadcast

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
        self.desk = Desk(self.book)
        self.class_accuracy: Tensor | None = None
        self.peak: Tensor | None = None
        self._metric: ClasswiseAccuracy | None = None

    @property
    def class_names(self) -> list[str]:
        """Names of the classes as log keys carry them: the data's, else 00, 01, …"""
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
        data.to(loop.device)
        self.class_accuracy = None
        self.book.clear()
        if loop.client.module is None and data.num_classes is not None:
            if self._metric is None:
                self._metric = ClasswiseAccuracy(data.num_classes, sync_on_compute=False).to(loop.device)
            self._metric.reset()
        self._placed = Placement(loop.client_modules(), loop.trainer.precision_plugin, loop.device)
        live = weights.live(weights.shared)
        evaluated = loop.aggregator.evaluation_weights(live)
        if evaluated is not live:
            before = weights.snapshot(weights.shared)
            loop.round_start = {f"client.{name}": value for name, value in before.items()}
            weights.load(evaluated)

    def step(self, kind: str, batch: Any, batch_idx: int, dataloader_idx: int) -> Any:
        """One batch, by the net's logits or by the module's own `validation_step` or `test_step`."""
        client = self.loop.client
        batch = self._placed(batch)
        if client.module is None:
            x, y = batch
            assert self._metric is not None
            self._metric.update(client(x), y)
            return None
        module = client.module
        if not overridden(module, f"{kind}_step"):
            return None
        step = getattr(module, f"{kind}_step")
        self.desk.note_batch(batch)
        arguments = [batch, batch_idx, dataloader_idx][: len(inspect.signature(step).parameters)]
        with lend(list(client.lightning_modules()), self.desk):
            return step(*arguments)

    def end(self, prefix: str) -> dict[str, float]:
        """After the last batch: the global weights again, and the pass's values by log key."""
        loop = self.loop
        if loop.round_start and loop.weights is not None:
            loop.weights.load(
                {name.removeprefix("client."): value for name, value in loop.round_start.items()}
            )
            loop.round_start = {}
        logged = self.book.values()
        if logged:
            numbers = torch.stack([value.double().cpu() for value in logged.values()]).tolist()
            return dict(zip(logged, numbers, strict=True))
        if self._metric is None:
            return {}
        result = self._metric.compute().cpu()
        self.class_accuracy = result[:-2]
        *by_class, accuracy, loss = result.tolist()
        values = {f"{prefix}/acc": accuracy, f"{prefix}/loss": loss}
        return values | {
            f"{prefix}/acc_class/{n}": v for n, v in zip(self.class_names, by_class, strict=True)
        }

    def forgetting(self) -> float:
        """F of FedNTD after this round: the mean over classes of peak − present accuracy.

        Source: Lee et al., NeurIPS 2022, arXiv:2106.03097, Eq. 5.
        """
        assert self.class_accuracy is not None
        now = self.class_accuracy
        self.peak = now.clone() if self.peak is None else torch.fmax(self.peak, now)
        return float((self.peak - now).nanmean())

    @torch.no_grad()
    def alma(self, round_idx: int) -> float:
        """Mean over all clients of the accuracy, on its own test split, of what each would deploy."""
        loop = self.loop
        weights, client, runner = loop.weights, loop.client, loop.runner
        assert weights is not None
        before = weights.snapshot(list(weights.entries))
        self._placed = Placement(loop.client_modules(), loop.trainer.precision_plugin, loop.device)
        client.eval()
        accuracies = []
        for client_id in range(loop.data.num_clients):
            local = loop.data.view(client_id, round_idx)
            if not local.size("test"):
                continue
            client.switch(runner.load(client_id, Broadcast(round_idx, "deployed", None), {}))
            predict = client.deployed()
            batches = map(self._placed, local.batches("test", batch_size=loop.data.eval_batch_size))
            hits = [predict(x).argmax(1) == y for x, y in batches]
            accuracies.append(torch.cat(hits).double().mean())
        weights.load(before)
        return float(torch.stack(accuracies).mean()) if accuracies else float("nan")
