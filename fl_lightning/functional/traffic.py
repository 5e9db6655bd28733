"""Bytes of what a message carries."""

from collections.abc import Mapping
from typing import Any

from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from fl_lightning.functional.state import StateLike


def traffic(weights: StateLike | None, extras: Mapping[str, Any]) -> int:
    """Count 4 bytes for every float entry of the weights and extras, whatever the precision, and none for integers.

    Args:
        weights: shared entries, or None.
        extras: tensors, numbers and (nested) dicts or lists of them.

    Returns:
        Bytes.
    """
    values = (weights or {}).values()
    sizes = [value.numel() for value in values if isinstance(value, Tensor) and value.is_floating_point()]
    return sum(sizes) * 4 + (_floats(extras) * 4 if extras else 0)


def _floats(value: Any) -> int:
    """Count the floats in a pytree, those in its tensors included."""
    counts: list[int] = []
    apply_to_collection(value, Tensor, lambda t: counts.append(t.numel() if t.is_floating_point() else 0))
    apply_to_collection(value, float, lambda _: counts.append(1))
    return sum(counts)
