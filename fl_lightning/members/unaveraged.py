"""Parts of the client that nobody averages: buffers with `persistent=False`, and extra states of modules."""

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
"""Key of the buffers that a client keeps, in its memory."""


class NonPersistentBuffers(Member):
    """Sets the buffers that are in no state dict back for every client, so that it begins as a fresh copy would.

    Args:
        client: the module, before any training.
        keep: `fnmatch` patterns of those that a client keeps in its memory.

    Attributes:
        start: values before any training, by name; None for a buffer that was not allocated then.
        places: who owns them, and under which attribute; empty where there are none.

    Raises:
        ValueError: if a pattern matches none.
    """

    name = "buffers"
    at_client = True

    def __init__(self, client: nn.Module, keep: tuple[str, ...] = ()) -> None:
        self.client = client
        self._may_come = runs_foreign_code(client)
        self.start: dict[str, Tensor | None] = {}
        self.places: dict[str, tuple[nn.Module, str]] = {}
        buffers = self._find()
        copies = {id(value): value.detach().clone() for value in buffers.values()}  # one for all names of a buffer
        self.start.update({name: copies[id(value)] for name, value in buffers.items()})
        first: dict[int, str] = {}
        self._first = {name: first.setdefault(id(value), name) for name, value in buffers.items()}  # of several names
        matched = (name for name in buffers if any(fnmatchcase(name, pattern) for pattern in keep))
        self.kept = list(dict.fromkeys(self._first[name] for name in matched))
        for pattern in keep:
            if not any(fnmatchcase(name, pattern) for name in buffers):
                raise ValueError(
                    f"keep: a pattern must match a buffer with persistent=False, {pattern!r} matches none of "
                    f"{list(buffers)[:8]}; entries of the state dict stay with a client by model.personal"
                )

    def _find(self) -> State:
        """Find the buffers that are not known yet."""
        saved = self.client.state_dict(keep_vars=True)
        named = self.client.named_buffers(remove_duplicate=False)
        buffers = {name: value for name, value in named if name not in saved and name not in self.start}
        for name in buffers:
            path, _, attribute = name.rpartition(".")
            self.places[name] = (self.client.get_submodule(path), attribute)
        return buffers

    @property
    def is_used(self) -> bool:
        return bool(self.places) or self._may_come

    def enter(self, job: ClientJob) -> None:
        self.set_back(job.memory.get(KEPT, {}))

    def trained(self, job: ClientJob) -> None:
        """Record the buffers that came to be in training, and keep what the client is to have again."""
        if self._may_come:
            self._may_come = False
            self.start.update(dict.fromkeys(self._find()))
        if self.kept:
            live = {name: getattr(*self.places[name]) for name in self.kept}
            job.memory[KEPT] = {name: value.detach().clone() for name, value in live.items() if value is not None}

    def leave(self) -> None:
        self.set_back({})

    def place(self) -> None:
        """Put the values where the module lies, and in its type.

        It is as it was before any training.
        """
        placed: dict[int, Tensor] = {}
        for name, value in self.start.items():
            live = getattr(*self.places[name])
            if value is not None and live is not None:
                self.start[name] = placed.setdefault(id(value), value.to(live))

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take the values of a checkpoint in place of those with which the module was built, also in the module."""
        for name, value in state.items():
            start = self.start.get(name)
            if start is not None and start.shape == value.shape:
                start.copy_(value)
        self.set_back({})

    def set_back(self, kept: State) -> None:
        """Set all buffers back: to what the client has kept, else to their start.

        Each is a tensor of its own.

        The one before may be a part of the data by now, so that nothing is written into it.
        """
        fresh: dict[int, Tensor] = {}
        for name, (owner, attribute) in self.places.items():
            value = kept.get(self._first.get(name, name), self.start[name])
            if value is not None and id(value) not in fresh:
                fresh[id(value)] = value.clone()
            setattr(owner, attribute, None if value is None else fresh[id(value)])

    def state_dict(self, mark: Any = None) -> State:
        """Give the values before any training that are allocated."""
        return {name: value for name, value in self.start.items() if value is not None}


class ExtraStates(Member):
    """Sets what modules return by `get_extra_state` back for every client: it is in the state dict, but has no mean.

    Args:
        client: the module.
    """

    at_client = True

    def __init__(self, client: nn.Module) -> None:
        self._owners = {
            f"{path}.{EXTRA}".lstrip("."): module
            for path, module in client.named_modules()
            if type(module).get_extra_state is not nn.Module.get_extra_state
            and type(module).set_extra_state is not nn.Module.set_extra_state
        }
        self._start: dict[str, Any] | None = None
        """The states that clients start from, while clients are trained."""

    @property
    def is_used(self) -> bool:
        return bool(self._owners)

    def enter(self, job: ClientJob) -> None:
        """Set all states to those before the first client."""
        if self._start is None:
            self._start = self.mark()
        self.undo(self._start)

    def leave(self) -> None:
        if self._start is not None:
            self.undo(self._start)
            self._start = None

    def mark(self) -> dict[str, Any]:
        """Copy the states, by name."""
        return {name: deepcopy(owner.get_extra_state()) for name, owner in self._owners.items()}

    def undo(self, mark: Mapping[str, Any]) -> None:
        """Hand every module a copy of its state."""
        for name, state in mark.items():
            self._owners[name].set_extra_state(deepcopy(state))

    def entries_at(self, mark: Mapping[str, Any]) -> Mapping[str, Any]:
        return {f"client.{name}": state for name, state in mark.items()}
