"""Lightning's own demo modules, unchanged: FedAvg is the loop by hand over stock Trainers, and resume is exact."""

import copy

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.demos.boring_classes import BoringModel, ManualOptimBoringModel, RandomDataset
from pytorch_lightning.demos.lstm import LightningLSTM
from pytorch_lightning.demos.transformer import LightningTransformer, Transformer
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

from fl_lightning import FederatedDataModule, FederatedLoop
from fl_lightning.data import FixedPartition
from fl_lightning.functional.state import weighted_mean
from tests.toys import equal, trainer

VOCABULARY = 11
PARTS = [list(range(0, 8)), list(range(8, 12)), list(range(12, 24))]
"""Samples of the clients; batches of 4 divide them, since the LSTM's state has the size of a batch."""


def words():
    draw = torch.Generator().manual_seed(0)
    text = torch.randint(VOCABULARY, (24, 6), generator=draw)
    return TensorDataset(text[:, :-1], text[:, 1:])


def transformer():
    module = LightningTransformer(vocab_size=VOCABULARY)
    module.model = Transformer(VOCABULARY, ninp=8, nhead=2, nhid=8, nlayers=1, dropout=0.0)
    return module


def lstm():
    module = LightningLSTM(vocab_size=VOCABULARY)
    for part in module.modules():
        if isinstance(part, nn.LSTM):
            part.dropout = 0.0
        elif isinstance(part, nn.Dropout):
            part.p = 0.0
    return module


CASES = {
    "BoringModel": (BoringModel, lambda: RandomDataset(32, 24)),
    "ManualOptimBoringModel": (ManualOptimBoringModel, lambda: RandomDataset(32, 24)),
    "LightningTransformer": (transformer, words),
    "LightningLSTM": (lstm, words),
}


@pytest.fixture(params=[*list(CASES)[:3], pytest.param("LightningLSTM", marks=pytest.mark.slow)])  # it is large
def case(request):
    """A factory of equal modules, and the samples."""
    make, samples = CASES[request.param]
    pl.seed_everything(5, verbose=False)
    first = make()
    return lambda: copy.deepcopy(first), samples()


def federate(module, samples, rounds, callbacks=(), ckpt_path=None):
    data = FederatedDataModule.from_datasets(
        samples, num_clients=3, partition=FixedPartition(PARTS), batch_size=4, shuffle=False
    )
    loop = FederatedLoop(module, seed=1)
    run = trainer(rounds, callbacks=list(callbacks), enable_checkpointing=bool(callbacks))
    run.fit(loop, datamodule=data, ckpt_path=ckpt_path)
    return dict(loop.client.module.state_dict())


def by_hand(module, samples, rounds):
    for _ in range(rounds):
        states = []
        for part in PARTS:
            client = copy.deepcopy(module)
            client.prepare_data = lambda: None  # a fit with loaders would download WikiText
            loader = DataLoader(Subset(samples, part), batch_size=4)
            trainer(1, limit_val_batches=0).fit(client, train_dataloaders=loader)
            states.append(client.state_dict())
        module.load_state_dict(weighted_mean(states, map(len, PARTS)))
    return dict(module.state_dict())


def test_fedavg_is_the_loop_by_hand(case):
    make, samples = case
    assert equal(federate(make(), samples, 2), by_hand(make(), samples, 2))


def test_resume_is_exact(case, tmp_path):
    make, samples = case
    whole = federate(make(), samples, 3)
    federate(make(), samples, 1, [ModelCheckpoint(tmp_path, "one")])
    assert equal(federate(make(), samples, 3, ckpt_path=tmp_path / "one.ckpt"), whole)
