import csv

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.loggers import CSVLogger
from sklearn.metrics import precision_recall_fscore_support
from torch.utils.data import DataLoader, TensorDataset

from fl_lightning import FederatedDataModule, FederatedLoop
from fl_lightning.callbacks import ClasswiseReport
from fl_lightning.data import DatasetSource, TensorSource
from fl_lightning.functional.forgetting import forgetting, forgetting_per_class
from fl_lightning.methods import FedEXPAggregator
from fl_lightning.reports.terminal import print_classes
from tests.callbacks.toy import CLASSES, At, Regression, data, loop, trainer
from tests.toys import samples

pytestmark = pytest.mark.filterwarnings("ignore")


def rows(path):
    with (path / "classwise.csv").open(newline="") as file:
        return list(csv.reader(file))


def accuracies(federated):
    """The rounds that were evaluated, and A_c in them, (T, C)."""
    rounds, names, table = federated.recorder.history.columns("/acc_class/")
    assert names == CLASSES
    return rounds, table


def printed(text):
    """The cells of each class's line."""
    lines = text.splitlines()
    return {
        name: line.split(name, 1)[1].replace("%", "").split()
        for name in CLASSES
        for line in lines
        if line.lstrip().startswith(name)
    }


def test_csv_has_exactly_one_row_per_round(tmp_path):
    seen = []
    complete = At(2, lambda _: seen.append(rows(tmp_path)))
    runner = trainer([ClasswiseReport(), complete], tmp_path, rounds=4)
    federated = loop()
    runner.fit(federated, datamodule=data())
    header, *lines = rows(tmp_path)
    assert header == ["round", *CLASSES]
    assert [int(line[0]) for line in lines] == [0, 1, 2, 3]
    assert seen == [rows(tmp_path)[:4]]  # complete at any moment
    table = torch.tensor([[float(cell) for cell in line[1:]] for line in lines], dtype=torch.float64)
    assert torch.equal(table, accuracies(federated)[1])
    with (tmp_path / "metrics.csv").open(newline="") as file:
        logged = [float(row["global/acc_class/owl"]) for row in csv.DictReader(file)]
    assert logged == pytest.approx(table[:, 2].tolist())


def test_table_is_the_history_in_words(tmp_path, capsys):
    federated = loop()
    divided = data()
    runner = trainer([ClasswiseReport()], tmp_path, rounds=5)
    runner.fit(federated, datamodule=divided)
    out = capsys.readouterr().out
    table = accuracies(federated)[1]
    labels = divided.split("test").labels
    lost = forgetting_per_class(table)
    for c, cells in enumerate(printed(out).values()):
        numbers = (table[-1, c], table[:, c].max(), lost[c])
        percents = [f"{100 * v:.1f}" for v in numbers]
        assert [*cells[:2], *cells[4:]] == [str(int((labels == c).sum())), *percents]  # precision and F1 are between
    worst = int(table[-1].argmin())
    accuracy = runner.callback_metrics["global/acc"]
    assert f"accuracy {100 * accuracy:.1f} %   forgetting F {100 * forgetting(table):.1f} %" in out
    assert f"worst class {CLASSES[worst]}: {100 * table[-1, worst]:.1f} %" in out
    assert "after 5 rounds (test split)" in out


def test_precision_recall_and_f1_are_scikit_learns_of_the_last_model(tmp_path, capsys):
    federated = loop()
    divided = data()
    trainer([ClasswiseReport()], tmp_path, rounds=3).fit(federated, datamodule=divided)
    x, y = divided.split("test").all()
    with torch.no_grad():
        preds = federated.client.eval()(x).argmax(1)
    with (tmp_path / "classification.csv").open(newline="") as file:
        table = {row.pop("class"): row for row in csv.DictReader(file)}
    out = capsys.readouterr().out
    for name, average in ((None, None), ("macro", "macro"), ("weighted", "weighted")):
        values = precision_recall_fscore_support(y, preds, average=average, zero_division=0)[:3]
        for key, expected in zip(("precision", "recall", "F1"), values, strict=True):
            got = [float(table[row][key]) for row in ([name] if name else CLASSES)]
            assert got == pytest.approx(np.atleast_1d(expected).tolist())
            assert name is None or f"{key} {100 * float(expected):.1f} %" in out.partition(f"{name}: ")[2]
    assert [int(table[name]["samples"]) for name in (*CLASSES, "macro")] == [*torch.bincount(y).tolist(), len(y)]


def classification(folder):
    with (folder / "classification.csv").open(newline="") as file:
        return {row.pop("class"): row for row in csv.DictReader(file)}


@pytest.mark.parametrize(("rounds", "every"), [(5, 2), (3, 3), (4, 3), (2, 1)])
@pytest.mark.parametrize("rule", [None, FedEXPAggregator])
def test_the_table_is_of_one_model_whichever_rounds_are_evaluated(rounds, every, rule, tmp_path, capsys):
    """Accuracy, precision, recall, F1 and the title are those of the last model, as `test` finds it in last.ckpt."""
    federated = loop(aggregator=rule and rule())
    runner = trainer([ClasswiseReport()], tmp_path, rounds=rounds, check_val_every_n_epoch=every)
    runner.fit(federated, datamodule=data())
    out = capsys.readouterr().out
    table = classification(tmp_path)
    assert f"after {rounds} rounds (test split)" in out
    assert {row["round"] for row in table.values()} == {str(rounds - 1)}
    for name, cells in printed(out).items():
        assert cells[1] == f"{100 * float(table[name]['recall']):.1f}"  # the accuracy of a class is its recall
    fresh = loop(aggregator=rule and rule())
    tested = trainer([ClasswiseReport()], rounds=0)
    tested.test(fresh, datamodule=data(), ckpt_path=tmp_path / "last.ckpt", verbose=False)
    again = capsys.readouterr().out
    assert f"after {rounds} rounds (test split)" in again
    assert [cells[:4] for cells in printed(again).values()] == [cells[:4] for cells in printed(out).values()]
    assert f"accuracy {100 * tested.callback_metrics['test/acc']:.1f} %" in out


class TwoLoaders(pl.LightningDataModule):
    """Two validation loaders of unequal sizes."""

    def loader(self, size, seed):
        x, y = samples(size, seed)
        return DataLoader(TensorDataset(x, y), batch_size=10)

    def train_dataloader(self):
        return self.loader(60, 0)

    def val_dataloader(self):
        return [self.loader(30, 1), self.loader(45, 2)]

    def test_dataloader(self):
        return self.loader(20, 3)


@pytest.mark.parametrize("limits", [{}, {"limit_val_batches": 2}])
def test_with_several_validation_loaders_the_row_and_the_tables_are_of_the_same_samples(limits, tmp_path, capsys):
    federated = loop()
    divided = FederatedDataModule.from_datamodule(TwoLoaders(), num_clients=3, num_classes=3, eval_batch_size=10)
    runner = trainer([ClasswiseReport()], tmp_path, **limits)
    runner.fit(federated, datamodule=divided)
    out = capsys.readouterr().out
    (key,) = [key for key in federated.round_metrics if key.endswith("/acc")]
    assert f"accuracy {100 * federated.round_metrics[key]:.1f} %" in out
    table = classification(tmp_path)
    assert float(table["weighted"]["recall"]) == pytest.approx(federated.round_metrics[key], abs=1e-6)
    assert int(table["macro"]["samples"]) == (40 if limits else 75)
    assert "after 3 rounds (val and val/dataloader_idx_1 splits)" in " ".join(out.split())
    runner.test(federated, datamodule=divided, verbose=False)
    assert "after 3 rounds (test split)" in capsys.readouterr().out


def test_best_and_forgetting_are_told_of_the_samples_of_the_fit_only(tmp_path, capsys):
    federated = loop()
    runner = trainer([ClasswiseReport()], tmp_path)
    runner.fit(federated, datamodule=data())
    capsys.readouterr()
    x, y = samples(50)
    fewer = FederatedDataModule(TensorSource((x, y), (x[:20], y[:20])), num_clients=4)
    fewer.source.class_names = data().source.class_names
    for ckpt_path in (None, tmp_path / "last.ckpt"):
        told = []
        for tested, limits in ((data(), {}), (fewer, {}), (data(eval_batch_size=5), {"limit_test_batches": 2})):
            fresh = federated if ckpt_path is None else loop()
            fresh.identity.allow(["data"])
            run = trainer([ClasswiseReport()], **limits)
            run.test(fresh, datamodule=tested, ckpt_path=ckpt_path, verbose=False)
            told.append("forgetting" in capsys.readouterr().out)
        assert told == [True, False, False]


class Drawing(TensorDataset):
    """Draws from the global generators as it is read, but gives the same samples."""

    def __getitem__(self, index):
        torch.rand(1)
        np.random.rand()
        return super().__getitem__(index)


def with_test(kind, x, y):
    """Data with these test samples: tensors, or a dataset that is read sample by sample."""
    changed = data()
    train = changed.source.train
    if kind == "datasets":
        changed.source = DatasetSource(TensorDataset(*train), Drawing(x, y), num_classes=3)
    else:
        changed.source = TensorSource(train, (x, y), num_classes=3)
    return changed


def other_samples():
    """Return test samples with as many of each class as the first ones, all except a copy other ones."""
    x, y = data().source.test
    moved = x.clone()
    moved[7] += 1e-3
    order = torch.arange(len(y)).flip(0)
    return {
        "same": (x, y),
        "a copy": (x.clone(), y.clone()),
        "one moved": (moved, y),
        "reversed": (x[order], y[order]),
        "other labels": (x, y[order]),
    }


@pytest.mark.parametrize("kind", ["tensors", "datasets"])
def test_other_samples_with_equal_class_counts_are_told_apart(kind, tmp_path, capsys):
    trainer([ClasswiseReport()], tmp_path).fit(loop(), datamodule=with_test(kind, *data().source.test))
    capsys.readouterr()
    for name, (x, y) in other_samples().items():
        fresh = loop()
        fresh.identity.allow(["data"])
        run = trainer([ClasswiseReport()])
        run.test(fresh, datamodule=with_test(kind, x, y), ckpt_path=tmp_path / "last.ckpt", verbose=False)
        assert ("forgetting" in capsys.readouterr().out) == (name in ("same", "a copy")), name


def test_resume_keeps_the_whole_history(tmp_path):
    whole = loop()
    resumed = loop()
    trainer([ClasswiseReport()], tmp_path / "whole", rounds=5).fit(whole, datamodule=data())
    first = tmp_path / "part"
    trainer([ClasswiseReport()], first, rounds=3).fit(loop(), datamodule=data())
    with (first / "classwise.csv").open("a") as file:
        file.write("3,0,0,0\r\n")  # a round that the checkpoint does not know
    runner = trainer([ClasswiseReport()], first, rounds=5)
    runner.fit(resumed, datamodule=data(), ckpt_path=first / "last.ckpt")
    assert accuracies(resumed)[0] == [0, 1, 2, 3, 4]
    assert torch.equal(accuracies(resumed)[1], accuracies(whole)[1])
    assert rows(first) == rows(tmp_path / "whole")


def test_checkpoint_from_within_the_end_of_a_round(tmp_path):
    """Taken after the round's validation: the round is neither lost nor doubled."""
    path = tmp_path / "mid.ckpt"
    trainer([ClasswiseReport(), At(1, lambda t: t.save_checkpoint(path))]).fit(loop(), datamodule=data())
    resumed = loop()
    trainer([ClasswiseReport(tmp_path)], rounds=4).fit(resumed, datamodule=data(), ckpt_path=path)
    assert accuracies(resumed)[0] == [1, 2, 3]  # no csv had the first row
    assert [line[0] for line in rows(tmp_path)[1:]] == ["1", "2", "3"]


def test_without_metrics_csv_the_report_reads_its_own(tmp_path):
    runner = trainer([ClasswiseReport(tmp_path), At(1, lambda t: t.save_checkpoint(tmp_path / "at.ckpt"))])
    runner.fit(loop(), datamodule=data())
    before = rows(tmp_path)
    resumed = loop()
    again = trainer([ClasswiseReport(tmp_path)])
    again.fit(resumed, datamodule=data(), ckpt_path=tmp_path / "at.ckpt")
    assert accuracies(resumed)[0] == [0, 1, 2]
    assert rows(tmp_path) == before


def test_second_fit_from_scratch_starts_a_new_history(tmp_path):
    report = ClasswiseReport(tmp_path)
    federated = loop()
    trainer([report], rounds=3).fit(federated, datamodule=data())
    trainer([report], rounds=2).fit(federated, datamodule=data())
    assert accuracies(federated)[0] == [0, 1]
    assert [line[0] for line in rows(tmp_path)[1:]] == ["0", "1"]


@pytest.mark.parametrize("verb", ["validate", "test"])
def test_evaluation_of_a_checkpoint_prints_and_writes_nothing(tmp_path, capsys, verb):
    trainer([ClasswiseReport()], tmp_path / "fit").fit(loop(), datamodule=data())
    after_fit = printed(capsys.readouterr().out)
    runner = trainer([ClasswiseReport()], tmp_path / "after")
    getattr(runner, verb)(loop(), datamodule=data(), ckpt_path=tmp_path / "fit" / "last.ckpt", verbose=False)
    out = capsys.readouterr().out
    assert printed(out) == after_fit
    assert all(len(cells) == 6 for cells in after_fit.values())
    assert "after 3 rounds" in out
    assert not (tmp_path / "after" / "classwise.csv").exists()


def test_evaluation_without_a_checkpoint_knows_no_forgetting(capsys):
    trainer([ClasswiseReport()]).validate(loop(), datamodule=data(), verbose=False)
    out = capsys.readouterr().out
    assert all(len(cells) == 4 for cells in printed(out).values())
    assert len(printed(out)) == 3
    assert "orgetting" not in out


def test_held_back_split_is_not_compared_with_the_test_split(tmp_path, capsys):
    runner = trainer([ClasswiseReport()], tmp_path)
    federated = loop()
    held = data(val_fraction=0.2)
    runner.fit(federated, datamodule=held)
    out = capsys.readouterr().out
    assert "(val split)" in out
    assert sum(int(cells[0]) for cells in printed(out).values()) == 20
    runner.test(federated, datamodule=held, verbose=False)
    out = capsys.readouterr().out
    assert "(test split)" in out
    assert "orgetting" not in out
    assert sum(int(cells[0]) for cells in printed(out).values()) == 50


def test_limited_evaluation_counts_what_it_saw(capsys):
    runner = trainer([ClasswiseReport()], limit_val_batches=2)
    runner.fit(loop(), datamodule=data(eval_batch_size=10))
    assert sum(int(cells[0]) for cells in printed(capsys.readouterr().out).values()) == 20


def test_module_client_prints_its_last_values(tmp_path, capsys):
    federated = FederatedLoop(client=Regression(), seed=0)
    runner = trainer([ClasswiseReport()], tmp_path)
    runner.fit(federated, datamodule=data(classes=False))
    out = capsys.readouterr().out
    assert "val_loss" in out
    assert "mse" in out
    assert not (tmp_path / "classwise.csv").exists()
    runner.test(federated, datamodule=data(classes=False), verbose=False)
    assert "val_loss" in capsys.readouterr().out


def test_no_validation_no_failure(tmp_path, capsys):
    trainer([ClasswiseReport()], tmp_path, limit_val_batches=0).fit(loop(), datamodule=data())
    assert "train/ce" in capsys.readouterr().out


@pytest.mark.parametrize("settings", [{}, {"fast_dev_run": True}])
def test_without_a_folder_nothing_is_written(tmp_path, monkeypatch, settings):
    monkeypatch.chdir(tmp_path)
    trainer([ClasswiseReport()], **settings).fit(loop(), datamodule=data())
    assert not list(tmp_path.rglob("*.csv"))


def test_dirpath_beats_the_logger(tmp_path):
    logger = CSVLogger(tmp_path / "logs")
    trainer([ClasswiseReport(tmp_path / "mine")], logger=logger).fit(loop(), datamodule=data())
    assert len(rows(tmp_path / "mine")) == 4
    assert not list((tmp_path / "logs").rglob("classwise.csv"))


def test_other_ranks_print_and_write_nothing(tmp_path, capsys, monkeypatch):
    report = ClasswiseReport(tmp_path)
    federated = loop()
    runner = trainer([report])
    runner.fit(federated, datamodule=data())
    for path in tmp_path.iterdir():
        path.unlink()
    capsys.readouterr()
    monkeypatch.setattr(type(runner), "is_global_zero", False)
    report.on_train_start(runner, federated)
    report.on_fit_end(runner, federated)
    assert capsys.readouterr().out == ""
    assert not list(tmp_path.iterdir())


def test_class_without_samples_and_many_classes(capsys):
    accuracy = torch.linspace(0.5, 1, 60, dtype=torch.float64)
    accuracy[7] = torch.nan
    samples = torch.full((60,), 2)
    samples[7] = 0
    names = [f"c{c}" for c in range(60)]
    print_classes("Title", names, samples, accuracy, accuracy.clone(), {}, max_rows=5)
    out = capsys.readouterr().out
    assert "worst class c0: 50.0 %" in out
    assert "forgetting F 0.0 %" in out
    assert "5 of 60 classes" in out
    assert f"accuracy {100 * accuracy.nanmean():.1f} %" in out
    print_classes("Title", names, samples, accuracy, None, {}, max_rows=60)
    line = next(line for line in capsys.readouterr().out.splitlines() if line.strip().startswith("c7 "))
    assert line.split() == ["c7", "0", "-"]


def test_max_rows_is_checked():
    with pytest.raises(ValueError, match="max_rows must be at least 1, got 0"):
        ClasswiseReport(max_rows=0)
