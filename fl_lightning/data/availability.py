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
        given: a share of the rounds, in [0, 1], for all clients; a list of shares, one for each; or a text file with
            a line for each round, the ids of the clients available then, which begins again after its last line.
        num_clients: N.
        seed: of the draws.

    Raises:
        ValueError: a share outside [0, 1], another number of shares, or a line that names no clients.
        FileNotFoundError: without such a file.
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
        """List the clients that are available in a round, in their order."""
        if self._trace:
            there = self._trace[round_idx % len(self._trace)]
            return [client_id for client_id in clients if client_id in there]
        draws = ((c, keyed_numpy(self._seed, "availability", round_idx, c).random()) for c in clients)
        return [client_id for client_id, draw in draws if draw < self._rates[client_id]]

    def always(self, round_idx: int) -> set[int]:
        """Tell which clients are certainly available in a round."""
        if self._trace:
            return self._trace[round_idx % len(self._trace)]
        return {client_id for client_id, rate in enumerate(self._rates) if rate >= 1}

    def ever(self, round_idx: int) -> set[int]:
        """Tell which clients may be available in a round."""
        if self._trace:
            return self._trace[round_idx % len(self._trace)]
        return {client_id for client_id, rate in enumerate(self._rates) if rate > 0}

    @property
    def period(self) -> int:
        """Rounds after which the same clients may be available."""
        return max(1, len(self._trace))


class AvailableCohorts(Cohorts):
    """The ids of every round's clients among those that are available, perhaps none.

    Args:
        availability: as `Availability` takes it.
        over_selection: share of further clients that are drawn, since some may not be available: of those that are,
            the first `size` in drawn order take part.
        of: arguments of `Cohorts`, by name.

    Raises:
        ValueError: `over_selection` where it does nothing, such as with availability None.
    """

    def __init__(
        self, availability: float | Sequence[float] | str | Path | None, over_selection: float, **of: Any
    ) -> None:
        super().__init__(**of)
        check_at_least(0, "0 draws no more than a cohort", over_selection=over_selection)
        if availability is None or (over_selection and self.schedule is not None):
            raise ValueError(
                f"over_selection draws more clients because some may not be available, got {over_selection} "
                f"{'without data.availability' if availability is None else 'with data.schedule'}; leave it at 0"
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
        every = [self._bounds_of(round_idx) for round_idx in self._different_rounds()]
        return CohortBounds(
            least=min((bounds.least for bounds in every), default=0),
            most=max((bounds.most for bounds in every), default=0),
        )

    def _different_rounds(self) -> list[int]:
        """List rounds in which all that can be different is so."""
        if self.schedule is not None:
            return list(range(len(self.schedule)))
        rounds: list[int] = []
        for begin, following in zip(self.begins, [*self.begins[1:], None], strict=True):
            end = begin + self._available.period
            rounds += range(begin, end if following is None else min(end, following))
        return rounds

    def _bounds_of(self, round_idx: int) -> CohortBounds:
        """Count the clients of a round, at least and at most, before it is drawn."""
        there = self.there(round_idx)
        always = self._available.always(round_idx).intersection(there)
        ever = self._available.ever(round_idx).intersection(there)
        if self.schedule is not None:
            cohort = set(self.schedule[round_idx])
            return CohortBounds(len(cohort & always), len(cohort & ever))
        if self.draws_each and self.share < 1:
            return CohortBounds(0, len(ever))
        missing = len(there) - len(always)
        least = max(0, min(self._num_asked, len(there)) - missing)
        return CohortBounds(min(self.size, least), min(self.size, len(ever)))

    def __call__(self, round_idx: int) -> list[int]:
        if self._num_asked == self.size:
            return self._available.of(super().__call__(round_idx), round_idx)
        generator = keyed_numpy(self.seed, "cohort", round_idx)
        asked = self.drawn(generator, self._num_asked, among=self.there(round_idx))
        return sorted(self._available.of(asked, round_idx)[: self.size])


def cohorts(availability: float | Sequence[float] | str | Path | None, over_selection: float, **of: Any) -> Cohorts:
    """Make the cohorts of all rounds, with the arguments of `AvailableCohorts`."""
    if availability is None and not over_selection:
        return Cohorts(**of)
    return AvailableCohorts(availability, over_selection, **of)


def read_trace(path: Path, num_clients: int) -> list[set[int]]:
    """Read which clients are available in every round.

    Raises:
        ValueError: naming file and line.
        FileNotFoundError: without such a file.
    """
    if not path.is_file():
        raise FileNotFoundError(
            f"data.availability must be a share, a list of shares or a trace file, got {path}, which does not exist"
        )
    rounds: list[set[int]] = []
    try:
        text = path.read_text(encoding="utf-8")
        for line in text.splitlines():
            rounds.append({int(word) for word in line.replace(",", " ").split()})
    except ValueError as error:
        raise ValueError(
            f"a trace of data.availability has the ids of clients in every line, and line {len(rounds) + 1} of {path} "
            f"has something else ({error})"
        ) from None
    if not rounds:
        raise ValueError(f"a trace of data.availability needs a line for each round, and {path} is empty")
    for number, clients in enumerate(rounds, 1):
        if outside := [client_id for client_id in clients if not 0 <= client_id < num_clients]:
            raise ValueError(
                f"a trace of data.availability names clients in [0, {num_clients}), and line {number} of {path} has "
                f"{outside[0]}"
            )
    return rounds
