"""Extra states of modules (`get_extra_state`), which a state dict has and nobody averages."""

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from torch import nn

from fl_lightning.functional.state import EXTRA


class ExtraStates:
    """Sets what modules return by `get_extra_state` back for every client: it is in the state dict, but has no mean.

    Args:
        client: the module.
    """

    def __init__(self, client: nn.Module) -> None:
        self._owners = {
            f"{path}.{EXTRA}".lstrip("."): module
            for path, module in client.named_modules()
            if type(module).get_extra_state is not nn.Module.get_extra_state
            and type(module).set_extra_state is not nn.Module.set_extra_state
        }
        self._start: dict[str, Any] = {}

    @classmethod
    def of(cls, client: nn.Module) -> "ExtraStates | None":
        """The extra states of a module; None: it has none."""
        found = cls(client)
        return found if found._owners else None

    def begin(self) -> None:
        """Let clients start from the states as they are now."""
        self._start = self.snapshot()

    def reset(self) -> None:
        """Set all states to those that clients start from."""
        self.load(self._start)

    def snapshot(self) -> dict[str, Any]:
        """Copy the states, by name."""
        return {name: deepcopy(owner.get_extra_state()) for name, owner in self._owners.items()}

    def load(self, states: Mapping[str, Any]) -> None:
        """Hand every module a copy of its state."""
        for name, state in states.items():
            self._owners[name].set_extra_state(deepcopy(state))
