"""Bytes of what a message carries."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from fl_lightning.functional.state import State, StateLike

NUMBER = 8
"""Bytes of a number of Python's."""


class CodedState(dict[str, Tensor]):
    """Entries as they are read from a message, and what of the message the codec has made.

    Args:
        entries: by name.
        coded: tensors of the codec.
        names: entries that these are of.
    """

    def __init__(self, entries: StateLike, coded: State, names: Sequence[str]) -> None:
        super().__init__(entries)
        self.coded = coded
        self.names = names

    @cached_property
    def message(self) -> State:
        """The entries that travel as they are, and the codec's tensors."""
        names = set(self.names)
        return {**{name: value for name, value in self.items() if name not in names}, **self.coded}


def message_of(weights: StateLike | None) -> StateLike | None:
    """Get what travels of weights."""
    return weights.message if isinstance(weights, CodedState) else weights


def traffic(weights: StateLike | None, extras: Mapping[str, Any]) -> int:
    """Count the bytes of the values in a message: of tensors as their types have them, names and shapes for nothing.

    A number of Python's takes 8 bytes, True and False 1, a text its UTF-8, None nothing.

    Args:
        weights: shared entries, or what a codec has made of them; or None.
        extras: tensors, numbers and (nested) dicts or lists of them.

    >>> import torch
    >>> traffic({"w": torch.zeros(10), "steps": torch.tensor(3)}, {"norm": 0.5, "is_short": True})
    57
    """
    size = sum(value.nbytes for value in (message_of(weights) or {}).values() if isinstance(value, Tensor))
    return size + (_size(extras) if extras else 0)


def _size(value: Any) -> int:
    """Count the bytes in a pytree."""
    sizes: list[int] = []
    apply_to_collection(value, (Tensor, bool, int, float, str), lambda leaf: sizes.append(_size_of(leaf)))
    return sum(sizes)


def _size_of(leaf: Any) -> int:
    """Count the bytes of a value."""
    if isinstance(leaf, Tensor):
        return leaf.nbytes
    if isinstance(leaf, str):
        return len(leaf.encode())
    return 1 if isinstance(leaf, bool) else NUMBER
