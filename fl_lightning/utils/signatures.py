"""Checks of signatures: unknown arguments of a constructor, and hooks that the package could not call."""

import inspect
import re
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from functools import wraps
from typing import Any, TypeVar, cast

from fl_lightning.utils.renamed import instead_of

Init = TypeVar("Init", bound=Callable[..., None])

PACKAGE = "fl_lightning."
NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)

WHERE: dict[str, tuple[str, ...]] = {
    "it is the optimizer's: give the client optimizer=functools.partial(torch.optim.SGD, lr=0.1)": (
        *("lr", "learning_rate", "local_lr", "client_lr", "momentum", "weight_decay", "nesterov", "betas"),
    ),
    "it is the server optimizer's: FederatedLoop(..., server_optimizer=functools.partial(torch.optim.SGD, lr=1.0))": (
        *("server_lr", "server_momentum", "global_lr"),
    ),
    "it is an argument of FederatedLoop": (
        *("local_epochs", "max_local_steps", "aggregator", "server_optimizer", "server_module", "transforms"),
        *("clip_norm", "lr_decay", "chunk", "faults", "evaluate_clients_every"),
    ),
    "passes over a client's data are local_epochs of FederatedLoop, rounds max_epochs of the Trainer": (
        *("epochs", "num_epochs", "num_local_epochs"),
    ),
    "rounds are epochs of the Trainer: Trainer(max_epochs=...)": (
        *("rounds", "num_rounds", "n_rounds", "max_rounds", "global_rounds", "max_epochs"),
    ),
    "it is an argument of FederatedDataModule": (
        *("num_clients", "participation", "batch_size", "partition", "val_fraction", "proxy_size", "schedule"),
    ),
    "the clients are num_clients and participation of FederatedDataModule": (
        *("clients", "n_clients", "num_users", "fraction", "fraction_fit", "clients_per_round", "cohort_size"),
    ),
    "it is a partition's: FederatedDataModule(..., partition=DirichletPartition(alpha=0.1))": ("alpha",),
    "a client takes net= (a function that makes a net) or module= (a LightningModule), a FederatedLoop a client": (
        *("model", "network", "backbone", "lightning_module", "net", "module"),
    ),
    "datasets are given by FederatedDataModule.from_datasets(train, test)": (
        *("train", "test", "train_dataset", "test_dataset", "dataset", "datasets"),
    ),
    "the Trainer takes it: Trainer(...)": ("devices", "accelerator", "precision", "strategy", "logger", "callbacks"),
    "the Trainer is given the data: Trainer(...).fit(loop, datamodule=...)": ("data", "datamodule", "dataloaders"),
}
"""Where an argument belongs, by its name, for constructors that do not have it."""


def named_arguments(kind: type) -> list[str]:
    """List the arguments of a class, those that it hands on to its bases too."""
    homes = (parent for parent in kind.__mro__ if parent is kind or parent.__module__.startswith(PACKAGE))
    inits = (vars(parent)["__init__"] for parent in homes if "__init__" in vars(parent))
    parameters = (p.name for init in inits for p in inspect.signature(init).parameters.values() if p.kind in NAMED)
    return list(dict.fromkeys(name for name in parameters if name != "self"))


def unknown_argument(kind: type, name: str) -> str:
    """Report that a class has no such argument, and where it belongs, or what there is."""
    known = named_arguments(kind)
    where = next((place for place, names in WHERE.items() if name in names), "")
    near = "".join(f"the nearest is {close!r}; " for close in get_close_matches(name, known, 1))
    refusal = f"{kind.__name__} got an unexpected keyword argument {name!r}"
    return f"{refusal}; {where or f'{near}it takes ' + ', '.join(known)}"


def checks_arguments(init: Init) -> Init:
    """Make a constructor without `**base` refuse unknown and removed arguments."""
    known = inspect.signature(init).parameters

    @wraps(init)
    def checked(self: object, *args: Any, **kwargs: Any) -> None:
        for name in kwargs:
            if name not in known and (remedy := instead_of(type(self), name)):
                raise TypeError(f"{type(self).__name__}: the argument {name!r} is gone; {remedy}")
            if name not in known:
                raise TypeError(unknown_argument(type(self), name))
        init(self, *args, **kwargs)

    return cast(Init, checked)


def check_overrides(kind: type) -> None:
    """Refuse a user's class with a method that cannot be called as the overridden one is.

    Further arguments with defaults, `*args` and `**kwargs` are allowed. Only plain functions are checked, and none that
    another library's class defines with its own arguments.

    Raises:
        TypeError: naming the method and its right arguments.
    """
    if kind.__module__.startswith(PACKAGE):
        return  # tests/utils/test_signatures.py looks at these, at no cost to an import
    ours = [parent for parent in kind.__mro__ if parent.__module__.startswith(PACKAGE)]
    others = kind.__mro__[kind.__mro__.index(ours[-1]) + 1 :]
    contracts = {name: member for parent in ours for name, member in vars(parent).items() if inspect.isfunction(member)}
    for name, contract in contracts.items():  # of several that of the base
        owner = next(parent for parent in kind.__mro__ if name in vars(parent))
        theirs = any(positional(vars(parent).get(name)) is not None for parent in others)
        if owner not in ours and not theirs and (name[0] != "_" or name == "__call__"):
            check_call(f"{kind.__name__}.{name}", vars(owner)[name], positional(contract))


def positional(function: Any, required: bool = False) -> list[str] | None:
    """List the arguments of a method, or the `required` ones, without self.

    None: any number, or it is no function.
    """
    if not inspect.isfunction(function):
        return None
    parameters = list(inspect.signature(function).parameters.values())
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return None
    return [p.name for p in parameters if p.kind in POSITIONAL and not (required and p.default is not p.empty)][1:]


def check_call(name: str, target: object, arguments: Iterable[str] | None, of_object: bool = False) -> None:
    """Refuse a method that cannot be called with these arguments.

    Args:
        name: `Class.method`, for the error.
        target: the method as its class has it.
        arguments: besides self; None: not known.
        of_object: whether `target` is as an object has it, which gives self.

    Raises:
        TypeError: naming the method and its right arguments.
    """
    bound = of_object or isinstance(target, staticmethod)
    function = target.__func__ if isinstance(target, staticmethod | classmethod) else target
    if arguments is None or not (inspect.isfunction(function) or inspect.ismethod(function)):
        return
    signature = inspect.signature(function, follow_wrapped=False)  # of a decorator's wrapper that which is called
    given = list(arguments)
    try:
        signature.bind(*(given if bound else ["self", *given]))
    except TypeError:
        takes = [str(p).partition(":")[0].partition("=")[0] for p in signature.parameters.values()][not bound :]
        method = name.rpartition(".")[2]
        raise TypeError(
            f"{name} is called with ({', '.join(given)}), but takes ({', '.join(takes)}); define "
            f"{method}({', '.join(['self', *given])})"
        ) from None


def document_arguments_of(kind: type, base: type) -> None:
    """Add a base's arguments to a docstring that has a line `base: …` for them, for `help` has the own only.

    Args:
        kind: the class whose docstring it is.
        base: the class whose arguments `**base` takes.
    """
    docstring, inherited = (inspect.cleandoc(vars(each).get("__doc__") or "") for each in (kind, base))
    line = re.search(r"^    base: .*(?:\n {8}.*)*", docstring, re.MULTILINE)
    arguments = re.search(r"^Args:((?:\n {4}.*)+)", inherited, re.MULTILINE)
    if line and arguments:
        kind.__doc__ = docstring[: line.end()] + arguments[1] + docstring[line.end() :]
