"""Stragglers: the clients of a cohort that do not make all of their local epochs in time.

Source: Li et al., MLSys 2020, arXiv:1812.06127, section 5.2: a share of the devices of a round makes a number of epochs
that is uniform in 1 ... E. FedAvg drops these devices, and FedProx aggregates what they have done.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from fl_lightning.data.clients import CohortBounds, Cohorts
from fl_lightning.data.local_work import LocalWork
from fl_lightning.utils.keyed import keyed_numpy
from fl_lightning.utils.settings import check_at_least, check_at_most, check_choice


@dataclass(frozen=True)
class Stragglers:
    """Lets a share of each cohort be late: such clients make fewer local epochs, or are dropped.

    A cohort of K clients has floor(share · K + 1/2) stragglers. For each client of a round two numbers are drawn by
    sampling seed, round and client only. The clients with the smallest first numbers are the stragglers, so that all
    methods have the same ones, and those of a smaller share are among those of a larger one. The second number is u,
    uniform in (0, 1]: a straggler makes ceil(u · E) of its E local epochs, a number uniform in 1 ... E.

    Args:
        share: Share of each cohort that is late, in [0, 1].
        late: Treatment of a straggler. `cut`: its update after ceil(u · E) epochs counts as any other, weighed by all
            of its samples. `drop`: it takes no part in the round, as if it had not been chosen. A round whose whole
            cohort is dropped leaves the model as it was.

    Raises:
        ValueError: `share` is outside [0, 1], or `late` is another word.

    Source:
        Li et al., MLSys 2020, arXiv:1812.06127, section 5.2.
    """

    share: float
    late: Literal["cut", "drop"] = "cut"

    def __post_init__(self) -> None:
        check_at_least(0, "0 lets nobody be late", share=self.share)
        check_at_most(1, "it is the share of a cohort that is late", share=self.share)
        check_choice(("cut", "drop"), late=self.late)

    @property
    def cuts(self) -> bool:
        """Whether some clients make fewer local epochs."""
        return self.late == "cut" and self.share > 0

    @property
    def drops(self) -> bool:
        """Whether some clients of a cohort take no part."""
        return self.late == "drop" and self.share > 0

    def count(self, size: int) -> int:
        """Return the number of stragglers in a cohort.

        Args:
            size: Number of clients in the cohort.

        >>> [Stragglers(share=0.5).count(size) for size in (0, 1, 4, 5)], Stragglers(share=0.9).count(10)
        ([0, 1, 2, 3], 9)
        """
        # Without the small number a product such as 0.29 * 50 would be rounded down.
        return int(self.share * size + 0.5 + 1e-9)


class RoundStragglers(NamedTuple):
    """Holds the stragglers of one round.

    Args:
        seed: Seed of the draws.
        round_idx: Communication round, from 0.
        shares: Share of the local epochs that each straggler makes, in (0, 1], by client id.
    """

    seed: int
    round_idx: int
    shares: dict[int, float]


class StragglersWork(LocalWork):
    """Tells the share of its local epochs that a client makes: less than all of them if it is a straggler.

    Args:
        given: Settings of the stragglers.
        seed: Seed of the draws.
    """

    whole_epochs = True

    def __init__(self, given: Stragglers, seed: int) -> None:
        super().__init__(1.0, seed)
        self.given = given
        self._cohorts: Cohorts | None = None
        self._present: RoundStragglers | None = None

    @property
    def is_partial(self) -> bool:
        return self.given.cuts

    def taking_part(self, cohorts: Cohorts) -> Cohorts:
        self._cohorts = cohorts
        return PunctualCohorts(cohorts, self) if self.given.drops else cohorts

    def among(self, cohort: Sequence[int], round_idx: int) -> dict[int, float]:
        """Draw the stragglers of a cohort, and the share of its local epochs that each makes, in (0, 1].

        Args:
            cohort: Client ids of the round.
            round_idx: Communication round, from 0.
        """
        drawn: list[tuple[float, int, float]] = []
        for client_id in cohort:
            generator = keyed_numpy(self.seed, "stragglers", round_idx=round_idx, client_id=client_id)
            rank, rest = generator.random(2).tolist()
            drawn.append((rank, client_id, 1.0 - rest))
        drawn.sort()
        late = drawn[: self.given.count(len(cohort))]
        return {client_id: share for _, client_id, share in late}

    def __call__(self, client_id: int, round_idx: int) -> float:
        if self._cohorts is None or not self.given.cuts:
            return 1.0
        present = self._present
        if present is None or (present.seed, present.round_idx) != (self.seed, round_idx):
            shares = self.among(self._cohorts(round_idx), round_idx)
            present = RoundStragglers(seed=self.seed, round_idx=round_idx, shares=shares)
            self._present = present
        return present.shares.get(client_id, 1.0)


class PunctualCohorts(Cohorts):
    """Gives the clients of every round that are not dropped as stragglers, perhaps none.

    Args:
        cohorts: The cohorts before clients are dropped.
        work: Draws the stragglers.

    Raises:
        ValueError: All clients of every round would be dropped.
    """

    def __init__(self, cohorts: Cohorts, work: StragglersWork) -> None:
        self.clients = cohorts.clients
        self.num_clients = cohorts.num_clients
        self.schedule = cohorts.schedule
        self.stays = cohorts.stays
        self.seed = cohorts.seed
        self.size = cohorts.size
        self.draws_each = cohorts.draws_each
        self.share = cohorts.share
        self._cohorts = cohorts
        self._work = work
        most = cohorts.bounds.most
        if most and not self.bounds.most:
            raise ValueError(
                f"data.local_work.share must leave a client in a round, got {work.given.share} with late=drop, which "
                f"drops {most} of at most {most}; lower data.local_work.share, or set data.local_work.late to cut"
            )

    @property
    def sampling_rate(self) -> float | None:
        """None, because which clients are dropped depends on the other clients of the cohort."""
        return None

    @cached_property
    def bounds(self) -> CohortBounds:
        before = self._cohorts.bounds
        num_late = self._work.given.count
        return CohortBounds(
            least=before.least - num_late(before.least),
            most=before.most - num_late(before.most),
        )

    def rekey(self, seed: int) -> None:
        super().rekey(seed)
        self._cohorts.rekey(seed)

    def __call__(self, round_idx: int) -> list[int]:
        cohort = self._cohorts(round_idx)
        late = self._work.among(cohort, round_idx)
        return [client_id for client_id in cohort if client_id not in late]


def work_for(given: float | Sequence[float] | Stragglers, seed: int) -> LocalWork:
    """Return the local work of the clients.

    Args:
        given: Share of the local steps, a range of shares, or the settings of stragglers.
        seed: Seed of the draws.
    """
    if isinstance(given, Stragglers):
        return StragglersWork(given, seed)
    return LocalWork(given, seed)
