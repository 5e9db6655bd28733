"""Bytes of the values in a message."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from fl_lightning.functional.state import State, StateLike

NUMBER = 8
"""Bytes of a Python number."""


class CodedState(dict[str, Tensor]):
    """Holds the entries as they are read from a message, and the codec's tensors in it.

    Args:
        entries: The entries, by name.
        coded: The tensors of the codec, by name.
        names: The names of the entries that the codec has coded.
    """

    def __init__(self, entries: StateLike, coded: State, names: Sequence[str]) -> None:
        super().__init__(entries)
        self.coded = coded
        self.names = names

    @cached_property
    def message(self) -> State:
        """The entries that travel as they are, and the codec's tensors."""
        coded_names = set(self.names)
        uncoded = {name: value for name, value in self.items() if name not in coded_names}
        return {**uncoded, **self.coded}


def message_of(weights: StateLike | None) -> StateLike | None:
    """Return the tensors that travel for weights: those of a codec, or the weights themselves."""
    return weights.message if isinstance(weights, CodedState) else weights


def traffic(weights: StateLike | None, extras: Mapping[str, Any]) -> int:
    """Count the bytes of the values in a message. Names and shapes count nothing.

    A tensor takes the bytes of its type, a Python number 8 bytes, True and False 1, a text its UTF-8, None nothing.

    Args:
        weights: Shared entries, or a `CodedState`. None: no weights travel.
        extras: Tensors, numbers and (nested) dicts or lists of them.

    >>> import torch
    >>> traffic({"w": torch.zeros(10), "steps": torch.tensor(3)}, {"norm": 0.5, "is_short": True})
    57
    """
    message = message_of(weights) or {}
    size = sum(value.nbytes for value in message.values() if isinstance(value, Tensor))
    if extras:
        size += _size(extras)
    return size


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
