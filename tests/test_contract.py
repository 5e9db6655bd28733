"""What every method must do, over everything that `fl_lightning.methods` exports: a new file is covered by existing.

A case is a client class or a server module with its `configs/experiment/digits_<name>.yaml`, or an aggregator or
optimizer of its own with FedAvg's and `configs/method/<name>.yaml`; <name> is the class's in lower case.
"""

import csv
import inspect
import math
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import yaml
from torch.utils.data import DataLoader, TensorDataset

import fl_lightning.cli.main
from fl_lightning import Aggregator, ClientModule, FederatedDataModule, FederatedLoop, methods
from fl_lightning.__main__ import main
from fl_lightning.aggregation import ServerModule
from fl_lightning.cli.methods import entries
from fl_lightning.cli.trials import Federation
from fl_lightning.data import FixedPartition, TensorSource
from tests.toys import BatchNormNet, EdgePartition, fit, samples, sgd, trainer

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = ROOT / "configs"
EXPORTED = {name: getattr(methods, name) for name in methods.__all__ if inspect.isclass(getattr(methods, name))}
CLIENTS = {name: kind for name, kind in EXPORTED.items() if issubclass(kind, ClientModule)}
PARTS = {
    name.removesuffix("Aggregator").removesuffix("Server"): kind
    for name, kind in EXPORTED.items()
    if issubclass(kind, Aggregator | ServerModule | torch.optim.Optimizer)
}
"""Methods that are only an aggregator, a server module or an optimizer."""
NAMES = sorted({*CLIENTS, *PARTS})
NEEDS_LOGITS = {
    "FedAlign",
    "FedDF",
    "FedED",
    "FedKA",
    "FedLC",
    "FedMD",
    "FedNTD",
    "FedPAC",
    "FedRep",
    "FedRoD",
    "FedRS",
}
NEEDS_LOGITS |= {"KnFu", "MOON", "SelectiveFD"}
"""Methods whose terms are of a classifier, so that they go around no other module."""
EDGES = {
    "seed_everything": 0,
    "trainer": {
        "max_epochs": 2,
        "accelerator": "cpu",
        "devices": 1,
        "enable_progress_bar": False,
    },
    "model": {
        "local_epochs": 2,
        "threads": 1,
        "alma_every": 1,
        "client": {"init_args": {"net": {"class_path": "tests.toys.BatchNormNet", "init_args": {"dropout": 0.2}}}},
    },
    "data": {
        "num_clients": len(EdgePartition.SIZES),
        "participation": 0.8,
        "schedule": [[0, 1, 2, 3], [1, 2, 3, 4]],
        "batch_size": 8,
        "partition": {"class_path": "tests.toys.EdgePartition"},
    },
}
"""Few samples, a BatchNorm net with dropout, and a client of each awkward kind in a cohort that is not everyone."""


def configs_of(name: str) -> list[Path]:
    """The shipped files of a method, as a user would give them."""
    if name in CLIENTS or issubclass(PARTS[name], ServerModule):
        return [CONFIGS / "experiment" / f"digits_{name.lower()}.yaml"]
    return [CONFIGS / "experiment" / "digits_fedavg.yaml", CONFIGS / "method" / f"{name.lower()}.yaml"]


class Run:
    """Runs of a method's files through the command line, in a folder of their own, and what they left behind."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder
        edges = folder / "edges.yaml"
        edges.write_text(yaml.safe_dump(EDGES), encoding="utf-8")
        self.files = [part for path in [*configs_of(name), edges] for part in ("-c", str(path))]

    def fit(self, *more: str) -> "Run":
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(self.folder)
            patch.setattr(fl_lightning.cli.main, "RunPlots", lambda folder: pl.Callback())  # slow, and tried elsewhere
            main(["fit", *self.files, *more])
        return self

    @property
    def rows(self) -> list[dict[str, float]]:
        (table,) = self.folder.glob("runs/*/0*/metrics.csv")
        with table.open(encoding="utf-8") as file:
            return [{key: float(value) for key, value in row.items() if value} for row in csv.DictReader(file)]

    @property
    def state(self) -> dict[str, Any]:
        """Everything that the last checkpoint keeps of the federation."""
        (path,) = self.folder.glob("runs/*/0*/checkpoints/last.ckpt")
        saved = torch.load(path, weights_only=True)
        return {
            key: saved[key] for key in ("state_dict", "federated", "optimizer_states", "lr_schedulers", "global_step")
        }


def same(a: Any, b: Any) -> bool:
    """Bit-equality of nests of dicts, lists, tensors and numbers."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a.nan_to_num(), b.nan_to_num())
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b) or (isinstance(a, float) and isinstance(b, float) and math.isnan(a) and math.isnan(b))


@pytest.fixture(scope="module", params=NAMES)
def name(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def two_rounds(name, tmp_path_factory) -> Run:
    return Run(tmp_path_factory.mktemp(name), name).fit()


def test_every_method_has_its_files(name):
    for path in [CONFIGS / "method" / f"{name.lower()}.yaml", *configs_of(name)]:
        assert path.is_file(), f"write {path.relative_to(ROOT)}"
    assert f"fl_lightning.methods.{name}" in (CONFIGS / "method" / f"{name.lower()}.yaml").read_text(encoding="utf-8")
    file = Path(inspect.getfile(EXPORTED.get(name) or PARTS[name]))
    test = ROOT / "tests" / "methods" / f"test_{file.name}"
    assert test.is_file(), f"write {test.relative_to(ROOT)}"


def test_two_rounds_with_awkward_clients_are_finite_and_count_their_bytes(two_rounds):
    first, second = two_rounds.rows
    assert any(key.startswith("train/") for key in first)
    for row in (first, second):
        assert all(map(math.isfinite, row.values()))
        assert 0 <= row["local/alma"] <= 1
        for way in ("comm/bytes_down", "comm/bytes_up"):
            assert row[way] == int(row[way])
            assert row[way] > 0 or "global/acc" not in row  # nothing moves only where nothing is shared
    saved = two_rounds.state
    assert any("running_mean" in key for key in saved["state_dict"])
    assert all(value.isfinite().all() for value in saved["state_dict"].values())
    assert saved["global_step"] == 2


def test_resume_after_the_first_round_is_the_uninterrupted_run(name, two_rounds, tmp_path):
    """Determinism too: the first round is run twice."""
    halves = Run(tmp_path, name).fit("--trainer.max_epochs", "1")
    assert halves.rows == two_rounds.rows[:1]
    halves.fit("--ckpt_path", "last")
    assert halves.rows == two_rounds.rows
    assert same(halves.state, two_rounds.state)


def test_a_store_in_files_resumes_to_the_same(name, two_rounds, tmp_path):
    kept = two_rounds.state["federated"]["store"]
    if not kept["records"] and not len(kept["files"]):
        pytest.skip("keeps nothing between rounds")
    files = ["--model.store.memory_budget_mb", "0"]
    halves = Run(tmp_path, name).fit("--trainer.max_epochs", "1", *files).fit("--ckpt_path", "last", *files)
    assert list(tmp_path.glob("runs/*/0*/clients/*.safetensors"))
    assert halves.rows == two_rounds.rows
    assert same(halves.state["state_dict"], two_rounds.state["state_dict"])


def test_bf16_mixed_follows_float32(name, two_rounds, tmp_path):
    half = Run(tmp_path, name).fit("--trainer.max_epochs", "1", "--trainer.precision", "bf16-mixed")
    exact = {key: value for key, value in two_rounds.rows[0].items() if key.startswith("train/")}
    assert {key: half.rows[0][key] for key in exact} == pytest.approx(exact, rel=1e-2, abs=1e-2)
    assert all(v.dtype != torch.bfloat16 for v in half.state["state_dict"].values())


@pytest.mark.slow
def test_two_processes_equal_one(name, two_rounds, tmp_path):
    pair = Run(tmp_path, name)
    strategy = ["--trainer.strategy", "client_parallel", "--trainer.devices", "2"]
    done = subprocess.run(
        [sys.executable, "-m", "fl_lightning", "fit", *pair.files, *strategy],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert pair.rows == two_rounds.rows
    assert same(pair.state, two_rounds.state)


class Line(pl.LightningModule):
    """A regression, with a norm layer and a dict for a batch's values."""

    def __init__(self, optimizer):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
        self.optimizer, self.steps = optimizer, 0

    def training_step(self, batch, batch_idx):
        x, y = batch
        self.steps += 1
        mse = (self.net(x) - y).square().mean()
        self.log("mse", mse)
        return {"loss": mse}

    def configure_optimizers(self):
        return self.optimizer(self.parameters())


def regression_data() -> FederatedDataModule:
    """A line's points at six clients, one of them empty, with every set that a method may need."""
    x = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
    source = TensorSource((x, y := 0.3 * x.sum(1, keepdim=True) + 0.3), (x, y))
    extra = dict.fromkeys(("proxy", "transfer", "shared"), source)
    clients = FixedPartition([list(range(a, b)) for a, b in pairwise((0, 12, 20, 20, 30, 39, 60))])
    return FederatedDataModule(source, 6, clients, batch_size=5, extra_splits=extra)


def around(module: Line, parts: Federation) -> FederatedLoop:
    """Train a module for five rounds."""
    loop = FederatedLoop(
        parts.client(module=module),
        parts.rule and parts.rule(),
        server_module=parts.server_module and parts.server_module(),
        server_optimizer=parts.server_optimizer,
        personal=[pattern.replace("net.head", "module.net.1") for pattern in parts.personal],
        transforms=parts.transform and parts.transform(),
        seed=0,
    )
    return fit(None, 5, regression_data(), loop=loop)


@pytest.mark.parametrize("entry", entries(), ids=lambda entry: entry.name)
def test_around_a_regression_it_learns_or_is_refused_at_start(entry):
    """Refused are those whose terms need logits, and only those."""
    torch.manual_seed(0)
    module = Line(entry.federation.optimizer)
    if entry.name in NEEDS_LOGITS:
        with pytest.raises(ValueError, match=r"needs the logits of a net, got module=Line; give .*net="):
            around(module, entry.federation)
        assert not module.steps
        return
    mse = around(module, entry.federation).recorder.history.curve("mse")
    assert mse[4] < 0.95 * mse[0]
    assert module.steps


def alone(kind: type[ClientModule]) -> ClientModule:
    """A client under a plain Trainer, without a federation."""
    client = kind(net=BatchNormNet, optimizer=sgd(), num_classes=3, input_shape=(4,))
    trainer(2).fit(client, DataLoader(TensorDataset(*samples(24)), batch_size=8))
    return client


@pytest.mark.parametrize("name", sorted(CLIENTS))
def test_alone_under_a_plain_trainer_it_trains_or_says_why_not(name):
    """Where what it needs is local it trains; else the refusal names the method and the federation it needs."""
    before = CLIENTS[name](net=BatchNormNet, num_classes=3, input_shape=(4,)).state_dict()
    try:
        client = alone(CLIENTS[name])
    except ValueError as error:
        refusal = str(error)
        missing = [word for word in (name, "FederatedLoop") if word not in refusal]
        if missing:
            pytest.fail(f"the refusal of {name} must name it and FederatedLoop, got {refusal!r}")
    else:
        assert client.state_dict().keys() == before.keys()
        assert client.trainer.global_step == 6
