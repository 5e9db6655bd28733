"""The base of sources of images: augmentation, normalization, and pictures of more than 8 bits."""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor

from fl_lightning.data.schema import described, pixel_scale
from fl_lightning.data.sources import Source, labelled_split
from fl_lightning.data.splits import Array, TensorSplit, Transform
from fl_lightning.data.transforms import Compose, CropFlip, Cutout, Normalize, ResizedCropFlip
from fl_lightning.utils.settings import check_choice

Augmentation = Literal[
    "none",
    "flip",
    "crop_flip",
    "reflect_crop_flip",
    "resized_crop_flip",
    "fedntd",
    "autoaugment",
    "autoaugment_only",
]
Normalization = Literal["standard", "half"] | list[list[float]]


MOST_OF_16_BITS = 2**16 - 1
"""The white of an image of 16 bits."""


class Images(NamedTuple):
    """Holds the images of a split.

    Args:
        x: Images (n, C, H, W) uint8, or floats in [0, 255] if an image has more than 8 bits.
        y: Class of each image, (n,).
        columns: Further values (n,) by name. None: there are none.
    """

    x: Tensor
    y: Tensor
    columns: Mapping[str, Array] | None = None


class ImageSource(Source):
    """Keeps images in memory, uint8 or floats in [0, 255], and augments and normalizes them a batch at a time.

    Args:
        root: Folder of the files, as the subclass says.
        augmentation: Augmentation of training batches, as for `MNIST`.
        normalize: Normalization of all images, as for `MNIST`.
        limit: Most samples of each split, drawn by class. None: all.
    """

    mean: tuple[float, ...] | None = None
    """Mean of each channel of the data set. None: the source measures it when it reads the images."""

    std: tuple[float, ...] | None = None
    """Standard deviation of each channel. None: the source measures it when it reads the images."""

    channels: int = 3
    """Number of channels of an image."""

    def __init__(
        self, root: str, augmentation: Augmentation, normalize: Normalization, limit: int | None = None
    ) -> None:
        check_choice(get_args(Augmentation), augmentation=augmentation)
        self.root = root
        self.augmentation = augmentation
        self.limit = limit
        self._told = normalize != "standard"
        self._measures = not self._told and self.mean is None
        unknown = (0.5,) * self.channels
        self._own = normalization(normalize, self.mean or unknown, self.std or unknown)
        self.normalize = self._own

    def splits(self, train: Images, *others: Images | None) -> list[Any]:
        """Make the splits of images, the training split first, and None for images that there are not.

        Args:
            train: Training images, which are augmented in training.
            others: Test and validation images, each or None.

        Raises:
            ValueError: The augmentation is not one for images of more than 8 bits.
        """
        self._decide_scale(train)
        if train.x.is_floating_point() and self.augmentation.startswith("autoaugment"):
            raise ValueError(
                f"augmentation must be one for images of more than 8 bits, got {self.augmentation}; set augmentation: "
                f"crop_flip"
            )
        splits: list[Any] = [self._labelled(train, transform=self.training_transform(), name="train")]
        for name, images in zip(("test", "val"), others, strict=False):
            if images is None:
                splits.append(None)
            else:
                splits.append(self._labelled(images, transform=self.normalize, name=name))
        return splits

    def _decide_scale(self, train: Images) -> None:
        """Choose how the images are normalized: as the training data, else as told, else by the training images.

        Raises:
            ValueError: `normalize` says something else than the training data.
        """
        scale = pixel_scale(self.leader)
        if scale is not None:
            if self._told and described(scale) != described(self._own):
                raise ValueError(
                    f"normalize of {self.place} must be that of the training data ({scale}), got {self._own}; leave it "
                    f"out"
                )
            self.normalize = scale
        elif self._measures:
            mean, std = measure(train.x)
            self.normalize = Normalize(mean, std)
        else:
            self.normalize = self._own

    def _labelled(self, images: Images, *, transform: Transform, name: str) -> TensorSplit:
        """Make a split of images, whose labels are checked."""
        split = labelled_split(images.x, images.y, self.num_classes, transform=transform, name=name)
        split.columns = dict(images.columns or {})
        return split

    def training_transform(self) -> Transform:
        """Make the transform of training images: `normalize`, and the augmentation before and after it."""
        normalize = self.normalize
        if self.augmentation.startswith("autoaugment"):
            from fl_lightning.data.autoaugment import AutoAugment  # noqa: PLC0415 - torchvision is slow to import

            if self.augmentation == "autoaugment_only":
                return Compose(AutoAugment(), normalize)
            return Compose(CropFlip(4), AutoAugment(), normalize)
        augmented: dict[Augmentation, Transform] = {
            "none": normalize,
            "flip": Compose(CropFlip(0), normalize),
            "crop_flip": Compose(CropFlip(4), normalize),
            "reflect_crop_flip": Compose(CropFlip(4, reflect=True), normalize),
            "resized_crop_flip": Compose(ResizedCropFlip(), normalize),
            "fedntd": Compose(CropFlip(4), normalize, Cutout(16)),
        }
        return augmented[self.augmentation]


def normalization(given: Normalization, mean: tuple[float, ...], std: tuple[float, ...]) -> Normalize:
    """Choose how images are normalized.

    Args:
        given: The setting: a name, or the means and the standard deviations.
        mean: Mean of each channel of the data set, (C,).
        std: Standard deviation of each channel of the data set, (C,).

    Raises:
        ValueError: The setting is neither a name nor one mean and one standard deviation for each channel.

    >>> normalization("half", (0.1307,), (0.3081,))
    Normalize(mean=(0.5,), std=(0.5,), divisor=255.0)
    """
    if given == "standard":
        return Normalize(mean, std)
    if given == "half":
        return Normalize((0.5,) * len(mean), (0.5,) * len(std))
    if isinstance(given, str) or len(given) != 2 or any(len(part) not in {1, len(mean)} for part in given):
        raise ValueError(
            f"normalize must be standard, half or [means, standard deviations] with 1 or {len(mean)} numbers each, got "
            f"{given!r}"
        )
    return Normalize(given[0], given[1])


def error_line(error: Exception) -> str:
    """Return what an exception says in one line."""
    return " ".join(str(error).split()) or type(error).__name__


def loaded(image: Any, place: str) -> Any:
    """Decode a picture of Pillow's.

    Args:
        image: The picture, whose file may not be decoded yet.
        place: The name of the picture, for errors.

    Raises:
        ValueError: The picture cannot be decoded.
    """
    try:
        image.load()
    except Exception as error:  # Pillow raises all kinds
        raise ValueError(
            f"{place} could not be read as an image ({error_line(error)}): replace or delete it"
        ) from error
    return image


def is_deep(image: Any) -> bool:
    """Return True if a picture of Pillow's has more than 8 bits a pixel."""
    mode: str = image.mode
    return mode == "F" or mode.startswith("I")


def eight_bits_as_floats(image: Any, place: str) -> Any:
    """Return a picture of more than 8 bits a pixel as grey floats in [0, 255], and any other picture as it is.

    Args:
        image: A picture of Pillow's.
        place: The name of the picture, for errors.

    Raises:
        ValueError: Nothing tells which value is white.
    """
    from PIL import Image  # noqa: PLC0415 - slow to import

    if not is_deep(image):
        return image
    mode = image.mode
    values = np.asarray(image).astype(np.float32)
    # Pillow calls some images of 16 bits I, and stretches those of PGM files to 16 bits.
    if mode.startswith("I;16") or getattr(image, "format", None) in ("PNG", "PPM"):
        return Image.fromarray(values * np.float32(255 / MOST_OF_16_BITS))
    least = float(values.min())
    most = float(values.max())
    if mode == "F" and least >= 0 and most <= 1:
        return Image.fromarray(values * np.float32(255))
    kind = "floats" if mode == "F" else "whole numbers of 32 bits"
    raise ValueError(
        f"{place} must have 8 or 16 bits a pixel, or floats in [0, 1], got {kind} in [{least:g}, {most:g}], of which "
        f"nothing tells what is white; convert it to 16 bits"
    )


def measure(x: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Measure the mean and standard deviation of x / 255 in each channel.

    Args:
        x: Images (n, C, H, W), uint8 or floats in [0, 255].

    >>> measure(torch.tensor([0, 255], dtype=torch.uint8).view(2, 1, 1, 1))
    ((0.5,), (0.5,))
    """
    if x.is_floating_point():
        shares_of_white = [channel.double() / 255 for channel in x.unbind(1)]
        means = tuple(float(channel.mean()) for channel in shares_of_white)
        deviations = tuple(float(channel.std(correction=0)) for channel in shares_of_white)
        return means, deviations
    histograms = [channel.flatten().bincount(minlength=256) for channel in x.unbind(1)]
    counts = torch.stack(histograms).double()
    shares = counts / counts.sum(1, keepdim=True)
    values = torch.arange(256, dtype=torch.float64) / 255
    mean = shares @ values
    std = (shares * (values - mean[:, None]).square()).sum(1).sqrt()
    return tuple(mean.tolist()), tuple(std.tolist())
