"""Checks of signatures: unknown arguments of a constructor, and hooks that the package could not call."""

import inspect
import re
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any, NoReturn, TypeVar, cast

from fl_lightning.utils.renamed import check_not_gone
from fl_lightning.utils.suggestions import MEANT, suggestion

Init = TypeVar("Init", bound=Callable[..., None])

PACKAGE = "fl_lightning."

NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
"""The kinds of parameters that can be given by name."""

POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
"""The kinds of parameters that can be given by place."""

WHERE: dict[str, tuple[str, ...]] = {
    "it is the optimizer's: give the client optimizer=functools.partial(torch.optim.SGD, lr=0.1)": (
        "model.client.optimizer.lr",
        "momentum",
        "weight_decay",
        "nesterov",
        "betas",
    ),
    "it is the server optimizer's: FederatedLoop(..., server_optimizer=functools.partial(torch.optim.SGD, lr=1.0))": (
        "model.server_optimizer.lr",
        "server_momentum",
    ),
    "passes over a client's data are local_epochs of FederatedLoop, rounds max_epochs of the Trainer": (
        "epochs",
        "num_epochs",
        "num_local_epochs",
    ),
    "rounds are epochs of the Trainer: Trainer(max_epochs=...)": ("trainer.max_epochs",),
    "it is {}an argument of FederatedLoop": (
        "model.local_epochs",
        "model.max_local_steps",
        "model.clip_norm",
        "aggregator",
        "server_optimizer",
        "server_module",
        "transforms",
        "lr_decay",
        "chunk",
        "faults",
        "evaluate_clients_every",
        "evaluate_training_every",
    ),
    "it is {}an argument of FederatedDataModule": (
        "num_clients",
        "participation",
        "data.batch_size",
        "data.partition",
        "val_fraction",
        "proxy_size",
        "schedule",
    ),
    "the clients are num_clients and participation of FederatedDataModule": ("data.num_clients", "data.participation"),
    "the clients of a round are {}an argument of FederatedDataModule": ("data.cohort_size",),
    "it is a partition's: FederatedDataModule(..., partition=DirichletPartition(alpha=0.1))": ("data.partition.alpha",),
    "a client takes net= (a function that makes a net) or module= (a LightningModule), a FederatedLoop a client": (
        "model",
        "lightning_module",
        "model.client.net",
        "model.client",
    ),
    "the Trainer is given the data: Trainer(...).fit(loop, datamodule=...)": ("data", "datamodule", "dataloaders"),
    "datasets are given by FederatedDataModule.from_datasets(train, test)": ("train", "test", "data.source"),
    "it is {}an argument of the Trainer: Trainer(...)": (
        "trainer.devices",
        "trainer.accelerator",
        "trainer.logger",
        "precision",
        "strategy",
        "callbacks",
    ),
}
"""Sentences that tell where an argument belongs, each with its settings. The first sentence with a setting counts.

An option of the command line, such as `data.batch_size`, stands for the argument `batch_size` and for the other words
for this option (`OTHER_WORDS`). A name without a point stands for itself. `{}` stands for the name of the argument, if
the user wrote another word for it.
"""


def named_arguments(kind: type) -> list[str]:
    """Return the names of a class's arguments, and of the arguments that the class hands on to its bases."""
    names: list[str] = []
    for parent in kind.__mro__:
        is_ours = parent is kind or parent.__module__.startswith(PACKAGE)
        if is_ours and "__init__" in vars(parent):
            names += parameters_by_name(vars(parent)["__init__"])
    return [name for name in dict.fromkeys(names) if name != "self"]


def parameters_by_name(function: Callable[..., Any]) -> list[str]:
    """Return the names of the parameters that can be given by name."""
    parameters = inspect.signature(function).parameters.values()
    return [parameter.name for parameter in parameters if parameter.kind in NAMED]


def unknown_argument(kind: type, name: str) -> str:
    """Return the sentence that refuses an argument which a class does not have, and tells where it belongs.

    If nothing is known about the name, the sentence lists the arguments of the class.

    Args:
        kind: The class.
        name: The name of the argument.
    """
    refusal = f"{kind.__name__} got an unexpected keyword argument {name!r}"
    place = where_it_belongs(name)
    if place is not None:
        return f"{refusal}; {place}"
    known = named_arguments(kind)
    return f"{refusal}{suggestion(name, known)}; it takes {', '.join(known)}"


def where_it_belongs(name: str) -> str | None:
    """Return the sentence that tells where an argument belongs. None means that nothing is known about the name.

    >>> where_it_belongs("batch_size"), where_it_belongs("local_bs")  # doctest: +NORMALIZE_WHITESPACE
    ('it is an argument of FederatedDataModule', 'it is batch_size, an argument of FederatedDataModule')
    """
    for sentence, settings in WHERE.items():
        for setting in settings:
            argument = setting.rpartition(".")[2]
            if name == argument:
                return sentence.format("")
            if MEANT.get(name) == setting:
                return sentence.format(f"{argument}, ")
    return None


def checks_arguments(init: Init) -> Init:
    """Make a constructor without `**base` refuse unknown and removed arguments in one sentence."""
    known = inspect.signature(init).parameters

    @wraps(init)
    def checked(self: object, *args: Any, **kwargs: Any) -> None:
        for name in kwargs:
            if name not in known:
                refuse_argument(type(self), name)
        init(self, *args, **kwargs)

    return cast(Init, checked)


def refuse_argument(kind: type, name: str) -> NoReturn:
    """Refuse an argument that a class does not have.

    Args:
        kind: The class.
        name: The name of the argument.

    Raises:
        TypeError: Always. The sentence names the remedy.
    """
    check_not_gone(kind, [name])
    raise TypeError(unknown_argument(kind, name))


def check_overrides(kind: type) -> None:
    """Refuse a user's class with a method that cannot be called like the method of the package that it overrides.

    Further arguments with defaults, `*args` and `**kwargs` are allowed. Only plain functions are checked. A method
    that a class of another library also defines, with its own arguments, is not checked.

    Args:
        kind: The class.

    Raises:
        TypeError: A method takes other arguments. The sentence names the method and the right arguments.
    """
    if kind.__module__.startswith(PACKAGE):
        # tests/utils/test_signatures.py checks these classes, so that an import need not.
        return
    ours = [parent for parent in kind.__mro__ if parent.__module__.startswith(PACKAGE)]
    others = kind.__mro__[kind.__mro__.index(ours[-1]) + 1 :]
    contracts: dict[str, Any] = {}
    for parent in ours:
        # A base comes after its subclasses and replaces their methods, because callers rely on the base's arguments.
        contracts.update({name: member for name, member in vars(parent).items() if inspect.isfunction(member)})
    for name, contract in contracts.items():
        owner = next(parent for parent in kind.__mro__ if name in vars(parent))
        if owner in ours or is_method_of(others, name):
            continue
        if not name.startswith("_") or name == "__call__":
            check_call(f"{kind.__name__}.{name}", vars(owner)[name], positional(contract))


def is_method_of(kinds: Iterable[type], name: str) -> bool:
    """Return True if one of the classes defines this method with a fixed number of arguments."""
    return any(positional(vars(kind).get(name)) is not None for kind in kinds)


def positional(function: Any, required: bool = False) -> list[str] | None:
    """Return the names of a method's arguments by place, without self.

    Args:
        function: The method, as its class has it.
        required: Whether arguments with defaults are left out.

    Returns:
        The names. None means that the method takes any number of arguments, or that `function` is no plain function.
    """
    if not inspect.isfunction(function):
        return None
    names = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.VAR_POSITIONAL:
            return None
        has_default = parameter.default is not parameter.empty
        if parameter.kind in POSITIONAL and not (required and has_default):
            names.append(parameter.name)
    return names[1:]


def check_call(name: str, target: object, arguments: Iterable[str] | None, of_object: bool = False) -> None:
    """Refuse a method that cannot be called with these arguments.

    Args:
        name: The method as `Class.method`, for the error.
        target: The method, as its class has it.
        arguments: The names of the arguments, without self. None means that they are not known, and checks nothing.
        of_object: Whether `target` is the method of an object, which gives self.

    Raises:
        TypeError: The method takes other arguments. The sentence names the method and the right arguments.
    """
    bound = of_object or isinstance(target, staticmethod)
    function = target.__func__ if isinstance(target, staticmethod | classmethod) else target
    if arguments is None or not (inspect.isfunction(function) or inspect.ismethod(function)):
        return
    # A decorated method is called through its wrapper, so the wrapper's own signature counts.
    signature = inspect.signature(function, follow_wrapped=False)
    given = list(arguments)
    placed = given if bound else ["self", *given]
    try:
        signature.bind(*placed)
    except TypeError:
        takes = [written(parameter) for parameter in signature.parameters.values()]
        if not bound:
            takes = takes[1:]
        method = name.rpartition(".")[2]
        raise TypeError(
            f"{name} is called with ({', '.join(given)}), but takes ({', '.join(takes)}); define "
            f"{method}({', '.join(['self', *given])})"
        ) from None


def written(parameter: inspect.Parameter) -> str:
    """Return a parameter as it is written, without its annotation and its default."""
    return str(parameter).partition(":")[0].partition("=")[0]


def document_arguments_of(kind: type, base: type) -> None:
    """Add the arguments of a base to the docstring of a class, because `help` shows only the class's own.

    A class without the line `base: …` in its docstring, for the arguments that `**base` takes, stays as it is.

    Args:
        kind: The class whose docstring is changed.
        base: The class whose arguments `**base` takes.
    """
    docstring = inspect.cleandoc(vars(kind).get("__doc__") or "")
    inherited = inspect.cleandoc(vars(base).get("__doc__") or "")
    line = re.search(r"^    base: .*(?:\n {8}.*)*", docstring, re.MULTILINE)
    arguments = re.search(r"^Args:((?:\n {4}.*)+)", inherited, re.MULTILINE)
    if line and arguments:
        kind.__doc__ = docstring[: line.end()] + arguments[1] + docstring[line.end() :]
