"""Every table of the papers: its file, its published values, and two rounds of its cells at tiny scale."""

from pathlib import Path

import pytest
import yaml

from fl_lightning.experiments import experiment as files
from fl_lightning.experiments.cells import Cells, Request
from fl_lightning.papers import PaperTable
from fl_lightning.papers.paper_table import number_in
from tests.commands import say

NAMES = [name for name in files.names() if "table" in name]


def whole(name):
    """The experiment at the paper's size."""
    experiment = files.read(files.shipped_path(name))
    if experiment.full:
        experiment.enlarge()
    experiment.seeds = [0]
    return experiment


def paper_tables(experiment):
    return [drawing for drawing in experiment.draw.values() if isinstance(drawing, PaperTable)]


def test_every_table_of_the_five_papers_has_a_file():
    tables = {name.partition("/table")[::2] for name in NAMES}
    assert {n for paper, n in tables if paper == "fedka"} == set("123456789")
    assert {n for paper, n in tables if paper == "fedntd"} >= {"1", "2", "8", "9", "10", "11", "12", "13", "14", "G3"}
    assert {n for paper, n in tables if paper == "knfu"} == {"1", "2"}
    assert {n for paper, n in tables if paper == "feded"} == set("1234567")
    assert {n for paper, n in tables if paper == "fedcl"} == {"1"}


@pytest.mark.parametrize("name", NAMES)
def test_published_values_belong_to_rows_and_columns_of_the_table(name):
    experiment = whole(name)
    rows = {runs.label or method for runs in experiment.runs for method in runs.methods}
    cases = {case for runs in experiment.runs for case in experiment.cases_of(runs)}
    assert paper_tables(experiment)
    for table in paper_tables(experiment):
        columns = list(table.cases) or list(experiment.cases)
        assert set(columns) <= cases
        assert table.baseline is None or table.baseline in rows
        assert {*table.claims, *(other for others in table.claims.values() for other in others)} <= rows
        published = [row for values in table.paper.values() for row in values.values()]
        assert set().union(*table.paper.values()) <= rows
        assert {len(row) for row in published} == {len(columns)}
        numbers = [value for row in published for value in row if value is not None]
        assert numbers
        assert all(number_in(str(value)) for value in numbers)


@pytest.mark.parametrize("name", NAMES)
def test_a_table_tells_what_it_costs(name):
    assert whole(name).core_hours() > 0


def tiny(config, source):
    """The configuration of a cell with few images and clients of one step."""
    data, model, trainer = config["data"], config["model"], config["trainer"]
    like = source.rpartition(".")[2]
    data["source"] = {"class_path": "tests.papers.tiny.TinyImages", "init_args": {"like": like}}
    partition = data["partition"].get("init_args", {})
    if "min_samples" in partition:
        partition["min_samples"] = 0
    if "samples_per_client" in partition:
        partition |= {"samples_per_client": min(partition["samples_per_client"] or 4, 4), "overlap": True}
    data["participation"] = min(1.0, 2 / data["num_clients"])
    model |= {"evaluate_clients_every": 1} if model["evaluate_clients_every"] else {}
    data["transfer_size"], data["client_test_size"] = 8 if data["transfer_size"] else 0, None
    data["batch_size"] = 4
    model |= {"max_local_steps": 1, "local_epochs": 1, "threads": 1}
    trainer |= {"max_epochs": 2, "accelerator": "cpu", "enable_progress_bar": False, "default_root_dir": "runs"}
    for callback in trainer["callbacks"] or []:
        given = callback.get("init_args", {})
        given |= {"every": 1} if "every" in given else {}
    return config


def cells_of(name):
    """All cells of a table with one seed, equal ones once."""
    return {cell.name: cell for cell in Cells(whole(name), Request()).all()}


def two_rounds(cell):
    config = tiny({**cell.config}, cell.config["data"]["source"]["class_path"])
    Path("cell.yaml").write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
    said = say("fit -c cell.yaml --plots.format none")
    assert said.code == 0, f"{cell.name}: {said.err}"
    (table,) = Path("runs/cell").rglob("metrics.csv")
    header, *rows = table.read_text().splitlines()
    assert len(rows) == 2
    return header.split(",")


def keys_of(experiment):
    return {key for table in paper_tables(experiment) for key in table.log_keys()}


def cheapest(experiment):
    """The last row that has the column that costs least, with that column alone."""
    columns = [
        (case.get(files.HOURS, 0), runs, name)
        for runs in experiment.runs
        for name, case in experiment.cases_of(runs).items()
    ]
    least = min(hours for hours, *_ in columns)
    hours, runs, name = next(column for column in reversed(columns) if column[0] == least)
    experiment.runs, runs.cases = [runs], {name: experiment.cases_of(runs)[name]}
    return hours, experiment


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (cheapest(whole(n))[0] > 50)) for n in NAMES]
)
def test_a_cell_runs_two_rounds_at_tiny_scale(name, tmp_path, monkeypatch):
    """The last row in the column that costs least logs what the table needs."""
    monkeypatch.chdir(tmp_path)
    _, experiment = cheapest(whole(name))
    (*_, cell) = Cells(experiment, Request()).all()
    assert keys_of(experiment) <= set(two_rounds(cell))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_cell_runs_two_rounds_at_tiny_scale(name, tmp_path, monkeypatch):
    keys = keys_of(whole(name))
    for i, cell in enumerate(cells_of(name).values()):
        (tmp_path / str(i)).mkdir()
        monkeypatch.chdir(tmp_path / str(i))
        assert keys <= set(two_rounds(cell)), cell.name
