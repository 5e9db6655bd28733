"""The state of the one client that a module stands for."""

from typing import Any

from fl_lightning.client.optimizers import LocalProgress
from fl_lightning.client.teacher import LogitCache
from fl_lightning.types import State


class ClientContext:
    """What belongs to one client in one exchange.

    Args:
        client_id: 0 ... N-1; -1: nobody.
        received: shared trainable weights as they came.
        memory: what the client keeps between rounds.
        weights_token: the same object for all clients that received the same weights.
    """

    def __init__(
        self,
        client_id: int = -1,
        received: State | None = None,
        memory: dict[str, Any] | None = None,
        weights_token: object = None,
    ) -> None:
        self.client_id = client_id
        self.received: State = {} if received is None else received
        self.memory: dict[str, Any] = {} if memory is None else memory
        self.weights_token = weights_token
        self.round: dict[str, Any] = {}
        self.progress = LocalProgress()
        self.logit_cache: LogitCache | None = None

    def keep_logits(self, cache: LogitCache | None) -> None:
        """Use this cache of teachers' logits from now on."""
        self.logit_cache = cache
