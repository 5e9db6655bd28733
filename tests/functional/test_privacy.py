"""ε against closed forms, written out here, and against values of other accountants."""

import math
from statistics import NormalDist

import pytest

from fl_lightning.functional import privacy
from fl_lightning.functional.privacy import epsilon, noise_for

pytest.importorskip("dp_accounting")

PHI = NormalDist().cdf


def closed_form(q, z, count, delta):
    """ε of `count` Gaussian mechanisms (q = 1), or of one on a Poisson sample: where δ(ε) falls to δ, by bisection."""

    def delta_of(e):
        if q == 1:  # Balle and Wang, ICML 2018: mu = sqrt(T) / z
            mu = math.sqrt(count) / z
            return PHI(mu / 2 - e / mu) - math.exp(e) * PHI(-mu / 2 - e / mu)
        # removal: (1 - q) N(0, z²) + q N(1, z²) against N(0, z²): larger above x
        x = z * z * math.log((math.exp(e) - 1 + q) / q) + 0.5
        return q * (1 - PHI((x - 1) / z)) + (1 - q - math.exp(e)) * (1 - PHI(x / z))

    low = 0.0
    high = 100.0
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if delta_of(middle) > delta else (low, middle)
    return high


CASES = [  # q, z, T, delta; PLD; PRV (Opacus 1.6); RDP
    (1, 4, 16, 1e-5, 4.3772, 4.387, 4.73),
    (0.05, 0.6, 1, 1e-5, 3.7830, 3.793, 4.52),
    (0.01, 1, 1000, 1e-5, 1.8282, 1.838, 2.10),
    (0.1, 1, 100, 1e-3, 4.7844, 4.795, 5.66),
    (0.2, 1.5, 30, 1e-2, 1.8687, 1.879, 2.37),
    (0.2, 0.5, 50, 1e-5, 38.676, 38.688, 47.3),
    (1, 10, 200, 1e-3, 4.8453, 4.856, 5.42),
]


@pytest.mark.parametrize(("q", "z", "count", "delta", "pld", "prv", "rdp"), CASES)
def test_epsilon_is_that_of_other_accountants(q, z, count, delta, pld, prv, rdp):
    value = epsilon(q, z, count, delta)
    assert value == pytest.approx(pld, abs=1e-3)
    assert value == pytest.approx(prv, abs=0.02)
    assert epsilon(q, z, count, delta, "rdp") == pytest.approx(rdp, abs=0.06)


@pytest.mark.parametrize(
    ("q", "z", "count", "delta"),
    [(1, 4, 16, 1e-5), (1, 10, 200, 1e-3), (1, 1, 1, 1e-5), (0.05, 0.6, 1, 1e-5), (0.3, 0.8, 1, 1e-4)],
)
def test_epsilon_is_the_closed_form_where_there_is_one(q, z, count, delta):
    exact = closed_form(q, z, count, delta)
    assert exact - 1e-9 <= epsilon(q, z, count, delta) <= exact + 1e-3, "never below it"


def test_no_mechanism_costs_nothing_and_more_cost_more():
    spent = [epsilon(0.2, 1.1, count, 1e-5) for count in (0, 1, 2, 30)]
    assert spent[0] == 0
    assert spent == sorted(set(spent))


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
@pytest.mark.parametrize(
    ("budget", "q", "count"), [pytest.param(8.0, 0.25, 30, marks=pytest.mark.slow), (0.5, 0.25, 30), (3.0, 1, 10)]
)
def test_the_least_noise_that_keeps_a_budget(budget, q, count, accountant):
    z = noise_for(budget, q, count, 1e-3, accountant)
    assert 0.99 * budget < epsilon(q, z, count, 1e-3, accountant) <= budget
    assert epsilon(q, z * 0.995, count, 1e-3, accountant) > budget


def test_without_the_library_one_sentence_says_what_to_install(monkeypatch):
    def missing(name):
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(privacy, "import_module", missing)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'fl_lightning\[dp\]' adds it"):
        epsilon(0.123, 1.0, 1, 1e-5, "rdp")
