"""A step of torch's optimizers, bit for bit, without what nobody asked for: labels, hooks, passes over memory."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.optim import SGD, Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.optim.sgd import sgd
from torch.utils.hooks import RemovableHandle

MIN_FUSED = 2**15
"""Numbers of a parameter from which on its passes over memory are what takes time."""
VECTOR = 16
"""The most numbers that a CPU moves at once: those left over at the end are rounded otherwise by the fused kernel."""


class BareStep:
    """Steps an optimizer by the function inside torch's `step`, where nobody listens to it.

    `step` is wrapped in a profiler's label and in calls of hooks, which take longer than the arithmetic of a small net.

    Args:
        optimizer: torch's; see `of`.
        function: the one inside its `step`.
        counted: handle of the hook that counts steps: the only one there may be, which the caller calls in its place.
    """

    def __init__(self, optimizer: Optimizer, function: Callable[[Optimizer], Any], counted: RemovableHandle) -> None:
        self.optimizer, self._function, self._after = optimizer, function, counted.hooks_dict_ref
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
    def of(cls, optimizer: Optimizer, counted: RemovableHandle) -> "BareStep | None":
        """The bare step of an optimizer, or None where its `step` is not torch's own or is differentiated."""
        function = unwrapped_step(type(optimizer).step)
        if function is None or optimizer.defaults.get("differentiable"):
            return None
        return cls(optimizer, sgd_step if type(optimizer) is SGD else function, counted)

    def __call__(self) -> bool:
        """Take a step; False, and no step, where there is another hook or where `step` was replaced."""
        listened = len(self._after() or ()) != 1 or self._before() or self._before_any() or self._after_any()
        if listened or "step" in vars(self.optimizer) or type(self.optimizer).step is not self._step:
            return False
        with torch.no_grad():
            self._function(self.optimizer)
        return True


def no_hook(*_: Any) -> None:
    """A hook that shows where hooks of its kind are kept."""


def unwrapped_step(step: Any) -> Callable[[Optimizer], Any] | None:
    """The function under torch's own decorators; None where a layer is somebody else's.

    >>> unwrapped_step(SGD.step).__qualname__
    'SGD.step'
    """
    while getattr(step, "__globals__", {}).get("__name__", "").startswith("torch."):
        if not hasattr(step, "__wrapped__"):
            found: Callable[[Optimizer], Any] = step
            return found
        step = step.__wrapped__
    return None


def sgd_step(optimizer: Optimizer) -> None:
    """Step `torch.optim.SGD` as its own `step` does.

    On a CPU that takes up to four passes over memory, and torch's fused kernel one: it is given the long parameters,
    unless the user set `fused` or `foreach`. It is torch's own step in small, because that has one kernel for a group.
    """
    for group in optimizer.param_groups:
        foreach, momentum, parts = group["foreach"], group["momentum"], dict[tuple[bool, ...], Any]()
        several = bool(momentum or group["weight_decay"])  # passes over memory: one pass is faster plain
        fuses = several and group["fused"] is None and foreach is None
        for p in group["params"]:
            if (grad := p.grad) is not None:
                buffer = optimizer.state[p].get("momentum_buffer") if momentum else None
                fused = fuses and p.numel() >= MIN_FUSED and is_fusible(p, grad, buffer, group)
                part = fused, fused and buffer is None, grad.is_sparse  # a fused step is everybody's first or nobody's
                params, grads, buffers = parts.setdefault(part, ([], [], []))
                params.append(p)
                grads.append(grad)
                buffers.append(buffer)
                if p.device.type == "cpu" and group["fused"] is None:
                    foreach = bool(foreach)  # as torch chooses for a group on a CPU, after asking every parameter
        for (fused, _, sparse), (params, grads, buffers) in parts.items():
            sgd(
                params,
                grads,
                buffers,
                has_sparse_grad=sparse,
                foreach=foreach,
                fused=fused or group["fused"],
                weight_decay=group["weight_decay"],
                momentum=momentum,
                lr=group["lr"],
                dampening=group["dampening"],
                nesterov=group["nesterov"],
                maximize=group["maximize"],
            )
            if fused:  # which the kernel leaves out: autograd finds by it that a graph's weights have changed
                increment_version(params + [buffer for buffer in buffers if buffer is not None])
            for p, buffer in zip(params, buffers, strict=True) if momentum else ():
                optimizer.state[p]["momentum_buffer"] = buffer


def is_fusible(p: Tensor, grad: Tensor, buffer: Tensor | None, group: dict[str, Any]) -> bool:
    """True where the fused kernel gives the same bits; it reads everything as if it lay in memory as `p` does."""
    usual = p.device.type == "cpu" and type(p) in (nn.Parameter, Tensor) and grad.layout is torch.strided
    dense = p.is_contiguous() or p.is_contiguous(memory_format=torch.channels_last)
    others = [one for one in (grad, buffer) if one is not None]
    alike = usual and dense and all(one.dtype == p.dtype and one.stride() == p.stride() for one in others)
    numbers = not any(isinstance(group[name], Tensor) for name in ("lr", "momentum", "dampening", "weight_decay"))
    if not (alike and numbers) or p.numel() % VECTOR:
        return False
    rules = (bool(group[name]) for name in ("momentum", "dampening", "nesterov", "weight_decay", "maximize"))
    return fused_is_exact(p.dtype, *rules)


@cache
def fused_is_exact(
    dtype: torch.dtype, momentum: bool, dampening: bool, nesterov: bool, weight_decay: bool, maximize: bool
) -> bool:
    """True where three fused steps on this CPU give every bit of plain ones, tried once on random numbers.

    They do on the x86 CPU tried (AVX2), but no compiler promises it.

    Args:
        dtype: of the parameters.
        momentum: whether there is any; so with `dampening` and `weight_decay`.
        dampening: see above.
        nesterov: as of SGD; so is `maximize`.
        weight_decay: see above.
        maximize: see above.
    """
    results = []
    for fused in (False, True):
        g = torch.Generator().manual_seed(0)
        params = [torch.randn(n * MIN_FUSED + VECTOR * n, generator=g, device="cpu").to(dtype) for n in (1, 3)]
        rules = {"dampening": 0.1 * dampening, "nesterov": nesterov, "weight_decay": 0.013 * weight_decay}
        try:
            optimizer = SGD(params, 0.037, 0.9 * momentum, maximize=maximize, foreach=False, fused=fused, **rules)  # type: ignore[arg-type]
            for _ in range(3):
                for p in params:
                    p.grad = torch.randn(p.shape, generator=g, device="cpu").to(dtype)
                optimizer.step()
        except (RuntimeError, ValueError):  # there is no such kernel for the type, or SGD takes no such settings
            return False
        buffers = [optimizer.state[p]["momentum_buffer"] for p in params] if momentum else []
        results.append(torch.cat(params + buffers))
    return torch.equal(*results)
