"""Methods: one file for each paper."""

from fl_lightning.methods.fedalign import FedAlign
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.fedcl import FedCL
from fl_lightning.methods.fedcurv import FedCurv
from fl_lightning.methods.feddyn import FedDyn
from fl_lightning.methods.feded import FedED
from fl_lightning.methods.fedexp import FedEXPAggregator
from fl_lightning.methods.fedka import FedKA
from fl_lightning.methods.fedlc import FedLC
from fl_lightning.methods.fedmd import FedMD
from fl_lightning.methods.fedntd import FedNTD
from fl_lightning.methods.fedprox import FedProx
from fl_lightning.methods.fedrs import FedRS
from fl_lightning.methods.knfu import KnFu
from fl_lightning.methods.local import Local
from fl_lightning.methods.moon import MOON
from fl_lightning.methods.sam import SAM
from fl_lightning.methods.scaffold import SCAFFOLD

__all__ = [
    "MOON",
    "SAM",
    "SCAFFOLD",
    "FedAlign",
    "FedAvg",
    "FedCL",
    "FedCurv",
    "FedDyn",
    "FedED",
    "FedEXPAggregator",
    "FedKA",
    "FedLC",
    "FedMD",
    "FedNTD",
    "FedProx",
    "FedRS",
    "KnFu",
    "Local",
]
