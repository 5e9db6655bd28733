"""A value that is not finite is a value. Clients without a value are left out of a mean."""

import csv
import math
from dataclasses import replace

import pytest
import torch
from torchmetrics import Metric, MetricCollection

from fl_lightning import FederatedLoop
from fl_lightning.aggregation import UpdateTransform
from fl_lightning.engines.deployed import score
from fl_lightning.federation.clients_evaluation import mean_values, values_of_score
from fl_lightning.monitors import ClientTable, DriftMonitor
from fl_lightning.utils.round_table import RoundTable
from tests.federation.faulty import CLIENT, ROUND, Faulty
from tests.toys import BatchNormNet, sgd, toy_data, trainer

pytestmark = pytest.mark.filterwarnings("ignore")
SIZES = (8, 12, 5, 0)


class Repaired(UpdateTransform):
    """Sends finite numbers in place of others, so that the run goes on."""

    def on_client(self, update, broadcast):
        weights = {name: value.nan_to_num(0.0, 1.0, -1.0) for name, value in update.weights.items()}
        return replace(update, weights=weights)


def diverged(how, folder, **settings):
    """Two rounds, in the second of which one client diverges."""
    client = Faulty(how=how, net=BatchNormNet, optimizer=sgd())
    loop = FederatedLoop(client, seed=3, transforms=[Repaired()], **settings)
    monitors = [DriftMonitor(dirpath=folder), ClientTable(dirpath=folder)]
    trainer(2, callbacks=monitors).fit(loop, datamodule=toy_data(SIZES))
    return loop


def table(path, column):
    """The cells of a column, as text, by round and client."""
    with path.open(newline="") as file:
        return {(int(row["round"]), int(row["client"])): row[column] for row in csv.DictReader(file)}


@pytest.mark.parametrize("how", ["NaN", "Inf"])
def test_the_drift_of_a_client_that_diverged_is_shown(how, tmp_path):
    loop = diverged(how, tmp_path)
    drifts = loop.recorder.history.curve("local/drift")
    assert math.isfinite(drifts[0])
    assert not math.isfinite(loop.round_metrics["local/drift"])
    for key in ("local/weight_divergence", "train/drift_diversity", "local/drift/std"):
        assert not math.isfinite(loop.round_metrics[key]), key
    for name in ("drift.csv", "clients.csv"):
        cells = table(tmp_path / name, "drift")
        assert cells[ROUND, CLIENT] in ("nan", "inf")
        assert cells[0, 3] == cells[ROUND, 3] == ""  # it has no samples
        finite = [float(cell) for (round_idx, _), cell in cells.items() if cell and not round_idx]
        assert drifts[0] == pytest.approx(sum(finite) / len(finite))
    losses = table(tmp_path / "clients.csv", "loss_after")
    assert losses[ROUND, CLIENT] == "nan"
    assert losses[ROUND, 3] == ""


class Own(Metric):
    """The mean of the first score, or NaN if the client lacks class 2."""

    higher_is_better = True

    def __init__(self):
        super().__init__()
        self.add_state("total", torch.zeros(()))
        self.add_state("twos", torch.zeros(()))

    def update(self, preds, target):
        self.total += preds[:, 0].sum()
        self.twos += (target == 2).sum()

    def compute(self):
        return torch.where(self.twos > 0, self.total, torch.nan)


def own_value(logits, y, client_id=0):
    """The value of `Own` of one client, for a predictor that gives these scores."""
    scored = score(
        client_id=client_id,
        predict=lambda x: logits,
        batches=[(torch.zeros(len(y), 4), y)],
        device=torch.device("cpu"),
        metrics=MetricCollection({"own": Own()}),
    )
    return values_of_score(scored, ["a", "b", "c"])


def test_a_mean_over_clients_tells_nan_from_what_is_not_defined():
    some = torch.ones(2, 3)
    broken = torch.full((2, 3), torch.nan)
    defined = own_value(some, torch.tensor([0, 2]))
    lacks = own_value(some, torch.tensor([0, 1]))
    diverged = own_value(broken, torch.tensor([0, 2]))
    assert (defined, lacks) == ({"local/own": 2.0}, {"local/own": None})
    assert math.isnan(diverged["local/own"])
    assert mean_values([defined, lacks]) == {"local/own": 2.0}
    assert math.isnan(mean_values([defined, lacks, diverged])["local/own"])
    assert math.isnan(mean_values([{"a": math.inf}, {"a": -math.inf}])["a"])


def test_cells_keep_what_is_not_finite(tmp_path):
    written = RoundTable(tmp_path / "table.csv", ("round", "a", "b", "c"))
    written.append([[0, math.nan, None, -math.inf], [1, torch.tensor(math.nan).item(), 0.0, "nan"]])
    assert (tmp_path / "table.csv").read_text().splitlines() == ["round,a,b,c", "0,nan,,-inf", "1,nan,0.0,nan"]
