"""Traces that a client leaves besides its entries: attributes and hooks of modules, and switches of torch."""

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from fl_lightning.types import Member
from fl_lightning.utils.attributes import instance_attributes

PARAMETER_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
"""Attributes of a parameter with its hooks. Torch has no public way to read the hooks."""

ENTRIES = ("_parameters", "_buffers", "_modules")
"""Attributes of a module with its entries and parts, which others hold."""

NOT_OF_USERS = {"torch", "torchmetrics", "torchvision", "pytorch_lightning", "lightning", "fl_lightning"}
"""Packages whose objects a module of the user's may hold, such as the Trainer."""

COLLECTIONS = (dict, list, set, deque)
"""Collections whose contents are restored if an attribute of a module is one."""


class Traces(Member):
    """Removes what a client that fails has left in the module and in torch's switches.

    Args:
        client: The client module.
    """

    at_client = True

    def __init__(self, client: nn.Module) -> None:
        self._client = client

    def mark(self) -> "Snapshot":
        return Snapshot(self._client)

    def undo(self, mark: "Snapshot") -> None:
        mark.undo()


class Snapshot:
    """Holds the client module and torch's switches as they were before a client.

    It covers the classes and attributes of all modules, and the contents of the collections that are
    attributes: hooks, parametrizations, methods that were replaced. It leaves metric objects out,
    because they begin anew for every client.

    Args:
        client: The client module.
        with_values: Whether it also covers the values of plain tensors and arrays that are attributes, of collections
            within collections, and of objects whose classes come with the modules. Entries of the state dict are not
            among them.
    """

    def __init__(self, client: nn.Module, *, with_values: bool = False) -> None:
        self._attributes: list[tuple[nn.Module, type[nn.Module], dict[str, Any]]] = []
        self._collections: list[tuple[Any, Any]] = []
        """Collections, and copies of them."""
        self._tensors: list[tuple[Tensor, Tensor]] = []
        """Plain tensors, and copies of them."""
        self._arrays: list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]] = []
        """Arrays, and copies of them."""
        self._held: set[int] = set()
        """The objects within attributes that are held."""
        self._packages = {package_of(module) for module in client.modules()} - NOT_OF_USERS
        """The packages of the user's own modules."""
        self._hooks: list[tuple[nn.Parameter, str, dict[Any, Any]]] = []
        for module in client.modules():
            if isinstance(module, Metric | MetricCollection):
                continue
            attributes = dict(vars(module))
            self._attributes.append((module, type(module), attributes))
            for value in attributes.values():
                if isinstance(value, COLLECTIONS):
                    self._collections.append((value, value.copy()))
            if with_values:
                for name, value in attributes.items():
                    if name not in ENTRIES:
                        self._hold_values(value)
        for parameter in client.parameters():
            for name in PARAMETER_HOOKS:
                self._hooks.append((parameter, name, dict(getattr(parameter, name) or {})))
        self._switches = switches()

    def _hold_values(self, value: Any) -> None:
        """Hold the values of an attribute, or of an item of a collection."""
        if id(value) in self._held:
            return
        self._held.add(id(value))
        if isinstance(value, nn.Parameter | nn.Module | type):
            return
        if isinstance(value, Tensor):
            if value.is_inference() or value.is_meta:
                return  # No training can write to it.
            self._tensors.append((value, value.detach().clone()))
        elif isinstance(value, np.ndarray):
            if value.flags.writeable:
                self._arrays.append((value, value.copy()))
        elif isinstance(value, COLLECTIONS):
            self._collections.append((value, value.copy()))
        elif package_of(value) in self._packages:
            value = instance_attributes(value)
            self._collections.append((value, value.copy()))
        if isinstance(value, dict):
            value = list(value.values())
        if isinstance(value, list | set | deque | tuple):
            for item in value:
                self._hold_values(item)

    def undo(self) -> None:
        """Restore everything."""
        for module, kind, attributes in self._attributes:
            if type(module) is not kind:
                module.__class__ = kind
            current = vars(module)
            current.clear()
            current.update(attributes)
        for collection, contents in self._collections:
            refill(collection, contents)
        for tensor, values in self._tensors:
            if tensor.shape != values.shape:
                tensor.data = values
            elif not torch.equal(tensor, values):  # An expanded tensor, which is not writable, is equal.
                with torch.no_grad():
                    tensor.copy_(values)
        for array, elements in self._arrays:
            np.copyto(array, elements)
        for parameter, name, hooks in self._hooks:
            current_hooks = getattr(parameter, name)
            if current_hooks:
                refill(current_hooks, hooks)
        for switch, current_switch in zip(self._switches, switches(), strict=True):
            if current_switch.value != switch.value:
                switch.set(switch.value)


def package_of(value: object) -> str:
    """Return the name of the top-level package that defines an object's class."""
    return type(value).__module__.partition(".")[0]


class Switch(NamedTuple):
    """A switch of torch for the whole process, or its thread.

    Args:
        value: The value of the switch.
        set: Sets the switch.
    """

    value: Any
    set: Callable[[Any], Any]


def switches() -> list[Switch]:
    """Return the switches that a client may set for a few lines, with their present values.

    A client that fails in such lines does not set the switch back. All other switches either have a
    context manager that sets them back on an error (autocast, default device, anomaly detection,
    cuDNN), or are set once for a whole process (threads, precision of matrix products).
    """
    deterministic = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    return [
        Switch(torch.is_grad_enabled(), torch.set_grad_enabled),
        Switch(torch.get_default_dtype(), torch.set_default_dtype),
        Switch(deterministic, lambda flags: torch.use_deterministic_algorithms(flags[0], warn_only=flags[1])),
    ]


def refill(collection: Any, contents: Any) -> None:
    """Replace the contents of a collection, which stays the same object."""
    collection.clear()
    if isinstance(collection, list | deque):
        collection.extend(contents)
    else:
        collection.update(contents)
