"""Faults of clients, rules and servers: their settings, their errors, and which clients a run has left out."""

import os
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from linecache import getline
from pathlib import Path
from traceback import walk_tb
from typing import NamedTuple

from torch import Tensor

import fl_lightning
from fl_lightning.types import ClientUpdate, State
from fl_lightning.utils.settings import check_above, check_at_least, check_choice

PACKAGE = str(Path(fl_lightning.__file__).parent)
LIBRARIES = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))
"""Folders whose files are not the user's own."""


class FaultError(RuntimeError):
    """Error for a fault in a round; the federation is as it was before that round."""


class NonFiniteUpdateError(FaultError):
    """Error for NaN or infinite weights of a client or the rule; the global model is that of the round before."""


class ClientError(FaultError):
    """Error for a client that failed, in its own code or by what it sent.

    Args:
        sentence: that names client, round, file and line.
        client_id: of the client.
        reason: what happened, without client and round.
    """

    def __init__(self, sentence: str, client_id: int = -1, reason: str = "") -> None:
        super().__init__(sentence)
        self.client_id, self.reason = client_id, reason


class Fault(NamedTuple):
    """A client that a round left out, and why."""

    round_idx: int
    client_id: int
    reason: str


@dataclass(frozen=True)
class FaultSettings:
    """Settings of what happens on faults.

    Args:
        nonfinite: on values that must not become the model: `error`, or `skip` the client, else the round.
        on_error: on a client that raises or sends something else than asked for: `error`, or `skip` it.
        max_update_norm: greatest norm of a client's update; None: any.
        min_clients: a round in which fewer take part leaves the model as it was.
        patience: so many rounds in a row with every client skipped end the run.

    Raises:
        ValueError: naming the setting, its range and the value.
    """

    nonfinite: str = "error"
    on_error: str = "error"
    max_update_norm: float | None = None
    min_clients: int = 1
    patience: int = 10

    def __post_init__(self) -> None:
        check_choice(("error", "skip"), nonfinite=self.nonfinite, on_error=self.on_error)
        check_above(0, max_update_norm=self.max_update_norm)
        check_at_least(1, min_clients=self.min_clients, patience=self.patience)

    @property
    def skips(self) -> bool:
        """True where clients may be left out."""
        return "skip" in (self.nonfinite, self.on_error)


class Patience:
    """Ends a run whose every client is skipped, round after round.

    Args:
        rounds: in a row that end it.
    """

    def __init__(self, rounds: int) -> None:
        self.rounds, self._in_a_row = rounds, 0

    def end_round(self, round_idx: int, size: int, skipped: list[Fault], lost: str) -> None:
        """Count a round with a cohort of `size` clients; `lost` says why it was, or is empty.

        Raises:
            FaultError: naming the last reason.
        """
        everyone = len(skipped) >= size
        self._in_a_row = self._in_a_row + 1 if everyone else 0
        if self._in_a_row >= self.rounds:
            many = f"{self.rounds} round{'s' * (self.rounds != 1)}"
            last = f": {skipped[-1].reason if skipped else lost}"
            raise FaultError(
                f"every client was skipped for {many} in a row (model.patience), up to round {round_idx}{last}; mend "
                f"that, or raise model.patience"
            )


def client_error(client_id: int, round_idx: int, error: Exception) -> ClientError:
    """Name client, round and the user's own line in one sentence; what the package refuses keeps its words."""
    text, kind, (place, own) = " ".join(str(error).split()), type(error).__name__, place_of(error)
    at = f" ({place})" if place else ""
    if own:
        sentence = f"{text}; it was client {client_id} in round {round_idx}{at}"
        return ClientError(sentence, client_id, text)
    said = f": {text}" if text else ""
    hint = "end your own generators by return" if isinstance(error, StopIteration) else "mend that line"
    sentence = f"client {client_id} raised {kind} in round {round_idx}{said}{at}; {hint}, or set model.on_error to skip"
    return ClientError(sentence, client_id, f"{kind}{said}{at}")


def as_raised(error: ClientError) -> Exception:
    """Give the error of a run that ends with it: a ValueError or TypeError of the package's own checks stays one."""
    cause = error.__cause__
    if isinstance(cause, Exception) and type(cause) in (ValueError, TypeError) and place_of(cause)[1]:
        found = type(cause)(str(error))
        found.__cause__ = cause
        return found
    return error


def place_of(error: Exception) -> tuple[str, bool]:
    """Find the user's own line that an error came through last, and whether a check of the package raised it.

    Returns:
        "file, line n", empty where no file of the user's is involved; and True for an error of the package's own.
    """
    frames = [(frame.f_code.co_filename, line) for frame, line in walk_tb(error.__traceback__)]
    users = [(name, line) for name, line in frames if not name.startswith((PACKAGE + os.sep, *LIBRARIES, "<"))]
    checks = isinstance(error, ValueError | TypeError | TimeoutError) and bool(frames)
    own = checks and frames[-1][0].startswith(PACKAGE + os.sep) and getline(*frames[-1]).lstrip().startswith("raise ")
    if not users:
        return ("" if own or not frames else "{}, line {}".format(*frames[-1])), own
    name, line = users[-1]
    relative = os.path.relpath(name)
    return f"{name if relative.startswith('..') else relative}, line {line}", own


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


def skipped_of(round_idx: int, reasons: dict[int, str], cohort: Iterable[int], lost: str) -> list[Fault]:
    """List the clients that a round left out: all of its cohort where the round was lost."""
    if lost:
        reasons = {client_id: reasons.get(client_id, lost) for client_id in cohort}
    return [Fault(round_idx, client_id, reason) for client_id, reason in sorted(reasons.items())]
