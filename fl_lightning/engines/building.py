"""The builder of a client's optimizers, which also steps the schedulers of the optimizers."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from pytorch_lightning.plugins.precision import Precision
from pytorch_lightning.utilities.types import LRSchedulerConfig
from torch import Tensor
from torch.optim import Optimizer

from fl_lightning.client.hooks import overridden, own_hook
from fl_lightning.client.module import ClientModule
from fl_lightning.client.optimizers import LocalOptimizers, is_settled, needs_closure
from fl_lightning.types import ClockKind, OptimizerFactory, Phase
from fl_lightning.utils.settings import SettingError


class OptimizerBuilder:
    """Builds the optimizers of every phase, so that no momentum outlives a client's round.

    An optimizer is used again only if a reset optimizer equals a new one.

    Args:
        client: The client module. Its `configure_optimizers` makes the optimizers.
        accumulated: Batches per optimizer step, ≥ 1.
        device: The device on which the client is trained.
        precision: The Trainer's precision plugin.
        hands_out: Whether a hook is given the optimizers. The hook may change the optimizers, so
            no other client uses them.

    Attributes:
        reusable: The optimizers that the next phase without `trains` uses again. None if there
            are none.
    """

    def __init__(
        self, *, client: ClientModule, accumulated: int, device: torch.device, precision: Precision, hands_out: bool
    ) -> None:
        self.client = client
        self.owner = client.lightning_modules()[-1]
        self.accumulated = accumulated
        self.device = device
        self.precision = precision
        self.reusable: LocalOptimizers | None = None
        self._hands_out = hands_out
        self._single_use: LocalOptimizers | None = None
        """The optimizers of the last phase, if no other phase uses them."""
        self._factory: OptimizerFactory | None = None
        """The factory that made `reusable`."""
        self._slope: Callable[[float], float] | None = None
        if overridden(client, "accumulated_lr_slope", ClientModule):
            self._slope = client.accumulated_lr_slope

    def of(self, phase: Phase) -> LocalOptimizers:
        """Return the optimizers of a phase, reused or new."""
        return self.at_hand(phase) or self._replaced(phase)

    def at_hand(self, phase: Phase) -> LocalOptimizers | None:
        """Return the optimizers that a phase can use again, or None if it needs new ones."""
        if phase.trains is not None or self.reusable is None:
            return None
        if self.client.optimizer_factory is not self._factory:
            return None
        # Somebody who was given the optimizers since may have changed them.
        return self.reusable if self.reusable.reusable else None

    def keep(self, phase: Phase, optimizers: LocalOptimizers) -> bool:
        """Keep the optimizers of a phase for other phases if a reset optimizer equals a new one.

        Args:
            phase: The phase.
            optimizers: The optimizers of the phase.

        Returns:
            Whether the optimizers were kept.
        """
        if phase.trains is not None or not optimizers.reusable or not self.settles():
            return False
        self.reusable = optimizers
        self._factory = self.client.optimizer_factory
        return True

    def _replaced(self, phase: Phase) -> LocalOptimizers:
        """Build the optimizers of a phase, and release the optimizers that they replace."""
        if phase.trains is None:
            self.forget()
        elif self._single_use is not None:
            self._single_use.release()
        optimizers = self.new()
        if not self.keep(phase, optimizers):
            self._single_use = optimizers
        return optimizers

    def settles(self) -> bool:
        """Return True if the client's optimizers cannot depend on the client."""
        if self._hands_out or overridden(self.owner, "configure_optimizers", ClientModule):
            return False
        return is_settled(self.client.optimizer_factory)

    def forget(self) -> None:
        """Release all optimizers, so that the next client gets new ones.

        A client that failed may have left its optimizers in the middle of a step.
        """
        for optimizers in (self.reusable, self._single_use):
            if optimizers is not None:
                optimizers.release()
        self.reusable = None
        self._single_use = None

    def new(self) -> LocalOptimizers:
        """Return new optimizers, made by `configure_optimizers`.

        Raises:
            SettingError: Automatic optimization, accumulation or the precision cannot use the
                optimizers.
        """
        owner = type(self.owner).__name__
        backward = own_hook(self.owner, "backward") or Tensor.backward
        scaler: Any = None
        if getattr(self.precision, "scaler", None) is not None:
            # With the Trainer's scaler a client would depend on the clients before it.
            scaler = torch.amp.GradScaler(self.device.type)

        def scaled_backward(loss: Tensor, *args: Any, **kwargs: Any) -> None:
            backward(scaler.scale(loss), *args, **kwargs)

        optimizers = LocalOptimizers(
            configured=self.client.configure_optimizers(),
            owner=owner,
            slope=self._slope,
            scaler=scaler,
            backward=backward if scaler is None else scaled_backward,
        )
        if self.client.automatic_optimization:
            check_automatic(
                optimizers.raw,
                owner=owner,
                accumulated=self.accumulated,
                scaled=scaler is not None,
            )
        return optimizers

    def schedule(self, schedulers: Sequence[LRSchedulerConfig], interval: str, *, count: int, kind: ClockKind) -> None:
        """Step the schedulers that are due. The server steps every ReduceLROnPlateau.

        Args:
            schedulers: The schedulers of a phase.
            interval: The interval that has ended, `epoch` or `step`.
            count: The number of epochs so far, or of batches of the epoch. As in Lightning a frequency is one of
                batches, although a scheduler is stepped only after an optimizer step.
            kind: What the schedulers cover.
        """
        for entry in schedulers:
            if entry.interval != interval or entry.reduce_on_plateau:
                continue
            if count % entry.frequency == 0:
                self.step(entry, kind)

    def step(self, entry: LRSchedulerConfig, kind: ClockKind) -> None:
        """Step a scheduler that needs no value, by the module's hook.

        Args:
            entry: The scheduler.
            kind: What the scheduler covers.

        Raises:
            ValueError: The scheduler has no further steps.
        """
        try:
            self.owner.lr_scheduler_step(entry.scheduler, None)
        except ValueError as error:
            raise ValueError(short_sentence(entry, kind, str(error))) from error


def check_automatic(optimizers: Sequence[Optimizer], *, owner: str, accumulated: int, scaled: bool) -> None:
    """Refuse optimizers that automatic optimization cannot step.

    Args:
        optimizers: The optimizers.
        owner: Name of the module that has configured the optimizers.
        accumulated: Batches per optimizer step, ≥ 1.
        scaled: Whether gradients are scaled.

    Raises:
        SettingError: There are several optimizers, or one that computes its gradient more than once
            a step together with a gradient scaler or with accumulation.
    """
    if len(optimizers) > 1:
        raise SettingError(
            f"{owner} has {len(optimizers)} optimizers under automatic optimization; set "
            f"self.automatic_optimization = False and step them in training_step, as Lightning asks"
        )
    if not scaled and accumulated == 1:
        return
    if any(needs_closure(optimizer) for optimizer in optimizers):
        kind = type(optimizers[0]).__name__
        remedy = "trainer.precision=bf16-mixed" if scaled else "model.accumulate_grad_batches=1"
        raise SettingError(
            f"{kind} computes its gradient more than once a step, over one batch and without a gradient scaler; "
            f"set {remedy}"
        )


def short_sentence(entry: LRSchedulerConfig, kind: ClockKind, fault: str) -> str:
    """Return a sentence about a schedule that ends before the training of a client.

    Args:
        entry: The scheduler.
        kind: What the scheduler covers.
        fault: What is wrong with it.
    """
    name = type(entry.scheduler).__name__
    if kind == "run":
        return (
            f"{name} must have a rate for each local {entry.interval} of all rounds (model.clock: run), got {fault}; "
            f"give it trainer.estimated_stepping_batches, or set model.clock: round if it covers one round"
        )
    return (
        f"{name} must have a rate for each local {entry.interval} of a round (model.clock: round), got {fault}; give "
        f"it trainer.estimated_stepping_batches, or set model.clock: run if it covers all rounds"
    )
