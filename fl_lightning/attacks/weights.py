"""Attacks that train as they should and send other weights than they have learned."""

from abc import abstractmethod
from collections.abc import Iterable
from typing import Any

import torch
from pytorch_lightning import LightningModule
from torch import Tensor, nn

from fl_lightning.attacks.attack import Attack, attacked
from fl_lightning.client import ClientModule
from fl_lightning.types import ClientData
from fl_lightning.utils.settings import check_above


class WeightAttack(Attack):
    """An attack on the shared trainable weights that are sent; what else is sent and kept stays as it is."""

    @abstractmethod
    def poisoned(self, received: Tensor, trained: Tensor, generator: torch.Generator) -> Tensor:
        """Make what is sent of a weight as it came and as it was trained, all of one shape."""

    def fix_trainable(self, personal: Iterable[str] = ()) -> list[tuple[str, nn.Module, str]]:
        kept = set(personal)
        owners = super().fix_trainable(kept)
        if owners and all(name in kept for name, *_ in owners):
            raise ValueError(
                f"an attack on weights needs clients that share some, but those of {type(self).__name__} share none; "
                f"take label_flip"
            )
        return owners

    def reply(self, exchange: str, local: ClientData) -> dict[str, Any]:
        extras = super().reply(exchange, local)
        if self.is_attacker:
            generator = local.generator("attack")
            with torch.no_grad():
                for name, value in self.params().items():
                    value.copy_(self.poisoned(self.received[name], value, generator))
        return extras


class SignFlip(WeightAttack):
    """Sends x − factor · (y − x) for the received x and the trained y.

    Attributes:
        factor: > 0.
    """

    factor: float = 10.0

    def poisoned(self, received: Tensor, trained: Tensor, generator: torch.Generator) -> Tensor:
        return received - self.factor * (trained - received)


class Noise(WeightAttack):
    """Sends the trained weights with normal noise.

    Attributes:
        std: of the noise, > 0.
    """

    std: float = 1.0

    def poisoned(self, received: Tensor, trained: Tensor, generator: torch.Generator) -> Tensor:
        return trained + self.std * torch.randn(trained.shape, generator=generator).to(trained)


def sign_flip(client: LightningModule, attackers: list[int], factor: float = 10.0) -> ClientModule:
    """Make some clients send x − factor · (y − x) for the received weights x and the trained ones y.

    Args:
        client: of any method that shares weights.
        attackers: ids of the malicious clients.
        factor: > 0.
    """
    check_above(0, factor=factor)
    return attacked(client, SignFlip, attackers, factor=factor)


def noise(client: LightningModule, attackers: list[int], std: float = 1.0) -> ClientModule:
    """Make some clients add normal noise to the weights that they send.

    Args:
        client: of any method that shares weights.
        attackers: ids of the malicious clients.
        std: of the noise, > 0.
    """
    check_above(0, std=std)
    return attacked(client, Noise, attackers, std=std)
