"""Tasks of a user's own module: its own steps test it on each task, whatever value sums it up."""

import math
import warnings

import pytest
import pytorch_lightning as pl
import torch
from torch import nn
from torch.nn.functional import mse_loss

from fl_lightning import FederatedDataModule
from fl_lightning.data import ClassIncremental, DomainIncremental, FixedPartition, TensorSource
from fl_lightning.methods import FedProx
from fl_lightning.utils.keyed import keyed_numpy
from tests.toys import fit
from tests.user_data import Dicts, Pairs, points
from tests.user_modules import Classifier, DictNet

pytestmark = pytest.mark.filterwarnings("ignore")
PARTS = [list(range(0, 14)), list(range(14, 23)), list(range(23, 36))]


class Line(pl.LightningModule):
    """A regression that logs its error, and another value after it."""

    key = "val/mse"

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        return mse_loss(self.net(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log_dict({self.key: mse_loss(self.net(batch[0]), batch[1]), "val/largest": batch[0].max()})

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Unsaid(Line):
    """Its value has a name that tells no direction."""

    key = "val/score"


class Watch(pl.Callback):
    """The rows of a run, and the weights that were evaluated."""

    def __init__(self):
        self.rows = []
        self.nets = []

    def on_train_epoch_end(self, trainer, loop):
        self.rows.append(dict(loop.round_metrics))
        self.nets.append({name: value.clone() for name, value in loop.client.module.net.state_dict().items()})


def line_data(num_rounds=2):
    draws = torch.Generator().manual_seed(0)
    x = torch.randn(36, 4, generator=draws)
    tested = torch.randn(15, 4, generator=draws)
    weight = torch.tensor([[1.0], [-2.0], [0.5], [3.0]])
    source = TensorSource((x, x @ weight), (tested, tested @ weight))
    return FederatedDataModule(
        source, 3, FixedPartition(PARTS), batch_size=5, seed=0, scenario=DomainIncremental(num_rounds, permutations=2)
    )


def errors(net, data, indices=slice(None)):
    """The mean squared error on both tasks, computed by hand."""
    x = data.split("test").x[indices]
    y = data.split("test").y[indices]
    order = keyed_numpy(0, "scenario/permutation/1").permutation(4)
    line = nn.Linear(4, 1)
    line.load_state_dict(net)
    return [mse_loss(line(seen), y).item() for seen in (x, x[:, order])]


def test_a_regression_is_tested_by_its_error_and_forgets_where_the_error_rises():
    data = line_data()
    watch = Watch()
    start = Line().net.state_dict()
    loop = fit(FedProx(module=Line(), mu=0.1), 4, data, callbacks=[watch], evaluate_clients_every=1)
    names = ["permutation 0", "permutation 1"]
    curve = [errors(net, data) for net in watch.nets]
    for row, expected in zip(watch.rows, curve, strict=True):
        assert [row[f"global/value_task/{name}"] for name in names] == pytest.approx(expected, rel=1e-5)
        assert not [key for key in row if "acc_task" in key]
    initial = errors(start, data)
    end = curve[3]
    row = watch.rows[3]
    assert row["global/value_tasks"] == pytest.approx(sum(end) / 2, rel=1e-5)
    assert row["global/value_forgetting_tasks"] == pytest.approx(end[0] - curve[1][0], rel=1e-4)
    assert row["global/value_backward_transfer"] == pytest.approx(curve[1][0] - end[0], rel=1e-4)
    assert row["global/value_forward_transfer"] == pytest.approx(initial[1] - curve[1][1], rel=1e-4)
    assert row["global/value_forgetting_tasks"] > 0
    assert row["global/value_learned"] == pytest.approx((curve[1][0] + end[1]) / 2, rel=1e-5)
    assert loop._run.parts.recorder.directions["local/value_learned"] == "min"
    own = [errors(watch.nets[3], data, data.client_indices("test", client)) for client in range(3)]
    for task, name in enumerate(names):
        mean = sum(of_client[task] for of_client in own) / 3
        assert row[f"local/value_task/{name}"] == pytest.approx(mean, rel=1e-5)


def test_the_table_of_a_module_is_continued(tmp_path):
    def run(rounds, ckpt_path=None):
        watch = Watch()
        loop = fit(FedProx(module=Line()), rounds, line_data(), callbacks=[watch], ckpt_path=ckpt_path)
        loop.trainer.save_checkpoint(tmp_path / f"{rounds}.ckpt")
        return loop, watch.rows

    whole, rows = run(4)
    _, first = run(2)
    continued, rest = run(4, tmp_path / "2.ckpt")
    assert [*first, *rest] == rows
    assert continued._run.tasks.state_dict() == whole._run.tasks.state_dict()
    assert continued._run.tasks.value == ("val/mse", "min")


def test_a_value_whose_direction_nobody_tells_has_no_forgetting():
    watch = Watch()
    with pytest.warns(UserWarning, match=r"val/score is better when lower or higher"):
        fit(FedProx(module=Unsaid()), 2, line_data(1), callbacks=[watch])
    said = [key.removeprefix("global/value_") for key in watch.rows[1] if key.startswith("global/value_")]
    assert said == ["task/permutation 0", "task/permutation 1", "tasks", "learned"]


def test_classes_of_a_module_and_data_of_the_users_own():
    scenario = ClassIncremental([[0, 2], [1]], rounds_per_task=1)
    data = FederatedDataModule.from_datamodule(Pairs(), num_clients=3, scenario=scenario, num_classes=3)
    watch = Watch()
    fit(FedProx(module=Classifier()), 2, data, callbacks=[watch])
    x, y = points(30, 1)
    for row, weights in zip(watch.rows, watch.nets, strict=True):
        net = Classifier().net.eval()
        net.load_state_dict(weights)
        right = net(x).argmax(1) == y
        for name, classes in (("0-2", [0, 2]), ("1", [1])):
            chosen = torch.isin(y, torch.tensor(classes))
            assert row[f"val/acc_task/{name}"] == pytest.approx(right[chosen].float().mean().item())
    assert math.isfinite(watch.rows[1]["val/forgetting_tasks"])


def test_a_module_cannot_know_the_task():
    scenario = ClassIncremental([[0, 2], [1]], rounds_per_task=1, knows_task=True)
    data = FederatedDataModule.from_datamodule(Pairs(), num_clients=3, scenario=scenario, num_classes=3)
    with pytest.raises(ValueError, match=r"knows_task chooses among the logits of a net, and a Classifier is tested"):
        fit(FedProx(module=Classifier()), 2, data)


def test_domains_of_a_column_of_the_users_own_items():
    """The batches are dictionaries, which only the module understands."""
    scenario = DomainIncremental(1, column="writer", values=["w0", "w3"])
    data = FederatedDataModule.from_datamodule(Dicts(), num_clients=2, scenario=scenario)
    rows = Watch()
    fit(FedProx(module=Judging()), 2, data, callbacks=[rows])
    for writer, row in ((0, rows.rows[0]), (3, rows.rows[1])):
        chosen = [index for index in range(20) if index % 6 == writer]
        assert row[f"val/value_task/w{writer}"] == len(chosen)


class Judging(DictNet):
    """Logs how many samples it is tested on."""

    def validation_step(self, batch, batch_idx):
        self.log("num_errors", float(len(batch["label"])), reduce_fx="sum")

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Unmeasured(Line):
    """A regression without a step of its own for evaluations."""

    validation_step = pl.LightningModule.validation_step


@pytest.mark.parametrize(("module", "told"), [(Unmeasured, 1), (Line, 0)])
def test_tasks_on_which_nothing_is_measured_are_told_of(module, told):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(module(), 1, line_data())
    said = [str(warning.message) for warning in caught if "nothing is measured on the tasks" in str(warning.message)]
    assert len(said) == told
    assert all("because Unmeasured has no validation_step" in text for text in said)
