"""Services that Lightning gives only the fitted module: logging, optimizers, transfer of batches."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from numbers import Number
from typing import Any, ClassVar

import torch
from pytorch_lightning import LightningDataModule, LightningModule
from pytorch_lightning.plugins.precision import Precision
from pytorch_lightning.utilities import GradClipAlgorithmType
from pytorch_lightning.utilities.types import LRSchedulerConfig
from torch import Tensor, nn
from torch.optim import Optimizer
from torchmetrics import Metric

from fl_lightning.client.hooks import hooks, overridden
from fl_lightning.client.metric_states import (
    NOBODY,
    ClientMetric,
    fresh_metrics,
    joined_values,
    load_states,
    parts_that_count,
    states_of,
)
from fl_lightning.client.optimizers import LocalOptimizers, frozen, params_of_others
from fl_lightning.data.loaders import without_none
from fl_lightning.functional.classes import WHOLE, class_labels
from fl_lightning.functional.state import to_host
from fl_lightning.metrics.keys import Direction, check_writer, metric_directions
from fl_lightning.utils.batches import known_length
from fl_lightning.utils.life import LIFE

MOST_ROWS = 512
"""Number of values of one name at which a client's accumulator reduces them to one."""

DeviceRows = dict[str, tuple[str, list[tuple[Any, float]]]]
"""Logged values, on any device: by name the reduction and the (value, weight) pairs."""

LoggedRows = dict[str, tuple[str, list[tuple[float, float]]]]
"""Logged values on the host: by name the reduction and the (value, weight) pairs."""

TRAINER_SERVICES = ("log", "log_dict", "optimizers", "lr_schedulers", "manual_backward", "clip_gradients")
"""Names of the services that a Trainer gives the fitted module, but not a module inside it."""

SERVICES = (*TRAINER_SERVICES, "toggle_optimizer", "untoggle_optimizer", "all_gather")
"""Names of all services that a client is given."""


class MetricAccumulator:
    """Holds logged values on their device until they are read.

    Args:
        most_rows: The number of values of one name that are reduced to one on the device. None: never.

    Attributes:
        metrics: The metric objects that were logged, by name, and count on.
        counted: What clients that have ended have counted in metric objects.
        directions: Whether values of logged metric objects are better when lower or higher, by name.
    """

    def __init__(self, most_rows: int | None = MOST_ROWS) -> None:
        self.most_rows = most_rows
        self.metrics: dict[str, Metric] = {}
        self.counted: list[ClientMetric] = []
        self.directions: dict[str, Direction] = {}
        self._rows: DeviceRows = {}
        self._ended: dict[str, Metric] = {}
        """Metric objects of dataloaders that have ended, by name."""
        self._objects: dict[str, Metric] = {}
        """Metric objects in which clients have counted, by name."""

    def log(self, name: str, value: Any, weight: float, reduce_fx: Any = "mean") -> None:
        """Take one value, without moving it to the host.

        Args:
            name: The key of the value.
            value: A number, a tensor of one element or a metric object.
            weight: The weight of the value in a mean.
            reduce_fx: The reduction, mean, sum, max or min, by its name or as a function of that name.

        Raises:
            ValueError: `value` is neither a number, a tensor of one element nor a metric, or the reduction is unknown.
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
        kind, pairs = self._rows[name]
        pairs.append((value, weight))
        if len(pairs) == self.most_rows:
            pairs[:] = [self._reduced(kind, pairs)]

    @staticmethod
    def _reduced(kind: str, pairs: list[tuple[Any, float]]) -> tuple[Tensor, float]:
        """Reduce many (value, weight) pairs to one, on the device."""
        values = torch.stack([torch.as_tensor(value).reshape(()).double() for value, _ in pairs])
        if kind == "mean":
            weights = torch.tensor([weight for _, weight in pairs], dtype=torch.float64).to(values.device)
            value = (values @ weights) / weights.sum()
        else:
            value = getattr(values, kind)()
        return value, float(sum(weight for _, weight in pairs))

    def absorb(self, other: "MetricAccumulator") -> None:
        """Add the values of another accumulator, such as a client's."""
        self.metrics |= other.metrics
        self.counted += other.counted
        self._objects |= other._objects
        add_rows(self._rows, other._rows)

    def end_loader(self) -> None:
        """Keep what the metric objects have counted so far under the keys by which they were logged.

        As in Lightning, the objects themselves go on counting.
        """
        for name, metric in self.metrics.items():
            if name not in self._ended:
                self._ended[name] = metric
                with fresh_metrics(parts_that_count(metric)):
                    kept = deepcopy(metric)
                load_states(kept, states_of(metric))
                self.metrics[name] = kept

    def end_client(self, client_id: int, root: nn.Module) -> None:
        """Take what a client has counted in the metric objects that it logged.

        Callbacks may still look at the objects of `root`, which are fresh for every client. Others are reset.

        Args:
            client_id: The id of the client.
            root: The module that contains the metric objects.
        """
        if not self.metrics:
            return
        paths = self.metric_paths(root)
        for name, metric in self.metrics.items():
            of_client = ClientMetric(client_id, name=name, path=paths.get(name, ""), states=states_of(metric))
            self.counted.append(of_client)
        self._objects |= self.metrics
        if client_id != NOBODY:
            self.metrics = {name: metric for name, metric in self.metrics.items() if name not in paths}
        self._reset_metrics()

    def joined(self, counted: Iterable[ClientMetric], root: nn.Module) -> dict[str, float]:
        """Return the values of metric objects over the clients of all processes, by key.

        Args:
            counted: What the clients of all processes have counted, without the clients that were left out.
            root: The module that contains the metric objects.
        """

        def find(name: str, path: str) -> Metric | None:
            if name not in self._objects and path:
                self._objects[name] = root.get_submodule(path)  # type: ignore[assignment]
            return self._objects.get(name)

        values = joined_values(counted, find)
        self.directions |= metric_directions({name: self._objects[name] for name in values})
        self.counted = []
        self._objects = {}
        return values

    @property
    def rows(self) -> Mapping[str, tuple[str, Sequence[tuple[Any, float]]]]:
        """The values that were not read yet: by name the reduction and the (value, weight) pairs."""
        return self._rows

    def drain(self, more: Sequence[Tensor] = ()) -> tuple[list[float], LoggedRows]:
        """Move all values to the host at once, and return them. The metric objects stay here.

        Args:
            more: Further tensors of one element, which are moved in the same transfer.

        Returns:
            The numbers of `more`, and the values.
        """
        numbers, rows_of_parts = drain([self], more)
        return numbers, rows_of_parts[0]

    def rows_so_far(self) -> LoggedRows:
        """Return all values on the host, and keep them here."""
        copied = MetricAccumulator()
        add_rows(copied._rows, self._rows)
        _, rows = copied.drain()
        return rows

    def take_rows(self) -> DeviceRows:
        """Return the values, and forget them. The metric objects stay here."""
        rows = self._rows
        self._rows = {}
        return rows

    @property
    def sizes(self) -> dict[str, int]:
        """The number of values that were not read yet, by name."""
        return {name: len(pairs) for name, (_, pairs) in self._rows.items()}

    def cut(self, sizes: Mapping[str, int]) -> None:
        """Drop the values after the first ones, and reset the metric objects.

        Args:
            sizes: The number of values to keep, by name. The values of other names are dropped.
        """
        self._rows = {name: (kind, pairs[: sizes[name]]) for name, (kind, pairs) in self._rows.items() if name in sizes}
        self.counted = [of_client for of_client in self.counted if of_client.client_id == NOBODY]
        self._reset_metrics()

    def metric_paths(self, root: nn.Module) -> dict[str, str]:
        """Return the paths in `root` of the logged metric objects, for processes that have logged none."""
        if not self.metrics:
            return {}
        paths = {id(module): path for path, module in root.named_modules()}
        return {name: paths[id(metric)] for name, metric in self.metrics.items() if id(metric) in paths}

    def reduce(
        self, rows: Sequence[LoggedRows], paths: Sequence[Mapping[str, str]], root: nn.Module
    ) -> dict[str, float]:
        """Reduce the values of all processes to one value a name, and reset the metric objects.

        Args:
            rows: The values of every process.
            paths: The `metric_paths` of every process. All processes compute the metric objects in one order,
                since each computation is a collective.
            root: The module that contains the metric objects.
        """
        values = self.reduce_so_far(rows, paths, root)
        if self.metrics:
            self.directions |= metric_directions(self.metrics)
            self._reset_metrics()
        return values

    def reduce_so_far(
        self, rows: Sequence[LoggedRows], paths: Sequence[Mapping[str, str]], root: nn.Module
    ) -> dict[str, float]:
        """Reduce the values of all processes as `reduce` does. The metric objects count on.

        Args:
            rows: The values of every process.
            paths: The `metric_paths` of every process.
            root: The module that contains the metric objects.
        """
        values = reduced(rows)
        for paths_of_process in paths:
            for name, path in paths_of_process.items():
                self.metrics.setdefault(name, root.get_submodule(path))  # type: ignore[arg-type]
        values |= {name: float(self.metrics[name].compute()) for name in sorted(self.metrics)}
        return values

    def _reset_metrics(self) -> None:
        """Reset the metric objects, and forget them."""
        # One object may have several names.
        for metric in self.metrics.values():
            metric.reset()
        for metric in self._ended.values():
            metric.reset()
        self.metrics = {}
        self._ended = {}

    def clear(self) -> None:
        """Drop all values and reset the metric objects, after a round that failed."""
        self.cut({})
        self.counted = []


def check_number(name: str, value: Any) -> None:
    """Refuse a logged value that is not a number.

    Raises:
        ValueError: `value` is not a number. The sentence names the key.
    """
    if isinstance(value, Tensor):
        raise ValueError(f"self.log({name!r}) takes one number, got a tensor of shape {tuple(value.shape)}")
    if not isinstance(value, Number):
        raise ValueError(f"self.log({name!r}) takes a number, a tensor or a metric, got {type(value).__name__}")


def reduction_of(name: str, reduce_fx: Any) -> str:
    """Return the name of a reduction.

    Args:
        name: The key of the logged value, for the error.
        reduce_fx: The reduction, by its name or as a function of that name.

    Raises:
        ValueError: The reduction is unknown.
    """
    reduction = getattr(reduce_fx, "__name__", reduce_fx)
    if reduction not in ("mean", *REDUCTIONS):
        raise ValueError(f"self.log({name!r}): reduce_fx must be mean, sum, max or min, got {reduction!r}")
    return str(reduction)


def drain(parts: Iterable[MetricAccumulator], more: Sequence[Tensor] = ()) -> tuple[list[float], list[LoggedRows]]:
    """Move the values of some accumulators to the host at once. Their metric objects stay there.

    Args:
        parts: The accumulators.
        more: Further tensors of one element, which are moved in the same transfer.

    Returns:
        The numbers of `more`, and the values of each accumulator.
    """
    rows_of_parts = [part.take_rows() for part in parts]
    lists_of_pairs: list[list[tuple[Any, float]]] = []
    for rows in rows_of_parts:
        lists_of_pairs += [pairs for _, pairs in rows.values()]
    tensors = [*more]
    for pairs in lists_of_pairs:
        tensors += [value for value, _ in pairs if isinstance(value, Tensor)]
    numbers = to_host(tensors)
    numbers_of_values = iter(numbers[len(more) :])
    for pairs in lists_of_pairs:
        for index, (value, weight) in enumerate(pairs):
            number = next(numbers_of_values) if isinstance(value, Tensor) else float(value)
            pairs[index] = (number, float(weight))
    return numbers[: len(more)], rows_of_parts


def world_size() -> int:
    """Return the number of processes."""
    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1


def add_rows(rows: dict[str, tuple[str, list[Any]]], more: Mapping[str, tuple[str, list[Any]]]) -> None:
    """Append further values to `rows`, name by name."""
    for name, (kind, more_pairs) in more.items():
        _, pairs = rows.setdefault(name, (kind, []))
        pairs.extend(more_pairs)


def reduced(parts: Sequence[LoggedRows]) -> dict[str, float]:
    """Reduce the values of several processes to one value for each name.

    Sums are exact, so the result does not depend on the process of a client.
    """
    merged: LoggedRows = {}
    for rows in parts:
        add_rows(merged, rows)
    return {name: reduced_pairs(kind, pairs) for name, (kind, pairs) in merged.items()}


def reduced_pairs(kind: str, pairs: Sequence[tuple[float, float]]) -> float:
    """Reduce (value, weight) pairs to one value. A mean of no weight is NaN."""
    values = [value for value, _ in pairs]
    if kind != "mean":
        return REDUCTIONS[kind](values)
    total_weight = math.fsum(weight for _, weight in pairs)
    if total_weight == 0:
        return math.nan
    return exact_sum([value * weight for value, weight in pairs]) / total_weight


def exact_sum(values: Sequence[float]) -> float:
    """Return the sum with one rounding. If a value is not finite, they are added one by one.

    >>> exact_sum([1e100, 1.0, -1e100]), exact_sum([math.inf, -math.inf])
    (1.0, nan)
    """
    return math.fsum(values) if all(map(math.isfinite, values)) else sum(values)


REDUCTIONS: dict[str, Callable[[Sequence[float]], float]] = {"sum": exact_sum, "max": max, "min": min}
"""The reductions besides the weighted mean, by name."""


class ClientServices:
    """Implements a client's `self.log`, `self.optimizers()`, … while an engine or evaluation drives it.

    Attributes:
        logged: The accumulator that takes what the client logs.
        methods: The services, by the name of the method that each replaces.
    """

    services: ClassVar[Sequence[str]] = SERVICES
    """Names of the services that the class implements."""
    evaluates = False
    """Whether the client's own module evaluates the global model, and reports the values in place of the loop."""
    needs_sizes: ClassVar[bool] = False
    """Whether a mean needs the number of samples of each batch, as Lightning's evaluations do."""

    def __init__(self) -> None:
        self.logged = MetricAccumulator()
        self._checked = set[str]()
        """Keys that the client may log."""
        self.methods: dict[str, Callable[..., Any]] = {name: getattr(self, name) for name in self.services}
        self._optimizers = LocalOptimizers(None, "nobody")
        self._batch: Any = None
        self._weight: int | None = 1
        """The weight of a value of the batch. None: its number of samples is not known."""
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
        """Begin a client, a phase or a batch, and set the weight of the values that follow.

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
        if name not in self._checked:
            check_writer(name, "clients", evaluates=self.evaluates)
            self._checked.add(name)
        if batch_size is None:
            if self._batch is not None:
                self._weight = known_length(self._batch)
                self._batch = None
            batch_size = self._weight
        if batch_size is None:
            self.check_weight(name, value, reduce_fx)
            batch_size = 1
        self.logged.log(name, value, weight=batch_size, reduce_fx=reduce_fx)

    def check_weight(self, name: str, value: Any, reduce_fx: Any) -> None:
        """Check a value of a batch in which Lightning finds no number of samples. In training it weighs 1.

        Args:
            name: The key of the value.
            value: The value.
            reduce_fx: The reduction.

        Raises:
            ValueError: The value is averaged over the batches of an evaluation.
        """
        is_mean = not isinstance(value, Metric) and reduction_of(name, reduce_fx) == "mean"
        if is_mean and self.needs_sizes:
            raise ValueError(
                f"self.log({name!r}) needs the number of samples in a batch, and finds none in it; give it by "
                f"self.log({name!r}, value, batch_size=...)"
            )

    def log_dict(self, values: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
        for name, value in values.items():
            self.log(name, value, *args, **kwargs)

    def all_gather(self, data: Any, *args: Any, **kwargs: Any) -> Any:
        """Return `data` as it is, in a run of one process.

        Raises:
            RuntimeError: There are several processes. They are at different clients, and would wait for each other
                forever.
        """
        world = world_size()
        if world > 1:
            raise RuntimeError(
                f"self.all_gather cannot be called where a client is trained or tested: {world} processes are at "
                f"different clients; log the value, or gather in an evaluation of the global model"
            )
        return data

    def optimizers(self, use_pl_optimizer: bool = True) -> Any:
        optimizers = self._optimizers.handed_out()
        chosen: list[Any] = optimizers.wrapped if use_pl_optimizer else optimizers.raw
        return chosen[0] if len(chosen) == 1 else list(chosen)

    def raw_optimizers(self) -> Sequence[Optimizer]:
        """Return the optimizers themselves, which may be changed from now on."""
        return self._optimizers.handed_out().raw

    def scheduler_configs(self) -> Sequence[LRSchedulerConfig]:
        """Return the schedulers with their settings."""
        return self._optimizers.schedulers

    def lr_schedulers(self) -> Any:
        schedulers = [entry.scheduler for entry in self._optimizers.schedulers]
        if not schedulers:
            return None
        return schedulers[0] if len(schedulers) == 1 else schedulers

    def manual_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        self._optimizers.backward(loss, *args, **kwargs)

    def clip_gradients(
        self, optimizer: Any, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        algorithm = GradClipAlgorithmType(gradient_clip_algorithm or "norm")
        Precision().clip_gradients(optimizer, clip_val=gradient_clip_val or 0, gradient_clip_algorithm=algorithm)

    def toggle_optimizer(self, optimizer: Any) -> None:
        """Let only this optimizer's parameters require a gradient, until `untoggle_optimizer`."""
        self._toggled.enter_context(frozen(params_of_others(optimizer, self._optimizers.raw)))

    def untoggle_optimizer(self, optimizer: Any) -> None:
        self._toggled.close()


class StepServices(ClientServices):
    """Implements the services where the module's own step evaluates it, perhaps on several dataloaders."""

    needs_sizes = True
    _suffix = ""

    def begin_loader(self, suffix: str) -> None:
        """Let keys end in `suffix` from now on, as Lightning does for one of several dataloaders.

        Args:
            suffix: The end of the keys. An empty one belongs to the only dataloader.
        """
        if suffix and suffix != self._suffix:
            self.logged.end_loader()
        self._suffix = suffix

    def log(self, name: str, *args: Any, add_dataloader_idx: bool = True, **kwargs: Any) -> None:
        key = name + self._suffix if add_dataloader_idx else name
        super().log(key, *args, **kwargs)


class EvaluationServices(StepServices):
    """Implements the services in an evaluation, where all processes are at the same batch and may gather."""

    services = tuple(name for name in SERVICES if name != "all_gather")

    def begin_loader(self, suffix: str) -> None:
        """Let keys end in `suffix` from now on.

        Args:
            suffix: The end of the keys. An empty one belongs to the only dataloader.

        Raises:
            RuntimeError: There are several processes, which must all have the same metric objects.
        """
        is_next = suffix and suffix != self._suffix
        if is_next and self.logged.metrics and world_size() > 1:
            raise RuntimeError(
                "with several processes a metric object cannot be logged by several dataloaders; log the value, or "
                "give data.source one validation loader"
            )
        super().begin_loader(suffix)


class ClientTestServices(StepServices):
    """Implements the services while a client is tested by the module's own step. Its values get keys `local/KEY`."""

    evaluates = True

    def log(self, name: str, *args: Any, **kwargs: Any) -> None:
        check_writer(f"local/{name}", "clients")
        super().log(name, *args, **kwargs)


def loader_suffix(dataloader_idx: int) -> str:
    """Return the end of the keys that are logged of one of several dataloaders.

    Args:
        dataloader_idx: Index of the dataloader.
    """
    return f"/dataloader_idx_{dataloader_idx}"


@contextmanager
def attach_services(modules: Sequence[LightningModule], methods: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Put services over the modules' own methods within the block, and restore the methods after it.

    Args:
        modules: The client, and the module that it is built around.
        methods: The services, by the name of the method that each replaces.
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
        modules: The client, and the module that it is built around.
        device: The device of the batches.
        precision: The Trainer's precision plugin. None: 32-true.
        datamodule: The user's own data module. As in Lightning, its transfer hooks go before the module's. None: there
            is no such data module.

    Attributes:
        datamodule: The user's own data module.
        hooked: Whether a hook of the user may change a batch.
        moves: Whether a hook of the user sees a batch before the batch lies on the device.
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
        self.datamodule = datamodule
        data: Any = datamodule
        module = modules[-1]
        before_owner = data if overridden(data, "on_before_batch_transfer") else module
        transfer_owner = data if overridden(data, "transfer_batch_to_device") else module
        self._before = before_owner.on_before_batch_transfer
        self._transfer = transfer_owner.transfer_batch_to_device
        self._after = hooks([data], "on_after_batch_transfer") or hooks(modules, "on_after_batch_transfer")
        hooked_before = overridden(before_owner, "on_before_batch_transfer")
        self.moves = hooked_before or overridden(transfer_owner, "transfer_batch_to_device")
        self.hooked = self.moves or bool(self._after)
        self._has_own_loss = len(modules) > 1

    def each(self, batches: Iterable[Any], dataloader_idx: int = 0) -> Iterator[Any]:
        """Yield batches as a call returns them. A `collate_fn` or a hook skips a batch by None.

        Args:
            batches: The batches.
            dataloader_idx: Index of their dataloader, which hooks of the user get.
        """
        transferred = (self(batch, dataloader_idx) for batch in without_none(batches))
        return without_none(transferred)

    def __call__(self, batch: Any, dataloader_idx: int = 0) -> Any:
        """Return the batch on the device and in the Trainer's precision.

        A batch that lies on the device already is not moved, unless a hook of the user would see the move.

        Args:
            batch: The batch.
            dataloader_idx: Index of its dataloader, which hooks of the user get.
        """
        if self.moves or not self._is_on_device(batch):
            batch = self._before(batch, dataloader_idx)
            batch = self._transfer(batch, self._device, dataloader_idx)
        for hook in self._after:
            batch = hook(batch, dataloader_idx)
        batch = self._precision.convert_input(batch)
        if self._has_own_loss or not isinstance(batch, tuple | list) or len(batch) != 2:
            return batch
        # A net has the losses and metrics of this package, which read classes in int64.
        x, y = batch
        return (x, class_labels(y)) if isinstance(y, Tensor) and y.dtype in WHOLE else batch

    def _is_on_device(self, batch: Any) -> bool:
        """Return True for a list or tuple of tensors that all lie on the device."""
        if type(batch) not in (list, tuple):
            return False
        return all(isinstance(part, Tensor) and part.device == self._device for part in batch)
