"""The client: the base class of methods, local training, and the store of client state."""

from fl_lightning.client.context import ClientContext
from fl_lightning.client.module import ClientModule
from fl_lightning.client.services import BatchTransfer, ClientServices, MetricAccumulator, attach_services
from fl_lightning.client.training import LocalSettings, LocalTrainer

__all__ = [
    "BatchTransfer",
    "ClientContext",
    "ClientModule",
    "ClientServices",
    "LocalSettings",
    "LocalTrainer",
    "MetricAccumulator",
    "attach_services",
]
