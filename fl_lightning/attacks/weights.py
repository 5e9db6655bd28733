"""Attacks that train honestly and send other weights than they have learned."""

from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import replace

import torch
from pytorch_lightning import LightningModule
from torch import Tensor, nn

from fl_lightning.attacks.attack import Attack, attacked
from fl_lightning.client import ClientModule
from fl_lightning.types import Broadcast, ClientData, ClientUpdate, TrainableModule
from fl_lightning.utils.settings import check_above


class WeightAttack(Attack):
    """Poisons the shared trainable weights that a client sends. The rest that it sends or keeps is honest.

    The attack replaces the output of an honest client's transforms.
    """

    @abstractmethod
    def poisoned(self, received: Tensor, trained: Tensor, generator: torch.Generator) -> Tensor:
        """Return the entry that is sent in place of a trained one.

        Args:
            received: The entry as the client received it.
            trained: The entry as the client's transforms send it, of the same shape.
            generator: The generator of the attack's draws in this round.
        """

    def fix_trainable(self, personal: Iterable[str] = ()) -> list[tuple[str, nn.Module, str]]:
        kept = set(personal)
        owners = super().fix_trainable(kept)
        if owners and all(name in kept for name, *_ in owners):
            raise ValueError(
                f"an attack on weights needs clients that share some, but those of {type(self).__name__} share none; "
                f"take label_flip"
            )
        return owners

    def transmitted(self, update: ClientUpdate, broadcast: Broadcast, local: ClientData) -> ClientUpdate:
        """Poison the weights that a malicious client sends, after its transforms.

        Raises:
            ValueError: A transform has taken the weights out of the message.
        """
        sent = super().transmitted(update, broadcast, local)
        if sent.client_id not in self.attackers or not broadcast.uploads:
            return sent
        if sent.weights is None:
            raise ValueError(
                f"{type(self).__name__} poisons the weights that are sent, but a transform sends something else in "
                f"their place; leave one of the two out"
            )
        generator = local.generator("attack")
        received = self.received
        poisoned = {name: self.poisoned(received[name], sent.weights[name], generator) for name in self.params()}
        return replace(sent, weights={**sent.weights, **poisoned})


class SignFlip(WeightAttack):
    """Sends x − factor · (y − x) for the received x and the trained y.

    Attributes:
        factor: The length of the step back, as a multiple of the trained one, > 0.
    """

    factor: float = 10.0

    def poisoned(self, received: Tensor, trained: Tensor, generator: torch.Generator) -> Tensor:
        return received - self.factor * (trained - received)


class Noise(WeightAttack):
    """Sends the trained weights with normal noise.

    Attributes:
        std: The standard deviation of the noise, > 0.
    """

    std: float = 1.0

    def poisoned(self, received: Tensor, trained: Tensor, generator: torch.Generator) -> Tensor:
        return trained + self.std * torch.randn(trained.shape, generator=generator).to(trained)


def sign_flip(client: LightningModule | TrainableModule, attackers: list[int], factor: float = 10.0) -> ClientModule:
    """Make some clients send x − factor · (y − x) for the received weights x and the trained ones y.

    Args:
        client: The client of any method that shares weights.
        attackers: The ids of the malicious clients.
        factor: The length of the step back, as a multiple of the trained one, > 0.
    """
    check_above(0, factor=factor)
    return attacked(client, SignFlip, attackers, factor=factor)


def noise(client: LightningModule | TrainableModule, attackers: list[int], std: float = 1.0) -> ClientModule:
    """Make some clients add normal noise to the weights that they send.

    Args:
        client: The client of any method that shares weights.
        attackers: The ids of the malicious clients.
        std: The standard deviation of the noise, > 0.
    """
    check_above(0, std=std)
    return attacked(client, Noise, attackers, std=std)
