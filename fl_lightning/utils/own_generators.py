"""Random generators that a user's objects keep, such as `self.rng = np.random.default_rng()` of a dataset."""

import pickle
import random
import sys
import sysconfig
from collections import UserDict, UserList, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import islice
from types import (
    BuiltinMethodType,
    CodeType,
    FunctionType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
    NoneType,
)
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fl_lightning.utils.attributes import instance_attributes
from fl_lightning.utils.keyed import keyed_seed
from fl_lightning.utils.packages import is_of_lightning

OwnGenerator = random.Random | np.random.Generator | np.random.RandomState | np.random.BitGenerator | torch.Generator
"""A random generator of Python, NumPy or torch."""

MAX_DEPTH = 16
"""Steps from an object to a generator that it keeps."""

MOST_OBJECTS = 2_000
"""Largest number of objects that are searched."""

MOST_ITEMS = 100
"""Largest number of items of a list or dict that are searched."""

OF_LIBRARIES = frozenset(
    {
        *sys.stdlib_module_names,
        "fl_lightning",
        "lightning",
        "lightning_fabric",
        "lightning_utilities",
        "numpy",
        "pandas",
        "PIL",
        "pytorch_lightning",
        "scipy",
        "sklearn",
        "torch",
        "torchmetrics",
        "torchvision",
    }
)
"""Packages whose classes and functions keep no generator of a user's in a variable of theirs."""

STDLIB = sysconfig.get_paths()["stdlib"]
"""Folder of Python's own modules."""

OF_TORCH = frozenset(vars(nn.Module()))
"""Attributes in which torch keeps the parts of a module."""

NO_HOLDERS = (
    str,
    bytes,
    int,
    float,
    complex,
    type,
    NoneType,
    ModuleType,
    Tensor,
    np.ndarray,
    np.generic,
    random.SystemRandom,
)
"""Types of values that keep nothing. What the operating system draws has no state, and nobody can seed it."""


def generators_in(*holders: Any) -> list[OwnGenerator]:
    """List the random generators that objects keep, in a fixed order, each once.

    Attributes of objects and of their classes, items of collections, arguments of a `partial`, variables and defaults
    of functions, and global variables that functions name are searched. No code of the objects runs. The generators
    that all code of a process shares, and Lightning's own objects, are left out.

    Args:
        holders: The objects.

    >>> generators_in({"a": [random.Random(0)], "b": random.random}, None)  # doctest: +ELLIPSIS
    [<random.Random object at 0x...>]
    """
    shared = shared_generators()
    found: list[OwnGenerator] = []
    searched: dict[int, Any] = {}
    waiting = deque((holder, 0) for holder in holders)
    while waiting and len(searched) < MOST_OBJECTS:
        value, depth = waiting.popleft()
        is_shared = any(value is generator for generator in shared)
        if is_shared or id(value) in searched or isinstance(value, NO_HOLDERS):
            continue
        searched[id(value)] = value
        if isinstance(value, OwnGenerator):
            found.append(value)
        elif depth < MAX_DEPTH:
            waiting.extend((part, depth + 1) for part in parts_of(value))
    return found


def generators_of(*objects: Any) -> list[OwnGenerator]:
    """List the random generators that objects and their methods use, without those of the modules within them.

    Args:
        objects: The objects, such as the parts of a module.
    """
    held: list[Any] = []
    for value in objects:
        held += [part for name, part in vars(value).items() if name not in OF_TORCH and may_hold(part)]
        held += class_members(type(value))
    return generators_in(*held)


def may_hold(value: Any) -> bool:
    """Return True for a generator, a function, a collection or an object of a user's class."""
    if isinstance(value, nn.Module) or is_of_lightning(value, ("Trainer", "LightningModule", "LightningDataModule")):
        return False
    if type(value) in (list, tuple):
        # Such as the sizes of a convolution: a net has thousands, which would use up the search.
        return not all(isinstance(item, NO_HOLDERS) for item in islice(value, MOST_ITEMS))
    if isinstance(value, OwnGenerator | dict | list | tuple | deque | set | frozenset | UserDict | UserList):
        return True
    module = type(value).__module__
    return not is_of_library(module) or (callable(value) and not module.startswith("fl_lightning."))


def shared_generators() -> list[Any]:
    """List the generators that all code of a process shares."""
    of_python = getattr(random.random, "__self__", None)
    of_numpy = getattr(np.random.rand, "__self__", None)
    return [of_python, of_numpy, torch.default_generator]


def parts_of(value: Any) -> Iterator[Any]:
    """Yield what an object keeps."""
    if isinstance(value, dict):
        yield from islice(value.values(), MOST_ITEMS)
        yield from islice(value, MOST_ITEMS)
    elif isinstance(value, list | tuple | deque | set | frozenset):
        yield from islice(value, MOST_ITEMS)
    if isinstance(value, partial):
        yield from (value.func, value.args, value.keywords)
    elif isinstance(value, FunctionType):
        yield from variables_of(value)
    elif isinstance(value, MethodType):
        yield from (value.__self__, value.__func__)
    elif isinstance(value, BuiltinMethodType):
        # Functions of Boost.Python only say that they are of this class.
        yield getattr(value, "__self__", None)
    elif isinstance(value, staticmethod | classmethod):
        yield value.__func__
    elif isinstance(value, property):
        yield value.fget
    elif not is_of_lightning(value, ("Trainer", "LightningModule")):
        yield from attributes_of(value)
        yield from class_members(type(value))


def attributes_of(value: Any) -> Iterator[Any]:
    """Yield the attributes of an object, also those in `__slots__`."""
    yield from instance_attributes(value).values()
    for base in type(value).__mro__:
        if is_of_library(base.__module__):
            continue
        for member in vars(base).values():
            if isinstance(member, MemberDescriptorType):
                # A slot may have no value yet.
                with suppress(AttributeError):
                    yield member.__get__(value)


def class_members(kind: type) -> Iterator[Any]:
    """Yield the attributes and methods of a user's class, which may name global variables."""
    for base in kind.__mro__:
        if not is_of_library(base.__module__):
            yield from vars(base).values()


def variables_of(function: FunctionType) -> Iterator[Any]:
    """Yield the variables of a function around it, its defaults, and the global variables that it names."""
    for cell in function.__closure__ or ():
        # The variable may have no value yet.
        with suppress(ValueError):
            yield cell.cell_contents
    yield function.__defaults__
    yield function.__kwdefaults__
    yield getattr(function, "__wrapped__", None)
    if is_of_library(function.__module__ or ""):
        return
    is_users = not is_installed(function.__module__)
    for name in names_in(function.__code__):
        variable = function.__globals__.get(name)
        is_foreign = isinstance(variable, FunctionType) and is_installed(variable.__module__)
        # What a library keeps for itself, such as a generator of names of files, is not the user's.
        if isinstance(variable, OwnGenerator) or (is_users and not is_foreign and may_hold(variable)):
            yield variable


def names_in(code: CodeType) -> Iterator[str]:
    """Yield the names of global variables and attributes in code, also in the functions within it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from names_in(constant)


def is_of_library(module: str) -> bool:
    """Return True for a module of `OF_LIBRARIES`. A user's own file may have the name of one of Python's."""
    package = module.partition(".")[0]
    if package not in sys.stdlib_module_names:
        return package in OF_LIBRARIES
    path = path_of(module)
    return not path or (path.startswith(STDLIB) and not is_installed(module))


def is_installed(module: str | None) -> bool:
    """Return True for the name of a module that lies among installed packages."""
    path = path_of(module or "")
    return "site-packages" in path or "dist-packages" in path


def path_of(module: str) -> str:
    """Return the path of the file of an imported module, empty without one."""
    return getattr(sys.modules.get(module), "__file__", None) or ""


def key_generators(generators: Sequence[OwnGenerator], seed: int) -> None:
    """Seed generators, each with a key of its own.

    Args:
        generators: The generators.
        seed: The seed.

    >>> own = [random.Random(0), np.random.default_rng(0)]
    >>> key_generators(own, 7)
    >>> first = [generator.random() for generator in own]
    >>> key_generators(own, 7)
    >>> first == [generator.random() for generator in own] and first[0] != first[1]
    True
    """
    for place, generator in enumerate(generators):
        key = keyed_seed(seed, f"generator/{place}")
        if isinstance(generator, torch.Generator):
            generator.manual_seed(key)
        elif isinstance(generator, np.random.Generator):
            key_bits(generator.bit_generator, key)
        elif isinstance(generator, np.random.BitGenerator):
            key_bits(generator, key)
        elif isinstance(generator, np.random.RandomState):
            generator.seed(key % 2**32)
        else:
            generator.seed(key)


def key_bits(bits: Any, key: int) -> None:
    """Seed a bit generator of NumPy.

    Args:
        bits: The bit generator.
        key: The seed.
    """
    bits.state = type(bits)(key).state


def states_of_generators(generators: Sequence[OwnGenerator]) -> list[bytes]:
    """Return the states of generators, to be compared."""
    states: list[bytes] = []
    for generator in generators:
        if isinstance(generator, torch.Generator):
            states.append(bytes(generator.get_state().cpu().numpy()))
        else:
            states.append(pickle.dumps(generator))
    return states


@contextmanager
def kept_states(generators: Sequence[OwnGenerator]) -> Iterator[None]:
    """Put generators back to their states after the block.

    Args:
        generators: The generators.

    >>> own = random.Random(0)
    >>> with kept_states([own]):
    ...     inside = own.random()
    >>> own.random() == inside
    True
    """
    states = [state_of(generator) for generator in generators]
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            set_state(generator, state)


def state_of(generator: OwnGenerator) -> Any:
    """Return the state of a generator, as its own library gives it."""
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, np.random.BitGenerator):
        return generator.state
    if isinstance(generator, random.Random):
        return generator.getstate()
    return generator.get_state()


def set_state(generator: OwnGenerator, state: Any) -> None:
    """Put a generator back to a state that `state_of` has returned."""
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, np.random.BitGenerator):
        generator.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.set_state(state)
