"""A user's mistake ends with one sentence: the rule, what was given, the remedy. Nothing else is printed or lost."""

import sys
from argparse import ArgumentError

import lightning  # noqa: F401  its handler writes to the stream that is standard error when it is imported
import pytest
import torch

from fl_lightning import methods
from fl_lightning.__main__ import COMMANDS, main
from fl_lightning.members.faults import ClientError
from tests.commands import TINY, refusal, say

FIT = f"fit {TINY} --trainer.max_epochs 1"
CHECKPOINT = "--trainer.callbacks ModelCheckpoint --trainer.callbacks"
OWN = """
import torch
from torch import nn
from pytorch_lightning import LightningDataModule, LightningModule
from fl_lightning.data import TensorSource
from lightning.pytorch import Callback as Twin

class NoStep(LightningModule):
    def configure_optimizers(self):
        return None

class OfTheTwin(Twin):
    pass

class Mine(LightningModule):
    def __init__(self, width: int = 4):
        super().__init__()
        self.net = nn.Linear(64, 10)

    def training_step(self, batch, batch_idx):
        raise ValueError("a bug of one's own")

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

class Folders(LightningDataModule):
    def __init__(self, width: int = 4):
        super().__init__()

class Exploding(Mine):
    def training_step(self, batch, batch_idx):
        return self.net(batch[0].flatten(1)).sum() * float("inf")

class ElevenLabels(TensorSource):
    def __init__(self):
        data = torch.zeros(22, 3), torch.arange(22) % 11
        super().__init__(data, data, num_classes=10)
"""


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch, without_pictures):
    """An empty working directory with classes of a user's own, one of them on top of the twin package."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "broken.py").write_text("import a_package_that_is_not_there\n")
    (tmp_path / "halves.py").write_text("from torch import no_such_name\n")
    (tmp_path / "through.py").write_text("import halves\n")
    (tmp_path / "typo.py").write_text("class Net:\n    x = = 3\n")
    before = set(sys.modules)
    yield tmp_path
    for name in {"own", "broken", "halves", "through", "typo"} - before:
        sys.modules.pop(name, None)


OPTIONS = [
    ("--model.local_epoch 3", "unknown option 'model.local_epoch'; the nearest is 'model.local_epochs'"),
    ("--trainer.maxepochs 3", "unknown option 'trainer.maxepochs'; the nearest is 'trainer.max_epochs'"),
    ("--nosuch", "unknown option 'nosuch'; fl-lightning fit --help all lists them"),
    ("stray", "unexpected argument 'stray'; options begin with --"),
    ("--model.client.betta 3", "model.client: unknown option 'betta'; the nearest is 'beta'"),
    ("--model.client FedProx --model.client.beta 3", "model.client: unknown option 'beta'; there are mu, "),
    ("--model.client FedNTDD", "model.client: there is no class 'FedNTDD'; the nearest is 'FedNTD'"),
    ("--model.client.net Percptron", "model.client.net: there is no class 'Percptron'; the nearest is 'Perceptron'"),
    (
        "--model.client.net torch.optim.SGD",
        "model.client.net must be a subclass of torch.nn.Module, and torch.optim.SGD is none; it takes BodyAndHead, ",
    ),
    ("--model.client.net.hiden 3", "model.client.net: unknown option 'hiden'; the nearest is 'hidden'"),
    ("--model.client.optimizer.lrr 3", "model.client.optimizer: unknown option 'lrr'; the nearest is 'lr'"),
    ("--model.client.beta x", "model.client.beta must be float, got x"),
    ("--model.client.optimizer.lr x", "model.client.optimizer.lr must be float, got x"),
    ("--data.source.roott x", "data.source: unknown option 'roott'"),
    ("--model.server_optimizer.lr 1", "its class must be named before the option 'lr'; it takes ASGD, "),
    ("--model.client Local --model.client.net.hiden 3", "unknown option 'hiden'; the nearest is 'hidden'"),
    ("--model.client.kd_form sun", "model.client.kd_form must be sum or convex, got sun; the nearest is 'sum'"),
    (
        "--model.aggregator Aggregator --model.aggregator.weighting sample",
        "model.aggregator.weighting must be samples or uniform, got sample; the nearest is 'samples'",
    ),
    (
        "--model.faults.nonfinite skipp",
        "model.faults.nonfinite must be error or skip, got skipp; the nearest is 'skip'",
    ),
    ("--model.faults.nonfinit skip", "model.faults: unknown option 'nonfinit'; the nearest is 'nonfinite'"),
    ("--model.faults quiet", "model.faults must be error or skip, got quiet"),
    ("--data.num_clients five", "data.num_clients must be int, got five"),
    ("--data.partition Dirichlet", "there is no class 'Dirichlet'; the nearest is 'DirichletPartition'"),
    ("--trainer.callbacks EarlyStoping", "there is no class 'EarlyStoping'; the nearest is 'EarlyStopping'"),
    (
        "-c nosuch.yaml",
        "config: there is no file nosuch.yaml, and no configuration of that name comes with ",
    ),
    (
        "--model.client torch.nn.Linear",
        "must be a subclass of LightningModule, and torch.nn.Linear is none; it takes APFL, ",
    ),
    ("--model.client nosuch.Net", "there is no class 'nosuch.Net': no module 'nosuch' can be imported from "),
    ("--model.client torch.nosuch.Net", "no module 'torch.nosuch' can be imported from "),
    ("--model.client onw.Mine", "; the nearest is 'own'"),
    ("--model.client own.py:Mine", "a class is named by its import path: write own.Mine, got own.py:Mine"),
    ("--model.client ./sub/own.py:Mine", "write sub.own.Mine, got ./sub/own.py:Mine"),
    ("--model.client own:Mine", "write own.Mine, got own:Mine"),
    ("--model.client own", "write own.CLASS, got own; there are NoStep, OfTheTwin, Mine, "),
    ("--trainer.callbacks own.py:OfTheTwin", "write own.OfTheTwin, got own.py:OfTheTwin"),
    ("--model.client FedNtd", "there is no class 'FedNtd'; the nearest is 'FedNTD'"),
    ("--model.client fed-prox", "the nearest is 'FedProx'"),
    ("--model.client.optimizer sgd", "there is no class 'sgd'; the nearest is 'SGD'"),
    ("--model.aggregator median", "there is no class 'median'; the nearest is 'MedianAggregator'"),
    ("--model.aggregator krum", "the nearest is 'KrumAggregator'"),
    ("--model.transforms normclip", "the nearest is 'NormClip'"),
    ("--data.partition dirichlet", "there is no class 'dirichlet'; the nearest is 'DirichletPartition'"),
    ("--data.partition iid", "the nearest is 'IIDPartition'"),
    ("--data.source cifar10", "there is no class 'cifar10'; the nearest is 'CIFAR10'"),
    ("--trainer.callbacks earlystopping", "the nearest is 'EarlyStopping'"),
    (
        "--model.client FedProx --model.client.mu 0,01",
        "model.client.mu must be float, got 0,01; numbers are written with a ",
    ),
    (
        "--model.client.optimizer.lr ,5",
        "model.client.optimizer.lr must be float, got ,5; numbers are written with a point: 0.5",
    ),
    ("--data.participation=-0,5", "numbers are written with a point: -0.5"),
    ("--model.client.optimizer.lr fast", "optimizer.lr must be float, got fast; write a number, such as 0.01"),
    ("--model.local_epochs two", "model.local_epochs must be int or list, got two; write a whole number, such as 3"),
    (
        "--model '{client: {class_path: FedProx, init_args: {mu: 0,01}}}'",
        "a key in a file must be a name, got 1; a comma ends a value: write numbers with a point, 0.01",
    ),
    (
        "--model.client tests.user_modules.Regresion",
        "there is no class 'tests.user_modules.Regresion'; the nearest is 'tests.user_modules.Regression'",
    ),
    (
        "--model.client broken.Net",
        "broken.Net cannot be imported (broken.py, line 1), it needs a_package_that_is_not_there",
    ),
    (
        "--data.source broken.Data",
        "broken.Data cannot be imported (broken.py, line 1), it needs a_package_that_is_not_",
    ),
    (
        "--model.client halves.Net",
        "(halves.py, line 1), its import raised ImportError: cannot import name 'no_such_name'",
    ),
    (
        "--trainer.callbacks through.Watch",
        "through.Watch cannot be imported (halves.py, line 1), its import raised Imp",
    ),
    ("--model.client typo.Net", "its import raised SyntaxError: invalid syntax (typo.py, line 2); mend that"),
    ("--trainer.callbacks own.Mine", "trainer.callbacks must be a subclass of Callback, and own.Mine is none"),
    ("--model.client own.Mine --model.client.widht 3", "unknown option 'widht'; the nearest is 'width'"),
    ("--data.source own.Folders --data.source.widht 3", "data.source: unknown option 'widht'; the nearest is 'width'"),
    ("--data.source own.Folders --data.source.width x", "data.source.width must be int, got x"),
    ("--data.source own.Mine", "data.source must be a subclass of Source, and own.Mine is none; it takes CIFAR10, "),
    ("--trainer.callbacks.patience 3", "trainer.callbacks: its class must be named before the option 'patience'; it "),
]

MEANT = [
    ("seed", "seed_everything"),
    ("trainer.rounds", "trainer.max_epochs"),
    ("num_rounds", "trainer.max_epochs"),
    ("model.lr", "model.client.optimizer.lr"),
    ("learning_rate", "model.client.optimizer.lr"),
    ("model.client.lr", "model.client.optimizer.lr"),
    ("model.client.momentum", "model.client.optimizer.momentum"),
    ("data.alpha", "data.partition.alpha"),
    ("alpha", "data.partition.alpha"),
    ("model.mu", "model.client.mu"),
    ("model.hidden", "model.client.net.hidden"),
    ("data.root", "data.source.root"),
    ("local_epochs", "model.local_epochs"),
    ("trainer.local_epochs", "model.local_epochs"),
    ("model.num_clients", "data.num_clients"),
    ("data.fraction_fit", "data.participation"),
    ("method", "model.client"),
    ("checkpoint", "ckpt_path"),
    ("model.clientt", "model.client"),
]

VALUES = [
    ("--data.num_clients 5000", "num_clients must lie between 1 and the number of samples, got 5000 clients for 1437"),
    ("--data.partition.alpha 0", "error: alpha must be positive, got 0.0: "),
    ("--data.partition.alpha -1", "error: alpha must be positive, got -1.0: "),
    ("--data.participation 0", "participation must lie in (0, 1], got 0.0; "),
    ("--data.participation 1.5", "participation must lie in (0, 1], got 1.5; "),
    ("--data.source CIFAR10 --data.source.root missing", "CIFAR10 was not found in root missing"),
    ("--data.source own.ElevenLabels", "labels must lie in [0, 10), got 10 at index 10 of the train split: "),
    ("--model.client own.NoStep", "a client needs a training_step, and NoStep has none; define "),
    (
        "--model.client own.Exploding",
        "but client 0 returned NaN or infinite values in round 0; lower the learning rate",
    ),
    ("--model.local_epochs [1,2]", "local_epochs as a list needs one number per client (4), got 2"),
    ("--model.initial_weights no.pt", "initial_weights must be a file, got no.pt; give "),
    ("--ckpt_path last", "--ckpt_path last needs a run in runs/digits_fedntd "),
    ("--ckpt_path no.ckpt", "--ckpt_path must be last, best or a checkpoint file, got no.ckpt"),
    ("--trainer.limit_train_batches 3", "trainer.limit_train_batches must stay unset, got 3; use "),
    ("--trainer.sync_batchnorm true", "trainer.sync_batchnorm must be false, got true; leave it unset"),
]

NO_MEANING = [
    ("--trainer.overfit_batches 1", "trainer.overfit_batches=1 has no meaning in a federation; use "),
    ("--trainer.val_check_interval 0.5", "trainer.val_check_interval must be 1.0, got 0.5; use "),
    ("--trainer.strategy ddp --trainer.devices 2", "trainer.strategy must be client_parallel, got DDPStrategy with 2 "),
    ("--trainer.gradient_clip_val 1.5", "trainer.gradient_clip_val=1.5; set model.clip_norm"),
    ("--trainer.accumulate_grad_batches 2", "trainer.accumulate_grad_batches=2; set the model's"),
    ("--trainer.precision bf16-true", "trainer.precision=bf16-true is refused; use bf16-mixed"),
    ("--trainer.precision 16-true", "trainer.precision=16-true is refused; use bf16-mixed"),
    (
        "--trainer.callbacks StochasticWeightAveraging --trainer.callbacks.swa_lrs 0.1",
        "adds an epoch for BatchNorm, which would be a round; leave it out",
    ),
    ("--trainer.val_check_interval 00:00:01:00", "trainer.val_check_interval must be 1.0, got a time; use trainer."),
    ("--trainer.callbacks LearningRateFinder", "leave it out, and compare short runs with several model.client.opti"),
    (
        "--trainer.callbacks BatchSizeFinder",
        "the Trainer's batch, which is a round; leave it out, and set data.batch_size",
    ),
    (
        "--trainer.callbacks GradientAccumulationScheduler --trainer.callbacks.scheduling '{0: 2}'",
        "of which a round has one; leave it out, and set model.accumulate_grad_batches",
    ),
    (
        "--trainer.callbacks BackboneFinetuning",
        "which is the server's; freeze and unfreeze loop.client by requires_grad_ in ",
    ),
    (
        "--trainer.callbacks ModelPruning --trainer.callbacks.pruning_fn l1_unstructured",
        "not those that the clients share; prune the trained client.ckpt",
    ),
    (
        "--trainer.callbacks SpikeDetection",
        "a step of the Trainer is a round; leave it out, and set model.faults.max_update_",
    ),
    (f"{CHECKPOINT}.train_time_interval 00:00:10", "never writes in a federation; use every_n_epochs"),
    (f"{CHECKPOINT}.every_n_train_steps 2", "counts batches, of which a round has one; use every_n_epochs"),
]
"""What a Trainer may have that a round has not; tests/test_loop.py tries each without the command line."""


@pytest.mark.parametrize(("options", "says"), OPTIONS)
def test_a_wrong_option(options, says):
    assert says in refusal(f"{FIT} {options}", 2)


def test_a_name_that_several_classes_have_is_said_to_be_theirs():
    """A class of one's own with the name of one of ours: a short name is neither's."""
    twin = type("FedRS", (methods.FedRS,), {"__module__": "my_task"})
    try:
        said = refusal(f"{FIT} --model.client FedRS", 2)
    finally:
        twin.__name__ = "Another"
    both = "fl_lightning.methods.fedrs.FedRS, my_task.FedRS"
    assert f"'FedRS' names several classes: {both}; write the import path of the one that is meant" in said


@pytest.mark.parametrize(("given", "means"), MEANT)
def test_an_option_is_suggested_by_what_it_means_before_how_it_is_spelt(given, means):
    assert f"; the nearest is {means!r}; " in refusal(f"{FIT} --{given} 3", 2)


def slow(row):
    return pytest.param(*row, marks=pytest.mark.slow)


@pytest.mark.parametrize(("options", "says"), [*VALUES, *map(slow, NO_MEANING)])
def test_what_a_run_cannot_do(here, options, says, monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert says in refusal(f"{FIT} {options} --trainer.enable_progress_bar false", 1)
    assert not list(here.glob("runs/*"))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            "model.client FedDyn --model.client.alpha 0",
            "alpha must be above 0, got 0.0; FedAvg is the method without these terms",
        ),
        (
            "model.transforms NormClip --model.transforms.max_norm 0",
            "max_norm must be above 0, got 0.0; it is the greatest norm of an update",
        ),
        (
            "data.source Synthetic --data.source.iid true --data.source.alpha 0.5",
            "data.source.iid gives all clients one law, and alpha and beta make them differ, got alpha=0.5 and "
            "beta=0.0; leave alpha and beta at 0, or iid out",
        ),
    ],
)
def test_what_a_class_says_of_its_arguments_is_said_once_and_alone(options, says):
    """Also where the option may be one of several kinds, to none of which the value belongs."""
    assert refusal(f"{FIT} --{options}", 1) == f"fl-lightning: error: {says}"


def test_a_wrong_key_in_a_file(here):
    for text, says in (
        ("model: {local_epoch: 3}", "unknown option 'model.local_epoch'; the nearest is 'model.local_epochs'"),
        ("model: [3", "did not find expected ',' or ']'"),
        ("trainer: {callbacks: [{class_path: EarlyStoping}]}", "the nearest is 'EarlyStopping'"),
        (
            "trainer: {callbacks: {class_path: EarlyStopping, init_args: {monitr: a}}}",
            "trainer.callbacks: unknown option 'monitr'; the nearest is 'monitor'",
        ),
        ("model: {client: {class_path: FedProx, mu: 1.0}}", "options of a class belong under init_args, beside its "),
    ):
        (here / "mine.yaml").write_text(text)
        assert says in refusal("fit -c mine.yaml", 2)


def test_a_value_that_no_round_has():
    said = refusal(f"{FIT} --trainer.callbacks EarlyStopping --trainer.callbacks.monitor nosuch", 1)
    assert "conditioned on metric `nosuch` which is not available. Pass in or modify your `EarlyStopping` ca" in said


@pytest.mark.parametrize("encoding", ["utf-16", "latin-1"])
def test_a_file_that_is_not_utf8(here, encoding):
    (here / "mine.yaml").write_bytes("# für später\nmodel: {local_epochs: 1}\n".encode(encoding))
    says = "config: mine.yaml must be text in UTF-8, got byte 0xf"
    assert says in refusal(f"{FIT} -c mine.yaml", 2)
    assert says in refusal(f"{FIT} --config=mine.yaml", 2)
    (here / "lr=1").mkdir()
    (here / "mine.yaml").rename(here / "lr=1/mine.yaml")
    for option in ("-c ", "--config="):
        assert says.replace("mine", "lr=1/mine") in refusal(f"{FIT} {option}lr=1/mine.yaml", 2)


def test_a_file_that_holds_itself(here):
    (here / "mine.yaml").write_text("model: &a [*a]\n")
    assert "a value in a file holds itself" in refusal(f"{FIT} -c mine.yaml", 2)


BROKEN = {"bytes": b"\xff\xfe", "cut": b"{", "list": b"[1]", "1": b'{"checkpoints": [1]}', "deep": b"[" * 100_000}


def test_a_broken_registry_does_not_stop_a_run(here):
    assert say(FIT).code == 0
    (run,) = here.glob("runs/digits_fedntd/*")
    (run / "clients").mkdir(exist_ok=True)
    for content in BROKEN.values():
        (run / "clients" / "checkpoints.json").write_bytes(content)
        said = say(f"{FIT} --ckpt_path last")
        assert said.code == 0, said.err


def test_a_table_that_is_none(here):
    assert say(FIT).code == 0
    (table,) = here.glob("runs/digits_fedntd/*/metrics.csv")
    for content in (b"a,b\n1,2\n", b"\xff\xfe\x00\n1\n", b"round,a\n0,x\n"):
        table.write_bytes(content)
        said = refusal(f"{FIT} --ckpt_path last --trainer.max_epochs 2", 1)
        assert "metrics.csv must be a table of numbers with a row for each round" in said
        assert said.endswith("move it away")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--model.client.optimizer.lr 1", "model.client.optimizer: its class must be named before the option 'lr'; "),
        ("--model.client.net.hidden [3]", "model.client.net: its class must be named before the option 'hidden'; "),
        ("--data.partition.alpha 1", "data.partition: its class must be named before the option 'alpha'; it takes "),
        ("--trainer.logger CSVLoger", "there is no class 'CSVLoger'; the nearest is 'CSVLogger'"),
    ],
)
def test_options_without_a_file(options, says):
    assert says in refusal(f"fit {options}", 2)


def test_a_wrong_command():
    said = refusal("fti", 2)
    others = " or ".join(name for name in COMMANDS if name[0] != "-")
    assert f"must be fit or validate or test or predict or {others}, got fti; the nearest" in said


@pytest.mark.parametrize(
    ("source", "files"),
    [
        (
            "CIFAR10",
            [
                f"cifar-10-batches-py/{name}"
                for name in ("test_batch", "batches.meta", *(f"data_batch_{i}" for i in range(1, 6)))
            ],
        ),
        ("MNIST", [f"MNIST/raw/{p}-{k}-ubyte" for p in ("train", "t10k") for k in ("images-idx3", "labels-idx1")]),
    ],
)
def test_a_corrupt_data_file(here, source, files):
    for name in files:
        (here / "data" / name).parent.mkdir(parents=True, exist_ok=True)
        (here / "data" / name).write_bytes(b"rubbish")
    said = refusal(f"{FIT} --data.source {source} --data.source.root data", 1)
    assert "is corrupt" in said
    assert "delete it and set `download: true`" in said


def test_a_checkpoint_of_another_net_loses_nothing(here):
    assert say(f"{FIT} --trainer.logger false").code == 0
    before = {path: path.read_bytes() for path in here.rglob("runs/**/*") if path.is_file()}
    another = "--ckpt_path last --model.client.net.hidden [5]"
    says = (
        "begun with, but model.client.net.hidden was [64], is [5]; give it those, start a new run, or let it change by"
    )
    assert says in refusal(f"{FIT} {another} --trainer.max_epochs 2", 1)
    assert says in refusal(f"test {TINY} {another}", 1)
    allowed = "--allow_changes model.client.net.hidden"
    assert "entry 'client.net.body.1.bias' has shape (64,)" in refusal(f"test {TINY} {another} {allowed}", 1)
    assert {path: path.read_bytes() for path in before} == before


def test_a_file_that_is_no_checkpoint(here):
    (here / "a.ckpt").write_bytes(b"rubbish")
    assert "a.ckpt cannot be read as a checkpoint" in refusal(f"{FIT} --ckpt_path a.ckpt", 1)
    torch.save({"state_dict": {}}, here / "b.ckpt")
    assert "set model.initial_weights" in refusal(f"test {TINY} --ckpt_path b.ckpt", 1)


def test_an_error_in_a_users_own_code_names_client_round_and_line(here, monkeypatch):
    """Its traceback can be asked for."""
    said = refusal(f"{FIT} --model.client own.Mine --trainer.enable_progress_bar false", 1)
    assert "client 0 raised ValueError in round 0: a bug of one's own (own.py, line 21); " in said
    assert not list(here.glob("runs/*"))
    monkeypatch.setenv("FL_LIGHTNING_DEBUG", "1")
    with pytest.raises(ClientError) as caught:
        main([*FIT.split(), "--model.client", "own.Mine"])
    assert isinstance(caught.value.__cause__, ValueError)


def test_the_traceback_of_a_refusal_can_be_asked_for(monkeypatch):
    monkeypatch.setenv("FL_LIGHTNING_DEBUG", "1")
    with pytest.raises(ArgumentError, match=r"unknown option 'nosuch'"):
        main([*FIT.split(), "--nosuch", "2"])
    with pytest.raises(ValueError, match="participation"):
        main([*FIT.split(), "--data.participation", "2"])


def test_an_option_of_a_class_that_is_given_by_a_name():
    said = refusal(f"{FIT} --trainer.strategy client_parallel --trainer.strategy.timeout 3", 2)
    assert (
        "trainer.strategy must be the path of a class to take the option 'timeout', got a name; give the path" in said
    )


def interrupted(*_):
    raise KeyboardInterrupt("round 3 is complete")


@pytest.mark.parametrize(
    ("rank", "local_rank", "says"),
    [
        ("", "", "round 3 is complete"),
        ("", "0", "round 3 is complete"),
        ("0", "0", "round 3 is complete"),
        ("", "1", ""),
        ("2", "0", ""),
    ],
    ids=["alone", "Lightning's first", "torchrun's first", "Lightning's second", "the first of torchrun's second node"],
)
def test_of_several_processes_one_says_that_the_run_was_interrupted(rank, local_rank, says, monkeypatch):
    if rank:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
        monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    monkeypatch.setattr("fl_lightning.cli.main.FederatedCLI", interrupted)
    said = say(FIT)
    assert said.code == 130
    assert said.out == ""
    assert bool(said.err) == bool(says)
    assert says in said.err
