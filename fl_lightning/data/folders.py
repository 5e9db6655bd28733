"""Sources of images in folders: a folder for each class, and Tiny-ImageNet's own layout."""

import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
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
from fl_lightning.data.new_samples import NewSamples
from fl_lightning.data.published import check_published
from fl_lightning.data.schema import Schema
from fl_lightning.data.sources import AUTHORS
from fl_lightning.data.splits import Split
from fl_lightning.utils.settings import as_list, check_count

Listed = Sequence[tuple[str, int]]
"""The files of a split, each with its class."""

AGAIN = "unpack tiny-imagenet-200.zip again"
"""The remedy for files that are not as published."""

RESIZE = "set image_size, to which all are resized"
"""The remedy for images of several sizes."""


class _FolderSource(ImageSource):
    """Reads RGB images from a file each.

    Args:
        root: Folder of the files, as the subclass says.
        augmentation: Augmentation of training batches, as for `MNIST`.
        normalize: Normalization of all images, as for `MNIST`.
        limit: Most samples of each split, drawn by class. None: all.
    """

    remedy: ClassVar[str]
    """The remedy for an image of another size, for the error."""

    image_size: int | None = None
    """Height and width to which all images are resized. None: they keep their size."""

    places = ("root",)

    def __init__(
        self, root: str, augmentation: Augmentation, normalize: Normalization, limit: int | None = None
    ) -> None:
        super().__init__(root=root, augmentation=augmentation, normalize=normalize, limit=limit)
        self.folder = Path(root).expanduser()

    def _read(self, train: Listed, test: Listed | None, image_size: int | None = None) -> tuple[Split, Split | None]:
        """Read the images of both splits.

        Args:
            train: Files of the training split.
            test: Files of the test split. None: there is none.
            image_size: Height and width to which all images are resized. None: all have one size.
        """
        train = self._chosen(train, "train")
        listed = list(train)
        if test:
            test = self._chosen(test, "test")
            listed += test
        paths = [path for path, _ in listed]
        x = read_images(paths, image_size=image_size, remedy=self.remedy)
        y = torch.tensor([label for _, label in listed])
        n = len(train)
        images = Images(x=x[:n], y=y[:n])
        test_images = None if test is None else Images(x=x[n:], y=y[n:])
        training, testing = self.splits(images, test_images)
        return training, testing

    def read_new(self, path: Path, schema: Schema) -> NewSamples:
        """Read the images of a folder and of all folders below it, or one image.

        The name of an image is its path below the folder. Classes are not read from names of folders.
        """
        root = path if path.is_dir() else path.parent
        paths = new_images(path)
        remedy = f"resize them to {sized(schema)}"
        x = read_images([str(found) for found in paths], image_size=self.image_size, remedy=remedy)
        names = [found.relative_to(root).as_posix() for found in paths]
        shape = None if schema.inputs is None else schema.inputs.shape
        if shape is not None and tuple(x.shape[1:]) != shape:
            raise ValueError(
                f"the images of --new must have {sized(schema)} pixels as the training images, got "
                f"{_pixels((x.shape[3], x.shape[2]))} in {paths[0]}; {remedy}"
            )
        return NewSamples.of(x, names=names, column="file", schema=schema)

    def _chosen(self, listed: Listed, split: str) -> Listed:
        """Choose at most `limit` files of a split, so that no other files are read."""
        labels = np.array([label for _, label in listed])
        return [listed[i] for i in self.limited_rows(split, labels, len(listed))]


class ImageFolder(_FolderSource):
    """Reads images in `root/train/<class>/*` and `root/test/<class>/*`, as torchvision's `ImageFolder` does.

    CINIC-10 has this layout, and your own images may have it. Grey images, palettes and transparency become RGB. Images
    of 16 bits, and of floats in [0, 1], are scaled by the largest value of their type and kept as floats. Other images
    of more than 8 bits are refused. Files of other types are counted in one line. The class names are the names of the
    folders, in alphabetical order.

    Args:
        root: Folder that holds the folders of the splits.
        train_folders: Names of the training folders, whose images are joined, such as `[train, valid]` of CINIC-10.
        test_folder: Name of the test folder. None: `test` if there is such a folder, else there are no test samples.
        image_size: Height and width to which all images are resized (stretched, bilinear). None: all have one size.
        augmentation: Augmentation of training batches, as for `MNIST`.
        normalize: Normalization of all images, as for `MNIST`. `standard` measures the mean and deviation of the
            training images.
        limit: Most samples of each split, drawn by class. None: all.

    Raises:
        ValueError: `train_folders` is empty, or `image_size` is below 1.
    """

    remedy = RESIZE

    def __init__(
        self,
        root: str = "data",
        train_folders: Sequence[str] = ("train",),
        test_folder: str | None = None,
        image_size: int | None = None,
        *,
        augmentation: Augmentation = "none",
        normalize: Normalization = "standard",
        limit: int | None = None,
    ) -> None:
        super().__init__(root=root, augmentation=augmentation, normalize=normalize, limit=limit)
        check_count(1, image_size=image_size)
        self.train_folders = as_list(train_folders)
        self.test_folder = test_folder
        self.image_size = image_size
        if not self.train_folders:
            raise ValueError("train_folders must name at least one folder, got none; leave it out for train")

    def load(self) -> tuple[Split, Split | None]:
        train = [self._listed(name) for name in self.train_folders]
        others = train[1:]
        test_files = None
        if self.test_folder is not None or (self.folder / "test").is_dir():
            test = self._listed(self.test_folder or "test")
            others.append(test)
            test_files = test.samples
        self.class_names = tuple(train[0].classes)
        self.num_classes = len(self.class_names)
        for listed in others:
            self._check_classes(train[0], listed)
        files = []
        for listed in train:
            files += listed.samples
        return self._read(files, test=test_files, image_size=self.image_size)

    def _listed(self, name: str) -> Any:
        """List the images of a split as torchvision's `ImageFolder`, and warn of files that are not read.

        Args:
            name: Name of the split's folder.

        Raises:
            FileNotFoundError: There is no such folder, or a class has no images.
        """
        from torchvision import datasets  # noqa: PLC0415 - slow to import

        folder = self.folder / name
        if not folder.is_dir():
            raise FileNotFoundError(
                f"there is no folder {folder}, which should hold images as <class>/<image>: set root to the folder "
                f"that holds {name}"
            )
        try:
            listed = datasets.ImageFolder(folder)
        except FileNotFoundError as error:
            raise FileNotFoundError(
                f"{folder} must hold a folder of images for each class ({error_line(error)}): add what is missing, or "
                f"delete folders without images"
            ) from error
        tell_unread(folder, listed.extensions)
        return listed

    def _check_classes(self, first: Any, other: Any) -> None:
        """Refuse a split with other classes than the first.

        Args:
            first: The first split, as torchvision's `ImageFolder`.
            other: The other split.

        Raises:
            ValueError: One of the splits has a class that the other does not have.
        """
        different = sorted(set(first.classes) ^ set(other.classes))
        if not different:
            return
        name = different[0]
        has = other
        lacks = first
        if name in first.classes:
            has = first
            lacks = other
        raise ValueError(
            f"all splits must have the same classes, and {lacks.root} has no folder {name} as {has.root} has: add it, "
            f"or delete the other"
        )


class TinyImageNet(_FolderSource):
    """Reads photographs of 200 classes, 100,000 training images and 10,000 test images of 3×64×64.

    The published validation images are the test split, because the published test images have no labels. Grey images
    become RGB. Classes are in the order of their WordNet ids.

    Args:
        root: Folder that holds `tiny-imagenet-200/`, unpacked from tiny-imagenet-200.zip.
        augmentation: Augmentation of training batches, as for `MNIST`.
        normalize: Normalization of all images, as for `MNIST`. `standard` measures the mean and deviation of the
            training images.
        limit: Most samples of each split, drawn by class. None: all.
    """

    classes_by = AUTHORS
    remedy = AGAIN
    is_published = True
    shape = (3, 64, 64)

    def __init__(
        self,
        root: str = "data",
        augmentation: Augmentation = "none",
        normalize: Normalization = "standard",
        limit: int | None = None,
    ) -> None:
        super().__init__(root=root, augmentation=augmentation, normalize=normalize, limit=limit)
        self.folder /= "tiny-imagenet-200"

    def load(self) -> tuple[Split, Split | None]:
        ids = sorted(line for line, *_ in self._lines("wnids.txt"))
        words = {key: text for key, text, *_ in self._lines("words.txt", columns=2)}
        self.num_classes = len(ids)
        self.class_names = short_names([words.get(key, key) for key in ids])
        classes = {key: label for label, key in enumerate(ids)}
        train = self._training_files(classes)
        self._check_balance("train/*/images", train, ids)
        test = self._test_files(classes)
        self._check_balance("val/val_annotations.txt", test, ids)
        held: list[tuple[Tensor, Sequence[int]]] = []
        for listed in (train, test):
            labels = torch.tensor([label for _, label in listed])
            held.append((labels, self.shape))
        check_published(name="TinyImageNet", place=self.root, shape=self.shape, splits=held)
        return self._read(train, test)

    def _training_files(self, classes: Mapping[str, int]) -> list[tuple[str, int]]:
        """List the training images.

        Args:
            classes: Class of each WordNet id.
        """
        train: list[tuple[str, int]] = []
        for key, label in classes.items():
            images = sorted((self.folder / "train" / key / "images").glob("*.JPEG"))
            train += [(str(path), label) for path in images]
        return train

    def _test_files(self, classes: Mapping[str, int]) -> list[tuple[str, int]]:
        """List the published validation images.

        Args:
            classes: Class of each WordNet id.

        Raises:
            ValueError: An image is of a class without a number.
        """
        annotations = "val/val_annotations.txt"
        test: list[tuple[str, int]] = []
        for name, key, *_ in self._lines(annotations, columns=2):
            if key not in classes:
                raise ValueError(f"{self.folder / annotations} names {key}, wnids.txt does not: {AGAIN}")
            path = self.folder / "val" / "images" / name
            test.append((str(path), classes[key]))
        return test

    def _lines(self, name: str, columns: int = 1) -> list[list[str]]:
        """Read a table with tabs between its columns.

        Args:
            name: Name of the file below the data set's folder.
            columns: Least number of columns.

        Raises:
            FileNotFoundError: There is no such file.
            ValueError: The file is empty, or a line has fewer columns.
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
        """Refuse classes with fewer images than others. As published, each class has 500 and 50.

        Args:
            place: Place of the images below the data set's folder, for the error.
            listed: The images.
            ids: WordNet id of each class.

        Raises:
            ValueError: A class has fewer images than another, or there are no images.
        """
        counts = Counter(label for _, label in listed)
        fewest = min(range(len(ids)), key=lambda label: counts[label])
        most = max(range(len(ids)), key=lambda label: counts[label])
        if counts[fewest] < counts[most] or not listed:
            raise ValueError(
                f"all classes must have as many images, and {self.folder / place} has {counts[fewest]} of "
                f"{ids[fewest]} and {counts[most]} of {ids[most]}: {AGAIN}"
            )


def tell_unread(folder: Path, extensions: Sequence[str]) -> None:
    """Count the files of a split that are not read, by the endings of their names, in one warning.

    Args:
        folder: Folder of the split.
        extensions: Endings of the names of files that are read.
    """
    counts: Counter[str] = Counter()
    for path in folder.glob("*/**/*"):
        ending = path.suffix.lower()
        if ending not in extensions and not path.name.startswith(".") and path.is_file():
            counts[ending or "no ending"] += 1
    warn_of_unread(folder, counts)


def warn_of_unread(folder: Path, counts: Counter[str]) -> None:
    """Warn of files that are not read, if there are any.

    Args:
        folder: Folder of the files.
        counts: Number of the files by the ending of their names.
    """
    if counts:
        kinds = ", ".join(f"{count} of {ending}" for ending, count in sorted(counts.items()))
        rank_zero_warn(
            f"{folder} holds {counts.total()} files that are not read ({kinds}); convert images to png, or delete them"
        )


def new_images(path: Path) -> list[Path]:
    """List an image, or the images of a folder and of all folders below it, in the order of their paths.

    Files of other types are counted in one warning. Hidden files are left out.

    Raises:
        ValueError: There is no image.
    """
    from torchvision.datasets.folder import IMG_EXTENSIONS  # noqa: PLC0415 - slow to import

    if path.is_file():
        return [path]
    found = []
    others: Counter[str] = Counter()
    for file in sorted(path.rglob("*")):
        is_hidden = any(part.startswith(".") for part in file.relative_to(path).parts)
        # A link that leads nowhere is an image that cannot be read.
        is_lost = file.is_symlink() and not file.exists()
        if is_hidden or not (file.is_file() or is_lost):
            continue
        if file.suffix.lower() in IMG_EXTENSIONS:
            found.append(file)
        else:
            others[file.suffix.lower() or "no ending"] += 1
    if not found:
        raise ValueError(f"--new must be an image or a folder of images, got {path}, which holds none; name another")
    warn_of_unread(path, others)
    return found


def sized(schema: Schema) -> str:
    """Return the height and width of the training images in a sentence."""
    shape = None if schema.inputs is None else schema.inputs.shape
    return "one size" if shape is None else f"{shape[-2]}×{shape[-1]}"


def short_names(texts: Sequence[str]) -> tuple[str, ...]:
    """Shorten lists of synonyms to the first synonym, if no other list begins with it.

    Args:
        texts: Lists of synonyms, separated by commas.

    >>> short_names(["goldfish, Carassius auratus", "crane, bird", "crane, machine"])
    ('goldfish', 'crane, bird', 'crane, machine')
    """
    firsts = [text.split(",")[0] for text in texts]
    names = []
    for first, text in zip(firsts, texts, strict=True):
        is_alone = firsts.count(first) == 1
        names.append(first if is_alone else text)
    return tuple(names)


def read_images(paths: Sequence[str], image_size: int | None = None, remedy: str = RESIZE) -> Tensor:
    """Read images of one size as RGB.

    Args:
        paths: Paths of the files, n of them.
        image_size: Height and width to which all images are resized. None: they keep their size.
        remedy: The remedy for an image of another size, for the error.

    Returns:
        The images, (n, 3, H, W): uint8, or floats in [0, 255] if an image has more than 8 bits.

    Raises:
        ValueError: A file is no image, an image has another size, or nothing tells which value of an image is white.
    """
    images = np.empty((0, 3, 0, 0), np.uint8)
    size = None
    # Pillow warns of transparency that is dropped.
    with warnings.catch_warnings(action="ignore"):
        for i, path in enumerate(paths):
            image = _read_image(path, image_size)
            if size is None:
                size = image.size
                images = np.empty((len(paths), 3, image.height, image.width), np.uint8)
            if image.size != size:
                raise ValueError(
                    f"all images must have one size, got {_pixels(size)} of {paths[0]} and {_pixels(image.size)} of "
                    f"{path}: {remedy}"
                )
            pixels = np.asarray(image)
            has_more_than_8_bits = pixels.ndim == 2
            if has_more_than_8_bits:
                images = images.astype(np.float32, copy=False)
                images[i] = pixels
                continue
            images[i] = pixels.transpose(2, 0, 1)
    return torch.from_numpy(images)


def _read_image(path: str, image_size: int | None) -> Any:
    """Read an image with Pillow: RGB, or grey floats in [0, 255] if it has more than 8 bits.

    Args:
        path: Path of the file.
        image_size: Height and width to which the image is resized. None: it keeps its size.

    Raises:
        ValueError: The file is no image, or nothing tells which value of the image is white.
    """
    from PIL import Image  # noqa: PLC0415 - slow to import
    from PIL.Image import Resampling  # noqa: PLC0415

    try:
        opened = Image.open(path)
    # Pillow raises errors of all kinds.
    except Exception as error:
        raise ValueError(f"{path} could not be read as an image ({error_line(error)}): replace or delete it") from error
    with opened:
        picture = loaded(opened, str(path))
        read = picture if is_deep(picture) else picture.convert("RGB")
    image: Any = eight_bits_as_floats(read, str(path))
    if image_size is not None:
        image = image.resize((image_size, image_size), Resampling.BILINEAR)
    return image


def _pixels(size: tuple[int, int]) -> str:
    """Return the height and width of an image, for errors, of its width and height."""
    return f"{size[1]}×{size[0]}"
