"""Bytes that an exchange moves, counted from what is really sent."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from fl_lightning.data import FederatedDataModule
from fl_lightning.data.holdout import SERVER_ONLY
from fl_lightning.types import Broadcast, ClientUpdate, State

Bytes = dict[tuple[str, str], int]
"""Bytes by log key and exchange."""


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
    """

    def __init__(self, shared: State) -> None:
        self._num_shared, self._shared_bytes = len(shared), traffic(shared, {})
        self._bytes: Bytes = {}

    def count(self, key: str, exchange: str, message: Broadcast | ClientUpdate) -> None:
        """Count a message under `comm/bytes_down` or `comm/bytes_up`."""
        weights, known = message.weights, 0
        if weights is not None and len(weights) == self._num_shared:
            weights, known = None, self._shared_bytes
        if weights is not None or message.extras:
            known += traffic(weights, message.extras)
        self._bytes[key, exchange] = self._bytes.get((key, exchange), 0) + known

    def take(self) -> Bytes:
        """The bytes of this process, by log key and exchange, since the last call."""
        counted, self._bytes = self._bytes, {}
        return counted


def per_exchange(parts: Sequence[Bytes], exchanges: Sequence[str]) -> dict[str, float]:
    """A round's bytes by log key, and where it has several exchanges those of each one too.

    Args:
        parts: of each process, what `TrafficCounter.take` gave.
        exchanges: of a round.

    >>> per_exchange([{("comm/bytes_down", "train"): 8}, {("comm/bytes_down", "train"): 4}], ["train"])
    {'comm/bytes_down': 12.0, 'comm/bytes_up': 0.0}
    """
    values = {}
    for key in ("comm/bytes_down", "comm/bytes_up"):
        values[key] = 0.0
        for exchange in exchanges:
            moved = 0.0
            for part in parts:
                moved += part.get((key, exchange), 0)
            values[key] += moved
            if len(exchanges) > 1:
                values[f"{key}/{exchange}"] = moved
    return values


def bytes_of_sets(data: FederatedDataModule, needs: Iterable[str]) -> dict[str, float]:
    """Bytes of the sets that every client is sent once, as they are stored; nothing where a method needs none."""
    splits = [data.split(name) for name in needs if name not in (*SERVER_ONLY, "logits")]
    moved = [split.num_bytes for split in splits if split.num_bytes is not None]
    return {"comm/bytes_sets": float(data.num_clients * sum(moved))} if moved else {}
