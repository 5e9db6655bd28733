"""Trains one client for one exchange, as the Trainer would train a module of its own."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from fnmatch import fnmatchcase
from functools import cache
from inspect import Parameter, signature
from typing import Any, Protocol

import numpy as np
import torch
from pytorch_lightning import LightningModule
from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau

from fl_lightning.client import ClientModule
from fl_lightning.local.hooks import Placement, hooks, overridden
from fl_lightning.local.lending import Desk, LogBook, reduced
from fl_lightning.local.optimizers import (
    LocalOptimizer,
    LocalOptimizers,
    LocalScheduler,
    step_scheduler,
    zero_grad,
)
from fl_lightning.teacher import BATCH_NORMS, Repeats
from fl_lightning.types import Batch, Phase
from fl_lightning.utils.keyed import keyed_seed


class Settings(Protocol):
    """The loop's settings of local training."""

    @property
    def seed(self) -> int:
        """Keys every draw of the run."""

    lr_decay: float
    accumulate_grad_batches: int
    clip_norm: float | None
    max_local_steps: int | None


class LocalTrainer:
    """Runs the phases of a client's training in the one client module.

    Args:
        client: the module that every client is trained in.
        settings: the loop's settings of local training.
        precision: the Trainer's precision plugin.
        desk: the lent services, whose `optimizers()` and `lr_schedulers()` this keeps up to date.
        placed: puts batches where they belong.
    """

    def __init__(self, client: ClientModule, settings: Settings, precision: Any, desk: Desk, placed: Placement) -> None:
        self.client, self.settings, self.precision, self.desk = client, settings, precision, desk
        self.device, self._placed = placed.device, placed
        self.modules: list[LightningModule] = list(client.lightning_modules())
        self._seed = settings.seed
        self.modes = [(module, module.training) for module in client.modules()]
        self.batch_norms = [(name, part) for name, part in client.named_modules() if isinstance(part, BATCH_NORMS)]
        self.epoch_end: Callable[[int], None] | None = None
        self._reused: LocalOptimizers | None = None
        self._last: LocalOptimizers | None = None
        self._hooks: dict[str, list[Callable[..., Any]]] = {}
        inner = self.modules[-1]
        self._step: Callable[..., Any] | None = inner.optimizer_step if overridden(inner, "optimizer_step") else None
        self._clip: Callable[..., Any] | None = (
            inner.configure_gradient_clipping if overridden(inner, "configure_gradient_clipping") else None
        )
        self._zero = inner.optimizer_zero_grad if overridden(inner, "optimizer_zero_grad") else None
        self._backward = inner.backward if overridden(inner, "backward") else None
        self._schedule = inner.lr_scheduler_step if overridden(inner, "lr_scheduler_step") else None
        slope = type(client).exposure_slope is not ClientModule.exposure_slope
        self._slope = client.exposure_slope if slope else None

    def restore_modes(self) -> None:
        """Every module in the mode (train or eval) in which the user left it."""
        for module, mode in self.modes:
            if module.training != mode:
                module.training = mode

    def hooks_of(self, name: str) -> list[Callable[..., Any]]:
        """The hooks `name` of the client's modules that override it."""
        found = self._hooks.get(name)
        if found is None:
            found = self._hooks[name] = hooks(self.modules, name)
        return found

    def call(self, name: str, *args: Any) -> list[Any]:
        """Call the hook `name` of the client's modules that override it."""
        found = self.hooks_of(name)
        return [hook(*args) for hook in found] if found else []

    def seed(self, purpose: str, data: Any) -> None:
        """Key the global generators (dropout, what a module draws by itself) by the client and round of `data`."""
        seed = keyed_seed(self._seed, purpose, data.round_idx, data.client_id)
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        if self.device.type == "cuda":
            torch.cuda.manual_seed(seed)

    def train(self, data: Any, exchange: str, epochs: int) -> None:
        """All phases of one exchange on one client's data, in place; the client's context is set by the loop."""
        self.seed(f"train/{exchange}", data)
        passed: dict[str, int] = {}
        for phase in self.client.phases(exchange):
            self.restore_modes()
            if data.size(phase.split):
                own, before = epochs if phase.epochs is None else phase.epochs, passed.get(phase.split, 0)
                with nullcontext() if phase.trains is None else self._trained(phase.trains):
                    self._phase(phase, data, own, before)
                passed[phase.split] = before + own

    def _optimizers(self, phase: Phase) -> LocalOptimizers:
        """Built anew, or reset to what it was when it was built: momentum never outlives a client's round."""
        if self._reused is not None and phase.trains is None:
            self._reused.reset()
            return self._reused
        if self._last is not None and self._last is not self._reused:
            self._last.release()
        scaler = self._scaler()
        owner = type(self.modules[-1]).__name__
        found = self._last = LocalOptimizers(self.client.configure_optimizers(), owner, self._slope, scaler)
        if self.client.automatic_optimization and len(found.raw) > 1:
            raise ValueError(
                f"{owner} has {len(found.raw)} optimizers under automatic optimization; set "
                f"self.automatic_optimization = False and step them in training_step, as Lightning asks"
            )
        if self.client.automatic_optimization and any(needs_closure(optimizer) for optimizer in found.raw):
            for refused, setting in (
                (scaler is not None, "trainer.precision=bf16-mixed"),
                (self.settings.accumulate_grad_batches > 1, "model.accumulate_grad_batches=1"),
            ):
                if refused:
                    raise ValueError(
                        f"{type(found.raw[0]).__name__} computes its gradient more than once a step, over one batch "
                        f"and without a gradient scaler; set {setting}"
                    )
        own = type(self.client).configure_optimizers is not ClientModule.configure_optimizers
        if found.reusable and self.client.module is None and phase.trains is None and not own:
            self._reused = found
        self.desk.backward = self._backward_of(scaler)
        return found

    def _phase(self, phase: Phase, data: Any, epochs: int, before: int) -> None:
        """`epochs` passes over the phase's split, which earlier phases of the exchange have passed `before` times."""
        client, desk = self.client, self.desk
        optimizers = self._optimizers(phase)
        for optimizer in optimizers.raw:  # of a client that accumulated and did not step at its end
            zero_grad(optimizer)
        optimizers.set_lr(phase.lr, self.settings.lr_decay**data.round_idx)
        context = client.context
        steps, exposure = context.num_steps, context.exposure
        context.exposure += optimizers.exposure.value  # NaN where it is not defined, whatever the number of steps
        desk.optimizers_now = optimizers.wrapped
        desk.schedulers_now = [entry.scheduler for entry in optimizers.schedulers]
        batch_size = data.samples_per_batch(phase.split, phase.batch_size)
        batches = data.num_batches(phase.split, batch_size) - self._single_sample(
            data, phase.split, batch_size, phase.batch_size
        )
        repeats = context.repeats = self._repeats(phase, data, epochs)
        for epoch in range(epochs):
            if self._finished():
                break
            desk.epoch_book = LogBook() if optimizers.plateau else None
            desk.note_samples(data.size(phase.split))
            self.call("on_train_epoch_start")
            with_index = phase.with_index or repeats is not None
            for index, item in enumerate(data.batches(phase.split, before + epoch, batch_size, with_index=with_index)):
                if index == batches or self._finished():
                    break
                if repeats is None:
                    batch = self._placed(item)
                else:
                    batch = self._placed(item[0])
                    repeats.x, repeats.positions = batch[0], item[1]
                if not self._batch(batch, index, batches, optimizers):
                    break
                context.num_steps = steps + optimizers.steps
                context.exposure = exposure + optimizers.exposure.value
            else:
                if repeats is not None:
                    repeats.complete = True
            desk.note_samples(data.size(phase.split))
            self.call("on_train_epoch_end")
            if client.automatic_optimization:
                self._schedule_all(optimizers.schedulers, "epoch", epoch + 1)
            if self.epoch_end is not None:
                self.epoch_end(epoch)

    def _repeats(self, phase: Phase, data: Any, epochs: int) -> Repeats | None:
        """Where a teacher's logits of one epoch hold for the next: samples come back as they are."""
        if epochs < 2 or not self.client.distils:
            return None
        hooked = self._placed.transfers or self._placed.after
        return None if phase.with_index or hooked or data.augments(phase.split) else Repeats(data.size(phase.split))

    def _batch(self, batch: Batch, index: int, batches: int, optimizers: LocalOptimizers) -> bool:
        """Train on one batch; False: the client wants no more of this epoch."""
        client, settings = self.client, self.settings
        self.desk.note_batch(batch)
        if -1 in self.call("on_train_batch_start", batch, index):
            return False
        loss: Tensor | None = None
        if not client.automatic_optimization or not optimizers.wrapped:
            loss = client.training_step(batch, index)
        else:
            every = settings.accumulate_grad_batches
            boundary = (index + 1) % every == 0 or index + 1 == batches
            optimizer = optimizers.wrapped[0]

            def closure() -> Tensor | None:
                nonlocal loss
                if index % every == 0:
                    self.call("on_before_zero_grad", optimizer)
                    if self._zero is None:
                        zero_grad(optimizer.optimizer)
                    else:
                        self._zero(data_epoch(client), index, optimizer.optimizer)
                loss = client.training_step(batch, index)
                if loss is None:
                    return None
                self.call("on_before_backward", loss)
                self.desk.backward(loss if every == 1 else loss / every)
                self.call("on_after_backward")
                if boundary:
                    self._before_step(optimizer)
                return loss

            if not boundary:
                closure()
            elif self._step is not None:
                self._step(data_epoch(client), index, optimizer, closure)
            elif needs_closure(optimizer.optimizer):
                optimizer.step(closure)
            elif closure() is not None:
                optimizer.step()
            if boundary and optimizers.schedulers:
                self._schedule_all(optimizers.schedulers, "step", optimizers.steps)
        if self.hooks_of("on_train_batch_end"):
            outputs = {} if loss is None else {"loss": loss.detach(), **client.outputs}
            self.call("on_train_batch_end", outputs, batch, index)
        return True

    def _before_step(self, optimizer: LocalOptimizer) -> None:
        optimizer.unscale()
        self.call("on_before_optimizer_step", optimizer)
        if self._clip is not None:
            self._clip(optimizer, self.settings.clip_norm, "norm")
        elif self.settings.clip_norm is not None:
            self.desk.clip_gradients(optimizer, self.settings.clip_norm)

    def _backward_of(self, scaler: Any | None) -> Callable[..., None]:
        backward = self._backward
        if scaler is None and backward is None:
            return Tensor.backward

        def run(loss: Tensor, *args: Any, **kwargs: Any) -> None:
            scaled = loss if scaler is None else scaler.scale(loss)
            if backward is None:
                scaled.backward(*args, **kwargs)
            else:
                backward(scaled, *args, **kwargs)

        return run

    def _schedule_all(self, schedulers: list[LocalScheduler], interval: str, count: int) -> None:
        due = [entry for entry in schedulers if entry.interval == interval and count and count % entry.frequency == 0]
        monitors = any(isinstance(entry.scheduler, ReduceLROnPlateau) for entry in due)
        book = self.desk.epoch_book if monitors else None
        logged = {} if book is None else reduced([book.drain()[1]])
        for entry in due:
            step_scheduler(entry, logged, self._schedule)

    def _finished(self) -> bool:
        limit = self.settings.max_local_steps
        return limit is not None and self.client.num_steps >= limit

    def _single_sample(self, data: Any, split: str, batch_size: int, own: int | str | None) -> int:
        """1 where the last batch is a single sample that a BatchNorm net leaves out.

        A client with one sample in all trains with BatchNorm in eval mode instead.

        Raises:
            ValueError: if `batch_size` is 1 and the net has BatchNorm.
        """
        norms = [part for name, part in self.batch_norms if self.client.has(data.client_id, name)]
        if not norms:
            return 0
        n = data.size(split)
        if n == 1:
            for module in norms:
                module.eval()
            return 0
        if batch_size == 1:
            setting = "data.batch_size" if own is None else "the phase's batch_size"
            raise ValueError(f"batch_size must be at least 2 for a net with BatchNorm, got 1; raise {setting}")
        return int(n % batch_size == 1)

    @contextmanager
    def _trained(self, patterns: tuple[str, ...]) -> Iterator[None]:
        """Let only the named parameters require a gradient."""
        left = [
            parameter
            for name, parameter in self.client.params().items()
            if not any(fnmatchcase(name, pattern) for pattern in patterns)
        ]
        if len(left) == len(self.client.params()):
            raise ValueError(
                f"Phase(trains=...) must name trainable parameters, got {patterns}, which match none of "
                f"{list(self.client.params())[:8]}"
            )
        for parameter in left:
            parameter.requires_grad_(False)
            parameter.grad = None
        try:
            yield
        finally:
            for parameter in left:
                parameter.requires_grad_(True)

    def _scaler(self) -> Any | None:
        """A fresh gradient scaler for one client and phase, so that clients do not depend on each other's order."""
        if getattr(self.precision, "scaler", None) is None:
            return None
        return torch.amp.GradScaler(self.device.type)


def data_epoch(client: ClientModule) -> int:
    """The `epoch` argument of Lightning's step hooks: the round."""
    return client.trainer.current_epoch


def needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """True for optimizers whose step cannot be called without a closure (LBFGS, SAM)."""
    return _takes_closure(type(optimizer).step)


@cache
def _takes_closure(step: Callable[..., Any]) -> bool:
    closure = signature(step).parameters.get("closure")
    return closure is not None and closure.default is Parameter.empty
