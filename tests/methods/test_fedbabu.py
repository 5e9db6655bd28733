"""FedBABU: the head that nobody trains or sends, the body under it, and the fine-tuning that gives the value."""

import copy
from functools import partial

import pytest
import pytorch_lightning as pl
import torch
from torch import nn
from torch.nn import functional as F

from fl_lightning import FineTuning, NonFiniteUpdateError
from fl_lightning.functional.state import clone
from fl_lightning.methods import FedAvg, FedBABU, FedRep
from fl_lightning.nets import HeterogeneousNets, Perceptron
from tests.toys import BatchNormNet, equal, fit, sgd, toy_data, trainer, weights_of

Small = partial(Perceptron, hidden=(6,))
Norm = partial(BatchNormNet, dropout=0.0)
HEAD = ("net.head.weight", "net.head.bias")
LATE = {"sizes": (7, 12, 5, 0, 1), "schedule": [[0, 1, 3, 4], [0, 2], [4, 1, 3]]}


def fedbabu(**settings):
    return FedBABU(**{"net": Norm, "optimizer": sgd(weight_decay=0.1), **settings})


def heads(state):
    return {name: state[name].clone() for name in HEAD}


class Noted(pl.Callback):
    """What each client has in its module after its training, and what it sends."""

    def __init__(self):
        self.entries = []
        self.sent = []

    def on_client_end(self, trainer, loop, update):
        self.entries.append(clone(loop.client.state_dict()))
        self.sent.append(set(update.weights))


def test_the_head_keeps_its_bits_under_decay_and_momentum_and_never_travels():
    watch = Noted()
    loop = fit(fedbabu(), 3, toy_data(**LATE), local_epochs=3, callbacks=[watch], evaluate_clients_every=1)
    drawn = heads(fit(FedAvg(net=Norm), 0, toy_data(**LATE)).client.state_dict())
    everywhere = [*watch.entries, loop.client.state_dict(), loop.initial_personal]
    everywhere += [loop.store.personal(client_id) for client_id in range(5)]
    everywhere += [loop.client_model(client_id).state_dict() for client_id in range(5)]
    assert all(equal(heads(state), drawn) for state in everywhere)
    assert all(sent.isdisjoint(HEAD) and "net.body.0.weight" in sent for sent in watch.sent)
    body = sum(value.numel() for name, value in loop.client.state_dict().items() if name not in HEAD)
    assert loop.round_metrics["comm/bytes_up"] == 3 * (4 * (body - 1) + 8)  # a counter of 8 bytes
    assert not equal(loop.client.state_dict(), fit(FedAvg(net=Norm), 0, toy_data(**LATE)).client.state_dict())


def test_the_head_gets_no_gradient_and_no_momentum():
    class Watched(FedBABU):
        seen = ()

        def on_before_optimizer_step(self, optimizer):
            head = self.net.head.weight
            self.seen = (*self.seen, (head.grad is None, head.requires_grad, head in optimizer.state))

    client = Watched(net=Norm, optimizer=sgd(weight_decay=0.1))
    fit(client, 2, toy_data((10,)))
    assert set(client.seen) == {(True, False, False)}
    assert client.net.head.weight.requires_grad  # outside of the training


def test_the_body_is_trained_under_the_drawn_head_by_hand():
    data = toy_data((7, 12), dtype=torch.float64, shuffle=False)
    settings = {"precision": "64-true", "lr_decay": 0.5}
    server = copy.deepcopy(fit(fedbabu(), 0, data, **settings).client.net)
    loop = fit(fedbabu(), 2, data, local_epochs=2, **settings)
    for round_idx in range(2):
        states = []
        for client_id in (0, 1):
            net = copy.deepcopy(server).train()
            net.head.requires_grad_(False)
            optimizer = torch.optim.SGD(net.body.parameters(), lr=0.1 * 0.5**round_idx, momentum=0.9, weight_decay=0.1)
            for _ in range(2):
                for x, y in loop.data.view(client_id, round_idx).batches():
                    optimizer.zero_grad()
                    F.cross_entropy(net(x), y).backward()
                    optimizer.step()
            states.append(net.state_dict())
        mean = {name: (7 * value + 12 * states[1][name]) / 19 for name, value in states[0].items()}
        counter = "body.1.num_batches_tracked"
        server.load_state_dict({**mean, counter: mean[counter].round()})
    torch.testing.assert_close(dict(loop.client.net.state_dict()), dict(server.state_dict()), rtol=1e-9, atol=1e-12)


def test_it_is_fedrep_that_never_trains_its_head():
    settings = {"net": BatchNormNet, "optimizer": sgd(weight_decay=0.01)}
    ours, theirs = (
        fit(client, 3, toy_data(**LATE), evaluate_clients_every=1)
        for client in (FedBABU(**settings), FedRep(head_epochs=0, **settings))
    )
    assert equal(weights_of(ours), weights_of(theirs))
    for key in ("local/alma", "global/acc", "comm/bytes_up", "comm/bytes_down"):
        assert ours.round_metrics.get(key) == theirs.round_metrics.get(key)


def test_a_uniform_mean_is_an_option():
    """The authors' code weighs clients alike."""
    samples, uniform = (
        weights_of(fit(fedbabu(), 1, toy_data((6, 12)), weighting=weighting)) for weighting in ("samples", "uniform")
    )
    assert not equal(samples, uniform)


# --- fine-tuning


@pytest.mark.parametrize(
    ("trains", "moves"), [(None, {"head", "body"}), ("net.head.*", {"head"}), (["net.body.*"], {"body"})]
)
def test_fine_tuning_trains_all_or_what_its_settings_name(trains, moves):
    """From the averaged body and the drawn head; nothing is kept, and the rounds have the same bits."""
    tuning = FineTuning(epochs=3, trains=trains)
    loop = fit(fedbabu(), 2, toy_data(**LATE), evaluate_clients_every=1, fine_tuning=tuning)
    before = clone(loop.client.state_dict())
    names = [name for name, _ in loop.client.named_parameters()]
    for client_id in (0, 2):
        tuned = loop.client_model(client_id, tuned=True).state_dict()
        moved = {name.split(".")[1] for name in names if not torch.equal(tuned[name], before[name])}
        assert moved == moves
        assert not torch.equal(tuned["net.body.1.running_mean"], before["net.body.1.running_mean"])
    empty = loop.client_model(3, tuned=True).state_dict()
    assert equal(empty, before)
    assert equal(loop.client.state_dict(), before)
    assert equal(weights_of(loop), weights_of(fit(fedbabu(), 2, toy_data(**LATE), evaluate_clients_every=1)))


def test_its_value_is_that_after_fine_tuning():
    settings = {"evaluate_clients_every": 1, "fine_tuning": FineTuning(epochs=10)}
    loop = fit(fedbabu(optimizer=sgd()), 8, local_epochs=2, **settings)
    assert loop.round_metrics["local/tuned/alma"] > loop.round_metrics["local/alma"]


NOTICE = "a model of FedBABU means nothing before a client has fine-tuned it, and so do global/KEY and local/KEY; set"


@pytest.mark.parametrize(
    ("client", "settings", "times"),
    [
        (FedBABU, {}, 1),
        (FedBABU, {"evaluate_clients_every": 1}, 1),
        (FedBABU, {"evaluate_clients_every": 1, "fine_tuning": FineTuning()}, 0),
        (FedAvg, {}, 0),
    ],
)
def test_a_run_without_fine_tuning_says_once_that_its_values_mean_nothing(caplog, client, settings, times):
    with caplog.at_level("INFO"):
        fit(client(net=Small), 2, toy_data((7, 9)), **settings)
    said = [text for text in caplog.messages if "fine_tun" in text]
    assert [text.startswith(NOTICE) for text in said] == [True] * times
    assert all("set model.evaluate_clients_every and model.fine_tuning.epochs" in text for text in said)


def test_a_pooled_run_cannot_fine_tune_and_is_not_told_to(caplog):
    with caplog.at_level("INFO"):
        fit(FedBABU(net=Small), 1, toy_data((7, 9), pooled=True))
    assert not [text for text in caplog.messages if "fine_tun" in text]


def test_who_predicts_with_the_global_model_is_told_to_fine_tune_it(caplog):
    loop = fit(FedBABU(net=Small), 1, evaluate_clients_every=1, fine_tuning=FineTuning())
    sentence = "This is the global model, which means nothing before a client of FedBABU has fine-tuned it (--client 0"
    for tuned in (False, True):
        caplog.clear()
        if tuned:
            loop.deploy(0, tuned=True)
        with caplog.at_level("INFO"):
            trainer(1).predict(loop, datamodule=toy_data())
        assert (sentence in caplog.text) is not tuned


# --- around a module


class Classifier(pl.LightningModule):
    """The net above, trained by a module of the user's."""

    def __init__(self, net=None):
        super().__init__()
        torch.manual_seed(0)
        self.net = net or Norm(3, (4,))

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self.net(x), y)

    def configure_optimizers(self):
        return sgd(weight_decay=0.1)(self.parameters())


@pytest.mark.parametrize(
    "head",
    ["module.net.head.*", ["module.net.head.weight", "module.net.head.bias"], ["module.*", "!module.net.body.*"]],
)
def test_around_a_module_it_is_the_same(head):
    ours = fit(FedBABU(module=Classifier(), head=head), 2, toy_data(**LATE))
    torch.manual_seed(0)
    net = Norm(3, (4,))
    inside = fit(fedbabu(net=lambda classes, shape: copy.deepcopy(net)), 2, toy_data(**LATE))
    renamed = {name.removeprefix("module."): value for name, value in ours.client.state_dict().items()}
    assert equal(renamed, dict(inside.client.state_dict()))
    assert set(ours.global_weights.personal) == {f"module.{name}" for name in HEAD}


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.head = nn.Linear(4, 4)
        self.head.weight = self.first.weight

    def forward(self, x):
        return self.head(self.first(x).relu())


class Ends(nn.Module):
    """A net whose last layer has another name."""

    def __init__(self, num_classes, input_shape):
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.fc = nn.Linear(6, num_classes)

    def forward(self, x):
        return self.fc(self.first(x).relu())


class Frozen(Perceptron):
    def __init__(self, num_classes, input_shape):
        super().__init__(num_classes, input_shape, hidden=(6,))
        self.head.requires_grad_(False)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: FedBABU(module=Classifier()), r"got 'net.head.\*', which matches none .* head='module.net.head.\*'"),
        (
            lambda: FedBABU(module=Classifier(), head="module.net.neck.*"),
            r"got 'module.net.neck.\*', which matches none",
        ),
        (lambda: fedbabu(head=["net.head.*", "net.neck.*"]), r"got 'net.neck.\*', which matches none .*'net.head.\*'"),
        (lambda: fedbabu(net=Ends), r"got 'net.head.\*', which matches none .*such as head='net.fc.\*'"),
        (lambda: fedbabu(head=[]), r"must match parameters that are trained, got \[\]"),
        (lambda: fedbabu(head="net.*"), r"must leave parameters to the body, got \['net.\*'\], which match all of"),
        (lambda: fedbabu(net=partial(Perceptron, hidden=())), r"must leave parameters to the body"),
        (lambda: fedbabu(net=Frozen), r"must match parameters that are trained, got 'net.head.\*'"),
        (lambda: fedbabu(head="net.body.1.running_mean"), r"must match parameters that are trained"),
        (
            lambda: FedBABU(module=Classifier(Tied()), head="module.net.head.*"),
            r"must have parameters of its own, got module.net.head.weight, which is module.net.first.weight too; untie",
        ),
    ],
)
def test_a_head_that_does_not_divide_the_parameters_is_refused_before_anyone_trains(make, sentence):
    class Never(pl.Callback):
        def on_client_start(self, trainer, loop, client_id):
            pytest.fail("a client was trained")

    with pytest.raises(ValueError, match=f"FedBABU.head {sentence}|FedBABU.head .*{sentence}"):
        fit(make(), 1, callbacks=[Never()])


def test_different_nets_share_no_body():
    net = partial(HeterogeneousNets, nets=[Small, partial(Perceptron, hidden=(5,))])
    with pytest.raises(ValueError, match="clients with different nets can share no entry"):
        fit(fedbabu(net=net, head="net.nets.*.head.*"), 1, toy_data((7, 9)))


def test_statistics_within_the_head_belong_to_the_body():
    """They move, travel and are averaged, though a pattern matches them."""

    class NormedHead(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Linear(4, 6)
            self.head = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 3))

        def forward(self, x):
            return self.head(self.body(x).relu())

    loop = fit(FedBABU(module=Classifier(NormedHead()), head="module.net.head.*"), 2, toy_data((7, 12)))
    shared = set(loop.global_weights.shared)
    assert {"module.net.head.0.running_mean", "module.net.head.0.num_batches_tracked"} <= shared
    assert {"module.net.head.0.weight", "module.net.head.1.weight"}.isdisjoint(shared)
    assert loop.client.state_dict()["module.net.head.0.num_batches_tracked"] > 0


# --- rounds


def test_further_personal_entries_are_trained_and_stay():
    loop = fit(fedbabu(), 2, personal="net.body.0.*")
    drawn = fit(fedbabu(), 0).client.state_dict()
    firsts = [loop.store.personal(client_id)["net.body.0.weight"] for client_id in range(5)]
    assert not any(torch.equal(firsts[0], other) for other in firsts[1:])
    assert equal(heads(loop.store.personal(0)), heads(drawn))


def test_a_stack_of_clients_is_trained_as_one_by_one():
    alone, stacked = (fit(fedbabu(), 3, chunk=chunk) for chunk in (1, 3))
    assert stacked.engine.why_not() is None
    torch.testing.assert_close(weights_of(stacked), weights_of(alone))
    drawn = heads(fit(fedbabu(), 0).client.state_dict())
    assert all(equal(heads(stacked.store.personal(client_id)), drawn) for client_id in range(5))


def test_a_resumed_run_has_the_same_bits(tmp_path):
    settings = {"evaluate_clients_every": 1, "fine_tuning": FineTuning(epochs=2)}
    whole, half = (fit(fedbabu(net=BatchNormNet), rounds, toy_data(**LATE), **settings) for rounds in (3, 1))
    half.trainer.save_checkpoint(tmp_path / "half.ckpt")
    resumed = fit(fedbabu(net=BatchNormNet), 3, toy_data(**LATE), ckpt_path=tmp_path / "half.ckpt", **settings)
    assert equal(weights_of(resumed), weights_of(whole))
    assert resumed.round_metrics == whole.round_metrics


def test_a_module_whose_weights_are_drawn_anew_continues_with_the_head_of_the_checkpoint(tmp_path):
    def client(seed):
        made = Classifier()
        torch.manual_seed(seed)
        made.net.apply(lambda part: part.reset_parameters() if hasattr(part, "reset_parameters") else None)
        return FedBABU(module=made, head="module.net.head.*")

    whole, half = (fit(client(1), rounds, toy_data(**LATE)) for rounds in (3, 1))
    half.trainer.save_checkpoint(tmp_path / "half.ckpt")
    resumed = fit(client(2), 3, toy_data(**LATE), ckpt_path=tmp_path / "half.ckpt")
    assert equal(weights_of(resumed), weights_of(whole))


class Broken(FedBABU):
    """FedBABU whose client 0 ends with a body that is not finite."""

    def reply(self, exchange, local):
        if local.client_id == 0:
            self.net.body[0].weight.data.fill_(torch.nan)
        return super().reply(exchange, local)


def test_a_client_that_is_not_finite_is_named_or_as_if_it_were_absent():
    settings = {"net": Norm, "optimizer": sgd()}
    with pytest.raises(NonFiniteUpdateError, match="client 0 returned NaN"):
        fit(Broken(**settings), 1, toy_data((9, 7)))
    skipped = fit(Broken(**settings), 2, toy_data((9, 7), schedule=[[0, 1], [0, 1]]), nonfinite="skip")
    absent = fit(FedBABU(**settings), 2, toy_data((9, 7), schedule=[[1], [1]]))
    assert skipped.round_metrics["train/skipped"] == 1
    assert equal(weights_of(skipped), weights_of(absent))
    assert skipped.store.personal(0) is None
