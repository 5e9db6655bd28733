"""The global weights: what the entries of a client's state dict are."""

from torch import nn

from fl_lightning.client import ClientModule
from fl_lightning.federation.server import GlobalWeights
from tests.user_modules import Plain


class Twice(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.second = self.first


def test_a_layer_under_two_names_is_one_entry_and_is_saved_under_both():
    weights = GlobalWeights(ClientModule(module=Twice()))
    assert {n for n in weights.entries if "first" in n} == {"module.first.weight", "module.first.bias"}
    assert not [name for name in weights.entries if "second" in name]
    saved = weights.saved(weights.snapshot(weights.entries))
    assert saved["client.module.second.weight"].equal(saved["client.module.first.weight"])
