"""Parts of the client that nobody averages: buffers with `persistent=False` and extra states of modules."""

from collections.abc import Mapping
from copy import deepcopy
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from fl_lightning.client.checks import runs_foreign_code
from fl_lightning.functional.state import EXTRA
from fl_lightning.types import ClientJob, Member, State

KEPT = "kept_buffers"
"""Key in a client's memory of the buffers that the client keeps."""


class NonPersistentBuffers(Member):
    """Resets the buffers that are in no state dict, so that every client begins as a fresh copy of the module would.

    Args:
        client: The client module, before any training.
        keep: `fnmatch` patterns of the buffers that a client keeps in its memory.

    Attributes:
        initial: The values before any training, by name. None for a buffer that was not allocated
            then.
        places: The module and the attribute of every buffer, by name.
        kept: Names of the buffers that a client keeps, one for each buffer.

    Raises:
        ValueError: A pattern matches no such buffer.
    """

    name = "buffers"
    at_client = True

    def __init__(self, client: nn.Module, keep: tuple[str, ...] = ()) -> None:
        self.client = client
        self.initial: dict[str, Tensor | None] = {}
        self.places: dict[str, tuple[nn.Module, str]] = {}
        self._may_add_buffers = runs_foreign_code(client)
        """Whether the first training may add buffers."""
        buffers = self._new_buffers()
        self._first_name: dict[str, str] = {}
        """By each name of a buffer its first name. A buffer may have several."""
        first_names: dict[int, str] = {}
        for name, value in buffers.items():
            first_name = first_names.setdefault(id(value), name)
            self._first_name[name] = first_name
            # All names of a buffer share one copy.
            self.initial[name] = value.detach().clone() if first_name == name else self.initial[first_name]
        self.kept: list[str] = []
        for name in buffers:
            matches = any(fnmatchcase(name, pattern) for pattern in keep)
            if matches and self._first_name[name] not in self.kept:
                self.kept.append(self._first_name[name])
        for pattern in keep:
            if not any(fnmatchcase(name, pattern) for name in buffers):
                raise ValueError(
                    f"keep: a pattern must match a buffer with persistent=False, {pattern!r} matches none of "
                    f"{list(buffers)[:8]}; entries of the state dict stay with a client by model.personal"
                )

    def _new_buffers(self) -> State:
        """Return the buffers that are not known yet, and record their places."""
        state = self.client.state_dict(keep_vars=True)
        buffers = State()
        for name, value in self.client.named_buffers(remove_duplicate=False):
            if name in state or name in self.initial:
                continue
            path, _, attribute = name.rpartition(".")
            self.places[name] = (self.client.get_submodule(path), attribute)
            buffers[name] = value
        return buffers

    @property
    def is_used(self) -> bool:
        return bool(self.places) or self._may_add_buffers

    def enter(self, job: ClientJob) -> None:
        """Give the client the buffers that it has kept."""
        self.set_back(job.memory.get(KEPT, {}))

    def trained(self, job: ClientJob) -> None:
        """Record the buffers that the first training has added, and keep the buffers that the client has again."""
        if self._may_add_buffers:
            self._may_add_buffers = False
            self.initial.update(dict.fromkeys(self._new_buffers()))
        if not self.kept:
            return
        memory = State()
        for name in self.kept:
            value = self._live(name)
            if value is not None:
                memory[name] = value.detach().clone()
        job.memory[KEPT] = memory

    def leave(self) -> None:
        self.set_back({})

    def _live(self, name: str) -> Tensor | None:
        """Return a buffer of the module."""
        owner, attribute = self.places[name]
        value: Tensor | None = getattr(owner, attribute)
        return value

    def place(self) -> None:
        """Move the values before any training to the device and type of the module's buffers."""
        placed: dict[int, Tensor] = {}
        for name, value in self.initial.items():
            live = self._live(name)
            if value is not None and live is not None:
                self.initial[name] = placed.setdefault(id(value), value.to(live))

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Use the values of a checkpoint as the values before any training, also in the module."""
        for name, value in state.items():
            initial = self.initial.get(name)
            if initial is not None and initial.shape == value.shape:
                initial.copy_(value)
        self.set_back({})

    def set_back(self, kept: State) -> None:
        """Reset all buffers to what the client has kept, or to their values before any training.

        Every buffer becomes a new tensor. Nothing is written into the tensor before, since it may be
        a part of the data.

        Args:
            kept: The buffers that the client has kept, by their first names.
        """
        clones: dict[int, Tensor] = {}
        for name, (owner, attribute) in self.places.items():
            first_name = self._first_name.get(name, name)
            value = kept.get(first_name, self.initial[name])
            if value is None:
                setattr(owner, attribute, None)
                continue
            if id(value) not in clones:
                clones[id(value)] = value.clone()
            setattr(owner, attribute, clones[id(value)])

    def state_dict(self, mark: Any = None) -> State:
        """Return the values before any training, without buffers that were not allocated."""
        return {name: value for name, value in self.initial.items() if value is not None}


class ExtraStates(Member):
    """Resets what modules return by `get_extra_state` for every client, because it has no mean.

    Args:
        client: The client module.
    """

    at_client = True

    def __init__(self, client: nn.Module) -> None:
        self._owners: dict[str, nn.Module] = {}
        """By name of the entry the module that has the state."""
        for path, module in client.named_modules():
            if has_extra_state(module):
                name = f"{path}.{EXTRA}".lstrip(".")
                self._owners[name] = module
        self._start: dict[str, Any] | None = None
        """The states from which clients start. None while no client is trained."""

    @property
    def is_used(self) -> bool:
        return bool(self._owners)

    def enter(self, job: ClientJob) -> None:
        """Reset all states to what they were before the first client."""
        if self._start is None:
            self._start = self.mark()
        self.undo(self._start)

    def leave(self) -> None:
        if self._start is not None:
            self.undo(self._start)
            self._start = None

    def mark(self) -> dict[str, Any]:
        """Return copies of the states, by name."""
        return {name: deepcopy(owner.get_extra_state()) for name, owner in self._owners.items()}

    def undo(self, mark: Mapping[str, Any]) -> None:
        """Give every module a copy of its state."""
        for name, state in mark.items():
            self._owners[name].set_extra_state(deepcopy(state))

    def entries_at(self, mark: Mapping[str, Any]) -> Mapping[str, Any]:
        return {f"client.{name}": state for name, state in mark.items()}


def has_extra_state(module: nn.Module) -> bool:
    """Return True if the class of a module defines how its extra state is read and written."""
    kind = type(module)
    reads = kind.get_extra_state is not nn.Module.get_extra_state
    writes = kind.set_extra_state is not nn.Module.set_extra_state
    return reads and writes
