"""Services that Lightning gives the fitted module only (logging, optimizers, transfer), for a client that is driven."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from itertools import islice
from numbers import Number
from operator import mul
from typing import Any, ClassVar

import torch
from pytorch_lightning import LightningDataModule, LightningModule
from pytorch_lightning.plugins.precision import Precision
from pytorch_lightning.utilities import GradClipAlgorithmType
from torch import Tensor, nn
from torchmetrics import Metric

from fl_lightning.client.hooks import hooks, overridden
from fl_lightning.client.optimizers import LocalOptimizers, frozen, params_of_others
from fl_lightning.functional.state import to_host
from fl_lightning.utils.life import LIFE

MOST_ROWS = 512

Rows = dict[str, tuple[str, list[tuple[float, float]]]]
"""Logged values on the host: by name the reduction and the (value, weight) pairs."""


TRAINER_SERVICES = ("log", "log_dict", "optimizers", "lr_schedulers", "manual_backward", "clip_gradients")
SERVICES = (*TRAINER_SERVICES, "toggle_optimizer", "untoggle_optimizer", "all_gather")
"""Names of what Lightning gives the fitted module, and of all that a client is given."""


class MetricAccumulator:
    """Logged values, kept on the device until they are read.

    Args:
        most_rows: more values of one name are reduced to one on the device; None: never.

    Attributes:
        metrics: the metric objects that were logged, by name.
    """

    def __init__(self, most_rows: int | None = MOST_ROWS) -> None:
        self.most_rows = most_rows
        self.metrics: dict[str, Metric] = {}
        self._rows: dict[str, tuple[str, list[tuple[Any, float]]]] = {}
        self._ended: dict[str, Metric] = {}

    def log(self, name: str, value: Any, weight: float, reduce_fx: Any = "mean") -> None:
        """Take one value, without moving it to the host.

        Raises:
            ValueError: if `value` is neither a number, a tensor of one element nor a metric, or the reduction is
                unknown.
        """
        if isinstance(value, Metric):
            self.metrics[name] = value
            return
        if isinstance(value, Tensor) and value.numel() == 1:
            value = value.detach()
        elif not isinstance(value, int | float):
            check_number(name, value)
        if name not in self._rows:
            self._rows[name] = (reduction_of(name, reduce_fx), [])
        kind, rows = self._rows[name]
        rows.append((value, weight))
        if len(rows) == self.most_rows:
            rows[:] = [self._reduced(kind, rows)]

    @staticmethod
    def _reduced(kind: str, rows: list[tuple[Any, float]]) -> tuple[Tensor, float]:
        """Reduce many values to one, on the device."""
        values = torch.stack([torch.as_tensor(value).reshape(()).double() for value, _ in rows])
        sizes = torch.tensor([size for _, size in rows], dtype=torch.float64).to(values.device)
        value = (values @ sizes) / sizes.sum() if kind == "mean" else getattr(values, kind)()
        return value, float(sum(size for _, size in rows))

    def absorb(self, other: "MetricAccumulator") -> None:
        """Add the values of another accumulator (a client's)."""
        self.metrics |= other.metrics
        add_rows(self._rows, other._rows)

    def end_loader(self) -> None:
        """Keep the values of the metric objects so far for the keys they were logged by.

        As in Lightning they go on.

        Raises:
            RuntimeError: with several processes, which must all have the same objects.
        """
        if self.metrics and world_size() > 1:
            raise RuntimeError(
                "with several processes a metric object cannot be logged by several dataloaders; log the value, or "
                "give data.source one validation loader"
            )
        for name, metric in self.metrics.items():
            if name not in self._ended:
                self._ended[name] = metric
                self.metrics[name] = deepcopy(metric)

    @property
    def rows(self) -> Mapping[str, tuple[str, Sequence[tuple[Any, float]]]]:
        """The values since they were read: by name the reduction and the (value, weight) pairs."""
        return self._rows

    def drain(self, more: Sequence[Tensor] = ()) -> tuple[list[float], Rows]:
        """Move all values, and `more` 0-d tensors, to the host at once.

        Only the metric objects stay here.
        """
        numbers, (rows,) = drain([self], more)
        return numbers, rows

    def take_rows(self) -> dict[str, tuple[str, list[tuple[Any, float]]]]:
        """Hand over the values.

        The metric objects stay.
        """
        rows = self._rows
        self._rows = {}
        return rows

    @property
    def sizes(self) -> dict[str, int]:
        """Number of the values since they were read, by name."""
        return {name: len(pairs) for name, (_, pairs) in self._rows.items()}

    def cut(self, sizes: Mapping[str, int]) -> None:
        """Drop the values since there were so many, by name, and reset the metric objects."""
        self._rows = {n: (kind, pairs[: sizes[n]]) for n, (kind, pairs) in self._rows.items() if n in sizes}
        self._reset_metrics()

    def metric_paths(self, root: nn.Module) -> dict[str, str]:
        """Find the paths in `root` of the logged metric objects, for the ranks on which none was logged."""
        where = {id(module): path for path, module in root.named_modules()} if self.metrics else {}
        return {name: where[id(metric)] for name, metric in self.metrics.items() if id(metric) in where}

    def reduce(self, rows: Sequence[Rows], paths: Sequence[Mapping[str, str]], root: nn.Module) -> dict[str, float]:
        """Reduce all processes' rows and the metric objects to values.

        The metrics are reset.

        Args:
            rows: of every rank.
            paths: `metric_paths` of every rank; the metrics are computed in one order, since each is a collective.
            root: the module that the metric objects are part of.
        """
        values = reduced(rows)
        if self.metrics or any(paths):
            values |= self._computed(paths, root)
        return values

    def _computed(self, paths: Sequence[Mapping[str, str]], root: nn.Module) -> dict[str, float]:
        """Compute the values of the metric objects, those of the other ranks too, and reset these."""
        for paths_of_rank in paths:
            for name, path in paths_of_rank.items():
                self.metrics.setdefault(name, root.get_submodule(path))  # type: ignore[arg-type]
        values = {name: float(self.metrics[name].compute()) for name in sorted(self.metrics)}
        self._reset_metrics()
        return values

    def _reset_metrics(self) -> None:
        """Reset the metric objects, and forget them."""
        for metric in (*self.metrics.values(), *self._ended.values()):  # one may have several names
            metric.reset()
        self.metrics = {}
        self._ended = {}

    def clear(self) -> None:
        """Drop everything and reset the metric objects (a round that failed)."""
        self.cut({})


def check_number(name: str, value: Any) -> None:
    """Refuse a logged value that is no number.

    Raises:
        ValueError: naming it.
    """
    if isinstance(value, Tensor):
        raise ValueError(f"self.log({name!r}) takes one number, got a tensor of shape {tuple(value.shape)}")
    if not isinstance(value, Number):
        raise ValueError(f"self.log({name!r}) takes a number, a tensor or a metric, got {type(value).__name__}")


def reduction_of(name: str, reduce_fx: Any) -> str:
    """Name the reduction of logged values.

    Raises:
        ValueError: it is unknown.
    """
    reduction = getattr(reduce_fx, "__name__", reduce_fx)
    if reduction not in ("mean", *REDUCTIONS):
        raise ValueError(f"self.log({name!r}): reduce_fx must be mean, sum, max or min, got {reduction!r}")
    return str(reduction)


def drain(parts: Iterable[MetricAccumulator], more: Sequence[Tensor] = ()) -> tuple[list[float], list[Rows]]:
    """Move all values of some accumulators, and `more` 0-d tensors, to the host at once.

    Metric objects stay there.
    """
    rows = [part.take_rows() for part in parts]
    lists = [pairs for of_part in rows for _, pairs in of_part.values()]
    tensors = (value for pairs in lists for value, _ in pairs if isinstance(value, Tensor))
    numbers = iter(to_host([*more, *tensors]))
    host = list(islice(numbers, len(more)))
    for pairs in lists:
        pairs[:] = [(next(numbers) if isinstance(v, Tensor) else float(v), float(n)) for v, n in pairs]
    return host, rows


def world_size() -> int:
    """Number of processes."""
    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1


def add_rows(rows: dict[str, tuple[str, list[Any]]], more: Mapping[str, tuple[str, list[Any]]]) -> None:
    """Add further values to those of the same names."""
    for name, (kind, pairs) in more.items():
        rows.setdefault(name, (kind, []))[1].extend(pairs)


def reduced(parts: Sequence[Rows]) -> dict[str, float]:
    """Reduce the rows of several processes.

    Sums are exact, so the division of clients among them does not show.
    """
    merged: Rows = {}
    for rows in parts:
        add_rows(merged, rows)
    return {name: reduced_pairs(kind, pairs) for name, (kind, pairs) in merged.items()}


def reduced_pairs(kind: str, pairs: Sequence[tuple[float, float]]) -> float:
    """Reduce (value, weight) pairs to one value, NaN for a mean of no weight."""
    values, sizes = zip(*pairs, strict=True)
    if kind != "mean":
        return REDUCTIONS[kind](values)
    size = math.fsum(sizes)
    return exact_sum([*map(mul, values, sizes)]) / size if size else math.nan


def exact_sum(values: Sequence[float]) -> float:
    """Sum with one rounding, or one by one where a value is not finite.

    >>> exact_sum([1e100, 1.0, -1e100]), exact_sum([math.inf, -math.inf])
    (1.0, nan)
    """
    return math.fsum(values) if all(map(math.isfinite, values)) else sum(values)


REDUCTIONS: dict[str, Callable[[Sequence[float]], float]] = {"sum": exact_sum, "max": max, "min": min}
"""What makes one value of many, besides the weighted mean."""


def batch_length(batch: Any) -> int:
    """Count the samples in a batch: the length of its first tensor (1 where there is none)."""
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    for item in batch if isinstance(batch, list | tuple) else (batch,):
        if isinstance(item, Tensor):
            return item.shape[0] if item.ndim else 1
        if isinstance(item, Mapping | list | tuple):
            return batch_length(item)
    return 1


class ClientServices:
    """Implements a client's `self.log`, `self.optimizers()`, … while an engine or an evaluation drives it."""

    services: ClassVar[Sequence[str]] = SERVICES

    def __init__(self) -> None:
        self.logged = MetricAccumulator()
        self.methods: dict[str, Callable[..., Any]] = {name: getattr(self, name) for name in self.services}
        self._optimizers = LocalOptimizers(None, "nobody")
        self._batch: Any = None
        self._weight = 1
        self._toggled = ExitStack()

    # --- called by what drives the client ---

    def begin(
        self,
        *,
        logged: MetricAccumulator | None = None,
        optimizers: LocalOptimizers | None = None,
        batch: Any = None,
        num_samples: int = 1,
    ) -> None:
        """Set the weight of the values that are logged from now on, and what else begins.

        Every call is a sign of life of the process.

        Args:
            logged: The accumulator of the client that begins or goes on. None keeps the present one.
            optimizers: The optimizers of the phase that begins. None keeps the present ones.
            batch: The batch that begins. A value weighs the number of its samples, which the first value counts.
                None means that a value weighs `num_samples`.
            num_samples: The weight of a value that is logged outside a batch, 1 or more.
        """
        LIFE.beat()
        if logged is not None:
            self.logged = logged
        if optimizers is not None:
            self._optimizers = optimizers
        self._batch = batch
        self._weight = num_samples

    # --- called by the client ---

    def log(
        self, name: str, value: Any, *args: Any, reduce_fx: Any = "mean", batch_size: int | None = None, **ignored: Any
    ) -> None:
        if batch_size is None:
            if self._batch is not None:
                self._weight = batch_length(self._batch)
                self._batch = None
            batch_size = self._weight
        self.logged.log(name, value, batch_size, reduce_fx)

    def log_dict(self, values: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
        for name, value in values.items():
            self.log(name, value, *args, **kwargs)

    def all_gather(self, data: Any, *args: Any, **kwargs: Any) -> Any:
        """Return `data`, with one process.

        Raises:
            RuntimeError: with several processes, which are at different clients and would wait for each other for ever.
        """
        if (world := world_size()) > 1:
            raise RuntimeError(
                f"self.all_gather cannot be called in local training, where {world} processes are at different "
                f"clients; log the value, or gather in on_validation_epoch_end"
            )
        return data

    def optimizers(self, use_pl_optimizer: bool = True) -> Any:
        optimizers = self._optimizers.handed_out()
        chosen: list[Any] = optimizers.wrapped if use_pl_optimizer else optimizers.raw
        return chosen[0] if len(chosen) == 1 else list(chosen)

    def lr_schedulers(self) -> Any:
        schedulers = [entry.scheduler for entry in self._optimizers.schedulers]
        return schedulers[0] if len(schedulers) == 1 else schedulers or None

    def manual_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        self._optimizers.backward(loss, *args, **kwargs)

    def clip_gradients(
        self, optimizer: Any, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        algorithm = GradClipAlgorithmType(gradient_clip_algorithm or "norm")
        Precision().clip_gradients(optimizer, gradient_clip_val or 0, algorithm)

    def toggle_optimizer(self, optimizer: Any) -> None:
        """Let only this optimizer's parameters require a gradient, until `untoggle_optimizer`."""
        self._toggled.enter_context(frozen(params_of_others(optimizer, self._optimizers.raw)))

    def untoggle_optimizer(self, optimizer: Any) -> None:
        self._toggled.close()


class EvaluationServices(ClientServices):
    """Implements the same in an evaluation, where all processes are at the same batch and may gather."""

    services = SERVICES[:-1]
    _suffix = ""

    def begin_loader(self, suffix: str) -> None:
        """Let keys end in `suffix` from now on: that of one of several dataloaders, as Lightning's."""
        if suffix and suffix != self._suffix:
            self.logged.end_loader()
        self._suffix = suffix

    def log(self, name: str, *args: Any, add_dataloader_idx: bool = True, **kwargs: Any) -> None:
        super().log(name + self._suffix if add_dataloader_idx else name, *args, **kwargs)


@contextmanager
def attach_services(modules: Sequence[LightningModule], methods: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Put services over the modules' own methods within the block.

    What was there before is put back after it.

    Args:
        modules: the client and the module in it.
        methods: by name.
    """
    before = [{name: vars(module)[name] for name in methods if name in vars(module)} for module in modules]
    for module in modules:
        vars(module).update(methods)
    try:
        yield
    finally:
        for module, replaced in zip(modules, before, strict=True):
            for name in methods:
                vars(module).pop(name, None)
            vars(module).update(replaced)


class BatchTransfer:
    """Puts batches on the device and in the Trainer's precision, through the client's own transfer hooks.

    Args:
        modules: the client and the module in it.
        device: where batches belong.
        precision: the Trainer's precision plugin; None: 32-true.
        datamodule: the user's own, whose transfer hooks go before the module's, as in Lightning; or None.

    Attributes:
        hooked: whether a hook of the user's may change a batch.
        moves: whether one of them sees it before it lies on the device.
    """

    def __init__(
        self,
        modules: Sequence[LightningModule],
        device: torch.device,
        precision: Precision | None = None,
        datamodule: LightningDataModule | None = None,
    ) -> None:
        self._precision = precision or Precision()
        self._device = device
        data: Any = datamodule
        names = ("on_before_batch_transfer", "transfer_batch_to_device")
        after = "on_after_batch_transfer"
        owners = [data if overridden(data, name) else modules[-1] for name in names]
        self._before, self._transfer = map(getattr, owners, names)
        self.moves = any(map(overridden, owners, names))
        self._after = hooks([data], after) or hooks(modules, after)
        self.hooked = self.moves or bool(self._after)

    def __call__(self, batch: Any) -> Any:
        there = type(batch) is tuple and isinstance(batch[0], Tensor) and batch[0].device == self._device
        if self.moves or not there:
            batch = self._transfer(self._before(batch, 0), self._device, 0)
        for hook in self._after:
            batch = hook(batch, 0)
        return self._precision.convert_input(batch)
