"""Images in folders: a folder for each class, and Tiny-ImageNet's own layout."""

import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from pytorch_lightning.utilities import rank_zero_warn
from torch import Tensor

from fl_lightning.data.images import (
    Augmentation,
    Images,
    ImageSource,
    Normalization,
    eight_bits_as_floats,
    error_line,
    is_deep,
    loaded,
)
from fl_lightning.data.published import check_published
from fl_lightning.data.sources import AUTHORS
from fl_lightning.data.splits import Split
from fl_lightning.utils.settings import as_list, check_count

Listed = Sequence[tuple[str, int]]
"""The files of a split, each with its class."""


AGAIN = "unpack tiny-imagenet-200.zip again"
RESIZE = "set image_size, to which all are resized"


class _FolderSource(ImageSource):
    """RGB images that are read from a file each."""

    remedy: ClassVar[str]
    """For an image of another size."""

    def __init__(
        self, root: str, augmentation: Augmentation, normalize: Normalization, limit: int | None = None
    ) -> None:
        super().__init__(root, augmentation, normalize, limit)
        self.folder = Path(root).expanduser()

    def _read(self, train: Listed, test: Listed | None, image_size: int | None = None) -> tuple[Split, Split | None]:
        """Read the images of both splits."""
        train = self._chosen(train, "train")
        test = test and self._chosen(test, "test")
        listed = [*train, *(test or [])]
        x = read_images([path for path, _ in listed], image_size, self.remedy)
        y = torch.tensor([label for _, label in listed])
        n = len(train)
        training, testing = self.splits(Images(x[:n], y[:n]), None if test is None else Images(x[n:], y[n:]))
        return training, testing

    def _chosen(self, listed: Listed, split: str) -> Listed:
        """Leave at most `limit` files of a split, so that no others are read."""
        labels = np.array([label for _, label in listed])
        return [listed[i] for i in self.limited_rows(split, labels, len(listed))]


class ImageFolder(_FolderSource):
    """Images in `root/train/<class>/*` and `root/test/<class>/*`, as torchvision's `ImageFolder` reads them.

    CINIC-10 has this layout, and your own images may. Grey images, palettes and transparency become RGB. Images of 16
    bits, and of floats in [0, 1], are scaled by what their type can hold and kept as floats; other images of more than
    8 bits are refused. Files of other types are counted in one line. The class names are those of the folders, in
    alphabetical order.

    Args:
        root: folder that holds the folders of the splits.
        train_folders: their names; the images of several are joined, such as `[train, valid]` of CINIC-10.
        test_folder: its name; None: `test` where there is such a folder, else there are no test samples.
        image_size: height and width to which all images are resized (stretched, bilinear); None: all have one size.
        augmentation: of training batches, as for `MNIST`.
        normalize: of all images, as for `MNIST`; `standard` measures the mean and deviation of the training images.
        limit: most samples of each split, drawn by class; None: all.
    """

    remedy = RESIZE
    named_by_root: ClassVar[bool] = True
    """The name of `root` tells which images these are."""

    def __init__(
        self,
        root: str = "data",
        train_folders: Sequence[str] = ("train",),
        test_folder: str | None = None,
        image_size: int | None = None,
        augmentation: Augmentation = "none",
        normalize: Normalization = "standard",
        limit: int | None = None,
    ) -> None:
        super().__init__(root, augmentation, normalize, limit)
        check_count(1, image_size=image_size)
        self.train_folders = as_list(train_folders)
        self.test_folder = test_folder
        self.image_size = image_size
        if not self.train_folders:
            raise ValueError("train_folders must name at least one folder, got none; leave it out for train")

    def load(self) -> tuple[Split, Split | None]:
        train = [self._listed(name) for name in self.train_folders]
        tests = self.test_folder is not None or (self.folder / "test").is_dir()
        test = self._listed(self.test_folder or "test") if tests else None
        self.class_names = tuple(train[0].classes)
        self.num_classes = len(self.class_names)
        for listed in (*train[1:], *([test] if test else [])):
            self._check_classes(train[0], listed)
        files = [sample for listed in train for sample in listed.samples]
        return self._read(files, test and test.samples, self.image_size)

    def _listed(self, name: str) -> Any:
        """List the images of a split."""
        from torchvision import datasets  # noqa: PLC0415 - slow to import

        folder = self.folder / name
        if not folder.is_dir():
            raise FileNotFoundError(
                f"there is no folder {folder}, which should hold images as <class>/<image>: set root to the folder "
                f"that holds {name}"
            )
        try:
            listed = datasets.ImageFolder(folder)
        except FileNotFoundError as error:  # no class, or a class without images
            raise FileNotFoundError(
                f"{folder} must hold a folder of images for each class ({error_line(error)}): add what is missing, or "
                f"delete folders without images"
            ) from error
        tell_unread(folder, listed.extensions)
        return listed

    def _check_classes(self, first: Any, other: Any) -> None:
        if different := sorted({*first.classes} ^ {*other.classes}):
            has, lacks = (first, other) if different[0] in first.classes else (other, first)
            raise ValueError(
                f"all splits must have the same classes, and {lacks.root} has no folder {different[0]} as {has.root} "
                f"has: add it, or delete the other"
            )


class TinyImageNet(_FolderSource):
    """Photographs of 200 classes, 100,000 / 10,000 images of 3×64×64, the published validation images as test split.

    The published test images have no labels. Grey images become RGB. Classes are in the order of their WordNet ids.

    Args:
        root: folder that holds `tiny-imagenet-200/`, unpacked from tiny-imagenet-200.zip.
        augmentation: of training batches, as for `MNIST`.
        normalize: of all images, as for `MNIST`; `standard` measures the mean and deviation of the training images.
        limit: most samples of each split, drawn by class; None: all.
    """

    classes_by = AUTHORS
    remedy = AGAIN
    shape = (3, 64, 64)

    def __init__(
        self,
        root: str = "data",
        augmentation: Augmentation = "none",
        normalize: Normalization = "standard",
        limit: int | None = None,
    ) -> None:
        super().__init__(root, augmentation, normalize, limit)
        self.folder /= "tiny-imagenet-200"

    def load(self) -> tuple[Split, Split | None]:
        ids = sorted(line for line, *_ in self._lines("wnids.txt"))
        words = {key: text for key, text, *_ in self._lines("words.txt", 2)}
        self.num_classes = len(ids)
        self.class_names = short_names([words.get(key, key) for key in ids])
        classes = {key: label for label, key in enumerate(ids)}
        train = []
        for key, label in classes.items():
            images = sorted((self.folder / "train" / key / "images").glob("*.JPEG"))
            train += [(str(path), label) for path in images]
        self._check_balance("train/*/images", train, ids)
        test = []
        for name, key, *_ in self._lines("val/val_annotations.txt", 2):
            if key not in classes:
                raise ValueError(f"{self.folder / 'val/val_annotations.txt'} names {key}, wnids.txt does not: {AGAIN}")
            test.append((str(self.folder / "val" / "images" / name), classes[key]))
        self._check_balance("val/val_annotations.txt", test, ids)
        labels = [(torch.tensor([label for _, label in listed]), self.shape) for listed in (train, test)]
        check_published("TinyImageNet", self.root, self.shape, labels)
        return self._read(train, test)

    def _lines(self, name: str, columns: int = 1) -> list[list[str]]:
        """Read a table with tabs between its columns.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: a line with fewer columns.
        """
        path = self.folder / name
        if not path.is_file():
            raise FileNotFoundError(
                f"Tiny-ImageNet was not found in root {self.root}, which should hold {path}: unpack "
                f"tiny-imagenet-200.zip (http://cs231n.stanford.edu/tiny-imagenet-200.zip) there, or name the folder "
                f"that holds tiny-imagenet-200"
            )
        rows = [line.split("\t") for line in path.read_text(encoding="utf-8").splitlines() if line]
        if not rows or any(len(row) < columns for row in rows):
            raise ValueError(f"{path} is corrupt, each line must have {columns} columns: {AGAIN}")
        return rows

    def _check_balance(self, place: str, listed: Listed, ids: Sequence[str]) -> None:
        """Refuse classes with fewer images than others, which all have 500 and 50 as published."""
        counts = Counter(label for _, label in listed)
        fewest, most = (choose(range(len(ids)), key=lambda label: counts[label]) for choose in (min, max))
        if counts[fewest] < counts[most] or not listed:
            raise ValueError(
                f"all classes must have as many images, and {self.folder / place} has {counts[fewest]} of "
                f"{ids[fewest]} and {counts[most]} of {ids[most]}: {AGAIN}"
            )


def tell_unread(folder: Path, extensions: Sequence[str]) -> None:
    """Count the files of a split that are not read, by the endings of their names, in one line.

    Args:
        folder: of the split.
        extensions: of the names of files that are read.
    """
    counts: Counter[str] = Counter()
    for path in folder.glob("*/**/*"):
        ending = path.suffix.lower()
        if ending not in extensions and not path.name.startswith(".") and path.is_file():
            counts[ending or "no ending"] += 1
    if counts:
        kinds = ", ".join(f"{count} of {ending}" for ending, count in sorted(counts.items()))
        rank_zero_warn(
            f"{folder} holds {counts.total()} files that are not read ({kinds}); convert images to png, or delete them"
        )


def short_names(texts: Sequence[str]) -> tuple[str, ...]:
    """Shorten lists of synonyms to the first, where that is not another's too.

    >>> short_names(["goldfish, Carassius auratus", "crane, bird", "crane, machine"])
    ('goldfish', 'crane, bird', 'crane, machine')
    """
    firsts = [text.split(",")[0] for text in texts]
    return tuple(first if firsts.count(first) == 1 else text for first, text in zip(firsts, texts, strict=True))


def read_images(paths: Sequence[str], image_size: int | None = None, remedy: str = RESIZE) -> Tensor:
    """Read images of one size as RGB, (n, 3, H, W): uint8, or floats in [0, 255] if one has more than 8 bits.

    Args:
        paths: of the files.
        image_size: height and width to which all are resized; None: they are left as they are.
        remedy: for an image of another size.

    Raises:
        ValueError: a file that is no image, an image of another size, or one of which nothing tells what is white.
    """
    from PIL import Image  # noqa: PLC0415 - slow to import
    from PIL.Image import Resampling  # noqa: PLC0415

    images = np.empty((0, 3, 0, 0), np.uint8)
    size = None
    with warnings.catch_warnings(action="ignore"):  # of Pillow, about transparency that is dropped
        for i, path in enumerate(paths):
            try:
                opened = Image.open(path)
            except Exception as error:  # Pillow raises all kinds
                raise ValueError(
                    f"{path} could not be read as an image ({error_line(error)}): replace or delete it"
                ) from error
            with opened:
                picture = loaded(opened, str(path))
                read = picture if is_deep(picture) else picture.convert("RGB")
            image: Any = eight_bits_as_floats(read, str(path))
            if image_size is not None:
                image = image.resize((image_size, image_size), Resampling.BILINEAR)
            if size is None:
                size = image.size
                images = np.empty((len(paths), 3, image.height, image.width), np.uint8)
            if image.size != size:
                raise ValueError(
                    f"all images must have one size, got {_pixels(size)} of {paths[0]} and {_pixels(image.size)} of "
                    f"{path}: {remedy}"
                )
            pixels = np.asarray(image)
            if pixels.ndim == 2:  # of more than 8 bits
                images = images.astype(np.float32, copy=False)
                images[i] = pixels
                continue
            images[i] = pixels.transpose(2, 0, 1)
    return torch.from_numpy(images)


def _pixels(size: tuple[int, int]) -> str:
    return f"{size[1]}×{size[0]}"
