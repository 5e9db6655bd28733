"""Stacks of pytrees of tensors, one row for each client: dicts, lists and tuples of one structure."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

Stacked = tuple[Any, Any]
"""A stacked pytree and its dims.

The dims have the structure of the pytree: 0 for a tensor (K, ...), None for a value that all rows share.
"""


class StackingError(RuntimeError):
    """Tells that the step of a client cannot be taken for several clients at once."""


def stack_pytrees(trees: Sequence[Any]) -> Stacked:
    """Stack pytrees of one structure, so that each tensor becomes (K, ...).

    A value that is the same object in all of them is not stacked. Neither are equal plain values.

    Args:
        trees: The pytrees, one for each row.

    Returns:
        The stacked pytree and its dims, as `vmap` takes them.

    Raises:
        StackingError: The structures, the shapes or the plain values differ.

    >>> stack_pytrees([{"a": torch.tensor(1.0), "n": 3}, {"a": torch.tensor(2.0), "n": 3}])
    ({'a': tensor([1., 2.]), 'n': 3}, {'a': 0, 'n': None})
    """
    first = trees[0]
    if isinstance(first, Tensor):
        return _stack_tensors(trees)
    if any(type(tree) is not type(first) for tree in trees):
        raise StackingError("its clients have values of different types")
    if isinstance(first, dict):
        return _stack_dicts(trees)
    if type(first) in (list, tuple):
        return _stack_sequences(trees)
    if any(tree != first for tree in trees):
        raise StackingError(f"its clients have different values of {type(first).__name__}")
    return first, None


def _stack_tensors(trees: Sequence[Any]) -> Stacked:
    """Stack values of which the first one is a tensor."""
    first = trees[0]
    if all(tree is first for tree in trees):
        return first, None
    if any(not isinstance(tree, Tensor) or tree.shape != first.shape for tree in trees):
        raise StackingError("its clients have tensors of different shapes")
    return torch.stack(list(trees)), 0


def _stack_dicts(trees: Sequence[dict[Any, Any]]) -> Stacked:
    """Stack dicts, entry by entry."""
    first = trees[0]
    if any(tree.keys() != first.keys() for tree in trees):
        raise StackingError("its clients have values of different names")
    stacked = {}
    dims = {}
    for name in first:
        stacked[name], dims[name] = stack_pytrees([tree[name] for tree in trees])
    return stacked, dims


def _stack_sequences(trees: Sequence[Any]) -> Stacked:
    """Stack lists or tuples, item by item."""
    first = trees[0]
    if any(len(tree) != len(first) for tree in trees):
        raise StackingError("its clients have lists of different lengths")
    kind = type(first)
    stacked = []
    dims = []
    for items in zip(*trees, strict=True):
        stacked_items, item_dims = stack_pytrees(items)
        stacked.append(stacked_items)
        dims.append(item_dims)
    return kind(stacked), kind(dims)


def rows_of(tree: Any, dims: Any, rows: slice | int) -> Any:
    """Return some rows, or one row, of a stacked pytree.

    Args:
        tree: The stacked pytree.
        dims: The dims of the pytree. A value whose dim is None is returned whole.
        rows: The rows. A number takes one row, without the dimension of the rows.

    >>> rows_of({"a": torch.tensor([1.0, 2.0, 3.0]), "n": 3}, {"a": 0, "n": None}, slice(1, 3))
    {'a': tensor([2., 3.]), 'n': 3}
    """
    if isinstance(tree, dict):
        return {name: rows_of(value, dims[name], rows) for name, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)([rows_of(value, dim, rows) for value, dim in zip(tree, dims, strict=True)])
    return tree if dims is None else tree[rows]


def stacked_leaves(tree: Any, dims: Any) -> list[Tensor]:
    """List the tensors of a stacked pytree that have one value for each row.

    Args:
        tree: The stacked pytree.
        dims: The dims of the pytree.

    >>> stacked_leaves(({"a": torch.tensor([1.0, 2.0])}, 3), ({"a": 0}, None))
    [tensor([1., 2.])]
    """
    leaves: list[Tensor] = []
    if isinstance(tree, dict):
        for name, value in tree.items():
            leaves += stacked_leaves(value, dims[name])
    elif type(tree) in (list, tuple):
        for value, dim in zip(tree, dims, strict=True):
            leaves += stacked_leaves(value, dim)
    elif dims is not None:
        leaves.append(tree)
    return leaves


def with_leaves(tree: Any, dims: Any, leaves: Iterator[Tensor]) -> Any:
    """Return a stacked pytree with other tensors in the places of its `stacked_leaves`.

    Args:
        tree: The stacked pytree.
        dims: The dims of the pytree.
        leaves: The tensors, in the order of `stacked_leaves`.

    >>> with_leaves(({"a": torch.tensor([1.0, 2.0])}, 3), ({"a": 0}, None), iter([torch.tensor(5.0)]))
    ({'a': tensor(5.)}, 3)
    """
    if isinstance(tree, dict):
        return {name: with_leaves(value, dims[name], leaves) for name, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)([with_leaves(value, dim, leaves) for value, dim in zip(tree, dims, strict=True)])
    return tree if dims is None else next(leaves)
