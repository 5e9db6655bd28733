import csv
import sys
import time

import numpy as np
import pytest

from fl_lightning import FederatedLoop
from fl_lightning.callbacks import ClasswiseReport, RunPlots, plot_accuracy, plot_classwise, plot_partition
from fl_lightning.callbacks import plots as module
from fl_lightning.callbacks.plots import num_samples_of
from fl_lightning.data import Window
from fl_lightning.reports.figures import plot_bubbles, plot_sizes, plot_values
from fl_lightning.reports.report import write_report
from fl_lightning.reports.saved import Group, read_run
from tests.callbacks.toy import CLASSES, At, Regression, data, loop, trainer
from tests.toys import toy_data

pytestmark = pytest.mark.filterwarnings("ignore")
ALL = {"partition.png", "accuracy.png", "classwise.png", "confusion.png"}


def pictures(folder):
    return {path.name for path in folder.glob("*.png") if path.read_bytes().startswith(b"\x89PNG")}


@pytest.fixture
def calls(monkeypatch):
    """The arguments that the pure functions are called with; nothing is drawn."""
    seen = {name: [] for name in ("plot_partition", "plot_accuracy", "plot_classwise", "plot_sizes", "plot_values")}
    for name, found in seen.items():
        monkeypatch.setattr(module, name, lambda *a, found=found, **named: found.append(a))
    monkeypatch.setattr(module, "save", lambda figure, path: None)
    return seen


def test_run_folder_gets_whole_pictures(tmp_path):
    trainer([RunPlots()], tmp_path, rounds=2).fit(loop(), datamodule=data())
    assert pictures(tmp_path) == ALL
    assert {path.name for path in tmp_path.iterdir()} == ALL | {
        "metrics.csv",
        "partition.csv",
        "status.json",
        "hparams.yaml",
        "last.ckpt",
    } - (set() if (tmp_path / "hparams.yaml").exists() else {"hparams.yaml"})


def test_an_unknown_format_is_refused():
    with pytest.raises(ValueError, match="format must be one of png, pdf, svg, metrics, none, got 'gif'"):
        RunPlots(format="gif")


def test_without_a_format_there_are_no_pictures_but_the_partition_is_kept(tmp_path, calls):
    trainer([RunPlots(format="none")], tmp_path).fit(loop(), datamodule=data())
    assert not pictures(tmp_path)
    assert not any(calls.values())
    with (tmp_path / "partition.csv").open(newline="") as file:
        header, *rows = csv.reader(file)
    assert header == ["client", *CLASSES]
    assert len(rows) == data().num_clients


@pytest.mark.parametrize("with_report", [True, False])
def test_pictures_show_the_data_and_the_history(tmp_path, calls, with_report):
    report = ClasswiseReport()
    federated = data()
    trainer([RunPlots(), *[report] * with_report], tmp_path).fit(loop(), datamodule=federated)
    ((counts, names),) = calls["plot_partition"]
    assert np.array_equal(counts, federated.label_counts)
    assert names == CLASSES
    ((rounds, accuracies, losses),) = calls["plot_accuracy"]
    assert rounds == [0, 1, 2]
    with (tmp_path / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    logged = {name: [float(row[name]) for row in rows] for name in rows[0] if name.startswith("global")}
    assert accuracies == {"global/acc": pytest.approx(logged["global/acc"])}
    assert losses == {"global/loss": pytest.approx(logged["global/loss"])}
    ((table, names, rounds),) = calls["plot_classwise"]
    assert table.shape == (3, 3)
    assert rounds == [0, 1, 2]
    assert names == CLASSES
    assert table[:, 2] == pytest.approx(logged["global/acc_class/owl"])


@pytest.mark.parametrize("with_report", [True, False])
def test_resume_draws_the_whole_history(tmp_path, calls, with_report):
    def callbacks():
        return [RunPlots(), *([ClasswiseReport()] if with_report else [])]

    trainer(callbacks(), tmp_path / "whole", rounds=4).fit(loop(), datamodule=data())
    trainer(callbacks(), tmp_path / "part", rounds=2).fit(loop(), datamodule=data())
    trainer(callbacks(), tmp_path / "part", rounds=4).fit(
        loop(), datamodule=data(), ckpt_path=tmp_path / "part" / "last.ckpt"
    )
    whole, _, resumed = calls["plot_accuracy"]
    assert resumed == whole
    whole, _, resumed = calls["plot_classwise"]
    assert np.array_equal(resumed[0], whole[0])
    assert resumed[1:] == whole[1:]


def test_drawing_during_fit_is_rare(tmp_path, calls, monkeypatch):
    trainer([RunPlots(every=0)], tmp_path, rounds=4).fit(loop(), datamodule=data())
    often = len(calls["plot_accuracy"])
    assert often > 1
    monkeypatch.setattr(module, "save", lambda figure, path: time.sleep(0.05))
    trainer([RunPlots(every=0)], tmp_path, rounds=4).fit(loop(), datamodule=data())
    assert len(calls["plot_accuracy"]) - often == 2  # one during, one at the end: 0.1 s allow the next after 5 s


def test_pictures_of_an_interrupted_run(tmp_path):
    def fail(_):
        raise KeyboardInterrupt

    with pytest.raises(SystemExit):
        trainer([RunPlots(), At(1, fail)], tmp_path).fit(loop(), datamodule=data())
    assert pictures(tmp_path) == ALL - {"confusion.png"}  # that of the last round comes at the end


def test_failure_while_drawing_does_not_hide_the_first(tmp_path, monkeypatch):
    def fail(_):
        monkeypatch.setattr(module, "plot_accuracy", None)
        raise RuntimeError("the first")

    with pytest.raises(RuntimeError, match="the first"):
        trainer([RunPlots(), At(1, fail)], tmp_path).fit(loop(), datamodule=data())


def test_module_client_without_classes(tmp_path, calls):
    federated = FederatedLoop(client=Regression(), seed=0)
    trainer([RunPlots()], tmp_path).fit(federated, datamodule=data(classes=False))
    ((rounds, accuracies, losses),) = calls["plot_accuracy"]
    assert rounds == [0, 1, 2]
    assert accuracies == {}
    assert set(losses) == {"val_loss"}
    assert not calls["plot_partition"]
    assert not calls["plot_classwise"]
    assert calls["plot_sizes"] == [([25, 25, 25, 25],)]
    ((rounds, values),) = calls["plot_values"]
    assert rounds == [0, 1, 2]
    assert set(values) == {"mse"}


@pytest.mark.parametrize("draw", [plot_partition, plot_bubbles, plot_sizes], ids=lambda draw: draw.__name__)
@pytest.mark.parametrize("unseen", [(), (1,), (0, 2)], ids=str)
def test_clients_that_never_train_are_hatched_and_the_legend_says_so(draw, unseen):
    counts = np.array([[1, 2], [3, 4], [5, 6]])
    given = (counts.sum(1),) if draw is plot_sizes else (counts, ["a", "b"])
    figure = draw(*given, unseen=unseen)
    panels = [axes for axes in figure.axes if any(part.get_hatch() for part in axes.patches)]
    assert len(panels) == (0 if not unseen else 2 if draw is plot_partition else 1)
    for axes in panels:
        hatched = [part.get_window_extent() for part in axes.patches if part.get_hatch()]
        drawn = [axes.transData.inverted().transform(box.get_points()) for box in hatched]
        assert [points[:, 0].mean() for points in drawn] == pytest.approx(list(unseen), abs=1e-6)
    words = [text.get_text() for legend in figure.legends for text in legend.get_texts()]
    assert [word for word in words if not word.isdigit()] == (["never trains (data.unseen)"] if unseen else [])


def test_a_run_tells_its_pictures_its_table_and_its_page_who_never_trains(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(module, "plot_partition", lambda *given, **named: seen.append(named["unseen"]))
    monkeypatch.setattr(module, "save", lambda figure, path: None)
    federated = data(unseen=[2])
    run = trainer([RunPlots()], tmp_path)
    run.fit(loop(), datamodule=federated)
    assert seen == [(2,)]
    page = write_report([Group("FedAvg", [read_run(tmp_path)])], tmp_path).read_text("utf-8")
    assert "1 of 4 clients never trains (data.unseen, hatched)." in page


def test_a_module_without_classes_gets_its_own_pictures(tmp_path):
    federated = FederatedLoop(client=Regression(), seed=0)
    trainer([RunPlots()], tmp_path).fit(federated, datamodule=data(classes=False))
    assert pictures(tmp_path) == {"partition.png", "accuracy.png", "values.png"}
    many = plot_values([0, 1, 2], {f"value {i}": [i, float("nan"), 2.0] for i in range(4)}, title="four")
    shown = [axes.get_title() for axes in many.axes if axes.axison]
    assert shown == ["value 0", "value 1", "value 2", "value 3"]
    (bars,) = plot_sizes([3, 0, 5]).axes
    assert [bar.get_height() for bar in bars.patches] == [3, 0, 5]


def test_alma_is_drawn_where_it_is_known(tmp_path, calls):
    trainer([RunPlots()], tmp_path, rounds=4).fit(loop(evaluate_clients_every=2), datamodule=data())
    ((_, accuracies, _),) = calls["plot_accuracy"]
    assert np.isnan(accuracies["local/alma"]).tolist() == [True, False, True, False]


def test_without_a_folder_or_without_fit_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runner = trainer([RunPlots()])
    runner.fit(loop(), datamodule=data())
    runner = trainer([RunPlots()], tmp_path)
    runner.validate(loop(), datamodule=data(), verbose=False)
    runner.test(loop(), datamodule=data(), verbose=False)
    assert not list(tmp_path.rglob("*.png"))


def test_second_fit_from_scratch_starts_anew(tmp_path, calls):
    plots = RunPlots(tmp_path)
    trainer([plots], rounds=3).fit(loop(), datamodule=data())
    trainer([plots], rounds=1).fit(loop(), datamodule=data())
    assert calls["plot_accuracy"][-1][0] == [0]
    assert len(calls["plot_classwise"][-1][0]) == 1


def test_every_is_checked():
    with pytest.raises(ValueError, match="every must be at least 0, got -1"):
        RunPlots(every=-1)


# --- the pure functions


@pytest.mark.parametrize(("num_clients", "num_classes"), [(1, 1), (10, 10), (100, 45)])
def test_partition_holds_every_count(num_clients, num_classes):
    draw = np.random.default_rng(0)
    counts = draw.integers(0, 50, (num_clients, num_classes)) * (draw.random((num_clients, num_classes)) < 0.5)
    figure = plot_partition(counts, [str(c) for c in range(num_classes)])
    axes, above, beside, _ = figure.axes
    assert np.array_equal(axes.images[0].get_array().filled(0), counts.T)
    assert [bar.get_height() for bar in above.patches] == counts.sum(1).tolist()
    assert [bar.get_width() for bar in beside.patches] == counts.sum(0).tolist()
    if num_clients <= 20:
        assert len(axes.texts) == (counts > 0).sum()
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("client", "class")
    assert len(axes.get_yticklabels()) <= 40
    if num_clients <= 10:
        figure.canvas.draw()


def test_accuracy_holds_the_curves():
    nan = float("nan")
    figure = plot_accuracy([0, 1, 2], {"a": [0.1, nan, 0.3], "b": [0.5, 0.6]}, {"a": [2.0, 1.0, 0.5]}, "Title")
    left, right = figure.axes
    assert [line.get_xydata().tolist() for line in left.lines] == [[[0, 10], [2, 30]], [[0, 50], [1, 60]]]
    assert right.lines[0].get_ydata().tolist() == [2.0, 1.0, 0.5]
    assert (left.get_ylabel(), right.get_ylabel(), left.get_xlabel()) == ("accuracy (%)", "loss", "round")
    assert [text.get_text() for text in left.get_legend().get_texts()] == ["a: 30.0 %", "b: 60.0 %"]
    assert len({(line.get_color(), line.get_linestyle()) for line in left.lines}) == 2
    figure.canvas.draw()


@pytest.mark.parametrize(("num_rounds", "num_classes"), [(1, 2), (60, 50)])
def test_classwise_holds_the_history(num_rounds, num_classes):
    history = np.random.default_rng(0).random((num_rounds, num_classes))
    history[:, 0] = np.nan
    figure = plot_classwise(history, [str(c) for c in range(num_classes)], list(range(0, 5 * num_rounds, 5)))
    axes, _, beside = figure.axes
    shown = axes.collections[0].get_array().reshape(num_classes, num_rounds)
    assert np.allclose(shown[1:], 100 * history.T[1:])
    best, last = (line.get_xdata() for line in beside.lines)
    assert np.allclose(last[1:], 100 * history[-1, 1:])
    assert np.allclose(best[1:], 100 * history[:, 1:].max(0))
    assert np.isnan(best[0])
    figure.canvas.draw()


def test_names_and_rounds_are_checked():
    with pytest.raises(ValueError, match=r"one name per class \(3\), got 2"):
        plot_partition(np.ones((2, 3)), ["a", "b"])
    with pytest.raises(ValueError, match="at least one round"):
        plot_classwise(np.ones((0, 2)), ["a", "b"])


def test_users_pyplot_is_left_alone():
    import matplotlib as mpl

    before = mpl.get_backend()
    rc = dict(mpl.rcParams)
    loaded = "matplotlib.pyplot" in sys.modules
    figure = plot_partition(np.ones((2, 2)), ["a", "b"])
    assert type(figure.canvas).__name__ == "FigureCanvasAgg"
    assert (mpl.get_backend(), dict(mpl.rcParams)) == (before, rc)
    assert ("matplotlib.pyplot" in sys.modules) == loaded


def test_sizes_are_those_of_all_rounds_where_data_change():
    changing = toy_data((10, 6), scenario=Window(per_round=0.5))
    changing.setup("fit")
    assert changing.size(0, round_idx=0) == 5
    assert [num_samples_of(changing, client_id) for client_id in range(2)] == [10, 6]
