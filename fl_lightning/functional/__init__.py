"""Mathematics that several papers share: pure functions on tensors and arrays."""

from importlib import import_module
from pkgutil import iter_modules
from typing import Any

_MODULES = sorted(module.name for module in iter_modules(__path__))


def __getattr__(name: str) -> Any:
    """Find a function in the modules, which are imported on first use.

    A module goes before a function of the same name.
    """
    for home in () if name[0] == "_" or name in _MODULES else _MODULES:
        module = import_module(f"{__name__}.{home}")
        if getattr(value := vars(module).get(name), "__module__", None) == module.__name__:
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """List the modules and functions that can be imported from here."""
    modules = [import_module(f"{__name__}.{home}") for home in _MODULES]
    named = [(name, value, m.__name__) for m in modules for name, value in vars(m).items() if name[0] != "_"]
    public = [name for name, value, home in named if getattr(value, "__module__", "") == home]
    return sorted({*globals(), *_MODULES, *public})
