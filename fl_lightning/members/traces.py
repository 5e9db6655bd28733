"""Traces of a client that fails, besides its entries: attributes and hooks of modules, torch's switches."""

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from pytorch_lightning import LightningModule
from torch import nn
from torchmetrics import Metric, MetricCollection

from fl_lightning.types import Member

PARAMETER_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
"""Attributes of a parameter with its hooks; torch has no public way to ask for them."""

CPU = torch.device("cpu")
COLLECTIONS = (dict, list, set, deque)


class Traces(Member):
    """Lets no client that fails leave anything in the module or torch's switches.

    Args:
        client: the module.
    """

    at_client = True

    def __init__(self, client: LightningModule) -> None:
        self._client = client

    def mark(self) -> "Snapshot":
        return Snapshot(self._client, self._client.device.type)

    def undo(self, mark: "Snapshot") -> None:
        mark.undo()


class Snapshot:
    """The client module and torch's switches before a client, to which `undo` goes back.

    Classes and attributes of all modules are put back, and what dictionaries, lists and sets among them hold: hooks,
    parametrizations, methods that were replaced. Metric objects are left alone, whose counts are dropped by the round.

    Args:
        client: the module.
        device_type: `cpu`, `cuda`: where it is trained.
    """

    def __init__(self, client: nn.Module, device_type: str = "cpu") -> None:
        parts = [module for module in client.modules() if not isinstance(module, Metric | MetricCollection)]
        self._attributes = [(module, type(module), dict(vars(module))) for module in parts]
        held = [value for _, _, attributes in self._attributes for value in attributes.values()]
        self._held = [(value, value.copy()) for value in held if isinstance(value, COLLECTIONS)]
        hooked = [(parameter, name) for parameter in client.parameters() for name in PARAMETER_HOOKS]
        self._hooks = [(parameter, name, dict(getattr(parameter, name) or {})) for parameter, name in hooked]
        self._device_type = device_type
        self._switches = switches(device_type)
        self._nesting = torch.autocast_increment_nesting() - 1
        torch.autocast_decrement_nesting()

    def undo(self) -> None:
        """Put everything back."""
        for module, kind, attributes in self._attributes:
            if type(module) is not kind:
                module.__class__ = kind
            now = vars(module)
            now.clear()
            now.update(attributes)
        for value, before in self._held:
            refill(value, before)
        for parameter, name, before in self._hooks:
            if hooks := getattr(parameter, name):
                refill(hooks, before)
        for (now, _), (before, setter) in zip(switches(self._device_type), self._switches, strict=True):
            if now != before:
                setter(before)
        while torch.autocast_increment_nesting() > self._nesting + 1:
            torch.autocast_decrement_nesting()
            torch.autocast_decrement_nesting()
        torch.autocast_decrement_nesting()


def refill(value: Any, before: Any) -> None:
    """Let a collection hold what it held before."""
    value.clear()
    (value.extend if isinstance(value, list | deque) else value.update)(before)


def switches(device_type: str) -> list[tuple[Any, Callable[[Any], Any]]]:
    """Read torch's switches of this process.

    Each with the function that sets it.
    """
    cudnn = torch.backends.cudnn
    return [
        (torch.is_grad_enabled(), torch.set_grad_enabled),
        (torch.get_default_dtype(), torch.set_default_dtype),
        (torch.get_default_device(), lambda device: torch.set_default_device(None if device == CPU else device)),
        (torch.get_num_threads(), torch.set_num_threads),
        (torch.get_float32_matmul_precision(), torch.set_float32_matmul_precision),
        (
            (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
            lambda flags: torch.autograd.set_detect_anomaly(*flags),
        ),
        (
            (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
            lambda flags: torch.use_deterministic_algorithms(flags[0], warn_only=flags[1]),
        ),
        (torch.is_autocast_enabled(device_type), lambda flag: torch.set_autocast_enabled(device_type, flag)),
        (torch.get_autocast_dtype(device_type), lambda dtype: torch.set_autocast_dtype(device_type, dtype)),
        (torch.is_autocast_cache_enabled(), torch.set_autocast_cache_enabled),
        *((getattr(cudnn, name), partial(setattr, cudnn, name)) for name in ("enabled", "benchmark", "deterministic")),
    ]
