"""Structure of the client module: what a client adds, replaces or reshapes is found, and undone."""

from collections.abc import Iterable
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
        self._client, self._weights = client, weights
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
        state, weights = self._client.state_dict(keep_vars=True), self._weights
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
        state, layout, parameters = self._client.state_dict(keep_vars=True), self._layout, self._parameters
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


class HeldEntries:
    """Copies of all entries of the client module, which are put back whatever an evaluation did to them.

    Buffers with `persistent=False`, extra states and `requires_grad` are among them; a buffer that came to be is gone.

    Args:
        weights: of the module.
    """

    def __init__(self, weights: GlobalWeights) -> None:
        self._weights, self._extra = weights, weights.extra.mark()
        places = {**weights.entries, **weights.non_persistent.places}
        self._there = {name: (place, getattr(*place, None)) for name, place in places.items()}
        self._parameters = dict(weights.client.named_parameters())
        self._buffers = frozenset(name for name, _ in weights.client.named_buffers())
        with torch.inference_mode(False), torch.no_grad():  # an evaluation may begin within Lightning's
            self._copies = {
                name: (value, value.detach().clone(), value.requires_grad)
                for name, (_, value) in self._there.items()
                if value is not None
            }

    def put_back(self) -> None:
        """Let every name stand for the same tensor again, with its shape and `requires_grad`.

        Values may differ.

        Raises:
            ValueError: naming a parameter that came to be, went, or stands in a module that was replaced.
        """
        self._check(name for name, _ in self._weights.client.named_parameters() if name not in self._parameters)
        for (owner, attribute), value in self._there.values():
            if getattr(owner, attribute, None) is not value:
                setattr(owner, attribute, value)
        parameters = dict(self._weights.client.named_parameters())
        self._check(name for name, value in self._parameters.items() if parameters.get(name) is not value)
        for name in {name for name, _ in self._weights.client.named_buffers()} - self._buffers:
            path, _, attribute = name.rpartition(".")
            setattr(self._weights.client.get_submodule(path), attribute, None)
        for value, copy, flag in self._copies.values():
            if value.shape != copy.shape or value.dtype != copy.dtype:
                value.data = copy.clone()
            if value.requires_grad != flag:
                value.requires_grad_(flag)

    def _check(self, changed: Iterable[str]) -> None:
        """Refuse parameters that are others than before."""
        for name in changed:
            raise ValueError(
                f"an evaluation must leave the client's parameters as they are, but {name!r} was added, removed or "
                f"replaced in it; do it in __init__ or configure_model"
            )

    @torch.no_grad()
    def restore(self) -> None:
        """Put everything back, values too."""
        self.put_back()
        for value, copy, _ in self._copies.values():
            value.copy_(copy)
        self._weights.extra.undo(self._extra)

    def state_dict(self) -> dict[str, Any]:
        """Give the entries of the state dict, by their names in the loop's."""
        entries = {name: self._copies[name][1] for name in self._weights.entries if name in self._copies}
        return self._weights.saved({**entries, **self._extra})
