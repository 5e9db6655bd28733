"""Transforms between client and sum: their order, what is counted, norm clipping, their state."""

import csv
from dataclasses import replace
from functools import partial

import pytest
import pytorch_lightning as pl
import torch
from torch import nn

from fl_lightning import Aggregator, FederatedLoop
from fl_lightning.aggregation import NormClip, UpdateTransform
from fl_lightning.attacks import noise, sign_flip
from fl_lightning.functional import state as S
from fl_lightning.members.faults import ClientError, FaultError
from fl_lightning.methods import FedAvg, FedEXPAggregator
from fl_lightning.types import Broadcast, ClientUpdate
from tests.commands import TINY, say
from tests.hooks.toy import BYTES, Median, Updates
from tests.toys import SIZES, BatchNormNet, equal, fit, sgd, toy_data, weights_of


def client():
    return FedAvg(net=BatchNormNet, optimizer=sgd())


# --- order, and what is counted


class Notes(UpdateTransform):
    """Notes when it is called, and what it sees."""

    def __init__(self, name, calls):
        super().__init__()
        self.name = name
        self.calls = calls

    def on_client(self, update, broadcast):
        self.calls.append((self.name, "client", update.client_id))
        return replace(update, extras={**update.extras, self.name: float(len(update.extras))})

    def on_server(self, update, broadcast):
        finite = all(value.isfinite().all() for value in update.weights.values())
        self.calls.append((self.name, "server", update.client_id, finite, int(update.num_samples)))
        assert broadcast.round_idx == self.server.round_idx
        return update


def test_the_guard_comes_first_then_the_transforms_in_their_order():
    """On the client the update is as it was trained; on the server one that is skipped is already replaced."""
    data = toy_data((7, 12))
    calls = []
    data.setup()
    data.split("train").x[8] = torch.nan  # of client 1
    watch = Updates()
    transforms = [Notes("a", calls), Notes("b", calls)]
    loop = fit(client(), 1, data, callbacks=[watch], nonfinite="skip", transforms=transforms)
    sides = [("client",), ("server",)]
    assert [call[:3] for call in calls] == [(n, *side, c) for c in range(2) for side in sides for n in "ab"]
    assert [call[3:] for call in calls if call[1] == "server"] == [(True, 7)] * 2 + [(True, 0)] * 2
    assert watch.rounds[0][0].extras == {"a": 0.0, "b": 1.0}
    assert loop.round_metrics["train/skipped"] == 1
    assert loop.round_metrics["comm/bytes_up"] == 2 * (BYTES + 2 * 8)  # what `on_client` added is sent


class Bits(UpdateTransform):
    """Sends the sign of what every entry moved, and one length for each; all else stays at home."""

    def on_client(self, update, broadcast):
        moved = {n: update.weights[n] - broadcast.weights[n] for n in self.server.trainable}
        packed = {n: (value.sign().to(torch.int8), value.abs().mean()) for n, value in moved.items()}
        return replace(update, weights=None, extras={**update.extras, "packed": packed})

    def on_server(self, update, broadcast):
        packed = update.extras["packed"]
        moved = {n: broadcast.weights[n] + sign * length for n, (sign, length) in packed.items()}
        return replace(update, weights={**broadcast.weights, **moved})


def test_compression_is_counted_as_it_is_sent_and_undone_before_the_rule():
    loop = fit(client(), 1, transforms=[Bits()])
    assert loop.round_metrics["comm/bytes_down"] == 5 * BYTES
    signs = sum(value.numel() for value in loop.client.parameters())
    assert loop.round_metrics["comm/bytes_up"] == 5 * (4 * 6 + signs)  # six lengths, and int8
    start = fit(client(), 0).client.state_dict()
    for name, value in loop.client.state_dict().items():
        same = torch.equal(value, start[name])
        assert same if name not in loop.server.trainable else not same or name == "net.body.0.bias"


class LeavesOut(UpdateTransform):
    """A client, as the device would say it."""

    def on_server(self, update, broadcast):
        keeps = torch.tensor(update.client_id != 1)
        return replace(update, num_samples=keeps.to(torch.int64) * update.num_samples)


@pytest.mark.parametrize("rule", [Aggregator, FedEXPAggregator, Median])
@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_an_update_without_samples_is_left_out_by_every_rule(rule, weighting):
    settings = {"weighting": weighting, "personal": "net.head.*"}
    left = fit(client(), 1, toy_data(SIZES), aggregator=rule(), transforms=[LeavesOut()], **settings)
    absent = fit(client(), 1, toy_data(SIZES, schedule=[[0, 2, 3, 4]]), aggregator=rule(), **settings)
    for name, value in weights_of(absent).items():
        torch.testing.assert_close(weights_of(left)[name], value)


class Replaces(UpdateTransform):
    """An entry of the update that the guard has looked at, in place."""

    def on_server(self, update, broadcast):
        update.weights["net.head.bias"] = torch.zeros(3)
        return update


@pytest.mark.parametrize("rule", [Aggregator, Median])
def test_an_entry_that_a_transform_replaces_is_what_the_rule_takes(rule):
    loop = fit(client(), 1, aggregator=rule(), transforms=[Replaces()])
    assert not loop.client.net.head.bias.any()


# --- norm clipping


class Server:
    """What a transform sees."""

    trainable = ("w", "b")

    def __init__(self, weights):
        self.weights = weights
        self.module = nn.Module()
        self.module.register_buffer("mean", torch.zeros(2))


@pytest.mark.parametrize(("buffers", "bounded"), [("clip", ("w", "b", "mean")), ("keep", ("w", "b"))])
def test_norm_clipping_is_the_formula(buffers, bounded):
    """Δ · min(1, τ/‖Δ‖), one norm over all float entries; a client within the bound stays bit for bit."""
    start = {"w": torch.randn(3, 2), "b": torch.randn(2), "mean": torch.zeros(2), "n": torch.tensor(3)}
    clip = NormClip(0.5, buffers)
    clip.setup(Server(start))
    for size in (0.0, 1e-3, 2.0, 1e4):
        moved = {name: size * torch.randn(start[name].shape) for name in bounded}
        rest = {"mean": torch.ones(2), "n": torch.tensor(9)}
        weights = {**start, **rest, **S.add({n: start[n] for n in moved}, moved)}
        update = ClientUpdate(0, 4, 2, 0.1, dict(weights))
        new = clip.on_server(update, Broadcast(0, "train", start)).weights
        norm = sum((weights[n].double() - start[n].double()).square().sum() for n in moved).sqrt().item()
        for name, value in weights.items():
            if name in moved and norm > 0.5:
                wanted = start[name].double() + 0.5 / norm * (value.double() - start[name].double())
                assert torch.equal(new[name], wanted.float())
            else:
                assert torch.equal(new[name], value)


def test_it_measures_from_what_the_client_was_sent():
    start = {"w": torch.zeros(2), "b": torch.zeros(1)}
    clip = NormClip(max_norm=1.0)
    clip.setup(Server(start))
    sent = {"w": torch.tensor([3.0, 4.0])}
    update = ClientUpdate(0, 1, 1, 0.1, {"w": torch.tensor([3.0, 6.0]), "b": torch.zeros(1)})
    assert clip.on_server(update, Broadcast(0, "train", sent)).weights["w"].tolist() == [3.0, 5.0]


def test_clients_share_the_bound_in_a_federation():
    watch = Updates()
    loop = fit(client(), 2, callbacks=[watch], transforms=[NormClip(0.05)])
    names = [name for name, value in loop.server.weights.items() if value.is_floating_point()]
    for updates in watch.rounds[1].values():  # in round 1 from what round 0 left
        moved = S.sub({n: updates.weights[n].double() for n in names}, {n: watch.after[0][n].double() for n in names})
        assert S.inner(moved, moved).sqrt().item() == pytest.approx(0.05, rel=1e-4)
    assert equal(weights_of(fit(client(), 2, transforms=[NormClip(1e6)])), weights_of(fit(client(), 2)))


def moves(loop, start):
    """Norm of what all shared float entries moved."""
    after = loop.client.state_dict()
    return sum((after[n] - v).double().square().sum() for n, v in start.items() if v.is_floating_point()).sqrt().item()


def test_it_bounds_buffers_too():
    """BatchNorm's running statistics are entries like others, unless they are kept."""
    start = {name: value.clone() for name, value in fit(client(), 0).client.state_dict().items()}
    assert moves(fit(client(), 1, transforms=[NormClip(1e-6)]), start) < 1.01e-6
    assert moves(fit(client(), 1, transforms=[NormClip(1e-6, buffers="keep")]), start) > 1e-2
    with pytest.raises(ValueError, match="buffers must be one of clip, keep, got 'drop'"):
        NormClip(1.0, buffers="drop")


class Squares(FedEXPAggregator):
    """Keeps what FedEXP was told of each client, and what of it was added."""

    def setup(self):
        super().setup()
        self.told = []

    def add(self, update):
        super().add(update)
        moved = [(update.weights[n] - self.server.weights[n]).double().square().sum() for n in self.server.trainable]
        self.told.append((float(update.extras["square"]), float(sum(moved))))


def test_the_statistics_of_a_rule_are_of_what_is_added():
    """After every transform; they are taken at the server and are no traffic."""
    rule = Squares()
    loop = fit(client(), 1, aggregator=rule, transforms=[NormClip(0.05), Feeds()])
    assert len(rule.told) == len(SIZES)
    for told, added in rule.told:
        assert told == pytest.approx(added, rel=1e-12)
    assert loop.round_metrics["comm/bytes_up"] == len(SIZES) * BYTES


def test_a_clipped_attack_does_not_grow_by_fedexps_step():
    """Two of five clients flip their sign and send a hundred times what they learned."""
    start = {name: value.clone() for name, value in fit(client(), 0).client.state_dict().items()}
    for rule in (None, FedEXPAggregator()):
        attack = sign_flip(client(), [1, 3], factor=100.0)
        assert moves(fit(attack, 3, aggregator=rule, transforms=[NormClip(0.1)]), start) <= 0.3001


class Gentle(UpdateTransform):
    """What an honest client does to its own update: it sends a thousandth of what it has learned."""

    def on_client(self, update, broadcast):
        moved = {n: update.weights[n] - broadcast.weights[n] for n in self.server.trainable}
        return replace(
            update, weights={**update.weights, **{n: broadcast.weights[n] + v / 1000 for n, v in moved.items()}}
        )


@pytest.mark.parametrize(("attack", "least"), [(partial(sign_flip, factor=1e4), 0.1), (partial(noise, std=0.1), 0.1)])
def test_an_attack_replaces_what_the_honest_client_side_has_made(attack, least):
    """It is not made gentle, and the honest clients still are."""
    watch = Updates()
    before = S.clone(fit(client(), 0).client.state_dict())
    fit(attack(client(), [1]), 1, callbacks=[watch], transforms=[Gentle()])
    norms = {}
    for client_id, update in watch.rounds[0].items():
        moved = S.sub(
            {n: update.weights[n] for n in ("net.head.weight",)}, {"net.head.weight": before["net.head.weight"]}
        )
        norms[client_id] = S.inner(moved, moved).sqrt().item()
    assert norms.pop(1) > least
    assert max(norms.values()) < 1e-2


class Drops(UpdateTransform):
    """Sends no weights."""

    def on_client(self, update, broadcast):
        return replace(update, weights=None)


def test_an_attack_on_weights_that_are_not_sent_is_refused():
    with pytest.raises(ValueError, match="SignFlipFedAvg poisons the weights that are sent, but a transform sends"):
        fit(sign_flip(client(), [1]), 1, transforms=[Drops()])


class Moves(UpdateTransform):
    """Sends what every entry moved."""

    def on_client(self, update, broadcast):
        return replace(update, weights={n: v - broadcast.weights[n] for n, v in update.weights.items()})

    def on_server(self, update, broadcast):
        return replace(update, weights={n: v + broadcast.weights[n] for n, v in update.weights.items()})


def test_an_attack_comes_before_what_has_two_sides():
    plain, coded = (fit(sign_flip(client(), [1]), 1, transforms=found) for found in ([], [Moves()]))
    for name, value in weights_of(plain).items():
        torch.testing.assert_close(weights_of(coded)[name], value)
    with pytest.raises(ValueError, match=r"^NormClip bounds how far .* but Moves sends something else"):
        FederatedLoop(client(), transforms=[NormClip(0.1), Moves()])


class Renames(UpdateTransform):
    """Sends the entries by other names, end to end."""

    def on_client(self, update, broadcast):
        return replace(update, weights={f"{n}/flat": v.reshape(-1) for n, v in update.weights.items()})

    def on_server(self, update, broadcast):
        return replace(
            update, weights={n: update.weights[f"{n}/flat"].view_as(v) for n, v in broadcast.weights.items()}
        )


def test_other_names_on_the_way_skip_nobody():
    data = toy_data()
    data.setup()
    data.split("train").x[8] = torch.nan  # of client 1
    loop = fit(client(), 1, data, transforms=[Renames()], nonfinite="skip")
    assert [fault.client_id for fault in loop.skipped] == [1]


class Masked(BatchNormNet):
    """With a mask of −∞ among its buffers."""

    def __init__(self, num_classes, input_shape):
        super().__init__(num_classes, input_shape)
        self.register_buffer("mask", torch.full((3,), -torch.inf))


def test_a_mask_does_not_keep_from_clipping():
    made = {"net": Masked, "optimizer": sgd()}
    start = {n: v.clone() for n, v in fit(FedAvg(**made), 0).client.state_dict().items() if n != "net.mask"}
    assert moves(fit(FedAvg(**made), 1, transforms=[NormClip(1e-6)]), start) < 1.01e-6


class Claims(UpdateTransform):
    """Gives client 2 more samples than it has, at the server."""

    def __init__(self, samples):
        super().__init__()
        self.samples = samples

    def on_server(self, update, broadcast):
        wrong = update.client_id == 2 and self.server.round_idx == 1
        return replace(update, num_samples=self.samples) if wrong else update


@pytest.mark.parametrize("samples", [torch.tensor(10**15), torch.tensor(-5)])
def test_a_number_of_samples_on_the_device_is_checked_too(samples):
    with pytest.raises(FaultError, match=r"client 2 was given \S+ samples in round 1"):
        fit(client(), 2, transforms=[Claims(samples)])
    loop = fit(client(), 2, transforms=[Claims(samples)], nonfinite="skip")
    absent = fit(client(), 2, toy_data(schedule=[[0, 1, 2, 3, 4], [0, 1, 3, 4]]), transforms=[Claims(samples)])
    assert [fault.client_id for fault in loop.skipped] == [2]
    assert equal(weights_of(loop), weights_of(absent))


@pytest.mark.parametrize(
    ("settings", "bound"),
    [
        ({"transforms": [NormClip(0.1), Bits()]}, "NormClip"),
        ({"transforms": [Bits(), NormClip(0.1)]}, "NormClip"),
        ({"transforms": [Bits()], "max_update_norm": 3.0}, r"model\.faults\.max_update_norm=3\.0"),
    ],
)
@pytest.mark.parametrize("mode", ["error", "skip"])
def test_a_bound_beside_a_transform_that_sends_something_else_is_refused_by_both_names(settings, bound, mode):
    """Under skip, too: no client is at fault."""
    settings = {"nonfinite": mode, "on_error": mode, **settings}
    with pytest.raises(ValueError, match=rf"^{bound} bounds how far .* but Bits sends something else in their place"):
        fit(client(), 1, **settings)


class Halves(Bits):
    """Sends float16 weights."""

    def on_client(self, update, broadcast):
        return replace(update, weights={n: v.half() for n, v in update.weights.items()})

    def on_server(self, update, broadcast):
        return replace(update, weights={n: v.to(broadcast.weights[n].dtype) for n, v in update.weights.items()})


def test_other_types_on_the_way_are_something_else_too():
    assert fit(client(), 1, transforms=[Halves()]).round_metrics["global/acc"] > 0
    with pytest.raises(ValueError, match=r"NormClip bounds .* but Halves sends something else"):
        fit(client(), 1, transforms=[Halves(), NormClip(0.1)])


@pytest.mark.parametrize("mode", ["error", "skip"])
def test_the_guard_judges_what_was_trained_where_no_weights_are_sent(mode):
    """The sign of NaN is a whole number like others."""
    data = toy_data()
    data.setup()
    data.split("train").x[8] = torch.nan  # of client 1
    if mode == "error":
        with pytest.raises(FaultError, match="client 1 returned NaN or infinite values in round 0"):
            fit(client(), 1, data, transforms=[Bits()])
    else:
        loop = fit(client(), 1, data, transforms=[Bits()], nonfinite="skip")
        assert [fault.client_id for fault in loop.skipped] == [1]


def test_a_bound_of_zero_is_refused():
    with pytest.raises(ValueError, match="max_norm must be above 0, got 0"):
        NormClip(max_norm=0)


@pytest.mark.usefixtures("without_pictures")
def test_transforms_in_yaml(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    clip = "{class_path: fl_lightning.aggregation.NormClip, init_args: {max_norm: 0.0001}}"
    (tmp_path / "clip.yaml").write_text(f"trainer: {{max_epochs: 1}}\nmodel: {{transforms: [{clip}]}}\n")
    losses = []
    for more in ("--trainer.max_epochs 1", "-c clip.yaml"):
        said = say(f"fit {TINY} {more}")
        assert said.code == 0, said.err
        path = sorted(tmp_path.glob("runs/*/*/metrics.csv"))[-1]
        with path.open() as file:
            losses.append([float(row["global/loss"]) for row in csv.DictReader(file)])
    assert losses[0] != losses[1]
    saved = sorted(tmp_path.glob("runs/*/*/config.yaml"))[-1].read_text()
    assert "max_norm: 0.0001" in saved


# --- state


class Feeds(UpdateTransform):
    """Halves what moves, and adds what it kept back in the rounds before to the next client's."""

    def __init__(self):
        super().__init__()
        self.rest = {}
        self.updates = 0

    def on_server(self, update, broadcast):
        start = {n: broadcast.weights[n] for n in self.server.trainable}
        moved = S.sub({n: update.weights[n] for n in start}, start)
        moved = S.add(moved, self.rest) if self.rest else moved
        self.rest = S.scale(moved, 0.5)
        self.updates = self.updates + 1
        return replace(update, weights={**update.weights, **S.add(start, self.rest)})

    def state_dict(self):
        return {"rest": self.rest, "updates": self.updates}

    def load_state_dict(self, state):
        self.rest = state["rest"]
        self.updates = state["updates"]


class Save(pl.Callback):
    def __init__(self, hook, path):
        setattr(self, hook, lambda trainer, loop, *_: self.save(trainer, path))

    @staticmethod
    def save(trainer, path):
        if trainer.current_epoch == 1 and not path.exists():
            trainer.save_checkpoint(path)


@pytest.mark.parametrize("hook", ["on_train_epoch_end", "on_client_end", "on_exchange_end"])
def test_a_transform_with_state_resumes_exactly(hook, tmp_path):
    """Also from a checkpoint that was taken within a round: it holds the state before the round."""
    whole = Feeds()
    again = Feeds()
    first = fit(client(), 3, callbacks=[Save(hook, tmp_path / "at.ckpt")], transforms=[whole])
    second = fit(client(), 3, ckpt_path=tmp_path / "at.ckpt", transforms=[again])
    assert equal(weights_of(first), weights_of(second))
    assert whole.updates == again.updates == 3 * len(SIZES)
    assert equal(whole.rest, again.rest)


def test_a_failed_round_leaves_the_state_as_it_was():
    class Fails(pl.Callback):
        def on_client_end(self, trainer, loop, update):
            if trainer.current_epoch == 1 and update.client_id == 3:
                raise ZeroDivisionError

    feeds = Feeds()
    one = Feeds()
    loop = FederatedLoop(client(), transforms=[feeds], seed=3)
    with pytest.raises(ClientError, match="raised ZeroDivisionError"):
        fit(None, 3, loop=loop, callbacks=[Fails()])
    assert equal(weights_of(loop), weights_of(fit(client(), 1, transforms=[one])))
    assert feeds.updates == one.updates == len(SIZES)
    assert equal(feeds.rest, one.rest)


def test_the_checkpoint_of_other_transforms_is_refused(tmp_path):
    fit(client(), 2, callbacks=[Save("on_train_epoch_end", tmp_path / "at.ckpt")], transforms=[Feeds()])
    with pytest.raises(ValueError, match=r"model\.transforms\.0 was .*Feeds, is unset"):
        fit(client(), 3, ckpt_path=tmp_path / "at.ckpt")


def test_before_a_loop_there_is_no_server():
    with pytest.raises(RuntimeError, match="NormClip sees the server"):
        NormClip(1.0).on_server(ClientUpdate(0, 1, 1, 0.1, {"w": nn.Parameter(torch.zeros(1))}), Broadcast(0, "a", {}))
