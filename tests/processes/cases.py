"""Federations that are run with 1, 2 and 4 processes, and the script that runs them.

`python cases.py FOLDER DEVICES CASE...` writes what rank 0 sees of each case to FOLDER/CASE-DEVICES.json.
"""

import hashlib
import json
import os
import signal
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks.weight_averaging import EMAWeightAveraging
from torchmetrics.classification import MulticlassAUROC, MulticlassF1Score

from fl_lightning import ClientModule, FaultPolicy, FederatedDataModule, FederatedLoop
from fl_lightning.aggregation import QSGD, FedBuff, GatheringAggregator, NormClip, TopK, UpdateTransform
from fl_lightning.data import ClassIncremental, Devices, Stragglers
from fl_lightning.distributed import ClientParallelStrategy
from fl_lightning.functional import state as S
from fl_lightning.methods import SCAFFOLD, DPFedAvg, FedAvg, FedEWC, FedEXPAggregator, FedNTD, Local, dp_sgd
from fl_lightning.monitors import (
    ClientTable,
    DriftMonitor,
    FeatureProbe,
    ForgettingMonitor,
    GroupMetrics,
    LossLandscape,
    NeuronActivations,
    PersonalisedAccuracy,
    SampleReduction,
)
from fl_lightning.nets import HeterogeneousNets, Perceptron
from tests.client.test_forwarding import Scaled
from tests.restless import Restless, RestlessNet
from tests.toys import BatchNormNet, folded, sgd, toy_data, trainer
from tests.user_data import Pairs, Sensors
from tests.user_modules import Adapted, Classifier

SIZES = (7, 12, 5, 0, 16, 9, 3)


class Median(GatheringAggregator):
    """Of every entry the middle value; the clients' rows come to the root process only."""

    def begin_round(self, cohort):
        self.cohort = cohort

    def end_exchange(self):
        is_root = not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
        assert list(self.rows) == (self.cohort if is_root else [])
        super().end_exchange()

    def reduce(self, updates):
        rows = [update.weights for update in updates.values()]
        stacked = {name: torch.stack([row[name].double() for row in rows]) for name in self.server.trainable}
        return {name: values.quantile(0.5, 0).to(rows[0][name].dtype) for name, values in stacked.items()}


class Stuck(Median):
    """Fails in the third round, on the root process, which alone reduces."""

    def reduce(self, updates):
        if self.server.round_idx == 2:
            raise ValueError("no value is in the middle")
        return super().reduce(updates)


class Mindful(ClientModule):
    """Remembers its last weights and is pulled to them; keeps its head."""

    def is_personal(self, name, owner):
        return "head" in name

    def training_step(self, batch, batch_idx):
        loss = self.local_loss(batch, batch_idx)
        last = self.memory.get("last")
        if last is None:
            return loss
        moved = S.sub(self.params(), last)
        return loss + 0.1 * S.inner(moved, moved)

    def reply(self, exchange, local):
        self.memory["last"] = S.clone(self.params())
        return {}


class Exploding(FedAvg):
    """Client 2 fails in round 1, client 5 in round 2."""

    def receive(self, broadcast, local):
        fails = (local.client_id, broadcast.round_idx) in ((2, 1), (5, 2))
        self.round_buffer("factor", torch.tensor(float("inf") if fails else 1.0))

    def training_step(self, batch, batch_idx):
        return self.local_loss(batch, batch_idx) * self.round["factor"]


class Rounded(UpdateTransform):
    """The client sends three digits."""

    def on_client(self, update, broadcast):
        weights = {name: value.double().mul(1000).round().div(1000).to(value) for name, value in update.weights.items()}
        return replace(update, weights=weights)


class SomeLog(ClientModule):
    """A key that only one client logs."""

    def training_step(self, batch, batch_idx):
        if self.context.client_id == 1:
            self.log("train/one", batch[0].mean())
        return self.local_loss(batch, batch_idx)


def fedavg():
    return FederatedLoop(FedAvg(net=BatchNormNet, optimizer=sgd()), seed=5, threads=1), toy_data(SIZES)


def few():
    """Fewer clients than ranks."""
    loop = FederatedLoop(FedNTD(net=BatchNormNet, optimizer=sgd()), seed=5, threads=1)
    return loop, toy_data(SIZES, schedule=[[1], [2], [0, 6]])


def memory():
    momentum = lambda params: torch.optim.SGD(params, 0.7, 0.9)  # noqa: E731
    client = Mindful(net=BatchNormNet, optimizer=sgd())
    loop = FederatedLoop(client, seed=5, threads=1, server_optimizer=momentum, evaluate_clients_every=1)
    return loop, toy_data(SIZES, participation=0.6)


def gathers(rule=Median):
    client = FedAvg(net=BatchNormNet, optimizer=sgd())
    return FederatedLoop(client, aggregator=rule(), seed=5, threads=1), toy_data(SIZES)


def transforms():
    """The norm that cuts lies between those of the clients."""
    client = FedAvg(net=BatchNormNet, optimizer=sgd())
    return FederatedLoop(client, transforms=[Rounded(), NormClip(0.3)], seed=5, threads=1), toy_data(SIZES)


def personal():
    client = FedAvg(net=BatchNormNet, optimizer=sgd())
    loop = FederatedLoop(client, personal=["*body.1*", "*head*"], seed=5, threads=1, evaluate_clients_every=2)
    return loop, toy_data(SIZES, participation=0.6)


def skips():
    """With personal entries, whose mean leaves the failed client out too."""
    client = Exploding(net=BatchNormNet, optimizer=sgd())
    policy = FaultPolicy(nonfinite="skip")
    return FederatedLoop(client, faults=policy, personal="*head*", seed=5, threads=1), toy_data(SIZES)


def all_at_once():
    client = Exploding(net=BatchNormNet, optimizer=sgd())
    settings = {"transforms": [NormClip(0.3)], "personal": "*head*", "nonfinite": "skip"}
    return FederatedLoop(client, aggregator=Median(), seed=5, threads=1, **folded(settings)), toy_data(SIZES)


def some_log():
    return FederatedLoop(SomeLog(net=BatchNormNet, optimizer=sgd()), seed=5, threads=1), toy_data(SIZES)


def metrics():
    """The user's metrics on the global model, whose samples do not divide, and on every client's."""
    client = FedAvg(net=BatchNormNet, optimizer=sgd())
    own = {"f1": MulticlassF1Score(3), "auroc": MulticlassAUROC(3, average=None)}
    return FederatedLoop(client, seed=5, threads=1, evaluate_clients_every=2, metrics=own), toy_data(
        SIZES, eval_batch_size=7
    )


def monitors():
    """Every monitor; only the sums of moves depend on the order of the processes, in the last bits."""
    client = FedNTD(net=BatchNormNet, optimizer=sgd())
    return FederatedLoop(client, seed=5, threads=1, local_epochs=2), toy_data(SIZES, participation=0.8)


def module():
    """A user's module with metric objects, and validation samples that do not divide."""
    pl.seed_everything(3, verbose=False)
    data = FederatedDataModule.from_datamodule(Pairs(), num_clients=5, participation=0.6, eval_batch_size=7)
    return FederatedLoop(Classifier(), seed=5, threads=1), data


class Reads(Classifier):
    """Uses what its validation step is given."""

    def on_validation_batch_end(self, outputs, batch, batch_idx, dataloader_idx=0):
        assert len(batch[0])


def one_batch():
    """All validation samples in one batch, so that other ranks have none and have logged no metric object."""
    pl.seed_everything(3, verbose=False)
    data = FederatedDataModule.from_datamodule(Pairs(), num_clients=5, participation=0.6)
    return FederatedLoop(Reads(), seed=5, threads=1), data


def adapted():
    """A frozen base, which travels to a client once."""
    pl.seed_everything(3, verbose=False)
    schedule = [[0, 1], [0, 1, 2], [4, 2, 6], [5, 0]]
    return FederatedLoop(Adapted(), seed=5, threads=1), toy_data(SIZES, schedule=schedule)


def stacked():
    """Clients in pairs, whoever trains them: the stacks are of the same size with one process and with several."""
    client = FedAvg(net=partial(BatchNormNet, dropout=0.0), optimizer=sgd())
    return FederatedLoop(client, seed=5, threads=1, local_epochs=2, chunk=2), toy_data((10,) * 8)


def preprocessed():
    """A callback of the module's own changes batches, of which some ranks have none in validation."""
    pl.seed_everything(3, verbose=False)
    return FederatedLoop(Scaled(), seed=5, threads=1, local_epochs=2), toy_data(SIZES, participation=0.6)


def restless():
    """A module that changes itself in evaluation, whose batches processes divide: logged values depend on that."""
    pl.seed_everything(3, verbose=False)
    return FederatedLoop(Restless(), seed=5, threads=1), toy_data(SIZES, participation=0.6, eval_batch_size=7)


def restless_clients():
    """The same for a net that is evaluated for every client, too."""
    client = FedAvg(net=RestlessNet, optimizer=sgd())
    loop = FederatedLoop(client, seed=5, threads=1, evaluate_clients_every=1, personal="*head*")
    return loop, toy_data(SIZES, participation=0.6, eval_batch_size=7)


def averaging():
    """A rule that evaluates the mean of two rounds, of the clients, too."""
    client = FedAvg(net=BatchNormNet, optimizer=sgd())
    loop = FederatedLoop(client, FedEXPAggregator(), seed=5, threads=1, evaluate_clients_every=1)
    return loop, toy_data(SIZES, participation=0.6)


def averaged():
    """The same by a callback."""
    client = FedAvg(net=BatchNormNet, optimizer=sgd())
    loop = FederatedLoop(client, seed=5, threads=1, evaluate_clients_every=1)
    return loop, toy_data(SIZES, participation=0.6)


def streams():
    """Samples that have no number until they were trained on."""
    pl.seed_everything(3, verbose=False)
    data = FederatedDataModule.from_datamodule(Sensors(), num_clients=4, participation=0.8)
    return FederatedLoop(Classifier(), seed=5, threads=1, max_local_steps=4), data


def private():
    """Noisy sums of clients drawn each by itself, of whom one is skipped, and a clip that follows them."""
    client = Exploding(net=BatchNormNet, optimizer=sgd())
    rule = DPFedAvg(noise_multiplier=1.0, delta=0.01, clip=0.5, quantile=0.5)
    policy = FaultPolicy(nonfinite="skip")
    loop = FederatedLoop(client, aggregator=rule, faults=policy, personal="*head*", seed=5, threads=1)
    return loop, toy_data(SIZES, sampling="poisson", participation=0.6)


def private_stacked():
    """Clients in pairs under a private rule."""
    client = FedAvg(net=partial(BatchNormNet, dropout=0.0), optimizer=sgd())
    loop = FederatedLoop(client, aggregator=DPFedAvg(noise_multiplier=1.0, delta=0.01), seed=5, threads=1, chunk=2)
    return loop, toy_data((10,) * 8)


def coded():
    """Both ways, with what is lost in the memory of clients of whom one is skipped."""
    client = Exploding(net=BatchNormNet, optimizer=sgd())
    codec = QSGD(3, feedback=True, down=True)
    loop = FederatedLoop(client, codec=codec, faults=FaultPolicy(nonfinite="skip"), seed=5, threads=1)
    return loop, toy_data(SIZES, participation=0.6)


def coded_stacked():
    """Clients in pairs that keep back what they do not send."""
    client = FedAvg(net=partial(BatchNormNet, dropout=0.0), optimizer=sgd())
    return FederatedLoop(client, codec=TopK(0.1), seed=5, threads=1, chunk=2), toy_data((10,) * 8)


def hidden_samples():
    """Batches, noise and accounts of each client's own."""
    client = dp_sgd(FedAvg(net=partial(Perceptron, hidden=(8,)), optimizer=sgd()), 1.0, delta=0.01, sample_rate=0.3)
    return FederatedLoop(client, seed=5, threads=1), toy_data(SIZES, participation=0.6)


class Unlike(Local):
    """A net of its own for every client. That of clients 0 and 6 has thousands of times the operations.

    By its samples, and by its id, one rank of two would train both.
    """

    def receive(self, broadcast, local):
        super().receive(broadcast, local)
        if local.client_id in (0, 6):
            self.met.append(broadcast.round_idx)
            assert not torch.distributed.is_initialized() or len(self.met) == len(set(self.met))


def unlike():
    """Clients of which two have a much larger net."""
    nets = [partial(Perceptron, hidden=(200, 200) if client_id in (0, 6) else ()) for client_id in range(len(SIZES))]
    client = Unlike(net=partial(HeterogeneousNets, nets=nets), optimizer=sgd())
    client.met = []
    return FederatedLoop(client, seed=5, threads=1, evaluate_clients_every=2), toy_data(SIZES)


def late():
    """Clients that come back in later rounds, with control variates; some are lost."""
    client = SCAFFOLD(net=BatchNormNet, optimizer=sgd(momentum=0.0))
    devices = Devices(step_seconds=[0.2, 0.9], up_mbps=[2.0, 0.7], jitter=0.3, dropout=0.2)
    loop = FederatedLoop(client, pacing=FedBuff(buffer=2), seed=5, threads=1)
    return loop, toy_data(SIZES, participation=0.6, devices=devices)


def tasks_of_a_module():
    """A module that is tested by its own steps on tasks of classes."""
    scenario = ClassIncremental([[0, 2], [1]], rounds_per_task=2, delay=1)
    pl.seed_everything(3, verbose=False)
    data = FederatedDataModule.from_datamodule(
        Pairs(), num_clients=5, num_classes=3, participation=0.6, scenario=scenario
    )
    return FederatedLoop(FedEWC(module=Classifier(hidden=4)), seed=5, threads=1, evaluate_clients_every=1), data


def stragglers(late="cut"):
    """Some clients of each round make fewer epochs, or take no part."""
    loop = FederatedLoop(FedAvg(net=BatchNormNet, optimizer=sgd()), seed=5, threads=1, local_epochs=3)
    return loop, toy_data(SIZES, local_work=Stragglers(0.5, late))


def dropped():
    return stragglers("drop")


def changing():
    """Clients that meet tasks of their own order, join and leave, and keep their heads."""
    client = FedEWC(net=BatchNormNet, optimizer=sgd())
    loop = FederatedLoop(client, seed=5, threads=1, personal="*head*", evaluate_clients_every=1)
    scenario = ClassIncremental([[0], [1], [2]], rounds_per_task=1, order="shuffled")
    stays = {1: [1, None], 4: [0, 1], 6: [0, 2]}
    return loop, toy_data(SIZES, cohort_size=4, scenario=scenario, stays=stays)


LIST = (
    fedavg,
    late,
    tasks_of_a_module,
    few,
    memory,
    gathers,
    transforms,
    personal,
    skips,
    all_at_once,
    some_log,
    metrics,
    monitors,
    module,
    one_batch,
    adapted,
    stacked,
    averaging,
    averaged,
    streams,
    private,
    private_stacked,
    coded,
    coded_stacked,
    hidden_samples,
    preprocessed,
    restless,
    restless_clients,
    unlike,
    stragglers,
    dropped,
    changing,
)
CASES = {case.__name__: case for case in LIST}
RESTLESS = ("restless", "restless_clients")


def callbacks_of(name, folder):
    if name in ("averaging", "averaged"):
        groups = GroupMetrics({"first": [0, 1], "others": [2, 4, 6]}, {"f1": MulticlassF1Score(3)})
        return [groups] if name == "averaging" else [EMAWeightAveraging(decay=0.5), groups]
    if name != "monitors":
        return []
    return [
        ForgettingMonitor(epochs=True, dirpath=folder),
        PersonalisedAccuracy(train=True),
        DriftMonitor(dirpath=folder),
        ClientTable(dirpath=folder),
        GroupMetrics({"first": [0, 1], "others": [2, 4, 6]}, {"f1": MulticlassF1Score(3)}, dirpath=folder),
        NeuronActivations(every=2, dirpath=folder),
        FeatureProbe(every=4, samples=12, plot=False, dirpath=folder),
        LossLandscape(every=4, samples=12, grid=3, repeats=2, iterations=4, clients=[1, 4], dirpath=folder),
        SampleReduction(class_idx=0, client=4, start=1, every=1, step=0.1),
    ]


class Trouble(pl.Callback):
    """In the third round rank 1's first client fails in the way that is asked."""

    def __init__(self, how):
        self.how = how
        self.done = False

    def on_client_start(self, trainer, loop, client_id):
        if trainer.current_epoch < 2 or trainer.global_rank != trainer.world_size - 1 or self.done:
            return
        self.done = True
        if self.how == "exception":
            raise ValueError("the disk of client data is gone")
        if self.how == "gather":
            loop.client.all_gather(torch.ones(()))
        if self.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.how == "nan":
            with torch.no_grad():
                next(iter(loop.client.params().values())).fill_(float("nan"))


def trouble(how, folder, devices):
    loop, data = gathers(Stuck) if how == "rule" else fedavg()
    settings = {"save_on_train_epoch_end": True, "enable_version_counter": False}
    save = pl.callbacks.ModelCheckpoint(folder, filename="last", **settings)
    run = trainer(4, folder, callbacks=[Trouble(how), save], enable_checkpointing=True, **parallel(devices))
    run.fit(loop, datamodule=data)


def parallel(devices):
    return {} if devices == 1 else {"strategy": ClientParallelStrategy(), "devices": devices}


def digest(loop):
    values = [value.float().numpy().tobytes() for value in loop.state_dict().values()]
    return hashlib.sha256(b"".join(values)).hexdigest()


def run_case(name, folder, devices):
    """Four rounds; a checkpoint after two, from which other numbers of processes go on."""
    loop, data = CASES[name]()
    rounds = 3 if name == "few" else 4
    rows = Rows(folder / f"{name}-{devices}.ckpt")
    files = folder / f"{name}-{devices}"
    run = trainer(rounds, folder, callbacks=[*callbacks_of(name, files), rows], **parallel(devices))
    run.fit(loop, datamodule=data)
    found = {"hash": digest(loop), "rows": rows.rows}
    other = folder / f"{name}-1.ckpt"
    if devices > 1 and other.is_file():
        loop, data = CASES[name]()
        rows = Rows(None)
        files = folder / f"{name}-{devices}-resumed"
        run = trainer(rounds, folder, callbacks=[*callbacks_of(name, files), rows], **parallel(devices))
        run.fit(loop, datamodule=data, ckpt_path=other)
        found |= {"resumed": digest(loop), "resumed_rows": rows.rows}
    if run.is_global_zero:
        (folder / f"{name}-{devices}.json").write_text(json.dumps(found))


class Rows(pl.Callback):
    def __init__(self, path):
        self.path = path
        self.rows = []

    def on_train_epoch_end(self, trainer, loop):
        self.rows.append(dict(loop.round_metrics))
        if trainer.current_epoch == 1:
            trainer.save_checkpoint(self.path)


if __name__ == "__main__":
    where, count, *names = sys.argv[1:]
    torch.set_num_threads(1)
    for each in names:
        if each in CASES:
            run_case(each, Path(where), int(count))
        else:
            trouble(each, Path(where), int(count))
