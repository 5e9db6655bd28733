"""FedRS: scale down the logits of the classes that a client lacks, so that it does not push them away.

Source: Li and Zhan, KDD 2021 (FedRS: Federated Learning with Restricted Softmax). Server: FedAvg. The paper's
classifier has no bias. Here the whole logit is scaled, with the bias. `form: soft` is the scaling of the authors' code.
"""

from typing import Any, Literal

from torch import Tensor

from fl_lightning.client import ClientModule
from fl_lightning.functional.losses import cross_entropy
from fl_lightning.functional.state import to_float32
from fl_lightning.types import Batch, Broadcast, ClientData
from fl_lightning.utils.settings import check_choice, check_numbers

Form = Literal["hard", "soft"]


def scaling(counts: Tensor, alpha: float, form: Form = "hard") -> Tensor:
    """Return the scale of each logit: 1 if n_c > 0, else α, or α + (1 − α) n_c / max n with `soft`: (C,) -> (C,).

    The scales are float64.

    Args:
        counts: Numbers of samples n_c.
        alpha: Scale α of a class without samples.
        form: `hard` or `soft`.

    >>> import torch
    >>> scaling(torch.tensor([4, 0, 1]), alpha=0.5), scaling(torch.tensor([4, 0, 1]), alpha=0.5, form="soft")
    (tensor([1.0000, 0.5000, 1.0000], dtype=torch.float64), tensor([1.0000, 0.5000, 0.6250], dtype=torch.float64))
    """
    if form == "soft":
        shares = counts.double() / counts.max().clamp(min=1)
    else:
        shares = (counts > 0).double()
    return alpha + (1 - alpha) * shares


def restricted_cross_entropy(logits: Tensor, target: Tensor, scale: Tensor) -> Tensor:
    """Compute the cross-entropy of s ⊙ z: (B, C), (B,), (C,) -> ().

    A class of scale 0 keeps e⁰ in the denominator.
    """
    return cross_entropy(to_float32(logits) * scale, target)


class FedRS(ClientModule):
    """Trains with the cross-entropy of scaled logits, and evaluates the plain ones.

    Args:
        alpha: Scale of a class without samples, in [0, 1]. 1 is FedAvg.
        form: Scale of the other classes. `hard`: 1. `soft`: α + (1 − α) n_c / max n.
        base: Arguments of `ClientModule`, which must include `net`.
    """

    needs = frozenset({"logits"})
    fedavg_equivalent = {"alpha": 1}
    stackable = True
    reads = frozenset({"label counts"})

    def __init__(self, alpha: float = 0.5, form: Form = "hard", **base: Any) -> None:
        super().__init__(**base)
        check_numbers(alpha=alpha)
        if not 0 <= alpha <= 1:
            raise ValueError(f"alpha must lie in [0, 1], got {alpha}; 1 is FedAvg")
        check_choice(("hard", "soft"), form=form)
        self.alpha = alpha
        self.form = form

    def receive(self, broadcast: Broadcast, local: ClientData) -> None:
        self.round_buffer("scale", scaling(local.label_counts, self.alpha, self.form))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        x, y = batch
        loss = restricted_cross_entropy(self(x), y, self.round["scale"])
        self.log("train/ce", loss)
        return loss
