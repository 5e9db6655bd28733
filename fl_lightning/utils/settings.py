"""Checks of settings, whose errors name setting, rule, value and remedy.

An unset setting (None) passes.
"""

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from inspect import signature
from types import FunctionType
from typing import Any, TypeGuard, TypeVar

import numpy as np
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

Value = TypeVar("Value")


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

    Raises:
        TypeError: naming the setting.

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
        if isinstance(value, nn.Module) or (isinstance(value, type) and issubclass(value, nn.Module)):
            hint = "give nets and modules by name (net=, module=)"
        raise TypeError(f"{name} must be a number, got {described(value)}{hint and '; ' + hint}")


MOST_LISTED = 8
"""Most names of clients in a sentence."""


def is_array(value: object) -> TypeGuard[np.ndarray[Any, Any] | Tensor]:
    """Return True for an array of NumPy, which does not multiply with tensors in training, and for several numbers."""
    return isinstance(value, np.ndarray) or (isinstance(value, Tensor) and value.ndim > 0)


def check_whole(hint: str = "", /, **settings: object) -> None:
    """Refuse a setting that is no whole number, with `hint` at the end of the sentence.

    Raises:
        TypeError: naming the setting.

    >>> check_whole(local_epochs=1.5)
    Traceback (most recent call last):
    TypeError: local_epochs must be a whole number, got 1.5
    """
    for name, value in settings.items():
        if value is not None and (is_array(value) or not hasattr(type(value), "__index__")):
            raise TypeError(f"{name} must be a whole number, got {described(value)}{hint and '; ' + hint}")


def check_not_none(**settings: object) -> None:
    """Refuse a number that is None.

    Raises:
        TypeError: naming the setting.

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
        TypeError: naming the setting that is no whole number.
        ValueError: naming the setting that is below `low`.
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
    return f"{', '.join(names[:MOST_LISTED])}{', …' if len(names) > MOST_LISTED else ''}"


def check_kind(kind: type | tuple[type, ...], rule: str, remedy: str, /, **settings: object) -> None:
    """Refuse a setting that is no instance of `kind`.

    Args:
        kind: the class, or classes.
        rule: what the setting must be.
        remedy: ends the sentence.
        settings: by name.

    Raises:
        TypeError: naming the setting.

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
        arguments: with which it is called, such as `parameters`.
        made: what it makes.
        example: of such a function.
        settings: by name.

    Raises:
        TypeError: naming the setting.

    >>> check_factory("x", "a tensor", "torch.relu", activation=nn.ReLU())
    Traceback (most recent call last):
    TypeError: activation must be a function (x) that makes a tensor, got ReLU; give torch.relu
    """
    for name, value in settings.items():
        sentence = f"{name} must be a function ({arguments}) that makes {made}, got {described(value)}"
        if isinstance(value, nn.Module | Optimizer) or not (value is None or callable(value)):
            raise TypeError(f"{sentence}; give {example}")
        function = value
        given = tuple[Any, ...]()
        named = dict[str, Any]()
        while isinstance(function, partial):
            function, given, named = function.func, (*function.args, *given), {**function.keywords, **named}
        try:
            parameters = signature(function) if callable(function) else None
        except (TypeError, ValueError):  # of some built-in functions Python knows no signature
            continue
        try:
            if parameters is not None:
                parameters.bind(*given, *arguments.split(", "), **named)
        except TypeError as error:
            raise TypeError(f"{sentence}, which fails ({error}); give {example}") from None


def check_choice(choices: Iterable[str], /, **settings: object) -> None:
    """Refuse a setting that is none of `choices`.

    Raises:
        ValueError: naming the setting.

    >>> check_choice(("kl", "mse"), distance="l1")
    Traceback (most recent call last):
    ValueError: distance must be one of kl, mse, got 'l1'
    """
    allowed = tuple(choices)
    for name, value in settings.items():
        if value not in allowed:
            raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {described(value)}")


def check_bound(
    holds: Callable[[float, float], bool], relation: str, bound: float, hint: str, settings: Mapping[str, float | None]
) -> None:
    """Refuse settings for which `holds(value, bound)` is false, as the functions below.

    Raises:
        ValueError: naming the setting.
        TypeError: it is no number.
    """
    check_numbers(hint, **settings)
    for name, value in settings.items():
        if value is not None and not holds(value, bound):
            raise ValueError(f"{name} must be {relation} {bound}, got {value}{hint and '; ' + hint}")


def check_at_least(low: float, hint: str = "", /, **settings: float | None) -> None:
    """Refuse a setting below `low`, or NaN, with `hint` at the end of the sentence.

    Raises:
        ValueError: naming the setting.
        TypeError: it is no number.

    >>> check_at_least(0, "0 is FedAvg", mu=-1.0)
    Traceback (most recent call last):
    ValueError: mu must be at least 0, got -1.0; 0 is FedAvg
    """
    check_bound(operator.ge, "at least", low, hint, settings)


def check_above(low: float, hint: str = "", /, **settings: float | None) -> None:
    """Refuse a setting that is not above `low`, with `hint` at the end of the sentence.

    Raises:
        ValueError: naming the setting.
        TypeError: it is no number.

    >>> check_above(0, temperature=0)
    Traceback (most recent call last):
    ValueError: temperature must be above 0, got 0
    """
    check_bound(operator.gt, "above", low, hint, settings)


def check_at_most(high: float, hint: str = "", /, **settings: float | None) -> None:
    """Refuse a setting above `high`, or NaN, with `hint` at the end of the sentence.

    Raises:
        ValueError: naming the setting.
        TypeError: it is no number.

    >>> check_at_most(1, share=1.5)
    Traceback (most recent call last):
    ValueError: share must be at most 1, got 1.5
    """
    check_bound(operator.le, "at most", high, hint, settings)


def check_below(high: float, hint: str = "", /, **settings: float | None) -> None:
    """Refuse a setting that is not below `high`, with `hint` at the end of the sentence.

    Raises:
        ValueError: naming the setting.
        TypeError: it is no number.

    >>> check_below(1, share=1)
    Traceback (most recent call last):
    ValueError: share must be below 1, got 1
    """
    check_bound(operator.lt, "below", high, hint, settings)


def check_inside(low: float, high: float, hint: str = "", /, **settings: float | None) -> None:
    """Refuse a setting that does not lie in (low, high), with `hint` at the end of the sentence.

    Raises:
        ValueError: naming the setting.
        TypeError: it is no number.

    >>> check_inside(0, 1, delta=1.0)
    Traceback (most recent call last):
    ValueError: delta must lie in (0, 1), got 1.0
    """
    check_numbers(hint, **settings)
    for name, value in settings.items():
        if value is not None and not low < value < high:
            raise ValueError(f"{name} must lie in ({low}, {high}), got {value}{hint and '; ' + hint}")


def as_list(value: Any) -> list[Any]:
    """Make a list of a list, of one value or of None.

    >>> as_list([1, 2]), as_list("one"), as_list(None)
    ([1, 2], ['one'], [])
    """
    return list(value) if isinstance(value, list | tuple) else [] if value is None else [value]


def is_plain_sgd(optimizer: Optimizer) -> bool:
    """Tell whether an optimizer is SGD with the step −lr · gradient: no momentum, weight decay or maximize.

    >>> import torch
    >>> weights = [torch.nn.Parameter(torch.zeros(1))]
    >>> is_plain_sgd(SGD(weights, lr=0.5)), is_plain_sgd(SGD(weights, lr=0.5, momentum=0.9))
    (True, False)
    """
    if type(optimizer) is not SGD:
        return False
    return not any(group[name] for group in optimizer.param_groups for name in ("momentum", "weight_decay", "maximize"))


def agreed(name: str, given: Value | None, known: Value | None) -> Value | None:
    """Choose the value of a setting that the user gave or the source knows, and refuse two different ones.

    >>> agreed("num_classes", None, 10)
    10
    """
    if given is not None and known is not None and given != known:
        raise ValueError(f"data.{name} must be that of the source ({known}), got {given}; leave it unset")
    return known if given is None else given
