"""Checks of settings, whose errors name setting, rule, value and remedy.

An unset setting (None) passes.
"""

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from inspect import signature
from types import FunctionType
from typing import Any, NamedTuple, TypeGuard, TypeVar

import numpy as np
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

Value = TypeVar("Value")

MOST_LISTED = 8
"""Most names of clients in a sentence."""


class SettingError(ValueError):
    """Error for settings with which no client can train, so that no client is at fault and none is skipped."""


def described(value: object) -> str:
    """Describe a value in a few words of a sentence.

    >>> described("sgd"), described(nn.Linear), described(nn.Linear(1, 1)), described([0.5, 1])
    ("'sgd'", 'Linear (the class, not an instance)', 'Linear', '[0.5, 1]')
    """
    if isinstance(value, type):
        return f"{value.__name__} (the class, not an instance)"
    if isinstance(value, FunctionType):
        return f"the function {value.__name__}"
    text = repr(value)
    return text if type(value).__module__ == "builtins" and len(text) <= 60 else type(value).__name__


def check_numbers(hint: str = "", /, **settings: object) -> None:
    """Refuse a setting that is no number, such as text or a module given by position.

    Args:
        hint: End of the sentence.
        settings: The settings by name.

    Raises:
        TypeError: A setting is no number. The sentence names it.

    >>> check_numbers(mu="0.1")
    Traceback (most recent call last):
    TypeError: mu must be a number, got '0.1'
    """
    for name, value in settings.items():
        if is_array(value):
            holds_one_number = math.prod(value.shape) == 1
            remedy = f"give the number in it, {name}.item()" if holds_one_number else "give one number"
            raise TypeError(f"{name} must be a number, got {described(value)}; {remedy}")
        if value is None or hasattr(type(value), "__float__"):
            continue
        is_module_class = isinstance(value, type) and issubclass(value, nn.Module)
        if is_module_class or isinstance(value, nn.Module):
            hint = "give nets and modules by name (net=, module=)"
        raise TypeError(f"{name} must be a number, got {described(value)}{ending(hint)}")


def ending(hint: str) -> str:
    """Return the end of a sentence with a hint, or nothing without a hint."""
    return f"; {hint}" if hint else ""


def is_array(value: object) -> TypeGuard[np.ndarray[Any, Any] | Tensor]:
    """Return True for an array of NumPy, which does not multiply with tensors in training, and for several numbers."""
    return isinstance(value, np.ndarray) or (isinstance(value, Tensor) and value.ndim > 0)


def check_whole(hint: str = "", /, **settings: object) -> None:
    """Refuse a setting that is no whole number, with `hint` at the end of the sentence.

    Raises:
        TypeError: A setting is no whole number. The sentence names it.

    >>> check_whole(local_epochs=1.5)
    Traceback (most recent call last):
    TypeError: local_epochs must be a whole number, got 1.5
    """
    for name, value in settings.items():
        if value is None:
            continue
        if is_array(value) or not hasattr(type(value), "__index__"):
            raise TypeError(f"{name} must be a whole number, got {described(value)}{ending(hint)}")


def check_not_none(**settings: object) -> None:
    """Refuse a number that is None.

    Raises:
        TypeError: A setting is None. The sentence names it.

    >>> check_not_none(delay=None)
    Traceback (most recent call last):
    TypeError: delay must be a number, got None; give one, or leave it out for the default
    """
    for name, value in settings.items():
        if value is None:
            raise TypeError(f"{name} must be a number, got None; give one, or leave it out for the default")


def check_count(low: int, hint: str = "", /, **settings: Any) -> None:
    """Refuse a setting that is no whole number of at least `low`, with `hint` at the end of the sentence.

    Raises:
        TypeError: A setting is no whole number. The sentence names it.
        ValueError: A setting is below `low`. The sentence names it.
    """
    check_whole(hint, **settings)
    check_at_least(low, hint, **settings)


def client_index(value: Any, num_clients: int, *, name: str) -> int:
    """Return the id of a client as Python's own number, whatever whole number it is.

    Args:
        value: The id.
        num_clients: Number of clients N.
        name: Name of the setting.

    Raises:
        TypeError: The value is no whole number.
        ValueError: The id is none in [0, N).

    >>> client_index(np.int64(2), 3, name="client_id")
    2
    """
    is_whole = hasattr(type(value), "__index__") and not isinstance(value, bool) and not is_array(value)
    if not is_whole:
        raise TypeError(
            f"{name} must be the id of a client, got {described(value)}; give a number in [0, {num_clients})"
        )
    index = operator.index(value)
    if index not in range(num_clients):
        raise ValueError(f"{name} must lie in [0, {num_clients}), got {index}; give one of these ids")
    return index


def find_client(word: str, names: Sequence[str], num_clients: int) -> int | None:
    """Return the id of the client that a word means: its name, else the digits of its id. None means no client.

    Args:
        word: The word.
        names: Names of the clients by id. Empty if they have none.
        num_clients: Number of clients N.

    >>> [find_client(word, ["east", "7"], 2) for word in ("7", "east", "1", "west", "2")]
    [1, 0, 1, None, None]
    """
    if word in names:
        return list(names).index(word)
    return int(word) if word.isdecimal() and int(word) < num_clients else None


def listed(names: Sequence[str]) -> str:
    """Return the first few of some names, for a sentence.

    >>> listed(["east", "west"])
    'east, west'
    """
    shown = ", ".join(names[:MOST_LISTED])
    return f"{shown}, …" if len(names) > MOST_LISTED else shown


def check_kind(kind: type | tuple[type, ...], rule: str, remedy: str, /, **settings: object) -> None:
    """Refuse a setting that is no instance of `kind`.

    Args:
        kind: The class, or several classes.
        rule: What the setting must be.
        remedy: End of the sentence.
        settings: The settings by name.

    Raises:
        TypeError: A setting is no instance. The sentence names it.

    >>> check_kind(nn.Module, "a module", "give nn.ReLU()", layer=nn.ReLU)
    Traceback (most recent call last):
    TypeError: layer must be a module, got ReLU (the class, not an instance); give nn.ReLU()
    """
    for name, value in settings.items():
        if value is not None and not isinstance(value, kind):
            raise TypeError(f"{name} must be {rule}, got {described(value)}; {remedy}")


def check_factory(arguments: str, made: str, example: str, /, **settings: object) -> None:
    """Refuse a setting that is no function of these arguments, such as the object that it should make.

    Args:
        arguments: Names of the arguments with which the function is called, such as `parameters`.
        made: What the function makes.
        example: A value that is right.
        settings: The settings by name.

    Raises:
        TypeError: A setting is no such function. The sentence names it.

    >>> check_factory("x", "a tensor", "torch.relu", activation=nn.ReLU())
    Traceback (most recent call last):
    TypeError: activation must be a function (x) that makes a tensor, got ReLU; give torch.relu
    """
    for name, value in settings.items():
        if value is None:
            continue
        sentence = f"{name} must be a function ({arguments}) that makes {made}, got {described(value)}"
        if isinstance(value, nn.Module | Optimizer) or not callable(value):
            raise TypeError(f"{sentence}; give {example}")
        problem = why_not_called(value, arguments.split(", "))
        if problem:
            raise TypeError(f"{sentence}, which fails ({problem}); give {example}")


def why_not_called(function: Callable[..., object], arguments: Sequence[str]) -> str:
    """Return why a function cannot be called with some arguments. The text is empty if it can, or if nobody knows.

    Args:
        function: The function, or a `partial` of it.
        arguments: Names of the arguments, which are given by place.

    >>> why_not_called(lambda x: x, ["x", "y"])
    'too many positional arguments'
    """
    given: list[Any] = []
    named: dict[str, Any] = {}
    while isinstance(function, partial):
        given = [*function.args, *given]
        named = {**function.keywords, **named}
        function = function.func
    try:
        parameters = signature(function)
    except (TypeError, ValueError):
        # Python knows no signature of some built-in functions.
        return ""
    given += arguments
    bind = partial(parameters.bind, **named)
    try:
        bind(*given)
    except TypeError as error:
        return str(error)
    return ""


def check_choice(choices: Iterable[str], /, **settings: object) -> None:
    """Refuse a setting that is none of `choices`.

    Raises:
        ValueError: A setting is none of them. The sentence names it.

    >>> check_choice(("kl", "mse"), distance="l1")
    Traceback (most recent call last):
    ValueError: distance must be one of kl, mse, got 'l1'
    """
    allowed = tuple(choices)
    for name, value in settings.items():
        if value not in allowed:
            raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {described(value)}")


class Bound(NamedTuple):
    """Has a bound of settings.

    Args:
        relation: The words for the relation of a setting to the bound, such as `at least`.
        holds: Returns True if a value, its first argument, has the relation to the bound.
        bound: The bound.
    """

    relation: str
    holds: Callable[[float, float], bool]
    bound: float


def check_bound(limit: Bound, hint: str, settings: Mapping[str, float | None]) -> None:
    """Refuse settings without the relation to a bound.

    Args:
        limit: The bound.
        hint: End of the sentence.
        settings: The settings by name.

    Raises:
        ValueError: A setting does not have the relation. The sentence names it.
        TypeError: A setting is no number.
    """
    check_numbers(hint, **settings)
    for name, value in settings.items():
        if value is not None and not limit.holds(value, limit.bound):
            raise ValueError(f"{name} must be {limit.relation} {limit.bound}, got {value}{ending(hint)}")


def check_at_least(low: float, hint: str = "", /, **settings: float | None) -> None:
    """Refuse a setting below `low`, or NaN, with `hint` at the end of the sentence.

    Raises:
        ValueError: A setting is below `low`, or NaN. The sentence names it.
        TypeError: A setting is no number.

    >>> check_at_least(0, "0 is FedAvg", mu=-1.0)
    Traceback (most recent call last):
    ValueError: mu must be at least 0, got -1.0; 0 is FedAvg
    """
    check_bound(Bound("at least", operator.ge, low), hint, settings)


def check_above(low: float, hint: str = "", /, **settings: float | None) -> None:
    """Refuse a setting that is not above `low`, with `hint` at the end of the sentence.

    Raises:
        ValueError: A setting is not above `low`. The sentence names it.
        TypeError: A setting is no number.

    >>> check_above(0, temperature=0)
    Traceback (most recent call last):
    ValueError: temperature must be above 0, got 0
    """
    check_bound(Bound("above", operator.gt, low), hint, settings)


def check_at_most(high: float, hint: str = "", /, **settings: float | None) -> None:
    """Refuse a setting above `high`, or NaN, with `hint` at the end of the sentence.

    Raises:
        ValueError: A setting is above `high`, or NaN. The sentence names it.
        TypeError: A setting is no number.

    >>> check_at_most(1, share=1.5)
    Traceback (most recent call last):
    ValueError: share must be at most 1, got 1.5
    """
    check_bound(Bound("at most", operator.le, high), hint, settings)


def check_below(high: float, hint: str = "", /, **settings: float | None) -> None:
    """Refuse a setting that is not below `high`, with `hint` at the end of the sentence.

    Raises:
        ValueError: A setting is not below `high`. The sentence names it.
        TypeError: A setting is no number.

    >>> check_below(1, share=1)
    Traceback (most recent call last):
    ValueError: share must be below 1, got 1
    """
    check_bound(Bound("below", operator.lt, high), hint, settings)


def check_inside(low: float, high: float, hint: str = "", /, **settings: float | None) -> None:
    """Refuse a setting that does not lie in (low, high), with `hint` at the end of the sentence.

    Raises:
        ValueError: A setting does not lie in (low, high). The sentence names it.
        TypeError: A setting is no number.

    >>> check_inside(0, 1, delta=1.0)
    Traceback (most recent call last):
    ValueError: delta must lie in (0, 1), got 1.0
    """
    check_numbers(hint, **settings)
    for name, value in settings.items():
        if value is not None and not low < value < high:
            raise ValueError(f"{name} must lie in ({low}, {high}), got {value}{ending(hint)}")


def as_list(value: Any) -> list[Any]:
    """Make a list of a list, of one value or of None.

    >>> as_list([1, 2]), as_list("one"), as_list(None)
    ([1, 2], ['one'], [])
    """
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def is_plain_sgd(optimizer: Optimizer) -> bool:
    """Return True if an optimizer is SGD with the step −lr · gradient: no momentum, weight decay or maximize.

    >>> import torch
    >>> weights = [torch.nn.Parameter(torch.zeros(1))]
    >>> is_plain_sgd(SGD(weights, lr=0.5)), is_plain_sgd(SGD(weights, lr=0.5, momentum=0.9))
    (True, False)
    """
    if type(optimizer) is not SGD:
        return False
    for group in optimizer.param_groups:
        if group["momentum"] or group["weight_decay"] or group["maximize"]:
            return False
    return True


def agreed(name: str, given: Value | None, known: Value | None) -> Value | None:
    """Choose the value of a setting that the user gave or the source knows, and refuse two different values.

    Args:
        name: Name of the setting, below `data`.
        given: The user's value. None is unset.
        known: The source's value. None is unknown.

    Raises:
        ValueError: The two values differ.

    >>> agreed("num_classes", None, 10)
    10
    """
    if given is not None and known is not None and given != known:
        raise ValueError(f"data.{name} must be that of the source ({known}), got {given}; leave it unset")
    return known if given is None else given
