"""Digests of the source of a user's classes, which tell that the code of a run has changed since it was begun."""

import ast
import hashlib
import inspect
import linecache
import sys
import sysconfig
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cache, lru_cache, partial
from pathlib import Path
from types import FunctionType, MethodType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary

from pytorch_lightning.utilities import rank_zero_info
from torch import Tensor, nn

from fl_lightning.utils.own_generators import OF_TORCH, names_in
from fl_lightning.utils.packages import is_of_lightning

PACKAGE = "fl_lightning"

MAX_DEPTH = 4
"""Largest depth of an object in another one whose class counts."""

MOST_OBJECTS = 500
"""Number of objects that are looked at, and of classes and functions."""

MOST_ITEMS = 50
"""Number of items of a collection that is looked at. A longer one holds samples."""

WITHOUT_PARTS = (Tensor, nn.Module)
"""Classes of objects whose attributes are not looked at: they are large, or are described by other means."""

LIGHTNING_WITHOUT_PARTS = ("LightningDataModule", "Trainer")
"""Lightning's classes of such objects."""

KNOWN: "WeakKeyDictionary[Any, str]" = WeakKeyDictionary()
"""Digests by class or function, because finding a source takes milliseconds."""


def digests_of_code(kinds: Iterable[Any]) -> dict[str, str]:
    """Return digests of the source of the user's classes and functions, by name.

    Args:
        kinds: Classes and functions. Those of this package and of installed packages are left out.
    """
    digests = {}
    for kind in with_named(kinds):
        digest = digest_of_code(kind)
        if digest:
            digests[f"{kind.__module__}.{kind.__qualname__}"] = digest
    return digests


def with_named(kinds: Iterable[Any]) -> list[Any]:
    """Return the user's classes and functions, and those that their code names, each once. No code of theirs runs.

    Args:
        kinds: Classes, functions and other values. Those that are not the user's are left out.
    """
    found: dict[Any, None] = {}
    waiting = deque(kinds)
    while waiting and len(found) < MOST_OBJECTS:
        kind = waiting.popleft()
        if is_of_user(kind) and kind not in found:
            found[kind] = None
            waiting.extend(named_by(kind))
    return list(found)


def named_by(kind: Any) -> Iterator[Any]:
    """Yield the classes and functions that the code of a user's class or function names, and classes of its objects."""
    for function in functions_of(kind):
        # The function in whose code it stands, such as a decorator.
        yield function.__globals__.get(function.__code__.co_qualname.partition(".")[0])
        names = list(dict.fromkeys(names_in(function.__code__)))
        for name in names:
            value = function.__globals__.get(name)
            if isinstance(value, ModuleType):
                # Such as `losses.focal` of a module `losses` of the user's. Nothing is imported.
                yield from (vars(value).get(part) for part in names)
            elif inspect.isclass(value) or inspect.isfunction(value):
                yield value
            else:
                # Such as a function that keeps its values (`functools.cache`).
                yield from (type(value), getattr(value, "__dict__", {}).get("__wrapped__"))


def functions_of(kind: Any) -> Iterator[FunctionType]:
    """Yield a function, or the methods of a class and of the user's classes it derives from, each with its wrappers."""
    members: list[Any] = [kind]
    if inspect.isclass(kind):
        members = []
        for base in filter(is_of_user, kind.__mro__):
            members += vars(base).values()
    for member in members:
        part = member.fget if isinstance(member, property) else member
        while isinstance(part, FunctionType | staticmethod | classmethod):
            if isinstance(part, FunctionType):
                yield part
            part = getattr(part, "__wrapped__", None)


def kinds_within(values: Iterable[Any]) -> list[Any]:
    """Return the user's classes and functions of which objects are made, each once.

    Attributes, items of short collections and the parts of a `partial` are looked at. No code of the objects runs.

    Args:
        values: The objects.
    """
    kinds: list[Any] = []
    searched: dict[int, Any] = {}
    waiting = deque((value, 0) for value in values)
    while waiting and len(searched) < MOST_OBJECTS:
        value, depth = waiting.popleft()
        if id(value) in searched:
            continue
        searched[id(value)] = value
        if isinstance(value, MethodType):
            waiting.append((value.__self__, depth + 1))
            value = value.__func__
        kind = value if inspect.isclass(value) or inspect.isfunction(value) else type(value)
        if is_of_user(kind) and kind not in kinds:
            kinds.append(kind)
        if depth < MAX_DEPTH:
            waiting.extend((part, depth + 1) for part in parts_of(value))
    return kinds


def kinds_kept_by(module: nn.Module) -> list[Any]:
    """Return the user's classes and functions of the objects that a module and its parts keep, without their nets."""
    kept: list[Any] = []
    for part in module.modules():
        if is_of_user(type(part)):
            kept += [value for name, value in vars(part).items() if name not in OF_TORCH]
    return kinds_within(kept)


def parts_of(value: Any) -> list[Any]:
    """Return the attributes of an object, the items of a short collection, or the parts of a `partial`."""
    if inspect.isclass(value) or inspect.isfunction(value) or isinstance(value, WITHOUT_PARTS):
        return []
    if is_of_lightning(value, LIGHTNING_WITHOUT_PARTS):
        return []
    if isinstance(value, dict):
        return list(value.values()) if len(value) <= MOST_ITEMS else []
    if isinstance(value, list | tuple):
        return list(value) if len(value) <= MOST_ITEMS else []
    if isinstance(value, partial):
        return [value.func, *value.args, *value.keywords.values()]
    return list(getattr(value, "__dict__", {}).values())


def digest_of_code(kind: Any) -> str:
    """Return a digest of the source of a class and of the user's classes that it derives from, or "" without a source.

    Args:
        kind: The class, or a function.
    """
    if kind not in KNOWN:
        parts = [part for part in getattr(kind, "__mro__", (kind,)) if is_of_user(part)]
        digest = hashlib.sha256()
        has_source = False
        for part in parts:
            # A class that was typed at a prompt has no file.
            with suppress(OSError, TypeError):
                digest.update(source_of(part).encode())
                has_source = True
        KNOWN[kind] = digest.hexdigest()[:12] if has_source else ""
    return KNOWN[kind]


def source_of(kind: Any) -> str:
    """Return the source of a class or function.

    `inspect` reads the whole file anew for each class, which takes milliseconds.

    Raises:
        OSError: There is no source.
        TypeError: The class has no file.
    """
    file = inspect.getsourcefile(kind) if inspect.isclass(kind) else None
    if file is None:
        return inspect.getsource(kind)
    linecache.checkcache(file)
    lines = linecache.getlines(file)
    place = places_of_classes("".join(lines)).get(kind.__qualname__)
    return inspect.getsource(kind) if place is None else "".join(lines[place[0] - 1 : place[1]])


@lru_cache(maxsize=16)
def places_of_classes(source: str) -> dict[str, tuple[int, int] | None]:
    """Return the first and the last line of each class by its qualified name. None is a name of several classes.

    Args:
        source: The source of a file.
    """
    places: dict[str, tuple[int, int] | None] = {}
    waiting: deque[tuple[ast.AST, str]] = deque()
    with suppress(SyntaxError):
        waiting.append((ast.parse(source), ""))
    while waiting:
        node, prefix = waiting.popleft()
        for part in ast.iter_child_nodes(node):
            inner = prefix
            if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef):
                inner = f"{prefix}{part.name}.<locals>."
            elif isinstance(part, ast.ClassDef):
                name = f"{prefix}{part.name}"
                first = min([part.lineno, *(decorator.lineno for decorator in part.decorator_list)])
                places[name] = None if name in places else (first, part.end_lineno or first)
                inner = f"{name}."
            waiting.append((part, inner))
    return places


def is_of_user(kind: Any) -> bool:
    """Return True for a class or function of a file that is neither of this package nor of an installed one."""
    if not (inspect.isclass(kind) or inspect.isfunction(kind)):
        return False
    if kind.__module__.partition(".")[0] == PACKAGE:
        return False
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return file is not None and not is_installed(file)


@cache
def is_installed(file: str) -> bool:
    """Return True for a file of Python or of an installed package."""
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    folders = {Path(sysconfig.get_path(name)).resolve() for name in names}
    path = Path(file).resolve()
    return any(path.is_relative_to(folder) for folder in folders)


def loaded_kind(name: str) -> Any:
    """Return the class or function of a dotted name, or None if no loaded module has it. Nothing is imported."""
    module, _, attributes = name.rpartition(".")
    while module:
        if module in sys.modules:
            kind: Any = sys.modules[module]
            for attribute in attributes.split("."):
                kind = getattr(kind, attribute, None)
            return kind
        module, _, last = module.rpartition(".")
        attributes = f"{last}.{attributes}"
    return None


def changed_code(was: Mapping[str, str], now: Mapping[str, str] | None = None) -> list[str]:
    """Return the names of the classes and functions whose source has changed.

    Args:
        was: Digests by name when the run was begun.
        now: Digests by name today. None means that the loaded modules tell.
    """
    if now is None:
        now = digests_of_code(kind for kind in map(loaded_kind, was) if kind is not None)
    return [name for name, digest in was.items() if name in now and now[name] != digest]


def tell_changed_code(was: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Name in one line the classes and functions whose source has changed since the run was begun."""
    changed = changed_code(was, now)
    if changed:
        rank_zero_info(
            f"{', '.join(changed)}: the source has changed since the run was begun, so that its rounds are of two "
            f"programs; start a new run without --ckpt_path to have all rounds of this one"
        )
