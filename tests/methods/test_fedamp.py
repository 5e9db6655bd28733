"""FedAMP: which mean a client is sent and pulled to, what it deploys, and what no model of a client goes through."""

import math
from functools import partial

import numpy as np
import pytest
import torch

from fl_lightning.functional.state import weighted_mean
from fl_lightning.methods import DPFedAvg, FedAMP, FedAvg, Local, local_dp
from fl_lightning.methods.fedamp import FedAMPServer, cosine_attention, exp_attention, mixed
from fl_lightning.nets import Perceptron
from tests.federation.test_local_checks import dropped
from tests.methods.snapshots import check_failed_round
from tests.methods.test_local import Regression
from tests.toys import BatchNormNet, equal, fit, sgd, toy_data, weights_of

Small = partial(Perceptron, hidden=(6,))
SIZES = (7, 12, 0, 9, 1)
LATE = {"sizes": (7, 12, 5, 0, 16), "schedule": [[0, 1, 3], [0, 2], [4, 1, 3]]}
MILD = {"alpha": 1.0, "sigma": 5.0}
"""Models of clients weigh up to 1/5."""


def fedamp(kind=FedAMP, **settings):
    return kind(**{"net": Small, "optimizer": sgd(), **MILD, **settings})


class Seen(FedAMP):
    """Notes the entries from which each client trains, by (round, client)."""

    def receive(self, broadcast, local):
        super().receive(broadcast, local)
        start = {name: value.clone() for name, value in self.entries().items()}
        self.seen[broadcast.round_idx, local.client_id] = start


def seen(rounds, data, **settings):
    client = fedamp(Seen, **settings)
    client.seen = {}
    return fit(client, rounds, data), client.seen


def own_of(loop, client_id):
    return loop.store.memory(client_id).get("own_models", [None])[-1]


def initial_of(**settings):
    return dict(fit(fedamp(**settings), 0).client.state_dict())


def vector(state, names):
    return np.concatenate([state[name].double().numpy().ravel() for name in names])


# --- the equations ---


@pytest.mark.parametrize(("attention", "sigma"), [("exp", 5.0), ("cosine", 3.0)])
def test_the_mean_that_a_client_is_sent_by_hand(attention, sigma):
    """Client 3 of the second round and client 0 of the third one come late or again; client 2 has no samples."""
    data = {"schedule": [[0, 1, 2], [3, 1], [0, 2, 4]]}
    more = {"attention": attention, "sigma": sigma, "self_weight": 0.3, "net": BatchNormNet}
    loop, found = seen(3, toy_data(SIZES, **data), **more)
    initial = initial_of(**more)
    for round_idx, client_id in ((1, 3), (1, 1), (2, 0), (2, 2), (2, 4)):
        before = fit(fedamp(**more), round_idx, toy_data(SIZES, **data))
        models = {i: own_of(before, i) for i in range(5) if own_of(before, i) is not None}
        own = models.pop(client_id, initial)
        vectors = {i: vector(model, loop.server.trainable) for i, model in models.items()}
        mine = vector(own, loop.server.trainable)
        if attention == "exp":
            xi = {i: 1.0 / sigma * math.exp(-((v - mine) ** 2).sum() / sigma) for i, v in vectors.items()}
        else:
            cos = {i: v @ mine / np.linalg.norm(v) / np.linalg.norm(mine) for i, v in vectors.items()}
            total = sum(math.exp(sigma * c) for c in cos.values())
            xi = {i: 0.7 * math.exp(sigma * c) / total for i, c in cos.items()}
        assert min(xi.values()) > 0
        assert loop.server_module is not before.server_module
        assert before.server_module.attention(client_id) == pytest.approx(xi, rel=1e-9)
        for name, value in own.items():
            wanted = value.double() + sum(xi[i] * (models[i][name].double() - value.double()) for i in xi)
            if not value.is_floating_point():
                wanted = wanted.round()
            torch.testing.assert_close(found[round_idx, client_id][name].double(), wanted, rtol=1e-6, atol=1e-7)
    assert all(equal(found[0, client_id], initial) for client_id in (0, 1, 2))


def test_integers_half_to_even_and_equal_entries_in_their_bits():
    own = {"w": torch.tensor([-0.0, 0.1]), "n": torch.tensor(3), "on": torch.tensor(True)}
    other = {"w": torch.tensor([-0.0, 0.1]), "n": torch.tensor(4), "on": torch.tensor(True)}
    new = mixed(own, [other], torch.tensor([0.5]))
    assert new["n"].item() == 4  # 3.5
    assert new["w"].view(torch.int32).tolist() == own["w"].view(torch.int32).tolist()
    assert equal(mixed(own, [], torch.tensor([])), own)
    alike = {"w": torch.rand(999, dtype=torch.float64, generator=torch.Generator().manual_seed(0))}
    assert equal(mixed(alike, [alike, alike], torch.tensor([0.1, 0.3], dtype=torch.float64)), alike)
    moved = {"w": alike["w"] + 1}
    assert not equal(mixed(alike, [moved], torch.tensor([0.1])), alike)
    assert cosine_attention(torch.tensor([]), 5.0, 0.4).tolist() == []
    assert exp_attention(torch.tensor([0.0, math.inf]), 1.0, 4.0).tolist() == [0.25, 0.0]


def test_the_pull_is_lam_over_alpha_times_the_way_from_the_mean():
    client = fedamp(num_classes=3, input_shape=(4,), lam=0.5, alpha=2.0)
    client.fix_trainable()
    params = client.params()
    client.context.start = {name: value.detach() - 1 for name, value in params.items()}
    client.context.trainable = tuple(params)
    client.log = lambda *args, **kwargs: None
    batch = (torch.zeros(2, 4), torch.tensor([0, 1]))
    loss = client.training_step(batch, 0) - client.local_loss(batch, 0)
    number = sum(value.numel() for value in params.values())
    assert loss.item() == pytest.approx(0.5 / (2 * 2.0) * number, rel=1e-5)
    for gradient in torch.autograd.grad(loss, list(params.values()), allow_unused=True):
        torch.testing.assert_close(gradient, torch.full_like(gradient, 0.25), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("net", [Small, BatchNormNet])
def test_without_attention_and_pull_it_is_local(net):
    settings = {"net": net, "optimizer": sgd()}
    ours = fit(FedAMP(alpha=1e-300, lam=0.0, **settings), 3, toy_data(**LATE))
    theirs = fit(Local(finetune_epochs=0, **settings), 3, toy_data(**LATE))
    for client_id in (0, 1, 2, 4):
        assert equal(own_of(ours, client_id), theirs.store.record(client_id)[1])


def test_a_stronger_pull_stays_nearer():
    ways = []
    for lam in (0.0, 5.0):
        loop, found = seen(2, toy_data((8, 12)), lam=lam)
        names = loop.server.trainable
        ways.append(np.linalg.norm(vector(own_of(loop, 0), names) - vector(found[1, 0], names)))
    assert ways[1] < 0.9 * ways[0]


# --- who has which model ---


def test_models_bytes_and_the_server_s_mean():
    """Client 2 has no samples: nobody is sent a part of its model, and it keeps none."""
    schedule = [[0, 1, 2], [0, 2, 3], [3, 4]]
    loop, _ = seen(3, toy_data(SIZES, schedule=schedule))
    bytes_of_net = 4 * (4 * 6 + 6 + 6 * 3 + 3)
    for way in ("comm/bytes_down", "comm/bytes_up"):
        curve = loop.recorder.history.curve(way)
        assert [curve[r] for r in range(3)] == [3 * bytes_of_net, 3 * bytes_of_net, 2 * bytes_of_net]
    assert loop.server_module.trained.tolist() == [True, True, False, True, True]
    assert own_of(loop, 2) is None
    for client_id in (0, 1, 3, 4):
        assert equal(own_of(loop, client_id), dict(loop.server_module.latest(client_id)))
    mean = weighted_mean([own_of(loop, 3), own_of(loop, 4)], [9, 1])
    torch.testing.assert_close(dict(loop.client.state_dict()), mean)


def test_a_client_deploys_its_own_model_or_the_initial_one():
    data = {"schedule": [[0, 1, 2], [0, 1, 2]], "unseen": [4]}
    loop = fit(fedamp(net=BatchNormNet), 2, toy_data((7, 12, 0, 9, 8), **data))
    initial = initial_of(net=BatchNormNet)
    for client_id in (0, 1):
        assert equal(dict(loop.client_model(client_id).state_dict()), own_of(loop, client_id))
        assert loop.server_module.deployment(client_id) == {}
    for client_id in (2, 3, 4):
        assert equal(dict(loop.client_model(client_id).state_dict()), initial)
    assert not equal(dict(loop.client.state_dict()), initial)


def test_personal_entries_stay_and_take_no_part_in_the_distances():
    loop = fit(fedamp(), 2, toy_data(SIZES), personal="net.head.*")
    assert not [name for name in loop.server_module.latest(0) if "head" in name]
    assert [name for name in own_of(loop, 0) if "head" in name]
    assert not [name for name in loop.server.trainable if "head" in name]


def test_frozen_parameters_stay_as_they_are():
    class Frozen(FedAMP):
        def build(self, num_classes, input_shape):
            super().build(num_classes, input_shape)
            self.net.head.weight.requires_grad_(False)

    loop = fit(fedamp(Frozen), 3, toy_data(SIZES))
    initial = initial_of()["net.head.weight"]
    for client_id in (0, 1, 3, 4):
        assert torch.equal(own_of(loop, client_id)["net.head.weight"], initial)


def test_a_client_whose_samples_fill_no_batch_has_no_model():
    """It sends the mean that it was sent, which is nobody's model."""
    loop = fit(fedamp(), 2, dropped(8, num_clients=4))
    sizes = [loop.data.size(client_id, 0) for client_id in range(4)]
    assert sorted(sizes) == [7, 7, 8, 8]
    assert loop.server_module.trained.tolist() == [size == 8 for size in sizes]
    assert [own_of(loop, client_id) is not None for client_id in range(4)] == [size == 8 for size in sizes]


def test_under_local_noise_whoever_has_samples_has_trained():
    """Such a client does not tell its number of steps."""
    client = local_dp(fedamp(), noise_multiplier=0.1, max_norm=1.0)
    loop = fit(client, 2, toy_data(SIZES))
    assert loop.server_module.trained.tolist() == [True, True, False, True, True]


# --- a round as a whole, stacks (two processes: tests/test_contract.py) ---


def test_a_resumed_run_has_the_same_bits_with_batchnorm_and_around_a_module(tmp_path):
    for name, more in (("net", {"net": BatchNormNet}), ("module", {})):

        def client(more=more):
            torch.manual_seed(1)
            return fedamp(**(more or {"module": Regression(), "net": None, "optimizer": None}))

        whole, half = (fit(client(), rounds, toy_data(**LATE)) for rounds in (3, 2))
        half.trainer.save_checkpoint(tmp_path / name)
        resumed = fit(client(), 3, toy_data(**LATE), ckpt_path=tmp_path / name)
        assert equal(weights_of(resumed), weights_of(whole))
        assert equal(own_of(resumed, 4), own_of(whole, 4))
        assert resumed.round_metrics == whole.round_metrics


@pytest.mark.parametrize("attention", ["exp", "cosine"])
def test_a_stack_gives_each_client_its_own_mean(attention):
    settings = {"attention": attention, "lam": 3.0}
    alone = fit(fedamp(**settings), 3, toy_data((8, 12, 0, 9, 5)))
    stacked = fit(fedamp(**settings), 3, toy_data((8, 12, 0, 9, 5)), chunk=3)
    assert stacked.engine.why_not() is None
    for client_id in (0, 1, 3, 4):
        torch.testing.assert_close(own_of(stacked, client_id), own_of(alone, client_id))


class Breaks(FedAMP):
    """Client 1 sends values that are not finite in round 1."""

    def reply(self, exchange, local):
        if local.client_id == 1 and local.round_idx == 1:
            with torch.no_grad():
                self.net.head.bias.fill_(torch.nan)
        return super().reply(exchange, local)


def test_a_skipped_client_is_as_an_absent_one():
    skipped = fit(fedamp(Breaks), 3, toy_data((7, 9, 5)), nonfinite="skip")
    absent = fit(fedamp(), 3, toy_data((7, 9, 5), schedule=[[0, 1, 2], [0, 2], [0, 1, 2]]))
    assert equal(weights_of(skipped), weights_of(absent))
    assert equal(own_of(skipped, 1), own_of(absent, 1))


def test_a_round_copies_no_model_and_a_failed_one_restores_them():
    check_failed_round(fedamp, FedAMPServer, sizes=(7, 9, 5), schedule=[[0, 1], [0, 2]])


def test_bf16_mixed():
    loop = fit(fedamp(net=BatchNormNet), 2, toy_data(SIZES), precision="bf16-mixed")
    assert all(value.isfinite().all() for value in weights_of(loop).values())
    assert loop.server_module.attention(0)


# --- what is refused ---


def test_an_alpha_with_which_models_would_have_negative_weights_is_refused():
    """N is the number of clients that train."""
    words = (
        r"alpha must be at most sigma / \(N - 1\) for N=4 clients, so that no model has a negative weight, got "
        r"alpha=2.0 with sigma=5.0; set model.client.alpha to 1.6666666666666667"
    )
    data = toy_data((7, 9, 5, 6, 8), unseen=[4])
    with pytest.raises(ValueError, match=words):
        fit(fedamp(alpha=2.0), 1, data)
    fit(fedamp(alpha=5.0 / 3), 1, data)
    fit(fedamp(alpha=2.0, attention="cosine"), 1, data)
    fit(fedamp(alpha=2.0), 1, toy_data((7,)))


def test_the_defaults_go_with_101_clients():
    client = FedAMP()
    assert client.alpha == client.sigma / 100


def test_at_the_largest_alpha_a_client_of_equal_models_is_sent_them():
    weights = exp_attention(torch.zeros(3, dtype=torch.float64), alpha=5.0 / 3, sigma=5.0)
    models = [{"w": torch.tensor([float(i)])} for i in range(4)]
    new = mixed(models[0], models[1:], weights)
    torch.testing.assert_close(new["w"], torch.tensor([2.0]))


def test_what_cannot_work_is_refused():
    private = DPFedAvg(noise_multiplier=1.0, delta=0.01)
    words = (
        "DPFedAvg adds noise .* FedAMPServer takes in each client's update before it; take a method whose server only"
    )
    with pytest.raises(ValueError, match=words):
        fit(fedamp(), 1, toy_data(participation=1.0), aggregator=private)
    with pytest.raises(ValueError, match="a FedAMPServer needs a FedAMP client, got FedAvg; leave"):
        fit(FedAvg(net=Small), 1, server_module=FedAMPServer())
    with pytest.raises(ValueError, match="FedAMP needs trainable entries that the clients share, got none"):
        fit(fedamp(), 1, personal="*")
    for setting, message in (
        ({"alpha": 0.0}, "alpha must be above 0"),
        ({"sigma": 0.0}, "sigma must be above 0"),
        ({"lam": -1.0}, "lam must be at least 0"),
        ({"attention": "dot"}, "attention must be one of exp, cosine, got 'dot'"),
        ({"self_weight": 1.5}, "self_weight must be at most 1"),
    ):
        with pytest.raises(ValueError, match=message):
            FedAMP(**setting)
