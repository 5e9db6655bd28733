"""The attributes of a user's objects, read without running code of theirs."""

from collections.abc import Mapping
from typing import Any


def instance_attributes(value: object) -> Mapping[str, Any]:
    """Return the attributes of an object by name. An object without `__dict__` has none.

    `hasattr` and `vars` would call the `__getattr__` and `__getattribute__` of the object, which may raise any error.

    Args:
        value: The object.

    >>> from types import SimpleNamespace
    >>> instance_attributes(SimpleNamespace(rate=0.1))
    {'rate': 0.1}
    >>> instance_attributes(1)
    {}
    """
    try:
        found: Mapping[str, Any] = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return found
