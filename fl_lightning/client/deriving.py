"""Clients with an additional part: their class derives from the part and the class of a method."""

from typing import Any

from pytorch_lightning import LightningModule

from fl_lightning.client.module import ClientModule

CLASSES: dict[tuple[type[ClientModule], type[ClientModule]], Any] = {}
"""Derived classes, by the part and the class of the client."""


def with_part(client: LightningModule, part: type[ClientModule], **settings: Any) -> ClientModule:
    """Let a client do the work of a part besides that of its method.

    Args:
        client: A client of any method, which is returned as an object of another class. Another LightningModule becomes
            a client of FedAvg.
        part: The class whose methods come before those of the client's class.
        settings: The attributes of the part.
    """
    derived_client = client if isinstance(client, ClientModule) else ClientModule(module=client)
    derived_client.__class__ = derived(part, type(derived_client))
    # A client that is equivalent to FedAvg would only call the plain loss, and not the part.
    derived_client.may_be_fedavg_equivalent = False
    for name, value in settings.items():
        setattr(derived_client, name, value)
    return derived_client


def derived(part: type[ClientModule], base: type[ClientModule]) -> Any:
    """Return the class that derives from a part and the class of a client. It is made once.

    Args:
        part: The class of the part.
        base: The class of the client.
    """
    if (part, base) not in CLASSES:
        # Copies and other processes find the class by the two classes that it derives from.
        def reduce(self: Any) -> Any:
            return empty, (part, base), self.__getstate__()

        name = f"{part.__name__}{base.__name__}"
        CLASSES[part, base] = type(name, (part, base), {"__reduce__": reduce})
    return CLASSES[part, base]


def empty(part: type[ClientModule], base: type[ClientModule]) -> Any:
    """Make an object of a derived class, without its state.

    Args:
        part: The class of the part.
        base: The class of the client.
    """
    kind = derived(part, base)
    return kind.__new__(kind)
