"""CelebA by celebrity, from LEAF's json files or from torchvision's."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from fl_lightning.data.folders import read_images
from fl_lightning.data.images import Augmentation, Images, ImageSource, Normalization
from fl_lightning.data.leaf import read_leaf
from fl_lightning.data.published import file_fault
from fl_lightning.data.sources import AUTHORS
from fl_lightning.data.splits import Array, Split
from fl_lightning.utils.settings import check_count

IMAGES = "img_align_celeba"
LISTS = ("list_eval_partition.txt", "identity_CelebA.txt", "list_attr_celeba.txt")
"""torchvision's files: the split, the celebrity and the attributes of each image."""

ListedImages = tuple[list[str], Array, Array]
"""Names of image files, their classes and their celebrities."""


class CelebA(ImageSource):
    """Portraits of celebrities with one of 40 attributes as two classes, by celebrity, images of 3×H×W.

    `data.by: celebrity` with `data.num_clients: null` makes each celebrity a client. With LEAF's json files in
    `root/train` and `root/test` the images are those of 9,343 celebrities with at least five, 200,288 in all, and the
    attribute is the one that LEAF wrote (smiling). Without them the split is the published one, 162,770 / 19,867 /
    19,962 images of 10,177 celebrities, who are in one split each; the validation images are evaluated every round.

    Args:
        root: folder that holds `img_align_celeba/*.jpg`, and LEAF's `train/*.json` and `test/*.json` or torchvision's
            `list_eval_partition.txt`, `identity_CelebA.txt` and `list_attr_celeba.txt`.
        attribute: that makes the second class; LEAF's files have theirs.
        image_size: height and width to which all images are resized (LEAF: 84); None: they stay 218×178.
        augmentation: of training batches, as for `MNIST`.
        normalize: of all images, as for `MNIST`; `standard` measures the mean and deviation of the training images.
        limit: most samples of each split, drawn by class; None: all. No other images are read.

    Source:
        Liu et al. 2015, arXiv:1411.7766; by celebrity: Caldas et al. 2018, arXiv:1812.01097.
    """

    num_classes = 2
    classes_by = AUTHORS
    places = ("root",)

    def __init__(
        self,
        root: str = "data/celeba",
        attribute: str = "Smiling",
        image_size: int | None = 84,
        augmentation: Augmentation = "none",
        normalize: Normalization = "standard",
        limit: int | None = None,
    ) -> None:
        super().__init__(root, augmentation, normalize, limit)
        check_count(1, "None leaves images as they are", image_size=image_size)
        self.attribute = attribute
        self.image_size = image_size
        self.folder = Path(root).expanduser()
        self.class_names = (f"not {attribute}", attribute)

    @property
    def _has_json(self) -> bool:
        return (self.folder / "train").is_dir()

    def load(self) -> tuple[Split, Split]:
        if not (self.folder / IMAGES).is_dir():
            raise FileNotFoundError(
                f"CelebA was not found in root {self.root}, which should hold {self.folder / IMAGES}/*.jpg: unpack "
                f"img_align_celeba.zip (https://mmlab.ie.cuhk.edu.hk/projects/CelebA.html) there, and LEAF's json "
                f"files or {', '.join(LISTS)} beside it"
            )
        listed = [self._leaf("train"), self._leaf("test")] if self._has_json else self._published()
        images = [
            self._images(of_split, split) for of_split, split in zip(listed, ("train", "test", "val"), strict=False)
        ]
        train, test, *rest = self.splits(*images)
        self.validation = rest[0] if rest else None
        return train, test

    def _leaf(self, split: str) -> ListedImages:
        """List the images of LEAF's split."""
        names, y, owners = read_leaf(self.root, split, "celeba", np.asarray)
        return names.tolist(), np.asarray(y, np.int64), owners

    def _published(self) -> list[ListedImages]:
        """List the training, test and validation images of the published split."""
        from torchvision.datasets import CelebA as Known  # noqa: PLC0415 - slow to import

        sums = {name: md5 for _, md5, name in Known.file_list}
        parts, owners, attributes = (self._rows(name, sums[name]) for name in LISTS)
        _, titles, *attributes = attributes  # below the number of images
        if self.attribute not in titles:
            raise ValueError(f"attribute must be one of {', '.join(titles)}, got {self.attribute}")
        column = titles.index(self.attribute) + 1
        if not len(parts) == len(owners) == len(attributes):
            raise ValueError(f"{', '.join(LISTS)} in {self.folder} must have a line for each image: copy them again")
        names = np.array([row[0] for row in parts])
        part = np.array([int(row[1]) for row in parts])
        y = np.array([int(row[column]) > 0 for row in attributes], np.int64)
        celebrities = np.array([int(row[1]) for row in owners])
        return [(names[rows].tolist(), y[rows], celebrities[rows]) for rows in (part == 0, part == 2, part == 1)]

    def _rows(self, name: str, md5: str) -> list[list[str]]:
        """Read a list whose md5 is torchvision's, 33 MB in all."""
        path = self.folder / name
        if not path.is_file():
            raise FileNotFoundError(
                f"CelebA in root {self.root} must have {path}: copy it there, or let LEAF's preprocess.sh write "
                f"{self.folder}/train/*.json and test/*.json"
            )
        if fault := file_fault(path, md5):
            raise ValueError(f"{path} must be the published list ({fault}): copy it again")
        return [line.split() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]

    def _images(self, listed: ListedImages, split: str) -> Images:
        """Read the images of a split that `limit` leaves."""
        names, y, owners = listed
        rows = self.limited_rows(split, y, len(y))
        paths: Sequence[str] = [str(self.folder / IMAGES / names[i]) for i in rows]
        x = read_images(paths, self.image_size)
        return Images(x, torch.from_numpy(y[rows]), {"celebrity": owners[rows]})
