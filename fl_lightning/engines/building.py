"""Builder of a client's optimizers, whose schedulers it steps."""

from collections.abc import Callable
from typing import Any

import torch
from pytorch_lightning.plugins.precision import Precision
from pytorch_lightning.utilities.types import LRSchedulerConfig
from torch import Tensor

from fl_lightning.client.hooks import overridden, own_hook
from fl_lightning.client.module import ClientModule
from fl_lightning.client.optimizers import LocalOptimizers, is_settled
from fl_lightning.types import OptimizerFactory, Phase


class OptimizerBuilder:
    """Builds the optimizers of a phase anew, or takes those at hand: momentum never outlives a client's round.

    Args:
        client: whose `configure_optimizers` they are of.
        accumulated: batches per step.
        device: that the client is trained on.
        precision: the Trainer's precision plugin.
        hands_out: whether a hook is given the optimizers, which may then be used by no other client.

    Attributes:
        reusable: those of a phase without `trains`, where a reset one equals a new one.
    """

    def __init__(
        self, client: ClientModule, accumulated: int, device: torch.device, precision: Precision, hands_out: bool
    ) -> None:
        self.client = client
        self.owner = client.lightning_modules()[-1]
        self.accumulated = accumulated
        self.device = device
        self.precision = precision
        self._hands_out = hands_out
        self.reusable: LocalOptimizers | None = None
        self._passing: LocalOptimizers | None = None
        self._factory: OptimizerFactory | None = None
        self._slope = client.accumulated_lr_slope if overridden(client, "accumulated_lr_slope", ClientModule) else None

    def of(self, phase: Phase) -> LocalOptimizers:
        """Build the phase's optimizers, or take those at hand."""
        return self.at_hand(phase) or self._built(phase)

    def at_hand(self, phase: Phase) -> LocalOptimizers | None:
        """Give the optimizers that are used again, unless somebody has made more of them than they were."""
        kept = self.reusable
        settled = self.client.optimizer_factory is self._factory
        return kept if phase.trains is None and settled and kept is not None and kept.reusable else None

    def keep(self, phase: Phase, optimizers: LocalOptimizers) -> bool:
        """Use the phase's optimizers again where a reset one equals a new one, and return whether that is so."""
        keeps = phase.trains is None and optimizers.reusable and self.settles()
        if keeps:
            self.reusable = optimizers
            self._factory = self.client.optimizer_factory
        return keeps

    def _built(self, phase: Phase) -> LocalOptimizers:
        """Build the phase's optimizers in the place of those before."""
        if phase.trains is None:
            self.forget()
        elif self._passing is not None:
            self._passing.release()
        optimizers = self.new()
        if not self.keep(phase, optimizers):
            self._passing = optimizers
        return optimizers

    def settles(self) -> bool:
        """Return True where the client's optimizers cannot depend on the client that they are built for."""
        overrides = overridden(self.owner, "configure_optimizers", ClientModule)
        return not self._hands_out and not overrides and is_settled(self.client.optimizer_factory)

    def forget(self) -> None:
        """Build the optimizers anew for the next client: one that failed may have left them in the middle of a step."""
        for optimizers in (self.reusable, self._passing):
            if optimizers is not None:
                optimizers.release()
        self.reusable = self._passing = None

    def new(self) -> LocalOptimizers:
        """Build optimizers by `configure_optimizers`.

        Raises:
            ValueError: if they do not go with automatic optimization, accumulation or the precision.
        """
        client = self.client
        owner = type(self.owner).__name__
        backward = own_hook(self.owner, "backward") or Tensor.backward
        # a scaler of its own, or a client would depend on those before it
        scaled = getattr(self.precision, "scaler", None) is not None
        scaler: Any = torch.amp.GradScaler(self.device.type) if scaled else None

        def scaled_backward(loss: Tensor, *args: Any, **kwargs: Any) -> None:
            backward(scaler.scale(loss), *args, **kwargs)

        configured = client.configure_optimizers()
        optimizers = LocalOptimizers(
            configured,
            owner,
            slope=self._slope,
            scaler=scaler,
            backward=scaled_backward if scaled else backward,
        )
        if not client.automatic_optimization:
            return optimizers
        if len(optimizers.raw) > 1:
            raise ValueError(
                f"{owner} has {len(optimizers.raw)} optimizers under automatic optimization; set "
                f"self.automatic_optimization = False and step them in training_step, as Lightning asks"
            )
        many_batches = self.accumulated > 1
        if (scaled or many_batches) and any(wrapped.needs_closure for wrapped in optimizers.wrapped):
            raise ValueError(
                f"{type(optimizers.raw[0]).__name__} computes its gradient more than once a step, over one batch "
                f"and without a gradient scaler; set "
                f"{'trainer.precision=bf16-mixed' if scaled else 'model.accumulate_grad_batches=1'}"
            )
        return optimizers

    def schedule(self, schedulers: list[LRSchedulerConfig], interval: str, count: int) -> None:
        """Step the schedulers of this interval that are due after `count` of it."""
        for entry in schedulers:
            if entry.interval == interval and count and count % entry.frequency == 0 and not entry.reduce_on_plateau:
                step_scheduler(entry, self.owner.lr_scheduler_step)  # the others are the server's


def step_scheduler(entry: LRSchedulerConfig, step: Callable[[Any, Any], None]) -> None:
    """Step a scheduler that needs no value.

    Args:
        entry: the scheduler.
        step: the module's `lr_scheduler_step`.

    Raises:
        ValueError: if the scheduler is stepped beyond its end.
    """
    try:
        step(entry.scheduler, None)
    except ValueError as error:
        raise ValueError(
            f"{type(entry.scheduler).__name__} lives for one client and one round, whose local steps it must cover: "
            f"{error}; give it their number, since trainer.estimated_stepping_batches counts rounds"
        ) from error
