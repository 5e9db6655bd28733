"""`fl-lightning partition`: draw and describe the clients of a run, their samples and devices, without training."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fl_lightning.cli.console import quiet_lightning
from fl_lightning.cli.parser_only import parts_of
from fl_lightning.cli.split import taken
from fl_lightning.data import FederatedDataModule
from fl_lightning.engines.inspection import class_names
from fl_lightning.functional.classes import distance_from_uniform, effective_classes
from fl_lightning.reports.figures import plot_bubbles, plot_sizes, save
from fl_lightning.reports.time_figures import plot_devices
from fl_lightning.runs.devices import DEVICES, columns_of, differing_columns, write_devices
from fl_lightning.runs.partition import PARTITION, write_partition
from fl_lightning.utils.files import check_output
from fl_lightning.utils.text import printable

ROUND = "--round"

MOST = 20
"""Clients that have a line each."""

WIDEST = 30
"""Characters of a client's name that a line has."""


def run(argv: list[str]) -> None:
    """Print a description of the split and of the clients' devices, and draw both where a folder is given.

    Args:
        argv: The command line of a fit, `--round T` for the samples of a round of data that change, and `--output DIR`
            for `partition.png`, `partition.csv`, `devices.png` and `devices.csv`. Of a round the first two files have
            its number in their names.

    Raises:
        ValueError: There is something else in the folder's place, or it may not be written, or the round is no round in
            which data may have changed.
    """
    arguments, folder = taken(argv)
    arguments, round_idx = round_taken(arguments)
    if folder is not None:
        check_output(folder)
    with quiet_lightning():
        data: FederatedDataModule = parts_of(["fit", *arguments]).datamodule
        data.prepare_data()
        data.setup("fit")
        check_round(data, round_idx)
        drawn = drawn_of(data, round_idx)
    lines = [*notes_on_rounds(data, round_idx), *describe(drawn, data)]
    print(printable("\n".join(lines), keep="\n"))
    if folder is None:
        print("--output DIR draws it")
        return
    folder.mkdir(parents=True, exist_ok=True)
    written = draw_partition(folder, drawn, data, round_idx=round_idx)
    if data.devices is not None:
        written += draw_devices(folder, drawn.devices, data)
    print(f"{folder}: {', '.join(path.name for path in written)}")


def check_round(data: FederatedDataModule, round_idx: int | None) -> None:
    """Refuse a round if the samples are the same in all rounds.

    Args:
        data: The data.
        round_idx: Communication round, from 0. None: all rounds.

    Raises:
        ValueError: The data do not change, and no client joins or leaves.
    """
    if round_idx is not None and data.scenario is None and data.stays is None:
        raise ValueError(
            f"{ROUND} shows the samples of a round, which are the same in all rounds without data.scenario and "
            f"data.stays, got {round_idx}; leave it out"
        )


class Drawn(NamedTuple):
    """Has the numbers of a partition that was drawn.

    Args:
        sizes: Number of training samples of each client, (N,) int64.
        counts: Number of samples of each client and class, (N, C). None: the samples have no classes.
        devices: Values of the N clients by setting. Empty: time is not simulated.
        away: Ids of the clients that are away, if the numbers are of one round.
    """

    sizes: Tensor
    counts: Tensor | None
    devices: Mapping[str, Sequence[float]]
    away: Sequence[int]


def drawn_of(data: FederatedDataModule, round_idx: int | None) -> Drawn:
    """Count the samples of the clients, and draw their devices.

    Args:
        data: The data.
        round_idx: Communication round, from 0. None: all rounds.
    """
    has_classes = data.split("train").labels is not None and data.num_classes is not None
    parts = parts_in(data, round_idx)
    counts = None
    if has_classes:
        counts = data.label_counts if round_idx is None else data.count_labels(parts)
    devices: Mapping[str, Sequence[float]] = {}
    if data.devices is not None:
        devices = columns_of(data.devices.draw(data.num_clients, seed=data.cohort.seed))
    return Drawn(
        sizes=sizes_of(data, parts),
        counts=counts,
        devices=devices,
        away=away_in(data, round_idx),
    )


def draw_partition(folder: Path, drawn: Drawn, data: FederatedDataModule, *, round_idx: int | None) -> list[Path]:
    """Draw the samples of the clients, and write their table if they have classes.

    Args:
        folder: Folder of the files.
        drawn: The numbers.
        data: The data.
        round_idx: The round of the numbers, which the names of the files have. None: all rounds.

    Returns:
        The files, and others of these names that are there already.
    """
    ending = "" if round_idx is None else f"-{round_idx}"
    if drawn.counts is None:
        figure = plot_sizes(drawn.sizes, client_names=data.client_names, unseen=data.unseen_clients)
    else:
        names = class_names(data)
        figure = plot_bubbles(drawn.counts, names, client_names=data.client_names, unseen=data.unseen_clients)
        write_partition(
            (folder / PARTITION).with_stem(f"partition{ending}"),
            drawn.counts.tolist(),
            names=names,
            clients=data.client_names,
            unseen=data.unseen_clients,
        )
    save(figure, folder / f"partition{ending}.png")
    return sorted(folder.glob(f"partition{ending}.*"))


def round_taken(words: list[str]) -> tuple[list[str], int | None]:
    """Take the round out of a command line.

    Args:
        words: The command line, without `--output`.

    Returns:
        The other words, and the round. None: the command line names no round.

    Raises:
        ValueError: The round is no whole number of at least 0.
    """
    split: list[str] = []
    for word in words:
        split += word.split("=", 1) if word.startswith(f"{ROUND}=") else [word]
    if ROUND not in split:
        return words, None
    place = split.index(ROUND)
    value = split[place + 1] if place + 1 < len(split) else "none"
    if not value.isdecimal():
        raise ValueError(f"{ROUND} needs a round, a whole number from 0, got {value}; write {ROUND} 10")
    return split[:place] + split[place + 2 :], int(value)


def parts_in(data: FederatedDataModule, round_idx: int | None) -> list[Tensor]:
    """Return the samples that each client has in a round, (n,) int64. A client that is away has none.

    Args:
        data: The data.
        round_idx: Communication round, from 0. None: the samples that a client has in any round.
    """
    samples = data.client_samples()
    if round_idx is None:
        return [samples.all_indices(client_id) for client_id in range(data.num_clients)]
    there = data.present_clients(round_idx)
    parts: list[Tensor] = []
    for client_id in range(data.num_clients):
        part = samples.indices(client_id, round_idx)
        parts.append(part if client_id in there else part[:0])
    return parts


def away_in(data: FederatedDataModule, round_idx: int | None) -> list[int]:
    """Return the ids of the clients that are away in a round, ascending. None: in no round, so that nobody is."""
    if round_idx is None:
        return []
    there = set(data.present_clients(round_idx))
    return [client_id for client_id in range(data.num_clients) if client_id not in there]


def sizes_of(data: FederatedDataModule, parts: Sequence[Tensor]) -> Tensor:
    """Return the number of samples of each client, (N,) int64. Those of a stream are of its longest pass.

    Args:
        data: The data.
        parts: The samples of each client, (n,) int64.
    """
    if data.has_streams:
        return torch.tensor([data.size(client_id, round_idx=0) for client_id in range(data.num_clients)])
    return torch.tensor([len(part) for part in parts])


def notes_on_rounds(data: FederatedDataModule, round_idx: int | None) -> list[str]:
    """Return lines that tell of which round the numbers are, if data change or clients join and leave.

    Args:
        data: The data.
        round_idx: Communication round, from 0. None: all rounds.
    """
    if data.scenario is None and data.stays is None:
        return []
    name = "data.stays" if data.scenario is None else type(data.scenario).__name__
    if round_idx is None:
        return [f"{name}: in all rounds together ({ROUND} T shows round T)"]
    there = len(data.present_clients(round_idx))
    away = f", {there} of {data.num_clients} clients are there" if there < data.num_clients else ""
    return [f"{name}: in round {round_idx}{away}"]


def draw_devices(folder: Path, columns: Mapping[str, Sequence[float]], data: FederatedDataModule) -> list[Path]:
    """Write the devices of the clients as a table, and draw the settings that differ from client to client.

    Args:
        folder: Folder of the files.
        columns: Values of the N clients by setting.
        data: The data, which name the clients.

    Returns:
        The files. There is no picture if all devices are alike.
    """
    table = folder / DEVICES
    write_devices(table, columns)
    differing = differing_columns(columns)
    if not differing:
        return [table]
    picture = folder / "devices.png"
    save(plot_devices(differing, client_names=data.client_names, unseen=data.unseen_clients), picture)
    return [table, picture]


def describe(drawn: Drawn, data: FederatedDataModule) -> list[str]:
    """Describe a split in lines.

    Args:
        drawn: The numbers of the split.
        data: The data, which were divided.
    """
    sizes = drawn.sizes
    kind = type(data.partition).__name__
    if data.by:
        kind += f" by {data.by}"
    lines = [
        f"{int(sizes.sum()):,} training samples, {len(sizes)} clients, {data.cohort.bounds} in a round, {kind}",
        f"samples of a client: {range_text(sizes, 0)}",
    ]
    unseen = data.unseen_clients
    if unseen:
        names = [data.client_names[client_id] for client_id in unseen]
        lines.append(f"never train (data.unseen): {', '.join(names)}")
    if drawn.counts is not None:
        lines += lines_of_classes(drawn.counts)
    lines += lines_of_devices(drawn.devices)
    if len(sizes) > MOST:
        return lines
    return [*lines, "", *by_client(data.client_names, columns_by_client(drawn, unseen))]


def lines_of_classes(counts: Tensor) -> list[str]:
    """Describe the classes of the clients.

    Args:
        counts: Number of samples of each client and class, (N, C).
    """
    num_classes = counts.shape[1]
    largest = 1 - 1 / num_classes
    distance = range_text(distance_from_uniform(counts), 2)
    return [
        f"classes of a client: {range_text(classes_of(counts), 0)} of {num_classes}",
        f"effective classes: {range_text(effective_classes(counts), 1)} (exp of the entropy)",
        f"distance from uniform: {distance} (total variation, at most {largest:.2f})",
    ]


def classes_of(counts: Tensor) -> Tensor:
    """Count the classes of which each client has samples, (N, C) -> (N,)."""
    return (counts > 0).sum(1)


def lines_of_devices(devices: Mapping[str, Sequence[float]]) -> list[str]:
    """Describe the settings of the clients' devices, without settings that are 0 for all clients.

    Args:
        devices: Values of the N clients by setting.
    """
    differing = differing_columns(devices)
    lines: list[str] = []
    for name, values in devices.items():
        if name in differing:
            lines.append(f"{name} of a client: {range_text(torch.tensor(values), digits_of(values))}")
        elif values[0]:
            lines.append(f"{name} of all clients: {values[0]:.4g}")
    return lines


class Column(NamedTuple):
    """Has the values of one column of the table of clients.

    Args:
        heading: Name of the column.
        form: Format of a value, such as `.2f`.
        values: The values, (N,).
    """

    heading: str
    form: str
    values: Tensor


def columns_by_client(drawn: Drawn, unseen: Sequence[int]) -> list[Column]:
    """Return the columns of the table of clients.

    Args:
        drawn: The numbers of the split.
        unseen: Ids of the clients that never train.
    """
    columns = [Column("samples", ",", drawn.sizes)]
    if drawn.counts is not None:
        columns.append(Column("classes", "", classes_of(drawn.counts)))
        columns.append(Column("effective", ".1f", effective_classes(drawn.counts)))
        columns.append(Column("distance", ".2f", distance_from_uniform(drawn.counts)))
    for name, values in differing_columns(drawn.devices).items():
        columns.append(Column(name, f".{digits_of(values)}f", torch.tensor(values)))
    for name, marked in {"unseen": unseen, "away": drawn.away}.items():
        if marked:
            marks = [int(client_id in marked) for client_id in range(len(drawn.sizes))]
            columns.append(Column(name, "", torch.tensor(marks)))
    return columns


def by_client(names: Sequence[str], columns: Sequence[Column]) -> list[str]:
    """Write a line for each client, with a dash for what a client without samples does not have.

    Args:
        names: Names of the N clients.
        columns: The columns.

    >>> by_client(["ann", "0"], [Column("samples", ",", torch.tensor([1200, 3]))])
    ['client  samples', '   ann    1,200', '     0        3']
    >>> by_client(["ann", "0"], [Column("effective", ".1f", torch.tensor([1.5, float("nan")]))])
    ['client  effective', '   ann        1.5', '     0          -']
    """
    shown = ["client", *map(shortened, names)]
    width = max(map(len, shown))
    rows = [[f"{name:>{width}}"] for name in shown]
    for heading, form, values in columns:
        cells = [heading]
        for value in values.tolist():
            text = "-" if math.isnan(value) else f"{value:{form}}"
            cells.append(f"{text:>{len(heading)}}")
        for row, cell in zip(rows, cells, strict=True):
            row.append(cell)
    return ["  ".join(row) for row in rows]


def shortened(name: str) -> str:
    """Return at most `WIDEST` characters of a client's name."""
    return name if len(name) <= WIDEST else f"{name[: WIDEST - 1]}…"


def digits_of(values: Sequence[float]) -> int:
    """Return how many decimals tell values apart: three digits of the median.

    >>> digits_of([0.01, 0.02, 0.5]), digits_of([12.0, 20.0]), digits_of([0.0, 500.0, 900.0])
    (4, 1, 0)
    """
    median = float(np.median(values))
    if median <= 0:
        return 2
    return int(np.clip(2 - np.floor(np.log10(median)), 0, 6))


def range_text(values: Tensor, digits: int) -> str:
    """Write the least, median and greatest of values (N,), without values that are NaN.

    Args:
        values: The values. NaN for a client without samples.
        digits: Number of decimals.

    >>> range_text(torch.tensor([3.0, 1.0, 9.0, float("nan")]), 1), range_text(torch.tensor([float("nan")]), 1)
    ('1.0 to 9.0, median 3.0', '-')
    """
    if values.isnan().all():
        return "-"
    least, median, greatest = np.nanquantile(values.double().numpy(), [0, 0.5, 1])
    return f"{least:,.{digits}f} to {greatest:,.{digits}f}, median {median:,.{digits}f}"
