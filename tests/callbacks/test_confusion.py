"""The confusion matrix of the last and of the best round: counted in the evaluation, kept, written, drawn and shown."""

import csv

import numpy as np
import pytest
import torch
from torchmetrics.functional.classification import multiclass_confusion_matrix

from fl_lightning.callbacks import ClasswiseReport, RunPlots
from fl_lightning.functional.accuracy import answers_and_samples, class_counts, confusion_counts
from fl_lightning.metrics import ClassifierScores
from fl_lightning.reports.figures import plot_confusion
from fl_lightning.reports.report import write_report
from fl_lightning.reports.saved import Group, read_run
from fl_lightning.runs.confusion import read_matrices, write_confusion
from fl_lightning.utils.round_table import read_cells
from tests.callbacks.toy import CLASSES, At, data, loop, trainer

pytestmark = pytest.mark.filterwarnings("ignore")


def predicted_and_labels(federated, divided):
    """The answers of the evaluated model on the test split, and the labels."""
    with torch.no_grad(), federated.evaluation.evaluated_entries():
        x, y = next(iter(divided.split("test").batches([torch.arange(len(divided.split("test")))], generator=None)))
        return federated.client(x).argmax(1), y


def test_the_counts_are_those_of_torchmetrics_and_hold_the_class_counts():
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(60, 4, generator=generator)
    target = torch.randint(0, 4, (60,), generator=generator)
    counts = confusion_counts(scores, target, 4)
    assert torch.equal(counts[:, :4].long(), multiclass_confusion_matrix(scores, target, 4))
    assert not counts[:, 4].any()
    assert torch.equal(answers_and_samples(counts), class_counts(scores, target, 4))
    # More outputs than classes: such an answer is in no row but its own.
    fewer = target % 3
    counts = confusion_counts(scores, fewer, 3)
    assert torch.equal(counts[:, 3].long(), torch.bincount(fewer[scores.argmax(1) == 3], minlength=3))
    assert torch.equal(answers_and_samples(counts), class_counts(scores, fewer, 3))
    # Answers below 0 are none of the classes, too.
    answers = torch.tensor([-1, 0, -2, 1])
    target = torch.tensor([0, 0, 1, 1])
    counts = confusion_counts(answers, target, 2)
    assert counts.tolist() == [[1.0, 0.0, 1.0], [0.0, 1.0, 1.0]]
    assert torch.equal(answers_and_samples(counts), class_counts(answers, target, 2))
    for wrong in (-1, 4):
        with pytest.raises(IndexError):
            confusion_counts(scores[:1], torch.tensor([wrong]), 4)


def test_scores_are_the_same_bits_with_and_without_it():
    generator = torch.Generator().manual_seed(1)
    plain, counting = ClassifierScores(4), ClassifierScores(4, confusion=True)
    for _ in range(3):
        logits = torch.randn(20, 4, generator=generator)
        target = torch.randint(0, 4, (20,), generator=generator)
        plain.update(logits, target)
        counting.update(logits, target)
    assert torch.equal(plain.compute(), counting.compute())
    assert torch.equal(plain.class_samples, counting.class_samples)
    assert plain.confusion is None
    assert counting.confusion.sum() == 60


def test_the_last_and_the_best_round_are_kept_and_written(tmp_path):
    by_round = []
    divided = data()
    federated = loop()

    def watch(_):
        answers, labels = predicted_and_labels(federated, divided)
        by_round.append(multiclass_confusion_matrix(answers, labels, len(CLASSES)))

    watchers = [At(round_idx, watch) for round_idx in range(5)]
    trainer([ClasswiseReport(), *watchers], tmp_path, rounds=5).fit(federated, datamodule=divided)
    accuracies = [int(matrix.trace()) for matrix in by_round]
    best = accuracies.index(max(accuracies))
    names, matrices = read_matrices(read_cells(tmp_path / "confusion.csv"))
    assert names == CLASSES
    for model, round_idx in (("last", 4), ("best", best)):
        written_round, counts = matrices[model]
        assert written_round == round_idx
        assert torch.equal(counts[:, :-1], by_round[round_idx])


def test_a_continued_run_knows_its_best_round_of_before(tmp_path):
    whole = loop()
    trainer([ClasswiseReport()], tmp_path / "whole", rounds=4).fit(whole, datamodule=data())
    trainer([ClasswiseReport()], tmp_path / "half", rounds=2).fit(loop(), datamodule=data())
    resumed = loop()
    again = trainer([ClasswiseReport()], tmp_path / "rest", rounds=4)
    again.fit(resumed, datamodule=data(), ckpt_path=tmp_path / "half/last.ckpt")
    assert resumed.recorder.confusions.keys() == whole.recorder.confusions.keys()
    for model, of_round in whole.recorder.confusions.items():
        assert resumed.recorder.confusions[model].round_idx == of_round.round_idx
        assert torch.equal(resumed.recorder.confusions[model].counts, of_round.counts)
    assert (tmp_path / "rest/confusion.csv").read_bytes() == (tmp_path / "whole/confusion.csv").read_bytes()


def test_many_classes_have_no_matrix(tmp_path, monkeypatch):
    monkeypatch.setattr("fl_lightning.federation.evaluation.MOST_CLASSES", len(CLASSES) - 1)
    federated = loop()
    trainer([ClasswiseReport(), RunPlots()], tmp_path, rounds=2).fit(federated, datamodule=data())
    assert federated.recorder.confusions == {}
    assert not list(tmp_path.glob("confusion.*"))


def test_the_file_says_answers_that_are_no_class(tmp_path):
    counts = torch.tensor([[3, 1, 0], [0, 2, 2]])
    write_confusion(tmp_path / "confusion.csv", {"last": (4, counts), "best": (2, counts.flip(0))}, ["a", ""])
    with (tmp_path / "confusion.csv").open(newline="", encoding="utf-8") as file:
        lines = list(csv.reader(file))
    assert lines[0] == ["model", "round", "class", "predicted", "samples"]
    write_confusion(tmp_path / "confusion.csv", {"last": (4, counts), "best": (2, counts)}, ["a", "b"])
    names, matrices = read_matrices(read_cells(tmp_path / "confusion.csv"))
    assert names == ["a", "b"]
    assert matrices["best"][0] == 2
    assert torch.equal(matrices["last"][1], counts)
    # Names that a spreadsheet would run are marked in the file.
    write_confusion(tmp_path / "confusion.csv", {"last": (4, counts)}, ["=1+1", "@b"])
    names, matrices = read_matrices(read_cells(tmp_path / "confusion.csv"))
    assert names == ["=1+1", "@b"]
    assert torch.equal(matrices["last"][1], counts)


def test_the_picture_has_shares_of_the_class():
    table = np.array([[3, 1, 0], [0, 2, 2]])
    figure = plot_confusion({"best round": table, "last round": table[:, :2]}, ["a", "b"])
    left, right, _ = figure.axes
    assert left.images[0].get_array().tolist() == [[75, 25, 0], [0, 50, 50]]
    assert [text.get_text() for text in left.get_xticklabels()] == ["a", "b", "none"]
    assert right.images[0].get_array().tolist() == [[75, 25], [0, 100]]
    with pytest.raises(ValueError, match=r"one name per class \(2\), got 3"):
        plot_confusion({"": table}, ["a", "b", "c"])


def test_the_page_shows_sums_over_the_seeds_and_leaves_a_stale_file_out(tmp_path):
    for seed in (0, 1):
        folder = tmp_path / f"runs/{seed}"
        trainer([ClasswiseReport(folder)], folder, rounds=2).fit(loop(local_epochs=1 + seed), datamodule=data())
    runs = [read_run(tmp_path / f"runs/{seed}") for seed in (0, 1)]
    group = Group("FedAvg", runs)
    page = write_report([group], tmp_path).read_text("utf-8")
    assert "summed over 2 seeds. The largest at the end:" in page
    for run in runs:
        path = run.folder / "confusion.csv"
        path.write_text(path.read_text().replace("last,1,", "last,0,"))
    assert "The largest at the end:" not in write_report([group], tmp_path).read_text("utf-8")
