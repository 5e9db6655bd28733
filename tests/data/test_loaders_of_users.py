"""What loaders and datasets of users have and a federation must keep: unread labels, last batches, several loaders."""

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.demos.boring_classes import BoringModel, RandomDataset
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torchmetrics import MeanMetric

from fl_lightning import FederatedDataModule, FederatedLoop
from fl_lightning.data import DirichletPartition, FixedPartition
from fl_lightning.data.seen import NUM_READ, NUM_READINGS
from fl_lightning.methods import FedAvg
from tests.toys import equal, fit, trainer
from tests.user_data import Pairs, points
from tests.user_modules import Plain


class Lazy(Dataset):
    """Images that are read when they are asked for, with their labels; it counts."""

    def __init__(self, n=24):
        self.x, self.hidden = points(n, 0)
        self.reads = 0

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        self.reads += 1
        return self.x[index], int(self.hidden[index])


@pytest.mark.parametrize("settings", [{}, {"partition": FixedPartition([[0, 1, 2], [3]])}, {"val_fraction": 0.25}])
def test_labels_that_nobody_asks_for_are_not_read(settings):
    train = Lazy()
    test = Lazy(8)
    data = FederatedDataModule.from_datasets(train, test, num_clients=2, **settings)
    data.setup("fit")
    looks = NUM_READ * NUM_READINGS if "val_fraction" in settings else 0  # whether reading is random
    assert train.reads <= 1 + looks  # the shape of a sample
    assert test.reads == 0
    assert data.num_classes == 3
    assert train.reads > 1
    assert data.label_counts.sum() == len(data.client_indices("train", 0)) + len(data.client_indices("train", 1))


def test_nor_by_a_fit_of_a_module(tmp_path):
    train = Lazy()
    data = FederatedDataModule.from_datasets(train, num_clients=2, batch_size=4)
    trainer(1, tmp_path, limit_val_batches=0).fit(FederatedLoop(Plain()), datamodule=data)
    of_digest = 24 + 3 * 6  # the samples of the run's digest, three of which are read six times to see if they change
    assert train.reads <= 24 + 2 + of_digest  # the samples of one epoch, and the shape of one


def test_they_are_read_where_the_partition_or_a_net_asks():
    data = FederatedDataModule.from_datasets(Lazy(), num_clients=2, partition=DirichletPartition(1.0, 2))
    data.setup("fit")
    assert data.num_classes == 3
    loop = fit(FedAvg(), 1, FederatedDataModule.from_datasets(Lazy(), Lazy(9), num_clients=2))
    assert loop.client.num_classes == 3
    assert 0 <= loop.round_metrics["global/acc_class/02"] <= 1


class Columns(Dataset):
    """As a dataset of Hugging Face: columns by name, items as dictionaries; decoding an item costs."""

    column_names = ["image", "label", "user"]

    def __init__(self, n=12):
        x, y = points(n, 0)
        self.columns = {"image": x, "label": y.tolist(), "user": [f"u{i % 3}" for i in range(n)]}

    def __len__(self):
        return len(self.columns["label"])

    def __getitem__(self, key):
        if isinstance(key, str):
            return self.columns[key]
        assert key == 0, "a sample was decoded"
        return {name: values[key] for name, values in self.columns.items()}


@pytest.mark.parametrize("part", [lambda d: d, lambda d: torch.utils.data.Subset(d, range(12))])
def test_columns_are_read_without_the_samples(part):
    data = FederatedDataModule.from_datasets(part(Columns()), by="user")
    data.setup("fit")
    assert data.num_clients == 3
    assert data.client_indices("train", 1).tolist() == [1, 4, 7, 10]
    assert data.num_classes == 3
    counts = np.bincount(points(12, 0)[1][[1, 4, 7, 10]], minlength=3)
    assert data.label_counts[1].tolist() == counts.tolist()


class Some(pl.LightningDataModule):
    def __init__(self, drop_last=False, loaders=1):
        super().__init__()
        self.drop_last = drop_last
        self.loaders = loaders
        self.train = TensorDataset(*points(20, 0))

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=4, drop_last=self.drop_last)

    def val_dataloader(self):
        sets = [TensorDataset(*points(6 + i, 1 + i)) for i in range(self.loaders)]
        return [DataLoader(one, batch_size=4) for one in sets]


@pytest.mark.parametrize("every", [1, 2])
def test_drop_last_is_taken_over(every):
    """Clients of 10, 7 and 3 samples: a client with less than a batch takes no step."""
    seen = []

    class Seen(Plain):
        def training_step(self, batch, batch_idx):
            seen.append(len(batch[1]))
            return super().training_step(batch, batch_idx)

    partition = FixedPartition([list(range(10)), list(range(10, 17)), [17, 18, 19]])
    data = FederatedDataModule.from_datamodule(Some(drop_last=True), num_clients=3, partition=partition)
    fit(Seen(), 1, data, accumulate_grad_batches=every)
    assert seen == [4, 4, 4]
    assert [len(batch[1]) for batch in data.view(1, 0).batches("train")] == [4, 3]  # a pass of a method's own


def test_drop_last_is_the_loop_by_hand():
    class Sgd(Plain):
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    pl.seed_everything(3, verbose=False)
    module = Sgd()
    start = {name: value.clone() for name, value in module.state_dict().items()}
    data = FederatedDataModule.from_datamodule(
        Some(drop_last=True), num_clients=1, partition=FixedPartition([list(range(10))])
    )
    loop = fit(module, 1, data, local_epochs=2)
    hand = Sgd()
    hand.load_state_dict(start)
    optimizer = hand.configure_optimizers()
    for _ in range(2):
        for x, y in DataLoader(TensorDataset(*points(20, 0)[:2]), batch_size=4):
            if int((x == points(20, 0)[0][8]).all(1).any()):  # the third batch would have two samples
                break
            optimizer.zero_grad()
            F.cross_entropy(hand.net(x), y).backward()
            optimizer.step()
    assert equal(dict(loop.client.module.state_dict()), dict(hand.state_dict()))


class Several(Plain):
    def __init__(self):
        super().__init__()
        self.mean = MeanMetric()

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.mean.update(loss)
        self.log("val_loss", loss)
        self.log("val_mean", self.mean)
        self.log(f"own_{dataloader_idx}", loss, add_dataloader_idx=False)

    def on_validation_epoch_end(self):
        self.log("at_end", 1.0)


def test_several_validation_loaders_have_lightnings_keys():
    pl.seed_everything(3, verbose=False)
    module = Several()
    data = FederatedDataModule.from_datamodule(Some(loaders=2), num_clients=2, eval_batch_size=4)
    loop = fit(module, 1, data)
    results = trainer(1).validate(module, Some(loaders=2), verbose=False)
    expected = {key: value for result in results for key, value in result.items()}
    found = {key: value for key, value in loop.round_metrics.items() if not key.startswith(("comm/", "loss", "train"))}
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert found[key] == pytest.approx(value, rel=1e-5)
    one = fit(Several(), 1, FederatedDataModule.from_datamodule(Some(), num_clients=2)).round_metrics
    assert "val_loss" in one
    assert not any("dataloader_idx" in key for key in one)


def test_loaders_of_the_module_itself_are_ignored_with_one_line(caplog):
    caplog.set_level("INFO")
    pl.seed_everything(3, verbose=False)
    data = FederatedDataModule.from_datasets(RandomDataset(32, 24), num_clients=3, batch_size=4)
    loop = fit(BoringModel(), 2, data)
    said = (
        "train_dataloader, val_dataloader, test_dataloader, predict_dataloader of BoringModel are not called: the data"
    )
    assert sum(said in message for message in caplog.messages) == 1
    assert all(value.isfinite().all() for value in loop.client.module.state_dict().values())


# --- the test loader, which a plain fit does not ask for -----------------------------------------------------------


class Asked(Pairs):
    """Notes what it is asked for; without a test set."""

    def __init__(self, error=None):
        super().__init__()
        self.error = error
        self.asked = []

    def setup(self, stage):
        super().setup(stage)
        self.asked.append(stage)

    def test_dataloader(self):
        self.asked.append("test_dataloader")
        if self.error is not None:
            raise self.error
        return super().test_dataloader()


class Unvalidated(Asked):
    val_dataloader = pl.LightningDataModule.val_dataloader


class AbsentByDefault(Asked):
    def test_dataloader(self):
        return pl.LightningDataModule.test_dataloader(self)


class AbsentByNone(Asked):
    def test_dataloader(self):
        return None


class AbsentOnTheInstance(Asked):
    """As the data modules of PyTorch Geometric do."""

    def __init__(self):
        super().__init__()
        self.test_dataloader = None


def federated(datamodule, **settings):
    return FederatedDataModule.from_datamodule(datamodule, num_clients=3, **settings)


def test_a_fit_with_validation_samples_asks_for_no_test_samples():
    own = Asked(AssertionError("there is no test set"))
    data = federated(own)
    loop = FederatedLoop(Plain())
    run = trainer(2)
    run.fit(loop, datamodule=data)
    run.validate(loop, datamodule=data, verbose=False)
    assert own.asked == ["fit"]
    with pytest.raises(AssertionError, match="no test set"):
        run.test(loop, datamodule=data)


def test_nor_does_one_that_holds_validation_samples_back():
    own = Unvalidated(AssertionError("there is no test set"))
    trainer(1).fit(FederatedLoop(Plain()), datamodule=federated(own, val_fraction=0.2))
    assert own.asked == ["fit"]


def test_they_are_asked_for_once_where_they_are_evaluated():
    own = Unvalidated()
    data = federated(own)
    loop = FederatedLoop(Plain())
    trainer(2).fit(loop, datamodule=data)
    assert own.asked == ["fit", "test", "test_dataloader"]
    assert "val_loss" in loop.round_metrics

    own = Asked()
    data = federated(own)
    loop = FederatedLoop(FedAvg(), evaluate_clients_every=1)
    run = trainer(2)
    run.fit(loop, datamodule=data)
    run.test(loop, datamodule=data, verbose=False)
    assert own.asked == ["fit", "test", "test_dataloader"]
    assert sum(len(data.client_indices("test", i)) for i in range(3)) > 0
    assert loop.round_metrics["local/alma"] > 0
    assert run.callback_metrics["test/acc"] > 0


@pytest.mark.parametrize("kind", [AbsentByDefault, AbsentByNone, AbsentOnTheInstance])
def test_no_test_loader_means_no_test_samples(kind):
    class Neither(kind):
        val_dataloader = Unvalidated.val_dataloader

    data = federated(Neither())
    loop = FederatedLoop(Plain())
    run = trainer(1)
    run.fit(loop, datamodule=data)
    assert data.evaluated is None
    assert "val_loss" not in loop.round_metrics
    with pytest.raises(ValueError, match="the data have no split 'test'"):
        run.test(loop, datamodule=data)
    with pytest.raises(ValueError, match="the data have no split 'test'"):
        federated_and_set_up(kind()).split("test")


@pytest.mark.parametrize("kind", [AbsentByDefault, AbsentByNone, AbsentOnTheInstance])
def test_predict_without_samples_names_the_loader_to_define(kind):
    data = federated(kind())
    loop = FederatedLoop(Plain())
    run = trainer(1)
    run.fit(loop, datamodule=data)
    with pytest.raises(
        ValueError, match=r"predict needs samples to answer, got data with only train.*define predict_dataloader"
    ):
        run.predict(loop, datamodule=data)


def federated_and_set_up(datamodule):
    data = federated(datamodule)
    data.setup("fit")
    return data


def test_labels_of_test_samples_that_come_late_are_checked():
    class Further(Pairs):
        def test_dataloader(self):
            return DataLoader(TensorDataset(torch.randn(4, 4), torch.tensor([0, 1, 2, 3])))

    data = federated_and_set_up(Further())
    assert data.num_classes == 3
    with pytest.raises(ValueError, match=r"labels must lie in \[0, 3\), got 3 at index 3"):
        data.split("test")
    assert federated_and_set_up(type("Own", (Further,), {"num_classes": 4})()).split("test").labels.max() == 3
