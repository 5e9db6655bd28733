"""What clients keep between rounds, by client id."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fl_lightning.types import State


class ClientStore:
    """Memory and personal entries of every client that has taken part, in host memory.

    A value is replaced, never edited, so a checkpoint taken at any time holds whole rounds only.
    """

    def __init__(self) -> None:
        self._records: dict[int, dict[str, Any]] = {}
        self.owners: dict[int, int] = {}
        """Which process keeps a client's record, by client id; empty with one process."""

    def memory(self, client_id: int) -> dict[str, Any]:
        """A copy of what the client kept: edited in place, or in a round that fails, it leaves the record as it is."""
        memory: dict[str, Any] = kept(self._records.get(client_id, {}).get("memory", {}), "memory")
        return memory

    def personal(self, client_id: int) -> State | None:
        """The client's own entries, or None before its first training."""
        personal: State | None = self._records.get(client_id, {}).get("personal")
        return personal

    def put(self, client_id: int, memory: Mapping[str, Any], personal: State | None) -> None:
        """Keep a client's memory and personal entries.

        Raises:
            TypeError: if the memory holds something that a checkpoint cannot.
        """
        record: dict[str, Any] = {}
        if memory:
            record["memory"] = kept(dict(memory), f"memory of client {client_id}")
        if personal is not None:
            record["personal"] = personal
        if record:
            self._records[client_id] = record

    def state_dict(self) -> dict[int, dict[str, Any]]:
        """All records, for a checkpoint."""
        return dict(self._records)

    def load_state_dict(self, state: Mapping[int, dict[str, Any]], rank: int = 0, world: int = 1) -> None:
        """Restore what `state_dict` gave: a client's record goes to rank `client_id mod world`."""
        self.owners = {client_id: client_id % world for client_id in state} if world > 1 else {}
        self._records = {c: record for c, record in state.items() if c % world == rank}


def kept(value: Any, where: str) -> Any:
    """`value` with its tensors copied; only what `torch.load(weights_only=True)` reads is allowed."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: kept(item, f"{where}[{key!r}]") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [kept(item, where) for item in value]
    if value is None or isinstance(value, bool | int | float | str | torch.dtype):
        return value
    raise TypeError(
        f"{where} must consist of tensors, numbers, strings, lists and dicts, got {type(value).__name__}; convert it "
        f"before it is kept (checkpoints load with weights_only=True)"
    )
