"""Random numbers of the user's own code are keyed for each client, whatever `model.chunk` says."""

import logging
import random
from functools import partial

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from fl_lightning import ClientModule, FederatedDataModule, FederatedLoop
from fl_lightning.data import TensorSource
from fl_lightning.engines.draws import SharedDraws
from fl_lightning.types import Phase
from tests.toys import equal, samples, trainer, weights_of

X, Y = samples(48)
REASON = "draw random numbers, which are keyed for one client at a time"


def torch_draw():
    return torch.rand(()).item()


DRAWS = {"torch": torch_draw, "numpy": np.random.rand, "python": random.random}


class Items(Dataset):
    """Samples to which a draw is added.

    Args:
        draw: Draws a number. None: the samples are as they are.
    """

    def __init__(self, draw=None):
        self.draw = draw

    def __len__(self):
        return len(Y)

    def __getitem__(self, index):
        shift = 0.0 if self.draw is None else self.draw()
        return X[index] + shift, Y[index]


def drawing_collate(items):
    batch = torch.utils.data.default_collate(items)
    return batch[0] + torch.rand(1), batch[1]


class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 3)
        nn.init.ones_(self.net.weight)
        nn.init.zeros_(self.net.bias)

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Augmenting(Net):
    def on_after_batch_transfer(self, batch, dataloader_idx):
        return batch[0] + torch.rand(len(batch[0]), 1), batch[1]


class Mixing(Net):
    """Draws in its step by NumPy, which torch.func does not see."""

    def training_step(self, batch, batch_idx):
        share = np.random.beta(0.5, 0.5)
        return share * super().training_step(batch, batch_idx)


class Drawing(ClientModule):
    """Draws the learning rate of its phase."""

    def __init__(self, **base):
        super().__init__(module=Net(), **base)

    def phases(self, exchange):
        return (Phase(lr=0.1 * random.random()),)


class Loaders(pl.LightningDataModule):
    def __init__(self, collate=None, draw=None):
        super().__init__()
        self.collate = collate
        self.draw = draw

    def train_dataloader(self):
        return DataLoader(Items(self.draw), batch_size=8, collate_fn=self.collate)


class AugmentingLoaders(Loaders):
    def on_before_batch_transfer(self, batch, dataloader_idx):
        return batch[0] + torch.rand(1), batch[1]


def unkeyed(x, generator):
    return x + torch.rand(len(x), 1)


def loaded(kind=Loaders, **settings):
    return FederatedDataModule.from_datamodule(kind(**settings), num_clients=6)


def in_memory():
    source = TensorSource((X, Y), (X, Y), num_classes=3, transform=unkeyed)
    return FederatedDataModule(source, num_clients=6, batch_size=8)


OWN = {
    "numpy": np.random.default_rng,
    "numpy's old one": np.random.RandomState,
    "numpy's bits": np.random.PCG64,
    "python": random.Random,
    "torch": lambda seed: torch.Generator().manual_seed(seed),
}
HERE = np.random.default_rng(5)


def drawn_from(own):
    if isinstance(own, torch.Generator):
        return torch.rand((), generator=own).item()
    if isinstance(own, np.random.BitGenerator):
        return own.random_raw() % 1000 / 1000
    return own.random() if hasattr(own, "random") else own.rand()


class Shift:
    """A transform with a generator of its own."""

    def __init__(self, own):
        self.own = own

    def __call__(self, x=None, generator=None):
        return drawn_from(self.own) if x is None else x + drawn_from(self.own)


class Nested(Shift):
    """A transform within others, whose generators lie in a set."""

    def __init__(self):
        super().__init__(random.Random(1))
        self.parts = {"first": [[{"own": [{self.own}]}]]}
        self.own = None

    def __call__(self):
        (own,) = self.parts["first"][0][0]["own"][0]
        return own.random()


class ByGlobal:
    def __call__(self):
        return HERE.random()


def closure(own):
    return lambda: drawn_from(own)


class MixingByItself(Net):
    """Draws in its step from a generator of its own."""

    def __init__(self):
        super().__init__()
        self.own = [np.random.default_rng(7)]

    def training_step(self, batch, batch_idx):
        return self.own[0].beta(0.5, 0.5) * super().training_step(batch, batch_idx)


class Share:
    """An object of the user's with a generator in `__slots__`."""

    __slots__ = ("own",)

    def __init__(self):
        self.own = np.random.default_rng(7)


class Slotted(Share):
    __slots__ = ()

    def __call__(self):
        return self.own.random()


class MixingByAnObject(Net):
    """Draws in its step from the generator of an object that it keeps."""

    def __init__(self):
        super().__init__()
        self.share = Share()

    def training_step(self, batch, batch_idx):
        return self.share.own.beta(0.5, 0.5) * super().training_step(batch, batch_idx)


def shifted_by_global():
    return HERE.random()


class ByHelper:
    def __call__(self):
        return sum(shifted_by_global() for _ in range(2))


class AugmentingByItself(Loaders):
    def __init__(self):
        super().__init__()
        self.own = random.Random(0)

    def on_before_batch_transfer(self, batch, dataloader_idx):
        return batch[0] + self.own.random(), batch[1]


def collate_by(own, items):
    batch = torch.utils.data.default_collate(items)
    return batch[0] + own.random(), batch[1]


class Stream(IterableDataset):
    """Samples without a length, to which draws from a generator of the stream's own are added."""

    def __init__(self):
        self.own = np.random.default_rng(2)

    def __iter__(self):
        for x, y in zip(X[:16], Y[:16], strict=True):
            yield x + self.own.random(), y


def streams():
    return FederatedDataModule.from_datasets({client_id: Stream() for client_id in range(6)}, batch_size=8)


def in_memory_by_itself():
    source = TensorSource((X, Y), (X, Y), num_classes=3, transform=Shift(random.Random(0)))
    return FederatedDataModule(source, num_clients=6, batch_size=8)


KINDS = {
    **{f"items, own {name}": (Net, lambda make=make: loaded(draw=Shift(make(1)))) for name, make in OWN.items()},
    "items, closure": (Net, lambda: loaded(draw=closure(np.random.default_rng(1)))),
    "items, method": (Net, lambda: loaded(draw=np.random.default_rng(1).random)),
    "items, global": (Net, lambda: loaded(draw=ByGlobal())),
    "collate_fn, own": (Net, lambda: loaded(collate=partial(collate_by, random.Random(0)))),
    "step, own": (MixingByItself, loaded),
    "step, own object": (MixingByAnObject, loaded),
    "items, own nested": (Net, lambda: loaded(draw=Nested())),
    "items, own slots": (Net, lambda: loaded(draw=Slotted())),
    "items, own global in a helper": (Net, lambda: loaded(draw=ByHelper())),
    "hook of the data module, own": (Net, lambda: loaded(AugmentingByItself)),
    "transform in memory, own": (Net, in_memory_by_itself),
    "streams, own": (Net, streams),
    **{f"items, {name}": (Net, lambda draw=draw: loaded(draw=draw)) for name, draw in DRAWS.items()},
    "collate_fn": (Net, lambda: loaded(collate=drawing_collate)),
    "hook of the module": (Augmenting, loaded),
    "hook of the data module": (Net, lambda: loaded(AugmentingLoaders)),
    "step": (Mixing, loaded),
    "phases": (Drawing, loaded),
    "transform in memory": (Net, in_memory),
}


def fit(kind, rounds=2, chunk=1, ckpt_path=None, callbacks=()):
    make_module, make_data = KINDS[kind]
    loop = FederatedLoop(make_module(), seed=3, chunk=chunk, local_epochs=2, max_local_steps=10)
    run = trainer(rounds, limit_val_batches=0, callbacks=list(callbacks))
    run.fit(loop, datamodule=make_data(), ckpt_path=ckpt_path)
    return loop, run


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "streams, own"])  # no stream is stacked
def test_clients_that_draw_are_trained_one_by_one(kind, caplog):
    alone, _ = fit(kind)
    with caplog.at_level(logging.INFO):
        together, _ = fit(kind, chunk=4)
    assert REASON in caplog.text
    assert equal(weights_of(together), weights_of(alone))


@pytest.mark.parametrize(
    "kind", ["items, numpy", "hook of the module", "step", *[kind for kind in KINDS if "own" in kind]]
)
def test_a_continued_run_draws_what_the_unbroken_one_draws(kind, tmp_path):
    chunk = 1 if kind == "streams, own" else 4
    unbroken, _ = fit(kind, chunk=chunk)
    _, run = fit(kind, rounds=1, chunk=chunk)
    path = tmp_path / "first.ckpt"
    run.save_checkpoint(path)
    continued, _ = fit(kind, chunk=chunk, ckpt_path=path)
    assert equal(weights_of(continued), weights_of(unbroken))


class Curious(pl.Callback):
    """Draws between the epochs of clients."""

    def on_client_epoch_end(self, run, loop, client_id, epoch):
        torch.rand(1)


@pytest.mark.parametrize("callbacks", [[], [Curious()]])
def test_code_of_the_user_that_does_not_draw_is_stacked(callbacks, caplog, monkeypatch):
    monkeypatch.setitem(KINDS, "nothing", (Net, loaded))
    alone, _ = fit("nothing")
    with caplog.at_level(logging.INFO):
        together, _ = fit("nothing", chunk=4, callbacks=callbacks)
    assert "one after the other" not in caplog.text
    torch.testing.assert_close(weights_of(together), weights_of(alone))


@pytest.mark.parametrize("name", DRAWS)
def test_a_draw_is_seen(name):
    draws = SharedDraws(torch.device("cpu"))
    assert not draws.happened()
    DRAWS[name]()
    assert draws.happened()
    draws.restart()
    assert not draws.happened()
