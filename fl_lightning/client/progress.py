"""Progress of a client's local training: how many steps it took, and how far they led."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.optim import SGD, Optimizer


@dataclass
class LocalProgress:
    """K and E of one client in one exchange: optimizer steps, and their way on a scalar whose gradient is always 1.

    Args:
        num_steps: K.
        accumulated_lr: E.
        share: of the batches that a step accumulates those that it has: less than 1 for the last step of an epoch
            whose batches `accumulate_grad_batches` does not divide.
        idle_steps: steps of phases that train no shared parameter: they count in K, not in E.
        lr: learning rate of the last step that counts in E and had one above 0; 0: there is none.
        uncounted_steps: those of phases that count in neither.
    """

    num_steps: int = 0
    accumulated_lr: float = 0.0
    share: float = 1.0
    idle_steps: int = 0
    lr: float = 0.0
    uncounted_steps: int = 0

    def move(self, steps: int, accumulated_lr: float, lr: float = 0.0) -> None:
        """Add `steps`, taken with the learning rate `lr`, to K and set E."""
        self.num_steps += steps
        self.accumulated_lr = accumulated_lr
        self.lr = lr or self.lr

    def add_to(self, whole: "LocalProgress") -> None:
        """Add the steps of a phase, whose progress this is, to those of its exchange."""
        whole.move(self.num_steps, whole.accumulated_lr + self.accumulated_lr, self.lr)

    def was_idle(self, since: "LocalProgress") -> None:
        """Record that nothing shared was trained since the progress was `since`."""
        self.idle_steps += self.num_steps - since.num_steps
        self.accumulated_lr = since.accumulated_lr
        self.lr = since.lr

    def accumulated(self, share: float) -> None:
        """Set `share` for the step to come."""
        self.share = share


class AccumulatedLR:
    """Counts K and E of a phase.

    E: how far the optimizer travels on a scalar whose gradient is 1.

    b ← ρ·b + slope(E); E += lr·b (Nesterov: lr·(slope + ρ·b)), for SGD with one learning rate; NaN otherwise. The
    slope is 1, or less by a method's own terms and by batches that an accumulated gradient lacks.

    Attributes:
        steps: taken in the phase.
        progress: in which they are counted.
    """

    def __init__(self, optimizers: list[Optimizer], slope: Callable[[float], float] | None) -> None:
        self.slope = slope
        groups = optimizers[0].param_groups if len(optimizers) == 1 and type(optimizers[0]) is SGD else []
        plain = all(not group["dampening"] and not group["maximize"] for group in groups)
        alike = len({(group["lr"], group["momentum"], group["nesterov"]) for group in groups}) == 1
        self.group = groups[0] if plain and alike else None
        self.defined = self.group is not None or not optimizers
        self.progress = LocalProgress()
        self._before = 0.0
        self.steps = 0
        self._value = 0.0
        self._momentum = 0.0

    def begin(self, progress: LocalProgress) -> None:
        """Begin a phase, whose steps are counted in `progress`."""
        self.progress = progress
        self._before = progress.accumulated_lr
        self.steps = 0
        self._value = 0.0 if self.defined else math.nan
        self._momentum = 0.0
        progress.move(0, self._before + self._value)  # NaN where it is not defined, however many steps

    def step(self, *_: Any) -> None:
        """Count one step (a hook of the optimizers)."""
        self.steps = self.steps + 1
        lr = 0.0
        if (group := self.group) is not None:
            slope = self.progress.share * (1.0 if self.slope is None else self.slope(self._value))
            rho = group["momentum"]
            self._momentum = rho * self._momentum + slope
            travelled = slope + rho * self._momentum if group["nesterov"] else self._momentum
            lr = float(group["lr"])
            self._value += lr * travelled
        self.progress.move(1, self._before + self._value, lr)
