"""The server: the global weights in the one client module, the view that its parts have, and the server optimizer."""

import copy
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from operator import attrgetter
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from fl_lightning.client.extra_states import ExtraStates, is_entry
from fl_lightning.client.module import ClientModule
from fl_lightning.data import FederatedDataModule
from fl_lightning.federation.buffers import TransientBuffers
from fl_lightning.federation.frozen import FrozenEntries
from fl_lightning.functional.state import FlatState
from fl_lightning.nets import HeterogeneousNets
from fl_lightning.types import State
from fl_lightning.utils.keyed import keyed_generator

requires_grad = attrgetter("requires_grad")


class GlobalWeights:
    """Reads and writes the entries of the client module's state dict by name.

    Args:
        client: the module.
        personal: `fnmatch` patterns of entries that never travel, besides those of `client.is_personal`; with `!` in
            front, of entries that do travel all the same.
        keep: patterns of buffers with `persistent=False` that a client keeps in its memory.

    Raises:
        ValueError: if a pattern matches no entry, or an entry cannot be averaged.
    """

    def __init__(self, client: ClientModule, personal: tuple[str, ...] = (), keep: tuple[str, ...] = ()) -> None:
        modules = dict(client.named_modules(remove_duplicate=False))
        self.entries: dict[str, tuple[nn.Module, str]] = {}
        self.tied: dict[str, str] = {}
        """Further names of entries, by which a checkpoint holds them too; they are averaged and sent once."""
        state = {n: v for n, v in client.state_dict(keep_vars=True).items() if is_entry(n, v)}
        first: dict[int, str] = {}
        kept: set[str] = set()
        for alias, value in state.items():
            name = first.setdefault(id(value), alias)
            owner, attribute = modules[alias.rpartition(".")[0]], alias.rpartition(".")[2]
            if name == alias:
                self.entries[name] = (owner, attribute)
            else:
                self.tied[alias] = name
            if client.is_personal(alias, owner) or matches(alias, personal):
                kept.add(name)
        for pattern in personal:
            if not any(fnmatchcase(name, pattern.removeprefix("!")) for name in state):
                raise ValueError(
                    f"personal: a pattern must match an entry of the client, {pattern!r} matches none of "
                    f"{list(self.entries)[:8]}"
                )
        found = {name: getattr(*entry) for name, entry in self.entries.items()}
        check_averageable(client, found)
        # the optimizers hold the same parameter objects, so these stay; buffers may be assigned anew
        self._parameters = {name: value for name, value in found.items() if isinstance(value, nn.Parameter)}
        self.personal = [name for name in self.entries if name in kept]
        self.shared = [name for name in self.entries if name not in kept]
        self.own_models = not self.shared and client.module is None
        """True where the clients are classifiers that share nothing, so that there is no global model."""
        self.client, self.transient, self.trainable = client, TransientBuffers(client, keep), tuple[str, ...]()
        """The shared trainable entries."""
        self.extra = ExtraStates.of(client)
        self._room: dict[torch.dtype, Tensor] = {}
        """Memory in which the entries of one client after the other are laid end to end: new one is slow at first."""
        self._kept, self._flags, self.freezes = kept, list[bool](), True
        """True where some entry does not require a gradient."""
        self._find_trainable()
        self.frozen = FrozenEntries({n: v for n, v in self._parameters.items() if n not in kept})
        self.travelling = self.shared
        """The shared entries that travel in this round."""
        if self.shared and isinstance(client.net, HeterogeneousNets):
            raise ValueError(
                f"clients with different nets can share no entry, but {type(client).__name__} shares "
                f"{len(self.shared)}; give it one net, or take KnFu, FedMD, Local or model.personal=['*']"
            )

    def begin_round(self, stateful: Callable[[], str]) -> None:
        """Find out what is trained from now on, and what travels.

        Args:
            stateful: says who keeps a state of the trained entries, empty: nobody. What was trained at the start then
                goes on travelling, and nothing may come to be trained.

        Raises:
            ValueError: naming an entry that was unfrozen, and who cannot bear it.
        """
        flags = list(map(requires_grad, self._parameters.values()))
        if flags == self._flags and not self.freezes:
            return
        if flags != self._flags:
            self._flags, self.freezes, owner = flags, not all(flags), stateful()
            if not owner:
                self._find_trainable()
            elif new := self.frozen.trained - set(self.trainable):
                raise ValueError(
                    f"{owner} keeps a state of the entries that are trained, so that none may be unfrozen later, "
                    f"but {min(new)!r} was; unfreeze it before the fit, or train by FedAvg's mean"
                )
        self.frozen.begin_round(self.trainable)
        idle = self.frozen.idle
        self.travelling = [name for name in self.shared if name not in idle] if idle else self.shared

    def _find_trainable(self) -> None:
        self.trainable = tuple(n for n, *_ in self.client.fix_trainable(self._kept) if n not in self._kept)

    def personal_of(self, client_id: int) -> list[str]:
        """Name the personal entries of one client: with `HeterogeneousNets`, those of its own net."""
        if not isinstance(self.client.net, HeterogeneousNets):
            return self.personal
        return [name for name in self.personal if self.client.has(client_id, name)]

    def live(self, names: Iterable[str]) -> FlatState:
        """Read the named entries as they lie in the module, detached: they change when another client is loaded."""
        known, rest = self._parameters, self.entries
        entries = [(n, (known[n] if n in known else getattr(*rest[n])).detach()) for n in names]
        return FlatState(entries, room=self._room)

    def snapshot(self, names: Iterable[str], idle: Mapping[str, Tensor] = MappingProxyType({})) -> State:
        """Copy the named entries; `idle` ones are as given and need no copy."""
        known, rest, copied = self._parameters, self.entries, State()
        for name in names:
            value = idle.get(name)
            if value is None:
                value = (known[name] if name in known else getattr(*rest[name])).detach().clone()
            copied[name] = value
        return copied

    def saved(self, state: Mapping[str, Any]) -> dict[str, Any]:
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


def matches(name: str, patterns: Iterable[str]) -> bool:
    """True for a name that one of the `fnmatch` patterns matches, and none of those with `!` in front.

    >>> matches("net.head.bias", ["*", "!net.head.*"]), matches("net.body.bias", ["*", "!net.head.*"])
    (False, True)
    """
    kinds: tuple[list[str], list[str]] = ([], [])
    for pattern in patterns:
        kinds[pattern.startswith("!")].append(pattern.removeprefix("!"))
    kept, shared = (any(fnmatchcase(name, pattern) for pattern in kind) for kind in kinds)
    return kept and not shared


def check_averageable(client: ClientModule, entries: State) -> None:
    """Refuse entries that cannot be averaged, and trained weights that would pass from one client to the next.

    Raises:
        ValueError: naming the entry.
    """
    known = {id(value) for value in entries.values()}
    for name, value in [*client.named_parameters(), *entries.items()]:
        if isinstance(value, nn.UninitializedParameter | nn.UninitializedBuffer):
            rule = "must have a shape, but is that of a lazy layer; call the layer once in configure_model"
        elif value.is_complex():
            rule = "must be real to be averaged, but is complex; keep its torch.view_as_real"
        elif value.requires_grad and id(value) not in known:
            rule = "is trained, but state_dict() leaves it out; put it in, or set requires_grad=False"
        else:
            continue
        raise ValueError(f"the client's entry {name} {rule}")


class Server:
    """The server as its parts see it (the `ServerView` protocol).

    Args:
        global_weights: in the client module.
        data: of the federation; its `batch_seed`, the run's seed, keys every draw.
        store: of the clients' memory.
    """

    def __init__(self, global_weights: GlobalWeights, data: FederatedDataModule, store: Any) -> None:
        self.module: nn.Module = global_weights.client
        self.round_idx = 0
        self.global_weights, self.store, self._data = global_weights, store, data
        self._snapshot: State | None = None

    def attach(self, data: FederatedDataModule) -> None:
        """Take the data of another fit."""
        self._data = data

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
    def trainable(self) -> tuple[str, ...]:
        return self.global_weights.trainable

    @property
    def travelling(self) -> State:
        """The shared entries that travel in this round."""
        whole, names = self.weights, self.global_weights.travelling
        return whole if len(names) == len(whole) else {name: whole[name] for name in names}

    @property
    def num_clients(self) -> int:
        return self._data.num_clients

    @property
    def cohort_size(self) -> int:
        return min(map(len, self._data.schedule or []), default=self._data.cohort_size)

    @property
    def weights(self) -> State:
        return self.global_weights.live(self.global_weights.shared) if self._snapshot is None else self._snapshot

    def size(self, client_id: int) -> int:
        return self._data.size(client_id)

    def data(self, split: str) -> Any:
        return self._data.split(split)

    def generator(self, purpose: str) -> torch.Generator:
        return keyed_generator(self._data.batch_seed, purpose, self.round_idx)


class ServerOptimizer:
    """Steps on global − aggregate as a gradient, in float64; without an optimizer it copies the aggregate.

    Reddi et al., ICLR 2021, arXiv:2003.00295 (FedOpt). Even without one an SGD is stepped once a round, because
    Lightning counts the steps of the fitted module's optimizer.

    Args:
        factory: the optimizer, as a function of its parameters, or None.
        trainable: the shared trainable weights, which alone it moves; the rest is copied.
        undoes: whether a step whose result is not finite is undone, so that the run can go on.
    """

    def __init__(
        self, factory: Callable[[Iterable[Any]], Optimizer] | None, trainable: State, undoes: bool = False
    ) -> None:
        self.copies, self.undoes = factory is None, undoes
        if factory is None:
            self.params = {"rounds": nn.Parameter(torch.zeros((), dtype=torch.float32))}
            self.optimizer: Optimizer = SGD(self.params.values(), lr=1.0)
        else:
            self.params = {name: nn.Parameter(value.detach().double()) for name, value in trainable.items()}
            self.optimizer = factory(self.params.values())

    @torch.no_grad()
    def step(self, start: State, new: State | None, run: Callable[[], Any], scaler: Any | None) -> State | None:
        """Take one step; returns the next shared weights, or None where they would not be finite.

        Args:
            start: the round's first shared weights.
            new: weights of the last exchange, or None: nothing moves, but the step counts.
            run: steps the optimizer through Lightning.
            scaler: the Trainer's gradient scaler, which divides what is multiplied here.
        """
        target = None if self.copies else new
        keeps = self.undoes and not self.copies
        before = (
            copy.deepcopy(self.optimizer.state_dict()) if keeps or (scaler is not None and target is None) else None
        )
        for name, parameter in self.params.items():
            gradient = None if scaler is None else torch.zeros_like(parameter)  # a scaler refuses to step without one
            if target is not None:
                parameter.copy_(start[name])
                gradient = parameter - target[name].double()
            parameter.grad = gradient if scaler is None else scaler.scale(gradient)
        run()
        if before is not None and target is None:
            self.optimizer.load_state_dict(before)
        if target is None:
            return start if new is None else new
        stepped = {
            name: self.params[name].to(value.dtype) if name in self.params else value for name, value in target.items()
        }
        if bool(torch.stack([stepped[name].isfinite().all() for name in self.params]).all()):
            return stepped
        if before is not None:
            self.optimizer.load_state_dict(before)
        return None
