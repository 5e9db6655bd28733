"""Settings of local training, and the decay of its learning rate over the rounds."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, get_args

from fl_lightning.types import ClockKind
from fl_lightning.utils.settings import check_above, check_at_least, check_choice, check_count


@dataclass(frozen=True)
class CosineDecay:
    """Lowers the learning rate along half a cosine from the optimizer's own to `final`, over the first T rounds.

    lr_t = final + (lr − final) · (1 + cos(π t / T)) / 2 for t ≤ T, and final from then on.

    Args:
        final: Learning rate from round T on, ≥ 0.
        rounds: T, ≥ 1. None until a run says its number of rounds.

    Source:
        Loshchilov and Hutter, arXiv:1608.03983, Eq. 5, as in FedCL's code.

    >>> decay = CosineDecay(final=0.02, rounds=4)
    >>> [round(0.1 * decay.factor(t, lr=0.1), 4) for t in (0, 2, 4)]
    [0.1, 0.06, 0.02]
    """

    final: float
    rounds: int | None = None

    def over(self, rounds: int | None) -> "CosineDecay":
        """Return the decay in a run. The decay's own number of rounds goes before the run's.

        Args:
            rounds: Number of rounds of the run. None or -1 is no limit.

        Raises:
            ValueError: The number of rounds is not known.
        """
        if self.rounds is not None:
            return self
        if rounds is None or rounds < 1:
            raise unknown_rounds(rounds)
        return replace(self, rounds=rounds)

    def factor(self, round_idx: int, lr: float) -> float:
        """Return the ratio of the learning rate in a round to the optimizer's own rate.

        Raises:
            ValueError: The number of rounds is not known.
        """
        if self.rounds is None:
            raise unknown_rounds(None)
        if lr == 0:
            return 1.0
        share = (1 + math.cos(math.pi * min(round_idx, self.rounds) / self.rounds)) / 2
        return share + (1 - share) * self.final / lr


@dataclass(frozen=True)
class PowerDecay:
    """Multiplies the learning rate by the same factor in every round: lr_t = lr · base^t.

    Args:
        base: The factor, > 0.

    >>> PowerDecay(0.5).factor(2, lr=0.1)
    0.25
    """

    base: float

    def over(self, rounds: int | None) -> "PowerDecay":
        """Return the decay in a run, which is the same for any number of rounds."""
        return self

    def factor(self, round_idx: int, lr: float) -> float:
        """Return the ratio of the learning rate in a round to the optimizer's own rate."""
        return self.base**round_idx


Decay = CosineDecay | PowerDecay
LRDecay = float | Mapping[str, float] | Decay
"""What `lr_decay` may be: a factor, a cosine by its names, or a decay."""

NO_DECAY = PowerDecay(1.0)


def cosine_of(lr_decay: object) -> Mapping[str, Any] | None:
    """Return the settings of the cosine that `lr_decay` asks for, unchecked, or None if it asks for none."""
    if isinstance(lr_decay, Mapping) and "cosine" in lr_decay:
        return lr_decay
    return None


def parse_decay(lr_decay: LRDecay) -> Decay:
    """Return the decay that a user's `lr_decay` means.

    Args:
        lr_decay: A factor > 0, `{"cosine": final}`, `{"cosine": final, "rounds": T}` or a decay.

    Raises:
        ValueError: `lr_decay` is something else, or a number is out of its range.
        TypeError: A number is something else.
    """
    if isinstance(lr_decay, Decay):
        return lr_decay
    if not isinstance(lr_decay, Mapping):
        check_above(0, "{cosine: FINAL_LR} is half a cosine", lr_decay=lr_decay)
        return PowerDecay(lr_decay)
    cosine = cosine_of(lr_decay)
    if cosine is None or not cosine.keys() <= {"cosine", "rounds"}:
        raise ValueError(
            f"lr_decay must be a factor > 0, {{cosine: FINAL_LR}} or {{cosine: FINAL_LR, rounds: T}}, got "
            f"{dict(lr_decay)}"
        )
    final = cosine["cosine"]
    check_at_least(0, "it is the rate after the last round", cosine=final)
    if "rounds" not in cosine:
        return CosineDecay(final)
    rounds = cosine["rounds"]
    if not is_round_count(rounds):
        raise ValueError(
            f"rounds of lr_decay={{cosine: …}} must be a whole number ≥ 1, got {rounds}; from that round on the "
            f"rate is FINAL_LR"
        )
    return CosineDecay(final, int(rounds))


def is_round_count(rounds: object) -> bool:
    """Return True for a whole number ≥ 1, as an int or a float."""
    if isinstance(rounds, bool) or not isinstance(rounds, int | float):
        return False
    return rounds >= 1 and rounds % 1 == 0


def unknown_rounds(max_epochs: int | None) -> ValueError:
    """Return the error for a cosine over a number of rounds that is not known."""
    return ValueError(
        f"lr_decay={{cosine: …}} needs the number of rounds, got trainer.max_epochs={max_epochs}; set it, or give "
        f"{{cosine: FINAL_LR, rounds: T}}"
    )


@dataclass(frozen=True)
class LocalSettings:
    """Holds the settings of local training.

    Args:
        local_epochs: Passes over a client's samples in a round, ≥ 0. A list gives each client its
            own number.
        max_local_steps: Largest number of optimizer steps of a client in an exchange, ≥ 1. None is
            no limit.
        lr_decay: Decay of the local learning rate over the rounds. With a number > 0 the rate of
            round t is lr · lr_decay^t. `{"cosine": final}` is half a cosine down to the rate
            `final`, over the rounds of the run or over its own, `{"cosine": final, "rounds": T}`.
        accumulate_grad_batches: Batches per local optimizer step, ≥ 1.
        clip_norm: Largest norm of a local gradient, > 0. None does not clip.
        client_timeout: Seconds that a client may train in an exchange, > 0, compared between
            batches. None is no limit.
        seed: Seed of the run, which keys every draw.
        clock: What the schedules of a client's module, and what it asks its Trainer for, cover. `run`
            means all rounds, as if they were one fit of their local epochs, `round` each round by
            itself.

    Attributes:
        decay: The decay that `lr_decay` means.

    Raises:
        ValueError: A setting is out of its range.
        TypeError: A setting is not a number of the right kind.
    """

    local_epochs: int | list[int] = 1
    max_local_steps: int | None = None
    lr_decay: LRDecay = 1.0
    accumulate_grad_batches: int = 1
    clip_norm: float | None = None
    client_timeout: float | None = None
    seed: int = 0
    clock: ClockKind = "run"
    decay: Decay = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        numbers = self.local_epochs if isinstance(self.local_epochs, list) else [self.local_epochs]
        for number in numbers:
            if number is None:
                raise TypeError("local_epochs must be a whole number, got None; leave it out for 1")
            check_count(0, "a list gives each client its own", local_epochs=number)
        check_count(1, max_local_steps=self.max_local_steps, accumulate_grad_batches=self.accumulate_grad_batches)
        # A frozen dataclass has no other way to set an attribute.
        object.__setattr__(self, "decay", parse_decay(self.lr_decay))
        check_above(0, clip_norm=self.clip_norm, client_timeout=self.client_timeout)
        check_choice(get_args(ClockKind), clock=self.clock)

    def over(self, rounds: int | None) -> "LocalSettings":
        """Return the settings in a run.

        Args:
            rounds: Number of rounds of the run. None or -1 is no limit.

        Raises:
            ValueError: The learning rate falls over the rounds of the run, and they have no limit.
        """
        return replace(self, lr_decay=self.decay.over(rounds))

    def epochs_of(self, client_id: int) -> int:
        """Return the number of passes of a client over its samples."""
        if isinstance(self.local_epochs, list):
            return self.local_epochs[client_id]
        return self.local_epochs

    def lr_factor(self, round_idx: int) -> Callable[[float], float] | None:
        """Return the function of a learning rate that gives its factor in a round.

        None means that the rate stays.
        """
        if self.decay == NO_DECAY:
            return None
        return partial(self.decay.factor, round_idx)

    @property
    def max_batches(self) -> int | None:
        """The largest number of batches of a client in an exchange. None is no limit."""
        if self.max_local_steps is None:
            return None
        return self.max_local_steps * self.accumulate_grad_batches
