"""The two packages of Lightning, `pytorch_lightning` and its twin `lightning.pytorch`, which need not be installed."""

CORE = ("pytorch_lightning.core.", "lightning.pytorch.core.")


def lightning_base(kind: type) -> type:
    """Find the class of Lightning's own that `kind` derives from, whichever package it is of, else `object`.

    >>> from pytorch_lightning.demos.boring_classes import BoringModel
    >>> lightning_base(BoringModel).__name__
    'LightningModule'
    """
    return next((base for base in kind.__mro__ if base.__module__.startswith(CORE)), object)


def distribution_of(kind: type) -> str:
    """Return the name of the installed package whose Lightning `kind` derives from: its own or the twin's.

    >>> from pytorch_lightning.demos.boring_classes import BoringModel
    >>> distribution_of(BoringModel)
    'pytorch_lightning'
    """
    return lightning_base(kind).__module__.partition(".")[0]
