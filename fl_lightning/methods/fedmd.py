"""FedMD: every client learns from the mean of all clients' predictions on a transfer set.

Source: Li and Wang 2019, arXiv:1910.03581, Alg. 1 (`targets: logits`); as KnFu compares with it: `targets: soft`.
Note: the warm-up on the transfer set is left out, and "revisiting" the own data is the next round's training.
"""

from typing import Any, Literal

from torch import Tensor

from fl_lightning.federation.codistillation import KnowledgeClient, KnowledgeServer, soft_label_divergence
from fl_lightning.functional.state import to_float32
from fl_lightning.utils.settings import check_choice


def consensus(knowledge: Tensor) -> Tensor:
    """Compute the plain mean of the participants' knowledge, in float64: (N, K, C) -> (K, C)."""
    return knowledge.double().mean(0)


def mean_absolute_error(logits: Tensor, target: Tensor) -> Tensor:
    """Average |logits − target| over samples and classes: (B, C), (B, C) -> (), float32 or better."""
    logits = to_float32(logits)
    return (logits - target.to(logits.dtype)).abs().mean()


class FedMDServer(KnowledgeServer):
    """Sends every participant the mean of all participants, with or without data."""

    def fuse(self, client_ids: list[int], knowledge: Tensor) -> Tensor:
        return consensus(knowledge).expand_as(knowledge)


class FedMD(KnowledgeClient):
    """Fine-tunes towards the consensus on the transfer set.

    Args:
        targets: Predictions that are exchanged. `soft`: softmax outputs, with the loss CE + lam² · KL(mean ‖ softmax).
            `logits`: raw scores, with lam² · mean absolute error in place of the divergence (the original, with
            ce_on=none).
        base: Arguments of `KnowledgeClient` and `ClientModule`.
    """

    server_class = FedMDServer
    stackable = True
    sends = frozenset({"logits"})

    def __init__(self, targets: Literal["soft", "logits"] = "soft", **base: Any) -> None:
        super().__init__(**base)
        check_choice(("soft", "logits"), targets=targets)
        self.targets = targets

    def predictions(self, logits: Tensor) -> Tensor:
        return super().predictions(logits) if self.targets == "soft" else to_float32(logits)

    def distillation_loss(self, logits: Tensor, knowledge: Tensor) -> Tensor:
        if self.targets == "logits":
            return mean_absolute_error(logits, knowledge)
        return soft_label_divergence(logits, knowledge, self.temperature)
