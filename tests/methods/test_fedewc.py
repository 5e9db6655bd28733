"""FedEWC: the pull towards the model of the change, and the information that it is weighted by."""

import torch

from fl_lightning.data import ClassIncremental
from fl_lightning.methods import FedEWC
from tests.methods.changing import SIZES, Small, changing, run
from tests.methods.stacked import stacked_and_alone
from tests.toys import fit, sgd, toy_data, weights_of


def test_the_penalty_stacks():
    client = FedEWC(net=Small, num_classes=3, input_shape=(4,)).double()
    draws = torch.Generator().manual_seed(0)
    x = torch.randn(3, 5, 4, generator=draws).double()
    y = torch.randint(3, (3, 5), generator=draws)
    entries = {name: torch.rand(3, *value.shape, generator=draws).double() for name, value in client.params().items()}
    buffers = {"omega": entries, "anchor": {name: 0.1 * value for name, value in entries.items()}}
    torch.testing.assert_close(*stacked_and_alone(client, buffers, x, y))


def test_the_more_weight_the_nearer_the_weights_stay_to_the_model_of_the_change():
    start = weights_of(run(FedEWC, 2, net=Small, lam=1.0))
    client = run(FedEWC, 3, net=Small, lam=1.0).store.record(1)[0]
    omega = client["omega"]
    distances = []
    for lam in (0.0, 1.0, 10.0):
        end = weights_of(fit(FedEWC(lam=lam, net=Small, optimizer=sgd(0.02, 0.0)), 4, changing()))
        begun = weights_of(fit(FedEWC(lam=lam, net=Small, optimizer=sgd(0.02, 0.0)), 2, changing()))
        moved = {name: (end[f"client.{name}"] - begun[f"client.{name}"]).square() for name in omega}
        distances.append(sum(float((omega[name] * moved[name]).sum()) for name in omega))
    assert distances[0] > distances[1] > distances[2] > 0
    assert start.keys() == end.keys()


def test_omega_adds_the_information_of_each_stage_and_fades():
    tasks = ClassIncremental([[0], [1], [2]], rounds_per_task=1)
    found = {}
    for rounds in (1, 2, 3):
        loop = run(FedEWC, rounds, toy_data(SIZES, scenario=tasks), net=Small, lam=1e-9, gamma=0.5)
        found[rounds] = loop.store.record(1)[0]
    assert "omega" not in found[1]
    for name, value in found[1]["fisher"].items():
        torch.testing.assert_close(found[2]["omega"][name], value)
        expected = 0.5 * found[2]["omega"][name] + found[2]["fisher"][name]
        torch.testing.assert_close(found[3]["omega"][name], expected)
