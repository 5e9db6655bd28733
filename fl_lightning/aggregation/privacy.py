"""Base of rules that are private: what they release hides each client, and a ledger counts what that costs."""

import math
from abc import ABC
from collections.abc import Mapping

import torch
from pytorch_lightning.utilities import rank_zero_warn
from torch import Tensor

from fl_lightning.aggregation.server_parts import Aggregator
from fl_lightning.functional.privacy import Accountant, check_delta, epsilon, imported, noise_for
from fl_lightning.metrics.history import EPSILON
from fl_lightning.utils.settings import check_above, check_choice

TERMS = ("noise_multiplier", "rate", "exchanges", "num_clients")
"""Names of the terms of every guarantee: z of a round, q, releases of a round to the same clients, and N."""


class PrivateAggregator(Aggregator, ABC):
    """A rule with Gaussian noise, of z times what one client can change, on sums over clients drawn each by itself.

    Whether a client takes part then changes what is released by (ε, δ) only. All clients weigh the same, and a round
    without clients is released, too.

    Args:
        noise_multiplier: z > 0; None: the least with which the planned rounds keep `target_epsilon`.
        target_epsilon: the run ends before the round that would cost more; None: there is no budget.
        delta: δ in (0, 1), which should be below 1 / N.
        accountant: of ε: `pld` (privacy loss distributions), or `rdp` (Rényi divergences), which is looser.
        weighting: of the clients: `uniform`, without another choice.

    Attributes:
        rounds: of the ledger.
        ledger: terms of the rounds by name, equal for all of them; empty before the first.
    """

    is_private = True
    needs = frozenset({"clients"})

    def __init__(
        self,
        noise_multiplier: float | None,
        target_epsilon: float | None,
        delta: float,
        accountant: Accountant,
        weighting: str,
    ) -> None:
        name = type(self).__name__
        if weighting != "uniform":
            raise ValueError(
                f"{name} bounds what a client can change, so that a weight may not tell how many samples it has: "
                f"weighting must be uniform, got {weighting!r}; leave it out"
            )
        super().__init__("uniform")
        check_above(0, "it is the noise as a multiple of the clip", noise_multiplier=noise_multiplier)
        check_above(0, target_epsilon=target_epsilon)
        check_choice(("pld", "rdp"), accountant=accountant)
        check_delta(delta)
        if noise_multiplier is None and target_epsilon is None:
            raise ValueError(
                f"{name} needs noise_multiplier, or target_epsilon to find it from, and got neither; set one, or both "
                f"to end the run at the budget"
            )
        self.noise_multiplier = noise_multiplier
        self.target_epsilon = target_epsilon
        self.delta = delta
        self.accountant = accountant
        self.rounds = 0
        self.ledger = dict[str, float]()

    def setup(self) -> None:
        imported("dp_accounting")  # before anything is trained
        if self.delta * self.server.num_clients > 1:
            rank_zero_warn(
                f"delta={self.delta:g} of {type(self).__name__} is above 1 / {self.server.num_clients} clients, which "
                f"allows that one of them is given away as a whole; set a smaller one"
            )

    def terms(self) -> Mapping[str, float]:
        """Give the further terms of this rule's guarantee, by name."""
        return {}

    def get_extra_state(self) -> Tensor:
        """Give the ledger, float64 on the CPU, where it can be read within a round."""
        names = [*TERMS, *self.terms()]
        return torch.tensor([self.rounds, *(self.ledger.get(name, 0.0) for name in names)], dtype=torch.float64)

    def set_extra_state(self, state: Tensor) -> None:
        """Take what `get_extra_state` gave."""
        rounds, *terms = state.tolist()
        self.rounds = int(rounds)
        self.ledger = {}
        if self.rounds:
            self.ledger = dict(zip([*TERMS, *self.terms()], terms, strict=True))

    def spent(self, rounds: int) -> float:
        """Compute ε of so many rounds."""
        if not self.ledger:
            return 0.0
        z = self.ledger["noise_multiplier"] / math.sqrt(self.ledger["exchanges"])
        return epsilon(self.ledger["rate"], z, rounds, self.delta, self.accountant)

    @property
    def is_spent(self) -> bool:
        return self.target_epsilon is not None and self.spent(self.rounds + 1) > self.target_epsilon

    @property
    def expected(self) -> float:
        """Clients in a cohort that are expected, q N."""
        return self.ledger["rate"] * self.ledger["num_clients"]

    def begin_round(self, cohort: list[int]) -> None:
        """Begin a round of the ledger.

        Raises:
            ValueError: terms that are not those of the rounds before, or no budget for another one.
        """
        self.ledger = self._agreed()
        if self.is_spent:
            raise ValueError(
                f"{type(self).__name__} keeps target_epsilon={self.target_epsilon} at delta={self.delta}, and a "
                f"further round after {self.rounds} would make it {self.spent(self.rounds + 1):.4g}; raise the budget "
                f"or the noise_multiplier, or leave trainer.min_epochs unset"
            )
        self.rounds += 1

    def _agreed(self) -> dict[str, float]:
        """Give the terms of this round, which are those of the rounds before, if there were any."""
        before = self.ledger if self.rounds else {}
        server = self.server
        rate = server.sampling_rate or 0.0
        exchanges = len(getattr(server.module, "exchanges", ("train",)))
        z = self.noise_multiplier or before.get("noise_multiplier") or self._least_noise(rate, exchanges)
        now = {**dict(zip(TERMS, (z, rate, float(exchanges), float(server.num_clients)), strict=True)), **self.terms()}
        for name, was in before.items():
            if was != now[name]:
                raise ValueError(
                    f"the guarantee of {type(self).__name__} is of rounds with equal terms, but {name} was {was:.6g} "
                    f"in the {self.rounds} rounds so far and is {now[name]:.6g}; go on with the terms that the run was "
                    f"begun with"
                )
        return now

    def _least_noise(self, rate: float, exchanges: int) -> float:
        """Find the noise multiplier with which the planned rounds keep the budget."""
        rounds = self.server.planned_rounds
        budget = self.target_epsilon
        if not rounds or budget is None:
            raise ValueError(
                f"{type(self).__name__} finds the noise that keeps target_epsilon over the planned rounds, and "
                f"trainer.max_epochs is not set; set it, or noise_multiplier"
            )
        return noise_for(budget, rate, rounds, self.delta, self.accountant) * math.sqrt(exchanges)

    def row_values(self) -> Mapping[str, float]:
        return {EPSILON: self.spent(self.rounds)}

    def summary(self) -> str:
        if not self.rounds:
            return ""
        by = {"pld": "privacy loss distributions", "rdp": "Rényi divergences"}[self.accountant]
        budget = f", which leaves no further round of target_epsilon={self.target_epsilon:g}" if self.is_spent else ""
        return (
            f"privacy: ε = {self.spent(self.rounds):.4g} at δ = {self.delta:g} for every client as a whole (added or "
            f"removed) after {self.rounds} round{'s' * (self.rounds != 1)}{budget}, by {by}; "
            f"q = {self.ledger['rate']:g}, noise multiplier {self.ledger['noise_multiplier']:.4g}"
        )
