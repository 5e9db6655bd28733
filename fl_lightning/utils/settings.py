"""Checks of settings: an error names setting, rule, value and what to do; an unset setting (None) passes."""

from collections.abc import Iterable
from typing import Any, TypeVar

from torch.optim import SGD, Optimizer

Value = TypeVar("Value")


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
            raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")


def check_at_least(low: float, hint: str = "", /, **settings: float | None) -> None:
    """Refuse a setting below `low`, or NaN; `hint` ends the sentence.

    Raises:
        ValueError: naming the setting.

    >>> check_at_least(0, "0 is FedAvg", mu=-1.0)
    Traceback (most recent call last):
    ValueError: mu must be at least 0, got -1.0; 0 is FedAvg
    """
    for name, value in settings.items():
        if value is not None and not value >= low:
            raise ValueError(f"{name} must be at least {low}, got {value}{hint and '; ' + hint}")


def check_above(low: float, hint: str = "", /, **settings: float | None) -> None:
    """Refuse a setting that is not above `low`; `hint` ends the sentence.

    Raises:
        ValueError: naming the setting.

    >>> check_above(0, temperature=0)
    Traceback (most recent call last):
    ValueError: temperature must be above 0, got 0
    """
    for name, value in settings.items():
        if value is not None and not value > low:
            raise ValueError(f"{name} must be above {low}, got {value}{hint and '; ' + hint}")


def check_at_most(high: float, hint: str = "", /, **settings: float | None) -> None:
    """Refuse a setting above `high`, or NaN; `hint` ends the sentence.

    Raises:
        ValueError: naming the setting.

    >>> check_at_most(1, share=1.5)
    Traceback (most recent call last):
    ValueError: share must be at most 1, got 1.5
    """
    for name, value in settings.items():
        if value is not None and not value <= high:
            raise ValueError(f"{name} must be at most {high}, got {value}{hint and '; ' + hint}")


def check_below(high: float, hint: str = "", /, **settings: float | None) -> None:
    """Refuse a setting that is not below `high`; `hint` ends the sentence.

    Raises:
        ValueError: naming the setting.

    >>> check_below(1, share=1)
    Traceback (most recent call last):
    ValueError: share must be below 1, got 1
    """
    for name, value in settings.items():
        if value is not None and not value < high:
            raise ValueError(f"{name} must be below {high}, got {value}{hint and '; ' + hint}")


def as_list(value: Any) -> list[Any]:
    """Make a list of a list, of one value or of None.

    >>> as_list([1, 2]), as_list("one"), as_list(None)
    ([1, 2], ['one'], [])
    """
    return list(value) if isinstance(value, list | tuple) else [] if value is None else [value]


def is_plain_sgd(optimizer: Optimizer) -> bool:
    """True for an SGD whose step is −lr · gradient: without momentum, weight decay or maximize.

    >>> import torch
    >>> weights = [torch.nn.Parameter(torch.zeros(1))]
    >>> is_plain_sgd(SGD(weights, lr=0.5)), is_plain_sgd(SGD(weights, lr=0.5, momentum=0.9))
    (True, False)
    """
    if type(optimizer) is not SGD:
        return False
    return not any(group[name] for group in optimizer.param_groups for name in ("momentum", "weight_decay", "maximize"))


def agreed(name: str, given: Value | None, known: Value | None) -> Value | None:
    """Choose the value of a setting that the user gave or the source knows; where both do, it must be the same.

    >>> agreed("num_classes", None, 10)
    10
    """
    if given is not None and known is not None and given != known:
        raise ValueError(f"data.{name} must be that of the source ({known}), got {given}; leave it unset")
    return known if given is None else given
