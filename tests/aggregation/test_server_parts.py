"""Rules and server modules: what they keep, and what their helpers promise."""

from functools import partial

import pytest
import torch

from fl_lightning import Aggregator, FederatedLoop
from fl_lightning.aggregation import GatheringAggregator, KrumAggregator, ServerModule
from fl_lightning.methods import FedAvg, FedProx
from fl_lightning.nets import Perceptron
from tests.hooks.toy import Median, Updates
from tests.toys import BatchNormNet, equal, fit, sgd, toy_data, weights_of

Small = partial(Perceptron, hidden=(6,))


class First(GatheringAggregator):
    """The first client with samples, in float64."""

    def reduce(self, updates):
        _, first = next(iter(updates.items()))
        return {name: first.weights[name].double() for name in self.server.trainable}


class TwoExchanges(FedProx):
    """Its loss is in the type of what it was sent."""

    exchanges = ("first", "second")

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        assert loss.dtype == torch.float32
        return loss


def test_a_rule_without_reduce_cannot_be_made():
    class Forgets(GatheringAggregator):
        def finish(self):
            return None

    with pytest.raises(TypeError, match=r"abstract method '?reduce"):
        Forgets()


@pytest.mark.parametrize("net", [Small, BatchNormNet])
def test_a_rule_that_gathers_sees_clients_with_samples_only_and_keeps_the_types(net):
    """In a net without buffers too; what it returns in float64 is float32 when it goes down again."""
    watch = Updates()
    client = TwoExchanges(mu=0.1, net=net, optimizer=sgd())
    loop = fit(client, 2, toy_data((0, 7, 12)), callbacks=[watch], aggregator=First())
    for name in loop.server.trainable:
        assert watch.after[-1][name].dtype == torch.float32
        assert torch.equal(watch.after[-1][name], watch.rounds[-1][1].weights[name])


@pytest.mark.parametrize("rule", [Aggregator, Median])
def test_where_no_client_has_samples_the_weights_stay(rule):
    settings = {"aggregator": rule(), "nonfinite": "skip"}
    loop = fit(FedAvg(net=BatchNormNet, optimizer=sgd()), 1, toy_data((0, 0, 7), schedule=[[0, 1]]), **settings)
    assert equal(loop.client.state_dict(), fit(FedAvg(net=BatchNormNet), 0).client.state_dict())


def test_of_one_client_every_rule_makes_that_client():
    data = {"sizes": (7, 12), "schedule": [[1], [0]]}
    runs = [
        fit(FedAvg(net=BatchNormNet, optimizer=sgd()), 2, toy_data(**data), aggregator=r())
        for r in (Aggregator, Median)
    ]
    torch.testing.assert_close(weights_of(runs[0]), weights_of(runs[1]), rtol=0, atol=1e-7)


class Keeps(ServerModule):
    """Rows of replies, without weights, and state by name."""

    def setup(self):
        self.kept = self.server_state(self.server.trainable)
        self.seen = []

    def add(self, update):
        self.gather(update, weights=update.client_id == 1)
        self.sum("n", {"n": torch.ones(())}, update.num_samples)

    def finish(self, exchange, aggregate):
        self.seen.append({c: (row.num_samples, row.weights is None) for c, row in self.rows.items()})
        self.seen.append((self.summed("n")["n"].item(), self.summed("nothing")))
        changed = {name: value.double() / 3 for name, value in aggregate.items() if name in self.kept}
        moved = self.moved(aggregate, changed)
        assert all(moved[name].dtype == value.dtype for name, value in aggregate.items())
        assert all(torch.equal(moved[n], aggregate[n]) for n in aggregate if n not in self.kept)
        return moved


def test_rows_sums_and_state_are_those_of_the_exchange():
    side = Keeps()
    loop = fit(FedAvg(net=BatchNormNet, optimizer=sgd()), 2, toy_data((7, 0, 5)), server_module=side)
    assert side.seen == [{0: (7, True), 1: (0, False), 2: (5, True)}, (12.0, {})] * 2
    assert not side.rows  # nothing of a round outlives it
    assert side.summed("n") == {}
    kept = {name: value for name, value in loop.state_dict().items() if name.startswith("server_module.")}
    assert len(kept) == len(loop.server.trainable)
    assert all(value.dtype == torch.float64 and not value.any() for value in kept.values())


@pytest.mark.parametrize("part", [Aggregator(), ServerModule()])
def test_without_a_loop_there_is_no_server(part):
    with pytest.raises(RuntimeError, match=f"{type(part).__name__} sees the server's weights once a FederatedLoop"):
        part.server_state(["w"])
    assert FederatedLoop(FedAvg())


def test_a_weighting_of_another_name_is_refused():
    with pytest.raises(ValueError, match="weighting must be one of samples, uniform, got 'sizes'"):
        Aggregator(weighting="sizes")
    with pytest.raises(TypeError, match="KrumAggregator got an unexpected keyword argument 'weights'; the nearest is"):
        KrumAggregator(weights="uniform")
