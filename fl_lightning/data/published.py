"""Data sets as published: their numbers of images and checksums, which tell wrong files at once."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

ClassSizes = Sequence[int] | int
"""Number of images of each class, or of all images if no balance is published."""

PUBLISHED: dict[str, tuple[ClassSizes, ClassSizes]] = {
    # LeCun, Cortes and Burges. The balance is that of the label files.
    "MNIST": (
        [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949],
        [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009],
    ),
    # Xiao et al. 2017, arXiv:1708.07747, section 2.
    "FashionMNIST": ([6_000] * 10, [1_000] * 10),
    # Clanuwat et al. 2018, arXiv:1812.01718, and its README.
    "KMNIST": ([6_000] * 10, [1_000] * 10),
    # Cohen et al. 2017, arXiv:1702.05373, Table II
    "EMNIST byclass": (697_932, 116_323),
    "EMNIST bymerge": (697_932, 116_323),
    "EMNIST balanced": ([2_400] * 47, [400] * 47),
    "EMNIST letters": ([4_800] * 26, [800] * 26),
    "EMNIST digits": ([24_000] * 10, [4_000] * 10),
    "EMNIST mnist": ([6_000] * 10, [1_000] * 10),
    # Krizhevsky 2009, and its page.
    "CIFAR10": ([5_000] * 10, [1_000] * 10),
    "CIFAR100": ([500] * 100, [100] * 100),
    # Netzer et al. 2011, section 3.
    "SVHN": (73_257, 26_032),
    # Le and Yang 2015, Tiny ImageNet Visual Recognition Challenge.
    "TinyImageNet": ([500] * 200, [50] * 200),
}
"""Numbers of training and of test images, by data set."""

GREYS = {"FashionMNIST": 0.286, "KMNIST": 0.192}
"""Mean grey value in [0, 1] of the training images of sets that nothing else tells apart."""

GREY_TOLERANCE = 0.04
"""Largest difference from a mean grey value."""

GREY_IMAGES = 1_000
"""Number of images, the first ones, on which the mean grey value is measured."""

IDX_OF_BYTES = b"\0\0\x08"
"""Beginning of an idx file of bytes. Then come the number of dimensions, one byte, and their sizes, four bytes each."""

SIZE_BYTES = 4
"""Number of bytes of the size of a dimension."""


def check_published(
    name: str, place: str, shape: Sequence[int], splits: Sequence[tuple[Tensor, Sequence[int]]]
) -> None:
    """Refuse images of another number, in all or of a class, or of another shape than a data set has.

    Only labels are counted. A set that is not in `PUBLISHED` is not checked.

    Args:
        name: Name of the data set, and of its split if it has several.
        place: Place of its files, for the error.
        shape: Published shape of one image.
        splits: Classes (n,) and shape of one image of the training split, and those of the test split.

    Raises:
        ValueError: A number or a shape differs.
    """
    if name not in PUBLISHED:
        return
    for which, (y, found_shape), published in zip(("training", "test"), splits, PUBLISHED[name], strict=False):
        wanted, got = difference(published, shape=shape, y=y, found_shape=found_shape)
        if wanted != got:
            raise ValueError(
                f"the {which} split of {name} in {place} must have {wanted}, as published, got {got}: the files are of "
                f"another data set or incomplete, fetch them again (data.source.limit takes fewer samples)"
            )


def check_grey(name: str, place: str, x: Tensor) -> None:
    """Refuse images with the mean grey value of another set that has as many images.

    Args:
        name: Name of the data set. A set that is not in `GREYS` is not checked.
        place: Place of its files, for the error.
        x: Training images, (n, C, H, W) uint8.

    Raises:
        ValueError: The mean grey value differs.
    """
    if name not in GREYS or name not in PUBLISHED:
        return
    wanted = GREYS[name]
    got = float(x[:GREY_IMAGES].float().mean()) / 255
    if abs(got - wanted) > GREY_TOLERANCE:
        raise ValueError(
            f"the training images of {name} in {place} must have a mean grey value near {wanted}, got {got:.3f}: the "
            f"files are of another data set, fetch them again"
        )


def difference(
    published: ClassSizes, *, shape: Sequence[int], y: Tensor, found_shape: Sequence[int]
) -> tuple[str, str]:
    """Describe the first difference of a split from its published numbers.

    Args:
        published: Published number of images of each class, or of all.
        shape: Published shape of one image.
        y: Classes of the images, (n,).
        found_shape: Shape of one image.

    Returns:
        What is published and what was found. The two texts are equal if there is no difference.

    >>> difference([2, 1], shape=(1, 8, 8), y=torch.tensor([0, 1, 1]), found_shape=(1, 8, 8))
    ('2 images of class 0', '1 images of class 0')
    """
    size = published if isinstance(published, int) else sum(published)
    of_all = (sized(size, shape), sized(len(y), found_shape))
    is_same_in_all = len(y) == size and tuple(found_shape) == tuple(shape)
    if isinstance(published, int) or not is_same_in_all:
        return of_all
    found = torch.bincount(y.clamp(min=0), minlength=len(published)).tolist()
    for class_idx, got in enumerate(found):
        wanted = published[class_idx] if class_idx < len(published) else 0
        if got != wanted:
            return f"{wanted:,} images of class {class_idx}", f"{got:,} images of class {class_idx}"
    return of_all


def sized(count: int, shape: Sequence[int]) -> str:
    """Write how many images of a shape there are.

    >>> sized(60_000, (1, 28, 28))
    '60,000 images of 1×28×28'
    """
    return f"{count:,} images of {'×'.join(map(str, shape))}"


def file_fault(path: Path, md5: str | None) -> str | None:
    """Return the fault of a file, or None if it has none.

    Args:
        path: The file.
        md5: The published md5 in hexadecimal digits. None: the file is an idx file, whose header tells its length.
    """
    if md5 is None:
        return idx_fault(path)
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
    return None if digest == md5 else f"its md5 is {digest}, not {md5}"


def idx_fault(path: Path) -> str | None:
    """Return the fault of an idx file of bytes, whose header tells its length, or None if it has none.

    Args:
        path: The file.
    """
    with path.open("rb") as file:
        head = file.read(4)
        sizes = file.read(SIZE_BYTES * head[3]) if len(head) == 4 else b""
    if len(head) < 4 or head[:3] != IDX_OF_BYTES or len(sizes) < SIZE_BYTES * head[3]:
        return "it does not begin as an idx file of bytes"
    num_values = 1
    for start in range(0, len(sizes), SIZE_BYTES):
        num_values *= int.from_bytes(sizes[start : start + SIZE_BYTES], "big")
    promised = len(head) + len(sizes) + num_values
    held = path.stat().st_size
    return None if held == promised else f"its header promises {promised:,} bytes, it holds {held:,}"
