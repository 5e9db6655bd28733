"""A step of a user's module is given what plain Lightning gives it, and its batch weighs what it weighs there."""

import inspect
from collections import namedtuple
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from lightning_fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fl_lightning import ClientModule, FederatedDataModule, FederatedLoop, methods
from fl_lightning.client.checks import evaluation_arguments
from fl_lightning.functional.sample_gradients import sample_gradients
from fl_lightning.functional.state import State
from fl_lightning.methods import FedAvg
from tests.toys import samples, trainer, weights_of


class Data(pl.LightningDataModule):
    """Ten training samples and seven others, in batches of four: the last batch is smaller.

    Args:
        loaders: Number of validation loaders.
        collate: Makes a batch of samples.
    """

    def __init__(self, loaders=1, collate=None):
        super().__init__()
        self.loaders = loaders
        self.collate = collate
        self.train = TensorDataset(*samples(10))

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=4, collate_fn=self.collate)

    def loader(self, seed):
        return DataLoader(TensorDataset(*samples(7, seed=seed)), batch_size=4, collate_fn=self.collate)

    def val_dataloader(self):
        made = [self.loader(i) for i in range(self.loaders)]
        return made[0] if self.loaders == 1 else made

    def test_dataloader(self):
        return self.loader(7)

    predict_dataloader = test_dataloader


class Net(pl.LightningModule):
    """Keeps the arguments of its steps. Its value of a batch tells how much the batch weighs."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 3)
        self.met = []

    def note(self, *arguments):
        self.met.append(arguments)

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class NamedStage(Net):
    """Its own evaluation calls the steps with another stage."""

    def validation_step(self, batch, batch_idx, stage="val"):
        self.note(batch_idx, stage)

    def test_step(self, batch, batch_idx, stage="test"):
        self.note(batch_idx, stage)

    def predict_step(self, batch, batch_idx, scale=2.0):
        self.note(batch_idx, scale)
        return self.net(batch[0])


class OnlyBatch(Net):
    def validation_step(self, batch):
        self.note(len(batch[0]))

    def test_step(self, batch):
        self.note(len(batch[0]))

    def predict_step(self, batch):
        self.note(len(batch[0]))
        return self.net(batch[0])


class Loader(Net):
    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.note(batch_idx, dataloader_idx)

    test_step = validation_step

    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        self.note(batch_idx, dataloader_idx)
        return self.net(batch[0])


class Anything(Net):
    def validation_step(self, *arguments):
        self.note(*arguments[1:])

    test_step = validation_step

    def predict_step(self, *arguments):
        self.note(*arguments[1:])
        return self.net(arguments[0][0])


def passes(module, data, makes_model):
    """Return what the steps met in a sanity check, a fit and each further pass, by pass."""
    model = makes_model(module)
    run = trainer(1, num_sanity_val_steps=1)
    found = {}
    for name in ("fit", "validate", "test", "predict"):
        module.met.clear()
        getattr(run, name)(model, datamodule=data)
        found[name] = list(module.met)
    return found


class NamedOnly(Net):
    """Its third argument can be given by name only."""

    def validation_step(self, batch, batch_idx, *, dataloader_idx=0):
        self.note(batch_idx, dataloader_idx)


class ThirdAndFourth(Net):
    def validation_step(self, batch, batch_idx, stage="val", dataloader_idx=0):
        assert stage == "val"
        self.note(batch_idx, dataloader_idx)


class Wrapped(Net):
    """Its step is called through a wrapper, which takes anything."""

    @torch.no_grad()
    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.note(batch_idx, dataloader_idx)


class WithoutGradients(Net):
    @torch.no_grad()
    def validation_step(self, batch, batch_idx, stage="val"):
        self.note(batch_idx, stage)


class Set(Net):
    """Its step is set on the object, with its last argument given."""

    def __init__(self):
        super().__init__()
        self.validation_step = partial(self.evaluate, stage="val")

    def evaluate(self, batch, batch_idx, stage):
        self.note(batch_idx, stage)


@pytest.mark.parametrize("kind", [NamedStage, OnlyBatch, WithoutGradients, Set])
def test_a_third_argument_of_another_meaning_keeps_its_default_with_several_loaders(kind):
    """Plain Lightning refuses such a step."""
    module = kind()
    data = FederatedDataModule.from_datamodule(Data(2), num_clients=1, eval_batch_size=4)
    trainer(1).validate(FederatedLoop(FedAvg(module=module)), datamodule=data)
    once = [(4,), (3,)] if kind is OnlyBatch else [(0, "val"), (1, "val")]
    assert module.met == once * 2


@pytest.mark.parametrize("kind", [Loader, NamedOnly, ThirdAndFourth, Wrapped, Anything])
def test_the_index_of_the_loader_is_given_wherever_a_step_takes_it(kind):
    module = kind()
    data = FederatedDataModule.from_datamodule(Data(2), num_clients=1, eval_batch_size=4)
    trainer(1).validate(FederatedLoop(FedAvg(module=module)), datamodule=data)
    assert module.met == [(0, 0), (1, 0), (0, 1), (1, 1)]


STEPS = {"fit": "validation_step", "validate": "validation_step", "test": "test_step", "predict": "predict_step"}


@pytest.mark.parametrize("name", STEPS)
def test_a_step_that_cannot_be_called_is_refused_before_anything_trains(name):
    def step(self, batch, batch_idx, dataloader_idx):
        self.note("called")

    kind = type("Needs", (Net,), {STEPS[name]: step})
    module = kind()
    loop = FederatedLoop(FedAvg(module=module))
    data = FederatedDataModule.from_datamodule(Data(1), num_clients=1, eval_batch_size=4)
    with pytest.raises(TypeError, match=rf"Needs\.{STEPS[name]} is called with \(batch, batch_idx\), but takes"):
        getattr(trainer(1), name)(loop, datamodule=data)
    assert module.met == []
    if name == "fit":
        trainer(1, limit_val_batches=0).fit(loop, datamodule=data)


@pytest.mark.parametrize("name", ["training_step", *sorted(set(STEPS.values()))])
def test_a_step_that_draws_its_own_batches_is_refused(name):
    kind = type("Draws", (Net,), {name: lambda self, dataloader_iter: None})
    with pytest.raises(TypeError, match=rf"Draws\.{name} takes dataloader_iter"):
        FederatedLoop(kind())


@pytest.mark.parametrize("kind", [NamedStage, OnlyBatch, Loader, Anything])
@pytest.mark.parametrize("loaders", [1, 2])
def test_steps_are_given_lightnings_arguments(kind, loaders):
    if loaders == 2 and kind in (NamedStage, OnlyBatch):
        pytest.skip("plain Lightning refuses several loaders where a step takes no dataloader_idx")
    plain = passes(kind(), Data(loaders), makes_model=lambda module: module)
    data = FederatedDataModule.from_datamodule(Data(loaders), num_clients=1, eval_batch_size=4)
    ours = passes(kind(), data, makes_model=lambda module: FederatedLoop(FedAvg(module=module)))
    assert ours == plain


# --- the weight of a batch ---

Pair = namedtuple("Pair", "x y")


@dataclass
class Graph:
    names: list
    x: Tensor
    y: Tensor


def stacked(items):
    return torch.stack([x for x, _ in items]), torch.stack([y for _, y in items])


KINDS = {
    "tuple": stacked,
    "text first": lambda items: {"text": ["a"] * len(items), "n": 3, "x": stacked(items)[0], "y": stacked(items)[1]},
    "named tuple": lambda items: Pair(*stacked(items)),
    "dataclass": lambda items: Graph(["a"] * len(items), *stacked(items)),
    "list of dictionaries": lambda items: [{"x": stacked(items)[0]}, {"y": stacked(items)[1]}],
    "nested": lambda items: ({"meta": ("a", {"x": stacked(items)[0]})}, stacked(items)[1]),
    "one tensor": lambda items: torch.cat([stacked(items)[0], stacked(items)[1][:, None].float()], dim=1),
    "scalar first": lambda items: (torch.tensor(1.0), *stacked(items)),
}


def count(batch):
    """Return the number of samples, whatever holds them."""
    if isinstance(batch, Tensor):
        return len(batch) if batch.ndim else 0
    if isinstance(batch, Graph):
        return len(batch.x)
    if isinstance(batch, dict):
        batch = list(batch.values())
    return max([count(part) for part in batch if not isinstance(part, str | int)], default=0)


class Logs(Net):
    def training_step(self, batch, batch_idx):
        self.log("train/size", float(count(batch)), on_step=False, on_epoch=True)
        return self.net.weight.square().sum()

    def validation_step(self, batch, batch_idx):
        self.log("val/size", float(count(batch)))


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_weighs_what_it_weighs_in_lightning(kind):
    plain = trainer(1)
    plain.fit(Logs(), Data(collate=KINDS[kind]))
    ours = trainer(1)
    data = FederatedDataModule.from_datamodule(Data(collate=KINDS[kind]), num_clients=1, eval_batch_size=4)
    loop = FederatedLoop(FedAvg(module=Logs()))
    ours.fit(loop, datamodule=data)
    for key in ("train/size", "val/size"):
        assert loop.round_metrics[key] == pytest.approx(float(plain.callback_metrics[key]), rel=1e-6), key


class Opaque:
    """A batch in which Lightning finds no samples."""

    def __init__(self, items):
        self.x = torch.stack([x for x, _ in items])

    def to(self, device):
        return self


class OfOpaque(Net):
    given = {}

    def training_step(self, batch, batch_idx):
        self.log("train/loss", 1.0)  # a step of training, for which Lightning asks no number
        return self.net(batch.x).square().mean()

    def validation_step(self, batch, batch_idx):
        self.log("val/sum", 1.0, reduce_fx="sum")
        self.log("val/mean", self.net(batch.x).mean(), **{name: len(batch.x) for name in self.given})


def test_a_mean_over_a_batch_of_unknown_size_is_refused_as_in_lightning():
    class Given(OfOpaque):
        given = {"batch_size"}

    for kind, is_refused in ((OfOpaque, True), (Given, False)):
        data = FederatedDataModule.from_datamodule(Data(collate=Opaque), num_clients=1, eval_batch_size=4)
        plain_error = nullcontext() if not is_refused else pytest.raises(MisconfigurationException)
        with plain_error:
            trainer(1).fit(kind(), Data(collate=Opaque))
        words = r"self.log\('val/mean'\) needs the number of samples in a batch, and finds none in it; give it by"
        with pytest.raises(ValueError, match=words) if is_refused else nullcontext():
            trainer(1).fit(FederatedLoop(FedAvg(module=kind())), datamodule=data)


# --- methods that take the samples of a batch one by one ---

MIXED = {
    "text first": KINDS["text first"],
    "dataclass": KINDS["dataclass"],
    "none first": lambda items: (None, *stacked(items)),
    "texts and a number": lambda items: {"id": ["a"] * len(items), "xy": stacked(items), "n": torch.tensor(2.0)},
}


def x_and_y(batch):
    if isinstance(batch, Graph):
        return batch.x, batch.y
    if isinstance(batch, dict):
        return batch.get("xy") or (batch["x"], batch["y"])
    return batch[-2], batch[-1]


class Trains(Net):
    def __init__(self):
        super().__init__()
        nn.init.ones_(self.net.weight)
        nn.init.zeros_(self.net.bias)

    def training_step(self, batch, batch_idx):
        x, y = x_and_y(batch)
        loss = F.cross_entropy(self.net(x), y)
        self.log("train/loss", loss)
        return loss


METHODS = {
    name: kind
    for name in dir(methods)
    if inspect.isclass(kind := getattr(methods, name)) and issubclass(kind, ClientModule) and not kind.needs
}
METHODS["FedBABU"] = partial(methods.FedBABU, head="module.net.bias")  # which must be told a part of the module
WRAPPERS = {
    "dp_sgd": lambda module: methods.dp_sgd(module, noise_multiplier=0.1),
    "local_dp": lambda module: methods.local_dp(module, noise_multiplier=0.1),
}


@pytest.mark.parametrize("name", [*METHODS, *WRAPPERS])
def test_a_method_does_not_depend_on_what_else_is_in_a_batch(name):
    def fit(collate):
        client = WRAPPERS[name](Trains()) if name in WRAPPERS else METHODS[name](module=Trains())
        data = FederatedDataModule.from_datamodule(Data(collate=collate), num_clients=2, proxy_size=0.2)
        loop = FederatedLoop(client, seed=1)
        trainer(1, limit_val_batches=0).fit(loop, datamodule=data)
        return weights_of(loop)

    expected = fit(stacked)
    for kind, collate in MIXED.items():
        # Gradients of single samples are taken one by one if a batch has texts.
        torch.testing.assert_close(fit(collate), expected, rtol=1e-5, atol=1e-7, msg=kind)


def test_each_sample_has_its_own_text():
    batch = {"text": ["a", "bb", "ccc"], "x": torch.tensor([1.0, 2.0, 3.0]), "n": 2}

    def loss(params, sample):
        assert sample["n"] == 2
        return params["w"] * sample["x"].sum() * len(sample["text"][0])

    found = sample_gradients(loss, {"w": torch.tensor(1.0)}, batch, at_once=2)
    assert torch.cat([part["w"] for part in found]).tolist() == [1.0, 4.0, 9.0]


def test_samples_that_cannot_be_told_apart_are_refused():
    batch = (torch.tensor(1.0), torch.zeros(4, 2))
    with pytest.raises(ValueError, match=r"must have one length .*, got 1 samples and a tensor of 4"):
        list(sample_gradients(lambda params, sample: params["w"], {"w": torch.tensor(1.0)}, batch, at_once=8))


def test_a_named_third_argument_before_any_others_keeps_its_default():
    def step(batch, batch_idx, stage="val", *rest):
        return stage

    assert evaluation_arguments(step, batch_idx=4, dataloader_idx=1) == ([4], {})


def test_a_number_of_the_batch_in_a_tensor_belongs_to_every_sample():
    batch = {"x": torch.tensor([1.0, 2.0]), "scale": torch.tensor(3.0)}
    parts = sample_gradients(
        lambda params, sample: params["w"] * sample["x"].sum() * sample["scale"],
        State({"w": torch.tensor(1.0)}),
        batch,
        at_once=2,
    )
    assert torch.cat([part["w"] for part in parts]).tolist() == [3.0, 6.0]
