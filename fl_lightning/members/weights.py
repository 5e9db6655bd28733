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
        client: The client module.
        personal: `fnmatch` patterns of entries that are never transmitted, in addition to the
            entries of `client.is_personal`. A pattern with `!` in front makes an exception, whose
            entries are transmitted.
        keep: `fnmatch` patterns of buffers with `persistent=False` that a client keeps in its
            memory.
        keeps_state: Returns the name of the part that keeps a state of the trained entries, or an
            empty text. With such a part the trained entries never change.

    Attributes:
        entries: The module and the attribute of every entry, by name.
        personal: Names of the entries that stay with a client.
        shared: Names of all other entries.
        before: All entries as they were when the round began.
        start: The shared entries as they were when the round began.

    Raises:
        ValueError: A pattern matches no entry, or an entry cannot be averaged.
    """

    def __init__(
        self,
        client: ClientModule,
        personal: tuple[str, ...] = (),
        keep: tuple[str, ...] = (),
        keeps_state: Callable[[], str] = str,
    ) -> None:
        self.client = client
        self.entries: dict[str, tuple[nn.Module, str]] = {}
        self.tied: dict[str, str] = {}
        """Further names of entries. A checkpoint holds an entry by all its names."""
        self._personal_names: set[str] = set()
        """Names of the entries that stay with a client."""
        self._find_entries(personal)
        tensors = {name: getattr(owner, attribute) for name, (owner, attribute) in self.entries.items()}
        check_averageable(client, tensors)
        self._parameters = {name: value for name, value in tensors.items() if isinstance(value, nn.Parameter)}
        self.personal = [name for name in self.entries if name in self._personal_names]
        self.shared = [name for name in self.entries if name not in self._personal_names]
        self.own_models = not self.shared
        """Whether the clients share nothing, so that there is no global model."""
        self.non_persistent = NonPersistentBuffers(client, keep)
        self.extra = ExtraStates(client)
        self.before = State()
        self.start = State()
        self.trainable = tuple[str, ...]()
        """Names of the shared trainable entries."""
        self.freezes = True
        """Whether an entry does not require a gradient."""
        self._keeps_state = keeps_state
        self._requires_grad = list[bool]()
        """Whether each parameter requires a gradient, as the last round found it."""
        self._scratch: dict[torch.dtype, Tensor] = {}
        """Memory that all clients share for their entries laid end to end, since new memory is slow at first."""
        self._find_trainable()
        personal_names = self._personal_names
        shared_parameters = {name: value for name, value in self._parameters.items() if name not in personal_names}
        self.frozen = FrozenEntries(shared_parameters, first_exchange=client.exchanges[0])
        self.transmitted_entries = self.shared
        """Names of the shared entries that are transmitted in this round."""
        if self.shared and isinstance(client.net, HeterogeneousNets):
            raise ValueError(
                f"clients with different nets can share no entry, but {type(client).__name__} shares "
                f"{len(self.shared)}; give it one net, or take KnFu, FedMD, FedProto, Local or model.personal=['*']"
            )

    def _find_entries(self, personal: tuple[str, ...]) -> None:
        """Find the entries of the client, and which of them stay with a client.

        Args:
            personal: `fnmatch` patterns of entries that are never transmitted.

        Raises:
            ValueError: A pattern matches no entry.
        """
        first_names: dict[int, str] = {}
        for alias, value in self.client.state_dict(keep_vars=True).items():
            if not is_entry(alias, value):
                continue
            path, _, attribute = alias.rpartition(".")
            owner = self.client.get_submodule(path)
            name = first_names.setdefault(id(value), alias)
            if name == alias:
                self.entries[name] = (owner, attribute)
            else:
                self.tied[alias] = name
            if self.client.is_personal(alias, owner) or matches(alias, personal):
                self._personal_names.add(name)
        for pattern in personal:
            if not any(fnmatchcase(name, pattern.removeprefix("!")) for name in (*self.entries, *self.tied)):
                raise ValueError(
                    f"personal: a pattern must match an entry of the client, {pattern!r} matches none of "
                    f"{list(self.entries)[:8]}"
                )

    def check_owners(self) -> None:
        """Refuse a client whose hook `on_load_checkpoint` has replaced a module with entries.

        Raises:
            ValueError: A module with entries is no part of the client any more.
        """
        present = {id(module) for module in self.client.modules()}
        for name, (owner, attribute) in self.entries.items():
            if id(owner) not in present:
                layer = name.removesuffix(f".{attribute}")
                raise ValueError(
                    f"on_load_checkpoint must keep the modules of the client, got another one for {layer!r}; make it "
                    f"in __init__, setup or configure_model"
                )

    @property
    def features(self) -> list[Member]:
        """The members for what not every model has: extra states, buffers in no state dict, frozen entries."""
        return [self.extra, self.non_persistent, self.frozen]

    # --- as a member of the round ---

    def prepare(self) -> bool:
        """Find the entries that are trained and transmitted in the next round.

        Returns:
            Whether an entry was frozen or unfrozen.

        Raises:
            ValueError: An entry was unfrozen, although a part keeps a state of the trained entries.
        """
        requires_grad = [value.requires_grad for value in self._parameters.values()]
        changed = requires_grad != self._requires_grad
        if changed:
            self._requires_grad = requires_grad
            self.freezes = not all(requires_grad)
            owner = self._keeps_state()
            if owner:
                self._check_not_unfrozen(owner)
            else:
                self._find_trainable()
        if changed or self.freezes:
            self._find_transmitted()
        return changed

    def _find_trainable(self) -> None:
        """Find the shared trainable entries."""
        personal = self._personal_names
        trainable = (name for name, *_ in self.client.fix_trainable(personal))
        self.trainable = tuple(name for name in trainable if name not in personal)

    def _check_not_unfrozen(self, owner: str) -> None:
        """Refuse trainable entries that were not trainable when the fit began.

        Args:
            owner: Name of the part that keeps a state of the trained entries.

        Raises:
            ValueError: An entry was unfrozen.
        """
        trainable = {name for name, value in self.frozen.parameters.items() if value.requires_grad}
        unfrozen = trainable - set(self.trainable)
        if unfrozen:
            raise ValueError(
                f"{owner} keeps a state of the entries that are trained, so that none may be unfrozen later, but "
                f"{min(unfrozen)!r} was; unfreeze it before the fit, or train by FedAvg's mean"
            )

    def _find_transmitted(self) -> None:
        """Find the entries that are transmitted in the next round: all that some client may not have."""
        self.frozen.find_already_sent(fixed=self.trainable)
        already_sent = self.frozen.already_sent
        self.transmitted_entries = self.shared
        if already_sent:
            self.transmitted_entries = [name for name in self.shared if name not in already_sent]

    def mark(self) -> State:
        """Return a copy of all entries when a round begins."""
        self.before = self.snapshot(self.entries, self.frozen.already_sent)
        self.start = self.before
        if self.personal:
            self.start = {name: self.before[name] for name in self.shared}
        return self.before

    def undo(self, mark: State) -> None:
        self.load(mark)

    def entries_at(self, mark: State) -> Mapping[str, Any]:
        return self.saved(mark)

    def end(self, outcome: RoundOutcome, shared: Sequence[Any]) -> Mapping[str, float]:
        """Load the new entries, except for the frozen ones that have not changed."""
        if outcome.aborted:
            return {}
        already_sent = self.frozen.already_sent
        entries = outcome.entries
        if already_sent:
            entries = {name: value for name, value in entries.items() if name not in already_sent}
        self.load(entries)
        return {}

    # --- reading and writing ---

    def personal_of(self, client_id: int) -> list[str]:
        """Return the names of one client's personal entries, of its own net among `HeterogeneousNets`."""
        if not isinstance(self.client.net, HeterogeneousNets):
            return self.personal
        return [name for name in self.personal if self.client.has(client_id, name)]

    def live(self, names: Iterable[str]) -> FlatState:
        """Return the named entries without a copy. They change when another client is loaded."""
        entries: list[tuple[str, Tensor]] = []
        for name in names:
            owner, attribute = self.entries[name]
            entries.append((name, getattr(owner, attribute).detach()))
        return FlatState(entries, scratch=self._scratch)

    def snapshot(self, names: Iterable[str], sent: Mapping[str, Tensor] = MappingProxyType({})) -> State:
        """Return copies of the named entries.

        Args:
            names: Names of entries.
            sent: Entries that have not changed, by name. They are not copied.
        """
        copies = State()
        for name in names:
            if name in sent:
                copies[name] = sent[name]
            else:
                owner, attribute = self.entries[name]
                copies[name] = getattr(owner, attribute).detach().clone()
        return copies

    def saved(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the entries of `state` by their names in the loop's state dict, with all names of each entry."""
        tied = {alias: state[name] for alias, name in self.tied.items() if name in state}
        return {f"client.{name}": value for name, value in {**state, **tied}.items()}

    @torch.no_grad()
    def load(self, state: State) -> None:
        """Copy entries into the module.

        Args:
            state: Values of some of the entries, by name.

        Raises:
            KeyError: The module has no such entry.
        """
        for name, value in state.items():
            owner, attribute = self.entries[name]
            getattr(owner, attribute).copy_(value)


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Return True for a name that a pattern matches, unless a pattern with `!` in front matches it too.

    Args:
        name: Name of an entry.
        patterns: `fnmatch` patterns, some with `!` in front.

    >>> matches("net.head.bias", ["*", "!net.head.*"]), matches("net.body.bias", ["*", "!net.head.*"])
    (False, True)
    """
    matching = [pattern for pattern in patterns if fnmatchcase(name, pattern.removeprefix("!"))]
    return bool(matching) and not any(pattern.startswith("!") for pattern in matching)


def check_averageable(client: ClientModule, entries: State) -> None:
    """Refuse entries that cannot be averaged, and trained weights that would pass from one client to the next.

    Args:
        client: The client module.
        entries: The entries of the client module, by name.

    Raises:
        ValueError: An entry has no shape or is complex, or a trained parameter is no entry.
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
