"""Data sets of LEAF with natural owners, read from the json files that its scripts write.

A file is an object with `users`, a list of names, and `user_data`, which has `{"x": [...], "y": [...]}` of each.
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
    """The samples of a split.

    Args:
        x: inputs, as `convert` made them.
        y: targets as they stand in the files.
        owners: name of each sample's owner, (n,).
    """

    x: Array
    y: list[Any]
    owners: Array


def read_leaf(
    root: str,
    split: str,
    dataset: str,
    convert: Callable[[list[Any]], Array],
    targets: Callable[[list[Any]], list[Any]] = list,
    overlap: int = 0,
) -> LeafSplit:
    """Read all files of a split, owner by owner in the order of their names.

    Args:
        root: folder that holds `train/*.json` and `test/*.json`.
        split: train or test.
        dataset: name of LEAF's folder, for the error.
        convert: makes an array (n, ...) of one owner's inputs.
        targets: makes the targets of what stands in the files; both raise a ValueError for what cannot be one.
        overlap: samples that LEAF counts of an owner and does not write, as `check_sizes` takes them.

    Raises:
        FileNotFoundError: there are no such files.
        ValueError: a file that is not LEAF's, or an owner in two files.
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
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            users = content["user_data"]
            check_sizes(content, {user: len(held["y"]) for user, held in users.items()}, overlap)
            read = {user: (convert(held["x"]), targets(held["y"])) for user, held in users.items() if held["y"]}
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(
                f"{path} must be a file of LEAF's, with user_data of x and y ({type(error).__name__}: {error}): write "
                f"it again"
            ) from error
        if twice := sorted(owners.keys() & read):
            raise ValueError(
                f"each owner must be in one file of {folder}, got {twice[0]} again in {path}: write it again"
            )
        owners |= read
    names = sorted(owners)
    if not names or any(len(x) != len(y) for x, y in owners.values()):
        raise ValueError(f"each owner in {folder} must have as many x as y, and at least one of them: write it again")
    x = np.concatenate([owners[name][0] for name in names])
    y = [target for name in names for target in owners[name][1]]
    return LeafSplit(x, y, np.repeat(names, [len(owners[name][1]) for name in names]))


def check_sizes(content: Mapping[str, Any], sizes: Mapping[str, int], overlap: int = 0) -> None:
    """Compare the samples of each owner with what the file tells of them, where it does.

    How many owners there are in all depends on what LEAF's scripts were asked for (`--sf`, `-k`). Some versions of
    them write owners without a sample that they do not list.

    Args:
        content: of the file.
        sizes: samples of each owner in `user_data`.
        overlap: samples of each owner that may have been counted and not written.

    Raises:
        ValueError: naming the owner.

    >>> check_sizes({"users": ["a"], "num_samples": [80]}, {"a": 1, "b": 0}, overlap=79)
    """
    if "num_samples" not in content:
        return
    listed = dict(zip(content["users"], content["num_samples"], strict=True))
    lacking = {user: listed.get(user, 0) - sizes.get(user, 0) for user in sorted(listed.keys() | sizes.keys())}
    if wrong := [user for user, count in lacking.items() if count not in (0, overlap)]:
        raise ValueError(f"num_samples has {listed.get(wrong[0], 0)} of {wrong[0]}, user_data {sizes.get(wrong[0], 0)}")


class FEMNIST(ImageSource):
    """Handwritten digits and letters by writer, 62 classes, 805,263 images of 1×28×28 of 3,550 writers in all.

    `data.by: writer` with `data.num_clients: null` makes each writer a client.

    Args:
        root: folder that holds LEAF's `train/*.json` and `test/*.json`.
        augmentation: of training batches, as for `MNIST`.
        normalize: of all images, as for `MNIST`; `standard` measures the mean and deviation of the training images.
        limit: most samples of each split, drawn by class; None: all.
    """

    num_classes = 62
    classes_by = AUTHORS
    channels = 1
    class_names = (*string.digits, *string.ascii_uppercase, *string.ascii_lowercase)

    def __init__(
        self,
        root: str = "data/femnist",
        augmentation: Augmentation = "none",
        normalize: Normalization = "standard",
        limit: int | None = None,
    ) -> None:
        super().__init__(root, augmentation, normalize, limit)

    def load(self) -> tuple[Split, Split]:
        train, test = self.splits(self._images("train"), self._images("test"))
        return train, test

    def _images(self, split: str) -> Images:
        """Read the images of a split, which the files hold as grey values in [0, 1]."""
        read = read_leaf(self.root, split, "femnist", as_bytes, checked_classes)
        return Images(torch.from_numpy(read.x), torch.tensor(read.y), {"writer": read.owners})


def as_bytes(images: list[Any]) -> Array:
    """Convert flat images of grey values in [0, 1], n of 784, to (n, 1, 28, 28) uint8.

    Raises:
        ValueError: other values.

    >>> int(as_bytes([[1.0] * 784]).max()), as_bytes([[0.5] * 784]).shape
    (255, (1, 1, 28, 28))
    """
    greys = np.asarray(images, np.float32).reshape(-1, 1, 28, 28)
    if not ((greys >= 0) & (greys <= 1)).all():
        raise ValueError(f"grey values lie in [0, 1], got {greys.min():g} to {greys.max():g}")
    return np.rint(greys * 255).astype(np.uint8)


def checked_classes(targets: list[Any]) -> list[int]:
    """Check the classes of images.

    Raises:
        ValueError: anything but a whole number in [0, 62).
    """
    if wrong := [target for target in targets if not isinstance(target, int) or not 0 <= target < FEMNIST.num_classes]:
        raise ValueError(f"a class is a whole number in [0, {FEMNIST.num_classes}), got {wrong[0]!r}")
    return list(targets)


class Shakespeare(Source):
    """The next character in Shakespeare's plays, by speaking role: 80 characters before it, of 80 kinds.

    `data.by: role` with `data.num_clients: null` makes each role a client. All have 4,226,158 samples of 1,129 roles,
    some 660 of which speak long enough for LEAF's sequences and have samples.
    Characters that LEAF does not number count as spaces.

    Args:
        root: folder that holds LEAF's `train/*.json` and `test/*.json`.
        limit: most samples of each split, drawn by class; None: all.
    """

    length = 80
    """Characters of a sample."""

    num_classes = len(LETTERS)
    classes_by = AUTHORS
    class_names = tuple("\\n" if letter == "\n" else letter for letter in LETTERS)

    def __init__(self, root: str = "data/shakespeare", limit: int | None = None) -> None:
        self.root = root
        self.limit = limit

    def load(self) -> tuple[Split, Split]:
        train, test = (self._split(name) for name in ("train", "test"))
        return train, test

    def _split(self, name: str) -> TensorSplit:
        # the first test samples, which reach into training ones, LEAF leaves out but counts in num_samples
        overlap = self.length - 1 if name == "test" else 0
        read = read_leaf(self.root, name, "shakespeare", as_numbers, as_letters, overlap)
        y = torch.tensor(read.y)
        return TensorSplit(torch.from_numpy(read.x), y, AsLong(), columns={"role": read.owners})


def as_letters(targets: list[Any]) -> list[int]:
    """Number the next characters.

    Raises:
        ValueError: anything but one character.
    """
    if wrong := [target for target in targets if not isinstance(target, str) or len(target) != 1]:
        raise ValueError(f"the next character is one, got {wrong[0]!r}")
    return [int(number) for number in as_numbers(targets)[:, 0]]


NUMBERS = np.full(256, LETTERS.index(" "), np.uint8)
NUMBERS[np.frombuffer(LETTERS.encode("latin-1"), np.uint8)] = np.arange(len(LETTERS))
"""Number of each character by its code."""


def as_numbers(texts: list[str]) -> Array:
    """Number the characters of texts of one length T: n of them -> (n, T) uint8.

    >>> as_numbers(["ab", "b~"]).tolist()  # a tilde is none of them
    [[53, 54], [54, 1]]
    """
    codes = np.stack([np.frombuffer(text.encode("utf-32-le"), "<u4") for text in texts])
    numbers: Array = NUMBERS[np.minimum(codes, len(NUMBERS) - 1)]
    return numbers
