"""Nets: features and a linear head, one file per architecture; nothing federated."""

from fl_lightning.nets.backbone import Backbone
from fl_lightning.nets.fedcl_cnn import FedCLCIFARCNN, FedCLMNISTCNN
from fl_lightning.nets.fedka_tcnn import FedKATCNN
from fl_lightning.nets.fedntd_cnn import FedNTDCNN, FedNTDHypersphere
from fl_lightning.nets.heterogeneous import HeterogeneousNets
from fl_lightning.nets.knfu_cnn import KnFuM1, KnFuM2
from fl_lightning.nets.mobilenet import CIFARMobileNetV2
from fl_lightning.nets.perceptron import Perceptron
from fl_lightning.nets.resnet import CIFARResNet, ResNet

__all__ = [
    "Backbone",
    "CIFARMobileNetV2",
    "CIFARResNet",
    "FedCLCIFARCNN",
    "FedCLMNISTCNN",
    "FedKATCNN",
    "FedNTDCNN",
    "FedNTDHypersphere",
    "HeterogeneousNets",
    "KnFuM1",
    "KnFuM2",
    "Perceptron",
    "ResNet",
]
