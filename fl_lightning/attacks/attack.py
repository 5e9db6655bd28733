"""Base of the attacks, and the functions that make a client malicious."""

from collections.abc import Iterable
from typing import Any

from pytorch_lightning import LightningModule

from fl_lightning.client import ClientModule
from fl_lightning.client.deriving import with_part
from fl_lightning.types import Broadcast, ClientData, TrainableModule


class Attack(ClientModule):
    """Part of a malicious client, to be derived together with the class of the client, or made by `attacked`.

    Attributes:
        attackers: ids of the malicious clients.
    """

    stackable = False  # some clients attack, others do not
    attackers: frozenset[int] = frozenset()

    @property
    def is_attacker(self) -> bool:
        """Tell whether a malicious client is being trained."""
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
        client: of any method, or a LightningModule (then FedAvg's); the same object is returned, of another class.
        attack: what the malicious ones do.
        attackers: their ids.
        settings: attributes of the attack.

    Raises:
        ValueError: if the client is malicious already, or no attacker is named.
    """
    whole = client if isinstance(client, ClientModule) else ClientModule(module=client)
    ids = frozenset(attackers)
    if isinstance(whole, Attack):
        raise ValueError(f"a client takes one attack, and {type(whole).__name__} has one; give it a plain client")
    if not ids or min(ids) < 0:
        raise ValueError(f"attackers must be the ids of one or more clients, got {sorted(ids)}")
    return with_part(whole, attack, attackers=ids, **settings)
