"""Runs on disk are read for reports, and those that differ only in the seed form a group."""

import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml  # type: ignore[import-untyped]
from numpy.typing import NDArray

from fl_lightning.federation.identity import DIGESTS, Difference, Settings, below, differences, flat
from fl_lightning.metrics.history import History
from fl_lightning.reports.figures import Numbers
from fl_lightning.runs.folder import CLIENT, CONFIG, identity_in, newest_first
from fl_lightning.runs.loggers import RoundCSVLogger
from fl_lightning.runs.partition import PARTITION
from fl_lightning.runs.round_table import read_cells, reading

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

SEEDS = ("seed_everything", "model.seed", "data.seed", "data.sampling_seed")
"""Settings in which the runs of one group may differ."""

POOLED = "data.pooled"
"""Setting of a reference that has the samples of all clients at one place."""

NOT_DATA = ("data.batch_size", "data.shuffle", "data.eval_batch_size", POOLED)
"""Settings of the data module that change neither the samples of a client nor the cohorts, or are a reference's."""

MOST_PARTS = 100_000
DEEPEST = 100
"""Parts of a configuration at most, and how deep they may be nested."""

MOST_SAMPLES = 2**53

CLASS_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")


class Counts(NamedTuple):
    """Training samples of each client and class, (N, C), and the names of the classes."""

    table: Numbers
    names: list[str]


@dataclass(frozen=True, eq=False)
class SavedRun:
    """One run.

    Attributes:
        folder: of the run.
        history: the rows of its metrics.csv.
        settings: fixed settings by dotted name; empty where neither config.yaml nor a checkpoint tells.
        data: what a checkpoint tells of the data and cohorts.
        test: values of the test split after the last round, by log key; empty where `test` was not run.
        partition: None where the samples have no classes.
        clients: columns of clients.csv by name, NaN where a cell holds no number; empty where there is none.
        rounds: of which it is read, the first ones; None: all.
        name: in the tables of the experiment that made it; empty: there is none.
        is_whole: whether no later round of it is left out.
    """

    folder: Path
    history: History
    settings: Settings
    data: Settings = field(default_factory=dict)
    test: Mapping[str, float] = field(default_factory=dict)
    partition: Counts | None = None
    clients: Mapping[str, Numbers] = field(default_factory=dict)
    rounds: int | None = None
    name: str = ""
    is_whole: bool = True

    def has_round(self, round_idx: int) -> bool:
        """Return True for a round of which it is read."""
        return self.rounds is None or round_idx < self.rounds

    def columns(self, name: str, texts: Sequence[str] = ()) -> dict[str, NDArray[Any]]:
        """Read a table of its folder with a row for each round and more, as `read_columns`."""
        columns = read_columns(self.folder / name, texts)
        if self.rounds is None or "round" not in columns:
            return columns
        rows = columns["round"] < self.rounds
        return {name: values[rows] for name, values in columns.items()}

    @property
    def seeds(self) -> tuple[object, ...]:
        """Settings that distinguish it within its group."""
        return tuple(self.settings.get(name) for name in SEEDS)

    @property
    def seed(self) -> str:
        """The seeds are written as text, equal ones once, empty where none is known."""
        return "/".join(dict.fromkeys(str(seed) for seed in self.seeds if seed is not None))


@dataclass(frozen=True, eq=False)
class Group:
    """Runs that differ only in the seed.

    Attributes:
        label: their name in tables and figures.
        runs: one of each seed.
    """

    label: str
    runs: Sequence[SavedRun]

    def curves(self, key: str) -> tuple[list[int], Numbers]:
        """Find the rounds in which all runs that know a value have it, and the values, (S, T)."""
        known = [curve for run in self.runs if (curve := run.history.curve(key))]
        rounds = sorted(set.intersection(*map(set, known))) if known else []
        return rounds, np.array([[curve[r] for r in rounds] for curve in known]).reshape(len(known), len(rounds))

    def columns(self, part: str) -> tuple[list[int], list[str], Numbers]:
        """Take the mean over the runs of the columns with `part` in their name: rounds, names and values (T, K)."""
        tables = [run.history.columns(part) for run in self.runs]
        tables = [table for table in tables if table[0] and table[1] == tables[0][1]]
        if not tables:
            return [], [], np.zeros((0, 0))
        rounds = sorted(set.intersection(*(set(known) for known, _, _ in tables)))
        chosen = [table.numpy()[[known.index(r) for r in rounds]] for known, _, table in tables]
        return rounds, tables[0][1], np.mean(chosen, axis=0)


# --- reading --------------------------------------------------------------------------------------


def find_runs(paths: Iterable[str | Path]) -> list[Path]:
    """Find the run folders that paths name: run folders, or folders with runs in them or below.

    Raises:
        FileNotFoundError: a path that holds no run.
    """
    folders: dict[Path, None] = {}
    for path in map(Path, paths):
        table = path / METRICS
        runs = [path] if os.path.lexists(table) and not os.path.isdir(table) else []
        runs = runs or list(folders_with_runs(path))
        if not runs:
            raise FileNotFoundError(f"a run folder holds {METRICS}, and there is none in {path} or below")
        folders |= dict.fromkeys(sorted(runs, key=natural))
    return list(folders)


def folders_with_runs(path: Path) -> Iterator[Path]:
    """Find the run folders below a folder, of an experiment those of its tables without the candidates of tuning."""
    for folder, folders, files in os.walk(path):
        if {"cells", TUNING} <= {*folders}:
            folders.remove(TUNING)
        if METRICS in chain(folders, files):
            yield Path(folder)


def natural(path: Path) -> list[tuple[int, str]]:
    """Key that orders folders by the numbers in their names: 2 before 10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", str(path))]


def read_run(folder: Path, rounds: int | None = None) -> SavedRun:
    """Read a run, as far as its folder holds it.

    Args:
        folder: of the run.
        rounds: that are read, the first ones; what `test` gave belongs to the last round; None: all.

    Raises:
        ValueError: naming the file that cannot be read as what it should be.
    """
    history = History()
    table = RoundCSVLogger(folder)
    if not table.path.is_file():
        raise ValueError(f"{table.path} must be a file with a row for each round, and is none; leave that run out")
    on_disk = sorted(table.rows_on_disk().items())
    shown = [(round_idx, row) for round_idx, row in on_disk if rounds is None or round_idx < rounds]
    for round_idx, row in shown:
        history.record(round_idx, row)
    if not history.rounds:
        raise ValueError(f"{table.path} must have a row for each round, and has none; leave that run out")
    checkpoints = (path for path in newest_first(folder, "*.ckpt") if path.name != CLIENT)
    identity = next(filter(None, map(identity_in, checkpoints)), {})
    objects = identity.get("objects", {})
    known = {name: value for name, value in objects.items() if name not in DIGESTS}
    settings = read_config(folder / CONFIG) or identity.get("config") or known
    data = {name: value for name, value in objects.items() if is_data(name)}
    test = read_test(folder / TEST, on_disk[-1][0]) if len(shown) == len(on_disk) else {}
    partition = read_partition(folder / PARTITION)
    clients = read_columns(folder / CLIENTS)
    limit = None if rounds is None else min(rounds, len(on_disk))
    whole = len(shown) == len(on_disk)
    name = read_name(folder / DONE)
    return SavedRun(folder, history, settings, data, test, partition, clients, limit, name, whole)


def read_config(path: Path) -> Settings:
    """Read the fixed settings in a run's configuration, none where there is no file.

    Raises:
        ValueError: it is no YAML of settings.
    """
    if not path.is_file():
        return {}
    with reading(path, "the configuration of a run, and cannot be read"):
        text = path.read_text(encoding="utf-8")
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # in C: a tenth of the time
        events = yaml.parse(text, loader) if "<<" in text else ()
        if any(isinstance(event, yaml.ScalarEvent) and event.value == "<<" for event in events):
            raise ValueError("mappings that take in others, which no run writes, may grow without end")
        try:
            content = yaml.load(text, loader)
        except yaml.YAMLError:  # of half a character, which is read in Python only
            content = yaml.safe_load(text)
        check_size(content)
        return flat(content)


def check_size(content: Any) -> None:
    """Refuse a pytree that is too deep or too large to be settings, as YAML's aliases may make of any file.

    Raises:
        ValueError: if it is.
    """
    left = MOST_PARTS
    parts = [(content, 0)]
    while parts:
        part, depth = parts.pop()
        inner = list(part.values()) if isinstance(part, Mapping) else part if isinstance(part, Sequence | Set) else ()
        left -= 0 if isinstance(part, str | bytes) else len(inner)
        if left < 0 or depth > DEEPEST:
            raise ValueError("too large")
        parts += [(value, depth + 1) for value in inner if not isinstance(value, str | bytes)]


def read_test(path: Path, last_round: int) -> dict[str, float]:
    """Read what `test` gave after a round, nothing where it was not run, or after another round.

    A file that does not say its round is of the last one: version 0.2.0 wrote none.

    Raises:
        ValueError: it is no JSON object of numbers.
    """
    if not path.is_file():
        return {}
    with reading(path, "the numbers that test gave by name, and cannot be read as them"):
        values = {name: float(number) for name, number in json.loads(path.read_text(encoding="utf-8")).items()}
    round_idx = values.pop("round", last_round)
    values.pop("round_best", None)
    return values if round_idx == last_round else {}


def read_name(path: Path) -> str:
    """Read the name that a run has in the tables of its experiment, empty where there is none.

    Raises:
        ValueError: it is no JSON object.
    """
    if not path.is_file():
        return ""
    with reading(path, "what an experiment says of a run, and cannot be read as it"):
        return str(json.loads(path.read_text(encoding="utf-8")).get("name", ""))


def read_partition(path: Path) -> Counts | None:
    """Read the training samples of each client and class, None where there is no such table or it is empty.

    Raises:
        ValueError: it is no table of counts.
    """
    columns = read_columns(path)
    columns.pop("client", None)
    if not columns:
        return None
    table = np.stack([*columns.values()], axis=1)
    if not ((table >= 0) & (table <= MOST_SAMPLES)).all():
        raise ValueError(f"{path} must hold counts of samples, and has other cells; move it away")
    return Counts(table, list(columns)) if len(table) else None


def read_columns(path: Path, texts: Sequence[str] = ()) -> dict[str, NDArray[Any]]:
    """Read a table by column, with NaN for a cell without a number but in `texts`, and without lines that were cut."""
    if not path.is_file():
        return {}
    with reading(path, "a table, and cannot be read as one"):
        columns = read_cells(path)
        return {name: np.array(c if name in texts else [*map(as_number, c)]) for name, c in columns.items()}


def as_number(text: str) -> float:
    """Read a number, and anything else as NaN."""
    try:
        return float(text)
    except ValueError:
        return math.nan


# --- groups ---------------------------------------------------------------------------------------


def grouped(runs: Iterable[SavedRun]) -> list[Group]:
    """Put the runs that differ only in the seed together, of several with the same seed the last."""
    alike: dict[object, dict[object, SavedRun]] = {}
    for run in runs:
        fixed = frozenset((name, repr(value)) for name, value in run.settings.items() if name not in SEEDS)
        alike.setdefault(fixed or run.folder, {})[repr(run.seeds)] = run
    members = [sorted(group.values(), key=lambda run: [str(seed) for seed in run.seeds]) for group in alike.values()]
    return [Group(label, group) for label, group in zip(labels(members), members, strict=True)]


def labels(groups: Sequence[Sequence[SavedRun]]) -> list[str]:
    """Name groups as their experiment does, else by the settings that distinguish them, as few as are needed."""
    given = [group[0].name for group in groups]
    if len({*given, ""}) == len(groups) + 1:
        return given
    if len(groups) == 1:
        return [name_of_folder(groups[0][0].folder)]
    table = differing([group[0].settings for group in groups])
    shared = [name for name, values in table.items() if "" not in values]
    top = [name for name in shared if not any(name != other and below(name, other) for other in shared)]
    classes = [name for name in top if any(map(CLASS_PATH.fullmatch, table[name]))]
    for chosen in (classes, top, list(table)):
        named = [", ".join(filter(None, (short(name, table[name][i]) for name in chosen))) for i in range(len(groups))]
        if len({*named, ""}) == len(groups) + 1:
            return named
    return [name_of_folder(group[0].folder) for group in groups]


def name_of_folder(folder: Path) -> str:
    """Name a run by its folder and the one above.

    >>> name_of_folder(Path("runs/digits_fedntd/0-seed1"))
    'digits_fedntd/0-seed1'
    """
    return "/".join(folder.resolve().parts[-2:])


def differing(settings: Sequence[Settings]) -> dict[str, list[str]]:
    """Find the settings that are not the same everywhere, seeds aside: the values as text, empty where unknown.

    >>> differing([{"model.mu": 0.1, "a": 1}, {"a": 1}])
    {'model.mu': ['0.1', '']}
    """
    names = dict.fromkeys(name for known in settings for name in known if name not in SEEDS)
    table = {name: ["" if name not in known else str(known[name]) for known in settings] for name in names}
    return {name: values for name, values in table.items() if len(set(values)) > 1}


MEAN = ("model.aggregator", "Aggregator")
"""The rule that is taken where none is named, too: the mean, which may be weighed otherwise."""


def short(name: str, value: str) -> str:
    """Write a setting in few words, a class by its name alone, and None not at all.

    >>> short("model.client", "fl_lightning.methods.FedNTD"), short("model.client.beta", "0.3")
    ('FedNTD', 'beta=0.3')
    """
    if value in ("", "None") or (name, value.rpartition(".")[2]) == MEAN:
        return ""
    return value.rpartition(".")[2] if CLASS_PATH.fullmatch(value) else f"{name.rpartition('.')[2]}={value}"


def is_data(name: str) -> bool:
    """True for a setting of the samples, of their partition or of the cohorts."""
    return below(name, "data") and not any(below(name, other) for other in NOT_DATA)


def data_differences(groups: Sequence[Group]) -> list[Difference]:
    """Compare the data and cohorts of runs with the same seed, of all groups: each difference once.

    Runs that have all samples at one place are compared among themselves.
    """
    by_name: dict[str, Difference] = {}
    first: dict[tuple[str, bool], SavedRun] = {}
    for run in (run for group in groups for run in group.runs):
        other = first.setdefault((run.seed, str(run.settings.get(POOLED)) == "True"), run)
        settings = {name: value for name, value in other.settings.items() if is_data(name)}
        for difference in chain(differences(other.data, run.data), differences(settings, run.settings)):
            by_name.setdefault(difference.name, difference)
    return list(by_name.values())
