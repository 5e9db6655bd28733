"""CelebA by celebrity, from LEAF's json files or from torchvision's."""

from pathlib import Path
from typing import NamedTuple

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

PARTS = {"train": 0, "test": 2, "val": 1}
"""Number of each split in `list_eval_partition.txt`."""


class ListedImages(NamedTuple):
    """Holds the images of a split as files list them.

    Args:
        names: Names of the image files, n of them.
        y: Class of each image, (n,) int64.
        owners: Celebrity of each image, (n,).
    """

    names: list[str]
    y: Array
    owners: Array


class CelebA(ImageSource):
    """Reads portraits of celebrities, 3×H×W, with one of 40 attributes as two classes.

    `data.by: celebrity` with `data.num_clients: null` makes each celebrity a client. There are two divisions:

    - LEAF's, with its json files in `root/train` and `root/test`: 200,288 images of the 9,343 celebrities who have at
      least five. The attribute is the one that LEAF wrote (smiling).
    - Without these files the published one: 162,770 / 19,867 / 19,962 images of 10,177 celebrities, who are in one
      split each. The validation images are evaluated every round.

    Args:
        root: Folder that holds `img_align_celeba/*.jpg`, and LEAF's `train/*.json` and `test/*.json` or torchvision's
            `list_eval_partition.txt`, `identity_CelebA.txt` and `list_attr_celeba.txt`.
        attribute: Attribute that makes the second class. LEAF's files have theirs.
        image_size: Height and width to which all images are resized (LEAF: 84). None: they stay 218×178.
        augmentation: Augmentation of training batches, as for `MNIST`.
        normalize: Normalization of all images, as for `MNIST`. `standard` measures the mean and the deviation of the
            training images.
        limit: Most samples of each split, drawn by class. None: all. No other images are read.

    Raises:
        ValueError: A setting is out of its range.

    Source:
        Liu et al. 2015, arXiv:1411.7766; by celebrity: Caldas et al. 2018, arXiv:1812.01097.
    """

    num_classes = 2
    classes_by = AUTHORS
    places = ("root",)

    def __init__(  # noqa: PLR0917 - called by position
        self,
        root: str = "data/celeba",
        attribute: str = "Smiling",
        image_size: int | None = 84,
        augmentation: Augmentation = "none",
        normalize: Normalization = "standard",
        limit: int | None = None,
    ) -> None:
        super().__init__(root=root, augmentation=augmentation, normalize=normalize, limit=limit)
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
        if self._has_json:
            listed = {split: self._leaf(split) for split in ("train", "test")}
        else:
            listed = self._published()
        images = {split: self._images(of_split, split) for split, of_split in listed.items()}
        train, test, self.validation = self.splits(images["train"], images["test"], images.get("val"))
        return train, test

    def _leaf(self, split: str) -> ListedImages:
        """List the images of LEAF's split.

        Args:
            split: The split, `train` or `test`.
        """
        read = read_leaf(root=self.root, split=split, dataset="celeba", convert=np.asarray)
        return ListedImages(names=read.x.tolist(), y=np.asarray(read.y, np.int64), owners=read.owners)

    def _published(self) -> dict[str, ListedImages]:
        """List the images of the published splits, by the name of the split.

        Raises:
            FileNotFoundError: A list is missing.
            ValueError: A list is not the published one, or has no such attribute.
        """
        from torchvision.datasets import CelebA as Known  # noqa: PLC0415 - slow to import

        sums = {name: md5 for _, md5, name in Known.file_list}
        parts, owners, attribute_lines = (self._rows(name, sums[name]) for name in LISTS)
        # The first line has the number of images.
        _, titles, *attributes = attribute_lines
        if self.attribute not in titles:
            raise ValueError(f"attribute must be one of {', '.join(titles)}, got {self.attribute}")
        column = titles.index(self.attribute) + 1
        if not len(parts) == len(owners) == len(attributes):
            raise ValueError(f"{', '.join(LISTS)} in {self.folder} must have a line for each image: copy them again")
        names = np.array([row[0] for row in parts])
        part = np.array([int(row[1]) for row in parts])
        y = np.array([int(row[column]) > 0 for row in attributes], np.int64)
        celebrities = np.array([int(row[1]) for row in owners])
        listed: dict[str, ListedImages] = {}
        for split, number in PARTS.items():
            rows = part == number
            listed[split] = ListedImages(names=names[rows].tolist(), y=y[rows], owners=celebrities[rows])
        return listed

    def _rows(self, name: str, md5: str) -> list[list[str]]:
        """Read the words of each line of a list.

        Args:
            name: Name of the file.
            md5: The md5 that torchvision publishes of it.

        Raises:
            FileNotFoundError: There is no such file.
            ValueError: The file has another md5.
        """
        path = self.folder / name
        if not path.is_file():
            raise FileNotFoundError(
                f"CelebA in root {self.root} must have {path}: copy it there, or let LEAF's preprocess.sh write "
                f"{self.folder}/train/*.json and test/*.json"
            )
        fault = file_fault(path, md5)
        if fault:
            raise ValueError(f"{path} must be the published list ({fault}): copy it again")
        return [line.split() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]

    def _images(self, listed: ListedImages, split: str) -> Images:
        """Read the images of a split that `limit` leaves.

        Args:
            listed: All images of the split.
            split: Name of the split.
        """
        rows = self.limited_rows(split, labels=listed.y, size=len(listed.y))
        paths = [str(self.folder / IMAGES / listed.names[row]) for row in rows]
        x = read_images(paths, self.image_size)
        return Images(x=x, y=torch.from_numpy(listed.y[rows]), columns={"celebrity": listed.owners[rows]})
