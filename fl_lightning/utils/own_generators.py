"""Random generators that a user's objects keep, such as `self.rng = np.random.default_rng()` of a dataset."""

import pickle
import random
from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice
from types import BuiltinMethodType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fl_lightning.utils.keyed import keyed_seed
from fl_lightning.utils.packages import is_of_lightning

OwnGenerator = random.Random | np.random.Generator | np.random.RandomState | torch.Generator
"""A random generator of Python, NumPy or torch."""

MAX_DEPTH = 6
"""Steps from an object to a generator that it keeps."""

MOST_OBJECTS = 2_000
"""Largest number of objects that are searched."""

MOST_ITEMS = 100
"""Largest number of items of a list or dict that are searched."""

OF_LIBRARIES = ("builtins", "torch", "torchvision", "numpy", "fl_lightning")
"""Packages whose classes keep no generator in a global variable."""

NO_HOLDERS = (str, bytes, int, float, complex, type, ModuleType, Tensor, np.ndarray, np.generic)
"""Types of values that keep nothing."""


def generators_in(*holders: Any) -> list[OwnGenerator]:
    """List the random generators that objects keep, in a fixed order, each once.

    Attributes, items of lists and dicts, arguments of a `partial`, variables of functions and global variables that
    functions name are searched. No code of the objects runs. The generators that all code of a process shares, and
    Lightning's own objects, are left out.

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
        if id(value) in searched or any(value is generator for generator in shared):
            continue
        searched[id(value)] = value
        if isinstance(value, OwnGenerator):
            found.append(value)
        elif depth < MAX_DEPTH:
            waiting.extend((part, depth + 1) for part in parts_of(value))
    return found


def generators_of(*objects: Any) -> list[OwnGenerator]:
    """List the random generators that objects keep as attributes, or in lists and dicts that are attributes.

    Args:
        objects: The objects, such as the parts of a module.
    """
    found: list[OwnGenerator] = []
    for value in objects:
        for attribute in vars(value).values():
            items = parts_of(attribute) if isinstance(attribute, dict | list | tuple) else (attribute,)
            found += [item for item in items if isinstance(item, OwnGenerator)]
    return generators_in(found)


def shared_generators() -> list[Any]:
    """List the generators that all code of a process shares."""
    of_python = getattr(random.random, "__self__", None)
    of_numpy = getattr(np.random.rand, "__self__", None)
    return [of_python, of_numpy, torch.default_generator]


def parts_of(value: Any) -> Iterator[Any]:
    """Yield what an object keeps."""
    if isinstance(value, NO_HOLDERS):
        return
    if isinstance(value, dict):
        yield from islice(value.values(), MOST_ITEMS)
    elif isinstance(value, list | tuple):
        yield from islice(value, MOST_ITEMS)
    elif isinstance(value, partial):
        yield from (value.func, value.args, value.keywords)
    elif isinstance(value, FunctionType):
        yield from variables_of(value)
    elif isinstance(value, MethodType):
        yield from (value.__self__, value.__func__)
    elif isinstance(value, BuiltinMethodType):
        yield value.__self__
    elif hasattr(value, "__dict__") and not is_of_lightning(value, ("Trainer", "LightningModule")):
        yield from vars(value).values()
        yield from methods_of(type(value))


def variables_of(function: FunctionType) -> Iterator[Any]:
    """Yield the variables of a function around it, and the generators among the global variables that it names."""
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:
            # The variable has no value yet.
            continue
    for name in function.__code__.co_names:
        variable = function.__globals__.get(name)
        if isinstance(variable, OwnGenerator):
            yield variable


def methods_of(kind: type) -> Iterator[FunctionType]:
    """Yield the methods of a class of a user's, which may name global variables."""
    for base in kind.__mro__:
        if base.__module__.partition(".")[0] not in OF_LIBRARIES:
            yield from (value for value in vars(base).values() if isinstance(value, FunctionType))


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
            bits: Any = generator.bit_generator
            bits.state = type(bits)(key).state
        elif isinstance(generator, np.random.RandomState):
            generator.seed(key % 2**32)
        else:
            generator.seed(key)


def states_of_generators(generators: Sequence[OwnGenerator]) -> list[bytes]:
    """Return the states of generators, to be compared."""
    states: list[bytes] = []
    for generator in generators:
        if isinstance(generator, torch.Generator):
            states.append(bytes(generator.get_state().cpu().numpy()))
        else:
            states.append(pickle.dumps(generator))
    return states
