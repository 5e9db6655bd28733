"""`PredictedDistribution` sees what KnFu's server infers, and changes nothing."""

import csv

import pytest
import torch

from fl_lightning.methods import KnFu
from fl_lightning.monitors import PredictedDistribution
from fl_lightning.nets import Perceptron
from tests.methods.own_models import models_of, transfer_data
from tests.toys import equal, fit, sgd


def run(callbacks, **settings):
    client = KnFu(net=Perceptron, optimizer=sgd(0.1))
    return fit(client, 3, transfer_data(), callbacks=callbacks, **settings)


@pytest.mark.parametrize("chunk", [1, 3])
def test_the_table_has_the_distributions_that_the_server_infers(chunk, tmp_path):
    loop = run([PredictedDistribution(dirpath=tmp_path)], chunk=chunk)
    with (tmp_path / "predicted_distribution.csv").open(newline="", encoding="utf-8") as file:
        header, *rows = csv.reader(file)
    fusion = loop.server_module.fusion
    assert header[:2] == ["round", "client"]
    assert [int(row[0]) for row in rows] == [t for t in range(3) for _ in fusion.client_ids]
    last = {int(row[1]): [float(cell) for cell in row[2:]] for row in rows if row[0] == "2"}
    found = torch.tensor([last[client_id] for client_id in fusion.client_ids], dtype=torch.float64)
    torch.testing.assert_close(found, fusion.epd, rtol=1e-5, atol=1e-6)


def test_it_changes_no_weight(tmp_path):
    bare = run([])
    watched = run([PredictedDistribution(dirpath=tmp_path, every=2)])
    assert all(map(equal, models_of(bare), models_of(watched)))
