"""Local training: one client for one exchange, as a Trainer would train the module."""

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from fnmatch import fnmatchcase
from time import monotonic
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from pytorch_lightning import LightningModule
from pytorch_lightning.plugins.precision import Precision
from torch import Tensor, nn
from torch.optim import Optimizer

from fl_lightning.client.hooks import hooks, own_hook
from fl_lightning.client.modes import BATCH_NORMS
from fl_lightning.client.module import ClientModule
from fl_lightning.client.optimizers import LocalOptimizers, frozen
from fl_lightning.client.progress import LocalProgress
from fl_lightning.client.services import BatchTransfer, ClientServices
from fl_lightning.client.teacher import LogitCache
from fl_lightning.engines.building import OptimizerBuilder
from fl_lightning.engines.settings import LocalSettings
from fl_lightning.types import Batch, ClientData, Phase
from fl_lightning.utils.devices import to_device
from fl_lightning.utils.keyed import keyed_seed

LOCAL_HOOKS = (
    "on_train_epoch_start",
    "on_train_epoch_end",
    "on_train_batch_start",
    "on_train_batch_end",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
)
"""Hooks of the client's modules that are called in local training."""


class LocalTrainer:
    """Runs the phases of a client's training in the one client module.

    Args:
        client: the module that every client is trained in.
        settings: of local training.
        services: attached to the client; told of every client, phase, epoch and batch.
        transfer: puts batches where they belong.
        device: that the client is trained on.
        precision: the Trainer's precision plugin.
        batch_hooks: of callbacks, by name, called before the client's of the same name.
    """

    def __init__(
        self,
        client: ClientModule,
        settings: LocalSettings,
        services: ClientServices,
        transfer: BatchTransfer,
        device: torch.device,
        precision: Precision,
        batch_hooks: Mapping[str, Sequence[Callable[..., None]]] = MappingProxyType({}),
    ) -> None:
        self.client, self.settings, self.services = client, settings, services
        self.transfer, self.device, self.precision = transfer, device, precision
        self.modules: list[LightningModule] = client.lightning_modules()
        self._training_step: Callable[..., Any] = client.training_step
        self._modes = [(module, module.training) for module in client.modules()]
        self._batch_norms = [(name, part) for name, part in client.named_modules() if isinstance(part, BATCH_NORMS)]
        self.lr_factors: Sequence[Sequence[float]] = ()
        self.batch_hooks = {name: found for name, found in batch_hooks.items() if found and name in LOCAL_HOOKS}
        self._hooks = {name: [*self.batch_hooks.get(name, ()), *hooks(self.modules, name)] for name in LOCAL_HOOKS}
        inner, clip_gradients = self.modules[-1], services.clip_gradients if settings.clip_norm else None
        self._optimizer_step, self._zero_grad = (
            own_hook(inner, "optimizer_step"),
            own_hook(inner, "optimizer_zero_grad"),
        )
        self._clip = own_hook(inner, "configure_gradient_clipping") or clip_gradients
        self.builder = OptimizerBuilder(client, settings.accumulate_grad_batches, device, precision)
        self._deadline: float | None = None
        self._round_idx, self._decays = 0, settings.decays

    def scale_lr(self, factors: Sequence[Sequence[float]]) -> None:
        """Multiply the learning rates of clients to come, by optimizer and parameter group; empty: leave them."""
        self.lr_factors = factors

    def restore_modes(self) -> None:
        """Put every module back in the mode (train or eval) in which the user left it."""
        for module, mode in self._modes:
            if module.training != mode:
                module.training = mode

    def seed(self, purpose: str, data: ClientData) -> None:
        """Key the global generators (dropout, what a module draws by itself) by the client and round of `data`."""
        seed = keyed_seed(self.settings.seed, purpose, data.round_idx, data.client_id)
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        if self.device.type == "cuda":
            torch.cuda.manual_seed(seed)

    def train(
        self,
        data: ClientData,
        exchange: str,
        neutral: bool = False,
        on_epoch_end: Sequence[Callable[[int], None]] = (),
    ) -> None:
        """Run all phases of one exchange on the client's data; the module is trained in place.

        Raises:
            TimeoutError: it took longer than `client_timeout`.
        """
        timeout = self.settings.client_timeout
        self._deadline = None if timeout is None else monotonic() + timeout
        self._round_idx = data.round_idx
        self.seed(f"train/{exchange}", data)
        self._training_step = self.client.local_loss if neutral else self.client.training_step
        local_epochs, passed = self.settings.local_epochs, dict[str, int]()
        if isinstance(local_epochs, list):
            local_epochs = local_epochs[data.client_id]
        for phase in self.client.phases(exchange):
            self.restore_modes()
            own = data if phase.indices is None else data.restricted(phase.split, phase.indices)
            if size := own.size(phase.split):
                epochs = local_epochs if phase.epochs is None else phase.epochs
                before = passed.get(phase.split, 0) if phase.counts else 0
                with nullcontext() if phase.trains is None else only(self.client, phase.trains):
                    self._phase(phase, own, size, epochs, before, on_epoch_end)
                if phase.counts:
                    passed[phase.split] = before + epochs
        if self._deadline is not None:
            self._check_time(self._deadline)

    def _phase(
        self,
        phase: Phase,
        data: ClientData,
        size: int,
        epochs: int,
        before: int,
        on_epoch_end: Sequence[Callable[[int], None]],
    ) -> None:
        """Run at most `epochs` passes over the phase's split, after `before` earlier ones."""
        client, settings = self.client, self.settings
        progress = client.context.progress if phase.counts else LocalProgress()
        optimizers = self.builder.of(phase)
        factor = settings.lr_factor(data.round_idx) if self._decays else None
        optimizers.begin(progress, phase.lr, factor, self.lr_factors)
        for optimizer in optimizers.raw if not client.automatic_optimization else ():
            zero_grad(optimizer)  # of a client that accumulated and did not step at its end
        cache = None
        if epochs > 1 and client.distils:
            changes = phase.with_index or self.transfer.hooked or data.augments(phase.split) or data.drop_last
            cache = None if changes else LogitCache(size)  # of samples that are the same in every epoch
        if cache is not client.context.logit_cache:
            client.context.keep_logits(cache)
        limit = settings.max_local_steps if phase.counts else None
        for epoch in range(epochs):
            if limit is not None and progress.num_steps >= limit:
                break
            self.services.begin_epoch(optimizers, size)
            for hook in self._hooks["on_train_epoch_start"]:
                hook()
            self._epoch(phase, data, size, before + epoch, optimizers, limit)
            if found := self._hooks["on_train_epoch_end"]:
                self.services.begin_samples(size)
                for hook in found:
                    hook()
            if optimizers.schedulers and client.automatic_optimization:
                self.builder.schedule(optimizers.schedulers, "epoch", epoch + 1)
            for told in on_epoch_end:
                told(epoch)

    def _epoch(
        self,
        phase: Phase,
        data: ClientData,
        size: int,
        epoch: int,
        optimizers: LocalOptimizers,
        limit: int | None,
    ) -> None:
        """Run one pass, to its end or to `limit` steps of the exchange."""
        client, hooks, cache = self.client, self._hooks, self.client.context.logit_cache
        batch_size = data.samples_per_batch(phase.split, phase.batch_size)
        num_batches = -(-size // batch_size)
        single = False
        if self._batch_norms:
            norms = [part for name, part in self._batch_norms if client.has(data.client_id, name)]
            single = leaves_out_last(norms, size, batch_size, phase)
        num_batches -= int(size % batch_size > 0 if data.drop_last else single)
        with_index = phase.with_index or cache is not None
        for index, item in enumerate(data.batches(phase.split, epoch, batch_size, with_index=with_index)):
            if index == num_batches or (limit is not None and client.num_steps >= limit):
                return
            if self._deadline is not None:
                self._check_time(self._deadline)
            positions: Any = item[1] if with_index else None
            batch = self.transfer(item[0] if with_index else item)  # the user's hooks see it as it is, without these
            if cache is not None:
                cache.begin_batch(batch[0], positions)
            elif with_index:
                batch = batch, to_device(positions, self.device)
            self.services.begin_batch(batch)
            if (found := hooks["on_train_batch_start"]) and -1 in [hook(batch, index) for hook in found]:
                return  # the client ends this epoch
            if client.automatic_optimization and optimizers.wrapped:
                loss = self._optimize(batch, index, data.ended or index + 1 == num_batches, optimizers)
            else:
                loss = self._training_step(batch, index)
            for hook in hooks["on_train_batch_end"]:
                hook({} if loss is None else {"loss": loss.detach(), **client.outputs}, batch, index)
        if cache is not None:
            cache.finish_epoch()

    def _check_time(self, deadline: float) -> None:
        if monotonic() > deadline:
            raise TimeoutError(
                f"the training of a client may take model.client_timeout={self.settings.client_timeout} s, and took "
                f"longer; raise it, or set model.on_error to skip"
            )

    def _optimize(self, batch: Batch, index: int, last: bool, optimizers: LocalOptimizers) -> Tensor | None:
        """Run forward, backward and, at the end of `accumulate_grad_batches`, a step; returns the loss."""
        every, optimizer, hooks = self.settings.accumulate_grad_batches, optimizers.wrapped[0], self._hooks
        boundary = last or (index + 1) % every == 0
        if boundary and every > 1:
            optimizers.exposure.accumulates((index % every + 1) / every)
        loss: Tensor | None = None

        def closure() -> Tensor | None:
            nonlocal loss
            if index % every == 0:
                for hook in hooks["on_before_zero_grad"]:
                    hook(optimizer)
                if self._zero_grad is None:
                    zero_grad(optimizer.optimizer)
                else:
                    self._zero_grad(self._round_idx, index, optimizer.optimizer)
            loss = self._training_step(batch, index)
            if loss is None:
                return None
            for hook in hooks["on_before_backward"]:
                hook(loss)
            optimizers.backward(loss if every == 1 else loss / every)
            for hook in hooks["on_after_backward"]:
                hook()
            if boundary:
                if optimizer.scaler is not None:
                    optimizer.unscale()
                for hook in hooks["on_before_optimizer_step"]:
                    hook(optimizer)
                if self._clip is not None:
                    self._clip(optimizer, self.settings.clip_norm, "norm")
            return loss

        if not boundary:
            closure()
        elif self._optimizer_step is not None:
            self._optimizer_step(self._round_idx, index, optimizer, closure)
        elif optimizer.takes_closure:
            optimizer.step(closure)
        elif closure() is not None:
            optimizer.step()
        if boundary and optimizers.schedulers:
            self.builder.schedule(optimizers.schedulers, "step", optimizers.exposure.steps)
        return loss


def zero_grad(optimizer: Optimizer) -> None:
    """Set the gradients to None, without the bookkeeping of `Optimizer.zero_grad` unless it is overridden."""
    if type(optimizer).zero_grad is not Optimizer.zero_grad:
        optimizer.zero_grad()
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


def leaves_out_last(norms: Sequence[nn.Module], size: int, batch_size: int, phase: Phase) -> bool:
    """True where a client's last batch is a single sample, which a net with BatchNorm leaves out.

    A client with one sample in all trains with BatchNorm in eval mode instead.

    Args:
        norms: of the client's net.
        size: its samples.
        batch_size: samples per batch.
        phase: in training.

    Raises:
        ValueError: `batch_size` is 1.
    """
    for module in norms if size == 1 else ():
        module.eval()
    if not norms or size == 1:
        return False
    if batch_size == 1:
        setting = "data.batch_size" if phase.batch_size is None else "the phase's batch_size"
        raise ValueError(f"batch_size must be at least 2 for a net with BatchNorm, got 1; raise {setting}")
    return size % batch_size == 1


def matching(names: Iterable[str], patterns: tuple[str, ...]) -> set[str]:
    """Choose the names that one of the `fnmatch` patterns matches."""
    return {name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)}


@contextmanager
def only(client: ClientModule, patterns: tuple[str, ...]) -> Iterator[None]:
    """Context in which only the parameters that match the patterns are trained; steps that train none shared are idle.

    Raises:
        ValueError: if the patterns name none.
    """
    progress = client.context.progress
    since = replace(progress)
    with frozen(left_out(client, patterns)):
        yield
    if not matching(client.params(), patterns):
        progress.was_idle(since)


def left_out(client: ClientModule, patterns: tuple[str, ...]) -> list[Tensor]:
    """List the trainable parameters that no pattern names; they lose their gradients.

    Raises:
        ValueError: if the patterns name none.
    """
    params = client.trained()
    trained = matching(params, patterns)
    left = [parameter for name, parameter in params.items() if name not in trained]
    if not trained:
        raise ValueError(
            f"Phase(trains=...) must name trainable parameters, got {patterns}, which match none of {list(params)[:8]}"
        )
    for parameter in left:
        parameter.grad = None
    return left
