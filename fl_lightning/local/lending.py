"""Lends a client the Trainer services that Lightning gives to the fitted module only: logging and optimizers."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from pytorch_lightning import LightningModule
from torch import Tensor
from torchmetrics import Metric

if TYPE_CHECKING:
    from fl_lightning.local.optimizers import LocalOptimizer

FLUSH = 512


class LogBook:
    """Values logged by the clients of one round, reduced on the device.

    A number is averaged over the round weighted by its batch's size (`reduce_fx` "sum", "max" and "min" are kept);
    a metric object is computed over the whole cohort and then reset.
    """

    def __init__(self) -> None:
        self.batch_size = 1
        self._pending: dict[str, list[tuple[Any, float]]] = {}
        self._totals: dict[str, tuple[Tensor, float]] = {}
        self._reduce: dict[str, str] = {}
        self._metrics: dict[str, Metric] = {}

    def log(self, name: str, value: Any, reduce_fx: Any = "mean", batch_size: int | None = None) -> None:
        """Take one value; nothing is moved to the host.

        Raises:
            ValueError: if `value` is neither a number, a tensor of one element nor a metric, or the reduction is
                unknown.
        """
        if isinstance(value, Metric):
            self._metrics[name] = value
            return
        if isinstance(value, Tensor):
            if value.numel() != 1:
                raise ValueError(
                    f"self.log({name!r}) takes one number, got a tensor of shape {tuple(value.shape)}"
                )
            value = value.detach().reshape(())
        elif not isinstance(value, int | float):
            raise ValueError(
                f"self.log({name!r}) takes a number, a tensor or a metric, got {type(value).__name__}"
            )
        if name not in self._reduce:
            reduction = getattr(reduce_fx, "__name__", reduce_fx)
            if reduction not in ("mean", "sum", "max", "min"):
                raise ValueError(
                    f"self.log({name!r}): reduce_fx must be mean, sum, max or min, got {reduction!r}"
                )
            self._reduce[name] = reduction
        rows = self._pending.setdefault(name, [])
        rows.append((value, self.batch_size if batch_size is None else batch_size))
        if len(rows) >= FLUSH:
            self._flush(name)

    def _flush(self, name: str) -> None:
        rows = self._pending.pop(name, [])
        if not rows:
            return
        kind, sizes = self._reduce[name], [float(size) for _, size in rows]
        if all(isinstance(value, Tensor) for value, _ in rows):
            values = torch.stack([value for value, _ in rows]).double()
        else:
            values = torch.tensor([float(value) for value, _ in rows], dtype=torch.float64)
        old, count = self._totals.get(name, (None, 0.0))
        if kind == "mean":
            equal = len(set(sizes)) == 1
            new = (
                values.sum() * sizes[0]
                if equal
                else values @ torch.tensor(sizes, dtype=values.dtype).to(values.device)
            )
            new = new if old is None else old + new
        elif kind == "sum":
            new = values.sum() if old is None else old + values.sum()
        else:
            values = values if old is None else torch.cat([values, old.reshape(1)])
            new = values.max() if kind == "max" else values.min()
        self._totals[name] = (new, count + sum(sizes))

    def values(self) -> dict[str, Tensor]:
        """The round's reduced values by name, as 0-d tensors on the device, and an empty book."""
        for name in list(self._pending):
            self._flush(name)
        out = {
            name: total / count if self._reduce[name] == "mean" else total
            for name, (total, count) in self._totals.items()
        }
        for name, metric in self._metrics.items():
            out[name] = metric.compute()
            metric.reset()
        self.clear()
        return out

    def clear(self) -> None:
        """Forget everything (a round that failed)."""
        self._pending.clear()
        self._totals.clear()
        self._reduce.clear()
        self._metrics.clear()


def batch_length(batch: Any) -> int:
    """Samples in a batch: the length of its first tensor (1 where there is none)."""
    if isinstance(batch, Tensor):
        return len(batch) if batch.ndim else 1
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    if isinstance(batch, list | tuple):
        for item in batch:
            if isinstance(item, Tensor | Mapping | list | tuple):
                return batch_length(item)
    return 1


class Desk:
    """The services lent to a client: what its `self.log`, `self.optimizers()`, … do while the loop drives it."""

    def __init__(self, book: LogBook) -> None:
        self.book = book
        self.epoch_book: LogBook | None = None
        self._batch: Any = None
        self.optimizers_now: list[LocalOptimizer] = []
        self.schedulers_now: list[Any] = []
        self.backward: Callable[..., None] = lambda loss, *args, **kwargs: loss.backward(*args, **kwargs)

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

    def note_batch(self, batch: Any) -> None:
        """The batch whose size weighs what is logged from now on (looked up when something is)."""
        self._batch = batch

    def log_dict(self, values: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
        for name, value in values.items():
            self.log(
                name, value, **{key: kwargs[key] for key in ("reduce_fx", "batch_size") if key in kwargs}
            )

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
        mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
        self._toggled = [
            (p, p.requires_grad)
            for other in self.optimizers_now
            for group in other.param_groups
            for p in group["params"]
        ]
        for parameter, required in self._toggled:
            parameter.requires_grad = required and id(parameter) in mine

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
)


@contextmanager
def lend(modules: list[LightningModule], desk: Desk) -> Iterator[None]:
    """Put the desk's services over the modules' own methods, and take them back whatever happens."""
    for module in modules:
        for name in LENT:
            module.__dict__[name] = getattr(desk, name)
    try:
        yield
    finally:
        for module in modules:
            for name in LENT:
                module.__dict__.pop(name, None)
