"""Results of an experiment in one csv file, of which its tables are made again without the runs."""

import csv
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from fl_lightning.metrics.history import History
from fl_lightning.metrics.keys import SECONDS
from fl_lightning.papers.drawing import Series, unique
from fl_lightning.reports.results import STATISTICS, known_metrics, statistics_of
from fl_lightning.reports.saved import TIMES, Group, SavedRun
from fl_lightning.utils.files import write_table
from fl_lightning.utils.round_table import read_cells
from fl_lightning.utils.text import of_cell

RUN = ("rounds", "all_rounds", "seconds", "cpu_seconds", "commit", "machine")
COLUMNS = ("case", "method", "seed", "metric", *STATISTICS, *RUN, "error", "curve")
STOPPED = "stopped_early"
"""Further column, which files of 0.2.0 lack: yes for a run that ended by itself before all rounds."""

SPENT = "max_seconds"
"""Further column, which files of earlier versions lack: simulated seconds that the run was given and has used up."""

UNKNOWN = "nan"
NOT_A_NUMBER = "NaN"
"""Words of a curve for a round without a value, and for a value that is no number."""

DIGITS = 8
"""Significant digits of the values of a curve."""


def write_stored(path: Path, series: Sequence[Series], keys: Sequence[str] = ()) -> None:
    """Write a line for each run and metric, one for its simulated seconds if it has any, and one for each failed run.

    Args:
        path: of the file.
        series: runs.
        keys: log keys; none: the known ones.
    """
    lines = list[list[Any]]()
    for each in series:
        for run in each.group.runs:
            info = list(made(run, each.all_rounds).values())
            clock = [SECONDS] if run.clock else []
            for key in unique([*(keys or known_metrics([each.group])), *clock]):
                statistics = statistics_of(run, key)
                if statistics:
                    values = [statistics.get(name, "") for name in STATISTICS]
                    start = [each.case, each.method, run.seed, key]
                    stopped = "yes" if run.stopped_early else ""
                    spent = "" if run.budget is None else run.budget
                    lines.append([*start, *values, *info, "", curve_text(run.history.curve(key)), stopped, spent])
        empty = [""] * (1 + len(STATISTICS) + len(RUN))
        lines += [[each.case, each.method, seed, *empty, error, "", "", ""] for seed, error in each.failed.items()]
    write_table(path, [[*COLUMNS, STOPPED, SPENT], *lines])


def made(run: SavedRun, all_rounds: int | None) -> dict[str, str]:
    """Sum up a run's rounds and costs, and name what it was made with, empty where no one tells."""
    path = run.folder / TIMES
    table = read_cells(path) if path.is_file() else {}
    sums = {name: f"{sum(map(float, table[name])):.1f}" if name in table else "" for name in ("seconds", "cpu_seconds")}
    named = {name: "; ".join(unique(filter(None, table.get(name, [])))) for name in ("commit", "machine")}
    rounds = {"rounds": str(len(run.history)), "all_rounds": "" if all_rounds is None else str(all_rounds)}
    return {**rounds, **sums, **named}


def curve_text(curve: dict[int, float]) -> str:
    """Write the values of a curve round by round, from round 0 on.

    A round without a value is `nan`, and a value that is no number is `NaN`.

    >>> curve_text({0: 0.5, 2: 0.75, 3: math.nan, 4: math.inf})
    '0.5 nan 0.75 NaN inf'
    """
    words = []
    for t in range(max(curve, default=-1) + 1):
        value = curve.get(t)
        if value is None:
            words.append(UNKNOWN)
        elif math.isnan(value):
            words.append(NOT_A_NUMBER)
        else:
            words.append(f"{value:.{DIGITS}g}")
    return " ".join(words)


def csv_rows(path: Path, columns: Iterable[str] = ()) -> list[dict[str, str]]:
    """Read the rows of a csv file by column, none where there is no file.

    Args:
        path: of the file.
        columns: that it must have.

    Raises:
        ValueError: it lacks one, or a line has other columns than the first.
    """
    if not path.is_file():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        rows = list(reader)
        there = reader.fieldnames or ()
    if missing := [name for name in columns if name not in there]:
        raise ValueError(f"{path} must have the columns {', '.join(columns)}, and lacks {', '.join(missing)}")
    if any(None in row or None in row.values() for row in rows):
        raise ValueError(f"{path} must have the columns of its first line in all others; mend it")
    return [{name: of_cell(text) for name, text in row.items()} for row in rows]


def read_stored(path: Path) -> list[Series]:
    """Read what `write_stored` wrote, as series of runs that know the stored metrics.

    Raises:
        ValueError: a line cannot be read.
    """
    lines = csv_rows(path, COLUMNS)
    series = list[Series]()
    for method, case in dict.fromkeys((line["method"], line["case"]) for line in lines):
        alike = [line for line in lines if (line["method"], line["case"]) == (method, case)]
        failed = {line["seed"]: line["error"] for line in alike if line["error"]}
        values = [line for line in alike if not line["error"]]
        seeds = unique(line["seed"] for line in values)
        runs = [stored_run(path, [line for line in values if line["seed"] == seed]) for seed in seeds]
        rounds = next((int(line["all_rounds"]) for line in alike if line["all_rounds"]), None)
        series.append(Series(method, case, Group("", runs), failed, rounds))
    return series


def stored_run(path: Path, lines: Iterable[dict[str, str]]) -> SavedRun:
    """Make a run of its lines."""
    rows = dict[int, dict[str, float]]()
    test = dict[str, float]()
    seed = rounds = ""
    planned: int | None = None
    budget: float | None = None
    for line in lines:
        if line.get(SPENT):
            budget = float(line[SPENT])
        if line.get(STOPPED) and line["all_rounds"]:
            planned = int(line["all_rounds"])
        seed = line["seed"]
        key = line["metric"]
        rounds = line["rounds"]
        for t, word in enumerate(line["curve"].split()):
            if word != UNKNOWN:
                rows.setdefault(t, {})[key] = float(word)
        if not line["curve"]:
            test[key] = float(line["final"])
    history = History()
    for t in sorted(rows):
        history.record(t, rows[t])
    return SavedRun(
        folder=path.parent,
        history=history,
        settings={"seed_everything": seed},
        test=test,
        rounds=int(rounds),
        planned=planned,
        budget=budget,
    )
