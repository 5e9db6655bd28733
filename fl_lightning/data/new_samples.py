"""New samples without targets, which are predicted by the schema of the training data."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from fl_lightning.data.schema import UNKNOWN_CLASS, Schema, check_alike
from fl_lightning.data.splits import TensorSplit
from fl_lightning.data.transforms import Compose


class NewSamples(NamedTuple):
    """Holds new samples, and what each of them is called.

    Args:
        split: The samples, in their order. Targets are unknown: -1 for a class, NaN for a number.
        names: The name of each sample: a number of a row, or the path of a file.
        column: What the names are, `row` or `file`.
        class_names: The names of the classes, in the order of their numbers. None: classes are numbers.
    """

    split: TensorSplit
    names: Sequence[int | str]
    column: str
    class_names: tuple[str, ...] | None

    @classmethod
    def of(cls, x: Tensor, *, names: Sequence[int | str], column: str, schema: Schema) -> "NewSamples":
        """Make new samples of values as files hold them, which are scaled as the training samples.

        Args:
            x: Samples (n, ...) as they are stored.
            names: The name of each sample.
            column: What the names are, `row` or `file`.
            schema: The schema of the training samples.

        Raises:
            ValueError: The samples do not reach the net as the training samples do.
        """
        scale = schema.scale
        split = TensorSplit(
            x=x,
            y=unknown_targets(schema, len(x)),
            transform=Compose(*scale) if scale else None,
            labelled=False,
        )
        check_alike(schema, split, "the samples of --new")
        return cls(split=split, names=names, column=column, class_names=schema.class_names)


def unknown_targets(schema: Schema, num_samples: int) -> Tensor:
    """Return targets that stand for unknown ones: -1 for a class, (n,) int64, and NaN for numbers.

    Args:
        schema: The schema of the training samples, whose targets have this shape.
        num_samples: The number n of samples.

    >>> unknown_targets(Schema(targets="classes"), 2).tolist(), unknown_targets(Schema(targets="numbers"), 1).tolist()
    ([-1, -1], [nan])
    """
    of_target = None if schema.inputs is None else schema.inputs.target_shape
    shape = (num_samples, *(of_target or ()))
    if schema.targets == "numbers":
        return torch.full(shape, torch.nan)
    return torch.full(shape, UNKNOWN_CLASS, dtype=torch.int64)


def check_new_path(path: Path) -> None:
    """Refuse new samples that are not there.

    Raises:
        FileNotFoundError: There is no such file or folder.
    """
    if not path.exists():
        raise FileNotFoundError(
            f"--new must be a file or a folder of new samples, got {path}, which does not exist; name one that does"
        )
