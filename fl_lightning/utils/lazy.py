"""Names of a package that are imported when somebody asks for them."""

import ast
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any


def lazy_names(
    package: str, homes: Mapping[str, str] | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Make the `__getattr__` and `__dir__` of a package whose names are imported on first use.

    Args:
        package: `__name__` of the package.
        homes: Module of each name. None takes the imports under `if TYPE_CHECKING:` in the package's own
            `__init__.py`, so that type checkers, editors and this function read one list.
    """
    modules = declared_names(package) if homes is None else homes

    # The two functions become the package's.
    def __getattr__(name: str) -> Any:  # noqa: N807
        if name == "__all__":
            return sorted(modules)
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(modules[name]), name)
        return vars(sys.modules[package]).setdefault(name, value)

    def __dir__() -> list[str]:  # noqa: N807
        return sorted({*vars(sys.modules[package]), *modules})

    return __getattr__, __dir__


def declared_names(package: str) -> dict[str, str]:
    """Return the module of each name that the package's `__init__.py` imports under `if TYPE_CHECKING:`.

    >>> declared_names("fl_lightning.nets")["Perceptron"]
    'fl_lightning.nets.perceptron'
    """
    loader: Any = getattr(find_spec(package), "loader", None)
    homes: dict[str, str] = {}
    for node in ast.parse(loader.get_source(package)).body:
        if isinstance(node, ast.If):
            homes |= imported_names(node)
    return homes


def imported_names(block: ast.If) -> dict[str, str]:
    """Return the module of each name that a block imports, except imports of `typing`."""
    homes: dict[str, str] = {}
    for node in block.body:
        if isinstance(node, ast.ImportFrom) and node.module != "typing":
            homes.update((alias.name, str(node.module)) for alias in node.names)
    return homes
