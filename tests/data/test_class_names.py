"""Class names and names of owners are one function each, wherever they are written."""

import csv

import pytest
import torch
from jsonargparse import ArgumentParser
from torchmetrics.classification import MulticlassAccuracy

from fl_lightning import FederatedDataModule, FederatedLoop
from fl_lightning.__main__ import main
from fl_lightning.callbacks import ClasswiseReport, RunPlots
from fl_lightning.data import TensorSource
from fl_lightning.engines.inspection import class_names
from fl_lightning.functional.classes import unique_names
from fl_lightning.methods import FedAvg
from fl_lightning.monitors import ClientTable, GroupMetrics
from fl_lightning.nets import Perceptron
from fl_lightning.runs.round_table import RoundTable
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


def owners_of(folder, **settings):
    """Train two owners, of whom every table speaks, for a round."""
    train = torch.utils.data.TensorDataset(X, Y)
    train.who = ["Bonn", "Aachen"] * 12
    data = FederatedDataModule.from_datasets(train, train, by="who", **settings)
    groups = GroupMetrics({"west": ["Aachen"], "both": [1, "Aachen"]}, MulticlassAccuracy(3), dirpath=folder)
    table = ClientTable(dirpath=folder)
    fit(FedAvg(net=Perceptron, optimizer=sgd()), 1, data, callbacks=[groups, table, RunPlots(folder, format="none")])
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
