"""Modules of other packages, unchanged, and modules of the tests that are made of the parts of other packages.

Each function makes a module and a data module, and imports their package.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from pytorch_lightning import LightningDataModule, LightningModule
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

PARTS = [list(range(0, 8)), list(range(8, 12)), list(range(12, 24))]
"""Samples of the clients. Batches of 4 divide them, since some states have the size of a batch."""

SIZE = 24
WORDS = 11


class Loaded(LightningDataModule):
    """Has a dataset as both training and validation samples."""

    def __init__(self, dataset: Any, collate_fn: Callable[[list[Any]], Any] = default_collate) -> None:
        super().__init__()
        self.dataset = dataset
        self.collate_fn = collate_fn

    def train_dataloader(self):
        return DataLoader(self.dataset, batch_size=4, collate_fn=self.collate_fn)

    val_dataloader = train_dataloader


class Items(Dataset):
    """Holds samples that a function makes of their index."""

    def __init__(self, make: Callable[[int], Any]) -> None:
        self.items = [make(i) for i in range(SIZE)]

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        return self.items[index]


@cache
def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def classes(count: int = 3) -> torch.Tensor:
    return torch.arange(SIZE) % count


def images(size: int = 32) -> torch.Tensor:
    shape = (SIZE, 3, size, size)
    return drawn(*shape)


# --- Lightning's own demos ----------------------------------------------------------------------------------------


def text() -> TensorDataset:
    words = torch.randint(WORDS, (SIZE, 6), generator=torch.Generator().manual_seed(0))
    return TensorDataset(words[:, :-1], words[:, 1:])


def boring() -> tuple[LightningModule, LightningDataModule]:
    from pytorch_lightning.demos.boring_classes import BoringModel, RandomDataset

    return BoringModel(), Loaded(RandomDataset(32, SIZE))


def boring_by_hand() -> tuple[LightningModule, LightningDataModule]:
    from pytorch_lightning.demos.boring_classes import ManualOptimBoringModel, RandomDataset

    return ManualOptimBoringModel(), Loaded(RandomDataset(32, SIZE))


def transformer() -> tuple[LightningModule, LightningDataModule]:
    from pytorch_lightning.demos.transformer import LightningTransformer, Transformer

    module = LightningTransformer(vocab_size=WORDS)
    module.model = Transformer(WORDS, ninp=8, nhead=2, nhid=8, nlayers=1, dropout=0.0)
    return module, Loaded(text())


def lstm() -> tuple[LightningModule, LightningDataModule]:
    from pytorch_lightning.demos.lstm import LightningLSTM

    module = LightningLSTM(vocab_size=WORDS)
    for part in module.modules():
        if isinstance(part, nn.LSTM):
            part.dropout = 0.0
        elif isinstance(part, nn.Dropout):
            part.p = 0.0
    return module, Loaded(text())


def collection() -> tuple[LightningModule, LightningDataModule]:
    from tests.user_modules import Metrics

    return Metrics(), Loaded(TensorDataset(drawn(SIZE, 4), classes()))


def gan() -> tuple[LightningModule, LightningDataModule]:
    from tests.third_party.gan import GAN

    shape = (SIZE, 1, 8, 8)
    return GAN(size=8), Loaded(TensorDataset(drawn(*shape).tanh(), classes()))


# --- torchgeo -----------------------------------------------------------------------------------------------------


def geo_samples(label: Callable[[int], torch.Tensor], key: str = "label") -> Items:
    return Items(lambda i: {"image": images()[i], key: label(i)})


def geo_classification() -> tuple[LightningModule, LightningDataModule]:
    """With a data module of torchgeo, which normalises on the device."""
    from torchgeo.datamodules import NonGeoDataModule
    from torchgeo.datasets import NonGeoDataset
    from torchgeo.trainers import ClassificationTask

    class Scenes(NonGeoDataset):
        def __init__(self, split="train"):
            self.samples = geo_samples(lambda i: classes()[i])

        def __len__(self):
            return SIZE

        def __getitem__(self, index):
            return dict(self.samples[index])

    return ClassificationTask(model="resnet18", in_channels=3, num_classes=3), NonGeoDataModule(Scenes, batch_size=4)


def geo_regression() -> tuple[LightningModule, LightningDataModule]:
    from torchgeo.trainers import RegressionTask

    return RegressionTask(model="resnet18", in_channels=3), Loaded(geo_samples(lambda i: drawn(SIZE)[i]))


def geo_segmentation() -> tuple[LightningModule, LightningDataModule]:
    from torchgeo.trainers import SemanticSegmentationTask

    task = SemanticSegmentationTask(model="unet", backbone="resnet18", in_channels=3, num_classes=3)
    return task, Loaded(geo_samples(lambda i: (images()[i, 0] > 0).long(), "mask"))


# --- others -------------------------------------------------------------------------------------------------------


def views() -> Loaded:
    def pair(i: int) -> Any:
        image = images()[i]
        return (image, image + 0.1 * drawn(3, 32, 32, seed=i)), classes()[i]

    return Loaded(Items(pair))


def byol() -> tuple[LightningModule, LightningDataModule]:
    from tests.third_party.contrastive import BYOL

    return BYOL(), views()


def moco() -> tuple[LightningModule, LightningDataModule]:
    from tests.third_party.contrastive import MoCo

    return MoCo(), views()


def simclr() -> tuple[LightningModule, LightningDataModule]:
    from tests.third_party.contrastive import SimCLR

    return SimCLR(), views()


def forecasting() -> tuple[LightningModule, LightningDataModule]:
    import pandas
    from pytorch_forecasting import TemporalFusionTransformer, TimeSeriesDataSet

    rows = []
    for series in range(3):
        for t in range(15):
            rows.append({"series": str(series), "time": t, "value": float(drawn(3, 15)[series, t])})
    data = TimeSeriesDataSet(
        pandas.DataFrame(rows),
        time_idx="time",
        target="value",
        group_ids=["series"],
        max_encoder_length=6,
        min_encoder_length=6,
        max_prediction_length=2,
        time_varying_unknown_reals=["value"],
    )
    assert len(data) == SIZE
    module = TemporalFusionTransformer.from_dataset(data, hidden_size=4, attention_head_size=1, dropout=0.0)
    return module, Loaded(data, data.to_dataloader(batch_size=4).collate_fn)


class Segmentation(LightningModule):
    """As the first example of segmentation-models-pytorch."""

    def __init__(self):
        super().__init__()
        import segmentation_models_pytorch as smp

        self.model = smp.Unet("resnet18", encoder_weights=None, encoder_depth=3, decoder_channels=(16, 8, 8), classes=1)
        self.loss_fn = smp.losses.DiceLoss(smp.losses.BINARY_MODE, from_logits=True)
        self.training_step_outputs = []

    def forward(self, image):
        return self.model(image)

    def shared_step(self, batch):
        image, mask = batch
        return self.loss_fn(self(image), mask)

    def training_step(self, batch, batch_idx):
        loss = self.shared_step(batch)
        self.training_step_outputs.append(loss.detach())
        return loss

    def on_train_epoch_end(self):
        self.log("train_dice", torch.stack(self.training_step_outputs).mean())
        self.training_step_outputs.clear()

    def validation_step(self, batch, batch_idx):
        self.log("valid_dice", self.shared_step(batch))

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=2e-4)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100, eta_min=1e-5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step", "frequency": 1}}


def segmentation() -> tuple[LightningModule, LightningDataModule]:
    x = images()
    return Segmentation(), Loaded(TensorDataset(x, (x[:, :1] > 0).float()))


class Sentences(LightningModule):
    """A transformer of Hugging Face as Lightning's examples wrap it: batches are dictionaries, the loss the model's."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def training_step(self, batch, batch_idx):
        loss = self.model(**batch).loss
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        out = self.model(**batch)
        self.log_dict({"val_loss": out.loss, "val_acc": (out.logits.argmax(1) == batch["labels"]).float().mean()})

    def configure_optimizers(self):
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)


def bert_model() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=WORDS,
        num_labels=3,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return BertForSequenceClassification(config)


def sentences() -> Loaded:
    words = text().tensors[0]
    labels = classes()

    def sentence(i: int) -> dict[str, torch.Tensor]:
        return {"input_ids": words[i], "attention_mask": torch.ones_like(words[i]), "labels": labels[i]}

    return Loaded(Items(sentence))


def bert() -> tuple[LightningModule, LightningDataModule]:
    return Sentences(bert_model()), sentences()


def lora() -> tuple[LightningModule, LightningDataModule]:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query", "value"], lora_dropout=0.0)
    return Sentences(get_peft_model(bert_model(), config)), sentences()


class Graphs(LightningModule):
    """As the Lightning example of torch_geometric: graphs are classified by a GIN."""

    def __init__(self):
        super().__init__()
        from torch_geometric.nn import GIN, MLP
        from torchmetrics import Accuracy

        self.gnn = GIN(4, 8, 2, dropout=0.0, jk="cat")
        self.classifier = MLP([8, 8, 3], norm="batch_norm", dropout=0.0)
        self.train_acc = Accuracy(task="multiclass", num_classes=3)
        self.val_acc = Accuracy(task="multiclass", num_classes=3)

    def forward(self, x, edge_index, batch):
        from torch_geometric.nn import global_add_pool

        return self.classifier(global_add_pool(self.gnn(x, edge_index), batch))

    def training_step(self, data, batch_idx):
        y_hat = self(data.x, data.edge_index, data.batch)
        loss = F.cross_entropy(y_hat, data.y)
        self.train_acc(y_hat.softmax(dim=-1), data.y)
        self.log("train_acc", self.train_acc, prog_bar=True, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, data, batch_idx):
        y_hat = self(data.x, data.edge_index, data.batch)
        self.val_acc(y_hat.softmax(dim=-1), data.y)
        self.log("val_acc", self.val_acc, prog_bar=True, on_step=False, on_epoch=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


def graphs() -> tuple[LightningModule, LightningDataModule]:
    from torch_geometric.data import Data
    from torch_geometric.loader import DataLoader as GraphLoader

    def graph(i: int) -> Data:
        edges = torch.randint(5, (2, 8), generator=torch.Generator().manual_seed(i))
        return Data(x=drawn(SIZE, 5, 4)[i], edge_index=edges, y=classes()[i : i + 1])

    class Many(LightningDataModule):
        def train_dataloader(self):
            return GraphLoader([graph(i) for i in range(SIZE)], batch_size=4)

        val_dataloader = train_dataloader

    return Graphs(), Many()
