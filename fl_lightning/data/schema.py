"""The schema of a federation's samples, which the training data decide: classes, columns and scale.

The training samples of `data.source` decide it once. Its test samples, the sources of further splits and the other
parties of a federation are read by it or refused. Proxy samples may be of other classes, with unknown labels.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from pytorch_lightning.utilities import rank_zero_info

from fl_lightning.data.splits import Split, TensorSplit, Transform
from fl_lightning.data.transforms import AsLong, Normalize, Scale

if TYPE_CHECKING:
    from fl_lightning.data.table_schema import TableSchema

SCALING = (Scale, Normalize, AsLong)
"""Transforms that every sample of a source gets, whatever its split."""

PROXY = "data.extra_splits.proxy"
"""The setting of the server's proxy samples."""

UNKNOWN_CLASS = -1
"""Label of a proxy sample whose class the training data do not have."""

SHOWN = 8
"""Most names in an error."""


class Schema(NamedTuple):
    """Holds what the training samples decide about all samples.

    Args:
        class_names: Names of the classes, in the order of their numbers. None: the source knows numbers only.
        num_classes: Number of classes. None: there are none, or they are not counted yet.
        targets: What the targets are. None: the samples are read by code of the user's.
        scale: Transforms of stored samples into inputs of the net, without augmentation. None: they are the user's.
        table: The columns of a table. None: the samples are not of a table.
    """

    class_names: tuple[str, ...] | None = None
    num_classes: int | None = None
    targets: Literal["classes", "numbers"] | None = None
    scale: tuple[Transform, ...] | None = None
    table: "TableSchema | None" = None

    def digests(self) -> dict[str, str]:
        """Return the digests of the parts that are known, by name, which the parties of a federation compare."""
        parts: dict[str, Any] = {
            "class_names": self.class_names,
            "targets": self.targets,
            "scale": None if self.scale is None else [described(transform) for transform in self.scale],
            "columns": None if self.table is None else self.table.features,
        }
        return {name: digest(value) for name, value in parts.items() if value is not None}


def digest(value: Any) -> str:
    """Return the first 16 characters of the SHA-256 of a plain value."""
    return sha256(repr(value).encode()).hexdigest()[:16]


def described(transform: Any) -> tuple[str, ...]:
    """Return the name and the numbers of a transform, alike whether a list or a tuple holds them.

    >>> described(Normalize([0.5], (0.5,)))
    ('Normalize', 'mean=(0.5,)', 'std=(0.5,)', 'divisor=(255.0,)')
    """
    numbers = []
    for field in fields(transform):
        value = getattr(transform, field.name)
        values = value if isinstance(value, Sequence) else [value]
        numbers.append(f"{field.name}={tuple(float(number) for number in values)}")
    return (type(transform).__name__, *numbers)


def scale_of(split: Split) -> tuple[Transform, ...] | None:
    """Return the transforms of a split that are no augmentation. None: the samples are read by code of the user's."""
    return scaling(split.transform) if isinstance(split, TensorSplit) else None


def scaling(transform: Any) -> tuple[Transform, ...]:
    """Return the parts of a transform that are no augmentation."""
    parts = getattr(transform, "transforms", (transform,))
    return tuple(part for part in parts if isinstance(part, SCALING))


def targets_of(split: Split) -> Literal["classes", "numbers"] | None:
    """Return what the targets of a split are. None: the samples are read by code of the user's."""
    if not isinstance(split, TensorSplit):
        return None
    return "numbers" if split.y.is_floating_point() else "classes"


def read_by(schema: Schema, own: Schema, split: Split, name: str) -> Split:
    """Return the samples of a further split with the class numbers of the training data.

    Classes are told by their names. Where the names are not known, the numbers are those of the training data. Proxy
    samples may be of other classes, because methods such as FedDF do not read their labels. These labels become
    `UNKNOWN_CLASS`.

    Args:
        schema: The schema of the training data.
        own: The schema of the further samples, as their source has read them.
        split: The further samples.
        name: The setting of their source, for errors.

    Raises:
        ValueError: A sample is of a class that the training data do not have.
    """
    if name == PROXY and isinstance(split, TensorSplit) and split.labels is not None:
        return known_classes(schema, own, split)
    if schema.class_names is not None and own.class_names is not None and schema.class_names != own.class_names:
        split = renumbered(split, names=own.class_names, wanted=schema.class_names, place=name)
    labels = split.labels if isinstance(split, TensorSplit) else None
    if labels is not None and schema.num_classes is not None:
        outside = labels[(labels < 0) | (labels >= schema.num_classes)]
        if len(outside):
            raise ValueError(
                f"{name} must have the classes 0 ... {schema.num_classes - 1} of the training data, got "
                f"{int(outside[0])}; number the classes as there"
            )
    return split


def known_classes(schema: Schema, own: Schema, split: TensorSplit) -> TensorSplit:
    """Return proxy samples with the class numbers of the training data, or `UNKNOWN_CLASS`.

    Args:
        schema: The schema of the training data.
        own: The schema of the proxy samples, as their source has read them.
        split: The proxy samples, which have labels.
    """
    labels = split.y
    if schema.class_names is not None and own.class_names is not None and schema.class_names != own.class_names:
        numbers = {name: number for number, name in enumerate(schema.class_names)}
        known = torch.tensor([numbers.get(name, UNKNOWN_CLASS) for name in own.class_names])
        labels = known.to(labels.device)[labels]
    elif schema.num_classes is not None:
        is_outside = (labels < 0) | (labels >= schema.num_classes)
        labels = labels.masked_fill(is_outside, UNKNOWN_CLASS)
    num_unknown = int((labels == UNKNOWN_CLASS).sum())
    if num_unknown:
        rank_zero_info(
            f"{PROXY}: {num_unknown} of {len(labels)} samples are of classes that the training data do not have; "
            f"their labels are unknown, which is right for methods that do not read them"
        )
    return TensorSplit(x=split.x, y=labels, transform=split.transform, columns=split.columns)


def has_unknown_classes(split: Split) -> bool:
    """Return True if a split has samples whose class the training data do not have."""
    if not isinstance(split, TensorSplit) or split.labels is None:
        return False
    return bool((split.labels == UNKNOWN_CLASS).any())


def renumbered(split: Split, *, names: Sequence[str], wanted: Sequence[str], place: str) -> Split:
    """Return samples with the numbers that their classes have elsewhere.

    Args:
        split: The samples.
        names: Names of their classes, in the order of their numbers.
        wanted: Names of the classes in the order of the numbers that are wanted.
        place: The setting of their source, for errors.

    Raises:
        ValueError: A class has no number there, or the samples are read by code of the user's.
    """
    if not isinstance(split, TensorSplit) or split.labels is None:
        raise ValueError(
            f"{place} must number its classes as the training data ({shown(wanted)}), got {shown(names)}; give its "
            f"dataset the same classes in the same order"
        )
    present = torch.unique(split.labels).tolist()
    foreign = [names[number] for number in present if names[number] not in wanted]
    if foreign:
        raise ValueError(
            f"{place} must have classes of the training data ({shown(wanted)}), got {foreign[0]!r}; leave its samples "
            f"out, or give samples without class names where nobody reads their classes"
        )
    numbers = torch.tensor([wanted.index(name) if name in wanted else -1 for name in names])
    return TensorSplit(
        x=split.x,
        y=numbers.to(split.y.device)[split.y],
        transform=split.transform,
        columns=split.columns,
    )


def shown(names: Sequence[str]) -> str:
    """Return names in a sentence, the first ones of many."""
    texts = [str(name) for name in names[:SHOWN]]
    if len(names) > SHOWN:
        texts.append("…")
    return ", ".join(texts)


def differing(known: Mapping[str, str], others: Mapping[str, str]) -> list[str]:
    """Return the names of the parts that both schemas know and that differ."""
    return [name for name in known if name in others and known[name] != others[name]]
