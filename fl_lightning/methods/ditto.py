"""Ditto: besides the global model every client trains one of its own, which is pulled towards the global one.

Source: Li et al., ICML 2021, arXiv:2012.04221, Algorithm 1. Server: FedAvg, which the own models do not touch.
Note: the own model begins as the initial model, whenever the client comes first. It is pulled to the weights as they
were received, and has an optimizer and BatchNorm statistics of its own.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fl_lightning.aggregation.guard import all_finite, extremes_in
from fl_lightning.client import InitialModelClient
from fl_lightning.functional.losses import proximal
from fl_lightning.functional.state import clone
from fl_lightning.types import Batch, Broadcast, ClientData, Phase, State
from fl_lightning.utils.settings import check_at_least


class Ditto(InitialModelClient):
    """Trains the global model with the loss L, and the client's own v with L + (lam/2) ‖v − w‖², w as received.

    Args:
        lam: Strength λ of the pull, >= 0. 0 trains the own models apart.
        personal_epochs: Number of passes that train the own model, >= 0, over the batches of the first passes. 0 is
            FedAvg.
        base: Arguments of `ClientModule`.
    """

    fedavg_equivalent = {"personal_epochs": 0}
    stackable = False  # the module changes its model between two phases

    def __init__(self, lam: float = 0.1, personal_epochs: int = 1, **base: Any) -> None:
        super().__init__(**base)
        check_at_least(0, "0 trains the own models apart", lam=lam)
        check_at_least(0, "0 is FedAvg", personal_epochs=personal_epochs)
        self.lam = lam
        self.personal_epochs = personal_epochs

    def own_model(self) -> State | None:
        return super().own_model() if self.personal_epochs else None

    def receive(self, broadcast: Broadcast, local: ClientData) -> None:
        self.round["num_samples"] = local.size()

    def phases(self, exchange: str) -> Iterator[Phase]:
        yield Phase()
        if not self.round.get("num_samples"):
            return
        trained = clone(self.entries())
        self.load_model(self.own_model() or self.context.start)
        self.round_buffer("anchor", self.received)
        yield Phase(epochs=self.personal_epochs, counts=False)
        self.keep_model()
        # The own model is never sent, and so is checked here: the weights that are sent become NaN with it.
        finite = all_finite(extremes_in(self.trained()))
        checked = {name: torch.where(finite, trained[name], torch.nan) for name in self.trained()}
        self.load_model(trained | checked)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = self.local_loss(batch, batch_idx)
        if "anchor" not in self.round:
            return loss
        pull = proximal(self.params(), self.round["anchor"])
        self.log("train/proximal", pull)
        return loss + self.lam * pull

    def nonfinite_hint(self) -> str:
        return f"Ditto's own models need lr · lam below 2: lower lam ({self.lam}); else {super().nonfinite_hint()}"

    def reply(self, exchange: str, local: ClientData) -> dict[str, Any]:
        return {}
