"""Nets: features and a linear head, one file per architecture; nothing federated."""

from fl_lightning.nets.backbone import Backbone
from fl_lightning.nets.fedka_tcnn import FedKATCNN
from fl_lightning.nets.fedntd_cnn import FedNTDCNN
from fl_lightning.nets.perceptron import Perceptron

__all__ = ["Backbone", "FedKATCNN", "FedNTDCNN", "Perceptron"]
