"""Metric objects of a client in local training, where every process is at another client."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torchmetrics import Metric


@contextmanager
def local_metrics(client: nn.Module) -> Iterator[None]:
    """Context in which `compute` of a client's metric objects is of this process, and waits for no other.

    Args:
        client: the module that has them.
    """
    metrics = [part for part in client.modules() if isinstance(part, Metric)]
    before = [metric.distributed_available_fn for metric in metrics]
    for metric in metrics:
        metric.distributed_available_fn = bool  # no process group: False
    try:
        yield
    finally:
        for metric, available in zip(metrics, before, strict=True):
            metric.distributed_available_fn = available
