"""Nests of tensors of several clients, stacked: dicts, lists and tuples of one structure."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

Stacked = tuple[Any, Any]
"""A nest whose tensors are (K, ...), and its dims beside it: 0, or None where all rows share a value."""


class StackingError(RuntimeError):
    """Raised by a client whose step cannot be taken for several clients at once."""


def stack_nest(nests: Sequence[Any]) -> tuple[Any, Any]:
    """Stack nests of one structure: each tensor becomes (K, ...); returns dims beside it, as `vmap` wants them.

    What is the same object, or an equal plain value, in all of them stays one.

    Raises:
        StackingError: if their structures, shapes or plain values differ.

    >>> stack_nest([{"a": torch.tensor(1.0), "n": 3}, {"a": torch.tensor(2.0), "n": 3}])
    ({'a': tensor([1., 2.]), 'n': 3}, {'a': 0, 'n': None})
    """
    first = nests[0]
    if isinstance(first, Tensor):
        if all(nest is first for nest in nests):
            return first, None
        if any(not isinstance(nest, Tensor) or nest.shape != first.shape for nest in nests):
            raise StackingError("its clients have tensors of different shapes")
        return torch.stack(list(nests)), 0
    if any(type(nest) is not type(first) for nest in nests):
        raise StackingError("its clients have values of different types")
    if isinstance(first, dict):
        if any(nest.keys() != first.keys() for nest in nests):
            raise StackingError("its clients have values of different names")
        pairs = {name: stack_nest([nest[name] for nest in nests]) for name in first}
        return {name: pair[0] for name, pair in pairs.items()}, {name: pair[1] for name, pair in pairs.items()}
    if type(first) in (list, tuple):
        if any(len(nest) != len(first) for nest in nests):
            raise StackingError("its clients have lists of different lengths")
        found = [stack_nest(items) for items in zip(*nests, strict=True)]
        kind = type(first)
        return kind(item for item, _ in found), kind(dims for _, dims in found)
    if any(nest != first for nest in nests):
        raise StackingError(f"its clients have different values of {type(first).__name__}")
    return first, None


def rows_of(nest: Any, dims: Any, rows: slice | int) -> Any:
    """Rows, or one row, of a stacked nest: of the tensors whose dim is 0.

    >>> rows_of({"a": torch.tensor([1.0, 2.0, 3.0]), "n": 3}, {"a": 0, "n": None}, slice(1, 3))
    {'a': tensor([2., 3.]), 'n': 3}
    """
    if isinstance(nest, dict):
        return {name: rows_of(value, dims[name], rows) for name, value in nest.items()}
    if type(nest) in (list, tuple):
        return type(nest)(rows_of(value, dim, rows) for value, dim in zip(nest, dims, strict=True))
    return nest if dims is None else nest[rows]


def stacked_leaves(nest: Any, dims: Any) -> list[Tensor]:
    """List the tensors of a stacked nest that have one value per row.

    >>> stacked_leaves(({"a": torch.tensor([1.0, 2.0])}, 3), ({"a": 0}, None))
    [tensor([1., 2.])]
    """
    if isinstance(nest, dict):
        return [leaf for name, value in nest.items() for leaf in stacked_leaves(value, dims[name])]
    if type(nest) in (list, tuple):
        return [leaf for value, dim in zip(nest, dims, strict=True) for leaf in stacked_leaves(value, dim)]
    return [] if dims is None else [nest]


def with_leaves(nest: Any, dims: Any, leaves: Iterator[Tensor]) -> Any:
    """Put others in the place of the `stacked_leaves` of a nest.

    >>> with_leaves(({"a": torch.tensor([1.0, 2.0])}, 3), ({"a": 0}, None), iter([torch.tensor(5.0)]))
    ({'a': tensor(5.)}, 3)
    """
    if isinstance(nest, dict):
        return {name: with_leaves(value, dims[name], leaves) for name, value in nest.items()}
    if type(nest) in (list, tuple):
        return type(nest)([with_leaves(value, dim, leaves) for value, dim in zip(nest, dims, strict=True)])
    return nest if dims is None else next(leaves)
