"""The local optimizers of one client, whose steps are counted."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import Parameter, signature
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from fl_lightning.client.schedulers import parse_optimizers


class Exposure:
    """Counts E: how far the optimizer travels on a scalar whose gradient is 1 (`slope` of it for a method's terms).

    b ← ρ·b + slope(E); E += lr·b (Nesterov: lr·(slope + ρ·b)), for SGD with one learning rate; NaN otherwise.
    """

    def __init__(self, optimizers: list[Optimizer], slope: Callable[[float], float] | None) -> None:
        self.slope = slope
        self.group: dict[str, Any] | None = None
        one = len(optimizers) == 1 and type(optimizers[0]) is SGD
        groups = optimizers[0].param_groups if one else []
        if groups and len({(g["lr"], g["momentum"], g["nesterov"], g["dampening"]) for g in groups}) == 1:
            self.group = groups[0] if not groups[0]["dampening"] and not groups[0]["maximize"] else None
        self.defined = self.group is not None or not optimizers
        self._start = 0.0 if self.defined else math.nan
        self.value, self.momentum = self._start, 0.0

    def reset(self) -> None:
        """Set E back to its value before the first step."""
        self.value, self.momentum = self._start, 0.0

    def step(self) -> None:
        group = self.group
        if group is None:
            return
        slope = 1.0 if self.slope is None else self.slope(self.value)
        rho = group["momentum"]
        self.momentum = rho * self.momentum + slope
        travelled = slope + rho * self.momentum if group["nesterov"] else self.momentum
        self.value += float(group["lr"]) * travelled


@dataclass
class LocalProgress:
    """K and E of one client in one exchange: optimizer steps, and their way on a scalar whose gradient is always 1."""

    num_steps: int = 0
    exposure: float = 0.0

    def move(self, steps: int, exposure: float) -> None:
        """Add `steps` to K and set E."""
        self.num_steps += steps
        self.exposure = exposure


class LocalOptimizers:
    """The optimizers and schedulers of one client in one phase.

    Args:
        configured: what `configure_optimizers` returned.
        owner: name of the module it belongs to, for errors.
        slope: the method's `exposure_slope`, or None.
        scaler: gradient scaler, or None.
        backward: computes gradients of a loss.

    Attributes:
        steps: taken in the phase.
    """

    def __init__(
        self,
        configured: Any,
        owner: str,
        slope: Callable[[float], float] | None = None,
        scaler: Any | None = None,
        backward: Callable[..., None] = Tensor.backward,
    ) -> None:
        self.raw, self.schedulers = parse_optimizers(configured, owner)
        self.exposure = Exposure(self.raw, slope)
        self.backward = backward
        self.steps = 0
        self.wrapped = [LocalOptimizer(optimizer, scaler, self._stepped, self.raw) for optimizer in self.raw]
        self.plateau = any(isinstance(entry.scheduler, ReduceLROnPlateau) for entry in self.schedulers)
        # torch's own optimizers keep their state in `state` and `param_groups` only, so a reset one equals a new one
        torchs = all(type(optimizer).__module__.startswith("torch.optim.") for optimizer in self.raw)
        self.reusable = torchs and not self.schedulers and scaler is None
        self._settings = [[dict(group) for group in optimizer.param_groups] for optimizer in self.raw]
        self._progress, self._before, self._used = LocalProgress(), 0.0, False

    def begin(self, progress: LocalProgress, lr: float | None = None, factor: float = 1.0) -> None:
        """Begin a phase of one client, as if the optimizers were built anew.

        Args:
            progress: counts the client's steps.
            lr: learning rate in place of the optimizers' own; None: their own.
            factor: of the learning rate (lr_decay^t).
        """
        if self._used:
            self._restore()
        self._used, self.steps = True, 0
        self._progress, self._before = progress, progress.exposure
        progress.move(0, self._before + self.exposure.value)  # NaN where it is not defined, however many steps
        if lr is not None or factor != 1.0:
            self._set_lr(lr, factor)

    def _stepped(self, *_: Any) -> None:
        self.steps += 1
        self.exposure.step()
        self._progress.move(1, self._before + self.exposure.value)

    def _set_lr(self, lr: float | None, factor: float) -> None:
        """Set the learning rates, before the first step; schedulers compute with the rates before the decay."""
        groups = [group for optimizer in self.raw for group in optimizer.param_groups]
        if lr is not None:
            for group in groups:
                group.update({key: lr for key in ("lr", "initial_lr") if key in group})
            for entry in self.schedulers:
                bases = getattr(entry.scheduler, "base_lrs", None)
                if bases is not None:
                    entry.scheduler.base_lrs = [lr for _ in bases]
        if self.schedulers and factor != 1.0:
            for wrapped in self.wrapped:
                wrapped.decay(factor)
        elif factor != 1.0:
            for group in groups:
                group["lr"] = group["lr"] * factor

    def release(self) -> None:
        """Restore the optimizers and take the hooks off: a module may hand out the same ones again."""
        self._restore()
        for wrapped in self.wrapped:
            while wrapped.hooks:
                wrapped.hooks.pop().remove()

    def _restore(self) -> None:
        for optimizer, settings in zip(self.raw, self._settings, strict=True):
            optimizer.state.clear()
            for group, setting in zip(optimizer.param_groups, settings, strict=True):
                group.update(setting)
        self.exposure.reset()


def needs_closure(optimizer: Optimizer) -> bool:
    """True for optimizers whose step cannot be called without a closure (LBFGS, SAM)."""
    closure = signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is Parameter.empty


def zero_grad(optimizer: Optimizer) -> None:
    """Set the gradients to None, without the bookkeeping of `Optimizer.zero_grad` unless it is overridden."""
    if type(optimizer).zero_grad is not Optimizer.zero_grad:
        optimizer.zero_grad()
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


def toggle(optimizer: Any, everyone: Sequence[Any]) -> list[tuple[Tensor, bool]]:
    """Let only this optimizer's parameters require a gradient; returns all parameters with what they were."""
    mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
    before = [(p, p.requires_grad) for other in everyone for group in other.param_groups for p in group["params"]]
    for parameter, required in before:
        parameter.requires_grad = required and id(parameter) in mine
    return before


class LocalOptimizer:
    """An optimizer as a client sees it: `step` honours the gradient scaler and is counted as a local step.

    Args:
        optimizer: torch's.
        scaler: gradient scaler, or None.
        on_step: called after each step that was taken.
        everyone: all optimizers of the client.
    """

    def __init__(
        self, optimizer: Optimizer, scaler: Any | None, on_step: Callable[..., None], everyone: Sequence[Optimizer]
    ) -> None:
        self.optimizer, self.scaler, self.everyone = optimizer, scaler, everyone
        self.wants_closure = needs_closure(optimizer)
        self._unscaled = False
        self._lrs: list[Any] = []
        # a step that the scaler skips does not count: the hook runs only where the optimizer moved
        self.hooks = [optimizer.register_step_post_hook(on_step)]

    def decay(self, factor: float) -> None:
        """Multiply the learning rates by `factor` while a step is taken, so that schedulers do not see the factor."""

        def before(*_: Any) -> None:
            self._lrs = [group["lr"] for group in self.optimizer.param_groups]
            for group in self.optimizer.param_groups:
                group["lr"] = group["lr"] * factor

        def after(*_: Any) -> None:
            for group, lr in zip(self.optimizer.param_groups, self._lrs, strict=True):
                group["lr"] = lr

        self.hooks.append(self.optimizer.register_step_pre_hook(before))
        self.hooks.append(self.optimizer.register_step_post_hook(after))

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":  # not there yet: this is being copied
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    @contextmanager
    def toggle_model(self, sync_grad: bool = True) -> Iterator[None]:
        """Context in which only this optimizer's parameters require a gradient."""
        toggled = toggle(self, self.everyone)
        try:
            yield
        finally:
            for parameter, required in toggled:
                parameter.requires_grad = required

    def unscale(self) -> None:
        """Divide the gradients by the scale, once a step, before they are clipped or read."""
        if self.scaler is not None and not self._unscaled:
            self.scaler.unscale_(self.optimizer)
            self._unscaled = True

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        if self.scaler is None:
            return self.optimizer.step(closure, **kwargs) if closure is not None else self.optimizer.step(**kwargs)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.unscale()
        self.scaler.step(self.optimizer, **kwargs)
        self.scaler.update()
        self._unscaled = False
        return loss
