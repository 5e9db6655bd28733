"""Settings of local training, and the decay of its learning rate over the rounds."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from fl_lightning.utils.settings import check_above, check_at_least, check_count


@dataclass(frozen=True)
class CosineDecay:
    """Half a cosine from the optimizer's own learning rate down to `final`, over the first T rounds.

    lr_t = final + (lr − final) · (1 + cos(π t / T)) / 2 for t ≤ T, and final from then on.

    Args:
        final: learning rate from round T on, ≥ 0.
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
        """Ratio of the rate in a round to the optimizer's own rate."""
        share = (1 + math.cos(math.pi * min(round_idx, self.rounds) / self.rounds)) / 2
        return share + (1 - share) * self.final / lr if lr else 1.0


@dataclass(frozen=True)
class PowerDecay:
    """lr_t = lr · base^t.

    >>> PowerDecay(0.5).factor(2, lr=0.1)
    0.25
    """

    base: float

    def factor(self, round_idx: int, lr: float) -> float:
        """Ratio of the rate in a round to the optimizer's own rate."""
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
    """Settings of local training.

    Args:
        local_epochs: passes over a client's data in a round; a list gives each client its own.
        max_local_steps: at most so many optimizer steps per client and exchange.
        lr_decay: the local learning rate of round t is lr · lr_decay^t; or as a `Decay` says.
        accumulate_grad_batches: batches per local optimizer step.
        clip_norm: largest norm of a local gradient; None: not clipped.
        client_timeout: seconds that the training of a client may take in an exchange, asked between batches; None: any.
        seed: keys every draw.

    Raises:
        ValueError: naming the setting, its range and the value.
    """

    local_epochs: int | list[int] = 1
    max_local_steps: int | None = None
    lr_decay: LRDecay = 1.0
    accumulate_grad_batches: int = 1
    clip_norm: float | None = None
    client_timeout: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        epochs = self.local_epochs
        for number in epochs if isinstance(epochs, list) else [epochs]:
            if number is None:
                raise TypeError("local_epochs must be a whole number, got None; leave it out for 1")
            check_count(0, "a list gives each client its own", local_epochs=number)
        check_count(1, max_local_steps=self.max_local_steps, accumulate_grad_batches=self.accumulate_grad_batches)
        check_decay(self.lr_decay)
        check_above(0, clip_norm=self.clip_norm, client_timeout=self.client_timeout)

    def epochs_of(self, client_id: int) -> int:
        """Give the passes of a client over its data."""
        epochs = self.local_epochs
        return epochs[client_id] if isinstance(epochs, list) else epochs

    def lr_factor(self, round_idx: int) -> Callable[[float], float] | None:
        """Choose the function of a learning rate that gives its factor in a round.

        None: the rate stays.

        Raises:
            ValueError: a cosine whose rounds are not known.
        """
        return None if self.lr_decay in NO_DECAY else partial(decay_of(self.lr_decay, None).factor, round_idx)

    @property
    def max_batches(self) -> int | None:
        """Most batches of a client in an exchange.

        None: any number.
        """
        return None if self.max_local_steps is None else self.max_local_steps * self.accumulate_grad_batches
