"""Every number in a caption is that of an independent computation from the files of a run."""

import csv
import inspect
import re
from collections import defaultdict
from itertools import pairwise

import numpy as np
import pytest

from fl_lightning import papers
from fl_lightning.papers import Series
from fl_lightning.papers.drawing import Drawing, labels_of
from fl_lightning.reports.saved import Group, read_run
from tests.experiments.test_reproduce import CLASSES, CLIENTS, ROUNDS, made_up  # noqa: F401

NUMBER = re.compile(r"(?<![\w.])[+-]?\d+(?:\.\d+)?(?:e[+-]?\d+)?")

LEFT_OUT = {"PaperTable": "needs the tables of a paper; tests/papers/test_paper_table.py computes them"}


def drawings():
    """All classes of drawings that can be made, with what the package lets import from `papers`."""
    kinds = [getattr(papers, name) for name in dir(papers)]
    found = {kind for kind in kinds if inspect.isclass(kind) and issubclass(kind, Drawing)}
    return {kind.__name__: kind for kind in found if not inspect.isabstract(kind)}


class Files:
    """The files of a run, read by csv alone."""

    def __init__(self, folder):
        self.folder = folder

    def rows(self, name):
        with (self.folder / name).open(newline="", encoding="utf-8") as file:
            return list(csv.DictReader(file))

    def curve(self, key):
        return [float(row[key]) for row in self.rows("metrics.csv")]

    def by_class(self):
        names = [f"global/acc_class/{c:02d}" for c in range(CLASSES)]
        return np.array([[float(row[name]) for name in names] for row in self.rows("metrics.csv")])

    def counts(self):
        return np.array([[float(row[f"{c:02d}"]) for c in range(CLASSES)] for row in self.rows("partition.csv")])

    def accuracies(self, moment):
        """(T, N, C)."""
        found = np.full((ROUNDS, CLIENTS, CLASSES), np.nan)
        for row in self.rows("client_classwise.csv"):
            if row["moment"] == moment:
                found[int(row["round"]), int(row["client"])] = [float(row[f"{c:02d}"]) for c in range(CLASSES)]
        return found

    def degree(self, client):
        """τ = (A_received − A_trained) / A_received, (T, C)."""
        before, after = (self.accuracies(moment)[:, client] for moment in ("received", "trained"))
        return (before - after) / before

    def arrays(self, name):
        return dict(np.load(self.folder / name))


def last_five(values):
    return sum(values[-5:]) / 5


def of_curves(files):
    return [f"{100 * last_five(files.curve('global/acc')):.3g}"]


def of_consistency(files):
    table = files.by_class()
    cosines = [a @ b / (np.linalg.norm(a) * np.linalg.norm(b)) for a, b in pairwise(table)]
    return [f"{last_five(cosines):.3g}"]


def of_maps(files):
    table = files.by_class()
    steps = [abs(table[t + 1, c] - table[t, c]) for t in range(ROUNDS - 1) for c in range(CLASSES)]
    return [f"{100 * sum(steps) / len(steps):.1f}"]


def of_shares_of_maps(files):
    deviations = [(row / row.sum()).std() for row in files.by_class()]
    return [f"{100 * sum(deviations) / ROUNDS:.1f}"]


def of_target(files):
    reached = [t for t, value in enumerate(files.curve("global/acc")) if value >= 0.5]
    return ["50", str(reached[0] + 1)]


def of_progress(files):
    """The weights of Definition 1: p of the classes, and (1 − p) / (C − 1)."""
    shares = files.counts() / files.counts().sum(1, keepdims=True)
    changes = []
    for weights in (shares, (1 - shares) / (CLASSES - 1)):
        ends = [(weights * files.accuracies(moment)[-1]).sum(1).mean() for moment in ("received", "1")]
        changes.append(f"{100 * (ends[1] - ends[0]):+.1f}")
    return changes


def of_degrees(files):
    held = files.counts()[3]
    dominant = held >= held.sum() / (2 * CLASSES)
    degree = files.degree(3)
    return ["3", "1", f"{degree[:, dominant].mean():.2f}", f"{degree[:, ~dominant].mean():.2f}"]


def of_one_class(files):
    return ["1", "2", f"{files.degree(1)[:, 2].mean():.2f}"]


def correlation(x, y):
    a, b = (np.asarray(values) - np.mean(values) for values in (x, y))
    return (a * b).sum() / np.sqrt((a * a).sum() * (b * b).sum())


def of_scatter(files):
    rows = files.rows("drift.csv")
    x, y = ([float(row[name]) for row in rows] for name in ("distribution_distance", "weight_divergence"))
    return [f"{correlation(x, y):.2f}"]


def of_bars(files):
    change = files.accuracies("trained")[0].mean() - files.accuracies("received")[0].mean()
    return [f"{100 * change:+.1f}", f"{100 * files.curve('global/acc')[0]:.1f}"]


def of_bars_of_a_client(files):
    change = (files.accuracies("trained") - files.accuracies("received"))[0, EMPTY]
    empty = files.counts()[EMPTY] == 0
    assert empty.any()
    return [f"{100 * change[empty].mean():+.1f}", f"{100 * files.curve('global/acc')[0]:.1f}"]


def of_counts(files):
    return [f"{(files.counts() > 0).sum() / CLIENTS:.1f}"]


def of_local_shares(files):
    shares = (files.counts() / files.counts().sum(1, keepdims=True))[:10]
    return [f"{shares.max():.2f}", f"{(1 - shares.min()) / (CLASSES - 1):.2f}"]


def of_predicted(files):
    rows = [row for row in files.rows("predicted_distribution.csv") if int(row["round"]) == ROUNDS - 1]
    predicted = np.array([[float(row[f"{c:02d}"]) for c in range(CLASSES)] for row in rows])
    true = files.counts() / files.counts().sum(1, keepdims=True)
    distance = sum(abs(a - b) for a, b in zip(true.ravel(), predicted.ravel(), strict=True)) / CLIENTS
    return [str(ROUNDS), "1", f"{distance:.2f}", f"{correlation(true.ravel(), predicted.ravel()):.2f}"]


def of_landscape(files):
    arrays = files.arrays("landscape-00005-global.npz")
    return ["2", "0.1", f"{sum(arrays['noise_loss'][1]) / 3:.2f}"]


def of_neurons(files):
    arrays = files.arrays("neurons-00005.npz")
    same = [a == b for model in arrays["trained"] for a, b in zip(model, arrays["received"], strict=True)]
    return [f"{100 * sum(same) / len(same):.1f}"]


def of_circles(files):
    arrays = files.arrays("features-00005.npz")
    lengths = []
    for features in arrays["features"].astype(float):
        angles = np.arctan2(features[:, 1], features[:, 0])
        groups = [angles[arrays["targets"] == c] for c in range(CLASSES)]
        lengths.append(f"{np.mean([np.hypot(np.cos(a).mean(), np.sin(a).mean()) for a in groups]):.2f}")
    received, *clients, aggregate = lengths
    named = [part for i, length in enumerate(clients) for part in (str(i), length)]
    return ["1", received, *named, aggregate]


def of_embedding(files):
    arrays = files.arrays("features-00005.npz")
    points = [
        (tuple(x), model, target)
        for model, features in enumerate(arrays["features"][:-1])
        for x, target in zip(features, arrays["targets"], strict=True)
    ]
    same = defaultdict(int)
    for i, (x, model, target) in enumerate(points):
        others = [(np.hypot(x[0] - y[0], x[1] - y[1]), m, t) for j, (y, m, t) in enumerate(points) if j != i]
        _, other_model, other_target = min(others)
        same["class"] += target == other_target
        same["model"] += model == other_model
    return [f"{100 * same[name] / len(points):.1f}" for name in ("class", "model")]


EMPTY = 2
"""A client that lacks two classes."""

KEYS = {"": "global/acc"}
CASES = [
    ("Curves", {"keys": KEYS}, of_curves),
    ("Consistency", {}, of_consistency),
    ("ClassMaps", {}, of_maps),
    ("ClassMaps", {"normalised": True}, of_shares_of_maps),
    ("Sweep", {"keys": KEYS, "xlabel": "β"}, lambda files: ["5", *of_curves(files)]),
    ("EndTable", {"keys": KEYS}, lambda files: ["5"]),
    ("RoundsToTarget", {"targets": {"": 50.0}}, of_target),
    ("LocalProgress", {}, of_progress),
    ("DegreeMap", {"client": 3}, of_degrees),
    ("OneClass", {"classes": {"": 2}, "client": 1}, of_one_class),
    ("DistanceScatter", {}, of_scatter),
    ("ClassBars", {}, of_bars),
    ("ClassBars", {"client": EMPTY}, of_bars_of_a_client),
    ("ClassCounts", {}, of_counts),
    ("LocalShares", {}, of_local_shares),
    ("PredictedDistributions", {}, of_predicted),
    ("Landscapes", {}, of_landscape),
    ("NeuronClasses", {}, of_neurons),
    ("Circles", {}, of_circles),
    ("Embedding", {}, of_embedding),
]


def test_every_drawing_is_compared_or_has_a_reason():
    assert drawings().keys() == {name for name, _, _ in CASES} | LEFT_OUT.keys()


@pytest.mark.parametrize(("name", "settings", "expected"), CASES, ids=lambda value: value if type(value) is str else "")
def test_the_numbers_of_a_caption_are_those_of_the_files(name, settings, expected, made_up, monkeypatch):  # noqa: F811
    # t-SNE takes long. Its points are the features here.
    monkeypatch.setattr("fl_lightning.papers.models.joint_embedding", lambda features, seed: features[..., :2])
    series = [Series("FedAvg", "", Group("", [read_run(made_up)]))]
    caption = drawings()[name](**settings).draw(series).caption
    assert NUMBER.findall(caption) == expected(Files(made_up)), caption


def test_a_line_of_one_run_has_no_band(made_up):  # noqa: F811
    runs = Series("FedAvg", "", Group("", [read_run(made_up)]))
    curves = drawings()["Curves"](keys={"accuracy": "global/acc"})
    _, mean, deviation = curves.line_of(runs, "global/acc")
    assert len(mean) > 1
    assert deviation is None
    runs = Series("FedAvg", "", Group("", [read_run(made_up)] * 2))
    _, _, deviation = curves.line_of(runs, "global/acc")
    assert deviation.tolist() == [0.0] * len(mean)


def test_shares_are_drawn_over_clients_and_classes(made_up):  # noqa: F811
    figure = drawings()["LocalShares"]().draw([Series("FedAvg", "", Group("", [read_run(made_up)]))]).content
    maps = [axes for axes in figure.axes if axes.images or axes.collections]
    assert maps[0].get_xlabel() == "client"
    assert maps[0].get_ylabel() == "class"


@pytest.mark.parametrize(
    ("pairs", "labels"),
    [
        ([("FedAvg", "IID"), ("FedAvg", "α = 0.1")], ["IID", "α = 0.1"]),
        ([("FedAvg", "IID"), ("FedNTD", "IID")], ["FedAvg", "FedNTD"]),
        (
            [("FedAvg", "IID"), ("FedAvg", "α = 0.1"), ("FedNTD", "IID")],
            ["FedAvg, IID", "FedAvg, α = 0.1", "FedNTD, IID"],
        ),
        ([("FedAvg", "IID")], ["FedAvg, IID"]),
        ([("FedAvg", "")], ["FedAvg"]),
    ],
)
def test_panels_and_captions_are_named_by_what_differs(pairs, labels, made_up):  # noqa: F811
    group = Group("", [read_run(made_up)])
    series = [Series(method, case, group) for method, case in pairs]
    assert labels_of(series) == labels
    drawn = papers.ClassMaps().draw(series)
    titles = [axes.get_title() for axes in drawn.content.axes if axes.get_title()]
    assert titles == labels
    names = [text.get_text() for text in drawn.content.axes[0].get_yticklabels()]
    assert names == [str(class_idx) for class_idx in range(CLASSES)]
