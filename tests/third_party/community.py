"""Modules and data modules that packages ship for their users: none was written or changed for this project.

Each function makes a module and a data module on data that a package comes with, or, where the first line says so,
on the authors' own generator of samples. Batches have 4 samples.
"""

import os
import wave
from collections.abc import Callable, Sequence
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
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


def inherited(variable: str, write: Callable[[], TemporaryDirectory[str]]) -> Path:
    """A folder that all processes of a run share: that of the process that has started this one, or a new one.

    Args:
        variable: The variable of the environment that has the folder.
        write: Writes the folder.
    """
    if variable not in os.environ:
        os.environ[variable] = write().name
    return Path(os.environ[variable])


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
    windows: list[dict[str, torch.Tensor]] = []
    for batch in batches:
        windows += separate(batch)
    np.random.set_state(numbers)
    return module, Given(windows[:48])


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
    path = Path(folder) / "audio" / "sample" / "sample.wav"
    with wave.open(str(path)) as file:
        values = np.frombuffer(file.readframes(file.getnframes()), dtype=np.int16)
    return values.astype(np.float32) / 2**15


# --- pykeen, https://github.com/pykeen/pykeen ----------------------------------------------------------------------


def knowledge_graph() -> Made:
    """Links between nations."""
    from pykeen.contrib.lightning import LCWALitModule

    module = LCWALitModule(dataset="nations", model="distmult", model_kwargs={"embedding_dim": 8}, batch_size=4)
    loader = module.train_dataloader()
    return module, Given(Subset(loader.dataset, range(48)), loader.collate_fn)


# --- aidsorb, https://github.com/adosar/aidsorb --------------------------------------------------------------------


def structures() -> Made:
    """The heat of formation of molecules, with a data module of the package, on the molecules of ASE."""
    from aidsorb.data import PCDCollator, prepare_data
    from aidsorb.datamodules import DataModule
    from aidsorb.litmodules import LitModule
    from aidsorb.modules import PointNet, PointNetClsHead
    from torchmetrics import MeanAbsoluteError, MetricCollection, R2Score

    folder = Path(written_structures().name)
    prepare_data(str(folder / "clouds"), split_ratio=(24, 16, 16))
    loaders = {"collate_fn": PCDCollator(channels_first=True, mode="zeropad")}
    sizes = {"train_batch_size": 4, "eval_batch_size": 4}
    labels = {"path_to_Y": str(folder / "heats.csv"), "index_col": "name", "labels": ["heat"]}
    data = DataModule(str(folder / "clouds"), config_dataloaders=loaders, **sizes, **labels)
    net = PointNet(PointNetClsHead(), n_global_feats=16)
    net(torch.zeros(2, 4, 8))
    optimizer = {"name": "SGD", "hparams": {"lr": 1e-4}}
    metrics = MetricCollection(MeanAbsoluteError(), R2Score())
    return LitModule(net, nn.MSELoss(), metrics, config_optimizer=optimizer), data


@cache
def written_structures() -> TemporaryDirectory[str]:
    """Write molecules as clouds of points, and their heats of formation in eV."""
    from aidsorb.utils import pcd_from_dir
    from ase.build import molecule
    from ase.data.g2 import data

    written = TemporaryDirectory()
    folder = Path(written.name)
    (folder / "files").mkdir()
    names = [name for name, values in data.items() if values["thermal correction"] is not None][:56]
    for name in names:
        molecule(name).write(folder / "files" / f"{name}.xyz")
    pcd_from_dir(str(folder / "files"), str(folder / "clouds"))
    rows = [f"{name},{float(data[name]['enthalpy']) / 23.06}" for name in names]
    (folder / "heats.csv").write_text("\n".join(["name,heat", *rows]))
    return written


# --- chemprop, https://github.com/chemprop/chemprop ----------------------------------------------------------------


def molecules() -> Made:
    """Activity of molecules, CHEMBL2321810, as RDKit comes with it."""
    from chemprop.data import MoleculeDatapoint, MoleculeDataset, collate_batch
    from chemprop.models import MPNN
    from chemprop.nn import BondMessagePassing, MeanAggregation, RegressionFFN
    from rdkit import RDConfig

    folder = Path(RDConfig.RDContribDir, "FreeWilson", "data")
    rows = (folder / "CHEMBL2321810_act.csv").read_text().splitlines()[1:]
    activity = dict(row.split(",") for row in rows)
    lines = [line.split() for line in (folder / "CHEMBL2321810.smi").read_text().splitlines()]
    points = [MoleculeDatapoint.from_smi(smiles, y=np.array([float(activity[name])])) for smiles, name in lines[:48]]
    module = MPNN(BondMessagePassing(d_h=16, depth=2), MeanAggregation(), RegressionFFN(input_dim=16, hidden_dim=16))
    return module, Given(MoleculeDataset(points), collate_batch)


# --- neuromancer, https://github.com/pnnl/neuromancer --------------------------------------------------------------


def oscillator() -> Made:
    """A neural differential equation, with a data module of the package, on the authors' Van der Pol oscillator."""
    from neuromancer.constraint import variable
    from neuromancer.dataset import LitDataModule
    from neuromancer.dynamics.integrators import RK4
    from neuromancer.loss import PenaltyLoss
    from neuromancer.modules.blocks import MLP
    from neuromancer.problem import LitProblem, Problem
    from neuromancer.system import Node, System

    field = MLP(2, 2, hsizes=[16])
    system = System([Node(RK4(field, h=0.1), ["xn"], ["xn"], name="field")], nsteps=4)
    reached = variable("xn")[:, :-1, :]
    loss = PenaltyLoss([(reached == variable("X")) ^ 2], [])
    module = LitProblem(Problem([system], loss), dev_metric="dev_loss")
    return module, LitDataModule(trajectories)


def trajectories() -> tuple[Any, Any, Any, int]:
    """Pieces of 4 states of the oscillator, as a `LitDataModule` asks for them."""
    from neuromancer.dataset import DictDataset
    from neuromancer.psl.autonomous import VanDerPol

    states = VanDerPol().simulate(nsim=224, ts=0.1)["X"]
    pieces = torch.tensor(np.asarray(states), dtype=torch.float32).view(56, 4, 2)
    sets = [
        DictDataset({"X": part, "xn": part[:, :1]}, name=name)
        for name, part in zip(("train", "dev", "test"), pieces.split([24, 16, 16]), strict=True)
    ]
    return sets[0], sets[1], sets[2], 4


# --- scvi-tools, https://github.com/scverse/scvi-tools -------------------------------------------------------------


def cells() -> Made:
    """Counts of genes by hand, two optimizers, with a data module of the package, on the authors' generator."""
    from scvi.data import synthetic_iid
    from scvi.dataloaders import DataSplitter
    from scvi.model import SCVI
    from scvi.train import AdversarialTrainingPlan

    cells = synthetic_iid(batch_size=28, n_genes=8, n_proteins=0)
    SCVI.setup_anndata(cells, batch_key="batch")
    model = SCVI(cells, n_hidden=8, n_latent=2)
    classifier = {"adversarial_classifier": True, "scale_adversarial_loss": 1.0}
    # A warm-up would scale the validation loss by an attribute that no checkpoint has.
    module = AdversarialTrainingPlan(model.module, n_epochs_kl_warmup=None, **classifier)
    places = np.arange(56)
    sets = [places[:24], places[24:40], places[40:]]
    return module, DataSplitter(model.adata_manager, external_indexing=sets, batch_size=4)


# --- pytorch-lifestream, https://github.com/pytorch-lifestream/pytorch-lifestream ----------------------------------


def purchases() -> Made:
    """Contrastive learning of customers, with the data module of the package, on the purchases that lifetimes has."""
    from ptls.frames import PtlsDataModule
    from ptls.frames.coles import CoLESModule
    from ptls.nn import RnnSeqEncoder, TrxEncoder

    encoder = TrxEncoder(embeddings={"discs": {"in": 8, "out": 4}}, numeric_values={"dollars": "log"})
    module = CoLESModule(
        RnnSeqEncoder(encoder, hidden_size=8, type="gru"),
        optimizer_partial=partial(torch.optim.Adam, lr=0.01),
        lr_scheduler_partial=partial(torch.optim.lr_scheduler.StepLR, step_size=2, gamma=0.5),
    )
    found = customers()
    train = halves(found[:24])
    held_out = halves(found[24:])
    sizes = {"train_batch_size": 4, "valid_batch_size": 4, "test_batch_size": 4}
    return module, PtlsDataModule(train_data=train, valid_data=held_out, test_data=held_out, **sizes)


def customers() -> list[dict[str, torch.Tensor]]:
    """48 customers of a music shop that bought four times or more: day, discs and dollars of each purchase."""
    import pandas

    (folder,) = find_spec("lifetimes").submodule_search_locations
    columns = ["all", "id", "day", "discs", "dollars"]
    frame = pandas.read_csv(Path(folder, "datasets", "CDNOW_sample.txt"), header=None, sep=r"\s+", names=columns)
    kept = [purchases for _, purchases in frame.groupby("id") if len(purchases) >= 4][:48]
    names = ["day", "discs", "dollars"]
    return [{name: torch.tensor(purchases[name].to_numpy()) for name in names} for purchases in kept]


def halves(found: list[dict[str, torch.Tensor]]) -> Any:
    from ptls.frames.coles import ColesDataset
    from ptls.frames.coles.split_strategy import SampleUniformBySplitCount

    return ColesDataset(found, SampleUniformBySplitCount(split_count=2), col_time="day")


# --- anomalib, https://github.com/open-edge-platform/anomalib ------------------------------------------------------


def adversaries() -> Made:
    """A GAN by hand with two optimizers, with a data module of the package, on pictures of ones and of eights."""
    from anomalib.data import Folder
    from anomalib.metrics import AUROC, Evaluator
    from anomalib.models import Ganomaly
    from anomalib.pre_processing import PreProcessor
    from torchvision.transforms.v2 import Resize

    sizes = {"batch_size": 4, "n_features": 4, "latent_vec_size": 4}
    parts = {
        "pre_processor": PreProcessor(Resize((32, 32))),
        "evaluator": Evaluator(val_metrics=AUROC(fields=["pred_score", "gt_label"], prefix="image_")),
    }
    module = Ganomaly(visualizer=False, **sizes, **parts)
    folders = {"normal_dir": "1", "abnormal_dir": "8"}
    data = Folder(
        "digits",
        root=inherited("PICTURES_OF_ADVERSARIES", written_pictures),
        train_batch_size=4,
        eval_batch_size=4,
        num_workers=0,
        seed=0,
        **folders,
    )
    return module, data


@cache
def written_pictures() -> TemporaryDirectory[str]:
    """Write a folder of the ones (40) and the eights (40) among the handwritten digits of scikit-learn."""
    from PIL import Image
    from sklearn.datasets import load_digits

    found = load_digits()
    written = TemporaryDirectory()
    for kind in (1, 8):
        folder = Path(written.name, str(kind))
        folder.mkdir()
        for place, image in enumerate(found.images[found.target == kind][:40]):
            Image.fromarray((image * 15).astype(np.uint8)).save(folder / f"{place:02}.png")
    return written


# --- rl4co, https://github.com/ai4co/rl4co --------------------------------------------------------------------------


def salesman() -> Made:
    """Reinforcement by hand, which learns tours, on the authors' generator of cities."""
    from rl4co.envs import TSPEnv
    from rl4co.models.rl import PPO
    from rl4co.models.zoo.am import AttentionModelPolicy

    env = TSPEnv(generator_params={"num_loc": 6})
    policy = AttentionModelPolicy(env_name=env.name, embed_dim=16, num_encoder_layers=1, num_heads=2)
    sizes = {"train_data_size": 4, "val_data_size": 4, "test_data_size": 4, "batch_size": 4}
    critic = {"embed_dim": 16, "hidden_dim": 16}
    module = PPO(env, policy, critic_kwargs=critic, mini_batch_size=2, optimizer_kwargs={"lr": 1e-3}, **sizes)
    cities = env.dataset(48)
    return module, Given(cities, cities.collate_fn)


# --- zeldarose, https://github.com/LoicGrobol/zeldarose ------------------------------------------------------------


def next_words() -> Made:
    """A language model, with the data module of the package, on the news that gensim comes with."""
    from transformers import GPT2Config, GPT2LMHeadModel
    from zeldarose.common import TrainConfig
    from zeldarose.tasks.ntp import NTPTrainingModel

    folder = inherited("NEWS_OF_NEXT_WORDS", written_news)
    news = lines_of_news()
    words = tokenizer(news[:48])
    net = GPT2LMHeadModel(GPT2Config(len(words), n_positions=32, n_embd=16, n_layer=1, n_head=2, bos_token_id=0))
    module = NTPTrainingModel(net, len(words), TrainConfig(learning_rate=1e-3, warmup_steps=2))
    files = {"train_path": folder / "train.txt", "val_path": folder / "held_out.txt"}
    data = module.get_data_module(4, 0, tokenizer=words, tokenizer_name="lee", data_dir=folder, **files)
    data.test_dataloader = data.val_dataloader
    return module, data


@cache
def written_news() -> TemporaryDirectory[str]:
    """Write 24 news to train with, and 24 that are held out."""
    written = TemporaryDirectory()
    news = lines_of_news()
    Path(written.name, "train.txt").write_text("\n".join(news[:24]))
    Path(written.name, "held_out.txt").write_text("\n".join(news[24:48]))
    return written


def lines_of_news() -> list[str]:
    (package,) = find_spec("gensim").submodule_search_locations
    path = Path(package) / "test" / "test_data" / "lee_background.cor"
    return path.read_text(encoding="utf-8").splitlines()


def tokenizer(lines: list[str]) -> Any:
    """The 200 most frequent words, as a tokenizer of transformers."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from tokenizers.trainers import WordLevelTrainer
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel(unk_token="[UNK]"))
    words.pre_tokenizer = Whitespace()
    words.train_from_iterator(lines, WordLevelTrainer(vocab_size=200, special_tokens=["[PAD]", "[UNK]"]))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]", model_max_length=32)


# --- disent, https://github.com/nmichlo/disent ---------------------------------------------------------------------


def squares() -> Made:
    """A variational autoencoder, on the authors' pictures of three squares."""
    from disent.dataset import DisentDataset
    from disent.dataset.data import XYSquaresData
    from disent.dataset.transform import ToImgTensorF32
    from disent.frameworks.vae import BetaVae
    from disent.model import AutoEncoder
    from disent.model.ae import DecoderLinear, EncoderLinear

    data = XYSquaresData(square_size=2, image_size=8, num_squares=2, grid_spacing=2)
    shape = data.x_shape
    net = AutoEncoder(EncoderLinear(x_shape=shape, z_size=4, z_multiplier=2), DecoderLinear(x_shape=shape, z_size=4))
    module = BetaVae(net, BetaVae.cfg(beta=0.01))
    samples = DisentDataset(data, transform=ToImgTensorF32())
    return module, Given(Subset(samples, range(0, 96, 2)))


# --- deepforest, https://github.com/weecology/DeepForest -----------------------------------------------------------


def crowns() -> Made:
    """Detection of the crowns of trees, on a picture from the air that the package comes with."""
    from deepforest.datasets.training import BoxDataset
    from deepforest.main import deepforest

    folder = Path(written_crowns().name)
    (file,) = map(str, folder.glob("*.csv"))
    files = {"csv_file": file, "root_dir": str(folder)}
    trainer = {"accelerator": "cpu", "devices": 1}
    module = deepforest(detector(), config_args={"num_classes": 1, "train": {"lr": 0.01, **files}, **trainer})
    module.set_labels({"Tree": 0})
    module.config.validation.update({"val_accuracy_interval": 1, **files})
    module.setup_metrics()
    samples = BoxDataset(file, str(folder))
    return module, Given(Subset(samples, range(48)), samples.collate_fn)


def detector() -> nn.Module:
    """A small RetinaNet of torchvision, which finds boxes in a picture however sure it is."""
    from torchvision.models.detection import RetinaNet
    from torchvision.models.detection.anchor_utils import AnchorGenerator

    layers = (nn.Conv2d(3, 8, 5, stride=4, padding=2), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2, padding=1), nn.ReLU())
    backbone = nn.Sequential(*layers)
    backbone.out_channels = 8
    anchors = AnchorGenerator(sizes=((16, 32),), aspect_ratios=((0.5, 1.0, 2.0),))
    found = {"score_thresh": 0.0, "detections_per_img": 50}
    return RetinaNet(backbone, 1, min_size=48, max_size=48, anchor_generator=anchors, **found)


@cache
def written_crowns() -> TemporaryDirectory[str]:
    """Write 55 pieces of the picture, each with a crown or more, and a table of the crowns' boxes."""
    from deepforest import get_data
    from deepforest.preprocess import split_raster

    written = TemporaryDirectory()
    picture = get_data("2019_YELL_2_541000_4977000_image_crop.png")
    split_raster(get_data("example.csv"), picture, patch_size=100, patch_overlap=0.0, save_dir=written.name)
    return written
