"""Bytes that an exchange moves, counted from what is really sent."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fl_lightning.data.holdout import SERVER_ONLY
from fl_lightning.types import State

if TYPE_CHECKING:
    from fl_lightning.data import FederatedDataModule


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
    if isinstance(value, Tensor):
        return value.numel() if value.is_floating_point() else 0
    if isinstance(value, float):
        return 1
    if isinstance(value, Mapping):
        return sum(_floats(item) for item in value.values())
    if isinstance(value, list | tuple):
        return sum(_floats(item) for item in value)
    return 0


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


def bytes_of_sets(data: "FederatedDataModule", needs: Iterable[str]) -> dict[str, float]:
    """Bytes of the sets that every client is sent once, as they are stored; nothing where a method needs none."""
    splits = [data.split(name) for name in needs if name not in (*SERVER_ONLY, "logits")]
    moved = [split.num_bytes for split in splits if split.num_bytes is not None]
    return {"comm/bytes_sets": float(data.num_clients * sum(moved))} if moved else {}
