"""A model that takes samples as files hold them, because it contains the scaling of the training samples."""

from typing import Any

import torch
from torch import Tensor, nn

from fl_lightning.data.schema import Schema
from fl_lightning.data.splits import Transform
from fl_lightning.data.table_schema import TableSchema
from fl_lightning.data.transforms import Normalize, Scale


class ScaledModel(nn.Module):
    """Scales stored samples as the training samples were scaled, and gives them to a model.

    It consists of tensors and of the model, so that TorchScript, `torch.export` and ONNX contain the scaling.

    Args:
        model: The model, called with inputs as the net reads them.
        schema: The schema of the training samples, which `source.schema` and a checkpoint have.

    Attributes:
        expects: What the module expects, in words.
        columns: The columns of its inputs if the samples are rows of a table: the name of a column of numbers, and
            `COLUMN=WORD` for each word of a column of words, 1 where a row has the word and else 0. Empty: no table.

    Raises:
        ValueError: The scaling is code of the user's, or is not of numbers.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, model: nn.Module, schema: Schema) -> None:
        super().__init__()
        self.model = model
        self.columns = columns_of(schema)
        mean, std = moments_of(schema)
        self.register_buffer("mean", mean)
        self.register_buffer("std", std)
        self.expects = expectation(schema, self.columns)

    def forward(self, x: Tensor) -> Any:
        """Return the outputs of the model.

        Args:
            x: Stored samples (n, ...). Rows of a table are (n, D), in the order of `columns`.
        """
        scaled = (x.to(self.mean.dtype) - self.mean) / self.std
        return self.model(scaled.to(torch.float32))


def columns_of(schema: Schema) -> list[str]:
    """Return the names of the inputs of a net that reads rows of a table. Empty: it reads others."""
    columns: list[str] = []
    if schema.table is None:
        return columns
    for feature in schema.table.features:
        if feature.words is None:
            columns.append(feature.name)
        else:
            columns += [f"{feature.name}={word}" for word in feature.words]
    return columns


def moments_of(schema: Schema) -> tuple[Tensor, Tensor]:
    """Return what is subtracted from a stored sample, and by what the rest is divided.

    Both are (D,) float64 for rows of a table, whose numbers may be large, and (C, 1, ...) float32 for other samples.

    Raises:
        ValueError: The scaling is code of the user's, or is not of numbers.
    """
    if schema.table is not None:
        return moments_of_columns(schema.table)
    mean = torch.zeros(1)
    std = torch.ones(1)
    if schema.scale is None:
        raise ValueError(not_scaled_by(None))
    for part in schema.scale:
        offset, factor = moments_of_transform(part)
        # The transform acts on (x - mean) / std, which the ones before have left.
        mean = mean + std * offset
        std = std * factor
    num_dims = 1 if schema.inputs is None else schema.inputs.num_dims
    shape = (-1, *[1] * (num_dims - 1))
    return mean.view(shape), std.view(shape)


def moments_of_columns(table: TableSchema) -> tuple[Tensor, Tensor]:
    """Return the mean and the standard deviation of each input of a table, (D,) float64. Words stay as they are."""
    means: list[float] = []
    deviations: list[float] = []
    for feature in table.features:
        if feature.words is None:
            means.append(feature.mean)
            deviations.append(feature.std)
        else:
            means += [0.0] * feature.width
            deviations += [1.0] * feature.width
    return torch.tensor(means, dtype=torch.float64), torch.tensor(deviations, dtype=torch.float64)


def moments_of_transform(part: Transform) -> tuple[Tensor, Tensor]:
    """Return what a transform subtracts from its input, and by what it divides the rest, (C,) or (1,) float32.

    Raises:
        ValueError: The transform is another one than Scale or Normalize.
    """
    if isinstance(part, Normalize):
        return torch.tensor(part.mean) * part.divisor, torch.tensor(part.std) * part.divisor
    if isinstance(part, Scale):
        return torch.zeros(1), torch.tensor([part.divisor], dtype=torch.float32)
    raise ValueError(not_scaled_by(part))


def not_scaled_by(part: Transform | None) -> str:
    """Return the sentence for samples that something else scales. None: code of the user's does."""
    given = "code of your own" if part is None else str(part)
    return (
        f"ScaledModel needs samples that Scale or Normalize scales, got {given}; export the model alone, and scale its "
        f"inputs"
    )


def expectation(schema: Schema, columns: list[str]) -> str:
    """Return in words what a model with scaling expects."""
    if columns:
        return (
            f"rows (n, {len(columns)}) of {', '.join(columns)}; numbers as files hold them, and 1 for the word that a "
            f"row has, else 0"
        )
    shape = None if schema.inputs is None else schema.inputs.shape
    sizes = "..." if shape is None else ", ".join(str(size) for size in shape)
    return f"samples (n, {sizes}) as they are stored"
