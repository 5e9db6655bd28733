"""Tuning by what the clients' models answer on held-out training samples, which no test sample decides."""

import csv
from pathlib import Path

import pytest
import yaml

from fl_lightning.experiments.cell_files import CellFiles
from fl_lightning.reports.saved import read_run
from tests.commands import say, working_in
from tests.experiments.test_compare import BASE

MIXED = {
    "base": ["base.yaml"],
    "seeds": [0],
    "tune_seeds": [7, 8],
    "tables": {"baseline": "FedAvg"},
    "runs": [
        {"methods": ["FedAvg"]},
        {"methods": ["FedProx"], "tune": {"model.client.mu": [0.1, 1000.0]}},
        {
            "methods": ["Ditto"],
            "tune": {"model.client.lam": [0.1, 1.0]},
            "tune_metric": "local/tuned/alma",
        },
    ],
}
"""A row that is tuned by the global model, and one by the clients' models after fine-tuning."""


@pytest.fixture
def here(tmp_path, without_pictures):
    with working_in(tmp_path, ""):
        base = yaml.safe_load(BASE)
        base["model"] |= {"evaluate_clients_every": 1, "fine_tuning": {"epochs": 1}}
        base["trainer"]["max_epochs"] = 2
        Path("base.yaml").write_text(yaml.safe_dump(base), encoding="utf-8")
        yield tmp_path


def scores(path):
    with Path(path).open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_each_row_is_tuned_by_its_own_metric(here):
    Path("mixed.yaml").write_text(yaml.safe_dump(MIXED), encoding="utf-8")
    said = say("reproduce mixed.yaml --output out --processes 0")
    assert said.code == 0, said
    (table,) = Path("out").rglob("*tuning.csv")
    rows = scores(table)
    keys = {"FedProx": "val/acc", "Ditto": "local/tuned/alma"}
    for row in rows:
        assert [key for key in keys.values() if row[key]] == [keys[row["method"]]]
    seeds = {path.stem.split("-seed")[1].split("-")[0] for path in Path("out").rglob("tuning/cells/*.yaml")}
    assert seeds == {"7", "8"}
    for method, key in keys.items():
        of_method = {row["settings"]: float(row[key]) for row in rows if row["method"] == method}
        (chosen,) = [row["settings"] for row in rows if row["method"] == method and row["chosen"] == "True"]
        assert of_method[chosen] == max(of_method.values())
        assert f"Tuned in validation: {chosen} for {method} ({key} " in said.out


@pytest.mark.slow
def test_a_method_may_be_tuned_by_another_metric_in_another_case(here):
    """What the global model decides, no client's test samples decide, and the other way round."""
    tune = {"model.client.mu": [0.1, 1.0]}
    by_place = {
        "base": ["base.yaml"],
        "tables": {"baseline": "FedProx"},
        "cases": {"few": {}, "many": {"data.participation": 1.0}},
        "runs": [
            {"methods": ["FedProx"], "tune": tune, "cases": ["few"]},
            {"methods": ["FedProx"], "tune": tune, "cases": ["many"], "tune_metric": "local/alma"},
        ],
    }
    Path("places.yaml").write_text(yaml.safe_dump(by_place), encoding="utf-8")
    said = say("reproduce places.yaml --output out --processes 0")
    assert said.code == 0, said
    (table,) = Path("out").rglob("*tuning.csv")
    keys = {"few": "val/acc", "many": "local/alma"}
    rows = scores(table)
    assert len(rows) == 4
    for row in rows:
        assert [key for key in keys.values() if row[key]] == [keys[row["case"]]]


def test_clients_that_decide_are_tested_on_held_out_training_samples(here):
    said = say(
        "compare -c base.yaml --methods FedAvg Ditto --seeds 0 --output out --processes 0 "
        "--tune model.client.lam=0.1,1 --tune_metric local/alma"
    )
    assert said.code == 0, said
    folder = Path("out/tuning")
    names = [path.stem for path in (folder / "cells").glob("*.yaml")]
    assert len(names) == 2
    for name in names:
        run = read_run(CellFiles(folder, name).run)
        assert run.settings["data.test_on_val"] is True
        assert run.settings["data.val_fraction"] == 0.1
        assert run.history.curve("local/alma")
        assert not run.test
    for path in Path("out/cells").glob("*.yaml"):
        run = read_run(CellFiles(Path("out"), path.stem).run)
        assert run.settings["data.test_on_val"] is False
        assert run.history.curve("global/acc")
