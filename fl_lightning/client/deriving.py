"""Clients with an additional part: their class derives from the part and the class of a method."""

from typing import Any

from pytorch_lightning import LightningModule

from fl_lightning.client.module import ClientModule
from fl_lightning.types import TrainableModule

CLASSES: dict[tuple[type[ClientModule], type[ClientModule]], Any] = {}
"""Derived classes, by the part and the class of the client."""


def with_part(client: LightningModule | TrainableModule, part: type[ClientModule], **settings: Any) -> ClientModule:
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


def check_parts(client: ClientModule) -> None:
    """Refuse a client whose parts are bypassed by methods that are set on the object itself.

    Raises:
        ValueError: Such a method is set.
    """
    for (part, base), kind in CLASSES.items():
        if type(client) is not kind:
            continue
        bypassed = sorted(name for name in vars(client) if is_work(part, name))
        if bypassed:
            raise ValueError(
                f"{part.__name__} does its work in {bypassed[0]}, and {bypassed[0]} set on the {base.__name__} itself "
                f"takes its place; define it in a class, or set it on the LightningModule in module="
            )


def is_work(part: type[ClientModule], name: str) -> bool:
    """Return True if a part has a method of this name that is not the one of every client."""
    method = getattr(part, name, None)
    return callable(method) and method is not getattr(ClientModule, name, None)


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
