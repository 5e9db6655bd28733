"""The random generators that a user's objects keep are found wherever the objects can reach them."""

import functools
import importlib
import random
import sys
from collections import UserDict, deque
from dataclasses import dataclass
from functools import partial
from types import BuiltinMethodType

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from torch import nn

from fl_lightning.client.metric_states import parts_that_count
from fl_lightning.utils.own_generators import generators_in, generators_of

MINE = np.random.default_rng(1)
BOX = {"mine": random.Random(1)}


class Slots:
    __slots__ = ("rng", "unset")

    def __init__(self):
        self.rng = random.Random(1)


class InheritedSlots(Slots):
    def __init__(self):
        super().__init__()
        self.more = 1


@dataclass(slots=True)
class Settings:
    rng: object


class OfTheClass:
    rng = np.random.default_rng(1)


class Holder:
    def __init__(self):
        self.rng = torch.Generator()


HOLDER = Holder()


class Items(list):
    def __init__(self):
        self.rng = random.Random(1)


class Static:
    @staticmethod
    def draw():
        return MINE.random()


class OfClass:
    @classmethod
    def draw(cls):
        return MINE.random()


class Property:
    @property
    def value(self):
        return MINE.random()


def with_default(x, rng=np.random.default_rng(1)):  # noqa: B008 - the generator is kept by the function
    return rng.random()


def with_named_default(x, *, rng=np.random.default_rng(1)):  # noqa: B008
    return rng.random()


def helper():
    return MINE.random()


def calling():
    return helper()


def in_a_comprehension():
    return [MINE.random() for _ in range(2)]


def in_a_lambda():
    return lambda: MINE.random() + 1


def in_a_dict():
    return BOX["mine"].random()


def in_an_object():
    return torch.rand((), generator=HOLDER.rng)


def nested(value, levels):
    """Keep a value as a Subset of a ConcatDataset of datasets with a Compose of transforms does."""
    for _ in range(levels // 2):
        value = Settings([value])
    return value


@functools.wraps(helper)
def decorated():
    return helper()


PLACES = {
    "slots": Slots,
    "slots of a base": InheritedSlots,
    "dataclass with slots": lambda: Settings(random.Random(1)),
    "attribute of the class": OfTheClass,
    "default": lambda: with_default,
    "named default": lambda: with_named_default,
    "default of a partial": lambda: functools.partial(with_default),
    "helper": lambda: calling,
    "comprehension": lambda: in_a_comprehension,
    "lambda": lambda: in_a_lambda,
    "global dict": lambda: in_a_dict,
    "global object": lambda: in_an_object,
    "decorated": lambda: decorated,
    "cached": lambda: functools.lru_cache(helper),
    "property": Property,
    "static method": Static,
    "class method": OfClass,
    "attribute of a list": Items,
    "deque": lambda: deque([random.Random(1)]),
    "user's dict": lambda: UserDict(mine=random.Random(1)),
    "set": lambda: {random.Random(1)},
    "key of a dict": lambda: {random.Random(1): "mine"},
    "bits of numpy": lambda: [np.random.PCG64(1)],
    "within several datasets": lambda: nested(Slots(), levels=12),
}


@pytest.mark.parametrize("place", PLACES)
def test_one_generator_is_found(place):
    assert len(generators_in(PLACES[place]())) == 1


class Module(pl.LightningModule):
    def __init__(self, **parts):
        super().__init__()
        self.net = nn.Linear(1, 1)
        vars(self).update(parts)


class Globally(Module):
    def training_step(self, batch, batch_idx):
        return MINE.random()


@pytest.mark.parametrize("place", PLACES)
def test_a_module_keeps_it_there(place):
    assert len(generators_of(Module(mixing=PLACES[place]()))) == 1


def test_a_step_names_a_global_one():
    assert generators_of(Globally()) == [MINE]


def test_nothing_of_libraries_and_no_shared_generator_is_found():
    found = generators_in(random, random.random, np.random.rand, torch.rand, nn.Dropout(), pl.Trainer, sys, print)
    assert not found
    module = Module(fit=pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False))
    assert not generators_of(module, nn.Sequential(nn.Dropout()))


class SaysItIsBuiltin:
    """Says that it is a function in C, as the functions of Boost.Python do, and has no `__self__`."""

    @property
    def __class__(self):
        return BuiltinMethodType


@pytest.mark.parametrize("place", [list, Settings, partial])
def test_what_only_says_that_it_is_a_function_in_c_does_not_stop_the_search(place):
    function = SaysItIsBuiltin()
    held = place([function]) if place is not partial else partial(print, function)
    assert generators_in(held, BOX) == [BOX["mine"]]


def test_what_the_operating_system_draws_cannot_be_keyed():
    assert not generators_in(Settings(random.SystemRandom()))


class Noise(nn.Module):
    def __init__(self):
        super().__init__()
        self.rng = np.random.default_rng(1)


def test_a_generator_behind_a_large_net_is_found():
    net = nn.Sequential(*[nn.Conv2d(1, 1, 1) for _ in range(500)], Noise())
    assert generators_of(*net.modules()) == [net[-1].rng]


LIBRARY = """
import random

_rng = random.Random()


def new_id():
    return _rng.random()
"""
USER = """
from a_library import new_id

class Mine:
    def save(self):
        return new_id()
"""


@pytest.mark.parametrize(("folder", "count"), [("site-packages", 0), ("mine", 1)])
def test_a_generator_that_an_installed_library_keeps_for_itself_is_left_alone(tmp_path, monkeypatch, folder, count):
    for name, place, text in (("a_library", folder, LIBRARY), ("a_user", "own", USER)):
        (tmp_path / place).mkdir()
        (tmp_path / place / f"{name}.py").write_text(text)
        monkeypatch.syspath_prepend(str(tmp_path / place))
        monkeypatch.delitem(sys.modules, name, raising=False)
    importlib.invalidate_caches()
    mine = importlib.import_module("a_user").Mine()
    assert len(generators_in(mine)) == count


class AnswersNothing:
    """It raises for every attribute that it lacks, as the placeholders of pydantic do."""

    __slots__ = ("rng",)

    def __init__(self):
        self.rng = random.Random(1)

    def __getattr__(self, name):
        raise RuntimeError(f"no {name} yet")


class AnswersLater:
    """It raises for every attribute until it is loaded."""

    def __init__(self):
        self.rng = random.Random(1)

    def __getattribute__(self, name):
        if name == "__class__":
            return object.__getattribute__(self, name)
        raise RuntimeError(f"{name} is not loaded yet")


@pytest.mark.parametrize("kind", [AnswersNothing, AnswersLater])
def test_an_object_whose_attributes_raise_is_searched_all_the_same(kind):
    holder = pl.LightningModule()
    holder.settings = kind()
    assert len(generators_in(kind())) == 1
    assert len(generators_of(holder)) == 1
    assert parts_that_count(holder) == []
