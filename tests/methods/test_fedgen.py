"""FedGen: its generator, how the server trains it, what clients draw and learn, and the identities with FedAvg."""

import math
from collections import OrderedDict
from contextlib import suppress
from functools import partial

import pytest
import pytorch_lightning as pl
import torch
from torch import nn
from torch.nn import functional as F

from fl_lightning import FederatedLoop
from fl_lightning.aggregation import MedianAggregator
from fl_lightning.attacks import sign_flip
from fl_lightning.functional.state import clone
from fl_lightning.methods import DPFedAvg, FedAvg, FedGen
from fl_lightning.methods.fedgen import FedGenServer, decayed, ensemble_loss, generated, likeness, new_generator
from fl_lightning.nets import Backbone, HeterogeneousNets, Perceptron
from tests.hooks.toy import Updates
from tests.methods.test_fedavg import Regression
from tests.toys import BatchNormNet, equal, fit, samples, sgd, toy_data, weights_of

Small = partial(Perceptron, hidden=(6,))
LITTLE = {"noise_dim": 3, "gen_hidden": 4, "gen_steps": 3, "gen_batch": 5, "gen_lr": 0.05}
"""Settings of a small generator that is trained for a short time."""

SIZES = (7, 0, 9, 1, 6)
PARTIAL = [[0, 1, 2], [2, 3, 4], [0, 1, 4], [1], [0, 2, 3]]
"""Cohorts with a client that has no samples, in round 3 alone."""


def fedgen(kind=FedGen, net=BatchNormNet, **settings):
    return kind(net=net, optimizer=sgd(), **{**LITTLE, **settings})


def module_of(entries):
    """G as torch has its layers."""
    hidden, inputs = entries["hidden.weight"].shape
    layers = OrderedDict(
        hidden=nn.Linear(inputs, hidden),
        norm=nn.BatchNorm1d(hidden),
        relu=nn.ReLU(),
        output=nn.Linear(hidden, len(entries["output.bias"])),
    )
    net = nn.Sequential(layers).double()
    net.load_state_dict({**net.state_dict(), **entries})
    return net


def entries_of(net):
    return {name: value for name, value in net.state_dict().items() if "num_batches" not in name}


def drawn(seed=0, **sizes):
    """First entries of G."""
    sizes = {"noise_dim": 3, "num_classes": 4, "hidden": 6, "width": 5, **sizes}
    return new_generator(**sizes, draws=torch.Generator().manual_seed(seed))


# --- equations


def test_the_generator_is_linear_batch_norm_relu_linear_of_noise_and_class():
    entries = drawn()
    net = module_of(entries)
    noise = torch.rand(7, 3, dtype=torch.float64)
    labels = torch.tensor([0, 3, 1, 1, 2, 0, 3])
    inputs = torch.cat([noise, F.one_hot(labels, 4)], dim=1)
    torch.testing.assert_close(generated(entries, labels, noise, training=True), net.train()(inputs))
    for name, value in entries_of(net).items():
        torch.testing.assert_close(entries[name], value)
    assert entries["norm.running_mean"].abs().min() > 0
    before = clone(entries)
    torch.testing.assert_close(generated(entries, labels, noise), net.eval()(inputs))
    assert equal(entries, before)


def test_it_starts_as_torch_s_layers_do():
    entries = drawn(hidden=400, width=300)
    layers = {"hidden": nn.Linear(7, 400), "norm": nn.BatchNorm1d(400), "output": nn.Linear(400, 300)}
    for name, value in entries_of(nn.ModuleDict(layers)).items():
        assert entries[name].shape == value.shape
        assert entries[name].dtype == torch.float64
        assert float(entries[name].std()) == pytest.approx(float(value.std()), rel=0.1)
        assert float(entries[name].max()) == pytest.approx(float(value.max()), rel=0.1)
    assert equal(drawn(1), drawn(1))
    assert not torch.equal(drawn(1)["hidden.weight"], drawn(2)["hidden.weight"])


def test_the_ensemble_weighs_each_head_by_its_share_of_the_class():
    logits = torch.randn(3, 4, 2, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([0, 1, 1, 0])
    counts = torch.tensor([[3, 0], [1, 0], [0, 5]])
    expected = 0.0
    for b, y in enumerate(labels.tolist()):
        for k in range(3):
            share = counts[k, y] / counts[:, y].sum()
            expected = expected - share * logits[k, b].log_softmax(0)[y] / len(labels)
    loss = ensemble_loss(logits, labels, counts, "losses")
    torch.testing.assert_close(loss, expected)
    loss.backward()
    assert not logits.grad[:2, 1].any(), "a client without a class has no say on it"
    assert logits.grad[2, 1].any()
    mean = ensemble_loss(logits, labels, counts, "logits")
    torch.testing.assert_close(mean, F.cross_entropy(sum(logits) / 3, labels))


def test_likeness_falls_where_unlike_noise_gives_unlike_features():
    features = torch.randn(4, 3, dtype=torch.float64)
    noise = torch.rand(4, 2, dtype=torch.float64)
    terms = []
    for i in range(4):
        for j in range(4):
            terms.append((features[i] - features[j]).abs().mean() * (noise[i] - noise[j]).square().mean())
    torch.testing.assert_close(likeness(features, noise), torch.exp(-sum(terms) / 16))
    assert likeness(features, noise[:1].expand(4, 2)) == 1
    assert likeness(3 * features, noise) < likeness(features, noise) < 1


def test_coefficients_fade_to_1e_4_and_0_stays_0():
    assert decayed(2.0, 0.9, 0) == 2.0
    assert decayed(2.0, 0.9, 3) == pytest.approx(2 * 0.9**3)
    assert decayed(2.0, 0.9, 1000) == 1e-4
    assert decayed(1e-4, 0.9, 5) == 1e-4
    assert decayed(0.0, 0.9, 1000) == 0.0


# --- the server


class WatchedServer(FedGenServer):
    """Notes G after each round, the heads and counts that it learns from, its draws, and what each client is sent."""

    def __init__(self):
        super().__init__()
        self.after = []
        self.given = []
        self.drawn = []
        self.sent = []

    def begin_round(self, cohort):
        super().begin_round(cohort)
        self.drawn.append([])

    def broadcast(self, exchange, client_id):
        message = super().broadcast(exchange, client_id)
        self.sent.append((self.server.round_idx, dict(message.extras)))
        return message

    def _train(self, heads, counts):
        self.given.append((heads, counts))
        super()._train(heads, counts)

    def finish(self, exchange, aggregate):
        state = torch.get_rng_state()
        new = super().finish(exchange, aggregate)
        assert torch.equal(torch.get_rng_state(), state)
        self.after.append(clone(self.generator))
        return new

    def draws(self, step, classes):
        found = super().draws(step, classes)
        self.drawn[-1].append(found)
        return found


class Watched(FedGen):
    """Notes the classes and noise that clients draw, by round and client."""

    server_class = WatchedServer

    def __init__(self, **settings):
        super().__init__(**settings)
        self.noted = {}

    def receive(self, broadcast, local):
        super().receive(broadcast, local)
        self.key = (broadcast.round_idx, local.client_id)
        self.noted[self.key] = [dict(self.round)]

    def labels(self):
        found = super().labels()
        self.noted[self.key].append(found)
        return found

    def noise(self, size):
        found = super().noise(size)
        self.noted[self.key].append(found)
        return found


@pytest.mark.parametrize("settings", [{}, {"ensemble": "logits", "diversity": 0.0}])
def test_the_generator_is_trained_on_the_trained_heads_by_one_adam_over_all_rounds(settings):
    """Beside torch's layers with one optimizer that lives through the run; clients without data have no say."""
    data = toy_data(SIZES, schedule=PARTIAL)
    seen = Updates()
    loop = fit(fedgen(Watched, gen_wd=0.02, **settings), 5, data, callbacks=[seen])
    side = loop.server_module
    start = fit(fedgen(Watched), 0, data).server_module.generator
    net = module_of(start).train()
    adam = torch.optim.Adam(net.parameters(), lr=0.05, weight_decay=0.02)
    for r, updates in enumerate(seen.rounds):
        teachers = [updates[client_id] for client_id in sorted(updates) if updates[client_id].num_samples]
        assert bool(side.drawn[r]) == bool(teachers), "a round without data trains nothing"
        adam.param_groups[0]["lr"] = 0.05 * 0.98**r
        for labels, noise in side.drawn[r]:
            features = net(torch.cat([noise, F.one_hot(labels, 3)], dim=1))
            logits = []
            for teacher in teachers:
                head = [teacher.weights[f"net.head.{name}"].double() for name in ("weight", "bias")]
                logits.append(F.linear(features, *head))
            counts = torch.stack([teacher.extras["counts"] for teacher in teachers]).double()
            if settings:
                loss = F.cross_entropy(sum(logits) / len(logits), labels)
            else:
                loss = likeness(features, noise)
                for of_head, count in zip(logits, counts, strict=True):
                    share = (count / counts.sum(0))[labels]
                    loss = loss + (share * F.cross_entropy(of_head, labels, reduction="none")).mean()
            adam.zero_grad()
            loss.backward()
            adam.step()
        for name, value in entries_of(net).items():
            torch.testing.assert_close(side.after[r][name], value)
    steps = {int(step) for step in side.steps.values()}
    assert steps == {4 * LITTLE["gen_steps"]}
    assert all(value.dtype == torch.float64 for value in side.generator.values())


def test_the_generator_learns_classes_that_the_cohort_has_and_clients_those_that_anybody_has_had():
    x, y = samples(30)
    by_class = [x[y == c][:4] for c in range(3)]
    data = toy_data((4, 4, 4), schedule=[[1], [1], [2], [1], [2]])
    data.source.train = (torch.cat(by_class), torch.arange(3).repeat_interleave(4))
    loop = fit(fedgen(Watched, gen_batch=30), 5, data)
    side = loop.server_module
    of_server = [set().union(*(labels.tolist() for labels, _ in step)) for step in side.drawn]
    assert of_server == [{1}, {1}, {2}, {1}, {2}]
    of_clients = []
    for notes in loop.client.noted.values():
        of_clients.append(set().union(*(n.tolist() for n in notes[1:] if n.dtype == torch.int64)))
    assert of_clients == [set(), {1}, {1}, {1, 2}, {1, 2}]
    assert side.seen["classes"].tolist() == [False, True, True]
    flags = [extras["seen"].nonzero().flatten().tolist() for round_idx, extras in side.sent if round_idx]
    assert flags == [[1], [1], [1, 2], [1, 2]], "flags stay as they were sent"


@pytest.mark.parametrize(("precision", "dtype"), [("32-true", torch.float32), ("64-true", torch.float64)])
def test_the_generator_of_the_rounds_before_is_sent_in_the_type_of_the_weights(precision, dtype):
    data = toy_data(SIZES, dtype=dtype, schedule=PARTIAL)
    side = fit(fedgen(Watched), 5, data, precision=precision).server_module
    for round_idx, extras in side.sent:
        if not round_idx:
            assert not extras
            continue
        expected = {name: value.to(dtype) for name, value in side.after[round_idx - 1].items()}
        assert equal(extras["generator"], expected), "it stays as it was sent"


def test_a_second_fit_begins_without_the_generator_as_the_first_did():
    loop = FederatedLoop(fedgen(Watched), seed=3)
    for _ in range(2):
        fit(None, 2, loop=loop)
    sent = [bool(extras) for _, extras in loop.server_module.sent]
    assert sent == ([False] * 5 + [True] * 5) * 2


def test_no_more_than_the_generator_flags_and_counts_travel():
    watch = Updates()
    loop = fit(fedgen(), 5, toy_data(SIZES, schedule=PARTIAL), callbacks=[watch])
    k, h, d, classes = 3, 4, 8, 3
    size = (k + classes + 1) * h + 4 * h + (h + 1) * d
    plain = fit(FedAvg(net=BatchNormNet, optimizer=sgd()), 5, toy_data(SIZES, schedule=PARTIAL))
    more = loop.round_metrics["comm/bytes_down"] - plain.round_metrics["comm/bytes_down"]
    assert more == len(PARTIAL[4]) * (4 * size + classes)
    more = loop.round_metrics["comm/bytes_up"] - plain.round_metrics["comm/bytes_up"]
    assert more == len(PARTIAL[4]) * 8 * classes
    assert all(set(update.extras) == {"counts"} for updates in watch.rounds for update in updates.values())


def test_nothing_is_sent_before_anybody_had_data():
    data = toy_data(SIZES, schedule=[[1], [1], [0, 2], [2]])
    loop = fit(fedgen(Watched), 4, data)
    assert [bool(extras) for _, extras in loop.server_module.sent] == [False, False, False, False, True]
    assert all(value.isfinite().all() for value in weights_of(loop).values())


def test_draws_differ_from_step_to_step_round_to_round_and_client_to_client_and_are_keyed():
    runs = [fit(fedgen(Watched, beta=1.0, gen_batch=4), 3, toy_data((7, 9))) for _ in range(2)]
    found = []
    for loop in runs:
        of_server = [noise for steps in loop.server_module.drawn for _, noise in steps]
        of_clients = [n[:4] for notes in loop.client.noted.values() for n in notes[1:] if n.is_floating_point()]
        found.append([*of_server, *(noise.double() for noise in of_clients if len(noise) == 4)])
    first, again = found
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert len(first) > 20
    assert len({float(noise[0, 0]) for noise in first}) == len(first)
    assert all(noise.min() >= 0 for noise in first)
    assert all(noise.max() < 1 for noise in first)


# --- the client


def test_its_terms_weigh_by_the_configured_batch_size_and_fade():
    loop = fit(fedgen(Watched, alpha=2.0, beta=3.0, decay=0.5), 4, toy_data((7, 9), batch_size=8))
    for (round_idx, _), (buffers, *_) in loop.client.noted.items():
        if not round_idx:
            assert "generator" not in buffers
            continue
        assert buffers["alpha"] == pytest.approx(2.0 * 0.5**round_idx * LITTLE["gen_batch"] / 8)
        assert buffers["beta"] == pytest.approx(3.0 * 0.5**round_idx)
    loop = fit(fedgen(Watched, decay=1.0), 2, toy_data((7, 9), batch_size="full"))
    of_round_1 = [notes[0]["alpha"] for (round_idx, _), notes in loop.client.noted.items() if round_idx]
    assert of_round_1 == pytest.approx([LITTLE["gen_batch"] / 7, LITTLE["gen_batch"] / 9])


class Weightless(FedGen):
    """Draws and computes the terms of FedGen, and gives them no weight."""

    def receive(self, broadcast, local):
        super().receive(broadcast, local)
        if self.round:
            self.round.update(alpha=0.0, beta=0.0)


def test_round_0_is_fedavg_and_draws_for_the_terms_shift_none_of_the_net_s():
    """The net has dropout."""
    data = partial(toy_data, SIZES, schedule=PARTIAL)
    for rounds, kind in ((1, FedGen), (3, Weightless)):
        plain = fit(FedAvg(net=BatchNormNet, optimizer=sgd()), rounds, data())
        ours = fit(fedgen(kind, beta=1.0), rounds, data())
        assert equal(clone(ours.client.state_dict()), clone(plain.client.state_dict()))
    other = fit(fedgen(), 3, data()).client.state_dict()
    assert not equal(clone(other), clone(plain.client.state_dict()))


@pytest.mark.parametrize("term", ["alpha", "beta"])
def test_each_term_goes_alone(term):
    loop = fit(fedgen(**{"alpha": 0.0, "beta": 0.0, term: 1.0}), 3)
    logged = set(loop.round_metrics)
    assert ("train/generated" in logged, "train/kd" in logged) == (term == "alpha", term == "beta")


def test_what_the_head_says_of_generated_features_is_a_constant_in_the_divergence():
    """Its gradient in the head is that of the local logits alone."""
    client = fedgen(beta=1.0, net=Small, num_classes=3, input_shape=(4,))
    client.log = lambda *args: None
    x, y = samples(5)
    entries = {name: value.float() for name, value in drawn(num_classes=3, hidden=4, width=6).items()}
    noise = torch.rand(5, 3)
    client.noise = lambda size: noise
    client.alpha = 0.0
    client.context.round |= {"generator": entries, "beta": 2.0}
    client.training_step((x, y), 0).backward()
    net = client.built_net
    with torch.no_grad():
        teacher = net.head(generated(entries, y, noise)).softmax(1)
    logits = net(x)
    loss = F.cross_entropy(logits, y) + 2.0 * F.kl_div(logits.log_softmax(1), teacher, reduction="batchmean")
    (expected,) = torch.autograd.grad(loss, [net.head.weight])
    torch.testing.assert_close(net.head.weight.grad, expected)


# --- identities, resume, faults


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"personal": "net.head.*"},
        {"aggregator": partial(DPFedAvg, noise_multiplier=1.0, delta=0.01, clip=0.5)},
    ],
)
def test_with_both_coefficients_0_it_is_fedavg_and_allocates_sends_and_refuses_nothing(settings):
    settings = {name: value if isinstance(value, str) else value() for name, value in settings.items()}
    data = partial(toy_data, SIZES, sampling="poisson", participation=0.8)
    plain = fit(FedAvg(net=BatchNormNet, optimizer=sgd()), 3, data(), **settings)
    again = {
        name: value if isinstance(value, str) else type(value)(1.0, delta=0.01, clip=0.5)
        for name, value in settings.items()
    }
    ours = fit(fedgen(alpha=0.0), 3, data(), **again)
    assert equal(weights_of(ours), weights_of(plain))
    assert not ours.server_module.state_dict()
    assert {**ours.round_metrics} == {**plain.round_metrics}


def test_with_both_coefficients_0_it_sends_nothing_under_an_attack_either():
    plain = fit(sign_flip(FedAvg(net=BatchNormNet, optimizer=sgd()), attackers=[1]), 3)
    ours = fit(sign_flip(fedgen(alpha=0.0), attackers=[1]), 3)
    assert equal(weights_of(ours), weights_of(plain))
    for way in ("comm/bytes_down", "comm/bytes_up"):
        assert ours.round_metrics[way] == plain.round_metrics[way]


class Headless(Backbone):
    """Calls its head otherwise."""

    def __init__(self, num_classes, input_shape):
        super().__init__()
        self.classifier = nn.Linear(4, num_classes)

    def features(self, x):
        return x

    def forward(self, x):
        return self.classifier(x)


def test_with_both_coefficients_0_a_net_needs_no_head():
    assert fit(fedgen(alpha=0.0, net=Headless), 2).round_metrics["train/ce"] > 0


class HeadOnly(Backbone):
    def __init__(self, num_classes, input_shape):
        super().__init__()
        self.head = nn.Linear(4, num_classes, bias=False)

    def features(self, x):
        return x


class Frozen(BatchNormNet):
    def __init__(self, num_classes, input_shape):
        super().__init__(num_classes, input_shape)
        self.head.requires_grad_(False)


@pytest.mark.parametrize("net", [HeadOnly, Frozen])
def test_a_head_without_bias_or_body_and_one_that_is_frozen_and_not_sent_teach(net):
    loop = fit(fedgen(Watched, net=net, beta=1.0), 3)
    assert len(loop.server_module.given) == 3
    assert all(value.isfinite().all() for value in weights_of(loop).values())
    if net is Frozen:
        for heads, _ in loop.server_module.given:
            assert all(torch.equal(head["net.head.weight"], loop.client.net.head.weight) for head in heads)


def test_a_resumed_run_has_the_same_bits(tmp_path):
    """The moments of Adam, the step and the statistics of BatchNorm live on."""
    data = partial(toy_data, SIZES, schedule=PARTIAL)
    whole = fit(fedgen(beta=1.0), 5, data())
    half = fit(fedgen(beta=1.0), 2, data())
    half.trainer.save_checkpoint(tmp_path / "half.ckpt")
    continued = fit(fedgen(beta=1.0), 5, data(), ckpt_path=tmp_path / "half.ckpt")
    assert equal(weights_of(continued), weights_of(whole))
    assert equal(continued.server_module.state_dict(), whole.server_module.state_dict())
    kept = whole.server_module.state_dict()
    assert kept["first_moments.hidden/weight"].any()
    assert kept["second_moments.hidden/weight"].any()


class Breaks(Perceptron):
    """Gives NaN for a batch of nine: the client with nine samples."""

    def forward(self, x):
        return super().forward(x) * (torch.nan if len(x) == 9 else 1.0)


def test_a_skipped_client_is_an_absent_one():
    """It has no say in G, and its classes count as not seen."""
    with_it = toy_data(SIZES, batch_size="full", schedule=[[0, 2, 4]] * 3)
    without = toy_data(SIZES, batch_size="full", schedule=[[0, 4]] * 3)
    ours = fit(fedgen(net=Breaks), 3, with_it, nonfinite="skip")
    theirs = fit(fedgen(net=Breaks), 3, without)
    assert ours.round_metrics["train/skipped"] == 1
    assert equal(weights_of(ours), weights_of(theirs))


class BreaksInRound1(FedGen):
    def training_step(self, batch, batch_idx):
        if "generator" in self.round and self.fails:
            raise RuntimeError("no memory")
        return super().training_step(batch, batch_idx)


class Marks(pl.Callback):
    def __init__(self):
        self.states = []

    def on_train_epoch_end(self, trainer, loop):
        self.states.append(clone(loop.server_module.state_dict()))


def test_a_round_that_is_given_up_leaves_the_generator_as_it_was():
    client = fedgen(BreaksInRound1)
    client.fails = True
    marks = Marks()
    fit(client, 3, on_error="skip", patience=5, callbacks=[marks])
    first, *others = marks.states
    assert first["generator.norm/running_mean"].any()
    assert all(equal(first, other) for other in others)


class ShortOfSteps(FedGenServer):
    """Fails once in the middle of G's training."""

    failed = False

    def draws(self, step, classes):
        if step == 2 and self.server.round_idx == 1 and not self.failed:
            self.failed = True
            raise KeyboardInterrupt
        return super().draws(step, classes)


class FailsOnce(FedGen):
    server_class = ShortOfSteps


def test_a_stop_in_the_middle_of_the_generator_s_training_is_undone(tmp_path):
    loop = FederatedLoop(fedgen(FailsOnce), seed=3)
    after_1 = fit(fedgen(), 1).server_module.state_dict()
    with suppress(KeyboardInterrupt, SystemExit):
        fit(None, 3, loop=loop)
    assert loop.server_module.failed
    assert equal(clone(loop.server_module.state_dict()), clone(after_1))


def test_a_robust_rule_moves_the_weights_and_leaves_the_generator_s_teachers_alone():
    mean = fit(fedgen(Watched), 1)
    median = fit(fedgen(Watched), 1, aggregator=MedianAggregator())
    assert equal(mean.server_module.state_dict(), median.server_module.state_dict())
    assert not equal(clone(mean.client.state_dict()), clone(median.client.state_dict()))


def test_clients_are_trained_one_by_one_although_a_stack_is_asked_for():
    alone = fit(fedgen(net=Small), 3)
    asked = fit(fedgen(net=Small), 3, chunk=3)
    assert "FedGen" in asked.engine.why_not()
    assert equal(weights_of(alone), weights_of(asked))


def test_it_fools_the_heads():
    """After some rounds they find the classes that its features were made for."""
    loop = fit(fedgen(gen_steps=200, gen_batch=32), 3)
    labels = torch.arange(3).repeat_interleave(50)
    noise = torch.rand(150, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    features = generated(loop.server_module.generator, labels, noise).float()
    assert (loop.client.net.head(features).argmax(1) == labels).float().mean() > 0.9


# --- refusals


@pytest.mark.parametrize(
    ("client", "settings", "sentence"),
    [
        (fedgen, {"personal": "net.head.*"}, "'net.head.weight' stays with each client; leave model.personal unset"),
        (fedgen, {"personal": "*.bias"}, "'net.head.bias' stays with each client"),
        (partial(fedgen, net=Headless), {}, "FedGen needs a net whose last layer is a torch.nn.Linear called head"),
        (partial(fedgen, net=partial(HeterogeneousNets, nets=[Small, HeadOnly])), {}, "FedGen"),
        (
            fedgen,
            {"aggregator": partial(DPFedAvg, noise_multiplier=1.0, delta=0.01, clip=0.5)},
            "FedGen also sends label counts",
        ),
    ],
)
def test_what_it_cannot_do_is_refused_at_start(client, settings, sentence):
    made = {name: value if isinstance(value, str) else value() for name, value in settings.items()}
    data = toy_data(SIZES, sampling="poisson", participation=0.5)
    watch = Updates()
    with pytest.raises(ValueError, match=sentence):
        fit(client(), 1, data, callbacks=[watch], **made)
    assert not any(watch.rounds)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"alpha": -1.0}, "alpha must be at least 0, got -1.0; 0 leaves its part out"),
        ({"beta": math.nan}, "beta must be at least 0"),
        ({"decay": 0.0}, "decay must be above 0"),
        ({"decay": 1.1}, "decay must be at most 1, got 1.1"),
        ({"ensemble": "mean"}, "ensemble must be one of losses, logits, got 'mean'"),
        ({"gen_batch": 1}, "gen_batch must be at least 2, got 1; the generator's BatchNorm needs two"),
        ({"gen_steps": 0}, "gen_steps must be at least 1"),
        ({"noise_dim": 0}, "noise_dim must be at least 1"),
        ({"gen_hidden": 0}, "gen_hidden must be at least 1"),
        ({"gen_lr": 0.0}, "gen_lr must be above 0"),
        ({"gen_wd": -0.1}, "gen_wd must be at least 0"),
        ({"diversity": -1.0}, "diversity must be at least 0"),
        ({"module": Regression(), "net": None}, "FedGen needs the logits"),
    ],
)
def test_wrong_settings_are_refused(settings, sentence):
    with pytest.raises(ValueError, match=sentence):
        FederatedLoop(FedGen(**settings))
