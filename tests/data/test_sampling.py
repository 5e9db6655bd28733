"""Cohorts of clients that are drawn each by itself, and the secret seed."""

import math
import re

import pytest

from tests.toys import toy_data


def cohorts(rounds=400, clients=30, **settings):
    data = toy_data((1,) * clients, batch_size=1, **{"sampling": "poisson", **settings})
    return [data.cohort(t) for t in range(rounds)]


def test_every_client_takes_part_with_the_probability_and_independently_of_the_others():
    q = 0.3
    drawn = cohorts(participation=0.3)
    sizes = [len(cohort) for cohort in drawn]
    deviation = math.sqrt(30 * q * (1 - q))
    assert abs(sum(sizes) / len(sizes) - 30 * q) < 4 * deviation / math.sqrt(len(sizes))
    variance = sum((size - 30 * q) ** 2 for size in sizes) / len(sizes)
    assert abs(variance / deviation**2 - 1) < 4 * math.sqrt(2 / len(sizes)), "as a binomial number has"
    for client_id in range(30):
        share = sum(client_id in cohort for cohort in drawn) / len(drawn)
        assert abs(share - q) < 4.5 * math.sqrt(q * (1 - q) / len(drawn))
    both = sum(0 in cohort and 1 in cohort for cohort in drawn) / len(drawn)
    assert abs(both - q * q) < 4.5 * math.sqrt(q * q * (1 - q * q) / len(drawn))
    assert all(cohort == sorted(set(cohort)) for cohort in drawn)


def test_a_cohort_may_be_empty_and_at_1_it_is_everybody():
    assert [] in cohorts(participation=0.05)
    for sampling in ("poisson", "uniform"):
        assert cohorts(3, participation=1.0, sampling=sampling) == [list(range(30))] * 3


def test_cohorts_depend_on_their_seed_and_the_round_only():
    assert cohorts(20, participation=0.3) == cohorts(20, participation=0.3)
    assert cohorts(20, participation=0.3) != cohorts(20, participation=0.3, sampling_seed=1)
    assert cohorts(20, participation=0.3, seed=1, sampling_seed=0) == cohorts(20, participation=0.3, sampling_seed=0)


def test_availability_leaves_out_clients_and_is_not_counted_as_sampling():
    whole = cohorts(50, participation=0.5)
    there = cohorts(50, participation=0.5, availability=0.5)
    assert all(set(some) <= set(of) for some, of in zip(there, whole, strict=True))
    assert there != whole
    rates = [
        toy_data(**settings).cohort.sampling_rate
        for settings in (
            {"sampling": "poisson", "participation": 0.5},
            {"sampling": "poisson", "participation": 0.5, "availability": 0.5},
            {"availability": 0.5},
            {"participation": 0.5},
            {"schedule": [[0, 1, 2, 3, 4]]},
        )
    ]
    assert rates == [0.5, 0.5, 1.0, None, None]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"sampling": "normal"}, "sampling must be one of uniform, poisson, got 'normal'"),
        ({"sampling": "poisson", "schedule": [[0]]}, "data.schedule names the cohorts, and sampling=poisson draws"),
        (
            {"sampling": "poisson", "availability": 0.5, "over_selection": 0.5, "participation": 0.5},
            "with sampling=poisson each client is drawn by itself, got 0.5",
        ),
    ],
)
def test_settings_are_checked(settings, says):
    with pytest.raises(ValueError, match=re.escape(says)):
        toy_data(**settings)


def test_a_secret_seed_is_drawn_anew_and_kept_in_the_state():
    settings = {"sampling": "poisson", "participation": 0.5, "secret_seed": True}
    one = toy_data(**settings)
    other = toy_data(**settings)
    open_ = toy_data()
    assert one.secret != other.secret
    assert len(one.secret) == 32
    assert [one.cohort(t) for t in range(20)] != [other.cohort(t) for t in range(20)]
    for data in (one, other, open_):
        data.setup("fit")
    other.load_state_dict(one.state_dict())
    assert [one.cohort(t) for t in range(20)] == [other.cohort(t) for t in range(20)]
    assert one.noise_seed == other.noise_seed != open_.noise_seed == open_.batch_seed
    assert "secret" not in open_.state_dict()
