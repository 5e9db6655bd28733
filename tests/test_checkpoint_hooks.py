"""The checkpoint hooks of a user's module, and `client.ckpt`, are as plain Lightning has them, in both packages."""

from argparse import Namespace
from dataclasses import dataclass

import lightning.pytorch as twin
import pytest
import pytorch_lightning as pl
import torch
import yaml
from pytorch_lightning.cli import OptimizerCallable
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fl_lightning import FederatedDataModule, FederatedLoop
from fl_lightning.__main__ import main
from fl_lightning.callbacks import ClientCheckpoint
from fl_lightning.methods import Ditto, FedProx, Local
from tests.toys import equal, samples, toy_data, trainer, weights_of

BOTH = pytest.mark.parametrize("package", [pl, twin], ids=["pytorch_lightning", "lightning.pytorch"])
AROUND = pytest.mark.parametrize("around", [None, FedProx], ids=["alone", "in a method"])


class Steps:
    """A module without its package."""

    def build(self):
        torch.manual_seed(0)
        self.backbone = nn.Linear(4, 4).requires_grad_(False)
        self.net = nn.Linear(4, 3)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return nn.functional.cross_entropy(self.net(self.backbone(x)), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def plain(package):
    class Plain(Steps, package.LightningModule):
        def __init__(self):
            super().__init__()
            self.build()
            self.seen = []

        def on_save_checkpoint(self, checkpoint):
            self.seen.append(("save", described(checkpoint)))
            checkpoint["mine"] = {"epoch": checkpoint["epoch"]}

        def on_load_checkpoint(self, checkpoint):
            assert checkpoint["mine"]["epoch"] == checkpoint["epoch"]
            self.seen.append(("load", described(checkpoint)))

    return Plain


def described(checkpoint):
    """What a hook can count on."""
    counts = {name: checkpoint[name] for name in ("epoch", "global_step")}
    return {**counts, "names": sorted(checkpoint["state_dict"]), "keys": sorted(checkpoint)}


def partial_weights(package):
    """Its frozen backbone is not saved."""

    class Partial(Steps, package.LightningModule):
        def __init__(self):
            super().__init__()
            self.build()

        def on_save_checkpoint(self, checkpoint):
            for name in [*checkpoint["state_dict"]]:
                if name.startswith("backbone."):
                    del checkpoint["state_dict"][name]

        def on_load_checkpoint(self, checkpoint):
            assert "backbone.weight" not in checkpoint["state_dict"]
            own = {f"backbone.{name}": value for name, value in self.backbone.state_dict().items()}
            checkpoint["state_dict"].update(own)

    return Partial


def more_weights(package):
    """It keeps a value among the weights, and takes it out again."""

    class More(Steps, package.LightningModule):
        def __init__(self):
            super().__init__()
            self.build()
            self.count = torch.zeros(())

        def on_save_checkpoint(self, checkpoint):
            checkpoint["state_dict"]["count"] = self.count + 1

        def on_load_checkpoint(self, checkpoint):
            self.count = checkpoint["state_dict"].pop("count")

    return More


def renamed_weights(package):
    """Its file has other names."""

    class Renamed(Steps, package.LightningModule):
        def __init__(self):
            super().__init__()
            self.build()

        def on_save_checkpoint(self, checkpoint):
            state = checkpoint["state_dict"]
            checkpoint["state_dict"] = {f"old.{name}": value for name, value in state.items()}

        def on_load_checkpoint(self, checkpoint):
            state = checkpoint["state_dict"]
            checkpoint["state_dict"] = {name.removeprefix("old."): value for name, value in state.items()}

    return Renamed


def emptied(package):
    """It writes into the weights that it is given."""

    class Emptied(Steps, package.LightningModule):
        def __init__(self):
            super().__init__()
            self.build()

        def on_save_checkpoint(self, checkpoint):
            checkpoint["backbone"] = checkpoint["state_dict"]["backbone.weight"].clone()
            checkpoint["state_dict"]["backbone.weight"] = torch.zeros(4, 4, dtype=torch.bfloat16)
            checkpoint.pop("lr_schedulers", None)

        def on_load_checkpoint(self, checkpoint):
            assert checkpoint["state_dict"]["backbone.weight"].dtype == torch.bfloat16
            checkpoint["state_dict"]["backbone.weight"] = checkpoint["backbone"]

    return Emptied


EDITING = [partial_weights, more_weights, renamed_weights, emptied]


def run(module, rounds=1, folder=None, ckpt_path=None, around=None):
    fitted = trainer(rounds, folder, callbacks=[ClientCheckpoint(folder)] if folder else None)
    client = module if around is None else around(module=module, mu=0.1)
    loop = FederatedLoop(client, seed=3)
    fitted.fit(loop, datamodule=toy_data(), ckpt_path=ckpt_path)
    return loop


def plain_fit(package, module, folder):
    """Write `plain.ckpt` by a Trainer without a federation."""
    fitted = trainer(1, folder, kind=package.Trainer)
    fitted.fit(module, DataLoader(TensorDataset(*samples(20)), batch_size=5))
    fitted.save_checkpoint(folder / "plain.ckpt")
    return folder / "plain.ckpt"


@BOTH
@AROUND
def test_hooks_see_what_they_see_in_lightning(package, around, tmp_path):
    alone = plain(package)()
    path = plain_fit(package, alone, tmp_path)
    trainer(2, tmp_path, kind=package.Trainer).fit(
        alone, DataLoader(TensorDataset(*samples(20)), batch_size=5), ckpt_path=path, weights_only=True
    )
    (_, saved), (_, loaded) = alone.seen
    module = plain(package)()
    loop = run(module, rounds=2, around=around)
    loop.trainer.save_checkpoint(tmp_path / "two.ckpt")
    again = plain(package)()
    run(again, rounds=3, ckpt_path=tmp_path / "two.ckpt", around=around)
    ((_, our_saved),) = module.seen
    ((_, our_loaded),) = again.seen
    counts = {"epoch": loop.trainer.current_epoch, "global_step": loop.trainer.global_step}
    for ours, theirs in ((our_saved, saved), (our_loaded, loaded)):
        assert counts.items() <= ours.items()
        assert ours["names"] == theirs["names"]
        assert set(theirs["keys"]) <= set(ours["keys"])
        assert "federated" not in ours["keys"]


@BOTH
@AROUND
@pytest.mark.parametrize("kind", EDITING)
def test_edits_of_the_weights_are_seen_again_and_the_run_goes_on_exactly(kind, around, package, tmp_path):
    whole = run(kind(package)(), rounds=2, around=around)
    first = run(kind(package)(), rounds=1, around=around)
    before = weights_of(first)
    first.trainer.save_checkpoint(tmp_path / "one.ckpt")
    assert equal(before, weights_of(first))
    torch.load(tmp_path / "one.ckpt", weights_only=True)
    again = run(kind(package)(), rounds=2, around=around, ckpt_path=tmp_path / "one.ckpt")
    assert equal(weights_of(whole), weights_of(again))
    if kind is more_weights:
        assert again.client.module.count == 1


def test_weights_that_a_hook_leaves_are_named(tmp_path, caplog):
    class Resets(Steps, pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.build()

        def on_load_checkpoint(self, checkpoint):
            state = checkpoint["state_dict"]
            state["net.bias"] = torch.ones_like(state["net.bias"])

    caplog.set_level("INFO")
    run(Resets()).trainer.save_checkpoint(tmp_path / "one.ckpt")
    whole = run(Resets(), rounds=2)
    assert "leaves other weights" not in caplog.text
    again = run(Resets(), rounds=2, ckpt_path=tmp_path / "one.ckpt")
    assert "on_load_checkpoint of Resets leaves other weights in the state dict (net.bias ...)" in caplog.text
    assert equal(weights_of(whole), weights_of(again))


def test_a_federation_that_is_loaded_alone_gives_the_hooks_their_checkpoint(tmp_path):
    run(plain(pl)(), rounds=2).trainer.save_checkpoint(tmp_path / "two.ckpt")
    module = plain(pl)()
    loop = FederatedLoop.load_from_checkpoint(tmp_path / "two.ckpt", client=module)
    trainer(1, tmp_path).fit(loop, datamodule=toy_data())
    ((what, seen),) = module.seen
    assert (what, seen["epoch"]) == ("load", 2)
    assert "net.weight" in seen["names"]


REPLACED = {
    "layer": lambda module: setattr(module, "net", nn.Linear(4, 3)),
    "layers": lambda module: setattr(module, "body", nn.Sequential(nn.Linear(4, 4))),
    "layer within": lambda module: module.body.append(nn.Identity()),
    "values": lambda module: module.net.bias.data.zero_(),
    "parameter": lambda module: setattr(module.net, "weight", nn.Parameter(torch.zeros(3, 4))),
}


@BOTH
@AROUND
@pytest.mark.parametrize("kind", REPLACED)
def test_a_hook_that_replaces_a_layer_is_refused_and_never_loses_it(kind, around, package, tmp_path):
    """The federation would exchange the layer that was replaced."""

    class Replacing(Steps, package.LightningModule):
        def __init__(self):
            super().__init__()
            self.build()
            self.body = nn.Sequential(nn.Linear(4, 4))

        def on_load_checkpoint(self, checkpoint):
            REPLACED[kind](self)

    run(Replacing(), around=around).trainer.save_checkpoint(tmp_path / "one.ckpt")
    whole = run(Replacing(), rounds=2, around=around)
    if kind in ("layer", "layers"):
        layer = {"layer": "module.net", "layers": r"module.body\.0"}[kind]
        with pytest.raises(ValueError, match=f"on_load_checkpoint must keep the modules of the client.*{layer}'"):
            run(Replacing(), rounds=2, ckpt_path=tmp_path / "one.ckpt", around=around)
        return
    again = run(Replacing(), rounds=2, ckpt_path=tmp_path / "one.ckpt", around=around)
    assert equal(weights_of(whole), weights_of(again))


@BOTH
def test_the_state_of_a_data_module_is_kept(package, tmp_path):
    class Data(package.LightningDataModule):
        def __init__(self):
            super().__init__()
            self.seen = 0

        def setup(self, stage):
            self.seen += 1

        def train_dataloader(self):
            return DataLoader(TensorDataset(*samples(20)), batch_size=5)

        def state_dict(self):
            return {"seen": self.seen}

        def load_state_dict(self, state_dict):
            self.seen = state_dict["seen"] + 10

    def fit(rounds, ckpt_path=None):
        inner = Data()
        data = FederatedDataModule.from_datamodule(inner, num_clients=2)
        fitted = trainer(rounds, limit_val_batches=0)
        fitted.fit(FederatedLoop(plain(package)(), seed=3), datamodule=data, ckpt_path=ckpt_path)
        return fitted, inner

    fitted, first = fit(1)
    fitted.save_checkpoint(tmp_path / "one.ckpt")
    _, again = fit(2, tmp_path / "one.ckpt")
    assert again.seen == first.seen + 10


# --- client.ckpt ---


@dataclass
class Setting:
    width: int = 3


class Scale(nn.Module):
    def __init__(self, factor=1.0):
        super().__init__()
        self.factor = factor

    def forward(self, x):
        return x * self.factor


def with_arguments(package):
    class Arguments(Steps, package.LightningModule):
        def __init__(self, width=2, lr=0.1):
            super().__init__()
            self.save_hyperparameters()
            self.build()

    return Arguments, lambda: Arguments(width=5)


def with_dictionary(package):
    class Dictionary(Steps, package.LightningModule):
        def __init__(self, settings, lr=0.1):
            super().__init__()
            self.save_hyperparameters(settings)
            self.build()

    return Dictionary, lambda: Dictionary({"width": 5, "lr": 0.3})


def with_namespace(package):
    class Named(Steps, package.LightningModule):
        def __init__(self, args):
            super().__init__()
            self.save_hyperparameters(args)
            self.build()

    return Named, lambda: Named(Namespace(width=5))


def with_ignored(package):
    class Ignored(Steps, package.LightningModule):
        def __init__(self, width, net=None):
            super().__init__()
            self.save_hyperparameters(ignore=["net"])
            self.build()

    return Ignored, lambda: Ignored(5, nn.Linear(1, 1))


def with_rest(package):
    class Rest(Steps, package.LightningModule):
        def __init__(self, **kwargs):
            super().__init__()
            self.save_hyperparameters()
            self.build()

    return Rest, lambda: Rest(width=5, depth=2)


def with_objects(package):
    class Objects(Steps, package.LightningModule):
        def __init__(self, setting, act):
            super().__init__()
            self.save_hyperparameters()
            self.build()
            self.act = act

    return Objects, lambda: Objects(Setting(5), Scale(2.0))


def with_hooks(package):
    """It cannot be loaded without what its hook writes."""

    class Hooked(Steps, package.LightningModule):
        def __init__(self):
            super().__init__()
            self.build()
            self.extra = None

        def on_save_checkpoint(self, checkpoint):
            checkpoint["extra"] = {"size": 3, "steps": checkpoint["epoch"]}
            checkpoint["state_dict"] = {f"old.{name}": value for name, value in checkpoint["state_dict"].items()}
            self.extra = nn.Linear(3, 3)
            checkpoint["state_dict"].update({f"extra.{name}": v for name, v in self.extra.state_dict().items()})
            self.extra = None

        def on_load_checkpoint(self, checkpoint):
            assert checkpoint["epoch"] == checkpoint["extra"]["steps"]
            self.extra = nn.Linear(checkpoint["extra"]["size"], 3)
            state = checkpoint["state_dict"]
            checkpoint["state_dict"] = {name.removeprefix("old."): value for name, value in state.items()}

    return Hooked, Hooked


KINDS = [with_arguments, with_dictionary, with_namespace, with_ignored, with_rest, with_objects, with_hooks]


@BOTH
@AROUND
@pytest.mark.parametrize("kind", KINDS)
def test_client_ckpt_loads_where_the_file_of_lightning_does(kind, around, package, tmp_path):
    cls, make = kind(package)
    plain_path = plain_fit(package, make(), tmp_path)
    module = make()
    run(module, folder=tmp_path, around=around)
    theirs = torch.load(plain_path, weights_only=False)
    ours = torch.load(tmp_path / "client.ckpt", weights_only=False)
    assert theirs.keys() - ours.keys() <= {"loops", "callbacks", "optimizer_states", "lr_schedulers"}
    assert theirs["state_dict"].keys() == ours["state_dict"].keys()
    for name in ("hparams_name", "pytorch-lightning_version"):
        assert ours.get(name) == theirs.get(name)
    for weights_only in (False, *([] if kind is with_objects else [True])):
        expected = cls.load_from_checkpoint(plain_path, weights_only=weights_only)
        loaded = cls.load_from_checkpoint(tmp_path / "client.ckpt", weights_only=weights_only)
        assert loaded.hparams.keys() == expected.hparams.keys()
        assert all(type(loaded.hparams[name]) is type(value) for name, value in expected.hparams.items())
        assert equal({name: loaded.state_dict()[name] for name in module.state_dict()}, module.state_dict())
    if kind is with_objects:
        assert (loaded.hparams.setting, loaded.act.factor) == (Setting(5), 2.0)


READ = {
    "deletes states": lambda checkpoint: checkpoint.pop("optimizer_states"),
    "deletes loops": lambda checkpoint: checkpoint.pop("loops"),
    "reads loops": lambda checkpoint: checkpoint["loops"]["fit_loop"]["epoch_progress"],
    "reads rates": lambda checkpoint: checkpoint["optimizer_states"][0]["param_groups"][0]["lr"],
    "reads others": lambda checkpoint: (checkpoint["callbacks"], checkpoint["lr_schedulers"]),
}


@BOTH
@AROUND
@pytest.mark.parametrize("kind", READ)
def test_a_hook_may_read_and_delete_what_lightning_keeps(kind, around, package, tmp_path):
    class Reads(Steps, package.LightningModule):
        def __init__(self):
            super().__init__()
            self.build()

        def on_save_checkpoint(self, checkpoint):
            READ[kind](checkpoint)

    plain_fit(package, Reads(), tmp_path)
    module = Reads()
    run(module, folder=tmp_path, around=around)
    saved = torch.load(tmp_path / "client.ckpt", weights_only=True)
    assert not saved.keys() & {"loops", "callbacks", "optimizer_states", "lr_schedulers"}
    assert equal(saved["state_dict"], dict(module.state_dict()))


@BOTH
@pytest.mark.parametrize("around", [None, FedProx, Local, Ditto])
def test_the_hook_for_the_file_of_a_client_sees_the_trainer(around, package, tmp_path):
    class Asks(Steps, package.LightningModule):
        def __init__(self):
            super().__init__()
            self.build()

        def on_save_checkpoint(self, checkpoint):
            checkpoint["asked"] = [self.global_step, self.trainer.max_epochs, self.trainer.world_size]

    loop = FederatedLoop(Asks() if around is None else around(module=Asks()), seed=3)
    fitted = trainer(2, callbacks=[ClientCheckpoint(tmp_path, clients=[1])])
    fitted.fit(loop, datamodule=toy_data())
    for path in tmp_path.iterdir():
        assert torch.load(path, weights_only=True)["asked"] == [2, 2, 1], path.name


def test_client_ckpt_of_a_plain_fit_is_built_in_the_same_way(tmp_path):
    cls, make = with_hooks(pl)
    fitted = trainer(1, tmp_path, callbacks=[ClientCheckpoint(tmp_path)])
    module = make()
    fitted.fit(module, DataLoader(TensorDataset(*samples(20)), batch_size=5))
    loaded = cls.load_from_checkpoint(tmp_path / "client.ckpt")
    assert torch.equal(loaded.net.weight, module.net.weight)


def test_what_cannot_be_pickled_is_left_out_and_named(tmp_path, caplog):
    class Functions(Steps, pl.LightningModule):
        def __init__(self, width=3, act=None):
            super().__init__()
            self.save_hyperparameters()
            self.build()

    caplog.set_level("INFO")
    run(Functions(width=5, act=lambda x: x), rounds=2, folder=tmp_path)
    assert caplog.text.count("hyper_parameters.act cannot be pickled, so that client.ckpt lacks") == 1
    loaded = Functions.load_from_checkpoint(tmp_path / "client.ckpt", act=abs)
    assert loaded.hparams.width == 5


def test_initial_weights_from_a_file_with_objects_say_what_is_wrong(tmp_path):
    _, make = with_objects(pl)
    run(make(), folder=tmp_path)
    loop = FederatedLoop(make(), seed=1, initial_weights=tmp_path / "client.ckpt")
    with pytest.raises(ValueError, match="holds more than tensors and plain values"):
        trainer(1).fit(loop, datamodule=toy_data())


def data_of(package):
    class Data(package.LightningDataModule):
        def __init__(self, size, batch_size=5, transform=None):
            super().__init__()
            self.save_hyperparameters()
            self.passes = 0

        def train_dataloader(self):
            self.passes += 1
            return DataLoader(TensorDataset(*samples(self.hparams.size)), batch_size=self.hparams.batch_size)

        def state_dict(self):
            return {"passes": self.passes}

        def load_state_dict(self, state_dict):
            self.passes = state_dict["passes"]

    return Data


@BOTH
@pytest.mark.parametrize("federated", [True, False])
def test_client_ckpt_loads_the_data_module_where_the_file_of_lightning_does(package, federated, tmp_path, caplog):
    caplog.set_level("INFO")
    kind = data_of(package)
    around = (
        (lambda data: FederatedDataModule.from_datamodule(data, num_clients=2)) if federated else (lambda data: data)
    )
    trainer_kind = pl.Trainer if federated else package.Trainer
    module = with_arguments(package)[1]()
    fitted = trainer(2, tmp_path, kind=trainer_kind, limit_val_batches=0, callbacks=[ClientCheckpoint(tmp_path)])
    data = kind(20, batch_size=4, transform=nn.Identity())
    fitted.fit(FederatedLoop(module) if federated else module, datamodule=around(data))
    loaded = kind.load_from_checkpoint(tmp_path / "client.ckpt", weights_only=True)
    assert dict(loaded.hparams) == {"size": 20, "batch_size": 4, "transform": None}
    assert loaded.passes == data.passes
    assert caplog.text.count("datamodule_hyper_parameters.transform are objects of the data module") == 1
    type(module).load_from_checkpoint(tmp_path / "client.ckpt", weights_only=True)


class Encoder(nn.Module):
    def __init__(self, width: int = 4):
        super().__init__()
        self.layer = nn.Linear(4, width)

    def forward(self, x):
        return self.layer(x)


def injected(package):
    class Injected(Steps, package.LightningModule):
        def __init__(self, encoder: nn.Module, optimizer: OptimizerCallable = torch.optim.SGD, lr: float = 0.5):
            super().__init__()
            self.save_hyperparameters()
            self.encoder = encoder
            self.optimizer = optimizer
            self.net = nn.Linear(5, 3)

        def backbone(self, x):
            return self.encoder(x)

        def configure_optimizers(self):
            return self.optimizer(self.parameters())

    return Injected


InjectedOurs = injected(pl)
InjectedTwin = injected(twin)
for name, kind in {"InjectedOurs": InjectedOurs, "InjectedTwin": InjectedTwin}.items():
    kind.__name__ = kind.__qualname__ = name


@pytest.mark.usefixtures("without_pictures")
@pytest.mark.parametrize("around", [False, True])
@pytest.mark.parametrize("kind", [InjectedOurs, InjectedTwin])
def test_objects_of_a_configuration_are_made_again_as_lightnings_command_line_does(kind, around, tmp_path, monkeypatch):
    module = {
        "class_path": f"{__name__}.{kind.__name__}",
        "init_args": {
            "encoder": {"class_path": f"{__name__}.Encoder", "init_args": {"width": 5}},
            "optimizer": {"class_path": "torch.optim.Adam", "init_args": {"lr": 0.01}},
        },
    }
    client = {"class_path": "FedProx", "init_args": {"mu": 0.1, "module": module}} if around else module
    config = {
        "trainer": {"max_epochs": 1, "accelerator": "cpu", "enable_progress_bar": False},
        "model": {"client": client},
        "data": {"source": {"class_path": "tests.user_data.Pairs"}, "num_clients": 2},
    }
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(config))
    main(["fit", "-c", "mine.yaml"])
    path = next(tmp_path.rglob("client.ckpt"))
    loaded = kind.load_from_checkpoint(path, weights_only=True)
    assert loaded.encoder.layer.out_features == 5
    assert loaded.hparams.lr == 0.5
    (optimizer,) = [loaded.configure_optimizers()]
    assert (type(optimizer), optimizer.defaults["lr"]) == (torch.optim.Adam, 0.01)
    assert equal(dict(loaded.state_dict()), torch.load(path)["state_dict"])
