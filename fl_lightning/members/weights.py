"""The global weights in the one client module: its shared and personal entries, by name."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from fl_lightning.client.module import ClientModule
from fl_lightning.functional.state import FlatState, is_entry
from fl_lightning.members.frozen import FrozenEntries
from fl_lightning.members.unaveraged import ExtraStates, NonPersistentBuffers
from fl_lightning.nets import HeterogeneousNets
from fl_lightning.types import Member, RoundOutcome, State


class GlobalWeights(Member):
    """Reads and writes the entries of the client module's state dict by name.

    Args:
        client: the module.
        personal: `fnmatch` patterns of entries that are never transmitted, besides those of `client.is_personal`; with
            `!` in front, of entries that are transmitted all the same.
        keep: patterns of buffers with `persistent=False` that a client keeps in its memory.
        keeps_state: names who keeps a state of the trained entries, empty: nobody. What was trained at the start then
            goes on being transmitted, and nothing may come to be trained.

    Raises:
        ValueError: if a pattern matches no entry, or an entry cannot be averaged.
    """

    def __init__(
        self,
        client: ClientModule,
        personal: tuple[str, ...] = (),
        keep: tuple[str, ...] = (),
        keeps_state: Callable[[], str] = str,
    ) -> None:
        state = {n: v for n, v in client.state_dict(keep_vars=True).items() if is_entry(n, v)}
        first: dict[int, str] = {}
        names = {alias: first.setdefault(id(value), alias) for alias, value in state.items()}
        paths = {alias: alias.rpartition(".") for alias in state}
        places = {alias: (client.get_submodule(path), attribute) for alias, (path, _, attribute) in paths.items()}
        self.entries = {name: places[name] for name in names.values()}
        self.tied = {alias: name for alias, name in names.items() if alias != name}
        """Further names of entries, by which a checkpoint holds them too; they are averaged and sent once."""
        stays = {n for n, (owner, _) in places.items() if client.is_personal(n, owner) or matches(n, personal)}
        kept = {names[alias] for alias in stays}
        for pattern in personal:
            if not any(fnmatchcase(name, pattern.removeprefix("!")) for name in state):
                raise ValueError(
                    f"personal: a pattern must match an entry of the client, {pattern!r} matches none of "
                    f"{list(self.entries)[:8]}"
                )
        values = {name: getattr(*place) for name, place in self.entries.items()}
        check_averageable(client, values)
        self._parameters = {name: value for name, value in values.items() if isinstance(value, nn.Parameter)}
        self.personal = [name for name in self.entries if name in kept]
        self.shared = [name for name in self.entries if name not in kept]
        self.own_models = not self.shared and client.module is None
        """True where the clients are classifiers that share nothing, so that there is no global model."""
        self.client = client
        self._keeps_state = keeps_state
        self.non_persistent = NonPersistentBuffers(client, keep)
        self.extra = ExtraStates(client)
        self.trainable = tuple[str, ...]()
        """The shared trainable entries."""
        self._scratch: dict[torch.dtype, Tensor] = {}
        """Memory in which the entries of one client after the other are laid end to end: new one is slow at first."""
        self.before = State()
        self.start = State()
        """All entries, and the shared ones, as they were when the round under way began."""
        self._kept = kept
        self._flags = list[bool]()
        self.freezes = True
        """True where some entry does not require a gradient."""
        self._find_trainable()
        self.frozen = FrozenEntries({n: v for n, v in self._parameters.items() if n not in kept}, client.exchanges[0])
        self.transmitted_entries = self.shared
        """The shared entries that are transmitted in this round."""
        if self.shared and isinstance(client.net, HeterogeneousNets):
            raise ValueError(
                f"clients with different nets can share no entry, but {type(client).__name__} shares "
                f"{len(self.shared)}; give it one net, or take KnFu, FedMD, Local or model.personal=['*']"
            )

    @property
    def features(self) -> list[Member]:
        """Members for what not every model has: extra states, buffers that are in no state dict, frozen entries."""
        return [self.extra, self.non_persistent, self.frozen]

    # --- as a member of the round ------------------------------------------------------------------------------

    def prepare(self) -> bool:
        """Find out what is trained from now on, and what is transmitted.

        Raises:
            ValueError: naming an entry that was unfrozen, and who cannot bear it.
        """
        flags = [value.requires_grad for value in self._parameters.values()]
        changed = flags != self._flags
        if changed:
            self._flags = flags
            self.freezes = not all(flags)
            self._find_trainable(self._keeps_state())
        if changed or self.freezes:
            self._find_transmitted()
        return changed

    def _find_trainable(self, owner: str = "") -> None:
        """Find the shared trainable entries, no new ones where an `owner` keeps a state of those that were."""
        if not owner:
            self.trainable = tuple(n for n, *_ in self.client.fix_trainable(self._kept) if n not in self._kept)
        elif new := {n for n, v in self.frozen.parameters.items() if v.requires_grad} - set(self.trainable):
            raise ValueError(
                f"{owner} keeps a state of the entries that are trained, so that none may be unfrozen later, but "
                f"{min(new)!r} was; unfreeze it before the fit, or train by FedAvg's mean"
            )

    def _find_transmitted(self) -> None:
        """Find the entries that are transmitted in the round to come: not those that everybody has."""
        self.frozen.find_already_sent(self.trainable)
        sent = self.frozen.already_sent
        self.transmitted_entries = [name for name in self.shared if name not in sent] if sent else self.shared

    def mark(self) -> State:
        self.before = self.snapshot(self.entries, self.frozen.already_sent)
        self.start = {name: self.before[name] for name in self.shared} if self.personal else self.before
        return self.before

    def undo(self, mark: State) -> None:
        self.load(mark)

    def entries_at(self, mark: State) -> Mapping[str, Any]:
        return self.saved(mark)

    def end(self, outcome: RoundOutcome, shared: Sequence[Any]) -> Mapping[str, float]:
        if not outcome.aborted:
            sent = self.frozen.already_sent
            new = outcome.entries
            self.load({name: value for name, value in new.items() if name not in sent} if sent else new)
        return {}

    def personal_of(self, client_id: int) -> list[str]:
        """Name the personal entries of one client: with `HeterogeneousNets`, those of its own net."""
        if not isinstance(self.client.net, HeterogeneousNets):
            return self.personal
        return [name for name in self.personal if self.client.has(client_id, name)]

    def live(self, names: Iterable[str]) -> FlatState:
        """Read the named entries as they lie in the module, detached: they change when another client is loaded."""
        entries = [(name, getattr(*self.entries[name]).detach()) for name in names]
        return FlatState(entries, scratch=self._scratch)

    def snapshot(self, names: Iterable[str], sent: Mapping[str, Tensor] = MappingProxyType({})) -> State:
        """Copy the named entries.

        `sent` ones are as given and need no copy.
        """
        return {name: sent[name] if name in sent else getattr(*self.entries[name]).detach().clone() for name in names}

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
            getattr(*self.entries[name]).copy_(value)


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Return True for a name that one of the `fnmatch` patterns matches, and none of those with `!` in front.

    >>> matches("net.head.bias", ["*", "!net.head.*"]), matches("net.body.bias", ["*", "!net.head.*"])
    (False, True)
    """
    matching = [pattern for pattern in patterns if fnmatchcase(name, pattern.removeprefix("!"))]
    return bool(matching) and not any(pattern.startswith("!") for pattern in matching)


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
