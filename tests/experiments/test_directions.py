"""`--direction`, and metric objects that tell it, in `compare`, tuning and `report`."""

import csv
import json
import re
from pathlib import Path

import pytest

from tests.commands import refusal, say, working_in
from tests.experiments.test_compare import BASE

OWN = """
from torchmetrics.classification import MulticlassAccuracy

class Mistakes(MulticlassAccuracy):
    higher_is_better = False

    def compute(self):
        return 1 - super().compute()
"""
METRIC = "  metrics: {odd: {class_path: own.Mistakes, init_args: {num_classes: 10}}}\n"
GRID = "compare -c base.yaml --methods FedAvg FedNTD --seeds 0 --output out --metrics global/odd --processes 0"


@pytest.fixture
def here(tmp_path, without_pictures):
    with working_in(tmp_path, OWN):
        Path("base.yaml").write_text(BASE.replace("data:\n", f"{METRIC}data:\n"), encoding="utf-8")
        Path("plain.yaml").write_text(BASE, encoding="utf-8")
        yield tmp_path


def rows(path):
    with Path(path).open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def marked() -> list[str]:
    """Methods with the best mark in the first column of values of the last table in Markdown."""
    _, _, last = Path("out/results.md").read_text(encoding="utf-8").rpartition("| method |")
    lines = last.splitlines()
    return [name for name in ("FedAvg", "FedNTD") for line in lines if re.match(rf"\| {name} \| \*\*", line)]


def test_a_metric_object_and_the_user_decide_tables_and_tuning(here):
    tune = f"{GRID} --tune model.client.beta=0.1,100 --tune_metric val/odd --val_fraction 0.2"
    said = say(tune)
    assert said.code == 0, said
    scores = {row["settings"]: float(row["val/odd"]) for row in rows("out/tuning.csv")}
    assert f"Tuned in validation: {min(scores, key=scores.get)} for FedNTD" in said.out
    finals = {r["method"]: float(r["mean"]) for r in rows("out/results.csv") if r["statistic"] == "final"}
    assert marked() == [name for name, value in finals.items() if value == min(finals.values())]
    assert all(
        json.loads(path.read_text())["global/odd"] == "min" for path in Path("out/runs").rglob("directions.json")
    )
    said = say(f"{tune} --direction val/odd=max global/odd=max")
    assert f"Tuned in validation: {max(scores, key=scores.get)} for FedNTD" in said.out
    finals = {r["method"]: float(r["mean"]) for r in rows("out/results.csv") if r["statistic"] == "final"}
    assert marked() == [name for name, value in finals.items() if value == max(finals.values())]


def test_tuning_on_a_value_whose_direction_nobody_tells_is_refused_before_anything_is_run(here):
    line = "compare -c plain.yaml --methods FedNTD --tune model.client.beta=0.1,100 --output out --tune_metric val/foo"
    assert "--direction must say whether val/foo is better when lower or higher" in refusal(line, 1)
    assert "--direction must be KEY=min or KEY=max" in refusal(f"{line} --direction val/foo", 1)
    line = "compare -c plain.yaml --methods FedNTD --output out --columns rounds --metrics val/foo"
    assert "--direction must say whether val/foo is better when lower or higher" in refusal(line, 1)
    assert not list(Path("out").rglob("metrics.csv"))
