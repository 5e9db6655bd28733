"""The two packages of Lightning, `pytorch_lightning` and its twin `lightning.pytorch`, which need not be installed."""

CORE = ("pytorch_lightning.core.", "lightning.pytorch.core.")


def lightning_base(kind: type) -> type:
    """Find the class of Lightning's own that `kind` derives from, whichever package it is of, else `object`.

    >>> from pytorch_lightning.demos.boring_classes import BoringModel
    >>> lightning_base(BoringModel).__name__
    'LightningModule'
    """
    return next((base for base in kind.__mro__ if base.__module__.startswith(CORE)), object)


def is_of_kind(value: object, kind: type) -> bool:
    """Tell whether a value is of a class of `pytorch_lightning`, or of that of the same name in its twin."""
    place = kind.__module__.replace("pytorch_lightning", "lightning.pytorch", 1)
    return isinstance(value, kind) or any(
        (base.__module__, base.__qualname__) == (place, kind.__qualname__) for base in type(value).__mro__
    )
