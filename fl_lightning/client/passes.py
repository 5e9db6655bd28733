"""A method's own passes over data, apart from training."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pytorch_lightning import LightningModule
from torch import nn


@contextmanager
def evaluation_mode(client: Any) -> Iterator[None]:
    """Put the client in eval mode and log nothing within the block, whatever services are attached.

    Args:
        client: a ClientModule.
    """
    modules: list[LightningModule] = list(client.lightning_modules())
    modes = [(module, module.training) for module in client.modules()]
    names = ("log", "log_dict")
    attached = [{name: vars(module)[name] for name in names if name in vars(module)} for module in modules]
    client.eval()
    try:
        for module in modules:
            vars(module).update(dict.fromkeys(names, _ignore))
        yield
    finally:
        for module, services in zip(modules, attached, strict=True):
            for name in names:
                del vars(module)[name]
            vars(module).update(services)
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
