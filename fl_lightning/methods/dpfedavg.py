"""DPFedAvg: average so that nobody can tell from the models whether a client took part at all.

Source: McMahan et al., ICLR 2018, arXiv:1710.06963, Algorithm 1 (flat clipping, fixed denominator); Andrew et al.,
NeurIPS 2021, arXiv:1905.03871, Algorithm 1 (`quantile`). Clients: any that send weights only.
"""

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor, nn

from fl_lightning.aggregation import PrivateAggregator
from fl_lightning.functional.privacy import SLACK, Accountant, gaussian_noise, kept_positive, shared_noise
from fl_lightning.types import ClientUpdate, State
from fl_lightning.utils.settings import check_above, check_inside

CLIP_RATE = 0.2
"""Learning rate η_C with which the clip follows the quantile, as in the paper."""

COUNT_SHARE = 1 / 20
"""Standard deviation of the noise on the count of short updates, as a share of the expected clients (the paper's)."""

GRID_BITS = 36
"""Bits of a clipped entry below the clip. Sums of up to 2^16 clients are exact in any order."""


def clipped(moved: Mapping[str, Tensor], clip: Tensor) -> tuple[State, Tensor]:
    """Return a client's move, scaled to a norm of at most C, and whether its norm was at most C before.

    The entries are rounded towards 0 to multiples of 2^-36 C', where C' is the power of two above C.

    Args:
        moved: The move of the client by name, float64.
        clip: The clip C, () float64.

    Returns:
        The clipped move, and whether its norm was at most C before, () bool.

    >>> short, is_short = clipped({"w": torch.tensor([3.0, 4.0], dtype=torch.float64)}, torch.tensor(1.0).double())
    >>> short["w"].round(decimals=9), bool(is_short)
    (tensor([0.6000, 0.8000], dtype=torch.float64), False)
    """
    norm = torch.stack([value.square().sum() for value in moved.values()]).sum().sqrt()
    # The quotient is ∞ if the client did not move.
    factor = (clip * SLACK / norm).clamp(max=1.0)
    grid = clip / torch.frexp(clip).mantissa * 2.0**-GRID_BITS
    short = {name: (value * factor / grid).trunc() * grid for name, value in moved.items()}
    return short, norm <= clip


class DPFedAvg(PrivateAggregator):
    """Updates w ← w + (Σ Δ_i · min(1, C / ‖Δ_i‖) + N(0, (z C)²)) / (q N) over every shared float entry that moves.

    Updates are clipped in float64. The denominator is the expected size of the cohort, and a client that is skipped
    counts as 0. The rule needs `data.sampling: poisson`, or all clients in every round. Entries of integers, and
    parameters that are not trained, stay as the server has them.

    Args:
        noise_multiplier: Noise multiplier z > 0. None takes the least with which the planned rounds keep
            `target_epsilon`.
        target_epsilon: Budget ε, > 0. The run ends before the round that would cost more. None: there is no budget.
        delta: δ in (0, 1), which should be below 1 / N.
        clip: Greatest norm C > 0 of an update, in the first round if `quantile` is given.
        quantile: Share of the updates that should stay unclipped, in (0, 1). C follows their norms, under noise that
            the budget pays. None: C stays.
        accountant: Accountant of ε: `pld` (privacy loss distributions), or `rdp` (Rényi divergences), which is looser.
        weighting: Weights of the clients, which must be `uniform`.
    """

    def __init__(  # noqa: PLR0917 - called by position
        self,
        noise_multiplier: float | None = None,
        target_epsilon: float | None = None,
        delta: float = 1e-5,
        clip: float = 1.0,
        quantile: float | None = None,
        accountant: Accountant = "pld",
        weighting: Literal["uniform"] = "uniform",
    ) -> None:
        super().__init__(
            noise_multiplier=noise_multiplier,
            target_epsilon=target_epsilon,
            delta=delta,
            accountant=accountant,
            weighting=weighting,
        )
        check_above(0, clip=clip)
        check_inside(0, 1, "None leaves the clip as it is", quantile=quantile)
        self.clip = clip
        self.quantile = quantile
        self.bound = nn.Buffer(torch.tensor(clip, dtype=torch.float64))
        self._exchange = 0
        self._released: tuple[str, ...] = ()
        """The names of the entries that are released: finite floats, without parameters that are not trained."""

    def setup(self) -> None:
        super().setup()
        fixed = dict(self.server.module.named_parameters()).keys() - set(self.server.trainable)
        released: list[str] = []
        for name, value in self.server.weights.items():
            is_free = value.is_floating_point() and name not in fixed
            if is_free and bool(value.isfinite().all()):
                released.append(name)
        self._released = tuple(released)

    def terms(self) -> Mapping[str, float]:
        return {"clip": self.clip, "quantile": -1.0 if self.quantile is None else self.quantile}

    def noises(self) -> tuple[float, float]:
        """Return the noise multiplier of the sum, and the standard deviation on the count of short updates.

        If the clip follows a quantile, both together cost as much as the ledger's noise multiplier.
        """
        z = self.ledger["noise_multiplier"]
        if self.quantile is None:
            return z, 0.0
        count_std = max(COUNT_SHARE * self.expected, z)
        # Each client adds ± 1/2 to the count, so that the multiplier is twice the standard deviation.
        return shared_noise(z, other=2 * count_std), count_std

    def row_values(self) -> Mapping[str, float]:
        values = dict(super().row_values())
        if self.quantile is not None:
            values["privacy/clip"] = float(self.bound)
        return values

    def begin_round(self, cohort: list[int]) -> None:
        super().begin_round(cohort)
        self._exchange = 0

    def add(self, update: ClientUpdate) -> None:
        """Add the clipped move of a client. A client that is left out counts as 0.

        Raises:
            ValueError: The client sends more than weights.
        """
        weights = update.weights
        if update.extras:
            raise ValueError(
                f"DPFedAvg adds noise to weights, and an update also has {min(update.extras)!r}, which would reach the "
                f"server as it is; send weights only, or leave model.aggregator unset"
            )
        if weights is None:
            return
        moved = {name: weights[name].double() - value.double() for name, value in self._moving().items()}
        short, is_short = clipped(moved, self.bound)
        self.sum("moved", short, self.weight(update))
        if self.quantile is not None:
            self.sum("short", {"count": is_short.double() - 0.5}, self.weight(update))

    def _moving(self) -> State:
        """Return the entries that are released, as they were sent."""
        entries = self.server.transmitted_entries
        return {name: entries[name] for name in self._released if name in entries}

    def finish(self) -> State | None:
        """Release the noisy mean, even if nobody took part."""
        draws = self.server.noise_generator(f"noise/{self._exchange}")
        self._exchange += 1
        total = self.summed("moved")
        short = self.summed("short")
        new: State = {}
        z, count_std = self.noises()
        for name, value in self._moving().items():
            noise = gaussian_noise(value.shape, draws, value.device)
            moved = value.double() + (total.get(name, 0.0) + z * self.bound * noise) / self.expected
            new[name] = kept_positive(name, new=moved, old=value.double())
        if self.quantile is not None:
            noise = count_std * gaussian_noise((), draws, self.bound.device)
            share = 0.5 + (short.get("count", 0.0) + noise) / self.expected
            self.bound.copy_(self.bound * torch.exp(-CLIP_RATE * (share - self.quantile)))
        return self.moved(self.server.weights, new)
