"""Modules of others, and as others write them, unchanged: FedAvg is the loop by hand bit for bit, resume is exact,
Python, command line and two processes agree.
"""

import copy
import importlib
import os
import subprocess
import sys
from pathlib import Path
from tempfile import mkdtemp

import pytest
import pytorch_lightning as pl
import torch
import yaml
from pytorch_lightning.callbacks import ModelCheckpoint

from fl_lightning.functional.state import weighted_mean
from fl_lightning.utils.keyed import keyed_seed
from tests.commands import run_in, say, working_in
from tests.third_party.cases import CASES, SEED, federate, loader_of, made, quiet_logger, same, skipped
from tests.third_party.community import Given
from tests.third_party.modules import PARTS, Loaded
from tests.toys import trainer

QUICK = ("BoringModel", "ManualOptimBoringModel", "LightningTransformer", "TwoByHand", "Stateful", "Sharp")


def case(name):
    """A case, skipped where one of its packages is not installed; slow but for some."""
    marks = [] if name in QUICK else [pytest.mark.slow]
    return pytest.param(name, id=name, marks=[*marks, skipped(name)])


NAMES = [case(name) for name in CASES]


def without_plateau(module):
    """Leave out a ReduceLROnPlateau, which a fit without validation refuses; it holds its rate for the first rounds."""
    found = module.configure_optimizers()
    if not isinstance(found, dict):
        return
    scheduler = found.get("lr_scheduler")
    settings = scheduler if isinstance(scheduler, dict) else found
    if "monitor" in settings:
        module.configure_optimizers = lambda: type(module).configure_optimizers(module)["optimizer"]


def stock_trainer(name, module, round_idx, client_id):
    """A Trainer of the module's own package for one epoch, which draws as the client does in the round."""
    package = pl if isinstance(module, pl.LightningModule) else importlib.import_module("lightning.pytorch")

    class Seeds(package.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if batch_idx == 0:
                torch.manual_seed(keyed_seed(SEED, "train/train", round_idx, client_id))

    settings = {"limit_val_batches": 0, "callbacks": [Seeds()], **quiet_logger(name, package.__name__)}
    return trainer(1, mkdtemp(), kind=package.Trainer, **settings)


def local_fit(name, module, own, client_id, round_idx):
    """Fit one client's samples as outside of a federation."""
    module.prepare_data = lambda: None  # Lightning's demos would download WikiText
    own.trainer = None
    own.prepare_data()
    own.setup("fit")
    loader = own.train_dataloader()
    samples = loader_of(loader, PARTS[client_id], 4)
    own.train_dataloader = lambda: samples
    without_plateau(module)
    data = {"train_dataloaders": samples} if isinstance(own, (Loaded, Given)) else {"datamodule": own}
    stock_trainer(name, module, round_idx, client_id).fit(
        module, **data
    )  # a twin's Trainer refuses a data module of ours


@pytest.mark.parametrize("name", NAMES)
def test_fedavg_is_the_loop_by_hand(name):
    reason = CASES[name].not_by_hand or CASES[name].uncopied
    if reason:
        pytest.skip(reason)
    module, _ = made(name)
    module.configure_model()
    for round_idx in range(2):
        states = []
        for client_id in range(len(PARTS)):
            client = copy.deepcopy(module)
            local_fit(name, client, made(name)[1], client_id, round_idx)
            states.append(client.state_dict())
        module.load_state_dict(weighted_mean(states, map(len, PARTS)))
    assert same(federate(name, 2, clock="round"), dict(module.state_dict()))


@pytest.mark.parametrize("name", NAMES)
def test_resume_is_exact(name, tmp_path):
    planned_rounds = 3 if CASES[name].asks_length else None
    whole = federate(name, 3, planned_rounds=planned_rounds)
    saves = ModelCheckpoint(tmp_path, "one")
    federate(name, 1, planned_rounds=planned_rounds, enable_checkpointing=True, callbacks=[saves])
    resumed = federate(name, 3, planned_rounds=planned_rounds, ckpt_path=tmp_path / "one.ckpt")
    assert same(resumed, whole)
    assert not all(value.isnan().any() for value in whole.values())


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_two_processes_equal_one(name, tmp_path):
    threads = torch.get_num_threads()
    alone = federate(name, 2)
    torch.set_num_threads(threads)
    script = str(Path(__file__).with_name("cases.py"))
    there = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, script, name, str(tmp_path), "2"],
        env=there, cwd=tmp_path, capture_output=True, text=True, timeout=580, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert same(torch.load(tmp_path / "state.pt", weights_only=True), alone)


OWN = """
from pytorch_lightning import LightningDataModule, LightningModule

from tests.third_party.cases import made

def module() -> LightningModule:
    return made({name!r})[0]

def data() -> LightningDataModule:
    return made({name!r})[1]
"""


@pytest.mark.usefixtures("without_pictures")
@pytest.mark.parametrize("name", NAMES)
def test_the_command_line_gives_the_same(name, tmp_path):
    settings = {
        "trainer": {"max_epochs": 2, "accelerator": "cpu", "enable_progress_bar": False},
        "model": {"seed": 1, "threads": 1, "client": {"class_path": "own.module"}},
        "data": {
            "source": {"class_path": "own.data"},
            "num_clients": 3,
            "shuffle": False,
            "partition": {"class_path": "fl_lightning.data.FixedPartition", "init_args": {"indices": PARTS}},
        },
    }
    with working_in(tmp_path, OWN.format(name=name)):
        (tmp_path / "mine.yaml").write_text(yaml.safe_dump(settings))
        said = say("fit -c mine.yaml")
        assert said.code == 0, said
        saved = torch.load(run_in(tmp_path, stem="mine") / "checkpoints/last.ckpt", weights_only=True)["state_dict"]
    state = federate(name, 2)
    assert same({name: saved[f"client.module.{name}"] for name in state}, state)
