"""MedMNIST's sets of medical images, from their npz files."""

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
"""Bytes of the largest file whose sum is compared at every start, in 0.25 s. Of larger ones (pathmnist) only the sums
inside the zip file, which numpy compares as it reads, and the numbers of images are."""

SPLITS = ("train", "val", "test")


class MedMNIST(ImageSource):
    """Medical images of 28×28 with the published split, whose validation images are evaluated every round.

    ChestMNIST is left out: its images have several labels each.

    Args:
        name: of the set, such as `bloodmnist`.
        root: folder that holds `<name>.npz`.
        augmentation: of training batches, as for `MNIST`.
        normalize: of all images, as for `MNIST`; `standard` measures the mean and deviation of the training images.
        limit: most samples of each split, drawn by class; None: all.

    Source:
        Yang et al. 2023, Scientific Data 10:41, arXiv:2110.14795.
    """

    classes_by = AUTHORS

    def __init__(
        self,
        name: MedMNISTName = "bloodmnist",
        root: str = "data",
        augmentation: Augmentation = "none",
        normalize: Normalization = "standard",
        limit: int | None = None,
    ) -> None:
        check_choice(get_args(MedMNISTName), name=name)
        self.name = name
        self.num_classes, self.channels, *_ = PUBLISHED[name]
        super().__init__(root, augmentation, normalize, limit)

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
        _, channels, *published = PUBLISHED[self.name]
        sizes = [len(split.y) for split in images]
        kinds = [(tuple(split.x.shape[1:]), split.x.dtype) for split in images]
        if sizes != published or {*kinds} != {((channels, 28, 28), torch.uint8)}:
            raise ValueError(
                f"{path} must hold {', '.join(map(str, published))} images of {channels}×28×28 uint8, as published, "
                f"got {', '.join(map(str, sizes))} of {', '.join(f'{of} {kind}' for of, kind in kinds)}: copy "
                f"{path.name} of 28×28 again"
            )
        if path.stat().st_size <= LARGEST_SUMMED and (fault := file_fault(path, MD5[self.name])):
            raise ValueError(f"{path} must have the published md5 ({fault}): copy it again")
        train, val, test = images
        training, testing, self.validation = self.splits(train, test, val)
        return training, testing

    @staticmethod
    def _images(x: np.ndarray, y: np.ndarray) -> Images:
        """Take images as they stand in the file: (n, 28, 28) or (n, 28, 28, 3), and labels (n, 1)."""
        stored = torch.from_numpy(x)
        return Images(stored[:, None] if x.ndim == 3 else stored.permute(0, 3, 1, 2), torch.from_numpy(y)[:, 0])
