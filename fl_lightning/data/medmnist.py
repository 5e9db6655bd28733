"""MedMNIST's sets of medical images, which npz files hold."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import torch

from fl_lightning.data.images import Augmentation, Images, ImageSource, Normalization, error_line
from fl_lightning.data.published import file_fault
from fl_lightning.data.sources import AUTHORS
from fl_lightning.data.splits import Split
from fl_lightning.utils.settings import check_choice

# fmt: off
MedMNISTName = Literal[
    "pathmnist", "dermamnist", "octmnist", "pneumoniamnist", "retinamnist", "breastmnist",
    "bloodmnist", "tissuemnist", "organamnist", "organcmnist", "organsmnist",
]
# fmt: on

PUBLISHED: dict[str, tuple[int, int, int, int, int]] = {
    "pathmnist": (9, 3, 89_996, 10_004, 7_180),
    "dermamnist": (7, 3, 7_007, 1_003, 2_005),
    "octmnist": (4, 1, 97_477, 10_832, 1_000),
    "pneumoniamnist": (2, 1, 4_708, 524, 624),
    "retinamnist": (5, 3, 1_080, 120, 400),
    "breastmnist": (2, 1, 546, 78, 156),
    "bloodmnist": (8, 3, 11_959, 1_712, 3_421),
    "tissuemnist": (8, 1, 165_466, 23_640, 47_280),
    "organamnist": (11, 1, 34_561, 6_491, 17_778),
    "organcmnist": (11, 1, 12_975, 2_392, 8_216),
    "organsmnist": (11, 1, 13_932, 2_452, 8_827),
}
"""Classes, channels, and images of the training, validation and test split, as published."""

MD5 = {
    "pathmnist": "a8b06965200029087d5bd730944a56c1",
    "dermamnist": "0744692d530f8e62ec473284d019b0c7",
    "octmnist": "c68d92d5b585d8d81f7112f81e2d0842",
    "pneumoniamnist": "28209eda62fecd6e6a2d98b1501bb15f",
    "retinamnist": "bd4c0672f1bba3e3a89f0e4e876791e4",
    "breastmnist": "750601b1f35ba3300ea97c75c52ff8f6",
    "bloodmnist": "7053d0359d879ad8a5505303e11de1dc",
    "tissuemnist": "ebe78ee8b05294063de985d821c1c34b",
    "organamnist": "68e3f8846a6bd62f0c9bf841c0d9eacc",
    "organcmnist": "b9ceb9546e10131b32923c5bbeaea2b1",
    "organsmnist": "9ab87b696fb54e2a387ebe992d6ed5f1",
}
"""Sums of the files of 28×28, as the package medmnist 3.0.2 has them."""

LARGEST_SUMMED = 150_000_000
"""Bytes of the largest file whose sum is compared at every start. Of a larger file (pathmnist) only the sums inside the
zip file, which numpy compares, and the numbers of images are compared."""

SPLITS = ("train", "val", "test")


class MedMNIST(ImageSource):
    """Reads medical images of 28×28 with the published split, whose validation images are evaluated every round.

    ChestMNIST is left out, because each of its images has several labels.

    Args:
        name: Name of the set, such as `bloodmnist`.
        root: Folder that holds `<name>.npz`.
        augmentation: Augmentation of training batches, as for `MNIST`.
        normalize: Normalization of all images, as for `MNIST`. `standard` measures the mean and the deviation of the
            training images.
        limit: Most samples of each split, drawn by class. None: all.

    Source:
        Yang et al. 2023, Scientific Data 10:41, arXiv:2110.14795.
    """

    classes_by = AUTHORS
    places = ("root",)
    is_published = True

    def __init__(
        self,
        name: MedMNISTName = "bloodmnist",
        root: str = "data",
        augmentation: Augmentation = "none",
        normalize: Normalization = "standard",
        *,
        limit: int | None = None,
    ) -> None:
        check_choice(get_args(MedMNISTName), name=name)
        self.name = name
        published = PUBLISHED[name]
        self.num_classes = published[0]
        self.channels = published[1]
        super().__init__(root=root, augmentation=augmentation, normalize=normalize, limit=limit)

    def load(self) -> tuple[Split, Split]:
        path = Path(self.root).expanduser() / f"{self.name}.npz"
        if not path.is_file():
            raise FileNotFoundError(
                f"MedMNIST was not found in root {self.root}, which should hold {path}: put it there "
                f"(https://zenodo.org/records/10519652), or name the folder that holds {path.name}"
            )
        try:
            with np.load(path, allow_pickle=False) as held:
                images = [self._images(held[f"{part}_images"], held[f"{part}_labels"]) for part in SPLITS]
        except Exception as error:  # numpy and zipfile raise all kinds
            raise ValueError(f"{path} could not be read ({error_line(error)}): copy it again") from error
        self._check_published(path, images)
        train, val, test = images
        training, testing, self.validation = self.splits(train, test, val)
        return training, testing

    def _check_published(self, path: Path, images: Sequence[Images]) -> None:
        """Refuse images that are not those that were published.

        Args:
            path: The file.
            images: Training, validation and test images.

        Raises:
            ValueError: Their number, shape, type or sum differs.
        """
        published = list(PUBLISHED[self.name][2:])
        sizes = [len(split.y) for split in images]
        kinds = [(tuple(split.x.shape[1:]), split.x.dtype) for split in images]
        if sizes != published or set(kinds) != {((self.channels, 28, 28), torch.uint8)}:
            wanted = ", ".join(str(size) for size in published)
            found = ", ".join(str(size) for size in sizes)
            found_kinds = ", ".join(f"{shape} {dtype}" for shape, dtype in kinds)
            raise ValueError(
                f"{path} must hold {wanted} images of {self.channels}×28×28 uint8, as published, got {found} of "
                f"{found_kinds}: copy {path.name} of 28×28 again"
            )
        if path.stat().st_size > LARGEST_SUMMED:
            return
        fault = file_fault(path, MD5[self.name])
        if fault:
            raise ValueError(f"{path} must have the published md5 ({fault}): copy it again")

    @staticmethod
    def _images(x: np.ndarray, y: np.ndarray) -> Images:
        """Return images as they stand in the file.

        Args:
            x: Images (n, 28, 28) or (n, 28, 28, 3).
            y: Labels (n, 1).
        """
        stored = torch.from_numpy(x)
        pixels = stored[:, None] if x.ndim == 3 else stored.movedim(-1, 1)
        return Images(x=pixels, y=torch.from_numpy(y)[:, 0])
