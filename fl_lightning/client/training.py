"""Local training: one client for one exchange, as a Trainer would train the module."""

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from time import monotonic
from typing import Any

import numpy as np
import torch
from pytorch_lightning import LightningModule
from pytorch_lightning.plugins.precision import Precision
from pytorch_lightning.utilities.types import LRSchedulerConfig
from torch import Tensor
from torch.optim import Optimizer

from fl_lightning.client.decay import LRDecay, PowerDecay, check_decay, decay_of
from fl_lightning.client.hooks import hooks, overridden
from fl_lightning.client.module import ClientModule
from fl_lightning.client.optimizers import LocalOptimizers, LocalProgress, frozen
from fl_lightning.client.schedulers import step_scheduler
from fl_lightning.client.services import BatchTransfer, ClientServices
from fl_lightning.client.teacher import BATCH_NORMS, LogitCache
from fl_lightning.types import Batch, ClientData, OptimizerFactory, Phase
from fl_lightning.utils.devices import to_device
from fl_lightning.utils.keyed import keyed_seed
from fl_lightning.utils.settings import check_above, check_at_least

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
NO_DECAY = (1.0, PowerDecay(1.0))


@dataclass(frozen=True)
class LocalSettings:
    """Settings of local training.

    Args:
        local_epochs: passes over a client's data in a round; a list gives each client its own.
        max_local_steps: at most so many optimizer steps per client and exchange.
        lr_decay: the local learning rate of round t is lr · lr_decay^t; or as a `Decay` says.
        accumulate_grad_batches: batches per local optimizer step.
        clip_norm: largest norm of a local gradient; None: not clipped.
        client_timeout: seconds that the training of a client may take in an exchange, asked between batches; None: any.
        seed: keys every draw.

    Raises:
        ValueError: naming the setting, its range and the value.
    """

    local_epochs: int | list[int] = 1
    max_local_steps: int | None = None
    lr_decay: LRDecay = 1.0
    accumulate_grad_batches: int = 1
    clip_norm: float | None = None
    client_timeout: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        epochs = self.local_epochs
        check_at_least(0, local_epochs=min(epochs, default=0) if isinstance(epochs, list) else epochs)
        check_at_least(1, max_local_steps=self.max_local_steps, accumulate_grad_batches=self.accumulate_grad_batches)
        check_decay(self.lr_decay)
        check_above(0, clip_norm=self.clip_norm, client_timeout=self.client_timeout)

    def lr_factor(self, round_idx: int) -> Callable[[float], float] | None:
        """Choose the function of a learning rate that gives its factor in a round; None: the rate stays.

        Raises:
            ValueError: a cosine whose rounds are not known.
        """
        if self.lr_decay in NO_DECAY:
            return None
        return partial(decay_of(self.lr_decay, None).factor, round_idx)

    @property
    def max_batches(self) -> int | None:
        """Most batches of a client in an exchange; None: any number."""
        return None if self.max_local_steps is None else self.max_local_steps * self.accumulate_grad_batches


class LocalTrainer:
    """Runs the phases of a client's training in the one client module.

    Args:
        client: the module that every client is trained in.
        settings: of local training.
        services: attached to the client; told of every client, phase, epoch and batch.
        transfer: puts batches where they belong.
        device: that the client is trained on.
        precision: the Trainer's precision plugin.
    """

    def __init__(
        self,
        client: ClientModule,
        settings: LocalSettings,
        services: ClientServices,
        transfer: BatchTransfer,
        device: torch.device,
        precision: Precision,
    ) -> None:
        self.client, self.settings, self.services = client, settings, services
        self.transfer, self.device, self.precision = transfer, device, precision
        self.modules: list[LightningModule] = client.lightning_modules()
        self._training_step: Callable[..., Any] = client.training_step
        self._modes = [(module, module.training) for module in client.modules()]
        self._batch_norms = [(name, part) for name, part in client.named_modules() if isinstance(part, BATCH_NORMS)]
        self.lr_factors: Sequence[Sequence[float]] = ()
        self._reusable: LocalOptimizers | None = None
        self._passing: LocalOptimizers | None = None
        self._hooks = {name: hooks(self.modules, name) for name in LOCAL_HOOKS}
        self._optimizer_step = self._own("optimizer_step")
        clip_gradients = services.clip_gradients if settings.clip_norm else None
        self._clip = self._own("configure_gradient_clipping") or clip_gradients
        self._zero_grad = self._own("optimizer_zero_grad")
        self._deadline: float | None = None
        self._round_idx = 0
        self._slope = client.exposure_slope if overridden(client, "exposure_slope", ClientModule) else None

    def _own(self, name: str) -> Callable[..., Any] | None:
        """Find a hook that the innermost module overrides; None where it does not."""
        inner = self.modules[-1]
        return getattr(inner, name) if overridden(inner, name) else None

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
                run = partial(self._phase, phase, own, size, epochs, before, on_epoch_end)
                done = run() if phase.trains is None else self._part(phase.trains, run)
                if phase.counts:
                    passed[phase.split] = before + done
        if self._deadline is not None:
            self._check_time(self._deadline)

    def _part(self, patterns: tuple[str, ...], run: Callable[[], int]) -> int:
        """Run a phase in which only the parameters that match the patterns are trained; returns its passes."""
        progress = self.client.context.progress
        since = replace(progress)
        with frozen(self._left_out(patterns)):
            done = run()
        if not matching(self.client.params(), patterns):
            progress.was_idle(since)
        return done

    def _phase(
        self,
        phase: Phase,
        data: ClientData,
        size: int,
        epochs: int,
        before: int,
        on_epoch_end: Sequence[Callable[[int], None]],
    ) -> int:
        """Run at most `epochs` passes over the phase's split, after `before` earlier ones; returns how many."""
        client, settings = self.client, self.settings
        progress = client.context.progress if phase.counts else LocalProgress()
        optimizers = self._optimizers(phase)
        factors = self.lr_factors if phase.optimizer is None else ()
        optimizers.begin(progress, phase.lr, settings.lr_factor(data.round_idx), factors)
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
                self.schedule(optimizers.schedulers, "epoch", epoch + 1)
            for told in on_epoch_end:
                told(epoch)
            if phase.until is not None and phase.until():
                return epoch + 1
        return epochs

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
        single = self._single_sample(data, phase, size, batch_size) if self._batch_norms else 0
        num_batches -= int(size % batch_size > 0) if data.drop_last else single
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
            self.schedule(optimizers.schedulers, "step", optimizers.exposure.steps)
        return loss

    def forget_optimizers(self) -> None:
        """Build the optimizers anew for the next client: one that failed may have left them in the middle of a step."""
        for found in (self._reusable, self._passing):
            if found is not None:
                found.release()
        self._reusable = self._passing = None

    # --- optimizers --------------------------------------------------------------------------------------------

    def _optimizers(self, phase: Phase) -> LocalOptimizers:
        """Build the phase's optimizers, or take the ones at hand: momentum never outlives a client's round."""
        plain = phase.trains is None and phase.optimizer is None
        if plain and self._reusable is not None:
            return self._reusable
        if self._passing is not None:
            self._passing.release()
        found = self.new_optimizers(phase.optimizer)
        if plain and found.reusable and not overridden(self.modules[-1], "configure_optimizers", ClientModule):
            self._reusable = found
        else:
            self._passing = found
        return found

    def new_optimizers(self, factory: OptimizerFactory | None = None) -> LocalOptimizers:
        """Build optimizers by the phase's factory or `configure_optimizers`.

        Raises:
            ValueError: if they do not go with automatic optimization, accumulation or the precision.
        """
        client, owner = self.client, type(self.modules[-1]).__name__
        backward = self._own("backward") or Tensor.backward
        # a scaler of its own, or a client would depend on those before it
        scaled = getattr(self.precision, "scaler", None) is not None
        scaler: Any = torch.amp.GradScaler(self.device.type) if scaled else None

        def scaled_backward(loss: Tensor, *args: Any, **kwargs: Any) -> None:
            backward(scaler.scale(loss), *args, **kwargs)

        configured = client.configure_optimizers() if factory is None else factory(list(client.trained().values()))
        if factory is not None and hasattr(configured, "attach_module"):  # as in `ClientModule.configure_optimizers`
            configured.attach_module(client)
        found = LocalOptimizers(configured, owner, self._slope, scaler, scaled_backward if scaled else backward)
        if not client.automatic_optimization:
            return found
        if len(found.raw) > 1:
            raise ValueError(
                f"{owner} has {len(found.raw)} optimizers under automatic optimization; set "
                f"self.automatic_optimization = False and step them in training_step, as Lightning asks"
            )
        many_batches = self.settings.accumulate_grad_batches > 1
        if (scaled or many_batches) and any(wrapped.needs_closure for wrapped in found.wrapped):
            raise ValueError(
                f"{type(found.raw[0]).__name__} computes its gradient more than once a step, over one batch "
                f"and without a gradient scaler; set "
                f"{'trainer.precision=bf16-mixed' if scaled else 'model.accumulate_grad_batches=1'}"
            )
        return found

    def schedule(self, schedulers: list[LRSchedulerConfig], interval: str, count: int) -> None:
        """Step the schedulers of this interval that are due after `count` of it."""
        for entry in schedulers:
            if entry.interval == interval and count and count % entry.frequency == 0 and not entry.reduce_on_plateau:
                step_scheduler(entry, self.modules[-1].lr_scheduler_step)  # the others are the server's

    # --- samples and parameters --------------------------------------------------------------------------------

    def _single_sample(self, data: ClientData, phase: Phase, n: int, batch_size: int) -> int:
        """Count 1 where the last batch is a single sample that a BatchNorm net leaves out, else 0.

        A client with one sample in all trains with BatchNorm in eval mode instead.

        Raises:
            ValueError: if `batch_size` is 1 and the net has BatchNorm.
        """
        norms = [part for name, part in self._batch_norms if self.client.has(data.client_id, name)]
        for module in norms if n == 1 else ():
            module.eval()
        if not norms or n == 1:
            return 0
        if batch_size == 1:
            setting = "data.batch_size" if phase.batch_size is None else "the phase's batch_size"
            raise ValueError(f"batch_size must be at least 2 for a net with BatchNorm, got 1; raise {setting}")
        return int(n % batch_size == 1)

    def _left_out(self, patterns: tuple[str, ...]) -> list[Tensor]:
        """List the trainable parameters that no pattern names; they lose their gradients.

        Raises:
            ValueError: if the patterns name none.
        """
        params = self.client.trained()
        trained = matching(params, patterns)
        left = [parameter for name, parameter in params.items() if name not in trained]
        if not trained:
            raise ValueError(
                f"Phase(trains=...) must name trainable parameters, got {patterns}, which match none of "
                f"{list(params)[:8]}"
            )
        for parameter in left:
            parameter.grad = None
        return left


def matching(names: Iterable[str], patterns: tuple[str, ...]) -> set[str]:
    """Choose the names that one of the `fnmatch` patterns matches."""
    return {name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)}


def zero_grad(optimizer: Optimizer) -> None:
    """Set the gradients to None, without the bookkeeping of `Optimizer.zero_grad` unless it is overridden."""
    if type(optimizer).zero_grad is not Optimizer.zero_grad:
        optimizer.zero_grad()
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None
