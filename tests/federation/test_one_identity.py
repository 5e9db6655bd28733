"""Which settings a run has: every setting has one record, and all settings of both sides are compared."""

import importlib
import inspect
import sys
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, IntEnum, StrEnum
from functools import partial
from itertools import count
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import get_args, get_origin, get_type_hints

import numpy as np
import pytest
import torch
from pytorch_lightning import LightningModule, Trainer
from torch import nn

from fl_lightning import FederatedLoop, methods
from fl_lightning.cli.parser_only import fit_parser
from fl_lightning.client import ClientModule
from fl_lightning.data import FEMNIST, MNIST, FederatedDataModule, ImageFolder, Source, TensorSource
from fl_lightning.experiments.composing import nested_names, option_names
from fl_lightning.federation.code import changed_code, digests_of_code, is_installed, kinds_within
from fl_lightning.federation.configured import flat
from fl_lightning.federation.described import MAX_DEPTH, described_value
from fl_lightning.federation.differences import EMPTY_IS_NONE, SPELLINGS, dataclass_of, default_of, differences
from fl_lightning.federation.effects import RECORDS, distinguishes, is_data, is_fixed, is_seed, record_of
from fl_lightning.federation.files import fingerprints
from fl_lightning.federation.fingerprint import MOST_HASHED, NUM_READ, digest_of_inputs
from fl_lightning.federation.horizon import Horizon
from fl_lightning.federation.identity import RunIdentity
from fl_lightning.methods import SCAFFOLD, FedAvg, FedCurv
from fl_lightning.utils.own_generators import generators_in


@dataclass
class Penalty:
    """A group of a user's settings."""

    l1: float = 0.0
    l2: float = 1.0


class Mine(LightningModule):
    """A user's module with arguments of all kinds."""

    def __init__(
        self,
        config: dict | None = None,
        widths: list[int] | None = None,
        gamma: float = 0.5,
        penalty: Penalty | None = None,
        folder: str = "/tmp",
    ) -> None:
        super().__init__()
        self.save_hyperparameters()


def config_of(**arguments):
    """A configuration that trains the user's module."""
    module = {"class_path": f"{__name__}.Mine", "init_args": arguments}
    client = {"class_path": "fl_lightning.client.ClientModule", "init_args": {"module": module}}
    return {"model": {"client": client}, "data": {"seed": 0}, "seed_everything": 0}


def names_of(was, now):
    return [difference.name.removeprefix("model.client.module.") for difference in differences(was, now)]


# --- one record a setting ---


DEFAULTS = fit_parser().parse_args(["fit"]).fit.as_dict()
OPTIONS = sorted({*nested_names(), *option_names(DEFAULTS)})
"""All options of a fit, by their dotted names."""


def test_every_record_is_of_a_setting_that_there_is():
    known = set(OPTIONS)
    above = {name.rpartition(".")[0] for name in known} | {name.partition(".")[0] for name in known}
    of_other_commands = {"return_predictions", "verbose"}
    of_chosen_classes = {name for name in RECORDS if name.startswith("data.scenario.")}
    assert set(RECORDS) - known - above - of_other_commands - of_chosen_classes == set()


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_answers_all_questions_alike(name):
    record = record_of(name)
    assert is_fixed(name) == (record.affects in ("data", "values"))
    assert is_data(name) == (record.affects == "data")
    assert is_seed(name) == record.is_seed
    assert distinguishes(name) or not is_fixed(name)
    assert record_of(f"{name}.something.below") == record


def test_what_nobody_knows_affects_values():
    for name in ("model.client.module.path", "model.aggregator.root", "model.something_new", "else"):
        assert record_of(name).affects == "values"


# --- both sides ---


@pytest.mark.parametrize(
    ("was", "now", "name"),
    [
        ({"config": {"a": 1}}, {"config": {"a": 1, "l2": 9.0}}, "config.l2"),
        ({"config": {"a": 1, "l2": 9.0}}, {"config": {"a": 1}}, "config.l2"),
        ({"config": {"a": {"b": 1}}}, {"config": {"a": {"b": 1, "c": 2}}}, "config.a.c"),
        ({"config": None}, {"config": {"a": 1}}, "config.a"),
        ({"widths": [8]}, {"widths": [8, 8]}, "widths"),
        ({"penalty": {"l1": 0.0}}, {"penalty": {"l1": 0.0, "l2": 2.0}}, "penalty.l2"),
        ({"penalty": None}, {"penalty": {"l1": 0.0, "l2": 1.0}}, "penalty.l1"),
        ({"penalty": {"l1": 0.0, "l2": 1.0}}, {"penalty": None}, "penalty.l1"),
        ({}, {"penalty": {"l1": 0.0, "l2": 1.0}}, "penalty.l1"),
        ({}, {"gamma": 0.7}, "gamma"),
        ({"gamma": 0.7}, {}, "gamma"),
        ({"folder": "/a"}, {"folder": "/b"}, "folder"),
    ],
    ids=str,
)
def test_a_setting_that_one_side_lacks_is_a_difference(was, now, name):
    assert names_of(flat(config_of(**was)), flat(config_of(**now)))[:1] == [name]


@pytest.mark.parametrize(
    "now",
    [{"gamma": 0.5}, {"config": None}, {"folder": "/tmp"}, {"penalty": {"l1": 0.3, "l2": 1.0}}],
    ids=str,
)
def test_a_setting_that_one_side_lacks_is_the_same_if_the_other_has_its_default(now):
    was = {"penalty": {"l1": 0.3}} if "penalty" in now else {}
    assert names_of(flat(config_of(**was)), flat(config_of(**now))) == []


def test_an_option_that_came_later_is_the_same_if_it_has_its_default():
    stored = flat(DEFAULTS)
    for name in ("data.feature_shift", "data.limit_test", "model.codec", "data.sampling", "trainer.max_epochs"):
        stored.pop(name, None)
    assert differences(stored, flat(DEFAULTS)) == []
    changed = flat({**DEFAULTS, "data": {**DEFAULTS["data"], "local_work": 0.5}})
    assert [one.name for one in differences(stored, changed)] == ["data.local_work"]


def test_a_seed_that_stands_for_another_one_is_that_one():
    config = config_of()
    same = {**config, "data": {"seed": 0, "sampling_seed": 0}, "model": {**config["model"], "seed": 0}}
    unset = {**config, "data": {"seed": 0, "sampling_seed": None}, "model": {**config["model"], "seed": None}}
    assert differences(flat(unset), flat(same)) == []
    other = {**unset, "data": {"seed": 0, "sampling_seed": 1}}
    assert [one.name for one in differences(flat(unset), flat(other))] == ["data.sampling_seed"]
    size = {**config, "data": {"seed": 0, "num_clients": 10, "cohort_size": 5, "participation": 1.0}}
    share = {**config, "data": {"seed": 0, "num_clients": 10, "cohort_size": None, "participation": 0.5}}
    assert differences(flat(size), flat(share)) == []


def test_objects_are_compared_as_completely_as_configurations():
    def identity(**arguments):
        told = RunIdentity()
        told.objects = described_value("model.client.module", Mine(**arguments))
        return told

    before = identity(config={"a": 1}).state_dict()
    with pytest.raises(ValueError, match=r"model\.client\.module\.config\.l2 was unset, is 9\.0; give it those"):
        identity(config={"a": 1, "l2": 9.0}).compare(before, evaluates=False)
    identity(config={"a": 1}).compare(before, evaluates=False)
    old = {"config": {}, "objects": before["objects"]}  # of version 0.2.0, whose settings were not complete
    identity(config={"a": 1, "l2": 9.0}).compare(old, evaluates=False)


@pytest.mark.parametrize(
    "values",
    [
        (np.arange(3.0), np.arange(3.0) * 2),
        (torch.ones(2), torch.zeros(2)),
        (Path("a"), Path("b")),
        (float("nan"), 1.0),
        ("a" * 300 + "b", "a" * 300 + "c"),
        ((1, 2), (1, 3)),
        ({1, 2}, {1, 3}),
    ],
    ids=["array", "tensor", "path", "nan", "long text", "tuple", "set"],
)
def test_values_of_any_kind_are_compared(values):
    first, second = values
    assert differences(described_value("x", first), described_value("x", first)) == []
    assert [one.name for one in differences(described_value("x", first), described_value("x", second))] == ["x"]


@pytest.mark.parametrize(
    ("was", "now", "is_equal"),
    [
        (True, 1, False),
        (False, 0, False),
        (False, 0.0, False),
        ([True], [1], False),
        ([0.1, [True]], [0.1, [1]], False),
        (1, 1.0, True),
        ([8, 8], [8.0, 8], True),
        ([8], 8, False),
        ("8", 8, False),
        ("true", True, False),
        (None, "null", False),
        (None, 0, False),
        ([float("nan")], [float("nan")], True),
    ],
    ids=str,
)
@pytest.mark.parametrize("swapped", [False, True])
def test_a_truth_value_is_no_number_and_a_whole_number_is_the_float(was, now, is_equal, swapped):
    first, second = (now, was) if swapped else (was, now)
    assert (names_of(flat(config_of(gamma=first)), flat(config_of(gamma=second))) == []) == is_equal


@pytest.mark.parametrize("name", ["limit_val_batches", "limit_test_batches", "limit_predict_batches"])
def test_a_count_of_batches_is_not_their_share(name):
    assert [one.name for one in differences({f"trainer.{name}": 1}, {f"trainer.{name}": 1.0})] == [f"trainer.{name}"]
    assert differences({f"trainer.{name}": 1.0}, {f"trainer.{name}": 1.0}) == []
    assert differences({f"trainer.{name}": 0.5}, {f"trainer.{name}": 1.0}) != []


@pytest.mark.parametrize(("one", "few"), [(8, [8]), ("a", ["a"]), (0.5, (0.5,)), (None, [None]), (8, {8})], ids=str)
def test_a_list_of_one_is_not_its_item(one, few):
    assert differences(described_value("m", Mine(widths=one)), described_value("m", Mine(widths=few))) != []
    listed = sorted(few) if isinstance(few, set) else few
    assert differences(flat(config_of(widths=one)), flat(config_of(widths=listed))) != []
    # Version 0.2.0 has written the item.
    was, now = described_value("m", Mine(widths=one)), described_value("m", Mine(widths=few))
    assert differences(was, now, only_shared=True) == []
    assert differences({**was, "m.widths": 9}, now, only_shared=True) != []


@pytest.mark.parametrize(
    ("name", "first", "second", "is_equal"),
    [
        ("precision", None, "32-true", True),
        ("precision", 32, "32-true", True),
        ("precision", "32", None, True),
        ("precision", 16, "16-mixed", True),
        ("precision", "bf16", "bf16-mixed", True),
        ("precision", "bf16", "16-mixed", False),
        ("precision", 64, None, False),
        ("precision", "64-true", 64, True),
        ("limit_val_batches", None, 1.0, True),
        ("limit_val_batches", None, 1, False),
        ("limit_val_batches", 2, 2.0, False),
        ("deterministic", None, False, True),
        ("deterministic", None, True, False),
        ("deterministic", "warn", True, False),
    ],
)
def test_flags_of_the_trainer_are_compared_as_lightning_reads_them(name, first, second, is_equal):
    assert (differences({f"trainer.{name}": first}, {f"trainer.{name}": second}) == []) == is_equal
    assert (differences({f"trainer.{name}": second}, {f"trainer.{name}": first}) == []) == is_equal


@pytest.mark.parametrize("value", [{}, [], [16], "other", 7])
def test_a_value_that_no_flag_takes_is_compared_as_it_is(value):
    for name in SPELLINGS:
        assert differences({name: value}, {name: value}) == []
        assert differences({name: value}, {name: None}) != []


def test_the_rule_that_is_named_is_the_one_that_nobody_named():
    median = flat({"model": {"aggregator": {"class_path": "fl_lightning.aggregation.Median"}}})
    assert differences(flat({"model": {"aggregator": None}}), median) != []
    named = flat({"model": {"aggregator": {"class_path": "fl_lightning.aggregation.Aggregator"}}})
    assert differences(flat({"model": {"aggregator": None}}), named) == []


UNKNOWN_BEFORE = {
    "data.batch_size": "None takes the batch size of the source's own loader, which no setting tells",
    "data.shuffle": "None takes what the source's own loader does, which no setting tells",
    "model.client.optimizer": "None is a function of the package, whose arguments have no names among the settings",
}
"""Settings whose value without one is known after the data are read only, or has no spelling, with the reason."""


def settings_of_objects():
    """The settings that a loop and data of defaults have."""
    samples = (torch.zeros(4, 2), torch.arange(4) % 2)
    data = FederatedDataModule(TensorSource(samples, samples))
    return FederatedLoop(FedAvg()).parts.described("32-true", None) | described_value("data", data)


OF_OBJECTS = settings_of_objects()
UNSET = sorted(name for name, value in flat(DEFAULTS).items() if value is None and OF_OBJECTS.get(name) is not None)
"""Options without a value whose objects have one."""


def test_options_without_a_value_whose_objects_have_one_are_many():
    assert {"model.aggregator", "model.server_module", "model.transforms", "data.partition"} < set(UNSET)
    assert set(UNKNOWN_BEFORE) < set(UNSET), "a reason that is needed no more"


@pytest.mark.parametrize("name", UNSET)
def test_a_default_that_is_named_is_the_same_run(name):
    if name in UNKNOWN_BEFORE:
        pytest.skip(UNKNOWN_BEFORE[name])
    unset = flat(DEFAULTS)
    below = {key: value for key, value in OF_OBJECTS.items() if key == name or key.startswith(f"{name}.")}
    named = {**unset, **below}
    assert differences(unset, named) == []
    assert differences(named, unset) == []
    lacking = {key: value for key, value in unset.items() if key != name}
    assert differences(lacking, named) == []


@pytest.mark.parametrize("value", [None, 1.0])
@pytest.mark.parametrize("name", [name for name in SPELLINGS if SPELLINGS[name] == {None: 1.0}])
def test_lightning_reads_no_share_of_batches_as_all(name, value):
    attribute = name.removeprefix("trainer.")
    assert getattr(Trainer(accelerator="cpu", logger=False, **{attribute: value}), attribute) == 1.0


METHODS_OF_SERVERS = [
    method
    for method in (getattr(methods, name) for name in methods.__all__)
    if inspect.isclass(method) and issubclass(method, ClientModule)
]


@pytest.mark.parametrize("kind", METHODS_OF_SERVERS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("around", [None, "fl_lightning.attacks.sign_flip", "fl_lightning.methods.dp_sgd"])
def test_the_server_module_of_a_method_may_be_named(kind, around):
    def config(server_module):
        client = {"class_path": f"{kind.__module__}.{kind.__qualname__}"}
        if around is not None:
            client = {"class_path": around, "init_args": {"client": client}}
        return flat({"model": {"client": client, "server_module": server_module}})

    server = kind.server_class
    named = {"class_path": f"{server.__module__}.{server.__qualname__}"}
    assert differences(config(None), config(named)) == []
    other = FedCurv.server_class if server is not FedCurv.server_class else SCAFFOLD.server_class
    assert differences(config(None), config({"class_path": f"{other.__module__}.{other.__qualname__}"})) != []


def test_the_server_module_of_a_client_that_nothing_tells_is_not_the_default():
    def config(server_module):
        return flat({"model": {"client": {"class_path": "nowhere.Client"}, "server_module": server_module}})

    assert differences(config(None), config({"class_path": "fl_lightning.aggregation.ServerModule"})) != []
    assert differences(config(None), config(None)) == []


def test_the_server_module_of_a_module_is_the_default_one():
    name = "fl_lightning.aggregation.ServerModule"
    plain = {"class_path": f"{__name__}.Mine"}
    for client in (plain, {"class_path": "fl_lightning.attacks.sign_flip", "init_args": {"client": plain}}):
        was = flat({"model": {"client": client, "server_module": None}})
        assert differences(was, flat({"model": {"client": client, "server_module": {"class_path": name}}})) == []


def takes_several(hint):
    """Return True for a type of several values or None."""
    parts = get_args(hint)
    return type(None) in parts and any((get_origin(part) or part) in (list, dict) for part in parts)


SEVERAL = {
    f"{part}.{name}": hint
    for part, kind in (("model", FederatedLoop), ("data", FederatedDataModule), ("trainer", Trainer))
    for name, hint in get_type_hints(kind.__init__).items()
    if takes_several(hint)
}
"""Options that take a list or a dict, or None."""

NO_EMPTY = {
    "data.availability": "a client without a share is refused",
    "data.schedule": "a schedule without rounds is refused",
    "data.unseen": "a list without clients is refused",
    "model.metrics": "an empty dict of metrics is refused by the parser",
    "trainer.max_time": "a dict is a span of time",
    "trainer.val_check_interval": "a dict is a span of time",
}


@pytest.mark.parametrize("name", sorted(SEVERAL))
def test_nothing_is_an_empty_list_or_dict(name):
    if name in NO_EMPTY:
        pytest.skip(NO_EMPTY[name])
    empty = {} if "dict" in str(SEVERAL[name]).lower() else []
    assert differences({name: None}, {name: empty}) == []
    assert differences({name: ["x"]}, {name: None}) != []


def test_every_list_that_may_be_empty_is_an_option():
    assert set(SEVERAL) - set(NO_EMPTY) == set(EMPTY_IS_NONE)


ONE = {"class_path": "fl_lightning.aggregation.NormClip", "init_args": {"max_norm": 3.0}}


@pytest.mark.parametrize(
    ("name", "one"),
    [
        ("model.personal", "net.head.*"),
        ("model.keep", "*"),
        ("model.transforms", ONE),
        ("trainer.callbacks", {"class_path": "pytorch_lightning.Callback"}),
    ],
)
def test_one_item_is_the_list_of_it(name, one):
    part, _, setting = name.partition(".")
    single = flat({part: {setting: one}})
    assert differences(single, flat({part: {setting: [one]}})) == []
    assert differences(flat({part: {setting: [one]}}), single) == []
    assert differences(flat({part: {setting: [one, one]}}), single) != []
    assert differences(flat({part: {setting: None}}), single) != []


def test_the_store_that_is_named_is_the_one_that_nobody_named():
    named = {"class_path": "fl_lightning.client.store.ClientStore", "init_args": {"memory_budget_mb": 4096.0}}
    assert differences(flat({"model": {"store": None}}), flat({"model": {"store": named}})) == []
    named["init_args"]["memory_budget_mb"] = 1.0
    assert differences(flat({"model": {"store": None}}), flat({"model": {"store": named}})) != []


def test_owners_that_a_column_names_are_not_drawn():
    iid = {"class_path": "fl_lightning.data.IIDPartition"}
    drawn = flat({"data": {"partition": iid}})
    assert differences(flat({"data": {"partition": None, "by": None}}), drawn) == []
    assert differences(flat({"data": {"partition": None, "by": "user"}}), drawn) != []


@pytest.mark.parametrize("given", [name for name in SPELLINGS["trainer.precision"] if name not in (16, "16")])
def test_lightning_reads_a_precision_so(given):
    """Half precision needs a GPU: on a CPU Lightning replaces it."""
    trainer = Trainer(precision=given, accelerator="cpu", logger=False)
    assert trainer.precision == SPELLINGS["trainer.precision"][given]


class Deep(LightningModule):
    """A user's module whose arguments are no empty collections unless they are given."""

    def __init__(self, widths: list[int] | None = (64,), config: dict | None = None, more: list[int] = ()) -> None:
        super().__init__()
        self.save_hyperparameters()


EMPTY = [
    ({"widths": []}, {}),
    ({"widths": []}, {"widths": [64]}),
    ({"widths": []}, {"widths": None}),
    ({"config": {}}, {"config": None}),
    ({"config": {"a": []}}, {"config": {}}),
    ({"config": {"a": {}}}, {"config": {}}),
    ({"config": {"a": [{}]}}, {"config": {"a": []}}),
    ({"config": {"a": [{"b": 1}, {}]}}, {"config": {"a": [{"b": 1}]}}),
]
"""Arguments that differ in an empty list or dict."""


@pytest.mark.parametrize(("first", "second"), [*EMPTY, *((second, first) for first, second in EMPTY)], ids=str)
def test_an_empty_list_or_dict_is_a_value(first, second):
    def config(arguments):
        return {"model": {"client": {"class_path": f"{__name__}.Deep", "init_args": arguments}}}

    assert differences(flat(config(first)), flat(config(second))) != []
    assert differences(flat(config(first)), flat(config(first))) == []
    assert differences(described_value("m", Deep(**first)), described_value("m", Deep(**second))) != []


def test_what_an_older_checkpoint_lacks_is_an_empty_list_or_dict_if_that_is_the_default():
    def config(arguments):
        return {"model": {"client": {"class_path": f"{__name__}.Deep", "init_args": arguments}, **further}}

    further = {}
    older = flat(config({}))
    assert differences(older, flat(config({"more": [], "config": {}}))) == []
    further = {"transforms": [], "personal": []}
    assert differences(older, flat(config({}))) == []


# --- places of samples ---


@pytest.mark.parametrize(
    ("source", "is_free"), [(ImageFolder, True), (FEMNIST, True), (MNIST, True), (Source, False)], ids=str
)
def test_only_a_source_says_which_argument_is_a_place(source, is_free):
    assert ("root" in source.places) == is_free
    name = f"{source.__module__}.{source.__qualname__}"
    was = {"data.source": name, "data.source.root": "a", "model.x": name, "model.x.root": "a"}
    now = {**was, "data.source.root": "b", "model.x.root": "b"}
    changed = [one.name for one in differences(was, now)]
    assert ("data.source.root" in changed) == (not is_free)
    assert "model.x.root" in changed, "no source of the data"


def every_source(kind=Source):
    for below in kind.__subclasses__():
        if below.__module__.startswith("fl_lightning."):
            yield below
            yield from every_source(below)


@pytest.mark.parametrize("source", sorted(every_source(), key=str))
def test_a_source_with_places_gives_a_fingerprint(source, tmp_path):
    if not source.places:
        assert source.fingerprint({}) is None
        return
    (tmp_path / "a.txt").write_text("some")
    arguments = {place: str(tmp_path) for place in source.places}
    first = source.fingerprint(arguments)
    assert first
    (tmp_path / "a.txt").write_text("others")
    assert (source.fingerprint(arguments) == first) == source.is_published
    missing = {place: str(tmp_path / "none") for place in source.places}
    assert (source.fingerprint(missing) is not None) == source.is_published


# --- the samples ---


class Drawn(torch.utils.data.Dataset):
    """Draws noise onto its samples by a generator of its own, or of numpy."""

    def __init__(self, own):
        self.rng = np.random.default_rng(0)
        self.own = own
        self.reads = 0

    def __len__(self):
        return 10

    def __getitem__(self, index):
        self.reads += 1
        noise = self.rng.normal() if self.own else np.random.normal()
        return torch.full((3,), float(index) + noise), index % 2


@pytest.mark.parametrize("own", [True, False])
def test_the_digest_of_the_samples_draws_nothing_of_the_run(own):
    dataset = Drawn(own)
    data = FederatedDataModule.from_datasets(dataset, dataset, num_clients=2, num_classes=2)
    data.setup("fit")
    train = data.split("train")
    train.digest = ""
    state = dataset.rng.bit_generator.state
    before = np.random.get_state()[1].copy()
    first = digest_of_inputs(train, seed=0)
    train.digest = ""
    assert digest_of_inputs(train, seed=0) == first
    assert first is not None
    assert dataset.rng.bit_generator.state == state
    assert (np.random.get_state()[1] == before).all()


def test_every_sample_in_memory_counts_and_the_seed_chooses_of_many():
    x = torch.rand(50, 4)
    y = torch.arange(50) % 2

    def digest(x, seed=0):
        data = FederatedDataModule(TensorSource((x, y), (x, y)), num_clients=2)
        data.setup("fit")
        return digest_of_inputs(data.split("train"), seed)

    assert digest(x) == digest(x.clone()) == digest(x, seed=1)
    for row in (0, 17, 49):
        changed = x.clone()
        changed[row] *= 10
        assert digest(changed) != digest(x)


# --- planned rounds ---


def test_a_horizon_is_part_of_a_run_only_if_something_has_read_it():
    horizon = Horizon()
    horizon.begin_run(8, -1)
    assert horizon.state() == {}
    assert horizon.changed({}) == {}
    assert horizon.rounds() == 8
    assert horizon.state() == {"planned_rounds": 8}
    again = Horizon()
    again.begin_run(12)
    assert again.changed({"planned_rounds": 8}) == {"planned_rounds": (8, 12)}
    assert again.state() == {"planned_rounds": 12}, "the run depends on it from now on"
    named = Horizon(8)
    named.begin_run(2)
    assert named.changed({"planned_rounds": 8}) == {}
    assert (named.rounds(), named.planned) == (8, 8)


def test_a_number_that_a_module_has_asked_for_is_compared_by_itself():
    cut = Horizon()
    cut.begin_run(3, 1)
    cut.asked("max_epochs")
    assert cut.state() == {"trainer.max_epochs": 3}
    whole = Horizon()
    whole.begin_run(3, -1)
    assert whole.changed(cut.state()) == {}, "it was cut by the other limit"
    longer = Horizon()
    longer.begin_run(5, -1)
    assert longer.changed(cut.state()) == {"trainer.max_epochs": (3, 5)}
    assert longer.state() == {"trainer.max_epochs": 5}


@pytest.mark.parametrize("given", [0, -3])
def test_a_plan_of_no_round_is_refused(given):
    with pytest.raises(ValueError, match="planned_rounds must be at least 1"):
        Horizon(given)


class Planner(LightningModule):
    """Plans its learning rates over the rounds of the Trainer."""

    def __init__(self, name: str = "max_epochs") -> None:
        super().__init__()
        self.name = name
        self.layer = torch.nn.Linear(4, 2)
        self.seen: list[int] = []

    def training_step(self, batch, batch_idx):
        x, y = batch
        return torch.nn.functional.cross_entropy(self.layer(x), y)

    def configure_optimizers(self):
        self.seen.append(int(getattr(self.trainer, self.name)) if self.name else 0)
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fitted(rounds, path=None, **settings):
    """A loop after a fit of a planning module."""
    x = torch.rand(12, 4)
    data = FederatedDataModule(TensorSource((x, torch.arange(12) % 2), (x, torch.arange(12) % 2)), num_clients=2)
    planned = {key: settings.pop(key) for key in ("planned_rounds",) if key in settings}
    loop = FederatedLoop(Planner(**settings), **planned)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
    trainer = Trainer(max_epochs=rounds, enable_model_summary=False, **quiet)
    torch.manual_seed(0)
    trainer.fit(loop, datamodule=data, ckpt_path=path)
    return loop, trainer


@pytest.mark.parametrize("name", ["max_epochs", "estimated_stepping_batches", ""])
def test_a_module_that_plans_over_the_rounds_is_not_continued_with_more(tmp_path, monkeypatch, name):
    monkeypatch.setattr(torch, "rand", lambda *shape: torch.linspace(0, 1, 48).reshape(12, 4))
    _, trainer = fitted(2, name=name)
    trainer.save_checkpoint(tmp_path / "2.ckpt")
    if not name:
        fitted(4, tmp_path / "2.ckpt", name=name)
        return
    with pytest.raises(ValueError, match=r"(planned_rounds|trainer\.max_epochs) was 2, is 4 "):
        fitted(4, tmp_path / "2.ckpt", name=name)
    loop, trainer = fitted(2, name=name, planned_rounds=4)
    assert set(loop.client.module.seen) == {4}
    trainer.save_checkpoint(tmp_path / "2.ckpt")
    fitted(4, tmp_path / "2.ckpt", name=name, planned_rounds=4)


# --- what was found by asking otherwise ---


class Color(Enum):
    RED = 1
    BLUE = 2


def scaled(x):
    return x


def doubled(x):
    return 2 * x


class Others(LightningModule):
    """A user's module that keeps arguments which its hyper-parameters lack."""

    def __init__(self, lr: float = 0.1, color: Color = Color.RED, loss: Callable = scaled, gamma: float = 0.5) -> None:
        super().__init__()
        self.save_hyperparameters("lr")
        self.color = color
        self.loss = loss
        self.gamma = gamma


@pytest.mark.parametrize(
    "changed",
    [{"color": Color.BLUE}, {"loss": doubled}, {"gamma": 0.7}, {"lr": 0.2}],
    ids=lambda given: next(iter(given)),
)
def test_arguments_beside_the_saved_hyper_parameters_are_compared(changed):
    (name,) = changed
    was = described_value("m", Others())
    assert [one.name for one in differences(was, described_value("m", Others(**changed)))] == [f"m.{name}"]
    assert differences(was, described_value("m", Others())) == []


@pytest.mark.parametrize(
    "given", [{"color": Color.RED}, {"loss": scaled}, {"gamma": 0.5}], ids=lambda given: next(iter(given))
)
def test_a_default_of_any_kind_is_the_default(given):
    module = {"class_path": f"{__name__}.Others", "init_args": {}}
    lacking = {"model": {"client": module}}
    having = {"model": {"client": {**module, "init_args": given}}}
    assert differences(flat(lacking), flat(having)) == []


@pytest.mark.parametrize(
    ("was", "now"),
    [
        (partial(torch.add, 1), partial(torch.add, 2)),
        (SimpleNamespace(lr=1), SimpleNamespace(lr=2)),
        (Namespace(lr=1), Namespace(lr=2)),
        (torch.float32, torch.float64),
        (nn.Sequential(nn.Linear(2, 2), nn.ReLU()), nn.Sequential(nn.Linear(2, 2), nn.Tanh())),
        (nn.ModuleList([nn.ReLU()]), nn.ModuleList([nn.Tanh()])),
        (nn.ModuleDict({"a": nn.ReLU()}), nn.ModuleDict({"a": nn.Tanh()})),
        (np.float32(0.1), np.float32(0.2)),
        (range(3), range(4)),
        (1 + 2j, 1 + 3j),
        (b"a", b"b"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_values_that_say_more_than_their_class_are_compared(was, now):
    assert differences(described_value("x", was), described_value("x", now)) != []
    assert differences(described_value("x", was), described_value("x", was)) == []


def test_a_hint_that_cannot_be_read_is_no_error():
    class Hinted:
        def __init__(self, conf: "Nope" = None) -> None:  # noqa: F821
            self.conf = conf

    assert default_of(Hinted, "conf") is None
    assert dataclass_of(Hinted, "conf") is None
    assert default_of(Hinted, "other") is inspect.Parameter.empty
    assert dataclass_of(Hinted, "other") is None


class Word(StrEnum):
    """A word of a user's settings."""

    MEAN = "mean"
    SUM = "sum"


class Level(IntEnum):
    """A number of a user's settings."""

    LOW = 1
    HIGH = 2


@dataclass
class Inner:
    """A group within a group."""

    rate: float = 0.1
    widths: list[int] = field(default_factory=lambda: [8])
    word: Word = Word.MEAN


@dataclass
class Outer:
    """A group with a group."""

    inner: Inner = field(default_factory=Inner)
    count: int = 1


class Typed(LightningModule):
    """A user's module whose defaults are of all types."""

    def __init__(
        self,
        word: Word = Word.MEAN,
        level: Level = Level.LOW,
        words: list[Word] = [Word.MEAN],  # noqa: B006
        by_name: dict[str, int] = {"a": 1, "b": 2},  # noqa: B006
        layers: list[dict[str, int]] = [{"a": 1}],  # noqa: B006
        outer: Outer = Outer(count=3),  # noqa: B008
        maybe: Inner | None = None,
        sides: tuple[int, int] = (1, 2),
        folder: Path = Path("a/b"),
        rate: float = float("nan"),
        scale: Callable = scaled,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()


TYPED = {
    "word": "MEAN",
    "level": "LOW",
    "words": ["MEAN"],
    "by_name": {"a": 1, "b": 2},
    "layers": [{"a": 1}],
    "outer": {"inner": {"rate": 0.1, "widths": [8], "word": "MEAN"}, "count": 3},
    "maybe": None,
    "sides": [1, 2],
    "folder": "a/b",
    "rate": float("nan"),
    "scale": f"{__name__}.scaled",
}
"""The defaults of `Typed` as a parsed configuration has them."""

OTHERS = [
    {"word": "SUM"},
    {"level": "HIGH"},
    {"words": []},
    {"words": ["MEAN", "MEAN"]},
    {"by_name": {"a": 1}},
    {"by_name": {"a": 1, "b": 3}},
    {"by_name": {"a": 1, "b": 2, "c": 3}},
    {"by_name": {}},
    {"layers": [{"a": 1}, {"a": 1}]},
    {"layers": [{}]},
    {"outer": {"inner": {"rate": 0.1, "widths": [8], "word": "MEAN"}, "count": 1}},
    {"outer": {"inner": {"rate": 0.1, "widths": [9], "word": "MEAN"}, "count": 3}},
    {"maybe": {"rate": 0.1, "widths": [8], "word": "MEAN"}},
]
"""Arguments of `Typed` that are no defaults."""


def typed(arguments):
    return flat({"model": {"client": {"class_path": f"{__name__}.Typed", "init_args": arguments}}})


@pytest.mark.parametrize("name", TYPED)
def test_a_default_of_every_type_is_the_default(name):
    assert set(TYPED) == set(inspect.signature(Typed).parameters)
    lacking = {key: value for key, value in TYPED.items() if key != name}
    assert differences(typed(lacking), typed(TYPED)) == []
    assert differences(typed(TYPED), typed(lacking)) == []
    objects = described_value("m", Typed())
    older = {key: value for key, value in objects.items() if not f"{key}.".startswith(f"m.{name}.")}
    assert older.keys() < objects.keys()
    assert differences(older, objects) == []


@pytest.mark.parametrize("other", OTHERS, ids=str)
def test_another_value_of_every_type_is_a_difference(other):
    (name,) = other
    lacking = {key: value for key, value in TYPED.items() if key != name}
    for was in (typed(lacking), typed(TYPED)):
        found = differences(was, typed({**TYPED, **other}))
        assert found != []
        assert all(one.name.startswith(f"model.client.{name}") for one in found)
        assert differences(typed({**TYPED, **other}), was) != []


def test_an_object_is_no_group_of_its_arguments():
    was = {"model.client": "own.Client", "model.client.a": 1}
    assert [one.name for one in differences(was, {"model.client.a": 1})] == ["model.client"]
    assert [one.name for one in differences({"model.client.a": 1}, was)] == ["model.client"]


def test_a_part_of_the_run_that_is_missing_whole_has_its_defaults():
    stored = {"seed_everything": 0}
    assert differences(stored, {**stored, "data.participation": 1.0, "model.local_epochs": 1}) == []
    assert differences(stored, {**stored, "data.participation": 0.5}) != []


@pytest.mark.parametrize("field_name", ["rate", "widths", "word"])
def test_a_field_that_came_later_has_its_default(field_name):
    older = {key: value for key, value in TYPED["outer"]["inner"].items() if key != field_name}
    lacking = typed({**TYPED, "outer": {"inner": older, "count": 3}})
    assert differences(lacking, typed(TYPED)) == []
    changed = {**TYPED["outer"]["inner"], field_name: {"rate": 0.2, "widths": [], "word": "SUM"}[field_name]}
    now = typed({**TYPED, "outer": {"inner": changed, "count": 3}})
    (found,) = differences(lacking, now)
    assert found.name.startswith(f"model.client.outer.inner.{field_name}")


def test_a_seed_that_the_stored_settings_lack_is_the_one_that_stands_for_it():
    stored = {"seed_everything": 0, "data.seed": 0}
    assert differences(stored, {**stored, "model.seed": None, "data.sampling_seed": 0}) == []
    assert differences(stored, {**stored, "model.seed": 3}) != []


def test_an_allowed_change_lets_no_other_one_through():
    before = RunIdentity()
    before.configure({"model": {"client": {"class_path": "a.B", "init_args": {"lr": 1.0}}}})
    before.objects = {"model.client": "a.B", "model.client.lr": 1.0, "data.inputs": "1a"}
    after = RunIdentity()
    after.configure({"model": {"client": {"class_path": "a.B", "init_args": {"lr": 2.0}}}})
    after.objects = {"model.client": "a.B", "model.client.lr": 2.0, "data.inputs": "2b"}
    after.allow(["model.client.lr"])
    with pytest.raises(ValueError, match=r"but data\.inputs was 1a, is 2b"):
        after.compare(before.state_dict(), evaluates=False)
    after.objects["data.inputs"] = None  # samples that cannot be digested are not compared
    after.compare(before.state_dict(), evaluates=False)
    assert [one.name for one in after.changed] == ["model.client.lr"]


@dataclass
class Pair:
    """A batch of a user's own kind."""

    x: torch.Tensor
    more: dict[str, torch.Tensor]


class Batches:
    """Gives samples in batches of any kind, as a split does."""

    digest = ""
    num_bytes = None
    own_generators = ()

    def __init__(self, make, size=12):
        self.make = make
        self.size = size
        self.read: list[int] = []

    def __len__(self):
        return self.size

    def batches(self, indices, generator):
        for rows in indices:
            self.read += rows.tolist()
            yield self.make(rows.double())


@pytest.mark.parametrize(
    "make",
    [
        lambda x: {"inputs": {"x": x}, "y": x},
        lambda x: [x, [x]],
        lambda x: Pair(x, {"y": x}),
        lambda x: SimpleNamespace(graph=SimpleNamespace(x=x)),
        lambda x: (x.numpy(), "text"),
        lambda x: x.to_sparse(),
    ],
    ids=["dict", "list", "dataclass", "object", "array", "sparse"],
)
def test_batches_of_any_kind_have_a_digest_of_their_numbers(make):
    first = digest_of_inputs(Batches(make), seed=0)
    assert first == digest_of_inputs(Batches(make), seed=0)
    assert first != digest_of_inputs(Batches(lambda x: make(10 * x)), seed=0)


@pytest.mark.parametrize(("depth", "counts"), [(6, True), (7, False)])
def test_numbers_count_down_to_the_sixth_level_of_a_batch(depth, counts):
    """A batch may hold itself, so that there is a last level. It is part of stored digests."""

    def nested(x):
        for _ in range(depth):
            x = [x]
        return x

    first = digest_of_inputs(Batches(nested), seed=0)
    assert (first != digest_of_inputs(Batches(lambda x: nested(10 * x)), seed=0)) == counts


def test_samples_that_are_read_otherwise_each_time_have_no_digest():
    read = count()
    assert digest_of_inputs(Batches(lambda x: x + next(read)), seed=0) is None


def test_of_many_samples_some_are_read_chosen_by_the_seed():
    def read(seed, size, num_bytes):
        split = Batches(lambda x: x, size)
        split.num_bytes = num_bytes
        digest_of_inputs(split, seed)
        return split.read

    assert len(read(0, 1000, MOST_HASHED + 1)) == NUM_READ
    assert read(0, 1000, MOST_HASHED + 1) != read(1, 1000, MOST_HASHED + 1)
    assert len(read(0, 1000, MOST_HASHED)) == 1000


GENERATOR = np.random.default_rng(0)
"""Draws for the samples of a dataset, at the level of a module."""


class Augmented(torch.utils.data.Dataset):
    """Draws from a generator of its transform, and from one of the module."""

    def __init__(self):
        self.transform = SimpleNamespace(parts=[SimpleNamespace(rng=np.random.default_rng(1))], random=Random(2))

    def __getitem__(self, index):
        drawn = self.transform.parts[0].rng.normal() + GENERATOR.normal() + self.transform.random.random()
        return torch.tensor([float(index) + drawn])


def test_generators_that_a_dataset_reaches_are_put_back():
    dataset = Augmented()

    def states():
        own = dataset.transform.parts[0].rng.bit_generator.state
        return repr((own, GENERATOR.bit_generator.state, dataset.transform.random.getstate()))

    split = Batches(lambda x: torch.stack([dataset[int(row)] for row in x]))
    split.own_generators = generators_in(dataset)
    before = states()
    digest_of_inputs(split, seed=0)
    assert states() == before


@pytest.mark.parametrize("base", [False, True])
def test_a_changed_base_class_is_changed_code(tmp_path, monkeypatch, base):
    (tmp_path / "coded.py").write_text("class Base:\n    rate = 1\n\nclass Mine(Base):\n    size = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    coded = importlib.import_module("coded")
    was = digests_of_code([coded.Mine, torch.nn.Linear, FederatedLoop])
    assert list(was) == ["coded.Mine"], "the user's own only"
    assert changed_code(was) == []
    text = (tmp_path / "coded.py").read_text()
    name = "rate" if base else "size"
    (tmp_path / "coded.py").write_text(text.replace(f"{name} = 1", f"{name} = 22"))
    del sys.modules["coded"]
    importlib.invalidate_caches()
    importlib.import_module("coded")
    assert changed_code(was) == ["coded.Mine"]
    del sys.modules["coded"]


# --- lines that nothing protected ---


class Within(Source):
    """A source that reads what another one gives."""

    def __init__(self, base, root="."):
        self.base = base
        self.root = root

    def load(self):
        return self.base.load()


def test_sources_within_a_source_have_fingerprints_of_their_own(tmp_path):
    (tmp_path / "a.txt").write_text("some")
    found = fingerprints({"data.source": Within(Within(ImageFolder(tmp_path)), root=tmp_path), "data.num": 3})
    assert set(found) == {"data.source.base.base"}
    assert found["data.source.base.base"] == ImageFolder.fingerprint({"root": tmp_path})
    assert fingerprints({"data.source": ImageFolder(tmp_path / "gone")}) == {}
    assert fingerprints({"data.source": Within(3)}) == {}


def nested(depth, value):
    for _ in range(depth):
        value = {"a": value}
    return value


@pytest.mark.parametrize("depth", [0, 1, MAX_DEPTH, MAX_DEPTH + 1, MAX_DEPTH + 5])
def test_values_of_any_depth_are_compared(depth):
    was = described_value("x", nested(depth, 1))
    assert differences(was, described_value("x", nested(depth, 2))) != []
    assert differences(was, described_value("x", nested(depth, 1))) == []
    assert len(was) == 1


def test_objects_are_compared_down_to_a_depth_of_eight():
    for depth, is_compared in ((8, True), (9, False)):
        was, now = (described_value("x", nested(depth, partial(max, a))) for a in (1, 2))
        assert (differences(was, now) != []) == is_compared


def test_a_value_that_holds_itself_is_described_once():
    value = SimpleNamespace(a=1)
    value.itself = value
    assert described_value("x", value)["x.a"] == 1
    assert MAX_DEPTH < len(described_value("x", value)) < 3 * MAX_DEPTH


@pytest.mark.parametrize(
    ("file", "is_of_others"),
    [
        (inspect.__file__, True),
        (np.__file__, True),
        (torch.__file__, True),
        (__file__, False),
        ("/nowhere/site-packages/own.py", False),
    ],
)
def test_files_of_python_and_of_packages_are_installed(file, is_of_others):
    assert is_installed(file) == is_of_others


@pytest.mark.parametrize("kind", [Random, torch.nn.Linear, FederatedLoop, partial, len, 3], ids=str)
def test_the_code_of_others_is_not_compared(kind):
    assert digests_of_code([kind]) == {}


class Joins:
    """An object of a user's own that makes batches."""

    def join(self, items):
        return items


def test_what_objects_are_made_of():
    assert kinds_within([Joins().join]) == [Joins.join, Joins]
    assert kinds_within([{"a": (Joins(),)}, Joins()]) == [Joins]
    assert kinds_within([[Joins() for _ in range(60)]]) == [], "a long collection holds samples"
    assert kinds_within([torch.zeros(2), nn.Linear(2, 2), "text", None]) == []


@pytest.mark.parametrize(("num_bytes", "num_read"), [(2**24, 1000), (2**24 + 1, 64), (None, 64 + 6 * 3)])
def test_how_many_samples_are_read(num_bytes, num_read):
    """16 MiB are read whole. Of samples that are loaded, three are read six times more."""
    split = Batches(lambda x: x, 1000)
    split.num_bytes = num_bytes
    digest_of_inputs(split, seed=0)
    assert len(split.read) == num_read


def test_an_empty_split_has_no_digest():
    assert digest_of_inputs(Batches(lambda x: x, 0), seed=0) is None


class Changes(LightningModule):
    """Writes into its own hyper-parameters while it trains."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = torch.nn.Linear(4, 2)

    def training_step(self, batch, batch_idx):
        self.hparams.lr = 0.5 * self.hparams.lr
        self.hparams.seen = batch_idx
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)


def test_a_loop_whose_module_changes_its_hyper_parameters_is_fitted_again_and_continued(tmp_path):
    x = torch.linspace(0, 1, 48).reshape(12, 4)

    def fit(loop, rounds, path=None):
        data = FederatedDataModule(TensorSource((x, torch.arange(12) % 2), (x, torch.arange(12) % 2)), num_clients=2)
        quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
        trainer = Trainer(max_epochs=rounds, enable_model_summary=False, **quiet)
        trainer.fit(loop, datamodule=data, ckpt_path=path)
        return trainer

    loop = FederatedLoop(Changes())
    fit(loop, 1).save_checkpoint(tmp_path / "1.ckpt")
    changed = loop.client.module.hparams.lr
    assert changed < 0.1
    fit(loop, 2)  # A fit without a checkpoint is compared with nothing.
    assert loop.identity.objects["model.client.module.lr"] == changed, "the settings with which it was begun"
    fit(FederatedLoop(Changes()), 2, tmp_path / "1.ckpt")
    with pytest.raises(ValueError, match=r"model\.client\.module\.lr was 0\.1, is "):
        fit(loop, 2, tmp_path / "1.ckpt")


class Rows(torch.utils.data.Dataset):
    """Samples that are loaded one by one, of which no argument tells."""

    def __init__(self, x):
        self._samples = x

    def __len__(self):
        return len(self._samples)

    def __getitem__(self, index):
        return self._samples[index], index % 2


@pytest.mark.parametrize("which", ["train", "val", "test"])
def test_samples_that_change_between_two_fits_of_a_process_are_compared(tmp_path, which):
    sets = {name: torch.linspace(0, 1, 48).reshape(12, 4) for name in ("train", "val", "test")}
    datasets = {name: Rows(x) for name, x in sets.items()}
    data = FederatedDataModule.from_datasets(**datasets, num_clients=2, num_classes=2)

    def fit(rounds, path=None):
        quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
        trainer = Trainer(max_epochs=rounds, enable_model_summary=False, **quiet)
        trainer.fit(FederatedLoop(Planner("")), datamodule=data, ckpt_path=path)
        return trainer

    fit(1).save_checkpoint(tmp_path / "1.ckpt")
    fit(2, tmp_path / "1.ckpt")
    sets[which].mul_(10)
    with pytest.raises(ValueError, match=r"data\.inputs.* was "):
        fit(2, tmp_path / "1.ckpt")
