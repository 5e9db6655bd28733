"""Clients of any method that do something besides: their class is derived of a part and the method's own class."""

from typing import Any

from pytorch_lightning import LightningModule

from fl_lightning.client.module import ClientModule

CLASSES: dict[tuple[type[ClientModule], type[ClientModule]], Any] = {}
"""Derived classes, by part and the class of the client."""


def with_part(client: LightningModule, part: type[ClientModule], **settings: Any) -> ClientModule:
    """Make a client do what a part of it says besides what its method does.

    Args:
        client: of any method, or a LightningModule (then FedAvg's); the same object is returned, of another class.
        part: whose methods come before those of the client's class.
        settings: attributes of the part.
    """
    whole = client if isinstance(client, ClientModule) else ClientModule(module=client)
    whole.__class__ = derived(part, type(whole))
    # at coefficients at which it is FedAvg only the plain loss would be called, and the part left out
    for name, value in {"may_be_fedavg_equivalent": False, **settings}.items():
        setattr(whole, name, value)
    return whole


def derived(part: type[ClientModule], base: type[ClientModule]) -> Any:
    """Derive the class of the clients of `base` with a part, once."""

    def reduce(self: Any) -> Any:  # copies and other processes know the class by its two parts
        return empty, (part, base), self.__getstate__()

    if (part, base) not in CLASSES:
        name = f"{part.__name__}{base.__name__}"
        CLASSES[part, base] = type(name, (part, base), {"__reduce__": reduce})
    return CLASSES[part, base]


def empty(part: type[ClientModule], base: type[ClientModule]) -> Any:
    """Make an object of a derived class, without its state."""
    kind = derived(part, base)
    return kind.__new__(kind)
