"""Looks at the client in the module, in the middle of its training, which leaves no trace there."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property
from typing import Any, TypeVar, cast

import torch
from pytorch_lightning.utilities.seed import isolate_rng
from torch import Tensor

from fl_lightning.client.hooks import overridden
from fl_lightning.client.module import ClientModule
from fl_lightning.client.services import batch_length
from fl_lightning.data import FederatedDataModule
from fl_lightning.engines.held_entries import HeldEntries
from fl_lightning.engines.sequential import SequentialEngine
from fl_lightning.functional.losses import cross_entropy
from fl_lightning.functional.state import to_float32
from fl_lightning.metrics import ClassifierScores
from fl_lightning.metrics.user_metrics import computed
from fl_lightning.types import Batch
from fl_lightning.utils.keyed import keyed_generator

Moment = tuple[Hashable, ...]
"""Name of the module's weights: the kind of the moment (`received`, `trained`, …), then whose and when."""

DEPLOYED = "deployed"
"""Kind of the moment at which scores and losses are those of what the client in the module would deploy."""

Value = TypeVar("Value")


class Inspection:
    """Evaluates the weights that lie in the client module: in a client hook, those of that client.

    What was computed for one *moment* is not computed again: several monitors share it. The random generators and the
    modes of the module are as they were when a look ends, and nothing is logged by it.

    Args:
        engine: has the client module and the transfer of batches.
        data: of the federation.
    """

    def __init__(self, engine: SequentialEngine, data: FederatedDataModule) -> None:
        self.client = engine.client
        self.data = data
        self._transfer = engine.local.transfer
        self._values: dict[Hashable, tuple[Moment, dict[Hashable, Any]]] = {}  # of each kind of moment the last one
        self._subsets: dict[tuple[str, int | None], Tensor] = {}
        self._weights = engine.weights
        self._predict = cast(Callable[[Tensor], Tensor], engine.client)
        self._deploys = overridden(engine.client, "deployed", ClientModule)

    @cached_property
    def class_names(self) -> list[str]:
        """Names of the C classes for log keys."""
        return class_names(self.data)

    @property
    def received(self) -> Moment:
        """The moment at which the client's weights are those it received, the same for all that received the same."""
        return ("received", self.client.context.weights_token)

    # --- looks -------------------------------------------------------------------------------------------------

    @contextmanager
    def look(self) -> Iterator[None]:
        """Context of a look: eval mode, no gradients, no logging.

        Entries and random generators restored at its end.
        """
        before = HeldEntries(self._weights)
        try:
            with isolate_rng(), torch.no_grad(), self.client.evaluation_mode():
                yield
        finally:
            before.restore()

    def forget(self) -> None:
        """Forget what was computed: a round is run again, whose moments have the same names."""
        self._values = {}

    def once(self, moment: Moment, key: Hashable, compute: Callable[[], Value]) -> Value:
        """Compute a value of the module at a moment, or give the one that was computed before."""
        last, values = self._values.get(moment[0], (None, {}))
        if last != moment:
            values = {}
            self._values[moment[0]] = moment, values
        if key not in values:
            with self._deployed() if moment[0] == DEPLOYED and self._deploys else nullcontext():
                values[key] = compute()
        value: Value = values[key]
        return value

    @contextmanager
    def _deployed(self) -> Iterator[None]:
        """Context of what the client in the module would deploy: in its place, or a predictor of its own."""
        before = HeldEntries(self._weights)
        try:
            with isolate_rng(), torch.no_grad(), self.client.evaluation_mode():
                self._predict = self.client.deployed()
            yield
        finally:
            self._predict = self.client
            before.restore()

    def scores(self, moment: Moment, split: str, samples: int | None = None) -> Tensor:
        """Class-wise accuracies, accuracy and mean cross-entropy over a split, (C + 2,) float64 on the CPU.

        Args:
            moment: what the module's weights are.
            split: name of the split.
            samples: evaluate so many, drawn once for the run; None: all.
        """
        return self.once(moment, (split, samples), lambda: self._scores(self.batches(split, samples)))

    def own_scores(self, moment: Moment, client_id: int, split: str = "test") -> Tensor:
        """The same over a client's own samples of a split.

        NaN where it has none.
        """
        return self.once(moment, (split, "of", client_id), lambda: self._scores(self._batches_of(client_id, split)))

    def own_loss(self, moment: Moment, client_id: int) -> float:
        """Mean local loss over a client's own training samples.

        NaN without, and under manual optimization.

        Of a client that deploys another predictor than its module the mean cross-entropy.
        """
        if not self.client.automatic_optimization:
            return float("nan")

        def compute() -> float:
            total = 0.0
            count = 0
            with self.look():
                for i, batch in enumerate(self._batches_of(client_id, "train")):
                    loss = self._loss(self._transfer(batch), i)
                    n = batch_length(batch)
                    total = total + float(loss) * n
                    count = count + n
            return total / count if count else float("nan")

        return self.once(moment, ("loss", client_id), compute)

    def _loss(self, batch: Batch, batch_idx: int) -> Tensor:
        if self._predict is self.client:
            return self.client.local_loss(batch, batch_idx)
        x, y = batch
        return cross_entropy(self._predict(x), y)

    def outputs(
        self, moment: Moment, layer: str | None, split: str, samples: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Outputs of a layer over a split, (n, d), and the targets, (n,), both on the CPU.

        Args:
            moment: what the module's weights are.
            layer: name of a module within the client; None: the features that the net's head reads.
            split: name of the split.
            samples: evaluate so many, drawn once for the run; None: all.
        """

        def compute() -> tuple[Tensor, Tensor]:
            parts = self.over(self.batches(split, samples), lambda b: (self.layer(b[0], layer).cpu(), b[1].cpu()))
            values, targets = zip(*parts, strict=True)
            return torch.cat(values), torch.cat(targets)

        return self.once(moment, ("outputs", layer, split, samples), compute)

    def layer(self, x: Tensor, layer: str | None = None) -> Tensor:
        """Outputs of a layer for a batch, (B, d), float32 or better.

        Of a convolution the mean over the image.
        """
        if layer is None:
            return to_float32(self.client.features(x))
        outputs: list[Tensor] = []
        handle = self.client.get_submodule(layer).register_forward_hook(lambda _m, _x, output: outputs.append(output))
        try:
            self.client(x)
        finally:
            handle.remove()
        return to_float32(outputs[-1] if outputs[-1].ndim <= 2 else outputs[-1].flatten(2).mean(2))

    def check_layer(self, layer: str | None, who: str) -> None:
        """Refuse a layer that the client does not have.

        Raises:
            ValueError: naming some that it has; without a layer: the client has no net.
        """
        names = [name for name, _ in self.client.named_modules() if name]
        if layer is None and self.client.net is None:
            raise ValueError(f"{who} needs the name of a layer for a client without net=, such as {names[-1]!r}")
        if layer is not None and layer not in names:
            raise ValueError(f"{who}: layer must name a module of the client, such as {names[-1]!r}, got {layer!r}")

    def over(self, batches: Iterator[Batch], fn: Callable[[Any], Value]) -> list[Value]:
        """Apply `fn` to every batch, where the module has it."""
        with self.look():
            return [fn(self._transfer(batch)) for batch in batches]

    def batches(self, split: str, samples: int | None = None) -> Iterator[Batch]:
        """Batches of a split, or of `samples` drawn from it once for the run, in order and without augmentation."""
        return self.data.split(split).batches(torch.split(self.subset(split, samples), self.data.eval_batch_size), None)

    def _batches_of(self, client_id: int, split: str) -> Iterator[Batch]:
        """Batches of a client's own samples of a split."""
        return self.data.view(client_id, 0).batches(split, batch_size=self.data.eval_batch_size)

    def subset(self, split: str, samples: int | None = None) -> Tensor:
        """Positions in a split of the samples that are looked at, (n,) int64, ascending."""
        if (split, samples) not in self._subsets:
            size = len(self.data.split(split))
            chosen = torch.arange(size)
            if samples is not None and samples < size:
                generator = keyed_generator(self.data.batch_seed, f"inspection/{split}")
                chosen = torch.randperm(size, generator=generator)[:samples].sort().values
            self._subsets[split, samples] = chosen
        return self._subsets[split, samples]

    @cached_property
    def _metric(self) -> ClassifierScores:
        metric = ClassifierScores(self.data.num_classes or 0, distributed_available_fn=bool)  # of this process alone
        return metric.to(next(self.client.parameters()).device)

    def _scores(self, batches: Iterator[Batch]) -> Tensor:
        self._metric.reset()
        with self.look():
            for batch in batches:
                x, y = self._transfer(batch)
                self._metric.update(self._predict(x), y)
            scores: Tensor = computed(self._metric).cpu()
        return scores


def class_names(data: FederatedDataModule) -> list[str]:
    """Name the classes for log keys: by the data's names, else by numbers."""
    names: Sequence[Any] | None = getattr(data.source, "class_names", None)
    count = data.num_classes or 0
    width = max(2, len(str(count - 1)))
    return [str(name).replace("/", "-") for name in names or [f"{c:0{width}d}" for c in range(count)]]
