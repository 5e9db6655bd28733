"""Rounds of late clients keep the contract of rounds, however they are cut, skipped or stacked."""

import itertools
from dataclasses import replace
from functools import partial

import pytest
import pytorch_lightning as pl
import torch

from fl_lightning import FaultPolicy, FederatedLoop
from fl_lightning.aggregation import QSGD, Aggregator, FedAsync, FedBuff, NormClip, Rounds, ServerModule, TopK
from fl_lightning.data.devices import Devices
from fl_lightning.functional.traffic import traffic
from fl_lightning.members.faults import ClientError
from fl_lightning.methods import SCAFFOLD, FedAvg, FedProx
from tests.test_resume import SaveIn
from tests.toys import BatchNormNet, equal, sgd, toy_data, trainer, weights_of

SIZES = (7, 12, 5, 9, 16, 6, 11, 4)
ROUNDS = 6


def devices(**more):
    return Devices(**{"step_seconds": [0.2, 0.9], "up_mbps": [2.0, 0.7], "latency": 0.05, **more})


def make_data(sizes=SIZES, **settings):
    return toy_data(sizes, **{"participation": 0.65, "devices": devices(dropout=0.15, jitter=0.3), **settings})


METHODS = {"FedAvg": FedAvg, "FedProx": partial(FedProx, mu=0.1), "SCAFFOLD": SCAFFOLD}


def make_loop(method="SCAFFOLD", buffer=3, **settings):
    client = METHODS[method](net=BatchNormNet, optimizer=sgd(momentum=0.0))
    settings = {"pacing": FedBuff(buffer=buffer), "lr_decay": 0.9, "seed": 5, **settings}
    return FederatedLoop(client, **settings)


class Rows(pl.Callback):
    """The rows of a run."""

    def __init__(self):
        self.rows = {}

    def on_train_epoch_end(self, trainer, loop):
        self.rows[trainer.current_epoch] = {k: v for k, v in loop.round_metrics.items() if k != "cost/seconds"}


def run(loop, rounds=ROUNDS, data=None, ckpt_path=None, callbacks=(), **settings):
    rows = Rows()
    fitted = trainer(rounds, callbacks=[rows, *callbacks], **settings)
    fitted.fit(loop, datamodule=data or make_data(), ckpt_path=ckpt_path)
    return rows.rows


def same_rows(rows, others):
    assert rows.keys() == others.keys()
    for round_idx, row in rows.items():
        assert row == pytest.approx(others[round_idx], rel=0, abs=0, nan_ok=True)


def messages_of(loop):
    return loop._rounds._messages


# --- 2: rounds


def test_a_buffer_of_all_clients_is_plain_rounds():
    plain = make_loop(pacing=None)
    rows = run(plain, data=make_data(participation=1.0, devices=None))
    paced = make_loop(pacing=FedBuff(buffer=len(SIZES)))
    timed = run(paced, data=make_data(participation=1.0, devices=devices()))
    assert equal(weights_of(paced), weights_of(plain))
    for round_idx, row in rows.items():
        kept = {key: value for key, value in timed[round_idx].items() if not key.startswith("time/")}
        assert kept == row
    assert {row["time/staleness_max"] for row in timed.values()} == {0.0}


@pytest.mark.parametrize("pacing", [None, Rounds()])
def test_devices_alone_change_no_bit_of_rounds(pacing):
    plain = make_loop(pacing=None)
    rows = run(plain, data=make_data(devices=None), rounds=3)
    timed = make_loop(pacing=pacing)
    found = run(timed, data=make_data(devices=devices()), rounds=3)
    assert equal(weights_of(timed), weights_of(plain))
    seconds = [row.pop("time/seconds") for row in found.values()]
    assert seconds == sorted(seconds)
    assert seconds[0] > 0
    same_rows(found, rows)


# --- 3, 6: resume

CUTS = [
    ("on_train_epoch_start", 2),
    ("on_client_end", 3),
    ("on_train_batch_end", 2),
    ("on_train_epoch_end", 3),
]


def sizes_for(buffer):
    """Clients of whom some are still at work when the buffer is full."""
    return SIZES if buffer < len(SIZES) else (*SIZES, 8, 10, 5, 13, 7, 6, 9, 12)


@pytest.fixture(scope="module")
def whole():
    """Runs that were never stopped, by method and buffer."""
    known = {}

    def of(method, buffer):
        if (method, buffer) not in known:
            loop = make_loop(method, buffer)
            known[method, buffer] = (run(loop, data=make_data(sizes_for(buffer))), weights_of(loop))
        return known[method, buffer]

    return of


@pytest.mark.parametrize(
    ("method", "buffer"),
    [
        ("SCAFFOLD", 3),
        *[
            pytest.param(method, buffer, marks=pytest.mark.slow)
            for method in METHODS
            for buffer in (1, 3, 10)
            if (method, buffer) != ("SCAFFOLD", 3)
        ],
    ],
)
@pytest.mark.parametrize(("hook", "round_idx"), CUTS)
def test_a_cut_run_has_the_bits_of_a_whole_one(whole, tmp_path, method, buffer, hook, round_idx):
    rows, weights = whole(method, buffer)
    path = tmp_path / "cut.ckpt"
    saver = SaveIn(hook, round_idx, path)
    sizes = sizes_for(buffer)
    run(make_loop(method, buffer), rounds=round_idx + 1, data=make_data(sizes), callbacks=[saver])
    assert saver.done
    assert max(row["time/staleness_max"] for row in rows.values()) > 0
    resumed = make_loop(method, buffer)
    further = run(resumed, data=make_data(sizes), ckpt_path=path)
    assert equal(weights_of(resumed), weights)
    same_rows(further, {index: rows[index] for index in further})


class Failing(pl.Callback):
    """Ends the run after the second client of a round."""

    def __init__(self, round_idx, path):
        self.round_idx = round_idx
        self.path = path
        self.seen = 0

    def on_client_end(self, trainer, loop, update):
        self.seen += trainer.current_epoch == self.round_idx
        if self.seen == 2:
            raise RuntimeError("stop")

    def on_exception(self, trainer, loop, error):
        trainer.save_checkpoint(self.path)


def test_an_error_in_the_middle_of_a_round_leaves_a_run_that_continues(whole, tmp_path):
    rows, weights = whole("SCAFFOLD", 3)
    failing = Failing(2, tmp_path / "error.ckpt")
    with pytest.raises(ClientError, match=r"client \d+ raised RuntimeError in round 2"):
        run(make_loop(), callbacks=[failing])
    resumed = make_loop()
    further = run(resumed, ckpt_path=failing.path)
    assert equal(weights_of(resumed), weights)
    same_rows(further, {index: rows[index] for index in further})


# --- 5: skip


class Broken(FedAvg):
    """Raises as some clients of some versions, or sends their updates as those of no samples."""

    def __init__(self, raises, **base):
        super().__init__(**base)
        self.raises = raises

    def receive(self, broadcast, local):
        is_meant = local.client_id % 2 == 0 and broadcast.round_idx in (1, 2, 3)
        self.round_buffer("is_meant", torch.tensor(is_meant))

    def training_step(self, batch, batch_idx):
        if self.raises and self.round["is_meant"]:
            raise RuntimeError("broken")
        return super().training_step(batch, batch_idx)

    def transmitted(self, update, broadcast, local):
        if self.raises or not self.round["is_meant"]:
            return update
        return replace(update, num_samples=0)


@pytest.mark.parametrize("buffer", [1, 3])
def test_a_client_that_fails_is_an_update_without_samples(buffer):
    found = []
    for raises in (True, False):
        loop = FederatedLoop(
            Broken(raises, net=BatchNormNet, optimizer=sgd()),
            pacing=FedBuff(buffer=buffer),
            faults=FaultPolicy(on_error="skip"),
            seed=5,
        )
        rows = run(loop, rounds=8, data=make_data(devices=devices()))
        found.append((weights_of(loop), rows, len(messages_of(loop))))
    (weights, rows, kept), (others, others_rows, others_kept) = found
    assert sum(row["train/skipped"] for row in rows.values()) >= 1
    assert sum(row["train/skipped"] for row in others_rows.values()) == 0
    assert equal(weights, others)
    assert kept == others_kept
    for key in ("comm/bytes_down", "time/seconds", "time/staleness"):
        assert [row[key] for row in rows.values()] == [row[key] for row in others_rows.values()]


# --- the keys of a job


class Keys(FedAvg):
    """Notes by which rounds its clients draw, and what they start from."""

    def __init__(self, **base):
        super().__init__(**base)
        self.seen = []

    def receive(self, broadcast, local):
        started = self.received["net.head.bias"].clone()
        self.seen.append((local.client_id, broadcast.round_idx, local.round_idx, started))


class Versions(pl.Callback):
    """The weights before each round."""

    def __init__(self):
        self.before = []

    def on_train_batch_start(self, trainer, loop, *_):
        self.before.append(loop.client.net.head.bias.detach().clone())


def test_a_job_draws_by_the_round_it_started_in_and_starts_from_its_weights():
    client = Keys(net=BatchNormNet, optimizer=sgd())
    loop = FederatedLoop(client, pacing=FedBuff(buffer=2), seed=5)
    versions = Versions()
    run(loop, rounds=6, callbacks=[versions])
    arrivals = [job for index in range(6) for job in loop._rounds.pace.timeline.round(index).arrivals]
    assert max(index // 2 - job.version for index, job in enumerate(arrivals)) > 0
    in_order = []
    for index in range(0, 12, 2):
        in_order += sorted(arrivals[index : index + 2], key=lambda job: (job.version, job.client_id))
    for (client_id, sent, drawn, started), job in zip(client.seen, in_order, strict=True):
        assert (client_id, sent, drawn) == (job.client_id, job.version, job.version)
        assert torch.equal(started, versions.before[job.version])


# --- 7, 8, 9, 10


def test_stacks_of_versions_are_clients_one_by_one():
    data = partial(toy_data, (10,) * 8, participation=0.75, devices=devices())
    one_by_one = make_loop("FedAvg", buffer=4)
    run(one_by_one, data=data())
    stacked = make_loop("FedAvg", buffer=4, chunk=4)
    run(stacked, data=data())
    for name, value in weights_of(one_by_one).items():
        assert torch.allclose(value.double(), weights_of(stacked)[name].double(), atol=1e-5), name


@pytest.mark.parametrize("rounds", [50, pytest.param(200, marks=pytest.mark.slow)])
def test_variances_stay_above_0_over_many_stale_rounds(rounds):
    loop = make_loop("FedAvg", buffer=1, pacing=FedBuff(buffer=1, form="constant"))
    rows = run(loop, rounds=rounds, data=make_data(participation=1.0), limit_val_batches=0)
    assert max(row["time/staleness_max"] for row in rows.values()) > 5
    variances = [value for name, value in weights_of(loop).items() if name.endswith("running_var")]
    assert variances
    assert all(bool((value > 0).all()) for value in variances)


@pytest.mark.parametrize("method", ["FedAvg", "SCAFFOLD"])
def test_bytes_are_counted_when_they_are_sent(method):
    loop = make_loop(method, buffer=2)
    rows = run(loop, rounds=8)
    timeline = loop._rounds.pace.timeline
    rounds = [timeline.round(index) for index in range(8)]
    shared = loop.server.weights
    trained = {name: shared[name] for name in loop.server.trainable}
    message = traffic(shared, {}) + (traffic(trained, {}) if method == "SCAFFOLD" else 0)
    assert sum(len(timed.lost) for timed in rounds) > 0
    assert [row["comm/bytes_down"] for row in rows.values()] == [len(timed.started) * message for timed in rounds]
    assert [row["comm/bytes_up"] for row in rows.values()] == [2 * message] * 8
    assert [row["time/lost"] for row in rows.values()] == [len(timed.lost) for timed in rounds]


class Kept(pl.Callback):
    """Counts the messages that are kept, and their versions, after each round."""

    def __init__(self):
        self.counts = []

    def on_train_batch_end(self, trainer, loop, *_):
        kept = messages_of(loop)
        weights = {id(message.broadcast.weights) for message in kept._kept.values()}
        self.counts.append((len(kept), len(weights)))


@pytest.mark.parametrize("max_staleness", [None, 1])
def test_what_is_kept_is_bounded(max_staleness):
    kept = Kept()
    pacing = FedBuff(buffer=2, max_staleness=max_staleness)
    loop = make_loop(pacing=pacing)
    run(loop, rounds=20, callbacks=[kept], limit_val_batches=0)
    at_work = loop.data.cohort.size
    assert max(count for count, _ in kept.counts) <= at_work + 2
    distinct = max(weights for _, weights in kept.counts)
    assert distinct <= (at_work + 2 if max_staleness is None else max_staleness + 1)


# --- rules, transforms, codecs


@pytest.mark.parametrize(
    "settings",
    [
        {"codec": QSGD(bits=4)},
        {"codec": TopK(fraction=0.2, feedback=True)},
        {"transforms": [NormClip(max_norm=1.0)], "aggregator": Aggregator("uniform")},
        {"server_optimizer": partial(torch.optim.Adam, lr=0.01), "pacing": FedAsync(buffer=2)},
    ],
    ids=["QSGD", "TopK", "NormClip", "FedAdam"],
)
def test_other_parts_go_with_late_clients_and_continue(tmp_path, settings):
    whole = make_loop("FedAvg", **settings)
    rows = run(whole, rounds=4)
    assert max(row["time/staleness_max"] for row in rows.values()) > 0
    path = tmp_path / "half.ckpt"
    run(make_loop("FedAvg", **settings), rounds=2, callbacks=[SaveIn("on_train_epoch_end", 1, path)])
    resumed = make_loop("FedAvg", **settings)
    run(resumed, rounds=4, ckpt_path=path)
    assert equal(weights_of(resumed), weights_of(whole))


def test_the_line_about_bytes_that_the_clock_does_not_count(caplog):
    class Chatty(ServerModule):
        takes_stale = True

        def broadcast(self, exchange, client_id):
            return self.sends(exchange, more=torch.zeros(1000))

    with caplog.at_level("INFO"):
        for method, codec in (("FedAvg", None), ("FedAvg", QSGD(bits=4)), ("SCAFFOLD", TopK(fraction=0.2))):
            run(make_loop(method, codec=codec), rounds=1)
        run(make_loop("FedAvg", pacing=None, codec=QSGD(bits=4, down=True)), rounds=1)
        assert "data.devices count" not in caplog.text
        run(make_loop("FedAvg", server_module=Chatty()), rounds=3)
    lines = [record.message for record in caplog.records if "data.devices count" in record.message]
    assert len(lines) == 1
    assert "comm/bytes_down" in lines[0]


# --- seconds


def test_a_run_ends_before_a_round_that_would_be_late(tmp_path):
    rows = run(make_loop("FedAvg", max_seconds=4.0), rounds=-1)
    ends = [row["time/seconds"] for row in rows.values()]
    further = run(make_loop("FedAvg"), rounds=len(rows) + 1)
    assert ends[-1] <= 4.0 < further[len(rows)]["time/seconds"]
    path = tmp_path / "end.ckpt"
    run(make_loop("FedAvg", max_seconds=2.0), rounds=-1, callbacks=[LastSaved(path)])
    continued = run(make_loop("FedAvg", max_seconds=4.0), rounds=-1, ckpt_path=path)
    assert max(continued) == max(rows)


class LastSaved(pl.Callback):
    def __init__(self, path):
        self.path = path

    def on_train_end(self, trainer, loop):
        trainer.save_checkpoint(self.path)


def test_evaluation_by_seconds_leaves_the_trainer_as_it_was():
    fitted = trainer(2)
    seen = []

    class Looks(pl.Callback):
        def on_train_epoch_end(self, trainer, loop):
            seen.append(trainer.check_val_every_n_epoch)

    fitted.callbacks.append(Looks())
    fitted.fit(make_loop("FedAvg", evaluate_every_seconds=100.0), datamodule=make_data())
    assert seen[0] != 1
    assert fitted.check_val_every_n_epoch == 1


def test_the_global_model_is_evaluated_by_seconds():
    rows = run(make_loop("FedAvg", evaluate_every_seconds=1.0), rounds=8)
    ends = [0.0, *(row["time/seconds"] for row in rows.values())]
    due = [int(after) > int(before) for before, after in itertools.pairwise(ends)]
    due[-1] = True
    assert [("global/acc" in row) for row in rows.values()] == due
    assert not all(due[:-1])


# --- checkpoints


def test_messages_of_a_checkpoint_are_checked():
    loop = make_loop()
    run(loop, rounds=2, limit_val_batches=0)
    member = messages_of(loop)
    saved = member.state_dict()
    assert len(saved) == len(member) > 1
    member.load_state_dict(saved)
    assert [one["version"] for one in member.state_dict()] == [one["version"] for one in saved]
    assert len({id(message.broadcast.weights) for message in member._kept.values()}) == len(member.versions)
    for change, error in (
        (lambda one: one["weights"].popitem(), "client . in a checkpoint must hold the shared entries, but"),
        (lambda one: one["weights"].update(other=torch.zeros(1)), "must hold the shared entries only"),
        (lambda one: one.pop("exchange"), "must have the part 'exchange'"),
        (lambda one: one.update(version="0"), "the part 'version' of a message"),
    ):
        one = {**saved[-1], "weights": dict(saved[-1]["weights"])}
        change(one)
        with pytest.raises((TypeError, ValueError), match=error):
            member.load_state_dict([*saved[:-1], one])
    member.load_state_dict([])
    with pytest.raises(ValueError, match=r"lacks that of client 3, which started in round 0; continue from another"):
        member.of(3, 0)


def test_freezing_while_clients_are_at_work_is_refused():
    class Freezes(pl.Callback):
        def on_train_epoch_start(self, trainer, loop):
            loop.client.net.head.requires_grad_(trainer.current_epoch < 2)

    with pytest.raises(ValueError, match="no parameter may be frozen or unfrozen while clients are at work"):
        run(make_loop("FedAvg"), callbacks=[Freezes()])
