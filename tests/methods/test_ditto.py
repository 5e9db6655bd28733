"""Ditto: the global model is FedAvg's; each client's own is trained apart and kept."""

import copy
from functools import partial

import pytest
import torch
from torch.nn import functional as F

from fl_lightning import NonFiniteUpdateError
from fl_lightning.methods import Ditto, FedAvg
from fl_lightning.nets import HeterogeneousNets, Perceptron
from tests.methods.test_local import Regression
from tests.toys import BatchNormNet, equal, fit, sgd, toy_data, weights_of

Small = partial(Perceptron, hidden=(6,))
LATE = {"sizes": (7, 12, 5, 0, 16), "schedule": [[0, 1, 3], [0, 2], [4, 1, 3]]}


def own_of(loop, client_id):
    return next(iter(loop.store.memory(client_id).get("own_models", [])), None)


def ditto(**settings):
    return Ditto(**{"net": Small, "optimizer": sgd(), **settings})


@pytest.mark.parametrize("lam", [0.0, 3.0])
def test_the_global_model_is_fedavg_s_bit_for_bit(lam):
    net = partial(BatchNormNet, dropout=0.2)
    runs = [fit(kind(net=net, optimizer=sgd()), 3, toy_data(**LATE)) for kind in (FedAvg, partial(Ditto, lam=lam))]
    assert equal(*map(weights_of, runs))
    for way in ("comm/bytes_down", "comm/bytes_up"):
        assert runs[0].round_metrics[way] == runs[1].round_metrics[way]


def test_the_own_model_by_hand():
    """A fresh momentum each round, decay, the pull to the weights as received; a late client begins at the start."""
    lam = 0.7
    data = toy_data(dtype=torch.float64, shuffle=False, **LATE)
    settings = {"optimizer": sgd(0.1, 0.9, weight_decay=0.01), "lam": lam, "personal_epochs": 2}
    loop = fit(ditto(**settings), 3, data, precision="64-true", lr_decay=0.5)
    start = fit(ditto(**settings), 0, toy_data(dtype=torch.float64, **LATE), precision="64-true").client.net
    wanted = [copy.deepcopy(start) for _ in range(5)]
    for round_idx, cohort in enumerate(LATE["schedule"]):
        before = toy_data(dtype=torch.float64, shuffle=False, **LATE)
        received = fit(ditto(**settings), round_idx, before, precision="64-true", lr_decay=0.5).client.net
        anchors = list(copy.deepcopy(received).parameters())
        for client_id in cohort:
            net = wanted[client_id]
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1 * 0.5**round_idx, momentum=0.9, weight_decay=0.01)
            for _ in range(2):
                for x, y in data.view(client_id, round_idx).batches():
                    away = [(p - a).square().sum() for p, a in zip(net.parameters(), anchors, strict=True)]
                    optimizer.zero_grad()
                    (F.cross_entropy(net(x), y) + lam / 2 * sum(away)).backward()
                    optimizer.step()
    for client_id in (0, 1, 2, 4):
        own = {name.removeprefix("net."): value for name, value in own_of(loop, client_id).items()}
        torch.testing.assert_close(own, dict(wanted[client_id].state_dict()), rtol=1e-9, atol=1e-12)
    assert own_of(loop, 3) is None  # it never had data


def test_statistics_of_the_own_model_are_its_own():
    loop = fit(ditto(net=BatchNormNet, personal_epochs=3), 2, toy_data((10,)))
    assert own_of(loop, 0)["net.body.1.num_batches_tracked"] == 2 * 3 * 2
    assert loop.client.state_dict()["net.body.1.num_batches_tracked"] == 2 * 2
    assert loop.client.num_steps == 2  # of the global model


def test_deployed_is_the_own_model_or_the_initial_one():
    loop = fit(ditto(), 2, toy_data(**LATE), evaluate_clients_every=1)
    start = {name: value.clone() for name, value in loop.client.initial.items()}
    assert equal(start, fit(ditto(), 0, toy_data(**LATE)).client.state_dict())
    for client_id, wanted in ((0, own_of(loop, 0)), (4, start)):
        loop.client.context.memory = loop.store.memory(client_id)
        assert loop.client.deployed() is loop.client
        assert equal(loop.client.entries(), wanted)


def test_resume_is_exact_also_around_a_module_with_weights_of_its_own(tmp_path):
    def client(seed):
        torch.manual_seed(seed)
        return Ditto(module=Regression())

    whole, half = (fit(client(1), rounds, toy_data(**LATE)) for rounds in (3, 1))
    half.trainer.save_checkpoint(tmp_path / "half.ckpt")
    resumed = fit(client(2), 3, toy_data(**LATE), ckpt_path=tmp_path / "half.ckpt")
    assert equal(weights_of(resumed), weights_of(whole))
    for client_id in (0, 1, 2, 4):
        assert equal(own_of(resumed, client_id), own_of(whole, client_id))


def test_a_stronger_pull_stays_nearer():
    def away(lam):
        loop = fit(ditto(lam=lam, personal_epochs=3), 1, toy_data((9,)))
        own = own_of(loop, 0)
        start = loop.client.initial
        return sum((own[name] - start[name]).square().sum().item() for name in start)

    assert away(0.0) > away(1.0) > away(8.0) > 0


def test_bad_settings():
    with pytest.raises(ValueError, match=r"lam must be at least 0, got -0.1"):
        Ditto(lam=-0.1)
    with pytest.raises(ValueError, match="personal_epochs must be at least 0, got -1; 0 is FedAvg"):
        Ditto(personal_epochs=-1)


def test_the_own_model_sees_the_batches_of_the_global_one():
    """From the same start and without a pull it becomes the same model."""
    data = toy_data((9,))
    loop = fit(ditto(lam=0.0, personal_epochs=3), 1, data, local_epochs=3)
    assert equal(own_of(loop, 0), loop.client.state_dict())


def test_an_own_model_that_is_not_finite_is_its_client_s():
    """It is never sent: as an error, or left out with the client's update."""
    settings = {"lam": 1e30, "personal_epochs": 9}
    sentence = r"client 0 returned NaN or infinite values in round 0; Ditto's own models need lr · lam .* lower lam"
    with pytest.raises(NonFiniteUpdateError, match=sentence):
        fit(ditto(**settings), 1, toy_data((9,)))
    loop = fit(ditto(**settings), 1, toy_data((9, 7)), nonfinite="skip")
    assert loop.round_metrics["train/skipped"] == 2
    assert own_of(loop, 0) is None


def test_different_nets_keep_their_own_entries():
    net = partial(HeterogeneousNets, nets=[Small, partial(Perceptron, hidden=())])
    loop = fit(ditto(net=net), 2, toy_data((9, 7)), personal="*", evaluate_clients_every=1)
    for client_id in (0, 1):
        assert own_of(loop, client_id).keys() == set(loop.global_weights.personal_of(client_id))
