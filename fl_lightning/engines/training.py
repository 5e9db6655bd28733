"""Local training: one client for one exchange, as a Trainer would train the module."""

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from fnmatch import fnmatchcase
from itertools import chain
from math import ceil, inf
from time import monotonic
from typing import Any, Literal, NoReturn

import numpy as np
import torch
from pytorch_lightning import LightningModule
from pytorch_lightning.plugins.precision import Precision
from pytorch_lightning.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer

from fl_lightning.client.checks import are_foreign
from fl_lightning.client.hooks import STEP_HOOKS, hooks, own_hook
from fl_lightning.client.modes import BATCH_NORMS
from fl_lightning.client.module import ClientModule
from fl_lightning.client.optimizers import LocalOptimizers, frozen
from fl_lightning.client.progress import ClientProgress
from fl_lightning.client.services import BatchTransfer, ClientServices
from fl_lightning.client.teacher import LogitCache
from fl_lightning.data.devices import PlannedWork
from fl_lightning.engines.building import OptimizerBuilder
from fl_lightning.engines.clock import ClientClock, Work
from fl_lightning.engines.lockstep import Passes
from fl_lightning.engines.schedules import Schedules
from fl_lightning.engines.settings import LocalSettings
from fl_lightning.types import Batch, ClientData, Phase
from fl_lightning.utils.devices import copy_to_device
from fl_lightning.utils.keyed import keyed_seed
from fl_lightning.utils.own_generators import generators_of, key_generators
from fl_lightning.utils.settings import SettingError

EpochHook = Callable[[int, int], None]
"""Called with `(client_id, epoch)` at the end of each local epoch."""

LOCAL_HOOKS = ("on_train_epoch_start", "on_train_epoch_end", *STEP_HOOKS)
"""Hooks of the client's modules that local training calls."""


class LocalTrainer:
    """Trains one client at a time, phase by phase, in the one client module.

    Args:
        client: The module in which every client is trained.
        settings: Settings of local training.
        services: The services attached to the client. They are told of every client, phase,
            epoch and batch.
        transfer: Moves and converts batches.
        device: The device on which the client is trained.
        precision: The Trainer's precision plugin.
        batch_hooks: Hooks of callbacks by name. Each is called before the client's hook of the
            same name.
        clock: The clock that the client's modules see. None takes one of `settings`.
    """

    def __init__(
        self,
        client: ClientModule,
        settings: LocalSettings,
        services: ClientServices,
        transfer: BatchTransfer,
        *,
        device: torch.device,
        precision: Precision,
        batch_hooks: Mapping[str, Sequence[Callable[..., None]]],
        clock: ClientClock | None = None,
    ) -> None:
        self.clock = clock or ClientClock(settings)
        self.tells_clock = client.module is not None or are_foreign([client])
        """Whether the client's own code may ask its Trainer for something."""
        self.client = client
        self.settings = settings
        self.services = services
        self.transfer = transfer
        self.device = device
        self.precision = precision
        self.modules: list[LightningModule] = client.lightning_modules()
        self.batch_norms = [(name, part) for name, part in client.named_modules() if isinstance(part, BATCH_NORMS)]
        self.lr_factors: Sequence[Sequence[float]] = ()
        self.batch_hooks: dict[str, Sequence[Callable[..., None]]] = {}
        for name, callables in batch_hooks.items():
            if callables and name in LOCAL_HOOKS:
                self.batch_hooks[name] = callables
        self._training_step: Callable[..., Any] = client.training_step
        self._modes = [(module, module.training) for module in client.modules()]
        self._hooks: dict[str, list[Callable[..., Any]]] = {}
        for name in LOCAL_HOOKS:
            self._hooks[name] = [*self.batch_hooks.get(name, ()), *hooks(self.modules, name)]
        inner = self.modules[-1]
        self._own_optimizer_step = own_hook(inner, "optimizer_step")
        self._own_zero_grad = own_hook(inner, "optimizer_zero_grad")
        own_clipping = own_hook(inner, "configure_gradient_clipping")
        self._clip = own_clipping
        if own_clipping is None and settings.clip_norm:
            self._clip = services.clip_gradients
        hooks_with_optimizer = [
            self._hooks["on_before_zero_grad"],
            self._hooks["on_before_optimizer_step"],
            self._own_optimizer_step,
            self._own_zero_grad,
            own_clipping,
        ]
        self.builder = OptimizerBuilder(
            client=client,
            accumulated=settings.accumulate_grad_batches,
            device=device,
            precision=precision,
            hands_out=any(hooks_with_optimizer),
        )
        self.schedules = Schedules(self.clock, self.builder)
        self._deadline = inf
        self._round_idx = 0
        owners: list[object] = list(client.modules())
        if transfer.datamodule is not None:
            owners.append(transfer.datamodule)
        self.own_generators = generators_of(*owners)

    def scale_lr(self, factors: Sequence[Sequence[float]]) -> None:
        """Set the factors of the learning rates of all clients to come.

        Args:
            factors: One factor for each optimizer and parameter group. Empty means 1 for all.
        """
        self.lr_factors = factors

    # --- rules of every engine ---

    def passes(self, data: ClientData, phase: Phase) -> Passes:
        """Return how a client's samples are divided into the batches of a phase.

        Raises:
            SettingError: The net has BatchNorm and `batch_size` is 1.
        """
        size = data.size(phase.split)
        batch_size = data.samples_per_batch(phase.split, phase.batch_size)
        epochs = phase.epochs
        if epochs is None:
            epochs = self.settings.epochs_of(data.client_id)
        normalizes = self.normalizes(data.client_id, size)
        if normalizes:
            setting = "data.batch_size" if phase.batch_size is None else "the phase's batch_size"
            check_normalized(batch_size, setting)
        return Passes.over(
            size=size,
            batch_size=batch_size,
            epochs=epochs,
            drops_single=normalizes,
            drops_tail=data.drop_last,
        )

    def normalizes(self, client_id: int, size: int) -> bool:
        """Return True if BatchNorm normalizes the batches of a client with `size` samples. One sample has none."""
        return size > 1 and bool(self._batch_norms_of(client_id))

    def _batch_norms_of(self, client_id: int) -> list[nn.Module]:
        """List the BatchNorm modules of a client's net."""
        return [part for name, part in self.batch_norms if self.client.has(client_id, name)]

    def step_limit(self, phase: Phase, num_steps: int) -> int | None:
        """Return the number of steps at which a phase ends, or None without a limit.

        Args:
            phase: The phase that begins.
            num_steps: Steps of the exchange so far, 0 for a phase that does not count.
        """
        limits: list[int] = []
        if phase.counts and self.settings.max_local_steps is not None:
            limits.append(self.settings.max_local_steps)
        if phase.max_steps is not None:
            limits.append(num_steps + phase.max_steps)
        return min(limits, default=None)

    def batch_limit(self, data: ClientData, phase: Phase, passes: Passes, num_steps: int) -> int | None:
        """Return the largest number of batches of a phase, or None without a limit.

        Args:
            data: The client's data. The share `local_work` of the batches, or of the epochs, is
                what a straggler trains on.
            phase: The phase that begins.
            passes: The batches of the phase.
            num_steps: Steps of the exchange so far.
        """
        if not phase.counts:
            num_steps = 0
        remaining: int | None = None
        step_limit = self.step_limit(phase, num_steps)
        if step_limit is not None:
            remaining = (step_limit - num_steps) * self.settings.accumulate_grad_batches
        if data.local_work == 1:
            return remaining
        # Without the small number a product such as 0.55 * 100 would round up to one batch, or epoch, more.
        if data.works_whole_epochs:
            epochs = max(1, ceil(data.local_work * passes.epochs - 1e-9))
            batches = epochs * passes.steps
            return batches if remaining is None else min(batches, remaining)
        batches = passes.epochs * passes.steps
        if remaining is not None:
            batches = min(batches, remaining)
        return ceil(data.local_work * batches - 1e-9)

    def repeats_samples(self, data: ClientData, phase: Phase, passes: Passes) -> bool:
        """Return True if every epoch has the same unchanged samples, so that a teacher's logits can be kept."""
        if phase.with_index or data.drop_last:
            return False
        if self.transfer.hooked or data.augments(phase.split):
            return False
        return passes.num_samples == data.size(phase.split)

    # --- one client ---

    def know_modes(self, modes: Sequence[tuple[nn.Module, bool]]) -> None:
        """Take the modes in which the user left the modules, where the present ones are others.

        Args:
            modes: Each module, and whether it is in train mode.
        """
        self._modes = list(modes)

    def restore_modes(self) -> None:
        """Set every module to the mode (train or eval) that the user gave it."""
        for module, mode in self._modes:
            if module.training != mode:
                module.training = mode

    def seed(self, purpose: str, data: ClientData) -> None:
        """Seed the generators for one purpose, client and round."""
        self.seed_by(keyed_seed(self.settings.seed, purpose, round_idx=data.round_idx, client_id=data.client_id))

    def seed_by(self, seed: int) -> None:
        """Seed the global generators, and those of the user's own. Dropout and the user's own code draw from them.

        Args:
            seed: The seed.
        """
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        if self.device.type == "cuda":
            torch.cuda.manual_seed(seed)
        if self.own_generators:
            key_generators(self.own_generators, seed)

    def train(
        self,
        data: ClientData,
        exchange: str,
        fedavg_equivalent: bool = False,
        on_epoch_end: Sequence[EpochHook] = (),
    ) -> None:
        """Train the module in place on a client's data, through all phases of one exchange.

        Args:
            data: The client's data.
            exchange: Name of the exchange.
            fedavg_equivalent: Whether the method has no effect with its settings, so that the
                plain local loss is enough.
            on_epoch_end: Callables for the end of each epoch.

        Raises:
            TimeoutError: The training took longer than `client_timeout`.
        """
        with self.attached_clock():
            self._train(data, exchange, fedavg_equivalent=fedavg_equivalent, on_epoch_end=on_epoch_end)

    def attached_clock(self) -> AbstractContextManager[None]:
        """Return a context in which the client's modules see the client's own clock, if they may ask for it."""
        return self.clock.attached(self.client) if self.tells_clock else nullcontext()

    def _train(
        self, data: ClientData, exchange: str, *, fedavg_equivalent: bool, on_epoch_end: Sequence[EpochHook]
    ) -> None:
        """Train the module as `train` does, with the arguments of `train`."""
        self._deadline = monotonic() + (self.settings.client_timeout or inf)
        self.seed(f"train/{exchange}", data)
        self._training_step = self.client.local_loss if fedavg_equivalent else self.client.training_step
        self._phases(self.client.phases(exchange), data, on_epoch_end)

    def fine_tune(self, data: ClientData, phases: Iterable[Phase]) -> None:
        """Train the module in place by the local loss alone.

        Args:
            data: The client's data for fine-tuning.
            phases: The phases of the training.
        """
        self._deadline = inf
        self.seed("fine_tuning", data)
        self._training_step = self.client.local_loss
        # The schedules and counts of the whole run would be at their end after the last round.
        alone = (replace(phase, clock="round") for phase in phases)
        with self.attached_clock():
            self._phases(alone, data, ())

    def _phases(self, phases: Iterable[Phase], data: ClientData, on_epoch_end: Sequence[EpochHook]) -> None:
        """Run phases one after the other.

        Args:
            phases: The phases.
            data: The client's data.
            on_epoch_end: Callables for the end of each epoch.

        Raises:
            TimeoutError: The training took longer than `client_timeout`.
        """
        self._round_idx = data.round_idx
        epochs_before = Counter[str]()
        for phase in phases:
            self.restore_modes()
            samples = data
            if phase.indices is not None:
                samples = data.restricted(phase.split, phase.indices)
            if samples.size(phase.split) == 0:
                continue
            with nullcontext() if phase.trains is None else trains_only(self.client, phase.trains):
                self._phase(
                    phase=phase,
                    data=samples,
                    epochs_before=epochs_before if phase.counts else Counter(),
                    on_epoch_end=on_epoch_end,
                )
        if monotonic() > self._deadline:
            self._stop()

    def _phase(
        self, phase: Phase, data: ClientData, epochs_before: Counter[str], on_epoch_end: Sequence[EpochHook]
    ) -> None:
        """Run the epochs of one phase.

        Args:
            phase: The phase.
            data: The client's data, restricted to the phase's samples.
            epochs_before: Epochs so far over each split. The phase adds its own.
            on_epoch_end: Callables for the end of each epoch.
        """
        client = self.client
        size = data.size(phase.split)
        passes = self.passes(data, phase)
        progress = client.context.progress if phase.counts else ClientProgress()
        if self.tells_clock:
            self._begin_clock(phase, data, passes=passes, progress=progress)
        optimizers = self._begin_optimizers(phase, data.round_idx, progress)
        keeps_time = self.tells_clock or bool(optimizers.schedulers)
        if not self.tells_clock and keeps_time:
            self._begin_clock(phase, data, passes=passes, progress=progress)
        if keeps_time:
            self.begin_schedules(optimizers)
        self._begin_logit_cache(phase, data, passes)
        # Only a straggler has a limit of batches here. `step_limit` ends the training of every other client.
        batch_limit: int | None = None
        if data.local_work != 1:
            batch_limit = self.batch_limit(data, phase, passes=passes, num_steps=progress.num_steps)
        last_step = self.step_limit(phase, progress.num_steps)
        step_limit = inf if last_step is None else last_step
        for epoch in range(passes.epochs):
            epoch_passes = passes
            if batch_limit is not None:
                epoch_passes = passes.of_epoch(epoch, batch_limit)
                if epoch_passes.steps == 0:
                    break
            if progress.num_steps >= step_limit:
                break
            if keeps_time:
                self.clock.begin_epoch(epoch, epoch_passes.steps)
            self.services.begin(optimizers=optimizers, num_samples=size)
            self._call("on_train_epoch_start")
            self._epoch(
                phase=phase,
                data=data,
                passes=epoch_passes,
                epoch=epochs_before[phase.split] + epoch,
                optimizers=optimizers,
                progress=progress,
                step_limit=step_limit,
            )
            self.services.begin(num_samples=size)
            self._call("on_train_epoch_end")
            for hook in on_epoch_end:
                hook(data.client_id, epoch)
        epochs_before[phase.split] += passes.epochs
        if not phase.counts:
            client.context.progress.uncounted_steps += progress.num_steps

    def work(self, phase: Phase, data: ClientData, *, passes: Passes, num_steps: int) -> Work:
        """Return what a client trains in a phase.

        Args:
            phase: The phase that begins.
            data: The client's data, restricted to the phase's samples.
            passes: The batches of the phase.
            num_steps: Steps of the exchange so far.
        """
        batch_limit: int | None = None
        if data.local_work != 1:
            batch_limit = self.batch_limit(data, phase, passes=passes, num_steps=num_steps)
        step_limit = self.step_limit(phase, num_steps)
        return Work.of(
            passes,
            round_idx=data.round_idx,
            num_samples=data.size(phase.split),
            accumulated=self.settings.accumulate_grad_batches,
            batch_limit=batch_limit,
            step_limit=None if step_limit is None else step_limit - num_steps,
        )

    def planned(self, data: ClientData, exchange: str) -> PlannedWork:
        """Return how much a client trains in an exchange, without training it.

        What a method does besides its first phases is not counted if it depends on what the client has become.

        Args:
            data: The client's data.
            exchange: Name of the exchange.
        """
        num_steps = 0
        batches = 0
        samples = 0
        for phase in self._phases_ahead(exchange):
            restricted = data if phase.indices is None else data.restricted(phase.split, phase.indices)
            if restricted.size(phase.split) == 0:
                continue
            passes = self.passes(restricted, phase)
            steps_before = num_steps if phase.counts else 0
            work = self.work(phase, restricted, passes=passes, num_steps=steps_before)
            for number in work.batches:
                batches += number
                samples += passes.of_epoch(0, number).num_samples
            if phase.counts:
                num_steps += work.num_steps
        return PlannedWork(batches=batches, samples=samples)

    def _phases_ahead(self, exchange: str) -> list[Phase]:
        """Return the phases of an exchange that are known before any client is loaded."""
        phases: list[Phase] = []
        try:
            for phase in self.client.phases(exchange):
                phases.append(phase)
        except (KeyError, AttributeError, IndexError):
            # A method may ask the client that is trained for its later phases.
            return phases
        return phases

    def _begin_clock(self, phase: Phase, data: ClientData, *, passes: Passes, progress: ClientProgress) -> None:
        """Let the clock begin a phase.

        Args:
            phase: The phase.
            data: The client's data, restricted to the phase's samples.
            passes: The batches of the phase.
            progress: Counts the steps of the phase.
        """
        work = self.work(phase, data, passes=passes, num_steps=progress.num_steps)
        if self.client.automatic_optimization:
            # As in Lightning, a step counts once its hook is over, also if it has changed nothing.
            progress = ClientProgress()
        self.clock.begin(work, kind=phase.clock, progress=progress, data=data)

    def begin_schedules(self, optimizers: LocalOptimizers) -> None:
        """Bring the schedulers of new optimizers to the present round of the clock, which answers by them from now on.

        A module that steps its schedulers by hand begins them anew in every round, because nobody knows how it steps
        them.
        """
        if self.client.automatic_optimization:
            self.clock.steps_with(self.services)
            if optimizers.schedulers:
                self.schedules.catch_up(optimizers)
        else:
            self.clock.steps_with(self.services, num_by_hand=max(1, len(optimizers.raw)))

    def _begin_optimizers(self, phase: Phase, round_idx: int, progress: ClientProgress) -> LocalOptimizers:
        """Return the optimizers of a phase, which begin as if they were built anew."""
        optimizers = self.builder.of(phase)
        optimizers.begin(
            progress=progress,
            lr=phase.lr,
            factor=self.settings.lr_factor(round_idx),
            factors=self.lr_factors,
        )
        if not self.client.automatic_optimization:
            # The client before may have accumulated gradients without a step at its end.
            for optimizer in optimizers.raw:
                zero_grad(optimizer)
        return optimizers

    def _begin_logit_cache(self, phase: Phase, data: ClientData, passes: Passes) -> None:
        """Begin a cache of a teacher's logits if every epoch of a phase needs the same logits."""
        context = self.client.context
        if passes.epochs > 1 and self.client.distils and self.repeats_samples(data, phase, passes):
            context.keep_logits(LogitCache(data.size(phase.split)))
        elif context.logit_cache is not None:
            # The cache holds the logits of the phase before.
            context.keep_logits(None)

    def _epoch(
        self,
        *,
        phase: Phase,
        data: ClientData,
        passes: Passes,
        epoch: int,
        optimizers: LocalOptimizers,
        progress: ClientProgress,
        step_limit: float,
    ) -> None:
        """Run one epoch, up to its end or to the step limit of the phase.

        Args:
            phase: The phase.
            data: The client's data, restricted to the phase's samples.
            passes: The batches of the epoch.
            epoch: The number of epochs over the split before this one.
            optimizers: The optimizers of the phase.
            progress: Counts the steps of the phase.
            step_limit: The number of these steps at which the phase ends.
        """
        client = self.client
        cache = client.context.logit_cache
        num_batches = passes.steps
        if data.size(phase.split) == 1:
            # One sample has no batch statistics.
            for module in self._batch_norms_of(data.client_id):
                module.eval()
        with_index = phase.with_index or cache is not None
        items = data.batches(
            split=phase.split,
            epoch=epoch,
            batch_size=passes.batch_size,
            with_index=with_index,
        )
        for index, item in enumerate(self.clock.counted(items) if self.tells_clock else items):
            if index == num_batches or progress.num_steps >= step_limit:
                return
            if monotonic() > self._deadline:
                self._stop()
            batch = self._indexed(cache, item) if with_index else self.transfer(item)
            is_last = data.ended or index + 1 == num_batches
            loss: Tensor | None = None
            if batch is None:
                # As in Lightning, the batch counts, and nothing is computed.
                rank_zero_warn("a training batch is None and is skipped; if this is on purpose, ignore this warning")
            else:
                self.services.begin(batch=batch)
                answers = [hook(batch, index) for hook in self._hooks["on_train_batch_start"]]
                if -1 in answers:
                    # As in Lightning, -1 ends the epoch, whose schedulers are stepped all the same.
                    self._end_batch(optimizers, index=index, is_last=True)
                    return
                if client.automatic_optimization and optimizers.wrapped:
                    loss = self._optimize(batch, index=index, is_last=is_last, optimizers=optimizers)
                else:
                    loss = self._training_step(batch, index)
            self._end_batch(optimizers, index=index, is_last=is_last or progress.num_steps >= step_limit)
            for hook in self._hooks["on_train_batch_end"]:
                hook(None if batch is None else self._outputs(loss), batch, index)
            # The outputs may hold the graph of the batch, and must not outlive the step.
            client.outputs = {}
        if cache is not None:
            cache.finish_epoch()

    def _outputs(self, loss: Tensor | None) -> dict[str, Any]:
        """Return what the hooks of a batch's end get of a step. It is empty if `training_step` skipped the batch."""
        return {} if loss is None else {"loss": loss.detach(), **self.client.outputs}

    def _end_batch(self, optimizers: LocalOptimizers, *, index: int, is_last: bool) -> None:
        """Step the schedulers that are due after a batch, before the hooks of its end.

        Args:
            optimizers: The optimizers of the phase.
            index: The index of the batch in the epoch.
            is_last: Whether the epoch ends with the batch.
        """
        if not (optimizers.schedulers and self.client.automatic_optimization):
            return
        if is_last or (index + 1) % self.settings.accumulate_grad_batches == 0:
            self.schedules.end_step(optimizers, index)
        if is_last:
            self.schedules.end_epoch(optimizers)

    def _indexed(self, cache: LogitCache | None, item: tuple[Batch, Tensor]) -> Batch:
        """Return the batch for `training_step` of samples with their positions. A batch of None stays None.

        Args:
            cache: The cache of the teacher's logits, which is told the positions. None means that
                the phase is `with_index`, so that `training_step` gets samples and positions.
            item: The samples, and their positions (B,) int64 within the client's split.
        """
        samples, positions = item
        # The user's transfer hooks see the samples without positions.
        batch = self.transfer(samples)
        if batch is None:
            return None
        if cache is None:
            return batch, copy_to_device(positions, self.device)
        cache.begin_batch(batch[0], positions)
        return batch

    def _call(self, name: str, *args: Any) -> None:
        """Call all hooks of one name."""
        for hook in self._hooks[name]:
            hook(*args)

    def _stop(self) -> NoReturn:
        """End the training of a client that has taken too long.

        Raises:
            TimeoutError: The training took longer than `client_timeout`.
        """
        raise TimeoutError(
            f"the training of a client may take model.faults.client_timeout={self.settings.client_timeout} s, and "
            f"took longer; raise it, or set model.faults.on_error to skip"
        )

    def _optimize(self, batch: Batch, *, index: int, is_last: bool, optimizers: LocalOptimizers) -> Tensor | None:
        """Run forward and backward, and a step after every `accumulate_grad_batches` batches.

        Args:
            batch: The batch.
            index: The index of the batch in the epoch.
            is_last: Whether the batch is the last of the epoch, which always ends with a step.
            optimizers: The optimizers of the phase. Automatic optimization has one optimizer.

        Returns:
            The loss, or None if `training_step` skipped the batch.
        """
        batches_per_step = self.settings.accumulate_grad_batches
        optimizer = optimizers.wrapped[0]
        takes_step = is_last or (index + 1) % batches_per_step == 0
        if takes_step and batches_per_step > 1:
            batches = index % batches_per_step + 1
            optimizers.accumulated_lr.progress.accumulated(batches / batches_per_step)
        loss: Tensor | None = None
        has_gradients = False

        def closure() -> Tensor | None:
            nonlocal loss, has_gradients
            loss = self._training_step(batch, index)
            # Lightning zeroes the gradients between the step and its backward pass, also of a skipped batch.
            if index % batches_per_step == 0:
                self._call("on_before_zero_grad", optimizer)
                if self._own_zero_grad is None:
                    zero_grad(optimizer.optimizer)
                else:
                    self._own_zero_grad(self._round_idx, index, optimizer.optimizer)
            if loss is not None:
                self._call("on_before_backward", loss)
                optimizers.backward(loss if batches_per_step == 1 else loss / batches_per_step)
                self._call("on_after_backward")
            # As in Lightning, a skipped batch ends an accumulation with a step, unless a scaler takes the step.
            has_gradients = loss is not None or (optimizer.scaler is None and has_grad(optimizer.optimizer))
            if takes_step and has_gradients:
                if optimizer.scaler is not None:
                    optimizer.unscale()
                self._call("on_before_optimizer_step", optimizer)
                if self._clip is not None:
                    self._clip(optimizer, self.settings.clip_norm, "norm")
            return loss

        if not takes_step:
            closure()
            return loss
        if self._own_optimizer_step is not None:
            # Lightning's hook has these four positional arguments.
            self._own_optimizer_step(self._round_idx, index, optimizer, closure)  # style: ok, a user's hook
        elif optimizer.takes_closure:
            optimizer.step(closure)
        else:
            closure()
            if has_gradients:
                optimizer.step()
        if self.tells_clock:
            self.clock.count_step()
        return loss


def check_normalized(batch_size: int | Literal["full"], setting: str) -> None:
    """Refuse batches of one sample, which have no batch statistics.

    Args:
        batch_size: Number of samples in a batch of a client whose net has BatchNorm.
        setting: Name of the setting with this number.

    Raises:
        SettingError: A batch has one sample.
    """
    if batch_size == 1:
        raise SettingError(f"batch_size must be at least 2 for a net with BatchNorm, got 1; raise {setting}")


def zero_grad(optimizer: Optimizer) -> None:
    """Set the gradients of an optimizer to None.

    Torch's own `zero_grad` does some bookkeeping that takes time, so only an overridden one is called.
    """
    if type(optimizer).zero_grad is not Optimizer.zero_grad:
        optimizer.zero_grad()
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


def has_grad(optimizer: Optimizer) -> bool:
    """Return True if a parameter of an optimizer has a gradient."""
    parameters = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    return any(parameter.grad is not None for parameter in parameters)


def matching(names: Iterable[str], patterns: tuple[str, ...]) -> set[str]:
    """Return the names that match at least one `fnmatch` pattern."""
    return {name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)}


@contextmanager
def trains_only(client: ClientModule, patterns: tuple[str, ...]) -> Iterator[None]:
    """Context in which only the parameters that match a pattern are trained.

    The steps in it count as `idle_steps` if no shared parameter matches.

    Args:
        client: The client module.
        patterns: `fnmatch` patterns of names of parameters.

    Raises:
        ValueError: No trainable parameter matches.
    """
    progress = client.context.progress
    progress_before = replace(progress)
    with frozen(untrained(client, patterns)):
        yield
    if not matching(client.params(), patterns):
        progress.was_idle(progress_before)


def untrained(client: ClientModule, patterns: tuple[str, ...]) -> list[Tensor]:
    """List the trainable parameters that match no pattern, and set their gradients to None.

    Args:
        client: The client module.
        patterns: `fnmatch` patterns of names of parameters.

    Raises:
        ValueError: No trainable parameter matches.
    """
    params = client.trained()
    trained = matching(params, patterns)
    if not trained:
        raise ValueError(
            f"Phase(trains=...) must name trainable parameters, got {patterns}, which match none of {list(params)[:8]}"
        )
    others = [parameter for name, parameter in params.items() if name not in trained]
    for parameter in others:
        parameter.grad = None
    return others
