"""FedProto: prototypes against a loop by hand, own models of several architectures, and what a client deploys."""

import copy
import math
from functools import partial

import pytest
import pytorch_lightning as pl
import torch
from torch.nn import functional as F

from fl_lightning import Aggregator, FaultPolicy, FederatedDataModule, FederatedLoop, FineTuning
from fl_lightning.aggregation import QSGD, MedianAggregator
from fl_lightning.data import TensorSource
from fl_lightning.methods import FedAvg, FedDecorr, FedProto, Local
from fl_lightning.methods.fedproto import (
    PROTOTYPES,
    FedProtoServer,
    distance_to_prototypes,
    prototype_logits,
)
from fl_lightning.metrics import ClasswiseAccuracy
from fl_lightning.nets import HeterogeneousNets, Perceptron
from tests.golden.end_to_end import TestedOnOwn
from tests.methods.own_models import models_of
from tests.methods.stacked import stacked_and_alone
from tests.methods.test_fedavg import Regression
from tests.toys import BatchNormNet, equal, fit, sgd, toy_data, trainer, weights_of

WIDTH = 8
Small = partial(Perceptron, hidden=(WIDTH,))
Deep = partial(Perceptron, hidden=(5, WIDTH))
Normed = partial(BatchNormNet, dropout=0.0)
THREE = partial(HeterogeneousNets, nets=[Small, Normed, Deep])
"""Nets of one width; client i has net i mod 3."""
SIZES = (7, 12, 1, 0, 14)
"""Client 2 has one sample, and client 3 none."""


def fedproto(kind=FedProto, **settings):
    return kind(**{"net": THREE, "optimizer": sgd(0.1, 0.9), **settings})


def labelled(*labels_of_clients, **settings):
    """Clients with samples of the given classes, of three, which are tested on their own training samples."""
    labels = torch.tensor([label for labels in labels_of_clients for label in labels])
    x = torch.randn(len(labels), 4, generator=torch.Generator().manual_seed(2)) + 2 * labels[:, None]
    sizes = [len(labels) for labels in labels_of_clients]
    parts = [part.tolist() for part in torch.arange(len(labels)).split(sizes)]
    return FederatedDataModule(
        TensorSource((x, labels), (x, labels), num_classes=3),
        partition=TestedOnOwn(parts),
        num_clients=len(sizes),
        **{"batch_size": 4, **settings},
    )


# --- equations


def test_the_distance_is_a_mean_over_all_samples_and_features_in_which_classes_without_prototype_add_0():
    f = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)).double()
    y = torch.tensor([0, 2, 1, 2, 0, 1])
    prototypes = torch.randn(3, 4, generator=torch.Generator().manual_seed(1)).double()
    seen = torch.tensor([True, False, True])
    total = sum(((f[b] - prototypes[y[b]]) ** 2).sum() for b in range(6) if y[b] != 1)
    torch.testing.assert_close(distance_to_prototypes(f, y, prototypes, seen), total / (6 * 4))
    f.requires_grad_()
    (gradient,) = torch.autograd.grad(distance_to_prototypes(f, y, prototypes, seen), f)
    assert not gradient[y == 1].any()
    assert gradient[y != 1].all()


def test_logits_are_negative_squared_distances_over_the_width():
    f = torch.randn(30, 4, generator=torch.Generator().manual_seed(0)).double()
    prototypes = torch.randn(3, 4, generator=torch.Generator().manual_seed(1)).double()
    found = prototype_logits(f, prototypes, torch.tensor([True, False, True]))
    expected = -(f[:, None] - prototypes).square().sum(-1) / 4
    torch.testing.assert_close(found[:, [0, 2]], expected[:, [0, 2]], rtol=1e-13, atol=0)
    assert (found[:, 1] == -torch.inf).all()


def test_near_features_far_from_0_keep_their_distances():
    f = 1000 + torch.rand(40, 8, generator=torch.Generator().manual_seed(0))
    prototypes = 1000 + torch.rand(40, 8, generator=torch.Generator().manual_seed(1))
    exact = -(f.double()[:, None] - prototypes.double()).square().sum(-1) / 8
    found = prototype_logits(f, prototypes, torch.ones(40, dtype=torch.bool))
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=0)


def test_half_types_count_in_float32():
    half = torch.ones(2, 4).bfloat16()
    seen = torch.tensor([True, True])
    assert distance_to_prototypes(half, torch.tensor([0, 1]), torch.zeros(2, 4), seen).dtype == torch.float32
    assert prototype_logits(half, torch.zeros(2, 4), seen).dtype == torch.float32


# --- a run


def by_hand(nets, data, schedule, lam, weighting):
    """Models of the clients and the server's prototypes after some rounds, by plain loops."""
    models = [copy.deepcopy(nets[client_id % len(nets)]) for client_id in range(data.num_clients)]
    prototypes = [None, None, None]
    for round_idx, cohort in enumerate(schedule):
        parts = [[], [], []]
        for client_id in cohort:
            net = models[client_id].train()
            view = data.view(client_id, round_idx)
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
            for x, y in view.batches("train", 0):
                features = net.features(x)
                loss = F.cross_entropy(net.head(features), y)
                for f, c in zip(features, y.tolist(), strict=True):
                    if prototypes[c] is not None:
                        loss = loss + lam * (f - prototypes[c]).square().sum() / features.numel()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            net.eval()
            if view.size():
                x, y = view.all()
                for c in y.unique().tolist():
                    parts[c].append((int((y == c).sum()), net.features(x)[y == c].detach().mean(0)))
        for c, of_class in enumerate(parts):
            if of_class:
                weights = [n if weighting == "samples" else 1 for n, _ in of_class]
                total = sum(weight * mean for weight, (_, mean) in zip(weights, of_class, strict=True))
                prototypes[c] = total / sum(weights)
    return models, prototypes


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_three_architectures_against_a_loop_by_hand(weighting):
    """With a client that comes back to its own model, one that comes late, one sample, no sample, and BatchNorm."""
    schedule = [[0, 1, 2, 3], [1, 2], [0, 3, 4]]
    data = toy_data(SIZES, dtype=torch.float64, schedule=schedule)
    client = fedproto(lam=0.7, weighting=weighting)
    loop = fit(client, 3, data, precision="64-true")
    begun = fit(fedproto(), 0, toy_data(SIZES, dtype=torch.float64), precision="64-true").client.net.nets
    models, prototypes = by_hand(begun, data, schedule, 0.7, weighting)
    for found, wanted in zip(models_of(loop), models, strict=True):
        torch.testing.assert_close(found, dict(wanted.state_dict()), rtol=1e-9, atol=1e-12)
    assert loop.server_module.seen.all()
    torch.testing.assert_close(loop.server_module.prototypes, torch.stack(prototypes), rtol=1e-9, atol=1e-12)


def test_a_prototype_is_the_mean_of_all_samples_of_its_class_whoever_has_them():
    """The paper's extra division would make it a fraction of that."""
    loop = fit(fedproto(net=Small), 1, labelled([0, 0, 0, 1], [0, 2]), local_epochs=0)
    data = labelled([0, 0, 0, 1], [0, 2])
    data.setup("fit")
    x, y = data.split("train").all()
    features = loop.client.net.features(x).detach()
    for c in range(3):
        torch.testing.assert_close(loop.server_module.prototypes[c].float(), features[y == c].mean(0))


@pytest.mark.parametrize("predicts", ["prototypes", "head"])
def test_lam_0_trains_as_local(predicts):
    """Bit for bit, models and, where the head predicts, rows; it still sends prototypes, which may predict."""
    ours = fit(fedproto(lam=0.0, predicts=predicts), 3, toy_data(SIZES))
    local = fit(Local(net=THREE, optimizer=sgd(0.1, 0.9), finetune_epochs=0), 3, toy_data(SIZES))
    assert all(map(equal, models_of(ours), models_of(local)))
    assert (ours.round_metrics["local/alma"] == local.round_metrics["local/alma"]) == (predicts == "head")
    assert "train/distance" not in ours.round_metrics


def test_the_first_round_is_local_s_and_later_rounds_are_not():
    once, twice = (fit(fedproto(), rounds, toy_data(SIZES)) for rounds in (1, 2))
    alone, longer = (
        fit(Local(net=THREE, optimizer=sgd(0.1, 0.9), finetune_epochs=0), n, toy_data(SIZES)) for n in (1, 2)
    )
    assert all(map(equal, models_of(once), models_of(alone)))
    assert not equal(models_of(twice)[0], models_of(longer)[0])
    assert twice.round_metrics["train/distance"] > 0


def test_only_prototypes_and_counts_travel():
    schedule = [[0, 1], [1, 3, 4]]
    loop = fit(fedproto(), 2, toy_data(SIZES, schedule=schedule))
    down = loop.recorder.history.curve("comm/bytes_down")
    up = loop.recorder.history.curve("comm/bytes_up")
    assert list(down.values()) == [0, 3 * (4 * 3 * WIDTH + 3)]
    assert list(up.values()) == [2 * (4 * 3 * WIDTH + 8 * 3), 3 * (4 * 3 * WIDTH + 8 * 3)]
    assert not loop.global_weights.shared
    assert not any(name.startswith("global/") for name in loop.round_metrics)


class Seen(FedProto):
    """Notes what each client sends."""

    def reply(self, exchange, local):
        sent = super().reply(exchange, local)
        self.seen[local.round_idx, local.client_id] = sent, self.num_steps
        return sent


def seen(rounds, data, **settings):
    client = fedproto(Seen, **settings)
    client.seen = {}
    return fit(client, rounds, data), client.seen


def test_a_client_without_data_sends_zeros_and_keeps_the_prototypes_that_it_receives():
    loop, found = seen(2, toy_data(SIZES))
    sent, num_steps = found[1, 3]
    assert num_steps == 0
    assert not sent["prototypes"].any()
    assert sent["counts"].tolist() == [0, 0, 0]
    assert loop.store.memory(3)[PROTOTYPES]["seen"].any()
    without = fit(fedproto(), 2, toy_data(SIZES, schedule=[[0, 1, 2, 4]] * 2))
    assert equal(weights_of(loop), weights_of(without))


def test_the_features_of_one_sample_are_its_class_mean():
    """As the privacy page says."""
    loop, found = seen(1, labelled([0, 0], [1]), net=Small)
    sent, _ = found[0, 1]
    data = labelled([0, 0], [1])
    data.setup("fit")
    x, _ = data.view(1, 0).all()
    net = Small(3, (4,))
    net.load_state_dict(models_of(loop)[1])
    torch.testing.assert_close(sent["prototypes"][1], net.features(x)[0].detach())
    assert sent["counts"].tolist() == [0, 1, 0]


def test_means_and_counts_are_of_the_samples_that_the_pass_has_seen():
    """A batch that a hook skips counts in neither: with the counts of all samples its class would be drawn to 0."""

    class Skips(Seen):
        def on_after_batch_transfer(self, batch, dataloader_idx):
            return None if 2 in batch[1] and not self.training else batch

    client = fedproto(Skips, net=Small)
    client.seen = {}
    fit(client, 1, labelled([0, 0, 1, 1, 2, 2]), evaluate_clients_every=9)
    assert client.seen[0, 0][0]["counts"].tolist() == [2, 2, 0]


def test_prototypes_are_of_eval_mode_and_of_the_trained_model():
    loop, found = seen(1, toy_data((12,)), net=BatchNormNet)
    data = toy_data((12,))
    data.setup("fit")
    x, y = data.view(0, 0).all()
    net = BatchNormNet(3, (4,))
    net.load_state_dict(models_of(loop)[0])
    net.eval()
    for c in y.unique().tolist():
        torch.testing.assert_close(found[0, 0][0]["prototypes"][c], net.features(x)[y == c].mean(0).detach())


# --- what is deployed


def test_a_client_deploys_the_prototypes_that_it_received_last_and_its_head_before():
    """Client 0 has the server's prototypes of round 1's end, which later rounds must not change; client 2 has none."""
    schedule = [[0, 1], [0, 1], [0], [1], [2]]
    data = labelled([0, 1], [1, 2], [0, 2], schedule=schedule)
    loop = fit(fedproto(predicts="prototypes"), 5, data, precision="64-true")
    earlier = fit(fedproto(), 2, labelled([0, 1], [1, 2], [0, 2], schedule=schedule), precision="64-true")
    never = fit(fedproto(), 1, labelled([0, 1], [1, 2], [0, 2], schedule=schedule), precision="64-true")
    torch.testing.assert_close(
        loop.store.memory(0)[PROTOTYPES],
        {"prototypes": earlier.server_module.prototypes, "seen": earlier.server_module.seen},
        rtol=0,
        atol=0,
    )
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(5)).double()
    model = loop.client_model(0).double()
    net = model.net.nets[0]
    expected = prototype_logits(net.features(x), earlier.server_module.prototypes, earlier.server_module.seen)
    torch.testing.assert_close(model(x), expected)
    first = never.client_model(0).double()
    torch.testing.assert_close(first(x), first.net.nets[0](x))


@pytest.mark.parametrize("schedule", [[[1], [0]], [[1], [0], [0]]])
def test_while_no_class_has_a_prototype_the_head_predicts(schedule):
    """Client 1 has no data, so that round 0 ends without a prototype."""
    data = labelled([0, 1, 2], [], schedule=schedule)
    loop = fit(fedproto(net=Small), len(schedule), data)
    model = loop.client_model(0)
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(5))
    assert torch.equal(model(x), model.net(x)) == (len(schedule) == 2)


def test_the_head_predicts_where_it_is_asked_to():
    loop = fit(fedproto(predicts="head"), 3, toy_data(SIZES))
    model = loop.client_model(1).eval()
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(5))
    assert torch.equal(model(x), model.net.nets[1](x))
    for found, wanted in zip(models_of(loop), models_of(fit(fedproto(), 3, toy_data(SIZES))), strict=True):
        assert equal(found, wanted)


def unseen_class(**settings):
    """Client 1 receives no prototype of class 2, of which it has samples."""
    data = labelled([0, 0, 1, 1], [0, 0, 0, 1, 2, 2], schedule=[[0], [1]])
    return fit(fedproto(net=Small, **settings), 2, data, evaluate_clients_every=1, metrics={"of": ClasswiseAccuracy(3)})


def test_a_class_without_prototype_is_never_answered_and_breaks_no_value():
    """What is undefined stays undefined, as among finite logits: client 0 has no samples of class 2."""
    loop = unseen_class()
    values = loop.recorder.client_values[1]
    accuracies = {key: value for key, value in values.items() if key.startswith("local/of/")}
    assert len(accuracies) == 3
    assert list(accuracies.values())[2] == 0
    assert all(value is not None for value in accuracies.values())
    assert values["local/alma"] <= 4 / 6
    assert not any(math.isnan(value) for value in loop.round_metrics.values())


def test_an_undefined_metric_of_logits_that_leave_a_class_out_is_undefined_and_not_broken():
    for predicts in ("prototypes", "head"):
        data = labelled([0, 0, 1, 1], [0, 0, 0, 1, 1, 1], schedule=[[0], [1]])
        client = fedproto(net=Small, predicts=predicts)
        loop = fit(client, 2, data, evaluate_clients_every=1, metrics={"of": ClasswiseAccuracy(3)})
        values = loop.recorder.client_values[1]
        assert [values[key] for key in sorted(values) if key.startswith("local/of/")][2] is None


def test_nan_of_broken_logits_stays_nan():
    class Broken(FedProto):
        def nearest_prototypes(self, x):
            return super().nearest_prototypes(x) * torch.nan

    class Rows(pl.Callback):
        def on_train_epoch_end(self, trainer, loop):
            seen.append(dict(loop.recorder.client_values.get(1, {})))

    seen = []
    data = labelled([0, 0, 1, 1], [0, 0, 0, 1, 1, 1], schedule=[[0], [1]])
    client = fedproto(Broken, net=Small)
    fit(client, 2, data, evaluate_clients_every=1, metrics={"of": ClasswiseAccuracy(3)}, callbacks=[Rows()])
    values = [value for key, value in sorted(seen[-1].items()) if key.startswith("local/of/")]
    assert math.isnan(values[2])


@pytest.mark.parametrize(("client_id", "is_infinite"), [(0, False), (1, True)])
def test_the_loss_of_a_client_is_infinite_where_it_has_samples_of_a_class_without_prototype(client_id, is_infinite):
    """Such a class has probability 0. The accuracies are numbers all the same."""
    loop = unseen_class()
    loop.deploy(client_id)
    data = labelled([0, 0, 1, 1], [0, 0, 0, 1, 2, 2], schedule=[[0], [1]])
    (found,) = trainer(0).test(loop, data, verbose=False)
    (loss,) = [value for key, value in found.items() if key.endswith("/loss")]
    assert not math.isnan(loss)
    assert math.isinf(loss) == is_infinite
    (accuracy,) = [value for key, value in found.items() if key.endswith("/acc")]
    assert 0 <= accuracy <= 1


def test_fine_tuning_moves_the_features_that_the_prototypes_judge():
    loop = fit(fedproto(net=Small), 2, toy_data((9, 12)), fine_tuning=FineTuning(epochs=3), evaluate_clients_every=1)
    assert 0 <= loop.round_metrics["local/tuned/alma"] <= 1
    before = models_of(loop)
    plain = fit(fedproto(net=Small), 2, toy_data((9, 12)))
    assert all(map(equal, before, models_of(plain)))


# --- faults, resume, stacks


def test_a_client_that_is_skipped_is_as_one_that_was_absent():
    class Broken(FedProto):
        def reply(self, exchange, local):
            sent = super().reply(exchange, local)
            if local.client_id == 1:
                sent["prototypes"].fill_(torch.nan)
            return sent

    broken = fit(fedproto(Broken), 2, toy_data(SIZES), nonfinite="skip")
    without = fit(fedproto(), 2, toy_data(SIZES, schedule=[[0, 2, 3, 4]] * 2))
    assert equal(weights_of(broken), weights_of(without))
    assert broken.store.memory(0)[PROTOTYPES]["prototypes"].equal(without.store.memory(0)[PROTOTYPES]["prototypes"])
    assert broken.store.memory(1) == {}
    with pytest.raises(RuntimeError, match="client 1 returned NaN or infinite values in round 0"):
        fit(fedproto(Broken), 1, toy_data(SIZES))


def test_a_round_in_which_all_clients_are_skipped_leaves_the_prototypes():
    class Breaks(FedProto):
        def reply(self, exchange, local):
            sent = super().reply(exchange, local)
            if local.round_idx:
                sent["prototypes"].fill_(torch.nan)
            return sent

    faults = FaultPolicy(nonfinite="skip", patience=9)
    broken = fit(fedproto(Breaks), 2, toy_data(SIZES), faults=faults)
    once = fit(fedproto(), 1, toy_data(SIZES))
    assert equal(dict(broken.server_module.state_dict()), dict(once.server_module.state_dict()))


def test_resume_is_exact(tmp_path):
    settings = {"schedule": [[0, 1, 2], [1, 3], [0, 4], [1, 2]]}
    whole, half = (fit(fedproto(), rounds, toy_data(SIZES, **settings)) for rounds in (4, 2))
    half.trainer.save_checkpoint(tmp_path / "half.ckpt")
    resumed = fit(fedproto(), 4, toy_data(SIZES, **settings), ckpt_path=tmp_path / "half.ckpt")
    assert all(map(equal, models_of(resumed), models_of(whole)))
    assert equal(weights_of(resumed), weights_of(whole))
    assert resumed.round_metrics == whole.round_metrics
    for client_id in range(5):
        kept, expected = (loop.store.memory(client_id).get(PROTOTYPES, {}) for loop in (resumed, whole))
        assert equal(kept, expected)


def test_it_stacks():
    client = FedProto(net=Small, num_classes=3, input_shape=(4,)).double()
    g = torch.Generator().manual_seed(0)
    x = torch.randn(3, 5, 4, generator=g).double()
    y = torch.randint(3, (3, 5), generator=g)
    buffers = {
        "prototypes": torch.randn(3, 3, WIDTH, generator=g).double(),
        "seen": torch.tensor([[True, True, False]] * 3),
    }
    torch.testing.assert_close(*stacked_and_alone(client, buffers, x, y))


def test_clients_that_are_stacked_end_as_one_by_one():
    stacked, alone = (fit(fedproto(net=Small), 3, toy_data((7, 12, 0, 9)), chunk=chunk) for chunk in (4, 1))
    for one, other in zip(models_of(stacked), models_of(alone), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(stacked.server_module.prototypes, alone.server_module.prototypes, rtol=1e-4, atol=1e-6)


def test_bf16_sends_float32_and_deploys_float32():
    loop, _ = seen(2, toy_data(SIZES))
    client = fedproto(Seen)
    client.seen = {}
    half = fit(client, 2, toy_data(SIZES), precision="bf16-mixed")
    assert client.seen[1, 0][0]["prototypes"].dtype == torch.float32
    assert half.store.memory(0)[PROTOTYPES]["prototypes"].dtype == torch.float32
    assert half.server_module.prototypes.dtype == torch.float64
    torch.testing.assert_close(half.server_module.prototypes, loop.server_module.prototypes, rtol=0.05, atol=0.05)


# --- other methods with nets of several architectures


class Drawn:
    """A factory that draws the same weights wherever it is called."""

    def __init__(self, factory):
        self.factory = factory

    def __call__(self, num_classes, input_shape):
        with torch.random.fork_rng():
            torch.manual_seed(7)
            return self.factory(num_classes, input_shape)


def test_a_method_that_reads_features_trains_each_net_of_several_as_it_would_alone():
    """`HeterogeneousNets.head` is the head of the client that is trained."""
    factories = [Drawn(partial(Perceptron, hidden=hidden)) for hidden in ((6,), (5, 9))]

    def models(net):
        return models_of(fit(FedDecorr(net=net, optimizer=sgd()), 2, toy_data((7, 9)), personal=["*"]))

    several = models(partial(HeterogeneousNets, nets=factories))
    for client_id, factory in enumerate(factories):
        assert equal(several[client_id], models(factory)[client_id])


# --- refusals


@pytest.mark.parametrize("net", [THREE, Small])
def test_nets_of_one_width_are_built(net):
    FedProto(net=net, num_classes=3, input_shape=(4,))


def test_nets_of_different_width_are_refused_when_they_are_built():
    nets = partial(HeterogeneousNets, nets=[Small, partial(Perceptron, hidden=(6,)), Deep, Perceptron])
    with pytest.raises(ValueError, match=r"FedProto needs nets whose heads read equally many features, got 6 and 8"):
        FedProto(net=nets, num_classes=3, input_shape=(4,))
    with pytest.raises(ValueError, match=r"features, got 6 and 8 and .*; give all nets the same width before the head"):
        fit(fedproto(net=nets), 1)


class Headless(torch.nn.Sequential):
    def __init__(self, num_classes, input_shape):
        super().__init__(torch.nn.Linear(4, num_classes))

    def features(self, x):
        return x


@pytest.mark.parametrize("net", [Headless, partial(HeterogeneousNets, nets=[Small, Headless])])
def test_a_net_without_a_head_is_refused_among_others_too(net):
    with pytest.raises(ValueError, match=r"FedProto needs a net whose last layer is .* called head, got Headless"):
        fit(fedproto(net=net), 1)


def test_what_cannot_work_is_refused():
    with pytest.raises(ValueError, match="FedProto needs the logits of a net, got module=Regression"):
        FederatedLoop(FedProto(module=Regression()))
    with pytest.raises(ValueError, match="a FedProtoServer needs a FedProto client, got FedAvg"):
        fit(FedAvg(net=Small), 1, server_module=FedProtoServer())
    with pytest.raises(ValueError, match="lam must be at least 0, got -1; 0 trains as Local"):
        FedProto(lam=-1)
    with pytest.raises(ValueError, match="weighting must be one of samples, uniform"):
        FedProto(weighting="clients")
    with pytest.raises(ValueError, match="predicts must be one of prototypes, head"):
        FedProto(predicts="body")


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            {"aggregator": MedianAggregator()},
            "MedianAggregator makes one set of .* leave model.aggregator unset",
        ),
        ({"server_optimizer": partial(torch.optim.SGD, lr=1.0)}, "a server_optimizer needs trainable entries"),
        ({"codec": QSGD(bits=4)}, "QSGD needs trainable entries that the clients share, got none"),
        (
            {"aggregator": Aggregator(weighting="uniform")},
            "model.aggregator.weighting weighs the weights of .* 'uniform'; set model.client.weighting=uniform",
        ),
    ],
)
def test_what_acts_on_shared_weights_is_refused(settings, sentence):
    with pytest.raises(ValueError, match=sentence):
        fit(fedproto(), 1, **settings)
