"""Settings of local training, and the decay of its learning rate over the rounds."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from fl_lightning.utils.settings import check_above, check_at_least, check_count


@dataclass(frozen=True)
class CosineDecay:
    """Lowers the learning rate along half a cosine from the optimizer's own to `final`, over the first T rounds.

    lr_t = final + (lr − final) · (1 + cos(π t / T)) / 2 for t ≤ T, and final from then on.

    Args:
        final: Learning rate from round T on, ≥ 0.
        rounds: T, ≥ 1.

    Source:
        Loshchilov and Hutter, arXiv:1608.03983, Eq. 5, as in FedCL's code.

    >>> decay = CosineDecay(final=0.02, rounds=4)
    >>> [round(0.1 * decay.factor(t, lr=0.1), 4) for t in (0, 2, 4)]
    [0.1, 0.06, 0.02]
    """

    final: float
    rounds: int

    def factor(self, round_idx: int, lr: float) -> float:
        """Return the ratio of the learning rate in a round to the optimizer's own rate."""
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

    def factor(self, round_idx: int, lr: float) -> float:
        """Return the ratio of the learning rate in a round to the optimizer's own rate."""
        return self.base**round_idx


Decay = CosineDecay | PowerDecay
LRDecay = float | Mapping[str, float] | Decay
NO_DECAY = (1.0, PowerDecay(1.0))


def check_decay(lr_decay: LRDecay) -> None:
    """Refuse what is neither a factor nor `{cosine: FINAL_LR}`, with or without `rounds`.

    Raises:
        ValueError: naming the rule and the value.
    """
    if isinstance(lr_decay, Mapping):
        if not {"cosine"} <= set(lr_decay) <= {"cosine", "rounds"}:
            raise ValueError(
                f"lr_decay must be a factor > 0, {{cosine: FINAL_LR}} or {{cosine: FINAL_LR, rounds: T}}, got "
                f"{dict(lr_decay)}"
            )
        check_at_least(0, "it is the rate after the last round", cosine=lr_decay["cosine"])
        rounds = lr_decay.get("rounds", 1)
        if isinstance(rounds, bool) or not isinstance(rounds, int | float) or not (rounds >= 1 and rounds % 1 == 0):
            raise ValueError(
                f"rounds of lr_decay={{cosine: …}} must be a whole number ≥ 1, got {rounds}; from that round on the "
                f"rate is FINAL_LR"
            )
    elif not isinstance(lr_decay, Decay):
        check_above(0, "{cosine: FINAL_LR} is half a cosine", lr_decay=lr_decay)


def decay_of(lr_decay: LRDecay, rounds: int | None) -> Decay:
    """Make the decay of a run.

    Args:
        lr_decay: a factor, `{"cosine": final}` with or without its own `rounds`, or a decay.
        rounds: T of a cosine that does not say it, or None or -1: the run has no last round.

    Raises:
        ValueError: a cosine over rounds without end.
    """
    if isinstance(lr_decay, Mapping):
        total = lr_decay.get("rounds", rounds)
        if total is None or total < 1:
            raise ValueError(
                f"lr_decay={{cosine: …}} needs the number of rounds, got trainer.max_epochs={rounds}; set it, or give "
                f"{{cosine: FINAL_LR, rounds: T}}"
            )
        return CosineDecay(lr_decay["cosine"], int(total))
    return PowerDecay(lr_decay) if isinstance(lr_decay, int | float) else lr_decay


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

    def __post_init__(self) -> None:
        numbers = self.local_epochs if isinstance(self.local_epochs, list) else [self.local_epochs]
        for number in numbers:
            if number is None:
                raise TypeError("local_epochs must be a whole number, got None; leave it out for 1")
            check_count(0, "a list gives each client its own", local_epochs=number)
        check_count(1, max_local_steps=self.max_local_steps, accumulate_grad_batches=self.accumulate_grad_batches)
        check_decay(self.lr_decay)
        check_above(0, clip_norm=self.clip_norm, client_timeout=self.client_timeout)

    def epochs_of(self, client_id: int) -> int:
        """Return the number of passes of a client over its samples."""
        if isinstance(self.local_epochs, list):
            return self.local_epochs[client_id]
        return self.local_epochs

    def lr_factor(self, round_idx: int) -> Callable[[float], float] | None:
        """Return the function of a learning rate that gives its factor in a round.

        None means that the rate stays.

        Raises:
            ValueError: The number of rounds of a cosine is not known.
        """
        return None if self.lr_decay in NO_DECAY else partial(decay_of(self.lr_decay, None).factor, round_idx)

    @property
    def max_batches(self) -> int | None:
        """The largest number of batches of a client in an exchange. None is no limit."""
        if self.max_local_steps is None:
            return None
        return self.max_local_steps * self.accumulate_grad_batches
