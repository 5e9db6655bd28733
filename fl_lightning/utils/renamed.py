"""Renamed arguments: the old name is refused, with the new one in the sentence."""

from collections.abc import Iterable

RENAMED: dict[str, dict[str, str]] = {
    "FedKA": {"mu": "max_anchors"},
    "FedCL": {"kind": "importance", "scale": "normalization"},
    "FederatedDataModule": {"sets": "extra_splits"},
}
"""New names of arguments by class and old name. Subclasses inherit them."""


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
