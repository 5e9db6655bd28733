"""Progress of a client's local training: its number of steps K and its accumulated learning rate E."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.optim import SGD, Optimizer


@dataclass
class ClientProgress:
    """Holds K and E of one client in one exchange, or in one phase of it.

    K is the number of optimizer steps. E is how far the optimizer moves a scalar whose gradient is always 1.

    Args:
        num_steps: K, from 0.
        accumulated_lr: E. NaN: it is not defined for the optimizer.
        share: The share of `accumulate_grad_batches` batches that the next step has, in (0, 1]. It is below 1 for the
            last step of an epoch whose number of batches `accumulate_grad_batches` does not divide.
        idle_steps: The steps of phases that train no shared parameter. They count in K, and not in E.
        lr: The learning rate of the last step that counts in E and had a learning rate above 0. 0: there is no such
            step.
        uncounted_steps: The steps of phases that count neither in K nor in E.
    """

    num_steps: int = 0
    accumulated_lr: float = 0.0
    share: float = 1.0
    idle_steps: int = 0
    lr: float = 0.0
    uncounted_steps: int = 0

    def move(self, steps: int, accumulated_lr: float, lr: float = 0.0) -> None:
        """Count some steps, and set E.

        Args:
            steps: The number of steps, which is added to K.
            accumulated_lr: The new E.
            lr: The learning rate of the steps. 0 keeps the last one.
        """
        self.num_steps += steps
        self.accumulated_lr = accumulated_lr
        self.lr = lr or self.lr

    def add_to(self, whole: "ClientProgress") -> None:
        """Add this progress, which is that of a phase, to the progress of its exchange.

        Args:
            whole: The progress of the exchange.
        """
        accumulated_lr = whole.accumulated_lr + self.accumulated_lr
        whole.move(self.num_steps, accumulated_lr=accumulated_lr, lr=self.lr)

    def was_idle(self, since: "ClientProgress") -> None:
        """Record that the steps of a phase have trained no shared parameter.

        Args:
            since: A copy of the progress before the phase.
        """
        self.idle_steps += self.num_steps - since.num_steps
        self.accumulated_lr = since.accumulated_lr
        self.lr = since.lr

    def accumulated(self, share: float) -> None:
        """Set the share of `accumulate_grad_batches` batches that the next step has."""
        self.share = share


class AccumulatedLR:
    """Counts K and E of a phase.

    For SGD with one learning rate a step sets b ← ρ·b + slope(E) and E ← E + lr·b. With Nesterov momentum it adds
    lr·(slope + ρ·b). The slope is 1 without the method's own terms, times the share of the accumulated batches that the
    step has. For other optimizers E is NaN.

    Args:
        optimizers: The optimizers of the phase.
        slope: The method's `accumulated_lr_slope`. None: 1.

    Attributes:
        group: The parameter group whose learning rate counts. None: E stays 0 or is NaN.
        defined: Whether E is a number. It is, also for a phase without an optimizer.
        steps: The steps of the phase so far.
        progress: The progress in which the steps are counted.
    """

    def __init__(self, optimizers: list[Optimizer], slope: Callable[[float], float] | None) -> None:
        self.slope = slope
        self.group = common_group(optimizers)
        self.defined = self.group is not None or not optimizers
        self.progress = ClientProgress()
        self.steps = 0
        self._before = 0.0
        """E before the phase."""
        self._value = 0.0
        """E of the phase."""
        self._momentum = 0.0

    def begin(self, progress: ClientProgress) -> None:
        """Begin a phase, whose steps are counted in `progress`."""
        self.progress = progress
        self.steps = 0
        self._before = progress.accumulated_lr
        self._value = 0.0 if self.defined else math.nan
        self._momentum = 0.0
        # An E that is not defined is NaN even if no step follows.
        progress.move(0, self._before + self._value)

    def step(self, *_: Any) -> None:
        """Count one step. The function is a hook of the optimizers."""
        self.steps += 1
        lr = 0.0
        group = self.group
        if group is not None:
            slope = self.progress.share
            if self.slope is not None:
                slope *= self.slope(self._value)
            rho = group["momentum"]
            self._momentum = rho * self._momentum + slope
            moved = slope + rho * self._momentum if group["nesterov"] else self._momentum
            lr = float(group["lr"])
            self._value += lr * moved
        self.progress.move(1, self._before + self._value, lr)


def common_group(optimizers: list[Optimizer]) -> dict[str, Any] | None:
    """Return a parameter group that has the settings of all, or None.

    It is None unless the only optimizer is SGD, all its groups have the same settings, and E is defined for them.
    """
    if len(optimizers) != 1 or type(optimizers[0]) is not SGD:
        return None
    groups = optimizers[0].param_groups
    is_plain = all(not group["dampening"] and not group["maximize"] for group in groups)
    # A rate may be a tensor or an array of one number, which does not tell by its hash which number it is.
    settings = {(float(group["lr"]), float(group["momentum"]), group["nesterov"]) for group in groups}
    return groups[0] if is_plain and len(settings) == 1 else None
