"""Plain values: what a checkpoint may hold, so that `torch.load(weights_only=True)` reads it.

A checkpoint is read by exact types. A subclass of a plain type (`np.float64`, an Enum of strings, a named tuple, a
`defaultdict`) makes the whole file unreadable, so every value takes its plain form before it is written.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping
from io import BytesIO
from pathlib import PurePath
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


def plain_scalar(value: Any) -> Any:
    """Return a number, a truth value or a text as exactly that type. Any other value is returned as it is.

    >>> plain_scalar(np.float64(0.5)), plain_scalar(np.str_("a")), plain_scalar(np.int32(3))
    (0.5, 'a', 3)
    """
    if type(value) in READABLE:
        return value
    if isinstance(value, np.generic):
        number = value.item()
        # An extended precision and a date have no plain form.
        return number if type(number) in READABLE else value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    return value


def plain_value(value: Any) -> Any:
    """Return the plain form of a value, at any depth.

    Numbers and texts take their exact type, as an Enum of either does. A path becomes its text, an array of NumPy a
    tensor (or a list, if torch lacks its type), a frozen set a set, any other collection a dict, a list or a tuple. An
    object without a plain form stays as it is. A value that is plain already is the same object.

    >>> plain_value({"a": [np.float64(0.5)], np.str_("b"): PurePath("x")})
    {'a': [0.5], 'b': 'x'}
    """
    if isinstance(value, Mapping):
        return plain_mapping(value)
    if isinstance(value, list | tuple | set | frozenset) and type(value) not in READABLE:
        return plain_collection(value)
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, np.ndarray):
        return plain_array(value)
    return plain_scalar(value)


def plain_mapping(value: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """Return the plain form of a mapping. What is plain already is returned as it is."""
    is_same = type(value) in MAPPINGS
    items: dict[Any, Any] = {}
    for key, item in value.items():
        plain_key = plain_value(key)
        items[plain_key] = plain_value(item)
        is_same = is_same and plain_key is key and items[plain_key] is item
    if is_same or not isinstance(value, OrderedDict):
        return value if is_same else items
    # A state dict of torch holds the versions of its modules in an attribute.
    ordered = OrderedDict(items)
    vars(ordered).update(vars(value))
    return ordered


def plain_collection(value: Any) -> Any:
    """Return the plain form of a list, a tuple or a set, of which a subclass becomes a list, a tuple or a set."""
    items = [plain_value(item) for item in value]
    is_same = all(item is old for item, old in zip(items, value, strict=True))
    if is_same and type(value) in SEQUENCES:
        return value
    if isinstance(value, tuple):
        return tuple(items)
    return items if isinstance(value, list) else set(items)


def plain_array(value: np.ndarray[Any, Any]) -> Any:
    """Return an array as a tensor with values of its own, or as a list if torch does not have its type."""
    try:
        return torch.from_numpy(np.array(value, order="C"))
    except TypeError:
        return plain_value(value.tolist())


def objects_in(value: Any, name: str = "") -> Iterator[str]:
    """Return the dotted names of the objects in a value that has its plain form, which `weights_only` does not read.

    Args:
        value: A value that `plain_value` has returned.
        name: Name of the value itself.
    """
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from objects_in(item, f"{name}.{key}".lstrip("."))
    elif type(value) in SEQUENCES:
        for item in value:
            yield from objects_in(item, name)
    elif not isinstance(value, Tensor) and type(value) not in READABLE:
        yield name


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
