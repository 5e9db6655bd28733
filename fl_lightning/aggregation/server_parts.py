"""The parts of the server that a paper may replace: the rule, and the method's own server side.

Source of the default rule: McMahan et al., AISTATS 2017, arXiv:1602.05629, Algorithm 1.
"""

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import compress
from typing import Any, ClassVar, Literal, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fl_lightning.functional.state import StateSum, choose, clone, mean_of, to_host
from fl_lightning.types import Broadcast, ClientData, ClientUpdate, Read, Sent, ServerView, State
from fl_lightning.utils.settings import check_choice
from fl_lightning.utils.signatures import check_overrides, checks_arguments

Client = TypeVar("Client", bound=nn.Module)


@dataclass
class PartialAggregate:
    """Holds the sums and rows of one process in an exchange, which cross processes before `finish`.

    Args:
        sums: The sums by name.
        rows: The gathered updates by client id.
    """

    sums: dict[str, StateSum] = field(default_factory=dict)
    rows: dict[int, ClientUpdate] = field(default_factory=dict)

    def mean(
        self,
        name: str,
        fallback: Callable[[], Mapping[str, Tensor]],
        sent: Mapping[str, Tensor] | None = None,
    ) -> State | None:
        """Return the weighted mean of what was added to a sum, or None if nothing of any weight was added.

        Args:
            name: Name of the sum.
            fallback: Returns the mean for a weight of 0 on the device, which is not read.
            sent: What the states of the sum were compared with, if they were. None means what `fallback` returns.
        """
        total = self.sums.get(name)
        if total is None:
            return None
        if isinstance(total.weight, Tensor):
            otherwise = fallback()
            return choose(total.weight != 0, mean_of(total, sent or otherwise), otherwise)
        if not total.weight:
            return None
        if total.compares and sent is None:
            sent = fallback()
        return mean_of(total, sent)

    def become(self, sums: dict[str, StateSum], rows: dict[int, ClientUpdate]) -> None:
        """Take the sums and rows of all processes in place of this one's."""
        self.sums = sums
        self.rows = rows


class NotSetUp:
    """Stands in for the server until a FederatedLoop sets it, and raises an error at every access.

    Args:
        name: Name of the class that holds it.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):  # `copy` and `pickle` ask for such attributes.
            raise AttributeError(attribute)
        raise RuntimeError(f"{self._name} sees the server's {attribute} once a FederatedLoop has set it up")


class ServerPart(nn.Module):
    """Has float64 sums over the cohort, rows by client, and state in buffers.

    It is the base of the rule and the server module.

    Attributes:
        needs: What the part needs: splits that the server owns, `logits` (a classifier with `net=`), `accumulated_lr`
            (E_i is defined), `start` (clients train from the weights as received) or `clients` (several, not one that
            has all samples). It is checked before any client trains.
        server: The server as its parts see it, set before `setup`.
        partial: Sums and rows of the exchange so far.
        weighs_clients: Whether the weights of its sums are the clients', which must be finite and at least 0.
        unchecked: Clients' weights since the last `take_unchecked` that are invalid, or may be invalid on the device.
    """

    needs: ClassVar[frozenset[str]] = frozenset()
    weighs_clients: ClassVar[bool] = False

    def __init__(self) -> None:
        super().__init__()
        self.server = cast(ServerView, NotSetUp(type(self).__name__))
        self.partial = PartialAggregate()
        self.unchecked: list[float | Tensor] = []
        self._ended: dict[str, StateSum] = {}
        """The sums of the last exchange, whose memory the next sums use."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        check_overrides(cls)

    @classmethod
    def plans(cls, arguments: Mapping[str, Any]) -> bool:  # noqa: ARG003 - parts that plan read the arguments
        """Return True if a part of these arguments depends on the number of planned rounds, `server.planned_rounds`.

        A run of such a part with more rounds is another run.

        Args:
            arguments: Arguments of the part by name, as a configuration has them.
        """
        return False

    def attach(self, server: ServerView) -> None:
        """Set `server`, before the loop calls `setup`."""
        self.server = server

    def setup(self) -> None:
        """Allocate all state that lives between rounds (`server_state`, buffers).

        Every checkpoint holds this state.
        """

    def begin_round(self, cohort: list[int]) -> None:
        """Prepare for a round with the clients in `cohort`, once before its first exchange.

        A round that is repeated without the clients that failed begins anew, from the state before the round.
        """

    def end_exchange(self) -> None:
        """Forget the exchange's sums and rows, but keep the memory of the sums for the next sums.

        The round calls this method.
        """
        self._ended = self.partial.sums
        self.partial = PartialAggregate()

    def snapshot(self) -> dict[str, Any]:
        """Return a copy of the state that is restored if a round fails.

        Values that are replaced and never edited in place need not be copied.
        """
        return copy.deepcopy(dict(self.state_dict()))

    def evaluation_weights(self, weights: State) -> State:
        """Return the weights that are evaluated in place of the global ones, and not fed back.

        The part must return `weights` itself if it evaluates the global weights.
        """
        return weights

    @property
    def averages(self) -> bool:
        """Whether `evaluation_weights` may return other weights than the global ones."""
        return type(self).evaluation_weights is not ServerPart.evaluation_weights

    def row_values(self) -> Mapping[str, float]:
        """Return values of the round's row, by log key, once the part has made its share of the new weights."""
        return {}

    # --- helpers ---

    @property
    def _sent(self) -> State | None:
        """The entries as the clients of the exchange were sent them, or None without a server."""
        return None if isinstance(self.server, NotSetUp) else self.server.weights

    def sum(
        self,
        name: str,
        state: Mapping[str, Tensor],
        weight: float | Tensor = 1,
        *,
        sent: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Add weight · state to the float64 sum `name`, which crosses processes before `finish`.

        Args:
            name: Name of the sum.
            state: Tensors by name.
            weight: Weight of the state.
            sent: The entries as clients were sent them. The mean keeps the bits of what no client of positive weight
                has changed. None if the sum is not of weights.
        """
        if self.weighs_clients:
            is_valid = not isinstance(weight, Tensor) and 0 <= weight < math.inf
            if not is_valid:
                self.unchecked.append(weight)
        sums = self.partial.sums
        if name not in sums:
            sums[name] = StateSum(after=self._ended.pop(name, None))
        sums[name].add(state, weight, sent)

    def take_unchecked(self) -> list[float | Tensor]:
        """Return `unchecked`, and empty it."""
        unchecked = self.unchecked
        self.unchecked = []
        return unchecked

    def total_weight(self, name: str) -> float | Tensor:
        """Return the sum of the weights in the sum `name`, 0 if no client added to it."""
        total = self.partial.sums.get(name)
        return 0 if total is None else total.weight

    def summed(self, name: str) -> State:
        """Return the sum `name` over the cohort, float64, empty if no client added to it."""
        total = self.partial.sums.get(name)
        return {} if total is None else total.state()

    def gather(self, update: ClientUpdate, weights: bool = True) -> None:
        """Keep a client's update in `rows`.

        Args:
            update: The update. Its weights are cloned.
            weights: Whether its weights are kept.
        """
        copied: State | None = None
        if weights and update.weights is not None:
            copied = clone(update.weights)
        self.partial.rows[update.client_id] = replace(update, weights=copied)

    @property
    def rows(self) -> dict[int, ClientUpdate]:
        """The gathered updates by client id, ascending once those of all processes are there."""
        return self.partial.rows

    def rows_with(self, name: Literal["num_samples", "included"]) -> dict[int, ClientUpdate]:
        """Return the `rows` whose `name` is not 0, by client id, ascending.

        Values on a device take one transfer to the host.
        """
        rows = sorted(self.rows.items())
        values = to_host([torch.as_tensor(getattr(row, name)) for _, row in rows])
        return dict(compress(rows, values))

    def server_state(self, names: Iterable[str]) -> "StateBuffers":
        """Return float64 zeros shaped as the named entries of the global model, kept in buffers.

        Call this method in `setup`.
        """
        weights = self.server.weights
        return StateBuffers({name: torch.zeros_like(weights[name], dtype=torch.float64) for name in names})

    def moved(self, aggregate: State, changes: Mapping[str, Tensor]) -> State:
        """Return `aggregate` with the entries of `changes` in place of its own, in its own types.

        Equal numbers keep the bits of the aggregate, which the sign of a zero may lose.
        """
        changed: State = {}
        for name, change in changes.items():
            value = change.to(aggregate[name].dtype)
            changed[name] = torch.where(value == aggregate[name], aggregate[name], value)
        return {**aggregate, **changed}


class Aggregator(ServerPart):
    """Streams the clients' weights into one new state, by default their mean.

    Order of calls: `setup` once, before a checkpoint is restored. In each round `begin_round`, then for each exchange
    `add` for every client of the cohort and one `finish`.

    Args:
        weighting: Weight of a client in the mean. `samples` is its number of samples n_i. `uniform` is 1, and 0 without
            samples.

    Attributes:
        is_private: Whether what the rule releases hides each client. Such a rule answers a round without clients too,
            and what else tells of clients is refused or marked.
        is_by_coordinate: Whether the rule decides each number by itself, by where most clients are.
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
        """Return extras of a client for this rule, whatever its method (FedEXP's norm), which `add` reads.

        They are computed at the server and cause no traffic.

        Args:
            update: The update as it will be added, after every transform, with live weights.
        """
        return {}

    def add(self, update: ClientUpdate) -> None:
        """Take one client's update. Its `update.weights` are live, so clone what is kept."""
        if update.weights is not None:
            self.sum("weights", update.weights, self.weight(update), sent=self._sent)

    def finish(self) -> State | None:
        """Return the new shared weights, or None if they stay as they are (no client had data).

        Under `nonfinite: skip`, and if a transform weighs a client by a tensor, the total weight is a tensor that is
        read after the round. If it is 0, the rule's result is dropped, and the mean of this base class is the weights
        as they are.
        """
        return self.partial.mean("weights", lambda: self.server.weights)

    @property
    def is_spent(self) -> bool:
        """Whether no further round may follow, so that the run ends."""
        return False

    def summary(self) -> str:
        """Return a sentence about the run that is told at its end. Empty if there is nothing to tell."""
        return ""

    def weight(self, update: ClientUpdate) -> float | Tensor:
        """Return the weight of a client: n_i, or 1 under uniform weighting, and 0 without samples.

        A rule may return any number ≥ 0.
        """
        num_samples = update.num_samples
        if self.weighting == "samples":
            return num_samples
        if isinstance(num_samples, Tensor):
            return (num_samples > 0).to(torch.int64)
        return int(num_samples > 0)


class Inquiry(ABC):
    """Answers at a client what a server module asks after the client's own exchanges, whatever the client's method is.

    The inquiry is an exchange in which nothing is trained. The object serves all clients, also those on other machines.
    It therefore keeps nothing of a client, and knows nothing of the server but the broadcast.

    Attributes:
        exchange: Name of the exchange. It is none of the client's own.
        sends: Kinds of what goes up to the server.
        reads: Kinds of what is read of the client's training data.
    """

    exchange: str
    sends: frozenset[Sent]
    reads: frozenset[Read] = frozenset()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        check_overrides(cls)

    @abstractmethod
    def answer(self, client: Any, broadcast: Broadcast, local: ClientData) -> dict[str, Any]:
        """Return the extras that go up.

        Args:
            client: The ClientModule, with the weights as they were sent and the client's own entries. It must stay as
                it is.
            broadcast: The message of the server.
            local: The client's data.
        """


class ServerModule(ServerPart):
    """Sends, takes in and keeps what a method needs at the server, by default what FedAvg needs.

    Any rule goes with it. Order of calls: `setup` once, before a checkpoint is restored. In each round `begin_round`,
    then for each exchange `broadcast` and `add` for every client of the cohort, and `finish` after the rule's.

    Attributes:
        makes_weights: Whether `finish` makes the new weights without the aggregate, so that no rule has an effect. A
            rule besides the mean is then refused.
        inquiry: What answers a further exchange at the clients, after their own exchanges. None asks them nothing. It
            is set in `__init__`. The message of the exchange (`broadcast`) has `uploads=False`.
        takes_stale: Whether the module may be given updates of clients that started from earlier weights and an earlier
            message (`model.pacing`). `unscaled` means only if the server takes their whole moves.
        stale_reason: Why it may not, as the end of a sentence that begins with the name of the module.
    """

    makes_weights: ClassVar[bool] = False
    takes_stale: bool | Literal["unscaled"] = False
    stale_reason: str = ""
    inquiry: Inquiry | None = None

    def inquires(self, round_idx: int) -> bool:
        """Return True if the exchange of `inquiry` is part of a round. In other rounds nothing is sent for it.

        Args:
            round_idx: Index of the round, from 0.
        """
        return self.inquiry is not None

    def exchanges_of(self, round_idx: int, own: tuple[str, ...]) -> tuple[str, ...]:
        """Return the names of the exchanges of a round, in order.

        Args:
            round_idx: Index of the round, from 0.
            own: The names of the client's own exchanges.
        """
        if self.inquiry is None or not self.inquires(round_idx):
            return own
        return (*own, self.inquiry.exchange)

    def broadcast(self, exchange: str, client_id: int) -> Broadcast:
        """Return the message to one client, by default the global weights."""
        return self.sends(exchange)

    def add(self, update: ClientUpdate) -> None:
        """Take in what the method itself needs of an update (`sum`, `gather`). The rule takes the weights."""

    def deployment(self, client_id: int) -> Mapping[str, Any]:
        """Return what the server gives a client for the model that it deploys, by default nothing.

        The client has the evaluated weights besides. The hook is called wherever such a model is made: for evaluations,
        predictions and copies, also of clients that never train (`data.unseen`). `ClientModule.receive_deployment` gets
        what it returns, which is no traffic.

        Args:
            client_id: Id of the client, from 0.
        """
        return {}

    def finish(self, exchange: str, aggregate: State | None) -> State | None:
        """Return the new shared weights, by default the rule's aggregate, or None if they stay as they are.

        They stay too if the total weight of all clients is 0 (`Aggregator.finish`). What is returned before the last
        exchange is sent down in the next exchange.

        Args:
            exchange: Name of the exchange.
            aggregate: What the rule has made, or None.
        """
        return aggregate

    def check_aggregator(self, aggregator: Aggregator) -> None:
        """Refuse a rule that would have no effect, or that breaks the method's own server step.

        It is called once, after `setup`.

        Args:
            aggregator: The rule of the federation.

        Raises:
            ValueError: The module makes the weights by itself, and the rule is not the mean.
        """
        if self.makes_weights and type(aggregator) is not Aggregator:
            raise ValueError(
                f"{type(self).__name__} makes the weights of the clients' updates by itself, so that "
                f"{type(aggregator).__name__} would have no effect; leave model.aggregator unset"
            )

    def check_server_optimizer(self, optimizer: Optimizer) -> None:
        """Refuse a server optimizer that breaks the method's own server step.

        It is called at the start of a run with a server optimizer.
        """

    def client_of(self, kind: type[Client]) -> Client:
        """Return the client module, whose settings the server reads.

        Args:
            kind: The class of the clients to which this server side belongs.

        Raises:
            ValueError: The client module is of another class.
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

        Call this method in `setup`.

        Raises:
            ValueError: The clients share no trainable entries.
        """
        if not self.server.trainable:
            name = type(self.server.module).__name__
            raise ValueError(
                f"{name} needs trainable entries that the clients share, got none; make fewer entries personal"
            )

    def sends(self, exchange: str, **extras: Any) -> Broadcast:
        """Return a broadcast of the global weights and `extras`, with server state in the weights' own types."""
        weights = self.server.weights
        for key, value in extras.items():
            if isinstance(value, StateBuffers):
                extras[key] = {name: tensor.to(weights[name].dtype) for name, tensor in value.items()}
        return Broadcast(round_idx=self.server.round_idx, exchange=exchange, weights=weights, extras=extras)


class StateBuffers(nn.Module, Mapping[str, Tensor]):
    """Holds a state in buffers, so that it is moved, saved and restored with the module that owns it."""

    def __init__(self, state: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.names = {name: name.replace(".", "/") for name in state}
        """The names of the buffers, which have no dots, by the names of the entries."""
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
