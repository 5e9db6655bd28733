"""FedEWC: the pull towards the model of the change, and the information that it is weighted by."""

import pytest
import pytorch_lightning as pl
import torch

from fl_lightning.data import ClassIncremental, LabelDrift, Window
from fl_lightning.members.faults import ClientError
from fl_lightning.methods import FedEWC
from tests.methods.changing import SIZES, Small, run
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
    lr = 0.02

    def loop_of(lam, rounds=2):
        data = toy_data((12,), scenario=ClassIncremental([[0, 1], [2]], rounds_per_task=1))
        return fit(FedEWC(lam=lam, net=Small, optimizer=sgd(lr, 0.0)), rounds, data, local_epochs=60)

    def vector(values, prefix=""):
        return torch.cat([values[f"{prefix}{name}"].flatten() for name in omega])

    omega = loop_of(1.0).store.record(0)[0]["omega"]
    begun = vector(weights_of(loop_of(1.0, rounds=1)), "client.")
    information = vector(omega)
    moved = {}
    for lam in (0.0, 1.0, 0.5 / lr / float(information.max())):
        moved[lam] = (vector(weights_of(loop_of(lam)), "client.") - begun).abs()
    free, weak, endless = [float((information * distance.square()).sum()) for distance in moved.values()]
    assert free > 1.5 * weak
    assert free > 20 * endless
    is_known = information > 0.5 * information.max()
    without, _, held = [distance[is_known].max() for distance in moved.values()]
    assert 0 < held < without / 20


@pytest.mark.parametrize("fisher", ["sample", "batch"])
def test_the_information_is_the_square_of_gradients_at_the_trained_weights(fisher):
    data = toy_data((12,), scenario=ClassIncremental([[0, 1], [2]], rounds_per_task=2), batch_size="full")
    loop = fit(FedEWC(net=Small, optimizer=sgd(), fisher=fisher), 1, data)
    view = data.view(0, 0)
    x, y = view.all()
    params = loop.client.params()

    def gradients(rows):
        loss = torch.nn.functional.cross_entropy(loop.client(x[rows]), y[rows])
        return torch.autograd.grad(loss, list(params.values()))

    batches = [torch.arange(len(x))] if fisher == "batch" else torch.arange(len(x)).split(1)
    squares = [[gradient.square() for gradient in gradients(rows)] for rows in batches]
    found = loop.store.record(0)[0]["fisher"]
    assert found.keys() == params.keys()
    for value, of_batches in zip(found.values(), zip(*squares, strict=True), strict=True):
        torch.testing.assert_close(value, torch.stack(of_batches).mean(0))


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


class Stop(pl.Callback):
    """Ends a run where its first client would train."""

    def on_client_start(self, trainer, loop, client_id):
        raise KeyError(client_id)


@pytest.mark.parametrize("scenario", [LabelDrift(alpha=1.0, rounds=12), Window(per_round=0.08)])
def test_where_every_round_is_a_stage_earlier_ones_must_fade(scenario):
    def begun(rounds=12, **settings):
        client = FedEWC(net=Small, optimizer=sgd(), **settings)
        fit(client, rounds, toy_data(SIZES, scenario=scenario), callbacks=[Stop()])

    with pytest.raises(ValueError, match=r"in every round, and FedEWC .* model\.client\.gamma must be below 1.* got 1"):
        begun(gamma=1.0)
    for settings in ({"gamma": 0.9}, {"gamma": 1.0, "lam": 0.0}, {"gamma": 1.0, "rounds": 5}):
        with pytest.raises(ClientError):
            begun(**settings)


def test_a_few_tasks_may_add_up():
    tasks = ClassIncremental([[0], [1], [2]], rounds_per_task=1)
    with pytest.raises(ClientError):
        fit(FedEWC(net=Small, optimizer=sgd(), gamma=1.0), 30, toy_data(SIZES, scenario=tasks), callbacks=[Stop()])


def test_where_every_round_is_a_stage_the_weights_stay_finite():
    scenario = LabelDrift(alpha=0.5, rounds=12, samples=0.6)
    loop = run(FedEWC, 12, toy_data((20, 25), scenario=scenario), net=Small, lam=1.0)
    omega = loop.store.record(1)[0]["omega"]
    assert all(value.isfinite().all() for value in [*weights_of(loop).values(), *omega.values()])


def test_the_anchor_is_the_model_received_at_the_change_and_stays():
    held = weights_of(run(FedEWC, 2, net=Small, lam=1.0))
    store = run(FedEWC, 4, net=Small, lam=1.0).store
    for client in range(3):
        anchor = store.record(client)[0]["anchor"]
        assert all(value.equal(held[f"client.{name}"]) for name, value in anchor.items())
