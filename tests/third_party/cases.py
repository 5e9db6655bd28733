"""The cases of this folder, and what the tests do with one.

`python cases.py CASE FOLDER DEVICES` federates one with several processes and writes its weights.
"""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import pytorch_lightning as pl
import torch
from pytorch_lightning import LightningDataModule, LightningModule

from fl_lightning import FederatedDataModule, FederatedLoop
from fl_lightning.data import FixedPartition
from fl_lightning.types import ClockKind
from tests.third_party import modules as M
from tests.third_party.written import WRITTEN, written
from tests.toys import trainer

SEED = 1


class Case(NamedTuple):
    """A module with its data.

    Args:
        make: both, new; the module's weights are drawn.
        needs: packages besides those of the core.
    """

    make: Callable[[], tuple[LightningModule, LightningDataModule]]
    needs: tuple[str, ...] = ()


CASES = {
    "BoringModel": Case(M.boring),
    "ManualOptimBoringModel": Case(M.boring_by_hand),
    "LightningTransformer": Case(M.transformer),
    "LightningLSTM": Case(M.lstm),
    "MetricCollection": Case(M.collection),
    "GAN": Case(M.gan),
    "torchgeo ClassificationTask": Case(M.geo_classification, ("torchgeo",)),
    "torchgeo RegressionTask": Case(M.geo_regression, ("torchgeo",)),
    "torchgeo SemanticSegmentationTask": Case(M.geo_segmentation, ("torchgeo",)),
    "lightly BYOL": Case(M.byol, ("lightly",)),
    "lightly MoCo": Case(M.moco, ("lightly",)),
    "lightly SimCLR": Case(M.simclr, ("lightly",)),
    "TemporalFusionTransformer": Case(M.forecasting, ("pytorch_forecasting",)),
    "segmentation_models_pytorch": Case(M.segmentation, ("segmentation_models_pytorch",)),
    "BERT": Case(M.bert, ("transformers",)),
    "BERT with LoRA": Case(M.lora, ("transformers", "peft")),
    "torch_geometric": Case(M.graphs, ("torch_geometric",)),
}
CASES |= {name: Case(partial(written, name), needs) for name, (_, needs) in WRITTEN.items()}


def made(name: str) -> tuple[LightningModule, LightningDataModule]:
    """Make a case; its weights are the same every time."""
    pl.seed_everything(5, verbose=False)
    return CASES[name].make()


def federate(name: str, rounds: int, clock: ClockKind = "run", **settings: Any) -> dict[str, torch.Tensor]:
    """Federate a case; returns the module's state."""
    module, own = made(name)
    data = FederatedDataModule.from_datamodule(own, num_clients=3, partition=FixedPartition(M.PARTS), shuffle=False)
    loop = FederatedLoop(module, seed=SEED, threads=1, clock=clock)
    ckpt_path = settings.pop("ckpt_path", None)
    trainer(rounds, **settings).fit(loop, datamodule=data, ckpt_path=ckpt_path)
    return dict(module.state_dict())


if __name__ == "__main__":
    case, folder, devices = sys.argv[1:]
    torch.set_num_threads(1)
    state = federate(case, 2, strategy="client_parallel", devices=int(devices))
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        torch.save(state, Path(folder) / "state.pt")
