"""The script that completes the command line in a shell."""

import shutil
import subprocess

import pytest

from fl_lightning.cli.configs import names
from tests.commands import refusal, say

pytest.importorskip("shtab")
COMPLETE = r"""
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(( $# - 1 )); COMPREPLY=()
$(complete -p fl-lightning | sed 's/.*-F \([^ ]*\).*/\1/')
printf '%s\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    said = say("--print_shtab bash")
    assert said.code == 0, said.err
    path = tmp_path_factory.mktemp("shell") / "completion.sh"
    path.write_text(said.out)
    return path


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("c", ["configs", "check", "compare"]),
        ("compare --see", ["--seeds"]),
        ("report --for", ["--format"]),
        ("reproduce feded/t", [f"feded/table{n}" for n in range(1, 8)]),
        ("pre", ["predict"]),
        ("fit --trainer.max_ep", ["--trainer.max_epochs"]),
        ("fit --data.partition.al", ["--data.partition.alpha"]),
        ("fit --model.client FedNT", ["FedNTD"]),
        ("fit --model.client.optimizer SG", ["SGD"]),
        (
            "fit --model.client.optimizer.mom",
            ["--model.client.optimizer.momentum", "--model.client.optimizer.momentum_decay"],
        ),
        ("fit --m", ["--model."]),
        ("fit --data.parti", ["--data.participation", "--data.partition", "--data.partition."]),
        ("fit --model.client.net", ["--model.client.net", "--model.client.net."]),
        ("compare --methods FedA", ["FedAdagrad", "FedAdam", "FedALA", "FedAlign", "FedAvg", "FedAvgM"]),
        ("compare --methods FedAvg LG", ["LG-FedAvg"]),
        ("compare --baseline SCAF", ["SCAFFOLD"]),
        ("test --ckpt", ["--ckpt_path"]),
        ("fit -c experiment/digits_fedn", ["experiment/digits_fednova", "experiment/digits_fedntd"]),
        ("configs data/", [name for name in names() if name.startswith("data/")]),
        ("methods --output ", ["md", "csv", "json"]),
    ],
)
def test_bash_completes(script, typed, completed):
    words = ["fl-lightning", *typed.split(" ")]
    done = subprocess.run(["bash", "-c", COMPLETE, "bash", script, *words], capture_output=True, text=True, check=True)
    assert sorted(done.stdout.split()) == sorted(completed), done.stderr


@pytest.mark.parametrize(("shell", "command"), [("zsh", "#compdef fl-lightning"), ("tcsh", "complete fl-lightning")])
def test_other_shells_have_a_script(shell, command):
    out = say(f"--print_shtab {shell}").out
    assert command in out
    assert "data.partition.alpha" in out


def test_a_shell_must_be_known():
    assert "--print_shtab must be one of bash, zsh, tcsh, got fish" in refusal("--print_shtab fish", 1)
    assert "got nothing" in refusal("--print_shtab", 1)


def test_without_the_extra_its_name_is_said(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "shtab", None)
    assert "pip install 'fl_lightning[shtab]'" in refusal("--print_shtab bash", 1)
