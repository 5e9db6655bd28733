"""The table of a run's jobs: which client works when in simulated time, and what becomes of its work."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from fl_lightning.aggregation.timeline import Job, TimedRound, Timeline
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


def jobs_of(
    timeline: Timeline, num_rounds: int, client_names: Sequence[str], *, deadline: float | None = None
) -> list[TimedJob]:
    """Return the jobs that start in the first rounds of a run, in the order of their starts.

    A job that the server no longer waits for ends with the round.

    Args:
        timeline: The timeline of the run.
        num_rounds: The number of rounds.
        client_names: Names of the N clients.
        deadline: Seconds after which a round leaves out the clients that are not back. None means no deadline.
    """
    rounds = [timeline.round(round_idx) for round_idx in range(num_rounds)]
    ended: dict[int, TimedJob] = {}
    for round_idx, timed in enumerate(rounds):
        for job in timed.arrivals:
            ended[job.number] = TimedJob(
                client=client_names[job.client_id],
                start=job.start,
                end=job.end,
                outcome="arrived",
                staleness=round_idx - job.version,
                round_idx=round_idx,
            )
        for job in timed.lost:
            ended[job.number] = TimedJob(
                client=client_names[job.client_id],
                start=job.start,
                end=min(job.end, timed.end),
                outcome="late" if is_late(job, timed, deadline) else "lost",
                round_idx=round_idx,
            )
    jobs: list[TimedJob] = []
    for timed in rounds:
        for job in timed.started:
            at_work = TimedJob(
                client=client_names[job.client_id],
                start=job.start,
                end=job.end,
                outcome="at work",
            )
            jobs.append(ended.get(job.number, at_work))
    return jobs


def is_late(job: Job, timed: TimedRound, deadline: float | None) -> bool:
    """Return True for a job that came to nothing because the server no longer waits for it.

    Args:
        job: A job that came to nothing in a round.
        timed: The round.
        deadline: Seconds after which a round leaves out the clients that are not back. None means no deadline.
    """
    is_over = deadline is not None and job.end >= job.start + deadline
    return not job.is_lost or is_over or job.end > timed.end


def write_timeline(path: Path, jobs: Sequence[TimedJob]) -> None:
    """Write the table of jobs, a line for each.

    Args:
        path: The file.
        jobs: The jobs.
    """
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
    jobs: list[TimedJob] = []
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
