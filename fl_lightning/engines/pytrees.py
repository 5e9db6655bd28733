"""Pytrees of tensors of several clients, stacked: dicts, lists and tuples of one structure."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

Stacked = tuple[Any, Any]
"""A pytree whose tensors are (K, ...), and its dims beside it: 0, or None where all rows share a value."""


class StackingError(RuntimeError):
    """Raised by a client whose step cannot be taken for several clients at once."""


def stack_pytrees(trees: Sequence[Any]) -> tuple[Any, Any]:
    """Stack pytrees of one structure: each tensor becomes (K, ...).

    Returns dims beside it, as `vmap` wants them.

    What is the same object, or an equal plain value, in all of them stays one.

    Raises:
        StackingError: if their structures, shapes or plain values differ.

    >>> stack_pytrees([{"a": torch.tensor(1.0), "n": 3}, {"a": torch.tensor(2.0), "n": 3}])
    ({'a': tensor([1., 2.]), 'n': 3}, {'a': 0, 'n': None})
    """
    first = trees[0]
    if isinstance(first, Tensor):
        if all(tree is first for tree in trees):
            return first, None
        if any(not isinstance(tree, Tensor) or tree.shape != first.shape for tree in trees):
            raise StackingError("its clients have tensors of different shapes")
        return torch.stack(list(trees)), 0
    if any(type(tree) is not type(first) for tree in trees):
        raise StackingError("its clients have values of different types")
    if isinstance(first, dict):
        if any(tree.keys() != first.keys() for tree in trees):
            raise StackingError("its clients have values of different names")
        pairs = {name: stack_pytrees([tree[name] for tree in trees]) for name in first}
        return {name: pair[0] for name, pair in pairs.items()}, {name: pair[1] for name, pair in pairs.items()}
    if type(first) in (list, tuple):
        if any(len(tree) != len(first) for tree in trees):
            raise StackingError("its clients have lists of different lengths")
        items = [stack_pytrees(column) for column in zip(*trees, strict=True)]
        kind = type(first)
        return kind(item for item, _ in items), kind(dims for _, dims in items)
    if any(tree != first for tree in trees):
        raise StackingError(f"its clients have different values of {type(first).__name__}")
    return first, None


def rows_of(tree: Any, dims: Any, rows: slice | int) -> Any:
    """Rows, or one row, of a stacked pytree: of the tensors whose dim is 0.

    >>> rows_of({"a": torch.tensor([1.0, 2.0, 3.0]), "n": 3}, {"a": 0, "n": None}, slice(1, 3))
    {'a': tensor([2., 3.]), 'n': 3}
    """
    if isinstance(tree, dict):
        return {name: rows_of(value, dims[name], rows) for name, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(rows_of(value, dim, rows) for value, dim in zip(tree, dims, strict=True))
    return tree if dims is None else tree[rows]


def stacked_leaves(tree: Any, dims: Any) -> list[Tensor]:
    """List the tensors of a stacked pytree that have one value per row.

    >>> stacked_leaves(({"a": torch.tensor([1.0, 2.0])}, 3), ({"a": 0}, None))
    [tensor([1., 2.])]
    """
    if isinstance(tree, dict):
        return [leaf for name, value in tree.items() for leaf in stacked_leaves(value, dims[name])]
    if type(tree) in (list, tuple):
        return [leaf for value, dim in zip(tree, dims, strict=True) for leaf in stacked_leaves(value, dim)]
    return [] if dims is None else [tree]


def with_leaves(tree: Any, dims: Any, leaves: Iterator[Tensor]) -> Any:
    """Put others in the place of the `stacked_leaves` of a pytree.

    >>> with_leaves(({"a": torch.tensor([1.0, 2.0])}, 3), ({"a": 0}, None), iter([torch.tensor(5.0)]))
    ({'a': tensor(5.)}, 3)
    """
    if isinstance(tree, dict):
        return {name: with_leaves(value, dims[name], leaves) for name, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)([with_leaves(value, dim, leaves) for value, dim in zip(tree, dims, strict=True)])
    return tree if dims is None else next(leaves)
