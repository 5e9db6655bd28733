"""Modes of modules: eval mode for a method's own passes over data.

BatchNorm, which mixes samples of a batch.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torchmetrics import Metric, MetricCollection

from fl_lightning.client.services import attach_services

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def mixes_samples(net: nn.Module) -> bool:
    """Tell whether a sample's output depends on its batch in eval mode too: BatchNorm without running statistics."""
    return any(isinstance(module, BATCH_NORMS) and module.running_mean is None for module in net.modules())


@contextmanager
def evaluation_mode(client: Any) -> Iterator[None]:
    """Put the client in eval mode and log nothing within the block, whatever services are attached.

    Its metric objects count nothing either: copies stand in for them.

    Args:
        client: a ClientModule.
    """
    metrics = [
        (parent, name, child)
        for parent in [*client.modules()]
        if not isinstance(parent, MetricCollection)
        for name, child in parent.named_children()
        if isinstance(child, Metric | MetricCollection)
    ]
    for parent, name, metric in metrics:
        setattr(parent, name, metric.clone())
    modes = [(module, module.training) for module in client.modules()]
    client.eval()
    try:
        with attach_services(client.lightning_modules(), {"log": _ignore, "log_dict": _ignore}):
            yield
    finally:
        for parent, name, metric in metrics:
            setattr(parent, name, metric)
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
