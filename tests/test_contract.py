"""What every method must do, over everything that `fl_lightning.methods` exports: a new file is covered by existing.

A case is a client class or a server module with its `configs/experiment/digits_<name>.yaml`, or an aggregator or
optimizer of its own with FedAvg's and `configs/method/<name>.yaml`; <name> is the class's in lower case.
"""

import csv
import inspect
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import yaml
from torch.utils.data import DataLoader, TensorDataset

import fl_lightning.cli.run_callbacks
from fl_lightning import Aggregator, ClientModule, FederatedDataModule, FederatedLoop, methods
from fl_lightning.__main__ import main
from fl_lightning.aggregation import (
    GeometricMedianAggregator,
    KrumAggregator,
    MedianAggregator,
    ServerModule,
    TrimmedMeanAggregator,
)
from fl_lightning.cli.configs import small_experiment
from fl_lightning.data import ClassIncremental, DomainIncremental, FixedPartition, LabelDrift, TensorSource, Window
from fl_lightning.functional.state import clone
from fl_lightning.metrics.history import UNPROTECTED
from tests.toys import BatchNormNet, EdgePartition, equal, fit, samples, sgd, toy_data, trainer, weights_of
from tests.user_data import Dicts
from tests.user_modules import DictNet
from tools.measure_methods import MODULE_SETTINGS, Entry, entries
from tools.measurement_runs import Federation

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
TRAITS = {
    "FedAvg",  # plain
    "FedProx",  # a term of the loss
    "FedNTD",  # a teacher
    "FedDyn",  # state of clients and server
    "SCAFFOLD",  # more than weights, both ways
    "MOON",  # a model of each client
    "FedCurv",  # passes over the data
    "FedRep",  # phases, a personal head
    "Ditto",  # a second, personal model
    "KnFu",  # several exchanges, no shared weights
    "FedDF",  # a server module that trains
    "FedNova",  # a rule
    "FedAvgM",  # a server optimizer
    "SAM",  # a local optimizer
}
"""A method of each trait: the others are tried by the slow tests, and by two rounds each by default."""
NEEDS_LOGITS = {
    "CCVR",
    "FedAlign",
    "FedDF",
    "FedDecorr",
    "FedED",
    "FedGKD",
    "FedGen",
    "FedKA",
    "FedLC",
    "FedLMD",
    "FedLwF",
    "FedMD",
    "FedNTD",
    "FedPAC",
    "FedProto",
    "FedRep",
    "FedRoD",
    "FedRS",
    "Replay",
}
NEEDS_LOGITS |= {"KnFu", "MOON", "SelectiveFD"}
"""Methods whose terms are of a classifier, so that they go around no other module."""
PLANS = {"CCVR"}
"""Methods that do something in the last planned round."""
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
        "evaluate_clients_every": 1,
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


def cohorts_of(name: str, **given: Any) -> dict[str, Any]:
    """Settings of the cohorts, for a private rule drawn client by client."""
    if not getattr(PARTS.get(name), "is_private", False):
        return given
    return {**given, "schedule": None, "participation": 0.8, "sampling": "poisson"}


def some(names: Iterable[str]) -> list[Any]:
    """Rows for methods; slow are those whose trait another one has, too."""
    return [pytest.param(name, marks=[] if name in TRAITS else pytest.mark.slow) for name in names]


def configs_of(name: str) -> list[Path]:
    """The shipped files of a method, as a user would give them."""
    if name in CLIENTS or issubclass(PARTS[name], ServerModule):
        return [CONFIGS / f"{part}.yaml" for part in small_experiment(name.lower())]
    return [CONFIGS / "experiment" / "digits_fedavg.yaml", CONFIGS / "method" / f"{name.lower()}.yaml"]


class Run:
    """Runs of a method's files through the command line, in a folder of their own, and what they left behind."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder
        edges = folder / "edges.yaml"
        data = cohorts_of(name, **EDGES["data"])
        edges.write_text(yaml.safe_dump({**EDGES, "data": data}), encoding="utf-8")
        self.files = [part for path in [*configs_of(name), edges] for part in ("-c", str(path))]

    def fit(self, *more: str) -> "Run":
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(self.folder)
            patch.setattr(
                fl_lightning.cli.run_callbacks, "RunPlots", lambda *_, **__: pl.Callback()
            )  # slow, and tried elsewhere
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


def check_rounds(rows: list[dict[str, float]], weights: dict[str, torch.Tensor]) -> None:
    """See that two rounds have finite values and weights, and whole bytes."""
    first, second = ({key.removeprefix(UNPROTECTED): value for key, value in row.items()} for row in rows)
    assert any(key.startswith("train/") for key in first)
    for row in (first, second):
        assert all(map(math.isfinite, row.values()))
        assert 0 <= row["local/alma"] <= 1
        for way in ("comm/bytes_down", "comm/bytes_up"):
            assert row[way] == int(row[way])
            assert row[way] > 0 or "global/acc" not in row  # nothing moves only where nothing is shared
    assert any("running_mean" in key for key in weights)
    assert all(value.isfinite().all() for value in weights.values())


@pytest.mark.slow  # the two rounds below, by its files and the command line, as in `make smoke`
def test_two_rounds_of_its_files_are_finite_and_count_their_bytes(two_rounds):
    check_rounds(two_rounds.rows, two_rounds.state["state_dict"])
    assert two_rounds.state["global_step"] == 2


@pytest.mark.slow  # the resume below, by the command line: tests/cli/test_main.py has one by default
def test_a_run_that_is_continued_is_the_uninterrupted_one(name, two_rounds, tmp_path):
    """Determinism too: the first round is run twice."""
    plan = ["--model.planned_rounds", "2"] if name in PLANS else []
    halves = Run(tmp_path, name).fit("--trainer.max_epochs", "1", *plan)
    assert halves.rows == two_rounds.rows[:1]
    halves.fit("--ckpt_path", "last", *plan)
    assert halves.rows == two_rounds.rows
    assert same(halves.state, two_rounds.state)


@pytest.mark.slow  # the same from files: tests/client/test_store.py has them by default
def test_a_store_in_files_resumes_to_the_same(name, two_rounds, tmp_path):
    kept = two_rounds.state["federated"]["store"]
    if not kept["records"] and not len(kept["files"]):
        pytest.skip("keeps nothing between rounds")
    files = ["--model.store.memory_budget_mb", "0"]
    halves = Run(tmp_path, name).fit("--trainer.max_epochs", "1", *files).fit("--ckpt_path", "last", *files)
    assert list(tmp_path.glob("runs/*/0*/clients/*.safetensors"))
    assert halves.rows == two_rounds.rows
    assert same(halves.state["state_dict"], two_rounds.state["state_dict"])


@pytest.mark.slow  # the precision below, by the command line and with dropout
def test_a_run_in_bf16_mixed_follows_float32(name, two_rounds, tmp_path):
    half = Run(tmp_path, name).fit("--trainer.max_epochs", "1", "--trainer.precision", "bf16-mixed")
    exact = {key: value for key, value in two_rounds.rows[0].items() if key.startswith("train/")}
    assert {key: half.rows[0][key] for key in exact} == pytest.approx(exact, rel=1e-2, abs=1e-2)
    assert all(v.dtype != torch.bfloat16 for v in half.state["state_dict"].values())


@pytest.fixture(scope="module")
def one_and_two_processes(tmp_path_factory) -> list[dict[str, Any]]:
    """What `tests/processes/methods.py` sees of all methods, by one script each."""
    folder = tmp_path_factory.mktemp("processes")
    script = ROOT / "tests/processes/methods.py"
    for devices in ("1", "2"):
        command = [sys.executable, str(script), str(folder / devices), devices]
        settings = {"env": {**os.environ, "OMP_NUM_THREADS": "1"}, "capture_output": True, "text": True}
        done = subprocess.run(command, cwd=folder, check=False, timeout=580, **settings)
        assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads((folder / devices).read_text(encoding="utf-8")) for devices in ("1", "2")]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_two_processes_equal_one(name, one_and_two_processes):
    """Weights and server state bit for bit, and every value of the round with what the clients would deploy."""
    one, two = one_and_two_processes
    assert json.dumps(one[name], sort_keys=True) == json.dumps(two[name], sort_keys=True)


class Line(pl.LightningModule):
    """A regression, with a norm layer and a dict for a batch's values."""

    def __init__(self, optimizer):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
        self.optimizer = optimizer
        self.steps = 0

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
        parts.client(module=module, **of_module(parts.module_settings)),
        parts.rule and parts.rule(),
        server_module=parts.server_module and parts.server_module(),
        server_optimizer=parts.server_optimizer,
        personal=[pattern.replace("net.head", "module.net.1") for pattern in parts.personal],
        transforms=parts.transform and parts.transform(),
        seed=0,
    )
    return fit(None, 5, regression_data(), loop=loop)


def of_module(settings: Mapping[str, str]) -> dict[str, str]:
    """Name the head of the module above in settings that a client needs around a module."""
    return {name: value.replace("net.head", "net.1") for name, value in settings.items()}


def around_entry(entry: Entry) -> Any:
    """A row, slow where another method has its trait; what is refused is refused at once."""
    quick = entry.name in TRAITS | NEEDS_LOGITS
    return pytest.param(entry, id=entry.name, marks=[] if quick else pytest.mark.slow)


@pytest.mark.parametrize("entry", [around_entry(entry) for entry in entries()])
def test_around_a_regression_it_learns_or_is_refused_at_start(entry):
    """Refused are those whose terms need logits, and only those."""
    torch.manual_seed(0)
    module = Line(entry.federation.optimizer)
    if entry.name in NEEDS_LOGITS:
        with pytest.raises(ValueError, match=r"needs the logits of a net, got module=Line; give .*net="):
            around(module, entry.federation)
        assert not module.steps
        return
    history = around(module, entry.federation).recorder.history
    mse = history.curve("mse") or history.curve(f"{UNPROTECTED}mse")
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


# --- what a method goes with, or refuses at start by a sentence


LOGITS = {name for name in NAMES if "logits" in getattr(EXPORTED.get(name) or PARTS[name], "needs", ())}
SHARE_NOTHING = {"FedMD", "FedProto", "KnFu", "Local", "SelectiveFD"}
OWN_STEP = {"CCVR", "FedCurv", "FedDyn", "SCAFFOLD"} | {name for name, kind in CLIENTS.items() if kind.own_start}
"""Methods that a server optimizer with momentum would break."""
NEED_SHARED_HEAD = {
    "CCVR": "a head that the clients share",
    "FedDF": "distils into a whole net",
    "FedGen": "learns from the heads that the clients send",
}
"""Methods whose server reads the heads of the clients, and how they refuse a head that stays with each."""
FEW = {
    "CCVR": {"samples_per_class": 20},
    "FedDF": {"distill_steps": 5},
    "DPFedAvg": {"noise_multiplier": 1.0, "delta": 0.01},
}
RULES = [
    MedianAggregator,
    pytest.param(partial(KrumAggregator, f=0), marks=pytest.mark.slow),  # all four are one class to a method,
    pytest.param(GeometricMedianAggregator, marks=pytest.mark.slow),  # and the table of `fl-lightning methods`
    pytest.param(TrimmedMeanAggregator, marks=pytest.mark.slow),  # has a round of each
]


Net = partial(BatchNormNet, dropout=0.0)


def settings_of(name: str, **client: Any) -> dict[str, Any]:
    """Settings of a loop that uses the method; `client`: of its client, which is FedAvg's where it has none."""
    part = PARTS.get(name)
    if part is methods.SAM:
        inner = client.get("optimizer") or sgd()
        return {"client": methods.FedAvg(**{**client, "optimizer": lambda params: part(params, base=inner)})}
    settings: dict[str, Any] = {"client": CLIENTS.get(name, methods.FedAvg)(**client)}
    if part is not None and issubclass(part, torch.optim.Optimizer):
        settings["server_optimizer"] = part
    elif part is not None:
        settings["aggregator" if issubclass(part, Aggregator) else "server_module"] = part(**FEW.get(name, {}))
    return settings


def with_net(name: str) -> dict[str, Any]:
    return settings_of(name, net=Net, optimizer=sgd())


def data_of(scale: float = 1.0, sizes: tuple[int, ...] = (7, 0, 9, 1, 6), **settings: Any) -> FederatedDataModule:
    """The toy clients and every set that a method may need, all inputs times `scale`."""

    def source(n: int, seed: int) -> TensorSource:
        train, test = ((scale * x, y) for x, y in (samples(n, seed), samples(12, seed + 1)))
        return TensorSource(train, test, num_classes=3)

    data = toy_data(sizes, extra_splits={name: source(11, 5) for name in ("proxy", "transfer")}, **settings)
    data.source = source(sum(sizes), 0)
    return data


def trained(data: FederatedDataModule, client: ClientModule, rounds: int = 2, **settings: Any) -> FederatedLoop:
    """Fit, and see that everything that is kept is finite."""
    loop = fit(client, rounds, data, local_epochs=2, **settings)
    kept = [loop.state_dict(), *(loop.store.record(i)[1] or {} for i in range(data.num_clients))]
    assert all(value.isfinite().all() for state in kept for value in state.values() if value.is_floating_point())
    return loop


def refused(words: str, data: FederatedDataModule, make: Any) -> None:
    """See that making and fitting a loop ends in a sentence, before any client trains."""

    class Never(pl.Callback):
        def on_client_start(self, trainer: Any, loop: Any, client_id: int) -> None:
            pytest.fail("a client was trained")

    with pytest.raises(ValueError, match=words):
        fit(None, 1, data, loop=FederatedLoop(**make()), callbacks=[Never()])


class SGDDictNet(DictNet):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


@pytest.mark.parametrize("name", some(NAMES))
def test_batches_may_be_dicts_where_it_goes_around_a_module(name):
    """A user's data module, and a module of his with BatchNorm, under partial participation."""
    if name == "SAM":
        pytest.skip("is set by the module's own configure_optimizers")
    cohorts = cohorts_of(name, participation=0.7)
    data = FederatedDataModule.from_datamodule(Dicts(), num_clients=3, proxy_size=8, **cohorts)
    if name in LOGITS:
        needs = f"{name}(Server)? needs the logits of a net, got module=SGDDictNet"
        refused(needs, data, lambda: settings_of(name, module=SGDDictNet()))
        return
    start = SGDDictNet()
    before = clone(start.state_dict())
    head = {"head": "module.net.3.*"} if name in MODULE_SETTINGS else {}
    loop = trained(data, **settings_of(name, module=start, **head))
    if name not in SHARE_NOTHING:
        assert not equal(before, dict(loop.client.module.state_dict()))


@pytest.mark.parametrize("name", some(sorted(CLIENTS)))
def test_its_own_passes_and_its_training_see_what_the_transfer_hook_makes_of_a_batch(name):
    """A hook that doubles the inputs is data of twice the size, bit for bit: the server's sets and evaluation too."""

    class Hooked(CLIENTS[name]):
        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return 2 * batch[0], batch[1]

    Hooked.__name__ = name
    hooked, plain = (
        trained(data_of(scale), kind(net=Net, optimizer=sgd()), evaluate_clients_every=1)
        for kind, scale in ((Hooked, 1.0), (CLIENTS[name], 2.0))
    )
    assert equal(weights_of(hooked), weights_of(plain))
    assert hooked.round_metrics == plain.round_metrics


@pytest.mark.parametrize("name", NAMES)
def test_two_rounds_with_awkward_clients_are_finite_and_count_their_bytes(name):
    class Rows(pl.Callback):
        rows: tuple[dict[str, float], ...] = ()

        def on_train_epoch_end(self, trainer: Any, loop: Any) -> None:
            self.rows = (*self.rows, {key: float(value) for key, value in loop.round_metrics.items()})

    cohorts = cohorts_of(name, schedule=EDGES["data"]["schedule"])
    own = {"partition": EdgePartition(), "batch_size": 8, **cohorts}
    watch = Rows()
    net = partial(BatchNormNet, dropout=0.2)
    settings = settings_of(name, net=net, optimizer=sgd(0.05))
    loop = trained(data_of(sizes=EdgePartition.SIZES, **own), callbacks=[watch], evaluate_clients_every=1, **settings)
    check_rounds(list(watch.rows), loop.state_dict())
    assert loop.trainer.global_step == 2


class SaveAfter(pl.Callback):
    """Saves a checkpoint after some rounds."""

    def __init__(self, folder: Path, rounds: Iterable[int]) -> None:
        self.paths = {round_idx: folder / f"{round_idx}.ckpt" for round_idx in rounds}

    def on_train_epoch_end(self, trainer: Any, loop: Any) -> None:
        if trainer.current_epoch in self.paths:
            trainer.save_checkpoint(self.paths[trainer.current_epoch])


def check_same_end(resumed: FederatedLoop, whole: FederatedLoop) -> None:
    """See that two runs have the same weights, values, records of clients and server optimizers, bit for bit."""
    assert equal(weights_of(resumed), weights_of(whole))
    assert same(resumed.round_metrics, whole.round_metrics)
    kept = [[loop.store.record(i) for i in sorted(loop.store.clients)] for loop in (resumed, whole)]
    assert same(*kept)
    assert same(*([optimizer.state_dict() for optimizer in loop.trainer.optimizers] for loop in (resumed, whole)))


@pytest.mark.parametrize("name", some(NAMES))
def test_resume_after_the_first_round_is_the_uninterrupted_run(name, tmp_path):
    def two_rounds(**settings: Any) -> FederatedLoop:
        return trained(data_of(), evaluate_clients_every=1, **with_net(name), **settings)

    save = SaveAfter(tmp_path, [0])
    whole = two_rounds(callbacks=[save])
    check_same_end(two_rounds(ckpt_path=save.paths[0]), whole)


CHANGING = {
    "classes": lambda: ClassIncremental([[0], [1], [2]], rounds_per_task=1, order="shuffled", delay=1),
    "rotated": lambda: DomainIncremental(rounds_per_task=1, permutations=3),
    "drift": lambda: LabelDrift(alpha=1.0, rounds=3, samples=0.8),
    "window": lambda: Window(per_round=0.3, keep=2, first=0.3),
}
"""Scenarios in which the data of a client change after each round."""


@pytest.mark.slow  # the runs of tests/federation/test_changing_resume.py, for all methods
@pytest.mark.parametrize("scenario", CHANGING)
@pytest.mark.parametrize("name", NAMES)
def test_resume_where_data_change_is_the_uninterrupted_run(name, scenario, tmp_path):
    def three_rounds(**settings: Any) -> FederatedLoop:
        data = data_of(scenario=CHANGING[scenario](), sizes=(17, 0, 19, 12, 16))
        return trained(data, rounds=3, evaluate_clients_every=1, **with_net(name), **settings)

    if getattr(PARTS.get(name), "is_private", False):
        with pytest.raises(ValueError, match=r"data\.scenario"):
            three_rounds()
        return
    save = SaveAfter(tmp_path, [0, 1])
    whole = three_rounds(callbacks=[save])
    for path in save.paths.values():
        resumed = three_rounds(ckpt_path=path)
        check_same_end(resumed, whole)
        tables = [loop._run.tasks and loop._run.tasks.state_dict() for loop in (resumed, whole)]
        assert str(tables[0]) == str(tables[1])


@pytest.mark.parametrize("name", some(NAMES))
def test_bf16_mixed_follows_float32(name):
    half, exact = (trained(data_of(), rounds=1, precision=p, **with_net(name)) for p in ("bf16-mixed", "32-true"))
    expected = {key: value for key, value in exact.round_metrics.items() if key.startswith("train/")}
    assert {key: half.round_metrics[key] for key in expected} == pytest.approx(expected, rel=1e-2, abs=1e-2)
    assert all(value.dtype != torch.bfloat16 for value in half.state_dict().values())


@pytest.mark.parametrize("name", some(NAMES))
def test_with_a_personal_head(name):
    """It never travels: each client has its own, which resume and other clients leave alone."""
    if name in NEED_SHARED_HEAD:
        refused(NEED_SHARED_HEAD[name], data_of(), lambda: {**with_net(name), "personal": "net.head.*"})
        return
    loop = trained(data_of(), personal="net.head.*", **with_net(name))
    heads = [loop.store.record(i)[1]["net.head.weight"] for i in (0, 2, 4)]
    assert any(torch.equal(heads[0], other) for other in heads[1:]) == (name == "FedBABU")  # which trains no head
    assert not [
        entry for entry in loop.global_weights.shared if ".head." in entry and not entry.startswith("personal_head")
    ]


@pytest.mark.parametrize("name", some(sorted({*CLIENTS, "CCVR", "FedDF", "FedEXP", "FedNova"})))
def test_a_server_optimizer_is_stepped_or_refused(name):
    def made() -> dict[str, Any]:
        return {**with_net(name), "server_optimizer": partial(torch.optim.SGD, lr=0.5, momentum=0.9)}

    if name in OWN_STEP | SHARE_NOTHING:
        refused("server_optimizer", data_of(), made)
    else:
        (state,) = trained(data_of(), **made()).trainer.optimizers[0].state_dict()["param_groups"]
        assert state["momentum"] == 0.9


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", some(sorted({*CLIENTS, "CCVR", "FedDF", "FedAdam", "FedAvgM"})))
def test_every_robust_rule_goes_with_it_where_weights_are_shared(name, rule):
    def made() -> dict[str, Any]:
        return {**with_net(name), "aggregator": rule()}

    if name in SHARE_NOTHING:
        refused("share none that is trained; leave model.aggregator unset", data_of(), made)
    elif name in CLIENTS and CLIENTS[name].own_start:
        refused("start from models of their own; leave model.aggregator unset", data_of(), made)
    else:
        trained(data_of(), **made())


@pytest.mark.parametrize("name", sorted(CLIENTS))
def test_it_says_whether_it_stacks_and_why_not(name):
    """`tests/engines/test_cohort.py` trains those that do."""
    kind = CLIENTS[name]
    assert "stackable" in vars(kind), f"{name} must say whether it stacks"
    if not kind.stackable:
        assert re.search(r"stackable = False  # \w+", inspect.getsource(kind)), f"{name} must say why not, in its line"
