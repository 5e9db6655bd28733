"""The local optimizers of one client, as `configure_optimizers` returned them, with counted steps."""

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from copy import deepcopy
from functools import cache, partial
from inspect import Parameter, signature
from typing import Any, NamedTuple

import torch
from pytorch_lightning.utilities.types import LRSchedulerConfig
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from fl_lightning.client.progress import AccumulatedLR, ClientProgress
from fl_lightning.client.unwrapped_step import UnwrappedStep, unwrapped_step
from fl_lightning.utils.settings import described

Factor = Callable[[float], float]
"""A function `lr -> factor` of a learning rate."""

Factors = Sequence[Sequence[float]]
"""Factors of learning rates, by optimizer and parameter group."""

FUSED = (SGD, Adam, AdamW, Adagrad)
"""Optimizers of torch that have more attributes if they are made with `fused=True`."""

SCHEDULER_SETTINGS = ("scheduler", "interval", "frequency", "monitor", "strict")
"""The settings of a scheduler that a client follows."""


class InitialGroup(NamedTuple):
    """Holds a parameter group, and what was in it when the optimizer was made.

    Args:
        group: The parameter group, the object itself.
        settings: The entries of the group.
        params: The parameters of the group.
    """

    group: dict[str, Any]
    settings: dict[str, Any]
    params: list[Tensor]


class InitialState(NamedTuple):
    """Holds the state that an optimizer had when it was made.

    Args:
        owners: The keys of the state, usually parameters.
        values: A copy of the value of each key.
    """

    owners: list[Any]
    values: list[Any]


class LocalOptimizers:
    """Holds the optimizers and schedulers of one client in one phase.

    Args:
        configured: The object that `configure_optimizers` returned.
        owner: The class name of the module that was asked, for errors.
        slope: The method's `accumulated_lr_slope`. None: it is 1.
        scaler: The gradient scaler. None: gradients are not scaled.
        backward: A function that computes the gradients of a loss.

    Attributes:
        raw: The optimizers themselves.
        wrapped: The optimizers as the client sees them.
        schedulers: The schedulers with their settings.
        foreign: What makes an optimizer more than its settings, in words. None: nothing.
        accumulated_lr: Counts the steps.
        reusable: Whether optimizers that are begun anew equal new ones. It is True for torch's own optimizers that
            nobody was given.

    Raises:
        TypeError: `configured` is neither an optimizer nor a collection that Lightning knows.
    """

    def __init__(
        self,
        configured: Any,
        owner: str,
        *,
        slope: Callable[[float], float] | None = None,
        scaler: Any | None = None,
        backward: Callable[..., None] = Tensor.backward,
    ) -> None:
        self.raw, self.schedulers = parse_optimizers(configured, owner)
        foreign_parts = [foreign_part(optimizer) for optimizer in self.raw]
        self.foreign = next((part for part in foreign_parts if part is not None), None)
        self.accumulated_lr = AccumulatedLR(self.raw, slope)
        self.backward = backward
        self.wrapped = [
            LocalOptimizer(optimizer, scaler=scaler, on_step=self.accumulated_lr.step, everyone=self.raw)
            for optimizer in self.raw
        ]
        # A ReduceLROnPlateau is stepped by the server, all other schedulers while a client trains.
        self._scheduled = any(not entry.reduce_on_plateau for entry in self.schedulers)
        self._initial_groups = [initial_groups(optimizer) for optimizer in self.raw]
        self._initial_states = [
            InitialState(list(optimizer.state), deepcopy(list(optimizer.state.values()))) for optimizer in self.raw
        ]
        # Torch's own optimizers keep everything in `state` and `param_groups`, which `begin` resets.
        self.reusable = not self.schedulers and scaler is None and self.foreign is None

    def handed_out(self) -> "LocalOptimizers":
        """Record that somebody is given the optimizers and may change them, and return them."""
        self.reusable = False
        return self

    def begin(
        self, progress: ClientProgress, lr: float | None = None, factor: Factor | None = None, factors: Factors = ()
    ) -> None:
        """Begin a phase of one client, as if the optimizers were built anew.

        Args:
            progress: Counts the client's steps.
            lr: The learning rate in place of the optimizers' own. None: their own.
            factor: Gives the factor of a learning rate in this round (`lr_decay`), which schedulers do not see.
                None: 1.
            factors: Further factors, those of ReduceLROnPlateau. Empty: 1.
        """
        self._reset()
        if lr is not None:
            self._set_lr(lr)
        if factors or factor is not None:
            self._decay(factor, factors)
        self.accumulated_lr.begin(progress)

    def _reset(self) -> None:
        """Put back the state and the parameter groups that the optimizers had when they were made."""
        for index, optimizer in enumerate(self.raw):
            owners, values = self._initial_states[index]
            groups = self._initial_groups[index]
            optimizer.state.clear()
            optimizer.state.update(zip(owners, deepcopy(values), strict=True))
            # A hook may have added groups.
            optimizer.param_groups[:] = [initial.group for initial in groups]
            for group, settings, params in groups:
                group.clear()
                group.update(settings)
                if isinstance(settings.get("lr"), Tensor):
                    # Schedulers write into the group's tensor, and must not reach the initial one.
                    group["lr"] = settings["lr"].clone()
                group["params"][:] = params

    def _set_lr(self, lr: float) -> None:
        """Put a phase's learning rate in place of the optimizers' own."""
        for optimizer in self.raw:
            for group in optimizer.param_groups:
                for key in ("lr", "initial_lr"):
                    if key in group:
                        group[key] = lr
        for entry in self.schedulers:
            if hasattr(entry.scheduler, "base_lrs"):
                entry.scheduler.base_lrs = [lr for _ in entry.scheduler.base_lrs]

    def _decay(self, factor: Factor | None, factors: Factors) -> None:
        """Multiply the learning rates by `factor` and `factors`, as `begin` explains them."""
        for index, wrapped in enumerate(self.wrapped):
            groups = wrapped.param_groups
            group_factors = list(factors[index]) if factors else [1.0] * len(groups)
            if factor is not None:
                lrs = [float(group.get("initial_lr", group["lr"])) for group in groups]
                group_factors = [given * factor(lr) for given, lr in zip(group_factors, lrs, strict=True)]
            if any(value != 1.0 for value in group_factors):
                wrapped.decay(group_factors, while_stepped=self._scheduled)

    def release(self) -> None:
        """Reset the optimizers and remove the hooks, because a module may return the same optimizers again."""
        self.begin(ClientProgress())
        for wrapped in self.wrapped:
            for hook in wrapped.hooks:
                hook.remove()


def initial_groups(optimizer: Optimizer) -> list[InitialGroup]:
    """Return the parameter groups of a new optimizer, with copies of their entries."""
    return [
        InitialGroup(group=group, settings=dict(group), params=list(group["params"]))
        for group in optimizer.param_groups
    ]


def foreign_part(optimizer: Optimizer) -> str | None:
    """Name a part of an optimizer that its constructor in torch would not make. None: there is none.

    >>> optimizer = SGD([torch.zeros(2)], lr=0.1)
    >>> hook = optimizer.register_step_post_hook(print)
    >>> foreign_part(optimizer), foreign_part(SGD([torch.zeros(2)], lr=0.1))
    ("the hook 'print' of its SGD", None)
    """
    kind = type(optimizer)
    if not kind.__module__.startswith("torch.optim."):
        return f"{kind.__name__}, which is not torch's"
    make: Callable[..., Optimizer] = kind
    attributes, group_keys = names_of_new(make)
    for name, value in vars(optimizer).items():
        if name not in attributes and not is_torch_step(optimizer, value):
            return f"the attribute {name!r} of its {kind.__name__}"
        if isinstance(value, OrderedDict) and value:
            # Torch keeps the hooks of an optimizer in ordered dicts.
            hook = next(iter(value.values()))
            return f"the hook {getattr(hook, '__name__', type(hook).__name__)!r} of its {kind.__name__}"
    for group in optimizer.param_groups:
        for name in group:
            if name not in group_keys:
                return f"the entry {name!r} of a parameter group of its {kind.__name__}"
    if not has_torch_state(optimizer):
        return f"the state that its {kind.__name__} has from the start"
    return None


def is_torch_step(optimizer: Optimizer, value: Any) -> bool:
    """Return True if an attribute is the step of the optimizer's class, which torch's schedulers may wrap."""
    function = unwrapped_step(value)
    is_bound = getattr(value, "__self__", optimizer) is optimizer
    return function is not None and function is unwrapped_step(type(optimizer).step) and is_bound


def has_torch_state(optimizer: Optimizer) -> bool:
    """Return True if the state is the one that torch's constructor makes: empty, or Adagrad's."""
    state: Any = optimizer.state
    if type(state) is not defaultdict or state.default_factory is not dict:
        return False
    if not state or type(optimizer) is not Adagrad:
        return not state
    for group in optimizer.param_groups:
        initial_sum = group["initial_accumulator_value"]
        for parameter in group["params"]:
            entries = state.get(parameter, {})
            if entries.keys() != {"step", "sum"}:
                return False
            if entries["step"] or not bool((entries["sum"] == initial_sum).all()):
                return False
    return True


def is_settled(factory: Any) -> bool:
    """Return True if a factory is known to treat all clients alike: a class of torch with plain values.

    >>> is_settled(partial(SGD, lr=0.1)), is_settled(SGD), is_settled(lambda params: SGD(params, lr=0.1))
    (True, True, False)
    """
    made = factory
    values: list[Any] = []
    if isinstance(factory, partial):
        made = factory.func
        values = [*factory.args, *factory.keywords.values()]
    if not isinstance(made, type) and made.__module__.split(".")[0] == "jsonargparse":
        # The factory of a configuration file is a function of jsonargparse, whose arguments contain the class.
        made = next((value for value in values if isinstance(value, type)), None)
        values = [value for value in values if not callable(value)]
    if not isinstance(made, type) or not made.__module__.startswith("torch.optim."):
        return False
    return all(isinstance(value, int | float | str | tuple | None) for value in values)


@cache
def names_of_new(kind: Callable[..., Optimizer]) -> tuple[frozenset[str], frozenset[str]]:
    """Return the names of a new optimizer's attributes, and those of the entries of its parameter groups.

    Args:
        kind: A class of torch.
    """
    plain = kind([torch.zeros(1, 1)])
    attributes = {*vars(plain)}
    if kind in FUSED:
        fused = kind([torch.zeros(1, 1)], fused=True)
        attributes |= {*vars(fused)}
    # Named parameters and schedulers add two entries.
    group_keys = {*plain.param_groups[0], "param_names", "initial_lr"}
    return frozenset(attributes), frozenset(group_keys)


def needs_closure(optimizer: Optimizer) -> bool:
    """Return True if the step of an optimizer cannot be called without a closure, as for LBFGS and SAM."""
    closure = signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is Parameter.empty


def takes_closure(optimizer: Optimizer) -> bool:
    """Return True if an optimizer is stepped with a closure, as Lightning steps every optimizer.

    Torch's own optimizers with `closure=None` call the closure first, so they are stepped without one. Other
    optimizers may need a closure although they declare `closure=None`.
    """
    step = type(optimizer).step
    is_foreign = not step.__module__.startswith("torch.optim.")
    return needs_closure(optimizer) or (is_foreign and "closure" in signature(step).parameters)


@contextmanager
def frozen(params: Iterable[Tensor]) -> Iterator[None]:
    """Context in which these parameters require no gradient."""
    before = [(parameter, parameter.requires_grad) for parameter in params]
    for parameter, _ in before:
        parameter.requires_grad = False
    try:
        yield
    finally:
        for parameter, required in before:
            parameter.requires_grad = required


def params_of_others(optimizer: Any, everyone: Iterable[Optimizer]) -> list[Tensor]:
    """Return the parameters that other optimizers step, and this optimizer does not.

    Args:
        optimizer: The optimizer.
        everyone: All optimizers of the client.
    """
    own_ids = {id(parameter) for parameter in stepped_by([optimizer])}
    return [parameter for parameter in stepped_by(everyone) if id(parameter) not in own_ids]


def stepped_by(optimizers: Iterable[Any]) -> list[Tensor]:
    """Return the parameters of some optimizers, in order."""
    params: list[Tensor] = []
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            params += group["params"]
    return params


class LocalOptimizer:
    """Shows an optimizer to a client: `step` uses the gradient scaler and counts as a local step.

    Args:
        optimizer: The optimizer itself.
        scaler: The gradient scaler. None: gradients are not scaled.
        on_step: A function that is called after each step.
        everyone: All optimizers of the client.

    Attributes:
        hooks: The handles of the hooks on the optimizer's step.
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
        # A step that the scaler skips does not count. The hook runs only if the optimizer steps.
        count_hook = optimizer.register_step_post_hook(on_step)
        self.hooks = [count_hook]
        self._on_step = on_step
        self._unwrapped_step: UnwrappedStep | None = None
        if scaler is None:
            self._unwrapped_step = UnwrappedStep.of(optimizer, count_hook)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """The class of the optimizer itself, so that `isinstance` and torch's schedulers accept the object."""
        return type(vars(self).get("optimizer", self))

    def decay(self, factors: Sequence[float], while_stepped: bool) -> None:
        """Multiply the learning rates of the parameter groups.

        Args:
            factors: The factor of each group.
            while_stepped: Whether the factors hold only while a step is taken, because schedulers set the rates and
                must not see the factors.
        """
        lrs: list[Any] = []

        def multiply(*_: Any) -> None:
            lrs[:] = [group["lr"] for group in self.optimizer.param_groups]
            for group, factor in zip(self.optimizer.param_groups, factors, strict=True):
                group["lr"] = group["lr"] * factor

        def put_back(*_: Any) -> None:
            for group, lr in zip(self.optimizer.param_groups, lrs, strict=True):
                group["lr"] = lr

        if while_stepped:
            self.hooks.append(self.optimizer.register_step_pre_hook(multiply))
            self.hooks.append(self.optimizer.register_step_post_hook(put_back))
        else:
            multiply()

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":
            # The object is being copied, and has no optimizer yet.
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
        """Take a step as torch does, and return the loss of the closure."""
        if closure is None and not kwargs and self._unwrapped_step is not None and self._unwrapped_step():
            return self._on_step()
        if self.scaler is not None:
            return self._scaled_step(self.scaler, closure, kwargs)
        if closure is None:
            return self.optimizer.step(**kwargs)
        return self.optimizer.step(closure, **kwargs)

    def _scaled_step(self, scaler: Any, closure: Callable[[], Any] | None, kwargs: dict[str, Any]) -> Any:
        """Take a step with gradients that the scaler has scaled, and return the loss of the closure."""
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
    """Return the optimizers and schedulers in what `configure_optimizers` returned.

    A learning rate that is a tensor is copied, because the optimizers of all clients may be built with one tensor.

    Args:
        configured: The returned object.
        owner: The class name of the module that was asked, for the error.

    Raises:
        TypeError: `configured` is neither an optimizer nor a collection that Lightning knows.
    """
    optimizers, schedulers = _parsed(configured, owner)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            lr = group.get("lr")
            if isinstance(lr, Tensor):
                group["lr"] = lr.clone()
                # A scheduler has written its first factor into the user's tensor.
                lr.copy_(group.get("initial_lr", lr))
    return optimizers, schedulers


def _parsed(configured: Any, owner: str) -> tuple[list[Optimizer], list[LRSchedulerConfig]]:
    """Return the optimizers and schedulers, without copies of learning rates."""
    if configured is None:
        return [], []
    if isinstance(configured, Optimizer):
        return [configured], []
    if isinstance(configured, Mapping):
        return _parsed_mapping(configured)
    if isinstance(configured, Sequence) and not isinstance(configured, str):
        items = list(configured)
        if all(isinstance(item, Optimizer | Mapping) for item in items):
            return _parsed_items(items, owner)
        if len(items) == 2 and isinstance(items[0], Sequence):
            optimizers, schedulers = items
            if not isinstance(schedulers, Sequence):
                schedulers = [schedulers]
            return list(optimizers), [_scheduler(scheduler) for scheduler in schedulers]
    raise TypeError(
        f"{owner}.configure_optimizers must return an optimizer, a dict, a list of them or (optimizers, schedulers), "
        f"got {described(configured)}; return such as torch.optim.SGD(self.parameters(), lr=0.1)"
    )


def _parsed_mapping(configured: Mapping[str, Any]) -> tuple[list[Optimizer], list[LRSchedulerConfig]]:
    """Return the optimizer and the scheduler of one dict."""
    scheduler = configured.get("lr_scheduler")
    schedulers = []
    if scheduler is not None:
        # As in Lightning, this monitor counts only for a scheduler that is not a dict itself.
        schedulers.append(_scheduler(scheduler, monitor=configured.get("monitor")))
    return [configured["optimizer"]], schedulers


def _parsed_items(items: Sequence[Any], owner: str) -> tuple[list[Optimizer], list[LRSchedulerConfig]]:
    """Return the optimizers and schedulers of a list of optimizers and dicts."""
    optimizers: list[Optimizer] = []
    schedulers: list[LRSchedulerConfig] = []
    for item in items:
        item_optimizers, item_schedulers = _parsed(item, owner)
        optimizers += item_optimizers
        schedulers += item_schedulers
    return optimizers, schedulers


def _scheduler(value: Any, monitor: str | None = None) -> LRSchedulerConfig:
    """Return the settings of a scheduler.

    Args:
        value: The scheduler, or a dict with it and its settings.
        monitor: The monitored value of a scheduler without a dict of its own. None: no value.
    """
    settings: dict[str, Any] = {"scheduler": value, "monitor": monitor}
    if isinstance(value, Mapping):
        settings = {key: value[key] for key in SCHEDULER_SETTINGS if key in value}
    reduces_on_plateau = isinstance(settings["scheduler"], ReduceLROnPlateau)
    return LRSchedulerConfig(reduce_on_plateau=reduces_on_plateau, **settings)
