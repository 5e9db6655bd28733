"""The table of a run's jobs: which client works when in simulated time, and what becomes of its work."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from fl_lightning.utils.files import write_table
from fl_lightning.utils.round_table import read_cells, reading

TIMELINE = "timeline.csv"
"""Name of the table."""

Outcome = Literal["arrived", "lost", "late", "at work"]
"""What becomes of a job: the server takes it, it is lost, it comes too late to count, or the run ends before."""

COLUMNS = ("client", "start", "end", "outcome", "staleness", "round")


class TimedJob(NamedTuple):
    """Has the time and the outcome of one client's work for one model that it was sent.

    Args:
        client: Name of the client.
        start: Simulated second at which the client is sent the model.
        end: Simulated second at which the job ends, or would end.
        outcome: What becomes of it.
        staleness: Number of server steps between, for a job that arrived. Otherwise 0.
        round_idx: The 0-based round that the job ends in, -1 if the run ends before.
    """

    client: str
    start: float
    end: float
    outcome: Outcome
    staleness: int = 0
    round_idx: int = -1


def write_timeline(path: Path, jobs: Sequence[TimedJob]) -> None:
    """Write the table of jobs, a line for each."""
    rows: list[Sequence[Any]] = [COLUMNS]
    for job in jobs:
        staleness = job.staleness if job.outcome == "arrived" else ""
        round_idx = "" if job.round_idx < 0 else job.round_idx
        rows.append([job.client, job.start, job.end, job.outcome, staleness, round_idx])
    write_table(path, rows)


def read_timeline(path: Path) -> list[TimedJob]:
    """Read the table of jobs, none if there is no file.

    Raises:
        ValueError: The file is no table of jobs.
    """
    if not path.is_file():
        return []
    jobs = []
    with reading(path, "a table of jobs in simulated time, and cannot be read as one"):
        columns = read_cells(path)
        for cells in zip(*(columns[name] for name in COLUMNS), strict=True):
            jobs.append(read_job(dict(zip(COLUMNS, cells, strict=True))))
    return jobs


def read_job(cells: dict[str, str]) -> TimedJob:
    """Read a line of the table.

    Args:
        cells: Its texts by column.

    Raises:
        ValueError: A cell has another kind of value.
    """
    outcomes: dict[str, Outcome] = {outcome: outcome for outcome in get_args(Outcome)}
    outcome = outcomes.get(cells["outcome"])
    start = float(cells["start"])
    end = float(cells["end"])
    if outcome is None or not 0 <= start <= end < math.inf:
        raise ValueError("no job has such a line")
    return TimedJob(
        client=cells["client"],
        start=start,
        end=end,
        outcome=outcome,
        staleness=int(cells["staleness"] or 0),
        round_idx=int(cells["round"] or -1),
    )
