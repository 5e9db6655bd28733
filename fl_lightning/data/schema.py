"""The schema of a federation's samples, which the training data decide: classes, columns and scale.

The training samples of `data.source` decide it once. Its test samples, the sources of further splits and the other
parties of a federation are read by it or refused. Proxy samples may be of other classes, with unknown labels.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor

from fl_lightning.data.splits import Split, TensorSplit, Transform
from fl_lightning.data.transforms import AsLong, Normalize, Scale
from fl_lightning.utils.keyed import keyed_globals

if TYPE_CHECKING:
    from fl_lightning.data.table_schema import TableSchema

SCALING = (Scale, Normalize, AsLong)
"""Transforms that every sample of a source gets, whatever its split."""

UNKNOWN_CLASS = -1
"""Label of a proxy sample whose class the training data do not have."""

SHOWN = 8
"""Most names in an error."""

WHITE = 255.0
"""The white of a picture of 8 bits."""

LARGEST_SCALED = 16
"""Largest amount of an input that was scaled or normalized. Stored values of pictures are larger."""

FEWEST_PIXELS = 16
"""Fewest values of a sample whose stored values are told from scaled ones."""

Level = Literal["stored", "scaled"]
"""Whether the inputs of a net are whole numbers as files hold them, such as 0 ... 255, or were scaled."""


class Inputs(NamedTuple):
    """Holds how samples reach the net.

    Args:
        dtype: Type of the values, such as `float32`. All whole numbers are `whole`.
        shape: Shape of a sample. None: samples may differ in shape.
        num_dims: Number of dimensions of a sample.
        level: Whether the values are stored or scaled ones. None: it cannot be told.
        target_shape: Shape of a target. None: it is not known.
    """

    dtype: str
    shape: tuple[int, ...] | None
    num_dims: int
    level: Level | None
    target_shape: tuple[int, ...] | None

    @property
    def form(self) -> str:
        """The shape of a sample in a sentence."""
        return f"{self.num_dims} dimensions" if self.shape is None else str(self.shape)


class Schema(NamedTuple):
    """Holds what the training samples decide about all samples.

    Args:
        class_names: Names of the classes, in the order of their numbers. None: the source knows numbers only.
        num_classes: Number of classes. None: there are none, or they are not counted yet.
        counts_classes: Whether this number is the largest label + 1 of the samples at hand, and nobody has stated it.
        targets: What the targets are. None: the samples are read by code of the user's.
        scale: Transforms of stored samples into inputs of the net, without augmentation. None: they are the user's.
        table: The columns of a table. None: the samples are not of a table.
        inputs: How samples reach the net. None: that is not known.
    """

    class_names: tuple[str, ...] | None = None
    num_classes: int | None = None
    counts_classes: bool = False
    targets: Literal["classes", "numbers"] | None = None
    scale: tuple[Transform, ...] | None = None
    table: "TableSchema | None" = None
    inputs: Inputs | None = None

    def digests(self) -> dict[str, str]:
        """Return the digests of the parts that are known, by name, which the parties of a federation compare."""
        parts: dict[str, Any] = {
            "class_names": self.class_names,
            "targets": self.targets,
            "scale": None if self.scale is None else [described(transform) for transform in self.scale],
            "columns": None if self.table is None else self.table.features,
            "num_classes": None if self.counts_classes else self.num_classes,
        }
        if self.inputs is not None and self.table is None:
            parts["dtype"] = self.inputs.dtype
            parts["shape"] = self.inputs.shape
            parts["level"] = self.inputs.level
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
    """Return what the targets of a split are. None: that is not known."""
    sample = probed(split)
    targets = None if sample is None else sample[1]
    if targets is None:
        return None
    return "numbers" if targets.is_floating_point() else "classes"


def inputs_of(split: Split) -> Inputs | None:
    """Return how the samples of a split reach the net. None: that is not known."""
    sample = probed(split)
    if sample is None:
        return None
    x, y = sample
    return Inputs(
        dtype=str(x.dtype).removeprefix("torch.") if x.is_floating_point() else "whole",
        shape=tuple(x.shape[1:]) if isinstance(split, TensorSplit) else None,
        num_dims=x.ndim - 1,
        level=level_of(x),
        target_shape=None if y is None else tuple(y.shape[1:]),
    )


def probed(split: Split) -> tuple[Tensor, Tensor | None] | None:
    """Return a few samples and their targets. None: they are no tensors. No target: there is none, or no tensor."""
    with keyed_globals(0, "probe"):  # a transform of the user's may draw
        batch = split.probe()
    if not isinstance(batch, list | tuple) or not batch or not isinstance(batch[0], Tensor):
        return None
    has_targets = len(batch) > 1 and isinstance(batch[1], Tensor)
    return batch[0], batch[1] if has_targets else None


def level_of(x: Tensor) -> Level | None:
    """Tell stored values from scaled ones.

    Args:
        x: Samples (n, ...).

    >>> level_of(torch.full((1, 28, 28), 255.0)), level_of(torch.full((1, 28, 28), 0.5)), level_of(torch.zeros(1, 28))
    ('stored', 'scaled', None)
    """
    if not x.is_floating_point() or x[0].numel() < FEWEST_PIXELS or not x.isfinite().all():
        return None
    is_whole = bool((x == x.round()).all())
    largest = float(x.abs().max())
    if is_whole and largest > LARGEST_SCALED and float(x.min()) >= 0:
        return "stored"
    return "scaled" if not is_whole and largest <= LARGEST_SCALED else None


def check_alike(schema: Schema, split: Split, name: str) -> None:
    """Refuse samples that do not reach the net as the training samples do.

    Args:
        schema: The schema of the training data.
        split: The further samples.
        name: What they are, for errors.

    Raises:
        ValueError: Names what differs: the type, the shape, the scale or the kind of the targets.
    """
    known = schema.inputs
    found = inputs_of(split)
    if known is None or found is None:
        return
    targets = targets_of(split)
    if schema.targets is not None and targets is not None and schema.targets != targets:
        raise ValueError(
            f"{name} must have {schema.targets} as targets, as the training data, got {targets}; convert their targets"
        )
    if known.dtype != found.dtype:
        raise ValueError(
            f"{name} must hold {typed(known.dtype)}, as the training data, got {typed(found.dtype)}; convert them"
        )
    if known.num_dims != found.num_dims or (known.shape and found.shape and known.shape != found.shape):
        raise ValueError(
            f"{name} must have the shape of data.source's ({known.form}), got {found.form}; resize or convert them"
        )
    if known.level is not None and found.level is not None and known.level != found.level:
        raise ValueError(
            f"{name} must have the scale of the training samples, which are {known.level} values, got {found.level} "
            f"ones; scale both alike, such as to [0, 1]"
        )
    if schema.targets is not None and known.target_shape != found.target_shape and found.target_shape is not None:
        raise ValueError(
            f"{name} must have targets of the shape of the training data's, {known.target_shape}, got "
            f"{found.target_shape}; reshape them"
        )


def typed(dtype: str) -> str:
    """Return the type of values in a sentence."""
    return "whole numbers" if dtype == "whole" else dtype


def read_by(schema: Schema, own: Schema, split: Split, name: str, *, takes_other_classes: bool = False) -> Split:
    """Return the samples of a further split with the class numbers of the training data.

    Classes are told by their names. Where the names are not known, the numbers are those of the training data. Samples
    that may be of other classes, because methods such as FedDF do not read their labels, get `UNKNOWN_CLASS` for these.

    Args:
        schema: The schema of the training data.
        own: The schema of the further samples, as their source has read them.
        split: The further samples.
        name: The setting of their source, for errors.
        takes_other_classes: Whether samples may be of classes that the training data do not have.

    Raises:
        ValueError: A sample is of a class that the training data do not have, or does not reach the net as theirs.
    """
    check_alike(schema, split, name)
    check_scale(schema, own, name)
    labels = split.labels
    if labels is None or not len(labels):
        return split
    wanted = schema.class_names or ()
    names = own.class_names or ()
    renamed = bool(wanted) and bool(names) and wanted != names
    if renamed:
        numbers = {class_name: number for number, class_name in enumerate(wanted)}
        known = torch.tensor([numbers.get(class_name, UNKNOWN_CLASS) for class_name in names])
        read = known[labels]
    elif schema.num_classes is not None:
        read = labels.masked_fill((labels < 0) | (labels >= schema.num_classes), UNKNOWN_CLASS)
    else:
        return split
    is_unknown = read == UNKNOWN_CLASS
    if is_unknown.any() and not takes_other_classes:
        first = int(labels[is_unknown][0])
        if renamed:
            raise ValueError(
                f"{name} must have classes of the training data ({shown(wanted)}), got "
                f"{names[first]!r}; leave its samples out, or give samples without class names where "
                f"nobody reads their classes"
            )
        raise ValueError(
            f"{name} must have the classes 0 ... {(schema.num_classes or 0) - 1} of the training data, got {first}; "
            f"number the classes as there"
        )
    return split if torch.equal(read, labels) else split.relabelled(read)


def check_scale(schema: Schema, own: Schema, name: str) -> None:
    """Refuse samples that are normalized by other numbers than the training samples, or are not normalized.

    Raises:
        ValueError: Names both.
    """
    if not schema.scale or not own.scale:
        return
    if normalized_by(schema.scale) != normalized_by(own.scale):
        raise ValueError(
            f"{name} must be normalized as the training data ({shown(schema.scale)}), got {shown(own.scale)}; give "
            f"both the same transform"
        )


def normalized_by(scale: Sequence[Transform]) -> list[tuple[str, ...]]:
    """Return the means and deviations of normalizations, whatever the stored value is that counts as 1.

    >>> normalized_by([Normalize([0.5], [0.5])]), normalized_by([Normalize([0.0], [1.0])]), normalized_by([Scale()])
    ([('Normalize', 'mean=(0.5,)', 'std=(0.5,)', 'divisor=(1.0,)')], [], [])
    """
    found = []
    for transform in scale:
        is_identity = isinstance(transform, Normalize) and not any(transform.mean) and set(transform.std) == {1}
        if isinstance(transform, Normalize) and not is_identity:
            found.append(described(replace(transform, divisor=1.0)))
    return found


def pixel_scale(leader: Schema | None) -> Normalize | None:
    """Return how pictures of 8 bits are normalized as the training data. None: these tell nothing of pictures.

    Args:
        leader: The schema of the training data. None: the pictures themselves decide.
    """
    scale = None if leader is None else leader.scale
    if not scale or len(scale) != 1:
        return None
    transform = scale[0]
    if isinstance(transform, Normalize):
        return transform if transform.divisor == WHITE else replace(transform, divisor=WHITE)
    return Normalize((0.0,), (1.0,)) if isinstance(transform, Scale) else None


def has_unknown_classes(split: Split) -> bool:
    """Return True if a split has samples whose class the training data do not have."""
    return split.labels is not None and bool((split.labels == UNKNOWN_CLASS).any())


def shown(names: Sequence[Any]) -> str:
    """Return names in a sentence, the first ones of many."""
    texts = [str(name) for name in names[:SHOWN]]
    if len(names) > SHOWN:
        texts.append("…")
    return ", ".join(texts)


def differing(known: Mapping[str, str], others: Mapping[str, str]) -> list[str]:
    """Return the names of the parts that both schemas know and that differ."""
    return [name for name in known if name in others and known[name] != others[name]]
