"""Codecs in a federation: what is counted, what travels as it is, feedback, what goes down, what is refused."""

import csv
from dataclasses import replace

import pytest
import pytorch_lightning as pl
import torch

from fl_lightning import FederatedLoop
from fl_lightning.aggregation import (
    FP16,
    QSGD,
    Codec,
    GeometricMedianAggregator,
    MedianAggregator,
    NormClip,
    RandomK,
    Sign,
    TopK,
    TrimmedMeanAggregator,
    UpdateTransform,
)
from fl_lightning.attacks import sign_flip
from fl_lightning.functional import state as S
from fl_lightning.members.codec import CODED, RESIDUALS, Encoder
from fl_lightning.members.faults import FaultError
from fl_lightning.methods import SCAFFOLD, DPFedAvg, FedAvg, FedFOMO, FedNTD, Local
from tests.aggregation.test_codecs import Own
from tests.commands import TINY, say
from tests.hooks.toy import BYTES, Linear, Updates
from tests.toys import SIZES, BatchNormNet, equal, fit, sgd, toy_data, weights_of

TRAINED = 4 * 8 + 8 + 2 * 8 + 8 * 3 + 3
"""Numbers that are trained in a BatchNormNet."""
OTHERS = 4 * 2 * 8 + 8
"""Bytes of its buffers, which travel as they are."""


def client(kind=FedAvg, **settings):
    return kind(net=BatchNormNet, optimizer=sgd(), **settings)


class Messages:
    """Notes what every client sends, as it leaves it."""

    def __init__(self, monkeypatch):
        self.sent = []
        on_client = Encoder.on_client

        def noted(member, result):
            coded = on_client(member, result)
            trained = replace(result.update, weights=S.clone(result.update.weights))  # they are live
            self.sent.append((trained, coded.update, result.job))
            return coded

        monkeypatch.setattr(Encoder, "on_client", noted)


@pytest.mark.parametrize(
    ("codec", "size"),
    [
        (FP16(), 2 * TRAINED),
        (QSGD(4), (TRAINED + 1) // 2 + 4),
        (TopK(0.1), 9 * 4 + 8),  # nine places of 7 bits
        (RandomK(0.1), 9 * 4),
        (Sign(), -(-TRAINED // 8) + 4),
        (Own(), 2 * TRAINED),
    ],
    ids=lambda value: type(value).__name__,
)
def test_bytes_are_those_of_what_is_sent(codec, size, monkeypatch):
    messages = Messages(monkeypatch)
    row = fit(client(), 1, codec=codec).round_metrics
    assert row["comm/bytes_up"] == len(SIZES) * (size + OTHERS)
    assert row["comm/bytes_down"] == len(SIZES) * BYTES
    for _, sent, _ in messages.sent:
        content = [value.reshape(-1).view(torch.uint8).numpy().tobytes() for value in sent.weights.values()]
        assert len(b"".join(content)) == size + OTHERS


def test_what_nobody_trains_arrives_exactly(monkeypatch):
    """Statistics, counters, frozen and personal entries; every trained one as the codec has it."""
    messages = Messages(monkeypatch)
    watch = Updates()
    module = client()
    module.build(3, (4,))
    frozen = module.net.body[0].weight.requires_grad_(False).clone()
    loop = fit(module, 2, callbacks=[watch], codec=Sign(), personal=["net.head.bias"])
    for trained, _, job in messages.sent[len(SIZES) :]:
        arrived = watch.rounds[1][job.client_id].weights
        assert arrived.keys() == trained.weights.keys()
        assert {"net.body.0.weight", "net.head.bias"}.isdisjoint(arrived)
    for updates in watch.rounds:
        for update in updates.values():
            assert update.weights["net.body.1.num_batches_tracked"].dtype == torch.int64
    assert torch.equal(loop.client.net.body[0].weight, frozen)
    plain = fit(client(), 1)
    coded = fit(client(), 1, codec=QSGD(2))
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        assert torch.equal(coded.client.net.body[1].get_buffer(name), plain.client.net.body[1].get_buffer(name))


def test_feedback_keeps_what_was_lost_and_sends_it_later(monkeypatch):
    """Σ decoded + residual = Σ moved, by client, up to rounding; where a client was left out of rounds, too."""
    messages = Messages(monkeypatch)
    watch = Updates()
    data = toy_data(schedule=[[0, 1, 2], [1, 3], [0, 1]])
    loop = fit(client(), 3, data, callbacks=[watch], codec=TopK(0.1))
    moved = {}
    arrived = {}
    rounds = iter([0] * 3 + [1] * 2 + [2] * 2)
    for trained, _, job in messages.sent:
        updates = watch.rounds[next(rounds)]
        for total, weights in ((moved, trained.weights), (arrived, updates[job.client_id].weights)):
            change = {n: weights[n].double() - job.broadcast.weights[n].double() for n in loop.server.trainable}
            before = total.get(job.client_id)
            total[job.client_id] = change if before is None else S.add(before, change)
    for client_id in range(4):
        kept = loop.store.memory(client_id)[RESIDUALS]["train/weights"]
        for name, value in moved[client_id].items():
            torch.testing.assert_close(arrived[client_id][name] + kept[name].double(), value, rtol=1e-5, atol=1e-5)
    assert RESIDUALS not in fit(client(), 1, codec=TopK(0.1, feedback=False)).store.memory(0)


class Breaks(pl.Callback):
    """Puts an infinity into what a client keeps back."""

    def on_train_epoch_start(self, trainer, loop):
        if trainer.current_epoch == 1:
            memory = loop.store.memory(1)
            (part,) = memory[RESIDUALS].values()
            part["net.head.bias"] = torch.full((3,), torch.inf)
            loop.store.put({1: (memory, None)}, 0)


@pytest.mark.parametrize("codec", [TopK(0.1), QSGD(2, feedback=True), Sign()], ids=lambda codec: type(codec).__name__)
@pytest.mark.parametrize("where", ["data", "residual"])
def test_what_is_not_finite_is_found_before_it_is_coded(codec, where):
    """Also where the codec does not send the number itself; a client that is left out keeps what it had."""
    data = toy_data()
    data.setup()
    if where == "data":
        data.split("train").x[8] = torch.nan  # of client 1
    settings = {"codec": codec, "callbacks": [Breaks()] if where == "residual" else []}
    with pytest.raises(FaultError, match="client 1 returned NaN or infinite values"):
        fit(client(), 2, data, **settings)
    loop = fit(client(), 2, data, nonfinite="skip", **settings)
    assert [fault.client_id for fault in loop.skipped] == [1]
    for client_id in (0, 2):
        (kept,) = loop.store.memory(client_id)[RESIDUALS].values()
        assert all(value.isfinite().all() for value in kept.values())


def test_what_a_codec_would_not_send_is_found_too():
    data = toy_data()
    data.setup()
    data.split("train").x[8] = torch.nan
    with pytest.raises(FaultError, match="client 1 returned NaN or infinite values"):
        fit(client(), 1, data, codec=RandomK(0.02))


def test_an_attack_is_coded_and_norm_clipping_sees_what_arrives(monkeypatch):
    messages = Messages(monkeypatch)
    watch = Updates()
    fit(sign_flip(client(), [1], factor=100.0), 1, callbacks=[watch], codec=QSGD(4), transforms=[NormClip(0.05)])
    norms = {job.client_id: moved(update.weights, job) for update, _, job in messages.sent}
    assert norms[1] > 10 * max(norm for client_id, norm in norms.items() if client_id != 1)
    for _, _, job in messages.sent:
        assert moved(watch.rounds[0][job.client_id].weights, job) <= 0.05 * (1 + 1e-4)


def moved(weights, job):
    """Norm of what all float entries moved."""
    start = {n: value.double() for n, value in job.broadcast.weights.items() if value.is_floating_point()}
    change = S.sub({n: weights[n].double() for n in start}, start)
    return S.inner(change, change).sqrt().item()


def test_a_private_rule_bounds_what_arrives(monkeypatch):
    """One client at q = 1: the model moves by at most the clip, and by as much noise as there is."""
    start = {n: v.double() for n, v in fit(client(), 0).client.state_dict().items() if v.is_floating_point()}
    rule = DPFedAvg(noise_multiplier=1e-6, delta=0.5, clip=0.01, accountant="rdp")
    loop = fit(client(), 1, toy_data((12,)), aggregator=rule, codec=RandomK(0.1), seed=3)
    change = S.sub({n: loop.client.state_dict()[n].double() for n in start}, start)
    assert 0.009 < S.inner(change, change).sqrt() <= 0.01 * (1 + 1e-3)
    assert "unprotected/comm/bytes_up" in loop.round_metrics


def test_the_change_of_a_control_variate_is_coded_where_what_is_lost_comes_later():
    """Server's c = mean of the clients' − mean of what they keep back; without feedback it travels as it is."""
    for codec in (TopK(0.1), TopK(0.1, feedback=False)):
        scaffold = SCAFFOLD(net=BatchNormNet, optimizer=sgd(momentum=0.0))
        loop = fit(scaffold, 3, codec=codec)
        whole = codec.encode(torch.zeros(TRAINED), torch.Generator())
        size = sum(value.nbytes for value in whole.values())
        dense = 4 * TRAINED
        assert loop.round_metrics["comm/bytes_up"] == len(SIZES) * (size + OTHERS + (size if codec.feedback else dense))
        memories = [loop.store.memory(client_id) for client_id in range(len(SIZES))]
        for name, value in loop.server_module.control.items():
            own = torch.stack([memory["control"][name].double() for memory in memories]).mean(0)
            if codec.feedback:
                kept = [memory[RESIDUALS]["train/control_change"][name].double() for memory in memories]
                own = own - torch.stack(kept).mean(0)
            torch.testing.assert_close(value, own, rtol=1e-4, atol=1e-6)


# --- downwards


def test_clients_train_from_the_coded_weights_and_the_server_keeps_its_own(monkeypatch):
    """All start from the same coded weights; new = old + mean of what they moved, in every bit but the last ones."""
    messages = Messages(monkeypatch)
    watch = Updates()
    loop = fit(client(), 2, callbacks=[watch], codec=QSGD(3, down=True))
    size = -(-TRAINED * 3 // 8) + 4
    row = loop.round_metrics
    assert row["comm/bytes_down"] == row["comm/bytes_up"] == len(SIZES) * (size + OTHERS)
    jobs = [job for _, _, job in messages.sent[len(SIZES) :]]
    sent = jobs[0].broadcast.weights
    assert all(job.broadcast.weights is sent for job in jobs)
    before, after = watch.after
    for name in loop.server.trainable:
        assert len(sent[name].unique()) <= 7
        assert not torch.equal(sent[name], before[name])
        rows = [SIZES[c] * (u.weights[name] - sent[name]).double() for c, u in watch.rounds[1].items()]
        torch.testing.assert_close(after[name].double(), before[name].double() + sum(rows) / sum(SIZES))
    for name in loop.global_weights.shared:
        if name not in loop.server.trainable:
            assert torch.equal(sent[name], before[name])


def test_a_teacher_is_the_model_that_was_sent():
    """FedNTD distils from what arrived, also in a stack of clients."""
    one, stack = (
        fit(FedNTD(net=Linear, optimizer=sgd()), 2, codec=FP16(down=True), chunk=chunk, seed=5) for chunk in (1, 5)
    )
    for name, value in weights_of(one).items():
        torch.testing.assert_close(value, weights_of(stack)[name], rtol=1e-5, atol=1e-6)


# --- determinism


@pytest.mark.parametrize("codec", [TopK(0.1), RandomK(0.1), QSGD(2, feedback=True), QSGD(3, down=True)])
def test_a_run_continued_after_any_round_is_the_whole_one(codec, tmp_path):
    class Saves(pl.Callback):
        def on_train_epoch_end(self, trainer, loop):
            trainer.save_checkpoint(tmp_path / f"{trainer.current_epoch}.ckpt")

    data = {"schedule": [[0, 1, 2], [1, 3], [0, 1, 4]]}
    whole = fit(client(), 3, toy_data(**data), codec=codec, callbacks=[Saves()])
    for round_idx in range(2):
        path = tmp_path / f"{round_idx}.ckpt"
        again = fit(client(), 3, toy_data(**data), codec=codec, ckpt_path=path)
        assert equal(weights_of(whole), weights_of(again))
        assert again.round_metrics == whole.round_metrics


def test_a_round_that_is_run_again_keeps_back_what_it_would_have(monkeypatch):
    """A client fails after others were taken in: they are as if it had not been asked."""

    class Fails(pl.Callback):
        def on_client_end(self, trainer, loop, update):
            if trainer.current_epoch == 1 and update.client_id == 2:
                raise ZeroDivisionError

    failing = fit(client(), 2, callbacks=[Fails()], codec=TopK(0.1), on_error="skip")
    without = fit(client(), 2, toy_data(schedule=[[0, 1, 2, 3, 4], [0, 1, 3, 4]]), codec=TopK(0.1))
    assert equal(weights_of(failing), weights_of(without))
    for client_id in (0, 1, 3):
        kept = [loop.store.memory(client_id)[RESIDUALS]["train/weights"] for loop in (failing, without)]
        assert equal(*kept)


def test_no_number_is_read_within_a_round():
    """`isfinite` and the residual stay on the device: there is no branch on a value."""
    with torch.device("meta"):
        for codec in (FP16(), Sign(), TopK(0.1), QSGD(4, feedback=True)):
            vector = torch.zeros(100)
            message = codec.encode(vector, torch.Generator())
            assert codec.decode(message, vector, torch.Generator()).is_meta


# --- refusals


class TwoSides(UpdateTransform):
    def on_client(self, update, broadcast):
        return update

    def on_server(self, update, broadcast):
        return update


@pytest.mark.parametrize(
    ("codec", "settings", "sentence"),
    [
        (
            TopK(),
            {"aggregator": MedianAggregator()},
            "MedianAggregator decides every number by itself.*TopK sends may be 0",
        ),
        (
            RandomK(),
            {"aggregator": TrimmedMeanAggregator()},
            "TrimmedMeanAggregator decides .* that RandomK sends may be 0",
        ),
        (
            FP16(),
            {"transforms": [TwoSides()]},
            "the codec FP16 codes what a client sends, and TwoSides sends something",
        ),
        (FP16(), {"personal": ["*"]}, r"FP16 needs trainable entries .* got none; leave it unset \(FedAvg shares"),
    ],
)
def test_what_does_not_go_together_is_refused_by_both_names(codec, settings, sentence):
    with pytest.raises(ValueError, match=sentence):
        fit(client(), 1, codec=codec, **settings)


def test_rules_of_whole_updates_and_codes_of_every_number_go_together():
    for rule, codec in ((GeometricMedianAggregator(), TopK(0.3)), (MedianAggregator(), Sign())):
        assert fit(client(), 1, aggregator=rule, codec=codec).round_metrics["global/acc"] > 0
    with pytest.raises(TypeError, match="codec must be an instance of a subclass of Codec, got QSGD"):
        FederatedLoop(client(), codec=QSGD)
    with pytest.raises(ValueError, match=r"FP16 needs trainable entries .* \(Local shares none"):
        fit(Local(), 1, codec=FP16())
    with pytest.raises(ValueError, match="TopK codes what moved since weights were sent, and clients of FedFOMO start"):
        fit(client(FedFOMO), 1, codec=TopK())


class Hides(Codec):
    """Makes 0 of NaN."""

    def encode(self, vector, draws):
        return {"values": vector.nan_to_num()}

    def decode(self, message, like, draws):
        return message["values"]


class Bare(Hides):
    """Does not call the base, and sends a number of Python's."""

    def __init__(self):
        pass

    def encode(self, vector, draws):
        return {"values": vector, "scale": 1.0}


def test_codecs_of_ones_own_keep_to_the_contract():
    with pytest.raises(ValueError, match="Hides makes finite numbers of it"):
        fit(client(), 1, codec=Hides())
    with pytest.raises(TypeError, match=r"Bare\.encode must return a dict of tensors by name"):
        fit(client(), 1, codec=Bare())


def test_what_is_no_message_is_an_error_of_that_client(monkeypatch):
    on_client = Encoder.on_client

    def other(member, result):
        coded = on_client(member, result)
        weights = {n: value[:1] if n.startswith(CODED) else value for n, value in coded.update.weights.items()}
        return coded._replace(update=replace(coded.update, weights=weights)) if result.job.client_id == 3 else coded

    monkeypatch.setattr(Encoder, "on_client", other)
    with pytest.raises(ValueError, match=r"a message must be of QSGD over 83 numbers.*give all parties the same model"):
        fit(client(), 1, codec=QSGD(4))
    loop = fit(client(), 1, codec=QSGD(4), on_error="skip")
    assert [fault.client_id for fault in loop.skipped] == [3]


def test_an_entry_that_is_none_is_refused_beside_codes(monkeypatch):
    on_client = Encoder.on_client

    def more(member, result):
        coded = on_client(member, result)
        return coded._replace(update=replace(coded.update, weights={**coded.update.weights, "more": torch.ones(1)}))

    monkeypatch.setattr(Encoder, "on_client", more)
    with pytest.raises(ValueError, match="must hold the shared entries only, but has 'more' too"):
        fit(client(), 1, codec=QSGD(4))


@pytest.mark.usefixtures("without_pictures")
def test_on_the_command_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = say(f"fit {TINY} --trainer.max_epochs 1 --model.codec QSGD --model.codec.bits 4 --model.codec.down true")
    assert said.code == 0, said.err
    (path,) = tmp_path.glob("runs/*/*/config.yaml")
    assert "bits: 4" in path.read_text()
    (row,) = csv.DictReader((path.parent / "metrics.csv").open())
    assert 0 < float(row["comm/bytes_down"]) == float(row["comm/bytes_up"])
    wrong = say(f"fit {TINY} --model.codec RandomK --model.codec.feedback true")
    assert wrong.code == 1
    assert "feedback keeps what a codec loses" in wrong.err
