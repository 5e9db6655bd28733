"""Federations for 1, 2 and 4 processes, and the script that runs them.

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
from fl_lightning.data import ClassIncremental, Devices, DomainIncremental, LabelDrift, Stragglers, Window
from fl_lightning.functional import state as S
from fl_lightning.methods import (
    SCAFFOLD,
    DPFedAvg,
    FedAvg,
    FedEWC,
    FedEXPAggregator,
    FedLwF,
    FedNTD,
    Local,
    Replay,
    dp_sgd,
)
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
from tests.processes.strategies import parallel
from tests.restless import Restless, RestlessNet
from tests.toys import BatchNormNet, folded, sgd, toy_data, trainer
from tests.user_data import Pairs, Sensors
from tests.user_modules import Adapted, Classifier

SIZES = (7, 12, 5, 0, 16, 9, 3)


class Median(GatheringAggregator):
    """Takes the median of every entry. The clients' rows come to the root process only."""

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
    """Remembers its last weights, is pulled to them, and keeps its head."""

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
    """Fails at client 2 in round 1 and at client 5 in round 2."""

    def receive(self, broadcast, local):
        fails = (local.client_id, broadcast.round_idx) in ((2, 1), (5, 2))
        self.round_buffer("factor", torch.tensor(float("inf") if fails else 1.0))

    def training_step(self, batch, batch_idx):
        return self.local_loss(batch, batch_idx) * self.round["factor"]


class Rounded(UpdateTransform):
    """Rounds what a client sends to three digits."""

    def on_client(self, update, broadcast):
        weights = {}
        for name, value in update.weights.items():
            weights[name] = value.double().mul(1000).round().div(1000).to(value)
        return replace(update, weights=weights)


class SomeLog(ClientModule):
    """Logs a key at one client only."""

    def training_step(self, batch, batch_idx):
        if self.context.client_id == 1:
            self.log("train/one", batch[0].mean())
        return self.local_loss(batch, batch_idx)


def loop_of(client, **settings):
    return FederatedLoop(client, seed=5, threads=1, **settings)


def fedavg():
    return loop_of(FedAvg(net=BatchNormNet, optimizer=sgd())), toy_data(SIZES)


def few():
    """Have fewer clients than ranks."""
    loop = loop_of(FedNTD(net=BatchNormNet, optimizer=sgd()))
    return loop, toy_data(SIZES, schedule=[[1], [2], [0, 6]])


def memory():
    momentum = sgd(0.7, 0.9)
    client = Mindful(net=BatchNormNet, optimizer=sgd())
    loop = loop_of(client, server_optimizer=momentum, evaluate_clients_every=1)
    return loop, toy_data(SIZES, participation=0.6)


def gathers(rule=Median):
    client = FedAvg(net=BatchNormNet, optimizer=sgd())
    return loop_of(client, aggregator=rule()), toy_data(SIZES)


def transforms():
    """Clip by a norm that lies between those of the clients."""
    client = FedAvg(net=BatchNormNet, optimizer=sgd())
    return loop_of(client, transforms=[Rounded(), NormClip(0.3)]), toy_data(SIZES)


def personal():
    client = FedAvg(net=BatchNormNet, optimizer=sgd())
    loop = loop_of(client, personal=["*body.1*", "*head*"], evaluate_clients_every=2)
    return loop, toy_data(SIZES, participation=0.6)


def skips():
    """Skip clients that have personal entries, whose mean leaves the failed client out too."""
    client = Exploding(net=BatchNormNet, optimizer=sgd())
    policy = FaultPolicy(nonfinite="skip")
    return loop_of(client, faults=policy, personal="*head*"), toy_data(SIZES)


def all_at_once():
    client = Exploding(net=BatchNormNet, optimizer=sgd())
    settings = {"transforms": [NormClip(0.3)], "personal": "*head*", "nonfinite": "skip"}
    return loop_of(client, aggregator=Median(), **folded(settings)), toy_data(SIZES)


def some_log():
    return loop_of(SomeLog(net=BatchNormNet, optimizer=sgd())), toy_data(SIZES)


def metrics():
    """Evaluate the user's metrics on the global model, whose samples do not divide, and on every client's model."""
    client = FedAvg(net=BatchNormNet, optimizer=sgd())
    own = {"f1": MulticlassF1Score(3), "auroc": MulticlassAUROC(3, average=None)}
    return loop_of(client, evaluate_clients_every=2, metrics=own), toy_data(SIZES, eval_batch_size=7)


def monitors():
    """Use every monitor. Only the last bits of the sums of moves depend on the order of the processes."""
    client = FedNTD(net=BatchNormNet, optimizer=sgd())
    return loop_of(client, local_epochs=2), toy_data(SIZES, participation=0.8)


def module():
    """Train a user's module with metric objects, and validation samples that do not divide."""
    pl.seed_everything(3, verbose=False)
    data = FederatedDataModule.from_datamodule(Pairs(), num_clients=5, participation=0.6, eval_batch_size=7)
    return loop_of(Classifier()), data


class Reads(Classifier):
    """Reads the batch after its validation step."""

    def on_validation_batch_end(self, outputs, batch, batch_idx, dataloader_idx=0):
        assert len(batch[0])


def one_batch():
    """Have all validation samples in one batch, so that other ranks have none and have logged no metric object."""
    pl.seed_everything(3, verbose=False)
    data = FederatedDataModule.from_datamodule(Pairs(), num_clients=5, participation=0.6)
    return loop_of(Reads()), data


def adapted():
    """Train a module with a frozen base, which travels to a client once."""
    pl.seed_everything(3, verbose=False)
    schedule = [[0, 1], [0, 1, 2], [4, 2, 6], [5, 0]]
    return loop_of(Adapted()), toy_data(SIZES, schedule=schedule)


def stacked():
    """Train clients in pairs. The stacks have the same size with one process and with several."""
    client = FedAvg(net=partial(BatchNormNet, dropout=0.0), optimizer=sgd())
    return loop_of(client, local_epochs=2, chunk=2), toy_data((10,) * 8)


def preprocessed():
    """Change batches by a callback of the module itself. Some ranks have no batch in validation."""
    pl.seed_everything(3, verbose=False)
    return loop_of(Scaled(), local_epochs=2), toy_data(SIZES, participation=0.6)


def restless():
    """Train a module that changes itself in evaluation. Its logged values depend on the division of the batches."""
    pl.seed_everything(3, verbose=False)
    return loop_of(Restless()), toy_data(SIZES, participation=0.6, eval_batch_size=7)


def restless_clients():
    """Do the same with a net that is also evaluated for every client."""
    client = FedAvg(net=RestlessNet, optimizer=sgd())
    loop = loop_of(client, evaluate_clients_every=1, personal="*head*")
    return loop, toy_data(SIZES, participation=0.6, eval_batch_size=7)


def averaging():
    """Evaluate the mean of two rounds by a rule, also for the clients."""
    client = FedAvg(net=BatchNormNet, optimizer=sgd())
    loop = loop_of(client, aggregator=FedEXPAggregator(), evaluate_clients_every=1)
    return loop, toy_data(SIZES, participation=0.6)


def averaged():
    """Evaluate averaged weights by a callback, also for the clients."""
    client = FedAvg(net=BatchNormNet, optimizer=sgd())
    loop = loop_of(client, evaluate_clients_every=1)
    return loop, toy_data(SIZES, participation=0.6)


def streams():
    """Train on streams, whose length is known only after the training."""
    pl.seed_everything(3, verbose=False)
    data = FederatedDataModule.from_datamodule(Sensors(), num_clients=4, participation=0.8)
    return loop_of(Classifier(), max_local_steps=4), data


def private():
    """Draw each client by itself, add noise to the sums, skip a client, and adapt the clip to the norms."""
    client = Exploding(net=BatchNormNet, optimizer=sgd())
    rule = DPFedAvg(noise_multiplier=1.0, delta=0.01, clip=0.5, quantile=0.5)
    policy = FaultPolicy(nonfinite="skip")
    loop = loop_of(client, aggregator=rule, faults=policy, personal="*head*")
    return loop, toy_data(SIZES, sampling="poisson", participation=0.6)


def private_stacked():
    """Train clients in pairs under a private rule."""
    client = FedAvg(net=partial(BatchNormNet, dropout=0.0), optimizer=sgd())
    loop = loop_of(client, aggregator=DPFedAvg(noise_multiplier=1.0, delta=0.01), chunk=2)
    return loop, toy_data((10,) * 8)


def coded():
    """Code both ways, with the lost part in the memory of the clients, and skip a client."""
    client = Exploding(net=BatchNormNet, optimizer=sgd())
    codec = QSGD(3, feedback=True, down=True)
    loop = loop_of(client, codec=codec, faults=FaultPolicy(nonfinite="skip"))
    return loop, toy_data(SIZES, participation=0.6)


def coded_stacked():
    """Train clients in pairs that keep what the code drops."""
    client = FedAvg(net=partial(BatchNormNet, dropout=0.0), optimizer=sgd())
    return loop_of(client, codec=TopK(0.1), chunk=2), toy_data((10,) * 8)


def hidden_samples():
    """Draw batches and noise for each client, and keep an account of each."""
    plain = FedAvg(net=partial(Perceptron, hidden=(8,)), optimizer=sgd())
    client = dp_sgd(plain, noise_multiplier=1.0, delta=0.01, sample_rate=0.3)
    return loop_of(client), toy_data(SIZES, participation=0.6)


LARGE = (0, 6)
"""Clients with a large net."""


class Unlike(Local):
    """Has a net of its own for every client. Those of clients 0 and 6 take thousands of times the operations.

    By the samples, and by the ids, one rank of two would train both.
    """

    def receive(self, broadcast, local):
        super().receive(broadcast, local)
        if local.client_id in LARGE:
            self.met.append(broadcast.round_idx)
            assert not torch.distributed.is_initialized() or len(self.met) == len(set(self.met))


def unlike():
    """Give two clients a much larger net."""
    nets = []
    for client_id in range(len(SIZES)):
        hidden = (200, 200) if client_id in LARGE else ()
        nets.append(partial(Perceptron, hidden=hidden))
    client = Unlike(net=partial(HeterogeneousNets, nets=nets), optimizer=sgd())
    client.met = []
    return loop_of(client, evaluate_clients_every=2), toy_data(SIZES)


def late():
    """Train clients with control variates that come back in later rounds. Some are lost."""
    client = SCAFFOLD(net=BatchNormNet, optimizer=sgd(momentum=0.0))
    devices = Devices(step_seconds=[0.2, 0.9], up_mbps=[2.0, 0.7], jitter=0.3, dropout=0.2)
    loop = loop_of(client, pacing=FedBuff(buffer=2))
    return loop, toy_data(SIZES, participation=0.6, devices=devices)


def tasks_of_a_module():
    """Test a module by its own steps on tasks of classes."""
    scenario = ClassIncremental([[0, 2], [1]], rounds_per_task=2, delay=1)
    pl.seed_everything(3, verbose=False)
    data = FederatedDataModule.from_datamodule(
        Pairs(), num_clients=5, num_classes=3, participation=0.6, scenario=scenario
    )
    return loop_of(FedEWC(module=Classifier(hidden=4)), evaluate_clients_every=1), data


def stragglers(late="cut"):
    """Let some clients of each round make fewer epochs, or take no part."""
    loop = loop_of(FedAvg(net=BatchNormNet, optimizer=sgd()), local_epochs=3)
    return loop, toy_data(SIZES, local_work=Stragglers(0.5, late))


def dropped():
    return stragglers("drop")


def changing():
    """Let clients meet tasks in an order of their own, join and leave, and keep their heads."""
    client = FedEWC(net=BatchNormNet, optimizer=sgd())
    loop = loop_of(client, personal="*head*", evaluate_clients_every=1)
    scenario = ClassIncremental([[0], [1], [2]], rounds_per_task=1, order="shuffled")
    stays = {1: [1, None], 4: [0, 1], 6: [0, 2]}
    return loop, toy_data(SIZES, cohort_size=4, scenario=scenario, stays=stays)


def replayed():
    """Train on samples of earlier domains with their logits."""
    client = Replay(net=BatchNormNet, optimizer=sgd(), size=4, alpha=0.5)
    scenario = DomainIncremental(2, noises=[0.0, 0.5], order="shuffled")
    return loop_of(client, chunk=2), toy_data(SIZES, cohort_size=4, scenario=scenario)


def drifting():
    """Distil from the model that a client had before its classes drifted."""
    loop = loop_of(FedLwF(net=BatchNormNet, optimizer=sgd()))
    return loop, toy_data(SIZES, cohort_size=4, scenario=LabelDrift(0.5, rounds=4))


def arriving():
    """Keep a sample for two rounds, and those of each class in the buffer for longer."""
    client = Replay(net=BatchNormNet, optimizer=sgd(), size=4, select="balanced")
    return loop_of(client), toy_data(SIZES, cohort_size=4, scenario=Window(0.3, keep=2))


LIST = (
    fedavg,
    replayed,
    drifting,
    arriving,
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
    """Return the callbacks of a case, which write their files to a folder."""
    if name == "averaging":
        return [groups()]
    if name == "averaged":
        return [EMAWeightAveraging(decay=0.5), groups()]
    if name != "monitors":
        return []
    return [
        ForgettingMonitor(epochs=True, dirpath=folder),
        PersonalisedAccuracy(train=True),
        DriftMonitor(dirpath=folder),
        ClientTable(dirpath=folder),
        groups(dirpath=folder),
        NeuronActivations(every=2, dirpath=folder),
        FeatureProbe(every=4, samples=12, plot=False, dirpath=folder),
        LossLandscape(every=4, samples=12, grid=3, repeats=2, iterations=4, clients=[1, 4], dirpath=folder),
        SampleReduction(class_idx=0, client=4, start=1, every=1, step=0.1),
    ]


def groups(**settings):
    return GroupMetrics({"first": [0, 1], "others": [2, 4, 6]}, {"f1": MulticlassF1Score(3)}, **settings)


class Trouble(pl.Callback):
    """Fails in the third round at the first client of the last rank, in the way that is asked."""

    def __init__(self, how):
        self.how = how
        self.done = False

    def on_client_start(self, trainer, loop, client_id):
        is_last_rank = trainer.global_rank == trainer.world_size - 1
        if trainer.current_epoch < 2 or not is_last_rank or self.done:
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
    """Fit four rounds with a failure, and save a checkpoint after each."""
    loop, data = gathers(Stuck) if how == "rule" else fedavg()
    save = pl.callbacks.ModelCheckpoint(
        folder,
        filename="last",
        save_on_train_epoch_end=True,
        enable_version_counter=False,
    )
    run = trainer(4, folder, callbacks=[Trouble(how), save], enable_checkpointing=True, **parallel(devices))
    run.fit(loop, datamodule=data)


def digest(loop):
    """Return the hash of the weights and the state of the server."""
    values = [value.float().numpy().tobytes() for value in loop.state_dict().values()]
    return hashlib.sha256(b"".join(values)).hexdigest()


def run_case(name, folder, devices):
    """Fit four rounds, with a checkpoint after two, from which other numbers of processes go on."""
    run, found = fitted(name, folder, devices, checkpoint=folder / f"{name}-{devices}.ckpt")
    other = folder / f"{name}-1.ckpt"
    if devices > 1 and other.is_file():
        run, resumed = fitted(name, folder, devices, ckpt_path=other)
        found |= {"resumed": resumed["hash"], "resumed_rows": resumed["rows"]}
    if run.is_global_zero:
        (folder / f"{name}-{devices}.json").write_text(json.dumps(found))


def fitted(name, folder, devices, *, checkpoint=None, ckpt_path=None):
    """Fit a case, and return the Trainer, with the hash and the rows of the run."""
    loop, data = CASES[name]()
    rounds = 3 if name == "few" else 4
    rows = Rows(checkpoint)
    files = folder / (f"{name}-{devices}" if ckpt_path is None else f"{name}-{devices}-resumed")
    run = trainer(rounds, folder, callbacks=[*callbacks_of(name, files), rows], **parallel(devices))
    run.fit(loop, datamodule=data, ckpt_path=ckpt_path)
    return run, {"hash": digest(loop), "rows": rows.rows}


class Rows(pl.Callback):
    """Keeps the row of each round, and saves a checkpoint in the second round.

    Args:
        path: Path of the checkpoint.
    """

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
