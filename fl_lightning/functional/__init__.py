"""Mathematics that several papers share: pure functions on tensors and arrays."""

from importlib import import_module
from pkgutil import iter_modules
from typing import Any

_MODULES = sorted(module.name for module in iter_modules(__path__))


def __getattr__(name: str) -> Any:
    """Find a function in the modules, which are imported on first use.

    A module goes before a function of the same name.
    """
    if not name.startswith("_") and name not in _MODULES:
        for home in _MODULES:
            functions = _functions_of(home)
            if name in functions:
                return functions[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """List the modules and functions that can be imported from here."""
    names = {*globals(), *_MODULES}
    for home in _MODULES:
        names.update(_functions_of(home))
    return sorted(names)


def _functions_of(home: str) -> dict[str, Any]:
    """Return the public functions and classes that a module defines itself, by name."""
    module = import_module(f"{__name__}.{home}")
    functions: dict[str, Any] = {}
    for name, value in vars(module).items():
        is_defined_here = getattr(value, "__module__", None) == module.__name__
        if is_defined_here and not name.startswith("_"):
            functions[name] = value
    return functions
