"""Local work: stragglers, which make a part of it, and one client in place of a cohort."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch

from fl_lightning.data.clients import ClientIndices, CohortBounds, Cohorts
from fl_lightning.utils.keyed import keyed_numpy
from fl_lightning.utils.settings import check_numbers


class LocalWork:
    """Tells the share of its local steps that a client makes, depending on seed, round and client only.

    Args:
        given: a share in (0, 1] for all clients and rounds; or [low, high]: uniform in it, drawn anew for every client
            and round.
        seed: of the draws.

    Raises:
        ValueError: a share outside (0, 1], or no range.

    Attributes:
        whole_epochs: whether a share is one of local epochs, rounded up to whole ones, and not of batches.
    """

    whole_epochs = False

    def __init__(self, given: float | Sequence[float], seed: int) -> None:
        bounds: list[Any] = list(given) if isinstance(given, list | tuple) else [given, given]
        for bound in bounds:
            check_numbers("it is a share of a client's local steps", local_work=bound)
        if len(bounds) != 2 or not 0 < bounds[0] <= bounds[1] <= 1:
            raise ValueError(
                f"local_work must be a share in (0, 1], or two of them [low, high], got {given}; 1.0 lets every client "
                f"make all of its steps"
            )
        self._low, self._high = map(float, bounds)
        self.seed = seed

    @property
    def is_partial(self) -> bool:
        """Whether a client may make less than all of its work."""
        return self._low != 1

    def taking_part(self, cohorts: Cohorts) -> Cohorts:
        """Take the cohorts of all rounds, and return those of the clients whose work counts: all of them here."""
        return cohorts

    def __call__(self, client_id: int, round_idx: int) -> float:
        """Draw the share of a client in a round, in (0, 1]."""
        if self._low == self._high:
            return self._low
        return float(keyed_numpy(self.seed, "local_work", round_idx, client_id).uniform(self._low, self._high))


class PooledCohorts(Cohorts):
    """The rounds of one client that has the samples of all: it takes part where anybody would.

    Args:
        cohorts: of the clients whose samples it has.

    Attributes:
        sizes: their numbers of samples, known once these are dealt.
    """

    def __init__(self, cohorts: Cohorts) -> None:
        super().__init__(1, 1.0, None, cohorts.seed)
        self._cohorts = cohorts
        self.sizes: list[int] = []

    @property
    def sampling_rate(self) -> float | None:
        """Give none: nobody can be left out."""
        return None

    @cached_property
    def bounds(self) -> CohortBounds:
        inner = self._cohorts.bounds
        return CohortBounds(min(1, inner.least), min(1, inner.most))

    def rekey(self, seed: int) -> None:
        super().rekey(seed)
        self._cohorts.rekey(seed)

    def __call__(self, round_idx: int) -> list[int]:
        return [0] if self._cohorts(round_idx) else []

    def pool(self, dealt: ClientIndices) -> ClientIndices:
        """Give the one client the samples of all that train."""
        trained = set(self._cohorts.clients)
        self.sizes = [len(part) if client_id in trained else 0 for client_id, part in enumerate(dealt)]
        if len(trained) == len(dealt):
            return ClientIndices([dealt.indices.numpy()])
        return ClientIndices([torch.cat([dealt[client_id] for client_id in self._cohorts.clients]).numpy()])

    def work(self, work: LocalWork, round_idx: int) -> float:
        """Compute the share of all samples that the round's cohort would have trained on, each as much as it works."""
        done = sum(self.sizes[client_id] * work(client_id, round_idx) for client_id in self._cohorts(round_idx))
        return done / max(1, sum(self.sizes))
