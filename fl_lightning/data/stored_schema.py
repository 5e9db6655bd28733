"""The schema of the training samples as plain values, which a checkpoint holds, and the reading of these."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from fl_lightning.data.owners import described_transform, transform_of
from fl_lightning.data.schema import Inputs, Schema
from fl_lightning.data.table_schema import TableSchema
from fl_lightning.data.transforms import Compose
from fl_lightning.utils.files import read_saved
from fl_lightning.utils.plain import plain_value

SCHEMA = "schema"
"""Key of the schema in the federation's part of a checkpoint, and in `client.ckpt`. Older files have none."""


OWNERS = "owners"
"""Key of the names of the owners by client id, in the federation's part of a checkpoint. Older files have none."""

DATA_SHAPE = "data_shape"
"""Key of the number of classes and the input shape, in a checkpoint and in a state dict that crosses processes."""


def stored_schema(schema: Schema) -> dict[str, Any]:
    """Return a schema as plain values, from which `schema_of` makes it again.

    >>> schema_of(stored_schema(Schema(class_names=("a", "b"), num_classes=2))).class_names
    ('a', 'b')
    """
    content = schema._asdict()
    scale = schema.scale
    content["scale"] = None if scale is None else described_transform(Compose(*scale))
    content["table"] = None if schema.table is None else asdict(schema.table)
    content["inputs"] = None if schema.inputs is None else schema.inputs._asdict()
    return dict(plain_value(content))


class Told(NamedTuple):
    """Holds what a checkpoint tells of the samples of its run.

    Args:
        schema: The schema of the training samples.
        owners: The names of the owners by client id. Empty: no column names owners, or a client has the samples of
            several.
        num_classes: The number C of classes of the net. None: nothing tells.
        input_shape: The shape of a sample of the net. None: nothing tells.
        has_clients: Whether the checkpoint is one of a federation, and not of the model alone.
    """

    schema: Schema
    owners: tuple[str, ...] = ()
    num_classes: int | None = None
    input_shape: tuple[int, ...] | None = None
    has_clients: bool = True


def read_told(path: str | Path) -> Told:
    """Read what a checkpoint of a federation, or `client.ckpt`, tells of the samples of its run.

    Args:
        path: The file.

    Raises:
        ValueError: The file cannot be read, or holds no schema.
    """
    checkpoint = read_saved(path, mmap=True)
    content = checkpoint.get("federated", checkpoint)
    remedy = "name a checkpoint of the run, or its client.ckpt"
    if "federated" in checkpoint:
        remedy = f"continue the run for a round by fit --ckpt_path {path}, and name the new checkpoint"
    schema = schema_in(content, path, remedy)
    num_classes = schema.num_classes
    input_shape = None if schema.inputs is None else schema.inputs.shape
    shape = content.get(DATA_SHAPE)
    if shape is not None:
        num_classes, *sizes = shape
        input_shape = tuple(sizes)
    return Told(
        schema=schema,
        owners=tuple(str(name) for name in content.get(OWNERS) or ()),
        num_classes=num_classes,
        input_shape=input_shape,
        has_clients="federated" in checkpoint,
    )


def read_schema(path: str | Path) -> Schema:
    """Read the schema of the training samples from a checkpoint of a federation, or from `client.ckpt`.

    Args:
        path: The file.

    Raises:
        ValueError: The file cannot be read, or holds no schema.
    """
    return read_told(path).schema


def schema_in(checkpoint: Mapping[str, Any], path: str | Path, remedy: str) -> Schema:
    """Return the schema of the training samples in the federation's part of a checkpoint, or in `client.ckpt`.

    Args:
        checkpoint: The content.
        path: The file, for errors.
        remedy: What to do, for errors.

    Raises:
        ValueError: There is no schema.
    """
    content = checkpoint.get(SCHEMA)
    if not isinstance(content, Mapping):
        raise ValueError(
            f"{path} must hold the schema of the training samples, and has none, as files of older versions; {remedy}"
        )
    try:
        return schema_of(content)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path} must hold the schema of the training samples as this version writes it, and does not ({error}); "
            f"{remedy}"
        ) from error


def has_schema(path: str | Path) -> bool:
    """Return True if a checkpoint holds the schema of the training samples, as those of older versions do not."""
    checkpoint = read_saved(path, mmap=True)
    return isinstance(checkpoint.get("federated", checkpoint).get(SCHEMA), Mapping)


def schema_of(content: Mapping[str, Any]) -> Schema:
    """Make the schema of the plain values that `stored_schema` returned.

    Raises:
        KeyError: The values are of another version.
    """
    names = content["class_names"]
    table = content["table"]
    inputs = content["inputs"]
    return Schema(
        class_names=None if names is None else tuple(names),
        num_classes=content["num_classes"],
        counts_classes=content["counts_classes"],
        targets=content["targets"],
        scale=None if content["scale"] is None else tuple(transforms_of(content["scale"])),
        table=None if table is None else TableSchema.of_content(table),
        inputs=None if inputs is None else Inputs(**inputs),
    )


def transforms_of(parts: Any) -> list[Any]:
    """Make each of the transforms that `described_transform` described."""
    return [transform_of([part]) for part in parts]
