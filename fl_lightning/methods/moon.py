"""MOON: pull the features towards the received model's and push them away from the client's own previous ones.

Source: Li et al., CVPR 2021, arXiv:2103.16257, Eq. 3 and Algorithm 1. Server: FedAvg. The representation is what the
net's head reads: features, or with the net `Projected` the output of the projection head, with which every method of a
comparison must be trained then.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fl_lightning.client import OwnModelClient, check_head
from fl_lightning.functional.losses import cross_entropy
from fl_lightning.functional.state import to_float32
from fl_lightning.types import Batch, Broadcast, ClientData
from fl_lightning.utils.settings import check_above, check_at_least


def model_contrastive(local: Tensor, received: Tensor, previous: Sequence[Tensor], temperature: float = 0.5) -> Tensor:
    """Average −log [e^(s_g/τ) / (e^(s_g/τ) + Σ_k e^(s_k/τ))], s the cosine of the local features with the others.

    Args:
        local: features of the model in training, (B, D).
        received: of the received model, (B, D); taken as constants.
        previous: of the client's previous models, each (B, D); constants; of none the result is 0.
        temperature: τ > 0.

    Returns:
        (), ≥ 0; log 2 with zero gradient where the only previous model is the received one.
    """
    given = (local, received.detach(), *(features.detach() for features in previous))
    z, *others = (F.normalize(to_float32(features), dim=1, eps=1e-8) for features in given)
    similarity = torch.stack([(z * other).sum(1) for other in others], 1) / temperature
    return cross_entropy(similarity, torch.zeros(len(z), dtype=torch.int64, device=z.device))


class MOON(OwnModelClient):
    """Local loss CE + μ ℓ, ℓ the contrast between received and previous model, 0 at a client's first participation.

    Args:
        mu: μ, weight of the contrast, >= 0; 0 is FedAvg.
        temperature: τ > 0.
        previous_models: how many of its own trained models a client keeps, the last ones, >= 1.
        base: of `ClientModule`; needs `net`.
    """

    needs = frozenset({"logits"})
    fedavg_equivalent = {"mu": 0}
    stackable = False  # every client has teachers of its own

    def __init__(self, mu: float = 1.0, temperature: float = 0.5, previous_models: int = 1, **base: Any) -> None:
        super().__init__(**base)
        check_at_least(0, "0 is FedAvg", mu=mu)
        check_above(0, temperature=temperature)
        check_at_least(1, "the paper keeps one", previous_models=previous_models)
        self.mu = mu
        self.temperature = temperature
        self.models_kept = previous_models

    def build(self, num_classes: int | None, input_shape: tuple[int, ...] | None) -> None:
        super().build(num_classes, input_shape)
        check_head(self, needs_body=False)

    def receive(self, broadcast: Broadcast, local: ClientData) -> None:
        kept = self.own_models()
        if kept:
            self.load_teacher("global")
        for k, state in enumerate(kept):
            self.load_teacher(f"previous/{k}", state)

    def contrast(self, x: Tensor, features: Tensor) -> Tensor:
        """Compute the term ℓ of a batch: inputs (B, ...) and their features (B, D) -> ()."""
        previous = [self.teacher(f"previous/{k}").features(x) for k in range(len(self.own_models()))]
        return model_contrastive(features, self.teacher("global").features(x), previous, self.temperature)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        if not self.own_models():
            return self.local_loss(batch, batch_idx)
        x, y = batch
        with self.forward_context():
            features = self.built_net.features(x)
            logits = self.built_net.head(features)
        loss = cross_entropy(logits, y)
        contrast = self.contrast(x, features)
        self.log_dict({"train/ce": loss, "train/contrast": contrast})
        return loss + self.mu * contrast

    def reply(self, exchange: str, local: ClientData) -> dict[str, Any]:
        return super().reply(exchange, local) if self.mu else {}

    def deployed(self) -> Callable[[Tensor], Tensor]:
        return self  # the model as received: the own ones serve the contrast only

    @property
    def deploys_own_model(self) -> bool:
        return False
