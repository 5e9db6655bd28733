"""FedNTD: distil the received model on the classes that a sample is *not*, beside the cross-entropy.

Source: Lee et al., NeurIPS 2022, arXiv:2106.03097, Eqs. 3-4 (KD), 10-11 (NTD), 17-18 (in between), App. L (MSE),
Proposition 2 (the parts of KD).
Server: FedAvg.
"""

from typing import Any, Literal

from torch import Tensor
from torch.nn import functional as F

from fl_lightning.client import ClientModule
from fl_lightning.functional.losses import cross_entropy, kl_divergence, true_class
from fl_lightning.functional.state import to_float32
from fl_lightning.types import Batch, Broadcast, ClientData
from fl_lightning.utils.settings import check_above, check_choice, check_numbers


def not_true_distillation(local: Tensor, teacher: Tensor, target: Tensor, temperature: float = 1.0) -> Tensor:
    """Compute τ² KL(teacher || local) over the C−1 not-true classes (Eq. 11): (B, C), (B, C), (B,) -> ()."""
    return kl_divergence(local, teacher, temperature, exclude=true_class(target, local.shape[1]))


def not_true_mse(local: Tensor, teacher: Tensor, target: Tensor) -> Tensor:
    """Average the squared difference of the raw not-true logits (App. L), 0 for C = 1: (B, C), (B, C), (B,) -> ()."""
    others = ~true_class(target, local.shape[1])
    squares = (to_float32(local) - to_float32(teacher)).square() * others
    return squares.sum() / (len(local) * max(1, local.shape[1] - 1))


def distillation(
    local: Tensor,
    teacher: Tensor,
    target: Tensor,
    temperature: float = 1.0,
    ntd_weight: float = 1.0,
    distance: Literal["kl", "mse"] = "kl",
) -> Tensor:
    """Compute (1−λ) L_KD + λ L_NTD (Eqs. 17-18): λ = 1 is NTD, λ = 0 is KD over all classes, "mse" App. L's NTD."""
    if distance == "mse":
        return not_true_mse(local, teacher, target)
    if ntd_weight == 1:
        return not_true_distillation(local, teacher, target, temperature)
    kd = kl_divergence(local, teacher, temperature)
    if ntd_weight == 0:
        return kd
    return (1 - ntd_weight) * kd + ntd_weight * not_true_distillation(local, teacher, target, temperature)


def kl_terms(local: Tensor, teacher: Tensor) -> Tensor:
    """Compute u(c) = q_g(c) log(q_g(c) / q_l(c)), whose sum is KL(teacher || local): (B, C), (B, C) -> (B, C)."""
    log_local, log_teacher = (F.log_softmax(to_float32(logits), 1) for logits in (local, teacher))
    return F.kl_div(log_local, log_teacher, reduction="none", log_target=True)


def kl_parts(local: Tensor, teacher: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the true and the not-true part of KL(teacher || local) (Prop. 2): (B, C), (B, C), (B,) -> (), ().

    >>> import torch
    >>> true, not_true = kl_parts(torch.zeros(1, 2), torch.tensor([[0.0, 1.0986]]), torch.tensor([1]))
    >>> true, not_true, true + not_true
    (tensor(0.3041), tensor(-0.1733), tensor(0.1308))
    """
    terms = kl_terms(local, teacher)
    is_true = true_class(target, local.shape[1])
    return (terms * is_true).sum(1).mean(), (terms * ~is_true).sum(1).mean()


def kl_parts_by_class(local: Tensor, teacher: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Average u(c) over the samples of class c, and over all others: (B, C), (B, C), (B,) -> (C,), (C,).

    Weighted with p and with (C−1) p̃ of the batch they sum to `kl_parts` (Prop. 2): matching the true logits acts on
    the in-local distribution, matching the others on the out-local. NaN where there are no such samples.

    >>> import torch
    >>> kl_parts_by_class(torch.zeros(1, 2), torch.tensor([[0.0, 1.0986]]), torch.tensor([1]))
    (tensor([   nan, 0.3041]), tensor([-0.1733,     nan]))
    """
    terms = kl_terms(local, teacher)
    is_true = true_class(target, local.shape[1])
    inside, outside = ((terms * mask).sum(0) / mask.sum(0) for mask in (is_true, ~is_true))
    return inside, outside


class FedNTD(ClientModule):
    """Local loss CE + beta · distillation (Eq. 10).

    Args:
        beta: weight of the distillation, >= 0; 0 is FedAvg.
        temperature: softmax temperature τ, > 0.
        ntd_weight: λ in [0, 1] between KD over all classes (0) and NTD (1).
        kd_form: `sum`: CE + beta · L; `convex`: (1 − beta) CE + beta · L, beta in [0, 1] (Eq. 3 as printed).
        distance: `kl`, or `mse` between raw not-true logits (then temperature and ntd_weight have no effect).
        teacher_mode: `eval`, or `train`: BatchNorm of the teacher uses batch statistics.
        base: of `ClientModule`; needs `net`.
    """

    needs = frozenset({"logits"})
    fedavg_equivalent = {"beta": 0}
    stackable = True

    def __init__(
        self,
        beta: float = 1.0,
        temperature: float = 1.0,
        ntd_weight: float = 1.0,
        kd_form: Literal["sum", "convex"] = "sum",
        distance: Literal["kl", "mse"] = "kl",
        teacher_mode: Literal["eval", "train"] = "eval",
        **base: Any,
    ) -> None:
        super().__init__(**base)
        check_numbers(beta=beta, ntd_weight=ntd_weight)
        if not beta >= 0 or (kd_form == "convex" and beta > 1):
            raise ValueError(f"beta must be at least 0, and at most 1 with kd_form=convex, got {beta}")
        check_choice(("sum", "convex"), kd_form=kd_form)
        check_choice(("kl", "mse"), distance=distance)
        check_choice(("eval", "train"), teacher_mode=teacher_mode)
        check_above(0, temperature=temperature)
        if not 0 <= ntd_weight <= 1:
            raise ValueError(f"ntd_weight must lie in [0, 1], got {ntd_weight}; 1 is NTD, 0 is KD")
        self.beta = beta
        self.temperature = temperature
        self.ntd_weight = ntd_weight
        self.kd_form = kd_form
        self.distance = distance
        self.teacher_mode = teacher_mode

    def receive(self, broadcast: Broadcast, local: ClientData) -> None:
        self.load_teacher("global", mode=self.teacher_mode)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        x, y = batch
        logits = self(x)
        ce = cross_entropy(logits, y)
        teacher = self.teacher("global")(x)
        ntd = distillation(logits, teacher, y, self.temperature, self.ntd_weight, self.distance)
        self.log_dict({"train/ce": ce, "train/ntd": ntd})
        return (1 - self.beta if self.kd_form == "convex" else 1.0) * ce + self.beta * ntd
