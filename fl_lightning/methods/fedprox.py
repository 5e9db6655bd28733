"""FedProx: pull the local weights towards the received ones.

Source: Li et al., MLSys 2020, arXiv:1812.06127, Eq. 2. Server: FedAvg.
"""

from typing import Any

from torch import Tensor

from fl_lightning.client import ClientModule
from fl_lightning.functional.losses import proximal
from fl_lightning.types import Batch
from fl_lightning.utils.settings import check_at_least


class FedProx(ClientModule):
    """Trains with the loss L + (mu/2) ‖θ − x‖² over the shared trainable parameters.

    Buffers and personal entries are not pulled.

    Args:
        mu: Strength of the pull, >= 0. 0 is FedAvg.
        base: Arguments of `ClientModule`.
    """

    fedavg_equivalent = {"mu": 0}
    stackable = True

    def __init__(self, mu: float = 0.01, **base: Any) -> None:
        super().__init__(**base)
        check_at_least(0, "0 is FedAvg", mu=mu)
        self.mu = mu

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = self.local_loss(batch, batch_idx)
        pull = proximal(self.params(), self.received)
        self.log("train/proximal", pull)
        return loss + self.mu * pull

    def accumulated_lr_slope(self, accumulated_lr: float) -> float:
        return 1.0 - self.mu * accumulated_lr
