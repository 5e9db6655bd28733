"""What a server gives a client that deploys its model reaches it wherever such a model is made, and nowhere else."""

import random

import pytest
import torch
from pytorch_lightning.callbacks.weight_averaging import EMAWeightAveraging
from torch import nn

from fl_lightning import Aggregator, ClientModule, FederatedLoop, FineTuning
from fl_lightning.aggregation import ServerModule
from fl_lightning.callbacks import ClientCheckpoint
from fl_lightning.methods import FedAvg, FedProx
from fl_lightning.types import Broadcast
from tests.toys import equal, fit, sgd, toy_data, trainer, weights_of

DATA = {"sizes": (7, 12, 0, 9, 8), "unseen": [4]}


class Biases(ServerModule):
    """Gives client i a bias of the head of (rounds so far, i, 0)."""

    def setup(self):
        self.rounds = nn.Buffer(torch.zeros((), dtype=torch.int64))

    def finish(self, exchange, aggregate):
        self.rounds = nn.Buffer(self.rounds + 1)
        return aggregate

    def deployment(self, client_id):
        return {"bias": torch.tensor([self.rounds.item(), client_id, 0.0])}


class Biased(FedAvg):
    """Deploys the bias that it is given; its draws must leave no trace."""

    server_class = Biases

    def receive_deployment(self, extras, local):
        torch.rand(3)
        self.given.append((local.client_id, local.size(), extras["bias"].tolist(), torch.rand(1).item()))
        with torch.no_grad():
            self.net.head.bias.copy_(extras["bias"])

    @property
    def deploys_own_model(self):
        return True


def biased():
    client = Biased(optimizer=sgd())
    client.given = []
    return client


def biases(given):
    return {client_id: bias for client_id, _, bias, _ in given}


WANTED = {i: [2.0, i, 0.0] for i in range(5)}


def test_it_reaches_clients_of_an_evaluation_and_leaves_no_trace():
    loop = fit(biased(), 2, toy_data(**DATA), evaluate_clients_every=2, fine_tuning=FineTuning(epochs=1))
    assert biases(loop.client.given) == WANTED
    assert [size for _, size, _, _ in loop.client.given] == [7, 12, 0, 9, 8]
    plain = fit(FedAvg(optimizer=sgd()), 2, toy_data(**DATA))
    assert equal(dict(loop.client.state_dict()), dict(plain.client.state_dict()))
    assert loop.round_metrics["comm/bytes_down"] == plain.round_metrics["comm/bytes_down"]


def test_its_draws_depend_on_the_client_alone():
    every = fit(biased(), 2, toy_data(**DATA), evaluate_clients_every=1).client.given
    draws = [draw for *_, draw in every]
    assert draws[:5] == draws[5:]
    assert len(set(draws)) == 5
    loop = fit(biased(), 2, toy_data(**DATA))
    loop.client_model(3)
    assert loop.client.given[-1][-1] == draws[3]


class BiasedByGenerator(Biased):
    """Draws from a generator of its own, too."""

    def receive_deployment(self, extras, local):
        super().receive_deployment(extras, local)
        self.rng.random()


def test_a_copy_of_a_client_s_model_moves_no_generator():
    client = BiasedByGenerator(optimizer=sgd())
    client.given = []
    client.rng = random.Random(0)
    loop = fit(client, 2, toy_data(**DATA))
    state = client.rng.getstate()
    torch.manual_seed(5)
    wanted = torch.rand(1)
    torch.manual_seed(5)
    loop.client_model(3)
    assert torch.equal(torch.rand(1), wanted)
    assert client.rng.getstate() == state


@pytest.mark.parametrize("step", ["validate", "test", "predict"])
@pytest.mark.parametrize("client_id", [1, 4])
def test_it_reaches_a_client_whose_model_is_evaluated_or_predicts(step, client_id):
    loop = fit(biased(), 2, toy_data(**DATA))
    before = weights_of(loop)
    loop.client.given.clear()
    loop.deploy(client_id)
    getattr(trainer(1), step)(loop, datamodule=toy_data(**DATA))
    assert biases(loop.client.given) == {client_id: WANTED[client_id]}
    assert equal(weights_of(loop), before)


@pytest.mark.parametrize("step", ["validate", "test", "predict"])
def test_the_global_model_is_evaluated_without_it(step):
    loop = fit(biased(), 2)
    getattr(trainer(1), step)(loop, datamodule=toy_data())
    assert not loop.client.given


@pytest.mark.parametrize("tuned", [False, True])
def test_it_reaches_copies_of_clients_models(tuned, tmp_path):
    loop = fit(
        biased(),
        2,
        toy_data(**DATA),
        evaluate_clients_every=2,
        fine_tuning=FineTuning(epochs=1, trains="net.body.*"),
        callbacks=[ClientCheckpoint(tmp_path, clients=[0, 4])],
    )
    for client_id in range(5):
        model = loop.client_model(client_id, tuned=tuned)
        assert model.net.head.bias.tolist() == WANTED[client_id]
    with loop.lent_to(3):
        assert loop.client.net.head.bias.tolist() == WANTED[3]
    assert loop.client.net.head.bias.tolist() != WANTED[3]
    states = [torch.load(path, weights_only=True)["state_dict"] for path in tmp_path.glob("client-*.ckpt")]
    found = [state["net.head.bias"].tolist() for state in states]
    assert WANTED[0] in found
    assert WANTED[4] in found


def test_a_copy_moves_no_generator():
    loop = fit(biased(), 1, toy_data(**DATA))
    torch.manual_seed(1)
    before = torch.get_rng_state()
    loop.client_model(3)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_method_without_it_enters_none_of_its_code(monkeypatch):
    def fails(*args):
        raise AssertionError("a method without deployment was asked")

    monkeypatch.setattr(ServerModule, "deployment", fails)
    monkeypatch.setattr(ClientModule, "receive_deployment", fails)
    loop = fit(FedProx(optimizer=sgd()), 1, toy_data(**DATA), evaluate_clients_every=1)
    loop.client_model(0)
    loop.deploy("all")
    trainer(1).test(loop, toy_data(**DATA), verbose=False)


def test_a_client_that_is_given_nothing_is_not_asked_to_receive_it():
    class Some(Biases):
        def deployment(self, client_id):
            return super().deployment(client_id) if client_id == 1 else {}

    class Takes(Biased):
        server_class = Some

    client = Takes(optimizer=sgd())
    client.given = []
    fit(client, 2, toy_data(**DATA), evaluate_clients_every=2)
    assert biases(client.given) == {1: WANTED[1]}


def test_averages_of_the_global_model_are_refused():
    words = (
        "EMAWeightAveraging averages the global model, and clients deploy what Biases gives them besides, got both; "
    )
    with pytest.raises(ValueError, match=f"{words}remove EMAWeightAveraging from trainer.callbacks"):
        fit(biased(), 1, toy_data(**DATA), callbacks=[EMAWeightAveraging(decay=0.5)])


def test_a_server_module_has_values_of_the_row_unless_its_round_is_aborted():
    class Counts(ServerModule):
        def row_values(self):
            return {"cohorts": 7.0}

    loop = fit(FedAvg(optimizer=sgd()), 1, server_module=Counts())
    assert loop.round_metrics["cohorts"] == 7.0

    class Breaks(FedAvg):
        def reply(self, exchange, local):
            with torch.no_grad():
                self.net.head.bias.fill_(torch.nan)
            return {}

    loop = fit(Breaks(optimizer=sgd()), 1, server_module=Counts(), nonfinite="skip")
    assert "cohorts" not in loop.round_metrics


def test_the_rule_s_value_comes_before_the_server_module_s():
    class Rule(Aggregator):
        def row_values(self):
            return {"cohorts": 3.0}

    class Counts(ServerModule):
        def row_values(self):
            return {"cohorts": 7.0}

    loop = FederatedLoop(FedAvg(optimizer=sgd()), Rule(), server_module=Counts(), seed=3)
    assert fit(None, 1, loop=loop).round_metrics["cohorts"] == 3.0


def test_the_start_of_an_exchange_may_be_moved():
    class Moves(FedAvg):
        def receive(self, broadcast: Broadcast, local):
            before = self.received
            moved = {"net.head.bias": torch.ones(3)}
            self.context.move_start(moved)
            assert torch.equal(self.received["net.head.bias"], torch.ones(3))
            others = {name for name in before if name != "net.head.bias"}
            assert all(self.received[name] is before[name] for name in others)
            assert not torch.equal(broadcast.weights["net.head.bias"], torch.ones(3))

    assert fit(Moves(optimizer=sgd()), 1).round_metrics
