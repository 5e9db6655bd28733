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
    is_true = true_class(target, local.shape[1])
    return kl_divergence(local, teacher, temperature=temperature, exclude=is_true)


def not_true_mse(local: Tensor, teacher: Tensor, target: Tensor) -> Tensor:
    """Average the squared difference of the raw not-true logits (App. L): (B, C), (B, C), (B,) -> ().

    It is 0 for C = 1.
    """
    others = ~true_class(target, local.shape[1])
    squares = (to_float32(local) - to_float32(teacher)).square() * others
    return squares.sum() / (len(local) * max(1, local.shape[1] - 1))


def distillation(  # noqa: PLR0917 - called by position
    local: Tensor,
    teacher: Tensor,
    target: Tensor,
    temperature: float = 1.0,
    ntd_weight: float = 1.0,
    distance: Literal["kl", "mse"] = "kl",
) -> Tensor:
    """Compute (1−λ) L_KD + λ L_NTD (Eqs. 17-18): (B, C), (B, C), (B,) -> ().

    Args:
        local: Logits of the model in training.
        teacher: Logits of the received model.
        target: Class of each sample.
        temperature: Softmax temperature τ > 0.
        ntd_weight: λ in [0, 1]. 1 is NTD, 0 is KD over all classes.
        distance: `kl`, or `mse`: the NTD of App. L, which reads neither τ nor λ.
    """
    if distance == "mse":
        return not_true_mse(local, teacher, target)
    if ntd_weight == 1:
        return not_true_distillation(local, teacher, target, temperature=temperature)
    kd = kl_divergence(local, teacher, temperature=temperature)
    if ntd_weight == 0:
        return kd
    ntd = not_true_distillation(local, teacher, target, temperature=temperature)
    return (1 - ntd_weight) * kd + ntd_weight * ntd


def kl_terms(local: Tensor, teacher: Tensor) -> Tensor:
    """Compute u(c) = q_g(c) log(q_g(c) / q_l(c)), whose sum is KL(teacher || local): (B, C), (B, C) -> (B, C)."""
    log_local = F.log_softmax(to_float32(local), 1)
    log_teacher = F.log_softmax(to_float32(teacher), 1)
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
    the in-local distribution, matching the others on the out-local. A class without such samples has NaN.

    >>> import torch
    >>> kl_parts_by_class(torch.zeros(1, 2), torch.tensor([[0.0, 1.0986]]), torch.tensor([1]))
    (tensor([   nan, 0.3041]), tensor([-0.1733,     nan]))
    """
    terms = kl_terms(local, teacher)
    is_true = true_class(target, local.shape[1])
    inside = (terms * is_true).sum(0) / is_true.sum(0)
    outside = (terms * ~is_true).sum(0) / (~is_true).sum(0)
    return inside, outside


class FedNTD(ClientModule):
    """Trains with the loss CE + beta · distillation (Eq. 10).

    Args:
        beta: Weight of the distillation, >= 0. 0 is FedAvg.
        temperature: Softmax temperature τ, > 0.
        ntd_weight: Number λ in [0, 1] between KD over all classes (0) and NTD (1).
        kd_form: Form of the loss. `sum`: CE + beta · L. `convex`: (1 − beta) CE + beta · L, beta in [0, 1] (Eq. 3 as
            printed).
        distance: Distance of the logits: `kl`, or `mse` between raw not-true logits, for which temperature and
            ntd_weight have no effect.
        teacher_mode: Mode of the teacher. With `train` its BatchNorm uses batch statistics.
        base: Arguments of `ClientModule`, which must include `net`.
    """

    needs = frozenset({"logits"})
    fedavg_equivalent = {"beta": 0}
    stackable = True

    def __init__(  # noqa: PLR0917 - called by position
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
        ntd = distillation(
            local=logits,
            teacher=self.teacher("global")(x),
            target=y,
            temperature=self.temperature,
            ntd_weight=self.ntd_weight,
            distance=self.distance,
        )
        self.log_dict({"train/ce": ce, "train/ntd": ntd})
        ce_weight = 1 - self.beta if self.kd_form == "convex" else 1.0
        return ce_weight * ce + self.beta * ntd
