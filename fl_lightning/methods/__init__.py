"""Methods: one file for each paper."""

from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.fedavgm import FedAvgM
from fl_lightning.methods.fedcl import FedCL
from fl_lightning.methods.feddf import FedDFServer
from fl_lightning.methods.feded import FedED
from fl_lightning.methods.fedexp import FedEXPAggregator
from fl_lightning.methods.fedka import FedKA
from fl_lightning.methods.fedmd import FedMD
from fl_lightning.methods.fednova import FedNovaAggregator
from fl_lightning.methods.fedntd import FedNTD
from fl_lightning.methods.fedopt import FedAdagrad, FedAdam, FedYogi
from fl_lightning.methods.fedprox import FedProx
from fl_lightning.methods.knfu import KnFu
from fl_lightning.methods.local import Local
from fl_lightning.methods.sam import SAM

__all__ = [
    "SAM",
    "FedAdagrad",
    "FedAdam",
    "FedAvg",
    "FedAvgM",
    "FedCL",
    "FedDFServer",
    "FedED",
    "FedEXPAggregator",
    "FedKA",
    "FedMD",
    "FedNTD",
    "FedNovaAggregator",
    "FedProx",
    "FedYogi",
    "KnFu",
    "Local",
]
