"""The command line as a user sees it: what is printed, and what a run leaves behind."""

import contextlib
import csv
import os
import shlex
import shutil
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from fl_lightning.callbacks import plot_accuracy
from fl_lightning.data import Digits
from fl_lightning.methods import FedNTD
from fl_lightning.nets import Perceptron
from tests.commands import CONFIGS, EXPERIMENT, TINY, empty_pictures, run_in, say, working_in

LAST = "checkpoints/last.ckpt"
NAME = "0-local_epochs=1-max_local_steps=1-num_clients=4-min_samples=1"
"""Of the folder of the first `TINY` run."""
OWN = """
import os
import signal
import torch
from torch import nn
from pytorch_lightning import Callback, LightningModule

class Net(LightningModule):
    def __init__(self, width: int = 4):
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.log("my/loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

class CtrlC(Callback):
    def __init__(self, round_idx: int, client: int):
        self.at, self.seen = (round_idx, client), 0

    def on_client_end(self, trainer, loop, update):
        self.seen = self.seen + 1 if trainer.current_epoch == self.at[0] else 0
        if (trainer.current_epoch, self.seen) == self.at:
            self.interrupt()

    def interrupt(self):
        os.kill(os.getpid(), signal.SIGINT)

class Hangup(CtrlC):
    def interrupt(self):
        assert signal.getsignal(signal.SIGHUP) is not signal.SIG_DFL, "the signal would end the tests"
        os.kill(os.getpid(), signal.SIGHUP)
"""


@pytest.fixture
def here(tmp_path):
    """An empty working directory with a user's module in it."""
    with working_in(tmp_path, OWN):
        yield tmp_path


@pytest.fixture
def ctrl_c_counts():
    """Ctrl-C interrupts, which a shell's background jobs ignore, and so does the end of the terminal, for `nohup`."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    before_hangup = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGINT, before)
    signal.signal(signal.SIGHUP, before_hangup)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A working directory in which two rounds were run once, and what that printed. Only to be read."""
    folder = tmp_path_factory.mktemp("finished")
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield folder, say(f"fit {TINY} --trainer.max_epochs 2")
    finally:
        os.chdir(before)


@pytest.fixture
def in_finished(finished, monkeypatch):
    monkeypatch.chdir(finished[0])
    return run_in(finished[0])


def table(run, name="metrics.csv"):
    with (run / name).open(newline="") as file:
        return list(csv.DictReader(file))


def weights(run):
    return torch.load(run / LAST, weights_only=True)["state_dict"]


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# --- one run ---------------------------------------------------------------------------------------------------------


def test_a_fit_ends_with_the_class_wise_table(finished):
    _, said = finished
    assert said.code == 0
    assert "Round 1/1" in said.out
    assert "acc " in said.out.partition("Class-wise")[0]  # the bar shows the round's accuracy
    for words in ("accuracy of the global model after 2 rounds (test split)", "forgetting F ", "worst class "):
        assert words in said.out
    report = said.out.partition("Class-wise")[2].splitlines()
    assert [line.split()[0] for line in report if line[:2].strip().isdigit()] == [str(c) for c in range(10)]


def test_a_fit_leaves_one_whole_folder(in_finished):
    names = {path.name for path in in_finished.iterdir() if not path.name.startswith("events.out.tfevents.")}
    pictures = {"partition.png", "accuracy.png", "classwise.png", "confusion.png"}
    tables = {"metrics.csv", "classwise.csv", "classification.csv", "confusion.csv", "partition.csv"}
    assert names == {"config.yaml", "status.json", *tables, "checkpoints", *pictures}
    assert all((in_finished / name).read_bytes().startswith(b"\x89PNG") for name in pictures)
    found = {path.name for path in (in_finished / "checkpoints").iterdir()}
    assert found == {"last.ckpt", "best-on-test.ckpt", "client.ckpt", "client-best-on-test.ckpt"}
    assert [row["round"] for row in table(in_finished, "classwise.csv")] == ["0", "1"]


def test_the_table_has_a_row_a_round(in_finished):
    rows = table(in_finished)
    assert [row["round"] for row in rows] == ["0", "1"]
    for key in ("train/ce", "train/ntd", "global/acc", "global/acc_class/09", "global/forgetting", "comm/bytes_up"):
        assert all(row[key] for row in rows), key


@pytest.mark.usefixtures("without_pictures")
@pytest.mark.parametrize(("form", "begins"), [("svg", b"<?xml"), pytest.param("pdf", b"%PDF", marks=pytest.mark.slow)])
def test_pictures_for_a_paper(here, form, begins):
    """A run may go on with another form."""
    assert say(f"fit {TINY} --trainer.max_epochs 1").code == 0
    assert say(f"fit {TINY} --trainer.max_epochs 2 --plots.format {form} --ckpt_path last").code == 0
    (run,) = (here / "runs/digits_fedntd").iterdir()
    for name in ("partition", "accuracy", "classwise"):
        assert (run / f"{name}.{form}").read_bytes().startswith(begins)
    assert yaml.safe_load((run / "config.yaml").read_text())["plots"] == {"format": form}


def test_rounds_are_counted_from_0_everywhere(finished, in_finished):
    """Bar, tables, events and pictures name the second of two rounds 1; what counts rounds says 2."""
    said = finished[1].out
    assert "Round 1/1" in said
    assert "after 2 rounds" in said
    for name in ("metrics.csv", "classwise.csv"):
        assert [row["round"] for row in table(in_finished, name)] == ["0", "1"]
    picture = plot_accuracy([0, 1], {"global/acc": [0.1, 0.2]})
    assert list(picture.axes[0].lines[0].get_xdata()) == [0, 1]
    assert picture.axes[0].get_xlabel() == "round"
    events = EventAccumulator(str(in_finished))
    events.Reload()
    assert [event.step for event in events.Scalars("global/acc")] == [0, 1]


def test_tensorboard_counts_rounds(in_finished):
    events = EventAccumulator(str(in_finished))
    events.Reload()
    for tag in ("global/acc", "train/ce"):
        assert [event.step for event in events.Scalars(tag)] == [0, 1]
    assert [float(row["global/acc"]) for row in table(in_finished)] == pytest.approx(
        [event.value for event in events.Scalars("global/acc")]
    )


def test_the_best_checkpoint_is_that_of_the_best_round(in_finished):
    accuracy = [float(row["global/acc"]) for row in table(in_finished)]
    best = torch.load(in_finished / "checkpoints/best-on-test.ckpt", weights_only=True)
    assert best["epoch"] == accuracy.index(max(accuracy))


def test_predictions_are_those_of_the_trained_model(in_finished):
    said = say(f"predict {TINY} --ckpt_path {in_finished / LAST}")
    assert said.code == 0, said.err
    logits = torch.load(in_finished / "predictions.pt", weights_only=True)
    with (in_finished / "predictions.csv").open(newline="", encoding="utf-8") as file:
        answers = [int(row["predicted"]) for row in csv.DictReader(file)]
    for name in ("predictions.pt", "predictions.csv"):
        (in_finished / name).unlink()
    assert logits.shape == (360, 10)
    assert answers == logits.argmax(1).tolist()
    right = (logits.argmax(1) == Digits().load()[1].labels).double().mean()
    assert float(right) == pytest.approx(float(table(in_finished)[-1]["global/acc"]))


def test_the_client_is_there_without_the_federation(in_finished):
    client = FedNTD.load_from_checkpoint(in_finished / "checkpoints/client.ckpt", net=partial(Perceptron, hidden=(64,)))
    saved = torch.load(in_finished / LAST, weights_only=True)["state_dict"]
    assert all(torch.equal(value, saved[f"client.{name}"]) for name, value in client.state_dict().items())


@pytest.mark.usefixtures("without_pictures")
def test_the_configuration_of_a_run_makes_the_run_again(in_finished, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = in_finished / "config.yaml"
    assert yaml.safe_load(config.read_text())["model"]["client"]["init_args"]["beta"] == 1.0
    assert say(f"fit -c {config}").code == 0
    again = run_in(tmp_path)
    assert same(weights(again), weights(in_finished))


@pytest.mark.parametrize(
    ("command", "which"),
    [
        ("validate", "last"),
        ("test", "best"),
        pytest.param("validate", "best", marks=pytest.mark.slow),
        pytest.param("test", "last", marks=pytest.mark.slow),
    ],
)
def test_evaluation_of_a_checkpoint_prints_the_report_and_writes_nothing(in_finished, command, which):
    before = sorted(in_finished.parent.rglob("*"))
    said = say(f"{command} {TINY} --ckpt_path {which}")
    assert said.code == 0
    accuracy = [float(row["global/acc"]) for row in table(in_finished)]
    shown = accuracy[-1] if which == "last" else max(accuracy)
    assert f"accuracy {100 * shown:.1f} %" in said.out
    assert "forgetting F" in said.out
    assert "worst class" in said.out
    assert sorted(in_finished.parent.rglob("*")) == before


@pytest.mark.usefixtures("without_pictures")
def test_with_a_validation_split_the_best_is_not_chosen_on_the_test_split(here):
    assert say(f"fit {TINY} --trainer.max_epochs 1 --data.val_fraction 0.1 --trainer.logger false").code == 0
    found = {path.name for path in (run_in(here) / "checkpoints").iterdir()}
    assert found == {"last.ckpt", "best.ckpt", "client.ckpt", "client-best.ckpt"}
    assert not (run_in(here) / "metrics.csv").exists()  # logger: false


def test_a_dry_run_leaves_nothing(here):
    said = say(f"fit {TINY} --trainer.fast_dev_run true")
    assert said.code == 0
    assert "Class-wise" in said.out
    assert not (here / "runs").exists()


@pytest.mark.usefixtures("without_pictures")
def test_a_users_own_module_lies_where_one_works(here):
    said = say("fit --model.client own.Net --model.client.width 6 --trainer.max_epochs 1 --data.num_clients 2")
    assert said.code == 0, said.err
    assert "my/loss" in said.out
    assert [float(row["my/loss"]) > 0 for row in table(run_in(here, stem="fit"))] == [True]
    assert sorted(path.name for path in (run_in(here, stem="fit") / "checkpoints").iterdir()) == [
        "client.ckpt",
        "last.ckpt",
    ]


def test_check_tells_whole_checkpoints_from_damaged_ones(in_finished, tmp_path):
    shutil.copytree(in_finished, tmp_path / "run")
    said = say(f"check {tmp_path / 'run'}")
    assert said.code == 0
    assert [line.partition(": ")[2] for line in said.out.splitlines()] == [
        "whole, 2 rounds",
        "whole",
        "whole",
        "whole, 2 rounds",
    ]
    path = tmp_path / "run" / LAST
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    torch.save({"state_dict": {}}, tmp_path / "other.pt")
    said = say(f"check {tmp_path / 'run'} {tmp_path / 'other.pt'} {tmp_path / 'missing.ckpt'}")
    assert said.code == 1
    best, _, _, last, other, missing = said.out.splitlines()
    assert best.endswith("whole, 2 rounds")
    assert "BROKEN: " in last
    assert "is damaged: its content is not what was written" in last
    assert other.endswith("readable, without a digest")
    assert "No such file" in missing
    assert say(f"test {TINY} --ckpt_path {path}").err.count("is damaged") == 1
    empty = say(f"check {tmp_path / 'run' / 'nothing'}{tmp_path}")
    assert empty.code == 1


# --- going on ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """The run folder of three rounds without a break."""
    folder = tmp_path_factory.mktemp("unbroken")
    with contextlib.chdir(folder), empty_pictures():
        assert say(f"fit {TINY} --trainer.max_epochs 3").code == 0
    return run_in(folder)


@pytest.mark.usefixtures("without_pictures")
def test_a_run_goes_on_in_its_folder_as_if_never_stopped(here, unbroken):
    for command in (f"fit {TINY} --trainer.max_epochs 1", f"fit {TINY} --trainer.max_epochs 3 --ckpt_path last"):
        assert say(command).code == 0
    (run,) = (here / "runs/digits_fedntd").iterdir()
    assert run.name == NAME
    assert same(weights(run), weights(unbroken))
    assert table(run) == table(unbroken)
    assert table(run, "classwise.csv") == table(unbroken, "classwise.csv")
    said = say(f"fit {TINY} --trainer.max_epochs 3 --ckpt_path last")
    assert said.code == 0  # complete already: its report once more
    assert f"accuracy {100 * float(table(run)[-1]['global/acc']):.1f} %" in said.out
    assert table(run) == table(unbroken)


@pytest.mark.usefixtures("without_pictures", "ctrl_c_counts")
@pytest.mark.parametrize("kind", ["CtrlC", "Hangup"])
def test_an_interruption_inside_a_round_loses_that_round_only(here, unbroken, kind):
    stop = f"--trainer.callbacks own.{kind} --trainer.callbacks.round_idx 1 --trainer.callbacks.client 1"
    said = say(f"fit {TINY} --trainer.max_epochs 3 {stop}")
    run = run_in(here)
    assert said.code == 130
    last = said.err.splitlines()[-1]
    assert last.startswith("fl-lightning: error: interrupted after 1 complete round; continue with fl-lightning fit ")
    assert torch.load(run / LAST, weights_only=True)["global_step"] == 1
    assert [row["round"] for row in table(run)] == ["0"]
    command = shlex.split(last.partition("continue with ")[2])[1:]
    at = command.index("--trainer.callbacks")
    assert say(shlex.join(command[:at] + command[at + 6 :])).code == 0
    assert same(weights(run), weights(unbroken))
    assert table(run) == table(unbroken)


@pytest.mark.usefixtures("ctrl_c_counts")
def test_ctrl_c_in_the_first_round_leaves_nothing(here):
    stop = "--trainer.callbacks own.CtrlC --trainer.callbacks.round_idx 0 --trainer.callbacks.client 1"
    said = say(f"fit {TINY} {stop}")
    assert said.code == 130
    assert said.err.splitlines()[-1].endswith("interrupted before the first round was complete; nothing is kept")
    assert not list(here.glob("runs/*"))


@pytest.mark.usefixtures("without_pictures")
def test_a_checkpoint_file_continues_the_run_around_it_and_a_new_run_leaves_old_ones_alone(here):
    assert say(f"fit {TINY} --trainer.max_epochs 1").code == 0
    old = run_in(here)
    before = {path: path.read_bytes() for path in old.rglob("*") if path.is_file()}
    assert say(f"fit {TINY} --trainer.max_epochs 1").code == 0
    assert {path: path.read_bytes() for path in old.rglob("*") if path.is_file()} == before
    assert say(f"fit {TINY} --trainer.max_epochs 2 --ckpt_path {old / LAST}").code == 0
    assert [len(table(run_in(here, n))) for n in (0, 1)] == [2, 1]


# --- composition ------------------------------------------------------------------------------------------------------


def printed(line: str) -> dict:
    said = say(f"{line} --print_config")
    assert said.code == 0, said.err
    return yaml.safe_load(said.out)


def test_the_command_line_beats_the_files():
    client = printed(f"fit {EXPERIMENT} --model.client.beta 0.3 --trainer.max_epochs 7")["model"]["client"]
    assert client["init_args"]["beta"] == 0.3
    assert client["init_args"]["temperature"] == 1.0


def test_short_names_of_everything():
    names = {
        "model.client": ("FedProx", "fl_lightning.methods"),
        "model.client.net": ("FedKATCNN", "fl_lightning.nets"),
        "model.client.optimizer": ("Adam", "torch.optim"),
        "model.aggregator": ("Aggregator", "fl_lightning"),
        "model.server_optimizer": ("SGD", "torch.optim"),
        "data.source": ("MNIST", "fl_lightning.data"),
        "data.partition": ("ShardPartition", "fl_lightning.data"),
        "trainer.callbacks": ("EarlyStopping", "pytorch_lightning.callbacks"),
    }
    line = " ".join(f"--{key} {name}" for key, (name, _) in names.items())
    config = printed(f"fit {line} --model.client.mu 0.5 --trainer.callbacks.monitor global/acc")
    for key, (name, module) in names.items():
        value = config
        for part in key.split("."):
            value = value.get("init_args", value)[part]
        value = value[0] if isinstance(value, list) else value
        assert value["class_path"].startswith(module), key
        assert value["class_path"].endswith(f".{name}"), key
    assert config["model"]["client"]["init_args"]["mu"] == 0.5


def test_another_client_keeps_what_the_old_one_shared_with_it():
    client = printed(f"fit {EXPERIMENT} --model.client FedProx")["model"]["client"]["init_args"]
    assert client["net"]["init_args"]["hidden"] == [64]
    assert client["optimizer"]["init_args"]["lr"] == 0.05
    assert "beta" not in client


def test_what_is_printed_can_be_given_back(here):
    (here / "all.yaml").write_text(say(f"fit {EXPERIMENT} --print_config").out)
    assert printed("fit -c all.yaml") == printed(f"fit {EXPERIMENT}")


# --- a process of its own ---------------------------------------------------------------------------------------------


def python(code: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONWARNINGS"}
    env |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(CONFIGS.parent)}
    code = f"import sys\nfrom fl_lightning.__main__ import main\n{code}"
    return subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, env=env, capture_output=True, text=True, timeout=250, check=False
    )


def test_help_needs_neither_torch_nor_lightning(tmp_path):
    slow = {"torch", "pytorch_lightning", "jsonargparse"}
    said = python(f"main(['--help'])\nassert not {slow} & set(sys.modules)", tmp_path)
    assert said.returncode == 0, said.stderr
    assert "fl-lightning fit -c experiment/digits_fedntd" in said.stdout


def test_a_run_prints_nothing_that_nobody_can_act_on(tmp_path):
    fit = ["fit", *shlex.split(TINY), "--trainer.max_epochs"]
    unpictured = ["--ckpt_path", "last", "--plots.format", "none"]
    commands = [[*fit, "1"], [*fit, "2", *unpictured], ["test", *shlex.split(TINY), "--ckpt_path", "last"]]
    said = python(f"for args in {commands}:\n    main(args)", tmp_path)
    assert said.returncode == 0, said.stderr
    assert said.stderr.replace(f"{tmp_path.resolve()}/", "").splitlines() == [
        f"Run folder: runs/digits_fedntd/{NAME}",
        "`Trainer.fit` stopped: `max_epochs=1` reached.",
        f"Run folder: runs/digits_fedntd/{NAME}, continued from round 1",
        "`Trainer.fit` stopped: `max_epochs=2` reached.",
    ]
