"""MOON: pull the features towards the received model's and push them away from the client's own previous ones.

Source: Li et al., CVPR 2021, arXiv:2103.16257, Eq. 3 and Algorithm 1. Server: FedAvg. The representation is what the
net's head reads: the features, or the output of the projection head of the net `Projected`. All methods of a comparison
must then be trained with the projection head.
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
        local: Features of the model in training, (B, D).
        received: Features of the received model, (B, D), as constants.
        previous: Features of the client's previous models, each (B, D), as constants. Without a model the result is 0.
        temperature: τ > 0.

    Returns:
        (), ≥ 0. It is log 2 with zero gradient if the only previous model is the received one.
    """
    z = directions(local)
    similarities = [(z * directions(other.detach())).sum(1) for other in (received, *previous)]
    logits = torch.stack(similarities, 1) / temperature
    return cross_entropy(logits, torch.zeros(len(z), dtype=torch.int64, device=z.device))


def directions(features: Tensor) -> Tensor:
    """Scale the features of each sample to length 1, in float32 or better: (B, D) -> (B, D)."""
    return F.normalize(to_float32(features), dim=1, eps=1e-8)


class MOON(OwnModelClient):
    """Trains with the loss CE + μ ℓ, where ℓ is the contrast between the received and the client's previous models.

    ℓ is 0 at a client's first participation.

    Args:
        mu: Weight μ of the contrast, >= 0. 0 is FedAvg.
        temperature: τ > 0.
        previous_models: Number of its own trained models that a client keeps, the last ones, >= 1.
        base: Arguments of `ClientModule`, which must include `net`.
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
        received = self.teacher("global").features(x)
        return model_contrastive(local=features, received=received, previous=previous, temperature=self.temperature)

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
        # The client's own models serve the contrast only.
        return self

    @property
    def deploys_own_model(self) -> bool:
        return False
