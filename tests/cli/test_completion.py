"""The script that completes the command line in a shell."""

import shutil
import subprocess

import pytest

from fl_lightning.cli.configs import config_names
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
        ("report --run", []),
        ("reproduce feded/t", [f"feded/table{n}" for n in range(1, 8)]),
        ("pre", ["predict"]),
        ("fit --fr", ["--from"]),
        ("test --fr", []),
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
        (
            "compare --methods FedA",
            ["FedAdagrad", "FedAdam", "FedALA", "FedAlign", "FedAMP", "FedAsync", "FedAvg", "FedAvgM"],
        ),
        ("compare --methods FedAvg LG", ["LG-FedAvg"]),
        ("compare --baseline SCAF", ["SCAFFOLD"]),
        ("test --ckpt", ["--ckpt_path"]),
        ("fit -c experiment/digits_fedn", ["experiment/digits_fednova", "experiment/digits_fedntd"]),
        ("configs data/", [name for name in config_names() if name.startswith("data/")]),
        ("methods --output ", ["md", "csv", "json"]),
        ("new ", ["method", "rule", "partition", "monitor", "module"]),
        ("new method FedLS --o", ["--output"]),
        ("partition --outp", ["--output"]),
        ("partition --data.parti", ["--data.participation", "--data.partition", "--data.partition."]),
        ("split --data.source Dig", ["Digits"]),
        ("split -c data/dig", ["data/digits"]),
    ],
)
def test_bash_completes(script, typed, completed):
    words = ["fl-lightning", *typed.split(" ")]
    done = subprocess.run(["bash", "-c", COMPLETE, "bash", script, *words], capture_output=True, text=True, check=True)
    assert sorted(done.stdout.split()) == sorted(completed), done.stderr


ZSH = r"""
compdef() { }; _shtab_fl_lightning() { print elsewhere }
compadd() { [[ $1 == -S ]] && shift 2; shift; print -l -- $@ }
eval "$(<$1)"; shift
words=("$@"); CURRENT=$#; PREFIX="${words[-1]}"
_fl_lightning_by_level
"""


def test_zsh_completes_by_level(tmp_path):
    out = say("--print_shtab zsh").out
    assert out.startswith("#compdef fl-lightning")
    assert "data.partition.alpha" in out
    if shutil.which("zsh") is None:
        pytest.skip("needs zsh")
    (tmp_path / "script").write_text(out)

    def completed(typed):
        words = ["fl-lightning", *typed.split(" ")]
        asked = ["zsh", "-fc", ZSH, "zsh", tmp_path / "script", *words]
        done = subprocess.run(asked, capture_output=True, text=True, check=True)
        return {word for word in done.stdout.split() if word.startswith(words[-1])}

    assert completed("fit --m") == {"--model."}
    assert completed("fit --data.parti") == {"--data.participation", "--data.partition", "--data.partition."}
    assert "--data.partition.alpha" in completed("partition --data.partition.")
    assert completed("fit --trainer.max_ep") == {"--trainer.max_epochs"}
    assert completed("new method FedLS --o") == {"--output"}


def test_tcsh_has_a_script():
    out = say("--print_shtab tcsh").out
    assert "complete fl-lightning" in out
    assert "data.partition.alpha" in out


def test_a_shell_must_be_known():
    assert "--print_shtab must be one of bash, zsh, tcsh, got fish" in refusal("--print_shtab fish", 1)
    assert "of bash, zsh, tcsh, got fish" in refusal("--print_shtab=fish", 1)
    assert "got nothing" in refusal("--print_shtab", 1)


def test_without_the_extra_its_name_is_said(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "shtab", None)
    assert "pip install 'fl_lightning[shtab]'" in refusal("--print_shtab bash", 1)
