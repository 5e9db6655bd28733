"""FedGKD: distil the mean of the last global models, beside the cross-entropy.

Source: Yao et al. 2021, arXiv:2107.00051. Server: FedAvg, which keeps the last M global models.
Note: the last models are the models at the ends of rounds, after a server optimizer. A round that is given up ends with
no model. The initial model never teaches, so that round 0 is FedAvg's. The teacher is in eval mode, with the mean of
the running statistics. A client with personal entries has its own in the teacher.
"""

from typing import Any

import torch
from torch import Tensor, nn

from fl_lightning.aggregation import ServerModule
from fl_lightning.aggregation.server_parts import StateBuffers
from fl_lightning.client import ClientModule
from fl_lightning.functional.losses import cross_entropy, kl_divergence
from fl_lightning.functional.state import clone, weighted_mean
from fl_lightning.types import Batch, Broadcast, ClientData, State
from fl_lightning.utils.settings import check_above, check_at_least


class FedGKDServer(ServerModule):
    """Keeps the last global models, and sends their mean where it is not the model that is sent anyway.

    Attributes:
        models: The last M global models, one after the other, the (M + 1)-th in the place of the first. Empty for M = 1
            and without distillation.
        number: How many global models have been kept so far in this fit, () int64. Empty as `models`.
    """

    stale_reason = "sends the mean of the last global models, which a client that is late has of another round"

    @property
    def takes_stale(self) -> bool:  # type: ignore[override]
        """Whether updates may be of earlier rounds. Only without distillation, which is FedAvg."""
        return not self.client_of(FedGKD).gamma

    def __init__(self) -> None:
        super().__init__()
        self.models = nn.ModuleList()
        self.number = StateBuffers({})
        self._teacher: State | None = None

    def snapshot(self) -> dict[str, Any]:
        # A round replaces a model and edits none, so that M models need not be copied.
        return dict(self.state_dict())

    def setup(self) -> None:
        client = self.client_of(FedGKD)
        if not client.gamma or client.models == 1:
            return
        weights = self.server.weights
        zeros = {name: torch.zeros_like(value) for name, value in weights.items()}
        self.models = nn.ModuleList(StateBuffers(clone(zeros)) for _ in range(client.models))
        self._count(0)

    def _count(self, number: int) -> None:
        """Keep the number of kept models, in a new tensor, because `snapshot` holds the old one."""
        self.number = StateBuffers({"models": torch.tensor(number)})

    def begin_round(self, cohort: list[int]) -> None:
        self._teacher = None
        if not self.models:
            return
        if not self.server.round_idx:
            self._count(0)
            return
        # A round that is given up takes its model back, so that the index of a round tells no place.
        number = int(self.number["models"])
        self.models[number % len(self.models)] = StateBuffers(clone(self.server.weights))
        self._count(number + 1)
        kept = [model for model in self.models[: number + 1] if isinstance(model, StateBuffers)]
        if len(kept) > 1:
            self._teacher = weighted_mean(kept, [1] * len(kept))

    def broadcast(self, exchange: str, client_id: int) -> Broadcast:
        if self._teacher is None:
            return self.sends(exchange)
        return self.sends(exchange, teacher=self._teacher)


class FedGKD(ClientModule):
    """Trains with the loss CE + (gamma/2) · τ² KL(teacher ‖ local model) from round 1 on.

    Args:
        gamma: Weight γ of the distillation, >= 0. 0 is FedAvg.
        temperature: Softmax temperature τ, > 0.
        models: Number M of the last global models whose mean teaches, >= 1. With 1 the received model teaches, and
            nothing more is sent.
        base: Arguments of `ClientModule`, which must include `net` unless gamma is 0.
    """

    server_class = FedGKDServer
    needs = frozenset({"logits"})
    fedavg_equivalent = {"gamma": 0}
    stackable = True

    def __init__(self, gamma: float = 0.2, temperature: float = 1.0, models: int = 5, **base: Any) -> None:
        super().__init__(**base)
        check_at_least(0, "0 is FedAvg", gamma=gamma)
        check_above(0, temperature=temperature)
        check_at_least(1, "1 distils the received model", models=models)
        self.gamma = gamma
        self.temperature = temperature
        self.models = models

    def receive(self, broadcast: Broadcast, local: ClientData) -> None:
        if not self.gamma or broadcast.round_idx == 0:
            return
        self.round["taught"] = True
        self.load_teacher("global", broadcast.extras.get("teacher"), common=True)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        x, y = batch
        logits = self(x)
        ce = cross_entropy(logits, y)
        self.log("train/ce", ce)
        if "taught" not in self.round:
            return ce
        kd = kl_divergence(logits, self.teacher("global")(x), temperature=self.temperature)
        self.log("train/kd", kd)
        return ce + self.gamma / 2 * kd
