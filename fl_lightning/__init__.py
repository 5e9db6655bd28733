"""Federated learning on PyTorch Lightning: a client is a LightningModule, a round is a training step."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fl_lightning.aggregation import Aggregator
    from fl_lightning.client import ClientModule
    from fl_lightning.data import FederatedDataModule
    from fl_lightning.federation.faults import NonFiniteUpdateError
    from fl_lightning.federation.loop import FederatedLoop

__version__ = "0.1.0"

__all__ = ["Aggregator", "ClientModule", "FederatedDataModule", "FederatedLoop", "NonFiniteUpdateError"]

_HOMES = {
    "Aggregator": "aggregation",
    "ClientModule": "client",
    "FederatedDataModule": "data",
    "FederatedLoop": "federation.loop",
    "NonFiniteUpdateError": "federation.faults",
}


def __getattr__(name: str) -> Any:
    """Import torch and Lightning when a class is asked for, not for `fl-lightning --help`."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
