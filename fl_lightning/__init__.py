"""Federated learning on PyTorch Lightning: a client is a LightningModule, a round is a training step."""

from typing import TYPE_CHECKING

from fl_lightning.utils.lazy import lazy_names

if TYPE_CHECKING:
    from fl_lightning.aggregation import Aggregator
    from fl_lightning.client import ClientModule
    from fl_lightning.data import FederatedDataModule
    from fl_lightning.federation.loop import FederatedLoop
    from fl_lightning.members.faults import FaultPolicy, NonFiniteUpdateError
    from fl_lightning.utils.life import heartbeat

__version__ = "0.3.0"

__all__ = [
    "Aggregator",
    "ClientModule",
    "FaultPolicy",
    "FederatedDataModule",
    "FederatedLoop",
    "NonFiniteUpdateError",
    "heartbeat",
]

_NAMES = {
    "aggregation": """Aggregator Codec FP16 FedAsync FedBuff GatheringAggregator GeometricMedianAggregator
        KrumAggregator MedianAggregator NormClip Pacing PrivateAggregator QSGD RandomK Rounds ServerModule Sign TopK
        TrimmedMeanAggregator UpdateTransform""",
    "attacks": "Attack label_flip noise sign_flip",
    "callbacks": "ClasswiseReport ClientCheckpoint RoundProgressBar RunPlots SavePredictions SkippedClients",
    "client": "ClientModule",
    "data": """CIFAR10 CIFAR100 CelebA ClassIncremental ClientDirichletPartition ColumnPartition DataModuleSource
        DatasetSource Devices Digits DirichletPartition DomainIncremental EMNIST FEMNIST FashionMNIST FeatureShift
        FederatedDataModule FixedPartition HuggingFace IIDPartition KMNIST LabelDrift ListedSamples MNIST MedMNIST
        Partition QuantityDirichletPartition QuantityPartition RemoveSamples SVHN Scenario Shakespeare ShardPartition
        Source Stragglers Synthetic TableSource TensorSource Window""",
    "distributed": "ClientParallelStrategy",
    "members.faults": "FaultPolicy NonFiniteUpdateError",
    "types": "FineTuning",
    "federation.loop": "FederatedLoop",
    "methods": """APFL CCVRServer DPFedAvg Ditto FedALA FedAMP FedAdagrad FedAdam FedAlign FedAvg FedAvgM FedBABU
        FedBN FedCL FedCurv FedDFServer FedDecorr FedDyn FedED FedEWC FedEXPAggregator FedFOMO FedGKD FedGen FedKA
        FedLC FedLMD FedLwF FedMD FedNTD FedNovaAggregator FedPAC FedProto FedProx FedRS FedRep FedRoD FedYogi IFCA
        KnFu Local MOON PFedMe PerFedAvg Replay SAM SCAFFOLD SelectiveFD dp_sgd local_dp""",
    "monitors": """ClassCount ClientTable DriftMonitor FeatureProbe ForgettingMonitor GroupMetrics LossLandscape Monitor
        NeuronActivations PredictedDistribution SampleReduction""",
    "nets": """Backbone CIFARMobileNetV2 CIFARResNet CharLSTM CharTransformer FedCLCIFARCNN FedCLMNISTCNN FedKATCNN
        FedNTDCNN FedNTDHypersphere HeterogeneousNets KnFuM1 KnFuM2 Perceptron Projected ResNet""",
    "utils.life": "heartbeat",
}
"""Names that can be imported from here, by their module within the package."""


def _homes() -> dict[str, str]:
    """Return the module within the package of each name of `_NAMES`."""
    homes: dict[str, str] = {}
    for home, names in _NAMES.items():
        for name in names.split():
            homes[name] = home
    return homes


HOMES = _homes()
"""Module within the package of each name that can be imported from here."""

__getattr__, __dir__ = lazy_names(__name__, homes={name: f"{__name__}.{home}" for name, home in HOMES.items()})
