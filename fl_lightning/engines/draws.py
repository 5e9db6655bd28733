"""Whether code has drawn random numbers from the generators that all code of a process shares."""

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from fl_lightning.engines.pytrees import StackingError
from fl_lightning.utils.own_generators import OwnGenerator, states_of_generators


class SharedDraws:
    """Tells whether somebody has drawn from the global generators of Python, NumPy and torch.

    They are seeded for one client at a time, so a draw for several clients at once is keyed by nothing.

    Args:
        device: The device on which clients are trained, whose generator is watched too.
        own: Generators that the user's module keeps, which are watched too.
    """

    def __init__(self, device: torch.device, own: Sequence[OwnGenerator] = ()) -> None:
        self._device = device
        self._own = own
        self._states = self._read()

    def restart(self) -> None:
        """Allow all draws up to now."""
        self._states = self._read()

    def happened(self) -> bool:
        """Return True if somebody has drawn since the start."""
        states = self._read()
        return any(not is_equal(state, before) for state, before in zip(states, self._states, strict=True))

    def check(self, drawer: str) -> None:
        """Check that nobody has drawn since the start.

        Args:
            drawer: The words for what may have drawn.

        Raises:
            StackingError: Somebody has drawn.
        """
        if self.happened():
            raise StackingError(f"{drawer} draw random numbers, which are keyed for one client at a time")

    def _read(self) -> list[Any]:
        """Return the states of all generators."""
        of_numpy: Any = np.random.get_state()
        keys = of_numpy[1]
        states: list[Any] = [random.getstate(), (bytes(keys), *of_numpy[2:]), torch.get_rng_state()]
        if self._device.type == "cuda":
            states.append(torch.cuda.get_rng_state(self._device))
        return [*states, *states_of_generators(self._own)]


def is_equal(state: Any, other: Any) -> bool:
    """Return True if two states of a generator are equal."""
    if isinstance(state, torch.Tensor):
        return torch.equal(state, other)
    return bool(state == other)
