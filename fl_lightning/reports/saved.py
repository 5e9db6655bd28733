"""Reads runs on disk for reports, and puts the runs that differ only in the seed into groups."""

import json
import math
import os
import re
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml  # type: ignore[import-untyped]
from numpy.typing import NDArray

from fl_lightning.federation.configured import flat
from fl_lightning.federation.differences import Difference, differences, is_place
from fl_lightning.federation.effects import SEEDS, below, is_data, is_digest, is_fixed, is_seed
from fl_lightning.federation.files import INITIAL_WEIGHTS
from fl_lightning.federation.horizon import round_limit
from fl_lightning.federation.values import Settings
from fl_lightning.metrics.history import History, plain_key
from fl_lightning.metrics.keys import SECONDS, Direction, Directions, direction_of
from fl_lightning.reports.figures import Numbers
from fl_lightning.runs.folder import CONFIG, identity_of
from fl_lightning.runs.loggers import RoundCSVLogger, read_directions, read_status
from fl_lightning.runs.partition import PARTITION, UNSEEN
from fl_lightning.utils.round_table import read_cells, reading

METRICS = "metrics.csv"
CLIENTS = "clients.csv"
CLASSIFICATION = "classification.csv"
"""Name of the table of precision, recall and F1 of the last global model."""

TEST = "test.json"
"""Name of the file with what `test` gave for the last checkpoint."""

DONE = "done.json"
"""Name of the file that the run of an experiment has when it is complete, with its name in tables."""

TUNING = "tuning"
"""Name of the folder with the runs of tuning within that of an experiment."""

TIMES = "times.csv"
"""Name of the table of what a run took, with a line for each part of it that one process has made."""

Seeds = tuple[object, ...]
"""Values of `SEEDS`, None if one is not known."""

ROUND = "round"
"""Key and column of the 0-based round that a file speaks of."""

CLIENT_COLUMN = "client"
"""Column of partition.csv with the names of the clients."""

MAX_SECONDS = "max_seconds"
"""Setting of the model that ends a run by its simulated seconds."""

POOLED = "data.pooled"
"""Setting of a reference that has the samples of all clients at one place."""

NAME_OF_SEED = re.compile(r"-seed\d+-[0-9a-f]{8}")
"""Part of the name of an experiment's run that differs from seed to seed."""

MOST_MOMENTS = 500
"""Largest number of moments of a curve over simulated seconds."""

MOST_PARTS = 100_000
"""Largest number of parts of a configuration."""

DEEPEST = 100
"""Largest depth of the parts of a configuration."""

MOST_SAMPLES = 2**53
"""Largest number of samples of a client and class."""

CLASS_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")


class Counts(NamedTuple):
    """Training samples of each client and class, (N, C), and the names of the classes and of the clients.

    Args:
        table: Number of samples of each client and class, (N, C).
        names: Names of the C classes.
        clients: Names of the N clients.
        unseen: Ids of the clients that never train.
    """

    table: Numbers
    names: list[str]
    clients: list[str]
    unseen: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class SavedRun:
    """Has what is read of one run.

    Attributes:
        folder: Folder of the run.
        history: The rows of its metrics.csv.
        settings: Settings by dotted name that fix the weights and values. Empty if neither config.yaml nor a checkpoint
            tells.
        is_configured: Whether config.yaml tells the settings, which are all then.
        data: What a checkpoint tells of the data and cohorts.
        test: Values of the test split after the last round, by log key. Empty if `test` was not run.
        partition: Samples of each client and class. None if the samples have no classes.
        clients: Columns of clients.csv by name, NaN for a cell without a number. Empty without the file.
        rounds: Number of rounds that are read, the first ones. None means all.
        name: Name in the tables of the experiment that made the run. Empty if there is none.
        case: The settings of the experiment's case that the name ends with, as text. None: nothing tells a case.
        is_whole: Whether no later round of the run is left out.
        directions: Whether values are better when lower or higher, by log key, as the user or metric objects tell.
        planned: Number of rounds that the run was asked for. None means that it is not known.
        is_finished: Whether the run ended by itself, as far as its folder tells.
        notes: Sentences on files of the folder that were left out.
        budget: Simulated seconds that the run was given and has used up: its next round would end later. None means
            that the run has no such limit, or that it ended for another reason.
    """

    folder: Path
    history: History
    settings: Settings
    is_configured: bool = True
    data: Settings = field(default_factory=dict)
    test: Mapping[str, float] = field(default_factory=dict)
    partition: Counts | None = None
    clients: Mapping[str, Numbers] = field(default_factory=dict)
    rounds: int | None = None
    name: str = ""
    case: str | None = None
    is_whole: bool = True
    directions: Directions = field(default_factory=dict)
    planned: int | None = None
    is_finished: bool = True
    notes: tuple[str, ...] = ()
    budget: float | None = None

    @property
    def keys(self) -> list[str]:
        """Log keys of the values, without the mark of unprotected values, each once."""
        return list(dict.fromkeys([*self.history.keys, *self.test]))

    @property
    def num_rounds(self) -> int:
        """Number of rounds up to the last one that is read."""
        return self.history.rounds[-1] + 1 if self.history.rounds else 0

    @property
    def stopped_early(self) -> bool:
        """Whether the run ended by itself before the rounds that it was asked for, as far as its folder tells.

        A run whose simulated seconds are used up has ended by itself.
        """
        if self.budget is not None:
            return True
        is_short = self.planned is not None and self.num_rounds < self.planned
        return is_short and self.is_finished and self.is_whole

    @property
    def clock(self) -> dict[int, float]:
        """Simulated seconds from the start of the run to the end of each round. Empty without simulated devices."""
        return {round_idx: end for round_idx, end in self.history.curve(SECONDS).items() if math.isfinite(end)}

    @property
    def seconds(self) -> float | None:
        """Simulated seconds for which the values are known. None without simulated devices.

        They are those of the last round, or the whole budget if the next round would end later.
        """
        ends = list(self.clock.values())
        if not ends:
            return None
        return ends[-1] if self.budget is None else max(ends[-1], self.budget)

    def timed_curve(self, key: str) -> dict[float, float]:
        """Return the values of a key by the simulated seconds at the end of their rounds, ascending.

        Of rounds that end at the same moment the last one counts. Without simulated devices there are none.
        """
        clock = self.clock
        curve: dict[float, float] = {}
        for round_idx, value in self.history.curve(key).items():
            if round_idx in clock:
                curve[clock[round_idx]] = value
        return curve

    def direction(self, key: str) -> Direction | None:
        """Return whether values of a key are better when lower or higher, or None if nobody tells."""
        return direction_of(key, self.directions)

    def is_unprotected(self, key: str) -> bool:
        """Return True for a value of a private run that its guarantee does not cover."""
        name = self.history.name_of(key)
        return name is not None and name != plain_key(name)

    def has_round(self, round_idx: int) -> bool:
        """Return True for a round that is read."""
        return self.rounds is None or round_idx < self.rounds

    def columns(self, name: str, texts: Sequence[str] = ()) -> dict[str, NDArray[Any]]:
        """Read a table of the folder with a row for each round and more, as `read_columns` does."""
        columns = read_columns(self.folder / name, texts)
        if self.rounds is None or ROUND not in columns:
            return columns
        rows = columns[ROUND] < self.rounds
        return {column: values[rows] for column, values in columns.items()}

    @property
    def seeds(self) -> Seeds:
        """Settings that distinguish the run within its group."""
        values = [self.settings.get(name) for name in SEEDS]
        # A broken file may have a list in the place of a seed.
        return tuple(value if isinstance(value, Hashable) else str(value) for value in values)

    @property
    def seed(self) -> str:
        """The seeds as text: one number if all known ones are equal, empty if none is known."""
        known = dict.fromkeys(str(seed) for seed in self.seeds if seed is not None)
        if len(known) < 2:
            return "".join(known)
        return "/".join("–" if seed is None else str(seed) for seed in self.seeds)


@dataclass(frozen=True, eq=False)
class Group:
    """Has runs that differ only in the seed.

    Attributes:
        label: Name of the runs where all groups stand together: the method and the case.
        runs: One run of each seed.
        notes: Sentences on runs that were left out.
        case: The settings in which groups are not compared with each other, above all those of the data, as text. Empty
            if all groups have the same.
        method: Name of the runs among the groups of the same case. Empty: it is the label.
    """

    label: str
    runs: Sequence[SavedRun]
    notes: tuple[str, ...] = ()
    case: str = ""
    method: str = ""

    @property
    def row(self) -> str:
        """Name of the runs among the groups of the same case."""
        return self.method or self.label

    def curves(self, key: str) -> tuple[list[int], Numbers]:
        """Find the rounds in which all runs that know a value have it, and the values, (S, T)."""
        known = self._known_curves(key)
        rounds: list[int] = []
        if known:
            rounds = sorted(set.intersection(*map(set, known)))
        values = np.zeros((len(known), len(rounds)))
        for row, curve in zip(values, known, strict=True):
            row[:] = [curve[round_idx] for round_idx in rounds]
        return rounds, values

    def _known_curves(self, key: str) -> list[dict[int, float]]:
        """Return the curves of the runs that know a value."""
        curves = [run.history.curve(key) for run in self.runs]
        return [curve for curve in curves if curve]

    def carried_curves(self, key: str) -> tuple[list[int], Numbers]:
        """Find the curves of all runs that know a value up to the end of the longest: rounds, and the values, (S, T).

        A run that ended earlier stands at its last value, so that the end of the mean is the mean of the runs' ends.
        """
        known = self._known_curves(key)
        rounds = shared_rounds([list(curve) for curve in known])
        table = np.zeros((len(known), len(rounds)))
        for row, curve in zip(table, known, strict=True):
            last = max(curve)
            row[:] = [curve[min(round_idx, last)] for round_idx in rounds]
        return rounds, table

    def timed_curves(self, key: str) -> tuple[list[float], Numbers]:
        """Find the curves over simulated seconds of all runs that know a value: seconds, (T,), and the values, (S, T).

        A run stands at each value until its next one, and at its last value until the end of the longest run. The
        curves begin when every run has a value. More than `MOST_MOMENTS` moments are replaced by equally spaced ones.
        """
        known: list[tuple[Numbers, Numbers]] = []
        ends: list[float] = []
        for run in self.runs:
            curve = run.timed_curve(key)
            if curve:
                known.append((np.array(list(curve)), np.array(list(curve.values()))))
                ends.append(run.seconds or 0.0)
        if not known:
            return [], np.zeros((0, 0))
        begin = np.max([moments[0] for moments, _ in known])
        moments = np.unique(np.concatenate([*(moments for moments, _ in known), np.array(ends)]))
        moments = moments[moments >= begin]
        if len(moments) > MOST_MOMENTS:
            moments = np.linspace(moments[0], moments[-1], MOST_MOMENTS)
        table = np.zeros((len(known), len(moments)))
        for row, (own_moments, values) in zip(table, known, strict=True):
            row[:] = values[np.searchsorted(own_moments, moments, side="right") - 1]
        return moments.tolist(), table

    @property
    def has_equal_rounds(self) -> bool:
        """Whether all runs have the same number of rounds."""
        return len({run.num_rounds for run in self.runs}) == 1

    def columns(self, part: str) -> tuple[list[int], list[str], Numbers]:
        """Return the mean over the runs of the columns with `part` in their name: rounds, names and values (T, K)."""
        tables = [run.history.columns(part) for run in self.runs]
        alike = [table for table in tables if table[0] and table[1] == tables[0][1]]
        if not alike:
            return [], [], np.zeros((0, 0))
        _, names, _ = alike[0]
        rounds = shared_rounds([known for known, _, _ in alike])
        chosen = []
        for known, _, table in alike:
            places = [known.index(min(round_idx, known[-1])) for round_idx in rounds]
            chosen.append(table.numpy()[places])
        return rounds, names, np.mean(chosen, axis=0)


def shared_rounds(known: Sequence[Sequence[int]]) -> list[int]:
    """Return the rounds in which every run has a value or is past its last one.

    Args:
        known: The rounds of each run, ascending, none of them empty.

    >>> shared_rounds([[0, 1, 2, 3], [0, 1]]), shared_rounds([[1, 3], [0, 1, 2, 3]]), shared_rounds([])
    ([0, 1, 2, 3], [1, 3], [])
    """
    rounds = []
    for round_idx in sorted(set(chain.from_iterable(known))):
        if all(round_idx in of_run or round_idx > of_run[-1] for of_run in known):
            rounds.append(round_idx)
    return rounds


# --- reading --------------------------------------------------------------------------------------


def find_runs(paths: Iterable[str | Path]) -> list[Path]:
    """Find the run folders that paths name: run folders, or folders with runs in them or below.

    Raises:
        FileNotFoundError: A path holds no run.
    """
    folders: dict[Path, None] = {}
    for path in map(Path, paths):
        table = path / METRICS
        is_run = os.path.lexists(table) and not os.path.isdir(table)
        runs = [path] if is_run else list(folders_with_runs(path))
        if not runs:
            raise FileNotFoundError(f"a run folder holds {METRICS}, and there is none in {path} or below")
        folders |= dict.fromkeys(sorted(runs, key=natural))
    return list(folders)


def folders_with_runs(path: Path) -> Iterator[Path]:
    """Find the run folders below a folder, without the candidates of an experiment's tuning."""
    for folder, folders, files in os.walk(path):
        if {"cells", TUNING} <= {*folders}:
            folders.remove(TUNING)
        if METRICS in chain(folders, files):
            yield Path(folder)


def natural(path: Path) -> list[tuple[int, str]]:
    """Return a key that orders folders by the numbers in their names: 2 before 10."""
    parts = []
    for part in re.split(r"(\d+)", str(path)):
        parts.append((int(part), "") if part.isdigit() else (-1, part))
    return parts


def read_run(
    folder: Path,
    rounds: int | None = None,
    directions: Directions | None = None,
    *,
    seconds: float | None = None,
) -> SavedRun:
    """Read a run, as far as its folder holds it.

    Args:
        folder: Folder of the run.
        rounds: Number of rounds that are read, the first ones. None reads all.
        directions: Directions of keys that win over those in the folder. None means none.
        seconds: Simulated seconds whose rounds are read, those that end by then. None reads all.

    Raises:
        ValueError: A file cannot be read as what it should be.
    """
    history = History()
    table = RoundCSVLogger(folder)
    if not table.path.is_file():
        raise ValueError(f"{table.path} must be a file with a row for each round, and is none; leave that run out")
    on_disk = sorted(table.rows_on_disk().items())
    within = [(round_idx, row) for round_idx, row in on_disk if ends_by(row, seconds)]
    shown = [(round_idx, row) for round_idx, row in within if rounds is None or round_idx < rounds]
    for round_idx, row in shown:
        history.record(round_idx, row)
    if not history.rounds:
        raise ValueError(f"{table.path} must have a row for each round, and has none; leave that run out")
    is_whole = len(shown) == len(on_disk)
    last_round = on_disk[-1][0]
    identity = identity_of(folder)
    objects = identity.get("objects", {})
    known = {name: value for name, value in objects.items() if not is_digest(name)}
    content = load_config(folder / CONFIG)
    planned = planned_rounds(content)
    test = read_test(folder / TEST, last_round)
    clients = read_columns(folder / CLIENTS)
    has_ended = is_finished(folder, content, last_round)
    name, case = read_name(folder / DONE)
    limit = None
    if rounds is not None:
        limit = min(rounds, len(on_disk))
        planned = rounds if planned is None else min(rounds, planned)
    if len(within) < len(on_disk):
        limit = len(shown)
    if limit is not None and ROUND in clients:
        rows = clients[ROUND] < limit
        clients = {name: values[rows] for name, values in clients.items()}
    budget: float | None = None
    if planned is not None and len(shown) >= planned:
        budget = None  # its rounds ended it
    elif len(within) < len(on_disk):
        budget = seconds
    elif has_ended:
        budget = smaller_budget(max_seconds_in(content), seconds)
    return SavedRun(
        folder=folder,
        history=history,
        settings=fixing(flat(content) or identity.get("config") or known),
        is_configured=bool(content),
        data={name: value for name, value in objects.items() if is_data(name)},
        test=test if is_whole else {},
        partition=read_partition(folder / PARTITION),
        clients=clients,
        rounds=limit,
        name=name,
        case=case,
        is_whole=is_whole,
        directions={**read_directions(folder), **(directions or {})},
        planned=planned,
        is_finished=has_ended,
        budget=budget,
        notes=notes_on_rounds(folder, last_round, is_whole=is_whole),
    )


def ends_by(row: Mapping[str, float], seconds: float | None) -> bool:
    """Return True for the row of a round that ends by a number of simulated seconds. None has no such limit."""
    return seconds is None or row.get(SECONDS, 0.0) <= seconds


def max_seconds_in(content: Mapping[str, Any]) -> float | None:
    """Return the simulated seconds that a configuration gives its run, or None if it does not limit them."""
    model = content.get("model")
    if not isinstance(model, Mapping):
        return None
    seconds = model.get(MAX_SECONDS)
    return float(seconds) if isinstance(seconds, int | float) else None


def smaller_budget(given: float | None, asked: float | None) -> float | None:
    """Return the smaller of the seconds that a run was given and those that are asked for, None if none were given."""
    if given is None:
        return None
    return given if asked is None else min(given, asked)


def fixing(settings: Settings) -> Settings:
    """Return the settings that fix the weights and values of a run, without the places of files."""
    return {name: value for name, value in settings.items() if is_fixed(name) and not is_place(name, settings)}


def load_config(path: Path) -> Mapping[str, Any]:
    """Read a run's configuration, empty if there is no file.

    Raises:
        ValueError: The file is no YAML of settings.
    """
    if not path.is_file():
        return {}
    with reading(path, "the configuration of a run, and cannot be read"):
        text = path.read_text(encoding="utf-8")
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # in C: a tenth of the time
        if "<<" in text:
            for event in yaml.parse(text, loader):
                if isinstance(event, yaml.ScalarEvent) and event.value == "<<":
                    raise ValueError("mappings that take in others, which no run writes, may grow without end")
        try:
            content = yaml.load(text, loader)
        except yaml.YAMLError:  # of half a character, which is read in Python only
            content = yaml.safe_load(text)
        check_size(content)
        flat(content)  # which refuses what is no settings
        return dict(content or {})


def planned_rounds(content: Mapping[str, Any]) -> int | None:
    """Return the rounds that a configuration asks for, or None if it does not limit them."""
    trainer = content.get("trainer")
    if not isinstance(trainer, Mapping):
        return None
    return round_limit(trainer.get("max_epochs"), trainer.get("max_steps")) or None


def is_finished(folder: Path, content: Mapping[str, Any], last_round: int) -> bool:
    """Return True if a run has ended by itself, or if nothing tells.

    Args:
        folder: Folder of the run.
        content: Its configuration.
        last_round: Its last round.
    """
    planned = planned_rounds(content)
    has_all_rounds = planned is not None and last_round + 1 >= planned
    if has_all_rounds or (folder / DONE).is_file():
        return True
    ended_after = read_status(folder)
    if ended_after is not None:
        return ended_after == last_round
    if planned is None:
        return True
    # Version 0.2.0 did not write whether a run has ended.
    return "EarlyStopping" in str(content["trainer"].get("callbacks"))


def check_size(content: Any) -> None:
    """Refuse a pytree that is too deep or too large to be settings, as YAML's aliases may make of any file.

    Raises:
        ValueError: It is too deep or too large.
    """
    remaining = MOST_PARTS
    parts = [(content, 0)]
    while parts:
        part, depth = parts.pop()
        inner = parts_of(part)
        remaining -= len(inner)
        if remaining < 0 or depth > DEEPEST:
            raise ValueError("too large")
        parts += [(value, depth + 1) for value in inner if not isinstance(value, str | bytes)]


def parts_of(content: Any) -> Sequence[Any]:
    """Return what a container holds, nothing for text and all else."""
    if isinstance(content, str | bytes):
        return ()
    if isinstance(content, Mapping):
        return list(content.values())
    if isinstance(content, Sequence | Set):
        return list(content)
    return ()


def read_test(path: Path, last_round: int) -> dict[str, float]:
    """Read what `test` gave for the model of a run's last round, by log key. Empty if it was not run after that round.

    A file that names no round is of the last one: version 0.2.0 wrote none.

    Args:
        path: The file of these values.
        last_round: The last round of the run.

    Raises:
        ValueError: The file is no JSON object of numbers.
    """
    values = read_values(path)
    round_idx = values.pop(ROUND, last_round)
    values.pop(f"{ROUND}_best", None)  # of the values of the best checkpoint
    return values if round_idx == last_round else {}


def read_values(path: Path) -> dict[str, float]:
    """Read the numbers of a JSON file by name, without the mark of unprotected values. Empty if there is no file.

    Raises:
        ValueError: The file is no JSON object of numbers.
    """
    if not path.is_file():
        return {}
    with reading(path, "the numbers that test gave by name, and cannot be read as them"):
        found = json.loads(path.read_text(encoding="utf-8"))
        return {plain_key(name): float(number) for name, number in found.items()}


def notes_on_rounds(folder: Path, last_round: int, *, is_whole: bool) -> tuple[str, ...]:
    """Return a sentence for each file of one model that is left out because the model is not that of the last round.

    Args:
        folder: Folder of the run.
        last_round: The last round of the run.
        is_whole: Whether no later round is left out. Otherwise the files are not asked for.
    """
    if not is_whole:
        return ()
    rounds = {
        TEST: read_values(folder / TEST).get(ROUND),
        CLASSIFICATION: classification_round(read_columns(folder / CLASSIFICATION, ["class"])),
    }
    notes = []
    for name, round_idx in rounds.items():
        if round_idx is not None and round_idx != last_round:
            path = folder / name
            notes.append(
                f"{path} is left out: its values are of round {round_idx:g}, and the last round is {last_round}"
            )
    return tuple(notes)


def classification_round(columns: Mapping[str, NDArray[Any]]) -> float | None:
    """Return the round of a table of the last model, or None if the table does not tell, as in 0.2.0."""
    rounds = columns.get(ROUND)
    if rounds is None or not len(rounds):
        return None
    return float(rounds[0])


def read_name(path: Path) -> tuple[str, str | None]:
    """Read the name that a run has in the tables of its experiment, and the case with which the name ends.

    Returns:
        The name, empty without one, and the case, None if nothing tells it. Version 0.2.0 wrote no case.

    Raises:
        ValueError: The file is no JSON object.
    """
    if not path.is_file():
        return "", None
    with reading(path, "what an experiment says of a run, and cannot be read as it"):
        done = json.loads(path.read_text(encoding="utf-8"))
        case = done.get("case")
        return str(done.get("name", "")), None if case is None else str(case)


def read_partition(path: Path) -> Counts | None:
    """Read the training samples of each client and class, or None if there is no such table or it is empty.

    Raises:
        ValueError: The file is no table of counts.
    """
    columns = read_columns(path, [CLIENT_COLUMN])
    clients = columns.pop(CLIENT_COLUMN, None)
    never_trains = columns.pop(UNSEEN, np.zeros(0))
    if not columns:
        return None
    table = np.stack([*columns.values()], axis=1)
    if not ((table >= 0) & (table <= MOST_SAMPLES)).all():
        raise ValueError(f"{path} must hold counts of samples, and has other cells; move it away")
    if not len(table):
        return None
    client_names = range(len(table)) if clients is None else clients
    unseen = tuple(int(client_id) for client_id in never_trains.nonzero()[0])
    return Counts(table, names=list(columns), clients=list(map(str, client_names)), unseen=unseen)


def read_columns(path: Path, texts: Sequence[str] = ()) -> dict[str, NDArray[Any]]:
    """Read a table by column, without lines that were cut. A cell without a number is NaN, except in `texts`."""
    if not path.is_file():
        return {}
    columns: dict[str, NDArray[Any]] = {}
    with reading(path, "a table, and cannot be read as one"):
        for name, cells in read_cells(path).items():
            columns[name] = np.array(cells if name in texts else [as_number(cell) for cell in cells])
    return columns


def as_number(text: str) -> float:
    """Read a number, and anything else as NaN."""
    try:
        return float(text)
    except ValueError:
        return math.nan


# --- groups ---------------------------------------------------------------------------------------


def grouped(runs: Iterable[SavedRun]) -> list[Group]:
    """Put the runs that differ only in the seed together.

    Of several runs with the same settings and seeds the longest finished one counts.
    """
    alike: dict[object, dict[str, list[SavedRun]]] = {}
    for run in runs:
        alike.setdefault(identity_of_group(run), {}).setdefault(repr(run.seeds), []).append(run)
    members: list[list[SavedRun]] = []
    notes: list[tuple[str, ...]] = []
    for by_seeds in alike.values():
        kept: list[SavedRun] = []
        left_out: list[str] = []
        for same in by_seeds.values():
            longest = longest_finished(same)
            kept.append(longest)
            left_out += [why_left_out(run, longest) for run in same if run is not longest]
        members.append(sorted(kept, key=lambda run: [str(seed) for seed in run.seeds]))
        notes.append(tuple(left_out))
    groups: list[Group] = []
    for name, runs_of_group, why in zip(names_of(members), members, notes, strict=True):
        method = name.method or client_of(runs_of_group[0])
        groups.append(Group(name.label, runs=runs_of_group, notes=why, case=name.case, method=method))
    return groups


def client_of(run: SavedRun) -> str:
    """Return the name of the class of a run's clients, empty if nothing tells it.

    >>> client_of(SavedRun(Path("0"), History(), {"model.client": "fl_lightning.methods.FedNTD"}))
    'FedNTD'
    """
    return str(run.settings.get("model.client", "")).rpartition(".")[2]


def identity_of_group(run: SavedRun) -> object:
    """Return what the runs of one group have in common: their settings without seeds, and the name in an experiment."""
    shared: set[tuple[str, str]] = set()
    for name, value in run.settings.items():
        if is_seed(name):
            continue
        text = NAME_OF_SEED.sub("", str(value)) if name == INITIAL_WEIGHTS else repr(value)
        shared.add((name, text))
    if not shared:
        return run.folder
    return frozenset(shared), run.name


def longest_finished(runs: Sequence[SavedRun]) -> SavedRun:
    """Return the longest finished run, or the longest one if none is finished. Of equal ones it is the last."""
    best = runs[0]
    for run in runs[1:]:
        if (run.is_finished, run.num_rounds) >= (best.is_finished, best.num_rounds):
            best = run
    return best


def why_left_out(run: SavedRun, kept: SavedRun) -> str:
    """Return why a run is left out in favor of another one with the same settings and seeds."""
    if run.is_finished != kept.is_finished:
        asked = "" if run.planned is None else f" of {run.planned}"
        reason = f"it is not finished ({run.num_rounds}{asked} rounds), and that one is ({kept.num_rounds} rounds)"
    elif run.num_rounds < kept.num_rounds:
        reason = f"it has {run.num_rounds} rounds, and that one has {kept.num_rounds}"
    else:
        reason = f"both have {run.num_rounds} rounds, and that one is the later folder"
    return f"{run.folder} is left out, because {kept.folder} has the same settings and seeds: {reason}"


class GroupName(NamedTuple):
    """Names a group of runs.

    Args:
        method: Name among the groups of the same case. Empty: it is the class of the clients.
        case: The settings of the data that distinguish the group. Empty: none do.
        folder: Name by which a group is known that no setting distinguishes. Empty: some do.
    """

    method: str
    case: str
    folder: str = ""

    @property
    def label(self) -> str:
        """All in one text."""
        return ", ".join(filter(None, self))


def names_of(groups: Sequence[Sequence[SavedRun]]) -> list[GroupName]:
    """Name groups as their experiment does, else by the settings that distinguish them, as few as are needed.

    Settings of the data make the case.
    """
    table = differing([group[0].settings for group in groups])
    shared = [name for name, values in table.items() if "" not in values]
    top = [name for name in shared if not any(name != other and below(name, other) for other in shared)]
    of_data = [name for name in top if is_data(name)]
    if are_names([group[0].name for group in groups]):
        cases = [name_by_settings(of_data, table, index).case for index in range(len(groups))]
        return [name_in_experiment(group[0], case) for group, case in zip(groups, cases, strict=True)]
    if len(groups) == 1:
        return [GroupName("", case="", folder=name_of_folder(groups[0][0].folder))]
    classes = [name for name in top if any(map(CLASS_PATH.fullmatch, table[name]))]
    for chosen in ([*classes, *of_data], top, list(table)):
        named = [name_by_settings(chosen, table, index) for index in range(len(groups))]
        if are_names([name.label for name in named]):
            return named
    return [GroupName(name_of_folder(group[0].folder), case="") for group in groups]


def name_in_experiment(run: SavedRun, case: str) -> GroupName:
    """Divide the name that an experiment has given to a run into method and case.

    Args:
        run: The run.
        case: The settings of the data that distinguish it, which count if the experiment tells no case, as in 0.2.0.
    """
    if run.case is not None:
        case = run.case
    if run.name == case:
        return GroupName("", case=case)
    return GroupName(run.name.removesuffix(f", {case}"), case=case)


def name_by_settings(chosen: Sequence[str], table: Mapping[str, Sequence[str]], index: int) -> GroupName:
    """Name a group by some settings.

    Args:
        chosen: Names of the settings.
        table: The values of each setting by group, as text.
        index: Index of the group.
    """
    of_method: list[str] = []
    of_case: list[str] = []
    for name in dict.fromkeys(chosen):
        text = short(name, table[name][index])
        if text:
            (of_case if is_data(name) else of_method).append(text)
    return GroupName(", ".join(of_method), case=", ".join(of_case))


def are_names(texts: Sequence[str]) -> bool:
    """Return True for texts that tell all groups apart: none is empty and none stands twice."""
    return "" not in texts and len(set(texts)) == len(texts)


def name_of_folder(folder: Path) -> str:
    """Name a run by its folder and the one above.

    >>> name_of_folder(Path("runs/digits_fedntd/0-seed1"))
    'digits_fedntd/0-seed1'
    """
    return "/".join(folder.resolve().parts[-2:])


def differing(settings: Sequence[Settings]) -> dict[str, list[str]]:
    """Find the settings that are not the same everywhere, without the seeds: the values as text, empty if unknown.

    >>> differing([{"model.mu": 0.1, "a": 1}, {"a": 1}])
    {'model.mu': ['0.1', '']}
    """
    names: dict[str, None] = {}
    for known in settings:
        names |= dict.fromkeys(known)
    table: dict[str, list[str]] = {}
    for name in names:
        values = [str(known[name]) if name in known else "" for known in settings]
        if not is_seed(name) and len(set(values)) > 1:
            table[name] = values
    return table


MEAN = ("model.aggregator", "Aggregator")
"""The setting and the class of the rule that is taken if none is named: the mean, which may be weighed otherwise."""


def short(name: str, value: str) -> str:
    """Write a setting in few words, a class by its name alone, and None not at all.

    >>> short("model.client", "fl_lightning.methods.FedNTD"), short("model.client.beta", "0.3")
    ('FedNTD', 'beta=0.3')
    """
    if value in ("", "None") or (name, value.rpartition(".")[2]) == MEAN:
        return ""
    if CLASS_PATH.fullmatch(value):
        return value.rpartition(".")[2]
    return f"{name.rpartition('.')[2]}={value}"


def data_differences(groups: Sequence[Group]) -> list[Difference]:
    """Compare the data and cohorts of runs with the same seed, of all groups: each difference once.

    Runs that have all samples at one place are compared among themselves.
    """
    by_name: dict[str, Difference] = {}
    first: dict[tuple[Seeds, bool], SavedRun] = {}
    for group in groups:
        for run in group.runs:
            is_pooled = str(run.settings.get(POOLED)) == "True"
            other = first.setdefault((run.seeds, is_pooled), run)
            told = differences(other.data, run.data, only_shared=True)  # a checkpoint may lack, or tell less
            both = other.is_configured and run.is_configured
            set_otherwise = differences(data_of(other), data_of(run), only_shared=not both)
            for difference in chain(told, set_otherwise):
                by_name.setdefault(difference.name, difference)
    return list(by_name.values())


def data_of(run: SavedRun) -> Settings:
    """Return the settings of the samples and cohorts of a run."""
    return {name: value for name, value in run.settings.items() if is_data(name)}
