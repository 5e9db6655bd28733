"""Bytes that an exchange moves, counted from what is really sent."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from fl_lightning.types import State


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
