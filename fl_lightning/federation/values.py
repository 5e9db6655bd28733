"""Values of settings in plain form, and classes by their names."""

import hashlib
from collections.abc import Iterable, Mapping
from pkgutil import resolve_name
from typing import Any

from torch import Tensor

from fl_lightning.functional.state import to_float32
from fl_lightning.utils.plain import plain_scalar, plain_value

Settings = dict[str, Any]
"""Plain values by dotted name. An object is the name of its class, with its arguments below."""

MAX_CHARACTERS = 200
"""Maximal number of characters of a value that is kept whole. A longer value is its beginning and a digest."""


def hash_of_value(value: Any) -> str:
    """Return the first 16 characters of the SHA-256 of a plain value."""
    ordered = sorted(value.items()) if isinstance(value, dict) else value
    return hashlib.sha256(repr(ordered).encode()).hexdigest()[:16]


def is_plain(value: Any) -> bool:
    """Return True if `plain_value` makes numbers, strings, None, and lists and dicts of these of a value."""
    if isinstance(value, Mapping):
        return all(is_plain(item) for item in value.values())
    if isinstance(value, list | tuple):
        return all(is_plain(item) for item in value)
    return type(plain_scalar(value)) in (type(None), bool, int, float, str)


def shortened(value: Any) -> Any:
    """Return the plain form of a value, or its beginning and a digest if it is long."""
    value = plain_value(value)
    text = repr(value)
    if len(text) > MAX_CHARACTERS:
        return f"{text[:40]}... (sha256 {hashlib.sha256(text.encode()).hexdigest()[:12]})"
    if isinstance(value, list | tuple):
        return [shortened(item) for item in value]
    return value


def digest_of(tensors: Iterable[Tensor]) -> str:
    """Return a digest of the types, shapes and values of tensors."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        values = to_float32(tensor.detach()).cpu().contiguous().numpy()
        # The memory itself is hashed, because a copy of large data takes too much memory.
        digest.update(values.reshape(-1).data)
    return f"sha256 {digest.hexdigest()[:12]}"


def class_name(kind: Any) -> str:
    """Return the name of a class or function, in the module that defines it.

    Args:
        kind: A class, a function, or the dotted name under which one is exported.
    """
    if isinstance(kind, str):
        try:
            kind = resolve_name(kind)
        except (ImportError, AttributeError, ValueError):
            return str(kind)
    if not hasattr(kind, "__qualname__"):
        return type(kind).__name__
    return f"{kind.__module__}.{kind.__qualname__}"


def resolved(name: Any) -> Any:
    """Return the class or function of a name, or None if it cannot be imported."""
    if not isinstance(name, str):
        return None
    try:
        return resolve_name(name)
    except (ImportError, AttributeError, ValueError):
        return None


def joined(parts: Iterable[Settings]) -> Settings:
    """Return one dict of the settings of several dicts."""
    settings: Settings = {}
    for part in parts:
        settings.update(part)
    return settings


def below_of(settings: Settings, name: str) -> Settings:
    """Return the settings below a setting, by what their names add to its name."""
    prefix = f"{name}."
    return {key.removeprefix(prefix): value for key, value in settings.items() if key.startswith(prefix)}


def is_number(value: Any) -> bool:
    """Return True for a number that is not a truth value."""
    return isinstance(value, int | float) and not isinstance(value, bool)
