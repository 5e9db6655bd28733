"""Timelines: who starts from which version, who comes back and when, as a pure function of settings and draws.

A version v is the weights before round v. A job is a client that starts from a version. A round is one server step.
"""

import heapq
from abc import ABC, abstractmethod
from bisect import insort
from collections import Counter
from collections.abc import Callable, Sequence
from typing import ClassVar, Literal, NamedTuple

from fl_lightning.data.devices import JobTimes
from fl_lightning.utils.keyed import keyed_numpy

MOST_LOST = 100_000
"""Number of jobs in a row that are lost before a timeline is taken for one in which no job arrives."""


class Job(NamedTuple):
    """Holds the job of a client.

    Args:
        number: The number of the start, from 0 in the run.
        client_id: Id of the client.
        version: The version that the client starts from.
        start: Seconds at which the client starts, since the start of the run.
        end: Seconds at which the job arrives, or at which the server knows that it is lost.
        is_lost: Whether the job is lost on its way. A job that arrives too late to count is not.
        share: The share of its batches that the client makes, in (0, 1].
    """

    number: int
    client_id: int
    version: int
    start: float
    end: float
    is_lost: bool
    share: float = 1.0


class TimedRound(NamedTuple):
    """Holds what happens in a round.

    Args:
        start: Seconds at which the round begins, since the start of the run.
        end: Seconds at which the server steps.
        started: The jobs that start from the version of the round, by number.
        arrivals: The jobs that the server step takes, in the order in which they arrive.
        lost: The jobs that come to nothing in this round.
    """

    start: float
    end: float
    started: tuple[Job, ...]
    arrivals: tuple[Job, ...]
    lost: tuple[Job, ...]


class Timeline(ABC):
    """Makes the rounds of a run one after the other, and keeps them.

    Attributes:
        patience: The settings that say how long the server waits for a job.
    """

    patience: ClassVar[str]

    def __init__(self) -> None:
        self._rounds: list[TimedRound] = []

    def round(self, round_idx: int) -> TimedRound:
        """Return what happens in a round.

        Args:
            round_idx: Index of the round, from 0.

        Raises:
            ValueError: No job arrives.
        """
        while len(self._rounds) <= round_idx:
            self._rounds.append(self._next(len(self._rounds)))
        return self._rounds[round_idx]

    def check_arrivals(self, limit: int | None) -> None:
        """Make rounds up to the first one in which a job arrives, or in which nobody starts.

        Args:
            limit: The number of rounds that there are. None means any number.

        Raises:
            ValueError: No job arrives.
        """
        round_idx = 0
        while limit is None or round_idx < limit:
            timed = self.round(round_idx)
            if timed.arrivals or not timed.started:
                return
            round_idx += 1
        raise ValueError(self._nobody_arrives(f"those of all {limit} rounds are lost"))

    def _nobody_arrives(self, fact: str) -> str:
        """Return the sentence about jobs of which none arrives.

        Args:
            fact: What happens to them.
        """
        return f"a job must come back at some time, but {fact}; raise {self.patience}, or lower data.devices.dropout"

    @abstractmethod
    def _next(self, round_idx: int) -> TimedRound:
        """Make the next round."""

    @abstractmethod
    def leaving(self, round_idx: int) -> list[Job]:
        """Return the jobs that start from the version of a round and arrive in a later one, by number."""

    def arrived_before(self, client_id: int, version: int, round_idx: int) -> bool:
        """Return True if the job of a client that started from a version has arrived before a round.

        Args:
            client_id: Id of the client.
            version: The version.
            round_idx: Index of a round that was asked for.
        """
        return version < round_idx


class SynchronousTimeline(Timeline):
    """Makes rounds that begin when the round before has ended.

    Args:
        times: The times of jobs.
        asked: Returns the clients that are asked in a round: `round_idx -> client ids`.
        wanted: The number of clients that count at most. None means all that are asked.
        deadline: Seconds after which a round ends. None means that it waits.
        late: Whether clients that would come after the deadline are dropped (`drop`), or make fewer batches (`cut`).
    """

    patience = "model.pacing.deadline"

    def __init__(
        self,
        times: JobTimes,
        *,
        asked: Callable[[int], Sequence[int]],
        wanted: int | None,
        deadline: float | None,
        late: Literal["drop", "cut"],
    ) -> None:
        super().__init__()
        self._times = times
        self._asked = asked
        self._wanted = wanted
        self._deadline = deadline
        self._late = late
        self._seconds = 0.0
        self._number = 0
        self._lost_in_a_row = 0

    def leaving(self, round_idx: int) -> list[Job]:
        return []

    def _next(self, round_idx: int) -> TimedRound:
        start = self._seconds
        clients = self._asked(round_idx)
        started = [self._job(client_id, round_idx) for client_id in clients]
        in_time = [job for job in started if not job.is_lost]
        in_time.sort(key=lambda job: (job.end, job.client_id))
        wanted = len(clients) if self._wanted is None else self._wanted
        arrivals = in_time[:wanted]
        numbers = {job.number for job in arrivals}
        lost = [job for job in started if job.number not in numbers]
        self._lost_in_a_row = 0 if arrivals else self._lost_in_a_row + len(lost)
        if self._lost_in_a_row >= MOST_LOST:
            raise ValueError(self._nobody_arrives(f"the last {MOST_LOST:,} were lost"))
        self._seconds = self._end(started, arrivals, wanted)
        return TimedRound(
            start=start,
            end=self._seconds,
            started=tuple(started),
            arrivals=tuple(arrivals),
            lost=tuple(lost),
        )

    def _end(self, started: Sequence[Job], arrivals: Sequence[Job], wanted: int) -> float:
        """Return when a round ends.

        Args:
            started: The jobs of the round.
            arrivals: The jobs that count.
            wanted: The number of jobs that count at most.
        """
        last_arrival = max((job.end for job in arrivals), default=self._seconds)
        if len(arrivals) in (wanted, len(started)):
            return last_arrival
        if self._deadline is not None:
            return self._seconds + self._deadline
        return max(job.end for job in started)

    def _job(self, client_id: int, version: int) -> Job:
        """Return the job of a client in a round. A job that the deadline drops is lost."""
        duration = self._times.duration(client_id, version)
        seconds = duration.seconds
        share = 1.0
        deadline = self._deadline
        is_late = deadline is not None and seconds > deadline
        if is_late and deadline is not None and self._late == "cut" and duration.computing > 0:
            # A late client makes as many batches as it has time for.
            batches = int((deadline - duration.fixed) / duration.computing * duration.batches)
            if batches >= 1:
                share = batches / duration.batches
                seconds = duration.fixed + share * duration.computing
                is_late = False
        lost_after = self._times.lost_after(client_id, version)
        if lost_after is not None:
            seconds *= lost_after
        if is_late and deadline is not None:
            seconds = min(seconds, deadline)
        number = self._number
        self._number += 1
        return Job(
            number=number,
            client_id=client_id,
            version=version,
            start=self._seconds,
            end=self._seconds + seconds,
            is_lost=is_late or lost_after is not None,
            share=share,
        )


class BufferedTimeline(Timeline):
    """Makes rounds that end when a number of jobs has arrived, whatever versions they started from.

    A free slot is filled at once by an idle client. A client that waits in the buffer is not idle. If nobody is idle,
    the slot is filled at the next step. Events of one time go by the number of the start.

    Args:
        times: The times of jobs.
        seed: The seed of the draws of who starts.
        clients: Ids of the clients that train, ascending.
        concurrency: The number of slots.
        buffer: The number of arrivals after which the server steps.
        timeout: Seconds after which the server takes a job for lost. None waits, and knows at once if one is lost.
        max_staleness: Largest number of server steps that a job may miss. None takes all jobs.
    """

    patience = "model.pacing.timeout or max_staleness"

    def __init__(
        self,
        times: JobTimes,
        *,
        seed: int,
        clients: Sequence[int],
        concurrency: int,
        buffer: int,
        timeout: float | None,
        max_staleness: int | None,
    ) -> None:
        super().__init__()
        self._times = times
        self._seed = seed
        self._idle = list(clients)
        self._free = concurrency
        self._buffer = buffer
        self._timeout = timeout
        self._max_staleness = max_staleness
        self._seconds = 0.0
        self._started: list[Job] = []
        """The jobs from the present version."""
        self._attempts = Counter[int]()
        """The number of jobs from the present version by client id."""
        self._number = 0
        self._at_work: list[tuple[float, int, Job]] = []
        """The jobs at work, a heap by end and number."""
        self._arrived_in: dict[tuple[int, int], int] = {}
        """The round in which a job arrives that counts, by client id and version."""
        self._fill(version=0)

    def leaving(self, round_idx: int) -> list[Job]:
        timed = self.round(round_idx)
        at_work = [job for job in timed.started if not job.is_lost and job not in timed.arrivals]
        if self._max_staleness is None:
            return at_work
        # A job that comes too late is never needed. Whether it does is known once it could not count any more.
        self.round(round_idx + self._max_staleness)
        return [job for job in at_work if (job.client_id, job.version) in self._arrived_in]

    def arrived_before(self, client_id: int, version: int, round_idx: int) -> bool:
        return self._arrived_in.get((client_id, version), round_idx) < round_idx

    def _next(self, round_idx: int) -> TimedRound:
        start = self._seconds
        arrivals: list[Job] = []
        lost: list[Job] = []
        lost_in_a_row = 0
        while len(arrivals) < self._buffer:
            self._seconds, _, job = heapq.heappop(self._at_work)
            self._free += 1
            if self._counts(job, round_idx):
                arrivals.append(job)
                self._arrived_in[job.client_id, job.version] = round_idx
                lost_in_a_row = 0
            else:
                lost.append(job)
                insort(self._idle, job.client_id)
                lost_in_a_row += 1
            if lost_in_a_row == MOST_LOST:
                raise ValueError(self._nobody_arrives(f"the last {MOST_LOST:,} were lost"))
            if len(arrivals) < self._buffer:
                self._fill(round_idx)
        started = self._started
        self._started = []
        self._attempts.clear()
        for job in arrivals:
            insort(self._idle, job.client_id)
        self._fill(round_idx + 1)
        return TimedRound(
            start=start,
            end=self._seconds,
            started=tuple(started),
            arrivals=tuple(arrivals),
            lost=tuple(lost),
        )

    def _counts(self, job: Job, round_idx: int) -> bool:
        """Return True if a job that has ended counts in a round."""
        if job.is_lost:
            return False
        return self._max_staleness is None or round_idx - job.version <= self._max_staleness

    def _fill(self, version: int) -> None:
        """Fill free slots with idle clients, which start from a version."""
        while self._free and self._idle:
            place = int(keyed_numpy(self._seed, "clock/start", self._number).integers(len(self._idle)))
            job = self._job(self._idle.pop(place), version)
            heapq.heappush(self._at_work, (job.end, job.number, job))
            self._started.append(job)
            self._free -= 1

    def _job(self, client_id: int, version: int) -> Job:
        """Return the next job of a client."""
        attempt = self._attempts[client_id]
        self._attempts[client_id] += 1
        seconds = self._times.duration(client_id, version, attempt).seconds
        lost_after = self._times.lost_after(client_id, version, attempt)
        is_lost = lost_after is not None
        if lost_after is not None:
            seconds *= lost_after
        if self._timeout is not None and (is_lost or seconds > self._timeout):
            # The server learns of a loss when it stops waiting.
            is_lost = True
            seconds = self._timeout
        number = self._number
        self._number += 1
        return Job(
            number=number,
            client_id=client_id,
            version=version,
            start=self._seconds,
            end=self._seconds + seconds,
            is_lost=is_lost,
        )
