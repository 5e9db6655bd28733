"""The configuration files that come with the package, wherever one works."""

import re
import subprocess
import sys

import pytest
import yaml

from fl_lightning.cli.configs import config_names
from tests.commands import CONFIGS, refusal, run_in, say

TINY = "--model.local_epochs 1 --model.max_local_steps 1 --trainer.max_epochs 1 --trainer.enable_progress_bar false"
NAME = "experiment/digits_fedavg"


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch, without_pictures):
    """A folder without configs/."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("asked", [NAME, f"{NAME}.yaml", f"configs/{NAME}.yaml", f"./configs/{NAME}"])
def test_a_run_finds_them_by_name(asked):
    said = say(f"fit -c {asked} --print_config")
    assert said.code == 0, said.err
    assert yaml.safe_load(said.out)["data"]["participation"] == 0.5


def test_a_run_goes_on_whatever_its_file_is_called(here):
    """The name and the path mean the same settings and the same folder."""
    assert say(f"fit -c {NAME} {TINY}").code == 0
    said = say(f"fit -c {CONFIGS}/{NAME}.yaml {TINY} --trainer.max_epochs 2 --ckpt_path last")
    assert said.code == 0, said.err
    assert len((run_in(here, stem="digits_fedavg") / "metrics.csv").read_text().splitlines()) == 3


def test_a_small_experiment_without_a_file_is_fedavgs_with_the_methods(here):
    """The name that 0.2.0 had for it means the same settings, and its runs lie where they lay."""
    parts = say(f"fit -c {NAME} -c method/moon --print_config")
    for asked in ("experiment/digits_moon", "configs/experiment/digits_moon.yaml"):
        said = say(f"fit -c {asked} --print_config")
        assert said.code == 0, said.err
        assert said.out == parts.out
    assert yaml.safe_load(parts.out)["model"]["client"]["class_path"] == "fl_lightning.methods.MOON"
    for words in ("", "--trainer.max_epochs 2 --ckpt_path last"):
        said = say(f"fit -c experiment/digits_moon {TINY} {words}")
        assert said.code == 0, said.err
    assert len((run_in(here, stem="digits_moon") / "metrics.csv").read_text().splitlines()) == 3
    assert not (here / "runs/digits_fedavg").exists()


@pytest.mark.parametrize("asked", ["experiment/digits_moon", "configs/experiment/digits_moon.yaml"])
def test_a_small_experiment_without_a_file_is_printed_as_its_parts(asked):
    said = say(f"configs {asked}")
    assert said.code == 0, said.err
    assert "merged in this order: -c experiment/digits_fedavg -c method/moon\n" in said.out
    for part in ("experiment/digits_fedavg", "method/moon"):
        assert (CONFIGS / f"{part}.yaml").read_text() in said.out


def test_a_small_experiment_without_a_file_is_copied_as_its_parts(here):
    assert say("configs experiment/digits_moon --copy mine").out == "2 files copied to mine\n"
    copies = sorted(path.relative_to(here / "mine").as_posix() for path in (here / "mine").rglob("*.yaml"))
    assert copies == ["experiment/digits_fedavg.yaml", "method/moon.yaml"]


def test_ones_own_file_comes_first(here):
    (here / "experiment").mkdir()
    (here / f"{NAME}.yaml").write_text("data: {num_clients: 3}")
    for asked in (NAME, f"{NAME}.yaml"):
        said = say(f"fit -c {asked} --print_config")
        assert yaml.safe_load(said.out)["data"]["num_clients"] == 3


def test_yaml_in_place_of_a_file():
    said = say("fit -c 'data: {num_clients: 4}' --print_config")
    assert yaml.safe_load(said.out)["data"]["num_clients"] == 4


def test_the_list_has_every_file_with_what_it_is():
    said = say("configs")
    found = [line.split(maxsplit=1) for line in said.out.splitlines()]
    assert [name for name, _ in found] == config_names()
    assert len(found) == len(list(CONFIGS.rglob("*.yaml")))
    assert all(re.search(r"[.!]$", title) for _, title in found), found
    of_data = [line.split()[0] for line in say("configs data").out.splitlines()]
    assert of_data == [name for name, _ in found if name.startswith("data/")]


@pytest.mark.parametrize("asked", ["data/digits", "data/digits.yaml", "configs/data/digits.yaml"])
def test_one_is_printed_as_it_stands(asked):
    assert say(f"configs {asked}").out == (CONFIGS / "data/digits.yaml").read_text()


def test_copies_are_the_users(here):
    assert say("configs --copy mine").code == 0
    assert {path.relative_to(here / "mine"): path.read_bytes() for path in (here / "mine").rglob("*.yaml")} == {
        path.relative_to(CONFIGS): path.read_bytes() for path in CONFIGS.rglob("*.yaml")
    }
    assert say("configs data/digits --copy one").out == "1 file copied to one\n"
    assert [path.name for path in (here / "one").rglob("*.*")] == ["digits.yaml"]
    (here / "one/data/digits.yaml").write_text("mine")
    said = refusal("configs --copy one", 1)
    assert "replaces no file, and one/data/digits.yaml exists" in said
    assert (here / "one/data/digits.yaml").read_text() == "mine"
    assert [path.name for path in (here / "one").rglob("*.*")] == ["digits.yaml"]


@pytest.mark.parametrize(
    ("asked", "nearest"),
    [
        ("experiment/digits_fedntdd", "experiment/digits_fedntd"),
        ("digits_fedntd", "experiment/digits_fedntd"),
        ("configs/experiments/digits_fedntd.yaml", "experiment/digits_fedntd"),
        ("experiment/digits_mon", "experiment/digits_moon"),
        ("experiment/digits_moon.yam", "experiment/digits_moon"),
        ("digits_moon", "experiment/digits_moon"),
    ],
)
def test_a_wrong_name_is_refused_with_the_nearest(asked, nearest):
    for line, code in ((f"configs {asked}", 1), (f"fit -c {asked}", 2)):
        said = refusal(line, code)
        assert f"there is no file {asked}, and no configuration of that name comes with the package; " in said
        assert f"the nearest is {nearest}; fl-lightning configs lists all names" in said


def test_a_name_leads_to_no_file_elsewhere():
    assert "there is no file ../setup" in refusal("configs ../setup", 1)


def test_a_wrong_option():
    assert "unknown option '--nosuch'; usage: fl-lightning configs [-h] [--copy DIR] [name]" in refusal(
        "configs --nosuch", 2
    )


@pytest.mark.parametrize("command", ["configs", "methods", "new"])
def test_a_list_imports_neither_torch_nor_lightning(command):
    asked = [command, *["--help"] * (command == "new")]
    code = "import sys, contextlib; from fl_lightning.__main__ import main\n"
    code += f"with contextlib.suppress(SystemExit): main({asked})\n"
    code += "print({'torch', 'pytorch_lightning'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=CONFIGS.parent)
    assert done.stdout.endswith("set()\n")


def test_without_tensorboard_a_run_has_its_table_and_says_so(here, monkeypatch, caplog):
    def missing(*args):
        raise ModuleNotFoundError("Neither `tensorboard` nor `tensorboardX` is available.")

    monkeypatch.setattr("fl_lightning.cli.run_callbacks.RunTensorBoard", missing)
    said = say(f"fit -c {NAME} {TINY}")
    assert said.code == 0
    assert caplog.text.count("TensorBoard is not installed: the run logs metrics.csv only") == 1
    assert (run_in(here, stem="digits_fedavg") / "metrics.csv").is_file()
