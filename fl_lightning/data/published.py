"""Data sets as published: their numbers of images and checksums, by which wrong files are known at once."""

import hashlib
import math
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path

import torch
from torch import Tensor

ClassSizes = Sequence[int] | int
"""Images of each class, or of all where no balance is published."""

PUBLISHED: dict[str, tuple[ClassSizes, ClassSizes]] = {
    # LeCun, Cortes and Burges; the balance is the label files'
    "MNIST": (
        [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949],
        [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009],
    ),
    "FashionMNIST": ([6_000] * 10, [1_000] * 10),  # Xiao et al. 2017, arXiv:1708.07747, section 2
    "KMNIST": ([6_000] * 10, [1_000] * 10),  # Clanuwat et al. 2018, arXiv:1812.01718, and its README
    # Cohen et al. 2017, arXiv:1702.05373, Table II
    "EMNIST byclass": (697_932, 116_323),
    "EMNIST bymerge": (697_932, 116_323),
    "EMNIST balanced": ([2_400] * 47, [400] * 47),
    "EMNIST letters": ([4_800] * 26, [800] * 26),
    "EMNIST digits": ([24_000] * 10, [4_000] * 10),
    "EMNIST mnist": ([6_000] * 10, [1_000] * 10),
    "CIFAR10": ([5_000] * 10, [1_000] * 10),  # Krizhevsky 2009, and its page
    "CIFAR100": ([500] * 100, [100] * 100),
    "SVHN": (73_257, 26_032),  # Netzer et al. 2011, section 3
    "TinyImageNet": ([500] * 200, [50] * 200),  # Le and Yang 2015, Tiny ImageNet Visual Recognition Challenge
}
"""Training and test images by data set."""

GREYS = {"FashionMNIST": 0.286, "KMNIST": 0.192}
"""Mean grey value in [0, 1] of the training images of sets that nothing else tells apart, as they are normalised."""


def check_published(
    name: str, place: str, shape: Sequence[int], splits: Sequence[tuple[Tensor, Sequence[int]]]
) -> None:
    """Refuse images that are not as many, in all and of each class, or not of the shape, as a data set has.

    Only labels are counted, which takes less than a millisecond. A set that is not in `PUBLISHED` is not checked.

    Args:
        name: of the data set, and of its split where it has several.
        place: of its files, for the error.
        shape: of one image.
        splits: classes (n,) and shape of one image of the training and the test split.

    Raises:
        ValueError: naming what was expected and what was found.
    """
    for which, (y, held), published in zip(("training", "test"), splits, PUBLISHED.get(name, ()), strict=False):
        wanted, got = difference(published, shape, y, held)
        if wanted != got:
            raise ValueError(
                f"the {which} split of {name} in {place} must have {wanted}, as published, got {got}: the files are of "
                f"another data set or incomplete, fetch them again (data.source.limit takes fewer samples)"
            )


def check_grey(name: str, place: str, x: Tensor) -> None:
    """Refuse images with the mean grey value of another set of as many images, judged by the first thousand.

    Args:
        name: of the data set; one that is not in `GREYS` is not checked.
        place: of its files, for the error.
        x: training images, (n, C, H, W) uint8.

    Raises:
        ValueError: naming both values.
    """
    wanted = GREYS.get(name) if name in PUBLISHED else None
    if wanted is not None and abs((got := float(x[:1_000].float().mean()) / 255) - wanted) > 0.04:
        raise ValueError(
            f"the training images of {name} in {place} must have a mean grey value near {wanted}, got {got:.3f}: the "
            f"files are of another data set, fetch them again"
        )


def difference(published: ClassSizes, shape: Sequence[int], y: Tensor, held: Sequence[int]) -> tuple[str, str]:
    """Describe the first difference of a split from its published numbers, two equal texts where there is none.

    >>> difference([2, 1], (1, 8, 8), torch.tensor([0, 1, 1]), (1, 8, 8))
    ('2 images of class 0', '1 images of class 0')
    """
    size = published if isinstance(published, int) else sum(published)
    if (len(y), *held) != (size, *shape) or isinstance(published, int):
        return sized(size, shape), sized(len(y), held)
    counts = enumerate(zip_longest(published, torch.bincount(y.clamp(min=0)).tolist(), fillvalue=0))
    label, pair = next(((label, pair) for label, pair in counts if len({*pair}) > 1), (0, (0, 0)))
    wanted, got = (f"{count:,} images of class {label}" for count in pair)
    return wanted, got


def sized(count: int, shape: Sequence[int]) -> str:
    """Write how many images of a shape there are.

    >>> sized(60_000, (1, 28, 28))
    '60,000 images of 1×28×28'
    """
    return f"{count:,} images of {'×'.join(map(str, shape))}"


def file_fault(path: Path, md5: str | None) -> str | None:
    """Name the fault of a file, or None: by its md5 where one is given, else by its length against its idx header."""
    with path.open("rb") as file:
        if md5 is not None:
            digest = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
            return None if digest == md5 else f"its md5 is {digest}, not {md5}"
        head = file.read(4)
        sizes = file.read(4 * head[3]) if len(head) == 4 else b""
    if len(head) < 4 or head[:3] != b"\0\0\x08" or len(sizes) < 4 * head[3]:
        return "it does not begin as an idx file of bytes"
    promised = 4 + len(sizes) + math.prod(int.from_bytes(sizes[i : i + 4], "big") for i in range(0, len(sizes), 4))
    held = path.stat().st_size
    return None if held == promised else f"its header promises {promised:,} bytes, it holds {held:,}"
