"""Communicators, which exchange values between the processes of a run."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from fl_lightning.aggregation import PartialAggregate
from fl_lightning.distributed.watch import RemoteError
from fl_lightning.functional.state import StateSum, SumForm
from fl_lightning.types import ClientUpdate, Member, State
from fl_lightning.utils.life import LIFE

CPU = torch.device("cpu")


class Communicator:
    """Exchanges values between the processes of a run, here at no cost because there is one process.

    Args:
        device: The device on which tensors cross (the process group's own). None is the CPU.

    Attributes:
        rank: The rank of this process.
        world: Number of processes.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self.rank = 0
        self.world = 1
        self.device = device or CPU

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's `value` on every rank, by rank. Tensors in it should lie on the CPU."""
        return [value]

    def all_gather_or_raise(self, value: Any, error: Exception | None) -> list[Any]:
        """Gather values as `gather` does, but raise an error on all ranks if one rank failed.

        Args:
            value: The value of this rank.
            error: The error of this rank, or None.

        Raises:
            Exception: This rank failed by `error`.
            RemoteError: Another rank failed.
        """
        if error is not None:
            raise error
        return [value]

    def merge(self, members: Sequence[Member], error: Exception | None) -> None:
        """Merge the partial aggregates of all processes in place, or raise an error on all if one failed.

        Every process then has the same aggregates.

        Args:
            members: The members that have partial aggregates, the same in every process. One of them may gather its
                rows on the root process only.
            error: The error of this process, or None.

        Raises:
            Exception: This rank failed by `error`.
            RemoteError: Another rank failed.
        """
        if error is not None:
            raise error

    def from_root(self, make: Callable[[], State | None], tensors: Callable[[], Iterable[Tensor]]) -> State | None:
        """Call a function on the root process only, and return its result on all processes.

        Args:
            make: The function.
            tensors: Returns tensors that the function changes, which are copied to all processes.
        """
        return make()

    def broadcast_(self, tensors: Sequence[Tensor]) -> None:
        """Copy rank 0's values to every rank (weights that a user's module drew without a seed)."""

    def gather_to_root(self, value: Any) -> list[Any]:
        """Return every rank's `value` on rank 0, and an empty list on the other ranks."""
        return [value]

    def assign_clients(
        self, cohort: Sequence[int], cost: Callable[[int], int], owners: Mapping[int, int]
    ) -> dict[int, int]:
        """Return the rank that trains each client.

        A client that has an owner goes to it. The other clients go to the rank with the least cost so far, the client
        with the largest cost first.

        Args:
            cohort: Ids of the round's clients.
            cost: Returns the cost of a client, ≥ 0: its samples, times the operations of one sample in its own net if
                the nets differ.
            owners: The rank that keeps a client's memory, by client id.
        """
        return dict.fromkeys(cohort, 0)


class ProcessCommunicator(Communicator):
    """Exchanges values through torch's default process group."""

    def __init__(self, device: torch.device | None = None) -> None:
        super().__init__(device)
        self.rank = dist.get_rank()
        self.world = dist.get_world_size()

    def gather(self, value: Any) -> list[Any]:
        by_rank: list[Any] = [None] * self.world
        with LIFE.waiting():
            dist.all_gather_object(by_rank, value)
        return by_rank

    def all_gather_or_raise(self, value: Any, error: Exception | None) -> list[Any]:
        failure = None if error is None else f"{type(error).__name__}: {error}"
        by_rank = self.gather((failure, value))
        if error is not None:
            raise error
        for rank, (remote_failure, _) in enumerate(by_rank):
            if remote_failure is not None:
                raise RemoteError(f"rank {rank} of {self.world} failed: {remote_failure}")
        return [remote_value for _, remote_value in by_rank]

    def merge(self, members: Sequence[Member], error: Exception | None) -> None:
        partials: dict[str, PartialAggregate] = {member.name: member.partial for member in members}
        root_only = next((member.name for member in members if member.gathers), "")
        rows = {name: to_device(partial.rows, CPU) for name, partial in partials.items()}
        open_rows = {name: rows_of_member for name, rows_of_member in rows.items() if name != root_only}
        sums = sums_by_key(partials)
        forms = {key: on_device(total.form, CPU) for key, total in sums.items()}
        gathered = self.all_gather_or_raise((forms, open_rows), error)
        merged_sums = self._add_up(sums, [forms_of_rank for forms_of_rank, _ in gathered])
        closed_rows = self.gather_to_root(rows[root_only]) if root_only else []
        for name, partial in partials.items():
            if name == root_only:
                rows_by_rank = closed_rows
            else:
                rows_by_rank = [rows_of_rank[name] for _, rows_of_rank in gathered]
            prefix = f"{name}/"
            partial.become(
                sums={key.removeprefix(prefix): s for key, s in merged_sums.items() if key.startswith(prefix)},
                rows=self._merged_rows(rows_by_rank),
            )

    def _merged_rows(self, by_rank: Sequence[Mapping[int, ClientUpdate]]) -> dict[int, ClientUpdate]:
        """Return the rows of all ranks on this process's device, by client id, ascending."""
        merged: dict[int, ClientUpdate] = {}
        for rows in by_rank:
            merged.update(rows)
        return {client_id: to_device(merged[client_id], self.device) for client_id in sorted(merged)}

    def _add_up(self, sums: Mapping[str, StateSum], by_rank: Sequence[Mapping[str, SumForm]]) -> dict[str, StateSum]:
        """Add up the sums of all ranks. A rank without clients joins with zeros.

        Args:
            sums: The sums of this rank by key.
            by_rank: Every rank's forms of its sums, by key.

        Raises:
            ValueError: A sum has other names, shapes or types on another rank.
        """
        forms: dict[str, SumForm] = {}
        for forms_of_rank in by_rank:
            for key, form in forms_of_rank.items():
                forms[key] = joined(key, forms[key], form) if key in forms else form
        added: dict[str, StateSum] = {}
        for key in sorted(forms):  # All ranks must take the same order.
            form = forms[key]
            total = sums[key] if key in sums else StateSum.zeros(form.layout, self.device, compares=form.compares)
            total.take_form(on_device(form, self.device))
            for vector in total.vectors():
                with LIFE.waiting():
                    dist.all_reduce(vector)
            for flags in total.flags():
                with LIFE.waiting():
                    dist.all_reduce(flags, dist.ReduceOp.MAX)
            added[key] = total
        return added

    def from_root(self, make: Callable[[], State | None], tensors: Callable[[], Iterable[Tensor]]) -> State | None:
        made: State | None = None
        error: Exception | None = None
        if self.rank == 0:
            try:
                made = to_device(make(), CPU)
            except Exception as problem:
                error = problem
        from_rank_0: State | None = self.all_gather_or_raise(made, error)[0]
        self.broadcast_(list(tensors()))
        if from_rank_0 is None:
            return None
        return {name: value.to(self.device) for name, value in from_rank_0.items()}

    def broadcast_(self, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            on_device = tensor.detach().to(self.device).contiguous()
            # Gloo sends no integers of 16 bits, and none without a sign of more than 8.
            as_bytes = on_device.reshape(-1).view(torch.uint8)
            with LIFE.waiting():
                dist.broadcast(as_bytes, 0)
            tensor.detach().copy_(on_device)

    def gather_to_root(self, value: Any) -> list[Any]:
        by_rank: list[Any] | None = None
        if self.rank == 0:
            by_rank = [None] * self.world
        with LIFE.waiting():
            dist.gather_object(value, by_rank, 0)
        return by_rank or []

    def assign_clients(
        self, cohort: Sequence[int], cost: Callable[[int], int], owners: Mapping[int, int]
    ) -> dict[int, int]:
        # A client without samples costs something too.
        costs = {client_id: max(1, cost(client_id)) for client_id in cohort}
        ranks = {client_id: owners[client_id] for client_id in cohort if client_id in owners}
        load = [0] * self.world
        for client_id, rank in ranks.items():
            load[rank] += costs[client_id]
        without_owner = costs.keys() - ranks.keys()
        for client_id in sorted(without_owner, key=lambda client_id: (-costs[client_id], client_id)):
            rank = load.index(min(load))
            ranks[client_id] = rank
            load[rank] += costs[client_id]
        return ranks


def current_communicator(device: torch.device | None = None) -> Communicator:
    """Return the communicator of this run, for several processes or for one.

    Args:
        device: The device on which tensors cross. None is the CPU.
    """
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        return ProcessCommunicator(device)
    return Communicator(device)


def on_device(form: SumForm, device: torch.device) -> SumForm:
    """Return a form whose weights are on a device."""
    return form._replace(weight=to_device(form.weight, device), unread=to_device(form.unread, device))


def joined(key: str, form: SumForm, other: SumForm) -> SumForm:
    """Return the form of a sum over two ranks.

    Args:
        key: Key of the sum.
        form: Its form on some ranks.
        other: Its form on another rank.

    Raises:
        ValueError: The sum has other names, shapes or types on the other rank.
    """
    if form.layout != other.layout or form.compares != other.compares:
        raise ValueError(f"the sum {key!r} has other names, shapes or types on another rank")
    return form._replace(
        weight=form.weight + other.weight,
        exact_weight=form.exact_weight + other.exact_weight,
        unread=form.unread + other.unread,
        places=form.places | other.places,
    )


def sums_by_key(partials: Mapping[str, PartialAggregate]) -> dict[str, StateSum]:
    """Return the sums of all members, by a key of the member's and the sum's names."""
    sums: dict[str, StateSum] = {}
    for name, partial in partials.items():
        for sum_name, total in partial.sums.items():
            sums[f"{name}/{sum_name}"] = total
    return sums


def to_device(value: Any, device: torch.device) -> Any:
    """Return a pytree of dicts, lists and updates with its tensors on `device`."""

    def moved(item: Any) -> Any:
        if isinstance(item, Tensor):
            return item.detach().to(device)
        return replace(item, **to_device(vars(item), device))

    return apply_to_collection(value, (Tensor, ClientUpdate), moved)
