"""FedAvg: the client as it stands, around a net and around a module."""

import copy

import pytorch_lightning as pl
import torch
from torch.nn import functional as F

from fl_lightning import ClientModule
from fl_lightning.aggregation import ServerModule
from fl_lightning.functional.state import weighted_mean
from fl_lightning.methods import FedAvg
from fl_lightning.nets import Perceptron
from tests.toys import fit, sgd, toy_data


def test_two_rounds_equal_the_algorithm_by_hand():
    """Algorithm 1 in float64: E epochs of each client's batches from the same start, then Σ n_i w_i / Σ n_i."""
    data = toy_data((7, 0, 12, 5), batch_size=4, dtype=torch.float64, schedule=[[0, 1, 2, 3], [2, 3]])
    client = FedAvg(net=Perceptron, optimizer=sgd(0.1, 0.0))
    loop = fit(client, 2, data, precision="64-true", local_epochs=2)
    start = fit(FedAvg(net=Perceptron), 0, data, precision="64-true").client.net.double()
    for t, cohort in enumerate(data.schedule):
        states = []
        sizes = []
        for client_id in cohort:
            local = data.view(client_id, t)
            net = copy.deepcopy(start)
            for epoch in range(2):
                for x, y in local.batches(epoch=epoch):
                    net.zero_grad()
                    F.cross_entropy(net(x), y).backward()
                    with torch.no_grad():
                        for p in net.parameters():
                            p.sub_(0.1 * p.grad)
            states.append(net.state_dict())
            sizes.append(local.size())
        start.load_state_dict(weighted_mean(states, sizes))
    for name, value in start.state_dict().items():
        torch.testing.assert_close(loop.client.net.state_dict()[name], value, rtol=1e-12, atol=1e-12)


def test_it_adds_nothing_to_the_client():
    assert FedAvg.training_step is ClientModule.training_step
    assert FedAvg.server_class is ServerModule
    assert not FedAvg.needs


class Regression(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.line = torch.nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        return (self.line(batch[0]).squeeze(1) - batch[1].float()).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def test_around_a_module_it_is_the_module_itself():
    bare, wrapped = (fit(kind, 2, seed=1).client.module.state_dict() for kind in same_start())
    torch.testing.assert_close(bare, wrapped, rtol=0, atol=0)


def same_start():
    module = Regression()
    return copy.deepcopy(module), FedAvg(module=module)
