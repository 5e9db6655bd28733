"""What has a new name is refused under the old one, with the new one in the sentence."""

import copy
import inspect

import pytest
import yaml
from pytorch_lightning.demos.boring_classes import BoringDataModule

import fl_lightning.data
from fl_lightning import Aggregator, ClientModule, FederatedDataModule, methods
from fl_lightning.aggregation import GatheringAggregator, ServerModule
from fl_lightning.data import DatasetSource, Digits, Partition
from fl_lightning.methods import FedCL, FedKA, FedProx, KnFu
from fl_lightning.utils.renamed import HOOKS, RENAMED, new_name, refuse_renamed
from tests.commands import EXPERIMENT, refusal

MAKERS = {
    "FedKA": FedKA,
    "FedCL": FedCL,
    "FederatedDataModule": lambda **old: FederatedDataModule(Digits(), **old),
    "DatasetSource": lambda **old: DatasetSource([(0.0, 0)], **old),
}
ARGUMENTS = [(name, old, new) for name, names in RENAMED.items() for old, new in names.items()]
BASES = {"ClientModule": ClientModule, "KnowledgeClient": KnFu, "Aggregator": Aggregator, "Partition": Partition}
MOVED = [(name, old, new) for name, names in HOOKS.items() for old, new in names.items()]


class Sub(FedKA):
    """Of a user's own."""


@pytest.mark.parametrize(("name", "old", "new"), ARGUMENTS)
def test_an_argument_is_refused_in_python(name, old, new):
    with pytest.raises(TypeError, match=f"^{name}: the argument '{old}' was renamed to '{new}'$"):
        MAKERS[name](**{old: None})


@pytest.mark.parametrize("make", ["from_datasets", "from_datamodule"])
def test_an_argument_is_refused_by_the_other_constructors(make):
    given = Digits() if make == "from_datasets" else BoringDataModule()
    with pytest.raises(TypeError, match="the argument 'sets' was renamed to 'extra_splits'"):
        getattr(FederatedDataModule, make)(given, sets={})


@pytest.mark.parametrize(("name", "old", "new"), ARGUMENTS)
@pytest.mark.parametrize("in_file", [False, True])
def test_an_option_is_refused_on_the_command_line_and_in_a_file(tmp_path, name, old, new, in_file):
    of_data, group = name == "FederatedDataModule", "data.source" if name == "DatasetSource" else "model.client"
    if in_file:
        kind = getattr(methods, name, None) or getattr(fl_lightning.data, name)
        part = {"class_path": f"{kind.__module__}.{name}", "init_args": {old: 1}}
        outer, inner = group.split(".")
        given = {"data": {old: {"proxy": 1}}} if of_data else {outer: {inner: part}}
        (tmp_path / "old.yaml").write_text(yaml.safe_dump(given))
        line = f"-c {tmp_path}/old.yaml"
    else:
        line = f"--data.{old} 1" if of_data else f"--{group} {name} --{group}.{old} 1"
    said = refusal(f"fit {EXPERIMENT} {line}", 2)
    prefix = "data." if of_data else ""
    assert said.endswith(f"the option '{prefix}{old}' was renamed to '{prefix}{new}'")


def test_other_arguments_and_other_classes_pass():
    refuse_renamed(FedKA, ["net", "optimizer"])
    refuse_renamed(FedProx, ["mu"])
    with pytest.raises(TypeError, match="unexpected keyword argument 'nosuch'"):
        FederatedDataModule(Digits(), nosuch=1)


def test_subclasses_inherit_the_renamed_arguments():
    assert new_name(Sub, "mu") == "max_anchors"
    with pytest.raises(TypeError, match="Sub: the argument 'mu'"):
        Sub(mu=3)


def test_the_constructor_keeps_its_signature():
    parameters = inspect.signature(FederatedDataModule).parameters
    assert list(parameters)[:2] == ["source", "num_clients"]
    assert "extra_splits" in parameters
    assert copy.copy(FederatedDataModule(Digits(), 3)).num_clients == 3


@pytest.mark.parametrize(("name", "old", "new"), MOVED)
def test_a_class_with_an_old_hook_is_refused(name, old, new):
    sentence = f"^Mine defines '{old}', in whose place there is now {new}"
    with pytest.raises(TypeError, match=sentence.replace("(", r"\(").replace(")", r"\)")):
        type("Mine", (BASES[name],), {old: lambda self: None})
    mixin = type("Mixin", (), {old: True})
    with pytest.raises(TypeError, match=f"Mine defines '{old}'"):
        type("Mine", (mixin, BASES[name]), {})


@pytest.mark.parametrize(("name", "old", "new"), MOVED)
def test_what_takes_the_place_of_an_old_hook_is_there(name, old, new):
    names = [word for word in new.replace(",", "").split() if word.isidentifier()]
    homes = (BASES[name], GatheringAggregator, ServerModule)
    assert any(hasattr(home, word) for word in [*names, new.rpartition(".")[2]] for home in homes)
    assert not hasattr(BASES[name], old)


def test_the_hooks_of_today_pass():
    type("Mine", (ServerModule,), {"broadcast": ServerModule.broadcast})
    type("Mine", (GatheringAggregator,), {"reduce": lambda self, updates: {}})
    type("Mine", (ClientModule,), {"nonfinite_hint": lambda self: "", "asks": None})
