"""Clients that are available in a round: by rates, or by a trace."""

import math
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from fl_lightning.data.clients import CohortBounds, Cohorts
from fl_lightning.utils.keyed import keyed_numpy
from fl_lightning.utils.settings import check_at_least


class Availability:
    """Tells which clients are available, depending on seed, round and client only.

    Args:
        given: Share of the rounds in which a client is available, in [0, 1], for all clients, or a list of shares, one
            for each. Or a text file that has, in a line for each round, the ids of the clients available then. It
            begins again after its last line.
        num_clients: Number N of clients.
        seed: Seed of the draws.

    Raises:
        ValueError: A share is outside [0, 1], there is another number of shares, or a line names no clients.
        FileNotFoundError: There is no such file.
    """

    def __init__(self, given: float | Sequence[float] | str | Path, num_clients: int, seed: int) -> None:
        self._seed = seed
        self._rates = list[float]()
        self._trace = list[set[int]]()
        if isinstance(given, str | Path):
            self._trace = read_trace(Path(given), num_clients)
            return
        rates = [given] * num_clients if isinstance(given, int | float) else list(given)
        if len(rates) != num_clients:
            raise ValueError(
                f"availability as a list needs one share per client ({num_clients}), got {len(rates)}; mend "
                f"data.availability"
            )
        for rate in rates:
            if not 0 <= rate <= 1:
                raise ValueError(f"availability must lie in [0, 1], got {rate}; 1 means in every round")
        self._rates = rates

    def of(self, clients: Iterable[int], round_idx: int) -> list[int]:
        """List the clients that are available in a round, in their order.

        Args:
            clients: Ids of clients.
            round_idx: Communication round, from 0.
        """
        if self._trace:
            available = self._traced(round_idx)
            return [client_id for client_id in clients if client_id in available]
        return [client_id for client_id in clients if self._is_drawn(client_id, round_idx)]

    def _traced(self, round_idx: int) -> set[int]:
        """Return the clients that the trace names for a round."""
        return self._trace[round_idx % len(self._trace)]

    def _is_drawn(self, client_id: int, round_idx: int) -> bool:
        """Draw whether a client is available in a round."""
        generator = keyed_numpy(self._seed, "availability", round_idx=round_idx, client_id=client_id)
        return bool(generator.random() < self._rates[client_id])

    def always(self, round_idx: int) -> set[int]:
        """Return the clients that are certainly available in a round.

        Args:
            round_idx: Communication round, from 0.
        """
        if self._trace:
            return self._traced(round_idx)
        return {client_id for client_id, rate in enumerate(self._rates) if rate >= 1}

    def ever(self, round_idx: int) -> set[int]:
        """Return the clients that may be available in a round.

        Args:
            round_idx: Communication round, from 0.
        """
        if self._trace:
            return self._traced(round_idx)
        return {client_id for client_id, rate in enumerate(self._rates) if rate > 0}

    @property
    def period(self) -> int:
        """The number of rounds after which the same clients may be available."""
        return max(1, len(self._trace))


class AvailableCohorts(Cohorts):
    """Gives the ids of every round's clients among the available ones, perhaps none.

    Args:
        availability: Availability of the clients, as `Availability` takes it. None is refused.
        over_selection: Share of further clients that are drawn because some may not be available, ≥ 0. Of the available
            ones among them, the first `size` in drawn order take part.
        of: Arguments of `Cohorts`, by name.

    Raises:
        ValueError: `over_selection` does nothing, such as with availability None.
    """

    def __init__(
        self, availability: float | Sequence[float] | str | Path | None, over_selection: float, **of: Any
    ) -> None:
        super().__init__(**of)
        check_at_least(0, "0 draws no more than a cohort", over_selection=over_selection)
        if availability is None or (over_selection and self.schedule is not None):
            beside = "without data.availability" if availability is None else "with data.schedule"
            raise ValueError(
                f"over_selection draws more clients because some may not be available, got {over_selection} {beside}; "
                f"leave it at 0"
            )
        if over_selection and self.draws_each:
            raise ValueError(
                f"over_selection draws a larger cohort, and with sampling=poisson each client is drawn by itself, got "
                f"{over_selection}; raise data.participation"
            )
        self._available = Availability(availability, self.num_clients, self.seed)
        self._num_asked = min(len(self.clients), math.ceil((1 + over_selection) * self.size - 1e-9))

    @property
    def not_of_one_size(self) -> str:
        return "data.availability"

    @cached_property
    def bounds(self) -> CohortBounds:
        bounds = [self._bounds_of(round_idx) for round_idx in self._different_rounds()]
        return CohortBounds(
            least=min((of_round.least for of_round in bounds), default=0),
            most=max((of_round.most for of_round in bounds), default=0),
        )

    def _different_rounds(self) -> list[int]:
        """List so many rounds that any other round has the clients of one of them, with the same availability."""
        if self.schedule is not None:
            return list(range(len(self.schedule)))
        rounds: list[int] = []
        for begin, following in zip(self.begins, [*self.begins[1:], None], strict=True):
            end = begin + self._available.period
            if following is not None:
                end = min(end, following)
            rounds += range(begin, end)
        return rounds

    def _bounds_of(self, round_idx: int) -> CohortBounds:
        """Count the clients of a round, at least and at most, before it is drawn."""
        there = self.there(round_idx)
        always = self._available.always(round_idx).intersection(there)
        ever = self._available.ever(round_idx).intersection(there)
        if self.schedule is not None:
            cohort = set(self.schedule[round_idx])
            return CohortBounds(least=len(cohort & always), most=len(cohort & ever))
        if self.draws_each and self.share < 1:
            return CohortBounds(least=0, most=len(ever))
        most_missing = len(there) - len(always)
        num_asked = min(self._num_asked, len(there))
        return CohortBounds(
            least=min(self.size, max(0, num_asked - most_missing)),
            most=min(self.size, len(ever)),
        )

    def __call__(self, round_idx: int) -> list[int]:
        if self._num_asked == self.size:
            return self._available.of(super().__call__(round_idx), round_idx)
        generator = keyed_numpy(self.seed, "cohort", round_idx)
        asked = self.drawn(generator, self._num_asked, among=self.there(round_idx))
        available = self._available.of(asked, round_idx)
        return sorted(available[: self.size])


def cohorts(availability: float | Sequence[float] | str | Path | None, over_selection: float, **of: Any) -> Cohorts:
    """Make the cohorts of all rounds.

    Args:
        availability: Availability of the clients, as `Availability` takes it. None: all are always available.
        over_selection: Share of further clients that are drawn, as `AvailableCohorts` takes it.
        of: Arguments of `Cohorts`, by name.

    Raises:
        ValueError: A setting is out of its range, or does nothing.
    """
    if availability is None and not over_selection:
        return Cohorts(**of)
    return AvailableCohorts(availability, over_selection=over_selection, **of)


def read_trace(path: Path, num_clients: int) -> list[set[int]]:
    """Read which clients are available in every round.

    Args:
        path: File with a line for each round: ids of clients, with commas or spaces between them.
        num_clients: Number N of clients.

    Raises:
        ValueError: A line has something else than ids of clients, or there is no line. The sentence names the line.
        FileNotFoundError: There is no such file.
    """
    if not path.is_file():
        raise FileNotFoundError(
            f"data.availability must be a share, a list of shares or a trace file, got {path}, which does not exist"
        )
    rounds: list[set[int]] = []
    try:
        text = path.read_text(encoding="utf-8")
        for line in text.splitlines():
            words = line.replace(",", " ").split()
            rounds.append({int(word) for word in words})
    except ValueError as error:
        raise ValueError(
            f"a trace of data.availability has the ids of clients in every line, and line {len(rounds) + 1} of {path} "
            f"has something else ({error})"
        ) from None
    if not rounds:
        raise ValueError(f"a trace of data.availability needs a line for each round, and {path} is empty")
    for number, clients in enumerate(rounds, start=1):
        outside = [client_id for client_id in clients if not 0 <= client_id < num_clients]
        if outside:
            raise ValueError(
                f"a trace of data.availability names clients in [0, {num_clients}), and line {number} of {path} has "
                f"{outside[0]}"
            )
    return rounds
