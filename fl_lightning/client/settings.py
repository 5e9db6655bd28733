"""Settings of local training."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from fl_lightning.client.decay import LRDecay, PowerDecay, check_decay, decay_of
from fl_lightning.utils.settings import check_above, check_count

NO_DECAY = (1.0, PowerDecay(1.0))


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

    @property
    def decays(self) -> bool:
        """True where the local learning rate depends on the round."""
        return self.lr_decay not in NO_DECAY

    def lr_factor(self, round_idx: int) -> Callable[[float], float] | None:
        """Choose the function of a learning rate that gives its factor in a round; None: the rate stays.

        Raises:
            ValueError: a cosine whose rounds are not known.
        """
        if not self.decays:
            return None
        return partial(decay_of(self.lr_decay, None).factor, round_idx)

    @property
    def max_batches(self) -> int | None:
        """Most batches of a client in an exchange; None: any number."""
        return None if self.max_local_steps is None else self.max_local_steps * self.accumulate_grad_batches
