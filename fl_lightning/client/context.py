"""The state of the one client that a module stands for: weights that it started from, memory, steps."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from fl_lightning.client.progress import LocalProgress
from fl_lightning.client.teacher import LogitCache
from fl_lightning.types import State


@dataclass
class ClientContext:
    """State of one client in one exchange.

    Args:
        client_id: 0 ... N-1; -1: no client.
        start: shared entries that training starts from.
        trainable: names of those that are trained.
        memory: state of the client between rounds.
        weights_token: the same object for all clients that received the same weights.
        round: constants of the client for this round, by name.
        progress: steps so far.
        logit_cache: of teachers' logits in the present phase, or None.
    """

    client_id: int = -1
    start: State = field(default_factory=dict)
    trainable: Sequence[str] = ()
    memory: dict[str, Any] = field(default_factory=dict)
    weights_token: object = None
    round: dict[str, Any] = field(default_factory=dict)
    progress: LocalProgress = field(default_factory=LocalProgress)
    logit_cache: LogitCache | None = None

    @cached_property
    def received(self) -> State:
        """The shared trainable weights as they came."""
        return {name: self.start[name] for name in self.trainable if name in self.start}

    def keep_logits(self, cache: LogitCache | None) -> None:
        """Use this cache of teachers' logits from now on."""
        self.logit_cache = cache
