"""The codec of a federation as members of its rounds, in the place of the clients and in that of the server."""

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
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
"""Beginning of the names of a codec's tensors in a message, among the entries that travel as they are."""

RESIDUALS = "codec:residuals"
"""Key in a client's memory of what the codec has lost of its messages, by exchange and part."""

Draws = Callable[[], torch.Generator]
"""Makes the generator of a message anew."""


class Coding:
    """Codes the trained entries of a state by what they moved, and leaves all others as they are.

    Those are buffers, whole numbers (BatchNorm's variance would not stay above 0), and parameters that nobody trains.

    Args:
        codec: of the vectors.
        weights: know the entries and which of them are trained.
    """

    def __init__(self, codec: Codec, weights: GlobalWeights) -> None:
        self.codec = codec
        self._weights = weights

    @property
    def names(self) -> tuple[str, ...]:
        """The trained entries."""
        return self._weights.trainable

    def encode(self, new: State, start: State, draws: Draws, lost: State | None = None) -> tuple[State, State]:
        """Make the message of a state, and what the codec loses of it, where `lost` says what it has lost so far.

        Where something is not finite, all is sent as NaN and nothing more counts as lost: no codec may hide it.

        Args:
            new: entries as they are.
            start: entries that the trained ones are measured from; 0 where there is none.
            draws: of the message.
            lost: by name, 0 where there is none; None: what is lost is forgotten.
        """
        before = self._laid(lost or {}, start)
        vector = self._laid(new, start) - self._laid(start, start) + before
        finite = vector.isfinite().all()
        vector = torch.where(finite, vector, torch.nan)
        coded = encoded(self.codec, vector, draws())
        trained = set(self.names)
        others = {name: value for name, value in new.items() if name not in trained}
        message = {**others, **{f"{CODED}{name}": value for name, value in coded.items()}}
        if lost is None:
            return message, {}
        rest = torch.where(finite, vector - self.codec.decode(coded, vector, draws()), before)
        return message, dict(self._split(rest, start))

    def decode(self, message: State, start: State, draws: Draws) -> State:
        """Read a state, in the order of the model's entries, with whatever else is in the message behind them.

        Raises:
            ValueError: what was sent is not the codec's.
        """
        coded = {n.removeprefix(CODED): value for n, value in message.items() if is_coded(n)}
        before = self._laid(start, start)
        kind = type(self.codec).__name__
        try:
            vector = self.codec.decode(coded, before, draws())
            if (vector.shape, vector.dtype) != (before.shape, before.dtype):
                raise TypeError(f"{tuple(vector.shape)} of {vector.dtype}")
        except Exception as error:  # of bytes from elsewhere nothing is known
            raise ValueError(
                f"a message must be of {kind} over {len(before)} numbers, and this one is not "
                f"({type(error).__name__}: {error}); give all parties the same model.codec"
            ) from error
        like = {name: start[name] for name in self.names}
        moved = self._split(before + vector, like)
        new = {name: value for name, value in message.items() if not is_coded(name)}
        new |= {name: value.to(like[name].dtype) for name, value in moved.items()}
        return {name: new[name] for name in self._weights.shared if name in new} | new

    def _laid(self, state: Mapping[str, Tensor], like: State) -> Tensor:
        """Lay the trained entries end to end, 0 for those that are missing, (n,) in float32 or better."""
        parts = [state[n] if n in state else torch.zeros_like(like[n]) for n in self.names]
        return torch.cat([to_float32(part.detach()).reshape(-1) for part in parts])

    def _split(self, vector: Tensor, like: State) -> dict[str, Tensor]:
        """Cut a vector into the trained entries."""
        sizes = [like[name].numel() for name in self.names]
        parts = zip(self.names, torch.split(vector, sizes), strict=True)
        return {name: part.view(like[name].shape) for name, part in parts}


def drawn_for(job: ClientJob, part: str) -> Draws:
    """Key the draws of a client's message, alike where it is made and where it is read."""
    return partial(job.data.generator, f"codec/{job.broadcast.exchange}/{part}")


def start_of(job: ClientJob) -> State:
    """Choose the shared entries that a client's are measured from: as they were sent, or as it has them."""
    return (job.broadcast.weights if job.start is None else job.start) or {}


class Encoder(Member):
    """Codes what leaves a client, and keeps what the codec loses of it in the client's memory.

    Args:
        coding: of the trained entries.
        weights: know which entries are transmitted.
        changes: names of extras that are changes of a state over the trained entries: they are coded under feedback,
            which makes up for what is lost of one in the next; else they travel as they are.
    """

    at_client = True

    def __init__(self, coding: Coding, weights: GlobalWeights, changes: Collection[str]) -> None:
        self._coding = coding
        self._weights = weights
        self._feedback = coding.codec.feedback
        self._changes = changes if self._feedback else ()

    def on_client(self, result: ClientResult) -> ClientResult:
        """Replace weights, and extras that are changes, by their messages.

        Raises:
            ValueError: an update that does not hold the entries that are transmitted.
        """
        update = result.update
        job = result.job
        if update.weights is None or not self._coding.names:
            return result
        start = start_of(job)
        wanted = {name: start[name] for name in self._weights.transmitted_entries}
        if not has_layout(update.weights, wanted):
            check_update(update, wanted)
        weights = self._coded(job, "weights", update.weights, start)
        zero = {name: torch.zeros_like(start[name]) for name in self._coding.names} if self._changes else {}
        changed = {n: self._coded(job, n, update.extras[n], zero) for n in self._changes if n in update.extras}
        return result._replace(update=replace(update, weights=weights, extras={**update.extras, **changed}))

    def _coded(self, job: ClientJob, part: str, new: State, start: State) -> State:
        """Make the message of a part, and keep what is lost of it."""
        kept = job.memory.get(RESIDUALS, {})
        key = f"{job.broadcast.exchange}/{part}"
        lost = kept.get(key, {}) if self._feedback else None
        message, rest = self._coding.encode(new, start, drawn_for(job, part), lost)
        if self._feedback:
            job.memory[RESIDUALS] = {**kept, key: rest}
        return message


class Decoder(Member):
    """Reads what clients have coded, at the server, before anything looks at it.

    Args:
        coding: of the trained entries.
    """

    def __init__(self, coding: Coding) -> None:
        self._coding = coding

    def incoming(self, result: ClientResult) -> ClientResult:
        """Put the entries in the place of their message.

        Raises:
            ValueError: what was sent is not the codec's.
        """
        update = result.update
        job = result.job
        if update.weights is None or not self._coding.names:
            return result
        start = start_of(job)
        weights = self._coding.decode(update.weights, start, drawn_for(job, "weights"))
        zero = {name: torch.zeros_like(start[name]) for name in self._coding.names}
        coded = {n for n, value in update.extras.items() if isinstance(value, dict) and any(map(is_coded, value))}
        read = {n: self._coding.decode(update.extras[n], zero, drawn_for(job, n)) for n in coded}
        return result._replace(update=replace(update, weights=weights, extras={**update.extras, **read}))


def is_coded(name: object) -> bool:
    """Tell whether something in a message is a codec's."""
    return isinstance(name, str) and name.startswith(CODED)


# --- downwards


class DownCoding:
    """Codes the global weights themselves, to the nearest: what they are besides stays at the server.

    Args:
        codec: of the federation.
        weights: know the entries and which of them are trained.
    """

    PURPOSE = "codec/down"
    """Of its draws."""

    def __init__(self, codec: Codec, weights: GlobalWeights) -> None:
        nearest = copy.copy(codec)
        nearest.feedback = True
        self._coding = Coding(nearest, weights)

    def encode(self, whole: State, draws: Draws) -> CodedState:
        """Code the shared entries."""
        zero = self._zero(whole)
        message, _ = self._coding.encode(whole, zero, draws)
        coded = {name: value for name, value in message.items() if is_coded(name)}
        return CodedState(self._coding.decode(message, zero, draws), coded, self._coding.names)

    def decode(self, message: State, like: State, draws: Draws) -> State:
        """Read the entries of a message, in the shapes and types of `like`."""
        return self._coding.decode(message, self._zero(like), draws) if any(map(is_coded, message)) else message

    def _zero(self, like: State) -> State:
        return {name: torch.zeros_like(like[name]) for name in self._coding.names}


class CodedBroadcast(Member):
    """Sends coded weights, once when a round begins: everybody measures from them.

    Args:
        coding: of the weights.
        server: has the global ones.
        send: begins the round from others.
    """

    def __init__(self, coding: DownCoding, server: ServerView, send: Callable[[State], None]) -> None:
        self._coding = coding
        self._server = server
        self._send = send
        self._sent: CodedState | None = None

    def begin(self, round_idx: int, cohort: list[int]) -> None:
        self._sent = None
        if self._server.trainable:
            self._sent = self._coding.encode(self._server.weights, partial(self._server.generator, DownCoding.PURPOSE))
            self._send(self._sent)

    def outgoing(self, broadcast: Broadcast, client_id: int) -> Broadcast:
        """Mark weights that are a part of those that were coded."""
        weights = broadcast.weights
        sent = self._sent
        if weights is None or sent is None or weights is sent:
            return broadcast
        if any(weights.get(name) is not sent[name] for name in sent.names):
            return broadcast
        return replace(broadcast, weights=CodedState(weights, sent.coded, sent.names))


def encoded(codec: Codec, vector: Tensor, draws: torch.Generator) -> State:
    """Make the message of a vector.

    Raises:
        TypeError: it is something else than tensors by name, whose bytes are counted.
    """
    message: Any = codec.encode(vector, draws)
    if not isinstance(message, dict) or not all(isinstance(value, Tensor) for value in message.values()):
        got = {name: type(value).__name__ for name, value in message.items()} if isinstance(message, dict) else message
        raise TypeError(
            f"{type(codec).__name__}.encode must return a dict of tensors by name, whose bytes are counted, got "
            f"{described(got)}; make tensors of its numbers"
        )
    return cast(State, message)


# --- what goes together


def check_codec(codec: Codec, rule: Aggregator, transforms: Sequence[UpdateTransform]) -> None:
    """Refuse parts that do not go with a codec.

    Raises:
        ValueError: naming both, or a codec that hides NaN.
        TypeError: one whose messages are no dicts of tensors.
    """
    kind = type(codec).__name__
    nothing = torch.full((2,), torch.nan)
    message = encoded(codec, nothing, torch.Generator().manual_seed(0))
    if bool(codec.decode(message, nothing, torch.Generator().manual_seed(0)).isfinite().all()):
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
