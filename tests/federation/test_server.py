"""The global weights: what the entries of a client's state dict are."""

import torch
from torch import nn

from fl_lightning.client import ClientModule
from fl_lightning.functional.state import flatten
from fl_lightning.members.weights import GlobalWeights
from fl_lightning.methods import FedAvg
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


def test_the_entries_of_one_client_after_the_other_are_laid_in_the_same_memory():
    client = FedAvg(num_classes=3, input_shape=(4,))
    weights = GlobalWeights(client)
    first = flatten(weights.live(weights.shared))[torch.float32]
    before = first.clone()
    assert torch.equal(before, torch.cat([p.detach().flatten() for p in client.parameters()]))
    weights.load({name: value + 1 for name, value in weights.snapshot(weights.shared).items()})
    second = flatten(weights.live(weights.shared))[torch.float32]
    assert second.data_ptr() == first.data_ptr()
    torch.testing.assert_close(second, before + 1)
    part = flatten(weights.live(weights.shared[:1]))[torch.float32]
    assert torch.equal(part, next(client.parameters()).detach().flatten())
