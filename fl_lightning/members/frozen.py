"""Shared parameters that nobody trains are transmitted only in the first round after a change."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import compress
from typing import Any

import torch
from torch import nn

from fl_lightning.types import Broadcast, ClientJob, Member, RoundOutcome, State


class FrozenEntries(Member):
    """Finds the shared entries that a round need not transmit, because nobody trains them and every client has them.

    An entry is *already sent* in a round under two conditions: its `requires_grad` is False when the
    round begins, and its value is the one that was transmitted last. A client that was in no round
    since then is sent the entry once.

    Args:
        parameters: The shared parameters, by name.
        first_exchange: Name of the first exchange of a round.

    Attributes:
        parameters: The shared parameters, by name.
        already_sent: The values of the entries that are already sent in this round, by name.
    """

    name = "frozen"
    at_client = True

    def __init__(self, parameters: Mapping[str, nn.Parameter], first_exchange: str = "train") -> None:
        self.parameters = parameters
        self.already_sent = State()
        self._first_exchange = first_exchange
        self._fixed: Collection[str] = ()
        """Entries that are transmitted in every round."""
        self._sent = State()
        """Frozen entries with the values that were sent last."""
        self._sent_round: dict[str, int] = {}
        """The round in which each of these entries was sent."""
        self._last_round: dict[int, int] = {}
        """The last round of every client."""
        self._loaded = False
        """Whether a checkpoint was loaded, whose values are in the module."""

    @property
    def is_used(self) -> bool:
        return not all(value.requires_grad for value in self.parameters.values())

    def find_already_sent(self, fixed: Collection[str]) -> None:
        """Find the entries that are already sent in the next round.

        Args:
            fixed: Names of entries that are transmitted in any case.
        """
        self._fixed = fixed
        if self._loaded:
            self._sent = {name: self.parameters[name].detach().clone() for name in self._sent_round}
            self._loaded = False
        # An entry that is trained now is sent once more when it is frozen again.
        for name in list(self._sent):
            if self.parameters[name].requires_grad or name in fixed:
                del self._sent[name]
                del self._sent_round[name]
        self.already_sent = self._unchanged()

    def _unchanged(self) -> State:
        """Return the frozen entries that have the values which were sent last."""
        changed = self.changed(self._sent)
        return {name: value for name, value in self._sent.items() if name not in changed}

    def end(self, outcome: RoundOutcome, shared: Sequence[Any]) -> Mapping[str, float]:
        """Record what the clients of a round were sent: the entries as they were when it began."""
        if outcome.aborted:
            return {}
        for client_id in outcome.asked:
            self._last_round[client_id] = outcome.round_idx
        for name, value in self.parameters.items():
            if value.requires_grad or name in self.already_sent or name in self._fixed:
                continue
            self._sent[name] = outcome.before[name]
            self._sent_round[name] = outcome.round_idx
        return {}

    def outgoing(self, broadcast: Broadcast, client_id: int) -> Broadcast:
        """Remove the entries from a message that its client already has."""
        if not self.already_sent or broadcast.weights is None:
            return broadcast
        last_round = broadcast.round_idx
        if broadcast.exchange == self._first_exchange:
            last_round = self._last_round.get(client_id, -1)
        known = {name for name in self.already_sent if self._sent_round[name] <= last_round}
        weights = {name: value for name, value in broadcast.weights.items() if name not in known}
        return replace(broadcast, weights=weights)

    @torch.no_grad()
    def changed(self, expected: State) -> list[str]:
        """Return the names of the entries with other values than expected.

        It takes one transfer from the device.

        Args:
            expected: Values of some of the entries, by name.
        """
        if not expected:
            return []
        differs = [(self.parameters[name].detach() != value).any() for name, value in expected.items()]
        return list(compress(expected, torch.stack(differs).tolist()))

    def trained(self, job: ClientJob) -> None:
        """Refuse a client that has changed an entry that was already sent.

        Raises:
            ValueError: The client has changed such an entry.
        """
        names = self.changed(self.already_sent)
        if names:
            raise ValueError(
                f"a parameter with requires_grad=False when a round begins is not transmitted, but a client has "
                f"changed {names[0]!r}; let it require a gradient before the round (a callback's "
                f"on_train_epoch_start), or make it a buffer"
            )

    def mark(self) -> State:
        return self.already_sent

    @torch.no_grad()
    def undo(self, mark: State) -> None:
        """Restore the entries that no client is sent again."""
        for name, value in mark.items():
            self.parameters[name].copy_(value)

    def state_dict(self, mark: Any = None) -> dict[str, Any]:
        """Return the rounds in which entries were sent and clients took part.

        Args:
            mark: The mark of the present round. None means that the next round is concerned.
        """
        names = self._unchanged() if mark is None else self.already_sent
        if not names:
            return {}
        since = {name: self._sent_round[name] for name in names}
        return {"since": since, "seen": dict(self._last_round)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the state of a checkpoint. If it is empty, the clients have received nothing."""
        self._sent_round = dict(state.get("since", {}))
        self._last_round = dict(state.get("seen", {}))
        self._sent = {}
        self.already_sent = {}
        self._loaded = bool(self._sent_round)
