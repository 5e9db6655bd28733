"""FedRep, and FedPer and LG-FedAvg as settings: head or body stays with the client."""

from functools import partial

import pytest
import torch
from torch import nn

from fl_lightning import FederatedLoop
from fl_lightning.methods import FedAvg, FedRep
from fl_lightning.nets import Perceptron
from tests.methods.test_local import Regression
from tests.toys import BatchNormNet, equal, fit, sgd, toy_data

Small = partial(Perceptron, hidden=(6,))


def model_after(client, **settings):
    loop = fit(client, 1, toy_data((7,)), local_epochs=2, **settings)
    return {name: value.clone() for name, value in loop.client.state_dict().items()}


def test_each_part_rests_while_the_other_is_trained():
    """Weight decay and momentum would move a part that only has no gradient."""
    start = fit(FedRep(net=Small), 0, toy_data((7,))).client.state_dict()
    start = {name: value.clone() for name, value in start.items()}
    optimizer = sgd(0.1, 0.9, weight_decay=0.1)
    only_head = model_after(FedRep(net=Small, optimizer=optimizer, head_epochs=2, body_epochs=0))
    only_body = model_after(FedRep(net=Small, optimizer=optimizer, head_epochs=0, body_epochs=2))
    for name, value in start.items():
        assert torch.equal(value, only_head[name]) == ("head" not in name)
        assert torch.equal(value, only_body[name]) == ("head" in name)


def test_steps_of_both_parts_count_and_statistics_move_in_both():
    loop = fit(FedRep(net=BatchNormNet, optimizer=sgd(), head_epochs=3), 1, toy_data((10,)), local_epochs=2)
    assert loop.client.num_steps == 2 * 3 + 2 * 2
    assert loop.client.state_dict()["net.body.1.num_batches_tracked"] == 10


def test_the_head_never_travels():
    loop = fit(FedRep(net=Small, optimizer=sgd(), head_epochs=1), 2, toy_data(schedule=[[0, 1], [1, 2]]))
    assert loop.round_metrics["comm/bytes_down"] == 2 * 4 * (4 * 6 + 6)
    heads = [loop.store.personal(c)["net.head.weight"] for c in range(3)]
    assert not any(torch.equal(heads[0], head) for head in heads[1:])
    assert loop.store.personal(3) is None


class Frozen(Perceptron):
    def __init__(self, num_classes, input_shape):
        super().__init__(num_classes, input_shape, hidden=(6,))
        self.head.requires_grad_(False)


def test_what_it_cannot_train_is_refused():
    with pytest.raises(ValueError, match="FedRep needs the logits of a net, got module=Regression"):
        FederatedLoop(FedRep(module=Regression()))
    with pytest.raises(ValueError, match="FedRep shares all but the head, but Perceptron has nothing else to train"):
        fit(FedRep(net=partial(Perceptron, hidden=())), 1)
    with pytest.raises(ValueError, match=r"needs a net whose last layer is a torch.nn.Linear called head, got Sequent"):
        fit(FedRep(net=lambda c, shape: nn.Sequential(nn.Linear(4, c))), 1)
    with pytest.raises(ValueError, match="FedRep trains the head apart, but that of Frozen has no parameter with"):
        fit(FedRep(net=Frozen), 1)
    with pytest.raises(ValueError, match="head_epochs must be at least 0, got -1"):
        FedRep(head_epochs=-1)


@pytest.mark.parametrize("patterns", ["net.head.*", ["*", "!net.body.*"]])
def test_fedper_is_a_setting(patterns):
    loop = fit(FedAvg(net=BatchNormNet, optimizer=sgd()), 2, personal=patterns)
    assert set(loop.global_weights.personal) == {"net.head.weight", "net.head.bias"}
    wanted = fit(FedAvg(net=BatchNormNet, optimizer=sgd()), 2, personal="net.head.*")
    assert equal(loop.client.state_dict(), wanted.client.state_dict())


def test_lg_fedavg_is_a_setting():
    loop = fit(FedAvg(net=BatchNormNet, optimizer=sgd()), 2, personal=["*", "!net.head.*"])
    assert set(loop.server.weights) == {"net.head.weight", "net.head.bias"}
    assert "net.body.1.running_mean" in loop.store.personal(0)
    assert loop.round_metrics["comm/bytes_up"] == 5 * 4 * (8 * 3 + 3)


def test_an_exception_that_matches_nothing_is_refused():
    with pytest.raises(ValueError, match=r"personal: a pattern must match an entry of the client, '!net.neck.\*'"):
        fit(FedAvg(net=Small), 1, personal=["*", "!net.neck.*"])
