"""Devices of the clients: how long a client's part of a round takes in simulated time, and whether it is lost."""

import csv
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fl_lightning.utils.keyed import keyed_numpy
from fl_lightning.utils.settings import check_numbers

Given = float | Sequence[float]
"""A number for all clients, `[median, σ]` of a log-normal over the clients, or a number for each client."""

BITS_OF_BYTE = 8
BITS_OF_MEGABIT = 1e6

TIMES = ("step_seconds", "sample_seconds", "latency")
"""Settings in seconds, ≥ 0."""

SPEEDS = ("down_mbps", "up_mbps")
"""Settings in Mbit/s, > 0. None sends in no time."""

CHANCES = ("jitter", "dropout")
"""Settings of what is drawn for every job, which have no log-normal over the clients."""

NAMES = (*TIMES, *SPEEDS, *CHANCES)
"""All settings that a client has a value of."""


@dataclass(frozen=True, repr=False)
class Devices:
    """Describes how fast the clients' devices are. The clock of a run is simulated, and no client waits for it.

    A client that is sent a model of D bytes, trains B batches of S samples in all and sends U bytes takes
    latency + 8·D/(10⁶·down_mbps) + J·(B·step_seconds + S·sample_seconds) + 8·U/(10⁶·up_mbps) seconds, with
    J = exp(jitter·z) and z standard normal, drawn anew for every job.

    Every setting is a number for all clients, or a list of N numbers. Where two numbers are given, they are
    `[median, σ]` of a log-normal over the clients, except for `jitter` and `dropout`.

    Args:
        step_seconds: Seconds of a batch, ≥ 0.
        sample_seconds: Seconds of a sample, ≥ 0, in addition.
        down_mbps: Bandwidth to the client in Mbit/s, > 0. None sends in no time.
        up_mbps: Bandwidth to the server in Mbit/s, > 0. None sends in no time.
        latency: Seconds that a job takes besides, ≥ 0.
        jitter: σ ≥ 0 of the log-normal factor of a job's training.
        dropout: Probability in [0, 1) that a job is lost, at a moment uniform in its duration.
        file: CSV file with a line for each client in the order of the ids, and a first line that names the columns.
            A column has the name of a setting, whose value it replaces. None means no file.

    Raises:
        TypeError: A setting is of another kind.
        ValueError: A setting is out of its range, nothing takes any time, or the file has other columns.
        FileNotFoundError: There is no such file.
    """

    step_seconds: float | list[float] = 0.0
    sample_seconds: float | list[float] = 0.0
    down_mbps: float | list[float] | None = None
    up_mbps: float | list[float] | None = None
    latency: float | list[float] = 0.0
    jitter: float | list[float] = 0.0
    dropout: float | list[float] = 0.0
    file: str | None = None

    def __post_init__(self) -> None:
        columns: Mapping[str, list[float]] = {} if self.file is None else read_columns(Path(self.file))
        for name in NAMES:
            if name in columns:
                # A frozen dataclass has no other way to set an attribute.
                object.__setattr__(self, name, columns[name])
            else:
                check_given(name, getattr(self, name))
        object.__setattr__(self, "_columns", frozenset(columns))
        times = (self.step_seconds, self.sample_seconds, self.latency)
        takes_time = any(value != 0 for value in times)
        if not takes_time and self.down_mbps is None and self.up_mbps is None:
            raise ValueError(
                "data.devices must say what takes time, got neither seconds nor bandwidths; set "
                "data.devices.step_seconds, such as to 0.1"
            )

    def __repr__(self) -> str:
        given = {name: getattr(self, name) for name in (*NAMES, "file")}
        texts = [f"{name}={value}" for name, value in given.items() if value not in (0, None)]
        return f"Devices({', '.join(texts)})"

    @property
    def from_file(self) -> frozenset[str]:
        """Names of the settings that the file replaces."""
        columns: frozenset[str] = vars(self)["_columns"]
        return columns

    @property
    def loses_clients(self) -> bool:
        """Whether jobs may be lost."""
        return self.dropout != 0

    def draw(self, num_clients: int, seed: int) -> "DeviceTable":
        """Draw the values of all clients.

        Args:
            num_clients: The number N of clients.
            seed: The seed of the draws.

        Raises:
            ValueError: A list or the file has values of another number of clients.

        >>> table = Devices(step_seconds=[0.2, 0.9], latency=0.05).draw(num_clients=3, seed=0)
        >>> table.latency.tolist(), len(set(table.step_seconds.tolist()))
        ([0.05, 0.05, 0.05], 3)
        """
        columns: dict[str, np.ndarray] = {}
        for name in NAMES:
            value: Given | None = getattr(self, name)
            if value is None:
                value = math.inf
            columns[name] = self._column(name, value, num_clients=num_clients, seed=seed)
        return DeviceTable(**columns)

    def _column(self, name: str, value: Given, *, num_clients: int, seed: int) -> np.ndarray:
        """Return the values of a setting, (N,) float64.

        Args:
            name: Name of the setting.
            value: The setting.
            num_clients: The number N of clients.
            seed: The seed of the draws.

        Raises:
            ValueError: A list or the file has values of another number of clients.
        """
        if isinstance(value, int | float):
            return np.full(num_clients, float(value))
        is_law = len(value) == 2 and name not in CHANCES and name not in self.from_file
        if is_law:
            median, sigma = value
            deviates = keyed_numpy(seed, f"clock/{name}").standard_normal(num_clients)
            drawn: np.ndarray = median * np.exp(sigma * deviates)
            return drawn
        if len(value) != num_clients:
            place = f"data.devices.{name}"
            form = "a number, or a list" if name in CHANCES else "a number, [median, σ], or a list"
            remedy = f"give {form} of {num_clients}"
            if name in self.from_file:
                place = f"the column {name} of {self.file}"
                remedy = f"give the file {num_clients} lines below its first one"
            raise ValueError(
                f"{place} must have a number for each of the {num_clients} clients, got {len(value)}; {remedy}"
            )
        return np.array(value, dtype=np.float64)


class DeviceTable(NamedTuple):
    """Holds the values of all clients by the names of the settings, each (N,) float64. A bandwidth may be infinite."""

    step_seconds: np.ndarray
    sample_seconds: np.ndarray
    down_mbps: np.ndarray
    up_mbps: np.ndarray
    latency: np.ndarray
    jitter: np.ndarray
    dropout: np.ndarray


class PlannedWork(NamedTuple):
    """Holds what a client trains in a job.

    Args:
        batches: The number of batches.
        samples: The number of samples in these batches.
    """

    batches: int
    samples: int


class Duration(NamedTuple):
    """Holds how long a job takes.

    Args:
        fixed: Seconds of latency and of messages.
        computing: Seconds of training.
        batches: The number of batches that are trained.
    """

    fixed: float
    computing: float
    batches: int

    @property
    def seconds(self) -> float:
        """Seconds of the whole job."""
        return self.fixed + self.computing


class JobTimes:
    """Tells how long each job takes and whether it is lost, as a pure function of seed, client, version and attempt.

    Args:
        table: The devices of the clients.
        seed: The seed of the draws.
        planned: Returns what a client trains that starts from a version: `(client_id, version) -> PlannedWork`.
        bytes_down: Bytes of a message to a client.
        bytes_up: Bytes of a message to the server.
    """

    def __init__(
        self,
        table: DeviceTable,
        *,
        seed: int,
        planned: Callable[[int, int], PlannedWork],
        bytes_down: int,
        bytes_up: int,
    ) -> None:
        self.bytes_down = bytes_down
        self.bytes_up = bytes_up
        self._table = table
        self._seed = seed
        self._planned = planned

    def duration(self, client_id: int, version: int, attempt: int = 0) -> Duration:
        """Return how long a job takes if it is not lost.

        Args:
            client_id: Id of the client.
            version: The version that the client starts from.
            attempt: The number of the client's earlier jobs from this version, which were all lost.
        """
        table = self._table
        work = self._planned(client_id, version)
        computing = work.batches * table.step_seconds[client_id] + work.samples * table.sample_seconds[client_id]
        jitter = table.jitter[client_id]
        if jitter:
            purpose = purpose_of("clock/jitter", attempt)
            generator = keyed_numpy(self._seed, purpose, round_idx=version, client_id=client_id)
            computing *= math.exp(jitter * generator.standard_normal())
        down = BITS_OF_BYTE * self.bytes_down / (BITS_OF_MEGABIT * table.down_mbps[client_id])
        up = BITS_OF_BYTE * self.bytes_up / (BITS_OF_MEGABIT * table.up_mbps[client_id])
        return Duration(
            fixed=float(table.latency[client_id] + down + up),
            computing=float(computing),
            batches=work.batches,
        )

    def lost_after(self, client_id: int, version: int, attempt: int = 0) -> float | None:
        """Return the share of its duration after which a job is lost, in [0, 1). None means that it is not lost.

        Args:
            client_id: Id of the client.
            version: The version that the client starts from.
            attempt: The number of the client's earlier jobs from this version, which were all lost.
        """
        dropout = self._table.dropout[client_id]
        if not dropout:
            return None
        purpose = purpose_of("clock/dropout", attempt)
        generator = keyed_numpy(self._seed, purpose, round_idx=version, client_id=client_id)
        chance, share = generator.random(2).tolist()
        return share if chance < dropout else None


def purpose_of(purpose: str, attempt: int) -> str:
    """Return the purpose of a draw of a job, which a client that starts from a version again draws anew.

    >>> purpose_of("clock/jitter", 0), purpose_of("clock/jitter", 2)
    ('clock/jitter', 'clock/jitter/2')
    """
    return f"{purpose}/{attempt}" if attempt else purpose


def check_given(name: str, value: Any) -> None:
    """Refuse a setting of devices that is no number in its range, and no list of such numbers.

    Args:
        name: Name of the setting.
        value: The setting.

    Raises:
        TypeError: The setting is of another kind.
        ValueError: A number is out of its range, or the list is empty.
    """
    place = f"data.devices.{name}"
    if value is None and name in SPEEDS:
        return
    numbers = list(value) if isinstance(value, list | tuple) else [value]
    if not numbers:
        raise ValueError(f"{place} must be a number or a list of numbers, got []; give a number for all clients")
    for number in numbers:
        check_numbers("it may be a number for each client", **{place: number})
        if number is None:
            raise TypeError(f"{place} must be a number, got None; leave it out")
    if len(numbers) == 2 and name not in CHANCES:
        median, sigma = numbers
        check_range(name, median, place)
        check_range("jitter", sigma, f"σ of {place}")
        return
    for number in numbers:
        check_range(name, number, place)


def check_range(name: str, number: float, place: str) -> None:
    """Refuse a number of a setting of devices that is out of its range.

    Args:
        name: Name of the setting.
        number: The number.
        place: Where it stands.

    Raises:
        ValueError: The number is out of its range.
    """
    if name in SPEEDS and not 0 < number < math.inf:
        raise ValueError(f"{place} must be a speed above 0 in Mbit/s, got {number}; leave it out to send in no time")
    if name == "dropout" and not 0 <= number < 1:
        raise ValueError(f"{place} must lie in [0, 1), got {number}; 0.1 loses one job in ten")
    if name not in SPEEDS and not 0 <= number < math.inf:
        raise ValueError(f"{place} must be at least 0 and finite, got {number}; give 0 for none")


def read_columns(path: Path) -> dict[str, list[float]]:
    """Read the columns of a file of devices, by name.

    Args:
        path: The CSV file.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file has other columns, no line, or something else than a number.
    """
    if not path.is_file():
        raise FileNotFoundError(
            f"data.devices.file must name a CSV file, got {path}, which does not exist; mend the path"
        )
    with path.open(newline="", encoding="utf-8") as lines:
        rows = list(csv.reader(lines))
    header: list[str] = []
    if rows:
        header = [name.strip() for name in rows[0]]
    unknown = [name for name in header if name not in NAMES]
    if not header or unknown or len(set(header)) < len(header):
        got = unknown[0] if unknown else header
        raise ValueError(
            f"the first line of data.devices.file must name columns among {', '.join(NAMES)}, got {got!r} in {path}; "
            f"mend the file"
        )
    columns: dict[str, list[float]] = {name: [] for name in header}
    for number, row in enumerate(rows[1:], start=2):
        if not row:
            continue
        if len(row) != len(header):
            raise ValueError(
                f"a line of data.devices.file must have a number for each column, got {len(row)} for {len(header)} "
                f"columns in line {number} of {path}; mend the file"
            )
        for name, text in zip(header, row, strict=True):
            columns[name].append(read_number(name, text, f"{name} in line {number} of {path}"))
    if not columns[header[0]]:
        raise ValueError(f"data.devices.file must have a line for each client, got none in {path}; add them")
    return columns


def read_number(name: str, text: str, place: str) -> float:
    """Read a number of a file of devices.

    Args:
        name: Name of its column.
        text: What the file has.
        place: Where it stands.

    Raises:
        ValueError: The text is no number in its range.
    """
    try:
        number = float(text)
    except ValueError:
        raise ValueError(f"{place} must be a number, got {text!r}; mend the file") from None
    check_range(name, number, place)
    return number
