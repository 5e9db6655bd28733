"""`fl-lightning reproduce`: every figure's file, its drawing on made-up runs, and one from command to picture."""

import csv
import math
import os
import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import yaml
from matplotlib.backends.backend_agg import FigureCanvasAgg

from fl_lightning.cli.configs import locate
from fl_lightning.experiments import experiment_files as spec
from fl_lightning.experiments.cells import Cells, Request
from fl_lightning.experiments.composing import method_config
from fl_lightning.experiments.reproduce import time_of
from fl_lightning.metrics.history import BY_CLASS
from fl_lightning.papers import EndTable, RoundsToTarget, Series, Sweep
from fl_lightning.papers.panels import finish, panels
from fl_lightning.reports.figures import draw_line
from fl_lightning.reports.result_tables import Table
from fl_lightning.reports.saved import Group, read_run
from tests.commands import refusal, say

CLASSES = 10
CLIENTS = 12
ROUNDS = 6
CURVES = (
    *(f"global/{name}" for name in ("acc", "forgetting", "acc_in_local", "acc_out_local")),
    *(f"local/{name}" for name in ("alma", "train", "initial", "personalised", "acc_in_local", "acc_out_local")),
    *("local/weight_divergence", "local/distribution_distance", "data/class_count"),
    *(f"{scope}/weight_alignment/{name}" for scope in ("global", "local") for name in ("first", "second")),
)
TINY = """
# A tiny figure.
minutes: 0.1
base: [experiment/digits_fedavg]
config: {trainer: {max_epochs: 2}, model: {local_epochs: 1, max_local_steps: 1}}
runs:
  - methods: [FedAvg]
    cases:
      few: {data.participation: 0.2}
      more: {data.participation: 0.5}
draw:
  a: {class_path: fl_lightning.papers.Curves, init_args: {keys: {"": global/acc}}}
  b: {class_path: fl_lightning.papers.EndTable, init_args: {keys: {accuracy: global/acc}}}
"""


# --- every figure ---------------------------------------------------------------------------------


def write_rows(path: Path, header: list[str], rows) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([header, *rows])


@pytest.fixture(scope="module")
def made_up(tmp_path_factory):
    """The folder of a run that has every file that a drawing reads, with random values."""
    folder = tmp_path_factory.mktemp("made_up")
    draws = np.random.default_rng(0)
    names = [f"{c:02d}" for c in range(CLASSES)]
    keys = [*CURVES, *(f"{key}/std" for key in CURVES), *(f"global{BY_CLASS}{name}" for name in names)]
    write_rows(folder / "metrics.csv", ["round", *keys], [[t, *draws.random(len(keys))] for t in range(ROUNDS)])
    write_rows(
        folder / "partition.csv", ["client", *names], [[i, *draws.integers(0, 30, CLASSES)] for i in range(CLIENTS)]
    )
    moments = ["received", "0", "1", "trained"]
    rows = [[t, i, m, *draws.random(CLASSES)] for t in range(ROUNDS) for i in range(CLIENTS) for m in moments]
    write_rows(folder / "client_classwise.csv", ["round", "client", "moment", *names], rows)
    columns = ["round", "client", "drift", "weight_divergence", "distribution_distance"]
    each = [(t, i) for t in range(ROUNDS) for i in range(CLIENTS)]
    write_rows(folder / "drift.csv", columns, [[*one, *draws.random(3)] for one in each])
    shares = [[*one, *draws.dirichlet(np.ones(CLASSES))] for one in each]
    write_rows(folder / "predicted_distribution.csv", ["round", "client", *names], shares)
    preferred = {
        name: draws.integers(0, CLASSES, size)
        for name, size in (("received", 8), ("trained", (3, 8)), ("aggregate", 8))
    }
    np.savez(folder / "neurons-00005.npz", clients=np.arange(3), **preferred)
    models = ["received", "client 0", "client 1", "client 2", "aggregate"]
    features = draws.normal(size=(5, 20, 2)).astype(np.float32)
    np.savez(folder / "features-00005.npz", features=features, models=models, targets=np.arange(20) % CLASSES)
    np.savez(
        folder / "landscape-00005-global.npz",
        sigmas=np.array([0.0, 0.1]),
        noise_loss=1 + draws.random((2, 3)),
        noise_accuracy=draws.random((2, 3)),
        line=np.linspace(-1, 1, 5),
        plane=1 + draws.random((5, 5)),
        eigenvalues=np.array([2.0, 1.0]),
    )
    return folder


@cache
def figure_of(name):
    """Content of a figure's file; only to be read."""
    return spec.read_experiment(spec.shipped_path(name))


@pytest.mark.parametrize("name", spec.experiment_names())
def test_a_figure_can_be_read(name):
    """Its file names configurations, methods and drawings that exist."""
    figure = figure_of(name)
    assert time_of(figure) == time_of(spec.read_runs(spec.shipped_path(name)))
    assert [locate(base) for base in figure.base]
    assert [method_config(part) for runs in figure.runs for method in runs.methods for part in method.split("+")]
    assert figure.draw


def drawn_figures():
    """Names of figures, slow where others before have all their kinds of drawings."""
    seen = set()
    for name in spec.experiment_names():
        kinds = set(re.findall(r"fl_lightning\.papers\.\w+", spec.shipped_path(name).read_text(encoding="utf-8")))
        yield pytest.param(name, marks=[pytest.mark.slow] * (kinds <= seen))
        seen |= kinds


@pytest.mark.parametrize("name", list(drawn_figures()))
def test_a_figure_can_be_drawn(name, made_up, monkeypatch):
    """Its drawings say what they show, on axes with names."""
    monkeypatch.setattr("fl_lightning.papers.models.joint_embedding", lambda features, seed: features[..., :2])  # slow
    figure = figure_of(name)
    run = read_run(made_up)
    series = [
        Series(runs.label or method, case, Group("", [run]))
        for runs in figure.runs
        for method in runs.methods
        for case in figure.cases_of(runs)
    ]
    contents = {letter: drawing.draw(series) for letter, drawing in figure.draw.items()}
    for content, caption in contents.values():
        assert caption.endswith(".")
        assert " : " not in caption
        if not isinstance(content, Table):
            shown = [axes for axes in content.axes if axes.axison]
            assert any(axes.get_xlabel() for axes in shown), name
            assert any(axes.get_ylabel() for axes in shown), name


def test_a_level_of_a_sweep_is_said_once(made_up):
    run = read_run(made_up)
    series = [
        Series("FedAvg", "none", Group("", [run])),
        *(Series("FedNTD", case, Group("", [run])) for case in ("0.1", "1")),
    ]
    _, caption = Sweep({"": "global/acc"}, "β", levels={"FedAvg": {"": "none"}}).draw(series)
    value = 100 * np.mean(list(run.history.curve("global/acc").values())[-5:])
    ends = f"FedAvg: {value:.3g}; FedNTD: 0.1 {value:.3g}, 1 {value:.3g}"
    assert caption == f"Accuracy (%), mean of the last 5 values. {ends}."


def test_each_panel_of_a_sweep_has_the_names_of_its_own_cases(made_up):
    series = [
        Series("FedAvg", case, Group("", [read_run(made_up)])) for case in ("R = 0.5", "R = 1", "N = 10", "N = 20")
    ]
    groups = {"R": {"R = 0.5": "0.5", "R = 1": "1"}, "N": {"N = 10": "10", "N = 20": "20"}}
    figure, _ = Sweep({"": "global/acc"}, "value", groups=groups).draw(series)
    found = [[label.get_text() for label in axes.get_xticklabels()] for axes in figure.axes]
    assert found == [["0.5", "1"], ["10", "20"]]


def test_a_target_that_is_not_reached_yet_is_not_never(made_up):
    runs = Group("", [read_run(made_up)])
    series = [Series("FedAvg", "", runs), Series("FedNTD", "", runs, all_rounds=ROUNDS + 1)]
    _, caption = RoundsToTarget({"": 100.0}).draw(series)
    assert caption.endswith("100 %: never: FedAvg; not yet: FedNTD.")


def test_an_end_is_of_as_many_values_as_there_are_and_the_best_is_bold_by_the_kind_of_the_value(made_up):
    series = [
        Series("FedAvg", "", Group("", [read_run(made_up)])),
        Series("FedNTD", "", Group("", [read_run(made_up, rounds=2)])),
    ]
    for key, best in (("global/acc", max), ("global/forgetting", min)):
        content, caption = EndTable({"x": key}, last=9).draw(series)
        ends = f"Rounds of the runs, which count to their own ends: FedAvg {ROUNDS}; FedNTD 2."
        assert caption == f"In %: mean of the last {ROUNDS} values. {ends}"
        values = [float(row[1].text) for row in content.rows]
        assert [row[1].mark for row in content.rows] == ["bold" if v == best(values) else "" for v in values]


def test_settings_that_json_cannot_write_reach_the_runs():
    figure = figure_of("fedcl/1")
    (runs, *_) = figure.runs
    runs = replace(runs, methods=runs.methods[:1], cases=["α = ∞"])
    (cell,) = Cells(replace(figure, runs=[runs], draw={}), Request()).all()
    assert cell.config["data"]["partition"]["init_args"]["alpha"] == math.inf


PUBLISHED = [
    ("fedntd/12", "FedCurv", {"fisher": "batch", "fisher_samples": 500, "lam": 1.0}),
    ("fedntd/12", "FedProx", {"mu": 0.1}),
    ("fedntd/12", "MOON", {"mu": 1.0, "temperature": 0.5}),
    ("fedntd/13", "FedAlign", {"mu": 0.45, "width": 0.25, "narrow_input": True}),
    ("feded/5", "FedProx", {"mu": 0.01}),
    ("feded/5", "MOON", {"mu": 0.01, "temperature": 0.5}),
    *((f"feded/{number}", "FedNTD", {"beta": 0.1, "temperature": 1.0}) for number in (5, 6)),
    *((f"feded/{number}", "FedLC", {"tau": 0.5, "form": "softmax"}) for number in (1, 4, 5)),
    *((f"feded/{number}", "FedED", {"lam": 0.1, "omega": None, "logit_form": "official"}) for number in (1, 4, 5, 6)),
]
"""Figures, the names of methods in them, and what these have in the paper of the figure."""


def composed(name, method):
    """The model's configuration of a method, as the figure names it, in the first case of its runs."""
    figure = figure_of(name)
    (runs,) = (runs for runs in figure.runs if method == runs.label or (not runs.label and method in runs.methods))
    cases = dict(list(figure.cases_of(runs).items())[:1])
    runs = replace(runs, cases=cases, methods=runs.methods if runs.label else [method])
    figure = replace(figure, runs=[runs], seeds=[0], draw={}, draw_full={})
    (cell,) = Cells(figure, Request()).all()
    return cell.config["model"]


@pytest.mark.parametrize(("name", "method", "settings"), PUBLISHED)
def test_a_method_has_the_settings_of_the_figure_s_paper_and_is_what_it_is_named(name, method, settings):
    client = composed(name, method)["client"]
    assert client["class_path"] == f"fl_lightning.methods.{method}"
    assert settings.items() <= client["init_args"].items()


def test_fedcl_s_learning_rate_falls_by_a_hundredth_each_round():
    for name in ("fedcl/1", "fedcl/2", "fedcl/table1"):
        assert composed(name, "FedCL")["lr_decay"] == 0.99


def test_fedalign_clips_as_its_paper_and_the_others_do_not():
    assert composed("fedntd/13", "FedAlign")["clip_norm"] == 10.0
    assert composed("fedntd/13", "FedAvg")["clip_norm"] is None


@pytest.mark.parametrize("width", [3.3, 5.0, 12.0])
@pytest.mark.parametrize(
    "names",
    [["FedAvg", "FedProx", "MOON", "FedDyn", "FedNTD", "FedKA"], ["FedAvg", "FedCL", "FedCL every 10 rounds"]],
    ids=len,
)
def test_a_legend_lies_within_its_figure(names, width):
    figure, axes = panels(["accuracy (%)"], [""], width=width)
    for i, name in enumerate(names):
        draw_line(axes[0, 0], i, [0, 1], np.array([0.1 * i, 1.0]), label=name)
    finish(figure, axes)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    found = figure.legends[0].get_window_extent(canvas.get_renderer())
    assert found.x0 >= 0
    assert found.x1 <= figure.bbox.width
    assert found.height <= 0.6 * figure.bbox.height


def has_small_size(name):
    """Whether an experiment has a size below the paper's. A table without one needs files of published data sets.

    tests/papers/test_tables.py runs the cells of such tables on other samples.
    """
    return "\nfull:" in spec.shipped_path(name).read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("name", list(filter(has_small_size, spec.experiment_names())))
def test_a_figure_end_to_end(name, tmp_path, monkeypatch, cells_here):
    """Two rounds of all its runs, with monitors that measure every round; then its pictures."""
    read = spec.read_experiment

    def short(path):
        figure = read(path)
        for callback in figure.config.get("trainer", {}).get("callbacks", []):
            if "every" in callback.get("init_args", {}):
                callback["init_args"]["every"] = 1
        return figure

    monkeypatch.setattr(spec, "read_experiment", short)
    said = say(f"reproduce {name} --set trainer.max_epochs=2 model.max_local_steps=2 --seeds 0 --output {tmp_path}")
    assert said.code == 0, said
    assert cells_here
    assert list((tmp_path / name.partition("/")[0]).glob("*.html"))


def test_the_list_has_every_figure_with_its_minutes(monkeypatch):
    monkeypatch.setattr(
        spec, "read_experiment", lambda path: pytest.fail(f"{path} is read with its drawings, which takes seconds")
    )
    lines = say("reproduce").out.splitlines()
    assert [line.split()[0] for line in lines] == spec.experiment_names()
    assert len(lines) == len(set(lines)) > 30
    assert all(re.match(r"\S+ +([\d.]+ min|\d+ h \d+ min|[\d,]+ h) ", line) for line in lines), lines
    assert all(line.endswith((".", "!")) for line in lines)


# --- from command to picture ----------------------------------------------------------------------


@pytest.fixture
def begun(tmp_path, monkeypatch, cells_here, without_pictures):
    """A folder with a tiny figure's file, where runs are made in this process; their names, as they are begun."""
    monkeypatch.chdir(tmp_path)
    Path("own").mkdir()
    Path("own/tiny.yaml").write_text(TINY.lstrip(), encoding="utf-8")
    return cells_here


def test_a_figure_is_run_once_and_drawn_again(begun):
    said = say("reproduce own/tiny.yaml --format png svg")
    assert said.code == 0, said
    assert len(begun) == 2
    there = {path.name for path in Path("reproduced/own").iterdir()}
    assert there == {"tinya.png", "tinya.svg", "tinyb.md", "tinyb.tex", "tiny.html"}
    table = Path("reproduced/own/tinyb.md").read_text()
    assert all(f"| FedAvg, {case} |" in table for case in ("few", "more"))
    assert "A tiny figure." in Path("reproduced/own/tiny.html").read_text()
    assert not list(Path("reproduced/runs").rglob("*.png"))
    again = say("reproduce own/tiny.yaml")
    assert again.code == 0, again
    assert len(begun) == 2
    assert Path("reproduced/own/tinyb.md").read_text() == table
    assert say("reproduce own/tiny.yaml --seeds 1 --set data.participation=0.3").code == 0
    assert len(begun) == 3  # a setting of the user wins over those of the cases, which are then the same runs


@pytest.mark.slow
def test_runs_begin_with_the_weights_of_the_start(begun):
    content = yaml.safe_load(TINY)
    content["start"] = {"methods": ["FedAvg"], "settings": {"trainer.max_epochs": 1}}
    Path("own/tiny.yaml").write_text("# Started.\n" + yaml.safe_dump(content, sort_keys=False))
    assert say("reproduce own/tiny.yaml").code == 0
    assert len(begun) == 3
    for path in Path("reproduced/cells").glob("*.yaml"):
        weights = yaml.safe_load(path.read_text())["model"]["initial_weights"]
        assert (weights is None) == (begun[0] in path.name), path
        assert weights is None or Path(weights).is_file()


@pytest.mark.parametrize(
    ("line", "code", "sentence"),
    [
        ("fedntd/99", 1, "an experiment is one that fl-lightning reproduce lists, or a file, got 'fedntd/99'"),
        ("own/tiny.yaml --set model.nosuch=1", 1, "nosuch"),
        ("own/tiny.yaml --set data.participation=0.1,0.2", 1, "--set takes one value of each setting, got 2 of data.p"),
        ("own/tiny.yaml --processes -1", 1, "processes must be at least 0"),
        ("own/tiny.yaml --output own/tiny.yaml/out", 1, "got own/tiny.yaml/out: own/tiny.yaml is a file; name another"),
        (f"own/tiny.yaml --output {'a' * 300} --plan", 1, "a: File name too long; name another"),
        ("own/tiny.yaml --output own/nothing", 1, "own/nothing is no folder; name another"),
        ("own/tiny.yaml --merge nowhere --plan", 1, "--merge takes folders that reproduce or compare wrote, and now"),
        *((f"own/tiny.yaml --rounds {n}", 1, "a whole number from 1 on, or") for n in ("0", ".inf", ".nan", "2.5")),
        ("own/tiny.yaml --seeds -1", 1, "seeds must be at least 0, got -1"),
        ("own/tiny.yaml --seeds 0 0", 1, "seeds must name each of its values once, got 0 0"),
        ("own/tiny.yaml --seeds null", 2, "seeds must be int, got None"),
        ("--rounds 5 --seeds 0", 1, "options are of an experiment, whose name comes first, got --rounds 5 --seeds 0"),
        ("own/tiny.yaml own/nothing.yaml", 1, "the file of an experiment must exist, got own/nothing.yaml"),
        ("own/tiny.yaml --methods fedavg", 1, "--methods must match one of FedAvg, got 'fedavg'; the nearest is"),
        ("own/tiny.yaml own/tiny.yml", 1, "result files of its own, and two write own/tiny; make them by two commands"),
        (
            "own/tiny.yaml own/tin.yaml",
            1,
            "result files of its own, and two write own/tinya; make them by two commands",
        ),
        ("own/tables.yaml own/other.yaml", 1, "result files of its own, and two write results.csv; make them by two"),
        ("own/draws.yaml", 1, "got 'draws'; the nearest is 'draw'"),
        ("own/hours.yaml", 1, "core_hours must be a number, got 'x' in the case 'few'"),
        ("own/large.yaml", 1, "core_hours must be a number, got 'x' in the case 'large'"),
        ("own/starts.yaml", 1, "start must be one run, of one method in at most one case"),
        ("own/begin.yaml", 1, "a row names cases of the experiment, got 'nothing'"),
        ("own/base.yaml", 1, "a table names rows of the experiment, got 'Fedavg'; the nearest is 'FedAvg'"),
        ("own/twice.yaml", 1, "seeds must name each of its values once, got 1 1"),
        (
            "fedcl/2 --cases 'MNIST, α = 1'",
            1,
            "--cases must match one of α = 1, got 'MNIST, α = 1'; with --full there is",
        ),
        ("own/wrong.yaml", 1, "own/wrong.yaml must say what an experiment needs and how it is drawn"),
        ("own/empty.yaml", 1, "there must be runs with methods, cases and seeds, and one of them is empty"),
        ("own/shown.yaml", 1, "there must be draw (pictures, tables) or tables (a comparison)"),
        ("own/named.yaml", 1, "a table names rows of the experiment, got 'FedAvgg'; the nearest is 'FedAvg'"),
        ("own/long.yaml", 1, "paper must hold a value for each of 2 cases, FedAvg has 1"),
        ("own/tiny.yaml --set trainer.logger=false", 1, "sets seeds, folders and loggers itself, got trainer.logger"),
        ("own/label.yaml", 1, "a label names one method, got 'both' for FedAvg, FedProx"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_what_is_refused(begun, line, code, sentence):
    Path("own/wrong.yaml").write_text(TINY.replace("Curves", "NoSuchDrawing"))
    Path("own/label.yaml").write_text(TINY.replace("[FedAvg]\n", "[FedAvg, FedProx]\n    label: both\n"))
    Path("own/empty.yaml").write_text(TINY.replace("[FedAvg]", "[]"))
    Path("own/twice.yaml").write_text(f"{TINY}\nseeds: [1, 1]\n")
    Path("own/nothing").symlink_to("absent")
    Path("own/tiny.yml").write_text(TINY)
    Path("own/tin.yaml").write_text(TINY.replace("  a:", "  ya:"))
    Path("own/large.yaml").write_text(f"{TINY}\ncases_full: {{large: {{core_hours: x}}}}\n")
    Path("own/begin.yaml").write_text(f"{TINY}\nstart: {{methods: [FedAvg], cases: [nothing]}}\n")
    for name in ("tables", "other"):
        Path(f"own/{name}.yaml").write_text(TINY.partition("draw:")[0] + "tables: {baseline: FedAvg}\n")
    Path("own/draws.yaml").write_text(TINY.replace("draw:", "draws:"))
    Path("own/hours.yaml").write_text(TINY.replace("few: {", "few: {core_hours: x, "))
    Path("own/starts.yaml").write_text(f"{TINY}\nstart: {{methods: [FedAvg, FedProx]}}\n")
    Path("own/base.yaml").write_text(f"{TINY}\ntables: {{baseline: Fedavg}}\n")
    Path("own/shown.yaml").write_text(TINY.partition("draw:")[0])
    table = TINY.partition("draw:")[0] + "draw: {'': {class_path: fl_lightning.papers.PaperTable, init_args: {%s}}}\n"
    keys = "keys: {x: global/acc}"
    Path("own/named.yaml").write_text(table % f"{keys}, paper: {{}}, baseline: FedAvgg")
    Path("own/long.yaml").write_text(table % f"{keys}, paper: {{x: {{FedAvg: [1]}}}}")
    assert sentence in refusal(f"reproduce {line}", code)
    assert not begun


def test_a_plan_needs_no_folder_that_can_be_written(begun, monkeypatch):
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK and access(path, mode))  # as for no root
    assert say("reproduce own/tiny.yaml --plan").code == 0
    assert "cannot be written; name another" in refusal("reproduce own/tiny.yaml", 1)
    assert not begun


def test_a_run_that_fails_is_named(begun):
    Path("own/tiny.yaml").write_text(TINY.replace("max_epochs: 2", "max_epochs: 2, callbacks: [LearningRateFinder]"))
    said = say("reproduce own/tiny.yaml")
    assert said.code == 1
    assert "2 runs failed, and the tables are those of the others. FedAvg-" in said.err
