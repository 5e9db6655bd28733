"""Modules and data modules that packages ship for their users: none was written or changed for this project.

Each function makes a module and a data module on data that a package comes with, or, where the first line says so,
on the authors' own generator of samples. Batches have 4 samples.
"""

import wave
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pytorch_lightning import LightningDataModule, LightningModule
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

Made = tuple[LightningModule, LightningDataModule]


class Given(LightningDataModule):
    """Samples of modules whose package has no data module for them: 24 to train with, and the others held out."""

    def __init__(self, samples: Any, collate_fn: Callable[[list[Any]], Any] | None = None, size: int = 24) -> None:
        super().__init__()
        self.samples = samples
        self.collate_fn = collate_fn
        self.size = size

    def _loader(self, places: Sequence[int]) -> DataLoader:
        return DataLoader(Subset(self.samples, list(places)), batch_size=4, collate_fn=self.collate_fn)

    def train_dataloader(self):
        return self._loader(range(self.size))

    def val_dataloader(self):
        return self._loader(range(self.size, len(self.samples)))

    test_dataloader = val_dataloader


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """64 pictures of handwritten digits of scikit-learn (64, 1, 8, 8), from 0 to 1, and their classes."""
    from sklearn.datasets import load_digits

    found = load_digits()
    x = torch.tensor(found.images[:64] / 16, dtype=torch.float32)[:, None]
    return x, torch.tensor(found.target[:64])


# --- lightning-uq-box, https://github.com/lightning-uq-box/lightning-uq-box ----------------------------------------


def langevin() -> Made:
    """Regression by hand, whose optimizer draws and calls a closure, on the authors' generator of samples."""
    from lightning_uq_box.datamodules import ToyHeteroscedasticDatamodule
    from lightning_uq_box.models import MLP
    from lightning_uq_box.uq_methods import NLL, SGLDRegression

    settings = {"lr": 1e-3, "weight_decay": 0.0, "noise_factor": 0.1, "burnin_epochs": 0, "n_sgld_samples": 1}
    return SGLDRegression(MLP(n_outputs=2, dropout_p=0.0), NLL(), **settings), ToyHeteroscedasticDatamodule(
        batch_size=4
    )


def routine() -> Made:
    from torch_uncertainty.routines import ClassificationRoutine

    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
    recipe = partial(torch.optim.Adam, lr=0.01)
    module = ClassificationRoutine(
        net, 10, nn.CrossEntropyLoss(), optim_recipe=lambda model: recipe(model.parameters())
    )
    return module, Given(TensorDataset(*digits()))


def segmentation_routine() -> Made:
    from torch_uncertainty.routines import SegmentationRoutine

    x, _ = digits()
    net = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 1))
    recipe = partial(torch.optim.Adam, lr=0.01)
    module = SegmentationRoutine(
        net,
        2,
        nn.CrossEntropyLoss(),
        optim_recipe=lambda model: recipe(model.parameters()),
        metric_subsampling_rate=1.0,
    )
    return module, Given(TensorDataset(x, (x[:, 0] > 0.5).long()))


# --- deeptab, https://github.com/OpenTabular/DeepTab ---------------------------------------------------------------


def table() -> Made:
    """A classifier of rows, with a data module of the package."""
    from deeptab.models import MLPClassifier
    from sklearn.datasets import load_breast_cancer

    frame = load_breast_cancer(as_frame=True).frame
    x = frame.drop(columns="target").iloc[:, :6]
    y = frame["target"].to_numpy()
    model = MLPClassifier()
    model.build_model(x[:64], y[:64], val_size=0.5, batch_size=4, shuffle=False, random_state=0)
    data = model._data_module
    data.setup("fit")
    data.test_dataloader = data.val_dataloader
    return model._task_model, data


# --- neuralforecast, https://github.com/Nixtla/neuralforecast ------------------------------------------------------


def forecasts() -> Made:
    """Forecasts, with a data module of the package, on the authors' generator of series."""
    from neuralforecast.models import NBEATS
    from neuralforecast.tsdataset import TimeSeriesDataModule, TimeSeriesDataset
    from neuralforecast.utils import generate_series

    series, *_ = TimeSeriesDataset.from_df(generate_series(24, min_length=60, max_length=80, equal_ends=True))
    module = NBEATS(
        h=4, input_size=8, stack_types=["identity"], n_blocks=[1], mlp_units=[[8, 8]], windows_batch_size=16
    )
    module.val_size = 8
    data = TimeSeriesDataModule(series, batch_size=4, valid_batch_size=4, shuffle_train=False)
    data.test_dataloader = data.val_dataloader
    return module, data


# --- gluonts, https://github.com/awslabs/gluonts -------------------------------------------------------------------


def sunspots() -> Made:
    """Forecasts of the yearly number of sunspots, as the package's estimator makes module and windows."""
    from gluonts.dataset.pandas import PandasDataset
    from gluonts.torch import DeepAREstimator
    from statsmodels.datasets import sunspots as yearly

    frame = yearly.load_pandas().data
    index = pandas_years(len(frame))
    values = PandasDataset(frame.set_index(index)["SUNACTIVITY"].astype("float32"), freq="YE")
    estimator = DeepAREstimator(
        "YE", prediction_length=4, context_length=8, num_layers=1, hidden_size=8, dropout_rate=0.0
    )
    module = estimator.create_lightning_module()
    numbers = np.random.get_state()
    np.random.seed(0)
    ready = estimator.create_transformation().apply(values, is_train=True)
    batches = estimator.create_training_data_loader(ready, module)
    windows = [sample for batch in batches for sample in separate(batch)][:48]
    np.random.set_state(numbers)
    return module, Given(windows)


def pandas_years(count: int) -> Any:
    import pandas

    return pandas.period_range("1700", periods=count, freq="Y")


def separate(batch: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    return [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]


# --- asteroid, https://github.com/asteroid-team/asteroid -----------------------------------------------------------


def speech() -> Made:
    """Separation of two speakers, on the conversation that pyannote.audio comes with."""
    from asteroid.engine.system import System
    from asteroid.losses import PITLossWrapper, pairwise_neg_sisdr
    from asteroid.models import ConvTasNet

    parts = torch.tensor(conversation()[: 96 * 1600]).view(2, 48, 1600)
    sources = parts.transpose(0, 1).contiguous()
    samples = TensorDataset(sources.sum(1), sources)
    model = ConvTasNet(2, n_filters=16, kernel_size=16, n_blocks=1, n_repeats=1, bn_chan=8, hid_chan=8, skip_chan=8)
    loss = PITLossWrapper(pairwise_neg_sisdr, pit_from="pw_mtx")
    module = System(model, torch.optim.Adam(model.parameters(), lr=1e-3), loss, train_loader=None)
    return module, Given(samples)


def conversation() -> np.ndarray:
    (folder,) = find_spec("pyannote").submodule_search_locations
    with wave.open(str(Path(folder, "audio", "sample", "sample.wav"))) as file:
        return np.frombuffer(file.readframes(file.getnframes()), dtype=np.int16).astype(np.float32) / 2**15


# --- pytorch-lifestream, https://github.com/pytorch-lifestream/pytorch-lifestream ----------------------------------


def knowledge_graph() -> Made:
    """Links between nations."""
    from pykeen.contrib.lightning import LCWALitModule

    module = LCWALitModule(dataset="nations", model="distmult", model_kwargs={"embedding_dim": 8}, batch_size=4)
    loader = module.train_dataloader()
    return module, Given(Subset(loader.dataset, range(48)), loader.collate_fn)


# --- torchphysics, https://github.com/boschresearch/torchphysics ---------------------------------------------------
