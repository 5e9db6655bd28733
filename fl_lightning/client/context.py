"""The state of the one client that a module stands for: start weights, memory, steps."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from fl_lightning.client.progress import ClientProgress
from fl_lightning.client.teacher import LogitCache
from fl_lightning.types import State


@dataclass
class ClientContext:
    """Holds the state of one client in one exchange.

    Args:
        client_id: The client's id, 0 ... N-1. -1 is no client.
        start: Shared entries that training starts from, by name.
        trainable: Names of the shared entries that are trained.
        memory: State of the client between rounds.
        weights_token: The same object for all clients that received the same weights.
        round: Constants of the client for this round, by name.
        progress: The client's steps so far.
        logit_cache: Cache of the teachers' logits in the present phase, or None.
    """

    client_id: int = -1
    start: State = field(default_factory=dict)
    trainable: Sequence[str] = ()
    memory: dict[str, Any] = field(default_factory=dict)
    weights_token: object = None
    round: dict[str, Any] = field(default_factory=dict)
    progress: ClientProgress = field(default_factory=ClientProgress)
    logit_cache: LogitCache | None = None

    @cached_property
    def received(self) -> State:
        """The shared trainable weights as the client received them."""
        return {name: self.start[name] for name in self.trainable if name in self.start}

    def move_start(self, entries: State) -> None:
        """Begin the exchange from other values of some shared entries than the received ones."""
        self.start = {**self.start, **entries}
        vars(self).pop("received", None)

    def keep_logits(self, cache: LogitCache | None) -> None:
        """Use this cache of teachers' logits from now on."""
        self.logit_cache = cache
