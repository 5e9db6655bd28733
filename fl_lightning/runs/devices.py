"""The table of the clients' devices, which `data.devices.file` reads."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from fl_lightning.data.devices import NAMES, DeviceTable
from fl_lightning.utils.files import write_table

DEVICES = "devices.csv"
"""Name of the table."""


def columns_of(table: DeviceTable) -> dict[str, list[float]]:
    """Return the values of the N clients by setting, without bandwidths that take no time.

    Args:
        table: The devices of the clients.
    """
    columns: dict[str, list[float]] = {}
    for name in NAMES:
        values: np.ndarray = getattr(table, name)
        if np.isfinite(values).all():
            columns[name] = values.tolist()
    return columns


def differing_columns(columns: Mapping[str, Sequence[float]]) -> dict[str, Sequence[float]]:
    """Return the settings that are not the same for all clients.

    Args:
        columns: Values of the N clients by setting.
    """
    return {name: values for name, values in columns.items() if len(set(values)) > 1}


def write_devices(path: Path, columns: Mapping[str, Sequence[float]]) -> None:
    """Write a line for each client in the order of the ids, and a first line with the names of the settings.

    Args:
        path: The file.
        columns: Values of the N clients by setting.
    """
    lines = zip(*columns.values(), strict=True)
    write_table(path, [columns, *lines])
