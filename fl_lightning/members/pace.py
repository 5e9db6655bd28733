"""The seconds that clients take, by which a round's clients are spread over processes."""

from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Any

from fl_lightning.types import ClientResult, Member, RoundOutcome


class Pace(Member):
    """Measures how long clients train, and tells all processes at the end of a round.

    It is no state of the federation: a run that is continued measures anew.

    Args:
        size: samples that a client trains on, by its id.
    """

    name = "pace"

    def __init__(self, size: Callable[[int], int]) -> None:
        self._size = size
        self._seconds: dict[int, float] = {}  # by client, the same in all processes
        self._samples, self._total = 0, 0.0  # of all these clients
        self._here: dict[int, float] = {}  # of the round under way, of this process
        self._mark = 0.0

    def begin(self, round_idx: int, cohort: list[int]) -> None:
        self._here, self._mark = {}, perf_counter()

    def incoming(self, result: ClientResult) -> ClientResult:
        now, client_id = perf_counter(), result.update.client_id
        self._here[client_id] = self._here.get(client_id, 0.0) + now - self._mark
        self._mark = now
        return result

    def end_exchange(self) -> None:
        self._mark = perf_counter()  # this process has waited for the others

    def share(self) -> Any:
        return self._here

    def end(self, outcome: RoundOutcome, shared: Sequence[Any]) -> Mapping[str, float]:
        for part in shared:
            for client_id, seconds in part.items():
                self._take(client_id, seconds)
        return {}

    def _take(self, client_id: int, seconds: float) -> None:
        """Take a client's seconds in: half of what is expected of it is what it took last."""
        before = self._seconds.get(client_id)
        if before is None:
            self._samples += max(1, self._size(client_id))
        else:
            seconds = (before + seconds) / 2
        self._total += seconds - (before or 0.0)
        self._seconds[client_id] = seconds

    def estimate(self) -> Callable[[int], float] | None:
        """Give the seconds that are expected of a client, by its id.

        None before any was measured. Who was not is expected to take as long by the sample as the others did.
        """
        if not self._seconds:
            return None
        rate = self._total / self._samples
        return lambda client_id: self._seconds.get(client_id, rate * max(1, self._size(client_id)))
