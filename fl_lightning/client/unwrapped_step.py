"""A step of torch's optimizers, bit for bit, without what nobody asked for: labels and hooks."""

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle


class UnwrappedStep:
    """Steps an optimizer by the function inside torch's `step`, where nobody listens to it.

    `step` is wrapped in a profiler's label and in calls of hooks, which take longer than the arithmetic of a small net.

    Args:
        optimizer: torch's; see `of`.
        function: the one inside its `step`.
        counted: handle of the hook that counts steps: the only one there may be, which the caller calls in its place.
    """

    def __init__(self, optimizer: Optimizer, function: Callable[[Optimizer], Any], counted: RemovableHandle) -> None:
        self.optimizer = optimizer
        self._function = function
        self._after = counted.hooks_dict_ref
        self._step = type(optimizer).step
        shown = (
            optimizer.register_step_pre_hook(no_hook),
            register_optimizer_step_pre_hook(no_hook),
            register_optimizer_step_post_hook(no_hook),
        )
        self._before, self._before_any, self._after_any = [handle.hooks_dict_ref for handle in shown]
        for handle in shown:
            handle.remove()

    @classmethod
    def of(cls, optimizer: Optimizer, counted: RemovableHandle) -> "UnwrappedStep | None":
        """The unwrapped step of an optimizer, or None where its `step` is not torch's own or is differentiated."""
        function = unwrapped_step(type(optimizer).step)
        if function is None or optimizer.defaults.get("differentiable"):
            return None
        return cls(optimizer, function, counted)

    def __call__(self) -> bool:
        """Take a step.

        False, and no step, where there is another hook or where `step` was replaced.
        """
        listened = len(self._after() or ()) != 1 or self._before() or self._before_any() or self._after_any()
        if listened or "step" in vars(self.optimizer) or type(self.optimizer).step is not self._step:
            return False
        with torch.no_grad():
            self._function(self.optimizer)
        return True


def no_hook(*_: Any) -> None:
    """A hook that shows where hooks of its kind are kept."""


def unwrapped_step(step: Any) -> Callable[[Optimizer], Any] | None:
    """The function under torch's own decorators.

    None where a layer is somebody else's.

    >>> unwrapped_step(torch.optim.SGD.step).__qualname__
    'SGD.step'
    """
    while getattr(step, "__globals__", {}).get("__name__", "").startswith("torch."):
        if not hasattr(step, "__wrapped__"):
            function: Callable[[Optimizer], Any] = step
            return function
        step = step.__wrapped__
    return None
