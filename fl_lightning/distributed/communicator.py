"""Communicators: of a run with one process, which has the interface, and of one with several."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from fl_lightning.aggregation import PartialAggregate
from fl_lightning.distributed.watch import RemoteError
from fl_lightning.functional.state import StateSum
from fl_lightning.types import ClientUpdate, Member, State
from fl_lightning.utils.life import LIFE


class Communicator:
    """Exchanges values between the processes of a run, at no cost with one process, as here.

    Args:
        device: where tensors cross (the process group's own).

    Attributes:
        rank: of this process.
        world: number of processes.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self.rank = 0
        self.world = 1
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

    def merge(self, members: Sequence[Member], error: Exception | None) -> None:
        """Merge the partial aggregates of all processes, in place and alike on each, or raise on all if one failed.

        Args:
            members: that have them, the same everywhere; one may gather its rows on the root process only.
            error: what went wrong here, or None.

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

    def assign_clients(
        self, cohort: Sequence[int], work: Callable[[int], int], owners: Mapping[int, int]
    ) -> dict[int, int]:
        """Choose each client's rank: its owner, and for the others, the longest first, the least loaded.

        Args:
            cohort: client ids of the round.
            work: of a client: its samples, by what one costs in its net.
            owners: rank that keeps a client's memory, by client id.
        """
        return dict.fromkeys(cohort, 0)


class ProcessCommunicator(Communicator):
    """Exchanges values through torch's default process group."""

    def __init__(self, device: torch.device | None = None) -> None:
        super().__init__(device)
        self.rank = dist.get_rank()
        self.world = dist.get_world_size()

    def gather(self, value: Any) -> list[Any]:
        out: list[Any] = [None] * self.world
        with LIFE.waiting():
            dist.all_gather_object(out, value)
        return out

    def all_gather_or_raise(self, value: Any, error: Exception | None) -> list[Any]:
        failures = [f"{type(error).__name__}: {error}" if error is not None else None, value]
        everyone = self.gather(failures)
        if error is not None:
            raise error
        for rank, (failure, _) in enumerate(everyone):
            if failure is not None:
                raise RemoteError(f"rank {rank} of {self.world} failed: {failure}")
        return [value for _, value in everyone]

    def merge(self, members: Sequence[Member], error: Exception | None) -> None:
        partials: dict[str, PartialAggregate] = {member.name: member.partial for member in members}
        to_root = next((member.name for member in members if member.gathers), "")
        rows = {name: to_device(part.rows, torch.device("cpu")) for name, part in partials.items()}
        sums = {f"{name}/{key}": s for name, part in partials.items() for key, s in part.sums.items()}
        layouts = {key: (total.layout, to_device(total.weight, torch.device("cpu"))) for key, total in sums.items()}
        open_rows = {name: part for name, part in rows.items() if name != to_root}
        gathered = self.all_gather_or_raise((layouts, open_rows), error)
        merged = self._add_up(sums, [layout for layout, _ in gathered])
        closed = self.gather_to_root(rows[to_root]) if to_root else []
        for name, part in partials.items():
            by_rank = closed if name == to_root else [opened[name] for _, opened in gathered]
            everyone = {c: row for rows_of_rank in by_rank for c, row in rows_of_rank.items()}
            part.become(
                {key.removeprefix(f"{name}/"): s for key, s in merged.items() if key.startswith(f"{name}/")},
                {c: to_device(everyone[c], self.device) for c in sorted(everyone)},
            )

    def _add_up(self, sums: Mapping[str, StateSum], parts: Sequence[Mapping[str, Any]]) -> dict[str, StateSum]:
        """Add up every rank's sums by `parts`, all ranks' layouts and weights, so that one without clients joins."""
        union: dict[str, Any] = {}
        weights: dict[str, float | Tensor] = {}
        for part in parts:
            for key, (layout, weight) in part.items():
                if union.setdefault(key, layout) != layout:
                    raise ValueError(f"the sum {key!r} has other names, shapes or types on another rank")
                weights[key] = weights.get(key, 0) + weight
        out = {}
        for key in sorted(union):
            total = out[key] = sums[key] if key in sums else StateSum.zeros(union[key], self.device)
            total.weigh(to_device(weights[key], self.device))
            for vector in (total.flat[dtype] for dtype in sorted(total.flat, key=str)):
                with LIFE.waiting():
                    dist.all_reduce(vector)
        return out

    def from_root(self, make: Callable[[], State | None], tensors: Callable[[], Iterable[Tensor]]) -> State | None:
        made: State | None = None
        error: Exception | None = None
        try:
            made = to_device(make(), torch.device("cpu")) if self.rank == 0 else None
        except Exception as problem:
            error = problem
        first: State | None = self.all_gather_or_raise(made, error)[0]
        self.broadcast_(list(tensors()))
        return first if first is None else {name: value.to(self.device) for name, value in first.items()}

    def broadcast_(self, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            there = tensor.detach().to(self.device).contiguous()
            with LIFE.waiting():
                dist.broadcast(there, 0)
            tensor.detach().copy_(there)

    def gather_to_root(self, value: Any) -> list[Any]:
        out: list[Any] | None = [None] * self.world if self.rank == 0 else None
        with LIFE.waiting():
            dist.gather_object(value, out, 0)
        return out or []

    def assign_clients(
        self, cohort: Sequence[int], work: Callable[[int], int], owners: Mapping[int, int]
    ) -> dict[int, int]:
        ranks = {client_id: owners[client_id] for client_id in cohort if client_id in owners}
        load = [0] * self.world
        for client_id, rank in ranks.items():
            load[rank] += max(1, work(client_id))
        for client_id in sorted(set(cohort) - ranks.keys(), key=lambda c: (-work(c), c)):
            rank = ranks[client_id] = load.index(min(load))
            load[rank] += max(1, work(client_id))
        return ranks


def current_communicator(device: torch.device | None = None) -> Communicator:
    """Make the communicator of this run, for several processes or for one."""
    several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    return ProcessCommunicator(device) if several else Communicator(device)


def to_device(value: Any, device: torch.device) -> Any:
    """Move the tensors in a pytree of dicts, lists and updates to `device`."""

    def moved(item: Any) -> Any:
        if isinstance(item, Tensor):
            return item.detach().to(device)
        return replace(item, **to_device(vars(item), device))

    return apply_to_collection(value, (Tensor, ClientUpdate), moved)
