"""A `test_dataloader` that returns several loaders: keys, indices and values as in plain Lightning."""

import pytest
import torch
import torchmetrics
from pytorch_lightning import LightningDataModule, Trainer
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset

from fl_lightning import FederatedDataModule, FederatedLoop
from fl_lightning.data import OwnerPartition
from fl_lightning.methods import FedAvg, Local
from fl_lightning.monitors import GroupMetrics
from tests.federation.test_clients_by_own_steps import QUIET, Base
from tests.toys import BatchNormNet, sgd

pytestmark = pytest.mark.filterwarnings("ignore")
CLIENTS = 3
TESTS = (9, 11)


def regression_set(size, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, 4, generator=generator)
    return TensorDataset(x, x.sum(1) + torch.randn(size, generator=generator))


class TwoHospitals(LightningDataModule):
    """It has a test loader for each of two places."""

    sizes = TESTS
    validates = True

    def train_dataloader(self):
        return DataLoader(regression_set(23, 0), batch_size=4)

    def val_dataloader(self):
        return DataLoader(regression_set(7, 1), batch_size=2) if self.validates else None

    def tests(self):
        return [regression_set(size, 2 + place) for place, size in enumerate(self.sizes)]

    def test_dataloader(self):
        return [DataLoader(tests, batch_size=2) for tests in self.tests()]


class LogsByLoader(Base):
    def __init__(self):
        super().__init__()
        self.mae = torchmetrics.MeanAbsoluteError()
        self.by_loader = torch.nn.ModuleList([torchmetrics.MeanAbsoluteError() for _ in TESTS])

    def on_validation_batch_start(self, batch, batch_idx, dataloader_idx=0):
        self.begun = (batch_idx, dataloader_idx)

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        assert self.begun == (batch_idx, dataloader_idx)
        x, y = batch
        self.mae(self.layer(x).squeeze(1), y)
        self.by_loader[dataloader_idx](self.layer(x).squeeze(1), y)
        self.log("mse", self.error(batch))
        self.log("index", float(dataloader_idx + batch_idx))
        self.log("own_mae", self.by_loader[dataloader_idx])

    def on_validation_epoch_end(self):
        self.log("mae", self.mae.compute())
        self.mae.reset()

    def test_step(self, batch, batch_idx, dataloader_idx=0):
        self.log("test_mse", self.error(batch))


class NamesIt(Base):
    """It makes the names of its values itself."""

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.log(f"mse_{dataloader_idx}", self.error(batch), add_dataloader_idx=False)


class OnlyTests(Base):
    def test_step(self, batch, batch_idx, dataloader_idx):
        self.log("mse", self.error(batch), batch_size=len(batch[1]))
        self.log("index", float(dataloader_idx))


class TransfersByLoader(LogsByLoader):
    """Its transfer hooks scale the samples of a loader by its index."""

    def on_before_batch_transfer(self, batch, dataloader_idx):
        return batch[0] * (1 + dataloader_idx), batch[1]

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return batch[0] + 3 * dataloader_idx, batch[1]


MODULES = (LogsByLoader, NamesIt, OnlyTests, TransfersByLoader)


def data_of(datamodule=None, **settings):
    chosen = TwoHospitals() if datamodule is None else datamodule
    settings = {"num_clients": CLIENTS, "seed": 1, "eval_batch_size": 2, **settings}
    return FederatedDataModule.from_datamodule(chosen, **settings)


def fitted(client, data=None, callbacks=(), **settings):
    loop = FederatedLoop(client, seed=1, **{"evaluate_clients_every": 1, **settings})
    run = Trainer(max_epochs=1, callbacks=list(callbacks), **QUIET)
    run.fit(loop, datamodule=data_of() if data is None else data)
    return loop


def samples_by_loader(data, client_id, sizes=TESTS):
    """The client's test samples of each loader, told by its indices in the joined sets."""
    positions = data.client_indices("test", client_id)
    found = []
    first = 0
    for size, tests in zip(sizes, data.source.datamodule.tests(), strict=True):
        chosen = positions[(positions >= first) & (positions < first + size)] - first
        found.append(DataLoader(Subset(tests, chosen.tolist()), batch_size=2))
        first += size
    return found


def merged(values_by_loader):
    found = {}
    for values in values_by_loader:
        found |= values
    return found


def plain(module, loaders):
    evaluates = "validate" if type(module).validation_step is not Base.validation_step else "test"
    return merged(getattr(Trainer(**QUIET), evaluates)(module, loaders, verbose=False))


@pytest.mark.parametrize("around", [FedAvg, Local], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("kind", MODULES, ids=lambda kind: kind.__name__)
def test_each_client_has_the_values_of_plain_lightning_with_its_loaders(kind, around):
    loop = fitted(around(module=kind()))
    for client_id, values in loop.recorder.client_values.items():
        found = plain(loop.client_model(client_id), samples_by_loader(loop.data, client_id))
        assert values == pytest.approx({f"local/{name}": value for name, value in found.items()}, rel=1e-5)
    assert len(loop.recorder.client_values) == CLIENTS
    if kind is not NamesIt:
        assert {"local/mse/dataloader_idx_0", "local/mse/dataloader_idx_1"} <= loop.round_metrics.keys()


class ByHospital(TwoHospitals):
    """Hospital a has samples of the first test loader only, and hospital b of the second one."""

    def train_dataloader(self):
        dataset = regression_set(9, 0)
        dataset.hospital = list("aaabbbccc")
        return DataLoader(dataset, batch_size=4)

    def tests(self):
        tests = super().tests()
        tests[0].hospital = list("aaaaaaccc")
        tests[1].hospital = list("bbbbbbbbccc")
        return tests


def test_a_client_without_samples_of_a_loader_has_no_value_of_it():
    loop = fitted(LogsByLoader(), data_of(ByHospital(), by="hospital", num_clients=None))
    values = loop.recorder.client_values
    assert "local/mse/dataloader_idx_1" not in values[0]
    assert "local/mse/dataloader_idx_0" not in values[1]
    for place, clients in enumerate([(0, 2), (1, 2)]):
        key = f"local/mse/dataloader_idx_{place}"
        mean = sum(values[client_id][key] for client_id in clients) / 2
        assert loop.round_metrics[key] == pytest.approx(mean)


def test_the_global_model_is_tested_with_the_same_keys():
    loop = fitted(LogsByLoader())
    wanted = merged(Trainer(**QUIET).test(loop.client_model(), datamodule=TwoHospitals(), verbose=False))
    found = merged(Trainer(**QUIET).test(loop, loop.data, verbose=False))
    assert wanted.keys() == {"test_mse/dataloader_idx_0", "test_mse/dataloader_idx_1"}
    assert found == pytest.approx(wanted)
    loop.deploy(1)
    found = merged(Trainer(**QUIET).test(loop, loop.data, verbose=False))
    of_client = samples_by_loader(loop.data, 1)
    wanted = merged(Trainer(**QUIET).test(loop.client_model(1), of_client, verbose=False))
    assert found == pytest.approx(wanted)


def test_without_validation_samples_the_loaders_are_evaluated_every_round():
    class WithoutValidation(TwoHospitals):
        validates = False

    loop = fitted(LogsByLoader(), data_of(WithoutValidation()))
    loaders = loop.data.source.datamodule.test_dataloader()
    found = plain(loop.client_model(), loaders)
    assert {name: loop.round_metrics[name] for name in found} == pytest.approx(found, rel=1e-5)
    resumed = Trainer(max_epochs=2, **QUIET)
    resumed.fit(FederatedLoop(LogsByLoader(), seed=1), datamodule=data_of(WithoutValidation()))


def test_groups_are_evaluated_by_loader():
    loop = fitted(LogsByLoader(), callbacks=[GroupMetrics({"all": [0, 1, 2]})])
    by_client = [samples_by_loader(loop.data, client_id) for client_id in range(CLIENTS)]
    joined = [ConcatDataset([loader.dataset for loader in loaders]) for loaders in zip(*by_client, strict=True)]
    found = plain(loop.client_model(), [DataLoader(samples, batch_size=2) for samples in joined])
    for place in range(2):
        key = f"mse/dataloader_idx_{place}"
        assert loop.round_metrics[f"global/{key}/all"] == pytest.approx(found[key], rel=1e-5)


class Classes(TwoHospitals):
    validates = False

    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.randn(30, 4), torch.arange(30) % 3), batch_size=4)

    def tests(self):
        return [TensorDataset(torch.randn(size, 4), torch.arange(size) % 3) for size in self.sizes]


def test_a_net_is_evaluated_on_all_loaders_as_one():
    loop = fitted(FedAvg(net=BatchNormNet, optimizer=sgd()), data_of(Classes()))
    assert {"local/alma", "global/acc"} <= loop.round_metrics.keys()
    values = merged(Trainer(**QUIET).test(loop, loop.data, verbose=False))
    assert values["test/acc"] == pytest.approx(loop.round_metrics["global/acc"])
    predicted = Trainer(**QUIET).predict(loop, loop.data)
    assert sum(len(batch) for batch in predicted) == sum(TESTS)


class Pictures(Dataset):
    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return torch.full((4,), float(index)), torch.tensor(float(index))


def first_items(items):
    return torch.stack([x for x, _ in items]), torch.stack([y for _, y in items])


def test_loaders_that_make_batches_in_different_ways_are_refused():
    class Mixed(TwoHospitals):
        def test_dataloader(self):
            return [
                DataLoader(Pictures(5), batch_size=2),
                DataLoader(Pictures(4), batch_size=2, collate_fn=first_items),
            ]

    with pytest.raises(ValueError, match=r"Mixed\.test_dataloader must return loaders with one collate_fn"):
        fitted(LogsByLoader(), data_of(Mixed()))


def test_a_step_that_cannot_take_the_index_is_refused_before_anything_trains():
    class TakesMore(Base):
        def validation_step(self, batch, batch_idx, dataloader_idx, stage):
            raise AssertionError

    with pytest.raises(TypeError, match="validation_step"):
        fitted(TakesMore(), data_of())


def test_an_owner_at_its_node_has_all_of_its_loaders(tmp_path):
    pytest.importorskip("flwr", reason="pip install 'fl_lightning[flower]'")
    from fl_lightning.data import Elsewhere
    from fl_lightning.flower.node import Node
    from tests.flower.grid import federate

    def make():
        return FederatedLoop(LogsByLoader(), seed=3, evaluate_clients_every=1)

    def own(client_id):
        return data_of(num_clients=2, partition=OwnerPartition(client_id), batch_size=4, seed=0)

    def answers(given):
        nodes = [Node(make(), own(client_id), client_id, tmp_path / str(client_id)) for client_id in range(2)]
        return {100 + node.client_id: node.answer for node in nodes}

    def servers():
        return FederatedDataModule(Elsewhere(tmp_path), num_clients=2, batch_size=4, eval_batch_size=2)

    server, *_ = federate(make, servers, tmp_path, answers, rounds=1)
    found = plain(server.client.module, TwoHospitals().test_dataloader())
    for client_id in range(2):
        values = server.recorder.client_values[client_id]
        assert values == pytest.approx({f"local/{name}": value for name, value in found.items()}, rel=1e-5)
