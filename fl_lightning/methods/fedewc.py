"""FedEWC: hold each parameter at the model that the client received when its data changed, by the Fisher information.

Source: Kirkpatrick et al., PNAS 2017, arXiv:1612.00796, Eq. 3, online as in Schwarz et al., ICML 2018,
arXiv:1805.06370. Server: FedAvg.
Note: nobody tells a client that a stage of its data ends. The Fisher information is therefore estimated after each
training, and the last estimate counts once the stage has changed.
"""

from typing import Any

from torch import Tensor

from fl_lightning.client import ClientModule
from fl_lightning.client.fisher import Fisher, fisher_information
from fl_lightning.functional import state as S
from fl_lightning.types import Batch, Broadcast, ClientData, State
from fl_lightning.utils.settings import check_at_least, check_at_most, check_choice


class FedEWC(ClientModule):
    """Trains with the loss L + (lam/2) Σ Ω (θ − θ*)² over the shared trainable parameters.

    When the stage of the client's data has changed, Ω becomes gamma · Ω + F, and θ* the model that the client receives.
    F is the diagonal of the Fisher information at the weights that the client trained in the stage before.

    Args:
        lam: Strength λ of the pull, >= 0. 0 is FedAvg. With SGD lr · lam · max(Ω) must stay well below 1.
        gamma: Weight γ of the Ω of earlier stages, in [0, 1]. Below 1 the oldest stages fade, as they must if the data
            change in every round.
        fisher: Squared gradients whose mean is F: of every `sample`, or of every `batch` of the first local epoch,
            which is faster, and whose mean is up to the batch size times smaller, so that lam means something else.
        fisher_samples: Number of samples with `fisher: batch`. The batch that passes it is the last.
        base: Arguments of `ClientModule`.
    """

    fedavg_equivalent = {"lam": 0}
    stackable = True
    reads = frozenset({"batches"})

    def __init__(
        self,
        lam: float = 1.0,
        gamma: float = 0.9,
        fisher: Fisher = "sample",
        fisher_samples: int = 500,
        **base: Any,
    ) -> None:
        super().__init__(**base)
        check_at_least(0, "0 is FedAvg", lam=lam)
        check_at_least(0, "0 keeps the last stage only", gamma=gamma)
        check_at_most(1, "1 adds up all stages", gamma=gamma)
        check_choice(("sample", "batch"), fisher=fisher)
        check_at_least(1, fisher_samples=fisher_samples)
        self.lam = lam
        self.gamma = gamma
        self.fisher = fisher
        self.fisher_samples = fisher_samples

    def receive(self, broadcast: Broadcast, local: ClientData) -> None:
        if self.is_fedavg_equivalent:
            return
        if local.size() and self.memory.get("stage", local.stage) != local.stage:
            self._end_stage(self.memory.pop("fisher", None))
            self.memory["stage"] = local.stage
        # All clients of a stack have the same buffers. Without an earlier stage Ω is 0.
        self.round_buffer("omega", self.memory.get("omega") or S.zeros_like(self.received))
        self.round_buffer("anchor", self.memory.get("anchor") or S.clone(self.received))

    def _end_stage(self, last: State | None) -> None:
        """Add the last estimate to Ω, and hold the weights at the received ones from now on.

        Args:
            last: The estimate of F in the stage that is over. None: the client made no step since it was counted.
        """
        if last is None:
            return
        before = self.memory.get("omega") or S.zeros_like(last)
        self.memory["omega"] = {name: self.gamma * before[name] + value for name, value in last.items()}
        self.memory["anchor"] = S.clone(self.received)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = self.local_loss(batch, batch_idx)
        if self.is_fedavg_equivalent:
            return loss
        params = self.params()
        anchor = self.round["anchor"]
        moved = {name: S.to_float32(value - anchor[name]).square() for name, value in params.items()}
        penalty = S.inner(self.round["omega"], moved)
        self.log("train/penalty", penalty)
        return loss + self.lam / 2 * penalty

    def why_not_every_round(self) -> str | None:
        if self.gamma < 1 or self.is_fedavg_equivalent:
            return None
        return f"model.client.gamma must be below 1, or Ω grows in each of these rounds, got {self.gamma}; take 0.9"

    def nonfinite_hint(self) -> str:
        return f"FedEWC needs lr · lam · max(Ω) well below 1: lower lam ({self.lam}); else {super().nonfinite_hint()}"

    def reply(self, exchange: str, local: ClientData) -> dict[str, Any]:
        if not self.is_fedavg_equivalent and self.num_steps:
            params = S.clone(self.params())
            self.memory["fisher"] = fisher_information(
                self, params, local=local, kind=self.fisher, max_samples=self.fisher_samples
            )
            self.memory["stage"] = local.stage
        return {}
