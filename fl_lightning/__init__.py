"""Federated learning on PyTorch Lightning: a client is a LightningModule, a round is a training step."""

from fl_lightning.aggregation import Aggregator
from fl_lightning.client import ClientModule
from fl_lightning.data import FederatedDataModule
from fl_lightning.loop import FederatedLoop, NonFiniteUpdateError

__version__ = "0.1.0"

__all__ = ["Aggregator", "ClientModule", "FederatedDataModule", "FederatedLoop", "NonFiniteUpdateError"]
