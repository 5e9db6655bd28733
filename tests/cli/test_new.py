"""`fl-lightning new`: what it writes passes its own test and the linter, and the commands that it prints run."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from fl_lightning.cli.new import KINDS, template_files
from tests.commands import refusal, say

ROOT = Path(__file__).resolve().parents[2]
QUICK = "--trainer.max_epochs 2 --model.max_local_steps 2"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    for name in ("mine", "test_mine"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("kind", KINDS)
def test_what_it_writes_is_clean_and_named(kind, folder):
    said = say(f"new {kind} MyFirst --output there")
    assert said.code == 0, said
    assert {path.name for path in Path("there").iterdir()} == {"myfirst.py", "myfirst.yaml", "test_myfirst.py"}
    assert "class MyFirst(" in Path("there/myfirst.py").read_text(encoding="utf-8")
    assert not re.search("new_?" + kind, "".join(template_files(kind, "MyFirst").values()), re.IGNORECASE)
    ruff = [sys.executable, "-m", "ruff", "check", "--config", str(ROOT / "pyproject.toml"), "--ignore", "D103,ANN"]
    checked = subprocess.run([*ruff, "there"], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout
    shown = subprocess.run(
        [*ruff[:3], "format", "--diff", "--line-length", "120", "there"], capture_output=True, text=True, check=False
    )
    assert shown.returncode == 0, shown.stdout


@pytest.mark.usefixtures("without_pictures", "cells_here")
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.slow] * (kind != "method")) for kind in KINDS]
)  # make smoke runs all
def test_the_commands_that_it_prints_run(kind, folder):
    commands = [line.strip() for line in say(f"new {kind} Mine").out.splitlines() if line.startswith("  ")]
    assert len(commands) == 3
    for command in commands:
        program, *words = shlex.split(command)
        if program == "python":
            assert words == ["-m", "pytest", "test_mine.py"]
            assert pytest.main(["-q", "-p", "no:cacheprovider", "-p", "no:randomly", *words[2:], "--rootdir", "."]) == 0
            continue
        more = QUICK.split() if words[0] in ("fit", "compare") else []
        said = say(
            shlex.join([*words, *more, *(["--seeds", "0", "--processes", "0"] if words[0] == "compare" else [])])
        )
        assert said.code == 0, said


def test_nothing_is_replaced_and_a_name_must_be_that_of_a_class(folder):
    assert say("new method Mine").code == 0
    before = Path("mine.py").read_text(encoding="utf-8")
    assert "fl-lightning new replaces no file, and mine.py exists" in refusal("new rule Mine", 1)
    assert Path("mine.py").read_text(encoding="utf-8") == before
    for name in ("2nd", "my-method", "class"):
        assert "the name of a class has letters, digits and _" in refusal(f"new rule {name}", 1)
    for name in ("Random", "Torch"):
        assert f"{name.lower()}.py would hide the installed module" in refusal(f"new rule {name}", 1)
    assert "Fedls" in refusal("new rule fedls", 1)
    said = refusal("new methods Mine", 2)
    assert "kind must be method or rule or partition or monitor or module, got methods; the nearest is 'method'" in said
