"""Messages to clients that come back in a later round than the one in which they started."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from fl_lightning.distributed import to_device
from fl_lightning.members.faults import check_update
from fl_lightning.members.weights import GlobalWeights
from fl_lightning.types import Broadcast, ClientUpdate, Member, Message, State
from fl_lightning.utils.settings import check_kind

Key = tuple[int, int]
"""Client id and version of a job that arrives."""


class Messages(Member):
    """Keeps the messages of clients at work until their jobs arrive.

    A message does not change once it is sent, also if the round in which it was sent is repeated or aborted: the client
    is at work. Nothing is therefore undone.

    Args:
        global_weights: The global weights, which know the shared entries.
        has_arrived: Whether a job has arrived before a round: `(client id, version, round) -> bool`. None before a fit.
    """

    name = "messages"

    def __init__(self, global_weights: GlobalWeights) -> None:
        self._global_weights = global_weights
        self._kept: dict[Key, Message] = {}
        self._frozen: list[bool] | None = None
        """Whether each shared parameter is frozen, as the last round found it."""
        self.has_arrived: Callable[[int, int, int], bool] | None = None

    def prepare(self) -> bool:
        """Refuse that parameters are frozen or unfrozen while clients are at work.

        Raises:
            ValueError: One was.
        """
        frozen = [not value.requires_grad for value in self._global_weights.frozen.parameters.values()]
        if self._frozen is not None and frozen != self._frozen:
            names = list(self._global_weights.frozen.parameters)
            changed = [name for name, was, now in zip(names, self._frozen, frozen, strict=True) if was != now]
            raise ValueError(
                f"no parameter may be frozen or unfrozen while clients are at work (model.pacing), but {changed[0]!r} "
                f"was; set requires_grad before the fit"
            )
        self._frozen = frozen
        return False

    def begin(self, round_idx: int, cohort: list[int]) -> None:
        """Forget the messages of jobs that have arrived in earlier rounds."""
        if self.has_arrived is None:
            return
        for client_id, version in list(self._kept):
            if self.has_arrived(client_id, version, round_idx):
                del self._kept[client_id, version]

    def keep(self, client_id: int, broadcast: Broadcast, start: State | None) -> None:
        """Keep a message.

        A method may send its live buffers as extras. They are copied, once for all clients of a version.

        Args:
            client_id: Id of the client.
            broadcast: The message.
            start: The shared entries that the client starts from, or None if the message holds all of them.
        """
        key = (client_id, broadcast.round_idx)
        if key in self._kept:
            return
        extras = dict(apply_to_collection(dict(broadcast.extras), Tensor, torch.clone))
        for (_, version), message in self._kept.items():
            if version == broadcast.round_idx:
                extras = shared_with(extras, message.broadcast.extras)
        sent = Broadcast(
            round_idx=broadcast.round_idx,
            exchange=broadcast.exchange,
            weights=broadcast.weights,
            extras=extras,
            uploads=broadcast.uploads,
        )
        self._kept[key] = Message(sent, start)

    def of(self, client_id: int, version: int) -> Message:
        """Return the message of a client that started from a version.

        Raises:
            ValueError: The message is not there, because a checkpoint lacks it.
        """
        if (client_id, version) not in self._kept:
            raise ValueError(
                f"the checkpoint must have the message of every client at work, and lacks that of client {client_id}, "
                f"which started in round {version}; continue from another checkpoint"
            )
        return self._kept[client_id, version]

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def versions(self) -> list[int]:
        """The versions of the messages, ascending."""
        return sorted({version for _, version in self._kept})

    # --- undoing, and checkpoints ---

    def mark(self) -> dict[Key, Message]:
        return dict(self._kept)

    def undo(self, mark: dict[Key, Message]) -> None:
        """Keep what was sent."""

    def state_dict(self, mark: dict[Key, Message] | None = None) -> list[dict[str, Any]]:
        kept = self._kept if mark is None else mark
        states: list[dict[str, Any]] = []
        for (client_id, version), message in sorted(kept.items(), key=lambda item: item[0]):
            broadcast = message.broadcast
            states.append(
                {
                    "client": client_id,
                    "version": version,
                    "exchange": broadcast.exchange,
                    "uploads": broadcast.uploads,
                    "weights": plain_state(broadcast.weights),
                    "start": plain_state(message.start),
                    "extras": dict(broadcast.extras),
                }
            )
        return states

    def load_state_dict(self, state: Sequence[Mapping[str, Any]]) -> None:
        """Take the messages of a checkpoint.

        Raises:
            TypeError: A message has a part of another kind.
            ValueError: A message lacks a part, or has other entries than the shared ones.
        """
        self._kept = {}
        whole: dict[int, State] = {}
        shared = self._global_weights.live(self._global_weights.shared)
        device = next(iter(shared.values())).device if shared else torch.device("cpu")
        for saved in state:
            check_saved(saved, shared)
            client_id = saved["client"]
            version = saved["version"]
            on_device = to_device(dict(saved), device)
            weights: State | None = on_device["weights"]
            start: State | None = on_device["start"]
            if weights is not None and start is None:
                # Messages of one version share their entries.
                weights = whole.setdefault(version, weights)
            elif start is not None:
                start = whole.setdefault(version, start)
            sent = Broadcast(
                round_idx=version,
                exchange=saved["exchange"],
                weights=weights,
                extras=on_device["extras"],
                uploads=saved["uploads"],
            )
            self._kept[client_id, version] = Message(sent, start)


def plain_state(state: State | None) -> dict[str, Tensor] | None:
    """Return entries as a plain dict, which a checkpoint may hold."""
    return None if state is None else dict(state)


def shared_with(extras: dict[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """Return extras in which tensors that are equal to those of another message are the same objects.

    Args:
        extras: The extras of a message.
        others: Those of the other message.
    """
    shared: dict[str, Any] = {}
    for name, value in extras.items():
        other = others.get(name)
        shared[name] = value
        if isinstance(value, Mapping) and isinstance(other, Mapping):
            shared[name] = shared_with(dict(value), other)
        elif isinstance(value, Tensor) and isinstance(other, Tensor) and are_equal(value, other):
            shared[name] = other
    return shared


def are_equal(value: Tensor, other: Tensor) -> bool:
    """Return True if two tensors have the same type, device and values."""
    is_alike = (value.dtype, value.device) == (other.dtype, other.device)
    return is_alike and torch.equal(value, other)


PARTS: Mapping[str, type | tuple[type, ...]] = {
    "client": int,
    "version": int,
    "exchange": str,
    "uploads": bool,
    "weights": (Mapping, type(None)),
    "start": (Mapping, type(None)),
    "extras": Mapping,
}
"""The parts of a message in a checkpoint, and the kinds of their values."""


def check_saved(saved: object, shared: State) -> None:
    """Refuse a message of a checkpoint that is none.

    Args:
        saved: The message.
        shared: The shared entries.

    Raises:
        TypeError: The message or a part of it is of another kind.
        ValueError: A part is missing, or an entry is not a shared one.
    """
    remedy = "continue from another checkpoint"
    check_kind(Mapping, "a dict for each client at work", remedy, messages=saved)
    for name, kind in PARTS.items():
        if not isinstance(saved, Mapping) or name not in saved:
            raise ValueError(f"a message of a checkpoint must have the part {name!r}, and this one lacks it; {remedy}")
        if not isinstance(saved[name], kind):
            raise TypeError(
                f"the part {name!r} of a message of a checkpoint must be of another kind, got "
                f"{type(saved[name]).__name__}; {remedy}"
            )
    if not isinstance(saved, Mapping):
        return
    for part in ("weights", "start"):
        entries = saved[part]
        if entries is None:
            continue
        # Only a message with a start of its own may leave out entries, which are frozen.
        is_whole = part == "start" or saved["start"] is None
        expected = {name: value for name, value in shared.items() if is_whole or name in entries}
        update = ClientUpdate(
            client_id=saved["client"], num_samples=0, num_steps=0, accumulated_lr=0.0, weights=entries
        )
        try:
            check_update(update, expected)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"the message of client {saved['client']} in a checkpoint must hold the shared entries, but {error}; "
                f"{remedy}"
            ) from error
