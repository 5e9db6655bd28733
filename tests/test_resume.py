"""A resumed run is the uninterrupted one, bit for bit, wherever it was cut."""

import warnings
from functools import partial

import pytest
import pytorch_lightning as pl
import torch
from torch import nn

from fl_lightning import Aggregator, FederatedLoop
from fl_lightning.aggregation import ServerModule
from fl_lightning.members.faults import ClientError
from fl_lightning.methods import SCAFFOLD, FedAvg, FedEXPAggregator, FedFOMO, FedNTD, FedPAC
from tests.toys import BatchNormNet, equal, fit, sgd, toy_data, trainer, weights_of

ROUNDS = 4
HOOKS = [
    "on_fit_start",
    "on_train_start",
    "on_train_epoch_start",
    "on_train_batch_start",
    "on_client_start",
    "on_client_epoch_end",
    "on_client_end",
    "on_exchange_end",
    "on_train_batch_end",
    "on_validation_start",
    "on_validation_batch_end",
    "on_validation_end",
    "on_train_epoch_end",
]


WITHIN = [hook for hook in HOOKS[3:] if hook != "on_train_batch_end"]
"""Those in which a run that ends by `max_steps` may be cut: in the others Lightning counts a round twice, or none."""


class Count(Aggregator):
    """The mean, pulled towards a running mean kept on the server; evaluated is something else again."""

    def setup(self):
        self.kept = self.server_state(self.server.trainable)
        self.register_buffer("rounds", torch.zeros((), dtype=torch.int64))

    def begin_round(self, cohort):
        self.rounds += 1

    def finish(self):
        new = super().finish()
        for name, value in self.kept.items():
            value.mul_(0.5).add_(new[name], alpha=0.5)
            new[name] = (new[name] + 0.1 * value).to(new[name].dtype)
        return new

    def evaluation_weights(self, weights):
        return {name: value * 0.5 if name in self.kept else value for name, value in weights.items()}


class Remembering(FedNTD):
    """Counts its own rounds and keeps its last weights: a client with memory, whose next update depends on it."""

    def receive(self, broadcast, local):
        super().receive(broadcast, local)
        self.round_buffer("times", torch.tensor(float(self.memory.get("times", 0))))

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * (1 + 0.1 * self.round["times"])

    def reply(self, exchange, local):
        self.memory["times"] = self.memory.get("times", 0) + 1
        return {}


def make_loop() -> FederatedLoop:
    return FederatedLoop(
        Remembering(net=BatchNormNet, optimizer=sgd()),
        aggregator=Count(),
        server_optimizer=partial(torch.optim.SGD, lr=0.7, momentum=0.9),
        server_lr_scheduler=partial(torch.optim.lr_scheduler.StepLR, step_size=2, gamma=0.5),
        local_epochs=2,
        lr_decay=0.9,
        personal=["*body.1*"],
        seed=5,
    )


def make_data():
    return toy_data(participation=0.6)


class SaveIn(pl.Callback):
    """Saves a checkpoint in one hook of one round, the first time it is called there."""

    def __init__(self, hook: str, round_idx: int, path):
        self.round_idx = round_idx
        self.path = path
        self.done = False
        setattr(self, hook, self.save)

    def save(self, trainer, *args, **kwargs):
        if trainer.current_epoch == self.round_idx and not self.done:
            self.done = True
            trainer.save_checkpoint(self.path)


@pytest.fixture(scope="module")
def uninterrupted():
    loop = make_loop()
    trainer(ROUNDS).fit(loop, datamodule=make_data())
    return loop


def outcome(loop):
    records = {client_id: loop.store.record(client_id) for client_id in sorted(loop.store.clients)}
    return weights_of(loop), records, loop.trainer.optimizers[0].state_dict()


def assert_same(loop, other):
    (weights, store, optimizer), (weights2, store2, optimizer2) = outcome(loop), outcome(other)
    assert equal(weights, weights2)
    assert store.keys() == store2.keys()
    for client_id, (memory, personal) in store.items():
        assert memory == store2[client_id][0]
        assert equal(personal, store2[client_id][1])
    assert optimizer["param_groups"] == optimizer2["param_groups"]
    for key, state in optimizer["state"].items():
        assert torch.equal(state["momentum_buffer"], optimizer2["state"][key]["momentum_buffer"])


def hook_and_round(hook, round_idx):
    """Slow: the first round, but for the ends of a client, a round and its evaluation; a later one shows the same."""
    ends = ("on_client_end", "on_train_batch_end", "on_validation_end", "on_train_epoch_end")
    repeats = hook not in HOOKS[:2] and hook not in ends and round_idx == 0
    return pytest.param(hook, round_idx, marks=[pytest.mark.slow] * repeats)


@pytest.mark.parametrize(
    ("hook", "round_idx"),
    [hook_and_round(hook, k) for hook in HOOKS for k in (0, 2) if hook not in HOOKS[:2] or k == 0],  # called once
)
def test_checkpoint_from_any_hook_continues_exactly(uninterrupted, tmp_path, hook, round_idx):
    path = tmp_path / "at.ckpt"
    saver = SaveIn(hook, round_idx, path)
    trainer(round_idx + 2, callbacks=[saver]).fit(make_loop(), datamodule=make_data())
    assert saver.done
    resumed = make_loop()
    trainer(ROUNDS).fit(resumed, datamodule=make_data(), ckpt_path=path)
    assert resumed.trainer.current_epoch == ROUNDS
    assert_same(resumed, uninterrupted)


@pytest.mark.parametrize(
    ("hook", "round_idx"),
    [pytest.param(hook, 1, marks=[pytest.mark.slow] * (hook != "on_train_epoch_end")) for hook in WITHIN],
)
def test_a_run_that_ends_by_steps_continues_exactly_again_and_again(uninterrupted, tmp_path, hook, round_idx):
    """Of checkpoints within a round, at its end, and after the run; with `max_epochs` between two of them."""
    first, second, third = (tmp_path / f"{name}.ckpt" for name in "abc")
    trainer(-1, max_steps=round_idx + 1, callbacks=[SaveIn(hook, round_idx, first)]).fit(
        make_loop(), datamodule=make_data()
    )
    again = trainer(-1, max_steps=3, callbacks=[SaveIn("on_train_epoch_end", 2, second)])
    again.fit(make_loop(), datamodule=make_data(), ckpt_path=first)
    again.save_checkpoint(third)
    assert (again.current_epoch, again.global_step) == (3, 3)
    for path in (second, third):
        for limits in ((-1, ROUNDS), (ROUNDS, -1), (ROUNDS, ROUNDS)):
            resumed = make_loop()
            run = trainer(limits[0], max_steps=limits[1])
            run.fit(resumed, datamodule=make_data(), ckpt_path=path)
            assert run.global_step == ROUNDS
            assert_same(resumed, uninterrupted)


@pytest.mark.parametrize("after", range(1, ROUNDS))
def test_after_any_round(uninterrupted, tmp_path, after):
    first = trainer(after)
    first.fit(make_loop(), datamodule=make_data())
    first.save_checkpoint(tmp_path / "last.ckpt")
    resumed = make_loop()
    trainer(ROUNDS).fit(resumed, datamodule=make_data(), ckpt_path=tmp_path / "last.ckpt")
    assert_same(resumed, uninterrupted)
    assert resumed.recorder.peak.tolist() == uninterrupted.recorder.peak.tolist()


class Interrupt(pl.Callback):
    """Ctrl-C within a round, after the second client."""

    def __init__(self, round_idx: int, error=KeyboardInterrupt):
        self.round_idx = round_idx
        self.error = error
        self.seen = 0

    def on_client_end(self, trainer, loop, update):
        if trainer.current_epoch == self.round_idx:
            self.seen += 1
            if self.seen == 2:
                raise self.error

    def on_exception(self, trainer, loop, exception):
        self.left = weights_of(loop)


def test_interrupt_inside_a_round_loses_nothing(uninterrupted, tmp_path):
    loop = make_loop()
    interrupt = Interrupt(2)
    run = trainer(ROUNDS, callbacks=[interrupt])
    with pytest.raises(SystemExit):
        run.fit(loop, datamodule=make_data())
    whole = make_loop()
    trainer(2).fit(whole, datamodule=make_data())
    assert equal(interrupt.left, weights_of(whole))  # the module holds the last whole round
    run.save_checkpoint(tmp_path / "interrupted.ckpt")
    resumed = make_loop()
    trainer(ROUNDS).fit(resumed, datamodule=make_data(), ckpt_path=tmp_path / "interrupted.ckpt")
    assert_same(resumed, uninterrupted)


class Break(pl.Callback):
    """Ctrl-C, or an error, at the first call of a hook in a round; what `on_exception` saves is a whole state."""

    def __init__(self, hook: str, round_idx: int, error, path):
        self.round_idx = round_idx
        self.error = error
        self.path = path
        setattr(self, hook, self.stop)

    def stop(self, trainer, *args, **kwargs):
        if trainer.current_epoch == self.round_idx:
            raise self.error

    def on_exception(self, trainer, loop, exception):
        trainer.save_checkpoint(self.path)


def broken_off(hook, error):
    """Slow: Ctrl-C where a round, a batch or an evaluation begins; where it ends is tried by default."""
    begins = hook.endswith("_start") and hook != "on_client_start"
    return pytest.param(hook, error, marks=[pytest.mark.slow] * (error is KeyboardInterrupt and begins))


@pytest.mark.parametrize(
    ("hook", "error"),
    [broken_off(h, KeyboardInterrupt) for h in HOOKS[2:]] + [broken_off(h, ZeroDivisionError) for h in HOOKS[6:11:2]],
)
def test_a_run_broken_off_in_any_hook_continues_exactly(uninterrupted, tmp_path, hook, error):
    run = trainer(ROUNDS, callbacks=[Break(hook, 2, error, tmp_path / "broken.ckpt")])
    with pytest.raises((SystemExit, error, ClientError)):
        run.fit(make_loop(), datamodule=make_data())
    resumed = make_loop()
    trainer(ROUNDS).fit(resumed, datamodule=make_data(), ckpt_path=tmp_path / "broken.ckpt")
    assert_same(resumed, uninterrupted)


class Rows(pl.loggers.logger.DummyLogger):
    """Keeps what is logged, by round."""

    def __init__(self):
        super().__init__()
        self.rows = {}

    def log_metrics(self, metrics, step=None):
        self.rows.setdefault(step, {}).update(metrics)


def rows_of_a_cut_run(hook, path):
    """Rows by round of an uninterrupted run of 4 rounds, and of one continued from `hook` of round 1."""
    whole = Rows()
    second = Rows()
    trainer(4, logger=whole).fit(make_loop(), datamodule=make_data())
    trainer(2, callbacks=[SaveIn(hook, 1, path)]).fit(make_loop(), datamodule=make_data())
    trainer(4, logger=second).fit(make_loop(), datamodule=make_data(), ckpt_path=path)
    return whole.rows, second.rows


@pytest.mark.parametrize("hook", ["on_client_end", "on_train_batch_end", "on_validation_end", "on_train_epoch_end"])
def test_the_rows_of_a_continued_run_are_those_of_the_uninterrupted_one(tmp_path, hook):
    whole, continued = rows_of_a_cut_run(hook, tmp_path / "at.ckpt")
    assert continued == {step: row for step, row in whole.items() if step >= 1}


@pytest.mark.parametrize(
    "server_optimizer",
    [
        partial(torch.optim.SGD, lr=1.0, momentum=0.9, nesterov=True),
        partial(torch.optim.Adam, lr=0.05),
        partial(torch.optim.Adagrad, lr=0.05),
    ],
)
def test_every_server_optimizer_continues_exactly(tmp_path, server_optimizer):
    """With a schedule that looks back at its own state, and another client optimizer with state of its own."""

    def run(rounds, ckpt_path=None):
        loop = FederatedLoop(
            FedAvg(net=BatchNormNet, optimizer=partial(torch.optim.Adam, lr=0.02)),
            server_optimizer=server_optimizer,
            server_lr_scheduler=partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=3),
            seed=1,
        )
        trainer(rounds).fit(loop, datamodule=toy_data(participation=0.4), ckpt_path=ckpt_path)
        return loop

    run(2).trainer.save_checkpoint(tmp_path / "two.ckpt")
    whole = run(4)
    resumed = run(4, tmp_path / "two.ckpt")
    assert equal(weights_of(whole), weights_of(resumed))
    assert whole.lr_schedulers().state_dict() == resumed.lr_schedulers().state_dict()


def test_should_stop_continues_exactly(uninterrupted, tmp_path):
    class Stop(pl.Callback):
        def on_client_end(self, trainer, loop, update):
            trainer.should_stop = trainer.current_epoch == 1

    run = trainer(ROUNDS, callbacks=[Stop()])
    run.fit(make_loop(), datamodule=make_data())
    assert run.current_epoch == 2
    run.save_checkpoint(tmp_path / "stopped.ckpt")
    resumed = make_loop()
    trainer(ROUNDS).fit(resumed, datamodule=make_data(), ckpt_path=tmp_path / "stopped.ckpt")
    assert_same(resumed, uninterrupted)


def test_checkpoint_of_another_net_is_refused(tmp_path):
    run = trainer(1)
    run.fit(FederatedLoop(FedAvg(), seed=0), datamodule=toy_data())
    run.save_checkpoint(tmp_path / "a.ckpt")
    with pytest.raises(ValueError, match=r"model.client.net was .*Perceptron, is .*BatchNormNet"):
        fit(FedAvg(net=BatchNormNet), ckpt_path=tmp_path / "a.ckpt")


@pytest.mark.parametrize("aggregator", [None, Count, FedEXPAggregator])
@pytest.mark.parametrize("client", [partial(FedNTD, net=BatchNormNet), partial(FedAvg, net=BatchNormNet)])
def test_a_loop_read_by_load_from_checkpoint_evaluates_alike(tmp_path, client, aggregator):
    made = {"aggregator": aggregator and aggregator(), "personal": "net.body.1*"}
    loop = fit(client(), rounds=2, **made)
    loop.trainer.save_checkpoint(tmp_path / "a.ckpt")
    made["aggregator"] = aggregator and aggregator()
    again = FederatedLoop.load_from_checkpoint(tmp_path / "a.ckpt", client=client(), seed=3, **made)
    values = [trainer(1).validate(one, toy_data(), verbose=False) for one in (loop, again)]
    assert values[0] == values[1]
    assert equal(weights_of(loop), weights_of(again))
    assert equal(loop.initial_personal, again.initial_personal)


@pytest.mark.parametrize("method", [SCAFFOLD, FedFOMO, FedPAC])
def test_what_a_server_module_allocates_for_the_data_comes_back(method):
    """As in the process that has started those of a fit, and with `load_from_checkpoint`."""
    loop = fit(method(net=BatchNormNet, optimizer=sgd()), rounds=2)
    again = FederatedLoop(method(net=BatchNormNet, optimizer=sgd(), num_classes=3, input_shape=(4,)), seed=3)
    again.load_state_dict(loop.state_dict())
    assert not equal(weights_of(again), weights_of(loop)), "not before the data are known"
    trainer(1).validate(again, toy_data(), verbose=False)
    assert equal(weights_of(again), weights_of(loop))


class Extra(nn.Module):
    """State of another kind than tensors, which is in the state dict by a name of its own."""

    def __init__(self):
        super().__init__()
        self.rounds = 0

    def get_extra_state(self):
        return {"rounds": self.rounds}

    def set_extra_state(self, state):
        self.rounds = state["rounds"]


class Counted(ServerModule):
    def setup(self):
        self.extra = Extra()

    def begin_round(self, cohort):
        self.extra.rounds += 1


def test_extra_state_of_what_a_server_module_makes_for_the_data_comes_back(tmp_path):
    loop = fit(FedAvg(net=BatchNormNet), rounds=2, server_module=Counted())
    loop.trainer.save_checkpoint(tmp_path / "a.ckpt")
    made = {"client": FedAvg(net=BatchNormNet), "server_module": Counted(), "seed": 3}
    again = FederatedLoop.load_from_checkpoint(tmp_path / "a.ckpt", **made)
    trainer(1).validate(again, toy_data(), verbose=False)
    assert again.server_module.extra.rounds == 2


def test_no_warning_about_a_resume_in_the_middle(tmp_path):
    run = trainer(2)
    run.fit(make_loop(), datamodule=make_data())
    run.save_checkpoint(tmp_path / "a.ckpt")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*resum.*")
        trainer(3).fit(make_loop(), datamodule=make_data(), ckpt_path=tmp_path / "a.ckpt")
