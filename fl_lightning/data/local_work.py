"""Local work: the share of its steps that a client makes, and one client in place of a cohort."""

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
        given: Share in (0, 1] for all clients and rounds, or [low, high]: the share is uniform between the two, drawn
            anew for every client and round.
        seed: Seed of the draws.

    Raises:
        ValueError: A share is outside (0, 1], or two shares are no range.

    Attributes:
        whole_epochs: Whether a share is one of local epochs, rounded up to whole ones. Otherwise it is one of batches.
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
        low, high = bounds
        self._low = float(low)
        self._high = float(high)
        self.seed = seed

    @property
    def is_partial(self) -> bool:
        """Whether a client may make less than all of its work."""
        return self._low != 1

    def taking_part(self, cohorts: Cohorts) -> Cohorts:
        """Return the cohorts without the clients whose work does not count. Here all work counts.

        Args:
            cohorts: The cohorts of all rounds.
        """
        return cohorts

    def __call__(self, client_id: int, round_idx: int) -> float:
        """Draw the share of a client in a round, in (0, 1].

        Args:
            client_id: Id of the client, from 0.
            round_idx: Communication round, from 0.
        """
        if self._low == self._high:
            return self._low
        generator = keyed_numpy(self.seed, "local_work", round_idx=round_idx, client_id=client_id)
        return float(generator.uniform(self._low, self._high))


class PooledCohorts(Cohorts):
    """Gives the rounds of one client that has the samples of all. It takes part if any of them would.

    Args:
        cohorts: The cohorts of the clients whose samples it has.

    Attributes:
        sizes: Number of samples of each of these clients, 0 of one that never trains. Empty until samples are dealt.
    """

    def __init__(self, cohorts: Cohorts) -> None:
        super().__init__(num_clients=1, participation=1.0, schedule=None, seed=cohorts.seed)
        self._cohorts = cohorts
        self.sizes: list[int] = []

    @property
    def sampling_rate(self) -> float | None:
        """None, because no client can be left out."""
        return None

    @cached_property
    def bounds(self) -> CohortBounds:
        inner = self._cohorts.bounds
        return CohortBounds(least=min(1, inner.least), most=min(1, inner.most))

    def rekey(self, seed: int) -> None:
        super().rekey(seed)
        self._cohorts.rekey(seed)

    def __call__(self, round_idx: int) -> list[int]:
        return [0] if self._cohorts(round_idx) else []

    def pool(self, dealt: ClientIndices) -> ClientIndices:
        """Give the one client the samples of all clients that train.

        Args:
            dealt: The samples of each client.
        """
        training = self._cohorts.clients
        self.sizes = [0] * len(dealt)
        for client_id in training:
            self.sizes[client_id] = len(dealt[client_id])
        if len(training) == len(dealt):
            return ClientIndices([dealt.indices.numpy()])
        parts = [dealt[client_id] for client_id in training]
        return ClientIndices([torch.cat(parts).numpy()])

    def work(self, work: LocalWork, round_idx: int) -> float:
        """Return the share of all samples that the cohort of a round would have trained on, in [0, 1].

        Args:
            work: Tells the share of its local steps that a client makes.
            round_idx: Communication round, from 0.
        """
        done = sum(self.sizes[client_id] * work(client_id, round_idx) for client_id in self._cohorts(round_idx))
        return done / max(1, sum(self.sizes))
