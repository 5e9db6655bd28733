"""The likeliest first mistakes in Python end in one sentence with a remedy, where they are made."""

import subprocess
import sys
from functools import partial
from importlib import import_module
from pkgutil import iter_modules

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

import fl_lightning
from fl_lightning import FederatedDataModule, FederatedLoop, functional
from fl_lightning.aggregation import KrumAggregator, MedianAggregator, NormClip, TrimmedMeanAggregator
from fl_lightning.data import (
    ClientDirichletPartition,
    DatasetSource,
    Digits,
    DirichletPartition,
    IIDPartition,
    ShardPartition,
    TensorSource,
)
from fl_lightning.methods import MOON, SCAFFOLD, Ditto, FedAvg, FedBN, FedDFServer, FedNTD, FedProx
from fl_lightning.nets import Perceptron
from tests.toys import BatchNormNet, folded, toy_data, trainer
from tests.user_modules import Plain

DATA = TensorDataset(torch.randn(40, 4), torch.arange(40) % 3)
LOADER = DataLoader(DATA)
NET = nn.Linear(4, 3)
SGD_OBJECT = SGD(NET.parameters(), lr=0.1)
A_PARTIAL = r"give functools\.partial\(torch\.optim\.SGD, lr="


class OwnData(pl.LightningDataModule):
    def train_dataloader(self):
        return LOADER


def loop(**settings):
    return FederatedLoop(FedAvg(), **folded(settings))


def data(**settings):
    return FederatedDataModule(Digits(), **settings)


def fit(client, **settings):
    trainer(1).fit(FederatedLoop(client, **folded(settings)), datamodule=toy_data())


MISTAKES = {
    # a client
    "net object": (lambda: FedAvg(net=NET), r"net must be a function \(num_classes, input_shape\) .*got Linear; give"),
    "net by place": (lambda: FedAvg(NET), "net must be a function .* that makes a net, got Linear; give lambda num_cl"),
    "built net": (lambda: FedAvg(net=Perceptron(3, (4,))), "net must be a function .*, got Perceptron; give lambda"),
    "net name": (lambda: FedAvg(net="Perceptron"), "net must be a function .*, got 'Perceptron'; give lambda num_cla"),
    "net without arguments": (lambda: FedAvg(net=lambda: NET), r"net must be .* fails \(too many positional arg"),
    "net of other arguments": (lambda: fit(FedAvg(net=nn.Linear)), r"net=Linear must make a net of \(num_classes, in"),
    "net of nothing": (lambda: fit(FedAvg(net=lambda c, s: None)), "net must make a torch.nn.Module, got None; let"),
    "module as net": (lambda: FedAvg(Plain()), r"got the LightningModule Plain; give it by name: FedAvg\(module="),
    "module as mu": (lambda: FedProx(Plain()), r"mu must be a number, got Plain; give .* by name \(net=, module=\)"),
    "module as beta": (lambda: FedNTD(Plain()), r"beta must be a number, got Plain; .*module="),
    "module as lam": (lambda: Ditto(Plain()), r"lam must be a number, got Plain; .*module="),
    "module as mu of MOON": (lambda: MOON(Plain()), r"mu must be a number, got Plain; .*module="),
    "module as option": (lambda: SCAFFOLD(Plain()), "option must be one of I, II, got Plain"),
    "module in FedBN": (lambda: FedBN(Plain()), r"got the LightningModule Plain; give it by name: FedBN\(module="),
    "class of module": (lambda: FedAvg(module=Plain), r"got Plain \(the class.*\); give an instance, Plain\(\.\.\.\)"),
    "net as module": (lambda: FedAvg(module=NET), r"a client must be a LightningModule, .*got Linear; .*FedAvg\(net="),
    "optimizer name": (lambda: FedAvg(optimizer="sgd"), f"optimizer must be a function .*, got 'sgd'; {A_PARTIAL}"),
    "optimizer object": (lambda: FedAvg(optimizer=SGD_OBJECT), f"optimizer must be a function .*got SGD; {A_PARTIAL}"),
    "optimizer rate": (lambda: FedAvg(optimizer=0.1), f"optimizer must be a function .*, got 0.1; {A_PARTIAL}"),
    "optimizer dict": (lambda: FedAvg(optimizer={"lr": 0.1}), f"optimizer must be .*, got {{'lr': 0.1}}; {A_PARTIAL}"),
    "optimizer's arguments": (
        lambda: FedAvg(optimizer=partial(SGD, learning_rate=0.1)),
        f"optimizer must be .* unexpected keyword argument 'learning_rate'.*; {A_PARTIAL}",
    ),
    "optimizer of nothing": (lambda: FedAvg(optimizer=lambda: SGD_OBJECT), f"too many positional .*; {A_PARTIAL}"),
    "lr": (lambda: FedAvg(lr=0.1), r"FedAvg got an unexpected .*'lr'; it is the optimizer's: give .*partial\(torch.op"),
    "lr of another": (lambda: FedProx(mu=0.1, lr=0.1), r"FedProx got .*'lr'; it is the optimizer's"),
    "momentum": (lambda: FedAvg(momentum=0.9), "'momentum'; it is the optimizer's"),
    "model": (lambda: FedAvg(model=NET), "'model'; a client takes net="),
    "epochs of a client": (lambda: FedAvg(local_epochs=2), "'local_epochs'; it is an argument of FederatedLoop"),
    "batch of a client": (lambda: FedAvg(batch_size=2), "'batch_size'; it is an argument of FederatedDataModule"),
    "mu of FedAvg": (
        lambda: FedAvg(mu=0.1),
        "'mu'; it takes net, module, optimizer, lr_scheduler, num_classes, input_shape",
    ),
    "typing": (lambda: FedProx(mmu=0.1), "'mmu'; the nearest is 'mu'; it takes mu, net, "),
    "text": (lambda: FedProx(mu="0.1"), "mu must be a number, got '0.1'; 0 is FedAvg"),
    "classes": (lambda: FedAvg(num_classes="10"), "num_classes must be a whole number, got '10'"),
    "shape": (lambda: FedAvg(input_shape=64), "input_shape must be the sizes of one sample, got 64; give such as"),
    "client before the data": (lambda: FedAvg()(torch.zeros(1, 4)), "FedAvg has no net before it is built for the"),
    # a loop
    "class of client": (lambda: FederatedLoop(FedAvg), r"give an instance, FedAvg\(\.\.\.\)"),
    "net in a loop": (lambda: FederatedLoop(NET), r"got Linear; give a net by the function that makes it: FedAvg\(net"),
    "name in a loop": (lambda: FederatedLoop("FedAvg"), "a client must be a LightningModule, .* got 'FedAvg'"),
    "rule name": (
        lambda: loop(aggregator="median"),
        r"aggregator must be .* such as MedianAggregator\(\), got 'median",
    ),
    "rule class": (lambda: loop(aggregator=MedianAggregator), r"got MedianAggregator \(the class, not an instance\)"),
    "data in a loop": (lambda: FederatedLoop(FedAvg(), data()), "got FederatedDataModule; data are given to the Train"),
    "server optimizer": (lambda: loop(server_optimizer=SGD_OBJECT), f"server_optimizer must be .* SGD; {A_PARTIAL}"),
    "server optimizer's name": (lambda: loop(server_optimizer="sgd"), f"server_optimizer must.*'sgd'; {A_PARTIAL}"),
    "server scheduler": (
        lambda: loop(server_optimizer=SGD, server_lr_scheduler=StepLR(SGD_OBJECT, 1)),
        r"server_lr_scheduler must be a function \(optimizer\) .*got StepLR; give functools",
    ),
    "server class": (lambda: loop(server_module=FedDFServer), r"FedAvg needs a ServerModule, got FedDFServer \(the cl"),
    "half an epoch": (lambda: loop(local_epochs=1.5), "local_epochs must be a whole number, got 1.5; a list"),
    "half an epoch of one": (lambda: loop(local_epochs=[1, 1.5]), "local_epochs must be a whole number, got 1.5"),
    "no epochs": (lambda: loop(local_epochs=None), "local_epochs must be a whole number, got None; leave it out"),
    "half a step": (lambda: loop(max_local_steps=2.5), "max_local_steps must be a whole number, got 2.5"),
    "half a batch": (lambda: loop(accumulate_grad_batches=1.5), "accumulate_grad_batches must be a whole number"),
    "clip": (lambda: loop(clip_norm="1"), "clip_norm must be a number, got '1'"),
    "decay": (lambda: loop(lr_decay="cosine"), "lr_decay must be a number, got 'cosine'; {cosine: FINAL_LR}"),
    "transform name": (lambda: loop(transforms="NormClip"), "transforms must be .*'NormClip'; give .NormClip"),
    "transform class": (lambda: loop(transforms=[NormClip]), "transforms must be .*NormClip .the class"),
    "transform function": (lambda: loop(transforms=lambda update: update), "transforms must be .*got the function"),
    "metric name": (lambda: loop(metrics="accuracy"), "metrics must be torchmetrics objects, got 'accuracy'; give"),
    "metric names": (lambda: loop(metrics={"a": "accuracy"}), "metrics must be torchmetrics objects, got 'accuracy'"),
    "metric function": (lambda: loop(metrics=len), "metrics must be torchmetrics objects, got"),
    "personal function": (lambda: loop(personal=lambda name: True), "personal must be names or patterns of entries"),
    "rounds": (lambda: loop(rounds=10), r"'rounds'; rounds are epochs of the Trainer: Trainer\(max_epochs"),
    "clients of a loop": (lambda: loop(num_clients=10), "'num_clients'; it is an argument of FederatedDataModule"),
    "lr of a loop": (lambda: loop(lr=0.1), "'lr'; it is the optimizer's"),
    "chunk": (lambda: loop(chunk="all"), "chunk must be a whole number, got 'all'; 'auto' chooses it"),
    "seed": (lambda: loop(seed="0"), "seed must be a whole number, got '0'"),
    "alma": (lambda: loop(evaluate_clients_every="1"), "evaluate_clients_every must be a whole number, got '1'"),
    "patience": (lambda: loop(patience="3"), "patience must be a whole number, got '3'"),
    "store": (lambda: loop(store="/tmp"), "store must be a ClientStore"),
    "weights": (lambda: loop(initial_weights=NET.state_dict()), "initial_weights must be a file, got OrderedDict"),
    # data
    "source class": (lambda: FederatedDataModule(Digits), r"source must be an instance, .*; give Digits\(\.\.\.\)"),
    "source name": (lambda: FederatedDataModule("digits"), "source must be a source .*, got 'digits'; datasets are"),
    "dataset": (lambda: FederatedDataModule(DATA, DATA), r"got TensorDataset; datasets are given by .*from_datasets"),
    "loader": (lambda: FederatedDataModule(LOADER), "source must be a source of fl_lightning.data, .* got DataLoader"),
    "data class": (lambda: FederatedDataModule(OwnData), r"give an instance, OwnData\(\.\.\.\)"),
    "data class to federate": (
        lambda: FederatedDataModule.from_datamodule(OwnData),
        r"must be a LightningDataModule, .*got OwnData \(the class, not an instance\); give an instance, OwnData\(",
    ),
    "source to federate": (lambda: FederatedDataModule.from_datamodule(Digits()), r"as FederatedDataModule\(Digits\("),
    "loader to federate": (
        lambda: FederatedDataModule.from_datamodule(LOADER),
        r"DataLoader; datasets are given by .*",
    ),
    "number in text": (lambda: data(num_clients="10"), "num_clients must be a whole number, got '10'"),
    "half a client": (lambda: data(num_clients=2.5), "num_clients must be a whole number, got 2.5"),
    "partition by place": (
        lambda: FederatedDataModule(Digits(), IIDPartition()),
        "num_clients must be .*; give the partition by name: partition=",
    ),
    "partition name": (lambda: data(partition="dirichlet"), r"partition must be .*'dirichlet'; give DirichletPartiti"),
    "partition class": (lambda: data(partition=IIDPartition), "partition must be .*got IIDPartition .the class"),
    "alpha of data": (lambda: data(alpha=0.1), r"'alpha'; it is a partition's: .*DirichletPartition\(alpha=0.1\)"),
    "ten clients a round": (lambda: data(participation=10), r"participation must lie in \(0, 1\], got 10"),
    "participation": (lambda: data(participation="0.5"), "participation must be a number, got '0.5'"),
    "batch size": (lambda: data(batch_size="all"), "batch_size must be a whole number, got 'all'; 'full' is the whole"),
    "half a batch size": (lambda: data(batch_size=32.0), "batch_size must be a whole number, got 32.0"),
    "schedule": (lambda: data(schedule=[0, 1]), "schedule must be a list for each round, got 0; give such as"),
    "fraction": (lambda: data(val_fraction="0.1"), "val_fraction must be a number, got '0.1'"),
    "proxy": (lambda: data(extra_splits={"proxy": DATA}), r"extra_splits\['proxy'\] must be a source"),
    "proxies": (lambda: data(extra_splits=[DATA]), "extra_splits must be sources by the name of their split, got li"),
    "train and test": (
        lambda: FederatedDataModule(train=DATA, test=DATA),
        r"'train'; datasets are given by FederatedDataModule.from_datasets\(train, test\)",
    ),
    "loader of from_datasets": (
        lambda: FederatedDataModule.from_datasets(LOADER),
        "train must be a torch Dataset, got DataLoader; give its dataset, train=loader.dataset",
    ),
    "source of from_datasets": (
        lambda: DatasetSource(Digits()).load(),
        "train must be a torch Dataset, got Digits; give a dataset",
    ),
    "tensors": (lambda: TensorSource(torch.zeros(4, 3), torch.zeros(4)), r"train must be a pair \(samples, labels\)"),
    "alpha text": (lambda: DirichletPartition(alpha="0.1"), "alpha must be a number, got '0.1'"),
    "no alpha": (lambda: DirichletPartition(alpha=None), "alpha must be positive, got None"),
    "clients of a partition": (lambda: DirichletPartition(0.1, num_clients=3), "'num_clients'; it is an argument of F"),
    "half a shard": (lambda: ShardPartition(2.5), "shards_per_client must be a whole number, got 2.5"),
    "proportions": (lambda: ClientDirichletPartition("0.1"), "alpha must be a number, got '0.1'"),
    "krum": (lambda: KrumAggregator("1"), "f must be a number, got '1'"),
    "trimmed": (lambda: TrimmedMeanAggregator("0.1"), "beta must be a number, got '0.1'"),
    "norm": (lambda: NormClip("1"), "max_norm must be a number, got '1'"),
    # a fit
    "module alone": (lambda: trainer(1).fit(Plain(), toy_data()), r"Plain takes batches; fit FederatedLoop\(Plain\("),
    "client alone": (lambda: trainer(1).fit(FedAvg(), toy_data()), r"FedAvg alone trains .* FederatedLoop\(client=\."),
    "no data": (lambda: trainer(1).fit(FederatedLoop(FedAvg())), "a FederatedLoop needs datamodule=FederatedDataModu"),
    "loader to fit": (lambda: trainer(1).fit(FederatedLoop(FedAvg()), LOADER), "a FederatedLoop needs datamodule="),
    "own data to fit": (
        lambda: trainer(1).fit(FederatedLoop(FedAvg()), datamodule=OwnData()),
        "needs datamodule=FederatedDataModule.*, got OwnData; wrap your data in one",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_ends_in_one_sentence(name):
    make, sentence = MISTAKES[name]
    with pytest.raises((TypeError, ValueError, RuntimeError), match=sentence) as caught:
        make()
    assert "\n" not in str(caught.value)
    assert "0x" not in str(caught.value)


def test_what_is_no_mistake_passes():
    class Own(FedAvg):
        def __init__(self, width=3, **base):
            super().__init__(**base)

    class Factory:
        def __call__(self, num_classes, input_shape, depth=1):
            return BatchNormNet(num_classes, input_shape)

    makers = (
        None,
        Perceptron,
        Factory(),
        partial(BatchNormNet, dropout=0.0),
        lambda *args, **more: BatchNormNet(*args),
    )
    for net in makers:
        Own(net=net, optimizer=SGD, num_classes=np.int64(3), input_shape=[4])
    for optimizer in (SGD, partial(SGD, lr=0.1), partial(partial(SGD, lr=0.1), momentum=0.9), lambda p: SGD(p, 1.0)):
        loop(server_optimizer=optimizer, server_lr_scheduler=partial(StepLR, step_size=1))
        FedProx(mu=np.float32(0.1), optimizer=optimizer)
    data(num_clients=np.int64(3), participation=torch.tensor(0.5), partition=DirichletPartition(np.float64(0.5)))
    loop(local_epochs=np.int64(2), max_local_steps=torch.tensor(3), metrics={}, transforms=(), personal=("net.*",))
    fit(FedAvg(net=Factory()))


class Broken(FedAvg):
    """Has a bug in a line of its own."""

    def receive(self, broadcast, local):
        raise KeyError("a bug of one's own")


def test_only_a_line_of_the_users_own_is_to_be_mended():
    with pytest.raises(
        RuntimeError, match=r"KeyError .*\(.*test_mistakes.py, line \d+\); mend that line, or set model.faults.on"
    ):
        fit(Broken())
    with pytest.raises(ValueError, match=r"model.client.optimizer must make.*Invalid learning rate.*; give") as caught:
        fit(FedAvg(optimizer=partial(SGD, lr=-1.0)))
    assert "mend" not in str(caught.value)


# --- what is imported from the top ------------------------------------------------------------------------------


def test_what_users_type_is_imported_from_the_top():
    from fl_lightning import MOON, DirichletPartition, FedAvg, Perceptron, heartbeat, sign_flip  # noqa: F401
    from fl_lightning.functional import kl_divergence, mean_std, state  # noqa: F401

    for home in ("methods", "nets", "data", "aggregation"):
        room = import_module(f"fl_lightning.{home}")
        for name in dir(room):
            kind = getattr(room, name)
            top = isinstance(kind, type) and kind.__module__.startswith("fl_lightning.") and name in dir(fl_lightning)
            assert not top or getattr(fl_lightning, name) is kind
    assert set(import_module("fl_lightning.methods").__all__) <= set(dir(fl_lightning))
    for name in set(dir(fl_lightning)) - set(vars(fl_lightning)):
        assert getattr(fl_lightning, name).__name__ == name
    with pytest.raises(ImportError, match="cannot import name 'FedNtd' from 'fl_lightning'"):
        from fl_lightning import FedNtd  # noqa: F401
    with pytest.raises(AttributeError, match=r"module 'fl_lightning.functional' has no attribute 'nosuch'"):
        functional.nosuch  # noqa: B018


def test_every_function_of_functional_is_there_by_its_name_unless_a_module_has_it():
    modules = [module.name for module in iter_modules(functional.__path__)]
    seen = {}
    for home in modules:
        module = import_module(f"fl_lightning.functional.{home}")
        for name, found in vars(module).items():
            if name[0] != "_" and getattr(found, "__module__", "") == module.__name__ and name not in modules:
                assert seen.setdefault(name, home) == home, f"{name} is in two modules"
                assert getattr(functional, name) is found
                assert name in dir(functional)
    assert len(seen) > 40


ROOMS = ("data", "metrics", "monitors", "nets")


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_gives_its_public_names_when_they_are_asked_for(room):
    module = import_module(f"fl_lightning.{room}")
    names = {}
    exec(f"from fl_lightning.{room} import *", names)
    assert len(module.__all__) > 9
    for name in module.__all__:
        assert names[name] is getattr(module, name)
        assert not isinstance(names[name], type) or names[name].__module__.startswith(f"fl_lightning.{room}.")
        assert name in dir(module)
    with pytest.raises(AttributeError, match=rf"module 'fl_lightning.{room}' has no attribute 'nosuch'"):
        module.nosuch  # noqa: B018


def test_nothing_slow_is_imported_before_it_is_asked_for():
    rooms = ", ".join(f"fl_lightning.{room}" for room in ("functional", *ROOMS))
    code = f"import sys, {rooms}; print([n for n in ('torch', 'numpy') if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
