"""Every table of the papers: its file, its published values, and two rounds of its cells at tiny scale."""

import math
from copy import deepcopy
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from fl_lightning.data import DirichletPartition, FederatedDataModule, TensorSource
from fl_lightning.experiments import experiment_files as files
from fl_lightning.experiments.cells import Cells, Request
from fl_lightning.experiments.experiment import HOURS
from fl_lightning.papers import PaperTable
from fl_lightning.papers.paper_table import NEVER, number_in
from fl_lightning.papers.sweeps import text_of
from tests.commands import say

NAMES = [name for name in files.experiment_names() if "table" in name]


@cache
def read_whole(name):
    experiment = files.read_experiment(files.shipped_path(name))
    if experiment.full:
        experiment.enlarge()
    experiment.seeds = [0]
    return experiment


def whole(name):
    """The experiment at the paper's size, to be changed at will."""
    return deepcopy(read_whole(name))


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
        assert all(number_in(str(value)) or value == NEVER for value in numbers)


@pytest.mark.parametrize("name", NAMES)
def test_a_table_tells_what_it_costs(name):
    assert whole(name).core_hours() > 0


def cell_of(name, row, case=None, request=None):
    """The cell of a row, by its label or method, in a column, by default the first one."""
    experiment = whole(name)
    runs = next(runs for runs in experiment.runs if row == runs.label or (not runs.label and row in runs.methods))
    case = case or next(iter(experiment.cases_of(runs)))
    method = runs.methods[0] if runs.label else row
    runs.cases = {case: experiment.cases_of(runs)[case]}
    runs.methods = [method]
    experiment.runs = [runs]
    return Cells(experiment, request or Request()).compose(runs, method, case, 0)


METHODS = [
    ("fedka/table1", "FedProx", {"mu": 0.01}),
    ("fedka/table1", "MOON", {"mu": 1.0, "temperature": 0.5}),
    ("fedka/table1", "FedDyn", {"alpha": 0.1}),
    ("fedka/table1", "FedNTD", {"beta": 1.0, "temperature": 1.0}),
    ("fedka/table1", "FedKA", {"beta": 0.1, "max_anchors": 10, "columns": "all", "strategy": "random"}),
    ("fedka/table1", "FedKA, Eq. 3 as printed", {"beta": 0.1, "max_anchors": 10, "columns": "dropped"}),
    ("fedka/table6", "FedKA, non-dominant classes", {"use_missing": False, "use_non_dominant": True}),
    ("fedka/table6", "as printed, missing classes", {"use_missing": True, "use_non_dominant": False}),
    ("fedka/table7", "proficient", {"strategy": "proficient", "columns": "all"}),
    ("fedcl/table1", "FedCL", {"strength": 0.5, "interval": 1, "importance": "abs"}),
    ("fedcl/table1", "FedCL every 10 rounds", {"strength": 0.5, "interval": 10, "when_missing": "cached"}),
    ("fedcl/table1", "FedCL every 10 rounds, Alg. 1", {"interval": 10, "when_missing": "identity"}),
    ("knfu/table1", "KnFu", {"beta": 10.0, "lam": 1.0, "ce_on": "transfer", "finetune_epochs": 1}),
    ("knfu/table1", "FedMD", {"targets": "soft", "ce_on": "transfer", "finetune_epochs": 1}),
    ("knfu/table1", "Local", {"finetune_epochs": 1}),
    ("fedntd/table1", "FedCurv", {"fisher": "batch", "fisher_samples": 500, "lam": 1.0}),
    ("fedntd/table1", "FedProx", {"mu": 0.1}),
    ("fedntd/table1", "MOON", {"mu": 1.0, "temperature": 0.5}),
    ("fedntd/table1", "FedNTD", {"beta": 1.0, "temperature": 1.0}),
    ("fedntd/table13", "FedAlign", {"mu": 0.45, "width": 0.25}),
    ("feded/table1", "FedProx", {"mu": 0.01}),
    ("feded/table1", "MOON", {"mu": 0.01, "temperature": 0.5}),
    ("feded/table1", "FedLC", {"tau": 0.5, "form": "softmax"}),
    ("feded/table1", "FedRS", {"alpha": 0.7}),
    ("feded/table1", "FedNTD", {"beta": 0.1}),
    ("feded/table1", "FedED", {"lam": 0.1, "logit_form": "official"}),
]
"""Tables, rows in them, and what these have in the paper of the table, or where it is silent in its comment."""


@pytest.mark.parametrize(("name", "row", "settings"), METHODS)
def test_a_row_has_the_settings_of_the_table_s_paper(name, row, settings):
    assert settings.items() <= cell_of(name, row).config["model"]["client"]["init_args"].items()


FEDERATIONS = [  # clients, participation, epochs, batch, lr, decay of the lr, weight decay, rounds
    ("fedka/table1", "CIFAR-10", (10, 1.0, 10, 128, 0.01, 1.0, 1e-5, 100)),
    ("fedka/table1", "Tiny-ImageNet", (10, 1.0, 10, 128, 0.01, 1.0, 1e-5, 20)),
    ("fedka/table3", "ratio 0.2", (10, 0.2, 10, 128, 0.01, 1.0, 1e-5, 100)),
    ("fedka/table4", "E = 20", (10, 1.0, 20, 128, 0.01, 1.0, 1e-5, 100)),
    ("fedka/table5", "100 clients", (100, 1.0, 10, 128, 0.01, 1.0, 1e-5, 100)),
    ("fedcl/table1", "α = 1", (10, 0.2, 2, 64, 0.005, 0.99, 1e-4, 500)),
    ("knfu/table1", "50 samples, α = 0.1", (20, 1.0, 1, 8, 0.01, 1.0, 0.0, 100)),
    ("knfu/table1", "100 samples, α = 0.1", (20, 1.0, 1, 16, 0.01, 1.0, 0.0, 100)),
    ("knfu/table1", "200 samples, α = 0.1", (20, 1.0, 1, 32, 0.01, 1.0, 0.0, 100)),
    ("knfu/table2", "500 samples, α = 0.1", (20, 1.0, 1, 64, 0.01, 1.0, 0.0, 100)),
    ("knfu/table2", "1000 samples, α = 0.1", (20, 1.0, 1, 128, 0.01, 1.0, 0.0, 100)),
    ("fedntd/table1", "MNIST, s = 2", (100, 0.1, 3, 50, 0.01, 0.99, 1e-5, 200)),
    ("fedntd/table1", "CIFAR-10, s = 2", (100, 0.1, 5, 50, 0.01, 0.99, 1e-5, 200)),
    ("feded/table1", "MNIST, β = 0.05", (10, 1.0, 5, 64, 0.01, 1.0, 1e-5, 50)),
    ("feded/table1", "CIFAR-10, β = 0.05", (10, 1.0, 10, 64, 0.01, 1.0, 1e-5, 100)),
]
"""Tables, columns in them, and what their runs have in the paper."""


@pytest.mark.parametrize(("name", "case", "settings"), FEDERATIONS)
def test_a_column_has_the_federation_of_the_table_s_paper(name, case, settings):
    config = cell_of(name, whole(name).runs[0].methods[0], case).config
    data = config["data"]
    model = config["model"]
    optimizer = config["model"]["client"]["init_args"]["optimizer"]
    assert optimizer["init_args"]["momentum"] == 0.9
    assert settings == (
        *(data["num_clients"], data["participation"], model["local_epochs"], data["batch_size"]),
        *(optimizer["init_args"]["lr"], model["lr_decay"], optimizer["init_args"]["weight_decay"]),
        config["trainer"]["max_epochs"],
    )


@pytest.mark.parametrize("name", ["fedka/3", "fedcl/table1", "knfu/2", "fedntd/table1", "feded/table1"])
def test_a_configuration_of_the_machine_leaves_the_rounds(name):
    row = whole(name).runs[0].methods[0]
    plain, gpu = (cell_of(name, row, request=Request(configs)) for configs in ((), ("trainer/gpu",)))
    assert gpu.config["trainer"]["accelerator"] == "gpu"
    assert gpu.max_rounds == plain.max_rounds


def test_the_clients_of_fedka_s_figures_have_samples_of_the_classes_that_are_drawn():
    """Without the images, as the counts of labels alone decide how many samples of each class a client is dealt."""
    y = torch.arange(10).repeat_interleave(5000)
    source = TensorSource((torch.zeros(len(y), 1), y), (torch.zeros(10, 1), torch.arange(10)), num_classes=10)
    data = cell_of("fedka/3", "FedAvg").config["data"]
    partition = DirichletPartition(**data["partition"]["init_args"])
    module = FederatedDataModule(source, data["num_clients"], partition=partition, seed=data["seed"])
    module.setup("fit")
    counts = module.label_counts
    sizes = module.label_counts.sum(1)
    (third,), (sixth,) = (whole(name).draw.values() for name in ("fedka/3", "fedka/6"))
    few, dominant = (counts[third.client, third.classes[case]] for case in ("few samples", "dominant"))
    assert 10 < few < 0.005 * sizes[third.client]
    assert 0.15 < dominant / sizes[third.client] < 0.25
    assert 0 < counts[sixth.client, sixth.classes[""]] < 0.05 * sizes[sixth.client]


def tiny(config, source):
    """The configuration of a cell with few images and clients of one step."""
    data = config["data"]
    model = config["model"]
    trainer = config["trainer"]
    like = source.rpartition(".")[2]
    data["source"] = {"class_path": "tests.papers.tiny.TinyImages", "init_args": {"like": like}}
    partition = data["partition"].get("init_args", {})
    if "min_samples" in partition:
        partition["min_samples"] = 0
    if "samples_per_client" in partition:
        partition |= {"samples_per_client": min(partition["samples_per_client"] or 4, 4), "overlap": True}
    data["participation"] = min(1.0, 2 / data["num_clients"])
    model |= {"evaluate_clients_every": 1} if model["evaluate_clients_every"] else {}
    data["transfer_size"] = 8 if data["transfer_size"] else 0
    data["client_test_size"] = None
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
        (case.get(HOURS, 0), runs, name) for runs in experiment.runs for name, case in experiment.cases_of(runs).items()
    ]
    least = min(hours for hours, *_ in columns)
    hours, runs, name = next(column for column in reversed(columns) if column[0] == least)
    experiment.runs, runs.cases = [runs], {name: experiment.cases_of(runs)[name]}
    return hours, experiment


ONE_OF_EACH = ("fedcl/table1", "feded/table1", "fedka/table3", "fedntd/table1", "knfu/table1")
"""Tables of which a cell is run by default; a cell of every other one is slow."""


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in ONE_OF_EACH)) for n in NAMES])
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


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in files.experiment_names() if name not in NAMES])
def test_a_figure_composes_at_the_papers_size(name):
    experiment = whole(name)
    cells = Cells(experiment, Request()).all()
    methods = [(runs.label or method, runs) for runs in experiment.runs for method in runs.methods]
    assert {(cell.method, cell.case) for cell in cells} == {
        (label, case) for label, runs in methods for case in experiment.cases_of(runs)
    }
    assert all(cell.all_rounds > 0 for cell in cells)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([70.0, 72.0], "71.0 ± 1.4"),
        ([70.0, 70.0], "70.0"),
        ([70.0], "70.0"),
        ([70.0, math.nan], "70.0 (1 of 2, else nan)"),
        ([math.inf], "inf"),
        ([], "–"),
    ],
)
def test_a_cell_says_which_values_are_no_numbers(values, text):
    assert text_of(np.array(values)) == text
