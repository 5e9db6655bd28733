"""The two packages of Lightning, `pytorch_lightning` and its twin `lightning.pytorch`, which need not be installed."""

LIGHTNING = ("pytorch_lightning.", "lightning.pytorch.")
"""First parts of the names of the modules of both packages."""

CORE = ("pytorch_lightning.core.", "lightning.pytorch.core.")
"""First parts of the names of the modules with the base classes of both packages."""


def lightning_base(kind: type) -> type:
    """Return the class of Lightning's own that `kind` derives from, of either package, else `object`.

    >>> from pytorch_lightning.demos.boring_classes import BoringModel
    >>> lightning_base(BoringModel).__name__
    'LightningModule'
    """
    for base in kind.__mro__:
        if base.__module__.startswith(CORE):
            return base
    return object


def distribution_of(kind: type) -> str:
    """Return the name of the installed package whose Lightning `kind` derives from: its own or the twin's.

    >>> from pytorch_lightning.demos.boring_classes import BoringModel
    >>> distribution_of(BoringModel)
    'pytorch_lightning'
    """
    return lightning_base(kind).__module__.partition(".")[0]


def lightning_kinds(value: object) -> set[str]:
    """Return the names of Lightning's own classes that the class of an object derives from, in either package.

    >>> from pytorch_lightning.callbacks import EarlyStopping
    >>> sorted(lightning_kinds(EarlyStopping("loss")))
    ['Callback', 'EarlyStopping']
    """
    return {base.__name__ for base in type(value).__mro__ if base.__module__.startswith(LIGHTNING)}


def is_of_lightning(value: object, names: str | tuple[str, ...]) -> bool:
    """Return True if an object is of one of Lightning's classes, whichever package the class is of.

    Args:
        value: The object.
        names: Name of a class of Lightning, or several names.

    >>> from pytorch_lightning.callbacks import EarlyStopping
    >>> is_of_lightning(EarlyStopping("loss"), ("ProgressBar", "EarlyStopping")), is_of_lightning(1, "Callback")
    (True, False)
    """
    wanted = (names,) if isinstance(names, str) else names
    return not lightning_kinds(value).isdisjoint(wanted)


def is_of_twin(value: object) -> bool:
    """Return True if the class of an object derives from a class of `lightning.pytorch`.

    >>> from pytorch_lightning.callbacks import EarlyStopping
    >>> is_of_twin(EarlyStopping("loss"))
    False
    """
    return any(base.__module__.startswith("lightning.pytorch.") for base in type(value).__mro__)
