"""Parts of the server that a paper may replace: the rule for the weights, and the method's own server side.

Source of the default rule: McMahan et al., AISTATS 2017, arXiv:1602.05629, Algorithm 1.
"""

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import compress
from typing import Any, ClassVar, Literal, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fl_lightning.functional.state import StateSum, choose, clone, mean_of, to_host
from fl_lightning.types import Broadcast, ClientUpdate, ServerView, State
from fl_lightning.utils.settings import check_choice
from fl_lightning.utils.signatures import check_overrides, checks_arguments

Client = TypeVar("Client", bound=nn.Module)


@dataclass
class PartialAggregate:
    """Sums and rows of one process in an exchange: all that crosses processes before `finish`."""

    sums: dict[str, StateSum] = field(default_factory=dict)
    rows: dict[int, ClientUpdate] = field(default_factory=dict)

    def mean(self, name: str, fallback: Callable[[], Mapping[str, Tensor]]) -> State | None:
        """Take the weighted mean of what was added to the sum `name`, or None for nothing of any weight.

        Args:
            name: of the sum.
            fallback: gives what the mean is where the weight, which is not read on a device, is 0.
        """
        total = self.sums.get(name)
        if total is None:
            return None
        if isinstance(total.weight, Tensor):
            return choose(total.weight != 0, mean_of(total), fallback())
        return mean_of(total) if total.weight else None

    def become(self, sums: dict[str, StateSum], rows: dict[int, ClientUpdate]) -> None:
        """Take the sums and rows of all processes in place of this one's."""
        self.sums = sums
        self.rows = rows


class NotSetUp:
    """Placeholder of the server until a FederatedLoop sets it, with an error at every access.

    Args:
        name: of the class that asks for it.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):  # copy and pickle ask
            raise AttributeError(attribute)
        raise RuntimeError(f"{self._name} sees the server's {attribute} once a FederatedLoop has set it up")


class ServerPart(nn.Module):
    """A part of the server with float64 sums over the cohort, rows by client, and state in buffers.

    Attributes:
        needs: splits that the server owns, `logits` (a classifier with `net=`), `accumulated_lr` (E_i is defined),
            `start` (clients train from the weights as received) or `clients` (several, not one that has all samples);
            checked before any client trains.
        server: the server as its parts see it, set before `setup`.
        partial: sums and rows of the exchange so far.
        weighs_clients: whether the weights of its sums are the clients', which must be finite and at least 0.
        unchecked: such weights since the last `take_unchecked` that are invalid, or may be, on the device.
    """

    needs: ClassVar[frozenset[str]] = frozenset()
    weighs_clients: ClassVar[bool] = False

    def __init__(self) -> None:
        super().__init__()
        self.server = cast(ServerView, NotSetUp(type(self).__name__))
        self.partial = PartialAggregate()
        self.unchecked: list[float | Tensor] = []
        self._ended: dict[str, StateSum] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        check_overrides(cls)

    def attach(self, server: ServerView) -> None:
        """Set `server`, before the loop calls `setup`."""
        self.server = server

    def setup(self) -> None:
        """Allocate all state that lives between rounds (`server_state`, buffers): it is part of every checkpoint."""

    def begin_round(self, cohort: list[int]) -> None:
        """Prepare for a round with the clients in `cohort`, once before its first exchange.

        A round that is repeated without clients that failed begins anew, from the state before it.
        """

    def end_exchange(self) -> None:
        """Forget the exchange's sums and rows, but keep the memory of the sums for the next ones.

        The round calls it.
        """
        self._ended = self.partial.sums
        self.partial = PartialAggregate()

    def snapshot(self) -> dict[str, Any]:
        """Copy the state that is restored if a round fails.

        Values that are replaced and never edited in place need not be copied.
        """
        return copy.deepcopy(dict(self.state_dict()))

    def evaluation_weights(self, weights: State) -> State:
        """Give the weights that are evaluated in place of the global ones, and not fed back."""
        return weights

    # --- helpers ---

    def sum(self, name: str, state: Mapping[str, Tensor], weight: float | Tensor = 1) -> None:
        """Add weight · state to the float64 sum `name`, which crosses processes before `finish`."""
        if self.weighs_clients and (isinstance(weight, Tensor) or not 0 <= weight < math.inf):
            self.unchecked.append(weight)
        sums = self.partial.sums
        if name not in sums:
            sums[name] = StateSum(after=self._ended.pop(name, None))
        sums[name].add(state, weight)

    def take_unchecked(self) -> list[float | Tensor]:
        """Hand over `unchecked`."""
        unchecked = self.unchecked
        self.unchecked = []
        return unchecked

    def total_weight(self, name: str) -> float | Tensor:
        """Sum the weights in the sum `name`, 0 if no client added to it."""
        total = self.partial.sums.get(name)
        return 0 if total is None else total.weight

    def summed(self, name: str) -> State:
        """Get the sum `name` over the cohort, float64, empty if no client added to it."""
        total = self.partial.sums.get(name)
        return {} if total is None else total.state()

    def gather(self, update: ClientUpdate, weights: bool = True) -> None:
        """Keep a client's update, its weights cloned (`weights=False`: left out), in `rows` by client id."""
        kept = clone(update.weights) if weights and update.weights is not None else None
        self.partial.rows[update.client_id] = replace(update, weights=kept)

    @property
    def rows(self) -> dict[int, ClientUpdate]:
        """The gathered updates by client id, ascending, once all processes' are there."""
        return self.partial.rows

    def rows_with(self, name: Literal["num_samples", "included"]) -> dict[int, ClientUpdate]:
        """Select the `rows` whose `name` is not 0, with one read where these lie on a device."""
        rows = dict(sorted(self.rows.items()))
        return dict(compress(rows.items(), to_host([torch.as_tensor(getattr(row, name)) for row in rows.values()])))

    def server_state(self, names: Iterable[str]) -> "StateBuffers":
        """Make float64 zeros shaped as the named entries of the global model, kept in buffers.

        Call it in `setup`.
        """
        weights = self.server.weights
        return StateBuffers({name: torch.zeros_like(weights[name], dtype=torch.float64) for name in names})

    def moved(self, aggregate: State, changes: Mapping[str, Tensor]) -> State:
        """Take `aggregate` with the entries of `changes` in place of its own, in its own types."""
        return {**aggregate, **{name: value.to(aggregate[name].dtype) for name, value in changes.items()}}


class Aggregator(ServerPart):
    """Streams the clients' weights into one new state, by default their mean.

    Order of calls: `setup` once, before a checkpoint is restored; each round `begin_round`, then for each exchange
    `add` for every client of the cohort and one `finish`.

    Args:
        weighting: a client's weight in the mean: its `samples` n_i, or `uniform`: 1 (and 0 without samples).

    Attributes:
        is_private: whether what it releases hides each client: it answers a round without clients, too, and what else
            tells of clients is refused or marked.
        is_by_coordinate: whether it decides each number by itself, by where most clients are.
    """

    weighs_clients = True
    is_private: ClassVar[bool] = False
    is_by_coordinate: ClassVar[bool] = False

    @checks_arguments
    def __init__(self, weighting: Literal["samples", "uniform"] = "samples") -> None:
        super().__init__()
        check_choice(("samples", "uniform"), weighting=weighting)
        self.weighting = weighting

    def client_statistics(self, update: ClientUpdate) -> Mapping[str, Any]:
        """Compute extras of a client for this rule, whatever its method (FedEXP's norm), to be read in `add`.

        They are of the `update` as it will be added, weights live, after every transform: at the server, no traffic.
        """
        return {}

    def add(self, update: ClientUpdate) -> None:
        """Take one client's update, whose `update.weights` are live, so that what is kept must be cloned."""
        if update.weights is not None:
            self.sum("weights", update.weights, self.weight(update))

    def finish(self) -> State | None:
        """Make the new shared weights, or None where they stay as they are (no client had data).

        Under `nonfinite: skip`, and where a transform weighs a client by a tensor, the total weight is a tensor that is
        read after the round: where it is 0 the rule's result is dropped, and the base class's mean is the weights as
        they are.
        """
        return self.partial.mean("weights", lambda: self.server.weights)

    def row_values(self) -> Mapping[str, float]:
        """Give values of the round's row, by log key, once the rule has made the new weights."""
        return {}

    @property
    def is_spent(self) -> bool:
        """Tell whether no further round may follow, so that the run ends."""
        return False

    def summary(self) -> str:
        """Sum up the run in a sentence that is told at its end.

        Empty: there is nothing to tell.
        """
        return ""

    def weight(self, update: ClientUpdate) -> float | Tensor:
        """Weigh a client: n_i, or 1 under uniform weighting, and 0 without samples.

        A rule may give any number >= 0.
        """
        n = update.num_samples
        if self.weighting == "samples":
            return n
        return (n > 0).to(torch.int64) if isinstance(n, Tensor) else int(n > 0)


class ServerModule(ServerPart):
    """The server side of a method: what it sends, takes in and keeps, by default FedAvg's. Any rule goes with it.

    Order of calls: `setup` once, before a checkpoint is restored; each round `begin_round`, then for each exchange
    `broadcast` and `add` for every client of the cohort, and `finish` after the rule's.
    """

    def broadcast(self, exchange: str, client_id: int) -> Broadcast:
        """Make the message to one client, by default the global weights."""
        return self.sends(exchange)

    def add(self, update: ClientUpdate) -> None:
        """Take in what the method itself needs of an update (`sum`, `gather`), while the rule takes the weights."""

    def finish(self, exchange: str, aggregate: State | None) -> State | None:
        """Make the new shared weights, by default the rule's aggregate, or None where they stay as they are.

        They stay, too, where the total weight of all clients is 0 (`Aggregator.finish`).
        A state returned before the last exchange is what the next exchange sends down.
        """
        return aggregate

    def check_server_optimizer(self, optimizer: Optimizer) -> None:
        """Refuse a server optimizer that breaks the method's own server step, at start where one is set."""

    def client_of(self, kind: type[Client]) -> Client:
        """Get the client module, whose settings the server reads.

        Raises:
            ValueError: if it is none of the `kind` that this server side belongs to.
        """
        client: Any = self.server.module
        if isinstance(client, kind):
            return client
        raise ValueError(
            f"a {type(self).__name__} needs a {kind.__name__} client, got {type(client).__name__}; leave "
            f"model.server_module unset"
        )

    def check_shares(self) -> None:
        """Refuse clients that share nothing that is trained.

        Call it in `setup`.

        Raises:
            ValueError: naming the client.
        """
        if not self.server.trainable:
            name = type(self.server.module).__name__
            raise ValueError(
                f"{name} needs trainable entries that the clients share, got none; make fewer entries personal"
            )

    def sends(self, exchange: str, **extras: Any) -> Broadcast:
        """Make a broadcast of the global weights and `extras`, server state in the weights' own types."""
        weights = self.server.weights
        for key, value in extras.items():
            if isinstance(value, StateBuffers):
                extras[key] = {name: tensor.to(weights[name].dtype) for name, tensor in value.items()}
        return Broadcast(self.server.round_idx, exchange, weights, extras)


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
