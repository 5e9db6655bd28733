"""Clients that cannot take part: rates, a trace, over-selection, and rounds without anyone."""

import pytest

from tests.federation.faulty import faulty
from tests.toys import equal, fit, toy_data, weights_of


def cohorts(rounds=200, **settings):
    data = toy_data((1,) * 20, batch_size=1, **settings)
    return [data.cohort(t) for t in range(rounds)]


def test_a_rate_is_that_of_every_client():
    found = cohorts(availability=0.3)
    for client_id in range(20):
        assert sum(client_id in cohort for cohort in found) == pytest.approx(60, abs=25)
    assert found == cohorts(availability=0.3) != cohorts(availability=0.3, sampling_seed=1)
    assert cohorts(availability=1.0, participation=0.5) == cohorts(participation=0.5)


def test_each_client_has_a_rate_of_its_own():
    found = cohorts(availability=[0.0] * 10 + [1.0] * 10)
    assert all(cohort == list(range(10, 20)) for cohort in found)


def test_a_trace_begins_again(tmp_path):
    (tmp_path / "trace.txt").write_text("0, 1 2\n\n19\n")
    found = cohorts(4, availability=str(tmp_path / "trace.txt"))
    assert found == [[0, 1, 2], [], [19], [0, 1, 2]]


def test_over_selection_fills_the_cohort_but_never_over():
    plain = cohorts(availability=0.5, participation=0.2)
    more = cohorts(availability=0.5, participation=0.2, over_selection=1.0)
    assert max(map(len, more)) == 4
    assert sum(map(len, plain)) / 200 == pytest.approx(2, abs=0.3)
    assert sum(map(len, more)) / 200 > 3
    assert all(cohort == sorted(set(cohort)) for cohort in more)


def test_a_round_without_clients_leaves_the_model_as_it_was(tmp_path):
    (tmp_path / "trace.txt").write_text("0 1 2 3 4\n\n0 1 2 3 4\n")
    loop = fit(None, 2, toy_data(availability=str(tmp_path / "trace.txt")), loop=faulty("", "error"))
    assert equal(weights_of(loop), weights_of(fit(None, 1, loop=faulty("", "error"))))
    assert loop.round_metrics["train/skipped"] == 0


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"availability": 1.5}, r"availability must lie in \[0, 1\], got 1.5"),
        ({"availability": [0.5]}, r"one share per client \(5\), got 1"),
        ({"over_selection": 0.5}, "got 0.5 without data.availability"),
        ({"over_selection": -1.0}, "over_selection must be at least 0, got -1.0"),
        ({"over_selection": 0.5, "availability": 0.5, "schedule": [[0]]}, "with data.schedule"),
    ],
)
def test_settings_are_checked(settings, says):
    with pytest.raises(ValueError, match=says):
        toy_data(**settings)


@pytest.mark.parametrize(
    ("text", "says"),
    [("0 1\nx", "line 2 of .* something else"), ("", "is empty"), ("0\n7", r"\[0, 5\), and line 2 .* 7")],
)
def test_a_trace_that_is_none_is_refused(text, says, tmp_path):
    (tmp_path / "trace.txt").write_text(text)
    with pytest.raises(ValueError, match=says):
        toy_data(availability=str(tmp_path / "trace.txt"))
    with pytest.raises(FileNotFoundError, match="does not exist"):
        toy_data(availability=str(tmp_path / "none.txt"))
