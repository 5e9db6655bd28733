"""A source of random images in the shape and with the classes of a data set, few of them."""

import torch

from fl_lightning.data import TensorSource

SHAPES = {
    "MNIST": (1, 28, 28, 10),
    "CIFAR10": (3, 32, 32, 10),
    "CIFAR100": (3, 32, 32, 100),
    "ImageFolder": (3, 32, 32, 10),
    "TinyImageNet": (3, 64, 64, 200),
    "PooledSource": (1, 28, 28, 10),
}


class TinyImages(TensorSource):
    """Random images.

    Args:
        like: name of the class of a source.
    """

    def __init__(self, like: str) -> None:
        *shape, classes = SHAPES[like]
        train = max(1000 // classes, 10)  # of each class; 100 clients with ten shards need 1,000 images
        test = torch.arange(20) % classes  # of the first classes: evaluating is most of a large net's two rounds
        splits = []
        for y in (torch.arange(classes).repeat_interleave(train), test):
            splits.append((torch.rand(len(y), *shape, generator=torch.Generator().manual_seed(0)), y))
        super().__init__(*splits, num_classes=classes)
        self.like = like
