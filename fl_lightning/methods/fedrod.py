"""FedRoD: a shared net is trained as if the client's classes were balanced, and a personal head on its own classes.

Source: Chen and Chao, ICLR 2022, arXiv:2107.00778, Eqs. 9-11, the linear personal head. Server: FedAvg.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fl_lightning.client import ClientModule, check_head
from fl_lightning.functional.losses import calibrated_cross_entropy, cross_entropy
from fl_lightning.functional.state import to_float32
from fl_lightning.types import Batch, Broadcast, ClientData
from fl_lightning.utils.settings import check_at_least


def log_counts(counts: Tensor, gamma: float) -> Tensor:
    """Compute γ log n_c, or 0 for all classes if γ = 0: (C,) -> (C,) float64. A class without samples has −∞.

    >>> log_counts(torch.tensor([1, 0]), gamma=1.0), log_counts(torch.tensor([1, 0]), gamma=0.0)
    (tensor([0., -inf], dtype=torch.float64), tensor([0., 0.], dtype=torch.float64))
    """
    if not gamma:
        return torch.zeros_like(counts, dtype=torch.float64)
    return gamma * counts.double().log()


def balanced_softmax(logits: Tensor, target: Tensor, counts: Tensor, gamma: float = 1.0) -> Tensor:
    """Compute the cross-entropy of logits + γ log n_c: (B, C), (B,), (C,) -> ()."""
    shift = log_counts(counts, gamma)
    return calibrated_cross_entropy(logits, target, shift=shift.to(to_float32(logits).dtype))


def personal_loss(generic: Tensor, personal: Tensor, target: Tensor) -> Tensor:
    """Compute the cross-entropy of both heads' summed logits: (B, C), (B, C), (B,) -> ().

    Args:
        generic: Logits of the generic head, as constants.
        personal: Logits of the personal head.
        target: Class of each sample.
    """
    return cross_entropy(generic.detach() + personal, target)


class FedRoD(ClientModule):
    """Trains with balanced softmax of the generic head + cross-entropy of both, which trains the personal head only.

    The personal head is never sent. It begins as a copy of the generic head that the client received first.

    Args:
        gamma: Power γ of the class counts in the balanced softmax, >= 0. 0 is cross-entropy.
        base: Arguments of `ClientModule`, which must include `net`.
    """

    needs = frozenset({"logits"})
    stackable = True
    sends = frozenset({"weights", "personal means"})
    reads = frozenset({"label counts"})
    personal_head: nn.Module

    def __init__(self, gamma: float = 1.0, **base: Any) -> None:
        super().__init__(**base)
        check_at_least(0, "0 is cross-entropy", gamma=gamma)
        self.gamma = gamma

    def build(self, num_classes: int | None, input_shape: tuple[int, ...] | None) -> None:
        super().build(num_classes, input_shape)
        check_head(self, needs_body=False)
        if self.net is not None and not hasattr(self, "personal_head"):
            self.personal_head = copy.deepcopy(self.net.head)

    def is_personal(self, name: str, owner: nn.Module) -> bool:
        return name.startswith("personal_head.")

    @torch.no_grad()
    def receive(self, broadcast: Broadcast, local: ClientData) -> None:
        self.round_buffer("log_counts", log_counts(local.label_counts, self.gamma))
        if local.size() and not self.memory.get("has_head"):
            self.personal_head.load_state_dict(self.built_net.head.state_dict())
            self.memory["has_head"] = True

    def both_heads(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the logits (B, C) of the generic head, by which the body learns, and of the personal head."""
        features = self.features(x)
        with self.forward_context():
            return self.built_net.head(features), self.personal_head(features.detach())

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        x, y = batch
        generic, personal = self.both_heads(x)
        balanced = calibrated_cross_entropy(generic, y, shift=self.round["log_counts"])
        ce = personal_loss(generic, personal, y)
        self.log_dict({"train/balanced": balanced, "train/personal": ce})
        return balanced + ce

    def deployed(self) -> Callable[[Tensor], Tensor]:
        """Return the sum of both heads as the predictor, or the generic head before the client has its own."""
        return self.summed_logits if self.memory.get("has_head") else self

    def summed_logits(self, x: Tensor) -> Tensor:
        """Compute the sum of both heads' logits: (B, ...) -> (B, C)."""
        generic, personal = self.both_heads(x)
        return generic + personal
