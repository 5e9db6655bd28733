"""Training of a part of the parameters: a phase's `trains`."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from fnmatch import fnmatchcase

from torch import Tensor

from fl_lightning.client.module import ClientModule
from fl_lightning.client.optimizers import frozen


def matching(names: Iterable[str], patterns: tuple[str, ...]) -> set[str]:
    """Choose the names that one of the `fnmatch` patterns matches."""
    return {name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)}


@contextmanager
def only(client: ClientModule, patterns: tuple[str, ...]) -> Iterator[None]:
    """Context in which only the parameters that match the patterns are trained; steps that train none shared are idle.

    Raises:
        ValueError: if the patterns name none.
    """
    progress = client.context.progress
    since = replace(progress)
    with frozen(left_out(client, patterns)):
        yield
    if not matching(client.params(), patterns):
        progress.was_idle(since)


def left_out(client: ClientModule, patterns: tuple[str, ...]) -> list[Tensor]:
    """List the trainable parameters that no pattern names; they lose their gradients.

    Raises:
        ValueError: if the patterns name none.
    """
    params = client.trained()
    trained = matching(params, patterns)
    left = [parameter for name, parameter in params.items() if name not in trained]
    if not trained:
        raise ValueError(
            f"Phase(trains=...) must name trainable parameters, got {patterns}, which match none of {list(params)[:8]}"
        )
    for parameter in left:
        parameter.grad = None
    return left
