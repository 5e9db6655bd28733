"""A net of a file may be any torch.nn.Module, as in Python. What needs a part of a net says so."""

import pytest

from tests.commands import TINY, refusal, say, working_in

OWN = """
from torch import nn

class Net(nn.Module):
    def __init__(self, num_classes, input_shape, hidden=8):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, num_classes))

    def forward(self, x):
        return self.layers(x)
"""
NET = f"fit {TINY} --trainer.max_epochs 1 --trainer.callbacks null --model.client.net own.Net"


@pytest.fixture
def here(tmp_path, without_pictures):
    with working_in(tmp_path, OWN):
        yield tmp_path


def test_a_plain_module_is_trained(here):
    said = say(f"{NET} --model.client.net.hidden 5")
    assert said.code == 0, said
    (config,) = here.glob("runs/*/*/config.yaml")
    assert "class_path: own.Net" in config.read_text()


@pytest.mark.parametrize(
    ("method", "part"),
    [
        ("FedRep", "whose last layer is a torch.nn.Linear called head"),
        ("MOON", "whose last layer is a torch.nn.Linear called head"),
        ("FedRoD", "whose last layer is a torch.nn.Linear called head"),
        ("SelectiveFD --data.transfer_size 50", "whose features gives the inputs of the head"),
        ("FedAlign", "whose stages gives its last block"),
    ],
)
def test_what_needs_a_part_of_a_net_says_so(here, method, part):
    line = f"{NET} --model.client.net.hidden 5".replace(
        "--model.client.net own", f"--model.client {method} --model.client.net own"
    )
    name = method.partition(" ")[0]
    assert f"{name} needs a net {part}, got Net; derive it from fl_lightning.nets.Backbone" in refusal(line, 1)
