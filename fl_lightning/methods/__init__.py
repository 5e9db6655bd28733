"""One paper, one file."""

from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.fedntd import FedNTD
from fl_lightning.methods.fedprox import FedProx

__all__ = ["FedAvg", "FedNTD", "FedProx"]
