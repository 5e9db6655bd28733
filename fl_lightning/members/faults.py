"""Faults of clients, rules and servers: their settings, their errors, and which clients a run has left out."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from fl_lightning.aggregation import NormClip, UpdateTransform
from fl_lightning.client.hooks import overridden
from fl_lightning.types import Check, ClientUpdate, Member, RoundOutcome, State
from fl_lightning.utils.settings import check_above, check_choice, check_count
from fl_lightning.utils.tracebacks import place_of, users_lines


class FaultError(RuntimeError):
    """Error for a fault in a round.

    The federation is as it was before that round.
    """


class NonFiniteUpdateError(FaultError):
    """Error for NaN or infinite weights of a client or the rule.

    The global model is that of the round before.
    """


class ClientError(FaultError):
    """Error for a client that failed, in its own code or by what it sent.

    Args:
        sentence: that names client, round, file and line.
        client_id: of the client.
        reason: what happened, without client and round.
        taken_in: whether its result was being taken in, so that it may have left something at the server.
    """

    def __init__(self, sentence: str, client_id: int = -1, reason: str = "", taken_in: bool = False) -> None:
        super().__init__(sentence)
        self.client_id = client_id
        self.reason = reason
        self.taken_in = taken_in


class TransformError(ValueError):
    """Error for transforms of updates that do not go together, which no client is at fault for."""


class Fault(NamedTuple):
    """A client that a round left out, and why."""

    round_idx: int
    client_id: int
    reason: str


@dataclass(frozen=True)
class FaultPolicy:
    """Policy of what happens on faults.

    Args:
        nonfinite: on a client update with NaN or inf, or above `max_update_norm`: `error`, or `skip` that client; on
            such values of the rule or the server optimizer, or a weight below 0: `error`, or `skip` the round.
        on_error: on a client that raises, takes longer than `client_timeout`, or sends something else than the shared
            entries: `error`, or `skip` that client.
        max_update_norm: greatest norm of a client's update over the trainable entries; None: any. It refuses;
            `NormClip` in `transforms` clips.
        min_clients: a round with fewer clients leaves the model as it was; 0 is for a private rule (DPFedAvg), which
            answers every round, with 1, too.
        client_timeout: seconds that a client may train in an exchange, asked between batches; None: any. A round in
            which it counted is not repeated exactly.
        patience: the run ends with an error after so many rounds in a row with every client skipped.

    Raises:
        ValueError: naming the setting, its range and the value.
    """

    nonfinite: Literal["error", "skip"] = "error"
    on_error: Literal["error", "skip"] = "error"
    max_update_norm: float | None = None
    min_clients: int = 1
    client_timeout: float | None = None
    patience: int = 10

    def __post_init__(self) -> None:
        check_choice(("error", "skip"), nonfinite=self.nonfinite, on_error=self.on_error)
        check_above(0, max_update_norm=self.max_update_norm, client_timeout=self.client_timeout)
        check_count(0, min_clients=self.min_clients)
        check_count(1, patience=self.patience)

    @classmethod
    def of(cls, given: "FaultPolicy | str") -> "FaultPolicy":
        """Make a policy of what a user gave: a word is taken for `nonfinite` and `on_error`."""
        if isinstance(given, cls):
            return given
        check_choice(("error", "skip"), faults=given)
        word: Any = given
        return cls(nonfinite=word, on_error=word)

    @property
    def skips(self) -> bool:
        """True where clients may be left out."""
        return "skip" in (self.nonfinite, self.on_error)


class SkippedClients(Member):
    """Names the clients that rounds leave out, and ends a run in which nothing but that happens.

    Args:
        settings: of what happens on faults.

    Attributes:
        skipped: clients that the last round left out, and why.
    """

    def __init__(self, settings: FaultPolicy) -> None:
        self._settings = settings
        self._in_a_row = 0
        self.skipped: list[Fault] = []

    @property
    def is_used(self) -> bool:
        return self._settings.skips or self._settings.min_clients > 1

    def end(self, outcome: RoundOutcome, shared: Sequence[Any]) -> Mapping[str, float]:
        """Count who is skipped: all of the cohort where the round is aborted.

        Raises:
            FaultError: after `patience` rounds with every client skipped.
        """
        reasons = outcome.failed
        if outcome.aborted:
            reasons = {client_id: reasons.get(client_id, outcome.aborted) for client_id in outcome.cohort}
        self.skipped = [Fault(outcome.round_idx, client_id, reason) for client_id, reason in sorted(reasons.items())]
        nobody = len(self.skipped) >= len(outcome.cohort) and bool(outcome.cohort or outcome.aborted)
        self._in_a_row = self._in_a_row + 1 if nobody else 0
        if self._in_a_row >= self._settings.patience:
            rounds = f"{self._settings.patience} round{'s' * (self._settings.patience != 1)}"
            reason = self.skipped[-1].reason if self.skipped else outcome.aborted
            raise FaultError(
                f"every client was skipped for {rounds} in a row (model.faults.patience), up to round "
                f"{outcome.round_idx}: {reason}; mend that, or raise model.faults.patience"
            )
        return {"train/skipped": float(len(self.skipped))}


HINTS = {
    "does not have a grad_fn": "let training_step return a loss with a gradient, without detach, item or no_grad",
    "Expected output to be a torch.Tensor": "let training_step return its loss as a tensor",
    "is out of bounds.": "let the net have an output for each class that the data have (num_classes)",
    "Invalid learning rate": "give the optimizer a learning rate of at least 0",
}
"""Remedies for errors in torch's own words, where no line of the user's is at fault."""


def client_error(client_id: int, round_idx: int, error: Exception, taken_in: bool = False) -> ClientError:
    """Name client, round and the user's own line in one sentence.

    What the package refuses keeps its words.
    """
    text, kind, (place, checked) = " ".join(str(error).split()), type(error).__name__, place_of(error)
    at = f" ({place})" if place else ""
    colon = f": {text}" if text else ""
    if checked:
        sentence = f"{text}; it was client {client_id} in round {round_idx}{at}"
        return ClientError(sentence, client_id, text, taken_in)
    remedy = "set model.faults.on_error to skip"
    if isinstance(error, StopIteration):
        remedy = f"end your own generators by return, or {remedy}"
    elif users_lines(error):
        remedy = f"mend that line, or {remedy}"
    elif hint := next((hint for words, hint in HINTS.items() if words in text), ""):
        remedy = f"{hint}, or {remedy}"
    sentence = f"client {client_id} raised {kind} in round {round_idx}{colon}{at}; {remedy}"
    return ClientError(sentence, client_id, f"{kind}{colon}{at}", taken_in)


def as_raised(error: Exception) -> Exception:
    """Give the error of a run that ends with it: a ValueError or TypeError of the package's own checks stays one."""
    cause: Any = error.__cause__
    if isinstance(error, ClientError) and type(cause) in (ValueError, TypeError) and place_of(cause)[1]:
        raised: Exception = type(cause)(str(error))
        raised.__cause__ = cause
        return raised
    return error


def has_layout(weights: State | None, shared: State) -> bool:
    """Return True where an update holds the shared entries and nothing else, in their shapes and types."""
    if weights is None or weights.keys() != shared.keys():
        return False
    pairs = [(value, weights[name]) for name, value in shared.items()]
    return all(isinstance(v, Tensor) and v.shape == like.shape and v.dtype == like.dtype for like, v in pairs)


def check_tensors(update: ClientUpdate) -> None:
    """Refuse an update whose entries are something else than tensors.

    Raises:
        TypeError: naming the entry.
    """
    for name, value in (update.weights or {}).items():
        if not isinstance(value, Tensor):
            raise TypeError(f"entry {name!r} of an update must be a tensor, got {type(value).__name__}; send a tensor")


def check_update(update: ClientUpdate, shared: State) -> None:
    """Refuse an update whose entries are not the shared ones, before anything of it is added.

    Raises:
        ValueError: naming an entry that is missing, unknown, or of another shape or type.
    """
    weights = update.weights
    if weights is None:
        return
    check_tensors(update)
    for name, wanted in shared.items():
        value = weights.get(name)
        if value is None:
            raise ValueError(f"an update must hold every shared entry, but entry {name!r} is missing; send it")
        if value.shape != wanted.shape:
            raise ValueError(
                f"entry {name!r} of an update must have shape {tuple(wanted.shape)}, got {tuple(value.shape)}; send "
                f"it as it was received"
            )
        if value.dtype != wanted.dtype:
            raise ValueError(
                f"entry {name!r} of an update must be of type {wanted.dtype}, got {value.dtype}; send it as it was "
                f"received"
            )
    if more := weights.keys() - shared.keys():
        raise ValueError(f"an update must hold the shared entries only, but has {min(more)!r} too; send it in extras")


def check_num_samples(update: ClientUpdate, known: int) -> None:
    """Refuse a number of samples that the client cannot have.

    One in a tensor stays on its device, unread.

    Raises:
        TypeError: it is no whole number.
        ValueError: it is below 0, or more than the `known` one.
    """
    n = update.num_samples
    if isinstance(n, Tensor):
        whole = n.ndim == 0 and not (n.is_floating_point() or n.is_complex() or n.dtype == torch.bool)
    else:
        whole = isinstance(n, Integral) and not isinstance(n, bool)
    if not whole:
        raise TypeError(
            f"num_samples of an update must be a whole number, got {n!r}; send the client's training samples"
        )
    if not isinstance(n, Tensor) and not 0 <= n <= known:
        raise ValueError(
            f"num_samples of an update must lie in [0, {known}], the training samples that the client has, got {n}; "
            f"send their number"
        )


def encodes(transform: UpdateTransform) -> bool:
    """Return True for a transform with two sides: what its client sends its server reads."""
    return all(overridden(transform, name, UpdateTransform) for name in ("on_client", "on_server"))


def check_measured(transforms: Iterable[UpdateTransform], max_norm: float | None) -> None:
    """Refuse a bound on what updates moved beside a transform that sends something else than the shared entries.

    Raises:
        TransformError: naming both.
    """
    bounds = [type(transform).__name__ for transform in transforms if isinstance(transform, NormClip)]
    bounds += [] if max_norm is None else [f"model.faults.max_update_norm={max_norm}"]
    if bounds:
        names = [type(t).__name__ for t in transforms if overridden(t, "on_client", UpdateTransform)]
        raise TransformError(
            f"{bounds[0]} bounds how far the shared entries moved, but {' and '.join(names)} sends something else in "
            f"their place; leave one of the two out"
        )


def judge(
    violations: Sequence[Check], round_idx: int, names: tuple[str, str], max_norm: float | None
) -> tuple[dict[int, str], str, str]:
    """Decide who is at fault for values that must not become the model.

    Args:
        violations: the values.
        round_idx: of their round.
        names: of the rule and the server module.
        max_norm: of an update.

    Returns:
        What the clients at fault did, by client id; what is wrong with the rule's weights; and with the aggregate.
    """
    broken: dict[int, str] = {}
    misweighed = aggregate = ""
    miscounted = {client_id for client_id, kind, *_ in violations if kind == "samples"}
    for client_id, kind, value, *_ in violations:
        if kind == "weight":
            if not misweighed and client_id not in miscounted:  # the rule weighs by the count
                misweighed = (
                    f"{names[0]} must give finite weights, but the weight of client {client_id} must be at least 0, "
                    f"got {value} in round {round_idx}; mend its weight()"
                )
        elif kind == "samples":
            broken.setdefault(client_id, f"was given {value:g} samples in round {round_idx}, which it does not have")
        elif kind == "norm":
            limit = f"model.faults.max_update_norm={max_norm}"
            reason = f"returned an update of norm {value:.4g} in round {round_idx}, above {limit}"
            broken.setdefault(client_id, reason)
        elif client_id >= 0:
            broken[client_id] = f"returned NaN or infinite values in round {round_idx}"
        else:
            aggregate = (
                f"the new global weights must be finite, but {names[0]} and {names[1]} made NaN or infinite values of "
                f"finite updates in round {round_idx}; lower the rule's step, or take another aggregator"
            )
    return broken, misweighed, aggregate
