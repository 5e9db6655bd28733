"""The recipes in docs/recipes run as they stand, from top to bottom, in a reader's empty folder."""

import csv
import os
import re
import shlex
import subprocess
import sys
from collections import Counter
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from fl_lightning import FederatedDataModule
from fl_lightning.__main__ import main
from tests.test_contributing import FENCED

ROOT = Path(__file__).resolve().parents[1]
RECIPES = {path.stem: path for path in sorted((ROOT / "docs/recipes").glob("*.md")) if path.stem != "index"}
NEEDS = {"datamodules": ["pytorch_tabular", "scvi"], "optuna": ["optuna"], "peft": ["peft"], "text": ["datasets"]}
FILE = re.compile(r"# (\w+\.(?:py|yaml))\n")


def executed(recipe: str, folder: Path) -> None:
    """Run the blocks of a recipe in order; one that begins with a file's name becomes that file."""
    for language, text in FENCED.findall(RECIPES[recipe].read_text(encoding="utf-8")):
        if named := FILE.match(text):
            (folder / named[1]).write_text(text, encoding="utf-8")
        elif language == "python":
            exec(compile(text, f"{recipe}.md", "exec"), {"__name__": "__main__"})  # in this process: torch is loaded
        elif language == "sh" and text.startswith("fl-lightning"):
            for line in text.splitlines():
                main(shlex.split(line)[1:])
        elif language == "sh":
            in_a_shell(text, folder)
        else:
            assert language == "text", f"{recipe}.md has a block that is not run, in {language}"


def in_a_shell(text: str, folder: Path) -> None:
    """Run a script in bash, with this checkout's `fl-lightning`."""
    command = f'fl-lightning() {{ "{sys.executable}" -m fl_lightning "$@"; }}\n'
    there = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        ["bash", "-euc", command + text],
        cwd=folder,
        env=there,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Runs a recipe; what it printed."""

    def of(recipe: str) -> str:
        for package in NEEDS.get(recipe, []):
            pytest.importorskip(package)
        monkeypatch.chdir(tmp_path)
        monkeypatch.syspath_prepend(str(tmp_path))
        executed(recipe, tmp_path)
        return capsys.readouterr().out

    before = set(sys.modules)
    yield of
    for name in {name for name in sys.modules if name.startswith("my_")} - before:
        del sys.modules[name]


def number(pattern: str, said: str) -> float:
    found = re.search(pattern, said)
    assert found, said
    return float(found[1])


@pytest.mark.slow
def test_images(run, tmp_path):
    said = run("images")
    accuracies = [float(value) for value in re.findall(r"^accuracy ([\d.]+) %", said, re.MULTILINE)]
    assert len(accuracies) == 2
    assert min(accuracies) > 40
    runs = [path / "partition.png" for path in (tmp_path / "runs/my_images").iterdir()]
    assert len(runs) == 2
    assert all(path.is_file() for path in runs)


def patients_are_whole(folder):
    """Check that no patient is on two sides, and that only the pictures of the training are augmented."""
    hospitals = import_module("my_hospitals").Hospitals()
    settings = yaml.safe_load((folder / "hospitals.yaml").read_text())["data"]
    del settings["source"]
    data = FederatedDataModule.from_datamodule(hospitals, **settings)
    data.setup("fit")
    with (folder / "pictures.csv").open(newline="") as file:
        of_patient = Counter(row["patient"] for row in csv.DictReader(file))
    trained = Counter(data.split("train").column("patient").tolist())
    held_back = Counter(data.split("val").column("patient").tolist())
    tested = Counter(hospitals.test.patient)
    assert trained | tested == of_patient
    assert not trained & tested
    assert held_back <= trained
    assert all(count == of_patient[patient] for patient, count in held_back.items())
    assert "west" not in data.split("val").column("hospital").tolist()
    pictures, again = (data.split("val").all()[0] for _ in range(2))
    assert torch.equal(pictures, again)
    of_east, once_more = (next(iter(data.view(0, 0).batches("train", epoch, shuffle=False)))[0] for epoch in range(2))
    assert not torch.equal(of_east, once_more)


@pytest.mark.slow
def test_hospitals(run, tmp_path):
    said = run("hospitals")
    page = RECIPES["hospitals"].read_text(encoding="utf-8")
    assert number(r"class_weights: \[([\d.]+)", page) == number(r"\[(\d\.\d\d), 0\.", said) > 1
    assert "never train (data.unseen): west" in said
    folder = tmp_path / "runs/hospitals/0"
    with (folder / "clients-test.csv").open(newline="") as file:
        by_hospital = {row["owner"]: row for row in csv.DictReader(file)}
    assert [name for name, row in by_hospital.items() if row["unseen"] == "1"] == ["west"]
    matrix = np.load(folder / "metrics/test-client-3/confusion.npz")["value"]
    recalls = matrix.diagonal() / matrix.sum(1)
    assert recalls.mean() == pytest.approx(float(by_hospital["west"]["local/accuracy"]), abs=1e-6)
    assert recalls.mean() > 0.6
    assert (folder / "metrics/test-client-3/confusion.png").is_file()
    of_plain_trainer = number(r"accuracy\s+│\s+([\d.]+)", said)
    assert of_plain_trainer == pytest.approx(recalls.mean(), abs=1e-6)
    patients_are_whole(tmp_path)
    answers = (tmp_path / "answers.csv").read_text().splitlines()
    shown = re.search(r"(row,eight.*\n.*\n.*\n.*)\n```", page)[1].splitlines()
    assert [line[:4] for line in answers] == [line[:4] for line in shown]


def test_tabular(run, tmp_path):
    said = run("tabular")
    assert "6 clinics" in said
    assert number(r"AUROC ([\d.]+)", said) > 0.9
    answers = (tmp_path / "may_answers.csv").read_text()
    assert answers == (tmp_path / "runs/tumours/0/predictions-may.csv").read_text()
    shown = re.findall(r"row,predicted.*\n.*\n.*\n", RECIPES["tabular"].read_text(encoding="utf-8"))
    assert [line[:6] for line in shown[0].splitlines()] == [line[:6] for line in answers.splitlines()[:3]]


@pytest.mark.slow  # peft imports transformers, which takes longer than the recipe
def test_lora(run):
    said = run("lora")
    tuned, total = (int(value) for value in re.search(r"(\d+) of (\d+) weights are trained", said).groups())
    assert tuned < total / 5
    assert number(r"ten digits ([\d.]+)", said) > 0.7


@pytest.mark.slow  # transformers is slow to import
def test_peft(run, tmp_path):
    said = run("peft")
    sent, whole = (int(value) for value in re.search(r"send (\d+) of (\d+) bytes", said).groups())
    assert sent < whole / 5
    assert number(r"accuracy ([\d.]+)", said) > 0.7
    assert (tmp_path / "adapters/adapter_config.json").is_file()


@pytest.mark.slow  # every run is a process
def test_sweep(run, tmp_path):
    said = run("sweep")
    shown = re.findall(r"^runs/digits_fedprox/(.+)$", RECIPES["sweep"].read_text(encoding="utf-8"), re.MULTILINE)
    assert (
        sorted(path.name.replace("-max_epochs=3", "") for path in (tmp_path / "runs/digits_fedprox").iterdir()) == shown
    )
    assert len(re.findall(r"mu [\d.]+: accuracy 0\.\d+ over 2 seeds", said)) == 2


def test_optuna(run):
    assert number(r"best accuracy ([\d.]+) with", run("optuna")) > 0.6


@pytest.mark.slow
def test_text(run):
    assert number(r"accuracy ([\d.]+)", run("text")) > 0.8


@pytest.mark.slow  # both packages are slow to import
def test_datamodules(run):
    said = run("datamodules")
    assert number(r"tumours: accuracy ([\d.]+)", said) > 0.85
    assert number(r"4 hospitals, ELBO ([\d.]+)", said) < 80
    assert "latent (240, 4)" in said


def test_every_recipe_is_listed_and_run():
    listed = re.findall(r"\]\((\w+)\.md\)", (ROOT / "docs/recipes/index.md").read_text(encoding="utf-8"))
    assert sorted(listed) == sorted(RECIPES)
    assert all(f"test_{recipe}" in globals() for recipe in RECIPES)
