"""Local training: one client for one exchange, as a Trainer would train the module."""

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from fnmatch import fnmatchcase
from math import ceil, inf
from time import monotonic
from typing import Any, NoReturn

import numpy as np
import torch
from pytorch_lightning import LightningModule
from pytorch_lightning.plugins.precision import Precision
from torch import Tensor, nn
from torch.optim import Optimizer

from fl_lightning.client.hooks import STEP_HOOKS, hooks, own_hook
from fl_lightning.client.modes import BATCH_NORMS
from fl_lightning.client.module import ClientModule
from fl_lightning.client.optimizers import LocalOptimizers, frozen
from fl_lightning.client.progress import LocalProgress
from fl_lightning.client.services import BatchTransfer, ClientServices
from fl_lightning.client.teacher import LogitCache
from fl_lightning.engines.building import OptimizerBuilder
from fl_lightning.engines.lockstep import Passes
from fl_lightning.engines.settings import LocalSettings
from fl_lightning.types import Batch, ClientData, Phase
from fl_lightning.utils.devices import to_device
from fl_lightning.utils.keyed import keyed_seed

EpochHook = Callable[[int, int], None]
"""`(client_id, epoch)`, at the end of each of a client's epochs."""

LOCAL_HOOKS = ("on_train_epoch_start", "on_train_epoch_end", *STEP_HOOKS)
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
        batch_hooks: Mapping[str, Sequence[Callable[..., None]]],
    ) -> None:
        self.client, self.settings, self.services = client, settings, services
        self.transfer, self.device, self.precision = transfer, device, precision
        self.modules: list[LightningModule] = client.lightning_modules()
        self._training_step: Callable[..., Any] = client.training_step
        self._modes = [(module, module.training) for module in client.modules()]
        self.batch_norms = [(name, part) for name, part in client.named_modules() if isinstance(part, BATCH_NORMS)]
        self.lr_factors: Sequence[Sequence[float]] = ()
        self.batch_hooks = {
            name: callables for name, callables in batch_hooks.items() if callables and name in LOCAL_HOOKS
        }
        self._hooks = {name: [*self.batch_hooks.get(name, ()), *hooks(self.modules, name)] for name in LOCAL_HOOKS}
        inner, clip_gradients = self.modules[-1], services.clip_gradients if settings.clip_norm else None
        names = "optimizer_step", "optimizer_zero_grad", "configure_gradient_clipping"
        self._optimizer_step, own_zero_grad, own_clip = (own_hook(inner, name) for name in names)
        self._zero_grad = own_zero_grad or (lambda *args: zero_grad(args[-1]))
        self._clip = own_clip or clip_gradients
        given = self._hooks["on_before_zero_grad"], self._hooks["on_before_optimizer_step"]
        hands_out = any((*given, self._optimizer_step, own_zero_grad, own_clip))
        self.builder = OptimizerBuilder(client, settings.accumulate_grad_batches, device, precision, hands_out)
        self._deadline = inf
        self._round_idx = 0

    def scale_lr(self, factors: Sequence[Sequence[float]]) -> None:
        """Multiply the learning rates of clients to come, by optimizer and parameter group.

        Empty: leave them.
        """
        self.lr_factors = factors

    # --- rules of every engine ---

    def passes(self, data: ClientData, phase: Phase) -> Passes:
        """Cut a client's samples into the batches of a phase.

        Raises:
            ValueError: batches of one sample for a net with BatchNorm, which leaves out a last batch of one.
        """
        size, batch_size = data.size(phase.split), data.samples_per_batch(phase.split, phase.batch_size)
        epochs = self.settings.epochs_of(data.client_id) if phase.epochs is None else phase.epochs
        normalizes = size > 1 and bool(self._batch_norms_of(data.client_id))
        if normalizes and batch_size == 1:
            setting = "data.batch_size" if phase.batch_size is None else "the phase's batch_size"
            raise ValueError(f"batch_size must be at least 2 for a net with BatchNorm, got 1; raise {setting}")
        return Passes.over(size, batch_size, epochs, normalizes, data.drop_last)

    def _batch_norms_of(self, client_id: int) -> list[nn.Module]:
        """List the BatchNorm modules of a client's net."""
        return [part for name, part in self.batch_norms if self.client.has(client_id, name)]

    def step_limit(self, phase: Phase) -> int | None:
        """Give the most steps of an exchange at whose number a phase ends.

        None: none.
        """
        return self.settings.max_local_steps if phase.counts else None

    def batch_limit(self, data: ClientData, phase: Phase, passes: Passes, num_steps: int) -> int | None:
        """Give the most batches of a phase, which a straggler has fewer of.

        None: as many as there are.

        Args:
            data: of the client, which tells the share of its work that it makes.
            phase: that begins.
            passes: of the phase.
            num_steps: of the exchange so far.
        """
        most, whole = self.settings.max_batches if phase.counts else None, passes.epochs * passes.steps
        left = None if most is None else most - num_steps * self.settings.accumulate_grad_batches
        if data.local_work == 1:
            return left
        return ceil(data.local_work * (whole if left is None else min(whole, left)) - 1e-9)

    def repeats_samples(self, data: ClientData, phase: Phase, passes: Passes) -> bool:
        """Return True where all samples come back unchanged in each epoch, so that a teacher's logits can be kept."""
        changes = phase.with_index or self.transfer.hooked or data.augments(phase.split) or data.drop_last
        return not changes and passes.num_samples == data.size(phase.split)

    # --- one client ---

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
        self, data: ClientData, exchange: str, fedavg_equivalent: bool = False, on_epoch_end: Sequence[EpochHook] = ()
    ) -> None:
        """Run all phases of one exchange on the client's data.

        The module is trained in place.

        Raises:
            TimeoutError: it took longer than `client_timeout`.
        """
        self._deadline = monotonic() + (self.settings.client_timeout or inf)
        self._round_idx = data.round_idx
        self.seed(f"train/{exchange}", data)
        self._training_step = self.client.local_loss if fedavg_equivalent else self.client.training_step
        passed = Counter[str]()
        for phase in self.client.phases(exchange):
            self.restore_modes()
            samples = data if phase.indices is None else data.restricted(phase.split, phase.indices)
            if samples.size(phase.split):
                with nullcontext() if phase.trains is None else only(self.client, phase.trains):
                    self._phase(phase, samples, passed if phase.counts else Counter(), on_epoch_end)
        if monotonic() > self._deadline:
            self._stop()

    def _phase(self, phase: Phase, data: ClientData, passed: Counter[str], on_epoch_end: Sequence[EpochHook]) -> None:
        """Run the passes over the phase's split, after those that have `passed`."""
        client, size, passes = self.client, data.size(phase.split), self.passes(data, phase)
        progress = client.context.progress if phase.counts else LocalProgress()
        optimizers = self.builder.of(phase)
        optimizers.begin(progress, phase.lr, self.settings.lr_factor(data.round_idx), self.lr_factors)
        for optimizer in optimizers.raw if not client.automatic_optimization else ():
            zero_grad(optimizer)  # of a client that accumulated and did not step at its end
        repeats = passes.epochs > 1 and client.distils and self.repeats_samples(data, phase, passes)
        if repeats or client.context.logit_cache is not None:  # of the phase before
            client.context.keep_logits(LogitCache(size) if repeats else None)
        works = None if data.local_work == 1 else self.batch_limit(data, phase, passes, progress.num_steps)
        for epoch in range(passes.epochs):
            now = passes if works is None else passes.of_epoch(epoch, works)
            if progress.num_steps >= (self.step_limit(phase) or inf) or not (now.steps or works is None):
                break
            self.services.begin_epoch(optimizers, size)
            self._call("on_train_epoch_start")
            self._epoch(phase, data, now, passed[phase.split] + epoch, optimizers)
            self.services.begin_samples(size)
            self._call("on_train_epoch_end")
            if optimizers.schedulers and client.automatic_optimization:
                self.builder.schedule(optimizers.schedulers, "epoch", epoch + 1)
            for hook in on_epoch_end:
                hook(data.client_id, epoch)
        passed[phase.split] += passes.epochs
        if not phase.counts:
            client.context.progress.uncounted_steps += progress.num_steps

    def _epoch(self, phase: Phase, data: ClientData, passes: Passes, epoch: int, optimizers: LocalOptimizers) -> None:
        """Run one pass, to its end or to the most steps of the exchange."""
        client, cache, progress = self.client, self.client.context.logit_cache, self.client.context.progress
        limit, num_batches = self.step_limit(phase) or inf, passes.steps
        if data.size(phase.split) == 1:  # which has no statistics of a batch
            for module in self._batch_norms_of(data.client_id):
                module.eval()
        with_index = phase.with_index or cache is not None
        for index, item in enumerate(data.batches(phase.split, epoch, passes.batch_size, with_index=with_index)):
            if index == num_batches or progress.num_steps >= limit:
                return
            if monotonic() > self._deadline:
                self._stop()
            batch = self._indexed(cache, *item) if with_index else self.transfer(item)
            self.services.begin_batch(batch)
            if -1 in [hook(batch, index) for hook in self._hooks["on_train_batch_start"]]:
                return  # the client ends this epoch
            if client.automatic_optimization and optimizers.wrapped:
                loss = self._optimize(batch, index, data.ended or index + 1 == num_batches, optimizers)
            else:
                loss = self._training_step(batch, index)
            for hook in self._hooks["on_train_batch_end"]:
                hook({} if loss is None else {"loss": loss.detach(), **client.outputs}, batch, index)
        if cache is not None:
            cache.finish_epoch()

    def _indexed(self, cache: LogitCache | None, item: Batch, positions: Tensor) -> Batch:
        """Make the batch of a phase `with_index`, or tell the cache of teachers' logits of one that is not."""
        batch = self.transfer(item)  # the user's hooks see it as it is, without the positions
        if cache is None:
            return batch, to_device(positions, self.device)
        cache.begin_batch(batch[0], positions)
        return batch

    def _call(self, name: str, *args: Any) -> None:
        """Call the hooks of this name."""
        for hook in self._hooks[name]:
            hook(*args)

    def _stop(self) -> NoReturn:
        raise TimeoutError(
            f"the training of a client may take model.faults.client_timeout={self.settings.client_timeout} s, and "
            f"took longer; raise it, or set model.faults.on_error to skip"
        )

    def _optimize(self, batch: Batch, index: int, last: bool, optimizers: LocalOptimizers) -> Tensor | None:
        """Run forward, backward and, at the end of `accumulate_grad_batches`, a step.

        Returns the loss.
        """
        every, optimizer = self.settings.accumulate_grad_batches, optimizers.wrapped[0]
        boundary = last or (index + 1) % every == 0
        if boundary and every > 1:
            optimizers.accumulated_lr.progress.accumulated((index % every + 1) / every)
        loss: Tensor | None = None

        def closure() -> Tensor | None:
            nonlocal loss
            if index % every == 0:
                self._call("on_before_zero_grad", optimizer)
                self._zero_grad(self._round_idx, index, optimizer.optimizer)
            loss = self._training_step(batch, index)
            if loss is None:
                return None
            self._call("on_before_backward", loss)
            optimizers.backward(loss if every == 1 else loss / every)
            self._call("on_after_backward")
            if boundary:
                if optimizer.scaler is not None:
                    optimizer.unscale()
                self._call("on_before_optimizer_step", optimizer)
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
            self.builder.schedule(optimizers.schedulers, "step", optimizers.accumulated_lr.steps)
        return loss


def zero_grad(optimizer: Optimizer) -> None:
    """Set the gradients to None, without the bookkeeping of `Optimizer.zero_grad` unless it is overridden."""
    if type(optimizer).zero_grad is not Optimizer.zero_grad:
        optimizer.zero_grad()
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


def matching(names: Iterable[str], patterns: tuple[str, ...]) -> set[str]:
    """Choose the names that one of the `fnmatch` patterns matches."""
    return {name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)}


@contextmanager
def only(client: ClientModule, patterns: tuple[str, ...]) -> Iterator[None]:
    """Context in which only the parameters that match the patterns are trained.

    Steps that train none shared count as `idle_steps`.

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
    """List the trainable parameters that no pattern names.

    They lose their gradients.

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
