"""Results of an experiment in one csv file, from which its tables are made again without the runs."""

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
"""Columns with what `made` tells of a run."""

COLUMNS = ("case", "method", "seed", "metric", *STATISTICS, *RUN, "error", "curve")
STOPPED = "stopped_early"
"""Further column, which files of 0.2.0 lack: yes for a run that ended by itself before all rounds."""

SPENT = "max_seconds"
"""Further column, which files of earlier versions lack: simulated seconds that the run was given and has used up."""

UNKNOWN = "nan"
"""Word of a curve for a round without a value."""

NOT_A_NUMBER = "NaN"
"""Word of a curve for a value that is no number."""

DIGITS = 8
"""Significant digits of the values of a curve."""


def write_stored(path: Path, series: Sequence[Series], keys: Sequence[str] = ()) -> None:
    """Write a line for each run and metric, one for its simulated seconds if it has any, and one for each failed run.

    Args:
        path: Path of the file.
        series: Runs of all methods and cases.
        keys: Log keys. Without keys the known ones are written.
    """
    columns = [*COLUMNS, STOPPED, SPENT]
    lines: list[dict[str, Any]] = []
    for each in series:
        for run in each.group.runs:
            clock = [SECONDS] if run.clock else []
            lines += lines_of(each, run, unique([*(keys or known_metrics([each.group])), *clock]))
        for seed, error in each.failed.items():
            lines.append({"case": each.case, "method": each.method, "seed": seed, "error": error})
    write_table(path, [columns, *([line.get(name, "") for name in columns] for line in lines)])


def lines_of(series: Series, run: SavedRun, keys: Iterable[str]) -> list[dict[str, Any]]:
    """Return the values of a run by column, a line for each log key that the run has.

    Args:
        series: The series of the run.
        run: The run.
        keys: Log keys.
    """
    of_run: dict[str, Any] = {
        "case": series.case,
        "method": series.method,
        "seed": run.seed,
        **made(run, series.all_rounds),
    }
    if run.stopped_early:
        of_run[STOPPED] = "yes"
    if run.budget is not None:
        of_run[SPENT] = run.budget
    lines = []
    for key in keys:
        statistics = statistics_of(run, key)
        if statistics:
            curve = curve_text(run.history.curve(key))
            lines.append({**of_run, "metric": key, **statistics, "curve": curve})
    return lines


def made(run: SavedRun, all_rounds: int | None) -> dict[str, str]:
    """Sum up a run's rounds and costs, and name commit and machine. What is not known is empty.

    Args:
        run: The run.
        all_rounds: Number of rounds of a whole run. None if it is not known.

    Returns:
        Texts by the names in `RUN`.
    """
    path = run.folder / TIMES
    table = read_cells(path) if path.is_file() else {}
    texts = {"rounds": str(len(run.history)), "all_rounds": "" if all_rounds is None else str(all_rounds)}
    for name in ("seconds", "cpu_seconds"):
        texts[name] = f"{sum(map(float, table[name])):.1f}" if name in table else ""
    for name in ("commit", "machine"):
        texts[name] = "; ".join(unique(filter(None, table.get(name, []))))
    return texts


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
    """Read the rows of a csv file by column, none if there is no file.

    Args:
        path: Path of the file.
        columns: Names of the columns that the file must have.

    Raises:
        ValueError: The file lacks a column, or a line has other columns than the first line.
    """
    if not path.is_file():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        rows = list(reader)
        present = reader.fieldnames or ()
    missing = [name for name in columns if name not in present]
    if missing:
        raise ValueError(f"{path} must have the columns {', '.join(columns)}, and lacks {', '.join(missing)}")
    if any(None in row or None in row.values() for row in rows):
        raise ValueError(f"{path} must have the columns of its first line in all others; mend it")
    return [{name: of_cell(text) for name, text in row.items()} for row in rows]


def read_stored(path: Path) -> list[Series]:
    """Read the file that `write_stored` wrote, as series of runs that know the stored metrics.

    Raises:
        ValueError: A line cannot be read.
    """
    by_series: dict[tuple[str, str], list[dict[str, str]]] = {}
    for line in csv_rows(path, COLUMNS):
        by_series.setdefault((line["method"], line["case"]), []).append(line)
    series = []
    for (method, case), lines in by_series.items():
        by_seed: dict[str, list[dict[str, str]]] = {}
        for line in lines:
            if not line["error"]:
                by_seed.setdefault(line["seed"], []).append(line)
        runs = [stored_run(path, of_seed) for of_seed in by_seed.values()]
        all_rounds = [int(line["all_rounds"]) for line in lines if line["all_rounds"]]
        series.append(
            Series(
                method=method,
                case=case,
                group=Group("", runs),
                failed={line["seed"]: line["error"] for line in lines if line["error"]},
                all_rounds=all_rounds[0] if all_rounds else None,
            )
        )
    return series


def stored_run(path: Path, lines: Sequence[dict[str, str]]) -> SavedRun:
    """Make a run of its lines.

    Args:
        path: Path of the file.
        lines: Lines of the run, one for each metric, at least one.
    """
    rows: dict[int, dict[str, float]] = {}
    test: dict[str, float] = {}
    planned: int | None = None
    budget: float | None = None
    for line in lines:
        if line.get(SPENT):
            budget = float(line[SPENT])
        if line.get(STOPPED) and line["all_rounds"]:
            planned = int(line["all_rounds"])
        key = line["metric"]
        for round_idx, word in enumerate(line["curve"].split()):
            if word != UNKNOWN:
                rows.setdefault(round_idx, {})[key] = float(word)
        if not line["curve"]:
            test[key] = float(line["final"])
    history = History()
    for round_idx in sorted(rows):
        history.record(round_idx, rows[round_idx])
    return SavedRun(
        folder=path.parent,
        history=history,
        settings={"seed_everything": lines[-1]["seed"]},
        test=test,
        rounds=int(lines[-1]["rounds"]),
        planned=planned,
        budget=budget,
    )
