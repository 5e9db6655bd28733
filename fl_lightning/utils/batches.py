"""The number of samples in a batch, and its single samples."""

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from lightning_fabric.utilities.exceptions import MisconfigurationException
from pytorch_lightning.utilities.data import extract_batch_size
from torch import Tensor


def batch_length(batch: Any) -> int:
    """Return the number of samples in a batch, as Lightning counts them. A batch in which it finds none counts as one.

    >>> batch_length({"text": ["a", "b"], "x": torch.zeros(2, 3)}), batch_length([{"x": torch.zeros(5)}])
    (2, 5)
    """
    length = known_length(batch)
    return 1 if length is None else length


def known_length(batch: Any) -> int | None:
    """Return the number of samples in a batch, or None if Lightning finds none.

    >>> known_length([torch.zeros(2, 3)]), known_length(object())
    (2, None)
    """
    try:
        return extract_batch_size(batch)
    except MisconfigurationException:
        return None


def joined_rows(parts: Sequence[Tensor], *, num_samples: int, split: str, reader: str) -> Tensor:
    """Return the rows of all batches of a split as one tensor, (n, ...), for code that finds a sample by its position.

    Args:
        parts: The rows of each batch, (B, ...).
        num_samples: Number n of samples of the split.
        split: Name of the split.
        reader: Name of the class that reads the rows.

    Raises:
        ValueError: A sample has no row, because its batch was skipped.
    """
    num_rows = sum(len(rows) for rows in parts)
    if num_rows != num_samples:
        raise ValueError(
            f"{reader} needs a row for each of the {num_samples} {split} samples, got {num_rows}; return a batch of "
            f"all samples in collate_fn and transfer hooks (None skips a batch)"
        )
    return torch.cat([*parts])


def tensors_of(value: Any) -> list[Tensor]:
    """List the tensors in a batch with a dimension of samples, in a fixed order."""
    if isinstance(value, Tensor):
        return [value] if value.ndim else []
    found: list[Tensor] = []
    for part in parts_of(value).values():
        found += tensors_of(part)
    return found


def has_texts(value: Any) -> bool:
    """Return True if a batch holds a list of texts, one for each sample."""
    return is_texts(value) or any(has_texts(part) for part in parts_of(value).values())


def is_texts(value: Any) -> bool:
    """Return True for a list or tuple of texts."""
    return type(value) in (list, tuple) and bool(value) and all(isinstance(item, str) for item in value)


def some_samples(value: Any, samples: slice) -> Any:
    """Return a batch of some samples of a batch. Numbers and single texts are the same.

    >>> some_samples({"x": torch.arange(3), "text": ["a", "b", "c"], "n": 3}, slice(1, 2))
    {'x': tensor([1]), 'text': ['b'], 'n': 3}
    """
    if isinstance(value, Tensor):
        return value[samples] if value.ndim else value
    if is_texts(value):
        return value[samples]
    return with_parts(value, {key: some_samples(part, samples) for key, part in parts_of(value).items()})


def parts_of(value: Any) -> Mapping[Any, Any]:
    """Return the parts of a mapping, a list, a tuple or a dataclass. Other values have none."""
    if isinstance(value, Mapping):
        return value
    if isinstance(value, list | tuple):
        return dict(enumerate(value))
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in fields(value) if field.init}
    return {}


def with_parts(value: Any, parts: Mapping[Any, Any]) -> Any:
    """Return a value like another one, with other parts.

    Args:
        value: The other value.
        parts: The parts, by the keys that `parts_of` gives.
    """
    if isinstance(value, Mapping):
        return dict(parts)
    if isinstance(value, tuple) and hasattr(value, "_replace"):
        return type(value)._make(parts.values())  # type: ignore[attr-defined]
    if isinstance(value, list | tuple):
        return type(value)(parts.values())
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **parts)
    return value
