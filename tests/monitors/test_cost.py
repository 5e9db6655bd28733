"""What a round costs: every optimizer step counts, those of personal models too, one by one and in a stack."""

from time import monotonic

import pytest

from fl_lightning.methods import Ditto, FedAvg, FedRep
from fl_lightning.monitors import CostMonitor
from fl_lightning.nets import Perceptron
from tests.monitors.test_monitors import run
from tests.toys import sgd, toy_data

SIZES = (10, 20, 30, 40)


@pytest.mark.parametrize("chunk", [1, 4])
@pytest.mark.parametrize(
    ("kind", "settings", "passes"),
    [(FedAvg, {}, 2), (Ditto, {"personal_epochs": 3}, 2 + 3), (FedRep, {"head_epochs": 4}, 4 + 2)],
)
def test_the_steps_of_a_round_are_those_of_all_clients_exchanges_and_phases(kind, settings, passes, chunk):
    client = kind(net=Perceptron, optimizer=sgd(), **settings)
    began = monotonic()
    loop = run(client, [CostMonitor()], 2, toy_data(SIZES, batch_size=10, partition=None), chunk=chunk)
    sizes = loop.data.label_counts.sum(1).tolist()
    assert loop.round_metrics["cost/steps"] == passes * sum(-(-size // 10) for size in sizes)
    assert 0 < loop.round_metrics["cost/seconds"] <= monotonic() - began
    assert loop.round_metrics["cost/memory"] > 1e6  # bytes


def test_every_other_round_is_measured():
    loop = run(None, [CostMonitor(every=2)], 3)
    assert sorted(loop.recorder.history.curve("cost/steps")) == [1]
    assert sorted(loop.recorder.history.curve("cost/seconds")) == [1]
