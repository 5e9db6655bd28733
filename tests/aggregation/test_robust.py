"""Robust rules: loops over rows, what no bounded number of clients can do, and how many clients they need."""

from functools import partial
from itertools import combinations

import pytest
import pytorch_lightning as pl
import torch

from fl_lightning.aggregation import (
    Aggregator,
    GeometricMedianAggregator,
    KrumAggregator,
    MedianAggregator,
    TrimmedMeanAggregator,
)
from fl_lightning.aggregation.robust import coordinate_median, geometric_median, krum_scores, trimmed_mean
from fl_lightning.methods import FedAvg, FedProx
from fl_lightning.nets import Perceptron
from tests.hooks.toy import SCAFFOLD, Updates
from tests.methods.test_fedavg import Regression
from tests.toys import BatchNormNet, equal, fit, sgd, toy_data, weights_of

Small = partial(Perceptron, hidden=(6,))
RULES = {
    "median": MedianAggregator,
    "trimmed_mean": partial(TrimmedMeanAggregator, 0.3),
    "krum": partial(KrumAggregator, 1),
    "multi_krum": partial(KrumAggregator, 1, 3),
    "geometric_median": partial(GeometricMedianAggregator, 50),
}


def rows(m=7, seed=0):
    return torch.randn(m, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def center(rule, matrix, weights=None):
    return rule().center(matrix, torch.ones(len(matrix), dtype=torch.float64) if weights is None else weights)


# --- equations


@pytest.mark.parametrize("m", [1, 2, 5, 6])
def test_median_and_trimmed_mean_are_those_of_sorted_columns(m):
    matrix = rows(m)
    columns = [sorted(column) for column in matrix.T.tolist()]
    median = [(c[(m - 1) // 2] + c[m // 2]) / 2 for c in columns]
    torch.testing.assert_close(coordinate_median(matrix), torch.tensor(median).double())
    for trim in range((m + 1) // 2):
        kept = [sum(c[trim : m - trim]) / (m - 2 * trim) for c in columns]
        torch.testing.assert_close(trimmed_mean(matrix, trim), torch.tensor(kept).double())


@pytest.mark.parametrize("f", [0, 1, 2])
def test_krum_s_scores_are_those_of_a_loop_and_a_twin_counts_as_another(f):
    matrix = rows(8)
    matrix[5] = matrix[2]
    wanted = []
    for i, one in enumerate(matrix):
        others = sorted(float((one - other).square().sum()) for j, other in enumerate(matrix) if j != i)
        wanted.append(sum(others[: 8 - f - 2]))
    torch.testing.assert_close(krum_scores(matrix, f), torch.tensor(wanted).double())


def test_on_equal_scores_krum_takes_the_lower_client():
    square = torch.tensor([[0.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 1.0]]).double()
    assert torch.equal(center(partial(KrumAggregator, 0), square), square[0])


def test_the_geometric_median_is_the_point_of_least_distance():
    matrix = rows()
    weights = torch.tensor([5.0, 1.0, 3.0, 2.0, 4.0, 1.0, 1.0]).double()
    z = geometric_median(matrix, weights, iters=500, nu=1e-9)

    def distance(point):
        return (weights * (matrix - point).norm(dim=1)).sum()

    gradient = (weights[:, None] * (z - matrix) / (z - matrix).norm(dim=1, keepdim=True)).sum(0)
    assert gradient.norm() < 1e-6
    assert distance(z) < distance(weights @ matrix / weights.sum())
    torch.testing.assert_close(geometric_median(matrix, weights, 0, 1e-6), weights @ matrix / weights.sum())


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_two_rows_far_away_move_no_rule_far(rule):
    """Of nine rows, wherever the two lie; the mean goes with them."""
    if isinstance(rule, partial) and rule.func is KrumAggregator:
        rule = partial(rule.func, 2, *rule.args[1:])
    honest = rows(7)
    for far in (1e3, -1e6):
        for places in list(combinations(range(9), 2))[::7]:
            matrix = torch.full((9, 5), far, dtype=torch.float64)
            matrix[[i for i in range(9) if i not in places]] = honest
            assert (center(rule, matrix) - honest.mean(0)).norm() < 4
            assert (matrix.mean(0) - honest.mean(0)).norm() > 100


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_equal_rows_are_returned_and_shifts_pass_through(rule):
    matrix = rows()
    shift = torch.arange(5.0).double()
    torch.testing.assert_close(center(rule, matrix + shift), center(rule, matrix) + shift)
    torch.testing.assert_close(center(rule, matrix[:1].expand(7, 5)), matrix[0])


def test_nothing_trimmed_and_no_step_taken_are_the_mean():
    for rule in (partial(TrimmedMeanAggregator, 0.0), partial(GeometricMedianAggregator, 0)):
        torch.testing.assert_close(center(rule, rows()), rows().mean(0))


def test_a_share_of_a_cohort_is_counted_as_it_is_written():
    assert [TrimmedMeanAggregator(0.29).trim(m) for m in (100, 99, 3)] == [29, 28, 0]


def test_a_share_of_which_nothing_is_trimmed_is_warned_of():
    with pytest.warns(UserWarning, match=r"beta=0.1 trims nothing of 5 clients; raise beta"):
        fit(FedAvg(net=Small), 0, toy_data(), aggregator=TrimmedMeanAggregator(0.1))


# --- runs


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_rows_are_the_clients_with_data_and_statistics_take_the_mean(rule):
    watch = Updates()
    sizes = (7, 0, 12, 5, 9, 16)
    client = FedAvg(net=BatchNormNet, optimizer=sgd())
    loop = fit(client, 1, toy_data(sizes), callbacks=[watch], aggregator=rule())
    updates = {c: update for c, update in watch.rounds[0].items() if update.num_samples}
    assert list(updates) == [0, 2, 3, 4, 5]
    names = loop.server.trainable
    matrix = torch.stack([torch.cat([u.weights[n].reshape(-1) for n in names]) for u in updates.values()]).double()
    n = torch.tensor([update.num_samples for update in updates.values()]).double()
    found = torch.cat([watch.after[0][name].reshape(-1) for name in names])
    torch.testing.assert_close(found, center(rule, matrix, n).float())
    name = "net.body.1.running_var"
    mean = sum(k * u.weights[name].double() for k, u in zip(n, updates.values(), strict=True)) / n.sum()
    torch.testing.assert_close(watch.after[0][name], mean.float())


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_any_rule_goes_with_terms_server_modules_and_user_modules(rule):
    data = partial(toy_data, (7, 9, 12, 5, 9))
    for client in (
        FedProx(mu=0.1, net=Small, optimizer=sgd()),
        SCAFFOLD(net=Small, optimizer=sgd()),
        FedAvg(module=Regression()),
    ):
        state = weights_of(fit(client, 2, data(), aggregator=rule()))
        assert all(value.isfinite().all() for value in state.values() if value.is_floating_point())


def test_a_client_that_is_skipped_is_no_row():
    class Broken(FedAvg):
        def reply(self, exchange, local):
            if local.client_id == 1:
                with torch.no_grad():
                    next(self.parameters()).fill_(torch.inf)
            return {}

    runs = [
        fit(
            kind(net=Small, optimizer=sgd()),
            1,
            toy_data(schedule=[ids]),
            aggregator=MedianAggregator(),
            nonfinite="skip",
        )
        for kind, ids in ((Broken, [0, 1, 2, 3]), (FedAvg, [0, 2, 3]))
    ]
    assert equal(*map(weights_of, runs))


class NeverTrained(pl.Callback):
    def on_client_start(self, trainer, loop, client_id):
        raise AssertionError


@pytest.mark.parametrize(
    ("rule", "settings", "sentence"),
    [
        (
            partial(KrumAggregator, 2),
            {},
            r"Krum.* needs m ≥ 2f \+ 3 = 7 clients \(f=2\), got cohorts of 5 clients; let",
        ),
        (partial(KrumAggregator, 1), {"participation": 0.8}, r"2f \+ 3 = 5 clients .* got cohorts of 4 clients"),
        (partial(KrumAggregator, 1), {"schedule": [[0, 1, 2, 3, 4], [0, 1]]}, "got cohorts of 2 clients"),
        (partial(KrumAggregator, 0, 6), {}, "needs m ≥ num_selected = 6 clients, got cohorts of 5 clients"),
    ],
)
def test_cohorts_that_are_too_small_are_refused_before_anyone_trains(rule, settings, sentence):
    with pytest.raises(ValueError, match=sentence):
        fit(FedAvg(net=Small), 2, toy_data(**settings), aggregator=rule(), callbacks=[NeverTrained()])


def test_a_trimmed_mean_needs_more_rows_than_it_cuts_off():
    """A β that rounding takes for one half cuts off both of two rows."""
    for beta, m in ((0.4999999999, 2), (0.2, 0), (0.0, 0)):
        assert TrimmedMeanAggregator(beta).too_few(m) == f"m > 2 ⌊beta m⌋ clients (beta={beta})"
    for beta, m in ((0.4999999999, 3), (0.49, 2), (0.0, 1)):
        assert TrimmedMeanAggregator(beta).too_few(m) is None


def test_a_round_with_too_few_clients_with_data_is_an_error_that_names_it():
    data = toy_data((7, 0, 12, 5, 9, 16), schedule=[[0, 2, 3, 4, 5], [0, 1, 2, 3, 4]])
    with pytest.raises(ValueError, match=r"2f \+ 3 = 5 clients .* got 4 clients with data in round 1"):
        fit(FedAvg(net=Small, optimizer=sgd()), 2, data, aggregator=KrumAggregator(1))


@pytest.mark.parametrize(
    ("rule", "settings", "sentence"),
    [
        (TrimmedMeanAggregator, {"beta": 0.5}, r"beta must lie in \[0, 0.5\), got 0.5"),
        (TrimmedMeanAggregator, {"beta": float("nan")}, r"beta must lie in \[0, 0.5\), got nan"),
        (KrumAggregator, {"f": -1}, "f must be at least 0, got -1"),
        (KrumAggregator, {"num_selected": 0}, "num_selected must be at least 1, got 0"),
        (GeometricMedianAggregator, {"iters": -1}, "iters must be at least 0, got -1"),
        (GeometricMedianAggregator, {"nu": 0.0}, "nu must be above 0, got 0.0"),
    ],
)
def test_wrong_settings_are_refused(rule, settings, sentence):
    with pytest.raises(ValueError, match=sentence):
        rule(**settings)


def test_with_nobody_s_data_the_weights_stay():
    data = toy_data((0, 0, 7, 5, 5, 5, 5), schedule=[[0, 1], [2, 3, 4, 5, 6]])
    loop = fit(FedAvg(net=Small, optimizer=sgd()), 1, data, aggregator=MedianAggregator())
    start = fit(FedAvg(net=Small), 0, data, aggregator=Aggregator())
    assert equal(loop.client.state_dict(), start.client.state_dict())


def test_the_weights_of_the_geometric_median_may_be_fractions():
    class Hundredths(GeometricMedianAggregator):
        def weight(self, update):
            return update.num_samples / 100

    rules = (GeometricMedianAggregator(), Hundredths())
    plain, scaled = (weights_of(fit(FedAvg(net=Small, optimizer=sgd()), 2, aggregator=rule)) for rule in rules)
    torch.testing.assert_close(plain, scaled)
