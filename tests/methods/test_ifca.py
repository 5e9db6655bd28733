"""IFCA: who chooses which model and by what, what each model becomes, and where the models begin."""

import math
from functools import partial

import pytest
import pytorch_lightning as pl
import torch
from torch import nn
from torch.nn import functional as F

from fl_lightning import FederatedDataModule, FederatedLoop, FineTuning
from fl_lightning.data import FixedPartition, TensorSource
from fl_lightning.functional.state import weighted_mean
from fl_lightning.methods import IFCA, DPFedAvg, FedAvg
from fl_lightning.methods.ifca import IFCAServer
from fl_lightning.nets import Backbone, Perceptron
from tests.federation.test_kept_bits import KEPT, OneType, bits
from tests.methods.snapshots import check_failed_round
from tests.methods.test_fedala import Manual
from tests.methods.test_local import Regression
from tests.toys import BatchNormNet, equal, fit, sgd, toy_data, trainer, weights_of

Small = partial(Perceptron, hidden=(6,))
SIZES = (7, 12, 0, 9, 1)
SCHEDULE = {"schedule": [[0, 1, 2], [3, 1, 0], [0, 2, 4]]}
BODY, HEAD = 4 * (4 * 6 + 6), 4 * (6 * 3 + 3)
"""Bytes of the parts of the small net."""


def ifca(kind=IFCA, **settings):
    return kind(**{"net": Small, "optimizer": sgd(), "k": 3, **settings})


def models_of(loop):
    return [dict(model) for model in loop.server_module.models]


class Seen(IFCA):
    """Notes the losses, the choice and the start of each client, by (round, client)."""

    def receive(self, broadcast, local):
        super().receive(broadcast, local)
        start = {name: value.clone() for name, value in self.entries().items()}
        self.seen[broadcast.round_idx, local.client_id] = (self.round.get("losses"), int(self.round["cluster"]), start)

    def losses(self, models, local):
        self.round["losses"] = super().losses(models, local)
        return self.round["losses"]


def seen(rounds, data, **settings):
    client = ifca(Seen, **settings)
    client.seen = {}
    return fit(client, rounds, data), client.seen


def loss_of(net, state, data, split):
    """The mean loss of a net with some entries, on a client's samples, by torch alone."""
    made = net(3, (4,))
    made.load_state_dict({name.removeprefix("net."): value for name, value in state.items()})
    made.eval()
    x, y = data.all(split)
    with torch.no_grad():
        return F.cross_entropy(made(x), y).item()


# --- choices ---


@pytest.mark.parametrize("net", [Small, partial(BatchNormNet, dropout=0.3)])
def test_choices_starts_and_means_by_hand(net):
    """Each model becomes the mean of who chose it, and stays in its bits where nobody did."""
    data = toy_data(SIZES, **SCHEDULE)
    k = 5
    loop, found = seen(3, data, net=net, k=k)
    unchosen = 0
    for r, cohort in enumerate(SCHEDULE["schedule"]):
        before = models_of(fit(ifca(net=net, k=k), r, toy_data(SIZES, **SCHEDULE)))
        sent = {}

        class Take(pl.Callback):
            def on_client_end(self, trainer, loop, update, sent=sent):
                sent[loop.server.round_idx, update.client_id] = {n: v.clone() for n, v in update.weights.items()}

        after = models_of(fit(ifca(net=net, k=k), r + 1, toy_data(SIZES, **SCHEDULE), callbacks=[Take()]))
        members = {cluster: [] for cluster in range(k)}
        for client_id in cohort:
            losses, chosen, start = found[r, client_id]
            if client_id == 2:
                assert (losses, chosen) == (None, -1)
                assert equal(start, before[0])
                continue
            wanted = [loss_of(net, model, data.view(client_id, r), "train") for model in before]
            assert losses.tolist() == pytest.approx(wanted, rel=1e-5)
            assert chosen == min(range(k), key=wanted.__getitem__)
            assert equal(start, before[chosen])
            members[chosen].append(client_id)
        for cluster, ids in members.items():
            if ids:
                mean = weighted_mean([sent[r, i] for i in ids], [SIZES[i] for i in ids])
                assert equal(after[cluster], mean)
            else:
                assert equal(after[cluster], before[cluster])
                unchosen += 1
        mean = weighted_mean([sent[r, i] for i in cohort], [SIZES[i] for i in cohort])
    assert unchosen
    assert len({chosen for _, chosen, _ in found.values()} - {-1}) > 1
    torch.testing.assert_close(dict(loop.client.state_dict()), mean)


def test_of_equal_losses_the_first_and_none_that_is_not_finite():
    client = ifca(num_classes=3, input_shape=(4,))
    client.load_model = lambda model: None
    for losses, chosen in (
        ([2.0, 1.0, 1.0], 1),
        ([math.nan, math.inf, 3.0], 2),
        ([-math.inf, 5.0, 4.0], 2),
        ([math.nan, math.inf, math.nan], 0),
    ):
        client.losses = lambda models, local, losses=losses: torch.tensor(losses, dtype=torch.float64)
        assert client.choose([{}, {}, {}], None) == chosen


def test_a_test_chooses_by_the_training_loss():
    """There is a client whose test samples like another model better."""
    data = toy_data((9, 8, 7, 6, 9))
    loop = fit(ifca(k=4), 2, data, evaluate_clients_every=1)
    models = models_of(loop)
    misled = 0
    for client_id in range(5):
        view = data.view(client_id, 1)
        by_training = [loss_of(Small, model, view, "train") for model in models]
        by_test = [loss_of(Small, model, view, "test") for model in models]
        chosen = min(range(4), key=by_training.__getitem__)
        misled += chosen != min(range(4), key=by_test.__getitem__)
        assert equal(dict(loop.client_model(client_id).state_dict()), models[chosen])
        x, y = view.all("test")
        net = Small(3, (4,))
        net.load_state_dict({name.removeprefix("net."): value for name, value in models[chosen].items()})
        share = (net(x).argmax(1) == y).double().mean().item()
        assert loop.recorder.client_values[client_id]["local/alma"] == pytest.approx(share)
    assert misled


def test_who_has_no_training_samples_deploys_the_global_model_and_who_never_trains_chooses():
    data = toy_data((9, 8, 0, 6, 9), unseen=[4])
    loop = fit(ifca(), 2, data)
    assert equal(dict(loop.client_model(2).state_dict()), dict(loop.client.state_dict()))
    losses = [loss_of(Small, model, data.view(4, 1), "train") for model in models_of(loop)]
    assert equal(dict(loop.client_model(4).state_dict()), models_of(loop)[losses.index(min(losses))])
    assert loop.server_module.choices.shape == (4,)


def test_shares_of_the_clusters_and_of_changed_choices():
    loop, found = seen(3, toy_data(SIZES, **SCHEDULE))
    last = {}
    for r, cohort in enumerate(SCHEDULE["schedule"]):
        choices = {i: found[r, i][1] for i in cohort if i != 2}
        changed = sum(last.get(i, chosen) != chosen for i, chosen in choices.items())
        for cluster in range(3):
            share = loop.recorder.history.curve(f"train/cluster/{cluster}")[r]
            assert share == pytest.approx(list(choices.values()).count(cluster) / len(choices))
        assert loop.recorder.history.curve("train/cluster_changed")[r] == pytest.approx(changed / len(choices))
        last |= choices
    assert loop.server_module.choices.tolist() == [last.get(i, -1) for i in range(5)]


def test_a_changed_choice_is_counted():
    class Moves(IFCA):
        def losses(self, models, local):
            return torch.arange(len(models)).double().roll(local.round_idx)

    loop = fit(ifca(Moves), 2)
    assert loop.recorder.history.curve("train/cluster_changed") == {0: 0.0, 1: 1.0}
    assert loop.round_metrics["train/cluster/1"] == 1.0


def test_a_round_of_clients_without_samples_changes_and_logs_nothing():
    loop = fit(ifca(), 2, toy_data(SIZES, schedule=[[0, 1], [2]]))
    assert "train/cluster/0" not in loop.round_metrics
    assert all(map(equal, models_of(loop), models_of(fit(ifca(), 1, toy_data(SIZES, schedule=[[0, 1]])))))


# --- identities ---


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_one_model_is_fedavg_bit_for_bit(weighting):
    net = partial(BatchNormNet, dropout=0.2)
    loops = [
        fit(kind(net=net, optimizer=sgd()), 3, toy_data(SIZES, **SCHEDULE), weighting=weighting)
        for kind in (FedAvg, partial(IFCA, k=1))
    ]
    assert equal(*(dict(loop.client.state_dict()) for loop in loops))
    assert equal(models_of(loops[1])[0], dict(loops[0].client.state_dict()))
    assert loops[0].round_metrics["comm/bytes_down"] == loops[1].round_metrics["comm/bytes_down"]
    assert not math.isnan(loops[1].round_metrics["train/cluster/0"])


def test_the_means_weigh_as_the_rule_does():
    class Take(pl.Callback):
        def on_client_end(self, trainer, loop, update):
            sent[update.client_id] = {name: value.clone() for name, value in update.weights.items()}

    class First(IFCA):
        def losses(self, models, local):
            return torch.arange(len(models)).double()

    sent = {}
    loop = fit(ifca(First), 1, toy_data((7, 12, 0)), callbacks=[Take()], weighting="uniform")
    assert equal(models_of(loop)[0], weighted_mean([sent[0], sent[1]], [1, 1]))


def test_clusters_separate_clients_of_contrary_labels():
    """Two clients have the labels of two others turned round: no single model serves both."""
    x = torch.randn(40, 2, generator=torch.Generator().manual_seed(0))
    y = (x[:, 0] > 0).long()

    labels = torch.cat([y[:20], 1 - y[20:]])
    parts = FixedPartition([list(range(10 * i, 10 * i + 10)) for i in range(4)])
    source = TensorSource((x, labels), (x, labels), num_classes=2)
    data = FederatedDataModule(source, num_clients=4, partition=parts, batch_size=5)
    loop = fit(IFCA(k=2, net=Small, optimizer=sgd(0.3)), 8, data)
    choices = loop.server_module.choices.tolist()
    assert choices[0] == choices[1] != choices[2] == choices[3]


# --- shared entries ---


def test_shared_entries_are_one_and_are_sent_once():
    loop, found = seen(2, toy_data(SIZES, **SCHEDULE), shared="net.body.*")
    heads = models_of(loop)
    assert all(name.startswith("net.head.") for head in heads for name in head)
    curve = loop.recorder.history.curve("comm/bytes_down")
    assert [curve[r] for r in range(2)] == [3 * (BODY + 3 * HEAD)] * 2
    integer = loop.round_metrics["comm/bytes_up"] / 3 - (BODY + HEAD)
    assert 0 < integer <= 8
    body = {name: value for name, value in loop.client.state_dict().items() if "body" in name}
    for client_id in (0, 1, 3):
        deployed = loop.client_model(client_id).state_dict()
        assert equal({name: deployed[name] for name in body}, dict(body))
    starts = [{name: found[1, i][2][name] for name in body} for i in (3, 1, 0)]
    assert equal(starts[0], starts[1])
    whole, _ = seen(1, toy_data(SIZES, **SCHEDULE))
    assert whole.round_metrics["comm/bytes_down"] == 3 * 3 * (BODY + HEAD)


class Frozen(IFCA):
    def build(self, num_classes, input_shape):
        super().build(num_classes, input_shape)
        self.net.body[1].weight.requires_grad_(False)


def test_frozen_parameters_are_the_same_in_all_models():
    loop = fit(ifca(Frozen), 3, toy_data(SIZES, **SCHEDULE))
    assert all("net.body.1.weight" not in model for model in models_of(loop))
    assert torch.equal(loop.client.net.body[1].weight, fit(ifca(), 0).client.net.body[1].weight)


# --- where the models begin ---


def test_the_first_model_is_the_initial_one_and_others_are_drawn_by_seed_and_number():
    def starts(seed, **settings):
        loop = FederatedLoop(ifca(**settings), seed=seed)
        trainer(0).fit(loop, datamodule=toy_data())
        return loop, models_of(loop)

    loop, models = starts(3, net=BatchNormNet)
    assert equal(models[0], dict(loop.client.state_dict()))
    assert all(map(equal, models, starts(3, net=BatchNormNet)[1]))
    assert equal(models[1], starts(3, net=BatchNormNet, k=2)[1][1])
    heads = starts(3, net=BatchNormNet, shared=["net.body.*"])[1]
    assert all(torch.equal(heads[j]["net.head.weight"], models[j]["net.head.weight"]) for j in range(3))
    other = starts(4, net=BatchNormNet)[1]
    for j in (1, 2):
        assert not torch.equal(models[j]["net.head.weight"], models[0]["net.head.weight"])
        assert not torch.equal(models[j]["net.head.weight"], other[j]["net.head.weight"])
        assert torch.equal(models[j]["net.body.1.running_var"], torch.ones(8))
    assert not torch.equal(models[1]["net.head.weight"], models[2]["net.head.weight"])


def test_layers_of_one_shape_begin_differently():
    model = models_of(fit(ifca(net=partial(Perceptron, hidden=(4, 4))), 0))[1]
    first, second = (value for name, value in model.items() if value.shape == (4, 4))
    assert not torch.equal(first, second)


def test_the_draws_of_starts_move_no_generator():
    class Drawn(pl.Callback):
        def on_fit_start(self, trainer, loop):
            drawn.append(torch.rand(1).item())

    drawn = []
    for k in (1, 3):
        pl.seed_everything(5, verbose=False)
        fit(ifca(k=k), 0, callbacks=[Drawn()])
    assert drawn[0] == drawn[1]


class Constant(Backbone):
    """A net whose layers are not those of torch; `reset` says how they are drawn anew."""

    class Layer(nn.Module):
        def __init__(self, size):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(size))
            self.register_buffer("mask", torch.ones(size))

        def forward(self, x):
            return x * self.weight * self.mask

    class Equal(Layer):
        def reset_parameters(self):
            nn.init.ones_(self.weight)

    def __init__(self, num_classes, input_shape, kind):
        super().__init__()
        self.scale = kind(input_shape[0])
        self.head = nn.Linear(input_shape[0], num_classes)

    def features(self, x):
        return self.scale(x)


def test_a_layer_that_cannot_be_drawn_anew_is_refused():
    net = partial(Constant, kind=Constant.Layer)
    words = (
        r"IFCA draws its k models by reset_parameters of their layers, which Layer 'net.scale' does not have; define "
        r"it there, or set model.client.shared to \[net.scale.weight\]"
    )
    with pytest.raises(ValueError, match=words):
        fit(ifca(net=net), 1)
    loop = fit(ifca(net=net, shared="net.scale.weight"), 1)
    assert set(models_of(loop)[0]) == {"net.scale.mask", "net.head.weight", "net.head.bias"}
    fit(ifca(net=net, k=1), 1)


def test_equal_models_are_refused():
    words = r"IFCA needs k=3 models that begin differently, got equal ones \(0 and 1\), .* set model.client.k to 1"
    with pytest.raises(ValueError, match=words):
        fit(ifca(net=partial(Constant, kind=Constant.Equal), shared="net.head.*"), 1)
    with pytest.raises(ValueError, match=words):
        fit(ifca(net=BatchNormNet, shared=["net.body.0.*", "net.head.*"]), 1)
    with pytest.raises(ValueError, match=words):
        fit(ifca(shared="*"), 1)
    fit(ifca(net=partial(Constant, kind=Constant.Equal)), 1)

    class Same(IFCAServer):
        def drawn(self, cluster, names):
            return super().drawn(1, names)

    with pytest.raises(ValueError, match=r"got equal ones \(1 and 2\)"):
        fit(ifca(), 1, server_module=Same())


def test_what_nobody_has_changed_keeps_its_bits_in_every_model():
    loop = fit(ifca(net=OneType), 2, toy_data(SIZES, **SCHEDULE))
    fresh = OneType(3, (4,))
    assert max(loop.server_module.choices.tolist()) > -1
    for model in models_of(loop):
        for name in KEPT:
            assert name == "untouched" or bits(model[f"net.{name}"]) == bits(getattr(fresh, name)), name


# --- a round as a whole, stacks, modules (two processes: tests/test_contract.py) ---


@pytest.mark.parametrize("shared", [None, "net.body.*"])
def test_a_resumed_run_has_the_same_bits(tmp_path, shared):
    settings = {"net": BatchNormNet, "shared": shared}
    whole, half = (fit(ifca(**settings), rounds, toy_data(SIZES, **SCHEDULE)) for rounds in (3, 2))
    half.trainer.save_checkpoint(tmp_path / "half.ckpt")
    resumed = fit(ifca(**settings), 3, toy_data(SIZES, **SCHEDULE), ckpt_path=tmp_path / "half.ckpt")
    assert equal(weights_of(resumed), weights_of(whole))
    assert resumed.round_metrics == whole.round_metrics


def test_a_round_copies_no_model_and_a_failed_one_restores_them():
    check_failed_round(ifca, IFCAServer, sizes=(7, 9, 5), schedule=[[0, 1], [0, 2]])


class Breaks(IFCA):
    """Client 1 sends values that are not finite in round 1."""

    def reply(self, exchange, local):
        if local.client_id == 1 and local.round_idx == 1:
            with torch.no_grad():
                self.net.head.bias.fill_(torch.nan)
        return super().reply(exchange, local)


def test_a_skipped_client_is_as_an_absent_one():
    skipped = fit(ifca(Breaks), 3, toy_data((7, 9, 5)), nonfinite="skip")
    absent = fit(ifca(), 3, toy_data((7, 9, 5), schedule=[[0, 1, 2], [0, 2], [0, 1, 2]]))
    assert equal(weights_of(skipped), weights_of(absent))
    for name in ("train/cluster/0", "train/cluster/1", "train/cluster_changed"):
        assert skipped.recorder.history.curve(name) == absent.recorder.history.curve(name)


def test_clients_choose_one_by_one_and_are_trained_in_a_stack():
    alone = fit(ifca(), 3, toy_data((8, 12, 0, 9, 5)), evaluate_clients_every=1)
    stacked = fit(ifca(), 3, toy_data((8, 12, 0, 9, 5)), chunk=3, evaluate_clients_every=1)
    assert stacked.engine.why_not() is None
    assert stacked.server_module.choices.tolist() == alone.server_module.choices.tolist()
    assert len(set(alone.server_module.choices.tolist())) > 2
    for one, other in zip(models_of(alone), models_of(stacked), strict=True):
        torch.testing.assert_close(other, one)


def test_what_has_moved_counts_from_the_chosen_model():
    class Watch(pl.Callback):
        def on_client_end(self, trainer, loop, update):
            received[update.client_id] = {name: value.clone() for name, value in loop.client.received.items()}

    received = {}
    _, found = seen(1, toy_data((8, 12, 9, 5, 6)))
    fit(ifca(), 1, toy_data((8, 12, 9, 5, 6)), callbacks=[Watch()])
    assert len({found[0, i][1] for i in range(5)}) > 1
    for client_id, start in received.items():
        assert equal(start, {name: found[0, client_id][2][name] for name in start})


class Draws(pl.LightningModule):
    """A user's module whose step draws, and logs."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        noise = torch.randn_like(batch[0])
        loss = F.mse_loss(self.layer(batch[0] + noise)[:, 0], batch[1].float())
        self.log("mse", loss)
        return loss

    def test_step(self, batch, batch_idx):
        self.log("error", F.mse_loss(self.layer(batch[0])[:, 0], batch[1].float()))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Skips(Draws):
    """Skips batches of one sample, such as the last one of a client."""

    def training_step(self, batch, batch_idx):
        if len(batch[0]) == 1:
            return None
        return F.mse_loss(self.layer(batch[0])[:, 0], batch[1].float())


def test_batches_that_a_module_skips_do_not_count_in_the_choice():
    def losses(*sizes):
        torch.manual_seed(0)
        client = Seen(module=Skips(), k=3)
        client.seen = {}
        fit(client, 1, toy_data(sizes))
        return client.seen[0, 0][0]

    assert torch.equal(losses(6, 4), losses(5, 5))
    assert losses(1, 9).tolist() == [0.0, 0.0, 0.0]


class Stages(Draws):
    """Notes whether a step is one of training for who asks the Trainer."""

    def training_step(self, batch, batch_idx):
        self.stages.append(self.trainer.training)
        return super().training_step(batch, batch_idx)


def test_a_step_that_chooses_for_a_test_is_one_of_training():
    module = Stages()
    module.stages = []
    loop = fit(IFCA(module=module, k=2), 1, toy_data((6, 5)), evaluate_clients_every=1)
    module.stages.clear()
    loop.deploy("all")
    trainer(1).test(loop, datamodule=toy_data((6, 5)), verbose=False)
    assert len(module.stages) == 2 * (2 + 1)
    assert all(module.stages)


def test_around_a_module_an_evaluation_leaves_no_trace_and_a_test_has_the_fit_s_values():
    def client():
        torch.manual_seed(1)
        return IFCA(k=3, module=Draws())

    data = toy_data((7, 12, 5))
    loop = fit(client(), 2, data, evaluate_clients_every=1, fine_tuning=FineTuning(epochs=1))
    plain = fit(client(), 2, toy_data((7, 12, 5)))
    assert equal(weights_of(loop), weights_of(plain))
    assert loop.round_metrics["train/cluster/0"] == plain.round_metrics["train/cluster/0"]
    in_fit = {name: value for name, value in loop.round_metrics.items() if name.startswith("local/")}
    assert {"local/error", "local/tuned/error"} <= in_fit.keys()
    loop.deploy("all")
    (values,) = trainer(1).test(loop, toy_data((7, 12, 5)), verbose=False)
    assert {name: values[name] for name in in_fit} == pytest.approx(in_fit, rel=1e-6)  # logged as float32


@pytest.mark.parametrize("step", ["validate", "test"])
def test_a_pass_over_a_client_s_samples_is_in_eval_mode_and_has_the_fit_s_values(step):
    net = partial(BatchNormNet, dropout=0.5)
    loop = fit(ifca(net=net), 2, toy_data((9, 8, 7)), evaluate_clients_every=1)
    before = weights_of(loop)
    for client_id in range(3):
        loop.deploy(client_id)
        (values,) = getattr(trainer(1), step)(loop, toy_data((9, 8, 7)), verbose=False)
        key = "test/acc" if step == "test" else "global/acc"
        assert values[key] == pytest.approx(loop.recorder.client_values[client_id]["local/alma"])
    assert equal(weights_of(loop), before)


def test_resume_around_a_module(tmp_path):
    def client():
        torch.manual_seed(1)
        return IFCA(k=2, module=Regression())

    whole, half = (fit(client(), rounds, toy_data(SIZES, **SCHEDULE)) for rounds in (3, 1))
    half.trainer.save_checkpoint(tmp_path / "half.ckpt")
    resumed = fit(client(), 3, toy_data(SIZES, **SCHEDULE), ckpt_path=tmp_path / "half.ckpt")
    assert equal(weights_of(resumed), weights_of(whole))


def test_bf16_mixed():
    loop = fit(ifca(net=BatchNormNet), 2, toy_data(SIZES), precision="bf16-mixed", evaluate_clients_every=1)
    assert all(value.isfinite().all() for value in weights_of(loop).values())


# --- what is refused ---


def test_what_cannot_work_is_refused():
    private = DPFedAvg(noise_multiplier=1.0, delta=0.01)
    with pytest.raises(ValueError, match=r"DPFedAvg adds noise .* IFCA also sends statistics"):
        fit(ifca(), 1, toy_data(participation=1.0), aggregator=private)
    with pytest.raises(ValueError, match=r"IFCA computes the loss of models .* but Manual steps its optimizers"):
        IFCA(module=Manual())
    with pytest.raises(ValueError, match="a IFCAServer needs a IFCA client, got FedAvg; leave"):
        fit(FedAvg(net=Small), 1, server_module=IFCAServer())
    with pytest.raises(ValueError, match="IFCA needs trainable entries that the clients share, got none"):
        fit(ifca(), 1, personal="*")
    with pytest.raises(ValueError, match=r"shared must match entries that the clients share, got 'net.tail.\*'"):
        fit(ifca(shared="net.tail.*"), 1)
    with pytest.raises(ValueError, match="k must be at least 1, got 0; 1 is FedAvg"):
        IFCA(k=0)
    with pytest.raises(TypeError, match="shared must be names or patterns of entries"):
        IFCA(shared=[3])
