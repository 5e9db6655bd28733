"""Which settings a run has: every setting has one record, and all settings of both sides are compared."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from pytorch_lightning import LightningModule, Trainer

from fl_lightning import FederatedLoop
from fl_lightning.cli.parser_only import fit_parser
from fl_lightning.data import FEMNIST, MNIST, FederatedDataModule, ImageFolder, Source, TensorSource
from fl_lightning.experiments.composing import nested_names, option_names
from fl_lightning.federation.effects import RECORDS, distinguishes, is_data, is_fixed, is_seed, record_of
from fl_lightning.federation.fingerprint import digest_of_inputs
from fl_lightning.federation.horizon import Horizon, round_limit
from fl_lightning.federation.identity import RunIdentity, described_value, differences, flat


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
    assert set(RECORDS) - known - above - of_other_commands == set()


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
    first = digest_of_inputs(train, 4, seed=0)
    train.digest = ""
    assert digest_of_inputs(train, 4, seed=0) == first
    assert first is not None
    assert dataset.rng.bit_generator.state == state
    assert (np.random.get_state()[1] == before).all()


def test_every_sample_in_memory_counts_and_the_seed_chooses_of_many():
    x = torch.rand(50, 4)
    y = torch.arange(50) % 2

    def digest(x, seed=0):
        data = FederatedDataModule(TensorSource((x, y), (x, y)), num_clients=2)
        data.setup("fit")
        return digest_of_inputs(data.split("train"), 8, seed)

    assert digest(x) == digest(x.clone()) == digest(x, seed=1)
    for row in (0, 17, 49):
        changed = x.clone()
        changed[row] *= 10
        assert digest(changed) != digest(x)


# --- planned rounds ---


def test_a_horizon_is_part_of_a_run_only_if_something_has_read_it():
    horizon = Horizon()
    horizon.begin_run(round_limit(8, -1))
    assert horizon.state() is None
    assert horizon.changed(None) is None
    assert horizon.rounds() == 8
    assert horizon.state() == 8
    again = Horizon()
    again.begin_run(round_limit(12, None))
    assert again.changed(8) == (8, 12)
    assert again.state() == 12, "the run depends on it from now on"
    named = Horizon(8)
    named.begin_run(2)
    assert named.changed(8) is None
    assert (named.rounds(), named.planned) == (8, 8)


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
    with pytest.raises(ValueError, match=r"planned_rounds was 2, is 4 "):
        fitted(4, tmp_path / "2.ckpt", name=name)
    loop, trainer = fitted(2, name=name, planned_rounds=4)
    assert set(loop.client.module.seen) == {4}
    trainer.save_checkpoint(tmp_path / "2.ckpt")
    fitted(4, tmp_path / "2.ckpt", name=name, planned_rounds=4)
