"""What a command refuses before it begins: weights that nobody trained, rounds without end, keys that stand twice."""

import os
import shlex
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from pytorch_lightning import LightningModule
from torch.nn import functional as F

import fl_lightning
from fl_lightning.cli.main import FederatedCLI
from tests.commands import CONFIGS, refusal, say
from tests.processes.forked import run_script

FEDAVG = f"-c {CONFIGS}/experiment/digits_fedavg.yaml"
ONE = "--trainer.max_epochs 1 --model.local_epochs 1 --plots.format none"


@pytest.fixture
def here(tmp_path, monkeypatch, without_pictures):
    monkeypatch.chdir(tmp_path)
    return tmp_path


# --- untrained weights


@pytest.mark.parametrize("command", ["validate", "test", "predict"])
def test_weights_that_nobody_trained_are_not_evaluated(here, command):
    said = refusal(f"{command} {FEDAVG}", 1)
    assert f"{command} needs trained weights" in said
    assert "there is no run in runs/digits_fedavg with a checkpoint: fit first" in said
    assert not (here / "runs").exists()


def test_the_newest_runs_checkpoints_are_named_and_work(here):
    for _ in range(2):
        assert say(f"fit {FEDAVG} {ONE}").code == 0
    said = refusal(f"test {FEDAVG}", 1)
    folder = max((here / "runs/digits_fedavg").iterdir()).relative_to(here)
    assert folder.name.startswith("1")
    for name in ("last.ckpt", "best-on-test.ckpt"):
        assert f"--ckpt_path {folder}/checkpoints/{name}" in said
        assert say(f"test {FEDAVG} --ckpt_path {folder}/checkpoints/{name}").code == 0
    assert say(f"validate {FEDAVG} --ckpt_path last").code == 0
    assert say(f"test {FEDAVG} --model.initial_weights {folder}/checkpoints/last.ckpt").code == 0


# --- a fit whose length nobody said


@pytest.mark.parametrize("text", [None, "{}", "trainer: {accelerator: cpu}", "trainer: {max_epochs: null}"])
def test_a_fit_needs_an_end(here, text):
    if text is not None:
        (here / "run.yaml").write_text(text)
    said = refusal("fit" if text is None else "fit -c run.yaml", 1)
    assert "fit needs trainer.max_epochs, the number of rounds," in said
    assert "add --trainer.max_epochs 30" in said
    assert not (here / "runs").exists()


@pytest.mark.parametrize(
    "end",
    [
        "--trainer.max_epochs 1",
        "--trainer.max_epochs null --trainer.max_steps 1",
        "--trainer.max_epochs=-1 --trainer.max_time 00:00:00:02",
        "--trainer.fast_dev_run true",
        "-c end.yaml",
    ],
)
def test_every_end_counts(here, end):
    (here / "end.yaml").write_text("trainer: {max_steps: 1}")
    assert say(f"fit --model.local_epochs 1 --plots.format none {end}").code == 0


def test_help_and_the_configuration_need_none(here):
    assert say("fit --print_config").code == 0
    assert say("fit --help").code == 0


# --- a method that needs more of the client's module than the module has


class Pixels(LightningModule):
    """A classifier of a user's own, which is no net."""

    def __init__(self):
        super().__init__()
        self.line = torch.nn.Linear(64, 10)

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.line(batch[0].flatten(1)), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_a_method_that_needs_logits_refuses_a_module_where_its_coefficient_is_not_0(here):
    given = f"fit {ONE} --model.client FedLMD --model.client.module {__name__}.Pixels"
    said = refusal(given, 1)
    assert "FedLMD needs the logits of a net, got module=Pixels; give it net= (a factory of a classifier)" in said
    assert not (here / "runs").exists()
    assert say(f"{given} --model.client.beta 0").code == 0


# --- keys that stand twice


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("trainer: {max_epochs: 2}\nmodel: {}\ntrainer: {accelerator: cpu}\n", "line 3: 'trainer' stands in line 1"),
        ("model:\n  client:\n    class_path: A\n    init_args: {mu: 1, mu: 2}\n", "line 4: 'mu' stands in line 4"),
        ("a: &x {b: 1}\nc: *x\nd: [1, {e: 1, f: 2,\n e: 3}]\n", "line 4: 'e' stands in line 3"),
    ],
)
def test_a_key_that_stands_twice_is_refused(here, text, says):
    (here / "twice.yaml").write_text(text)
    for command in ("fit -c twice.yaml", "fit --config twice.yaml", "fit --config=twice.yaml", "test -c twice.yaml"):
        assert f"twice.yaml, {says} already, where it would be dropped; keep one" in refusal(command, 2)
    assert f"twice.yaml, {says}" in refusal("reproduce twice.yaml", 1)
    assert f"twice.yaml, {says}" in refusal("compare -c twice.yaml --methods FedAvg --output out", 2)


def test_one_in_an_option_too(here):
    given = "{class_path: DirichletPartition, init_args: {alpha: 1, alpha: 2}}"
    for words in (["--data.partition", given], [f"--data.partition={given}"]):
        assert "--data.partition, line 1: 'alpha' stands in line 1" in refusal(shlex.join(["fit", *words]), 2)


def test_merged_keys_may_be_given_again(here):
    text = "base: &b {max_epochs: 3}\nmore: &m {accelerator: cpu}\ntrainer:\n  <<: *b\n  <<: *m\n  max_epochs: 1\n"
    (here / "merged.yaml").write_text(text.replace("base: ", "seed_everything: 0\nx: ").replace("more: ", "y: "))
    assert "stands in line" not in say("fit -c merged.yaml").err  # it has keys that no option has, but none twice


def test_a_file_without_settings_is_said_to_be_one(here):
    (here / "none.yaml").write_text("# nothing yet\n")
    assert "none.yaml holds no settings; write some into it" in refusal("fit -c none.yaml", 2)


# --- a reader that goes away


@pytest.fixture
def nobody_reads():
    """Descriptor of a pipe whose reader is gone."""
    read, write = os.pipe()
    os.close(read)
    yield write
    os.close(write)


@pytest.mark.parametrize("words", ["configs", "--help", "fit --help"])
def test_a_reader_that_goes_away_ends_a_command_quietly(here, nobody_reads, words):
    command = [sys.executable, "-m", "fl_lightning", *words.split()]
    done = subprocess.run(command, stdout=nobody_reads, stderr=subprocess.PIPE, text=True, check=False, timeout=120)
    assert done.returncode == 141, done.stderr
    assert done.stderr == ""


@pytest.mark.parametrize("words", ["fit --print_config", "reproduce"])
def test_it_ends_commands_that_load_torch_quietly_too(here, nobody_reads, words):
    """In a process that has loaded it already."""
    script = Path(fl_lightning.__file__).with_name("__main__.py")
    done = run_script(script, *words.split(), cwd=here, timeout=120, stdout=nobody_reads)
    assert done.returncode == 141, done.stderr
    assert done.stderr == ""


def test_a_command_whose_output_is_closed_runs(here):
    done = subprocess.run(
        f"{sys.executable} -m fl_lightning configs >&-", shell=True, stderr=subprocess.PIPE, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("name", ["twice.conf", "twice", "twice.json", "twice.YAML"])
def test_the_name_of_a_file_makes_no_difference(here, name):
    (here / name).write_text('{"trainer": {"max_epochs": 2},\n"trainer": {"accelerator": "cpu"}}')
    assert f"{name}, line 2: 'trainer' stands in line 1" in refusal(f"fit -c {name}", 2)


def test_a_file_that_a_file_names_is_checked_too(here):
    (here / "sub").mkdir()
    (here / "sub/model.yaml").write_text("local_epochs: 1\nlocal_epochs: 2\n")
    (here / "sub/run.yaml").write_text("trainer: {max_epochs: 1}\nmodel: model.yaml\n")
    assert "sub/model.yaml, line 2: 'local_epochs' stands in line 1" in refusal("fit -c sub/run.yaml", 2)


# --- another program's command line


def test_the_command_line_of_another_program_is_neither_read_nor_shown(here, monkeypatch, capfd, caplog):
    monkeypatch.setattr(sys, "argv", ["other.py", "--token", "s3cret", "--trainer.max_epochs", "7"])
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        cli = FederatedCLI(["fit", *FEDAVG.split(), *ONE.split()])
    assert cli.trainer.current_epoch == 1
    shown = capfd.readouterr()
    said = [shown.out, shown.err, caplog.text, *map(str, told)]
    assert not [text for text in said if "s3cret" in text]
    assert "s3cret" not in "".join(path.read_text() for path in here.rglob("*.yaml"))
