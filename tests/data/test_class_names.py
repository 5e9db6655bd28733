"""Class names and names of owners are one function each, wherever they are written."""

import csv

import pytest
import torch
from jsonargparse import ArgumentParser
from torchmetrics.classification import MulticlassAccuracy

from fl_lightning import FaultPolicy, FederatedDataModule, FederatedLoop
from fl_lightning.__main__ import main
from fl_lightning.callbacks import ClasswiseReport, RunPlots, SkippedClients, plots
from fl_lightning.data import TensorSource
from fl_lightning.engines.inspection import class_names
from fl_lightning.functional.classes import unique_names
from fl_lightning.methods import FedAvg
from fl_lightning.monitors import ClientTable, GroupMetrics
from fl_lightning.nets import Perceptron
from fl_lightning.reports.figures import plot_bubbles, plot_sizes
from fl_lightning.reports.report import partitions_of
from fl_lightning.reports.saved import Group, read_run
from fl_lightning.utils.round_table import RoundTable
from tests.toys import fit, sgd, trainer

X = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
Y = torch.arange(24) % 3


def data_of(names, num_classes=3, **settings):
    source = TensorSource((X, Y), (X, Y), num_classes)
    source.class_names = names
    return FederatedDataModule(source, **{"num_clients": 2, **settings})


def header_of(path):
    with path.open(encoding="utf-8") as file:
        return next(csv.reader(file))


@pytest.mark.parametrize(
    ("names", "unique"),
    [
        (None, ["00", "01", "02"]),
        (("a", "b", "c"), ["a", "b", "c"]),
        (("a/b", "a-b", "c"), ["a-b (0)", "a-b (1)", "c"]),
        (("a", "a", "a (0)"), ["a (0) (0)", "a (1)", "a (0)"]),
        (("a",), ["a", "01", "02"]),
        (("a", "b", "c", "d"), ["a", "b", "c"]),
        ((), ["00", "01", "02"]),
        (("", " ", None), ["00", "01", "02"]),
        ((0, True, None), ["0", "True", "02"]),
        (("a\nb", "a b", "ä,ö"), ["a b (0)", "a b (1)", "ä,ö"]),
        (("01", "", "x"), ["01 (0)", "01 (1)", "x"]),
    ],
)
def test_every_place_has_the_same_unique_names(names, unique, tmp_path):
    data = data_of(names)
    loop = fit(
        FedAvg(net=Perceptron, optimizer=sgd()),
        1,
        data,
        metrics=MulticlassAccuracy(3, average=None),
        callbacks=[RunPlots(tmp_path, format="none"), ClasswiseReport(tmp_path)],
    )
    assert class_names(data) == unique == loop.evaluation.inspection.class_names
    part = "global/acc_class/"
    assert [key.removeprefix(part) for key in loop.round_metrics if key.startswith(part)] == unique
    part = "global/MulticlassAccuracy/"
    assert [key.removeprefix(part) for key in loop.round_metrics if key.startswith(part)] == unique
    assert header_of(tmp_path / "partition.csv") == ["client", *unique]
    assert header_of(tmp_path / "classwise.csv") == ["round", *unique]


def test_names_stay_apart():
    names = ["a/b", "a-b", "a-b (0)", "a-b (1)", "a/b"]
    assert len(set(unique_names(names, 9))) == 9
    assert unique_names(["a/b", "c"], None) == ["a-b", "c"]


def owners_of(folder, *, picture="none", more=(), faults="error", **settings):
    """Train two owners, of whom every table speaks, for a round."""
    train = torch.utils.data.TensorDataset(X, Y)
    train.who = ["Bonn", "Aachen"] * 12
    data = FederatedDataModule.from_datasets(train, train, by="who", **settings)
    groups = GroupMetrics({"west": ["Aachen"], "both": [1, "Aachen"]}, MulticlassAccuracy(3), dirpath=folder)
    table = ClientTable(dirpath=folder)
    fit(
        FedAvg(net=Perceptron, optimizer=sgd()),
        1,
        data,
        callbacks=[*more, groups, table, RunPlots(folder, format=picture)],
        faults=faults,
    )
    return data


def column_of(path, name):
    with path.open(encoding="utf-8") as file:
        return [row[name] for row in csv.DictReader(file)]


def test_owners_have_their_names_in_every_table(tmp_path):
    assert owners_of(tmp_path).client_names == ["Aachen", "Bonn"]
    assert column_of(tmp_path / "partition.csv", "client") == ["Aachen", "Bonn"]
    assert column_of(tmp_path / "clients.csv", "owner") == ["Aachen", "Bonn"]
    assert column_of(tmp_path / "groups.csv", "samples") == ["12.0", "24.0"]


@pytest.mark.parametrize("group", [["Essen"], [2], [-1], []])
def test_a_group_of_nobody_is_refused(group, tmp_path):
    train = torch.utils.data.TensorDataset(X, Y)
    train.who = ["Bonn", "Aachen"] * 12
    data = FederatedDataModule.from_datasets(train, train, by="who")
    groups = GroupMetrics({"west": group}, MulticlassAccuracy(3), dirpath=tmp_path)
    with pytest.raises(ValueError, match=r"must name some in \[0, 2\) or of Aachen, Bonn, got .* for 'west'"):
        fit(FedAvg(net=Perceptron, optimizer=sgd()), 1, data, callbacks=[groups])


def test_the_rows_of_an_earlier_version_stay(tmp_path):
    path = tmp_path / "clients.csv"
    path.write_text("round,client\n0,1\n1,1\n")
    RoundTable(path, ("round", "client", "owner")).begin(1)
    assert path.read_text() == "round,client,owner\n0,1,\n"


def test_a_run_is_continued_with_its_class_names(tmp_path):
    def run(names, rounds, **more):
        loop = FederatedLoop(FedAvg(net=Perceptron, optimizer=sgd()), seed=0)
        fitted = trainer(rounds, tmp_path)
        fitted.fit(loop, data_of(names), **more)
        fitted.save_checkpoint(tmp_path / "last.ckpt")

    run(None, 1)
    with pytest.raises(ValueError, match=r"a run is continued with the settings .*data.class_names"):
        run(("a", "b", "c"), 2, ckpt_path=tmp_path / "last.ckpt")
    run(None, 2, ckpt_path=tmp_path / "last.ckpt")


def test_the_command_writes_the_names_of_a_run(tmp_path):
    main(["partition", "-c", "experiment/digits_fedavg", "--output", str(tmp_path)])
    assert header_of(tmp_path / "partition.csv") == ["client", *(f"{label:02d}" for label in range(10))]


def test_names_of_owners_that_look_like_numbers_stay_names():
    """In YAML, too: the owner `007` is not client 7."""
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(GroupMetrics, "groups_of")
    given = parser.parse_string("groups_of: {groups: {west: ['007', 3, Aachen]}}")
    assert given.groups_of.groups == {"west": ["007", 3, "Aachen"]}


class Halves(MulticlassAccuracy):
    """Computes a vector that is not by class."""

    def compute(self):
        return super().compute()[:2]


def test_parts_of_a_vector_that_is_not_by_class_have_their_positions():
    """They are not named as classes, whose names would be wrong."""
    loop = fit(FedAvg(net=Perceptron, optimizer=sgd()), 1, data_of(None), metrics={"mine": Halves(3, average=None)})
    part = "global/mine/"
    assert [key.removeprefix(part) for key in loop.round_metrics if key.startswith(part)] == ["0", "1"]


def labels_of(figure) -> list[str]:
    """The names on the first axis of a picture of clients."""
    axes = next(axes for axes in figure.axes if axes.get_xlabel() == "client")
    return [label.get_text() for label in axes.get_xticklabels()]


@pytest.mark.parametrize("kind", ["callback", "report", "bubbles", "sizes"])
def test_pictures_of_clients_have_the_names_of_the_table(kind, tmp_path, monkeypatch):
    drawn = []
    names = ["Aachen", "Bonn"]
    if kind == "callback":
        monkeypatch.setattr(plots, "save", lambda figure, path: drawn.append(figure))
        owners_of(tmp_path, picture="png")
        drawn = [figure for figure in drawn if any(axes.get_xlabel() == "client" for axes in figure.axes)]
    elif kind == "report":
        owners_of(tmp_path)
        (tmp_path / "metrics.csv").write_text("round,global/acc\n0,0.5\n")
        drawn = [part.figure for part in partitions_of([Group("a", [read_run(tmp_path)])])]
    elif kind == "bubbles":
        drawn = [plot_bubbles([[1, 2], [3, 4]], ["a", "b"], client_names=names)]
    else:
        drawn = [plot_sizes([1, 2], client_names=names)]
    assert drawn
    assert all(labels_of(figure) == names for figure in drawn)


def test_a_client_that_is_left_out_has_the_name_of_its_owner(tmp_path):
    owners_of(tmp_path, more=[SkippedClients(tmp_path)], faults=FaultPolicy(nonfinite="skip", max_update_norm=1e-9))
    with (tmp_path / "skipped.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["client"], row["owner"]) for row in rows] == [("0", "Aachen"), ("1", "Bonn")]


@pytest.mark.parametrize("version", ["now", "0.2.0"])
def test_names_that_are_given_later_make_no_other_columns(version, tmp_path):
    """Where the change is allowed, and where the checkpoint of version 0.2.0 knows no names."""

    def run(names, rounds, path=None):
        loop = FederatedLoop(FedAvg(net=Perceptron, optimizer=sgd()), seed=0)
        loop.parts.identity.allow(["data.class_names"])
        report = ClasswiseReport(tmp_path)
        fitted = trainer(rounds, tmp_path, callbacks=[report])
        fitted.fit(loop, data_of(names), ckpt_path=path)
        fitted.save_checkpoint(tmp_path / "last.ckpt")
        return loop

    def keys_of(loop):
        return [key for key in loop.round_metrics if "/acc_class/" in key]

    first = keys_of(run(None, 1))
    if version == "0.2.0":
        content = torch.load(tmp_path / "last.ckpt", weights_only=False)
        federated = content["federated"]
        del federated["settings"]["objects"]["data.class_names"]
        assert federated["recorder"].pop("class_names") == ["00", "01", "02"]
        del content["digest"]
        torch.save(content, tmp_path / "last.ckpt")
    assert keys_of(run(("a", "b", "c"), 2, tmp_path / "last.ckpt")) == first
    assert header_of(tmp_path / "classwise.csv") == ["round", "00", "01", "02"]
