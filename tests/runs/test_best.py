"""The best round's checkpoint of a task without classes: by its first validation key, or the one asked for."""

import csv
import json
import re

import pytest
import torch

from fl_lightning.runs.best import BestCheckpoint
from tests.commands import refusal, run_in, say, working_in

OWN = """
from tests.user_data import Curve
from tests.user_modules import Regression

class Task(Regression):
    def validation_step(self, batch, batch_idx):
        residual = self.net(batch[0]) - batch[1]
        step = float(self.current_epoch)
        self.log("val_mae", residual.abs().mean() + (step - 1) ** 2)
        self.log("val_r2", 1 - step)
"""
CONFIG = """
trainer: {accelerator: cpu, max_epochs: 3, enable_progress_bar: false}
model: {client: {class_path: own.Task}}
data: {source: {class_path: own.Curve}, num_clients: 3}
"""
LINE = "fit -c mine.yaml"


@pytest.fixture
def here(tmp_path, without_pictures):
    with working_in(tmp_path, OWN):
        (tmp_path / "mine.yaml").write_text(CONFIG)
        yield tmp_path


def best_round(folder):
    return torch.load(folder / "checkpoints/best.ckpt", weights_only=True)["epoch"]


def test_the_first_key_of_the_evaluation_chooses_the_best_round(here, caplog):
    said = say(LINE)
    assert said.code == 0, said
    folder = run_in(here, stem="mine")
    assert best_round(folder) == 1
    assert "best.ckpt is that of the round with the lowest val_mae" in caplog.text
    with (folder / "metrics.csv").open() as file:
        values = [float(row["val_mae"]) for row in csv.DictReader(file)]
    lines = re.findall(r"^ *(\d) +(\S.*)$", said.out, re.MULTILINE)
    assert "Values by round" in said.out
    assert [int(line[0]) for line in lines] == [0, 1, 2]
    assert all(f"{value:.6g}" in line[1] for value, line in zip(values, lines, strict=True))
    assert say(f"validate {LINE.removeprefix('fit')} --ckpt_path best").code == 0


def test_the_best_rounds_model_is_kept_in_the_form_of_the_last_one(here):
    assert say(LINE).code == 0
    folder = run_in(here, stem="mine") / "checkpoints"
    best = torch.load(folder / "client-best.ckpt", weights_only=True)
    assert best["epoch"] == best_round(folder.parent) == 1
    assert torch.load(folder / "client.ckpt", weights_only=True)["epoch"] == 2
    of_run = torch.load(folder / "best.ckpt", weights_only=True)["state_dict"]
    for name, value in best["state_dict"].items():
        assert torch.equal(value, of_run[f"client.module.{name}"])


ELSEWHERE = "--trainer.callbacks ClientCheckpoint --trainer.callbacks.dirpath elsewhere"


@pytest.mark.parametrize("filename", ["client.ckpt", "mine.ckpt"])
def test_the_best_rounds_model_lies_in_the_run_wherever_the_last_one_is_written(here, filename):
    assert say(f"{LINE} {ELSEWHERE} --trainer.callbacks.filename {filename}").code == 0
    folder = run_in(here, stem="mine")
    assert [path.name for path in (here / "elsewhere").iterdir()] == [filename]
    assert {path.name for path in (folder / "checkpoints").iterdir()} == {"last.ckpt", "best.ckpt", "client-best.ckpt"}
    best = torch.load(folder / "checkpoints/client-best.ckpt", weights_only=True)
    assert best["epoch"] == best_round(folder) == 1


def test_a_file_of_an_earlier_part_of_the_run_is_not_taken_for_the_best_round(here):
    """The run goes on with files in another folder. What lies in its own is of round 0."""
    assert say(f"{LINE} --trainer.max_epochs 1").code == 0
    folder = run_in(here, stem="mine")
    assert say(f"{LINE} --ckpt_path last {ELSEWHERE}").code == 0
    best = torch.load(folder / "checkpoints/client-best.ckpt", weights_only=True)
    assert best["epoch"] == best_round(folder) == 1


@pytest.mark.parametrize(("more", "wanted"), [("", 0), (" --best.mode min", 2)])
def test_another_key_chooses_where_it_is_asked_for(here, more, wanted):
    assert say(f"{LINE} --best.monitor val_r2{more}").code == 0
    (folder,) = (here / "runs/mine").iterdir()
    assert best_round(folder) == wanted


def test_a_run_that_is_continued_goes_on_comparing(here):
    assert say(f"{LINE} --trainer.max_epochs 2").code == 0
    (folder,) = (here / "runs/mine").iterdir()
    assert say(f"{LINE} --ckpt_path last").code == 0
    assert list((here / "runs/mine").iterdir()) == [folder]
    assert best_round(folder) == 1


def test_a_key_that_nobody_logs_is_refused(here):
    assert "best.monitor must be a key that is logged, one of" in refusal(f"{LINE} --best.monitor val_loss", 1)


HUBER = (
    OWN
    + """
class Told(torchmetrics.MeanMetric):
    higher_is_better = False

class Huber(Task):
    key = "Huber/val"

    def __init__(self):
        super().__init__()
        self.told = Told()

    def validation_step(self, batch, batch_idx):
        step = float(self.current_epoch)
        self.log(self.key, 1 + (step - 1) ** 2)

class Foo(Huber):
    key = "val/foo"

class Object(Huber):
    def validation_step(self, batch, batch_idx):
        self.told(1 + (float(self.current_epoch) - 1) ** 2)
        self.log("val/foo", self.told)

class Diverging(Huber):
    def validation_step(self, batch, batch_idx):
        self.log("val_acc", [float("inf"), 0.5, float("nan")][self.current_epoch])
"""
)


@pytest.fixture
def own(tmp_path, without_pictures):
    with working_in(tmp_path, f"import torchmetrics\n{HUBER}"):
        (tmp_path / "mine.yaml").write_text(CONFIG)
        yield tmp_path


@pytest.mark.parametrize(
    ("client", "options", "wanted"),
    [
        ("Huber", "", 1),  # by its name, although it does not end with it
        ("Object", "", 1),  # by the metric object
        ("Foo", " --direction val/foo=min", 1),
        ("Foo", " --direction val/foo=max", 0),
        ("Diverging", "", 1),  # NaN and infinite values are never the best
    ],
)
def test_the_direction_is_told_by_the_name_the_object_or_the_user(own, client, options, wanted):
    assert say(f"{LINE} --model.client own.{client}{options}").code == 0
    assert best_round(run_in(own, stem="mine")) == wanted


def test_a_direction_that_nobody_tells_is_never_guessed(own):
    with pytest.warns(UserWarning, match="best.ckpt is not kept: --direction must say whether val/foo is better"):
        assert say(f"{LINE} --model.client own.Foo").code == 0
    folder = run_in(own, stem="mine")
    assert not (folder / "checkpoints/best.ckpt").exists()
    sentence = "--direction must say whether val/foo is better when lower or higher"
    assert sentence in refusal(f"{LINE} --model.client own.Foo --best.monitor val/foo", 1)
    assert "--direction must be KEY=min or KEY=max, got 'val/foo'" in refusal(f"{LINE} --direction val/foo", 1)
    assert (
        say(f"{LINE} --model.client own.Foo --ckpt_path last --trainer.max_epochs 5 --direction val/foo=max").code == 0
    )
    assert best_round(folder) == 4
    assert json.loads((folder / "directions.json").read_text()) == {"val/foo": "max"}


def test_two_options_that_contradict_each_other_are_refused(here):
    said = refusal(f"{LINE} --best.monitor val_r2 --best.mode min --direction val_r2=max", 1)
    assert "best.mode must be the direction of val_r2 in --direction (max), got min; leave out one of them" in said


@pytest.mark.parametrize(
    ("key", "given", "mode"),
    [
        ("global/acc", None, "max"),
        ("global/loss", None, "min"),
        ("val/mae", None, None),
        ("val/mae", "min", "min"),
    ],
)
def test_scores_of_0_2_0_which_has_saved_no_mode_count_where_their_direction_is_certain(tmp_path, key, given, mode):
    written = BestCheckpoint(tmp_path, "best", monitor=key, mode=mode)
    written._watch(key, mode or "max")
    state = written.state_dict() | {"best_model_score": torch.tensor(0.25)}
    del state["mode"]
    read = BestCheckpoint(tmp_path, "best", mode=given)
    read.load_state_dict(state)
    if mode is None:
        assert read.monitor is None
    else:
        assert (read.monitor, read.mode, read.best_model_score) == (key, mode, 0.25)


TASKS = """
trainer: {accelerator: cpu, max_epochs: 3, enable_progress_bar: false}
data:
  num_clients: 3
  source: {class_path: fl_lightning.data.Digits, init_args: {limit: 120}}
  scenario:
    class_path: fl_lightning.data.ClassIncremental
    init_args: {tasks: [[0, 1], [2, 3]], rounds_per_task: 2}
"""


@pytest.mark.parametrize(("more", "kept"), [("", False), (" --best.monitor global/acc_tasks", True)])
def test_with_tasks_the_best_round_is_kept_only_where_it_is_asked_for(more, kept, tmp_path, without_pictures, recwarn):
    with working_in(tmp_path, OWN):
        (tmp_path / "tasks.yaml").write_text(TASKS)
        said = say(f"fit -c tasks.yaml --model.client FedAvg{more}")
        assert said.code == 0, said.err
        files = {path.name for path in (run_in(tmp_path, stem="tasks") / "checkpoints").glob("*.ckpt")}
    assert ("best-on-test.ckpt" in files) == kept
    assert "last.ckpt" in files
    reason = "best-on-test.ckpt is not kept: the best round by global/acc may lie in the middle of a task"
    told = [str(warning.message) for warning in recwarn if reason in str(warning.message)]
    assert len(told) == (not kept)
