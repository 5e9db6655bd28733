"""Values that people give wrongly in Python: each is refused in one sentence that says what is right."""

from functools import partial

import pytest
import pytorch_lightning as pl
import torch
from torch.utils.data import Subset, TensorDataset

from fl_lightning import FederatedDataModule, FederatedLoop
from fl_lightning.aggregation import KrumAggregator, TrimmedMeanAggregator
from fl_lightning.callbacks import RunPlots
from fl_lightning.data import (
    CIFAR10,
    ColumnPartition,
    Digits,
    DirichletPartition,
    FixedPartition,
    IIDPartition,
    ShardPartition,
    TensorSource,
)
from fl_lightning.methods import DPFedAvg, FedAvg, FedNTD, FedProx, Local
from fl_lightning.metrics import ClasswiseAccuracy
from fl_lightning.monitors import FeatureProbe, ForgettingMonitor, GroupMetrics, SampleReduction
from fl_lightning.nets import Perceptron, ResNet
from tests.toys import toy_data, trainer
from tests.user_modules import Plain

SAMPLES = TensorDataset(torch.zeros(40, 4), torch.arange(40) % 3)


def data(**settings):
    return FederatedDataModule(Digits(), **settings)


def of(train=SAMPLES, **settings):
    made = FederatedDataModule.from_datasets(train, SAMPLES, **settings)
    made.setup("fit")
    return made.label_counts


def fit(client=None, callbacks=(), federation=None, **settings):
    run = trainer(1)
    run.callbacks += callbacks
    run.fit(FederatedLoop(client or FedAvg(), **settings), datamodule=federation or toy_data())


class Detached(Plain):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx).detach()


class Untold(Plain):
    def configure_optimizers(self):
        return torch.optim.SGD


def accumulating():
    run = pl.Trainer(max_epochs=1, accumulate_grad_batches=2, logger=False, enable_checkpointing=False)
    run.fit(FederatedLoop(FedAvg()), datamodule=toy_data())


MISTAKES = {
    "a list of clients": (
        lambda: FederatedLoop([FedAvg(), FedProx()]),
        "all clients have one; nets that differ are Het",
    ),
    "a loop in a loop": (
        lambda: FederatedLoop(FederatedLoop(FedAvg())),
        "must not be a federation, got FederatedLoop; giv",
    ),
    "data in data": (
        lambda: FederatedDataModule(data()),
        "source must not be divided already, got Fed.*; give its sou",
    ),
    "net and module": (lambda: FedAvg(net=Perceptron, module=Plain()), "takes module= or net=, got both|got both"),
    "a module without logits": (
        lambda: FederatedLoop(FedNTD(module=Plain())),
        r"needs the logits of a net, got module=Plain; give it net=",
    ),
    "no clients": (lambda: data(num_clients=0), "num_clients must be at least 1, got 0"),
    "an empty batch": (lambda: data(batch_size=0), "batch_size must be at least 1, got 0; 'full' is the whole split"),
    "more than all": (lambda: data(val_fraction=1.5), r"val_fraction must lie in \[0, 1\), got 1.5; 0 holds nothing"),
    "no concentration": (lambda: DirichletPartition(0.0), "alpha must be positive, got 0.0: 0.1 gives each client few"),
    "negative samples": (
        lambda: DirichletPartition(0.1, min_samples=-1),
        "min_samples must be at least 0, got -1; 0 all",
    ),
    "no shards": (lambda: ShardPartition(0), "shards_per_client must be at least 1, got 0"),
    "a flat partition": (lambda: FixedPartition([0, 1]), "needs one flat list of whole numbers per client, got shape"),
    "an index beyond": (
        lambda: of(num_clients=1, partition=FixedPartition([[0, 99]])),
        r"indices must lie in 0 \.\.\. 39, got 99 for client 0",
    ),
    "no such column": (
        lambda: of(num_clients=2, partition=ColumnPartition("site")),
        "the samples have no column 'site'",
    ),
    "too few users": (lambda: of(by=[0, 1, 2]), "by= needs one value for each training sample, got 3 for 40 samples"),
    "users and a partition": (lambda: of(by=[0] * 40, partition=IIDPartition()), "takes by= or partition=, got both"),
    "no samples": (
        lambda: of(Subset(SAMPLES, []), num_clients=2),
        "got 2 clients for 0 samples: change num_clients, use",
    ),
    "labels for other samples": (
        lambda: TensorSource(*[(torch.zeros(4, 3), torch.zeros(5).long())] * 2).load(),
        "a split needs one label per sample, got 4 samples and 5 labels",
    ),
    "no files": (
        lambda: CIFAR10(root="nowhere").load(),
        "CIFAR10 was not found in root nowhere, .*: set `download: true`",
    ),
    "a negative weight": (lambda: FedProx(mu=-1), "mu must be at least 0, got -1; 0 is FedAvg"),
    "no temperature": (lambda: FedNTD(temperature=0), "temperature must be above 0, got 0"),
    "negative units": (
        lambda: fit(FedAvg(net=partial(Perceptron, hidden=[-3]))),
        "needs hidden layers of at least 1 unit",
    ),
    "units in text": (
        lambda: fit(FedAvg(net=partial(Perceptron, hidden="64"))),
        r"must make a net of \(num_classes, input",
    ),
    "images for vectors": (lambda: fit(FedAvg(net=ResNet)), r"ResNet needs images: an input_shape .*, got \(4,\)"),
    "classes in text": (lambda: ClasswiseAccuracy("10"), "num_classes must be a number, got '10'"),
    "no such weights": (
        lambda: fit(initial_weights="no.ckpt"),
        "initial_weights must be a file, got no.ckpt; give a ch",
    ),
    "nothing personal": (
        lambda: fit(personal=["no.*"]),
        r"personal: a pattern must match an entry .*'no\.\*' matches no",
    ),
    "a group of strangers": (
        lambda: fit(callbacks=[GroupMetrics({"a": [99]})]),
        r"must name some in \[0, 5\), got \[99\]",
    ),
    "a class beyond": (lambda: fit(callbacks=[SampleReduction(99)]), r"class_idx must lie in \[0, 3\), got 99"),
    "a client beyond": (
        lambda: fit(callbacks=[SampleReduction(0, client=99)]),
        r"client must lie in \[0, 5\), got 99",
    ),
    "no such layer": (
        lambda: fit(callbacks=[FeatureProbe(layer="net.no")]),
        "layer must name a module .*, got 'net.no'",
    ),
    "every zeroth round": (lambda: ForgettingMonitor(every=0), "every must be at least 1, got 0"),
    "a picture's form": (
        lambda: RunPlots(format="jpg"),
        "format must be one of png, pdf, svg, metrics, none, got 'jpg'",
    ),
    "a word of faults": (
        lambda: FederatedLoop(FedAvg(), faults="ignore"),
        "faults must be one of error, skip, got 'ign",
    ),
    "more than half": (lambda: TrimmedMeanAggregator(0.6), r"beta must lie in \[0, 0.5\), got 0.6; it is the share"),
    "too many liars": (
        lambda: fit(aggregator=KrumAggregator(f=50)),
        r"needs m ≥ 2f \+ 3 = 103 clients .*got cohorts of 5",
    ),
    "noise of no size": (
        lambda: fit(Local(), aggregator=DPFedAvg()),
        "needs noise_multiplier, or target_epsilon to find",
    ),
    "epochs of one": (
        lambda: fit(local_epochs=[1]),
        r"local_epochs as a list needs one number per client \(5\), got 1",
    ),
    "a cohort of strangers": (
        lambda: fit(federation=toy_data(schedule=[[99]])),
        r"must name different clients in \[0, 5",
    ),
    "a loss without a gradient": (
        lambda: fit(FedAvg(module=Detached())),
        "let training_step return a loss with a grad",
    ),
    "too few outputs": (
        lambda: fit(FedAvg(net=lambda *_: torch.nn.Linear(4, 2))),
        r"Target 2 is out of bounds.*; let the net have an output for each class that the data have \(num_classes\)",
    ),
    "the optimizer's class": (
        lambda: fit(FedAvg(module=Untold())),
        r"must return an optimizer, .*, got SGD \(the class, not an instance\); return such as torch.optim.SGD\(self",
    ),
    "a shift by number": (lambda: data(feature_shift=0.1), r"feature_shift must be a FeatureShift, .*got 0.1; give Fe"),
    "work in words": (
        lambda: data(local_work="half"),
        "local_work must be a number, got 'half'; it is a share of a cl",
    ),
    "a cohort by size": (
        lambda: data(clients_per_round=5),
        "'clients_per_round'; the clients of a round are cohort_size, an argument of FederatedDataModule",
    ),
    "samples before they are there": (
        lambda: data().label_counts,
        r"the samples must be loaded first; call setup\('fit'\) of the data, as a Trainer does",
    ),
    "the Trainer's batches": (accumulating, "accumulated by model.accumulate_grad_batches, not by trainer.accumulate"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistaken_value_ends_in_one_sentence(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make, sentence = MISTAKES[name]
    with pytest.raises((TypeError, ValueError, FileNotFoundError, RuntimeError), match=sentence) as caught:
        make()
    assert "\n" not in str(caught.value)
