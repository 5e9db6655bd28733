"""What devices and pacings exclude is refused in one sentence, before anything trains."""

from functools import partial

import pytest
import torch
from torch.utils.data import IterableDataset

from fl_lightning import FederatedDataModule, FederatedLoop
from fl_lightning.aggregation import QSGD, FedAsync, FedBuff, Rounds, ServerModule
from fl_lightning.data import Devices, Stragglers
from fl_lightning.data.checks import check_simulated
from fl_lightning.engines.sequential import SequentialEngine
from fl_lightning.methods import (
    APFL,
    IFCA,
    CCVRServer,
    DPFedAvg,
    FedAMP,
    FedAvg,
    FedCL,
    FedCurv,
    FedDFServer,
    FedDyn,
    FedFOMO,
    FedGen,
    FedGKD,
    FedMD,
    FedPAC,
    FedProto,
    KnFu,
    SelectiveFD,
    local_dp,
)
from tests.toys import BatchNormNet, sgd, toy_data, trainer

FAST = Devices(step_seconds=0.1)


def refused(match, *, client=None, data=None, pacing=None, rounds=1, **settings):
    client = client or FedAvg(net=BatchNormNet, optimizer=sgd())
    loop = FederatedLoop(client, pacing=pacing or FedBuff(buffer=2), seed=0, **settings)
    data = {"devices": FAST, **(data or {})}
    with pytest.raises(ValueError, match=match) as caught:
        trainer(rounds).fit(loop, datamodule=toy_data(**data))
    assert "\n" not in str(caught.value)
    return loop


def test_a_pacing_needs_devices():
    refused(r"model.pacing=FedBuff needs data.devices, .* got None; set data.devices", data={"devices": None})


@pytest.mark.parametrize(
    ("data", "match"),
    [
        ({"schedule": [[0, 1]]}, "got data.schedule; leave data.schedule out, or model.pacing"),
        ({"availability": 0.5}, "got data.availability; leave"),
        ({"participation": 0.5, "sampling": "poisson"}, "got data.sampling=poisson; leave"),
        ({"pooled": True}, "data.pooled leaves one client with all samples, and model.pacing="),
    ],
)
def test_cohorts_that_are_drawn_otherwise(data, match):
    refused(match, data=data)
    refused(match, data=data, pacing=FedAsync())
    refused(match, data=data, pacing=Rounds(over_selection=0.5))


@pytest.mark.parametrize("pacing", [FedBuff(buffer=2), FedAsync(), Rounds(deadline=1.0), Rounds(over_selection=0.5)])
def test_stragglers_of_the_data(pacing):
    data = {"local_work": Stragglers(0.5), "participation": 0.8}
    refused(
        f"data.local_work.share and model.pacing={type(pacing).__name__} both say which",
        data=data,
        pacing=pacing,
        local_epochs=3,
    )


def test_a_buffer_of_more_clients_than_there_are():
    refused(
        "model.pacing.buffer must be at most the number of clients that train, got 6 of 5 clients; set it to 5 or",
        pacing=FedBuff(buffer=6),
    )


PROXY = {"proxy_size": 6}
TRANSFER = {"transfer_size": 6}


@pytest.mark.parametrize(
    ("kind", "data", "match"),
    [
        (FedPAC, {}, r"needs a method with one exchange a round, and FedPAC has 2 \(train, heads\)"),
        (KnFu, TRANSFER, "needs a method with one exchange a round, and KnFu has 2"),
        (FedMD, TRANSFER, "needs a method with one exchange a round, and FedMD has 2"),
        (SelectiveFD, {**TRANSFER, **PROXY}, "needs a method with one exchange a round, and SelectiveFD has 2"),
        (FedFOMO, {}, "those of FedFOMO start from models of their own"),
        (FedDyn, {}, r"FedDynServer keeps h, .*; set model.pacing.form to constant"),
        (partial(FedCurv, scope="last_round"), {}, "FedCurvServer with scope=last_round compares the rounds"),
        (FedProto, {}, "FedProtoServer keeps prototypes"),
        (FedGKD, {}, "FedGKDServer sends the mean of the last global models"),
        (FedGen, {}, "FedGenServer trains its generator on the clients' heads"),
        (IFCA, {}, "those of IFCA start from models of their own"),
        (FedAMP, {}, "start|FedAMPServer keeps the clients' models"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_methods(kind, data, match):
    refused(match, client=kind(net=BatchNormNet, optimizer=sgd(momentum=0.0)), data=data)


def test_server_modules():
    class Own(ServerModule):
        pass

    refused(r"Own does not say that it may have them \(takes_stale\)", server_module=Own())
    refused("FedDFServer takes the clients' models as teachers", server_module=FedDFServer(), data=PROXY)
    refused("and CCVRServer has 2", server_module=CCVRServer(every=1))


@pytest.mark.parametrize(
    ("client", "pacing", "data"),
    [
        (partial(FedCurv, scope="seen"), FedBuff(buffer=2), {}),
        (FedDyn, FedBuff(buffer=2, form="constant"), {}),
        (FedCL, FedBuff(buffer=2), PROXY),
        (APFL, FedAsync(), {}),
    ],
    ids=["FedCurv", "FedDyn", "FedCL", "APFL"],
)
def test_methods_that_take_late_updates(client, pacing, data):
    loop = FederatedLoop(client(net=BatchNormNet, optimizer=sgd(momentum=0.0)), pacing=pacing, seed=0)
    run = trainer(3, limit_val_batches=0)
    run.fit(loop, datamodule=toy_data(devices=Devices(step_seconds=[0.1, 1.0]), **data))
    assert loop.round_metrics["time/seconds"] > 0
    assert all(bool(torch.isfinite(value).all()) for value in loop.server.weights.values())


def test_guarantees():
    rule = DPFedAvg(clip=1.0, noise_multiplier=1.0)
    refused("a guarantee of privacy counts on who is drawn", aggregator=rule)
    client = local_dp(FedAvg(net=BatchNormNet, optimizer=sgd()), noise_multiplier=1.0)
    refused("a guarantee of privacy counts on who is drawn", client=client)


def test_coded_broadcasts():
    refused(r"which QSGD\(down=True\) codes anew in every round", codec=QSGD(bits=4, down=True))


def test_seconds_need_devices():
    for name in ("max_seconds", "evaluate_every_seconds"):
        loop = FederatedLoop(FedAvg(net=BatchNormNet, optimizer=sgd()), seed=0, **{name: 2.0})
        with pytest.raises(ValueError, match=f"model.{name} counts simulated seconds, .*got 2.0 and no devices"):
            trainer(1).fit(loop, datamodule=toy_data())


def test_too_few_seconds_for_a_round():
    rule = r"model.max_seconds must leave time for a round, got 0\.01, and the first one ends after 0\.2 s"
    refused(rule, max_seconds=0.01, rounds=-1, pacing=Rounds(), data={"participation": 0.2})


def test_two_settings_of_when_the_model_is_evaluated():
    loop = FederatedLoop(FedAvg(net=BatchNormNet, optimizer=sgd()), seed=0, evaluate_every_seconds=2.0)
    with pytest.raises(ValueError, match=r"both say when the global model is evaluated, got 2\.0 and 3; leave one"):
        trainer(1, check_val_every_n_epoch=3).fit(loop, datamodule=toy_data(devices=FAST))


class Endless(IterableDataset):
    """A stream of samples."""

    def __iter__(self):
        return iter([(torch.zeros(4), 0), (torch.ones(4), 1)])


def test_streams():
    data = FederatedDataModule.from_datasets(
        {0: Endless(), 1: Endless()}, num_classes=2, input_shape=(4,), devices=FAST
    )
    loop = FederatedLoop(FedAvg(net=BatchNormNet, optimizer=sgd()), seed=0, max_local_steps=2)
    with pytest.raises(ValueError, match="and those of a stream are not known before; leave out"):
        trainer(1, limit_val_batches=0).fit(loop, datamodule=data)


def test_samples_that_change():
    data = toy_data(devices=FAST)
    data.setup("fit")
    with pytest.raises(ValueError, match="set_class_count changes how long clients train"):
        data.set_class_count(0, 0, 1)


def test_clients_of_a_real_federation():
    with pytest.raises(ValueError, match=r"devices belongs to simulations, .* got Devices\(step_s"):
        check_simulated(toy_data(devices=FAST))


def test_seconds_of_pooled_samples():
    loop = FederatedLoop(FedAvg(net=BatchNormNet, optimizer=sgd()), seed=0, max_seconds=2.0)
    with pytest.raises(ValueError, match="max_seconds counts simulated seconds, and data"):
        trainer(1).fit(loop, datamodule=toy_data(devices=FAST, pooled=True))


def test_clients_elsewhere():
    class Elsewhere(SequentialEngine):
        is_remote = True

    loop = FederatedLoop(FedAvg(net=BatchNormNet, optimizer=sgd()), seed=0)
    loop.engine_factory = lambda engine: Elsewhere(engine.client)
    with pytest.raises(ValueError, match="belong to simulations"):
        trainer(1).fit(loop, datamodule=toy_data(devices=FAST))


def test_no_job_arrives(monkeypatch):
    monkeypatch.setattr("fl_lightning.aggregation.timeline.MOST_LOST", 100)
    rule = "a job must come back at some time, but the last 100 were lost; raise model.pacing.{}, or lower"
    refused(rule.format("timeout or max_staleness"), pacing=FedBuff(2, timeout=1e-9))
    refused(rule.format("deadline"), pacing=Rounds(deadline=1e-9))


def test_no_job_of_a_schedule_arrives():
    rule = "a job must come back at some time, but those of all 2 rounds are lost; raise model.pacing.deadline, or"
    refused(rule, pacing=Rounds(deadline=1e-9), data={"schedule": [[0, 1], [2]]})


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: Rounds(late="cut"), "model.pacing.late=cut needs model.pacing.deadline"),
        (lambda: Rounds(deadline=0), "model.pacing.deadline must be above 0"),
        (lambda: FedBuff(buffer=0), "model.pacing.buffer must be at least 1"),
        (lambda: FedBuff(form="linear"), "model.pacing.form must be"),
        (lambda: FedAsync(alpha=1.5), "model.pacing.alpha must be at most 1"),
        (lambda: FedBuff(timeout=-1.0), "model.pacing.timeout must be above 0"),
        (Devices, "data.devices must say what takes time"),
        (lambda: Devices(step_seconds=-1), "data.devices.step_seconds must be at least 0 and finite, got -1"),
        (lambda: Devices(step_seconds=[0.1, -1]), "σ of data.devices.step_seconds must be at least 0"),
        (lambda: Devices(step_seconds=1, up_mbps=0), "data.devices.up_mbps must be a speed above 0 in Mbit/s, got 0"),
        (lambda: Devices(step_seconds=1, dropout=1), r"data.devices.dropout must lie in \[0, 1\), got 1"),
        (lambda: Devices(step_seconds=[]), r"must be a number or a list of numbers, got \[\]"),
        (lambda: Devices(step_seconds=[1, 2, 3]).draw(5, 0), "must have a number for each of the 5 clients, got 3"),
    ],
)
def test_settings(make, match):
    with pytest.raises(ValueError, match=match):
        make()


def test_a_file_of_devices(tmp_path):
    path = tmp_path / "devices.csv"
    path.write_text("step_seconds,dropout\n0.5,0\n1.5,0.25\n")
    table = Devices(step_seconds=9.0, latency=0.1, file=str(path)).draw(2, seed=0)
    assert table.step_seconds.tolist() == [0.5, 1.5]
    assert table.dropout.tolist() == [0, 0.25]
    assert table.latency.tolist() == [0.1, 0.1]
    with pytest.raises(ValueError, match=r"each of the 3 clients, got 2; give the file 3 lines below its first one"):
        Devices(file=str(path)).draw(3, seed=0)
    for text, match in (
        ("speed\n1\n", "must name columns among step_seconds, .* got 'speed'"),
        ("step_seconds\n", "must have a line for each client, got none"),
        ("step_seconds\nfast\n", "step_seconds in line 2 of .* must be a number, got 'fast'"),
        ("step_seconds,dropout\n1\n", "must have a number for each column, got 1 for 2"),
        ("dropout\n2\n", r"dropout in line 2 of .* must lie in \[0, 1\), got 2"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=match):
            Devices(file=str(path))
    with pytest.raises(FileNotFoundError, match="must name a CSV file"):
        Devices(file=str(tmp_path / "none.csv"))
