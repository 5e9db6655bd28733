"""Data sets of LEAF with natural owners, read from the json files that LEAF's scripts write.

A file is an object with `users`, a list of names, and `user_data`, which holds `{"x": [...], "y": [...]}` of each name.
Source: Caldas et al. 2018, arXiv:1812.01097.
"""

import json
import string
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from fl_lightning.data.images import Augmentation, Images, ImageSource, Normalization
from fl_lightning.data.sources import AUTHORS, Source
from fl_lightning.data.splits import Array, Split, TensorSplit
from fl_lightning.data.transforms import AsLong

LETTERS = "\n !\"&'(),-.0123456789:;>?" + string.ascii_uppercase + "[]" + string.ascii_lowercase + "}"
"""LEAF's 80 characters of Shakespeare, numbered in this order."""


class LeafSplit(NamedTuple):
    """Holds the samples of a split.

    Args:
        x: Inputs (n, ...), as `convert` made them.
        y: Target of each sample, n of them, as `targets` made them.
        owners: Name of each sample's owner, (n,).
    """

    x: Array
    y: list[Any]
    owners: Array


def read_leaf(
    root: str,
    split: str,
    dataset: str,
    convert: Callable[[list[Any]], Array],
    *,
    targets: Callable[[list[Any]], list[Any]] = list,
    overlap: int = 0,
) -> LeafSplit:
    """Read all files of a split, owner by owner in the order of their names.

    Args:
        root: Folder that holds `train/*.json` and `test/*.json`.
        split: The split, `train` or `test`.
        dataset: Name of LEAF's folder, for the error.
        convert: Function that makes an array (n, ...) of one owner's inputs. It raises a ValueError for other values.
        targets: Function that makes the targets of the values in the files. It raises a ValueError for other values.
        overlap: Number of samples that LEAF counts of an owner and does not write, as for `check_sizes`.

    Raises:
        FileNotFoundError: The folder of the split holds no json files.
        ValueError: A file is not LEAF's, an owner is in two files, or inputs and targets differ in number.
    """
    folder = Path(root).expanduser() / split
    files = sorted(folder.glob("*.json"))
    if not files:
        raise FileNotFoundError(
            f"LEAF's {dataset} was not found in root {root}, which should hold {folder}/*.json: let preprocess.sh of "
            f"https://github.com/TalwalkarLab/leaf (data/{dataset}, -t sample) write it, and name its data folder"
        )
    owners: dict[str, tuple[Array, list[Any]]] = {}
    for path in files:
        read: dict[str, tuple[Array, list[Any]]] = {}
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            users = content["user_data"]
            sizes = {user: len(held["y"]) for user, held in users.items()}
            check_sizes(content, sizes, overlap=overlap)
            for user, held in users.items():
                if held["y"]:
                    read[user] = (convert(held["x"]), targets(held["y"]))
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(
                f"{path} must be a file of LEAF's, with user_data of x and y ({type(error).__name__}: {error}): write "
                f"it again"
            ) from error
        twice = sorted(owners.keys() & read)
        if twice:
            raise ValueError(
                f"each owner must be in one file of {folder}, got {twice[0]} again in {path}: write it again"
            )
        owners |= read
    names = sorted(owners)
    if not names or any(len(x) != len(y) for x, y in owners.values()):
        raise ValueError(f"each owner in {folder} must have as many x as y, and at least one of them: write it again")
    x = np.concatenate([owners[name][0] for name in names])
    y: list[Any] = []
    counts: list[int] = []
    for name in names:
        _, of_owner = owners[name]
        y += of_owner
        counts.append(len(of_owner))
    return LeafSplit(x=x, y=y, owners=np.repeat(names, counts))


def check_sizes(content: Mapping[str, Any], sizes: Mapping[str, int], overlap: int = 0) -> None:
    """Compare the samples of each owner with the numbers of samples that the file lists, if it lists them.

    The number of owners depends on the options of LEAF's scripts (`--sf`, `-k`). Some versions of the scripts write
    owners without a sample that they do not list.

    Args:
        content: Content of the file.
        sizes: Number of samples of each owner in `user_data`.
        overlap: Number of samples of an owner that the file may count without holding them.

    Raises:
        ValueError: The file holds another number of samples of an owner than it lists.

    >>> check_sizes({"users": ["a"], "num_samples": [80]}, {"a": 1, "b": 0}, overlap=79)
    """
    if "num_samples" not in content:
        return
    listed = dict(zip(content["users"], content["num_samples"], strict=True))
    for user in sorted(listed.keys() | sizes.keys()):
        counted = listed.get(user, 0)
        held = sizes.get(user, 0)
        if counted - held not in (0, overlap):
            raise ValueError(f"num_samples has {counted} of {user}, user_data {held}")


class FEMNIST(ImageSource):
    """Reads handwritten digits and letters by writer: 62 classes, 805,263 images of 1×28×28 of 3,550 writers in all.

    `data.by: writer` with `data.num_clients: null` makes each writer a client.

    Args:
        root: Folder that holds LEAF's `train/*.json` and `test/*.json`.
        augmentation: Augmentation of training batches, as for `MNIST`.
        normalize: Normalization of all images, as for `MNIST`. `standard` measures the mean and deviation of the
            training images.
        limit: Most samples of each split, drawn by class. None: all.
    """

    num_classes = 62
    classes_by = AUTHORS
    channels = 1
    places = ("root",)
    class_names = (*string.digits, *string.ascii_uppercase, *string.ascii_lowercase)

    def __init__(
        self,
        root: str = "data/femnist",
        augmentation: Augmentation = "none",
        normalize: Normalization = "standard",
        limit: int | None = None,
    ) -> None:
        super().__init__(root=root, augmentation=augmentation, normalize=normalize, limit=limit)

    def load(self) -> tuple[Split, Split]:
        training = self._images("train")
        testing = self._images("test")
        train, test = self.splits(training, testing)
        return train, test

    def _images(self, split: str) -> Images:
        """Read the images of a split, which the files hold as grey values in [0, 1]."""
        read = read_leaf(
            root=self.root,
            split=split,
            dataset="femnist",
            convert=as_bytes,
            targets=checked_classes,
        )
        return Images(x=torch.from_numpy(read.x), y=torch.tensor(read.y), columns={"writer": read.owners})


def as_bytes(images: list[Any]) -> Array:
    """Convert flat images of grey values in [0, 1] to uint8.

    Args:
        images: Grey values of each image, n lists of 784.

    Returns:
        The images, (n, 1, 28, 28) uint8.

    Raises:
        ValueError: A value is outside [0, 1], or an image does not have 784 values.

    >>> int(as_bytes([[1.0] * 784]).max()), as_bytes([[0.5] * 784]).shape
    (255, (1, 1, 28, 28))
    """
    shape = (-1, 1, 28, 28)
    greys = np.asarray(images, np.float32).reshape(shape)
    if not ((greys >= 0) & (greys <= 1)).all():
        raise ValueError(f"grey values lie in [0, 1], got {greys.min():g} to {greys.max():g}")
    return np.rint(greys * 255).astype(np.uint8)


def checked_classes(targets: list[Any]) -> list[int]:
    """Return the classes of images if they are classes.

    Args:
        targets: Class of each image, as it stands in the file.

    Raises:
        ValueError: A class is not a whole number in [0, 62).
    """
    for target in targets:
        if not isinstance(target, int) or not 0 <= target < FEMNIST.num_classes:
            raise ValueError(f"a class is a whole number in [0, {FEMNIST.num_classes}), got {target!r}")
    return list(targets)


class Shakespeare(Source):
    """Reads Shakespeare's plays by speaking role: the next character, and the 80 characters before it, of 80 kinds.

    `data.by: role` with `data.num_clients: null` makes each role a client. The plays have 4,226,158 samples and 1,129
    roles. Some 660 roles speak long enough for LEAF's sequences and have samples.
    Characters that LEAF does not number count as spaces.

    Args:
        root: Folder that holds LEAF's `train/*.json` and `test/*.json`.
        limit: Most samples of each split, drawn by class. None: all.
    """

    length = 80
    """The number of characters of a sample."""

    num_classes = len(LETTERS)
    classes_by = AUTHORS
    places = ("root",)
    class_names = tuple("\\n" if letter == "\n" else letter for letter in LETTERS)

    def __init__(self, root: str = "data/shakespeare", limit: int | None = None) -> None:
        self.root = root
        self.limit = limit

    def load(self) -> tuple[Split, Split]:
        train = self._split("train")
        test = self._split("test")
        return train, test

    def _split(self, name: str) -> TensorSplit:
        """Read the samples of a split."""
        # LEAF leaves out the first test samples, which reach into training samples, but counts them in num_samples.
        overlap = self.length - 1 if name == "test" else 0
        read = read_leaf(
            root=self.root,
            split=name,
            dataset="shakespeare",
            convert=as_numbers,
            targets=as_letters,
            overlap=overlap,
        )
        return TensorSplit(
            x=torch.from_numpy(read.x),
            y=torch.tensor(read.y),
            transform=AsLong(),
            columns={"role": read.owners},
        )


def as_letters(targets: list[Any]) -> list[int]:
    """Number the next characters.

    Args:
        targets: The next character of each sample, as it stands in the file.

    Raises:
        ValueError: A target is not one character.
    """
    for target in targets:
        if not isinstance(target, str) or len(target) != 1:
            raise ValueError(f"the next character is one, got {target!r}")
    return [int(number) for number in as_numbers(targets)[:, 0]]


NUMBERS = np.full(256, LETTERS.index(" "), np.uint8)
NUMBERS[np.frombuffer(LETTERS.encode("latin-1"), np.uint8)] = np.arange(len(LETTERS))
"""The number of each character by its code, (256,) uint8."""


def as_numbers(texts: list[str]) -> Array:
    """Number the characters of texts.

    Args:
        texts: Texts, n of them, of one length T.

    Returns:
        The numbers, (n, T) uint8. A character that LEAF does not number has the number of the space.

    >>> as_numbers(["ab", "b~"]).tolist()  # LEAF does not number the tilde
    [[53, 54], [54, 1]]
    """
    codes = np.stack([np.frombuffer(text.encode("utf-32-le"), "<u4") for text in texts])
    numbers: Array = NUMBERS[np.minimum(codes, len(NUMBERS) - 1)]
    return numbers
