"""Base of the attacks, and the functions that make a client malicious."""

from collections.abc import Iterable
from typing import Any

from pytorch_lightning import LightningModule

from fl_lightning.client import ClientModule
from fl_lightning.client.deriving import with_part
from fl_lightning.types import Broadcast, ClientData, TrainableModule


class Attack(ClientModule):
    """Makes some clients malicious, as a base in front of the class of the clients.

    `attacked` derives such a class. A class statement with both bases does the same.

    Attributes:
        attackers: The ids of the malicious clients.
    """

    stackable = False  # Some clients attack, others do not.
    attackers: frozenset[int] = frozenset()

    @property
    def is_attacker(self) -> bool:
        """Whether the client that is being trained is malicious."""
        return self.context.client_id in self.attackers

    def receive(self, broadcast: Broadcast, local: ClientData) -> None:
        if max(self.attackers) >= local.num_clients:
            raise ValueError(f"attackers must lie in [0, {local.num_clients}), got {sorted(self.attackers)}")
        super().receive(broadcast, local)


def attacked(
    client: LightningModule | TrainableModule, attack: type[Attack], attackers: Iterable[int], **settings: Any
) -> ClientModule:
    """Make some clients malicious.

    Args:
        client: The client of any method, or a LightningModule, which becomes a client of FedAvg. A client gets another
            class and stays the same object.
        attack: The class of the attack.
        attackers: The ids of the malicious clients.
        settings: The attributes of the attack, by name.

    Returns:
        The client.

    Raises:
        ValueError: The client has an attack already, or no attacker is named.
    """
    whole = client if isinstance(client, ClientModule) else ClientModule(module=client)
    ids = frozenset(attackers)
    if isinstance(whole, Attack):
        raise ValueError(f"a client takes one attack, and {type(whole).__name__} has one; give it a plain client")
    if not ids or min(ids) < 0:
        raise ValueError(f"attackers must be the ids of one or more clients, got {sorted(ids)}")
    return with_part(whole, attack, attackers=ids, **settings)
