"""Modes of modules: eval mode for a method's own passes over data.

BatchNorm, which mixes the samples of a batch, is here too.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torchmetrics import Metric, MetricCollection

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

    It logs nothing whatever services are attached. Copies stand in for its metric objects, so that these count nothing.

    Args:
        client: A ClientModule.
    """
    metrics = metric_objects(client)
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
        for module, was_training in modes:
            module.training = was_training


def metric_objects(client: nn.Module) -> list[tuple[nn.Module, str, Metric | MetricCollection]]:
    """Return the metric objects in a module, each with its parent and its name there.

    A collection stands for the metric objects in it.
    """
    found: list[tuple[nn.Module, str, Metric | MetricCollection]] = []
    for parent in client.modules():
        if isinstance(parent, MetricCollection):
            continue
        for name, child in parent.named_children():
            if isinstance(child, Metric | MetricCollection):
                found.append((parent, name, child))
    return found


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
