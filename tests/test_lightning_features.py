"""The table of Lightning's other features in docs/your-module-details.md: every row is a test, by its name."""

import re
from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning import callbacks as C
from pytorch_lightning.callbacks.weight_averaging import EMAWeightAveraging
from pytorch_lightning.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from pytorch_lightning.tuner import Tuner

from fl_lightning import FederatedLoop
from fl_lightning.federation.checks import check_trainer
from fl_lightning.methods import FedProx
from tests.toys import equal, toy_data, trainer, weights_of
from tests.user_modules import Plain

PAGE = Path(__file__).parents[1] / "docs" / "your-module-details.md"


def go(client=Plain, rounds=3, wrap=lambda module: module, **settings):
    pl.seed_everything(7, verbose=False)
    loop = FederatedLoop(wrap(client()), seed=1)
    run = trainer(rounds, **settings)
    run.fit(loop, datamodule=toy_data((8, 12, 5)))
    return loop


class Weights(C.Callback):
    """The global weights after every round."""

    def __init__(self):
        self.found = []

    def on_train_epoch_end(self, trainer, loop):
        self.found.append({name: value.double().clone() for name, value in loop.client.state_dict().items()})


def weight_averaging(tmp_path):
    """EMA over rounds, by hand; the averaged weights are evaluated, and are the model at the end."""
    plain = Weights()
    go(callbacks=[plain])
    averaged = go(callbacks=[EMAWeightAveraging(decay=0.5)])
    expected = plain.found[0]
    for weights in plain.found[1:]:
        expected = {name: 0.5 * value + 0.5 * weights[name] for name, value in expected.items()}
    for name, value in averaged.client.state_dict().items():
        torch.testing.assert_close(value.double(), expected[name], rtol=1e-5, atol=1e-6)


def compiled(tmp_path):
    """The module, a method's module, and a net within the module."""

    class Within(Plain):
        def __init__(self):
            super().__init__()
            self.net.compile(backend="eager")

    plain = weights_of(go())
    prox = weights_of(go(wrap=lambda module: FedProx(module=module, mu=0.1)))
    assert equal(weights_of(go(wrap=lambda module: torch.compile(module, backend="eager"))), plain)
    assert equal(weights_of(go(Within)), plain)
    wrapped = go(wrap=lambda module: FedProx(module=torch.compile(module, backend="eager"), mu=0.1))
    assert equal(weights_of(wrapped), prox)


def profilers(tmp_path):
    for profiler in ("simple", "advanced", "pytorch"):
        assert equal(weights_of(go(profiler=profiler, default_root_dir=tmp_path)), weights_of(go()))


def fast_dev_run(tmp_path):
    loop = go(fast_dev_run=True)
    assert loop.recorder.history.rounds[-1] == 0


def early_stopping(tmp_path):
    loop = go(rounds=9, callbacks=[C.EarlyStopping("val_loss", patience=1, min_delta=10.0)])
    assert len(loop.recorder.history.rounds) == 2


def rates(tmp_path):
    from pytorch_lightning.loggers import CSVLogger

    logger = CSVLogger(tmp_path)
    go(callbacks=[C.LearningRateMonitor()], logger=logger)
    assert "lr-SGD" in (Path(logger.log_dir) / "metrics.csv").read_text()


def anomaly(tmp_path):
    assert equal(weights_of(go(detect_anomaly=True)), weights_of(go()))


def refused(words, **settings):
    with pytest.raises(ValueError, match=words):
        go(**settings)


def swa(tmp_path):
    refused(
        "StochasticWeightAveraging averages .* take EMAWeightAveraging", callbacks=[C.StochasticWeightAveraging(0.1)]
    )


def tuner(tmp_path):
    loop = FederatedLoop(Plain(), seed=1)
    for start, words in (("lr_find", "LearningRateFinder .*Tuner"), ("scale_batch_size", r"set data\.batch_size")):
        with pytest.raises(ValueError, match=words):
            getattr(Tuner(trainer(1)), start)(loop, datamodule=toy_data((8, 12, 5)))


def finetuning(tmp_path):
    refused("BackboneFinetuning adds .* on_train_epoch_start of a callback", callbacks=[C.BackboneFinetuning(1)])


def pruning(tmp_path):
    refused(r"ModelPruning replaces .*client\.ckpt", callbacks=[C.ModelPruning("l1_unstructured", amount=0.5)])


def accumulation(tmp_path):
    refused(r"set model\.accumulate_grad_batches", callbacks=[C.GradientAccumulationScheduler({1: 2})])


def sharded(tmp_path):
    for kind in (FSDPStrategy, DeepSpeedStrategy, ModelParallelStrategy):
        run = trainer(1)
        run.strategy.__class__ = type("Own", (type(run.strategy),), {})
        own = type(kind.__name__, (type(run.strategy),), {})
        run.strategy.__class__ = own  # neither can be made without the devices that it is for
        with pytest.raises(ValueError, match=f"trained whole on one device, .* {kind.__name__}, which spreads"):
            check_trainer(run)


ROWS = {
    "`EMAWeightAveraging`, `WeightAveraging`": (weight_averaging, True),
    "`torch.compile` of the module, or within it": (compiled, True),
    "`profiler`": (profilers, True),
    "`fast_dev_run`": (fast_dev_run, True),
    "`EarlyStopping`": (early_stopping, True),
    "`LearningRateMonitor`": (rates, True),
    "`detect_anomaly`": (anomaly, True),
    "`StochasticWeightAveraging`": (swa, False),
    "`Tuner`, `LearningRateFinder`, `BatchSizeFinder`": (tuner, False),
    "`BackboneFinetuning`, `BaseFinetuning`": (finetuning, False),
    "`ModelPruning`": (pruning, False),
    "`GradientAccumulationScheduler`": (accumulation, False),
    "FSDP, DeepSpeed, `ModelParallelStrategy`": (sharded, False),
}


def table():
    """Rows of the page: the feature, and whether it works."""
    section = PAGE.read_text(encoding="utf-8").partition("## Other features of Lightning")[2].partition("\n## ")[0]
    found = re.findall(r"^\| (.+?) \| (works|refused)\b", section, re.MULTILINE)
    return {feature: word == "works" for feature, word in found}


def test_the_page_has_these_rows():
    assert table() == {feature: works for feature, (_, works) in ROWS.items()}


@pytest.mark.parametrize("feature", ROWS)
def test_row(feature, tmp_path):
    ROWS[feature][0](tmp_path)
