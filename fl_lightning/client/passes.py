"""A method's own passes over data, apart from training."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from fl_lightning.client.services import attach_services


@contextmanager
def evaluation_mode(client: Any) -> Iterator[None]:
    """Put the client in eval mode and log nothing within the block, whatever services are attached.

    Args:
        client: a ClientModule.
    """
    modes = [(module, module.training) for module in client.modules()]
    client.eval()
    try:
        with attach_services(client.lightning_modules(), {"log": _ignore, "log_dict": _ignore}):
            yield
    finally:
        for part, mode in modes:
            part.training = mode


@contextmanager
def evaluating(net: nn.Module) -> Iterator[None]:
    """Put a net in eval mode within the block, which is part of a training step."""
    trained = [module for module in net.modules() if module.training]
    for module in trained:
        module.training = False
    try:
        yield
    finally:
        for module in trained:
            module.training = True


def _ignore(*args: Any, **kwargs: Any) -> None:
    """Replacement of `log` where nothing is logged."""
