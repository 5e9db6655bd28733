"""The code in CONTRIBUTING.md and README.md runs as it stands."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FENCED = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
METHODS = Path("fl_lightning/methods/__init__.py")


def blocks(document: str, *languages: str) -> list[str]:
    """The fenced blocks of a document in these languages, in order."""
    found = FENCED.findall((ROOT / document).read_text(encoding="utf-8"))
    return [text for language, text in found if language in languages]


def commands(document: str) -> list[list[str]]:
    """The `fl-lightning` command lines of a document, as lists of arguments."""
    text = "".join(blocks(document, "sh", "bash")).replace("\\\n", " ")
    return [shlex.split(line, comments=True) for line in text.splitlines() if line.startswith("fl-lightning ")]


def run(*arguments: str, cwd: Path, ok: bool = True) -> str:
    """Run Python on the package that lies in `cwd`, which comes before the installed one."""
    environment = {**os.environ, "PYTHONPATH": str(cwd), "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert (done.returncode == 0) == ok, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy of the sources with the walk-through's files written into it."""
    there = tmp_path_factory.mktemp("checkout")
    for folder in ("fl_lightning", "configs", "tests"):
        shutil.copytree(ROOT / folder, there / folder, ignore=shutil.ignore_patterns("__pycache__", "golden"))
    for file in ("setup.cfg", "pyproject.toml", "README.md"):
        shutil.copy(ROOT / file, there)
    written = []
    for block in blocks("CONTRIBUTING.md", "python", "yaml"):
        first, _, text = block.partition("\n")
        path = there / first.removeprefix("# ")
        if path == there / METHODS:
            names = re.findall(r"import (\w+)$", text, re.MULTILINE)
            old = path.read_text(encoding="utf-8")
            head, bracket, tail = old.partition("\n__all__ = [")
            listed = "".join(f'"{name}", ' for name in names)
            path.write_text(f"{head}{text}{bracket}{listed}{tail}", encoding="utf-8")
        else:
            assert not path.exists(), f"{first} is part of the package: show another one"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        written.append(path)
    assert len(written) == 4
    return there


def test_tests_of_the_walk_through_pass(checkout):
    out = run("-m", "pytest", "tests/methods/test_feddecorr.py", cwd=checkout)
    assert "5 passed" in out


def test_doctest_of_the_walk_through_passes(checkout):
    assert "1 passed" in run("-m", "pytest", "fl_lightning/methods/feddecorr.py", cwd=checkout)


def test_walk_through_is_clean(checkout):
    files = ["fl_lightning/methods/feddecorr.py", "tests/methods/test_feddecorr.py"]
    run("-m", "ruff", "check", *files, cwd=checkout)
    run("-m", "ruff", "format", "--check", *files, cwd=checkout)


def test_commands_of_the_walk_through(checkout):
    assert commands("CONTRIBUTING.md")
    for _, *arguments in commands("CONTRIBUTING.md"):
        out = run("-m", "fl_lightning", *arguments, cwd=checkout)
        assert "after 2 rounds" in out
    header = next(checkout.glob("runs/*/0/metrics.csv")).read_text().splitlines()[0]
    assert "train/decorr" in header


def test_python_of_the_readme(tmp_path):
    snippets = blocks("README.md", "python")
    assert snippets
    for text in snippets:
        run("-c", text, cwd=tmp_path)


@pytest.mark.parametrize(
    "command", commands("README.md") if (ROOT / "README.md").stat().st_size else [], ids=shlex.join
)
def test_commands_of_the_readme_are_understood(command, capsys, monkeypatch):
    from fl_lightning.__main__ import main

    monkeypatch.chdir(ROOT)
    _, *arguments = command
    if "--ckpt_path" in arguments:  # there is no run yet
        at = arguments.index("--ckpt_path")
        del arguments[at : at + 2]
    with pytest.raises(SystemExit) as stop:
        main([*arguments, "--print_config"])
    assert not stop.value.code, capsys.readouterr().err


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md"])
def test_files_that_the_documents_name_exist(document):
    text = (ROOT / document).read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in link]
    named = re.findall(r"`((?:fl_lightning|tests|configs|docs|notebooks|bench)/[\w./-]+\.\w+)(?:::[\w]+)?`", text)
    folder = (ROOT / document).parent
    shown = {"feddecorr"}  # written by the walk-through
    missing = [link for link in links if not (folder / link).exists()]
    missing += [name for name in named if not (ROOT / name).exists() and not any(part in name for part in shown)]
    assert not missing
    for file, test in re.findall(r"`?(tests/[\w/]+\.py)::(\w+)`?", text):
        assert f"def {test}(" in (ROOT / file).read_text(encoding="utf-8"), f"{file} has no {test}"
