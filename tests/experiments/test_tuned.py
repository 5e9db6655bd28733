"""`compare` with `model.fine_tuning`: the values after it stand beside those before it, for every method."""

import csv
from pathlib import Path

import pytest

from tests.commands import say

BASE = """
trainer: {max_epochs: 2, accelerator: cpu}
model:
  max_local_steps: 1
  threads: 1
  client: {class_path: FedAvg, init_args: {net: {class_path: fl_lightning.nets.Perceptron, init_args: {hidden: [8]}}}}
data: {num_clients: 4, participation: 0.5, partition: {class_path: fl_lightning.data.IIDPartition}}
"""
TUNED = "--model.evaluate_clients_every 1 --model.fine_tuning.max_steps 3 --model.fine_tuning.lr 0.05"
KEYS = ("local/alma", "local/tuned/alma")


@pytest.fixture
def base(tmp_path, monkeypatch, cells_here, without_pictures):
    """A working directory with a base in it, and a method whose file turns the fine-tuning off."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base.yaml").write_text(BASE, encoding="utf-8")
    (tmp_path / "plain.yaml").write_text(
        "model: {fine_tuning: null, client: {class_path: fl_lightning.methods.FedAvg}}", encoding="utf-8"
    )
    return tmp_path


def rows(name):
    with Path("out", name).open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_every_table_has_both_values_of_all_methods(base):
    (base / "tuned.yaml").write_text(
        "model: {evaluate_clients_every: 1, fine_tuning: {max_steps: 3, lr: 0.05}}", encoding="utf-8"
    )
    names = ["FedAvg", "FedBABU", "Ditto", "plain"]
    said = say(f"compare -c base.yaml -c tuned.yaml --methods {' '.join(names[:3])} plain.yaml --seeds 0 --output out")
    assert said.code == 0, said
    finals = {(row["method"], row["metric"]): row for row in rows("results.csv") if row["statistic"] == "final"}
    cells = {(row["method"], row["metric"]): row["final"] for row in rows("cells.csv")}
    for name in names:
        for key in KEYS:
            has_value = (name, key) != ("plain", "local/tuned/alma")
            assert ((name, key) in finals) == ((name, key) in cells) == has_value
            if has_value:
                assert float(finals[name, key]["mean"]) == float(cells[name, key])
                assert "own test splits" in finals[name, key]["scope"]
    assert float(finals["FedBABU", KEYS[1]]["mean"]) != float(finals["FedBABU", KEYS[0]]["mean"])
    before = "accuracy of their own models on their own test splits"
    after = "accuracy of their models, fine-tuned, on their own test splits"
    markdown = Path("out/results.md").read_text(encoding="utf-8")
    assert "| ALMA, % | ALMA, tuned, % |" in markdown
    titles = [line for line in markdown.splitlines() if line.startswith("**")]
    place = next(index for index, title in enumerate(titles) if before in title)
    assert after in titles[place + 1]
    lines = markdown.partition(f"**Mean over the clients of the {after}")[2].partition("\n**")[0].splitlines()
    table = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("|")]
    assert [row[0] for row in table[2:]] == names
    assert set(table[-1][1:]) == {"–"}
    assert all("–" not in row[1] for row in table[2:-1])
    assert after in said.out
    for name in ("results-by-metric.tex", "report.html"):
        text = Path("out", name).read_text(encoding="utf-8")
        assert text.index(before) < text.index(after), name
    page = Path("out/report.html").read_text(encoding="utf-8")
    assert "fine-tuned, on their own test splits" in page.partition("<h2>Curves")[2]


def test_what_is_asked_for_brings_its_value_after_fine_tuning(base):
    options = f"--methods FedAvg FedBABU --seeds 0 --output out --metrics local/alma {TUNED}"
    assert say(f"compare -c base.yaml {options}").code == 0
    assert [row["metric"] for row in rows("results.csv") if row["statistic"] == "final"] == [
        key for key in KEYS for _ in range(2)
    ]


def test_a_run_with_fine_tuning_is_another_cell_than_one_without(base, cells_here):
    """Else its values would be missing where the run without it is there already."""
    command = "compare -c base.yaml --methods FedAvg --seeds 0 --output out --model.evaluate_clients_every 1"
    assert say(command).code == 0
    assert say(f"{command} --model.fine_tuning.epochs 1").code == 0
    assert len(cells_here) == 2
    assert "local/tuned/alma" in {row["metric"] for row in rows("results.csv")}
