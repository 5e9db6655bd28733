"""The base of the sources of images: their augmentation and normalisation."""

from typing import ClassVar, Literal, get_args

from fl_lightning.data.sources import Source
from fl_lightning.data.splits import Transform
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


class ImageSource(Source):
    """A source of uint8 images in memory, augmented and normalised a batch at a time.

    Args:
        root: folder that holds the files, as the subclass says.
        augmentation: of training batches, as for `MNIST`.
        normalize: of all images, as for `MNIST`.
        limit: most samples of each split, drawn by class; None: all.
    """

    mean: ClassVar[tuple[float, ...]]
    std: ClassVar[tuple[float, ...]]

    def __init__(
        self, root: str, augmentation: Augmentation, normalize: Normalization, limit: int | None = None
    ) -> None:
        check_choice(get_args(Augmentation), augmentation=augmentation)
        self.root, self.augmentation, self.limit = root, augmentation, limit
        self.normalize = normalization(normalize, self.mean, self.std)

    def training_transform(self) -> Transform:
        """Make the transform of the training images, `normalize` with the augmentation around it."""
        normalize = self.normalize
        if self.augmentation.startswith("autoaugment"):
            from fl_lightning.data.autoaugment import AutoAugment  # noqa: PLC0415 - torchvision is slow to import

            before = [] if self.augmentation == "autoaugment_only" else [CropFlip(4)]
            return Compose(*before, AutoAugment(), normalize)
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
    """Choose how images are normalised, where `mean` and `std` are the data set's own.

    Raises:
        ValueError: if what is given is neither a name nor one mean and one standard deviation per channel.

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
    """Put what an exception says in one line."""
    return " ".join(str(error).split()) or type(error).__name__
