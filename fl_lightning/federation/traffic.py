"""Bytes that an exchange moves, counted from what is really sent."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from fl_lightning.data import FederatedDataModule
from fl_lightning.data.holdout import SERVER_ONLY
from fl_lightning.types import Broadcast, ClientUpdate, State


def traffic(weights: State | None, extras: Mapping[str, Any]) -> int:
    """4 bytes for every float entry of the weights and extras, whatever the precision; integers are free.

    Args:
        weights: shared entries, or None.
        extras: tensors, numbers and (nested) dicts or lists of them.

    Returns:
        Bytes.
    """
    return (0 if weights is None else _floats(weights) * 4) + (_floats(extras) * 4 if extras else 0)


def _floats(value: Any) -> int:
    """Float entries of the tensors, and floats, in a nest."""
    found: list[int] = []
    apply_to_collection(value, Tensor, lambda t: found.append(t.numel() if t.is_floating_point() else 0))
    apply_to_collection(value, float, lambda _: found.append(1))
    return sum(found)


class TrafficCounter:
    """Counts the bytes of a round's messages by exchange.

    Args:
        shared: the shared entries, whose size as a whole is counted once.
        exchanges: of a round.
    """

    def __init__(self, shared: State, exchanges: Sequence[str]) -> None:
        self._num_shared, self._shared_bytes = len(shared), traffic(shared, {})
        self._exchanges = tuple(exchanges)
        self._bytes = {exchange: [0, 0] for exchange in exchanges}

    def down(self, message: Broadcast) -> None:
        """Count a broadcast."""
        self._bytes[message.exchange][0] += self._size(message)

    def up(self, exchange: str, message: ClientUpdate) -> None:
        """Count an update."""
        self._bytes[exchange][1] += self._size(message)

    def take(self) -> dict[str, list[int]]:
        """[bytes down, bytes up] of this process by exchange, since the last call."""
        counted, self._bytes = self._bytes, {exchange: [0, 0] for exchange in self._exchanges}
        return counted

    def _size(self, message: Broadcast | ClientUpdate) -> int:
        weights = message.weights
        if weights is not None and len(weights) == self._num_shared:
            return self._shared_bytes + (traffic(None, message.extras) if message.extras else 0)
        return traffic(weights, message.extras)


def per_exchange(parts: Sequence[Mapping[str, Sequence[int]]]) -> dict[str, float]:
    """A round's bytes by log key, and where it has several exchanges those of each one too.

    Args:
        parts: of each process, (bytes down, bytes up) by exchange.

    >>> per_exchange([{"train": (8, 4)}, {"train": (4, 4)}])
    {'comm/bytes_down': 12.0, 'comm/bytes_up': 8.0}
    """
    values = {}
    for k, key in enumerate(("comm/bytes_down", "comm/bytes_up")):
        by_exchange = {name: float(sum(part[name][k] for part in parts)) for name in parts[0]}
        values[key] = sum(by_exchange.values())
        if len(by_exchange) > 1:
            values |= {f"{key}/{name}": moved for name, moved in by_exchange.items()}
    return values


def bytes_of_sets(data: FederatedDataModule, needs: Iterable[str]) -> dict[str, float]:
    """Bytes of the sets that every client is sent once, as they are stored; nothing where a method needs none."""
    splits = [data.split(name) for name in needs if name not in (*SERVER_ONLY, "logits", "exposure")]
    moved = [split.num_bytes for split in splits if split.num_bytes is not None]
    return {"comm/bytes_sets": float(data.num_clients * sum(moved))} if moved else {}
