"""FedLwF: distil the model that the client received when its data changed, on the classes that it had met before.

Source: Li and Hoiem, ECCV 2016, arXiv:1606.09282, in each client. Server: FedAvg.
Note: one head has all classes from the start. `classes: all` is ours; `new` is the form of Zhang et al., ICCV 2023,
arXiv:2303.06937 (TARGET), whose numbers are not comparable with those of `all`.
"""

from typing import Any, Literal

import torch
from torch import Tensor

from fl_lightning.client import ClientModule
from fl_lightning.functional.losses import cross_entropy, kl_divergence
from fl_lightning.functional.state import clone, to_float32
from fl_lightning.types import Batch, Broadcast, ClientData
from fl_lightning.utils.settings import check_above, check_at_least, check_choice


class FedLwF(ClientModule):
    """Trains with CE + alpha · τ² KL(old model ‖ local model) over the classes that the client met before this stage.

    The old model is the global model that the client received when the stage of its data last changed. It is in eval
    mode. In its first stage a client trains as FedAvg's does.

    Args:
        alpha: Weight of the distillation, >= 0. 0 is FedAvg.
        temperature: Softmax temperature τ, > 0.
        classes: Classes of the cross-entropy. `all`: all classes. `new`: the classes that the client has not met
            before.
        base: Arguments of `ClientModule`, which must include `net`.
    """

    needs = frozenset({"logits"})
    fedavg_equivalent = {"alpha": 0}
    stackable = False  # every client has an old model of its own
    reads = frozenset({"label counts"})

    def __init__(
        self, alpha: float = 1.0, temperature: float = 2.0, classes: Literal["all", "new"] = "all", **base: Any
    ) -> None:
        super().__init__(**base)
        check_at_least(0, "0 is FedAvg", alpha=alpha)
        check_above(0, temperature=temperature)
        check_choice(("all", "new"), classes=classes)
        self.alpha = alpha
        self.temperature = temperature
        self.classes = classes

    def receive(self, broadcast: Broadcast, local: ClientData) -> None:
        if self.is_fedavg_equivalent or not local.size():
            return
        present = local.label_counts > 0
        if self.memory.get("stage") != local.stage:
            self._begin_stage(local.stage, num_classes=len(present))
        self.memory["present"] = self.memory["present"] | present
        if "old" in self.memory and bool(self.memory["met"].any()):
            self.round["met"] = self.memory["met"].to(self.built_net.head.weight.device)
            self.load_teacher("old", self.memory["old"])

    def _begin_stage(self, stage: int, num_classes: int) -> None:
        """Begin a stage. After an earlier stage, keep the received model and count the classes of that stage as met.

        Args:
            stage: The stage that begins.
            num_classes: The number of classes C.
        """
        is_first = "stage" not in self.memory
        if not is_first:
            self.memory["met"] = self.memory["met"] | self.memory["present"]
            self.memory["old"] = clone(self.context.start)
        self.memory["stage"] = stage
        self.memory["present"] = torch.zeros(num_classes, dtype=torch.bool)
        if is_first:
            self.memory["met"] = torch.zeros(num_classes, dtype=torch.bool)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        x, y = batch
        logits = self(x)
        met = self.round.get("met")
        scores = logits
        if met is not None and self.classes == "new":
            # A class of an earlier stage may come again, and then counts as new.
            scores = to_float32(logits).masked_fill(met & ~present_in(y, len(met)), -torch.inf)
        ce = cross_entropy(scores, y)
        self.log("train/ce", ce)
        if met is None:
            return ce
        kd = kl_divergence(logits, self.teacher("old")(x), temperature=self.temperature, exclude=~met)
        self.log("train/kd", kd)
        return ce + self.alpha * kd


def present_in(target: Tensor, num_classes: int) -> Tensor:
    """Mark the classes of a batch: (B,) integers -> (C,) bool.

    >>> present_in(torch.tensor([2, 0, 2]), num_classes=4)
    tensor([ True, False,  True, False])
    """
    present = torch.zeros(num_classes, dtype=torch.bool, device=target.device)
    present[target] = True
    return present
