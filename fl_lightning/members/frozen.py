"""Shared parameters that nobody trains: they are transmitted in the first round after they changed, then no more."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import compress
from typing import Any

import torch
from torch import nn

from fl_lightning.types import Broadcast, ClientJob, Member, RoundOutcome, State


class FrozenEntries(Member):
    """Finds the entries that stay where they are in a round, since nobody trains them and everyone has them.

    An entry is *already sent* in a round if its `requires_grad` is False when the round begins and the round in which
    it was transmitted last has left it as it was. A client that has been in no round since then is sent it once.

    Args:
        parameters: shared ones, by name.
        first_exchange: name of a round's first exchange.

    Attributes:
        parameters: the shared ones.
        already_sent: values of the round's entries that were already sent, by name.
    """

    name = "frozen"
    at_client = True

    def __init__(self, parameters: Mapping[str, nn.Parameter], first_exchange: str = "train") -> None:
        self.parameters = parameters
        self._first_exchange = first_exchange
        self._fixed: Collection[str] = ()
        self.already_sent = State()
        self._sent = State()
        """Frozen entries as they were sent last."""
        self._since: dict[str, int] = {}
        """Round in which they were."""
        self._seen: dict[int, int] = {}
        """Last round of every client."""
        self._loaded = False

    @property
    def is_used(self) -> bool:
        return not all(value.requires_grad for value in self.parameters.values())

    def find_already_sent(self, fixed: Collection[str]) -> None:
        """Find the entries that were already sent, for the round to come, `fixed` ones left out."""
        self._fixed = fixed
        if self._loaded:
            self._sent = {name: self.parameters[name].detach().clone() for name in self._since}
            self._loaded = False
        frozen = [name for name, value in self.parameters.items() if not value.requires_grad and name not in fixed]
        for name in self._sent.keys() - frozen:
            del self._sent[name], self._since[name]  # trained, so that it is sent once when it is frozen again
        self.already_sent = self._unchanged()

    def _unchanged(self) -> State:
        """Select the frozen entries that are as they were sent last."""
        changed = self.changed(self._sent)
        return {name: value for name, value in self._sent.items() if name not in changed}

    def end(self, outcome: RoundOutcome, shared: Sequence[Any]) -> Mapping[str, float]:
        """Record what the clients of a round were sent: the entries as they were when it began."""
        if not outcome.aborted:
            self._seen.update(dict.fromkeys(outcome.asked, outcome.round_idx))
            for name, value in self.parameters.items():
                if not value.requires_grad and name not in self.already_sent and name not in self._fixed:
                    self._sent[name] = outcome.before[name]
                    self._since[name] = outcome.round_idx
        return {}

    def outgoing(self, broadcast: Broadcast, client_id: int) -> Broadcast:
        """Take the entries that a client already has out of a message."""
        if not self.already_sent or broadcast.weights is None:
            return broadcast
        first = broadcast.exchange == self._first_exchange
        last = self._seen.get(client_id, -1) if first else broadcast.round_idx
        there = {name for name in self.already_sent if self._since[name] <= last}
        return replace(broadcast, weights={n: v for n, v in broadcast.weights.items() if n not in there})

    @torch.no_grad()
    def changed(self, wanted: State) -> list[str]:
        """Name the entries that are not as they are wanted.

        With one transfer from the device.
        """
        if not wanted:
            return []
        differs = torch.stack([(self.parameters[name].detach() != value).any() for name, value in wanted.items()])
        return list(compress(wanted, differs.tolist()))

    def trained(self, job: ClientJob) -> None:
        """Refuse a client that has changed an entry that was already sent.

        Raises:
            ValueError: naming it.
        """
        if names := self.changed(self.already_sent):
            raise ValueError(
                f"a parameter with requires_grad=False when a round begins is not transmitted, but a client has "
                f"changed {names[0]!r}; let it require a gradient before the round (a callback's "
                f"on_train_epoch_start), or make it a buffer"
            )

    def mark(self) -> State:
        return self.already_sent

    @torch.no_grad()
    def undo(self, mark: State) -> None:
        """Put the entries back that no client is given anew."""
        for name, value in mark.items():
            self.parameters[name].copy_(value)

    def state_dict(self, mark: Any = None) -> dict[str, Any]:
        """Give what was already sent for the next round, or for the present one, and the clients' last rounds."""
        names = self._unchanged() if mark is None else self.already_sent
        since = {name: self._since[name] for name in names}
        return {"since": since, "seen": dict(self._seen)} if since else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the state of a checkpoint.

        Of none: a federation begins, whose clients have nothing.
        """
        self._since = dict(state.get("since", {}))
        self._seen = dict(state.get("seen", {}))
        self._sent, self.already_sent, self._loaded = {}, {}, bool(self._since)
