"""Commands that the package prints, and those of its pages, run as they are printed."""

import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from examples.clinics.make_patients import main as make_patients
from fl_lightning.__main__ import main
from fl_lightning.experiments.compare import default_folder
from tests.test_contributing import ROOT, commands

MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
ONE_STEP = ["--model.max_local_steps=1", "--trainer.accelerator=cpu"]
SHORT = ["--trainer.max_epochs=1", *ONE_STEP]
ONE_OF_MANY = ["--trainer.callbacks+=tests.commands.StopAfterRound", *ONE_STEP]
"""A run of one round that is planned for all of them, so that what a scenario refuses in a later round is refused."""

QUIET = ["--trainer.enable_progress_bar=false"]

ELSEWHERE = {
    "README.md": "tests/test_contributing.py::test_commands_of_the_guides",
    "docs/running.md": "tests/test_contributing.py::test_commands_of_the_guides",
    "docs/your-module.md": "tests/test_contributing.py::test_commands_of_your_module",
    "CONTRIBUTING.md": "tests/test_contributing.py::test_commands_of_the_walk_through",
}
"""Documents whose commands another test runs. tests/test_recipes.py runs those in docs/recipes."""

ABSENT = {
    "data/shakespeare": "the plays of LEAF are not in the package",
    "trainer/gpu": "there may be no GPU",
}
"""Parts of commands that cannot run here, with the reason. Such a command is only read."""


LONG = ("docs/changing-data.md", "docs/time.md")
"""Documents whose experiments have many cells, which takes a minute to compose."""


def documents() -> list[Any]:
    """Return the documents with commands that no other test runs. Those that take long are slow tests."""
    paths = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
    names = sorted(path.relative_to(ROOT).as_posix() for path in paths)
    found = [name for name in names if name not in ELSEWHERE and commands(name)]
    return [pytest.param(name, marks=pytest.mark.slow if name in LONG else ()) for name in found]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A reader's folder, with `configs/` and the files of one's own that the pages name."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "federation.yaml").symlink_to(ROOT / "examples/flower/federation.yaml")
    for name in ("patients.py", "clinics.yaml"):
        (tmp_path / name).symlink_to(ROOT / "examples/clinics" / name)
    make_patients(tmp_path)
    cumulative = "data: {scenario: {class_path: fl_lightning.data.ClassIncremental, init_args: {cumulative: true}}}"
    assert cumulative in (ROOT / "docs/compare.md").read_text(encoding="utf-8")
    (tmp_path / "cumulative.yaml").write_text(cumulative, encoding="utf-8")
    drawn = np.random.default_rng(0)
    rows = [f"{drawn.normal():.3f},{'abc'[i % 3]},{['yes', 'no'][i % 2]}" for i in range(60)]
    (tmp_path / "patients.csv").write_text("\n".join(["age,hospital,risk", *rows]) + "\n", encoding="utf-8")
    return tmp_path


def run_short(verb: str, arguments: list[str], folder: Path) -> None:
    """Run a command with one round and one step a client, or only read what cannot run here."""
    words = [word.replace("/srv", str(folder)) for word in arguments]
    if verb == "reproduce":
        main([verb, *words, "--plan"] if words else [verb])
    elif any(part in word for word in words for part in ABSENT):
        with pytest.raises(SystemExit) as stop:
            main([verb, *words, "--print_config"])
        assert not stop.value.code
    elif verb == "fit":
        main([verb, *words, *shortened(words), *QUIET])
    elif verb == "compare":
        main([verb, *words, *shortened(words), "--seeds", "0"])
    else:
        if verb == "report":
            make_runs(words)
        main([verb, *words])


def shortened(words: list[str]) -> list[str]:
    """Return the options that make a run short."""
    changes = any(word.startswith("scenario/") for word in words)
    return ONE_OF_MANY if changes else SHORT


def make_runs(words: list[str]) -> None:
    """Make a run in each folder that a report reads."""
    for word in words:
        if word.startswith("runs/"):
            main(["fit", "-c", f"configs/experiment/{Path(word).name}.yaml", *SHORT, *QUIET])


@pytest.mark.usefixtures("without_pictures", "cells_here")
@pytest.mark.parametrize("document", documents())
def test_every_command_of_a_page_runs(document, folder, capsys):
    for _, verb, *arguments in commands(document):
        run_short(verb, arguments, folder)
        assert capsys.readouterr().out or verb == "split"


def hints() -> list[list[str]]:
    """Return the commands that `make demo` prints at its end."""
    config = re.search(r"^CONFIG := (\S+)$", MAKEFILE, re.MULTILINE)[1]
    recipe = re.search(r"^demo:.*\n((?:\t.*\n)+)", MAKEFILE, re.MULTILINE)[1]
    _, _, printed = recipe.partition("printf")
    lines = re.findall(r"'(.*?)'", printed.replace("$(CONFIG)", config))
    return [shlex.split(line[line.index("fl-lightning ") :])[1:] for line in lines if "fl-lightning " in line]


@pytest.mark.usefixtures("without_pictures", "cells_here")
def test_the_hints_of_the_demo_run(folder):
    found = hints()
    assert [words[0] for words in found] == ["fit", "compare"]
    for verb, *words in found:
        main([verb, *words, *SHORT, *(QUIET if verb == "fit" else [])])
    assert (folder / "comparisons/digits_fedntd/report.html").is_file()


@pytest.mark.usefixtures("without_pictures", "cells_here")
def test_the_folder_of_a_comparison_is_named_after_the_last_file(folder):
    words = "-c digits_fedavg -c method/fedprox --methods FedAvg --seeds 0".replace("digits", "experiment/digits")
    main(["compare", *words.split(), *SHORT])
    assert (folder / "comparisons/fedprox/results.csv").is_file()


@pytest.mark.parametrize(
    ("configs", "name"),
    [
        (["a/one.yaml", "two.yaml"], "two"),
        (["a/one.yaml", "data: {source: {root: /srv/data}}"], "one"),
        (["experiment/digits_fedavg", "trainer: {max_epochs: 1}"], "digits_fedavg"),
        (["trainer: {max_epochs: 1}"], "compare"),
    ],
)
def test_yaml_on_the_command_line_names_no_folder(configs, name):
    assert default_folder(configs) == Path("comparisons") / name
