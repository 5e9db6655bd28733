"""Renamed arguments and hooks: the old name is refused, with the new one in the sentence."""

from collections.abc import Iterable

RENAMED: dict[str, dict[str, str]] = {
    "FedKA": {"mu": "max_anchors"},
    "FedCL": {"kind": "importance", "scale": "normalization"},
    "FederatedDataModule": {"sets": "extra_splits"},
    "DatasetSource": {"reading": "loader_spec"},
}
"""New names of arguments by class and old name. Subclasses inherit them."""

HOOKS: dict[str, dict[str, str]] = {
    "ClientModule": {
        "aggregator_class": "server_class (of a ServerModule)",
        "frozen": "load_teacher in receive, and teacher in training_step",
        "looking": "evaluation_mode",
        "remedy": "nonfinite_hint",
    },
    "KnowledgeClient": {"knowledge_of": "predictions", "digest": "distillation_loss"},
    "Aggregator": {
        "asks": "client_statistics",
        "broadcast": "ServerModule.broadcast",
        "gathers": "reduce of a GatheringAggregator",
    },
    "Partition": {"deal_test": "partition_test"},
}
"""Hooks of a class by their old names, and what is defined in their place."""


def new_name(kind: type, argument: str) -> str | None:
    """Look up the new name of a class's argument; None if it was not renamed.

    >>> class FedKA: ...
    >>> class MyFedKA(FedKA): ...
    >>> new_name(MyFedKA, "mu"), new_name(MyFedKA, "beta")
    ('max_anchors', None)
    """
    names = (RENAMED.get(base.__name__, {}).get(argument) for base in kind.__mro__)
    return next(filter(None, names), None)


def refuse_renamed(kind: type, arguments: Iterable[str]) -> None:
    """Refuse arguments under an old name; for constructors that pass arguments on as `**base`.

    Raises:
        TypeError: naming the argument's new name.
    """
    for argument in arguments:
        if new := new_name(kind, argument):
            raise TypeError(f"{kind.__name__}: the argument {argument!r} was renamed to {new!r}")


def refuse_renamed_hooks(kind: type) -> None:
    """Refuse a class that defines a hook under its old name, which is never called.

    Raises:
        TypeError: naming the hook in its place.
    """
    for base in kind.__mro__:
        for old, new in HOOKS.get(base.__name__, {}).items():
            if hasattr(kind, old):
                raise TypeError(f"{kind.__name__} defines {old!r}, in whose place there is now {new}")
