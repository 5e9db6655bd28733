"""The codec of a federation: the members of a round that code and read messages, at the client and at the server."""

import copy
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from fl_lightning.aggregation import Aggregator, Codec, UpdateTransform
from fl_lightning.functional.state import to_float32
from fl_lightning.functional.traffic import CodedState
from fl_lightning.members.faults import check_update, encodes, has_layout
from fl_lightning.members.weights import GlobalWeights
from fl_lightning.types import Broadcast, ClientJob, ClientResult, Member, ServerView, State
from fl_lightning.utils.settings import described

CODED = "coded:"
"""Beginning of the names of a codec's tensors in a message. The other entries are not coded."""

RESIDUALS = "codec:residuals"
"""Key in a client's memory of what the codec has lost of the client's messages, by exchange and part."""

Draws = Callable[[], torch.Generator]
"""Makes a new generator of a message, which draws the same numbers at the client and at the server."""


class Coding:
    """Codes how far the trained entries of a state have moved, and leaves the other entries as they are.

    The other entries are buffers and parameters that nobody trains. A coded variance of BatchNorm would
    not stay above 0.

    Args:
        codec: The codec of vectors.
        global_weights: The entries, and which of them are trained.
    """

    def __init__(self, codec: Codec, global_weights: GlobalWeights) -> None:
        self.codec = codec
        self._global_weights = global_weights

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the trained entries."""
        return self._global_weights.trainable

    def encode(self, new: State, start: State, draws: Draws, lost: State | None = None) -> tuple[State, State]:
        """Return the message of a state, and what the codec loses of the state.

        If a number is not finite, the message is NaN throughout and nothing more is lost, because no
        codec may hide such a number.

        Args:
            new: The entries to be coded.
            start: The entries from which the trained ones are measured.
            draws: Makes the generator of the message.
            lost: What was lost of earlier messages, by name, added to this one. A missing entry is
                0. None means that what is lost is forgotten.

        Returns:
            The message, and what is lost by name, which is empty if `lost` is None.
        """
        lost_before = self._vector(lost or {}, start)
        change = self._vector(new, start) - self._vector(start, start) + lost_before
        finite = change.isfinite().all()
        change = torch.where(finite, change, torch.nan)
        coded = encoded(self.codec, change, draws())
        trained = set(self.names)
        message = {name: value for name, value in new.items() if name not in trained}
        for name, value in coded.items():
            message[f"{CODED}{name}"] = value
        if lost is None:
            return message, {}
        lost_now = torch.where(finite, change - self.codec.decode(coded, change, draws()), lost_before)
        return message, self._split(lost_now, start)

    def decode(self, message: State, start: State, draws: Draws) -> State:
        """Return the state of a message: the model's entries in their order, then all other entries.

        Args:
            message: The message.
            start: The entries from which the trained ones are measured.
            draws: Makes the generator of the message.

        Raises:
            ValueError: The message is not one of this codec.
        """
        coded = {name.removeprefix(CODED): value for name, value in message.items() if is_coded(name)}
        before = self._vector(start, start)
        change = self._decoded(coded, before, draws)
        like = {name: start[name] for name in self.names}
        state = {name: value for name, value in message.items() if not is_coded(name)}
        for name, value in self._split(before + change, like).items():
            state[name] = value.to(like[name].dtype)
        entries = {name: state[name] for name in self._global_weights.shared if name in state}
        return entries | state

    def _decoded(self, coded: State, like: Tensor, draws: Draws) -> Tensor:
        """Return the vector of a message.

        Args:
            coded: The tensors of the codec.
            like: A vector of the same shape and type.
            draws: Makes the generator of the message.

        Raises:
            ValueError: The message is not one of this codec.
        """
        try:
            vector = self.codec.decode(coded, like, draws())
            if (vector.shape, vector.dtype) != (like.shape, like.dtype):
                raise TypeError(f"{tuple(vector.shape)} of {vector.dtype}")
        except Exception as error:
            # The bytes come from elsewhere, so the codec may raise anything.
            kind = type(self.codec).__name__
            raise ValueError(
                f"a message must be of {kind} over {len(like)} numbers, and this one is not "
                f"({type(error).__name__}: {error}); give all parties the same model.codec"
            ) from error
        return vector

    def _vector(self, state: Mapping[str, Tensor], like: State) -> Tensor:
        """Return the trained entries laid end to end, (n,) in float32 or better.

        Args:
            state: Entries by name. A missing entry is 0.
            like: Entries of the same shapes and types, by name.
        """
        entries = [state[name] if name in state else torch.zeros_like(like[name]) for name in self.names]
        return torch.cat([to_float32(entry.detach()).reshape(-1) for entry in entries])

    def _split(self, vector: Tensor, like: State) -> State:
        """Return the trained entries of a vector, in the shapes of `like`."""
        sizes = [like[name].numel() for name in self.names]
        parts = zip(self.names, torch.split(vector, sizes), strict=True)
        return {name: part.view(like[name].shape) for name, part in parts}


def draws_for(job: ClientJob, part: str) -> Draws:
    """Return the draws of a client's message, keyed so that they are the same where the message is read.

    Args:
        job: The job of the client.
        part: The part of the message: `weights`, or the name of an extra.
    """
    return partial(job.data.generator, f"codec/{job.broadcast.exchange}/{part}")


def start_of(job: ClientJob) -> State:
    """Return the shared entries from which a client started."""
    start = job.broadcast.weights if job.start is None else job.start
    return start or {}


class Encoder(Member):
    """Codes what leaves a client, and keeps what the codec loses in the client's memory.

    Args:
        coding: The coding of the trained entries.
        global_weights: The entries, and which of them are transmitted.
        changes: Names of extras that are changes of a state over the trained entries. A codec with
            feedback codes them, since the next change makes up for what is lost of this one.
            Without feedback they are not coded.
    """

    at_client = True

    def __init__(self, coding: Coding, global_weights: GlobalWeights, changes: Collection[str]) -> None:
        self._coding = coding
        self._global_weights = global_weights
        self._feedback = coding.codec.feedback
        self._changes = changes if self._feedback else ()

    def on_client(self, result: ClientResult) -> ClientResult:
        """Replace the weights, and extras that are changes, by their messages.

        Raises:
            ValueError: The update does not hold the entries that are transmitted.
        """
        update = result.update
        job = result.job
        if update.weights is None or not self._coding.names:
            return result
        start = start_of(job)
        expected = {name: start[name] for name in self._global_weights.transmitted_entries}
        if not has_layout(update.weights, expected):
            check_update(update, expected)
        weights = self._message(job, part="weights", new=update.weights, start=start)
        extras = dict(update.extras)
        if self._changes:
            zero = zeros_of(start, self._coding.names)
            for name in self._changes:
                if name in update.extras:
                    extras[name] = self._message(job, part=name, new=update.extras[name], start=zero)
        return result._replace(update=replace(update, weights=weights, extras=extras))

    def _message(self, job: ClientJob, *, part: str, new: State, start: State) -> State:
        """Return the message of a part, and keep what is lost in the client's memory.

        Args:
            job: The job of the client.
            part: The part of the message: `weights`, or the name of an extra.
            new: The entries to be coded.
            start: The entries from which the trained ones are measured.
        """
        draws = draws_for(job, part)
        if not self._feedback:
            message, _ = self._coding.encode(new, start, draws)
            return message
        residuals = job.memory.get(RESIDUALS, {})
        key = f"{job.broadcast.exchange}/{part}"
        message, lost = self._coding.encode(new, start, draws=draws, lost=residuals.get(key, {}))
        job.memory[RESIDUALS] = {**residuals, key: lost}
        return message


class Decoder(Member):
    """Reads what clients have coded, before any other member of the server.

    Args:
        coding: The coding of the trained entries.
    """

    def __init__(self, coding: Coding) -> None:
        self._coding = coding

    def incoming(self, result: ClientResult) -> ClientResult:
        """Replace messages by the entries that they hold.

        Raises:
            ValueError: A message is not one of this codec.
        """
        update = result.update
        job = result.job
        if update.weights is None or not self._coding.names:
            return result
        start = start_of(job)
        weights = self._coding.decode(update.weights, start, draws_for(job, "weights"))
        zero = zeros_of(start, self._coding.names)
        extras = dict(update.extras)
        for name, value in update.extras.items():
            if isinstance(value, dict) and any(map(is_coded, value)):
                extras[name] = self._coding.decode(value, zero, draws_for(job, name))
        return result._replace(update=replace(update, weights=weights, extras=extras))


def is_coded(name: object) -> bool:
    """Return True for the name of a codec's tensor in a message."""
    return isinstance(name, str) and name.startswith(CODED)


def zeros_of(state: State, names: Iterable[str]) -> State:
    """Return zeros in the shapes and types of the named entries of a state."""
    return {name: torch.zeros_like(state[name]) for name in names}


# --- downwards ---


class DownCoding:
    """Codes the global weights themselves, rounded to the nearest. The server keeps what the codec loses.

    Args:
        codec: The codec of the federation.
        global_weights: The entries, and which of them are trained.
    """

    PURPOSE = "codec/down"
    """Key of the draws of a broadcast."""

    def __init__(self, codec: Codec, global_weights: GlobalWeights) -> None:
        # A codec with feedback rounds to the nearest.
        nearest = copy.copy(codec)
        nearest.feedback = True
        self._coding = Coding(nearest, global_weights)

    def encode(self, shared: State, draws: Draws) -> CodedState:
        """Return the shared entries as they are read from their message, with the message."""
        zero = zeros_of(shared, self._coding.names)
        message, _ = self._coding.encode(shared, zero, draws)
        return CodedState(
            entries=self._coding.decode(message, zero, draws),
            coded={name: value for name, value in message.items() if is_coded(name)},
            names=self._coding.names,
        )

    def decode(self, message: State, like: State, draws: Draws) -> State:
        """Return the entries of a message, in the shapes and types of `like`."""
        if not any(map(is_coded, message)):
            return message
        return self._coding.decode(message, zeros_of(like, self._coding.names), draws)


class CodedBroadcast(Member):
    """Codes the global weights when a round begins, so that every client and the server measure from the same weights.

    Args:
        coding: The coding of the weights.
        server: The server with the global weights.
        send: Makes the server send other weights in this round.
    """

    def __init__(self, coding: DownCoding, server: ServerView, send: Callable[[State], None]) -> None:
        self._coding = coding
        self._server = server
        self._send = send
        self._sent: CodedState | None = None

    def begin(self, round_idx: int, cohort: list[int]) -> None:
        """Code the weights that the round sends."""
        self._sent = None
        if self._server.trainable:
            draws = partial(self._server.generator, DownCoding.PURPOSE)
            self._sent = self._coding.encode(self._server.weights, draws)
            self._send(self._sent)

    def outgoing(self, broadcast: Broadcast, client_id: int) -> Broadcast:
        """Mark weights that hold all coded entries, so that the coded tensors travel."""
        weights = broadcast.weights
        sent = self._sent
        if weights is None or sent is None or weights is sent:
            return broadcast
        if any(weights.get(name) is not sent[name] for name in sent.names):
            return broadcast
        return replace(broadcast, weights=CodedState(entries=weights, coded=sent.coded, names=sent.names))


def encoded(codec: Codec, vector: Tensor, draws: torch.Generator) -> State:
    """Return the message of a vector.

    Args:
        codec: The codec.
        vector: The vector, (n,).
        draws: The generator of the message.

    Raises:
        TypeError: The message is not a dict of tensors.
    """
    message: Any = codec.encode(vector, draws)
    if isinstance(message, dict) and all(isinstance(value, Tensor) for value in message.values()):
        return cast(State, message)
    got: Any = message
    if isinstance(message, dict):
        got = {name: type(value).__name__ for name, value in message.items()}
    raise TypeError(
        f"{type(codec).__name__}.encode must return a dict of tensors by name, whose bytes are counted, got "
        f"{described(got)}; make tensors of its numbers"
    )


# --- checks ---


def check_codec(codec: Codec, rule: Aggregator, transforms: Sequence[UpdateTransform]) -> None:
    """Refuse a codec that hides NaN, and parts of a federation that exclude its codec.

    Args:
        codec: The codec.
        rule: The rule of the federation.
        transforms: The transforms of updates.

    Raises:
        ValueError: The codec hides NaN, or the rule or a transform excludes the codec.
        TypeError: A message of the codec is not a dict of tensors.
    """
    kind = type(codec).__name__
    nans = torch.full((2,), torch.nan)
    message = encoded(codec, nans, torch.Generator().manual_seed(0))
    decoded = codec.decode(message, nans, torch.Generator().manual_seed(0))
    if bool(decoded.isfinite().all()):
        raise ValueError(
            f"an update with NaN must be found behind its codec, and {kind} makes finite numbers of it; let NaN through"
        )
    if codec.is_sparse and rule.is_by_coordinate:
        raise ValueError(
            f"{type(rule).__name__} decides every number by itself, and most of those that {kind} sends may be "
            f"0, which it would take; take QSGD, Sign or FP16, or a rule of whole updates such as KrumAggregator"
        )
    for transform in transforms:
        if encodes(transform):
            raise ValueError(
                f"the codec {kind} codes what a client sends, and {type(transform).__name__} sends something of its "
                f"own that its server side reads; leave one of the two out"
            )
