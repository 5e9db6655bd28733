"""The table of a run's confusion matrices."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fl_lightning.utils.files import write_table
from fl_lightning.utils.text import of_cell

CONFUSION = "confusion.csv"
"""Name of the table."""

COLUMNS = ("model", "round", "class", "predicted", "samples")
"""Columns of the table. `model` is `last` or `best`. `predicted` is empty for an answer that is none of the classes."""


def write_confusion(path: Path, matrices: Mapping[str, tuple[int, Tensor]], names: Sequence[str]) -> None:
    """Write a line for each class and each answer.

    Args:
        path: The file.
        matrices: Round and matrix (C, C + 1) of each model, as `confusion_counts` gives it.
        names: Names of the C classes.
    """
    lines: list[Sequence[Any]] = [COLUMNS]
    for model, (round_idx, counts) in matrices.items():
        for name, row in zip(names, counts.tolist(), strict=True):
            *of_classes, others = row
            for predicted, samples in zip(names, of_classes, strict=True):
                lines.append([model, round_idx, name, predicted, samples])
            if others:
                lines.append([model, round_idx, name, "", others])
    write_table(path, lines)


def read_matrices(cells: Mapping[str, Sequence[str]]) -> tuple[list[str], dict[str, tuple[int, Tensor]]]:
    """Read a table that `write_confusion` has written.

    Args:
        cells: The cells of the table by column.

    Returns:
        The names of the C classes, and round and matrix (C, C + 1) of each model.

    Raises:
        KeyError: A column is missing.
        ValueError: A round or a number of samples is none.
    """
    columns: dict[str, list[str]] = {}
    for column in COLUMNS:
        columns[column] = [of_cell(cell) for cell in cells[column]]
    names = list(dict.fromkeys(columns["class"]))
    places = {name: place for place, name in enumerate(names)}
    matrices: dict[str, tuple[int, Tensor]] = {}
    for model, round_idx, name, predicted, samples in zip(*columns.values(), strict=True):
        if model not in matrices:
            counts = torch.zeros(len(names), len(names) + 1, dtype=torch.int64)
            matrices[model] = (int(round_idx), counts)
        _, counts = matrices[model]
        # The last column counts the answers that are none of the classes.
        answer = places.get(predicted, len(names))
        counts[places[name], answer] = int(samples)
    return names, matrices
