"""Spreads the clients of a round over processes; no gradient is ever synchronised."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from pytorch_lightning.strategies import DDPStrategy, StrategyRegistry
from torch import Tensor

from fl_lightning.functional.state import StateSum


class ClientParallelStrategy(DDPStrategy):
    """Each process trains its share of the cohort; sums of weights cross once per exchange.

    Registered as `client_parallel` (one script per process), `client_parallel_spawn`, `client_parallel_fork` and
    `client_parallel_notebook` (processes started from the running one).
    """

    def configure_ddp(self) -> None:
        """The module stays as it is: there is nothing to wrap.

        Raises:
            ValueError: if it synchronises BatchNorm, whose statistics belong to one client.
        """
        if any(isinstance(module, torch.nn.SyncBatchNorm) for module in self.lightning_module.modules()):  # type: ignore[union-attr]
            raise ValueError(
                "processes train different clients, whose BatchNorm must not be synchronised, got SyncBatchNorm; leave "
                "trainer.sync_batchnorm unset"
            )


for name, method in (
    ("client_parallel", "popen"),
    ("client_parallel_spawn", "spawn"),
    ("client_parallel_fork", "fork"),
    ("client_parallel_notebook", "fork"),
):
    StrategyRegistry.register(
        name,
        ClientParallelStrategy,
        description=f"federated clients spread over processes ({method})",
        override=True,
        start_method=method,
    )


class RemoteError(RuntimeError):
    """Another process failed; the message names its rank and the cause."""


class Ranks:
    """What the processes of a run tell each other; with one process every call is free.

    Args:
        device: where tensors cross (the process group's own).
    """

    def __init__(self, device: torch.device | None = None) -> None:
        joined = dist.is_available() and dist.is_initialized()
        self.rank, self.world = (dist.get_rank(), dist.get_world_size()) if joined else (0, 1)
        self.device = device or torch.device("cpu")

    def gather(self, value: Any) -> list[Any]:
        """Every rank's `value` on every rank, by rank. Tensors in it should lie on the CPU."""
        if self.world == 1:
            return [value]
        out: list[Any] = [None] * self.world
        dist.all_gather_object(out, value)
        return out

    def agree(self, value: Any, error: Exception | None) -> list[Any]:
        """`gather`, by which all ranks learn at once that one of them failed.

        Raises:
            Exception: this rank's own `error`.
            RemoteError: naming the first other rank that failed, and why.
        """
        failures = [f"{type(error).__name__}: {error}" if error is not None else None, value]
        everyone = self.gather(failures)
        if error is not None:
            raise error
        for rank, (failure, _) in enumerate(everyone):
            if failure is not None:
                raise RemoteError(f"rank {rank} of {self.world} failed: {failure}")
        return [value for _, value in everyone]

    def merge(self, sums: Mapping[str, StateSum], layouts: Sequence[Mapping[str, Any]]) -> dict[str, StateSum]:
        """Add up every rank's sums; `layouts` are the gathered layouts, so a rank without clients joins too."""
        if self.world == 1:
            return dict(sums)
        union: dict[str, Any] = {}
        for found in layouts:
            for key, layout in found.items():
                if key in union and union[key] != layout:
                    raise ValueError(f"the sum {key!r} has other names, shapes or types on another rank")
                union[key] = layout
        out = {}
        for key in sorted(union):
            total = out[key] = sums[key] if key in sums else StateSum.zeros(union[key], self.device)
            for vector in (total.flat[dtype] for dtype in sorted(total.flat, key=str)):
                dist.all_reduce(vector)
        return out

    def broadcast_(self, tensors: Sequence[Tensor]) -> None:
        """Every rank takes rank 0's values (weights that a user's module drew without a seed)."""
        if self.world > 1:
            for tensor in tensors:
                there = tensor.detach().to(self.device).contiguous()
                dist.broadcast(there, 0)
                tensor.detach().copy_(there)

    def to_zero(self, value: Any) -> list[Any]:
        """Every rank's `value` on rank 0, an empty list on the others."""
        if self.world == 1:
            return [value]
        out: list[Any] | None = [None] * self.world if self.rank == 0 else None
        dist.gather_object(value, out, 0)
        return out or []

    def deal(self, cohort: Sequence[int], work: Callable[[int], int], owners: Mapping[int, int]) -> list[int]:
        """This rank's clients: those it owns, and of the others the longest first to the least loaded rank.

        Args:
            cohort: client ids of the round.
            work: samples that a client trains on.
            owners: rank that keeps a client's memory, by client id.
        """
        if self.world == 1:
            return list(cohort)
        load = [0] * self.world
        mine: list[int] = []
        free = []
        for client_id in cohort:
            if client_id in owners:
                load[owners[client_id]] += work(client_id)
                mine += [client_id] if owners[client_id] == self.rank else []
            else:
                free.append(client_id)
        for client_id in sorted(free, key=lambda c: (-work(c), c)):
            rank = min(range(self.world), key=lambda r: (load[r], r))
            load[rank] += max(1, work(client_id))
            mine += [client_id] if rank == self.rank else []
        return sorted(mine)
