"""Pytrees of tensors of several clients, stacked: dicts, lists and tuples of one structure."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

Stacked = tuple[Any, Any]
"""A pytree whose tensors are (K, ...), and its dims beside it: 0, or None where all rows share a value."""


class StackingError(RuntimeError):
    """Raised by a client whose step cannot be taken for several clients at once."""


def stack_pytrees(trees: Sequence[Any]) -> Stacked:
    """Stack pytrees of one structure, each tensor to (K, ...), with the dims that `vmap` wants beside it.

    What is the same object, or an equal plain value, in all of them stays one.

    Raises:
        StackingError: if their structures, shapes or plain values differ.

    >>> stack_pytrees([{"a": torch.tensor(1.0), "n": 3}, {"a": torch.tensor(2.0), "n": 3}])
    ({'a': tensor([1., 2.]), 'n': 3}, {'a': 0, 'n': None})
    """
    rows, structures = zip(*map(tree_flatten, trees), strict=True)
    if any(structure != structures[0] for structure in structures):
        raise StackingError("its clients have values of different names, numbers or types")
    pairs = [stack_leaf(leaves) for leaves in zip(*rows, strict=True)]
    values, dims = ([pair[i] for pair in pairs] for i in (0, 1))
    return tree_unflatten(values, structures[0]), tree_unflatten(dims, structures[0])


def stack_leaf(leaves: Sequence[Any]) -> Stacked:
    """Stack what all clients have at one place."""
    first = leaves[0]
    if all(leaf is first for leaf in leaves):
        return first, None
    if isinstance(first, Tensor):
        if any(not isinstance(leaf, Tensor) or leaf.shape != first.shape for leaf in leaves):
            raise StackingError("its clients have tensors of different shapes")
        return torch.stack(list(leaves)), 0
    if any(type(leaf) is not type(first) or leaf != first for leaf in leaves):
        raise StackingError(f"its clients have different values of {type(first).__name__}")
    return first, None


def rows_of(tree: Any, dims: Any, rows: slice | int) -> Any:
    """Rows, or one row, of a stacked pytree: of the tensors whose dim is 0.

    >>> rows_of({"a": torch.tensor([1.0, 2.0, 3.0]), "n": 3}, {"a": 0, "n": None}, slice(1, 3))
    {'a': tensor([2., 3.]), 'n': 3}
    """
    return tree_map(lambda leaf, dim: leaf if dim is None else leaf[rows], tree, dims)


def stacked_leaves(tree: Any, dims: Any) -> list[Tensor]:
    """List the tensors of a stacked pytree that have one value per row.

    >>> stacked_leaves(({"a": torch.tensor([1.0, 2.0])}, 3), ({"a": 0}, None))
    [tensor([1., 2.])]
    """
    pairs = zip(tree_leaves(tree), tree_leaves(dims), strict=True)
    return [leaf for leaf, dim in pairs if dim is not None]


def with_leaves(tree: Any, dims: Any, leaves: Iterator[Tensor]) -> Any:
    """Put others in the place of the `stacked_leaves` of a pytree.

    >>> with_leaves(({"a": torch.tensor([1.0, 2.0])}, 3), ({"a": 0}, None), iter([torch.tensor(5.0)]))
    ({'a': tensor(5.)}, 3)
    """
    return tree_map(lambda leaf, dim: leaf if dim is None else next(leaves), tree, dims)
