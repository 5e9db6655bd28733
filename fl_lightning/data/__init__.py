"""Sources of samples, partitions among clients, and the federation's data module."""

from fl_lightning.data.datasets import DataModuleSource, DatasetSource
from fl_lightning.data.module import FederatedDataModule
from fl_lightning.data.partitions import (
    ClientDirichletPartition,
    ColumnPartition,
    DirichletPartition,
    FixedPartition,
    IIDPartition,
    Partition,
    PartitionInput,
    QuantityPartition,
    ShardPartition,
)
from fl_lightning.data.sources import Digits, Source, TensorSource
from fl_lightning.data.splits import Split, TensorSplit
from fl_lightning.data.vision import CIFAR10, CIFAR100, MNIST, FashionMNIST

__all__ = [
    "CIFAR10",
    "CIFAR100",
    "MNIST",
    "ClientDirichletPartition",
    "ColumnPartition",
    "DataModuleSource",
    "DatasetSource",
    "Digits",
    "DirichletPartition",
    "FashionMNIST",
    "FederatedDataModule",
    "FixedPartition",
    "IIDPartition",
    "Partition",
    "PartitionInput",
    "QuantityPartition",
    "ShardPartition",
    "Source",
    "Split",
    "TensorSource",
    "TensorSplit",
]
