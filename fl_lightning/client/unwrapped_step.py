"""A step of torch's optimizers, bit for bit, without labels and hooks that nobody asked for."""

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle


class UnwrappedStep:
    """Steps an optimizer by the function inside torch's `step`, if no hook would notice.

    Torch wraps `step` in a label for profilers and in calls of hooks. They take longer than the arithmetic of a small
    net.

    Args:
        optimizer: An optimizer of torch. `UnwrappedStep.of` checks it.
        function: The function inside the optimizer's `step`.
        counted: The handle of the hook that counts steps. It may be the only hook, and the caller calls it after the
            step.
    """

    def __init__(self, optimizer: Optimizer, function: Callable[[Optimizer], Any], counted: RemovableHandle) -> None:
        self.optimizer = optimizer
        self._function = function
        self._step = type(optimizer).step
        # A handle has a weak reference to the dict in which torch keeps all hooks of a kind.
        before = optimizer.register_step_pre_hook(no_hook)
        before_any = register_optimizer_step_pre_hook(no_hook)
        after_any = register_optimizer_step_post_hook(no_hook)
        self._hooks_after = counted.hooks_dict_ref
        self._hooks_before = before.hooks_dict_ref
        self._hooks_before_any = before_any.hooks_dict_ref
        self._hooks_after_any = after_any.hooks_dict_ref
        for handle in (before, before_any, after_any):
            handle.remove()

    @classmethod
    def of(cls, optimizer: Optimizer, counted: RemovableHandle) -> "UnwrappedStep | None":
        """Return the unwrapped step of an optimizer, or None if there is none.

        There is none if the class has a `step` of its own, or if the step is differentiated.

        Args:
            optimizer: The optimizer.
            counted: The handle of the hook that counts steps.
        """
        function = unwrapped_step(type(optimizer).step)
        if function is None or optimizer.defaults.get("differentiable"):
            return None
        return cls(optimizer, function, counted)

    def __call__(self) -> bool:
        """Take a step, unless there is a further hook or `step` was replaced. Return whether it was taken."""
        if len(self._hooks_after() or ()) != 1:
            return False
        if self._hooks_before() or self._hooks_before_any() or self._hooks_after_any():
            return False
        if "step" in vars(self.optimizer) or type(self.optimizer).step is not self._step:
            return False
        with torch.no_grad():
            self._function(self.optimizer)
        return True


def no_hook(*_: Any) -> None:
    """Do nothing, as a hook whose handle shows where torch keeps hooks of its kind."""


def unwrapped_step(step: Any) -> Callable[[Optimizer], Any] | None:
    """Return the function under torch's own decorators, or None if one of the layers is not torch's.

    >>> unwrapped_step(torch.optim.SGD.step).__qualname__
    'SGD.step'
    """
    while getattr(step, "__globals__", {}).get("__name__", "").startswith("torch."):
        if not hasattr(step, "__wrapped__"):
            function: Callable[[Optimizer], Any] = step
            return function
        step = step.__wrapped__
    return None
