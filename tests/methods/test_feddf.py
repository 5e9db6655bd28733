"""FedDF: its ensemble, what it trains and leaves alone, when it stops, and what it refuses."""

from functools import partial

import pytest
import torch

from fl_lightning import FederatedLoop
from fl_lightning.aggregation import MedianAggregator
from fl_lightning.data import TensorSource
from fl_lightning.methods import FedAvg, FedDFServer, FedProx
from fl_lightning.nets import Perceptron
from tests.hooks.toy import Updates
from tests.methods.test_fedavg import Regression
from tests.toys import BatchNormNet, equal, fit, folded, samples, sgd, toy_data, weights_of

Small = partial(Perceptron, hidden=(6,))


def data(sizes=(7, 0, 12, 5), proxy=20, **settings):
    source = TensorSource(samples(proxy, seed=5), samples(2), num_classes=3)
    return toy_data(sizes, extra_splits={"proxy": source}, **settings)


class Watched(FedDFServer):
    """Notes the mean before and the target of each distillation."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.seen = []

    def distilled(self, student, target):
        self.seen.append((student, target))
        return super().distilled(student, target)


def feddf(rounds=1, client=None, on=None, rule=None, **settings):
    side = Watched(**{"distill_steps": 30, "distill_lr": 0.05, **settings})
    watch = Updates()
    client = client or FedAvg(net=BatchNormNet, optimizer=sgd())
    loop = FederatedLoop(client, rule, server_module=side, seed=3)
    fit(None, rounds, data() if on is None else on, loop=loop, callbacks=[watch])
    return loop, side, watch


def predict(state, x):
    net = BatchNormNet(3, (4,)).eval()
    net.load_state_dict({name.removeprefix("net."): value for name, value in state.items()})
    with torch.no_grad():
        return net(x)


def test_the_target_is_the_plain_mean_of_the_logits_of_clients_with_data_each_with_its_statistics():
    _, side, watch = feddf()
    x = samples(20, seed=5)[0]
    teachers = [update.weights for update in watch.rounds[0].values() if update.num_samples]
    assert len(teachers) == 3
    torch.testing.assert_close(side.seen[0][1], sum(predict(weights, x) for weights in teachers) / 3)


def test_the_student_comes_nearer_to_the_teachers_and_keeps_the_mean_s_statistics():
    _, side, watch = feddf(distill_batch="full", distill_lr=0.005, distill_steps=200)
    (mean, target), after, x = side.seen[0], watch.after[0], samples(20, seed=5)[0]
    plain = fit(FedAvg(net=BatchNormNet, optimizer=sgd()), 1, data()).client.state_dict()
    assert all(torch.equal(mean[name], value) for name, value in plain.items())

    def divergence(state):
        log_q = predict(state, x).log_softmax(1)
        p = target.softmax(1)
        return float((p * (p.log() - log_q)).sum(1).mean())

    assert divergence(after) < divergence(mean) / 2
    for name, value in mean.items():
        assert torch.equal(after[name], value) == ("running" in name or "num_batches" in name)


def test_labels_of_the_proxy_are_not_read():
    x, y = samples(20, seed=5)
    runs = []
    for labels in (y, 2 - y):
        source = TensorSource((x, labels), samples(2), num_classes=3)
        runs.append(weights_of(feddf(2, on=toy_data(extra_splits={"proxy": source}))[0]))
    assert equal(*runs)


def test_no_step_is_fedavg_bit_for_bit_and_nobody_s_data_changes_nothing():
    plain = fit(FedAvg(net=BatchNormNet, optimizer=sgd()), 2, data())
    assert equal(weights_of(plain), weights_of(feddf(2, distill_steps=0)[0]))
    loop, side, _ = feddf(on=data(schedule=[[1]]))
    assert not side.seen
    assert equal(loop.client.state_dict(), fit(FedAvg(net=BatchNormNet), 0, data()).client.state_dict())


def test_it_goes_with_any_client_and_rule():
    loop, side, _ = feddf(2, FedProx(mu=0.1, net=Small, optimizer=sgd()), rule=MedianAggregator())
    assert len(side.seen) == 2
    assert all(value.isfinite().all() for value in loop.client.state_dict().values())
    plain = fit(FedAvg(net=Small, optimizer=sgd()), 1, data()).round_metrics
    assert all(loop.round_metrics[key] == plain[key] for key in ("comm/bytes_down", "comm/bytes_up"))


def test_it_stops_where_the_validation_split_shows_no_gain_and_not_without_one():
    settings = {"distill_lr": 1e-9, "distill_steps": 40, "patience": 10, "eval_every": 5}
    assert feddf(on=data((7, 12, 5), val_fraction=0.2, batch_size=4, partition=None), **settings)[1].steps_taken == 10
    assert feddf(**settings)[1].steps_taken == 40


def test_the_schedule_falls_from_the_rate_to_nothing():
    side = FedDFServer(distill_lr=0.2, distill_steps=4)
    assert [side.lr_at(step) for step in (0, 2, 4)] == pytest.approx([0.2, 0.1, 0.0])
    assert FedDFServer(distill_lr=0.2, distill_schedule="constant").lr_at(7) == 0.2


def test_batches_pass_over_the_proxy_in_a_new_order_each_time():
    _, side, _ = feddf()
    side.distill_batch = 8
    order = side.order(20)
    passes = [torch.cat([next(order) for _ in range(3)]) for _ in range(2)]
    assert all(torch.equal(one.sort().values, torch.arange(20)) for one in passes)
    assert not torch.equal(*passes)


@pytest.mark.parametrize(
    ("client", "on", "settings", "sentence"),
    [
        (FedAvg(net=Small), toy_data, {}, "needs the split 'proxy'"),
        (
            FedAvg(net=Small),
            partial(data, proxy=0),
            {},
            "needs a proxy set with samples, got an empty one; set data.proxy_size",
        ),
        (FedAvg(module=Regression()), data, {}, "Watched needs the logits of a net, got module=Regression"),
        (FedAvg(net=Small), data, {"personal": "net.head.*"}, "'net.head.weight' stays with each client"),
        (FedAvg(net=BatchNormNet), data, {"personal": "*running*"}, "'net.body.1.running_mean' stays with each client"),
    ],
)
def test_what_it_cannot_do_is_refused_at_start(client, on, settings, sentence):
    with pytest.raises(ValueError, match=sentence):
        fit(None, 1, on(), loop=FederatedLoop(client, server_module=Watched(), **folded(settings)))


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"temperature": 0.0}, "temperature must be above 0, got 0.0"),
        ({"distill_steps": -1}, "distill_steps must be at least 0, got -1"),
        ({"distill_batch": 0}, "distill_batch must be at least 1, got 0"),
        ({"distill_schedule": "linear"}, "distill_schedule must be one of cosine, constant, got 'linear'"),
        ({"patience": 0}, "patience must be at least 1, got 0"),
    ],
)
def test_wrong_settings_are_refused(settings, sentence):
    with pytest.raises(ValueError, match=sentence):
        FedDFServer(**settings)


def test_a_weight_that_the_logits_do_not_use_stays_the_mean_s():
    class Spare(BatchNormNet):
        def __init__(self, *sizes):
            super().__init__(*sizes, dropout=0.0)
            self.spare = torch.nn.Parameter(torch.ones(2))

    loop, side, _ = feddf(client=FedAvg(net=Spare, optimizer=sgd()))
    assert side.steps_taken == 30
    assert torch.equal(loop.client.net.spare, torch.ones(2))
