"""Errors about the class that is the value of an option: there is none, or it is of another kind."""

import re
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from torch import nn

from fl_lightning.cli import classes
from fl_lightning.types import AnyCallback, AnyLogger, TrainableModule
from fl_lightning.utils.suggestions import suggestion
from fl_lightning.utils.tracebacks import place_of

FILE = re.compile(r"(?:\./)*([\w/\\.-]+?)(\.py)?(?:::?(\w+))?")
"""A class in the ways that other programs name it: `folder/module.py:Class`, `module:Class`, `module.py`."""

OF_BOTH_PACKAGES: dict[type, Any] = {
    pl.LightningModule: TrainableModule,
    pl.Callback: AnyCallback,
    pl.loggers.Logger: AnyLogger,
}
"""Types that match classes of `lightning.pytorch`, too, by the base class of `pytorch_lightning`."""


def class_not_named(option: str, base: type) -> str:
    """Refuse an option of a class that was given without the class."""
    return f"its class must be named before the option {option!r}{classes.choice(base)}"


def no_class(given: str, base: type) -> str:
    """Explain why a value names no class, or a class of another kind. The text is empty if the class is of the kind.

    Args:
        given: The value.
        base: The class of which a subclass is needed.
    """
    try:
        kind = classes.find_class(given)
    except Exception as error:
        # The import of a module may raise anything.
        return import_error(given, error)
    if kind is not None:
        return wrong_kind(given, kind, base)
    if given in classes.subclass_names(base):
        return several_classes(given, base)
    missing = classes.missing_module(given)
    if missing:
        beside = [path.stem for path in Path().glob("*.py")]
        near = suggestion(missing, beside) or "; write the import path of the class, such as my_task.MyModule"
        return f"there is no class {given!r}: no module {missing!r} can be imported from {Path.cwd()}{near}"
    form = import_path(given)
    if form:
        return form
    name = given.rpartition(".")[2]
    near = suggestion(given, classes.classes_beside(given)) or suggestion(name, classes.subclass_names(base))
    return f"there is no class {given!r}{near or classes.choice(base)}"


def wrong_kind(given: str, kind: type, base: type) -> str:
    """Refuse a class that is no subclass of what is needed. The text is empty if it is one."""
    taken = classes.taken(base)
    if issubclass(kind, taken) or issubclass(kind, OF_BOTH_PACKAGES.get(base, ())):
        return ""
    wanted = "torch.nn.Module" if taken is nn.Module else base.__name__
    return f"must be a subclass of {wanted}, and {given} is none{classes.choice(base)}"


def several_classes(given: str, base: type) -> str:
    """Refuse a short name that several classes have. The text is empty if only one class has it."""
    paths = classes.same_name(given, base)
    if len(paths) <= 1:
        return ""
    return f"{given!r} names several classes: {', '.join(paths)}; write the import path of the one that is meant"


def import_path(given: str) -> str:
    """Give the import path of a class that was named by its file or with a colon. The text is empty for other names."""
    parts = FILE.fullmatch(given)
    if parts is None:
        return ""
    stem, ending, name = parts.groups()
    path = Path(f"{stem}.py")
    is_file_without_ending = "." not in given and path.is_file()
    if not (ending or name or is_file_without_ending):
        return ""
    defined = classes.classes_in(path) if path.is_file() else []
    if not name and len(defined) == 1:
        name = defined[0]
    module = path.stem if path.is_absolute() else ".".join(path.with_suffix("").parts)
    choice = f"; there are {', '.join(defined)}" if defined and name in (None, "CLASS") else ""
    return f"a class is named by its import path: write {module}.{name or 'CLASS'}, got {given}{choice}"


def import_error(given: str, error: Exception) -> str:
    """Explain why the module of a class cannot be imported, and where."""
    if isinstance(error, ModuleNotFoundError) and error.name:
        reason = f"it needs {error.name}, which is not there; install that module"
    else:
        reason = f"its import raised {type(error).__name__}: {' '.join(str(error).split())}; mend that"
    place = ""
    # The text of a SyntaxError has its place.
    if not isinstance(error, SyntaxError):
        line, _ = place_of(error)
        place = f" ({line})"
    return f"{given} cannot be imported{place}, {reason}"
