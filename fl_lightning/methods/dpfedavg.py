"""DPFedAvg: average so that nobody can tell from the models whether a client took part at all.

Source: McMahan et al., ICLR 2018, arXiv:1710.06963, Algorithm 1 (flat clipping, fixed denominator); Andrew et al.,
NeurIPS 2021, arXiv:1905.03871, Algorithm 1 (`quantile`). Clients: any that send weights only.
"""

import math
from collections.abc import Mapping
from typing import Literal, NamedTuple

import torch
from pytorch_lightning.utilities import rank_zero_warn
from torch import Tensor, nn

from fl_lightning.aggregation import Aggregator
from fl_lightning.functional.privacy import SLACK, Accountant, epsilon, noise_for, shared_noise
from fl_lightning.metrics.history import EPSILON
from fl_lightning.types import ClientUpdate, State
from fl_lightning.utils.settings import check_above, check_choice, check_numbers

CLIP_RATE = 0.2
"""η_C, by which the clip follows the quantile, as in the paper."""

COUNT_SHARE = 1 / 20
"""Standard deviation of the noise on the count of short updates, as a share of the expected clients: the paper's."""

GRID_BITS = 36
"""Bits of a clipped entry below the clip: sums of up to 2^16 clients are exact, whoever adds them in which order."""


def clipped(moved: Mapping[str, Tensor], clip: Tensor) -> tuple[State, Tensor]:
    """Scale what a client moved to a norm of at most C, and tell whether it was no longer: float64 (...), () -> ().

    The entries are cut to multiples of 2^-36 C', C' being the power of two above C, towards 0.

    >>> short, is_short = clipped({"w": torch.tensor([3.0, 4.0], dtype=torch.float64)}, torch.tensor(1.0).double())
    >>> short["w"].round(decimals=9), bool(is_short)
    (tensor([0.6000, 0.8000], dtype=torch.float64), False)
    """
    norm = torch.stack([value.square().sum() for value in moved.values()]).sum().sqrt()
    factor = (clip * SLACK / norm).clamp(max=1.0)  # ∞ where the client did not move
    grid = clip / torch.frexp(clip).mantissa * 2.0**-GRID_BITS
    return {name: (value * factor / grid).trunc() * grid for name, value in moved.items()}, norm <= clip


VARIANCE = "running_var"
"""End of the names of BatchNorm's variances, which stay as they are where noise would make them negative."""


class Ledger(NamedTuple):
    """Terms of the guarantee, all of which a run keeps to its end.

    Args:
        noise_multiplier: z of a round.
        rate: q.
        exchanges: releases of a round, of the same clients.
        clip: C of the first round.
        quantile: that it follows; -1: it stays.
        num_clients: N.
    """

    noise_multiplier: float = 0.0
    rate: float = 0.0
    exchanges: float = 1
    clip: float = 0.0
    quantile: float = -1.0
    num_clients: float = 0


class DPFedAvg(Aggregator):
    """w ← w + (Σ Δ_i · min(1, C / ‖Δ_i‖) + N(0, (z C)²)) / (q N) over every shared float entry that moves.

    Whether a client is in the data changes what is released by (ε, δ) only: its update is clipped in float64, all
    clients weigh the same, the denominator is that of the cohort which is expected, and noise is added to the sum,
    in a round without clients, too. Clients that are skipped count as 0. Needs `data.sampling: poisson`, or all clients
    in every round. Entries of integers, and parameters that are not trained, stay as the server has them.

    Args:
        noise_multiplier: z > 0; None: the least with which the planned rounds keep `target_epsilon`.
        target_epsilon: the run ends before the round that would cost more; None: there is no budget.
        delta: δ in (0, 1), which should be below 1 / N.
        clip: C > 0, the greatest norm of an update, with `quantile` that of the first round.
        quantile: in (0, 1), share of the updates that are to stay unclipped: C follows their norms, under noise, which
            the budget pays; None: C stays.
        accountant: of ε: `pld` (privacy loss distributions), or `rdp` (Rényi divergences), which is looser.
        weighting: of the clients: `uniform`, without another choice.
    """

    is_private = True

    def __init__(
        self,
        noise_multiplier: float | None = None,
        target_epsilon: float | None = None,
        delta: float = 1e-5,
        clip: float = 1.0,
        quantile: float | None = None,
        accountant: Accountant = "pld",
        weighting: Literal["uniform"] = "uniform",
    ) -> None:
        if weighting != "uniform":
            raise ValueError(
                f"DPFedAvg bounds what a client can change, so that a weight may not tell how many samples it has: "
                f"weighting must be uniform, got {weighting!r}; leave it out"
            )
        super().__init__(weighting)
        check_above(0, "it is the noise as a multiple of the clip", noise_multiplier=noise_multiplier)
        check_above(0, target_epsilon=target_epsilon, clip=clip)
        check_choice(("pld", "rdp"), accountant=accountant)
        check_numbers(delta=delta, quantile=quantile)
        for name, value in {"delta": delta, "quantile": quantile}.items():
            if value is not None and not 0 < value < 1:
                raise ValueError(f"{name} must lie in (0, 1), got {value}")
        if noise_multiplier is None and target_epsilon is None:
            raise ValueError(
                "DPFedAvg needs noise_multiplier, or target_epsilon to find it from, and got neither; set one, or both "
                "to end the run at the budget"
            )
        self.noise_multiplier, self.target_epsilon, self.delta = noise_multiplier, target_epsilon, delta
        self.clip, self.quantile, self.accountant = clip, quantile, accountant
        self.bound = nn.Buffer(torch.tensor(clip, dtype=torch.float64))
        self.rounds = 0
        self.ledger: Ledger | None = None
        """Terms of the rounds, from the first on."""
        self._exchange = 0
        self._released: tuple[str, ...] = ()

    def setup(self) -> None:
        if self.delta * self.server.num_clients > 1:
            rank_zero_warn(
                f"delta={self.delta:g} of DPFedAvg is above 1 / {self.server.num_clients} clients, which allows that "
                f"one of them is given away as a whole; set a smaller one"
            )

    # --- the guarantee, and what of it was used ----------------------------------------------------------------

    def get_extra_state(self) -> Tensor:
        """Give the rounds so far and their terms, (7,) float64 on the CPU, where it can be read within a round."""
        return torch.tensor([self.rounds, *(self.ledger or Ledger())], dtype=torch.float64)

    def set_extra_state(self, state: Tensor) -> None:
        """Take what `get_extra_state` gave."""
        rounds, *terms = state.tolist()
        self.rounds, self.ledger = int(rounds), Ledger(*terms) if rounds else None

    def spent(self, rounds: int) -> float:
        """Compute ε of so many rounds."""
        if self.ledger is None:
            return 0.0
        z, rate, exchanges, *_ = self.ledger
        return epsilon(rate, z / math.sqrt(exchanges), rounds, self.delta, self.accountant)

    @property
    def is_spent(self) -> bool:
        return self.target_epsilon is not None and self.spent(self.rounds + 1) > self.target_epsilon

    def begin_round(self, cohort: list[int]) -> None:
        """Begin a round of the ledger.

        Raises:
            ValueError: terms that are not those of the rounds before, or no budget for another one.
        """
        self.ledger, self._exchange = self._agreed(), 0
        if self.is_spent:
            raise ValueError(
                f"DPFedAvg keeps target_epsilon={self.target_epsilon} at delta={self.delta}, and a further round after "
                f"{self.rounds} would make it {self.spent(self.rounds + 1):.4g}; raise the budget or the "
                f"noise_multiplier, or leave trainer.min_epochs unset"
            )
        self.rounds += 1

    def _agreed(self) -> Ledger:
        """Give the terms of this round, which are those of the rounds before, if there were any."""
        before, server = self.ledger if self.rounds else None, self.server
        rate, exchanges = server.sampling_rate or 0.0, len(getattr(server.module, "exchanges", ("train",)))
        z = self.noise_multiplier or (before.noise_multiplier if before else self._found(rate, exchanges))
        quantile = -1.0 if self.quantile is None else self.quantile
        terms = Ledger(z, rate, exchanges, self.clip, quantile, server.num_clients)
        for name, was, now in zip(Ledger._fields, before or terms, terms, strict=True):
            if was != now:
                raise ValueError(
                    f"the guarantee of DPFedAvg is of rounds with equal terms, but {name} was {was:.6g} in the "
                    f"{self.rounds} rounds so far and is {now:.6g}; go on with the terms that the run was begun with"
                )
        return terms

    def _found(self, rate: float, exchanges: int) -> float:
        """Find the noise multiplier with which the planned rounds keep the budget."""
        rounds, budget = self.server.planned_rounds, self.target_epsilon
        if not rounds or budget is None:
            raise ValueError(
                "DPFedAvg finds the noise that keeps target_epsilon over the planned rounds, and trainer.max_epochs is "
                "not set; set it, or noise_multiplier"
            )
        return noise_for(budget, rate, rounds, self.delta, self.accountant) * math.sqrt(exchanges)

    @property
    def expected(self) -> float:
        """Clients in a cohort that are expected, q N."""
        ledger = self.ledger
        return ledger.rate * ledger.num_clients if ledger else 0.0

    def noises(self) -> tuple[float, float]:
        """Give the noise multiplier of the sum, and the standard deviation on the count of short updates.

        Where the clip follows a quantile both together cost what the ledger's noise multiplier does.
        """
        z = self.ledger.noise_multiplier if self.ledger else 0.0
        if self.quantile is None:
            return z, 0.0
        count = max(COUNT_SHARE * self.expected, z)  # as ± 1/2 each: a multiplier of twice as much
        return shared_noise(z, 2 * count), count

    def values(self) -> Mapping[str, float]:
        clip = {} if self.quantile is None else {"privacy/clip": float(self.bound)}
        return {EPSILON: self.spent(self.rounds), **clip}

    def summary(self) -> str:
        if self.ledger is None or not self.rounds:
            return ""
        by = {"pld": "privacy loss distributions", "rdp": "Rényi divergences"}[self.accountant]
        budget = f", which leaves no further round of target_epsilon={self.target_epsilon:g}" if self.is_spent else ""
        return (
            f"privacy: ε = {self.spent(self.rounds):.4g} at δ = {self.delta:g} for every client as a whole (added or "
            f"removed) after {self.rounds} round{'s' * (self.rounds != 1)}{budget}, by {by}; "
            f"q = {self.ledger.rate:g}, noise multiplier {self.ledger.noise_multiplier:.4g}"
        )

    # --- a round -----------------------------------------------------------------------------------------------

    def add(self, update: ClientUpdate) -> None:
        """Add what a client moved, clipped.

        A client that is left out moved nothing.
        """
        weights = update.weights
        if update.extras:
            raise ValueError(
                f"DPFedAvg adds noise to weights, and an update also has {min(update.extras)!r}, which would reach the "
                f"server as it is; send weights only, or leave model.aggregator unset"
            )
        if weights is None:
            return
        start = {name: value.double() for name, value in self._moving().items()}
        moved = {name: weights[name].double() - value for name, value in start.items()}
        short, is_short = clipped(moved, self.bound)
        self.sum("moved", short, self.weight(update))
        if self.quantile is not None:
            self.sum("short", {"count": is_short.double() - 0.5}, self.weight(update))

    def _moving(self) -> State:
        """Choose the entries that are released: floats that are finite, but no parameters that are not trained."""
        entries = self.server.transmitted_entries
        if not self._released or not set(self._released) <= entries.keys():
            known = {name: value for name, value in self.server.module.named_parameters()}
            fixed = known.keys() - set(self.server.trainable)
            floats = [n for n, v in entries.items() if v.is_floating_point() and n not in fixed]
            self._released = tuple(n for n in floats if bool(entries[n].isfinite().all()))
        return {name: entries[name] for name in self._released}

    def finish(self) -> State | None:
        """Release the noisy mean, also where nobody took part."""
        generator = self.server.noise_generator(f"noise/{self._exchange}")
        self._exchange += 1
        start, total, short = self._moving(), self.summed("moved"), self.summed("short")
        z, count_noise = self.noises()
        scale, new = z * self.bound, State()
        for name, value in start.items():
            noise = torch.randn(value.shape, generator=generator, dtype=torch.float64).to(value.device)
            new[name] = value.double() + (total.get(name, 0.0) + scale * noise) / self.expected
            if name.endswith(VARIANCE):
                new[name] = torch.where(new[name] > 0, new[name], value.double())
        if self.quantile is not None:
            noise = count_noise * torch.randn((), generator=generator, dtype=torch.float64).to(self.bound.device)
            share = 0.5 + (short.get("count", 0.0) + noise) / self.expected
            self.bound.copy_(self.bound * torch.exp(-CLIP_RATE * (share - self.quantile)))
        return self.moved(self.server.weights, new)
