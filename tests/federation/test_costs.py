"""The cost of a sample in a net: its operations, counted without a trace, or its parameters."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from fl_lightning.distributed.communicator import ProcessCommunicator
from fl_lightning.federation.costs import sample_costs
from fl_lightning.federation.run import FederatedRun
from fl_lightning.nets import CharLSTM, CharTransformer, HeterogeneousNets, Perceptron

WIDTHS = nn.Linear(4, 3), nn.Linear(4, 7)
PARAMETERS = [4 * 3 + 3, 4 * 7 + 7]


class Restless(nn.Module):
    """Draws from every generator, and changes a buffer."""

    def __init__(self):
        super().__init__()
        self.calls = nn.Buffer(torch.zeros(()))
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        self.calls += 1
        noise = random.random() + np.random.random() + torch.rand((), device="cpu").item()
        return self.layer(x + noise)


class OfValues(nn.Module):
    """Branches on a value, which a net on the meta device does not have."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        return self.layer(x) if x.sum() > 0 else self.layer(-x)


class TwoInputs(OfValues):
    def forward(self, x, y):
        return self.layer(x + y)


class Uncopied(OfValues):
    def forward(self, x):
        return self.layer(x)

    def __deepcopy__(self, memo):
        raise TypeError("cannot be copied")


def test_operations_are_those_of_the_layers():
    """Two for each product: of a linear layer, a convolution, and an LSTM over 80 characters."""
    convolution = nn.Sequential(nn.Conv2d(3, 8, 5, padding=2), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8 * 36, 2))
    assert sample_costs([convolution], (3, 6, 6)) == [2 * 36 * 8 * 3 * 25 + 2 * 8 * 36 * 2]
    lstm = CharLSTM(num_classes=10, input_shape=(80,), embedding=8, hidden=16, layers=1)
    assert sample_costs([lstm], (80,)) == [80 * 2 * 4 * 16 * (8 + 16) + 2 * 16 * 10]


def test_a_net_of_more_parameters_than_operations_costs_those():
    embedding = nn.Sequential(nn.Embedding(1000, 8), nn.Flatten())
    assert sample_costs([embedding, nn.Identity()], (2,)) == [8000, 1]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_the_count_is_the_same_wherever_it_is_made(mode):
    nets = [CharTransformer(10, (20,)), CharTransformer(10, (20,)).double(), CharTransformer(10, (20,)).bfloat16()]
    with mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        costs = sample_costs(nets, (20,))
    assert costs == [sample_costs([CharTransformer(10, (20,)).eval()], (20,))[0]] * 3
    assert costs[0] > 5 * sum(parameter.numel() for parameter in nets[0].parameters())


def test_the_count_leaves_no_trace(recwarn):
    net = nn.Sequential(Restless(), nn.BatchNorm1d(3), nn.Dropout(0.5))
    before = {name: value.clone() for name, value in net.state_dict().items()}
    draws = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    assert sample_costs([net], (4,)) == [24]
    assert draws == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
    assert all(value.equal(before[name]) for name, value in net.state_dict().items())
    assert all(module.training for module in net.modules())
    assert not recwarn


@pytest.mark.parametrize("net", [OfValues, TwoInputs, Uncopied])
def test_parameters_are_the_cost_of_all_nets_where_one_cannot_be_counted(net, recwarn):
    assert sample_costs([*WIDTHS, net()], (4,)) == [*PARAMETERS, 15]
    assert not recwarn


@pytest.mark.parametrize("input_shape", [None, (3,), ()])
def test_parameters_are_the_cost_where_the_nets_do_not_read_the_shape(input_shape):
    assert sample_costs(WIDTHS, input_shape) == PARAMETERS


def cost_of(net, sizes, world=2):
    run = SimpleNamespace(
        data=SimpleNamespace(is_unread=False),
        parts=SimpleNamespace(client=SimpleNamespace(net=net)),
        server=SimpleNamespace(size=sizes.__getitem__),
        communicator=SimpleNamespace(world=world),
    )
    return FederatedRun.client_cost.func(run)


def test_the_work_of_a_client_is_its_samples_times_the_operations_of_its_net():
    net = HeterogeneousNets(3, (4,), [Perceptron, nets_of(100)])
    sizes = [7, 7, 0, 2]
    small, large = sample_costs(net.nets, (4,))
    assert large > small
    assert [cost_of(net, sizes)(client_id) for client_id in range(4)] == [7 * small, 7 * large, 0, 2 * large]
    assert [cost_of(Perceptron(3, (4,)), sizes)(client_id) for client_id in range(4)] == sizes
    assert [cost_of(net, sizes, world=1)(client_id) for client_id in range(4)] == sizes


def nets_of(hidden):
    return lambda num_classes, input_shape: Perceptron(num_classes, input_shape, hidden=(hidden, hidden))


def test_clients_of_fast_and_slow_nets_are_spread_evenly():
    """By their samples alone, one process would have all slow ones."""
    net = HeterogeneousNets(3, (4,), [Perceptron, nets_of(100)])
    cost = cost_of(net, [10] * 8)
    communicator = SimpleNamespace(world=2)
    ranks = ProcessCommunicator.assign_clients(communicator, range(8), cost, {})
    loads = [sum(cost(client_id) for client_id in ranks if ranks[client_id] == rank) for rank in range(2)]
    assert loads == [2 * cost(0) + 2 * cost(1)] * 2
