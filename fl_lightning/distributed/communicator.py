"""Communicator of a run with one process, and the interface of `processes.ProcessCommunicator` for several."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fl_lightning.aggregation import PartialAggregate
from fl_lightning.types import State


class Communicator:
    """Exchanges values between the processes of a run, at no cost with one process, as here.

    Args:
        device: where tensors cross (the process group's own).

    Attributes:
        rank: of this process.
        world: number of processes.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self.rank, self.world = 0, 1
        self.device = device or torch.device("cpu")

    def gather(self, value: Any) -> list[Any]:
        """Gather every rank's `value` on every rank, by rank. Tensors in it should lie on the CPU."""
        return [value]

    def all_gather_or_raise(self, value: Any, error: Exception | None) -> list[Any]:
        """Gather values as `gather` does, but raise on all ranks if one failed.

        Raises:
            Exception: this rank's own `error`.
            RemoteError: naming the first other rank that failed, and why.
        """
        if error is not None:
            raise error
        return [value]

    def merge(self, partials: Mapping[str, PartialAggregate], error: Exception | None, to_root: str = "") -> None:
        """Merge the partial aggregates of all processes, in place and alike on each, or raise on all if one failed.

        Args:
            partials: of this process, by name, the same names everywhere.
            error: what went wrong here, or None.
            to_root: the partial whose rows go to the root process only.

        Raises:
            Exception: as `all_gather_or_raise`.
        """
        if error is not None:
            raise error

    def from_root(self, make: Callable[[], State | None], tensors: Callable[[], Iterable[Tensor]]) -> State | None:
        """Call `make` on the root process only, and give what it returns to all processes."""
        return make()

    def broadcast_(self, tensors: Sequence[Tensor]) -> None:
        """Copy rank 0's values to every rank (weights that a user's module drew without a seed)."""

    def gather_to_root(self, value: Any) -> list[Any]:
        """Gather every rank's `value` on rank 0, and return an empty list on the others."""
        return [value]

    def assign_clients(self, cohort: Sequence[int], work: Callable[[int], int], owners: Mapping[int, int]) -> list[int]:
        """Choose this rank's clients: those it owns, and of the others the longest first, to the least loaded rank.

        Args:
            cohort: client ids of the round.
            work: samples that a client trains on.
            owners: rank that keeps a client's memory, by client id.
        """
        return list(cohort)
