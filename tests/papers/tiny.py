"""A source of few random images with the shape and the classes of a data set."""

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
"""Shape of a sample, and the number of classes."""


class TinyImages(TensorSource):
    """Holds random images.

    Args:
        like: Name of the class of a source.
    """

    def __init__(self, like: str) -> None:
        *shape, classes = SHAPES[like]
        # 100 clients with ten shards need 1,000 images.
        train_of_class = max(1000 // classes, 10)
        train_labels = torch.arange(classes).repeat_interleave(train_of_class)
        # The first classes are tested. Evaluating is most of the time of a large net's two rounds.
        test_labels = torch.arange(20) % classes
        super().__init__(
            train=(random_images(len(train_labels), shape), train_labels),
            test=(random_images(len(test_labels), shape), test_labels),
            num_classes=classes,
        )
        self.like = like


def random_images(n: int, shape: list[int]) -> torch.Tensor:
    return torch.rand((n, *shape), generator=torch.Generator().manual_seed(0))
