"""Holds the cases of this folder, and functions of the tests for a case.

`python cases.py CASE FOLDER DEVICES` federates a case with several processes and writes its weights.
"""

import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, NamedTuple

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning import LightningDataModule, LightningModule
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, Subset

from fl_lightning import FederatedDataModule, FederatedLoop
from fl_lightning.data import FixedPartition
from fl_lightning.types import ClockKind
from tests.third_party import community as C
from tests.third_party import modules as M
from tests.third_party.written import WRITTEN, written
from tests.toys import trainer

SEED = 1


class Case(NamedTuple):
    """Holds a module with its data.

    Args:
        make: Makes the module, with drawn weights, and its data.
        needs: Packages besides those of the core, by the names of their imports.
        pip: Names that install them. Empty means the names of the imports.
        needs_logger: Whether the module calls its Trainer's logger, which then must be there.
        asks_length: Whether the module asks for the number of rounds, so that a run that goes on must name it.
        not_by_hand: The reason why the module behaves differently by hand, or empty.
        uncopied: The reason why the module cannot be copied, so that no client's own model comes out, or empty.
        unstacked: Words of the reason why its clients are not stacked. Empty means that they are.
    """

    make: Callable[[], tuple[LightningModule, LightningDataModule]]
    needs: tuple[str, ...] = ()
    pip: str = ""
    needs_logger: bool = False
    asks_length: bool = False
    not_by_hand: str = ""
    uncopied: str = ""
    unstacked: str = ""


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
COMMUNITY = {
    "uq-box SGLDRegression": Case(
        C.langevin,
        ("lightning_uq_box",),
        "lightning-uq-box",
        asks_length=True,
        unstacked="on_train_epoch_end is called for one client",
    ),
    "torch-uncertainty ClassificationRoutine": Case(
        C.routine, ("torch_uncertainty",), unstacked="counts one client's batch at a time"
    ),
    "torch-uncertainty SegmentationRoutine": Case(
        C.segmentation_routine, ("torch_uncertainty",), unstacked="counts one client's batch at a time"
    ),
    "deeptab TaskModel": Case(C.table, ("deeptab",), unstacked="on_train_epoch_start is called for one client"),
    "neuralforecast NBEATS": Case(C.forecasts, ("neuralforecast",), unstacked="truth value of an array"),
    "gluonts DeepAR": Case(
        C.sunspots,
        ("gluonts", "statsmodels"),
        not_by_hand="configure_optimizers asks the Trainer whether it evaluates",
        unstacked="shares memory",
    ),
    "asteroid System": Case(
        C.speech,
        ("asteroid", "pyannote"),
        "asteroid pyannote.audio",
        needs_logger=True,
        unstacked="lr_scheduler_step is called for one client",
    ),
    "pykeen LCWALitModule": Case(
        C.knowledge_graph, ("pykeen",), unstacked="on_before_zero_grad is called for one client"
    ),
    "aidsorb LitModule": Case(C.structures, ("aidsorb", "ase"), unstacked="counts one client's batch at a time"),
    "chemprop MPNN": Case(
        C.molecules,
        ("chemprop",),
        asks_length=True,
        not_by_hand="configure_optimizers asks the Trainer for its loader",
        unstacked="counts one client's batch at a time",
    ),
    "neuromancer LitProblem": Case(
        C.oscillator, ("neuromancer",), unstacked="on_train_epoch_end is called for one client"
    ),
    "scvi AdversarialTrainingPlan": Case(
        C.cells,
        ("scvi",),
        "scvi-tools",
        unstacked="on_train_epoch_end is called for one client",
    ),
    "ptls CoLESModule": Case(
        C.purchases,
        ("ptls", "lifetimes"),
        "pytorch-lifestream lifetimes",
        unstacked="counts one client's batch at a time",
    ),
    "anomalib Ganomaly": Case(C.adversaries, ("anomalib",), unstacked="of a callback of the module is called"),
    "rl4co PPO": Case(C.salesman, ("rl4co",), unstacked="on_train_epoch_end is called for one client"),
    "zeldarose NTPTrainingModel": Case(
        C.next_words, ("zeldarose", "gensim"), unstacked="Dropout would draw other numbers"
    ),
    "disent BetaVae": Case(C.squares, ("disent",), unstacked="vmap: called random operation"),
    "deepforest": Case(C.crowns, ("deepforest",), unstacked="counts one client's batch at a time"),
}
"""Modules that were held out: this project knew none of them before it first federated them."""
CASES |= COMMUNITY
CASES |= {name: Case(partial(written, name), needs) for name, (_, needs) in WRITTEN.items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    """Return True if two states are equal bit for bit. NaN, with which a module may begin, equals NaN."""
    if a.keys() != b.keys():
        return False
    return all(torch.allclose(a[name], b[name], rtol=0, atol=0, equal_nan=True) for name in a)


def made(name: str) -> tuple[LightningModule, LightningDataModule]:
    """Make a case. Its weights are the same every time."""
    pl.seed_everything(5, verbose=False)
    return CASES[name].make()


def skipped(name: str) -> pytest.MarkDecorator:
    """Return the mark of a case, which skips the case if one of its packages is not installed."""
    needs = CASES[name].needs
    missing = [package for package in needs if importlib.util.find_spec(package) is None]
    names = CASES[name].pip or " ".join(needs)
    return pytest.mark.skipif(bool(missing), reason=f"pip install {names}")


def divided(name: str, own: LightningDataModule) -> FederatedDataModule:
    """Divide the data of a case among three clients."""
    settings = {"client_test_size": 8, "eval_batch_size": 4} if name in COMMUNITY else {}
    partition = FixedPartition(M.PARTS)
    return FederatedDataModule.from_datamodule(own, num_clients=3, partition=partition, shuffle=False, **settings)


def loader_of(loader: DataLoader[Any], places: Sequence[int], batch_size: int) -> DataLoader[Any]:
    """Return a loader of some samples of another loader's dataset, in order, which makes batches in the same way."""
    samples = Subset(loader.dataset, list(places))
    if loader.batch_size is None:
        sampler = BatchSampler(SequentialSampler(samples), batch_size, drop_last=False)
        return DataLoader(samples, batch_size=None, sampler=sampler, collate_fn=loader.collate_fn)
    return DataLoader(samples, batch_size=batch_size, collate_fn=loader.collate_fn)


def quiet_logger(name: str, kind: str = "pytorch_lightning") -> dict[str, Any]:
    """Return the settings of a Trainer with a logger that drops everything, for a module that asks for a logger.

    Args:
        name: The case.
        kind: The package of the Trainer.
    """
    if not CASES[name].needs_logger:
        return {}
    return {"logger": importlib.import_module(f"{kind}.loggers.logger").DummyLogger()}


def federate(
    name: str,
    rounds: int,
    *,
    clock: ClockKind = "run",
    chunk: int = 1,
    planned_rounds: int | None = None,
    **settings: Any,
) -> dict[str, torch.Tensor]:
    """Federate a case, and return the module's state."""
    module, own = made(name)
    data = divided(name, own)
    loop = FederatedLoop(module, seed=SEED, threads=1, chunk=chunk, planned_rounds=planned_rounds, clock=clock)
    ckpt_path = settings.pop("ckpt_path", None)
    fitting = trainer(rounds, mkdtemp(), **quiet_logger(name), **settings)
    fitting.fit(loop, datamodule=data, ckpt_path=ckpt_path)
    return dict(module.state_dict())


if __name__ == "__main__":
    case, folder, devices = sys.argv[1:]
    torch.set_num_threads(1)
    state = federate(case, 2, strategy="client_parallel", devices=int(devices))
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        torch.save(state, Path(folder) / "state.pt")
