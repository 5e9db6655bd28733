"""Nets of features and a linear head, one file per architecture, without anything federated."""

from typing import TYPE_CHECKING

from fl_lightning.utils.lazy import lazy_names

if TYPE_CHECKING:
    from fl_lightning.nets.backbone import Backbone as Backbone
    from fl_lightning.nets.backbone import BodyAndHead as BodyAndHead
    from fl_lightning.nets.backbone import NetFactory as NetFactory
    from fl_lightning.nets.backbone import PlainCNN as PlainCNN
    from fl_lightning.nets.characters import CharLSTM as CharLSTM
    from fl_lightning.nets.characters import CharTransformer as CharTransformer
    from fl_lightning.nets.fedcl_cnn import FedCLCIFARCNN as FedCLCIFARCNN
    from fl_lightning.nets.fedcl_cnn import FedCLMNISTCNN as FedCLMNISTCNN
    from fl_lightning.nets.fedka_tcnn import FedKATCNN as FedKATCNN
    from fl_lightning.nets.fedntd_cnn import FedNTDCNN as FedNTDCNN
    from fl_lightning.nets.fedntd_cnn import FedNTDHypersphere as FedNTDHypersphere
    from fl_lightning.nets.heterogeneous import HeterogeneousNets as HeterogeneousNets
    from fl_lightning.nets.knfu_cnn import KnFuM1 as KnFuM1
    from fl_lightning.nets.knfu_cnn import KnFuM2 as KnFuM2
    from fl_lightning.nets.mobilenet import CIFARMobileNetV2 as CIFARMobileNetV2
    from fl_lightning.nets.perceptron import Perceptron as Perceptron
    from fl_lightning.nets.projected import Projected as Projected
    from fl_lightning.nets.resnet import CIFARResNet as CIFARResNet
    from fl_lightning.nets.resnet import FedAlignResNet as FedAlignResNet
    from fl_lightning.nets.resnet import ResNet as ResNet
else:
    __getattr__, __dir__ = lazy_names(__name__)
