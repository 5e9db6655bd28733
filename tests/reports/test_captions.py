"""Every number under a figure of a report, and in its table of bytes, is that of an independent computation."""

import numpy as np
import pytest
import yaml

from fl_lightning.reports.costs import costs_of_group
from fl_lightning.reports.curve_pictures import band_over_bytes
from fl_lightning.reports.report import write_report
from fl_lightning.reports.saved import find_runs, grouped, read_run
from tests.papers.test_captions import NUMBER
from tests.reports.pages import captions, curves, rows
from tests.reports.saved_runs import CLASSES, settings, write_table

METHODS = ("FedAvg", "FedNTD")
SEEDS = (0, 1)
ROUNDS = 4
CLIENTS = ("loss_before", "loss_after", "acc_own_before", "acc_own")
BYTES = ("comm/bytes_down", "comm/bytes_up", "comm/bytes_sets")


class Values:
    """The values of a run by key, (T,), and those of its clients, by name: (T, N)."""

    def __init__(self, seed):
        draws = np.random.default_rng(seed)
        self.table = {key: draws.random(ROUNDS) for key in ("train/ce", "global/acc", "global/loss")}
        self.by_class = draws.random((ROUNDS, len(CLASSES)))
        self.clients = {name: draws.random((ROUNDS, 2)) for name in CLIENTS}
        self.partition = draws.integers(0, 9, (3, len(CLASSES)))
        self.bytes = {key: 1e6 * draws.integers(1, 99, ROUNDS) for key in BYTES}
        self.bytes["comm/bytes_sets"][1:] = np.nan

    def write(self, folder, method, seed):
        folder.mkdir(parents=True)
        columns = {**self.table, **self.bytes}
        columns |= {f"global/acc_class/{name}": self.by_class[:, c] for c, name in enumerate(CLASSES)}
        rows = [[t, *("" if np.isnan(v[t]) else v[t] for v in columns.values())] for t in range(ROUNDS)]
        write_table(folder / "metrics.csv", ["round", *columns], rows)
        rows = [[t, i, *(v[t, i] for v in self.clients.values())] for t in range(ROUNDS) for i in range(2)]
        write_table(folder / "clients.csv", ["round", "client", *CLIENTS], rows)
        rows = [[i, *row] for i, row in enumerate(self.partition)]
        write_table(folder / "partition.csv", ["client", *CLASSES], rows)
        (folder / "config.yaml").write_text(yaml.safe_dump(settings(method, seed)), encoding="utf-8")


RUNS = {method: [Values(10 * m + seed) for seed in SEEDS] for m, method in enumerate(METHODS)}


@pytest.fixture(scope="module")
def groups(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    for method, runs in RUNS.items():
        for seed, values in zip(SEEDS, runs, strict=True):
            values.write(folder / method / str(seed), method, seed)
    return grouped(map(read_run, find_runs([folder])))


@pytest.fixture(scope="module")
def page(groups, tmp_path_factory):
    return write_report(groups, tmp_path_factory.mktemp("out")).read_text("utf-8")


def mean_over_seeds(method, value):
    return sum(value(run) for run in RUNS[method]) / len(SEEDS)


def change_of(before, after, scale):
    def change(run):
        return run.clients[after][-1].mean() - run.clients[before][-1].mean()

    return [f"{scale * mean_over_seeds(m, change):+.3g}" for m in METHODS]


def classes_at_the_end(method):
    means = sum(run.by_class for run in RUNS[method]) / len(SEEDS)
    return CLASSES[means[-1].argmin()], 100 * means[-1].min()


def forgotten_most(method):
    """The best accuracy before the last round, or in it, minus the last, mean over the seeds."""
    lost = sum(run.by_class.max(0) - run.by_class[-1] for run in RUNS[method])
    return CLASSES[lost.argmax()]


EXPECTED = {
    "After each round, mean and one standard deviation over the seeds.": [],
    "loss_before and loss_after": change_of("loss_before", "loss_after", 1),
    "acc_own_before and acc_own": change_of("acc_own_before", "acc_own", 100),
    "Over the bytes moved in both directions, mean and one standard deviation over the seeds.": [],
    "Best accuracy over the rounds": [],
    **{
        f"Accuracy of the global model on each class after each round: {m}": ["2", f"{classes_at_the_end(m)[1]:.1f}"]
        for m in METHODS
    },
    **{
        f"Training samples of each class at each client: {m}, seed {seed}": [
            str(seed),
            *(str(f((run.partition > 0).sum(1))) for f in (min, max)),
            str(len(CLASSES)),
            *(str(f(run.partition.sum(1))) for f in (min, max)),
        ]
        for m in METHODS
        for seed, run in zip(SEEDS, RUNS[m], strict=True)
    },
}
"""The numbers of each caption, by its beginning."""


def test_every_caption_has_its_numbers(page):
    left = dict(EXPECTED)
    for caption in captions(page):
        (beginning,) = [text for text in EXPECTED if caption.startswith(text)]
        assert NUMBER.findall(caption) == EXPECTED[beginning], caption
        left.pop(beginning, None)
    # A report draws a few partitions only.
    assert all(text.startswith("Training samples") for text in left)


def test_every_class_that_a_caption_names_is_the_right_one(page):
    text = " ".join(captions(page))
    worst = "; ".join(f"{method} {forgotten_most(method)}" for method in METHODS)
    assert f"The class that is forgotten most: {worst}." in text
    for method in METHODS:
        name, value = classes_at_the_end(method)
        assert f"{method}, mean over 2 seeds. Lowest at the end: class {name}, {value:.1f} %." in text


@pytest.mark.parametrize(("key", "scale"), [("global/acc", 100), ("global/loss", 1), ("train/ce", 1)])
def test_every_curve_is_the_mean_of_its_runs(page, key, scale):
    wanted = {method: scale * mean_over_seeds(method, lambda run: run.table[key]) for method in METHODS}
    x = list(range(ROUNDS))
    found = []
    for lines in curves(page):
        is_it = all(lines[method][0] == x for method in METHODS)
        found.append(is_it and all(lines[m][1] == pytest.approx(wanted[m], rel=1e-5) for m in METHODS))
    assert found.count(True) == 1


def test_the_bytes_of_a_report_are_sums_and_means_in_megabytes(groups, page):
    shown = rows(page)
    for group in groups:
        runs = RUNS[group.label]
        down, up = (np.mean([run.bytes[key].mean() for run in runs]) / 1e6 for key in BYTES[:2])
        sets = np.mean([run.bytes[BYTES[2]][0] for run in runs]) / 1e6
        total = ROUNDS * (down + up) + sets
        assert list(costs_of_group(group).values()) == pytest.approx([down, up, sets, total])
        assert [group.label, *(f"{value:.4g}" for value in (down, up, sets, total))] in shown


def test_a_curve_over_bytes_lies_at_the_sums_of_the_bytes_until_then(groups):
    for group in groups:
        runs = RUNS[group.label]
        moved = [np.nansum([run.bytes[key] for key in BYTES], 0).cumsum() for run in runs]
        band = band_over_bytes(group, "global/acc", "share")
        assert band.x == pytest.approx(list(np.mean(moved, 0) / 1e6))
        assert band.values.ravel() == pytest.approx(100 * np.stack([run.table["global/acc"] for run in runs]).ravel())
