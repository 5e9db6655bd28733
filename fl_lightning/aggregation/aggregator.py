"""The weighted mean of the clients' weights (FedAvg), and the hooks with which a method replaces it.

Source: McMahan et al., AISTATS 2017, arXiv:1602.05629, Algorithm 1.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from fl_lightning.functional.state import StateSum, clone, mean_of
from fl_lightning.types import Broadcast, ClientUpdate, ServerView, State


@dataclass
class Tally:
    """What an aggregator has taken in since the exchange began: the only state that crosses processes."""

    sums: dict[str, StateSum] = field(default_factory=dict)
    weight: int | Tensor = 0
    rows: dict[int, ClientUpdate] = field(default_factory=dict)


class Aggregator(nn.Module):
    """Streams client updates into one new state; the base class is the mean weighted by samples.

    Order of calls: `setup` once, before a checkpoint is restored; each round `begin_round`, then for each exchange
    `broadcast` and `add` for every client of the cohort and one `finish`.

    Attributes:
        gathers: True where `finish` needs every client's update rather than sums; then `add` keeps the updates in
            `rows`, by client id.
        server: the server as an aggregator sees it, set before `setup`.
        weighting: `samples`: a client weighs n_i; `uniform`: 1 (and 0 without samples).
    """

    gathers: ClassVar[bool] = False

    def __init__(self) -> None:
        super().__init__()
        self.weighting: Literal["samples", "uniform"] = "samples"
        self.server: ServerView
        self.tally = Tally()

    def setup(self) -> None:
        """Allocate all state that lives between rounds (`server_state`, buffers): it is part of every checkpoint."""

    def begin_round(self, cohort: list[int]) -> None:
        """Called once at the start of a round with the ids of its clients."""

    def broadcast(self, exchange: str, client_id: int) -> Broadcast:
        """What goes down to one client; the default sends the global weights."""
        return self.sends(exchange)

    def asks(self, update: ClientUpdate) -> Mapping[str, Any]:
        """What a client adds to its reply for this aggregator, whatever its method (FedEXP's norm); runs on the client.

        `update` is the client's own, weights live.
        """
        return {}

    def add(self, update: ClientUpdate) -> None:
        """Take one client's update; `update.weights` are live, so what is kept must be cloned."""
        if self.gathers:
            weights = None if update.weights is None else clone(update.weights)
            self.tally.rows[update.client_id] = replace(update, weights=weights)
        elif update.weights is not None:
            weight = self.weight(update)
            self.tally.weight = self.tally.weight + weight
            self.sum("weights", update.weights, weight)

    def finish(self, exchange: str) -> State | None:
        """The new shared weights, or None: they stay as they are (no client had data).

        A state returned before the last exchange is what the next exchange sends down.
        """
        tally = self.tally
        if "weights" not in tally.sums or not bool(tally.weight):
            return None
        return mean_of(tally.sums["weights"], tally.weight)

    def evaluation_weights(self, weights: State) -> State:
        """The weights that are evaluated in place of the global ones; not fed back."""
        return weights

    def weight(self, update: ClientUpdate) -> int | Tensor:
        """n_i, or 1 under uniform weighting; 0 for a client without samples."""
        n = update.num_samples
        if self.weighting == "samples":
            return n
        return (n > 0).to(torch.int64) if isinstance(n, Tensor) else int(n > 0)

    def sends(self, exchange: str, **extras: Any) -> Broadcast:
        """A broadcast of the global weights and `extras`."""
        return Broadcast(self.server.round_idx, exchange, self.server.weights, extras)

    def sum(self, name: str, state: Mapping[str, Tensor], weight: float | Tensor = 1) -> None:
        """Add weight · state to the float64 sum `name`, which crosses processes before `finish`."""
        sums = self.tally.sums
        if name not in sums:
            sums[name] = StateSum()
        sums[name].add(state, weight)

    def summed(self, name: str) -> State:
        """The sum `name` over the cohort, float64; empty if no client added to it."""
        total = self.tally.sums.get(name)
        return {} if total is None else total.state()

    def server_state(self, names: Iterable[str]) -> "StateBuffers":
        """Float64 zeros shaped as the named entries of the global model, kept in buffers; call it in `setup`."""
        weights = self.server.weights
        return StateBuffers({name: torch.zeros_like(weights[name], dtype=torch.float64) for name in names})

    def begin_exchange(self) -> None:
        """Forget the sums and rows of the exchange before; the loop calls it."""
        self.tally = Tally()

    @property
    def rows(self) -> dict[int, ClientUpdate]:
        """The exchange's updates by client id, where `gathers`."""
        return self.tally.rows


class StateBuffers(nn.Module, Mapping[str, Tensor]):
    """A state held in buffers, so that it is moved, saved and restored with the module that owns it."""

    def __init__(self, state: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.names = {name: name.replace(".", "/") for name in state}
        for name, tensor in state.items():
            self.register_buffer(self.names[name], tensor)

    def __getitem__(self, name: str) -> Tensor:
        return self.get_buffer(self.names[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other
