"""Metric objects of a client in local training, while every process trains another client."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torchmetrics import Metric


@contextmanager
def local_metrics(client: nn.Module) -> Iterator[None]:
    """Context in which a client's metric objects compute over this process alone, without waiting for others.

    Args:
        client: The module with the metric objects.
    """
    metrics = [part for part in client.modules() if isinstance(part, Metric)]
    functions_before = [metric.distributed_available_fn for metric in metrics]
    for metric in metrics:
        # `bool()` is False, so the metric takes the run for one without a process group.
        metric.distributed_available_fn = bool
    try:
        yield
    finally:
        for metric, function in zip(metrics, functions_before, strict=True):
            metric.distributed_available_fn = function
