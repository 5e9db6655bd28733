"""The base of private rules, whose releases hide each client, with a ledger of what they cost."""

import math
from abc import ABC
from collections.abc import Mapping
from typing import Any

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
    """Adds Gaussian noise of z times what one client can change to the sums over the clients.

    Every client is drawn by itself. Whether a client takes part then changes what is released by (ε, δ) only. All
    clients weigh the same, and a round without clients is released too.

    Args:
        noise_multiplier: Noise multiplier z > 0. None is the smallest one with which the planned rounds keep
            `target_epsilon`.
        target_epsilon: Budget of the run, > 0. The run ends before the round that would cost more. None sets no budget.
        delta: Probability δ in (0, 1), which should be below 1 / N.
        accountant: Accountant of ε: `pld` (privacy loss distributions), or `rdp` (Rényi divergences), which is looser.
        weighting: Weighting of the clients, which is always `uniform`.

    Attributes:
        rounds: Number of rounds in the ledger.
        ledger: Terms of the rounds by name, equal for all of them. Empty before the first round.
    """

    is_private = True
    needs = frozenset({"clients"})

    def __init__(
        self,
        noise_multiplier: float | None,
        target_epsilon: float | None,
        *,
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

    @classmethod
    def plans(cls, arguments: Mapping[str, Any]) -> bool:
        return arguments.get("target_epsilon") is not None and arguments.get("noise_multiplier") is None

    def setup(self) -> None:
        imported("dp_accounting")  # A missing package is reported before anything is trained.
        if self.delta * self.server.num_clients > 1:
            rank_zero_warn(
                f"delta={self.delta:g} of {type(self).__name__} is above 1 / {self.server.num_clients} clients, which "
                f"allows that one of them is given away as a whole; set a smaller one"
            )

    def terms(self) -> Mapping[str, float]:
        """Return the further terms of this rule's guarantee, by name."""
        return {}

    def get_extra_state(self) -> Tensor:
        """Return the ledger, float64 on the CPU, where it can be read within a round."""
        names = [*TERMS, *self.terms()]
        values = [self.ledger.get(name, 0.0) for name in names]
        return torch.tensor([self.rounds, *values], dtype=torch.float64)

    def set_extra_state(self, state: Tensor) -> None:
        """Take what `get_extra_state` returned."""
        rounds, *values = state.tolist()
        self.rounds = int(rounds)
        self.ledger = {}
        if self.rounds:
            names = [*TERMS, *self.terms()]
            self.ledger = dict(zip(names, values, strict=True))

    def spent(self, rounds: int) -> float:
        """Return ε of so many rounds."""
        if not self.ledger:
            return 0.0
        return epsilon(
            rate=self.ledger["rate"],
            noise_multiplier=self.ledger["noise_multiplier"] / math.sqrt(self.ledger["exchanges"]),
            count=rounds,
            delta=self.delta,
            accountant=self.accountant,
        )

    @property
    def is_spent(self) -> bool:
        return self.target_epsilon is not None and self.spent(self.rounds + 1) > self.target_epsilon

    @property
    def expected(self) -> float:
        """The expected number of clients in a cohort, q N."""
        return self.ledger["rate"] * self.ledger["num_clients"]

    def begin_round(self, cohort: list[int]) -> None:
        """Begin a round of the ledger.

        Raises:
            ValueError: The terms differ from those of the rounds before, or the budget allows no further round.
        """
        self.ledger = self._agreed_terms()
        if self.is_spent:
            raise ValueError(
                f"{type(self).__name__} keeps target_epsilon={self.target_epsilon} at delta={self.delta}, and a "
                f"further round after {self.rounds} would make it {self.spent(self.rounds + 1):.4g}; raise the budget "
                f"or the noise_multiplier, or leave trainer.min_epochs unset"
            )
        self.rounds += 1

    def _agreed_terms(self) -> dict[str, float]:
        """Return the terms of this round.

        Raises:
            ValueError: The terms differ from those of the rounds before.
        """
        before = self.ledger if self.rounds else {}
        server = self.server
        rate = server.sampling_rate or 0.0
        exchanges = len(getattr(server.module, "exchanges", ("train",)))
        noise_multiplier = self.noise_multiplier or before.get("noise_multiplier")
        terms: dict[str, float] = {
            "noise_multiplier": noise_multiplier or self._smallest_noise(rate, exchanges),
            "rate": rate,
            "exchanges": float(exchanges),
            "num_clients": float(server.num_clients),
            **self.terms(),
        }
        for name, earlier in before.items():
            if earlier != terms[name]:
                raise ValueError(
                    f"the guarantee of {type(self).__name__} is of rounds with equal terms, but {name} was "
                    f"{earlier:.6g} in the {self.rounds} rounds so far and is {terms[name]:.6g}; go on with the terms "
                    f"that the run was begun with"
                )
        return terms

    def _smallest_noise(self, rate: float, exchanges: int) -> float:
        """Return the smallest noise multiplier with which the planned rounds keep the budget.

        Args:
            rate: Probability q with which a client takes part in a round.
            exchanges: Number of exchanges of a round.

        Raises:
            ValueError: No number of rounds is planned.
        """
        rounds = self.server.planned_rounds
        budget = self.target_epsilon
        if not rounds or budget is None:
            raise ValueError(
                f"{type(self).__name__} finds the noise that keeps target_epsilon over the planned rounds, and "
                f"neither trainer.max_epochs nor model.planned_rounds is set; set one, or noise_multiplier"
            )
        noise = noise_for(budget=budget, rate=rate, count=rounds, delta=self.delta, accountant=self.accountant)
        return noise * math.sqrt(exchanges)

    def row_values(self) -> Mapping[str, float]:
        return {EPSILON: self.spent(self.rounds)}

    def summary(self) -> str:
        if not self.rounds:
            return ""
        method = {"pld": "privacy loss distributions", "rdp": "Rényi divergences"}[self.accountant]
        rounds = "1 round" if self.rounds == 1 else f"{self.rounds} rounds"
        budget = f", which leaves no further round of target_epsilon={self.target_epsilon:g}" if self.is_spent else ""
        return (
            f"privacy: ε = {self.spent(self.rounds):.4g} at δ = {self.delta:g} for every client as a whole (added or "
            f"removed) after {rounds}{budget}, by {method}; "
            f"q = {self.ledger['rate']:g}, noise multiplier {self.ledger['noise_multiplier']:.4g}"
        )
