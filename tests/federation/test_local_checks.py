"""Settings with which no client can ever train are refused at the start, also where clients are skipped."""

import inspect
from functools import partial

import pytest
import torch
from pytorch_lightning import Callback, LightningDataModule
from pytorch_lightning.plugins.precision import MixedPrecision
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import ConstantLR, CosineAnnealingLR, LambdaLR, OneCycleLR, ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, TensorDataset

from fl_lightning import FederatedDataModule, FederatedLoop, aggregation, methods
from fl_lightning.aggregation import Aggregator, Codec, MedianAggregator, NormClip, ServerModule
from fl_lightning.client import ClientModule
from fl_lightning.client.optimizers import needs_closure
from fl_lightning.federation import local_checks
from fl_lightning.methods import SAM, FedAvg, Local
from fl_lightning.nets import HeterogeneousNets, Perceptron
from fl_lightning.types import Phase
from tests.methods.own_models import transfer_data
from tests.toys import BatchNormNet, equal, fit, folded, sgd, toy_data, trainer, weights_of
from tests.user_modules import Plain


def public(room, base):
    """The public classes of a room that derive from `base`."""
    kinds = [getattr(room, name) for name in dir(room)]
    return [kind for kind in kinds if inspect.isclass(kind) and issubclass(kind, base)]


def is_closed(kind):
    """Whether a step of an optimizer of torch cannot be called without a closure."""
    try:
        return needs_closure(kind([torch.zeros(1, requires_grad=True)], lr=0.1))
    except Exception:
        return False


CLOSED = [kind for kind in public(torch.optim, torch.optim.Optimizer) if is_closed(kind)]
FACTORIES = [*(partial(kind, lr=0.1) for kind in CLOSED), partial(SAM, base=sgd())]


class Untrained(Plain):
    def training_step(self, batch, batch_idx):
        pytest.fail("a client was trained")


def refused(client, match, data=None, plugins=(), **settings):
    """The run ends with this sentence before a client trains, although clients that fail are skipped."""
    loop = FederatedLoop(client, **folded({"nonfinite": "skip", "on_error": "skip", **settings}))
    with pytest.raises((ValueError, TypeError), match=match):
        trainer(1, plugins=list(plugins)).fit(loop, datamodule=data or toy_data())
    assert not loop.round_metrics
    assert not loop.skipped


# --- optimizers ---------------------------------------------------------------------------------------------------


def test_torch_has_an_optimizer_with_a_closure():
    assert torch.optim.LBFGS in CLOSED


@pytest.mark.parametrize("optimizer", FACTORIES, ids=lambda factory: factory.func.__name__)
@pytest.mark.parametrize("wraps", [False, True], ids=["net", "module"])
def test_closures_are_refused_with_accumulation_and_a_scaler(optimizer, wraps):
    def client():
        module = Untrained()
        module.configure_optimizers = lambda: optimizer(module.parameters())
        return module if wraps else FedAvg(optimizer=optimizer)

    name = optimizer.func.__name__
    refused(
        client(), f"{name} computes its gradient more than once.*accumulate_grad_batches=1", accumulate_grad_batches=2
    )
    scaled = MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu"))
    refused(client(), f"{name} computes its gradient more than once.*precision=bf16-mixed", plugins=[scaled])


def test_several_optimizers_without_steps_by_hand_are_refused():
    class Two(Untrained):
        def configure_optimizers(self):
            return [SGD(self.parameters(), lr=0.1), SGD(self.parameters(), lr=0.1)]

    refused(Two(), "Two has 2 optimizers under automatic optimization")


@pytest.mark.parametrize("settings", [{"lr": -1.0}, {"lr": 0.1, "nesterov": True}, {"lr": 0.1, "weight_decay": -1.0}])
def test_an_optimizer_that_refuses_its_arguments_is_refused(settings):
    refused(FedAvg(optimizer=partial(SGD, **settings)), "model.client.optimizer must make an optimizer.*raised")


class ByHand(Untrained):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


@pytest.mark.parametrize(
    "factory",
    [
        partial(torch.optim.SparseAdam, lr=0.1),
        partial(torch.optim.Adam, lr=0.1, capturable=True),
        partial(SAM, base=partial(torch.optim.SparseAdam, lr=0.1)),
    ],
    ids=["SparseAdam", "capturable on a CPU", "SAM of SparseAdam"],
)
def test_an_optimizer_that_cannot_step_is_refused(factory):
    refused(FedAvg(net=partial(Perceptron, hidden=[4]), optimizer=factory), "must step on dense gradients")


@pytest.mark.parametrize("kind", CLOSED)
def test_sam_of_an_optimizer_with_a_closure_is_refused(kind):
    factory = partial(SAM, base=partial(kind, lr=0.1))
    refused(FedAvg(net=partial(Perceptron, hidden=[4]), optimizer=factory), "whose step needs no closure")
    refused(
        FedAvg(net=partial(Perceptron, hidden=[4]), optimizer=partial(SAM, base=partial(SAM, base=sgd()))),
        "whose step needs no closure",
    )


class Drawing(torch.optim.SGD):
    """An optimizer of a user's own that draws and counts its steps."""

    steps = 0

    def step(self, closure=None):
        Drawing.steps += 1
        torch.rand(3)
        return super().step(closure)


class Draws(Callback):
    """Draws from the generator that all code of a process shares, before a client is trained."""

    drawn = None

    def on_train_start(self, trainer, pl_module):
        self.drawn = torch.rand(3)


def test_looking_at_an_optimizer_changes_no_bit(monkeypatch):
    def run():
        Drawing.steps = 0
        draws = Draws()
        client = FedAvg(net=partial(Perceptron, hidden=[4]), optimizer=partial(Drawing, lr=0.1))
        loop = fit(client, 1, callbacks=[draws])
        return weights_of(loop), draws.drawn, Drawing.steps

    weights, drawn, steps = run()
    monkeypatch.setattr(local_checks, "check_dense_steps", lambda local: None)
    other_weights, other_drawn, other_steps = run()
    assert equal(weights, other_weights)
    assert torch.equal(drawn, other_drawn)
    assert steps == other_steps + 1


@pytest.mark.parametrize("factory", [*(partial(kind, lr=0.1) for kind in CLOSED), partial(SAM, base=sgd())])
def test_an_optimizer_with_a_closure_is_taken(factory):
    loop = fit(FedAvg(net=partial(Perceptron, hidden=[4]), optimizer=factory), 1, faults="skip")
    assert not loop.skipped


def test_a_net_of_sparse_gradients_is_not_looked_at():
    class Words(nn.Module):
        def __init__(self, num_classes, input_shape):
            super().__init__()
            self.words = nn.Embedding(10, num_classes, sparse=True)

        def forward(self, x):
            return self.words(x.abs().long().clamp(max=9)).mean(1)

    loop = fit(FedAvg(net=Words, optimizer=partial(torch.optim.SparseAdam, lr=0.1)), 1)
    assert not loop.skipped


@pytest.mark.parametrize("rate", [float("nan"), float("inf")])
@pytest.mark.parametrize("is_module", [False, True])
def test_a_learning_rate_that_is_no_number_is_refused(rate, is_module):
    refused(client_of_rate(rate, is_module), "must be a finite number, got (nan|inf)")


@pytest.mark.parametrize("is_module", [False, True])
def test_a_learning_rate_of_0_gets_one_line(caplog, is_module):
    caplog.set_level("INFO")
    fit(client_of_rate(0.0, is_module), 1)
    name = "OfRate" if is_module else "FedAvg"
    assert caplog.text.count(f"the learning rate of {name} is 0, so that no client moves its weights") == 1
    caplog.clear()
    fit(client_of_rate(0.1, is_module), 1)
    assert "is 0" not in caplog.text


def test_a_part_with_a_rate_of_0_and_a_warm_up_get_no_such_line(caplog):
    caplog.set_level("INFO")
    fit(FedAvg(module=OfRate(0.1, first=0.0)), 1)
    fit(FedAvg(module=OfRate(0.1, warm_up=True)), 1)
    assert "so that no client moves" not in caplog.text


class OfRate(Plain):
    """A module with a learning rate."""

    interval = "step"

    def __init__(self, rate, first=None, warm_up=False):
        super().__init__()
        self.rate = rate
        self.first = rate if first is None else first
        self.warm_up = warm_up

    def configure_optimizers(self):
        first, *rest = self.parameters()
        groups = [{"params": [first], "lr": self.first}, {"params": rest, "lr": self.rate}]
        optimizer = SGD(groups)
        if not self.warm_up:
            return optimizer
        schedule = {"scheduler": LambdaLR(optimizer, float), "interval": self.interval}
        return {"optimizer": optimizer, "lr_scheduler": schedule}


def client_of_rate(rate, is_module):
    if is_module:
        return FedAvg(module=OfRate(rate))
    return FedAvg(net=partial(Perceptron, hidden=[4]), optimizer=partial(SGD, lr=rate))


# --- batches and cohorts ------------------------------------------------------------------------------------------


def dropped(batch_size, **settings):
    """Data whose loader leaves out a last batch of fewer samples."""
    samples = TensorDataset(torch.rand(30, 4), torch.arange(30) % 3)

    class Data(LightningDataModule):
        def train_dataloader(self):
            return DataLoader(samples, batch_size=batch_size, drop_last=True, shuffle=True)

        def val_dataloader(self):
            return DataLoader(samples, batch_size=10)

    return FederatedDataModule(Data(), **{"num_clients": 5, **settings})


def test_batches_that_every_client_leaves_out_are_refused():
    refused(Untrained(), r"must be at most the samples of the largest client \(6\) .* got 7", data=dropped(7))
    refused(FedAvg(module=Untrained()), "largest client", data=dropped(64))
    loop = fit(Plain(), 1, data=dropped(6))
    assert not loop.skipped


@pytest.mark.parametrize("interval", ["step", "epoch"])
def test_a_schedule_of_clients_without_a_batch_is_of_no_interest(interval):
    module = OfRate(0.1, warm_up=True)
    module.interval = interval
    loop = fit(module, 1, data=dropped(8, num_clients=4))
    assert sorted(loop.data.size(client_id, round_idx=0) for client_id in range(4)) == [7, 7, 8, 8]
    assert not loop.skipped


@pytest.mark.parametrize(
    ("data", "settings", "match"),
    [
        ({}, {"min_clients": 6}, r"min_clients must be at most the clients of a round \(5\), got 6"),
        ({"participation": 0.4}, {"min_clients": 3}, r"at most the clients of a round \(2\), got 3"),
        ({"schedule": [[0], [1, 2]]}, {"min_clients": 3}, r"at most the clients of a round \(2\), got 3"),
        ({"availability": [1, 0, 0, 0, 0]}, {"min_clients": 2}, r"at most the clients of a round \(1\), got 2"),
        ({"availability": 0.0}, {}, r"availability must let a client take part, got 0\.0"),
        ({"availability": [0] * 5}, {}, r"availability must let a client take part"),
    ],
    ids=str,
)
def test_cohorts_with_too_few_clients_in_every_round_are_refused(data, settings, match):
    refused(Untrained(), match, data=toy_data(**data), **settings)


@pytest.mark.parametrize("client", [Untrained, FedAvg, Local])
def test_a_partition_that_gives_nobody_samples_is_refused(client):
    match = "data.partition must give training samples to at least one client"
    refused(client(), match, data=toy_data(sizes=(0, 0, 0)))


def test_a_round_with_enough_clients_now_and_then_is_taken():
    loop = fit(Plain(), 2, data=toy_data(schedule=[[0], [1, 2]]), min_clients=2, on_error="skip")
    assert {fault.round_idx for fault in loop.skipped} <= {0}


@pytest.mark.parametrize("setting", [{"accumulate_grad_batches": 2}, {"clip_norm": 0.1}])
def test_settings_of_automatic_optimization_are_refused_for_steps_by_hand(setting):
    (name,) = setting
    refused(ByHand(), rf"model\.{name} must be .* where ByHand steps its optimizers itself", **setting)


# --- BatchNorm ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wraps", [False, True], ids=["net", "module"])
def test_batchnorm_with_batches_of_one_is_refused(wraps):
    module = Untrained()
    module.net = BatchNormNet(3, (4,))
    client = module if wraps else FedAvg(net=BatchNormNet)
    refused(
        client,
        r"batch_size must be at least 2 for a net with BatchNorm, got 1; raise data\.batch_size",
        toy_data(batch_size=1),
    )


def test_batchnorm_in_one_of_the_nets_counts_where_a_client_has_that_net():
    nets = partial(HeterogeneousNets, nets=[Perceptron, BatchNormNet])
    refused(Local(net=nets), "batch_size must be at least 2", toy_data((5, 5), batch_size=1))
    assert not fit(Local(net=nets), 1, toy_data((5, 1), batch_size=1), faults="skip").skipped


def test_a_phase_with_batches_of_one_is_no_clients_fault():
    class Phased(FedAvg):
        def phases(self, exchange):
            return (Phase(batch_size=1),)

    with pytest.raises(ValueError, match="raise the phase's batch_size"):
        fit(Phased(net=BatchNormNet), 1, faults="skip")


def test_a_last_batch_of_one_and_a_client_of_one_sample_stay_the_clients_own():
    assert not fit(FedAvg(net=BatchNormNet), 1, toy_data((6, 1)), faults="skip").skipped
    assert not fit(FedAvg(net=BatchNormNet), 1, toy_data((1, 1), batch_size=1), faults="skip").skipped


# --- what clients that start from models of their own, or share nothing, exclude -----------------------------------

CLIENTS = public(methods, ClientModule)


class OwnStart(FedAvg):
    """A user's method whose clients start from models of their own."""

    own_start = True


OWN_START = [*(kind for kind in CLIENTS if kind.own_start), OwnStart]
SHARE_NOTHING = [kind for kind in CLIENTS if not kind.sends & {"weights"}]
CODECS = [kind for kind in public(aggregation, Codec) if not inspect.isabstract(kind) and kind is not Codec]
RULES = [MedianAggregator, aggregation.KrumAggregator, aggregation.TrimmedMeanAggregator]
PARTS = {
    "NormClip": {"transforms": [NormClip(1.0)]},
    "max_update_norm": {"max_update_norm": 1.0},
    **{kind.__name__: {"codec": kind} for kind in CODECS},
    **{kind.__name__: {"aggregator": kind} for kind in RULES},
    "server_optimizer": {"server_optimizer": sgd()},
}


def made(settings):
    return {name: value() if inspect.isclass(value) else value for name, value in settings.items()}


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("kind", [*OWN_START, *SHARE_NOTHING], ids=lambda kind: kind.__name__)
def test_parts_that_need_weights_as_they_were_sent_are_refused(kind, name):
    try:
        settings = made(PARTS[name])
    except TypeError:
        pytest.skip("the class needs arguments of its own")
    sentence = "start from models of their own" if kind in OWN_START else "share none|the clients share, got none"
    refused(kind(net=Perceptron), f"{name}.*({sentence})", transfer_data(), **settings)


def test_there_are_such_clients():
    assert OWN_START
    assert len(SHARE_NOTHING) > 2


# --- a server module that makes the weights itself ------------------------------------------------------------------


class Alone(ServerModule):
    """Steps from the weights by itself, as q-FedAvg does."""

    makes_weights = True

    def add(self, update):
        self.sum("own", update.weights)

    def finish(self, exchange, aggregate):
        return {name: value.to(aggregate[name].dtype) / 5 for name, value in self.summed("own").items()}


@pytest.mark.parametrize("rule", [*RULES, type("Own", (Aggregator,), {})], ids=lambda rule: rule.__name__)
def test_a_rule_beside_a_server_module_that_makes_the_weights_is_refused(rule):
    refused(
        FedAvg(),
        f"Alone makes the weights .* {rule.__name__} would have no effect",
        aggregator=rule(),
        server_module=Alone(),
    )


def test_the_mean_beside_such_a_module_is_taken():
    assert fit(FedAvg(), 1, server_module=Alone()).round_metrics


def test_a_module_may_refuse_a_rule_by_itself():
    class Picky(ServerModule):
        def check_aggregator(self, aggregator):
            assert self.server.trainable
            if isinstance(aggregator, MedianAggregator):
                raise ValueError("no median")

    refused(FedAvg(), "no median", aggregator=MedianAggregator(), server_module=Picky())
    assert fit(FedAvg(), 1, aggregator=RULES[2](), server_module=Picky()).round_metrics


# --- the Trainer ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("every", [1, 3])
def test_loaders_that_are_reloaded_are_refused(every):
    run = trainer(1, reload_dataloaders_every_n_epochs=every)
    with pytest.raises(ValueError, match=rf"reload_dataloaders_every_n_epochs must stay 0, got {every}; leave"):
        run.fit(FederatedLoop(FedAvg()), datamodule=toy_data())


# --- schedulers -----------------------------------------------------------------------------------------------------


def scheduled(make, **settings):
    class Scheduled(Plain):
        def configure_optimizers(self):
            optimizer = SGD(self.parameters(), lr=0.1)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": make(optimizer), **settings}}

    return Scheduled()


def told(caplog, module, **settings):
    """The lines about schedulers of a round, for a client of at most 12 samples in batches of 5: 3 steps an epoch."""
    caplog.clear()
    with caplog.at_level("INFO"):
        fit(module, 1, toy_data((12, 7)), **{"clock": "round", **settings})
    return [text for text in caplog.messages if "begin anew for every client" in text]


CANNOT = "{} cannot change the learning rate, because a client has {}"
ZERO = "{} sets the learning rate to 0 in local {} {} of {}"


@pytest.mark.parametrize(
    ("make", "entry", "settings", "line"),
    [
        (partial(StepLR, step_size=1), {}, {}, CANNOT.format("StepLR", "1 local epoch")),
        (partial(StepLR, step_size=1), {}, {"local_epochs": 2}, ""),
        (partial(StepLR, step_size=2), {}, {"local_epochs": 2}, CANNOT.format("StepLR", "2 local epochs")),
        (partial(StepLR, step_size=1), {}, {"local_epochs": [1, 2]}, ""),
        (partial(StepLR, step_size=3), {"interval": "step"}, {}, CANNOT.format("StepLR", "3 local steps")),
        (partial(StepLR, step_size=2), {"interval": "step"}, {}, ""),
        (
            partial(StepLR, step_size=1),
            {"interval": "step"},
            {"max_local_steps": 1},
            CANNOT.format("StepLR", "1 local step"),
        ),
        (
            partial(StepLR, step_size=2),
            {"interval": "step"},
            {"accumulate_grad_batches": 2},
            CANNOT.format("StepLR", "2 local steps"),
        ),
        (
            partial(StepLR, step_size=1),
            {"frequency": 3},
            {"local_epochs": 3},
            CANNOT.format("StepLR", "3 local epochs"),
        ),
        (partial(LambdaLR, lr_lambda=float), {}, {}, ZERO.format("LambdaLR", "epoch", 1, 1)),
        (partial(CosineAnnealingLR, T_max=2), {}, {"local_epochs": 4}, ZERO.format("CosineAnnealingLR", "epoch", 3, 4)),
        (partial(CosineAnnealingLR, T_max=2), {}, {"local_epochs": 2}, ""),
        (
            partial(ConstantLR, factor=0.0, total_iters=9),
            {"interval": "step"},
            {},
            ZERO.format("ConstantLR", "step", 1, 3),
        ),
    ],
)
def test_a_scheduler_without_a_use_gets_one_line(caplog, make, entry, settings, line):
    (text,) = told(caplog, scheduled(make, **entry), **settings)
    if line:
        assert f"within which {line}; give them" in text
    else:
        assert "within which" not in text


def one_of(rates):
    """A rate for each step, which is a function of the number of steps."""
    return lambda step: rates[step]


SHORT = [
    partial(OneCycleLR, max_lr=0.1, total_steps=1),
    partial(LambdaLR, lr_lambda=one_of([1.0, 0.5])),
    partial(LambdaLR, lr_lambda=one_of({0: 1.0, 1: 0.5})),
]


@pytest.mark.parametrize("make", SHORT, ids=["OneCycleLR", "list", "dict"])
@pytest.mark.parametrize("interval", ["step", "epoch"])
def test_a_schedule_that_is_too_short_for_every_client_is_refused(make, interval):
    name = make.func.__name__
    module = scheduled(make, interval=interval)
    type(module).training_step = Untrained.training_step
    epochs = 2 if interval == "epoch" else 1
    for clock, covered, remedy in (("round", "a round", "run"), ("run", "all rounds", "round")):
        sentence = (
            rf"{name} must have a rate for each local {interval} of {covered} \(model.clock: {clock}\), got .*; "
            rf"give it trainer.estimated_stepping_batches, or set model.clock: {remedy} "
        )
        refused(module, sentence, toy_data((12, 7)), local_epochs=epochs, clock=clock)


def test_a_schedule_that_is_too_short_for_one_client_is_that_clients_fault():
    loop = fit(scheduled(SHORT[1], interval="step"), 1, toy_data((12, 4)), faults="skip", clock="round")
    assert [fault.client_id for fault in loop.skipped] == [0]


def test_a_schedule_that_is_too_short_for_all_rounds_of_one_client_is_refused():
    module = scheduled(SHORT[1], interval="step")
    type(module).training_step = Untrained.training_step
    refused(module, r"LambdaLR must have a rate for each local step of all rounds", toy_data((12, 4)))


def test_a_schedule_that_is_longer_than_all_looks_is_measured(monkeypatch):
    monkeypatch.setattr(local_checks, "MAX_CHANGES", 1)
    module = scheduled(partial(OneCycleLR, max_lr=0.1, total_steps=2), interval="step")
    type(module).training_step = Untrained.training_step
    refused(module, r"OneCycleLR must .*, got total_steps=2 for 3; .* model.clock: round", toy_data((12, 7)))


def test_a_scheduler_of_all_rounds_gets_no_line(caplog):
    assert told(caplog, scheduled(partial(StepLR, step_size=1)), clock="run") == []


# --- the server's optimizer ------------------------------------------------------------------------------------------


def stepping(make, rounds, **settings):
    """A fit of four rounds with a scheduler of the server."""
    loop = FederatedLoop(
        FedAvg(optimizer=sgd()), server_optimizer=partial(SGD, lr=1.0), server_lr_scheduler=make, **settings
    )
    run = trainer(rounds)
    run.fit(loop, datamodule=toy_data())
    return run


@pytest.mark.parametrize(
    "make",
    [
        partial(OneCycleLR, max_lr=1.0, total_steps=2),
        partial(OneCycleLR, max_lr=1.0, total_steps=3),
        partial(LambdaLR, lr_lambda=one_of([1.0, 0.5])),
        partial(LambdaLR, lr_lambda=one_of({0: 1.0})),
    ],
)
def test_a_schedule_of_the_server_that_is_too_short_is_refused_before_a_client_trains(make, monkeypatch):
    monkeypatch.setattr(FedAvg, "training_step", lambda *_: pytest.fail("a client was trained"))
    sentence = (
        rf"model.server_lr_scheduler must have a learning rate for each of the 4 rounds, got {make.func.__name__}"
    )
    with pytest.raises(ValueError, match=sentence):
        stepping(make, 4)
    with pytest.raises(ValueError, match=sentence):
        stepping(make, 1, planned_rounds=4)


@pytest.mark.parametrize("total", [4, 7])
def test_a_schedule_of_the_server_that_is_long_enough_is_taken(total):
    assert stepping(partial(OneCycleLR, max_lr=1.0, total_steps=total), 4).current_epoch == 4


def test_looking_at_a_schedule_of_the_server_changes_no_bit():
    class Counted(StepLR):
        made = 0

        def __init__(self, optimizer):
            type(self).made += 1
            torch.rand(3)
            super().__init__(optimizer, step_size=1, gamma=0.5)

    def weights(make):
        torch.manual_seed(0)
        run = stepping(make, 3)
        rates = run.lr_scheduler_configs[0].scheduler.get_last_lr()
        return weights_of(run.lightning_module), rates

    drawing, rates = weights(Counted)
    plain, same_rates = weights(partial(StepLR, step_size=1, gamma=0.5))
    assert Counted.made == 2
    assert rates == same_rates == [0.125]
    assert equal(drawing, plain)


@pytest.mark.parametrize(
    "settings",
    [
        {"server_optimizer": partial(SGD, lr=0.0)},
        {"server_optimizer": partial(torch.optim.Adam, lr=0.0)},
        {"server_optimizer": sgd(), "server_lr_scheduler": partial(LambdaLR, lr_lambda=lambda _: 0.0)},
    ],
)
def test_a_server_that_never_moves_is_refused(settings):
    refused(FedAvg(), "model.server_optimizer must move the model, got a learning rate of 0 in every round", **settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"server_optimizer": partial(SGD, lr=float("nan"))},
        {"server_optimizer": partial(torch.optim.Adam, lr=float("inf"))},
        {
            "server_optimizer": sgd(),
            "server_lr_scheduler": partial(LambdaLR, lr_lambda=lambda i: float("nan") if i else 1.0),
            "planned_rounds": 3,
        },
    ],
)
def test_a_server_whose_rate_is_not_finite_is_refused(settings):
    refused(FedAvg(), r"model.server_optimizer must have a learning rate that is finite .*, got (nan|inf)", **settings)


def test_a_server_optimizer_may_look_at_the_parameters():
    """The trial of the start has as many of them, and leaves alone what depends on their shapes."""
    base = fit(FedAvg(optimizer=sgd()), 1, server_optimizer=partial(SGD, lr=0.5))
    number = len(list(base.client.parameters()))

    def by_place(params):
        return SGD([{"params": [p], "lr": 0.5} for p, _ in zip(params, range(number), strict=True)])

    def by_shape(params):
        params = list(params)
        assert max(p.numel() for p in params) > 1
        return SGD(params, lr=0.5)

    for factory in (by_place, by_shape):
        assert equal(weights_of(fit(FedAvg(optimizer=sgd()), 1, server_optimizer=factory)), weights_of(base))


def test_a_server_optimizer_that_takes_no_dense_gradient_is_refused():
    optimizer = partial(torch.optim.SparseAdam, lr=1.0)
    refused(FedAvg(), "model.server_optimizer must step on dense gradients.*SparseAdam", server_optimizer=optimizer)


@pytest.mark.parametrize("clock", ["run", "round"])
def test_looking_at_a_schedule_changes_no_bit(clock):
    def weights(hook=None):
        torch.manual_seed(0)
        module = scheduled(partial(StepLR, step_size=1, gamma=0.5))
        if hook is not None:
            # Nobody looks at the schedule of a module with a hook of its own.
            type(module).lr_scheduler_step = hook
        return weights_of(fit(module, 2, toy_data((12, 7)), local_epochs=3, clock=clock))

    assert equal(weights(), weights(lambda self, scheduler, metric: scheduler.step()))


def test_a_plateau_is_not_a_scheduler_of_a_round(caplog):
    module = scheduled(ReduceLROnPlateau, monitor="loss", strict=False)
    assert told(caplog, module) == []
