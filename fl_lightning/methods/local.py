"""Local: every client trains a model of its own, and nothing is exchanged.

Source: a baseline of KnFu. It trains as many epochs as KnFu's methods spend on training and fine-tuning together.
"""

from collections.abc import Iterable
from typing import Any

from torch import nn

from fl_lightning.client import ClientModule
from fl_lightning.types import Phase
from fl_lightning.utils.settings import check_at_least


class Local(ClientModule):
    """Trains with cross-entropy, or with the loss of the wrapped module.

    Args:
        finetune_epochs: Number of further passes over the client's data in a round, with a fresh optimizer, ≥ 0. They
            stand for the fine-tuning of KnFu and FedMD.
        base: Arguments of `ClientModule`.
    """

    needs = frozenset({"clients"})
    stackable = True
    sends = frozenset()

    def __init__(self, finetune_epochs: int = 1, **base: Any) -> None:
        super().__init__(**base)
        check_at_least(0, finetune_epochs=finetune_epochs)
        self.finetune_epochs = finetune_epochs

    def is_personal(self, name: str, owner: nn.Module) -> bool:
        return True

    def phases(self, exchange: str) -> Iterable[Phase]:
        return Phase(), Phase(epochs=self.finetune_epochs)
