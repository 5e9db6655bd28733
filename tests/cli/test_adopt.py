"""`fit --from`: the configuration files of programs with LightningCLI, as these write them, and as people do."""

import importlib
import inspect
import sys
from contextlib import chdir
from functools import wraps
from pathlib import Path

import lightning.pytorch
import pytest
import pytorch_lightning
import torch
import yaml
from jsonargparse import get_loader

from fl_lightning.cli.adopt import adopt
from fl_lightning.cli.adopt_files import merged
from fl_lightning.cli.adopt_sections import READERS
from fl_lightning.cli.adopt_trainer import TRAINER
from fl_lightning.cli.errors import RefusedTogetherError
from fl_lightning.federation.checks import REFUSED
from fl_lightning.utils.packages import is_of_lightning
from tests.commands import say

THEIRS = """
import torch
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset
import PACKAGE as L
from PACKAGE.callbacks import EarlyStopping, ModelCheckpoint, ProgressBar
from PACKAGE.loggers import CSVLogger

class Data(L.LightningDataModule):
    def __init__(self, batch_size: int = 8, noise: float = 0.1):
        super().__init__()
        self.batch_size, self.noise = batch_size, noise

    def setup(self, stage=None):
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(60, 3, generator=generator)
        y = x.sum(dim=1) + self.noise * torch.randn(60, generator=generator)
        self.samples = TensorDataset(x, y)

    def train_dataloader(self):
        return DataLoader(Subset(self.samples, range(40)), batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(Subset(self.samples, range(40, 60)), batch_size=20)

class Bare(L.LightningModule):
    def __init__(self, width: int = 4, act: nn.Module = nn.ReLU()):
        super().__init__()
        self.save_hyperparameters(ignore="act")
        self.net = nn.Sequential(nn.Linear(3, width), act, nn.Linear(width, 1))

    def loss(self, batch, name):
        x, y = batch
        loss = nn.functional.mse_loss(self.net(x).squeeze(1), y)
        self.log(name, loss)
        return loss

    def training_step(self, batch, batch_idx):
        return self.loss(batch, "train_loss")

    def validation_step(self, batch, batch_idx):
        self.loss(batch, "val_loss")

class Net(Bare):
    def __init__(self, width: int = 4, lr: float = 0.1, act: nn.Module = nn.ReLU()):
        super().__init__(width, act)
        self.lr = lr

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)

class Linked(Net):
    def __init__(self, batch_size: int, width: int = 4):
        super().__init__(width)
        self.batch_size = batch_size

class LinkedByDefault(Net):
    def __init__(self, batch_size: int = 1, width: int = 4):
        super().__init__(width)

class Watch(L.Callback):
    seen = []

    def __init__(self, every: int = 1):
        self.every = every

    def on_train_epoch_end(self, trainer, pl_module):
        self.seen.append((trainer.current_epoch, self.every))

class Stop(EarlyStopping):
    pass

class Bar(ProgressBar):
    pass

class Keep(ModelCheckpoint):
    pass

class Log(CSVLogger):
    pass
"""

PACKAGES = {"pl": "pytorch_lightning", "twin": "lightning.pytorch"}
QUIET = "--trainer.max_epochs 2 --trainer.accelerator cpu --trainer.enable_progress_bar false --seed_everything 3"
CLASSES = "--model own.Net --data own.Data"


@pytest.fixture(params=PACKAGES.values(), ids=PACKAGES.keys())
def package(request, tmp_path):
    """The name of a package of Lightning, with a project of somebody in the working folder that uses it."""
    (tmp_path / "own.py").write_text(THEIRS.replace("PACKAGE", request.param))
    with chdir(tmp_path), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["main.py"])
        patch.syspath_prepend(str(tmp_path))
        yield request.param
    sys.modules.pop("own", None)


@pytest.fixture
def project(tmp_path):
    """A project of somebody in the working folder."""
    (tmp_path / "own.py").write_text(THEIRS.replace("PACKAGE", "lightning.pytorch"))
    with chdir(tmp_path), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["main.py"])
        patch.syspath_prepend(str(tmp_path))
        yield tmp_path
    sys.modules.pop("own", None)


def saved(package, words, model=None, data=None, linked=False):
    """Run LightningCLI of a package, and return the name of the configuration that it has saved."""
    cli = importlib.import_module(f"{package}.cli")
    own = importlib.import_module("own")

    class TheirCLI(cli.LightningCLI):
        def add_arguments_to_parser(self, parser):
            if linked:
                parser.link_arguments("data.batch_size", "model.batch_size")

    kinds = [None if name is None else getattr(own, name) for name in (model, data)]
    TheirCLI(*kinds, seed_everything_default=3, args=["fit", *QUIET.split(), *words.split()])
    (found,) = Path().rglob("config.yaml")
    return str(found.rename("theirs.yaml"))


def weights(line):
    """The weights of the global model after a fit."""
    said = say(line)
    assert said.code == 0, said.err
    newest = max(Path("runs").rglob("client.ckpt"), key=lambda path: path.stat().st_mtime_ns)
    return torch.load(newest, weights_only=False)["state_dict"]


def federated(client, module="own.Net", trainer="", model="", source="own.Data", source_arguments="{batch_size: 4}"):
    """A configuration of a federation, as somebody writes it who has read the documentation."""
    Path("ours.yaml").write_text(f"""
seed_everything: 3
trainer: {{max_epochs: 2, accelerator: cpu, enable_progress_bar: false, {trainer}}}
model:
  {model}
  client:
    class_path: fl_lightning.methods.FedAvg
    init_args: {{module: {{class_path: {module}, init_args: {{width: 5}}}}, {client}}}
data: {{num_clients: 4, source: {{class_path: {source}, init_args: {source_arguments}}}}}
""")
    return "fit -c ours.yaml"


BATCHES = "--data.batch_size 4"
ADAM = "--optimizer Adam --optimizer.lr 0.01"
SAVED = {
    "classes of the program": dict(
        words=f"--model.width 5 {BATCHES}", model="Net", data="Data", classes=CLASSES, ours={"client": ""}
    ),
    "classes of the file": dict(
        words=f"--model own.Net --model.width 5 --data own.Data {BATCHES}", classes="", ours={"client": ""}
    ),
    "settings of the Trainer": dict(
        words=f"--model.width 5 {BATCHES} --trainer.gradient_clip_val 0.5 --trainer.accumulate_grad_batches 2 "
        "--trainer.limit_train_batches 3 --trainer.val_check_interval 0.5 --trainer.log_every_n_steps 1",
        model="Net",
        data="Data",
        classes=CLASSES,
        ours={"client": "", "model": "{clip_norm: 0.5, accumulate_grad_batches: 2, max_local_steps: 2}"},
    ),
    "an optimizer and a scheduler": dict(
        words=f"--model.width 5 {BATCHES} {ADAM} --lr_scheduler StepLR --lr_scheduler.step_size 1",
        model="Bare",
        data="Data",
        classes="--model own.Bare --data own.Data",
        ours={
            "client": "optimizer: {class_path: Adam, init_args: {lr: 0.01}}, "
            "lr_scheduler: {class_path: StepLR, init_args: {step_size: 1}}",
            "module": "own.Bare",
        },
    ),
    "a scheduler that waits": dict(
        words=f"--model own.Bare --model.width 5 --data own.Data {BATCHES} {ADAM} "
        "--lr_scheduler=ReduceLROnPlateau --lr_scheduler.monitor val_loss",
        classes="",
        ours={
            "client": "optimizer: {class_path: Adam, init_args: {lr: 0.01}}, lr_scheduler: "
            "{class_path: pytorch_lightning.cli.ReduceLROnPlateau, init_args: {monitor: val_loss}}",
            "module": "own.Bare",
        },
    ),
    "callbacks and loggers": dict(
        words=f"--model own.Net --model.width 5 --data own.Data {BATCHES} --trainer.callbacks own.Watch "
        "--trainer.callbacks.every 7 --trainer.callbacks+ own.Stop --trainer.callbacks.monitor val_loss "
        "--trainer.callbacks+ EarlyStopping --trainer.callbacks.monitor val_loss "
        "--trainer.callbacks+ ModelCheckpoint --trainer.callbacks.every_n_train_steps 2 "
        "--trainer.logger+ own.Log --trainer.logger.save_dir logs "
        "--trainer.logger+ CSVLogger --trainer.logger.save_dir more",
        classes="",
        ours={"client": ""},
    ),
}
"""Options of a program with LightningCLI, those of `fit --from`, and the federation that is meant."""


@pytest.mark.usefixtures("without_pictures")
@pytest.mark.parametrize("case", SAVED.values(), ids=SAVED.keys())
def test_what_lightning_cli_has_saved_trains_as_the_federation_that_is_meant(package, case, caplog):
    caplog.set_level("INFO")
    name = saved(package, case["words"], case.get("model"), case.get("data"))
    own = importlib.import_module("own")
    own.Watch.seen.clear()
    entries = weights(f"fit --from {name} {case['classes']} --data.num_clients 4")
    if "callbacks" in case["words"]:
        assert own.Watch.seen == [(0, 7), (1, 7)]
        assert list(Path("logs").rglob("metrics.csv"))
        assert "every_n_train_steps: 2 dropped" in caplog.text
    model = case["ours"].get("model", "{}")[1:-1].replace(", ", "\n  ")
    expected = weights(federated(**{**case["ours"], "model": model}))
    assert entries.keys() == expected.keys()
    assert all(torch.equal(entries[key], expected[key]) for key in expected)


@pytest.mark.usefixtures("without_pictures", "project")
def test_the_folder_has_a_configuration_of_the_federation():
    Path("theirs.yaml").write_text("trainer: {max_epochs: 1, accelerator: cpu}\nmodel: {width: 5}\n")
    first = weights(f"fit --from theirs.yaml {CLASSES} --data.num_clients 4")
    (config,) = Path("runs/theirs").glob("0-*/config.yaml")
    written = yaml.safe_load(config.read_text())
    assert written["model"]["client"]["init_args"]["module"]["class_path"] == "own.Net"
    assert "from" not in written
    again = f"--from theirs.yaml {CLASSES} --data.num_clients 4 --ckpt_path last --trainer.max_epochs 2"
    for line in (f"validate -c {config} --ckpt_path last", f"fit {again}"):
        assert say(line).code == 0
    assert not list(Path("runs/theirs").glob("1*"))
    assert "from=" not in config.parent.name
    assert say(f"fit -c {config} --ckpt_path last --trainer.max_epochs 3").code == 0
    fresh = weights(f"fit -c {config} --trainer.max_epochs 1")
    assert all(torch.equal(first[key], fresh[key]) for key in first)


@pytest.mark.usefixtures("project")
def test_a_method_goes_around_their_module():
    Path("theirs.yaml").write_text("trainer: {max_epochs: 1}\nmodel: {width: 5}\noptimizer: SGD\n")
    for method in ("--model.client FedProx --model.client.mu 0.5", "-c method/fedprox --model.client.mu 0.5"):
        said = say(f"fit --from theirs.yaml {CLASSES} {method} --print_config")
        client = yaml.safe_load(said.out)["model"]["client"]
        assert client["class_path"] == "fl_lightning.methods.FedProx"
        assert client["init_args"]["mu"] == 0.5
        assert client["init_args"]["module"]["init_args"]["width"] == 5
        assert client["init_args"]["optimizer"]["class_path"] == "torch.optim.SGD"


@pytest.mark.usefixtures("without_pictures")
def test_a_bar_and_a_checkpoint_of_theirs_are_the_only_ones(package, monkeypatch):
    made = []
    create = pytorch_lightning.Trainer.__init__

    @wraps(create)
    def created(trainer, *args, **kwargs):
        create(trainer, *args, **kwargs)
        made.append(trainer)

    monkeypatch.setattr(pytorch_lightning.Trainer, "__init__", created)
    keep = "{class_path: own.Keep, init_args: {monitor: val_loss, save_last: true, dirpath: kept}}"
    Path("theirs.yaml").write_text(f"trainer: {{max_epochs: 1, accelerator: cpu, callbacks: [own.Bar, {keep}]}}\n")
    said = say(f"fit --from theirs.yaml {CLASSES} --data.num_clients 4 --trainer.logger false")
    assert said.code == 0, said.err
    for kind in ("ProgressBar", "ModelCheckpoint"):
        (only,) = [callback for callback in made[0].callbacks if is_of_lightning(callback, kind)]
        assert type(only).__module__ == "own"
    assert Path("kept/last.ckpt").is_file()


# --- the settings of the Trainer ---

DEFAULTS = {
    name: parameter.default
    for name, parameter in inspect.signature(pytorch_lightning.Trainer.__init__).parameters.items()
    if name != "self"
}
GIVEN = {
    "accelerator": "cpu",
    "strategy": "ddp",
    "devices": 1,
    "num_nodes": 2,
    "precision": "bf16-mixed",
    "logger": False,
    "callbacks": [{"class_path": "own.Watch"}],
    "fast_dev_run": True,
    "max_epochs": 2,
    "min_epochs": 1,
    "max_steps": 100,
    "min_steps": 10,
    "max_time": "00:01:00:00",
    "limit_train_batches": 0.5,
    "limit_val_batches": 3,
    "limit_test_batches": 3,
    "limit_predict_batches": 3,
    "overfit_batches": 2,
    "val_check_interval": 100,
    "check_val_every_n_epoch": 2,
    "num_sanity_val_steps": 2,
    "log_every_n_steps": 5,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": True,
    "accumulate_grad_batches": 4,
    "gradient_clip_val": 1.0,
    "gradient_clip_algorithm": "value",
    "deterministic": True,
    "benchmark": True,
    "inference_mode": False,
    "use_distributed_sampler": False,
    "profiler": "simple",
    "detect_anomaly": True,
    "barebones": True,
    "plugins": [{"class_path": "lightning.fabric.plugins.environments.LightningEnvironment"}],
    "sync_batchnorm": True,
    "reload_dataloaders_every_n_epochs": 1,
    "default_root_dir": "elsewhere",
    "enable_autolog_hparams": False,
    "model_registry": "name",
}
"""A value of each setting that is not at its default (or, for numbers of devices, changes nothing)."""

MOVED = {
    "limit_train_batches": ("data.local_work", 0.5),
    "accumulate_grad_batches": ("model.accumulate_grad_batches", 4),
    "gradient_clip_val": ("model.clip_norm", 1.0),
}


def answer(tmp_path, trainer, words=""):
    """The settings, notes and refusals of a file with these settings of the Trainer."""
    (tmp_path / "a.yaml").write_text(yaml.safe_dump({"trainer": {"max_epochs": 1, **trainer}}, sort_keys=False))
    line = f"fit --from {tmp_path}/a.yaml --model own.Net --data own.Data {words}"
    try:
        adopted = adopt(line.split())
    except RefusedTogetherError as error:
        return {}, [], error.sentences
    return yaml.safe_load(adopted.text), adopted.notes, []


def test_each_setting_of_either_trainer_has_an_answer():
    assert TRAINER.keys() == DEFAULTS.keys() == GIVEN.keys()
    assert inspect.signature(lightning.pytorch.Trainer.__init__).parameters.keys() - {"self"} == TRAINER.keys()


@pytest.mark.parametrize("name", GIVEN)
def test_a_setting_is_kept_moved_dropped_with_a_line_or_refused(name, tmp_path):
    settings, notes, refusals = answer(tmp_path, {name: GIVEN[name]})
    said = [line for line in [*notes, *refusals] if line.startswith(f"trainer.{name}")]
    if refusals:
        assert len(said) == 1
        option = said[0].rpartition("; add --")[2]
        # What the sentence tells to type is an answer.
        command, _, value = option.replace("ROUNDS", "3").partition(" ")
        assert not answer(tmp_path, {name: GIVEN[name]}, f"--{command} {value}")[2]
    elif name in MOVED:
        section, _, key = MOVED[name][0].partition(".")
        assert settings[section][key] == MOVED[name][1]
        assert len(said) == 1
    elif name in settings["trainer"]:
        assert settings["trainer"][name] == GIVEN[name] or said
    else:
        assert len(said) == 1


def test_a_limit_of_batches_is_one_of_steps(tmp_path):
    for given, steps in (
        ({"limit_train_batches": 5}, 5),
        ({"limit_train_batches": 5, "accumulate_grad_batches": 2}, 3),
    ):
        assert answer(tmp_path, given)[0]["model"]["max_local_steps"] == steps
    assert answer(tmp_path, {"limit_train_batches": 1.0})[0].keys() == {"model", "data", "trainer"}
    (sentence,) = answer(tmp_path, {"limit_train_batches": 0})[2]
    assert sentence.startswith("trainer.limit_train_batches must leave batches to train on, got 0")


def test_defaults_are_said_nowhere(tmp_path):
    settings, notes, refusals = answer(tmp_path, DEFAULTS | {"max_epochs": 2})
    assert settings["trainer"] == {"max_epochs": 2}
    assert [line for line in notes if not line.startswith(("model:", "data:", "trainer.max_epochs"))] == []
    assert refusals == []


@pytest.mark.parametrize(
    ("given", "strategy"),
    [
        ({"strategy": "ddp_find_unused_parameters_true"}, "client_parallel"),
        ({"strategy": "ddp_spawn"}, "client_parallel_spawn"),
        ({"strategy": "ddp_notebook"}, "client_parallel_notebook"),
        ({"strategy": {"class_path": "lightning.pytorch.strategies.DDPStrategy"}}, "client_parallel"),
        ({"strategy": {"class_path": "DDPStrategy", "init_args": {"start_method": "fork"}}}, "client_parallel_fork"),
        ({"devices": 2}, "client_parallel"),
        ({"devices": [0, 1], "strategy": "auto"}, "client_parallel"),
        ({"num_nodes": 2}, "client_parallel"),
        ({"devices": 1}, None),
        ({"devices": "auto"}, None),
        ({"strategy": "single_device"}, "single_device"),
    ],
)
def test_processes_train_different_clients(given, strategy, tmp_path):
    settings, notes, _ = answer(tmp_path, given)
    assert settings["trainer"].get("strategy") == strategy
    assert any(note.startswith("trainer.strategy") for note in notes) == (strategy not in (None, "single_device"))


@pytest.mark.parametrize(
    "strategy",
    ["fsdp", "deepspeed_stage_3", "FSDPStrategy", {"class_path": "lightning.pytorch.strategies.DeepSpeedStrategy"}],
)
def test_a_model_is_not_spread_over_devices(strategy, tmp_path):
    (sentence,) = answer(tmp_path, {"strategy": strategy})[2]
    assert sentence.endswith("add --trainer.strategy client_parallel")


@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.parametrize("package", PACKAGES.values())
def test_callbacks_without_a_meaning_are_in_the_list(kind, package, tmp_path):
    for path in (kind, f"{package}.callbacks.{kind}"):
        (sentence,) = answer(tmp_path, {"callbacks": [{"class_path": path}]})[2]
        assert path in sentence
        assert not answer(tmp_path, {"callbacks": [path]}, "--trainer.callbacks null")[2]


# --- files ---


def read(tmp_path, text, words=CLASSES):
    (tmp_path / "theirs.yaml").write_text(text)
    with chdir(tmp_path):
        adopted = adopt(f"fit --from theirs.yaml {words} --data.num_clients 4".split())
    return get_loader("yaml")(adopted.text), adopted


FORMS = {
    "classes": "model: {class_path: own.Net, init_args: {width: 5}}\ndata: {class_path: own.Data}",
    "arguments": "model: {width: 5}\ndata: {}",
    "with init_args": "model: {init_args: {width: 5}}",
    "names": "model.class_path: own.Net\nmodel.init_args.width: 5\ndata: own.Data",
    "of a command": "fit:\n  model: {width: 5}\nvalidate: {verbose: true}",
    "a file": "model: sub.yaml",
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_sections_have_many_forms(form, tmp_path):
    (tmp_path / "sub.yaml").write_text("class_path: own.Net\ninit_args: {width: 5}\n")
    words = "" if "own.Data" in form else CLASSES
    settings, adopted = read(
        tmp_path,
        f"{form}\n" + ("" if "fit:" in form else "trainer: {max_epochs: 1}"),
        f"{words} --trainer.max_epochs 1",
    )
    module = settings["model"]["client"]["init_args"]["module"]
    assert module == {"class_path": "own.Net", "init_args": {"width": 5}}
    assert settings["data"]["source"]["class_path"] == "own.Data"
    assert ("validate: dropped; it is the section of another command" in adopted.notes) == ("validate" in form)


def test_several_files_are_merged_as_lightning_does(tmp_path):
    (tmp_path / "more.yaml").write_text(
        "trainer: {max_epochs: 3, callbacks+: [own.Stop]}\noptimizer: {class_path: SGD}\n"
    )
    settings, adopted = read(
        tmp_path,
        "trainer: {max_epochs: 1, accelerator: cpu, callbacks: [own.Watch]}\n"
        "optimizer: {class_path: Adam, init_args: {amsgrad: true}}",
        f"--from more.yaml {CLASSES}",
    )
    assert settings["trainer"] == {"max_epochs": 3, "accelerator": "cpu", "callbacks": ["own.Watch", "own.Stop"]}
    assert settings["model"]["client"]["init_args"]["optimizer"] == {"class_path": "SGD"}
    assert adopted.files == ["theirs.yaml", "more.yaml"]
    assert merged({"a": 1}, {"a": None}) == {"a": None}


def test_texts_stay_texts(tmp_path):
    text = 'trainer: {max_epochs: 1}\nmodel: {lr: 1e-3, name: "1e-3", truth: "true", date: "2026-01-01"}'
    settings, _ = read(tmp_path, text)
    arguments = settings["model"]["client"]["init_args"]["module"]["init_args"]
    assert arguments == {"lr": 1e-3, "name": "1e-3", "truth": "true", "date": "2026-01-01"}


def test_classes_of_the_twin_are_those_that_the_trainer_knows(tmp_path):
    text = (
        "trainer:\n  max_epochs: 1\n  logger: lightning.pytorch.loggers.CSVLogger\n"
        "  callbacks: [lightning.pytorch.callbacks.Timer, {class_path: lightning.pytorch.callbacks.Timer}, own.Stop]\n"
        "  plugins: {class_path: lightning.fabric.plugins.environments.LightningEnvironment}\n"
        "model: {part: {class_path: lightning.pytorch.demos.boring_classes.BoringModel}}\n"
        "optimizer: {class_path: SGD}\n"
        "lr_scheduler: {class_path: lightning.pytorch.cli.ReduceLROnPlateau, init_args: {monitor: a}}\n"
    )
    settings, adopted = read(tmp_path, text)
    trainer = settings["trainer"]
    timer = "pytorch_lightning.callbacks.Timer"
    assert trainer["callbacks"] == [timer, {"class_path": timer}, "own.Stop"]
    assert trainer["logger"] == "pytorch_lightning.loggers.CSVLogger"
    assert trainer["plugins"]["class_path"] == "lightning_fabric.plugins.environments.LightningEnvironment"
    client = settings["model"]["client"]["init_args"]
    assert client["lr_scheduler"]["class_path"] == "pytorch_lightning.cli.ReduceLROnPlateau"
    # What their own module is given stays as it is.
    assert client["module"]["init_args"]["part"]["class_path"].startswith("lightning.pytorch.")
    assert len([note for note in adopted.notes if "is taken from" in note]) == 5


def test_a_scheduler_without_an_optimizer_is_dropped_as_by_lightning_cli(tmp_path):
    text = "trainer: {max_epochs: 1}\nlr_scheduler: {class_path: StepLR, init_args: {step_size: 1}}"
    settings, adopted = read(tmp_path, text)
    assert "lr_scheduler" not in settings["model"]["client"]["init_args"]
    assert "lr_scheduler: dropped; LightningCLI uses it with a section optimizer only" in adopted.notes
    settings, _ = read(tmp_path, text, f"{CLASSES} --optimizer SGD")
    assert settings["model"]["client"]["init_args"]["lr_scheduler"]["class_path"] == "StepLR"


def test_values_are_named_as_omegaconf_does(tmp_path):
    text = (
        "trainer: {max_epochs: 3, callbacks: [{class_path: own.Watch, init_args: {every: '${trainer.max_epochs}'}}]}\n"
        "model: {width: '${data.width}', name: 'w${data.width}'}\ndata: {width: 5}\n"
    )
    settings, adopted = read(tmp_path, text)
    assert settings["model"]["client"]["init_args"]["module"]["init_args"] == {"width": 5, "name": "w5"}
    assert settings["trainer"]["callbacks"][0]["init_args"] == {"every": 3}
    assert "model.width: ${data.width} is 5" in adopted.notes
    for wrong in ("${oc.env:NOWHERE}", "${data.nothing}", "${model.width}"):
        with pytest.raises(RefusedTogetherError, match=r"model.width must name a value of the file or a variable "):
            read(tmp_path, f"trainer: {{max_epochs: 3}}\nmodel: {{width: '{wrong}'}}\n")


def test_values_of_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("ROOT", "/data")
    monkeypatch.delenv("NOWHERE", raising=False)
    text = (
        "trainer: {max_epochs: 3}\nmodel: {a: '${oc.env:ROOT}/x', b: '${oc.env:NOWHERE, 7}', c: '${oc.env:NOWHERE,}', "
        "d: '${oc.env:ROOT,1}${oc.env:ROOT}'}\n"
    )
    settings, adopted = read(tmp_path, text)
    arguments = settings["model"]["client"]["init_args"]["module"]["init_args"]
    assert arguments == {"a": "/data/x", "b": "7", "c": "", "d": "/data/data"}
    assert "model.a: ${oc.env:ROOT}/x is taken from the environment" in adopted.notes
    assert not any("/data" in note for note in adopted.notes)


def test_options_of_their_program_are_refused_by_their_new_names(project):
    (project / "theirs.yaml").write_text("trainer: {max_epochs: 1}\n")
    line = f"fit --from theirs.yaml {CLASSES} --data.num_clients 4"
    said = say(f"{line} --model.width 5 --data.noise=0.5 --data.batch_size 4")
    assert "--model.width must have the name that it has in a federation, got an argument of own.Net" in said.err
    assert "; write --model.client.module.width" in said.err
    assert "; write --data.source.noise" in said.err
    # The federation has an option of this name.
    assert "--data.batch_size" not in said.err
    said = say(f"{line} --model.client.module.width 5 --data.source.noise=0.5 --data.batch_size 4 --print_config")
    assert said.code == 0, said.err


def test_a_linked_argument_with_a_default_is_said(package):
    name = saved(package, BATCHES, model="LinkedByDefault", data="Data", linked=True)
    line = f"fit --from {name} --model own.LinkedByDefault --data own.Data"
    (note,) = [note for note in adopt(line.split()).notes if "not in the file" in note]
    assert note.startswith("model.batch_size: not in the file, as an argument that the program links")
    assert note.endswith("; 1 is taken unless you add --model.client.module.batch_size VALUE")
    option = "--model.client.module.batch_size 4"
    assert not any("not in the file" in note for note in adopt(f"{line} {option}".split()).notes)
    assert "batch_size: 4" in say(f"{line} {option} --print_config").out
    # Somebody who writes a file leaves out what has its default.
    Path(name).write_text("trainer: {max_epochs: 1}\nmodel: {width: 5}\n")
    assert not any("not in the file" in note for note in adopt(line.split()).notes)


def test_a_checkpoint_gives_first_weights(tmp_path):
    (tmp_path / "old.ckpt").write_bytes(b"")
    text = "trainer: {max_epochs: 1}\nckpt_path: old.ckpt"
    assert read(tmp_path, text)[0]["model"]["initial_weights"] == "old.ckpt"
    settings, adopted = read(tmp_path, text, f"{CLASSES} --ckpt_path last")
    assert "initial_weights" not in settings["model"]
    assert "ckpt_path: dropped; the command line names other weights" in adopted.notes
    with pytest.raises(RefusedTogetherError, match="ckpt_path must be a file"):
        read(tmp_path, "trainer: {max_epochs: 1}\nckpt_path: best")


def test_all_refusals_are_in_one_list(tmp_path):
    text = (
        "trainer: {gpus: 1, max_steps: 10, precision: bf16-true, overfit_batches: 1, callbacks: [ModelPruning]}\n"
        "optimizer: {lr: 0.1}\nearly_stopping: {monitor: a}\nlogger_name: b\n"
    )
    (tmp_path / "theirs.yaml").write_text(text)
    with chdir(tmp_path):
        said = say("fit --from theirs.yaml")
    assert said.code == 1
    first, *lines = said.err.rstrip().split("\n")
    assert first.startswith("fl-lightning: error: theirs.yaml cannot be federated as written")
    names = "model data optimizer trainer.gpus trainer.max_steps trainer.precision trainer.overfit_batches"
    for name, line in zip([*names.split(), "trainer.callbacks", "early_stopping", "logger_name"], lines, strict=True):
        assert line.startswith(f"  - {name} ")


def test_sections_are_read_from_what_both_packages_offer():
    assert {"model", "data", "trainer", "optimizer", "lr_scheduler", "seed_everything", "ckpt_path"} == READERS.keys()


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("fit --from none.yaml", "--from must be a configuration file of LightningCLI, got none.yaml"),
        ("fit --from", "--from needs a value, got none; write --from FILE"),
        ("fit --from theirs.yaml --model --data own.Data", "--model needs a value, got --data; write --model CLASS"),
        ("test --from theirs.yaml", "--from is an option of fit, got test; give -c and the config.yaml"),
        ("fit -c from.yaml", "from is an option of the command line, got it in a file; write --from theirs.yaml"),
        ("fit --from list.yaml", "got list.yaml without sections"),
        ("fit --from theirs.yaml --model own.Net", "data must be the data that are divided, got none"),
        ("fit --from theirs.yaml --data own.Data", "model must be the LightningModule that clients train, got none"),
        ("fit --from theirs.yaml --model own.Ent --data own.Data", "module 'own' has no attribute 'Ent'"),
    ],
)
def test_a_line_that_is_wrong_is_said(line, sentence, project):
    Path("theirs.yaml").write_text("trainer: {max_epochs: 1}\n")
    Path("from.yaml").write_text("from: theirs.yaml\n")
    Path("list.yaml").write_text("- 1\n")
    said = say(line)
    assert said.code != 0
    assert sentence in said.err


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("trainer: {max_epochs: 1", "theirs.yaml must be YAML, and cannot be read at "),
        ("trainer: 5", "trainer must be settings by name, got 5"),
        ("trainer: {max_epochs: 1}\nmodel: 5", "model must be a class with its arguments, got 5"),
        ("trainer: {max_epochs: a}", "trainer.max_epochs: Expected a <class 'int'>. Got value: a"),
        ("trainer: {max_epochs: 1, callbacks: 5}", "trainer.callbacks"),
        (
            "trainer: {max_epochs: 1, limit_train_batches: a}",
            "trainer.limit_train_batches: Expected a <class",
        ),
        ("trainer: {max_epochs: 1, limit_train_batches: 3, accumulate_grad_batches: a}", "accumulate_grad_batches"),
        ("trainer: {max_epochs: 1, devices: [a], num_nodes: a}", "trainer.devices must be int or str, got ['a']"),
        ("trainer: {max_epochs: 1}\nseed_everything: a", "seed_everything"),
        ("trainer: {max_epochs: 1}\nmodel: {no_such: 1}", "unknown option 'no_such'"),
        ("trainer: {max_epochs: 1}\nmodel: {width: a}", "model.client.module.width must be int, got a"),
        ("trainer: {max_epochs: 1, max_epochs: 2}", "'max_epochs' stands in line 1 already"),
        ("a: &a [*a]", "a value in a file holds itself"),
    ],
)
def test_a_value_of_a_wrong_kind_is_said_in_a_sentence(text, sentence, project):
    Path("theirs.yaml").write_text(f"{text}\n")
    said = say(f"fit --from theirs.yaml {CLASSES}")
    assert said.code in (1, 2)
    assert sentence in said.err
    assert said.err.startswith("fl-lightning: error: ")


def test_what_further_files_give_need_not_stand_in_theirs(tmp_path):
    (tmp_path / "ours.yaml").write_text(
        "trainer: {max_epochs: 3, max_steps: -1}\ndata: {source: {class_path: own.Data}}\n"
    )
    settings, adopted = read(tmp_path, "trainer: {max_steps: 5}", "--model own.Net -c ours.yaml")
    assert settings == {"model": {"client": settings["model"]["client"]}}
    assert adopted.words == ["fit", "-c", "theirs.yaml", "-c", "ours.yaml", "--data.num_clients", "4"]


def test_a_linked_argument_is_asked_for_by_its_name(package):
    name = saved(package, BATCHES, model="Linked", data="Data", linked=True)
    line = f"fit --from {name} --model own.Linked --data own.Data"
    assert "model.client.module needs batch_size" in say(line).err
    said = say(f"{line} --print_config --model.client.module.batch_size 4")
    assert said.code == 0, said.err
