"""FedFOMO: which models a client is sent, how it moves, and what is kept where."""

from functools import partial

import pytest
import torch
from torch.nn import functional as F

from fl_lightning.methods import FedAvg, FedFOMO
from fl_lightning.methods.fedfomo import FedFOMOServer, candidate_weights, helpfulness, moved_towards
from fl_lightning.nets import Perceptron
from tests.methods.snapshots import check_failed_round
from tests.methods.test_fedala import Manual
from tests.methods.test_local import Regression
from tests.toys import BatchNormNet, equal, fit, sgd, toy_data, weights_of

Small = partial(Perceptron, hidden=(6,))
SIZES = (7, 12, 0, 9, 1)
W = 4 * (4 * 6 + 6 + 6 * 3 + 3)


def fedfomo(kind=FedFOMO, **settings):
    return kind(**{"net": Small, "optimizer": sgd(), "num_candidates": "all", **settings})


class Seen(FedFOMO):
    """Notes the start of training, the candidates and their helpfulness, by (round, client)."""

    def receive(self, broadcast, local):
        super().receive(broadcast, local)
        start = {name: value.clone() for name, value in self.entries().items()}
        self.seen[broadcast.round_idx, local.client_id] = (start, dict(broadcast.extras["candidates"]), self.round)


def view(sizes, round_idx):
    """Client 0's data in a round."""
    data = toy_data(sizes)
    data.setup("fit")
    return data.view(0, round_idx)


def seen(rounds, data=None, **settings):
    client = fedfomo(Seen, **settings)
    client.seen = {}
    return fit(client, rounds, data), client.seen


def test_the_mix_by_hand():
    data = toy_data((10, 12))
    _, found = seen(2, data)
    loop = fit(fedfomo(), 1, toy_data((10, 12)))
    own, other = (loop.store.memory(c)["own_models"][-1] for c in (0, 1))
    _, held = loop.client.parts(data.view(0, 1))
    x, y = data.view(0, 1).restricted("train", held).all()
    assert len(y) == 2
    losses = []
    for state in (own, other):
        net = Small(3, (4,))
        net.load_state_dict({name.removeprefix("net."): value for name, value in state.items()})
        losses.append(F.cross_entropy(net(x), y).detach())
    distance = torch.cat([(other[n] - own[n]).flatten() for n in own]).norm()
    raw = (losses[0] - losses[1]) / (distance + 1e-5)
    start, candidates, kept = found[1, 0]
    assert list(candidates) == [1]
    torch.testing.assert_close(kept["helpfulness"], torch.stack([torch.tensor(0.0), raw]))
    torch.testing.assert_close(start, other if raw > 0 else own)


def test_equations():
    raw = helpfulness(torch.tensor(1.0), torch.tensor([0.5, 2.0]), torch.tensor([1.0, 0.0]), floor=0.25)
    assert raw.tolist() == pytest.approx([0.4, -4.0])
    assert candidate_weights(raw).tolist() == [1.0, 0.0]
    assert candidate_weights(torch.tensor([-1.0, 0.0])).tolist() == [0.0, 0.0]
    own = {"w": torch.tensor([1.0]), "n": torch.tensor(3)}
    other = {"w": torch.tensor([3.0]), "n": torch.tensor(4)}
    new = moved_towards(own, [other], torch.tensor([0.5]))
    assert new["w"].item() == 2
    assert new["n"].item() == 4  # 3.5, half to even
    assert equal(moved_towards(own, [other], torch.tensor([0.0])), own)
    assert equal(moved_towards(own, [{**other, "w": torch.tensor([torch.inf])}], torch.tensor([0.0])), own)


def test_bytes_and_candidates_of_a_run():
    """Client 2 has no data: it is no candidate, and is sent the initial model every round."""
    schedule = [[0, 1, 2], [0, 2, 3], [3, 4]]
    loop, found = seen(3, toy_data(SIZES, schedule=schedule))
    chosen = {key: list(candidates) for key, (_, candidates, _) in found.items()}
    first = {(0, 0): [], (0, 1): [], (0, 2): [], (1, 0): [1], (1, 2): [], (1, 3): [0, 1]}
    assert chosen == {**first, (2, 3): [0, 1], (2, 4): [0, 1, 3]}
    down = loop.recorder.history.curve("comm/bytes_down")
    assert [down[r] for r in range(3)] == [3 * W, (1 + 1 + 3) * W, (2 + 4) * W]
    assert loop.round_metrics["comm/bytes_up"] == 2 * (W + 4 * 5)
    assert loop.server_module.trained.tolist() == [True, True, False, True, True]
    for client_id in (0, 1, 3, 4):
        own = loop.store.memory(client_id)["own_models"][-1]
        assert equal(own, dict(loop.server_module.latest(client_id)))


def test_a_client_begins_as_the_initial_model_whenever_it_comes():
    schedule = [[0, 1], [0, 1], [3]]
    loop, found = seen(3, toy_data(SIZES, schedule=schedule), num_candidates=1)
    start, _, kept = found[2, 3]
    if not bool((kept["helpfulness"] > 0).any()):
        assert equal(start, loop.client.initial)
    assert equal(loop.client.initial, fit(fedfomo(), 0, toy_data(SIZES)).client.state_dict())


def test_without_candidates_it_trains_alone_on_its_part():
    loop, _ = seen(2, toy_data((10,)))
    trained, held = fedfomo().parts(view((10,), 0))
    assert sorted([*trained.tolist(), *held.tolist()]) == list(range(10))
    assert torch.equal(fedfomo().parts(view((10,), 5))[1], held)  # of the run, not of the round
    assert loop.client.num_steps == 2  # 8 samples in batches of 5
    one = fedfomo().parts(view((1,), 0))
    assert [part.tolist() for part in one] == [[0], [0]]


def test_the_server_s_mean_is_the_cohort_s_by_all_its_samples():
    loop = fit(fedfomo(), 1, toy_data((10, 5)))
    own = [loop.store.memory(c)["own_models"][-1] for c in (0, 1)]
    wanted = {name: (2 * own[0][name] + own[1][name]) / 3 for name in own[0]}
    torch.testing.assert_close(dict(loop.client.state_dict()), wanted)


class Server:
    """What the server side sees of a federation of four."""

    num_clients = 4
    clients = range(4)
    round_idx = 0
    weights = {"w": torch.zeros(2)}
    trainable = ("w",)

    def __init__(self, **settings):
        self.module = fedfomo(**settings)

    def size(self, client_id):
        return int(client_id != 2)

    def generator(self, purpose):
        return torch.Generator().manual_seed(hash(purpose) % 2**31 + self.round_idx)


def server(**settings):
    made = FedFOMOServer()
    made.attach(Server(**settings))
    made.setup()
    made.trained[:] = True
    return made


def test_the_best_by_affinity_and_of_equal_ones_the_lower_id():
    made = server(num_candidates=2, epsilon=0.0)
    assert made.candidates(3) == [0, 1]
    made.affinity[3] = torch.tensor([-1.0, 0.5, 0.5, 9.0])
    assert made.candidates(3) == [1, 2]
    made.affinity[3, 0] = 0.7
    assert made.candidates(3) == [0, 1]
    assert made.candidates(2) == []


def test_exploration_falls_with_the_rounds():
    made = server(num_candidates=1, epsilon=1.0, epsilon_decay=0.5)
    made.affinity[3] = torch.tensor([9.0, 0.0, 0.0, 1.0])
    drawn = set()
    for seed in range(20):
        made.server.generator = lambda purpose, seed=seed: torch.Generator().manual_seed(seed)
        drawn |= set(made.candidates(3))
    assert drawn == {0, 1, 2}
    made.server.round_idx = 2
    for seed in range(20):
        made.server.generator = lambda purpose, seed=seed: torch.Generator().manual_seed(seed)
        assert made.candidates(3) == [0]


def test_resume_is_exact_with_batchnorm_and_around_a_module(tmp_path):
    for name, more in (("net", {"net": BatchNormNet}), ("module", {})):

        def client(more=more):
            torch.manual_seed(1)
            kind = more or {"module": Regression(), "net": None, "optimizer": None}
            return fedfomo(num_candidates=2, **{"epsilon": 0.5, **kind})

        whole, half = (fit(client(), rounds) for rounds in (3, 2))
        half.trainer.save_checkpoint(tmp_path / name)
        resumed = fit(client(), 3, ckpt_path=tmp_path / name)
        assert equal(weights_of(resumed), weights_of(whole))  # affinity and models too
        assert equal(resumed.store.memory(0)["own_models"][-1], whole.store.memory(0)["own_models"][-1])


def test_what_cannot_work_is_refused():
    with pytest.raises(ValueError, match=r"FedFOMO computes the loss of models .* but Manual steps its optimizers"):
        FedFOMO(module=Manual())
    with pytest.raises(ValueError, match="a FedFOMOServer needs a FedFOMO client, got FedAvg; leave"):
        fit(FedAvg(net=Small), 1, server_module=FedFOMOServer())
    with pytest.raises(ValueError, match="FedFOMO needs trainable entries that the clients share, got none"):
        fit(fedfomo(), 1, personal="*")
    for setting, message in (
        ({"num_candidates": 0}, "num_candidates must be at least 1, got 0; 'all' sends every model"),
        ({"epsilon": 1.5}, "epsilon must be at most 1"),
        ({"val_share": 1.0}, "val_share must be below 1"),
        ({"val_share": 0.0}, "val_share must be above 0"),
    ):
        with pytest.raises(ValueError, match=message):
            FedFOMO(**setting)


class Overflows(FedFOMO):
    """Client 1's model gives infinite losses, though its weights are finite."""

    def reply(self, exchange, local):
        sent = super().reply(exchange, local)
        if local.client_id == 1:
            with torch.no_grad():
                self.net.head.bias.fill_(1e38)
                self.net.head.weight.fill_(3e38)
        return sent


def test_a_candidate_of_infinite_loss_helps_nobody_and_accuses_nobody():
    class Seen(Overflows):
        def receive(self, broadcast, local):
            super().receive(broadcast, local)
            if local.client_id == 0:
                found.append((list(broadcast.extras["candidates"]), self.round["helpfulness"]))

    found = []
    loop = fit(fedfomo(Seen), 2, toy_data((7, 9)), nonfinite="skip")
    assert found[1][0] == [1]
    assert not found[1][1].any()
    assert loop.round_metrics["train/skipped"] == 0


def test_a_client_that_never_trained_deploys_the_initial_model():
    loop = fit(fedfomo(), 2, toy_data(SIZES, schedule=[[0, 1], [0, 1]]))
    loop.client.context.memory = loop.store.memory(3)
    loop.client.deployed()
    assert equal(loop.client.state_dict(), fit(fedfomo(), 0, toy_data(SIZES)).client.state_dict())


def test_a_round_copies_no_model_and_a_failed_one_restores_them():
    check_failed_round(fedfomo, FedFOMOServer, sizes=(7, 9, 5))


def test_a_server_optimizer_is_refused():
    with pytest.raises(ValueError, match=r"FedFOMO start from models of their own; leave model.server_optimizer unset"):
        fit(fedfomo(), 1, server_optimizer=partial(torch.optim.SGD, lr=1.0))
