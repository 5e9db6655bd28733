"""Samples of a user's dataset, seen through the transforms of another dataset."""

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from enum import Enum
from types import MethodType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from fl_lightning.utils.keyed import keyed_globals

TRANSFORMS = ("transform", "transforms", "target_transform", "augment", "augmentation")
"""Usual names under which a dataset keeps how its samples are transformed, those of torchvision first."""

PACKAGES = ("torch", "torchvision", "torchaudio", "torchtext", "datasets", "medmnist")
"""Packages whose datasets transform samples only by what they were given."""

PLAIN = (TensorDataset, Subset, ConcatDataset)
"""Classes of datasets that transform nothing."""

ARRAYS = ("builtins", "numpy", "torch", "pandas")
"""Packages whose lists, arrays and tables may be kept as `dataset`, and are none."""

PHASES = ("train", "training", "fit", "val", "valid", "validation", "eval", "test", "testing")
"""Values of an attribute that may tell a dataset to augment its samples."""

NUM_READ = 3
"""Samples that are read to find out whether reading them is random."""

NUM_READINGS = 6
"""How often each of these samples is read: a flip with a probability of 0.5 is missed once in 30,000 datasets."""


class Seen(NamedTuple):
    """The samples of a dataset as those of another dataset are seen, and why that may not be so."""

    dataset: Any
    doubts: list[str]


def may_transform(dataset: Any) -> bool:
    """Tell whether a dataset may transform its samples: all may, except tensors and parts of them."""
    return any(type(node) not in PLAIN for node in nodes_of(dataset))


def nodes_of(dataset: Any) -> list[Any]:
    """List a dataset and all datasets that it holds, in the order in which a sample leaves them."""
    nodes = [dataset]
    for inner in held_by(dataset).values():
        parts = inner if isinstance(inner, list) else [inner]
        for part in parts:
            nodes += nodes_of(part)
    return nodes


def held_by(dataset: Any) -> dict[str, Any]:
    """List what a dataset keeps of datasets: one, as `Subset` does, or a list of them, as `ConcatDataset` does.

    Returns:
        The dataset, or the list of datasets, by the name of the attribute.
    """
    held: dict[str, Any] = {}
    for name, value in attributes_of(dataset).items():
        if isinstance(value, list | tuple) and value and all(isinstance(part, Dataset) for part in value):
            held[name] = list(value)
        elif value is not dataset and is_dataset(name, value):
            held[name] = value
    return held


def is_dataset(name: str, value: Any) -> bool:
    """Tell whether an attribute of a dataset is another dataset, which need not be one of torch's."""
    if isinstance(value, Dataset):
        return True
    has_items = hasattr(value, "__getitem__") and hasattr(value, "__len__")
    return name == "dataset" and has_items and type(value).__module__.split(".")[0] not in ARRAYS


def attributes_of(dataset: Any) -> dict[str, Any]:
    """List the attributes that a dataset keeps itself."""
    return dict(getattr(dataset, "__dict__", {}))


def seen_as(dataset: Any, other: Any) -> Seen:
    """See the samples of a dataset through the transforms of another one, in a copy.

    Looks through `Subset`, `ConcatDataset` and datasets that hold another dataset. What a dataset of the other's class
    can be called with, or what is kept under one of the names in `TRANSFORMS`, is taken from that.

    Args:
        dataset: The samples.
        other: The dataset whose transforms are wanted.
    """
    doubts: list[str] = []
    return Seen(_seen(dataset, nodes_of(other), doubts), list(dict.fromkeys(doubts)))


def _seen(dataset: Any, others: Sequence[Any], doubts: list[str]) -> Any:
    """See a dataset, and all that it holds, as these others are seen, and note what cannot be decided."""
    changes: dict[str, Any] = {}
    for name, inner in held_by(dataset).items():
        if isinstance(inner, list):
            changes[name] = [_seen(part, others, doubts) for part in inner]
        else:
            changes[name] = _seen(inner, others, doubts)
    if type(dataset) not in PLAIN:
        changes |= _transforms_for(dataset, others, doubts)
    return with_attributes(dataset, changes) if changes else dataset


def _transforms_for(dataset: Any, others: Sequence[Any], doubts: list[str]) -> dict[str, Any]:
    """Choose the transforms of the others for a dataset, by attribute, and note what cannot be decided."""
    kind = type(dataset).__name__
    alike = [other for other in others if read_alike(dataset, other)]
    if alike:
        changes = _transforms_of(dataset, alike[0], doubts)
        if not is_of_package(dataset):
            doubts += [f"{kind}.{name} differs" for name in differing_flags(dataset, alike[0], changes)]
        return changes
    changes = {}
    for name, value in attributes_of(dataset).items():
        having = [other for other in others if hasattr(other, name)]
        if name in TRANSFORMS and having:
            changes[name] = getattr(having[0], name)
        elif is_transform(name, value):
            doubts.append(f"they have no {name} as {kind} has")
    if not is_of_package(dataset):
        doubts.append(f"{kind} reads samples by code of its own")
    return changes


def _transforms_of(dataset: Any, other: Any, doubts: list[str]) -> dict[str, Any]:
    """Choose the transforms of another dataset that is read by the same code, by attribute."""
    own = attributes_of(dataset)
    others = attributes_of(other)
    changes = {}
    for name in {**own, **others}:
        value = others.get(name)
        before = own.get(name)
        if value is before or not (is_transform(name, value) or is_transform(name, before)):
            continue
        if isinstance(value, MethodType) and value.__self__ is other:
            value = MethodType(value.__func__, dataset)  # of this dataset's samples
        if name not in others:
            doubts.append(f"they have no {name} as {type(dataset).__name__} has")
        elif value is None or name in TRANSFORMS or is_transform(name, value):
            changes[name] = value
        else:
            doubts.append(f"{type(dataset).__name__}.{name} differs")
    if format_of(dataset) != format_of(other):
        doubts.append(f"the format of {type(dataset).__name__} differs")
    return changes


def format_of(dataset: Any) -> Any:
    """Return the type of values that a dataset of Hugging Face gives. None: it says none."""
    given = getattr(dataset, "format", None)
    return given.get("type") if isinstance(given, Mapping) else None


def is_transform(name: str, value: Any) -> bool:
    """Tell whether an attribute of a dataset may transform samples.

    >>> is_transform("tfm", abs), is_transform("steps", [abs]), is_transform("root", "data"), is_transform("kind", int)
    (True, True, False, False)
    """
    if value is None or isinstance(value, Dataset):
        return False
    if name in TRANSFORMS:
        return True
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return bool(value) and all(is_transform(name, part) for part in value)
    return callable(value) and not isinstance(value, type)


def read_alike(dataset: Any, other: Any) -> bool:
    """Tell whether two datasets read a sample by the same code."""
    return type(dataset).__getitem__ is getattr(type(other), "__getitem__", None)


def is_of_package(dataset: Any) -> bool:
    """Tell whether a package wrote the code of a dataset."""
    return type(dataset).__module__.split(".")[0] in PACKAGES


def differing_flags(dataset: Any, other: Any, changes: Mapping[str, Any]) -> list[str]:
    """List the attributes, such as `train`, by whose values the other dataset reads samples otherwise.

    Args:
        dataset: The samples.
        other: The other dataset, of the same class.
        changes: What the other's transforms change in the dataset.
    """
    others = attributes_of(other)
    found = []
    for name, value in attributes_of(dataset).items():
        theirs = others.get(name)
        if is_flag(value) and is_flag(theirs) and theirs != value:
            plain = with_attributes(dataset, changes)
            flagged = with_attributes(dataset, {**changes, name: theirs})
            if not read_the_same(plain, flagged):
                found.append(name)
    return found


def is_flag(value: Any) -> bool:
    """Tell whether a value may say how samples are read."""
    return isinstance(value, bool | int | float | Enum) or (isinstance(value, str) and value.lower() in PHASES)


def with_attributes(dataset: Any, values: Mapping[str, Any]) -> Any:
    """Copy a dataset, and give the copy these attributes, with methods that are those of the copy."""
    changed = copy(dataset)
    for name, value in {**attributes_of(dataset), **values}.items():
        if isinstance(value, MethodType) and value.__self__ is dataset:
            setattr(changed, name, MethodType(value.__func__, changed))
        elif name in values:
            setattr(changed, name, value)
    return changed


def read_the_same(dataset: Any, other: Any) -> bool:
    """Tell whether two datasets give the same samples at some positions, where both may draw the same."""
    for index in positions(len(dataset)):
        try:
            with keyed_globals(0, "data/look"):
                item = dataset[index]
            with keyed_globals(0, "data/look"):
                another = other[index]
        except Exception:
            return False
        if not same_values(item, another):
            return False
    return True


def is_read_randomly(read: Callable[[Tensor], Any], num_samples: int) -> bool:
    """Tell whether samples differ from one reading to the next.

    Args:
        read: Reads the samples at int64 positions (n,).
        num_samples: The number of samples.
    """
    chosen = torch.tensor(positions(num_samples), dtype=torch.int64)
    first: Any = None
    for number in range(NUM_READINGS if len(chosen) else 0):
        with keyed_globals(number, "data/look"):
            batch = read(chosen)
        if number == 0:
            first = batch
        elif not same_values(first, batch):
            return True
    return False


def positions(num_samples: int) -> list[int]:
    """Choose at most `NUM_READ` positions, spread over the samples.

    >>> positions(10), positions(2)
    ([0, 4, 9], [0, 1])
    """
    chosen = np.linspace(0, num_samples - 1, min(NUM_READ, num_samples)).astype(int)
    return [int(index) for index in chosen]


def same_values(first: Any, second: Any) -> bool:
    """Tell whether two items of a dataset have the same values, where they can be compared.

    >>> same_values((torch.ones(2), {"y": 1}), (torch.ones(2), {"y": 2}))
    False
    """
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        first = first.detach().cpu().numpy()
        second = second.detach().cpu().numpy()
    if isinstance(first, np.ndarray):
        return isinstance(second, np.ndarray) and array_equal(first, second)
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        return first.keys() == second.keys() and all(same_values(first[key], second[key]) for key in first)
    if isinstance(first, list | tuple) and isinstance(second, list | tuple):
        return len(first) == len(second) and all(map(same_values, first, second))
    compared: Any = type(first).__eq__
    if compared is object.__eq__:
        return same_values(attributes_of(first), attributes_of(second))
    return bool(first == second)


def array_equal(first: np.ndarray[Any, Any], second: np.ndarray[Any, Any]) -> bool:
    """Tell whether two arrays are equal, where NaN equals NaN."""
    return np.array_equal(first, second, equal_nan=first.dtype.kind in "fc" and second.dtype.kind in "fc")
