"""FedCL: importance against a loop of backward passes, its sending, what stands in for it."""

import copy
import math
from functools import partial

import pytest
import pytorch_lightning as pl
import torch
from torch import nn
from torch.nn import functional as F

from fl_lightning.client.context import ClientContext
from fl_lightning.data import TensorSource
from fl_lightning.functional.importance import path_importance
from fl_lightning.methods import FedAvg, FedCL, FedProx
from fl_lightning.methods.fedcl import FedCLServer
from tests.methods.stacked import stacked_and_alone
from tests.toys import BatchNormNet, EdgePartition, equal, fit, samples, sgd, toy_data, weights_of

PROXY = samples(11, seed=5)


def data(proxy=PROXY, **settings):
    """The toy clients, and a proxy set of the server's own."""
    return toy_data(extra_splits={"proxy": TensorSource(proxy, samples(2), num_classes=3)}, **settings)


def fedcl(**settings):
    return FedCL(**{"net": BatchNormNet, "optimizer": sgd(), **settings})


class Watch(pl.Callback):
    """What every client used, by round and client, and the bytes of every round."""

    def __init__(self):
        self.used = []
        self.bytes = []

    def on_train_epoch_start(self, trainer, loop):
        self.used.append({})

    def on_client_end(self, trainer, loop, update):
        self.used[-1][update.client_id] = {
            name: value.clone() for name, value in loop.client.round["importance"].items()
        }

    def on_train_epoch_end(self, trainer, loop):
        self.bytes.append((loop.round_metrics["comm/bytes_down"], loop.round_metrics["comm/bytes_up"]))


def by_hand(net, kind, size):
    """Ω by one backward pass per sample or batch, in float64."""
    net = copy.deepcopy(net).double().eval()
    total = {f"net.{name}": torch.zeros((), dtype=torch.float64) for name, _ in net.named_parameters()}
    x, y = PROXY
    for batch, labels in zip(x.double().split(size), y.split(size), strict=True):
        net.zero_grad()
        F.cross_entropy(net(batch), labels).backward()
        for name, parameter in net.named_parameters():
            g = parameter.grad
            one = {"abs": g.abs(), "square": g.square(), "tensor": g.square().sum()}[kind]
            total[f"net.{name}"] = total[f"net.{name}"] + one
    return {name: value / len(x) for name, value in total.items()}


@pytest.mark.parametrize(("kind", "size"), [("abs", 1), ("square", 1), ("tensor", 4)])
def test_importance_is_that_of_a_loop_of_backward_passes(kind, size, monkeypatch):
    """BatchNorm on running statistics, no dropout; in chunks of 5 as in one."""
    client = fedcl(importance=kind, importance_batch=4, num_classes=3, input_shape=(4,))
    client.net.body[1].running_mean.fill_(0.3)
    before = copy.deepcopy(client.state_dict())
    modes = [module.training for module in client.modules()]
    weights = {name: value.detach() for name, value in client.params().items()}
    wanted = by_hand(client.net, kind, size)
    for floats in (5 * sum(value.numel() for value in weights.values()), 10**6):
        monkeypatch.setattr("fl_lightning.functional.importance.GRADIENT_FLOATS", floats)
        cut = client.samples_at_once(weights)
        assert cut == (4 if kind == "tensor" else 5 if floats < 10**6 else 10**6 // 83)
        omega = client.importance_of(weights, zip(*(t.split(cut) for t in PROXY), strict=True))
        assert all(value.min() >= 0 for value in omega.values())
        torch.testing.assert_close(omega, wanted, rtol=1e-4, atol=1e-6, check_dtype=False)
    assert equal(client.state_dict(), before)
    assert [module.training for module in client.modules()] == modes
    assert all(parameter.grad is None for parameter in client.parameters())


class Linear(nn.Linear):
    def __init__(self, num_classes, shape):
        super().__init__(*shape, num_classes)


def test_mas_of_a_linear_net_is_its_closed_form(monkeypatch):
    """The mean of 2 |f_c(x) x_j|, of single samples, whatever the labels."""
    client = fedcl(importance="mas", net=Linear, num_classes=3, input_shape=(4,))
    weights = {name: value.detach() for name, value in client.params().items()}
    x, y = PROXY
    f = client.net(x).detach()
    for floats in (4 * 15, 10**6):  # in batches of 4, and all at once
        monkeypatch.setattr("fl_lightning.functional.importance.GRADIENT_FLOATS", floats)
        cut = client.samples_at_once(weights)
        omega = client.importance_of(weights, zip(x.split(cut), y.flip(0).split(cut), strict=True))
        wanted = {"net.weight": 2 * (f.abs().T @ x.abs()) / len(x), "net.bias": 2 * f.abs().mean(0)}
        torch.testing.assert_close(omega, wanted)


def test_si_of_a_quadratic_is_that_of_its_path_by_hand():
    """L = ½ a (w − b)²: two steps, by the mean of two samples and by a third."""
    w = {"w": torch.tensor([1.0, 5.0])}
    targets = torch.tensor([[3.0, 5.0], [5.0, 5.0], [0.0, 6.0]])
    curvature = torch.tensor([2.0, 1.0])

    def loss(params, b):
        return (0.5 * curvature * (params["w"] - b).square()).sum(1).mean()

    omega = path_importance(loss, w, [targets[:2], targets[2:]], lr=0.25, damping=0.5)
    # w_0: 1 -> 1 + .25 * 6 = 2.5 -> 2.5 - .25 * 5 = 1.25; w_1: 5 -> 5 -> 5.25
    torch.testing.assert_close(omega["w"], torch.tensor([0.25 * (36 + 25) / (0.25**2 + 0.5), 0.25 / (0.25**2 + 0.5)]))
    assert torch.equal(w["w"], torch.tensor([1.0, 5.0]))
    assert torch.equal(path_importance(loss, w, [], lr=0.25)["w"], torch.zeros(2))


def test_si_is_that_of_sgd_over_the_proxy_set():
    """Of torch's own SGD on a copy in float64, BatchNorm on running statistics; the weights stay as they are."""
    client = fedcl(importance="si", importance_batch=4, importance_lr=0.1, num_classes=3, input_shape=(4,))
    net = copy.deepcopy(client.net).double().eval()
    before = copy.deepcopy(client.state_dict())
    weights = {name: value.detach() for name, value in client.params().items()}
    assert client.samples_at_once(weights) == 4
    batches = [*zip(*(t.split(4) for t in PROXY), strict=True)]
    omega = client.importance_of(weights, batches)
    start = {name: value.detach().clone() for name, value in net.named_parameters()}
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    fall = dict.fromkeys(start, 0.0)
    for inputs, labels in batches:
        last = {name: value.detach().clone() for name, value in net.named_parameters()}
        optimizer.zero_grad()
        F.cross_entropy(net(inputs.double()), labels).backward()
        optimizer.step()
        for name, value in net.named_parameters():
            fall[name] = fall[name] - value.grad * (value.detach() - last[name])
    wanted = {
        f"net.{name}": fall[name] / ((value.detach() - start[name]).square() + 1e-3)
        for name, value in net.named_parameters()
    }
    torch.testing.assert_close(omega, wanted, rtol=1e-4, atol=1e-6, check_dtype=False)
    assert all(value.min() >= 0 for value in omega.values())
    assert equal(client.state_dict(), before)


def test_scaled_importance_has_mean_one():
    for kind in ("abs", "tensor", "mas", "si"):
        client = fedcl(normalization="mean_one", importance=kind, num_classes=3, input_shape=(4,))
        weights = {name: value.detach() for name, value in client.params().items()}
        omega = client.importance_of(weights, [PROXY])
        entries = torch.cat([omega[name].expand_as(value).flatten() for name, value in weights.items()])
        assert entries.mean().item() == pytest.approx(1, rel=1e-5)


def test_the_first_step_of_a_round_is_fedavg_s():
    loop = fit(fedcl(strength=100.0), 3, data(), max_local_steps=1)
    assert loop.round_metrics["train/penalty"] == 0
    assert equal(
        weights_of(loop), weights_of(fit(FedAvg(net=BatchNormNet, optimizer=sgd()), 3, data(), max_local_steps=1))
    )


class Silent(FedCLServer):
    """Never sends an importance."""

    def begin_round(self, cohort):
        self.importance = {}


def test_with_ones_it_is_fedprox_with_twice_the_strength():
    ones = fit(fedcl(strength=0.5), 3, data(), server_module=Silent())
    prox = fit(FedProx(mu=1.0, net=BatchNormNet, optimizer=sgd()), 3, data())
    torch.testing.assert_close(weights_of(ones), weights_of(prox), rtol=1e-5, atol=1e-6)
    assert ones.round_metrics["comm/bytes_down"] == prox.round_metrics["comm/bytes_down"]


def test_it_is_sent_every_interval_rounds_and_costs_bytes_only_there():
    floats = 4 * 83  # of parameters; BatchNorm's two buffers of 8 and a counter travel with the weights
    for kind, extra in (("abs", floats), ("tensor", 4 * 6), ("mas", floats), ("si", floats)):
        watch = Watch()
        fit(fedcl(interval=2, importance=kind), 3, data(), callbacks=[watch])
        weights = 5 * (floats + 4 * 16 + 8)
        assert watch.bytes == [(weights + 5 * extra, weights), (weights, weights), (weights + 5 * extra, weights)]


@pytest.mark.parametrize("missing", ["identity", "cached", "local"])
def test_what_stands_in_for_a_missing_importance(missing):
    """Client 2 comes late, in a round that sends nothing; client 3 has no data."""
    schedule = [[0, 1], [0, 2, 3], [1, 2]]
    watch = Watch()
    source = data(schedule=schedule, sizes=(7, 12, 5, 0, 16))
    client = fedcl(interval=2, when_missing=missing)
    loop = fit(client, 3, source, callbacks=[watch])
    sent = watch.used[0][0]
    later = watch.used[2][1]
    assert equal(sent, watch.used[0][1])
    assert equal(later, watch.used[2][2])
    assert not equal(sent, later)
    ones = {name: torch.ones_like(value) for name, value in sent.items()}
    old, new, empty = (watch.used[1][client_id] for client_id in (0, 2, 3))
    assert equal(empty, ones)
    if missing == "identity":
        assert equal(old, ones)
        assert equal(new, ones)
    elif missing == "cached":
        assert equal(old, sent)
        assert equal(new, ones)
        assert equal(loop.store.memory(0)["importance"], sent)
        assert equal(loop.store.memory(2)["importance"], later)
    else:
        start = fit(fedcl(interval=2), 1, data(schedule=schedule, sizes=(7, 12, 5, 0, 16))).client
        params = {name: value.detach() for name, value in start.params().items()}
        own = start.importance_of(params, [source.view(2, 1).all()])
        torch.testing.assert_close(new, own)
    assert sorted(loop.store.clients) == ([0, 1, 2] if missing == "cached" else [])


def test_resume_with_a_cached_importance_is_exact(tmp_path):
    settings = {"schedule": [[0, 1], [0, 2], [1, 2], [0, 4]]}
    whole = fit(fedcl(interval=3, when_missing="cached"), 4, data(**settings))
    half = fit(fedcl(interval=3, when_missing="cached"), 2, data(**settings))
    half.trainer.save_checkpoint(tmp_path / "half.ckpt")
    resumed = fit(fedcl(interval=3, when_missing="cached"), 4, data(**settings), ckpt_path=tmp_path / "half.ckpt")
    assert equal(weights_of(resumed), weights_of(whole))
    assert resumed.round_metrics == whole.round_metrics


def edges(kind, rounds=3, strength=0.5, personal=None, **settings):
    """A run with awkward clients, Ω at the server in rounds 0 and 2 and at the clients in round 1."""
    client = fedcl(
        importance=kind,
        strength=strength,
        interval=2,
        when_missing="local",
        normalization="mean_one",
        net=partial(BatchNormNet, dropout=0.0),
        optimizer=sgd(0.05),
    )
    source = data(sizes=EdgePartition.SIZES, schedule=[[0, 1, 2, 3], [1, 2, 3, 4], [0, 4]], batch_size=8)
    loop = fit(client, rounds, source, personal=personal, **settings)
    assert all(value.isfinite().all() for value in loop.state_dict().values())
    return loop


@pytest.mark.parametrize("kind", ["mas", "si"])
def test_a_run_with_a_further_importance_keeps_the_laws_of_runs(kind, tmp_path):
    """Deterministic, resumed exactly, the same with clients trained at once, close to itself in bfloat16."""
    whole = edges(kind)
    half = edges(kind, 1)
    half.trainer.save_checkpoint(tmp_path / "half.ckpt")
    resumed = edges(kind, ckpt_path=tmp_path / "half.ckpt")
    assert equal(weights_of(resumed), weights_of(whole))
    assert resumed.round_metrics == whole.round_metrics
    together = edges(kind, chunk=4, precision="64-true")
    torch.testing.assert_close(together.state_dict(), edges(kind, chunk=1, precision="64-true").state_dict())
    rounded = edges(kind, 1, precision="bf16-mixed").round_metrics
    for name in ("train/ce", "train/importance", "train/penalty"):
        assert rounded[name] == pytest.approx(half.round_metrics[name], rel=0.02, abs=0.01)
    assert not equal(weights_of(whole), weights_of(edges("abs")))


@pytest.mark.parametrize("kind", ["mas", "si"])
def test_a_further_importance_is_of_what_is_shared_and_not_estimated_at_strength_0(kind):
    loop = edges(kind, personal=["net.head.*"])
    assert set(loop.client.round["importance"]) == set(loop.server.trainable)
    assert equal(weights_of(edges(kind, strength=0.0)), weights_of(edges("abs", strength=0.0)))


def test_entries_that_stay_with_a_client_are_not_pulled():
    watch = Watch()
    loop = fit(fedcl(strength=1e3), 2, data(), callbacks=[watch], personal=["net.head.*"])
    assert set(watch.used[0][0]) == {name for name in loop.client.params() if ".head." not in name}
    assert math.isfinite(loop.round_metrics["train/penalty"])


class Classifier(pl.LightningModule):
    """A user's module."""

    def __init__(self, reads=False):
        super().__init__()
        self.net = nn.Linear(4, 3)
        self.reads = reads

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss.item() if self.reads else loss)
        return loss

    def configure_optimizers(self):
        return sgd()(self.parameters())


@pytest.mark.parametrize("kind", ["abs", "si"])
def test_around_a_user_s_module(kind):
    """The same as with the net inside; what is logged while Ω is estimated is forgotten."""
    runs = []
    for client in (
        FedCL(module=Classifier(), importance=kind),
        FedCL(net=Linear, optimizer=sgd(), importance=kind, num_classes=3, input_shape=(4,)),
    ):
        with torch.no_grad():
            for parameter in client.parameters():
                parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view_as(parameter))
        watch = Watch()
        runs.append((fit(client, 1, data(), callbacks=[watch]).round_metrics, watch.used[0][0]))
    (module, inside), (net, outside) = runs
    assert module["loss"] == pytest.approx(net["train/ce"], rel=1e-6)
    for one, other in zip(inside.values(), outside.values(), strict=True):
        torch.testing.assert_close(one, other)


def test_what_a_user_s_module_cannot_have():
    with pytest.raises(RuntimeError, match="take the gradients of batches"):
        fit(FedCL(module=Classifier(reads=True)), 1, data())
    with pytest.raises(ValueError, match=r"importance=mas needs the logits of a net, got module=Classifier.*net="):
        FedCL(module=Classifier(), importance="mas")


class Turns(Classifier):
    """Its batches are turned around where they are put on the device."""

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return batch[0].flip(1), batch[1]


@pytest.mark.parametrize("missing", ["identity", "local"])
def test_importance_is_estimated_on_batches_as_training_sees_them(missing):
    """On the proxy set at the server, and on its own data at a client: through the user's transfer hooks."""
    watches = []
    for kind in (Turns, Classifier):
        watch = Watch()
        module = kind()
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view_as(parameter))
        proxy = PROXY if kind is Turns else (PROXY[0].flip(1), PROXY[1])
        source = data(proxy)
        if kind is Classifier:
            source.setup()
            source.split("train").x.copy_(source.split("train").x.flip(1))
        fit(FedCL(module=module, interval=2, when_missing=missing), 2, source, callbacks=[watch])
        watches.append(watch)
    for turned, already in zip(*(watch.used for watch in watches), strict=True):
        for client_id, omega in turned.items():
            torch.testing.assert_close(omega, already[client_id])
    assert len({float(omega["module.net.weight"].sum()) for omega in watches[0].used[0].values()}) == 1


def test_a_step_can_be_stacked():
    client = fedcl(num_classes=3, input_shape=(4,))
    client.net.body[3].p = 0.0
    start = {name: value.detach().clone() for name, value in client.params().items()}
    client.begin(ClientContext(0, start, tuple(start)))
    omega = {name: torch.rand(3, *value.shape) for name, value in start.items()}
    x, y = (torch.stack(parts) for parts in zip(*(samples(5, seed=s) for s in range(3)), strict=True))
    torch.testing.assert_close(*stacked_and_alone(client, {"importance": omega}, x, y))


@pytest.mark.parametrize("kind", ["abs", "mas", "si"])
def test_finite_where_logits_are_huge(kind):
    client = fedcl(importance=kind, num_classes=3, input_shape=(4,))
    weights = {name: value.detach() * 1e4 for name, value in client.params().items()}
    omega = client.importance_of(weights, [PROXY])
    assert all(value.isfinite().all() for value in omega.values())


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"strength": -1}, "strength must be at least 0, got -1"),
        ({"interval": 0}, "interval must be at least 1, got 0"),
        ({"importance": "fisher"}, "importance must be one of abs, square, tensor, mas, si, got 'fisher'"),
        ({"importance_lr": 0}, "importance_lr must be above 0, got 0"),
        ({"when_missing": "zero"}, "when_missing must be one of"),
        ({"normalization": "max"}, "normalization must be one of"),
    ],
)
def test_bad_settings(settings, sentence):
    with pytest.raises(ValueError, match=sentence):
        fedcl(**settings)


def test_it_needs_a_proxy_set_and_its_own_client():
    with pytest.raises(ValueError, match=r"FedCL needs the split 'proxy'.*data\.proxy_size"):
        fit(fedcl(), 1, toy_data())
    with pytest.raises(ValueError, match="needs a proxy set with samples"):
        fit(fedcl(), 1, data(proxy=tuple(t[:0] for t in PROXY)))
    with pytest.raises(ValueError, match="needs a FedCL client, got FedAvg"):
        fit(FedAvg(net=BatchNormNet), 1, data(), server_module=FedCLServer())
