"""DPFedAvg: its sensitivity, its noise, its ledger, and what it refuses."""

import math
import re
from dataclasses import replace
from functools import partial

import pytest
import pytorch_lightning as pl
import torch
from torch import nn

from fl_lightning import FaultPolicy, FederatedLoop
from fl_lightning.aggregation import NormClip, ServerModule, UpdateTransform
from fl_lightning.callbacks import RunPlots
from fl_lightning.callbacks.bar import headline
from fl_lightning.functional.privacy import epsilon, gaussian_noise
from fl_lightning.functional.state import StateSum
from fl_lightning.methods import SCAFFOLD, DPFedAvg, FedAvg, FedBN, FedDyn, FedNTD, FedProx, KnFu
from fl_lightning.methods.dpfedavg import clipped
from fl_lightning.nets import Backbone
from fl_lightning.reports.report import write_report
from fl_lightning.reports.saved import Group, read_run
from fl_lightning.runs.loggers import RoundCSVLogger
from fl_lightning.utils.keyed import keyed_noise
from tests.toys import BatchNormNet, equal, fit, sgd, toy_data, trainer, weights_of

pytest.importorskip("dp_accounting")

SIZES = (7, 12, 5, 9, 16, 8, 3, 11)
EMPTY = 4  # seed of the cohorts at a rate of .2: the second of them is empty, and the fourth


class Linear(Backbone):
    """A linear net."""

    def __init__(self, num_classes, input_shape):
        super().__init__()
        self.head = nn.Linear(math.prod(input_shape), num_classes)

    def features(self, x):
        return x.flatten(1)


def rule(**settings):
    return DPFedAvg(**{"noise_multiplier": 1.0, "delta": 0.01, "clip": 0.5, **settings})


def client(kind=FedAvg, net=BatchNormNet, **settings):
    return kind(net=net, optimizer=sgd(), **settings)


def poisson(**settings):
    return toy_data(SIZES, **{"sampling": "poisson", "participation": 0.5, **settings})


def rows_of(loop):
    history = loop.recorder.history
    return [dict(zip(history.names, row, strict=True)) for row in history.table.tolist()]


# --- clip and noise


def test_one_client_of_a_million_weights_changes_the_exact_sum_by_no_more_than_the_clip():
    generator = torch.Generator().manual_seed(0)
    clip = torch.tensor(0.3, dtype=torch.float64)
    clients = [torch.randn(10**6, generator=generator) * 10**exponent for exponent in (-6, -2, 0, 3)]
    parts = [clipped({"w": value.double()}, clip)[0] for value in clients]
    sums = []
    for order in (range(4), reversed(range(4)), (1, 2, 3)):
        total = StateSum()
        for index in order:
            total.add(parts[index])
        sums.append(total.state()["w"])
    assert torch.equal(sums[0], sums[1]), "the sum is exact in any order"
    removed = sums[0] - sums[2]
    assert torch.equal(removed, parts[0]["w"]), "and what one client adds can be taken out again exactly"
    for part in parts:
        assert math.sqrt(math.fsum(x * x for x in part["w"].tolist())) <= 0.3
    assert parts[3]["w"].norm() == pytest.approx(0.3, rel=1e-6)
    assert torch.allclose(parts[0]["w"], clients[0].double(), atol=0.3 * 2**-35), "a short update stays as it is"


@pytest.mark.parametrize("clip", [0.5, 0.3, 1e-9, 12345.678])
def test_no_direction_and_no_clip_gives_a_longer_update(clip):
    generator = torch.Generator().manual_seed(1)
    bound = torch.tensor(clip, dtype=torch.float64)
    for size in (1, 2, 3, 50):
        for scale in (1.0, 1e12):
            value = torch.randn(size, generator=generator, dtype=torch.float64) * clip * scale
            part, short = clipped({"w": value}, bound)
            assert math.sqrt(math.fsum(x * x for x in part["w"].tolist())) <= clip
            assert bool(short) == (value.norm() <= clip)


class Still(FedAvg):
    """Sends what it received."""

    def phases(self, exchange):
        return ()


class Wide(BatchNormNet):
    """With many weights that no loss depends on."""

    def __init__(self, num_classes, input_shape):
        super().__init__(num_classes, input_shape)
        self.wide = nn.Parameter(torch.zeros(20_000))


class Watch(pl.Callback):
    """Notes the shared entries after every round, and the cohorts."""

    def __init__(self):
        self.weights = []
        self.cohorts = []

    def on_train_epoch_end(self, trainer, loop):
        self.weights.append(loop.global_weights.snapshot(loop.global_weights.shared))
        self.cohorts.append(loop.data.cohort(trainer.current_epoch))


def test_the_noise_has_the_standard_deviation_that_is_paid_for_and_is_another_one_every_round():
    watch = Watch()
    fit(client(Still, Wide), 3, poisson(), callbacks=[watch], aggregator=rule(noise_multiplier=3.0, clip=0.2))
    wide = [weights["net.wide"].double() for weights in watch.weights]
    noises = [wide[0], wide[1] - wide[0], wide[2] - wide[1]]
    sigma = 3.0 * 0.2 / (0.5 * len(SIZES))
    n = len(wide[0])
    for noise in noises:
        assert abs(noise.std() / sigma - 1) < 4 / math.sqrt(2 * n)
        assert abs(noise.mean()) < 4 * sigma / math.sqrt(n)
    assert (torch.corrcoef(torch.stack(noises)).triu(1).abs() < 4 / math.sqrt(n)).all()


class TwoExchanges(Still):
    exchanges = ("first", "second")


def test_two_exchanges_have_noises_of_their_own_and_both_are_paid_for():
    watch = Watch()
    one = rule()
    two = rule()
    fit(client(TwoExchanges, Wide), 1, poisson(), callbacks=[watch], aggregator=two)
    fit(client(Still, Wide), 1, poisson(), aggregator=one)
    sigma = 0.5 / (0.5 * len(SIZES))
    noise = watch.weights[0]["net.wide"].double()
    assert abs(noise.std() / (sigma * math.sqrt(2)) - 1) < 4 / math.sqrt(2 * len(noise)), "not the same noise twice"
    assert two.spent(1) == pytest.approx(rule_of(1.0 / math.sqrt(2)), abs=1e-9)
    assert one.spent(1) == pytest.approx(rule_of(1.0), abs=1e-9)


def rule_of(noise_multiplier, count=1, rate=0.5, delta=0.01):
    return epsilon(rate, noise_multiplier, count, delta)


def test_buffers_of_floats_are_noised_counts_stay_and_no_variance_becomes_negative():
    watch = Watch()
    loop = fit(client(), 4, poisson(), callbacks=[watch], aggregator=rule(noise_multiplier=20.0))
    for before, after in zip(watch.weights, watch.weights[1:], strict=False):
        assert not torch.equal(before["net.body.1.running_mean"], after["net.body.1.running_mean"])
        assert (after["net.body.1.running_var"] > 0).all()
    assert loop.client.state_dict()["net.body.1.num_batches_tracked"] == 0
    assert all(value.isfinite().all() for value in watch.weights[-1].values())


def frozen_body(num_classes, input_shape):
    net = BatchNormNet(num_classes, input_shape)
    net.body[0].requires_grad_(False)
    return net


def test_a_pretrained_part_that_nobody_trains_gets_no_noise():
    before = FederatedLoop(client(net=frozen_body), seed=3)
    trainer(1).fit(before, datamodule=poisson())
    start = before.client.net.body[0].weight.clone()
    loop = fit(client(net=frozen_body), 3, poisson(), aggregator=rule())
    assert torch.equal(loop.client.net.body[0].weight, start)


class Fixed(FedAvg):
    """Moves by a vector of norm `client_id + 1`."""

    def transmitted(self, update, broadcast, local):
        weights = {name: value.clone() for name, value in broadcast.weights.items()}
        weights["net.head.weight"][0, 0] += update.client_id + 1
        return replace(update, weights=weights)


@pytest.mark.parametrize(("quantile", "start"), [pytest.param(0.5, 4.0, marks=pytest.mark.slow), (0.8, 21.0)])
def test_the_clip_converges_to_the_quantile_of_the_norms(quantile, start):
    data = toy_data((2,) * 20, sampling="poisson", participation=0.9)
    private = rule(clip=start, quantile=quantile, accountant="rdp")
    loop = fit(client(Fixed, Linear), 50 if start < 20 * quantile else 28, data, aggregator=private)
    late = [row["privacy/clip"] for row in rows_of(loop)[-15:]]
    assert sum(late) / len(late) == pytest.approx(20 * quantile, abs=2.0)


def test_a_followed_clip_costs_what_a_fixed_one_does():
    fixed = rule(noise_multiplier=1.3)
    followed = rule(noise_multiplier=1.3, quantile=0.5)
    rows = [rows_of(fit(client(), 2, poisson(), aggregator=private)) for private in (fixed, followed)]
    assert [row["privacy/epsilon"] for row in rows[0]] == [row["privacy/epsilon"] for row in rows[1]]
    of_sum, count = followed.noises()
    assert 1 / of_sum**2 + 1 / (2 * count) ** 2 == pytest.approx(1 / 1.3**2), "noise on the sum and on the count"
    assert of_sum > 1.3


# --- rounds


def test_a_round_without_clients_releases_noise_and_costs_as_much():
    data = poisson(participation=0.2, sampling_seed=EMPTY)
    watch = Watch()
    loop = fit(client(), 4, data, callbacks=[watch], aggregator=rule(), faults="skip")
    empty = watch.cohorts.index([])
    assert empty > 0
    before, after = watch.weights[empty - 1 : empty + 1]
    assert not torch.equal(before["net.head.weight"], after["net.head.weight"])
    spent = [row["privacy/epsilon"] for row in rows_of(loop)]
    assert spent == [pytest.approx(rule_of(1.0, t + 1, 0.2), abs=1e-9) for t in range(4)]


def test_without_the_rule_a_round_without_clients_leaves_the_model():
    data = poisson(participation=0.2, sampling_seed=EMPTY)
    watch = Watch()
    fit(client(), 4, data, callbacks=[watch])
    empty = watch.cohorts.index([])
    assert equal(*watch.weights[empty - 1 : empty + 1])


class Exploding(FedAvg):
    """Client 2 sends NaN."""

    def training_step(self, batch, batch_idx):
        factor = math.nan if self.context.client_id == 2 else 1.0
        return super().training_step(batch, batch_idx) * factor


class Failing(FedAvg):
    """Client 2 fails."""

    def receive(self, broadcast, local):
        if local.client_id == 2:
            raise ValueError("the disk is gone")


class Absent(FedAvg):
    """Client 2 sends what it received."""

    def phases(self, exchange):
        return () if self.context.client_id == 2 else super().phases(exchange)


@pytest.mark.parametrize("kind", [Exploding, Failing])
def test_a_client_that_is_skipped_counts_as_one_that_did_not_move(kind):
    runs = [fit(client(k, Linear), 3, poisson(), aggregator=rule(), faults="skip") for k in (kind, Absent)]
    assert equal(*map(weights_of, runs))
    assert [row["privacy/epsilon"] for row in rows_of(runs[0])] == [row["privacy/epsilon"] for row in rows_of(runs[1])]


@pytest.mark.parametrize("settings", [{}, {"quantile": 0.5}])
@pytest.mark.parametrize("kind", [FedAvg, FedNTD])
def test_a_run_that_is_continued_after_any_round_ends_like_the_whole_one(tmp_path, settings, kind):
    class Saves(pl.Callback):
        def on_train_epoch_end(self, trainer, loop):
            trainer.save_checkpoint(tmp_path / f"{trainer.current_epoch}.ckpt")

    whole = fit(client(kind), 4, poisson(), callbacks=[Saves()], aggregator=rule(**settings))
    for done in range(3):
        path = tmp_path / f"{done}.ckpt"
        rest = fit(client(kind), 4, poisson(), ckpt_path=path, aggregator=rule(**settings))
        assert equal(weights_of(rest), weights_of(whole))
        assert rest.round_metrics == whole.round_metrics


def test_clients_in_stacks_are_summed_alike():
    runs = []
    for chunk in (1, 3):
        net = partial(BatchNormNet, dropout=0.0)
        data = toy_data((10,) * 8, dtype=torch.float64, sampling="poisson", participation=0.6)
        runs.append(fit(client(net=net), 3, data, aggregator=rule(), chunk=chunk, precision="64-true"))
    one, stacked = map(weights_of, runs)
    for name, value in one.items():
        torch.testing.assert_close(stacked[name], value, rtol=1e-9, atol=1e-9)
    assert rows_of(runs[0])[-1]["privacy/epsilon"] == rows_of(runs[1])[-1]["privacy/epsilon"]


# --- the ledger


@pytest.mark.parametrize(
    ("changed", "data", "says"),
    [
        ({"noise_multiplier": 2.0}, {}, "noise_multiplier was 1 in the 2 rounds so far and is 2"),
        ({"clip": 1.0}, {}, "clip was 0.5 in the 2 rounds so far and is 1"),
        ({}, {"participation": 0.25}, "rate was 0.5 in the 2 rounds so far and is 0.25"),
    ],
)
def test_a_run_is_not_continued_with_other_terms(tmp_path, changed, data, says):
    run = trainer(2)
    run.fit(FederatedLoop(client(), aggregator=rule(), seed=3), datamodule=poisson())
    run.save_checkpoint(path := tmp_path / "last.ckpt")
    loop = FederatedLoop(client(), aggregator=rule(**changed), seed=3)
    with pytest.raises(ValueError, match="a run is continued with the settings it was begun with"):
        trainer(3).fit(loop, datamodule=poisson(**data), ckpt_path=path)
    loop = FederatedLoop(client(), aggregator=rule(**changed), seed=3)
    loop.identity.allow(["model.aggregator", "data"])
    with pytest.raises(ValueError, match=re.escape(says)):
        trainer(3).fit(loop, datamodule=poisson(**data), ckpt_path=path)


BUDGET = {"noise_multiplier": None, "target_epsilon": 3.0}


def test_a_run_that_has_planned_its_noise_is_not_continued_with_more_rounds(tmp_path):
    # The noise keeps the budget over the planned rounds: a longer run is another one, with more noise from the start.
    first = rule(**BUDGET)
    run = trainer(3)
    run.fit(FederatedLoop(client(), aggregator=first, seed=3), datamodule=poisson())
    path = tmp_path / "last.ckpt"
    run.save_checkpoint(path)
    assert 2.99 < first.spent(3) <= 3.0 < first.spent(4)
    loop = FederatedLoop(client(), aggregator=rule(**BUDGET), seed=3)
    with pytest.raises(ValueError, match=r"planned_rounds was 3, is 6 .* by model\.planned_rounds"):
        trainer(6).fit(loop, datamodule=poisson(), ckpt_path=path)
    again = rule(**BUDGET)
    loop = FederatedLoop(client(), aggregator=again, seed=3)
    loop.identity.allow(["planned_rounds"])
    run = trainer(6)
    run.fit(loop, datamodule=poisson(), ckpt_path=path)
    assert again.ledger == first.ledger
    assert run.global_step == 3, "the budget is spent"


@pytest.mark.parametrize("parts", [(2, 8), (5, 8), (2, 3, 8)], ids=str)
def test_a_run_that_names_its_planned_rounds_has_the_bits_of_the_whole_run_in_any_parts(tmp_path, parts):
    whole = FederatedLoop(client(), aggregator=rule(**BUDGET), seed=3)
    trainer(8).fit(whole, datamodule=poisson())
    path = None
    for end in parts:
        loop = FederatedLoop(client(), aggregator=rule(**BUDGET), seed=3, planned_rounds=8)
        run = trainer(end)
        run.fit(loop, datamodule=poisson(), ckpt_path=path)
        path = tmp_path / f"{end}.ckpt"
        run.save_checkpoint(path)
    assert loop.aggregator.ledger == whole.aggregator.ledger
    for name, value in whole.state_dict().items():
        assert torch.equal(torch.as_tensor(value), torch.as_tensor(loop.state_dict()[name])), name


def test_a_plan_of_fewer_rounds_than_the_trainer_has_is_refused():
    loop = FederatedLoop(client(), aggregator=rule(**BUDGET), seed=3, planned_rounds=2)
    with pytest.raises(ValueError, match=r"model\.planned_rounds must be at least .* Trainer \(8\), got 2"):
        trainer(8).fit(loop, datamodule=poisson())


def test_a_run_that_has_not_read_the_planned_rounds_is_continued_with_more(tmp_path):
    run = trainer(2)
    run.fit(FederatedLoop(client(), aggregator=rule(), seed=3), datamodule=poisson())
    path = tmp_path / "last.ckpt"
    run.save_checkpoint(path)
    run = trainer(4)
    run.fit(FederatedLoop(client(), aggregator=rule(), seed=3), datamodule=poisson(), ckpt_path=path)
    assert run.global_step == 4


def test_a_run_ends_at_its_budget_with_one_sentence(caplog):
    caplog.set_level("INFO")
    loop = FederatedLoop(client(), aggregator=rule(target_epsilon=4.0), seed=3)
    run = trainer(30)
    run.fit(loop, datamodule=poisson())
    told = [record.getMessage() for record in caplog.records if "privacy:" in record.getMessage()]
    spent = loop.round_metrics["privacy/epsilon"]
    rounds = run.global_step
    assert spent <= 4.0 < rule_of(1.0, rounds + 1)
    assert spent == pytest.approx(rule_of(1.0, rounds), abs=1e-9)
    assert len(told) == 1
    assert f"after {rounds} rounds, which leaves no further round of target_epsilon=4" in told[0]
    assert "simulated: whoever has the seeds" in told[0]


def test_no_round_is_begun_beyond_the_budget():
    with pytest.raises(ValueError, match=re.escape("keeps target_epsilon=1.0 at delta=0.01, and a further round")):
        fit(client(), 3, poisson(), aggregator=rule(target_epsilon=1.0))


def test_accounting_by_renyi_divergences_is_looser():
    rows = [rows_of(fit(client(), 2, poisson(), aggregator=rule(accountant=by))) for by in ("pld", "rdp")]
    assert rows[0][-1]["privacy/epsilon"] < rows[1][-1]["privacy/epsilon"]


# --- what is refused


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({}, "needs noise_multiplier, or target_epsilon"),
        ({"noise_multiplier": 0}, "noise_multiplier must be above 0"),
        ({"noise_multiplier": 1, "delta": 1.0}, "delta must lie in (0, 1), got 1.0"),
        ({"noise_multiplier": 1, "quantile": 0.0}, "quantile must lie in (0, 1), got 0.0"),
        ({"noise_multiplier": 1, "clip": 0}, "clip must be above 0"),
        ({"noise_multiplier": 1, "accountant": "moments"}, "accountant must be one of pld, rdp"),
        ({"noise_multiplier": 1, "weighting": "samples"}, "weighting must be uniform, got 'samples'"),
    ],
)
def test_settings_are_checked(settings, says):
    with pytest.raises(ValueError, match=re.escape(says)):
        DPFedAvg(**settings)


NoProximalTerm = partial(FedProx, mu=0.0)


class TakesUpdates(ServerModule):
    """Gathers updates whatever the coefficients of the client are."""

    def add(self, update):
        self.gather(update)


class Keeps(UpdateTransform):
    """Keeps the last update."""

    def state_dict(self):
        return {}


@pytest.mark.parametrize(
    ("kind", "data", "loop", "says"),
    [
        (FedAvg, {"sampling": "uniform"}, {}, "the cohorts here have a fixed size; set data.sampling to poisson"),
        (FedAvg, {"sampling": "uniform", "participation": 1, "schedule": [[0]] * 3}, {}, "are those of data.schedule"),
        (SCAFFOLD, {}, {}, "SCAFFOLD also sends control"),
        (KnFu, {"transfer_size": 5, "partition": None}, {}, "KnFu also sends logits"),
        (FedDyn, {}, {}, "FedDynServer takes in each client's update before it"),
        (NoProximalTerm, {}, {"server_module": TakesUpdates()}, "TakesUpdates takes in each client's update before it"),
        (FedAvg, {}, {"transforms": [Keeps()]}, "Keeps keeps something of each"),
        (FedAvg, {}, {"faults": {"min_clients": 2}}, "which model.faults.min_clients=2 would show"),
        (FedAvg, {}, {"faults": {"max_update_norm": 1.0}}, "model.faults.max_update_norm=1.0 would tell"),
    ],
)
def test_what_the_guarantee_does_not_cover_is_refused_at_start(kind, data, loop, says):
    settings = {**loop, **loop.get("faults", {})}
    settings.pop("faults", None)
    with pytest.raises(ValueError, match=re.escape(says)):
        fit(client(kind), 1, poisson(**data), aggregator=rule(), **settings)


class Talks(FedAvg):
    """Sends more than it declares."""

    def reply(self, exchange, local):
        return {"mean": torch.ones(3)}


def test_what_is_sent_and_not_declared_is_refused_when_it_comes():
    with pytest.raises(ValueError, match="adds noise to weights, and an update also has 'mean'"):
        fit(client(Talks), 1, poisson(), aggregator=rule())


def test_all_clients_in_every_round_are_a_sample_at_rate_1_however_they_are_drawn():
    rules = [rule(noise_multiplier=4.0, delta=1e-5) for _ in range(2)]
    for private, sampling in zip(rules, ("uniform", "poisson"), strict=True):
        fit(client(), 2, poisson(sampling=sampling, participation=1.0), aggregator=private)
    assert rules[0].ledger == rules[1].ledger
    assert rules[0].spent(16) == pytest.approx(4.3772, abs=1e-3)


def test_only_this_rule_takes_rounds_without_clients():
    with pytest.raises(ValueError, match=r"min_clients must be at least 1, got 0: Aggregator makes nothing"):
        FederatedLoop(FedAvg(), faults=FaultPolicy(min_clients=0))
    FederatedLoop(FedAvg(), aggregator=rule(), faults=FaultPolicy(min_clients=0))


def test_norm_clip_and_a_server_optimizer_go_with_it():
    momentum = partial(torch.optim.SGD, lr=1.0, momentum=0.9)
    loop = fit(client(), 2, poisson(), aggregator=rule(), transforms=[NormClip(0.1)], server_optimizer=momentum)
    assert loop.round_metrics["privacy/epsilon"] > 0


# --- what else tells of clients


def test_values_of_clients_are_marked_in_the_row_and_what_the_model_gives_is_not():
    loop = fit(client(FedBN), 2, poisson(), aggregator=rule(), evaluate_clients_every=1)
    keys = set(loop.round_metrics)
    marked = {"train/ce", "comm/bytes_up", "comm/bytes_down", "local/alma"}
    assert {f"unprotected/{key}" for key in marked} <= keys
    assert not marked & keys
    assert {"global/acc", "global/loss", "privacy/epsilon"} <= keys


def test_row_csv_bar_report_and_end_tell_epsilon_and_mark_what_is_not_covered(tmp_path, caplog):
    caplog.set_level("INFO")
    loop = FederatedLoop(client(), aggregator=rule(), seed=3)
    loggers = [RoundCSVLogger(tmp_path)]
    plots = RunPlots(tmp_path)
    trainer(2, tmp_path, logger=loggers, callbacks=[plots]).fit(loop, datamodule=poisson())
    header, *lines = (tmp_path / "metrics.csv").read_text().splitlines()
    names = header.split(",")
    assert {"privacy/epsilon", "unprotected/train/ce", "unprotected/comm/bytes_up", "global/acc"} <= set(names)
    assert float(lines[-1].split(",")[names.index("privacy/epsilon")]) == pytest.approx(rule_of(1.0, 2), abs=1e-9)
    assert not [*tmp_path.glob("partition*")], "who has what is not told"
    assert headline(loop.round_metrics).startswith(f"ε {rule_of(1.0, 2):.3g}  acc ")
    write_report([Group("private", [read_run(tmp_path)])], tmp_path / "report")
    page = (tmp_path / "report/report.html").read_text()
    assert "Differential privacy" in page
    assert f"{rule_of(1.0, 2):.4g}" in page
    assert "names begin with unprotected/" in page


def test_a_plateau_may_watch_only_what_the_row_has():
    class Watches(FedAvg):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "train/ce"}}

    with pytest.raises(ValueError, match=r"got monitor='train/ce'; watch one of .*'unprotected/train/ce'"):
        fit(client(Watches), 2, poisson(), aggregator=rule())


def test_no_mean_of_personal_entries_reaches_the_server():
    loop = fit(client(FedBN), 3, poisson(), aggregator=rule())
    initial = loop.initial_personal
    assert initial
    assert all(torch.equal(loop.client.state_dict()[name], value) for name, value in initial.items())
    plain = fit(client(FedBN), 3, poisson())
    assert not all(torch.equal(plain.client.state_dict()[name], value) for name, value in initial.items())


# --- a secret seed


def test_a_secret_seed_stands_in_checkpoints_only_and_goes_on_from_them(tmp_path):
    class Saves(Watch):
        def on_train_epoch_end(self, trainer, loop):
            super().on_train_epoch_end(trainer, loop)
            if trainer.current_epoch == 1:
                trainer.save_checkpoint(tmp_path / "1.ckpt")

    data = poisson(secret_seed=True)
    watch = Saves()
    whole = fit(client(), 4, data, callbacks=[watch], aggregator=rule())
    assert data.secret not in repr(whole.parts.hyperparameters())
    assert whole.identity.objects["data.sampling_seed"] == "secret"
    other = fit(client(), 4, poisson(secret_seed=True), aggregator=rule())
    assert not equal(weights_of(other), weights_of(whole))
    rest = Watch()
    again = fit(client(), 4, poisson(secret_seed=True), tmp_path / "1.ckpt", callbacks=[rest], aggregator=rule())
    assert equal(weights_of(again), weights_of(whole))
    assert rest.cohorts == watch.cohorts[2:]


def test_who_has_the_seed_can_take_the_noise_away_and_who_has_not_cannot():
    recovered = []
    for secret in (False, True):
        loop = FederatedLoop(client(Still, Wide), aggregator=rule(), seed=3)
        data = poisson(secret_seed=secret)
        trainer(1).fit(loop, datamodule=data)
        noise = keyed_noise(3, "noise/0", 0)
        guess = {}
        for name in loop.aggregator._moving():
            guess[name] = gaussian_noise(loop.server.weights[name].shape, noise, torch.device("cpu"))
        scale = 0.5 / (0.5 * len(SIZES))
        clean = loop.server.weights["net.wide"].double() - scale * guess["net.wide"]
        recovered.append(float(clean.abs().max()))
    assert recovered[0] < 1e-7
    assert recovered[1] > 0.1


def test_noise_is_keyed_by_all_bits_of_the_seed():
    """torch's own generator reads 32 of them, which can be tried one after the other."""
    keys = [keyed_noise(7 + (high << 32), "noise/0", 0) for high in range(3)]
    drawn = [gaussian_noise((4,), key, torch.device("cpu")) for key in keys]
    assert not torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[1], drawn[2])


@pytest.mark.parametrize("private", [True, False])
def test_a_second_fit_would_draw_the_same_noise_for_other_weights(private):
    loop = FederatedLoop(client(), aggregator=rule() if private else None, seed=3)
    trainer(1).fit(loop, datamodule=poisson())
    if private:
        with pytest.raises(ValueError, match="has run 1 rounds cannot begin at round 0 again"):
            trainer(1).fit(loop, datamodule=poisson())
    else:
        trainer(1).fit(loop, datamodule=poisson())


def test_what_a_client_calls_private_is_not_thereby_covered():
    class Boasts(FedAvg):
        def training_step(self, batch, batch_idx):
            self.log("privacy/x", 1.0)
            return super().training_step(batch, batch_idx)

    assert "unprotected/privacy/x" in fit(client(Boasts), 1, poisson(), aggregator=rule()).round_metrics
