"""The structure of the client module: what a client adds, replaces or reshapes is found and undone."""

from typing import Any

import torch
from torch import Tensor, nn

from fl_lightning.client.module import ClientModule
from fl_lightning.functional.state import is_entry
from fl_lightning.members.traces import refill
from fl_lightning.members.weights import GlobalWeights
from fl_lightning.types import ClientJob, Member, State

TABLES = ("_parameters", "_buffers", "_modules")
"""Attributes of a module in which torch keeps its parameters, buffers and submodules by name."""

TensorLayout = tuple[torch.Size, torch.dtype, torch.device]
"""Shape, type and device of a tensor."""

Flags = list[tuple[nn.Parameter, bool]]
"""Parameters, and whether each requires a gradient."""


class Structure(Member):
    """Keeps the modules, parameters and buffers of the client module as they are before the first round.

    Args:
        client: The client module.
        global_weights: The entries of the client module.
    """

    at_client = True

    def __init__(self, client: ClientModule, global_weights: GlobalWeights) -> None:
        self._client = client
        self._global_weights = global_weights
        self._entries = State()
        """The tensors of the entries, by all names of each."""
        self._layout: dict[str, TensorLayout] = {}
        self._parameters: dict[str, nn.Parameter] = {}
        self._attributes: list[tuple[dict[str, Any], dict[str, dict[str, Any]]]] = []
        """For every module its attributes, and copies of its `TABLES`."""
        self._flags: Flags = []

    def prepare(self) -> bool:
        """Record the structure before the first round, when the module is on its device.

        Returns:
            False, since no other member depends on the structure.
        """
        if self._layout:
            return False
        state = self._client.state_dict(keep_vars=True)
        for name, (owner, attribute) in self._global_weights.entries.items():
            self._entries[name] = getattr(owner, attribute)
        for alias, name in self._global_weights.tied.items():
            self._entries[alias] = self._entries[name]
        for name, value in self._entries.items():
            self._layout[name] = tensor_layout(value)
            if isinstance(value, nn.Parameter) and state[name] is value:
                self._parameters[name] = value
        for module in self._client.modules():
            attributes = vars(module)
            # Nothing can be added to TorchScript, whose tables are no dicts.
            tables = {table: dict(attributes[table]) for table in TABLES if isinstance(attributes[table], dict)}
            self._attributes.append((attributes, tables))
        return False

    def mark(self) -> Flags:
        """Record which parameters require a gradient."""
        self._flags = [(parameter, parameter.requires_grad) for parameter in self._client.parameters()]
        return self._flags

    def trained(self, job: ClientJob) -> None:
        """Refuse a module whose entries have changed, and undo what a client froze or unfroze.

        Raises:
            ValueError: An entry was added, removed, replaced or reshaped.
        """
        state = self._client.state_dict(keep_vars=True)
        for name, value in state.items():
            layout = self._layout.get(name)
            if layout is None:
                if is_entry(name, value):
                    raise ValueError(
                        f"the client's entries must exist before training, to be sent and saved, but {name!r} came to "
                        f"be in it; allocate it in __init__ or configure_model"
                    )
                continue
            if name in self._parameters and value is not self._parameters[name]:
                raise ValueError(
                    f"the client's parameters must stay the same objects, but {name!r} was replaced; copy the values "
                    f"into it"
                )
            if tensor_layout(value) != layout:
                raise reshaped(name, value, layout)
        if len(state) < len(self._layout):
            for name in self._layout:
                if name not in state:
                    raise ValueError(f"the client's entries must stay in training, but {name!r} is gone; keep it")
        for parameter, requires_grad in self._flags:
            if parameter.requires_grad != requires_grad:
                parameter.requires_grad_(requires_grad)

    def undo(self, mark: Flags) -> None:
        """Undo what a client did to the structure, without the values of the entries.

        New entries become None. The values must be loaded afterwards.
        """
        for attributes, tables in self._attributes:
            for table, contents in tables.items():
                restore_table(attributes[table], contents)
                # An attribute of the same name would hide the entry.
                for name in attributes.keys() & contents:
                    del attributes[name]
        for name, value in self._entries.items():
            layout = self._layout[name]
            if tensor_layout(value) != layout:
                shape, dtype, device = layout
                value.data = torch.zeros(shape, dtype=dtype, device=device)
                value.grad = None
        for parameter, requires_grad in mark:
            parameter.requires_grad_(requires_grad)


def restore_table(table: dict[str, Any], contents: dict[str, Any]) -> None:
    """Give a table of a module its former contents.

    A new module without entries stays. Everything else that is new becomes None.

    Args:
        table: One of a module's `TABLES`.
        contents: The former contents.
    """
    restored = dict(contents)
    for name, value in table.items():
        if name in contents:
            continue
        has_no_entries = isinstance(value, nn.Module) and not value.state_dict()
        restored[name] = value if has_no_entries else None
    refill(table, restored)


def reshaped(name: str, value: Tensor, layout: TensorLayout) -> ValueError:
    """Return the error for an entry whose shape, type or device has changed.

    Args:
        name: Name of the entry.
        value: The entry as it is.
        layout: The layout that it had.
    """
    shape, dtype, device = layout
    return ValueError(
        f"the client's entries must keep shape, type and device, but {name!r} has {tuple(value.shape)}, "
        f"{value.dtype} on {value.device} in place of {tuple(shape)}, {dtype} on {device}; keep them in training"
    )


def tensor_layout(value: Tensor) -> TensorLayout:
    """Return shape, type and device of a tensor."""
    return value.shape, value.dtype, value.device
