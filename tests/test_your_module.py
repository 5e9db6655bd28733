"""Any LightningModule with any data module: federated unchanged."""

import pytest
import pytorch_lightning as pl
import torch
import yaml
from torch.utils.data import DataLoader

from fl_lightning import FederatedDataModule, FederatedLoop
from fl_lightning.callbacks import ClientCheckpoint
from fl_lightning.data import DirichletPartition, FixedPartition
from fl_lightning.methods import FedNTD, FedProx
from tests.toys import equal, trainer, weights_of
from tests.user_data import Curve, Dicts, Pairs
from tests.user_modules import (
    MORE,
    SIX,
    Asking,
    ByHand,
    Classifier,
    Copies,
    DictNet,
    FineTune,
    Lazy,
    Metrics,
    Plain,
    Regression,
    TinyGAN,
    WarmUp,
    Worded,
)


def federate(module, datamodule, rounds=2, callbacks=None, ckpt_path=None, precision="32-true", clock="run", **data):
    pl.seed_everything(7, verbose=False)
    loop = FederatedLoop(module() if isinstance(module, type) else module, local_epochs=2, seed=1, clock=clock)
    data = FederatedDataModule.from_datamodule(datamodule(), **{"num_clients": 3, **data})
    run = trainer(rounds, callbacks=callbacks, precision=precision)
    run.fit(loop, datamodule=data, ckpt_path=ckpt_path)
    return loop, run, data


@pytest.mark.parametrize(("module", "datamodule"), SIX + MORE, ids=lambda kind: kind.__name__)
def test_each_trains_deterministically_and_resumes_exactly(module, datamodule, tmp_path):
    save = SaveAfter(tmp_path / "one.ckpt")
    whole, run, _ = federate(module, datamodule, 2, [save], participation=0.7)
    again, *_ = federate(module, datamodule, 2, participation=0.7)
    resumed, *_ = federate(module, datamodule, 2, ckpt_path=save.path, participation=0.7)
    assert equal(weights_of(whole), weights_of(again))
    assert equal(weights_of(whole), weights_of(resumed))
    assert all(value.isfinite().all() for value in weights_of(whole).values())
    assert run.global_step == 2


class SaveAfter(pl.Callback):
    def __init__(self, path):
        self.path = path

    def on_train_epoch_end(self, trainer, loop):
        if trainer.current_epoch == 0:
            trainer.save_checkpoint(self.path)


def test_one_client_is_the_module_under_a_plain_trainer():
    """One client with all samples, one round: the same numbers as `Trainer.fit(module)` on the same batches."""

    class Ordered(Pairs):
        def train_dataloader(self):
            return DataLoader(self.sets[0], 8)

    torch.manual_seed(0)
    plain = NoDropout()
    there = NoDropout()
    there.load_state_dict(plain.state_dict())
    trainer(2, limit_val_batches=0).fit(plain, datamodule=Ordered())
    loop, _, data = federate(there, Ordered, 1, num_clients=1, partition=FixedPartition([list(range(90))]))
    assert data.shuffle is False
    assert data.batch_size == 8
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(loop.client.module.state_dict()[name], value, rtol=1e-6, atol=1e-7)


class NoDropout(Classifier):
    """Without dropout, whose draws differ."""

    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))


def test_keys_keep_their_names():
    partition = DirichletPartition(0.5, min_samples=4)
    loop, run, _ = federate(Classifier, Pairs, 6, partition=partition, clock="round")
    assert {"loss", "train_acc", "val_acc", "val_loss", "comm/bytes_up"} <= loop.round_metrics.keys()
    assert run.callback_metrics["val_acc"] == loop.round_metrics["val_acc"]
    assert loop.round_metrics["val_acc"] > 0.5


def test_a_metric_is_that_of_the_whole_validation_set():
    loop, _, data = federate(Classifier, Pairs)
    x, y = data.split("val").all()
    loop.client.module.eval()
    assert loop.round_metrics["val_acc"] == pytest.approx((loop.client.module(x).argmax(1) == y).float().mean().item())


def test_validation_is_the_servers_and_test_its_test():
    loop, run, data = federate(Classifier, Pairs)
    assert data.evaluated == "val"
    assert len(data.split("val")) == 30
    run.test(loop, datamodule=data, verbose=False)
    x, y = data.split("test").all()
    loss = torch.nn.functional.cross_entropy(loop.client.module.eval()(x), y)
    assert run.callback_metrics["test_loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert len(torch.cat(run.predict(loop, datamodule=data))) == 40


def test_samples_to_predict_of_ones_own():
    class New(Pairs):
        def setup(self, stage):
            super().setup(stage)
            if stage == "predict":
                self.new = torch.utils.data.TensorDataset(self.sets[2].tensors[0][:7])

        def predict_dataloader(self):
            return DataLoader(self.new, batch_size=2)

    loop, run, data = federate(Classifier, New, 1)
    found = run.predict(loop, datamodule=data)
    plain = trainer(1).predict(loop.client.module, datamodule=New())
    assert len(torch.cat(found)) == 7
    assert torch.equal(torch.cat(found), torch.cat(plain))


def test_regression_learns_and_has_no_classes():
    before, *_ = federate(Regression, Curve, 1)
    loop, _, data = federate(Regression, Curve, 12)
    assert loop.round_metrics["val_mse"] < before.round_metrics["val_mse"]
    assert data.num_classes is None


def test_regression_cannot_be_divided_by_labels():
    with pytest.raises(ValueError, match="needs the labels of the samples, got none: use IIDPartition"):
        federate(Regression, Curve, partition=DirichletPartition(0.5))


def test_manual_optimization_steps_both_optimizers():
    start = TinyGAN()
    fresh = {name: value.clone() for name, value in start.state_dict().items()}
    loop, *_ = federate(start, Pairs, 1)
    moved = {
        name.split(".")[0] for name, v in loop.client.module.state_dict().items() if not torch.equal(v, fresh[name])
    }
    assert moved == {"generator", "critic"}
    assert {"g_loss", "c_loss"} <= loop.round_metrics.keys()


def test_hooks_are_called_for_every_client_and_local_epoch():
    loop, *_ = federate(DictNet, Dicts, 2)
    assert loop.client.module.epochs == 3 * 2 * 2
    assert "val_loss" in loop.round_metrics


def test_optimizer_step_of_ones_own_is_used():
    assert federate(WarmUp, Pairs, 1)[0].round_metrics["grad_norm"] > 0


def test_nothing_lent_is_left_behind():
    loop, *_ = federate(Classifier, Pairs, 1)
    assert not {"log", "optimizers", "manual_backward"} & vars(loop.client.module).keys()


@pytest.mark.parametrize(("module", "datamodule"), [(Classifier, Pairs), (DictNet, Dicts), (Regression, Curve)])
def test_a_method_around_any_module(module, datamodule):
    plain, *_ = federate(module, datamodule)
    fedavg_equivalent, *_ = federate(FedProx(module=seeded(module), mu=0.0), datamodule)
    pulled, *_ = federate(FedProx(module=seeded(module), mu=1.0), datamodule)
    assert equal(weights_of(fedavg_equivalent), weights_of(plain))
    assert not equal(weights_of(pulled), weights_of(plain))
    assert pulled.round_metrics["train/proximal"] > 0


def seeded(module):
    pl.seed_everything(7, verbose=False)
    return module()


def test_a_method_that_needs_logits_says_so():
    with pytest.raises(ValueError, match="FedNTD needs the logits of a net, got module=Lazy; give it net="):
        FederatedLoop(FedNTD(module=Lazy()))


def test_metrics_of_ones_own():
    loop, *_ = federate(Metrics, Pairs, 1)
    row = loop.round_metrics
    assert row["half"] == 0.5
    assert row["largest"] >= row["loss"]
    assert row["epoch_acc"] <= 1
    assert row["seen"] == 1  # batches: the server evaluates in larger ones than the loader has


def test_what_a_hook_is_handed_after_a_batch():
    """The loss without its graph and whatever else the step returned; with a method, the loss is the whole one."""
    partition = FixedPartition([list(range(40)), list(range(40, 90))])
    loop, *_ = federate(Copies, Pairs, 1, partition=partition, num_clients=2)
    copies = loop.client.module
    assert copies.batches == round((10 * 40 + 14 * 50) / 90)  # 2 epochs of 5 and of 7 batches: the weighted mean
    assert copies.mask.tolist() == [True, False]
    assert 0 < copies.smooth < loop.round_metrics["loss"]
    federate(FedProx(module=seeded(Copies), mu=1.0), Pairs, 1)


def test_frozen_parts_stay_and_are_not_sent_twice():
    start = seeded(FineTune)
    before = {name: value.clone() for name, value in start.state_dict().items()}
    federate(start, Pairs, 1)
    changed = {name for name, value in start.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {"net.2.weight", "net.2.bias"}


def test_manual_optimization_by_hand():
    loop, *_ = federate(ByHand, Pairs, 1)
    assert loop.round_metrics["lr"] == pytest.approx(0.005)  # halved after the first of two local epochs


def test_what_the_trainer_tells_a_client():
    """Epochs and steps are those of one fit, or of a round; a callback of the module's may end the run."""
    loop, run, _ = federate(Asking, Worded, 6)
    assert run.current_epoch == 2
    steps = 2 * 4  # two epochs of four batches
    assert (loop.round_metrics["round"], loop.round_metrics["steps"]) == (2 + 1, 2 * steps - 1)
    loop, run, _ = federate(Asking, Worded, 6, clock="round")
    assert (loop.round_metrics["round"], loop.round_metrics["steps"]) == (1, steps - 1)


def watching(strict):
    class Watching(Plain):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
            scheduler = {"scheduler": plateau, "monitor": "nothing", "strict": strict}
            return {"optimizer": optimizer, "lr_scheduler": scheduler}

    return Watching


def test_a_scheduler_that_watches_what_nobody_logs():
    with pytest.raises(ValueError, match=r"got monitor='nothing'; watch one of \[.*'loss'.*\], or set strict=False"):
        federate(watching(strict=True), Pairs)
    plain, *_ = federate(Plain, Pairs)
    waiting, *_ = federate(watching(strict=False), Pairs)
    assert equal(weights_of(waiting), weights_of(plain))


def cycle(num_steps):
    class Cycle(Plain):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            steps = num_steps or self.trainer.estimated_stepping_batches
            cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps)
            return [optimizer], [{"scheduler": cycle, "interval": "step"}]

    return Cycle


def test_a_schedule_over_the_estimated_batches_is_one_of_the_run():
    federate(cycle(None), Pairs, 3)
    federate(cycle(None), Pairs, 3, clock="round")


def test_a_schedule_of_one_round_is_refused_for_the_run():
    own = cycle(8)  # which is the number of steps of a client in a round
    federate(own, Pairs, 2, clock="round")
    with pytest.raises(
        ValueError, match=r"OneCycleLR must have a rate .* got total_steps=8 for 16; .* model.clock: round"
    ):
        federate(own, Pairs, 2)
    with pytest.raises(ValueError, match=r"\(model.clock: round\), got ValueError: Tried to step .* model.clock: run"):
        federate(cycle(5), Pairs, 2, clock="round")


def with_step(step):
    return type("Own", (Plain,), {"training_step": step})


def with_net(make):
    def build(self):
        Plain.__init__(self)
        make(self)

    return type("Own", (Plain,), {"__init__": build})


def leave_out(self, *args, **kwargs):
    state = Plain.state_dict(self, *args, **kwargs)
    for name in [name for name in state if "net.0" in name]:
        del state[name]
    return state


@pytest.mark.parametrize(
    ("module", "error", "words"),
    [
        (
            with_step(lambda self, dataloader_iter: None),
            TypeError,
            r"dataloader_iter, .* take \(batch, batch_idx\)",
        ),
        (
            with_step(lambda self, batch, batch_idx: {"los": 1}),
            ValueError,
            r"return its loss under 'loss', got .*los",
        ),
        (with_net(lambda m: setattr(m, "net", torch.nn.LazyLinear(3))), ValueError, "net.weight must have a shape"),
        (with_net(lambda m: m.register_buffer("c", torch.ones(2) * 1j)), ValueError, "module.c must be real"),
        (type("Own", (Plain,), {"state_dict": leave_out}), ValueError, "net.0.weight is trained, but state_dict"),
        (type("Own", (Plain,), {"state_dict": lambda self: {}}), TypeError, "state_dict must take torch's arguments"),
    ],
    ids=["dataloader_iter", "no loss", "lazy", "complex", "left out", "state_dict"],
)
def test_what_cannot_work_is_refused(module, error, words):
    with pytest.raises(error, match=words):
        federate(module, Pairs, 1)


def test_frozen_weights_may_be_left_out_of_checkpoints(tmp_path):
    class Thin(FineTune):
        strict_loading = False
        state_dict = leave_out

    save = SaveAfter(tmp_path / "one.ckpt")
    whole, *_ = federate(Thin, Pairs, 2, [save])
    assert not any("net.0" in name for name in torch.load(save.path, weights_only=True)["state_dict"])
    resumed, *_ = federate(Thin, Pairs, 2, ckpt_path=save.path)
    assert equal(weights_of(whole), weights_of(resumed))


def test_a_hook_that_cannot_be_forwarded_is_refused_by_name():
    class Own(Lazy):
        def on_validation_model_zero_grad(self):
            return None

    with pytest.raises(TypeError, match=r"Own overrides on_validation_model_zero_grad, .*gradients are None whenever"):
        FederatedLoop(Own())


def test_bf16_mixed_follows_float32():
    half, *_ = federate(Classifier, Pairs, 3, precision="bf16-mixed")
    full, *_ = federate(Classifier, Pairs, 3)
    assert half.round_metrics["loss"] == pytest.approx(full.round_metrics["loss"], abs=5e-2)
    assert all(v.dtype == torch.float32 for v in weights_of(half).values() if v.is_floating_point())


def test_client_ckpt_is_a_checkpoint_of_the_module(tmp_path):
    loop, *_ = federate(Classifier(hidden=5, lr=0.2), Pairs, 1, [ClientCheckpoint(tmp_path)])
    loaded = Classifier.load_from_checkpoint(tmp_path / "client.ckpt")
    assert dict(loaded.hparams) == {"hidden": 5, "lr": 0.2}
    assert equal(loaded.state_dict(), loop.client.module.state_dict())
    federate(FedProx(module=Lazy(), mu=0.1), Pairs, 1, [ClientCheckpoint(tmp_path)])
    assert Lazy.load_from_checkpoint(tmp_path / "client.ckpt").net.weight.shape == (3, 4)


@pytest.mark.usefixtures("without_pictures")
def test_by_class_path_in_yaml(tmp_path, monkeypatch, capsys):
    from fl_lightning.__main__ import main

    config = {
        "trainer": {"max_epochs": 2, "accelerator": "cpu"},
        "model": {
            "client": {
                "class_path": "fl_lightning.methods.FedProx",
                "init_args": {
                    "mu": 0.1,
                    "module": {"class_path": "tests.user_modules.Classifier", "init_args": {"hidden": 6}},
                },
            }
        },
        "data": {
            "source": {"class_path": "tests.user_data.Pairs", "init_args": {"batch_size": 9}},
            "num_clients": 3,
        },
    }
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(config))
    main(["fit", "-c", "mine.yaml"])
    table = next(tmp_path.glob("runs/mine/*/metrics.csv")).read_text().splitlines()
    assert len(table) == 3
    assert {"loss", "val_acc", "train/proximal"} <= set(table[0].split(","))


class Saves(Plain):
    """Adds an object and numbers to a checkpoint, as pytorch-forecasting's base class does."""

    def __init__(self, width=3):
        super().__init__()
        self.save_hyperparameters()
        self.special = torch.nn.ReLU()
        self.count = 0
        self.loaded = None

    def on_save_checkpoint(self, checkpoint):
        checkpoint["special"] = {"act": self.special, "count": self.count + 1}
        checkpoint["hyper_parameters"].update(act=self.special)

    def on_load_checkpoint(self, checkpoint):
        self.special = checkpoint["special"]["act"]
        self.count = checkpoint["special"]["count"]
        self.loaded = checkpoint


def test_objects_in_a_checkpoint_of_a_module_are_those_of_the_new_module(tmp_path, caplog):
    save = SaveAfter(tmp_path / "one.ckpt")
    federate(Saves, Pairs, 1, [save])
    torch.load(save.path, weights_only=True)
    again = Saves()
    own = again.special
    federate(again, Pairs, 2, ckpt_path=save.path)
    assert again.special is own
    assert again.count == 1
    assert again.loaded["hyper_parameters"]["width"] == 3
    assert "hyper_parameters.act, special.act of on_save_checkpoint are objects" in caplog.text
