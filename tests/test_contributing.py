"""The code in README.md, CONTRIBUTING.md and the guides of docs/ runs as it stands."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from contextlib import nullcontext, suppress
from pathlib import Path

import pytest
import yaml

from tests.commands import run_in

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
    for folder in ("fl_lightning", "configs", "docs", "tests"):
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


WALK = """
import sys
import pytest
from fl_lightning.__main__ import main
from tests.commands import empty_pictures
files, commands = {files}, {commands}
failed = pytest.main(["-vv", "-p", "no:cacheprovider", *files])
with empty_pictures():
    for command in commands:
        print("COMMAND")
        main(command)
sys.exit(failed)
"""
"""Tests and commands of the walk-through in one process: what it imports is slow."""


@pytest.fixture(scope="module")
def walked(checkout):
    """What the tests of the walk-through's files print, and what its commands do."""
    files = ["tests/methods/test_fedmax.py", "fl_lightning/methods/fedmax.py"]
    arguments = [words for _, *words in commands("CONTRIBUTING.md")]
    assert arguments
    return files, run("-c", WALK.format(files=files, commands=arguments), cwd=checkout).split("COMMAND\n")


@pytest.mark.slow  # make smoke runs it
def test_tests_and_doctest_of_the_walk_through_pass(walked):
    files, (out, *_) = walked
    assert "6 passed" in out
    passed = [len(re.findall(rf"^{file}::.* PASSED", out, re.MULTILINE)) for file in files]
    assert passed == [5, 1]


def test_walk_through_is_clean(checkout):
    files = ["fl_lightning/methods/fedmax.py", "tests/methods/test_fedmax.py"]
    run("-m", "ruff", "check", *files, cwd=checkout)
    run("-m", "ruff", "format", "--check", *files, cwd=checkout)


@pytest.mark.slow  # make smoke runs it
def test_commands_of_the_walk_through(checkout, walked):
    _, (_, *outs) = walked
    assert outs
    assert all("after 2 rounds" in out for out in outs)
    header = next(checkout.glob("runs/*/0*/metrics.csv")).read_text().splitlines()[0]
    assert "train/max" in header


@pytest.fixture(scope="module")
def readers_folder(tmp_path_factory):
    """Where a reader of the README works: `configs/`, and the files that the README shows."""
    there = tmp_path_factory.mktemp("reader")
    (there / "configs").symlink_to(ROOT / "configs")
    for text in blocks("README.md", "python"):
        if named := re.match(r"# (\w+\.py)$", text.partition("\n")[0]):
            (there / named[1]).write_text(text, encoding="utf-8")
    for text in blocks("docs/your-module.md", "yaml"):
        (there / text.partition("\n")[0].removeprefix("# ")).write_text(text, encoding="utf-8")
    return there


@pytest.mark.parametrize(
    "text",
    [text for guide in ("README.md", "docs/running.md", "docs/reuse.md") for text in blocks(guide, "python")],
    ids=lambda text: str(text.count("\n")),
)
def test_python_of_the_guides(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(text, "guide.md", "exec"), {"__name__": "__main__"})  # in this process: torch is loaded


def test_yaml_of_the_readme_is_that_of_the_repository():
    shown = blocks("README.md", "yaml")
    assert shown
    for text in shown:
        path = text.partition("\n")[0].removeprefix("# ")
        assert yaml.safe_load(text) == yaml.safe_load((ROOT / path).read_text(encoding="utf-8"))


@pytest.mark.usefixtures("without_pictures", "cells_here")
@pytest.mark.parametrize(
    "grids", [False, pytest.param(True, marks=pytest.mark.slow)]
)  # tests/experiments/test_compare.py has some
@pytest.mark.parametrize("guide", ["README.md", "docs/running.md"])
def test_commands_of_the_guides(guide, readers_folder, tmp_path, capsys, monkeypatch, grids):
    """Each with two steps a client: that a run learns is shown elsewhere. Of a grid the methods are read by default."""
    from fl_lightning.__main__ import main
    from fl_lightning.experiments.composing import method_config

    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(readers_folder))
    for path in readers_folder.iterdir():
        (tmp_path / path.name).symlink_to(path)
    shown = commands(guide)
    assert len(shown) > 5
    for _, verb, *arguments in shown:  # in the order of the guide: tests and resumed runs need what came before
        if verb == "configs":
            main([verb, *arguments])
            assert re.search("digits_fedntd|copied", capsys.readouterr().out)
            continue
        if verb == "reproduce":  # one is drawn in tests/experiments/test_reproduce.py
            main([verb, *(arguments if "--plan" in arguments else [])])
            assert {"fedntd/2", *arguments[:1]} & set(capsys.readouterr().out.replace(":", "").split())
            continue
        only_parsed = any(name in argument for argument in arguments for name in ("gpu", "cifar", "print_config"))
        ending = ["--print_config"] if only_parsed else []
        if verb == "fit" and not only_parsed:
            rounds = 3 if "--ckpt_path" in arguments else 2
            ending = [
                f"--trainer.max_epochs={rounds}",
                "--trainer.accelerator=cpu",
                "--trainer.enable_progress_bar=false",
                "--model.max_local_steps=2",
            ]
            ending += ["--model.evaluate_clients_every=1"] if "--model.evaluate_clients_every" in arguments else []
        if verb == "compare" and not grids:
            begin, end = (arguments.index(option) for option in ("--methods", "--seeds"))
            assert all(map(method_config, arguments[begin + 1 : end]))
            continue
        if verb == "compare":
            ending += ["--seeds", "0", "--set", "trainer.max_epochs=1", "--set", "model.max_local_steps=2"]
        with suppress(SystemExit) if only_parsed else nullcontext():
            main([verb, *arguments, *ending])
        out = capsys.readouterr().out
        if verb == "predict":
            assert (run_in(tmp_path) / "predictions.pt").is_file()
            continue
        if verb in ("compare", "report"):
            assert "report.html" in out
            continue
        assert "class_path" in out if only_parsed else re.search("Class-wise accuracy|Last values", out)
    resumed = run_in(tmp_path) / "metrics.csv"
    assert [line.partition(",")[0] for line in resumed.read_text().splitlines()] == ["round", "0", "1", "2"]


@pytest.fixture
def own_task(readers_folder, monkeypatch):
    """A reader's folder with the README's `my_task.py`, and the YAML files of docs/your-module.md."""
    monkeypatch.chdir(readers_folder)
    monkeypatch.syspath_prepend(str(readers_folder))


def test_python_of_your_module(own_task):
    shown = blocks("docs/your-module.md", "python") + blocks("docs/your-module-details.md", "python")
    assert len(shown) == 4
    for text in shown:
        exec(compile(text, "your-module.md", "exec"), {"__name__": "__main__"})


def test_commands_of_your_module(own_task, capsys):
    from fl_lightning.__main__ import main

    shown = commands("docs/your-module.md")
    assert len(shown) == 4
    for _, *arguments in shown:
        main(arguments)
        assert "val/mse" in capsys.readouterr().out


def test_processes_of_your_module_are_options(own_task, capsys):
    """The lines for several processes, as far as one machine without GPUs can read them."""
    from fl_lightning.__main__ import main

    text = "".join(blocks("docs/your-module-details.md", "text")).replace("\\\n", " ")
    lines = [line.partition("  #")[0] for line in text.splitlines() if " fit -c" in line]
    assert len(lines) == 4
    for line in lines:
        arguments = shlex.split(line[line.index(" fit -c") :].replace("accelerator gpu", "accelerator cpu"))
        with pytest.raises(SystemExit):
            main([*arguments, "--print_config"])
        assert "strategy: client_parallel" in capsys.readouterr().out


def test_hooks_of_your_module_are_those_of_the_code():
    """Every hook that is forwarded or refused is named, by itself or by the group it belongs to."""
    from fl_lightning.client.hooks import FORWARDED, INSTEAD

    text = (ROOT / "docs/your-module-details.md").read_text(encoding="utf-8")
    groups = ("on_validation_", "on_test_", "on_predict_")
    assert not [name for name in FORWARDED if f"`{name}`" not in text and not name.startswith(groups)]
    assert not [name for name in INSTEAD if f"`{name}`" not in text and not name.endswith("_dataloader")]


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md"])
def test_make_targets_of_the_documents_exist(document):
    text = (ROOT / document).read_text(encoding="utf-8")
    lines = [line for block in blocks(document, "sh") for line in block.splitlines() if line.startswith("make ")]
    lines += re.findall(r"`(make [a-z -]+)`", text)
    named = {word for line in lines for word in line.partition("#")[0].split()[1:]}
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert named
    assert named <= targets


@pytest.mark.parametrize(
    "document",
    [
        "README.md",
        "CONTRIBUTING.md",
        *(
            f"docs/{name}.md"
            for name in (
                "architecture",
                "compare",
                "decisions",
                "reuse",
                "running",
                "your-module",
                "your-module-details",
            )
        ),
    ],
)
def test_files_that_the_documents_name_exist(document):
    text = (ROOT / document).read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in link]
    named = re.findall(r"`((?:fl_lightning|tests|configs|docs|notebooks|bench)/[\w./-]+\.\w+)(?:::[\w]+)?`", text)
    folder = (ROOT / document).parent
    shown = {"fedmax"}  # written by the walk-through
    missing = [link for link in links if not (folder / link).exists()]
    missing += [name for name in named if not (ROOT / name).exists() and not any(part in name for part in shown)]
    assert not missing
    for file, test in re.findall(r"`?(tests/[\w/]+\.py)::(\w+)`?", text):
        assert f"def {test}(" in (ROOT / file).read_text(encoding="utf-8"), f"{file} has no {test}"
