"""FedEXP: its step size, what it leaves alone, what it evaluates, and its state in a checkpoint."""

from functools import partial

import pytest
import torch

from fl_lightning import FederatedLoop
from fl_lightning.methods import FedAvg, FedEXPAggregator
from fl_lightning.methods.fedexp import step_size
from fl_lightning.nets import Perceptron
from fl_lightning.types import ClientUpdate
from tests.toys import BatchNormNet, equal, fit, sgd, toy_data, trainer, weights_of

Small = partial(Perceptron, hidden=(6,))


class Server:
    """A server with one trainable weight and a counter."""

    trainable = ("w",)

    def __init__(self, dim=4):
        self.weights = {"w": torch.zeros(dim), "count": torch.tensor(3)}
        self.exact_weights = self.weights


def aggregate(deltas, sizes, **settings):
    """One round of updates that move `w` by the rows of `deltas`; the aggregator and what it returned."""
    aggregator = FedEXPAggregator(**settings)
    aggregator.attach(Server(deltas.shape[1]))
    aggregator.setup()
    aggregator.begin_round(list(range(len(deltas))))
    for client_id, (delta, n) in enumerate(zip(deltas, sizes, strict=True)):
        weights = {"w": delta.clone(), "count": torch.tensor(3 + 7 * n)}
        update = ClientUpdate(client_id, n, n, 0.0, weights)
        aggregator.add(ClientUpdate(client_id, n, n, 0.0, weights, aggregator.client_statistics(update)))
    return aggregator, aggregator.finish()


@pytest.mark.parametrize("eps_scale", ["paper", "code"])
def test_the_step_is_that_of_a_loop_and_a_client_without_data_is_left_out(eps_scale):
    deltas = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    sizes = [3, 0, 5, 1, 2]
    aggregator, new = aggregate(deltas, sizes, eps=0.1, eps_scale=eps_scale)
    p = [n / sum(sizes) for n in sizes]
    mean = [sum(weight * row[k] for weight, row in zip(p, deltas.tolist(), strict=True)) for k in range(4)]
    squares = sum(weight * sum(x * x for x in row) for weight, row in zip(p, deltas.tolist(), strict=True))
    eps = 0.1 * (4 if eps_scale == "code" else 1)
    eta = max(1.0, squares / (2 * (sum(x * x for x in mean) + eps)))
    assert eta > 1
    assert float(aggregator.eta_g) == pytest.approx(eta)
    torch.testing.assert_close(new["w"], torch.tensor([eta * x for x in mean]))
    assert new["count"] == round(3 + 7 * sum(weight * n for weight, n in zip(p, sizes, strict=True)))


@pytest.mark.parametrize("deltas", [torch.ones(3, 4), torch.zeros(3, 4), torch.randn(1, 4)])
def test_where_clients_agree_the_step_is_one(deltas):
    aggregator, new = aggregate(deltas, [2] * len(deltas))
    assert aggregator.eta_g == 1
    assert torch.equal(new["w"], deltas[0])


def test_the_step_is_never_below_one_and_grows_with_disagreement():
    ratios = [float(step_size(torch.tensor(4.0), torch.tensor(square), 1e-3)) for square in (4.0, 2.0, 1.0, 0.1)]
    assert ratios[0] == 1
    assert ratios == sorted(ratios)
    assert ratios[-1] == pytest.approx(4 / 0.202)


def test_no_valid_update_changes_nothing():
    assert aggregate(torch.ones(2, 4), [0, 0])[1] is None


def test_a_cohort_of_one_is_fedavg_bit_for_bit():
    runs = []
    for aggregator in (None, FedEXPAggregator()):
        data = toy_data(schedule=[[0], [3], [1]])
        runs.append(weights_of(fit(FedAvg(net=BatchNormNet, optimizer=sgd()), 3, data, aggregator=aggregator)))
    assert equal(runs[0], {name: value for name, value in runs[1].items() if name in runs[0]})


def test_what_is_evaluated_is_the_mean_of_two_rounds_and_is_not_fed_back():
    """In the first round the round's own weights; averages and last weights give the same training."""
    loops = {}
    evaluated = {}
    trained = {}
    for average_last in (True, False):
        aggregator = FedEXPAggregator(eps=1e-6, average_last=average_last)
        client = FedAvg(net=BatchNormNet, optimizer=sgd())
        seen = []
        after = []
        inner = aggregator.evaluation_weights

        def spy(weights, inner=inner, seen=seen, after=after):
            found = inner(weights)
            seen.append({name: value.clone() for name, value in found.items()})
            after.append({name: value.clone() for name, value in weights.items()})
            return found

        aggregator.evaluation_weights = spy
        loops[average_last] = fit(client, 3, loop=FederatedLoop(client, aggregator, seed=3))
        evaluated[average_last] = seen
        trained[average_last] = after
    for a, b in zip(*trained.values(), strict=True):
        assert equal(a, b)
    assert equal(evaluated[True][0], trained[True][0])
    for r in (1, 2):
        for name, value in evaluated[True][r].items():
            now = trained[True][r][name]
            before = trained[True][r - 1][name]
            assert value.dtype == now.dtype
            torch.testing.assert_close(value, ((now.double() + before.double()) / 2).to(now.dtype), rtol=0, atol=1e-6)
        assert equal(evaluated[False][r], trained[False][r])
    state = {name.removeprefix("client."): value for name, value in weights_of(loops[True]).items()}
    assert all(torch.equal(state[name], value) for name, value in trained[True][2].items())


def test_each_client_sends_one_number_more():
    rows = [
        fit(FedAvg(net=Small, optimizer=sgd()), 1, toy_data((7, 0, 5)), aggregator=aggregator).round_metrics
        for aggregator in (None, FedEXPAggregator())
    ]
    assert rows[1]["comm/bytes_up"] == rows[0]["comm/bytes_up"]
    assert rows[1]["comm/bytes_down"] == rows[0]["comm/bytes_down"]


def test_its_state_is_in_the_checkpoint(tmp_path):
    """Resumed after a round it evaluates and trains as if it had not stopped."""

    def loop():
        client = FedAvg(net=BatchNormNet, optimizer=sgd())
        return FederatedLoop(client, FedEXPAggregator(eps=1e-6), seed=3)

    whole = loop()
    first = loop()
    second = loop()
    trainer(3).fit(whole, datamodule=toy_data((4, 4, 4)))
    run = trainer(2)
    run.fit(first, datamodule=toy_data((4, 4, 4)))
    run.save_checkpoint(tmp_path / "two.ckpt")
    trainer(3).fit(second, datamodule=toy_data((4, 4, 4)), ckpt_path=tmp_path / "two.ckpt")
    assert equal(weights_of(whole), weights_of(second))
    assert whole.round_metrics["global/loss"] == second.round_metrics["global/loss"]


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"eps": 0.0}, "eps must be above 0, got 0.0"),
        ({"eps_scale": "paper2"}, "eps_scale must be one of paper, code, got 'paper2'"),
    ],
)
def test_wrong_settings_are_refused(settings, sentence):
    with pytest.raises(ValueError, match=sentence):
        FedEXPAggregator(**settings)
