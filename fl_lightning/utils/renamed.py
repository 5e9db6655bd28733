"""Arguments that are gone, and what to set in their place."""

from collections.abc import Iterable

FAULTS = ("nonfinite", "on_error", "max_update_norm", "min_clients", "client_timeout", "patience")
"""Arguments of FederatedLoop that belong to its `faults` now."""

GONE: dict[str, dict[str, str]] = {
    "FederatedLoop": {
        **{name: f"set {{}}faults.{name}" for name in FAULTS},
        "weighting": "set {}aggregator.weighting, of the rule (fl_lightning.aggregation.Aggregator is the mean)",
        "alma_every": "set {}evaluate_clients_every",
        "plateau": (
            "the server steps every ReduceLROnPlateau; a client without it leaves it out of configure_optimizers"
        ),
        "memory_format": "it is chosen; a module of your own keeps the layout that you give it",
        "compile": "torch.compile the module of your own, or a net, before it is given",
    },
    "ClientParallelStrategy": {
        "by_seconds": "leave it out: clients are spread by their samples and the operations of their nets",
    },
}
"""The removed arguments of each class, with the remedy. `{}` stands for the prefix of an option on the command line."""


def instead_of(kind: type, argument: str, prefix: str = "") -> str | None:
    """Return what takes the place of a removed argument. None means that the class never had the argument.

    Args:
        kind: The class, which may be a subclass of the class that had the argument.
        argument: The name of the argument.
        prefix: What comes before the names of the class's arguments on the command line, such as `model.`.

    >>> class FederatedLoop: ...
    >>> instead_of(FederatedLoop, "alma_every", "model."), instead_of(FederatedLoop, "client")
    ('set model.evaluate_clients_every', None)
    """
    for parent in kind.__mro__:
        remedy = GONE.get(parent.__name__, {}).get(argument)
        if remedy is not None:
            return remedy.format(prefix)
    return None


def check_not_gone(kind: type, arguments: Iterable[str]) -> None:
    """Refuse removed arguments of a class.

    Args:
        kind: The class.
        arguments: The names of arguments that the class does not have now.

    Raises:
        TypeError: One of the arguments is gone. The sentence names the remedy.
    """
    for name in arguments:
        remedy = instead_of(kind, name)
        if remedy is not None:
            raise TypeError(f"{kind.__name__}: the argument {name!r} is gone; {remedy}")
