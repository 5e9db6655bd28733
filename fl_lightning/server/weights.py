"""The global model's entries in the one client module: what is shared, what is personal, and how it is loaded."""

from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from fl_lightning.client import ClientModule
from fl_lightning.functional.keyed import keyed_generator
from fl_lightning.functional.state import FlatState
from fl_lightning.nets import HeterogeneousNets
from fl_lightning.types import State

if TYPE_CHECKING:
    from fl_lightning.data import FederatedDataModule
    from fl_lightning.store import ClientStore


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
        self._parameters = {
            name: value for name, entry in self.entries.items() if isinstance(value := getattr(*entry), nn.Parameter)
        }
        kept = set(self.personal)
        self.shared = [name for name in self.entries if name not in kept]
        self.own_models = not self.shared and client.module is None
        """Whether the clients are classifiers that share nothing, so that there is no global model."""
        self.trainable = client.fix_trainable()
        self.client = client
        if self.shared and isinstance(client.net, HeterogeneousNets):
            raise ValueError(
                f"clients with different nets can share no entry, but {type(client).__name__} shares "
                f"{len(self.shared)}; give it one net, or take KnFu, FedMD, Local or model.personal=['*']"
            )

    def _check(self, client: ClientModule) -> None:
        """Refuse entries that cannot be averaged, and weights that would leak from one client into the next."""
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
        """The personal entries of one client: with nets of different clients, those of its own."""
        if not isinstance(self.client.net, HeterogeneousNets):
            return self.personal
        return [name for name in self.personal if self.client.has(client_id, name)]

    def live(self, names: list[str]) -> State:
        """The named entries as they lie in the module, detached: they change when another client is loaded."""
        return FlatState([(name, self._entry(name).detach()) for name in names])

    def _entry(self, name: str) -> Tensor:
        found = self._parameters.get(name)
        return cast(Tensor, getattr(*self.entries[name])) if found is None else found

    def snapshot(self, names: list[str]) -> State:
        """Copies of the named entries."""
        return {name: self._entry(name).detach().clone() for name in names}

    def saved(self, state: State) -> State:
        """`state` by the names that it has in the loop's state dict."""
        again = {alias: state[name] for alias, name in self.tied.items() if name in state}
        return {f"client.{name}": value for name, value in {**state, **again}.items()}

    @torch.no_grad()
    def load(self, state: State) -> None:
        """Copy `state` into the module.

        Raises:
            KeyError: if the module has no such entry.
        """
        for name, value in state.items():
            self._entry(name).copy_(value)


class Server:
    """What an aggregator sees of the server (the `ServerView` protocol)."""

    def __init__(
        self,
        weights: GlobalWeights,
        data: "FederatedDataModule | None",
        store: "ClientStore",
        seed: Callable[[], int],
    ) -> None:
        self.module: nn.Module = weights.client
        self.trainable = tuple(name for name in weights.trainable if name not in set(weights.personal))
        self.round_idx = 0
        self.store = store
        self._all, self._data, self._seed = weights, data, seed
        self._now: State | None = None

    def attach(self, data: "FederatedDataModule") -> None:
        """Take the data module of another fit."""
        self._data = data

    @property
    def num_clients(self) -> int:
        return 0 if self._data is None else self._data.num_clients

    @property
    def weights(self) -> State:
        return self._all.live(self._all.shared) if self._now is None else self._now

    @weights.setter
    def weights(self, state: State | None) -> None:
        self._now = state

    def data(self, split: str) -> Any:
        assert self._data is not None
        return self._data.split(split)

    def generator(self, purpose: str) -> torch.Generator:
        return keyed_generator(self._seed(), purpose, self.round_idx)
