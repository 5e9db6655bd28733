"""Which settings a run is known by."""

from functools import partial
from pathlib import Path

import pytest
import torch
from pytorch_lightning import LightningModule

from fl_lightning.data import DirichletPartition
from fl_lightning.federation.configured import flat
from fl_lightning.federation.described import described_optimizer, described_value
from fl_lightning.federation.differences import differences
from fl_lightning.federation.effects import is_fixed
from fl_lightning.federation.identity import RunIdentity
from fl_lightning.methods import FedNTD
from fl_lightning.nets import Perceptron

CONFIG = {
    "seed_everything": 0,
    "trainer": {"max_epochs": 3, "precision": "32-true", "devices": 1, "callbacks": [{"class_path": "a.B"}]},
    "model": {
        "client": {
            "class_path": "fl_lightning.methods.FedNTD",
            "init_args": {
                "beta": 1.0,
                "net": {"class_path": "fl_lightning.nets.Perceptron", "init_args": {"hidden": [64]}},
            },
        },
        "threads": 1,
        "transforms": [{"class_path": "fl_lightning.aggregation.NormClip", "init_args": {"max_norm": 1.0}}],
    },
    "data": {"source": {"class_path": "fl_lightning.data.CIFAR10", "init_args": {"root": "/data"}}, "num_clients": 10},
}


def changed(**values):
    """The configuration with other values, by names with `__` for dots."""
    new = {key: dict(value) if isinstance(value, dict) else value for key, value in CONFIG.items()}
    for name, value in values.items():
        *above, last = name.split("__")
        place = new
        for part in above:
            place[part] = dict(place[part])
            place = place[part]
        place[last] = value
    return new


@pytest.mark.parametrize(
    ("values", "names"),
    [
        ({"seed_everything": 1}, ["seed_everything"]),
        ({"trainer__precision": "64-true"}, ["trainer.precision"]),
        ({"model__client__init_args__beta": 0.5}, ["model.client.beta"]),
        ({"model__client__class_path": "fl_lightning.methods.FedED"}, ["model.client"]),
        ({"data__num_clients": 20}, ["data.num_clients"]),
        ({"model__transforms": [{"class_path": "fl_lightning.aggregation.NormClip", "init_args": {"max_norm": 2.0}}]},
         ["model.transforms.0.max_norm"]),
        ({"trainer__max_epochs": 9, "trainer__devices": 2, "trainer__callbacks": None, "model__threads": 4}, []),
        ({"data__source__init_args__root": "/elsewhere"}, []),
    ],
)  # fmt: skip
def test_what_counts_of_a_configuration(values, names):
    changed_settings = differences(flat(CONFIG), flat(changed(**values)))
    assert [one.name for one in changed_settings if is_fixed(one.name)] == names


def test_a_class_is_the_same_by_whatever_path_it_is_named():
    longer = changed(model__client__class_path="fl_lightning.methods.fedntd.FedNTD")
    assert flat(CONFIG) == flat(longer)


def test_objects_tell_what_a_configuration_would():
    client = FedNTD(net=partial(Perceptron, hidden=[64]), beta=1.0)
    client.build(10, (64,))
    told = described_value("model.client", client)
    assert told["model.client"] == flat(CONFIG)["model.client"]
    assert told["model.client.beta"] == 1.0
    assert told["model.client.net"] == flat(CONFIG)["model.client.net"]
    assert described_value("data.partition", DirichletPartition(alpha=0.3))["data.partition.alpha"] == 0.3


def test_hyper_parameters_that_a_module_saved_are_its_own():
    class Mine(LightningModule):
        def __init__(self, width=3, folder="/tmp", net=None):
            super().__init__()
            self.save_hyperparameters(ignore=["net"])

    assert described_value("m", Mine(width=5))["m.width"] == 5
    assert described_value("m", Mine())["m.folder"] == "/tmp"


@pytest.mark.parametrize("factory", [partial(torch.optim.SGD, lr=0.1), lambda params: torch.optim.SGD(params, lr=0.1)])
def test_optimizer_factories_are_known_by_what_they_make(factory):
    same = described_optimizer("o", partial(torch.optim.SGD, lr=0.1, momentum=0))
    assert described_optimizer("o", factory) == same
    other = described_optimizer("o", partial(torch.optim.SGD, lr=0.1, momentum=0.9))
    assert [str(one) for one in differences(same, other)] == ["o.momentum was 0, is 0.9"]


def test_long_values_are_kept_short_and_still_compared():
    a = described_value("x", list(range(1000)))
    b = described_value("x", [*range(999), 0])
    assert len(a["x"]) < 100
    assert len(differences(a, b)) == 1
    assert described_value("path", Path("/x")) == {"path": "/x"}


def test_a_change_is_refused_by_name_unless_it_is_allowed():
    before = RunIdentity()
    after = RunIdentity()
    before.configure(CONFIG)
    after.configure(changed(model__client__init_args__beta=0.5, data__num_clients=20))
    with pytest.raises(ValueError, match=r"data.num_clients was 10, is 20; model.client.beta was 1.0, is 0.5; give"):
        after.compare(before.state_dict(), evaluates=False)
    after.compare(before.state_dict(), evaluates=True)
    assert after.changed == []
    after.configure(changed(model__client__init_args__beta=0.5))
    after.allow(["model.client.init_args.beta"])
    after.compare(before.state_dict(), evaluates=False)
    assert [one.name for one in after.changed] == ["model.client.beta"]


def test_what_is_unset_on_both_sides_is_no_difference():
    """What it stands for follows from the client or `data.by`, which are compared themselves."""
    unset = {"model.server_module": None, "data.partition": None}
    was = {**unset, "model.client": "fl_lightning.client.module.ClientModule", "data.by": None}
    now = {**unset, "model.client": "fl_lightning.methods.scaffold.SCAFFOLD", "data.by": "user"}
    assert sorted(difference.name for difference in differences(was, now)) == ["data.by", "model.client"]
