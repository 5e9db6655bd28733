"""Evaluations of the client in the module, which leave no trace in the client's training."""

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cached_property
from typing import Any, TypeVar, cast

import torch
from pytorch_lightning.utilities.seed import isolate_rng
from torch import Tensor

from fl_lightning.client.hooks import overridden
from fl_lightning.client.module import ClientModule
from fl_lightning.client.personal import check_features
from fl_lightning.data import FederatedDataModule
from fl_lightning.data.loaders import without_none
from fl_lightning.engines.held_entries import HeldEntries
from fl_lightning.engines.sequential import SequentialEngine
from fl_lightning.functional.classes import unique_names
from fl_lightning.functional.losses import cross_entropy
from fl_lightning.functional.state import to_float32
from fl_lightning.metrics import ClassifierScores
from fl_lightning.metrics.user_metrics import computed
from fl_lightning.types import Batch
from fl_lightning.utils.batches import batch_length, joined_rows
from fl_lightning.utils.keyed import keyed_generator

Moment = tuple[Hashable, ...]
"""Key of the weights in the module: the kind of the moment (`received`, `trained`, …), then the client and the time."""

DEPLOYED = "deployed"
"""Kind of the moment at which scores and losses describe what the client would deploy."""

MAX_VECTOR_DIMS = 2
"""Number of dimensions of a batch of vectors (B, d). A batch of images or sequences has more."""

Value = TypeVar("Value")


class Inspection:
    """Evaluates the weights in the client module. In a hook of a client they are that client's weights.

    Several monitors share what was computed for one *moment*. A look restores the random generators
    and the modes of the module, and logs nothing.

    Args:
        engine: The engine with the client module and the transfer of batches.
        data: The data module of the federation.
        round_idx: Gives the present round, of whose samples the clients' own values are.
    """

    def __init__(self, engine: SequentialEngine, data: FederatedDataModule, round_idx: Callable[[], int]) -> None:
        self.client = engine.client
        self.data = data
        self._round_idx = round_idx
        self._transfer = engine.local.transfer
        self._values: dict[Hashable, tuple[Moment, dict[Hashable, Any]]] = {}
        """By kind the last moment, and what was computed for it."""
        self._subsets: dict[tuple[str, int | None], Tensor] = {}
        """By split and number of samples the positions of the samples."""
        self._global_weights = engine.global_weights
        self._predict = cast(Callable[[Tensor], Tensor], engine.client)
        self._deploys = overridden(engine.client, "deployed", ClientModule)

    @cached_property
    def class_names(self) -> list[str]:
        """The names of the C classes, for keys of logged values."""
        return class_names(self.data)

    @property
    def received(self) -> Moment:
        """The moment at which a client holds what it received. Clients that received the same weights share it."""
        return ("received", self.client.context.weights_token)

    # --- looks ---

    @contextmanager
    def look(self) -> Iterator[None]:
        """Context of a look: eval mode, no gradients, no logging.

        At the end the entries and the random generators are restored.
        """
        held = HeldEntries(self._global_weights)
        try:
            with isolate_rng(), torch.no_grad(), self.client.evaluation_mode():
                yield
        finally:
            held.restore()

    def forget(self) -> None:
        """Forget what was computed, since the moments of a repeated round have the same keys."""
        self._values = {}

    def once(self, moment: Moment, key: Hashable, compute: Callable[[], Value]) -> Value:
        """Return a value of the module at a moment, which is computed only once.

        Args:
            moment: The key of the module's weights.
            key: The key of the value.
            compute: Computes the value.
        """
        kind = moment[0]
        last_moment, values = self._values.get(kind, (None, {}))
        if last_moment != moment:
            values = {}
            self._values[kind] = (moment, values)
        if key not in values:
            with self._deployed() if kind == DEPLOYED and self._deploys else nullcontext():
                values[key] = compute()
        value: Value = values[key]
        return value

    @contextmanager
    def _deployed(self) -> Iterator[None]:
        """Context in which predictions are those of what the client in the module would deploy."""
        held = HeldEntries(self._global_weights)
        try:
            with isolate_rng(), torch.no_grad(), self.client.evaluation_mode():
                self._predict = self.client.deployed()
            yield
        finally:
            self._predict = self.client
            held.restore()

    def scores(self, moment: Moment, split: str, samples: int | None = None) -> Tensor:
        """Return the accuracies of the classes, the accuracy and the mean cross-entropy over a split.

        Args:
            moment: The key of the module's weights.
            split: Name of the split.
            samples: The number of samples to evaluate, drawn once for the run. None evaluates all.

        Returns:
            The values, (C + 2,) float64 on the CPU.
        """
        return self.once(moment, (split, samples), lambda: self._scores(self.batches(split, samples)))

    def own_scores(self, moment: Moment, client_id: int, split: str = "test") -> Tensor:
        """Return the same values as `scores` over a client's own samples of a split.

        Args:
            moment: The key of the module's weights.
            client_id: The id of the client.
            split: Name of the split.

        Returns:
            The values, (C + 2,) float64 on the CPU. They are NaN for a client without samples.
        """
        return self.once(
            moment,
            (split, "of", client_id, self._round_idx()),
            lambda: self._scores(self._batches_of(client_id, split)),
        )

    def own_loss(self, moment: Moment, client_id: int) -> float | None:
        """Return the mean local loss over a client's own training samples.

        It is the cross-entropy if the client deploys another predictor than its module.

        Args:
            moment: The key of the module's weights.
            client_id: The id of the client.

        Returns:
            The mean, or None for a client without samples and under manual optimization.
        """
        if not self.client.automatic_optimization:
            return None

        def compute() -> float | None:
            total = 0.0
            count = 0
            with self.look():
                batches = self._transfer.each(self._batches_of(client_id, "train"))
                for batch_idx, batch in enumerate(batches):
                    loss = self._loss(batch, batch_idx)
                    size = batch_length(batch)
                    total += float(loss) * size
                    count += size
            return total / count if count else None

        return self.once(moment, ("loss", client_id, self._round_idx()), compute)

    def _loss(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the loss of a batch: the client's own, or the cross-entropy of another predictor."""
        if self._predict is self.client:
            return self.client.local_loss(batch, batch_idx)
        x, y = batch
        return cross_entropy(self._predict(x), y)

    def outputs(
        self, moment: Moment, layer: str | None, split: str, samples: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the outputs of a layer over a split, and the targets.

        Args:
            moment: The key of the module's weights.
            layer: Name of a module within the client. None takes the features that the head of
                the net reads.
            split: Name of the split.
            samples: The number of samples to evaluate, drawn once for the run. None evaluates all.

        Returns:
            The outputs (n, d) and the targets (n,), both on the CPU.
        """

        def of_batch(batch: Batch) -> tuple[Tensor, Tensor]:
            # A user's own batch may have more than inputs and targets.
            inputs = batch[0]
            targets = batch[1]
            return self.layer(inputs, layer).cpu(), targets.cpu()

        def compute() -> tuple[Tensor, Tensor]:
            parts = self.over_split(split, samples, of_batch)
            outputs = [output for output, _ in parts]
            targets = [target for _, target in parts]
            num_samples = len(self.subset(split, samples))
            rows = joined_rows(outputs, num_samples=num_samples, split=split, reader="a monitor of outputs")
            return rows, torch.cat(targets)

        return self.once(moment, ("outputs", layer, split, samples), compute)

    def layer(self, x: Tensor, layer: str | None = None) -> Tensor:
        """Return the outputs of a layer for a batch, (B, d), in float32 or better.

        The outputs of a convolution are averaged over the image.

        Args:
            x: The inputs of the batch.
            layer: Name of a module within the client. None takes the features that the head of
                the net reads.
        """
        if layer is None:
            return to_float32(self.client.features(x))
        outputs: list[Tensor] = []
        module = self.client.get_submodule(layer)
        handle = module.register_forward_hook(lambda _module, _inputs, output: outputs.append(output))
        try:
            self.client(x)
        finally:
            handle.remove()
        output = outputs[-1]
        if output.ndim > MAX_VECTOR_DIMS:
            output = output.flatten(2).mean(2)
        return to_float32(output)

    def check_layer(self, layer: str | None, who: str) -> None:
        """Refuse a layer that the client does not have.

        Args:
            layer: Name of a module within the client, or None for the features of its net.
            who: Name of the monitor that needs the layer.

        Raises:
            ValueError: The client has no such module, or no net with features if `layer` is None.
        """
        names = [name for name, _ in self.client.named_modules() if name]
        if layer is None and self.client.net is None:
            raise ValueError(f"{who} needs the name of a layer for a client without net=, such as {names[-1]!r}")
        if layer is None:
            check_features(self.client, who)
        if layer is not None and layer not in names:
            raise ValueError(f"{who}: layer must name a module of the client, such as {names[-1]!r}, got {layer!r}")

    def over(self, batches: Iterator[Batch], fn: Callable[[Any], Value]) -> list[Value]:
        """Return the value of `fn` for every batch, on the device of the module."""
        with self.look():
            return [fn(batch) for batch in self._transfer.each(batches)]

    def over_split(self, split: str, samples: int | None, fn: Callable[[Any], Value]) -> list[Value]:
        """Return the value of `fn` for every batch of a split, of at least one.

        Args:
            split: Name of the split.
            samples: The number of samples, drawn once for the run. None takes all.
            fn: The function of a batch.

        Raises:
            ValueError: All batches were skipped.
        """
        values = self.over(self.batches(split, samples), fn)
        if not values:
            raise ValueError(
                f"monitors must have samples of the {split} split, got no batch; return batches in collate_fn and "
                f"transfer hooks (None skips a batch)"
            )
        return values

    def batches(self, split: str, samples: int | None = None) -> Iterator[Batch]:
        """Return the batches of a split, in order and without augmentation.

        Args:
            split: Name of the split.
            samples: The number of samples, drawn once for the run. None takes all.
        """
        indices = torch.split(self.subset(split, samples), self.data.eval_batch_size)
        return without_none(self.data.split(split).batches(indices, generator=None))

    def _batches_of(self, client_id: int, split: str) -> Iterator[Batch]:
        """Return the batches of a client's own samples of a split in the present round."""
        view = self.data.view(client_id, self._round_idx())
        return view.batches(split, batch_size=self.data.eval_batch_size)

    def subset(self, split: str, samples: int | None = None) -> Tensor:
        """Return the positions of the samples to evaluate, (n,) int64, ascending.

        Args:
            split: Name of the split.
            samples: The number of samples, drawn once for the run. None takes all.
        """
        key = (split, samples)
        if key not in self._subsets:
            size = len(self.data.split(split))
            positions = torch.arange(size)
            if samples is not None and samples < size:
                generator = keyed_generator(self.data.batch_seed, f"inspection/{split}")
                positions = torch.randperm(size, generator=generator)[:samples].sort().values
            self._subsets[key] = positions
        return self._subsets[key]

    @cached_property
    def _metric(self) -> ClassifierScores:
        """The metric of `scores`. It computes over this process alone."""
        metric = ClassifierScores(self.data.num_classes or 0, distributed_available_fn=bool)
        return metric.to(next(self.client.parameters()).device)

    def _scores(self, batches: Iterator[Batch]) -> Tensor:
        """Return the values of `scores` over some batches."""
        self._metric.reset()
        with self.look():
            for x, y in self._transfer.each(batches):
                self._metric.update(self._predict(x), y)
            scores: Tensor = computed(self._metric).cpu()
        return scores


def class_names(data: FederatedDataModule) -> list[str]:
    """Return the names of the classes, for keys of logged values and tables: the data's names, else numbers."""
    names = data.source.class_names
    if not names:
        return unique_names(None, data.num_classes or 0)
    # Counting the classes may take a pass over the samples, and names say how many there are.
    return unique_names(names, vars(data).get("num_classes"))
