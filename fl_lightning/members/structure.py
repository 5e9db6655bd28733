"""Structure of the client module: what a client adds, replaces or reshapes is found, and undone."""

from typing import Any

import torch
from torch import Tensor, nn

from fl_lightning.client.module import ClientModule
from fl_lightning.functional.state import is_entry
from fl_lightning.members.traces import refill
from fl_lightning.members.weights import GlobalWeights
from fl_lightning.types import ClientJob, Member, State

TABLES = ("_parameters", "_buffers", "_modules")
"""Attributes of a module in which torch keeps what is in it."""

Layout = tuple[torch.Size, torch.dtype, torch.device]
"""Shape, type and device of a tensor."""

Flags = list[tuple[nn.Parameter, bool]]
"""Parameters, and whether each requires a gradient."""


class Structure(Member):
    """Keeps modules, parameters and buffers of the client module as they are before the first round.

    Args:
        client: the module.
        weights: of the module.
    """

    at_client = True

    def __init__(self, client: ClientModule, weights: GlobalWeights) -> None:
        self._client = client
        self._weights = weights
        self._entries = State()
        self._layout: dict[str, Layout] = {}
        self._parameters: dict[str, nn.Parameter] = {}
        self._attributes: list[tuple[dict[str, Any], dict[str, Any]]] = []
        """Attributes of all modules, and of each the `TABLES` as they were."""
        self._flags: Flags = []

    def prepare(self) -> bool:
        """Record the structure, once it lies where it is trained, before the first round."""
        if self._layout:
            return False
        state = self._client.state_dict(keep_vars=True)
        weights = self._weights
        self._entries = {name: getattr(*place) for name, place in weights.entries.items()}
        self._entries |= {alias: self._entries[name] for alias, name in weights.tied.items()}
        self._layout = {name: layout_of(value) for name, value in self._entries.items()}
        self._parameters = {
            name: value
            for name, value in self._entries.items()
            if isinstance(value, nn.Parameter) and state[name] is value
        }
        parts = [vars(module) for module in self._client.modules()]
        self._attributes = [(part, {name: dict(part[name]) for name in TABLES}) for part in parts]
        return False

    def mark(self) -> Flags:
        """Record which parameters require a gradient."""
        self._flags = [(parameter, parameter.requires_grad) for parameter in self._client.parameters()]
        return self._flags

    def trained(self, job: ClientJob) -> None:
        """Refuse a module whose entries are not those that it had, and undo what a client froze or unfroze.

        Raises:
            ValueError: naming the entry.
        """
        state = self._client.state_dict(keep_vars=True)
        layout = self._layout
        parameters = self._parameters
        for name, value in state.items():
            if name not in layout:
                if is_entry(name, value):
                    raise ValueError(
                        f"the client's entries must exist before training, to be sent and saved, but {name!r} came to "
                        f"be in it; allocate it in __init__ or configure_model"
                    )
                continue
            if name in parameters and value is not parameters[name]:
                raise ValueError(
                    f"the client's parameters must stay the same objects, but {name!r} was replaced; copy the values "
                    f"into it"
                )
            if layout_of(value) != layout[name]:
                raise ValueError(
                    f"the client's entries must keep shape, type and device, but {name!r} has {tuple(value.shape)}, "
                    f"{value.dtype} on {value.device} in place of {tuple(layout[name][0])}, {layout[name][1]} on "
                    f"{layout[name][2]}; keep them in training"
                )
        if len(state) < len(layout) and (missing := [name for name in layout if name not in state]):
            raise ValueError(f"the client's entries must stay in training, but {missing[0]!r} is gone; keep it")
        for parameter, flag in self._flags:
            if parameter.requires_grad != flag:
                parameter.requires_grad_(flag)

    def undo(self, mark: Flags) -> None:
        """Undo what a client did to the structure: what brought entries is None.

        The entries' values are to be loaded anew.
        """
        for attributes, tables in self._attributes:
            for table, before in tables.items():
                new = {name: value for name, value in attributes[table].items() if name not in before}
                empty = {n: v if isinstance(v, nn.Module) and not v.state_dict() else None for n, v in new.items()}
                refill(attributes[table], before | empty)
                for shadow in attributes.keys() & before:
                    del attributes[shadow]
        for name, value in self._entries.items():
            shape, dtype, device = self._layout[name]
            if layout_of(value) != (shape, dtype, device):
                value.data = torch.zeros(shape, dtype=dtype, device=device)
                value.grad = None
        for parameter, flag in mark:
            parameter.requires_grad_(flag)


def layout_of(value: Tensor) -> Layout:
    """Give shape, type and device."""
    return value.shape, value.dtype, value.device
