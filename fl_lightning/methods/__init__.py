"""One paper, one file."""

from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.fedcl import FedCL
from fl_lightning.methods.feded import FedED
from fl_lightning.methods.fedexp import FedEXPAggregator
from fl_lightning.methods.fedntd import FedNTD
from fl_lightning.methods.fedprox import FedProx
from fl_lightning.methods.sam import SAM

__all__ = ["SAM", "FedAvg", "FedCL", "FedED", "FedEXPAggregator", "FedNTD", "FedProx"]
