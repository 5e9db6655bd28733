"""A codec in a federation: the simulation's bits, and what is coded is what is on the wire."""

import pytest

pytest.importorskip("flwr", reason="pip install 'fl_lightning[flower]'")

from fl_lightning import FederatedLoop
from fl_lightning.aggregation import FP16, QSGD, RandomK, TopK
from fl_lightning.client.records import decode
from fl_lightning.flower.wire import RECORD
from fl_lightning.functional.traffic import traffic
from fl_lightning.methods import SCAFFOLD, FedAvg
from tests.flower.grid import federate
from tests.toys import BatchNormNet, equal, fit, sgd, toy_data, weights_of

SIZES = (7, 12, 5)


@pytest.mark.parametrize(
    ("kind", "codec"),
    [
        (FedAvg, lambda: TopK(0.1)),
        (SCAFFOLD, lambda: QSGD(3, feedback=True, down=True)),
        (FedAvg, lambda: RandomK(0.1)),
        (FedAvg, lambda: FP16(down=True)),
    ],
)
def test_the_simulations_bits_and_bytes(kind, codec, tmp_path):
    def loop():
        client = kind(net=BatchNormNet, optimizer=sgd(momentum=0.0))
        client.build(3, (4,))
        client.net.body[0].bias.requires_grad_(False)
        return FederatedLoop(client, codec=codec(), seed=3)

    start = loop()
    made = [start, *(loop() for _ in range(len(SIZES) + 1))]
    for other in made[1:]:
        other.client.load_state_dict(start.client.state_dict())
    loops = iter(made)
    plain = fit(None, 3, toy_data(SIZES), loop=next(loops))
    server, grid, _ = federate(lambda: next(loops), lambda: toy_data(SIZES), tmp_path, rounds=3)
    assert equal(weights_of(plain), weights_of(server))
    assert plain.round_metrics == server.round_metrics
    ways = {"comm/bytes_down": True, "comm/bytes_up": False}
    for key, asks in ways.items():
        last = [parts_of(message) for message in grid.log if is_of(message, asks)][-len(SIZES) :]
        assert sum(traffic(parts["weights"], parts["extras"]) for parts in last) == server.round_metrics[key]


def parts_of(message):
    return {name: decode(part.data) for name, part in message.content.array_records[RECORD].items()}


def is_of(message, asks):
    """Whether a message asks a node to train, or answers that."""
    head = parts_of(message)["head"]
    return head.get("ask") == "train" if asks else "num_steps" in head
