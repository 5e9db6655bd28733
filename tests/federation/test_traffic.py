import pytest
import torch

from fl_lightning import FaultPolicy, FederatedDataModule, FederatedLoop
from fl_lightning.data import TensorSource
from fl_lightning.data.transforms import Scale
from fl_lightning.federation.recorder import bytes_of_sets
from fl_lightning.functional.traffic import traffic
from fl_lightning.methods import FedAvg
from tests.toys import SIZES, BatchNormNet, fit, toy_data


@pytest.mark.parametrize(
    ("extras", "size"),
    [
        ({}, 0),
        ({"a": torch.zeros(3, dtype=torch.float64), "b": torch.zeros(2, dtype=torch.bfloat16)}, 28),
        ({"counts": torch.zeros(5, dtype=torch.int64), "mask": torch.ones(4, dtype=torch.bool), "x": None}, 44),
        ({"norm": 0.5, "nest": [{"c": torch.zeros(2, 2)}, (1.0, 2)], "is_short": True, "word": "né"}, 24 + 16 + 1 + 3),
    ],
)
def test_values_count_as_their_types_have_them(extras, size):
    assert traffic(None, extras) == size
    assert traffic({"w": torch.zeros(10), "steps": torch.tensor(3)}, extras) == 48 + size


class TwoExchanges(FedAvg):
    exchanges = ("first", "second")

    def reply(self, exchange, local):
        return {"more": torch.zeros(3)} if exchange == "second" else {}


def test_several_exchanges_are_counted_each_and_together():
    row = fit(TwoExchanges(net=BatchNormNet), 1).round_metrics
    once = len(SIZES) * sum(value.nbytes for value in BatchNormNet(3, (4,)).state_dict().values())
    assert row["comm/bytes_down/first"] == row["comm/bytes_down/second"] == row["comm/bytes_up/first"] == once
    assert row["comm/bytes_up/second"] == once + 4 * len(SIZES) * 3
    for way in ("comm/bytes_down", "comm/bytes_up"):
        assert row[way] == row[f"{way}/first"] + row[f"{way}/second"]
    assert not [key for key in fit(FedAvg(), 1).round_metrics if key.startswith("comm/") and key.count("/") > 1]


def test_a_round_of_too_few_clients_moves_nothing():
    data = toy_data(schedule=[[0, 1], [2]])
    loop = FederatedLoop(FedAvg(net=BatchNormNet), faults=FaultPolicy(min_clients=2))
    row = fit(None, 2, data, loop=loop).round_metrics
    assert row["train/skipped"] == 1
    assert row["comm/bytes_down"] == row["comm/bytes_up"] == 0


def test_sets_that_everyone_holds_are_counted_once_and_apart():
    class Needy(FedAvg):
        needs = frozenset({"shared", "transfer", "proxy", "logits"})

    data = toy_data(transfer_size=6, proxy_size=3, num_clients=2, partition=None)
    loop = fit(Needy(), 1, data)
    assert loop.round_metrics["comm/bytes_sets"] == 2 * (3 + 6) * 4 * 4  # 2 clients, 9 samples of 4 float32
    assert "comm/bytes_sets" not in fit(Needy(), 2, data).round_metrics  # in the first round alone
    assert "comm/bytes_sets" not in fit(FedAvg(), 1).round_metrics


def test_images_count_as_they_are_stored():
    """FedKA's figure for CIFAR-10: 30,720 bytes for each client."""
    images = torch.zeros(20, 3, 32, 32, dtype=torch.uint8), torch.arange(20) % 10
    data = FederatedDataModule(TensorSource(images, images, transform=Scale(255)), num_clients=2)
    data.setup()
    assert bytes_of_sets(data, {"shared"}) == {"comm/bytes_sets": 2 * 30_720}
