"""Differential privacy: the cost of rounds of a sampled Gaussian mechanism, and the noise that a budget needs.

The accountants are those of `dp-accounting` (Google), which is imported at the first use: privacy loss distributions
(Sommer et al., PoPETs 2019; Koskela et al., AISTATS 2020), and Rényi divergences (Mironov et al. 2019,
arXiv:1908.10530).
"""

import logging
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from importlib import import_module
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from fl_lightning.functional.state import State
from fl_lightning.utils.devices import copy_to_device
from fl_lightning.utils.settings import check_inside

Accountant = Literal["pld", "rdp"]

INTERVAL = 5e-4
"""Width of the steps to which privacy losses are rounded up. ε is never too small, and for up to some thousand
mechanisms at most 1e-3 too large."""

COUNTED = "privacy:counted"
"""Key of the counted mechanisms in a client's memory."""

LEAST_DELTA = 1e-12
"""Least δ that is accounted."""

VARIANCE = "running_var"
"""End of the names of BatchNorm's variances."""

MOST_STEPS = 200_000
"""Largest number of steps of a distribution. Where losses are large, the steps are wider."""

LEAST_NOISE = 0.01
"""Noise multiplier below which ε counts as infinite."""

SLACK = 1 - 2.0**-40
"""Share of a bound to which norms are scaled, so that no rounding brings a norm above the bound."""

MISSING = (
    "differential privacy is accounted by dp-accounting, which is not installed; pip install 'fl_lightning[dp]' adds it"
)


@lru_cache(maxsize=4096)
def epsilon(  # noqa: PLR0917 - called by position
    rate: float, noise_multiplier: float, count: int, delta: float, accountant: Accountant = "pld"
) -> float:
    """Compute ε of `count` Gaussian mechanisms, each on a Poisson sample, when one element is added or removed.

    Args:
        rate: Probability with which an element is in a sample, q in (0, 1].
        noise_multiplier: Standard deviation of the noise as a multiple of an element's greatest norm, z > 0.
        count: Number of mechanisms, ≥ 0.
        delta: δ in (0, 1).
        accountant: `pld` accounts by privacy loss distributions. `rdp` accounts by Rényi divergences, and gives a
            larger ε.

    Raises:
        ModuleNotFoundError: dp-accounting is not installed.
    """
    if not count:
        return 0.0
    if noise_multiplier < LEAST_NOISE:
        return math.inf
    if accountant == "pld":
        loss = loss_distribution(rate, noise_multiplier)
        if count > 1:
            loss = loss.self_compose(count)
        return float(loss.get_epsilon_for_delta(delta))
    rdp = imported("dp_accounting.rdp").RdpAccountant()
    events = imported("dp_accounting")
    with quiet():
        rdp.compose(events.PoissonSampledDpEvent(rate, events.GaussianDpEvent(noise_multiplier)), count)
        return float(rdp.get_epsilon(delta))


@lru_cache(maxsize=64)
def loss_distribution(rate: float, noise_multiplier: float) -> Any:
    """Return the privacy loss distribution of one mechanism. The arguments are those of `epsilon`."""
    make = imported("dp_accounting.pld.privacy_loss_distribution").from_gaussian_mechanism
    # Losses above it have a negligible probability.
    largest = 1 / (2 * noise_multiplier**2) + 40 / noise_multiplier
    width = max(INTERVAL, largest / MOST_STEPS)
    return make(noise_multiplier, sampling_prob=rate, value_discretization_interval=width)


@lru_cache(maxsize=64)
def noise_for(  # noqa: PLR0917 - called by position
    budget: float, rate: float, count: int, delta: float, accountant: Accountant = "pld"
) -> float:
    """Find the least noise multiplier z with which `count` mechanisms cost at most `budget`, to three digits.

    Args:
        budget: Largest ε, > 0.
        rate: Probability q, as in `epsilon`.
        count: Number of mechanisms, ≥ 1.
        delta: δ in (0, 1).
        accountant: Accountant, as in `epsilon`.

    Raises:
        ValueError: No noise multiplier up to 1e6 is enough.
    """

    def spent(noise_multiplier: float) -> float:
        return epsilon(rate=rate, noise_multiplier=noise_multiplier, count=count, delta=delta, accountant=accountant)

    low = 0.0
    high = 1.0
    while spent(high) > budget:
        low = high
        high = 2 * high
        if high > 1e6:
            raise ValueError(f"ε = {budget} at δ = {delta} cannot be kept by any noise over {count} rounds; raise it")
    while high - low > 5e-4 * high:
        middle = (low + high) / 2
        if middle < 0.05 or spent(middle) > budget:
            low = middle
        else:
            high = middle
    return high


def clipped_sum(gradients: State, bound: float) -> State:
    """Add up the gradients of samples, each scaled to a norm of at most `bound`: (B, ...) -> (...), float64.

    >>> clipped_sum({"w": torch.tensor([[3.0, 4.0], [0.3, 0.4]])}, 1.0)["w"].round(decimals=9)
    tensor([0.9000, 1.2000], dtype=torch.float64)
    """
    rows = {name: value.double() for name, value in gradients.items()}
    norms = torch.stack([value.flatten(1).square().sum(1) for value in rows.values()]).sum(0).sqrt()
    # The quotient is ∞ where a gradient is 0.
    factors = (bound * SLACK / norms).clamp(max=1.0)
    return {name: torch.tensordot(factors, value, dims=1) for name, value in rows.items()}


def gaussian_noise(shape: Iterable[int], draws: np.random.Generator, device: torch.device) -> Tensor:
    """Draw standard normal noise, float64 (...)."""
    return copy_to_device(torch.as_tensor(draws.standard_normal(tuple(shape)), dtype=torch.float64), device)


def kept_positive(name: str, new: Tensor, old: Tensor) -> Tensor:
    """Return a new entry, in which a variance of BatchNorm that noise has made negative keeps the old value.

    Args:
        name: Name of the entry.
        new: Entry under noise, of any shape.
        old: Entry before, of the same shape.
    """
    if not name.endswith(VARIANCE):
        return new
    return torch.where(new > 0, new, old)


def counted(memory: dict[str, Any], terms: Mapping[str, float], more: int) -> int:
    """Add to the number of mechanisms that a client's memory has counted, and return the sum.

    Args:
        memory: Memory of the client.
        terms: Terms of the guarantee by name, equal for all mechanisms.
        more: Number of further mechanisms.

    Raises:
        ValueError: A term differs from that of the mechanisms before.
    """
    before = memory.get(COUNTED, {"count": 0, **terms})
    for name, now in terms.items():
        if before[name] != now:
            raise ValueError(
                f"a guarantee is of steps with equal terms, but {name} was {before[name]:.6g} in the {before['count']} "
                f"so far and is {now:.6g}; go on with the terms that the run was begun with"
            )
    memory[COUNTED] = {"count": before["count"] + more, **terms}
    return int(memory[COUNTED]["count"])


def check_delta(delta: float) -> None:
    """Refuse a δ outside (0, 1), or too small for the accountant, which leaves out tails of about 1e-15.

    Raises:
        ValueError: δ is out of the range.
    """
    check_inside(0, 1, delta=delta)
    if delta < LEAST_DELTA:
        raise ValueError(f"delta must be at least {LEAST_DELTA:g}, below which ε is not computed, got {delta:g}")


def shared_noise(noise_multiplier: float, other: float) -> float:
    """Compute the multiplier z' with which two Gaussian mechanisms on one sample cost as much as one with z.

    1 / z² = 1 / z'² + 1 / other².

    Args:
        noise_multiplier: Multiplier z of the single mechanism.
        other: Multiplier of the second of the two, > z.

    Source: Andrew et al., NeurIPS 2021, arXiv:1905.03871, Theorem 1.

    >>> round(shared_noise(3.0, 5.0), 12)
    3.75
    """
    return 1 / math.sqrt(1 / noise_multiplier**2 - 1 / other**2)


@contextmanager
def quiet() -> Iterator[None]:
    """Context in which dp-accounting does not list the Rényi orders that it leaves out. They only loosen ε."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def imported(name: str) -> Any:
    """Import a module of dp-accounting.

    Raises:
        ModuleNotFoundError: The package is not installed.
    """
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(MISSING) from error
