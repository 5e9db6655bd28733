"""The local optimizers of one client, read from what `configure_optimizers` returned.

Their steps are counted.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from copy import deepcopy
from functools import cache, partial
from inspect import Parameter, signature
from typing import Any

import torch
from pytorch_lightning.utilities.types import LRSchedulerConfig
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from fl_lightning.client.progress import AccumulatedLR, LocalProgress
from fl_lightning.client.unwrapped_step import UnwrappedStep, unwrapped_step
from fl_lightning.utils.settings import described

Factor = Callable[[float], float]
"""`lr -> factor` of a learning rate."""

Factors = Sequence[Sequence[float]]
"""Factors of learning rates, by optimizer and parameter group."""


class LocalOptimizers:
    """The optimizers and schedulers of one client in one phase.

    Args:
        configured: what `configure_optimizers` returned.
        owner: name of the module it belongs to, for errors.
        slope: the method's `accumulated_lr_slope`, or None.
        scaler: gradient scaler, or None.
        backward: computes gradients of a loss.

    Attributes:
        reusable: whether optimizers that are begun anew equal new ones: torch's own, which nobody was given.
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
        self.foreign = next(filter(None, map(foreign_part, self.raw)), None)
        self.accumulated_lr = AccumulatedLR(self.raw, slope)
        self.backward = backward
        self.wrapped = [LocalOptimizer(optimizer, scaler, self.accumulated_lr.step, self.raw) for optimizer in self.raw]
        self._scheduled = any(not entry.reduce_on_plateau for entry in self.schedulers)  # while a client trains
        self._groups = [[(group, dict(group), list(group["params"])) for group in o.param_groups] for o in self.raw]
        self._states = [(list(o.state), deepcopy(list(o.state.values()))) for o in self.raw]
        # torch's own keep their state in `state` and `param_groups` only: a reset one equals a new one
        self.reusable = not self.schedulers and scaler is None and self.foreign is None

    def handed_out(self) -> "LocalOptimizers":
        """Record that somebody is given the optimizers, who may make more of them than they were.

        Returns them.
        """
        self.reusable = False
        return self

    def begin(
        self, progress: LocalProgress, lr: float | None = None, factor: Factor | None = None, factors: Factors = ()
    ) -> None:
        """Begin a phase of one client, as if the optimizers were built anew.

        Args:
            progress: counts the client's steps.
            lr: learning rate in place of the optimizers' own; None: their own.
            factor: gives that of a learning rate in this round (`lr_decay`), which schedulers do not see; None: 1.
            factors: further ones, by optimizer and parameter group (ReduceLROnPlateau's); empty: none.
        """
        for optimizer, groups, (owners, states) in zip(self.raw, self._groups, self._states, strict=True):
            optimizer.state.clear()
            optimizer.state.update(zip(owners, deepcopy(states), strict=True))
            optimizer.param_groups[:] = [group for group, *_ in groups]  # a hook may have added some
            for group, setting, params in groups:
                group.clear()
                group.update(setting)
                if isinstance(setting.get("lr"), Tensor):  # schedulers write into that of the group
                    group["lr"] = setting["lr"].clone()
                group["params"][:] = params
        if lr is not None:
            self._set_rate(lr)
        if factors or factor is not None:
            self._decay(factor, factors)
        self.accumulated_lr.begin(progress)

    def _set_rate(self, lr: float) -> None:
        """Put a phase's learning rate in place of the optimizers' own."""
        for group in (group for optimizer in self.raw for group in optimizer.param_groups):
            group.update({key: lr for key in ("lr", "initial_lr") if key in group})
        for entry in self.schedulers:
            if hasattr(entry.scheduler, "base_lrs"):
                entry.scheduler.base_lrs = [lr for _ in entry.scheduler.base_lrs]

    def _decay(self, factor: Factor | None, factors: Factors) -> None:
        """Multiply the learning rates, as `begin`."""
        for i, wrapped in enumerate(self.wrapped):
            row = list(factors[i]) if factors else [1.0] * len(wrapped.param_groups)
            if factor is not None:
                rates = [float(group.get("initial_lr", group["lr"])) for group in wrapped.param_groups]
                row = [times * factor(rate) for times, rate in zip(row, rates, strict=True)]
            if row != [1.0] * len(row):
                wrapped.decay(row, while_stepped=self._scheduled)

    def release(self) -> None:
        """Restore the optimizers and take the hooks off: a module may hand out the same ones again."""
        self.begin(LocalProgress())
        for wrapped in self.wrapped:
            for hook in wrapped.hooks:
                hook.remove()


def foreign_part(optimizer: Optimizer) -> str | None:
    """Name what makes an optimizer more than its settings: torch's constructor gives one none of it.

    >>> optimizer = SGD([torch.zeros(2)], lr=0.1)
    >>> hook = optimizer.register_step_post_hook(print)
    >>> foreign_part(optimizer), foreign_part(SGD([torch.zeros(2)], lr=0.1))
    ("the hook 'print' of its SGD", None)
    """
    kind = type(optimizer)
    if not kind.__module__.startswith("torch.optim."):
        return f"{kind.__name__}, which is not torch's"
    make: Callable[..., Optimizer] = kind
    attributes, keys = shape_of(make)
    for name, value in vars(optimizer).items():
        if name not in attributes and not is_own_step(optimizer, value):
            return f"the attribute {name!r} of its {kind.__name__}"
        for hook in value.values() if isinstance(value, OrderedDict) else ():
            return f"the hook {getattr(hook, '__name__', type(hook).__name__)!r} of its {kind.__name__}"
    for name in (name for group in optimizer.param_groups for name in group.keys() - keys):
        return f"the entry {name!r} of a parameter group of its {kind.__name__}"
    if not is_usual(optimizer):
        return f"the state that its {kind.__name__} has from the start"
    return None


def is_own_step(optimizer: Optimizer, value: Any) -> bool:
    """Return True for the step of the optimizer's class, maybe wrapped by torch's schedulers."""
    function = unwrapped_step(value)
    bound = getattr(value, "__self__", optimizer) is optimizer
    return function is not None and function is unwrapped_step(type(optimizer).step) and bound


def is_usual(optimizer: Optimizer) -> bool:
    """Return True where the state is what torch's constructor makes: empty, or Adagrad's."""
    state: Any = optimizer.state
    if type(state) is not defaultdict or state.default_factory is not dict:
        return False
    if not state or type(optimizer) is not Adagrad:
        return not state
    pairs = [
        (state[p], group["initial_accumulator_value"]) for group in optimizer.param_groups for p in group["params"]
    ]
    return all(
        held.keys() == {"step", "sum"} and not held["step"] and bool((held["sum"] == first).all())
        for held, first in pairs
    )


def is_settled(factory: Any) -> bool:
    """Return True for a factory of which is known that it gives every client the same: torch's class and plain values.

    >>> is_settled(partial(SGD, lr=0.1)), is_settled(SGD), is_settled(lambda params: SGD(params, lr=0.1))
    (True, True, False)
    """
    given = [*factory.args, *factory.keywords.values()] if isinstance(factory, partial) else []
    made = factory.func if isinstance(factory, partial) else factory
    if not isinstance(made, type) and made.__module__.split(".")[0] == "jsonargparse":  # `(..., class)`, of a file
        made = next((value for value in given if isinstance(value, type)), None)
        given = [value for value in given if not callable(value)]
    fixed = all(isinstance(value, int | float | str | tuple | None) for value in given)
    return fixed and isinstance(made, type) and made.__module__.startswith("torch.optim.")


@cache
def shape_of(kind: Callable[..., Optimizer]) -> tuple[frozenset[str], frozenset[str]]:
    """Names of the attributes of a new optimizer of torch's, and of the entries of its parameter groups."""
    plain = kind([torch.zeros(1, 1)])
    fused = kind([torch.zeros(1, 1)], fused=True) if kind in (SGD, Adam, AdamW, Adagrad) else plain
    return frozenset({*vars(plain), *vars(fused)}), frozenset(plain.param_groups[0]) | {"param_names", "initial_lr"}


def needs_closure(optimizer: Optimizer) -> bool:
    """Return True for optimizers whose step cannot be called without a closure (LBFGS, SAM)."""
    closure = signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is Parameter.empty


def takes_closure(optimizer: Optimizer) -> bool:
    """Tell whether an optimizer is stepped with a closure, as Lightning steps all: not where it would change nothing.

    Those of others may need one although they declare `closure=None`, as torch's do; torch's own call it first.
    """
    step = type(optimizer).step
    foreign = not step.__module__.startswith("torch.optim.")
    return needs_closure(optimizer) or (foreign and "closure" in signature(step).parameters)


@contextmanager
def frozen(params: Iterable[Tensor]) -> Iterator[None]:
    """Context in which these parameters require no gradient."""
    before = [(parameter, parameter.requires_grad) for parameter in params]
    for parameter, _ in before:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter, required in before:
            parameter.requires_grad_(required)


def params_of_others(optimizer: Any, everyone: Iterable[Optimizer]) -> list[Tensor]:
    """List the parameters that other optimizers step, and this one does not."""
    mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
    theirs = (p for other in everyone for group in other.param_groups for p in group["params"])
    return [p for p in theirs if id(p) not in mine]


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
        self.optimizer = optimizer
        self.scaler = scaler
        self.everyone = everyone
        self.needs_closure = needs_closure(optimizer)
        self.takes_closure = takes_closure(optimizer)
        self._unscaled = False
        # a step that the scaler skips does not count: the hook runs only where the optimizer moved
        self.hooks = [optimizer.register_step_post_hook(on_step)]
        self._on_step, self._bare = on_step, None if scaler is not None else UnwrappedStep.of(optimizer, self.hooks[0])

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """That of torch's optimizer, so that `isinstance` and torch's schedulers take one for the other."""
        return type(vars(self).get("optimizer", self))

    def decay(self, factors: Sequence[float], while_stepped: bool) -> None:
        """Multiply the groups' learning rates by `factors`, for good or only while a step is taken.

        The latter where schedulers set the rates, which must not see the factors.
        """
        lrs: list[Any] = []

        def before(*_: Any) -> None:
            lrs[:] = [group["lr"] for group in self.optimizer.param_groups]
            for group, factor in zip(self.optimizer.param_groups, factors, strict=True):
                group["lr"] = group["lr"] * factor

        if not while_stepped:
            before()
            return

        def after(*_: Any) -> None:
            for group, lr in zip(self.optimizer.param_groups, lrs, strict=True):
                group["lr"] = lr

        self.hooks += [self.optimizer.register_step_pre_hook(before), self.optimizer.register_step_post_hook(after)]

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":  # not there yet: this is being copied
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def toggle_model(self, sync_grad: bool = True) -> AbstractContextManager[None]:
        """Context in which only this optimizer's parameters require a gradient."""
        return frozen(params_of_others(self, self.everyone))

    def unscale(self) -> None:
        """Divide the gradients by the scale, once a step, before they are clipped or read."""
        if self.scaler is not None and not self._unscaled:
            self.scaler.unscale_(self.optimizer)
            self._unscaled = True

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        if closure is None and not kwargs and self._bare is not None and self._bare():
            return self._on_step()
        if self.scaler is not None:
            return self._scaled_step(self.scaler, closure, kwargs)
        return self.optimizer.step(**kwargs) if closure is None else self.optimizer.step(closure, **kwargs)

    def _scaled_step(self, scaler: Any, closure: Callable[[], Any] | None, kwargs: dict[str, Any]) -> Any:
        """Step with gradients that the scaler has scaled."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.unscale()
        scaler.step(self.optimizer, **kwargs)
        scaler.update()
        self._unscaled = False
        return loss


def parse_optimizers(configured: Any, owner: str) -> tuple[list[Optimizer], list[LRSchedulerConfig]]:
    """Read the optimizers and lr schedulers from what `configure_optimizers` returned.

    A learning rate that is a tensor is copied: all clients' optimizers may be built with that one.

    Raises:
        TypeError: if it is none of them.
    """
    optimizers, schedulers = _parsed(configured, owner)
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        lr = group.get("lr")
        if isinstance(lr, Tensor):
            group["lr"] = lr.clone()
            lr.copy_(group.get("initial_lr", lr))  # a scheduler writes its first factor into it
    return optimizers, schedulers


def _parsed(configured: Any, owner: str) -> tuple[list[Optimizer], list[LRSchedulerConfig]]:
    """Read them as they are."""
    if configured is None:
        return [], []
    if isinstance(configured, Optimizer):
        return [configured], []
    if isinstance(configured, Mapping):
        scheduler = configured.get("lr_scheduler")
        monitor = configured.get("monitor")  # read where the scheduler stands there by itself, as in Lightning
        return [configured["optimizer"]], [] if scheduler is None else [_scheduler(scheduler, monitor)]
    if isinstance(configured, Sequence) and not isinstance(configured, str):
        items = list(configured)
        if all(isinstance(item, Optimizer | Mapping) for item in items):
            pairs = [_parsed(item, owner) for item in items]
            optimizers = [optimizer for part, _ in pairs for optimizer in part]
            return optimizers, [scheduler for _, part in pairs for scheduler in part]
        if len(items) == 2 and isinstance(items[0], Sequence):
            schedulers = items[1] if isinstance(items[1], Sequence) else [items[1]]
            return list(items[0]), [_scheduler(scheduler) for scheduler in schedulers]
    raise TypeError(
        f"{owner}.configure_optimizers must return an optimizer, a dict, a list of them or (optimizers, schedulers), "
        f"got {described(configured)}; return such as torch.optim.SGD(self.parameters(), lr=0.1)"
    )


def _scheduler(value: Any, monitor: str | None = None) -> LRSchedulerConfig:
    known: dict[str, Any] = {"scheduler": value, "monitor": monitor}
    if isinstance(value, Mapping):
        known = {key: value[key] for key in ("scheduler", "interval", "frequency", "monitor", "strict") if key in value}
    return LRSchedulerConfig(reduce_on_plateau=isinstance(known["scheduler"], ReduceLROnPlateau), **known)
