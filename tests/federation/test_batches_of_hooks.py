"""In an evaluation of the global model the hooks on batches and the step see one batch, as in Lightning."""

from dataclasses import dataclass

import pytest
import torch
from pytorch_lightning import Callback, LightningDataModule, LightningModule
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fl_lightning import FederatedDataModule, FederatedLoop
from tests.toys import trainer

X = torch.randn(24, 3, generator=torch.Generator().manual_seed(0))
STAGES = ("validation", "test", "predict")


@dataclass
class Record:
    """A batch that a step completes, as those of anomalib."""

    x: torch.Tensor
    score: torch.Tensor | None = None


def as_dictionary(samples):
    return {"x": torch.stack([x for (x,) in samples])}


def as_record(samples):
    return Record(torch.stack([x for (x,) in samples]))


def as_list(samples):
    return [torch.stack([x for (x,) in samples]), None]


def get(batch, name):
    if isinstance(batch, list):
        return batch[["x", "score"].index(name)]
    return batch[name] if isinstance(batch, dict) else getattr(batch, name)


def put(batch, name, value):
    if isinstance(batch, list):
        batch[["x", "score"].index(name)] = value
    elif isinstance(batch, dict):
        batch[name] = value
    else:
        setattr(batch, name, value)


class Scores(Callback):
    """Reads what the step has left in the batch, as the metrics of anomalib."""

    def __init__(self, seen):
        self.seen = seen

    def note(self, *args):
        batch = args[3]
        self.seen.append(("callback", round(float(get(batch, "x").sum()), 4), get(batch, "score").tolist()))

    on_validation_batch_end = on_test_batch_end = on_predict_batch_end = note


class Completes(LightningModule):
    """Transforms its batches, and completes them in a step."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 1)
        self.seen = []

    def configure_callbacks(self):
        return [Scores(self.seen)]

    def on_after_batch_transfer(self, batch, dataloader_idx):
        if not self.trainer.training:
            put(batch, "x", get(batch, "x") * 2)
        return batch

    def start(self, batch, batch_idx, dataloader_idx=0):
        self.seen.append(("start", round(float(get(batch, "x").sum()), 4)))

    def step(self, batch, batch_idx):
        put(batch, "score", self.layer(get(batch, "x")).sum(1))

    def end(self, outputs, batch, batch_idx, dataloader_idx=0):
        self.seen.append(("end", get(batch, "score").tolist()))

    on_validation_batch_start = on_test_batch_start = on_predict_batch_start = start
    validation_step = test_step = predict_step = step
    on_validation_batch_end = on_test_batch_end = on_predict_batch_end = end

    def training_step(self, batch, batch_idx):
        return self.layer(get(batch, "x")).pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Data(LightningDataModule):
    def __init__(self, collate_fn):
        super().__init__()
        self.collate_fn = collate_fn

    def loader(self):
        return DataLoader(TensorDataset(X), batch_size=6, collate_fn=self.collate_fn)

    train_dataloader = val_dataloader = test_dataloader = predict_dataloader = loader


class TransformsItself(Data):
    """Transforms the batches in place of the module, and skips one in an evaluation."""

    def on_after_batch_transfer(self, batch, dataloader_idx):
        if self.trainer.training:
            return batch
        put(batch, "x", get(batch, "x") - 1)
        return batch


def seen_by(module, stage, tmp_path, *, fitted, datamodule):
    """What the hooks of a stage see, outside of a federation or in it."""
    call = {"validation": "validate"}.get(stage, stage)
    getattr(trainer(1, tmp_path), call)(fitted, datamodule=datamodule)
    return module.seen


@pytest.mark.parametrize("kind", [Data, TransformsItself])
@pytest.mark.parametrize("collate_fn", [as_dictionary, as_record, as_list])
@pytest.mark.parametrize("stage", STAGES)
def test_hooks_and_step_see_the_batches_of_plain_lightning(stage, collate_fn, kind, tmp_path):
    alone = Completes()
    plain = seen_by(alone, stage, tmp_path, fitted=alone, datamodule=kind(collate_fn))
    module = Completes()
    data = FederatedDataModule.from_datamodule(kind(collate_fn), num_clients=2, eval_batch_size=6)
    there = seen_by(module, stage, tmp_path, fitted=FederatedLoop(module), datamodule=data)
    assert plain
    assert there == plain


class Skips(Completes):
    """Skips a batch in its transfer."""

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return None if float(get(batch, "x").sum()) > 0 else batch


@pytest.mark.parametrize("stage", STAGES)
def test_a_batch_that_the_transfer_skips_has_no_hooks(stage, tmp_path):
    module = Skips()
    data = FederatedDataModule.from_datamodule(Data(as_dictionary), num_clients=2, eval_batch_size=6)
    seen = seen_by(module, stage, tmp_path, fitted=FederatedLoop(module), datamodule=data)
    kept = [x for x in X.split(6) if float(x.sum()) <= 0]
    assert 0 < len(kept) < 4
    assert [value for name, value, *_ in seen if name == "start"] == [round(float(x.sum()), 4) for x in kept]
    assert len(seen) == 3 * len(kept)
