"""FedLMD: distil the received model on the classes that a client has few samples of, beside the cross-entropy.

Source: Lu et al., ACM MM 2023 (Federated Learning with Label-Masking Distillation). Server: FedAvg.
Note: a class is of the majority where n_c > n/C. The teacher is silent on these classes, while the student's softmax
goes over all not-true classes, so that the logits of the majority are pushed down. A balanced client trains as FedNTD's
does. Where all not-true classes are of the majority the term is 0. The released code subtracts 1000 from masked logits
and gets a softmax over these classes there.
"""

from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from fl_lightning.client import ClientModule
from fl_lightning.functional.losses import cross_entropy, true_class
from fl_lightning.functional.state import to_float32
from fl_lightning.types import Batch, Broadcast, ClientData
from fl_lightning.utils.settings import check_above, check_at_least, check_choice

Teacher = Literal["received", "uniform"]


def majority(counts: Tensor) -> Tensor:
    """Mark the classes of which a client has more than n/C samples: (C,) integers -> (C,) bool.

    >>> majority(torch.tensor([5, 2, 2, 0]))
    tensor([ True, False, False, False])
    """
    return counts * len(counts) > counts.sum()


def label_masking_distillation(  # noqa: PLR0917 - called by position
    local: Tensor, teacher: Tensor | None, target: Tensor, masked: Tensor, temperature: float = 1.0
) -> Tensor:
    """Compute τ² · batch mean of Σ_{c ≠ y, c not masked} t_c log(t_c / q_c).

    t is the teacher's softmax over the classes of the sum, q the local one over all classes but y. A sample without a
    class in the sum adds 0.

    Args:
        local: Logits of the model in training, (B, C).
        teacher: Logits to be matched, (B, C), as constants. None: t is uniform.
        target: Class of each sample, (B,) integers.
        masked: Whether the teacher is silent on a class, (C,) bool.
        temperature: τ > 0.

    Returns:
        (), in nats, in float32 or better.

    >>> local = torch.tensor([[0.0, 0.0, 0.0]])
    >>> label_masking_distillation(local, local, torch.tensor([0]), torch.tensor([False, True, False]))
    tensor(0.6931)
    """
    local = to_float32(local) / temperature
    scores = torch.zeros_like(local) if teacher is None else to_float32(teacher.detach()) / temperature
    true = true_class(target, local.shape[1])
    silent = true | masked
    empty = silent.all(-1, keepdim=True)
    # A softmax over no class would be NaN. Such rows keep all classes here and are set to 0 below.
    log_teacher = F.log_softmax(scores.masked_fill(silent & ~empty, -torch.inf), -1)
    log_local = F.log_softmax(local.masked_fill(true & ~empty, -torch.inf), -1)
    log_teacher = log_teacher.masked_fill(silent, 0.0)
    log_local = log_local.masked_fill(silent, 0.0)
    terms = log_teacher.exp() * (log_teacher - log_local)
    return temperature**2 * terms.masked_fill(silent, 0.0).sum(-1).mean()


class FedLMD(ClientModule):
    """Trains with the loss CE + beta · label-masking distillation from the received model.

    Args:
        beta: Weight of the distillation, >= 0. 0 is FedAvg.
        temperature: Softmax temperature τ, > 0.
        teacher: `received`: the received model in eval mode. `uniform`: equal probabilities, without a second forward
            pass (FedLMD-Tf).
        base: Arguments of `ClientModule`, which must include `net` unless beta is 0.
    """

    needs = frozenset({"logits"})
    fedavg_equivalent = {"beta": 0}
    stackable = True
    reads = frozenset({"label counts"})

    def __init__(self, beta: float = 1.0, temperature: float = 1.0, teacher: Teacher = "received", **base: Any) -> None:
        super().__init__(**base)
        check_at_least(0, "0 is FedAvg", beta=beta)
        check_above(0, temperature=temperature)
        check_choice(("received", "uniform"), teacher=teacher)
        self.beta = beta
        self.temperature = temperature
        self.teaches = teacher

    def receive(self, broadcast: Broadcast, local: ClientData) -> None:
        self.round_buffer("majority", majority(local.label_counts))
        if self.teaches == "received":
            self.load_teacher("global")

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        x, y = batch
        logits = self(x)
        ce = cross_entropy(logits, y)
        teacher = self.teacher("global")(x) if self.teaches == "received" else None
        lmd = label_masking_distillation(
            local=logits,
            teacher=teacher,
            target=y,
            masked=self.round["majority"],
            temperature=self.temperature,
        )
        self.log_dict({"train/ce": ce, "train/lmd": lmd})
        return ce + self.beta * lmd
