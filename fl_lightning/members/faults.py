"""Faults of clients, rules and servers: the settings, the errors, and the clients that a run has left out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from fl_lightning.aggregation import NormClip, UpdateTransform
from fl_lightning.client.hooks import overridden
from fl_lightning.types import Check, ClientUpdate, Member, RoundOutcome, State
from fl_lightning.utils.settings import SettingError, check_above, check_choice, check_count
from fl_lightning.utils.tracebacks import place_of, users_lines


class FaultError(RuntimeError):
    """Error for a fault in a round, which leaves the federation as it was before that round."""


class NonFiniteUpdateError(FaultError):
    """Error for NaN or infinite weights of a client or the rule, which leaves the global model as it was."""


class ClientError(FaultError):
    """Error for a client that failed, in its own code or by what it sent.

    Args:
        sentence: The message, with client, round, file and line.
        client_id: The id of the client. -1 if it is not known.
        reason: What happened, without client and round.
        taken_in: Whether the client failed while the server took in its result, so that the client
            may have left something at the server.
    """

    def __init__(self, sentence: str, client_id: int = -1, reason: str = "", taken_in: bool = False) -> None:
        super().__init__(sentence)
        self.client_id = client_id
        self.reason = reason
        self.taken_in = taken_in


class Fault(NamedTuple):
    """A client that a round has left out, with the reason."""

    round_idx: int
    client_id: int
    reason: str


@dataclass(frozen=True)
class FaultPolicy:
    """Decides what happens on faults.

    Args:
        nonfinite: What happens on values that must not become the model. `error` ends the run.
            `skip` leaves out a client whose update has NaN or inf, or is above `max_update_norm`.
            It leaves out the round if the rule or the server optimizer makes such values, or if a
            weight is below 0.
        on_error: What happens on a client that raises, takes longer than `client_timeout`, or does
            not send the shared entries. `error` ends the run, `skip` leaves out the client.
        max_update_norm: Largest norm of a client's update over the trainable entries, > 0. A larger
            update is refused, while `NormClip` in `transforms` clips it. None is no limit.
        min_clients: Smallest number of clients of a round, ≥ 0. A smaller round leaves the model as
            it was. A private rule (DPFedAvg) answers every round with 0 and with 1.
        client_timeout: Seconds that a client may train in an exchange, > 0, compared between
            batches. None is no limit. A round that depends on it cannot be repeated exactly.
        patience: Number of rounds in a row with every client skipped that end the run with an
            error, ≥ 1.

    Raises:
        ValueError: A setting is out of its range.
        TypeError: A setting is not a number.
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
        """Return the policy that a user gave.

        Args:
            given: A policy, or `error` or `skip` for both `nonfinite` and `on_error`.

        Raises:
            ValueError: `given` is another word.
        """
        if isinstance(given, cls):
            return given
        check_choice(("error", "skip"), faults=given)
        word: Any = given
        return cls(nonfinite=word, on_error=word)

    @property
    def skips(self) -> bool:
        """Whether clients may be left out."""
        return "skip" in (self.nonfinite, self.on_error)


class SkipRecord(Member):
    """Records the clients that rounds leave out, and ends a run that skips every client.

    Args:
        settings: The policy of the run.

    Attributes:
        skipped: The clients that the last round left out.
    """

    def __init__(self, settings: FaultPolicy) -> None:
        self.skipped: list[Fault] = []
        self._settings = settings
        self._rounds_in_a_row = 0
        """Number of rounds up to now in which every client was skipped."""

    @property
    def is_used(self) -> bool:
        return self._settings.skips or self._settings.min_clients > 1

    def end(self, outcome: RoundOutcome, shared: Sequence[Any]) -> Mapping[str, float]:
        """Count the skipped clients. An aborted round skips its whole cohort.

        Raises:
            FaultError: Every client was skipped in `patience` rounds in a row.
        """
        reasons = outcome.failed
        if outcome.aborted:
            reasons = {client_id: reasons.get(client_id, outcome.aborted) for client_id in outcome.cohort}
        self.skipped = [Fault(outcome.round_idx, client_id, reason) for client_id, reason in sorted(reasons.items())]
        # A cohort without clients counts only if its round is aborted.
        counts = bool(outcome.cohort or outcome.aborted)
        if counts and len(self.skipped) >= len(outcome.cohort):
            self._rounds_in_a_row += 1
        else:
            self._rounds_in_a_row = 0
        if self._rounds_in_a_row >= self._settings.patience:
            raise self._impatient(outcome)
        return {"train/skipped": float(len(self.skipped))}

    def _impatient(self, outcome: RoundOutcome) -> FaultError:
        """Return the error for a run that has skipped every client for too long."""
        patience = self._settings.patience
        rounds = "1 round" if patience == 1 else f"{patience} rounds"
        reason = self.skipped[-1].reason if self.skipped else outcome.aborted
        return FaultError(
            f"every client was skipped for {rounds} in a row (model.faults.patience), up to round "
            f"{outcome.round_idx}: {reason}; mend that, or raise model.faults.patience"
        )


HINTS = {
    "does not have a grad_fn": "let training_step return a loss with a gradient, without detach, item or no_grad",
    "Expected output to be a torch.Tensor": "let training_step return its loss as a tensor",
    "is out of bounds.": "let the net have an output for each class that the data have (num_classes)",
    "Invalid learning rate": "give the optimizer a learning rate of at least 0",
}
"""Remedies by words of torch's own errors, for errors without a line of the user's code."""


def client_error(client_id: int, round_idx: int | str, error: Exception, taken_in: bool = False) -> ClientError:
    """Return the error of a client that failed, with client, round and the user's line in one sentence.

    Args:
        client_id: The id of the client.
        round_idx: The index of the round, or words for it.
        error: What the client raised. An error of the package's own checks keeps its words.
        taken_in: Whether the client failed while the server took in its result.
    """
    text = " ".join(str(error).split())
    place, is_own_check = place_of(error)
    at = f" ({place})" if place else ""
    if is_own_check:
        sentence = f"{text}; it was client {client_id} in round {round_idx}{at}"
        return ClientError(sentence, client_id=client_id, reason=text, taken_in=taken_in)
    kind = type(error).__name__
    colon = f": {text}" if text else ""
    remedy = "set model.faults.on_error to skip"
    hint = hint_for(error, text)
    if hint:
        remedy = f"{hint}, or {remedy}"
    sentence = f"client {client_id} raised {kind} in round {round_idx}{colon}{at}; {remedy}"
    return ClientError(sentence, client_id=client_id, reason=f"{kind}{colon}{at}", taken_in=taken_in)


def hint_for(error: Exception, text: str) -> str:
    """Return what the user may do about an error of a client, or an empty text if nothing is known.

    Args:
        error: The error.
        text: The message of the error, in one line.
    """
    if isinstance(error, StopIteration):
        return "end your own generators by return"
    if users_lines(error):
        return "mend that line"
    for words, hint in HINTS.items():
        if words in text:
            return hint
    return ""


def as_raised(error: Exception) -> Exception:
    """Return the error that ends a run. A ValueError or TypeError of the package's own checks stays one."""
    cause: Any = error.__cause__
    if not isinstance(error, ClientError) or type(cause) not in (ValueError, TypeError):
        return error
    _, is_own_check = place_of(cause)
    if not is_own_check:
        return error
    raised: Exception = type(cause)(str(error))
    raised.__cause__ = cause
    return raised


def has_layout(weights: State | None, shared: State) -> bool:
    """Return True if an update holds the shared entries and nothing else, in their shapes and types."""
    if weights is None or weights.keys() != shared.keys():
        return False
    for name, expected in shared.items():
        value = weights[name]
        if not isinstance(value, Tensor) or value.shape != expected.shape or value.dtype != expected.dtype:
            return False
    return True


def check_tensors(update: ClientUpdate) -> None:
    """Refuse an update with an entry that is not a tensor.

    Raises:
        TypeError: An entry is not a tensor.
    """
    for name, value in (update.weights or {}).items():
        if not isinstance(value, Tensor):
            raise TypeError(f"entry {name!r} of an update must be a tensor, got {type(value).__name__}; send a tensor")


def check_update(update: ClientUpdate, shared: State) -> None:
    """Refuse an update that does not hold the shared entries, before it is aggregated.

    Args:
        update: The update.
        shared: The shared entries.

    Raises:
        ValueError: An entry is missing, unknown, or of another shape or type.
        TypeError: An entry is not a tensor.
    """
    weights = update.weights
    if weights is None:
        return
    check_tensors(update)
    for name, expected in shared.items():
        value = weights.get(name)
        if value is None:
            raise ValueError(f"an update must hold every shared entry, but entry {name!r} is missing; send it")
        if value.shape != expected.shape:
            raise ValueError(
                f"entry {name!r} of an update must have shape {tuple(expected.shape)}, got {tuple(value.shape)}; send "
                f"it as it was received"
            )
        if value.dtype != expected.dtype:
            raise ValueError(
                f"entry {name!r} of an update must be of type {expected.dtype}, got {value.dtype}; send it as it was "
                f"received"
            )
    unknown = weights.keys() - shared.keys()
    if unknown:
        name = min(unknown)
        raise ValueError(f"an update must hold the shared entries only, but has {name!r} too; send it in extras")


def check_num_samples(update: ClientUpdate, known: int) -> None:
    """Refuse a number of samples that the client cannot have.

    The value of a tensor is not read, since this would wait for the device.

    Args:
        update: The update.
        known: The number of the client's training samples.

    Raises:
        TypeError: The number is no whole number.
        ValueError: The number is below 0 or above `known`.
    """
    num_samples = update.num_samples
    if not is_whole_number(num_samples):
        raise TypeError(
            f"num_samples of an update must be a whole number, got {num_samples!r}; send the client's training samples"
        )
    if not isinstance(num_samples, Tensor) and not 0 <= num_samples <= known:
        raise ValueError(
            f"num_samples of an update must lie in [0, {known}], the training samples that the client has, got "
            f"{num_samples}; send their number"
        )


def is_whole_number(value: object) -> bool:
    """Return True for a whole number, also in a 0-d tensor. A truth value is none."""
    if not isinstance(value, Tensor):
        return isinstance(value, Integral) and not isinstance(value, bool)
    if value.is_floating_point() or value.is_complex() or value.dtype == torch.bool:
        return False
    return value.ndim == 0


def encodes(transform: UpdateTransform) -> bool:
    """Return True for a transform whose client side sends something that its server side reads."""
    return all(overridden(transform, name, UpdateTransform) for name in ("on_client", "on_server"))


def bounds_of_norm(transforms: Sequence[UpdateTransform], max_norm: float | None) -> list[str]:
    """Name the settings that bound how far an update may move the shared entries.

    Args:
        transforms: The transforms of updates.
        max_norm: The setting `max_update_norm`.
    """
    bounds = [type(transform).__name__ for transform in transforms if isinstance(transform, NormClip)]
    if max_norm is not None:
        bounds.append(f"model.faults.max_update_norm={max_norm}")
    return bounds


def check_measured(transforms: Sequence[UpdateTransform], max_norm: float | None) -> None:
    """Refuse a bound on the norm of updates if a transform sends something else than the shared entries.

    Args:
        transforms: The transforms of updates, of which one sends something else.
        max_norm: The setting `max_update_norm`.

    Raises:
        SettingError: There is such a bound.
    """
    bounds = bounds_of_norm(transforms, max_norm)
    if bounds:
        senders = [transform for transform in transforms if overridden(transform, "on_client", UpdateTransform)]
        names = [type(transform).__name__ for transform in senders]
        raise SettingError(
            f"{bounds[0]} bounds how far the shared entries moved, but {' and '.join(names)} sends something else in "
            f"their place; leave one of the two out"
        )


class Judgment(NamedTuple):
    """Decision about values that must not become the model.

    Args:
        broken: By id of each client at fault, what the client did.
        misweighed: What is wrong with the rule's weights. Empty if nothing is.
        aggregate: What is wrong with the aggregate. Empty if nothing is.
    """

    broken: dict[int, str]
    misweighed: str
    aggregate: str


def judge(violations: Sequence[Check], round_idx: int, names: tuple[str, str], max_norm: float | None) -> Judgment:
    """Decide who is at fault for values that must not become the model.

    Args:
        violations: The failed checks.
        round_idx: The index of the round.
        names: Names of the rule and of the server module.
        max_norm: The setting `max_update_norm`.
    """
    rule, server_module = names
    broken: dict[int, str] = {}
    misweighed = ""
    aggregate = ""
    miscounted = {violation.client_id for violation in violations if violation.kind == "samples"}
    for violation in violations:
        client_id = violation.client_id
        value = violation.value
        if violation.kind == "weight":
            # The rule weighs by the number of samples, which may be what is wrong.
            if not misweighed and client_id not in miscounted:
                misweighed = (
                    f"{rule} must give finite weights, but the weight of client {client_id} must be at least 0, "
                    f"got {value} in round {round_idx}; mend its weight()"
                )
        elif violation.kind == "samples":
            broken.setdefault(client_id, f"was given {value:g} samples in round {round_idx}, which it does not have")
        elif violation.kind == "norm":
            limit = f"model.faults.max_update_norm={max_norm}"
            reason = f"returned an update of norm {value:.4g} in round {round_idx}, above {limit}"
            broken.setdefault(client_id, reason)
        elif client_id >= 0:
            broken[client_id] = f"returned NaN or infinite values in round {round_idx}"
        else:
            aggregate = (
                f"the new global weights must be finite, but {rule} and {server_module} made NaN or infinite values "
                f"of finite updates in round {round_idx}; lower the rule's step, or take another aggregator"
            )
    return Judgment(broken=broken, misweighed=misweighed, aggregate=aggregate)
