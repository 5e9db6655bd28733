"""FedRep: a shared body and a personal head for each client, which trains first the head, then the body.

Source: Collins et al., ICML 2021, arXiv:2102.07078, Algorithm 1. Server: FedAvg of the body.
"""

from collections.abc import Iterable
from typing import Any

from fl_lightning.client import PersonalHeadClient
from fl_lightning.types import Phase
from fl_lightning.utils.settings import check_at_least


class FedRep(PersonalHeadClient):
    """Trains with cross-entropy, first the head and then the body, with a fresh optimizer each.

    The part that is not trained gets neither weight decay nor momentum. BatchNorm's statistics move in both phases.
    With head_epochs=0 the head stays the initial model's.

    Args:
        head_epochs: Number of passes that train the head alone, >= 0.
        body_epochs: Number of passes that train the body alone, >= 0. None takes the loop's `local_epochs`.
        base: Arguments of `ClientModule`, which must include `net`.
    """

    stackable = True
    sends = frozenset({"weights", "personal means"})

    def __init__(self, head_epochs: int = 10, body_epochs: int | None = None, **base: Any) -> None:
        super().__init__(**base)
        check_at_least(0, head_epochs=head_epochs, body_epochs=body_epochs)
        self.head_epochs = head_epochs
        self.body_epochs = body_epochs

    def phases(self, exchange: str) -> Iterable[Phase]:
        head = Phase(epochs=self.head_epochs, trains=self.head_names())
        return head, Phase(epochs=self.body_epochs, trains=self.body_names())
