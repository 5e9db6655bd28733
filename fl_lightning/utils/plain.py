"""Plain values: what a checkpoint may hold, so that `torch.load(weights_only=True)` reads it.

A checkpoint is read by exact types. A subclass of a plain type (`np.float64`, an Enum of strings, a named tuple, a
`defaultdict`) makes the whole file unreadable, so every value takes its plain form before it is written.
"""

import os
from collections import Counter, OrderedDict, UserList, deque
from collections.abc import Callable, Iterator, Mapping, Set, ValuesView
from io import BytesIO
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

READABLE = frozenset(
    {
        type(None),
        bool,
        int,
        float,
        complex,
        str,
        bytes,
        bytearray,
        torch.dtype,
        torch.device,
        torch.layout,
        torch.Size,
        Tensor,
        Parameter,
    }
)
"""Types of values, besides containers, that are read as they are."""

MAPPINGS = (dict, OrderedDict, Counter)
"""Types of mappings that are read as they are."""

SEQUENCES = (list, tuple, set)
"""Types of collections that are read as they are."""

COLLECTIONS = (list, tuple, Set, deque, range, UserList, ValuesView)
"""Types of collections that have a plain form."""


def plain_scalar(value: Any) -> Any:
    """Return a number, a truth value or a text as exactly that type. Any other value is returned as it is.

    >>> plain_scalar(np.float64(0.5)), plain_scalar(np.str_("a")), plain_scalar(np.int32(3))
    (0.5, 'a', 3)
    """
    if type(value) in READABLE:
        return value
    if isinstance(value, np.generic):
        return plain_number(value)
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, complex):
        return complex.__complex__(value)
    if isinstance(value, bytes):
        return bytes.__bytes__(value)
    return value


def plain_number(value: np.generic) -> Any:
    """Return a value of one of NumPy's types as Python's own. A date is returned as it is."""
    if isinstance(value, np.longdouble):
        return float(value)
    if isinstance(value, np.clongdouble):
        return complex(value)
    number = value.item()
    return number if type(number) in READABLE else value


def plain_value(value: Any) -> Any:
    """Return the plain form of a value, at any depth.

    Numbers and texts take their exact type, as an Enum of either does. A path becomes its text, an array of NumPy a
    tensor (or a list, if torch lacks its type), a tensor of another class a `Tensor`, a frozen set a set, any other
    collection a dict, a list or a tuple. An object without a plain form stays as it is. A value that is plain already
    is the same object.

    >>> plain_value({"a": [np.float64(0.5)], np.str_("b"): deque([1])})
    {'a': [0.5], 'b': [1]}
    """
    if type(value) in READABLE:
        return value
    if isinstance(value, Mapping):
        return plain_mapping(value)
    if isinstance(value, COLLECTIONS):
        return plain_collection(value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, np.ndarray):
        return plain_array(value)
    if isinstance(value, Tensor):
        return plain_tensor(value)
    return plain_scalar(value)


def plain_mapping(value: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """Return the plain form of a mapping. What is plain already is returned as it is."""
    is_same = type(value) in MAPPINGS
    items: dict[Any, Any] = {}
    for key, item in value.items():
        new_key = plain_key(key)
        items[new_key] = plain_value(item)
        is_same = is_same and new_key is key and items[new_key] is item
    if is_same or not isinstance(value, OrderedDict):
        return value if is_same else items
    # A state dict of torch holds the versions of its modules in an attribute.
    ordered = OrderedDict(items)
    vars(ordered).update(vars(value))
    return ordered


def plain_key(value: Any) -> Any:
    """Return the plain form of a key, or of an item of a set. A frozen set becomes a sorted tuple, which has a hash.

    >>> plain_key(frozenset("ba")), plain_key((np.int64(1), frozenset([2])))
    (('a', 'b'), (1, (2,)))
    """
    if isinstance(value, frozenset):
        return tuple(sorted(map(plain_key, value), key=repr))
    if not isinstance(value, tuple) or type(value) in READABLE:
        return plain_value(value)
    items = tuple(map(plain_key, value))
    return value if type(value) is tuple and are_same(items, value) else items


def plain_collection(value: Any) -> Any:
    """Return the plain form of a collection: a tuple of a tuple, a set of a set, and a list of any other."""
    is_set = isinstance(value, Set)
    items = [plain_key(item) if is_set else plain_value(item) for item in value]
    if type(value) in SEQUENCES and are_same(items, value):
        return value
    if is_set:
        return set(items)
    return tuple(items) if isinstance(value, tuple) else items


def are_same(items: Any, others: Any) -> bool:
    """Return True if two collections of one length hold the same objects."""
    return all(item is other for item, other in zip(items, others, strict=True))


def plain_array(value: np.ndarray[Any, Any]) -> Any:
    """Return an array as a tensor with values of its own, or as a list if torch does not have its type."""
    try:
        return torch.from_numpy(np.array(value, dtype=value.dtype.newbyteorder("="), order="C"))
    except TypeError:
        return plain_value(value.tolist())


def plain_tensor(value: Tensor) -> Tensor:
    """Return a tensor of another class as a `Tensor` of the same values.

    A class whose tensors consist of several, such as a distributed tensor, stays as it is.
    """
    return value if hasattr(value, "__tensor_flatten__") else value.as_subclass(Tensor)


def objects_in(value: Any, name: str = "") -> Iterator[str]:
    """Yield the dotted names of the objects in a value in plain form, which `weights_only` does not read.

    Args:
        value: A value that `plain_value` has returned.
        name: Name of the value itself.
    """
    if isinstance(value, Mapping):
        for key, item in value.items():
            name_of_item = f"{name}.{key}".lstrip(".")
            yield from objects_in(key, name_of_item)
            yield from objects_in(item, name_of_item)
    elif type(value) in SEQUENCES:
        for item in value:
            yield from objects_in(item, name)
    elif type(value) not in READABLE:
        yield name


def without_refused(
    entries: Mapping[Any, Any], keeps: Callable[[Any], bool], left_out: list[str], prefix: str = ""
) -> dict[Any, Any]:
    """Return a copy of nested entries without the keys and values that cannot be kept.

    Args:
        entries: Entries by name, nested, in plain form.
        keeps: Tells whether a key or a value can be kept.
        left_out: Receives the dotted names of the entries that the copy lacks.
        prefix: Beginning of these names.
    """
    kept: dict[Any, Any] = {}
    for key, value in entries.items():
        name = f"{prefix}{key}"
        if keeps(key) and keeps(value):
            kept[key] = value
        elif keeps(key) and isinstance(value, dict):
            kept[key] = without_refused(value, keeps, left_out=left_out, prefix=f"{name}.")
        else:
            left_out.append(name)
    return kept


def is_readable(value: Any) -> bool:
    """Return True if `torch.load(weights_only=True)` reads a value in plain form."""
    has_objects = any(True for _ in objects_in(value))
    if not has_objects:
        return True
    try:
        written = BytesIO()
        torch.save(value, written)
        torch.load(BytesIO(written.getvalue()), weights_only=True)
    except Exception:
        # Pickling an object may raise anything.
        return False
    return True
