"""Extra states of modules (`get_extra_state`), which a state dict has and nobody averages."""

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from torch import nn

from fl_lightning.functional.state import EXTRA
from fl_lightning.types import ClientJob, Member


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
