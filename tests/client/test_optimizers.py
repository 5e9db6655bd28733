"""Optimizers of a factory: every client has them as if they were its own, one by one and where a stack is asked for."""

from functools import partial

import pytest
import pytorch_lightning as pl
import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam
from torch.optim.optimizer import register_optimizer_step_post_hook

from fl_lightning.client.optimizers import LocalOptimizers
from fl_lightning.client.progress import ClientProgress
from fl_lightning.methods import Ditto, FedAvg, FedRep
from tests.toys import BatchNormNet, equal, fit, sgd, toy_data, weights_of


def plain(params):
    return SGD(params, lr=0.05, momentum=0.9)


def hook_sets_lr(params):
    """In its n-th step lr = 0.01 n."""
    optimizer = plain(params)
    count = [0]

    def before(*_):
        count[0] += 1
        optimizer.param_groups[0]["lr"] = 0.01 * count[0]

    optimizer.register_step_pre_hook(before)
    return optimizer


def attribute_counts(params):
    optimizer = plain(params)
    optimizer.taken = 0

    def after(optimizer, *_):
        optimizer.taken += 1
        for p in optimizer.param_groups[0]["params"]:
            p.data.add_(1e-3 * optimizer.taken)

    optimizer.register_step_post_hook(after)
    return optimizer


def own_entry(params):
    optimizer = SGD([{"params": list(params), "seen": [0]}], lr=0.05)

    def after(optimizer, *_):
        group = optimizer.param_groups[0]
        group["seen"][0] += 1
        group["lr"] = 0.05 / group["seen"][0]

    optimizer.register_step_post_hook(after)
    return optimizer


def changes_defaults(params):
    optimizer = plain(params)

    def after(optimizer, *_):
        optimizer.defaults["lr"] *= 1.5
        optimizer.param_groups[0]["lr"] = optimizer.defaults["lr"]

    optimizer.register_step_post_hook(after)
    return optimizer


def anchored(params):
    """Pulled back to what the parameters were when it was built."""
    optimizer = plain(params)
    anchors = [p.detach().clone() for p in optimizer.param_groups[0]["params"]]

    def after(optimizer, *_):
        for p, anchor in zip(optimizer.param_groups[0]["params"], anchors, strict=True):
            p.data.lerp_(anchor, 0.1)

    optimizer.register_step_post_hook(after)
    return optimizer


def anchored_by_state(params):
    optimizer = plain(params)
    for p in optimizer.param_groups[0]["params"]:
        optimizer.state[p]["momentum_buffer"] = p.detach().clone()
    return optimizer


def adds_a_group(params):
    first, *rest = params
    optimizer = plain([first])

    def after(optimizer, *_):
        if len(optimizer.param_groups) == 1:
            optimizer.add_param_group({"params": rest, "lr": 0.01})

    optimizer.register_step_post_hook(after)
    return optimizer


def replaced_step(params):
    optimizer = plain(params)
    step = optimizer.step
    count = [0]

    def slower(closure=None):
        count[0] += 1
        optimizer.param_groups[0]["lr"] = 0.1 / count[0]
        return step(closure)

    optimizer.step = slower
    return optimizer


def tensor_lr(params):
    optimizer = SGD(params, lr=torch.tensor(0.05))
    optimizer.register_step_post_hook(lambda optimizer, *_: optimizer.param_groups[0]["lr"].mul_(0.9))
    return optimizer


class Slower(SGD):
    """A subclass with a count of its own."""

    def __init__(self, params):
        super().__init__(params, lr=0.1)
        self.count = 0

    def step(self, closure=None):
        self.count += 1
        self.param_groups[0]["lr"] = 0.1 / self.count
        return super().step(closure)


DECORATED = [
    *(hook_sets_lr, attribute_counts, own_entry, changes_defaults, anchored, anchored_by_state, adds_a_group),
    *(replaced_step, tensor_lr, Slower),
]
SETTLED = [plain, sgd(0.05), partial(Adam, lr=0.01), partial(Adagrad, lr=0.05, initial_accumulator_value=0.1)]


class Anew(FedAvg):
    """Its optimizers are built anew, as those of a `configure_optimizers` of one's own are."""

    def configure_optimizers(self):
        return self.optimizer_factory(self.parameters())


class Counted:
    """A factory that counts what it made."""

    def __init__(self, factory):
        self.factory = factory
        self.made = 0

    def __call__(self, params):
        self.made += 1
        return self.factory(params)


def run(kind, factory, rounds=2, **settings):
    net = settings.pop("net", partial(BatchNormNet, dropout=0.0))
    data = toy_data(dtype=torch.float64)
    return fit(kind(net=net, optimizer=factory), rounds, data, precision="64-true", local_epochs=2, **settings)


@pytest.mark.parametrize("factory", [*DECORATED, *SETTLED])
def test_every_client_has_an_optimizer_of_its_own(factory):
    counted = Counted(factory)
    loop = run(FedAvg, counted)
    anew = run(Anew, factory)
    assert equal(weights_of(loop), weights_of(anew))
    if factory in DECORATED:
        assert counted.made >= 10  # five clients in two rounds


@pytest.mark.parametrize("factory", DECORATED)
def test_clients_do_not_depend_on_those_before(factory):
    """One at a time: each client of a cohort sends what it sends alone."""
    together = run(FedAvg, factory, rounds=1)
    alone = [run(FedAvg, factory, 1).client for _ in range(2)]
    assert equal(alone[0].state_dict(), alone[1].state_dict())
    assert equal(together.client.state_dict(), alone[0].state_dict())


class Registers(pl.Callback):
    """Hooks that a callback puts on an optimizer while a client trains stay with that client."""

    def on_client_epoch_end(self, trainer, loop, client_id, epoch):
        if (client_id, epoch) == (1, 0):
            optimizer = loop.client.optimizers(use_pl_optimizer=False)
            optimizer.register_step_post_hook(lambda o, *_: o.param_groups[0].update(lr=0.5))


def test_a_hook_that_is_registered_in_training_stays_with_its_client():
    loop = run(FedAvg, plain, callbacks=[Registers()])
    assert equal(weights_of(loop), weights_of(run(Anew, plain, callbacks=[Registers()])))
    assert not equal(weights_of(loop), weights_of(run(FedAvg, plain)))


class NoNorm(BatchNormNet):
    """Without BatchNorm, whose clients of one sample are trained alone."""

    def __init__(self, num_classes, input_shape):
        super().__init__(num_classes, input_shape, dropout=0.0)
        self.body[1] = nn.Identity()


SAYS = {
    "hook_sets_lr": "the hook 'before' of its SGD is one client's",
    "attribute_counts": "the hook 'after' of its SGD is one client's",
    "own_entry": "the hook 'after' of its SGD is one client's",
    "changes_defaults": "the hook 'after' of its SGD is one client's",
    "anchored": "the hook 'after' of its SGD is one client's",
    "anchored_by_state": "the state that its SGD has from the start is one client's",
    "adds_a_group": "the hook 'after' of its SGD is one client's",
    "replaced_step": "the attribute 'step' of its SGD is one client's",
    "tensor_lr": "the hook '<lambda>' of its SGD is one client's",
    "Slower": "Slower is not known to treat every number by itself",
}


class OwnOptimizer(pl.LightningModule):
    """A module that makes its optimizer itself, always with the same weights."""

    def __init__(self, factory):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(4, 3)
        self.factory = factory

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return self.factory(self.parameters())


def close(a, b):
    return all(torch.allclose(a[name], b[name], rtol=0, atol=1e-12) for name in a)


def kinds_with_optimizers():
    """Every kind of client with a hook, a state and a class; slow with what else has the same reason with FedAvg."""
    for kind in (FedAvg, "module", FedRep, Ditto):
        for factory in DECORATED:
            few = kind is FedAvg or factory in (attribute_counts, anchored_by_state, Slower)
            yield pytest.param(kind, factory, marks=[] if few else pytest.mark.slow)


@pytest.mark.parametrize(("kind", "factory"), list(kinds_with_optimizers()))
def test_what_is_one_clients_is_not_stacked(kind, factory):
    """Whatever is on the optimizer, clients that are to be trained at once are as they are one by one."""

    def one(chunk):
        if kind == "module":
            return fit(OwnOptimizer(factory), 2, toy_data(), local_epochs=2, chunk=chunk)
        return run(kind, factory, net=NoNorm, chunk=chunk)

    loop = one(3)
    assert close(weights_of(loop), weights_of(one(1)))
    if kind is FedAvg:
        assert loop.engine.why_not() == SAYS[factory.__name__]


def test_a_hook_on_all_optimizers_is_a_reason():
    seen = []
    handle = register_optimizer_step_post_hook(lambda optimizer, *_: seen.append(type(optimizer)))
    try:
        loop = run(FedAvg, plain, net=NoNorm, chunk=3)
        assert loop.engine.why_not() == "a global hook of optimizers would see all clients at once"
    finally:
        handle.remove()


class Aliased(BatchNormNet):
    """A buffer that lies in a parameter's memory."""

    def __init__(self, num_classes, input_shape):
        super().__init__(num_classes, input_shape, dropout=0.0)
        self.body[1] = nn.Identity()
        self.register_buffer("mirror", self.head.weight.data)

    def features(self, x):
        return self.body(x.flatten(1)) + self.mirror[0]


def test_a_buffer_in_a_parameters_memory_is_not_stacked():
    loop = run(FedAvg, plain, net=Aliased, chunk=3)
    assert loop.engine.why_not() == "'net.mirror' shares memory with 'net.head.weight'"
    assert close(weights_of(loop), weights_of(run(FedAvg, plain, net=Aliased)))


@pytest.mark.parametrize("factory", [partial(Adam, lr=0.01), partial(Adagrad, lr=0.05)])
def test_auto_stacks_batch_norm_under_sgd_only(factory):
    data = {"sizes": (12, 12, 12, 12, 12)}

    def reason(factory, chunk):
        loop = fit(FedAvg(net=partial(BatchNormNet, dropout=0.0), optimizer=factory), 1, toy_data(**data), chunk=chunk)
        return loop.engine.why_not()

    assert reason(factory, "auto").startswith("BatchNorm under Ada")
    assert reason(factory, 3) is None
    assert reason(sgd(0.05), "auto") is None


def test_what_a_hook_added_is_taken_off_where_an_optimizer_is_handed_out_again():
    first = nn.Parameter(torch.ones(2))
    second = nn.Parameter(torch.ones(2))
    optimizer = plain([first])
    found = LocalOptimizers(optimizer, "Mine")
    optimizer.add_param_group({"params": [second], "lr": 0.5})
    optimizer.param_groups[0]["new"] = 1
    optimizer.param_groups[0]["params"].append(second)
    found.release()
    assert [group["params"] for group in optimizer.param_groups] == [[first]]
    assert "new" not in optimizer.param_groups[0]


class Scheduled(FedAvg):
    """Every step halves the learning rate, after a first one at a tenth of it."""

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        warm = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=1)
        later = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        schedulers = [{"scheduler": one, "interval": "step"} for one in (warm, later)]
        return [optimizer], schedulers


def test_schedulers_write_into_no_tensor_that_is_the_next_clients_learning_rate():
    given = torch.tensor(0.05, dtype=torch.float64)
    weights = []
    for lr in (0.05, given):
        torch.manual_seed(0)
        client = Scheduled(net=BatchNormNet, optimizer=partial(SGD, lr=lr))
        weights.append(weights_of(fit(client, 2, toy_data(), precision="64-true")))
    torch.testing.assert_close(*weights)
    assert given == 0.05


def test_optimizers_that_are_let_go_have_the_tensor_they_began_with():
    optimizer = SGD([torch.zeros(2)], lr=torch.tensor(0.5))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    held = LocalOptimizers(([optimizer], [scheduler]), "Own")
    held.begin(ClientProgress())
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.25
    held.release()
    assert optimizer.param_groups[0]["lr"] == 0.5
