"""FedKA: its anchors and their loss, its laws, and what each client used in a run."""

from functools import partial

import pytest
import pytorch_lightning as pl
import torch
from torch.nn import functional as F

from fl_lightning.functional.classes import ClassSplit, class_split
from fl_lightning.methods import FedAvg, FedKA
from fl_lightning.methods.fedka import Anchor, anchor_loss, anchor_plan, pick
from fl_lightning.nets import Perceptron
from tests.methods.stacked import stacked_and_alone
from tests.toys import BatchNormNet, equal, fit, sgd, toy_data, weights_of

Small = partial(Perceptron, hidden=(6,))


def fedka(**settings):
    return FedKA(**{"gamma": 0.4, "net": BatchNormNet, "optimizer": sgd(0.05), **settings})


class Watch(pl.Callback):
    """What every client used and its loss at each step, by round and client."""

    def __init__(self):
        self.used = []
        self.losses = []

    def on_train_epoch_start(self, trainer, loop):
        self.used.append({})
        self.losses.append({})

    def on_client_start(self, trainer, loop, client_id):
        inner = loop.parts.services.log
        steps = self.losses[-1].setdefault(client_id, [])

        def log(name, value, *args, **kwargs):
            if name == "train/ka":
                steps.append(float(value.detach()))
            inner(name, value, *args, **kwargs)

        loop.client.__dict__["log"] = log

    def on_client_end(self, trainer, loop, update):
        self.used[-1][update.client_id] = dict(loop.client.round)


def run(client, rounds=2, data=None, **settings):
    watch = Watch()
    loop = fit(client, rounds, data, callbacks=[watch], local_epochs=2, **settings)
    return loop, watch


# --- equations


def test_the_loss_is_that_of_a_loop():
    g = torch.Generator().manual_seed(0)
    received, local = (torch.randn(4, 5, generator=g, dtype=torch.float64) for _ in range(2))
    kept = torch.tensor([True, False, True, True, False])
    valid = torch.tensor([True, True, False, True])
    total = sum(
        (received[a, k].item() - local[a, k].item()) ** 2 for a in range(4) for k in range(5) if valid[a] and kept[k]
    )
    local.requires_grad_()
    loss = anchor_loss(received, local, kept, valid)
    assert loss.item() == pytest.approx(total / 3)
    (gradient,) = torch.autograd.grad(loss, local)
    assert not gradient[:, ~kept].any()
    assert not gradient[~valid].any()
    assert anchor_loss(received, local, kept, torch.zeros(4, dtype=torch.bool)) == 0
    assert anchor_loss(received, local, torch.zeros(5, dtype=torch.bool), valid) == 0
    assert anchor_loss(received, received, kept, valid) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_loss_is_finite_at_large_logits(dtype):
    received = torch.full((10, 100), 1e4, dtype=dtype)
    loss = anchor_loss(received, -received, torch.ones(100, dtype=torch.bool), torch.ones(10, dtype=torch.bool))
    assert loss.dtype == torch.float32
    assert loss.isfinite()


def test_missing_classes_are_shared_and_non_dominant_ones_local():
    split = class_split(torch.tensor([0, 3, 90, 0, 7]), gamma=0.07)
    assert anchor_plan(split) == {0: "shared", 1: "local", 3: "shared"}
    assert anchor_plan(split, use_non_dominant=False) == {0: "shared", 3: "shared"}
    assert anchor_plan(split, use_missing=False) == {1: "local"}
    assert anchor_plan(split, use_missing=False, use_non_dominant=False) == {}
    everything = ClassSplit(*(torch.tensor([value]) for value in (False, False, True)))
    assert anchor_plan(everything) == {}


def test_hard_and_proficient_take_the_extreme_loss_and_the_first_of_equals():
    labels = torch.tensor([1, 0, 1, 1, 0])
    losses = torch.tensor([2.0, 9.0, 2.0, 1.0, -1.0])
    assert pick(labels, 1, "hard", losses, None) == 0
    assert pick(labels, 1, "proficient", losses, None) == 3
    drawn = {pick(labels, 1, "random", torch.empty(0), torch.Generator().manual_seed(seed)) for seed in range(30)}
    assert drawn == {0, 2, 3}


# --- runs


@pytest.mark.parametrize(
    "fedavg_equivalent", [{"max_anchors": 0}, {"use_missing": False, "use_non_dominant": False}, {"gamma": 0.0}]
)
def test_without_anchors_it_is_fedavg_bit_for_bit(fedavg_equivalent):
    """γ = 0 too, where every client has every class: nothing to anchor, no anchor's forward."""
    data = partial(toy_data, sizes=(30, 40))
    fedavg = weights_of(fit(FedAvg(net=BatchNormNet, optimizer=sgd(0.05)), 2, data(), local_epochs=2))
    loop, watch = run(fedka(**{"beta": 0.5, **fedavg_equivalent}), data=data())
    assert equal(fedavg, weights_of(loop))
    assert not any(used for row in watch.used for used in row.values())


def test_the_loss_is_exactly_zero_at_the_first_step_of_every_round_and_only_there():
    """With BatchNorm and dropout: anchors run without dropout, on the running statistics that were received."""
    _, watch = run(fedka(beta=0.5), rounds=3)
    trained = [steps for row in watch.losses for steps in row.values() if steps]
    assert trained
    for first, *others in trained:
        assert first == 0
        assert all(loss > 0 for loss in others)


def test_anchors_leave_running_statistics_and_gradients_of_the_batch_alone():
    """The gradient of a step is that of CE on the batch plus that of the anchors through a second, frozen net."""
    client = FedKA(beta=0.5, gamma=0.4, net=partial(BatchNormNet, dropout=0.0), num_classes=3, input_shape=(4,))
    client.log = lambda *args: None
    g = torch.Generator().manual_seed(0)
    x = torch.randn(6, 4, generator=g)
    y = torch.tensor([0, 1, 0, 1, 1, 0])
    anchors = torch.randn(3, 4, generator=g)
    kept = torch.tensor([True, False, True])
    valid = torch.tensor([True, True, False])
    received = torch.randn(3, 3, generator=g)
    client.context.round = {"anchors": anchors, "kept": kept, "valid": valid, "received": received}
    client.net.body[1].running_mean.fill_(0.3)
    before = {name: value.clone() for name, value in client.net.named_buffers()}
    client.training_step((x, y), 0).backward()
    found = {name: parameter.grad.clone() for name, parameter in client.net.named_parameters()}
    moved = {name: value.clone() for name, value in client.net.named_buffers()}

    def gradients(loss):
        return torch.autograd.grad(loss, list(client.net.parameters()))

    for name, value in client.net.named_buffers():
        value.copy_(before[name])
    client.net.eval()
    of_anchors = gradients(0.5 * anchor_loss(received, client.net(anchors), kept, valid))
    client.net.train()
    of_batch = gradients(F.cross_entropy(client.net(x), y))
    for value, a, b in zip(found.values(), of_anchors, of_batch, strict=True):
        torch.testing.assert_close(value, a + b)
    assert all(torch.equal(value, moved[name]) for name, value in client.net.named_buffers())


def test_each_client_has_one_anchor_of_each_class_it_lacks_and_they_are_drawn_anew():
    """Missing classes from the set that all hold, the same in all rounds; the others from its own samples."""
    data = toy_data((9, 1, 0, 16))
    loop, watch = run(fedka(beta=0.1), rounds=6, data=data)
    shared, labels = data.view(0, 0).all("shared")
    local_rows = []
    for row in watch.used:
        assert not row[2], "a client without data has no anchors"
        for client_id in (0, 1, 3):
            used, (x, y) = row[client_id], data.view(client_id, 0).all()
            split = class_split(data.label_counts[client_id], 0.4)
            plan = anchor_plan(split)
            assert torch.equal(used["kept"], ~split.dominant)
            assert int(used["valid"].sum()) == len(plan)
            assert used["anchors"].shape == (3, 4)
            for anchor, (label, source) in zip(used["anchors"], plan.items(), strict=False):
                pool = shared[labels == label] if source == "shared" else x[y == label]
                assert (pool == anchor).all(1).any()
                if source == "local" and len(pool) > 2:
                    local_rows.append((client_id, label, anchor))
    keys = {(client_id, label) for client_id, label, _ in local_rows}
    assert keys
    for key in keys:
        assert len({tuple(anchor.tolist()) for *found, anchor in local_rows if tuple(found) == key}) > 1
    assert not [name for name in loop.state_dict() if "anchor" in name]


def test_the_cut_to_max_anchors_keeps_the_columns():
    data = toy_data((1, 1, 9), schedule=[[0, 1]] * 8)  # one class each: two are missing
    _, watch = run(fedka(max_anchors=1), rounds=8, data=data)
    chosen = set()
    for row in watch.used:
        for client_id, used in row.items():
            assert used["anchors"].shape == (1, 4)
            assert used["valid"].all()
            assert int(used["kept"].sum()) == 2
            chosen.add((client_id, tuple(used["anchors"][0].tolist())))
    assert len(chosen) > 3, "the cut is drawn every round"


def test_all_columns_hold_the_dominant_classes_too_and_nothing_else_changes():
    """The same anchors and divisor; a client whose classes are all dominant still has nothing to hold."""
    data = partial(toy_data, sizes=(9, 1, 0, 16))
    (_, dropped), (_, every) = (run(fedka(beta=0.1, columns=kind), 1, data()) for kind in ("dropped", "all"))
    for client_id, used in every.used[0].items():
        printed = dropped.used[0][client_id]
        assert used.keys() == printed.keys()
        if used:
            assert used["kept"].all()
            assert not printed["kept"].all()
            assert torch.equal(used["anchors"], printed["anchors"])
            assert torch.equal(used["valid"], printed["valid"])
    assert all(steps[0] == 0 for steps in every.losses[0].values() if steps)
    _, nothing = run(fedka(columns="all", gamma=0.0), 1, toy_data((30, 40)))
    assert not any(nothing.used[0].values())


@pytest.mark.parametrize("strategy", ["hard", "proficient"])
def test_strategies_take_the_sample_with_the_extreme_loss_under_the_received_model(strategy):
    class Check(FedKA):
        checked = 0

        def draw_anchors(self, plan, samples, local):
            anchors = super().draw_anchors(plan, samples, local)
            self.net.eval()
            for anchor in anchors:
                if anchor.source == "local":
                    x, y = samples["local"]
                    with torch.no_grad():
                        losses = F.cross_entropy(self.net(x), y, reduction="none")[y == anchor.label]
                        own = F.cross_entropy(self.net(x), y, reduction="none")[anchor.index]
                    assert y[anchor.index] == anchor.label
                    assert own == (losses.max() if strategy == "hard" else losses.min())
                    Check.checked += 1
            self.net.train()
            return anchors

    run(Check(gamma=0.4, strategy=strategy, net=BatchNormNet, optimizer=sgd(0.05)))
    assert Check.checked


def test_a_study_may_draw_anchors_of_its_own():
    class First(FedKA):
        def draw_anchors(self, plan, samples, local):
            return [Anchor(0, "shared", 0)]

    data = toy_data()
    _, watch = run(First(gamma=0.4, net=Small, optimizer=sgd(0.05)), data=data)
    (wanted,) = data.view(0, 0).all("shared")[0][:1]
    assert all(torch.equal(used["anchors"][used["valid"]], wanted[None]) for used in watch.used[0].values() if used)


def test_steps_of_clients_with_other_anchors_stack():
    client = FedKA(beta=0.5, net=BatchNormNet, num_classes=3, input_shape=(4,)).double().eval()
    g = torch.Generator().manual_seed(0)
    x = torch.randn(3, 5, 4, generator=g).double()
    y = torch.randint(3, (3, 5), generator=g)
    buffers = {
        "anchors": torch.randn(3, 3, 4, generator=g).double(),
        "received": torch.randn(3, 3, 3, generator=g).double(),
        "valid": torch.tensor([[True, True, False], [True, False, False], [True, True, True]]),
        "kept": torch.tensor([[True, True, False], [False, True, False], [True, True, True]]),
    }
    torch.testing.assert_close(*stacked_and_alone(client, buffers, x, y))


def test_the_shared_set_is_asked_for_at_start():
    with pytest.raises(ValueError, match=r"FedKA needs the split 'shared'.*shared_per_class"):
        fit(fedka(), data=toy_data(shared_per_class=0))


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"beta": -0.1}, "beta must be at least 0, got -0.1"),
        ({"gamma": float("nan")}, "gamma must be at least 0, got nan"),
        ({"max_anchors": -1}, "max_anchors must be at least 0, got -1"),
        ({"columns": "kept"}, "columns must be one of dropped, all, got 'kept'"),
        ({"strategy": "easy"}, "strategy must be one of random, hard, proficient, got 'easy'"),
    ],
)
def test_wrong_settings_are_refused(settings, sentence):
    with pytest.raises(ValueError, match=sentence):
        FedKA(**settings)


@pytest.mark.parametrize("running", [True, False])
def test_padding_does_not_change_the_logits_of_anchors(running):
    """Rows of zeros would enter the statistics of a batch where there are no running ones."""

    class Looks(FedKA):
        def receive(self, broadcast, local):
            super().receive(broadcast, local)
            rows = self.round["anchors"][self.round["valid"]]
            if len(rows) > 1:
                torch.testing.assert_close(self.round["received"][self.round["valid"]], self.anchor_logits(rows))

    fit(Looks(net=partial(BatchNormNet, running=running), gamma=0.3, optimizer=sgd()), 2)
