"""Methods: one file for each paper."""

from fl_lightning.methods.apfl import APFL
from fl_lightning.methods.ccvr import CCVRServer
from fl_lightning.methods.ditto import Ditto
from fl_lightning.methods.dpfedavg import DPFedAvg
from fl_lightning.methods.dpsgd import dp_sgd as dp_sgd
from fl_lightning.methods.fedala import FedALA
from fl_lightning.methods.fedalign import FedAlign
from fl_lightning.methods.fedamp import FedAMP
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.fedavgm import FedAvgM
from fl_lightning.methods.fedbabu import FedBABU
from fl_lightning.methods.fedbn import FedBN
from fl_lightning.methods.fedcl import FedCL
from fl_lightning.methods.fedcurv import FedCurv
from fl_lightning.methods.feddecorr import FedDecorr
from fl_lightning.methods.feddf import FedDFServer
from fl_lightning.methods.feddyn import FedDyn
from fl_lightning.methods.feded import FedED
from fl_lightning.methods.fedewc import FedEWC
from fl_lightning.methods.fedexp import FedEXPAggregator
from fl_lightning.methods.fedfomo import FedFOMO
from fl_lightning.methods.fedgen import FedGen
from fl_lightning.methods.fedgkd import FedGKD
from fl_lightning.methods.fedka import FedKA
from fl_lightning.methods.fedlc import FedLC
from fl_lightning.methods.fedlmd import FedLMD
from fl_lightning.methods.fedlwf import FedLwF
from fl_lightning.methods.fedmd import FedMD
from fl_lightning.methods.fednova import FedNovaAggregator
from fl_lightning.methods.fedntd import FedNTD
from fl_lightning.methods.fedopt import FedAdagrad, FedAdam, FedYogi
from fl_lightning.methods.fedpac import FedPAC
from fl_lightning.methods.fedproto import FedProto
from fl_lightning.methods.fedprox import FedProx
from fl_lightning.methods.fedrep import FedRep
from fl_lightning.methods.fedrod import FedRoD
from fl_lightning.methods.fedrs import FedRS
from fl_lightning.methods.ifca import IFCA
from fl_lightning.methods.knfu import KnFu
from fl_lightning.methods.local import Local
from fl_lightning.methods.local_dp import local_dp as local_dp
from fl_lightning.methods.moon import MOON
from fl_lightning.methods.perfedavg import PerFedAvg
from fl_lightning.methods.pfedme import PFedMe
from fl_lightning.methods.replay import Replay
from fl_lightning.methods.sam import SAM
from fl_lightning.methods.scaffold import SCAFFOLD
from fl_lightning.methods.selectivefd import SelectiveFD

__all__ = [
    "APFL",
    "IFCA",
    "MOON",
    "SAM",
    "SCAFFOLD",
    "CCVRServer",
    "DPFedAvg",
    "Ditto",
    "FedALA",
    "FedAMP",
    "FedAdagrad",
    "FedAdam",
    "FedAlign",
    "FedAvg",
    "FedAvgM",
    "FedBABU",
    "FedBN",
    "FedCL",
    "FedCurv",
    "FedDFServer",
    "FedDecorr",
    "FedDyn",
    "FedED",
    "FedEWC",
    "FedEXPAggregator",
    "FedFOMO",
    "FedGKD",
    "FedGen",
    "FedKA",
    "FedLC",
    "FedLMD",
    "FedLwF",
    "FedMD",
    "FedNTD",
    "FedNovaAggregator",
    "FedPAC",
    "FedProto",
    "FedProx",
    "FedRS",
    "FedRep",
    "FedRoD",
    "FedYogi",
    "KnFu",
    "Local",
    "PFedMe",
    "PerFedAvg",
    "Replay",
    "SelectiveFD",
]
