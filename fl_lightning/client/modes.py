"""Modes of modules: eval mode for a method's own passes over data.

BatchNorm, which mixes the samples of a batch, is here too.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import nn

from fl_lightning.client.metric_states import fresh_metrics, parts_that_count
from fl_lightning.client.services import attach_services

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def mixes_samples(net: nn.Module) -> bool:
    """Return True if a sample's output depends on its batch in eval mode too.

    It does behind a BatchNorm without running statistics.
    """
    return any(isinstance(module, BATCH_NORMS) and module.running_mean is None for module in net.modules())


@contextmanager
def evaluation_mode(client: Any) -> Iterator[None]:
    """Put the client in eval mode within the block, in which it logs nothing.

    It logs nothing whatever services are attached. Its metric objects count anew, and are as before afterwards.

    Args:
        client: A ClientModule.
    """
    modes = [(module, module.training) for module in client.modules()]
    client.eval()
    try:
        with silent(client), fresh_metrics(parts_that_count(client)):
            yield
    finally:
        for module, was_training in modes:
            module.training = was_training


def silent(client: Any) -> AbstractContextManager[None]:
    """Return a context in which the client logs nothing, whatever services are attached.

    Args:
        client: A ClientModule.
    """
    return attach_services(client.lightning_modules(), {"log": _ignore, "log_dict": _ignore})


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
    """Stand in for `log` where nothing is logged."""
