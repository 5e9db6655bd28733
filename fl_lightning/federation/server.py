"""The server: the global weights in the one client module, the view that its parts have, and the server optimizer."""

import copy
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from fl_lightning.client.module import ClientModule
from fl_lightning.functional.state import FlatState
from fl_lightning.nets import HeterogeneousNets
from fl_lightning.types import State
from fl_lightning.utils.keyed import keyed_generator


class GlobalWeights:
    """Reads and writes the entries of the client module's state dict by name.

    Args:
        client: the module.
        personal: `fnmatch` patterns of entries that never travel, besides those of `client.is_personal`.

    Raises:
        ValueError: if a pattern matches no entry, or an entry cannot be averaged.
    """

    def __init__(self, client: ClientModule, personal: tuple[str, ...] = ()) -> None:
        modules = dict(client.named_modules())
        self.entries: dict[str, tuple[nn.Module, str]] = {}
        self.personal: list[str] = []
        self.tied: dict[str, str] = {}
        """Further names of entries, by which a checkpoint holds them too; they are averaged and sent once."""
        state = {n: v for n, v in client.state_dict(keep_vars=True).items() if isinstance(v, Tensor)}
        first: dict[int, str] = {}
        for alias, value in state.items():
            name = first.setdefault(id(value), alias)
            owner, attribute = modules[alias.rpartition(".")[0]], alias.rpartition(".")[2]
            if name == alias:
                self.entries[name] = (owner, attribute)
            else:
                self.tied[alias] = name
            if client.is_personal(alias, owner) or any(fnmatchcase(alias, pattern) for pattern in personal):
                self.personal += [] if name in self.personal else [name]
        for pattern in personal:
            if not any(fnmatchcase(name, pattern) for name in state):
                raise ValueError(
                    f"personal: a pattern must match an entry of the client, {pattern!r} matches none of "
                    f"{list(self.entries)[:8]}"
                )
        self._check(client)
        # the optimizers hold the same parameter objects, so these stay; buffers may be assigned anew
        found = {name: getattr(*entry) for name, entry in self.entries.items()}
        self._parameters = {name: value for name, value in found.items() if isinstance(value, nn.Parameter)}
        kept = set(self.personal)
        self.shared = [name for name in self.entries if name not in kept]
        self.own_models = not self.shared and client.module is None
        """True where the clients are classifiers that share nothing, so that there is no global model."""
        self.trainable = tuple(name for name, *_ in client.fix_trainable(kept) if name not in kept)
        """The shared trainable entries."""
        self.client = client
        if self.shared and isinstance(client.net, HeterogeneousNets):
            raise ValueError(
                f"clients with different nets can share no entry, but {type(client).__name__} shares "
                f"{len(self.shared)}; give it one net, or take KnFu, FedMD, Local or model.personal=['*']"
            )

    def _check(self, client: ClientModule) -> None:
        """Refuse entries that cannot be averaged, and trained weights that would pass from one client to the next."""
        shared = {id(getattr(*entry)) for entry in self.entries.values()}
        for name, value in [*client.named_parameters(), *((name, getattr(*e)) for name, e in self.entries.items())]:
            if isinstance(value, nn.UninitializedParameter | nn.UninitializedBuffer):
                rule = "must have a shape, but is that of a lazy layer; call the layer once in configure_model"
            elif value.is_complex():
                rule = "must be real to be averaged, but is complex; keep its torch.view_as_real"
            elif value.requires_grad and id(value) not in shared:
                rule = "is trained, but state_dict() leaves it out; put it in, or set requires_grad=False"
            else:
                continue
            raise ValueError(f"the client's entry {name} {rule}")

    def personal_of(self, client_id: int) -> list[str]:
        """Name the personal entries of one client: with `HeterogeneousNets`, those of its own net."""
        if not isinstance(self.client.net, HeterogeneousNets):
            return self.personal
        return [name for name in self.personal if self.client.has(client_id, name)]

    def live(self, names: list[str]) -> FlatState:
        """Read the named entries as they lie in the module, detached: they change when another client is loaded."""
        known, rest = self._parameters, self.entries
        return FlatState([(n, (known[n] if n in known else getattr(*rest[n])).detach()) for n in names])

    def snapshot(self, names: Iterable[str]) -> State:
        """Copy the named entries."""
        known, rest = self._parameters, self.entries
        return {n: (known[n] if n in known else getattr(*rest[n])).detach().clone() for n in names}

    def saved(self, state: State) -> State:
        """Rename the entries of `state` as in the loop's state dict, tied names included."""
        again = {alias: state[name] for alias, name in self.tied.items() if name in state}
        return {f"client.{name}": value for name, value in {**state, **again}.items()}

    @torch.no_grad()
    def load(self, state: State) -> None:
        """Copy `state` into the module.

        Raises:
            KeyError: if the module has no such entry.
        """
        for name, value in state.items():
            entry = self._parameters.get(name)
            (getattr(*self.entries[name]) if entry is None else entry).copy_(value)


class ServerData(Protocol):
    """The federation's data as the server needs them (a `FederatedDataModule`)."""

    num_clients: int
    cohort_size: int
    schedule: list[list[int]] | None

    def split(self, name: str) -> Any:
        """A split by name."""

    def client_indices(self, split: str, client_id: int) -> Tensor:
        """A client's samples of a split, (n,) int64."""


class Server:
    """The server as its parts see it (the `ServerView` protocol).

    Args:
        weights: of the global model, in the client module.
        data: of the federation.
        store: of the clients' memory.
        seed: keys every draw.
    """

    def __init__(self, weights: GlobalWeights, data: ServerData, store: Any, seed: int) -> None:
        self.module: nn.Module = weights.client
        self.trainable = weights.trainable
        self.round_idx = 0
        self.store = store
        self._all, self._data, self._seed = weights, data, seed
        self._snapshot: State | None = None

    def attach(self, data: ServerData, seed: int) -> None:
        """Take the data of another fit."""
        self._data, self._seed = data, seed

    def begin_round(self, round_idx: int, weights: State) -> None:
        """Begin a round from `weights`, a snapshot of the shared entries."""
        self.round_idx, self._snapshot = round_idx, weights

    def advance(self, new: State) -> State:
        """Make the weights of an exchange the global ones; returns all shared entries."""
        before = self.weights
        self._snapshot = new if len(new) == len(before) else {**before, **new}
        return self._snapshot

    def end_round(self) -> None:
        """End the round: the global weights are those in the module again."""
        self._snapshot = None

    @property
    def in_round(self) -> bool:
        """True while the clients of a round are trained."""
        return self._snapshot is not None

    @property
    def num_clients(self) -> int:
        return self._data.num_clients

    @property
    def cohort_size(self) -> int:
        return min(map(len, self._data.schedule or []), default=self._data.cohort_size)

    @property
    def weights(self) -> State:
        return self._all.live(self._all.shared) if self._snapshot is None else self._snapshot

    def size(self, client_id: int) -> int:
        return len(self._data.client_indices("train", client_id))

    def data(self, split: str) -> Any:
        return self._data.split(split)

    def generator(self, purpose: str) -> torch.Generator:
        return keyed_generator(self._seed, purpose, self.round_idx)


class ServerOptimizer:
    """Steps on global − aggregate as a gradient, in float64; without an optimizer it copies the aggregate.

    Reddi et al., ICLR 2021, arXiv:2003.00295 (FedOpt). Even without one an SGD is stepped once a round, because
    Lightning counts the steps of the fitted module's optimizer.

    Args:
        factory: the optimizer, as a function of its parameters, or None.
        trainable: the shared trainable weights, which alone it moves; the rest is copied.
    """

    def __init__(self, factory: Callable[[Iterable[Any]], Optimizer] | None, trainable: State) -> None:
        self.copies = factory is None
        if factory is None:
            self.params = {"rounds": nn.Parameter(torch.zeros((), dtype=torch.float32))}
            self.optimizer: Optimizer = SGD(self.params.values(), lr=1.0)
        else:
            self.params = {name: nn.Parameter(value.detach().double()) for name, value in trainable.items()}
            self.optimizer = factory(self.params.values())

    @torch.no_grad()
    def step(self, start: State, new: State | None, run: Callable[[], Any], scaler: Any | None) -> State:
        """Take one step; returns the next shared weights.

        Args:
            start: the round's first shared weights.
            new: weights of the last exchange, or None: nothing moves, but the step counts.
            run: steps the optimizer through Lightning.
            scaler: the Trainer's gradient scaler, which divides what is multiplied here.
        """
        moves = new is not None and not self.copies
        before = None if moves or self.copies or scaler is None else copy.deepcopy(self.optimizer.state_dict())
        for name, parameter in self.params.items():
            gradient: Tensor | None = None
            if moves and new is not None:
                parameter.copy_(start[name])
                gradient = parameter - new[name].double()
            elif scaler is not None:
                gradient = torch.zeros_like(parameter)  # a scaler refuses to step without a gradient
            parameter.grad = gradient if scaler is None else scaler.scale(gradient)
        run()
        if before is not None:
            self.optimizer.load_state_dict(before)
        if new is None or self.copies:
            return start if new is None else new
        return {
            name: self.params[name].to(value.dtype) if name in self.params else value for name, value in new.items()
        }
