"""A client that fails under `on_error: skip` leaves nothing behind; extra states do not pass from client to client."""

import pytest
import pytorch_lightning as pl
import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import weight_norm

from fl_lightning import FaultPolicy, FederatedLoop
from fl_lightning.callbacks import ClientCheckpoint
from fl_lightning.members.traces import Snapshot as Traces
from fl_lightning.members.traces import switches
from tests.toys import equal, folded, toy_data, trainer, weights_of
from tests.user_modules import Plain

SIZES = (7, 12, 5)
FAILS = 1


class Doubled(nn.Module):
    def forward(self, x):
        return 2 * x


def doubled(module, inputs, output):
    return 2 * output


LEFT = {
    "parametrization": lambda m: parametrize.register_parametrization(m.net[0], "weight", Doubled()),
    "two parametrizations": lambda m: [weight_norm(m.net[0]), weight_norm(m.net[2])],
    "forward hook": lambda m: m.net.register_forward_hook(doubled),
    "forward pre-hook": lambda m: m.net[2].register_forward_pre_hook(lambda module, x: (2 * x[0],)),
    "backward hook": lambda m: m.net[0].register_full_backward_hook(lambda module, *_: (None,)),
    "hook of a parameter": lambda m: m.net[0].weight.register_hook(lambda gradient: 3 * gradient),
    "hook after a gradient": lambda m: m.net[0].weight.register_post_accumulate_grad_hook(lambda p: p.grad.zero_()),
    "state dict hook": lambda m: m.register_state_dict_post_hook(lambda *_: 1 / 0),
    "forward": lambda m: setattr(m.net, "forward", lambda x: m.net[2](m.net[1](m.net[0](x))) * 2),
    "training_step": lambda m: setattr(m, "training_step", None),
    "configure_optimizers": lambda m: setattr(m, "configure_optimizers", lambda: torch.optim.SGD(m.parameters(), 9.0)),
    "counter": lambda m: setattr(m, "seen", 100.0),
    "list": lambda m: m.losses.append(100.0),
    "dictionary": lambda m: m.scales.update(loss=100.0),
    "modes": lambda m: m.eval(),
    "frozen": lambda m: m.requires_grad_(False),
    "another module": lambda m: setattr(m.net, "1", nn.Tanh()),
    "no gradients": lambda m: torch.set_grad_enabled(False),
    "default type": lambda m: torch.set_default_dtype(torch.float64),
    "deterministic": lambda m: torch.use_deterministic_algorithms(True),
}


class Leaves(Plain):
    """Scales its loss by what clients leave in attributes; client 1 leaves something and fails."""

    def __init__(self, leave=None):
        super().__init__()
        self.leave = leave
        self.seen = 1.0
        self.losses = []
        self.scales = {"loss": 1.0}

    def training_step(self, batch, batch_idx):
        scale = self.seen * self.scales["loss"] * (1 + sum(self.losses))
        loss = super().training_step(batch, batch_idx)
        made = torch.zeros(2)  # of the default type
        if self.leave is not None:
            LEFT[self.leave](self)
            if self.leave:
                raise ValueError("no disk")
        assert torch.is_grad_enabled()
        assert made.dtype == torch.float32
        return loss * scale


class Fails(pl.Callback):
    """Tells the module which client it is."""

    def __init__(self, left):
        self.left = left

    def on_client_start(self, trainer, loop, client_id):
        loop.client.module.leave = self.left if client_id == FAILS else None


def fit(left, cohort, rounds=2, **settings):
    pl.seed_everything(7, verbose=False)
    loop = FederatedLoop(Leaves(), seed=1, **folded({"on_error": "skip", **settings}))
    data = toy_data(SIZES, schedule=[cohort] * rounds)
    trainer(rounds, callbacks=[Fails(left)]).fit(loop, datamodule=data)
    return loop


@pytest.mark.parametrize("chunk", [1, 2])
@pytest.mark.parametrize("left", LEFT)
def test_everything_is_as_if_the_client_had_not_been_asked(left, chunk):
    before = [value for value, _ in switches()]
    loop = fit(left, [0, 1, 2], chunk=chunk)
    other = fit(None, [0, 2])
    assert [fault.client_id for fault in loop.skipped] == [FAILS]
    assert equal(weights_of(loop), weights_of(other))
    module = loop.client.module
    wanted = other.client.module
    assert type(module.net[0]) is nn.Linear
    assert [*vars(module)] == [*vars(wanted)]
    assert (module.seen, module.losses, module.scales) == (1.0, [], {"loss": 1.0})
    assert [value for value, _ in switches()] == before


def test_what_clients_that_do_not_fail_leave_stays():
    class Counts(Leaves):
        def __init__(self):
            super().__init__()
            self.clients = []

        def on_train_epoch_start(self):
            self.clients.append(1)

    pl.seed_everything(7, verbose=False)
    loop = FederatedLoop(Counts(), seed=1, faults=FaultPolicy(on_error="skip"))
    trainer(2, callbacks=[Fails("forward hook")]).fit(loop, datamodule=toy_data(SIZES, schedule=[[0, 1, 2]] * 2))
    assert len(loop.client.module.clients) == 4


def test_a_client_that_is_refused_after_its_training_leaves_nothing(tmp_path):
    class Watches(pl.Callback):
        def on_client_end(self, trainer, loop, update):
            if update.client_id == FAILS:
                raise ValueError("not this one")

    class Hooks(Plain):
        def on_train_epoch_end(self):
            if self.hooks:
                self.net.register_forward_hook(doubled)

    class Tells(pl.Callback):
        def on_client_start(self, trainer, loop, client_id):
            loop.client.module.hooks = client_id == FAILS

    found = []
    for cohort in [0, 1, 2], [0, 2]:
        pl.seed_everything(7, verbose=False)
        loop = FederatedLoop(Hooks(), seed=1, faults=FaultPolicy(on_error="skip"))
        run = trainer(2, callbacks=[Watches(), Tells()])
        run.fit(loop, datamodule=toy_data(SIZES, schedule=[cohort] * 2))
        found.append(weights_of(loop))
    assert equal(*found)


def test_traces_of_nothing_change_nothing():
    module = Leaves()
    before = {name: dict(vars(part)) for name, part in module.named_modules()}
    Traces(module).undo()
    for name, part in module.named_modules():
        assert all(vars(part)[key] is value for key, value in before[name].items())


# --- extra states ------------------------------------------------------------------------------------------------

STATES = {
    "tensor": lambda count: torch.tensor([float(count), 1.0]),
    "0-d tensor": lambda count: torch.tensor(float(count)),
    "dictionary": lambda count: {"count": count, "history": torch.full((count,), 2.0), "none": None, "name": "x"},
    "number": lambda count: count,
    "list": lambda count: [count, torch.ones(count)],
    "none": lambda count: count or None,
}
COUNTS = {
    "tensor": lambda state: int(state[0]),
    "0-d tensor": int,
    "dictionary": lambda state: state["count"],
    "number": int,
    "list": lambda state: state[0],
    "none": lambda state: state or 0,
}


class Extra(nn.Module):
    """Scales by how often it was called, which is its extra state."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.count = 0
        self.starts = []

    def get_extra_state(self):
        return STATES[self.kind](self.count)

    def set_extra_state(self, state):
        self.count = COUNTS[self.kind](state)

    def forward(self, x):
        self.count += 1
        return x * (1 + 0.1 * self.count)


class Extended(Plain):
    def __init__(self, kind="tensor"):
        super().__init__()
        self.save_hyperparameters()
        self.net.append(Extra(kind))

    def on_train_batch_start(self, batch, batch_idx):
        if not batch_idx:
            self.net[-1].starts.append(self.net[-1].count)


class Sets(pl.Callback):
    """Sets the state between two rounds, and saves."""

    def __init__(self, path=None):
        self.path = path

    def on_train_epoch_start(self, trainer, loop):
        loop.client.module.net[-1].count = 3 * trainer.current_epoch

    def on_client_end(self, trainer, loop, update):
        if self.path is not None and trainer.current_epoch == 1:
            trainer.save_checkpoint(self.path.with_name("within.ckpt"))

    def on_train_epoch_end(self, trainer, loop):
        if self.path is not None and trainer.current_epoch == 1:
            trainer.save_checkpoint(self.path)


def extend(kind, rounds=3, ckpt_path=None, callback=None, order=(0, 1, 2), folder=None, **settings):
    pl.seed_everything(7, verbose=False)
    loop = FederatedLoop(Extended(kind), seed=1, **folded(settings))
    callbacks = [callback or Sets(), *([ClientCheckpoint(folder)] if folder else [])]
    run = trainer(rounds, callbacks=callbacks)
    run.fit(loop, datamodule=toy_data(SIZES, schedule=[list(order)] * rounds), ckpt_path=ckpt_path)
    return loop


@pytest.mark.parametrize("kind", STATES)
def test_every_client_starts_with_the_same_extra_state(kind, tmp_path):
    loop = extend(kind, callback=Sets(tmp_path / "two.ckpt"), folder=tmp_path)
    extra = loop.client.module.net[-1]
    assert extra.starts == [0] * 3 + [3] * 3 + [6] * 3
    assert extra.count == 6
    assert_alike(loop, extend(kind, order=(2, 0, 1)))
    assert_alike(loop, extend(kind, chunk=2))

    for name in "two", "within":
        saved = torch.load(tmp_path / f"{name}.ckpt", weights_only=True)["state_dict"]
        assert COUNTS[kind](saved["client.module.net.3._extra_state"]) == 3
        again = extend(kind, ckpt_path=tmp_path / f"{name}.ckpt")
        assert_alike(loop, again)

    alone = Extended.load_from_checkpoint(tmp_path / "client.ckpt", weights_only=True)
    assert alone.net[-1].count == 6
    started = FederatedLoop(Extended(kind), seed=1, initial_weights=tmp_path / "client.ckpt")
    trainer(1).fit(started, datamodule=toy_data(SIZES))
    assert started.client.module.net[-1].starts == [6] * 3


def assert_alike(one, other):
    """The same weights; the same extra state."""
    states = [weights_of_tensors(loop) for loop in (one, other)]
    assert equal(*states)
    assert one.client.module.net[-1].count == other.client.module.net[-1].count


def weights_of_tensors(loop):
    return {name: value.clone() for name, value in loop.state_dict().items() if isinstance(value, torch.Tensor)}
