"""Every checkpoint loads with `weights_only=True`, whatever types the numbers and texts of a run have."""

from collections import OrderedDict, UserList, defaultdict, deque, namedtuple
from collections.abc import Mapping
from enum import Enum, IntEnum
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from torch import nn

from fl_lightning import FederatedDataModule, FederatedLoop
from fl_lightning.aggregation import UpdateTransform
from fl_lightning.callbacks import ClientCheckpoint
from fl_lightning.data import TensorSource
from fl_lightning.methods import FedAvg, FedProx
from fl_lightning.nets import Perceptron
from fl_lightning.utils.plain import is_readable, plain_value
from tests.toys import equal, samples, sgd, toy_data, trainer, weights_of


class Word(str, Enum):  # noqa: UP042 - as code for Python 3.10 has it
    A = "a"


class Count(IntEnum):
    ONE = 1


class Half(float, Enum):
    VALUE = 0.5


class Text(str):
    """A subclass of a plain type."""


class Image(torch.Tensor):
    """A tensor of another class, which can be copied, as those of torchvision."""

    def __deepcopy__(self, memo):
        return self.as_subclass(torch.Tensor).clone().as_subclass(Image)


Pair = namedtuple("Pair", ["first", "second"])

NUMBERS = {
    "np.float64": np.linspace(0, 1, 3)[1],
    "np.float32": np.float32(0.5),
    "np.longdouble": np.longdouble(0.5),
    "enum of floats": Half.VALUE,
}
"""Forms of 0.5."""

VALUES = {
    **NUMBERS,
    "np.str_": np.array(["a"])[0],
    "np.int64": np.arange(2)[1],
    "np.bool_": np.bool_(True),
    "enum of texts": Word.A,
    "enum of numbers": Count.ONE,
    "text": Text("a"),
    "named tuple": Pair(1, Word.A),
    "nested": {Word.A: [Pair(np.float64(0.5), (Count.ONE,))]},
    "defaultdict": defaultdict(list, a=[np.float64(0.5)]),
    "path": Path("a"),
    "array": np.linspace(0, 1, 3),
    "texts": np.array(["a", "b"]),
    "array in another byte order": np.array([0.5, 1.0], dtype=">f8"),
    "array of long doubles": np.array([0.5, 1.0], dtype=np.longdouble),
    "frozen set": frozenset([np.int64(1)]),
    "frozen set as a key": {frozenset("ba"): 1, (1, frozenset([2])): np.float64(0.5)},
    "set of frozen sets": {frozenset("a")},
    "deque": deque([np.float64(0.5)], maxlen=3),
    "range": range(3),
    "list of the user's": UserList([Word.A]),
    "tensor of another class": torch.ones(2).as_subclass(Image),
}

CHANGED = {
    "path": "a",
    "frozen set as a key": {("a", "b"): 1, (1, (2,)): 0.5},
    "set of frozen sets": {("a",)},
    "deque": [0.5],
    "range": [0, 1, 2],
}
"""Plain forms that are not equal to the value."""

IN_MEMORY = {name: value for name, value in VALUES.items() if isinstance(value, np.generic | str | int | float | tuple)}
IN_MEMORY |= {name: VALUES[name] for name in ("nested", "defaultdict", "tensor of another class")}
"""Values that the memory of a client keeps. It refuses others in a sentence."""


def plain_types(value):
    """All types in a pytree."""
    if isinstance(value, Mapping):
        return {type(value)}.union(*(plain_types(each) for pair in value.items() for each in pair))
    if isinstance(value, list | tuple | set):
        return {type(value)}.union(*map(plain_types, value))
    return {type(value)}


@pytest.mark.parametrize("kind", VALUES)
def test_the_plain_form_has_exact_types_and_the_value(kind):
    value = VALUES[kind]
    plain = plain_value(value)
    assert plain_types(plain) <= {dict, list, tuple, set, str, int, float, bool, torch.Tensor}
    assert is_readable(plain)
    assert plain_value(plain) is plain
    if isinstance(value, np.ndarray | torch.Tensor):
        assert [*plain] == [*value]
    else:
        assert plain == CHANGED.get(kind, value)


def test_a_plain_value_is_the_same_object():
    state = nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1)).state_dict()
    whole = {"state_dict": state, "list": [1, (2.0, None)], "set": {1}, "type": torch.float32, "size": torch.Size([2])}
    assert plain_value(whole) is whole
    edited = OrderedDict(state, x=np.float64(1))
    edited._metadata = state._metadata
    plain = plain_value(edited)
    assert type(plain) is OrderedDict
    assert plain._metadata is state._metadata
    assert plain["0.weight"] is state["0.weight"]


class Remembers(FedProx):
    """Keeps a value in the memory of each client."""

    kept = None

    def reply(self, exchange, local):
        before = self.memory.get("value")
        assert plain_types(before) <= {type(None), dict, list, str, int, float, bool, torch.Tensor}
        self.memory["value"] = self.kept
        return {}


class Keeps(UpdateTransform):
    def __init__(self, value):
        self.value = value

    def state_dict(self):
        return {"value": self.value}


class Holds(pl.Callback):
    """Keeps a value, and adds it to the row of each round."""

    def __init__(self, value):
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def on_train_batch_end(self, trainer, loop, *args):
        if isinstance(self.value, float):
            loop.round_metrics["mine"] = self.value


class Module(pl.LightningModule):
    def __init__(self, lr=0.1, more=None):
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(0)
        self.net = nn.Linear(4, 3)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)

    def on_save_checkpoint(self, checkpoint):
        checkpoint["mine"] = self.hparams.more


class Data(FederatedDataModule):
    """Adds a value to its own state."""

    value = None

    def state_dict(self):
        return {**super().state_dict(), "value": self.value}


def data_with(value):
    source = TensorSource(samples(40), samples(12, seed=1), num_classes=3)
    data = Data(source, num_clients=3, batch_size=5)
    data.value = value
    return data


def in_module(value):
    lr = value if isinstance(value, float | np.floating) else 0.1
    return {"client": Module(lr, value)}


def in_memory(value):
    client = Remembers(mu=0.1)
    client.kept = value
    return {"client": client}


def in_settings(value):
    return {
        "client": FedProx(mu=value, optimizer=partial(torch.optim.SGD, lr=value)),
        "server_optimizer": partial(torch.optim.SGD, lr=value),
        "server_lr_scheduler": partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=value),
        "clip_norm": value,
    }


PLACES = {
    "module": (in_module, VALUES),
    "settings": (in_settings, {name: value for name, value in NUMBERS.items() if isinstance(value, float)}),
    "memory": (in_memory, IN_MEMORY),
    "transform": (lambda value: {"client": FedAvg(), "transforms": [Keeps(value)]}, VALUES),
    "callback": (lambda value: {"client": FedAvg(), "callbacks": [Holds(value)]}, VALUES),
    "data": (lambda value: {"client": FedAvg(), "data": data_with(value)}, VALUES),
}
"""Where a value comes in, and the values that make sense there."""

CASES = [(place, kind) for place, (_, values) in PLACES.items() for kind in values]


def run(parts, rounds, folder, ckpt_path=None):
    parts = dict(parts)
    data = parts.pop("data", None) or toy_data()
    callbacks = [*parts.pop("callbacks", []), ClientCheckpoint(folder)]
    fitted = trainer(rounds, folder, callbacks=callbacks)
    loop = FederatedLoop(parts.pop("client"), seed=3, **parts)
    fitted.fit(loop, datamodule=data, ckpt_path=ckpt_path)
    return loop


@pytest.mark.parametrize(("place", "kind"), CASES)
def test_a_checkpoint_is_read_and_continued(place, kind, tmp_path):
    make, values = PLACES[place]
    path = tmp_path / "one.ckpt"
    run(make(values[kind]), 1, tmp_path).trainer.save_checkpoint(path)
    saved = torch.load(path, weights_only=True)
    assert plain_types(saved["federated"]["settings"]) <= {dict, list, str, int, float, bool, type(None)}
    torch.load(tmp_path / "client.ckpt", weights_only=True)
    whole = run(make(values[kind]), 2, tmp_path)
    again = run(make(values[kind]), 2, tmp_path, ckpt_path=path)
    assert equal(weights_of(whole), weights_of(again))


def test_settings_are_compared_by_value(tmp_path):
    """A sweep writes `np.float64`, a file the same number."""
    lr, mu = np.linspace(0, 1, 3)[1:]
    path = tmp_path / "one.ckpt"
    optimizer = partial(torch.optim.SGD, lr=0.1)
    run({"client": FedProx(mu=lr, optimizer=optimizer)}, 1, tmp_path).trainer.save_checkpoint(path)
    run({"client": FedProx(mu=0.5, optimizer=optimizer)}, 2, tmp_path, path)
    with pytest.raises(ValueError, match=r"model\.client\.mu was 0\.5, is 1\.0"):
        run({"client": FedProx(mu=mu, optimizer=optimizer)}, 2, tmp_path, path)


class Odd:
    """An object without a plain form."""


class Color(Enum):
    RED = "red"


KEYS = {"enum": Color.RED, "class": Odd, "enum in a tuple": (1, Color.RED)}


@pytest.mark.parametrize("kind", KEYS)
def test_an_object_that_is_a_key_is_found(kind, tmp_path, caplog):
    """A module's entry is left out and named; a callback's state is named."""
    caplog.set_level("INFO")
    value = {"a": 1, KEYS[kind]: 2}
    path = tmp_path / "one.ckpt"
    assert not is_readable(plain_value(value))
    run({"client": Module(more=value)}, 1, tmp_path).trainer.save_checkpoint(path)
    saved = torch.load(path, weights_only=True)
    assert saved["federated"]["client"]["mine"] == {"a": 1}
    assert f"mine.{KEYS[kind]}" in saved["federated"]["client"]["left_out"]
    run({"client": FedAvg(), "callbacks": [Holds(value)]}, 1, tmp_path).trainer.save_checkpoint(path)
    assert f"callbacks.Holds.value.{KEYS[kind]} of the checkpoint are objects" in caplog.text


@pytest.mark.parametrize("lr", [np.array(0.5), np.longdouble(0.5), torch.tensor(0.5)], ids=["array", "long", "tensor"])
def test_a_rate_of_one_number_is_that_number(lr, tmp_path):
    found = []
    for rate in (0.5, lr):
        path = tmp_path / "one.ckpt"
        parts = {"client": FedProx(mu=0.1, optimizer=partial(torch.optim.SGD, lr=rate))}
        loop = run(parts, 1, tmp_path)
        loop.trainer.save_checkpoint(path)
        torch.load(path, weights_only=True)
        found.append(weights_of(loop))
    assert equal(*found)


def test_an_object_of_a_callback_is_named(tmp_path, caplog):
    caplog.set_level("INFO")
    loop = run({"client": FedAvg(), "callbacks": [Holds(Odd())]}, 1, tmp_path)
    loop.trainer.save_checkpoint(tmp_path / "one.ckpt")
    loop.trainer.save_checkpoint(tmp_path / "one.ckpt")
    assert caplog.text.count("callbacks.Holds.value of the checkpoint are objects") == 1
    again = trainer(2, tmp_path, callbacks=[Holds(Odd())])
    loop = FederatedLoop(FedAvg(), seed=3)
    again.fit(loop, datamodule=toy_data(), ckpt_path=tmp_path / "one.ckpt", weights_only=False)
    assert loop.trainer.current_epoch == 2


@pytest.mark.parametrize("kind", [name for name, value in NUMBERS.items() if isinstance(value, float)])
def test_parties_of_a_real_federation_have_the_same_text_of_equal_settings(kind):
    """They compare digests of it."""
    texts = []
    for value in (NUMBERS[kind], 0.5):
        optimizer = partial(torch.optim.SGD, lr=value)
        loop = FederatedLoop(FedProx(mu=value, optimizer=optimizer), seed=1, clip_norm=value)
        texts.append(repr(loop.parts.described("32-true", 3)))
    assert texts[0] == texts[1]


ARRAYS = {
    "0-d array": (np.array(0.5), True),
    "array of one": (np.array([0.5]), True),
    "array of two": (np.ones(2), False),
    "tensor of one": (torch.ones(1), True),
    "tensor of two": (torch.ones(2), False),
}
"""Values that are no number, and whether `.item()` gives the number in them."""


@pytest.mark.parametrize("kind", ARRAYS)
def test_an_array_is_no_number_of_a_setting(kind):
    """Items of `np.linspace` are numbers; a 0-d array ended the first step of training."""
    value, has_item = ARRAYS[kind]
    made = {
        "mu": lambda: FedProx(mu=value),
        "clip_norm": lambda: FederatedLoop(FedAvg(), clip_norm=value),
    }
    for name, make in made.items():
        remedy = rf"give the number in it, {name}\.item\(\)$" if has_item else "give one number$"
        with pytest.raises(TypeError, match=rf"{name} must be a number, got \w+; {remedy}"):
            make()
    with pytest.raises(TypeError, match="local_epochs must be a whole number"):
        FederatedLoop(FedAvg(), local_epochs=np.array(2))


def test_an_item_of_a_sweep_of_tensors_is_a_number(tmp_path):
    for value in torch.linspace(0, 1, 3):
        loop = FederatedLoop(FedProx(net=Perceptron, mu=value, optimizer=sgd()), seed=1, clip_norm=1 + value)
        fitted = trainer(1)
        fitted.fit(loop, datamodule=toy_data((4, 4)))
        fitted.save_checkpoint(tmp_path / "run.ckpt")
        torch.load(tmp_path / "run.ckpt", weights_only=True)
