"""A hook that cannot be called is refused when its class is made, with the right arguments; every other one passes."""

import pydoc
from abc import abstractmethod
from functools import partialmethod, wraps
from importlib import import_module
from importlib.util import find_spec
from pkgutil import walk_packages

import pytest
from pytorch_lightning import LightningModule

import fl_lightning
from fl_lightning import Aggregator, ClientModule, FederatedLoop
from fl_lightning.aggregation import GatheringAggregator, Inquiry, NormClip, ServerModule, UpdateTransform
from fl_lightning.data import DirichletPartition, Partition, Source
from fl_lightning.methods import FedAvg, FedNTD
from fl_lightning.utils import signatures
from tests.user_modules import Plain


def bare(self):
    """Take nothing."""


WRONG = [
    (ClientModule, "training_step", lambda self, batch: None, "self, batch, batch_idx"),
    (ClientModule, "training_step", lambda self, batch, batch_idx, optimizer_idx: None, "self, batch, batch_idx"),
    (FedAvg, "local_loss", lambda self, batch: None, "self, batch, batch_idx"),
    (FedNTD, "receive", lambda self, broadcast: None, "self, broadcast, local"),
    (FedAvg, "receive", bare, "self, broadcast, local"),
    (FedAvg, "phases", bare, "self, exchange"),
    (FedAvg, "reply", lambda self, local: {}, "self, exchange, local"),
    (FedAvg, "reply", lambda exchange, local: {}, "self, exchange, local"),
    (FedAvg, "is_personal", lambda self, name: True, "self, name, owner"),
    (FedAvg, "accumulated_lr_slope", bare, "self, accumulated_lr"),
    (FedAvg, "deployed", lambda self, x: x, "self"),
    (FedAvg, "nonfinite_hint", lambda self, error: "", "self"),
    (Aggregator, "add", bare, "self, update"),
    (Aggregator, "finish", lambda self, aggregate: None, "self"),
    (Aggregator, "weight", bare, "self, update"),
    (Aggregator, "client_statistics", bare, "self, update"),
    (Aggregator, "begin_round", bare, "self, cohort"),
    (Aggregator, "setup", lambda self, server: None, "self"),
    (GatheringAggregator, "reduce", bare, "self, updates"),
    (ServerModule, "broadcast", lambda self, exchange: None, "self, exchange, client_id"),
    (ServerModule, "finish", lambda self, aggregate: None, "self, exchange, aggregate"),
    (ServerModule, "add", lambda self, exchange, update: None, "self, update"),
    (ServerModule, "evaluation_weights", bare, "self, weights"),
    (UpdateTransform, "on_client", lambda self, update: update, "self, update, broadcast"),
    (NormClip, "on_server", lambda self, update: update, "self, update, broadcast"),
    (UpdateTransform, "setup", bare, "self, server"),
    (Partition, "__call__", lambda self, samples, num_clients: [], "self, samples, num_clients, generator"),
    (DirichletPartition, "partition_test", lambda self, dealt, test: [], "self, dealt, test, size"),
    (Source, "load", lambda self, root: (), "self"),
    (Source, "attach", bare, "self, trainer"),
]


@pytest.mark.parametrize(("base", "hook", "wrong", "right"), WRONG)
def test_a_wrong_hook_is_refused_with_the_right_arguments(base, hook, wrong, right):
    with pytest.raises(TypeError, match=rf"^Mine\.{hook} is called with \(.*; define {hook}\({right}\)$"):
        type("Mine", (base,), {hook: wrong})
    mixin = type("Mixin", (), {hook: wrong})
    with pytest.raises(TypeError, match=rf"^Mine\.{hook} is called with "):
        type("Mine", (mixin, base), {})
    child = type("Child", (base,), {})
    with pytest.raises(TypeError, match=f"define {hook}"):
        type("Mine", (child,), {hook: wrong})


def logged(function):
    @wraps(function)
    def with_a_logger(self, *args):
        return function(self, print, *args)

    return with_a_logger


def test_what_can_be_called_passes():
    class Client(FedAvg):
        def receive(self, *args, **kwargs):
            super().receive(*args, **kwargs)

        def phases(self, exchange, further=3, *, more=None):
            yield from super().phases(exchange)

        @logged
        def reply(self, logger, exchange, local):
            return {}

        @staticmethod
        def is_personal(name, owner):
            return False

        @classmethod
        def accumulated_lr_slope(cls, accumulated_lr):
            return 1.0

        def training_step(self, given, i):
            return self.local_loss(given, i)

        def forward(self, x):
            return super().forward(x)

        def configure_optimizers(self):
            return super().configure_optimizers()

        def on_train_batch_start(self, *_):
            """Lightning's own hooks are Lightning's to check."""

        def own(self):
            """A method that the package does not know."""

        deployed = partialmethod(lambda self, x: x, 3)

    class Between(ServerModule):
        @abstractmethod
        def finish(self, exchange, aggregate, *more):
            """Of which there are several."""

    class Own(Between):
        add = print

        def finish(self, exchange, aggregate=None):
            return aggregate

    class Deals(Partition):
        column = "user"

        def __call__(self, samples, num_clients, generator, /):
            return []

    Client(), Own(), Deals()


def test_every_class_of_the_package_passes_as_if_it_were_a_users(monkeypatch):
    kinds = set()
    for module in walk_packages(fl_lightning.__path__, "fl_lightning."):
        if module.name.endswith("__main__"):
            continue
        # fl_lightning.flower can be imported with its extra only.
        if module.name.startswith("fl_lightning.flower.") and find_spec("flwr") is None:
            continue
        values = vars(import_module(module.name)).values()
        kinds.update(value for value in values if isinstance(value, type))
    bases = (ClientModule, Aggregator, ServerModule, Inquiry, Partition, UpdateTransform, Source)
    checked = 0
    for base in bases:
        monkeypatch.setattr(signatures, "PACKAGE", base.__module__)
        for kind in kinds:
            if issubclass(kind, base) and not kind.__module__.startswith(base.__module__):
                signatures.check_overrides(kind)
                checked += 1
    assert checked > 50


MODULE_HOOKS = [
    ("training_step", bare, r"is called with \(batch\), but takes \(\)"),
    ("training_step", lambda self, batch, batch_idx, optimizer_idx: None, r"called with \(batch, batch_idx\)"),
    ("on_train_batch_start", lambda self, batch: None, r"define on_train_batch_start\(self, batch, batch_idx\)"),
    ("on_train_batch_end", lambda self, batch, i: None, r"on_train_batch_end\(self, outputs, batch, batch_idx\)"),
    ("on_train_epoch_end", lambda self, outputs: None, r"define on_train_epoch_end\(self\)"),
    ("on_before_optimizer_step", bare, r"define on_before_optimizer_step\(self, optimizer\)"),
    ("setup", bare, r"define setup\(self, stage\)"),
    ("on_validation_epoch_end", lambda self, outputs: None, r"define on_validation_epoch_end\(self\)"),
]


@pytest.mark.parametrize(("hook", "wrong", "says"), MODULE_HOOKS)
def test_a_wrong_hook_of_a_module_is_refused_when_it_becomes_a_client(hook, wrong, says):
    with pytest.raises(TypeError, match=rf"Mine\.{hook} .*{says}"):
        FederatedLoop(type("Mine", (Plain,), {hook: wrong})())


def test_lightnings_flexible_hooks_pass():
    class Mine(Plain):
        def training_step(self, batch):
            return super().training_step(batch, 0)

        def setup(self, stage=None):
            """Lightning hands it on by its name or by its place."""

        def on_validation_batch_end(self, outputs, batch, batch_idx):
            """Without the index of the loader."""

        def on_test_batch_end(self, outputs, batch, batch_idx, dataloader_idx):
            """With it."""

        def on_train_batch_end(self, *args):
            """Whatever comes."""

        @logged
        def on_train_epoch_end(self, logger):
            """Decorated."""

    assert isinstance(FederatedLoop(Mine()).client.module, LightningModule)
    Mine.on_train_start = logged(lambda self, logger: None)
    module = Mine()
    module.on_train_epoch_start = lambda: None
    FederatedLoop(module)


def test_help_of_a_method_shows_its_arguments_and_methods_before_those_of_lightning():
    shown = pydoc.plain(pydoc.render_doc(FedNTD))
    arguments, methods = shown.split("Methods defined here", 1)
    assert arguments.count("\n") < 50
    assert all(f"{name}:" in arguments for name in ("beta", "net", "optimizer", "module"))
    homes = ["receive(", "inherited from fl_lightning.client", "inherited from pytorch_lightning", "from torch.nn"]
    assert sorted(homes, key=methods.index) == homes

    class Mine(ClientModule):
        """A client.

        Args:
            base: of `ClientModule`,
                on two lines.

        Note:
            The end.
        """

    assert Mine.__doc__.startswith(
        "A client.\n\nArgs:\n    base: of `ClientModule`,\n        on two lines.\n    net: A factory"
    )
    assert Mine.__doc__.endswith("None takes it from the data.\n\nNote:\n    The end.")
