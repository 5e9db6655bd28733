"""FedALA: mixing by hand, what it leaves alone, and its state."""

import copy
from functools import partial

import pytest
import pytorch_lightning as pl
import torch
from torch.nn import functional as F

from fl_lightning.methods import FedALA, FedAvg
from fl_lightning.methods.fedala import settled
from fl_lightning.nets import Perceptron
from tests.methods.test_local import Regression
from tests.toys import BatchNormNet, equal, fit, sgd, toy_data, weights_of

Small = partial(Perceptron, hidden=(6,))


def fedala(**settings):
    return FedALA(**{"net": Small, "optimizer": sgd(), "eta": 5.0, **settings})


class Seen(FedALA):
    """Notes where training starts and how many passes were made, by (round, client)."""

    def receive(self, broadcast, local):
        self.made = []
        super().receive(broadcast, local)
        key = broadcast.round_idx, local.client_id
        self.starts[key] = {name: value.clone() for name, value in self.entries().items()}
        self.passes[key] = len(self.made)

    def one_pass(self, *arguments, **named):
        self.made.append(None)
        return super().one_pass(*arguments, **named)


def seen(rounds=2, data=None, net=Small, precision="32-true", **settings):
    client = Seen(net=net, optimizer=sgd(), **{"eta": 5.0, **settings})
    client.starts = {}
    client.passes = {}
    return fit(client, rounds, data, precision=precision), client


def test_a_first_participation_is_fedavg_s():
    assert equal(weights_of(fit(fedala(), 1)), weights_of(fit(FedAvg(net=Small, optimizer=sgd()), 1)))


def test_one_pass_by_hand():
    """θ̂ = θ_i + (θ_g − θ_i) A on the last tensors; A steps along the gradient of the loss in θ̂, batch by batch."""
    data = toy_data((9, 5), dtype=torch.float64)
    loop, client = seen(2, data, first_epochs=1, share=1.0, precision="64-true")
    before = fit(fedala(), 1, toy_data((9, 5), dtype=torch.float64), precision="64-true")
    received = before.client.state_dict()
    own = before.store.memory(0)["own_models"][-1]
    net = copy.deepcopy(before.client.net)
    names = ["net.head.weight", "net.head.bias"]
    mixing = {name: torch.ones_like(own[name]) for name in names}

    def start():
        return {n: own[n] + (received[n] - own[n]) * mixing[n] for n in names}

    for x, y in data.view(0, 1).restricted("train", client.drawn(data.view(0, 1))).batches():
        theta = {name: value.requires_grad_() for name, value in start().items()}
        net.load_state_dict({name.removeprefix("net."): value for name, value in received.items()})
        loss = F.cross_entropy(F.linear(net.features(x), *theta.values()), y)
        gradients = dict(zip(names, torch.autograd.grad(loss, [*theta.values()]), strict=True))
        mixing = {n: (mixing[n] - 5.0 * gradients[n] * (received[n] - own[n])).clamp(0, 1) for n in names}
    wanted = {**received, **start()}
    torch.testing.assert_close(client.starts[1, 0], wanted, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(loop.store.memory(0)["mixing"], mixing, rtol=1e-9, atol=1e-12)
    assert any(bool((value < 1).any()) for value in mixing.values())


def test_buffers_are_the_client_s_own_and_mixing_does_not_move_them():
    _, client = seen(2, net=BatchNormNet, first_epochs=3)
    own = fit(fedala(net=BatchNormNet, first_epochs=3), 1).store.memory(0)["own_models"][-1]
    start = client.starts[1, 0]
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        assert torch.equal(start[f"net.body.1.{name}"], own[f"net.body.1.{name}"])


@pytest.mark.parametrize(("layers", "mixed"), [(1, 1), (2, 2), (0, 4)])
def test_the_lower_layers_are_as_received(layers, mixed):
    loop, client = seen(2, layers=layers, first_epochs=2)
    received = fit(fedala(layers=layers), 1).client.state_dict()
    start = client.starts[1, 0]
    assert sum(not torch.equal(start[name], received[name]) for name in start) == mixed
    assert len(loop.store.memory(0)["mixing"]) == mixed


def test_passes_of_the_first_and_of_later_mixings():
    schedule = [[0], [0, 1], [0, 1, 2]]
    _, client = seen(3, toy_data((7, 8, 0), schedule=schedule), first_epochs=4, epochs=2)
    assert client.passes == {(0, 0): 0, (1, 0): 4, (1, 1): 0, (2, 0): 2, (2, 1): 4, (2, 2): 0}
    _, client = seen(2, toy_data((7,)), threshold=1e9)
    assert client.passes[1, 0] == 11  # more than ten
    _, client = seen(2, toy_data((7, 8)), eta=0.1, threshold=1e-30, max_epochs=13)
    assert client.passes[1, 0] == 13


def test_settled():
    assert not settled([0.0] * 10, 0.1)
    assert settled([9.0] + [0.0] * 10, 0.1)
    assert not settled([0.0] * 5 + [1.0] * 6, 0.1)
    assert settled([0.0] * 9 + [0.3, 0.3], 0.13)  # std of 8 times 0 and twice 0.3, over ten: 0.12


def test_samples_are_drawn_anew_every_round():
    data = toy_data((20,))
    one = toy_data((1,))
    client = fedala()
    for each in (data, one):
        each.setup("fit")
    drawn = [client.drawn(data.view(0, r)) for r in (0, 1, 1)]
    assert len(drawn[0]) == 16
    assert torch.equal(drawn[1], drawn[2])
    assert not torch.equal(drawn[0].sort().values, drawn[1].sort().values)
    assert len(client.drawn(one.view(0, 0))) == 1


def test_around_a_module_and_resumed(tmp_path):
    def client():
        torch.manual_seed(1)
        return FedALA(module=Regression(), eta=5.0, first_epochs=2)

    whole, half = (fit(client(), rounds) for rounds in (3, 2))
    half.trainer.save_checkpoint(tmp_path / "half.ckpt")
    resumed = fit(client(), 3, ckpt_path=tmp_path / "half.ckpt")
    assert equal(weights_of(resumed), weights_of(whole))
    one, other = (loop.store.memory(2) for loop in (resumed, whole))
    assert equal(one["own_models"][-1], other["own_models"][-1])
    assert equal(one["mixing"], other["mixing"])


def test_where_nothing_is_shared_every_client_goes_on_with_its_own():
    loop = fit(fedala(), 3, personal="*")
    assert "mixing" not in loop.store.memory(0)
    assert equal(loop.store.memory(0)["own_models"][-1], loop.store.personal(0))


class Manual(Regression):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


def test_bad_settings():
    with pytest.raises(ValueError, match=r"FedALA computes the loss of models .* but Manual steps its optimizers"):
        FedALA(module=Manual())
    with pytest.raises(ValueError, match="share must be at most 1, got 2"):
        FedALA(share=2)
    with pytest.raises(ValueError, match="epochs must be at least 1, got 0"):
        FedALA(epochs=0)
    with pytest.raises(ValueError, match="layers must be at least 0, got -1; 0 mixes all"):
        FedALA(layers=-1)


def test_deployed_is_the_own_model():
    loop = fit(fedala(), 1, evaluate_clients_every=1)
    assert isinstance(loop.client, pl.LightningModule)
    loop.client.context.memory = loop.store.memory(3)
    assert equal(loop.client.deployed().state_dict(), loop.store.memory(3)["own_models"][-1])


@pytest.mark.parametrize("part", ["head", "body"])
def test_what_is_frozen_later_is_taken_as_received_and_other_tensors_are_mixed(part):
    class Freeze(pl.Callback):
        def on_train_epoch_start(self, trainer, loop):
            if trainer.current_epoch == 2:
                loop.client.net.get_submodule(part).requires_grad_(False)
                frozen.update(
                    {n: v.clone() for n, v in loop.client.state_dict().items() if n.startswith(f"net.{part}")}
                )

    frozen: dict[str, torch.Tensor] = {}
    loop = fit(fedala(), 4, toy_data((7, 9, 12)), callbacks=[Freeze()])
    assert all(torch.equal(loop.client.state_dict()[name], value) for name, value in frozen.items())
    assert set(loop.store.memory(0)["mixing"]).isdisjoint(frozen)
