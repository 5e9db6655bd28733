"""Sources of samples, partitions among clients, and the federation's data module."""

from typing import TYPE_CHECKING

from fl_lightning.utils.lazy import lazy_names

if TYPE_CHECKING:
    from fl_lightning.data.autoaugment import AutoAugment as AutoAugment
    from fl_lightning.data.celeba import CelebA as CelebA
    from fl_lightning.data.column_partition import ColumnPartition as ColumnPartition
    from fl_lightning.data.datamodules import DataModuleSource as DataModuleSource
    from fl_lightning.data.datasets import DatasetSource as DatasetSource
    from fl_lightning.data.devices import Devices as Devices
    from fl_lightning.data.drift_scenarios import LabelDrift as LabelDrift
    from fl_lightning.data.drift_scenarios import ListedSamples as ListedSamples
    from fl_lightning.data.drift_scenarios import RemoveSamples as RemoveSamples
    from fl_lightning.data.drift_scenarios import Window as Window
    from fl_lightning.data.feature_shift import FeatureShift as FeatureShift
    from fl_lightning.data.folders import ImageFolder as ImageFolder
    from fl_lightning.data.folders import TinyImageNet as TinyImageNet
    from fl_lightning.data.hub import HuggingFace as HuggingFace
    from fl_lightning.data.images import ImageSource as ImageSource
    from fl_lightning.data.leaf import FEMNIST as FEMNIST
    from fl_lightning.data.leaf import Shakespeare as Shakespeare
    from fl_lightning.data.medmnist import MedMNIST as MedMNIST
    from fl_lightning.data.module import FederatedDataModule as FederatedDataModule
    from fl_lightning.data.new_samples import NewSamples as NewSamples
    from fl_lightning.data.owners import Elsewhere as Elsewhere
    from fl_lightning.data.owners import Folder as Folder
    from fl_lightning.data.owners import OwnerPartition as OwnerPartition
    from fl_lightning.data.partitions import ClientDirichletPartition as ClientDirichletPartition
    from fl_lightning.data.partitions import Dealt as Dealt
    from fl_lightning.data.partitions import DirichletPartition as DirichletPartition
    from fl_lightning.data.partitions import FixedPartition as FixedPartition
    from fl_lightning.data.partitions import IIDPartition as IIDPartition
    from fl_lightning.data.partitions import Partition as Partition
    from fl_lightning.data.partitions import PartitionInput as PartitionInput
    from fl_lightning.data.partitions import QuantityPartition as QuantityPartition
    from fl_lightning.data.partitions import ShardPartition as ShardPartition
    from fl_lightning.data.quantity_skew import QuantityDirichletPartition as QuantityDirichletPartition
    from fl_lightning.data.scaled_model import ScaledModel as ScaledModel
    from fl_lightning.data.scenario import Scenario as Scenario
    from fl_lightning.data.scenario import ScenarioInput as ScenarioInput
    from fl_lightning.data.scenario import Task as Task
    from fl_lightning.data.sources import Digits as Digits
    from fl_lightning.data.sources import PooledSource as PooledSource
    from fl_lightning.data.sources import Source as Source
    from fl_lightning.data.sources import TensorSource as TensorSource
    from fl_lightning.data.splits import Split as Split
    from fl_lightning.data.splits import TensorSplit as TensorSplit
    from fl_lightning.data.stored_schema import read_schema as read_schema
    from fl_lightning.data.stragglers import Stragglers as Stragglers
    from fl_lightning.data.synthetic import Synthetic as Synthetic
    from fl_lightning.data.tables import TableSource as TableSource
    from fl_lightning.data.task_scenarios import ClassIncremental as ClassIncremental
    from fl_lightning.data.task_scenarios import DomainIncremental as DomainIncremental
    from fl_lightning.data.transforms import Compose as Compose
    from fl_lightning.data.transforms import CropFlip as CropFlip
    from fl_lightning.data.transforms import Cutout as Cutout
    from fl_lightning.data.transforms import Normalize as Normalize
    from fl_lightning.data.transforms import ResizedCropFlip as ResizedCropFlip
    from fl_lightning.data.transforms import Scale as Scale
    from fl_lightning.data.vision import CIFAR10 as CIFAR10
    from fl_lightning.data.vision import CIFAR100 as CIFAR100
    from fl_lightning.data.vision import EMNIST as EMNIST
    from fl_lightning.data.vision import KMNIST as KMNIST
    from fl_lightning.data.vision import MNIST as MNIST
    from fl_lightning.data.vision import SVHN as SVHN
    from fl_lightning.data.vision import FashionMNIST as FashionMNIST
else:
    __getattr__, __dir__ = lazy_names(__name__)
