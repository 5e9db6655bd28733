"""Lends a client the Trainer services that Lightning gives to the fitted module only: logging and optimizers."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Number
from typing import TYPE_CHECKING, Any

import torch
from pytorch_lightning import LightningModule
from torch import Tensor, nn
from torchmetrics import Metric

from fl_lightning.local.optimizers import toggle

if TYPE_CHECKING:
    from fl_lightning.local.optimizers import LocalOptimizer

FLUSH = 512

Rows = dict[str, tuple[str, list[tuple[float, float]]]]
"""By name the reduction and the logged (value, batch size) on the host."""


class LogBook:
    """Values logged by the clients of one round, kept on the device until the round is over.

    A number is averaged over the round weighted by its batch's size (`reduce_fx` "sum", "max" and "min" are kept);
    a metric object is computed over the whole cohort and then reset.
    """

    def __init__(self) -> None:
        self.batch_size = 1
        self.metrics: dict[str, Metric] = {}
        self._rows: dict[str, list[tuple[Any, float]]] = {}
        self._reduce: dict[str, str] = {}
        self._first: dict[str, int] = {}

    def log(self, name: str, value: Any, reduce_fx: Any = "mean", batch_size: int | None = None) -> None:
        """Take one value; nothing is moved to the host.

        Raises:
            ValueError: if `value` is neither a number, a tensor of one element nor a metric, or the reduction is
                unknown.
        """
        if isinstance(value, Tensor):
            if value.numel() != 1:
                raise ValueError(f"self.log({name!r}) takes one number, got a tensor of shape {tuple(value.shape)}")
            value = value.detach()
        elif isinstance(value, Metric):
            self.metrics[name] = value
            return
        elif not isinstance(value, Number):
            raise ValueError(f"self.log({name!r}) takes a number, a tensor or a metric, got {type(value).__name__}")
        if name not in self._reduce:
            reduction = getattr(reduce_fx, "__name__", reduce_fx)
            if reduction not in ("mean", "sum", "max", "min"):
                raise ValueError(f"self.log({name!r}): reduce_fx must be mean, sum, max or min, got {reduction!r}")
            self._reduce[name] = reduction
        rows = self._rows.setdefault(name, [])
        rows.append((value, self.batch_size if batch_size is None else batch_size))
        if len(rows) - self._first.get(name, 0) >= FLUSH:
            self._shorten(name)

    def next_client(self) -> None:
        """What follows is another client's: rows of two clients are not reduced together before the round's end."""
        self._first = {name: len(rows) for name, rows in self._rows.items()}

    def _shorten(self, name: str) -> None:
        """Reduce one client's many rows to one, on the device."""
        first, kind = self._first.get(name, 0), self._reduce[name]
        rows = self._rows[name][first:]
        values = torch.stack([torch.as_tensor(value).reshape(()).double() for value, _ in rows])
        sizes = torch.tensor([size for _, size in rows], dtype=torch.float64).to(values.device)
        if kind == "mean":
            value = (values @ sizes) / sizes.sum()
        else:
            value = values.sum() if kind == "sum" else values.max() if kind == "max" else values.min()
        self._rows[name][first:] = [(value, float(sum(size for _, size in rows)))]

    def drain(self, more: Sequence[Tensor] = ()) -> tuple[list[float], Rows]:
        """All rows on the host, and `more` 0-d tensors, in one transfer; the book is empty but for its metrics."""
        device = [value for rows in self._rows.values() for value, _ in rows if isinstance(value, Tensor)]
        parts = [stacked(values) for values in (more, device) if values]
        host = torch.cat(parts).tolist() if parts else []
        numbers = iter(host[len(more) :])
        out: Rows = {}
        for name, rows in self._rows.items():
            pairs = [(next(numbers) if isinstance(value, Tensor) else float(value), float(n)) for value, n in rows]
            out[name] = (self._reduce[name], pairs)
        self.clear(metrics=False)
        return host[: len(more)], out

    def metric_paths(self, root: nn.Module) -> dict[str, str]:
        """Where in `root` the logged metric objects are, so that ranks on which none was logged find them."""
        if not self.metrics:
            return {}
        where = {id(module): path for path, module in root.named_modules()}
        return {name: where[id(metric)] for name, metric in self.metrics.items() if id(metric) in where}

    def compute_metrics(self, root: nn.Module, paths: Sequence[Mapping[str, str]]) -> dict[str, float]:
        """The values of the metric objects, which are reset; in one order on all ranks, since each is a collective.

        Args:
            root: the module that they are part of.
            paths: `metric_paths` of every rank.
        """
        for name, path in {name: path for found in paths for name, path in found.items()}.items():
            self.metrics.setdefault(name, root.get_submodule(path))  # type: ignore[arg-type]
        out = {}
        for name in sorted(self.metrics):
            metric = self.metrics.pop(name)
            out[name] = float(metric.compute())
            metric.reset()
        return out

    def clear(self, metrics: bool = True) -> None:
        """Forget everything (a round that failed)."""
        self._rows, self._reduce, self._first = {}, {}, {}
        if metrics:
            for metric in self.metrics.values():
                metric.reset()
            self.metrics.clear()


def stacked(values: Sequence[Tensor]) -> Tensor:
    """Tensors of one element each as one float64 vector."""
    if len({value.dtype for value in values}) > 1:
        values = [value.double() for value in values]
    return torch.stack([value.reshape(()) if value.ndim else value for value in values]).double()


def finite_rows(book: Rows) -> Rows:
    """What was logged without NaN and infinities: those of clients that are skipped."""
    finite = {name: (kind, [row for row in pairs if math.isfinite(row[0])]) for name, (kind, pairs) in book.items()}
    return {name: (kind, pairs) for name, (kind, pairs) in finite.items() if pairs}


def reduced(books: Sequence[Rows]) -> dict[str, float]:
    """The values of several processes' rows; exact sums, so that it does not matter who logged what."""
    merged: Rows = {}
    for rows in books:
        for name, (kind, pairs) in rows.items():
            merged.setdefault(name, (kind, []))[1].extend(pairs)
    out = {}
    for name, (kind, pairs) in merged.items():
        values = [value for value, _ in pairs]
        if kind == "mean":
            finite = all(math.isfinite(value) for value in values)
            total = math.fsum(value * n for value, n in pairs) if finite else sum(value * n for value, n in pairs)
            size = math.fsum(n for _, n in pairs)
            out[name] = total / size if size else math.nan
        elif kind == "sum":
            out[name] = math.fsum(values) if all(math.isfinite(value) for value in values) else sum(values)
        else:
            out[name] = max(values) if kind == "max" else min(values)
    return out


def batch_length(batch: Any) -> int:
    """Samples in a batch: the length of its first tensor (1 where there is none)."""
    if isinstance(batch, Tensor):
        return batch.shape[0] if batch.ndim else 1
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    if isinstance(batch, list | tuple):
        for item in batch:
            if isinstance(item, Tensor | Mapping | list | tuple):
                return batch_length(item)
    return 1


class Desk:
    """The services lent to a client: what its `self.log`, `self.optimizers()`, … do while the loop drives it."""

    def __init__(self, book: LogBook, trains: bool = True) -> None:
        self.book, self.trains = book, trains
        self.epoch_book: LogBook | None = None
        self._batch: Any = None
        self.optimizers_now: list[LocalOptimizer] = []
        self.schedulers_now: list[Any] = []
        self.backward: Callable[..., None] = Tensor.backward

    def log(
        self,
        name: str,
        value: Any,
        *args: Any,
        reduce_fx: Any = "mean",
        batch_size: int | None = None,
        **ignored: Any,
    ) -> None:
        if batch_size is None and self._batch is not None:
            self.book.batch_size, self._batch = batch_length(self._batch), None
        self.book.log(name, value, reduce_fx, batch_size)
        if self.epoch_book is not None:
            self.epoch_book.log(name, value, reduce_fx, batch_size or self.book.batch_size)

    def all_gather(self, data: Any, *args: Any, **kwargs: Any) -> Any:
        """What one process has.

        Raises:
            RuntimeError: with several, which are at different clients and would wait for each other for ever.
        """
        world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
        if world > 1:
            raise RuntimeError(
                f"self.all_gather cannot be called in local training, where {world} processes are at different "
                f"clients; log the value, or gather in on_validation_epoch_end"
            )
        return data

    def note_batch(self, batch: Any) -> None:
        """The batch whose size weighs what is logged from now on (looked up when something is)."""
        self._batch = batch

    def note_samples(self, count: int) -> None:
        """What is logged from now on weighs as much as so many samples."""
        self.book.batch_size, self._batch = count, None

    def log_dict(self, values: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
        for name, value in values.items():
            self.log(name, value, **{key: kwargs[key] for key in ("reduce_fx", "batch_size") if key in kwargs})

    def optimizers(self, use_pl_optimizer: bool = True) -> Any:
        chosen: list[Any] = list(self.optimizers_now)
        if not use_pl_optimizer:
            chosen = [optimizer.optimizer for optimizer in self.optimizers_now]
        return chosen[0] if len(chosen) == 1 else chosen

    def lr_schedulers(self) -> Any:
        if not self.schedulers_now:
            return None
        return self.schedulers_now[0] if len(self.schedulers_now) == 1 else list(self.schedulers_now)

    def manual_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        self.backward(loss, *args, **kwargs)

    def clip_gradients(
        self,
        optimizer: Any,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        if not gradient_clip_val:
            return
        params = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if gradient_clip_algorithm == "value":
            torch.nn.utils.clip_grad_value_(params, gradient_clip_val)
        else:
            torch.nn.utils.clip_grad_norm_(params, gradient_clip_val)

    def toggle_optimizer(self, optimizer: Any) -> None:
        """Only this optimizer's parameters require a gradient, until `untoggle_optimizer`."""
        self._toggled = toggle(optimizer, self.optimizers_now)

    def untoggle_optimizer(self, optimizer: Any) -> None:
        for parameter, required in self._toggled:
            parameter.requires_grad = required


LENT = (
    "log",
    "log_dict",
    "optimizers",
    "lr_schedulers",
    "manual_backward",
    "clip_gradients",
    "toggle_optimizer",
    "untoggle_optimizer",
    "all_gather",
)


@contextmanager
def lend(modules: list[LightningModule], desk: Desk) -> Iterator[None]:
    """Put the desk's services over the modules' own methods, and take them back whatever happens."""
    names = [name for name in LENT if name != "all_gather" or desk.trains]
    for module in modules:
        for name in names:
            module.__dict__[name] = getattr(desk, name)
    try:
        yield
    finally:
        for module in modules:
            for name in names:
                module.__dict__.pop(name, None)
