"""Files that are another data set's, or not all of it, are refused at once by the published numbers and sums."""

import numpy as np
import pytest
import torch

from fl_lightning.data import CIFAR10, EMNIST, KMNIST, MNIST, SVHN, FashionMNIST, TinyImageNet, published
from fl_lightning.data.published import PUBLISHED, check_grey, check_published
from tests.data.test_vision import write_idx

SIZES = {
    "MNIST": (60_000, 10_000, 10),
    "FashionMNIST": (60_000, 10_000, 10),
    "KMNIST": (60_000, 10_000, 10),
    "EMNIST byclass": (697_932, 116_323, None),
    "EMNIST bymerge": (697_932, 116_323, None),
    "EMNIST balanced": (112_800, 18_800, 47),
    "EMNIST letters": (124_800, 20_800, 26),
    "EMNIST digits": (240_000, 40_000, 10),
    "EMNIST mnist": (60_000, 10_000, 10),
    "CIFAR10": (50_000, 10_000, 10),
    "CIFAR100": (50_000, 10_000, 100),
    "SVHN": (73_257, 26_032, None),
    "TinyImageNet": (100_000, 10_000, 200),
}


@pytest.fixture
def as_published(monkeypatch):
    monkeypatch.setattr(published, "PUBLISHED", PUBLISHED)


def labels(counts):
    return torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))


def test_the_numbers_are_those_that_the_docs_give():
    found = {}
    for name, splits in PUBLISHED.items():
        classes = {None if isinstance(split, int) else len(split) for split in splits}
        found[name] = (*(split if isinstance(split, int) else sum(split) for split in splits), *classes)
    assert found == SIZES


@pytest.mark.parametrize(
    ("train", "test", "shape", "sentence"),
    [
        ([6_000] * 10, [1_000] * 10, (1, 28, 28), None),
        ([6_000] * 9 + [5_999], [1_000] * 10, (1, 28, 28), "must have 60,000 images of 1×28×28, .* got 59,999 images"),
        ([6_000] * 10, [1_000] * 10, (1, 64, 64), "training split .* got 60,000 images of 1×64×64"),
        ([6_000] * 10, [1_001, 999] + [1_000] * 8, (1, 28, 28), "test split .* 1,000 images of class 0, .* got 1,001"),
        ([6_000] * 9 + [3_000] * 2, [1_000] * 10, (1, 28, 28), "6,000 images of class 9, .* got 3,000 images of"),
        (PUBLISHED["MNIST"][0], PUBLISHED["MNIST"][1], (1, 28, 28), "KMNIST in root .* class 0, .*got 5,923"),
    ],
)
def test_numbers_shapes_and_balance_are_compared(as_published, train, test, shape, sentence):
    splits = [(labels(train), shape), (labels(test), shape)]
    if sentence is None:
        return check_published("KMNIST", "root", (1, 28, 28), splits)
    with pytest.raises(ValueError, match=sentence) as refused:
        check_published("KMNIST", "root", (1, 28, 28), splits)
    assert "data.source.limit takes fewer samples" in str(refused.value)
    return None


def test_a_set_without_a_published_balance_is_counted_only(as_published):
    check_published("SVHN", "", (3, 32, 32), [(torch.zeros(73_257, dtype=torch.int64), (3, 32, 32))])
    with pytest.raises(ValueError, match="must have 73,257 images of 3×32×32, as published, got 1 images"):
        check_published("SVHN", "", (3, 32, 32), [(torch.tensor([0]), (3, 32, 32))])


def test_sets_of_as_many_images_are_told_apart_by_their_grey(as_published):
    fashion = torch.full((1_000, 1, 28, 28), 73, dtype=torch.uint8)
    check_grey("FashionMNIST", "root", fashion)
    with pytest.raises(ValueError, match=r"images of KMNIST in root must have a mean grey value near 0.192, got 0.286"):
        check_grey("KMNIST", "root", fashion)


def test_every_source_of_torchvision_asks_for_its_numbers(as_published, tmp_path):
    named = {source()._name for source in (MNIST, FashionMNIST, KMNIST, CIFAR10, SVHN)} | {
        EMNIST(split)._name for split in ("byclass", "bymerge", "balanced", "letters", "digits", "mnist")
    }
    assert named | {"CIFAR100", "TinyImageNet"} == PUBLISHED.keys()
    for part in ("train", "t10k"):
        write_idx(tmp_path / "MNIST" / "raw" / f"{part}-images-idx3-ubyte", np.zeros((5, 28, 28), np.uint8))
        write_idx(tmp_path / "MNIST" / "raw" / f"{part}-labels-idx1-ubyte", np.arange(5, dtype=np.uint8))
    with pytest.raises(ValueError, match=r"the training split of MNIST in .* must have 60,000 images .* got 5 images"):
        MNIST(str(tmp_path)).load()


def test_tiny_imagenet_has_500_training_images_of_a_class(as_published, tmp_path):
    folder = tmp_path / "tiny-imagenet-200"
    (folder / "train" / "n1" / "images").mkdir(parents=True)
    (folder / "train" / "n1" / "images" / "a.JPEG").touch()
    (folder / "val").mkdir()
    for name, line in {"wnids.txt": "n1", "words.txt": "n1\tfish", "val/val_annotations.txt": "a.JPEG\tn1"}.items():
        (folder / name).write_text(line + "\n")
    with pytest.raises(
        ValueError, match=r"training split of TinyImageNet .* must have 100,000 images of 3×64×64, .* got 1"
    ):
        TinyImageNet(str(tmp_path)).load()
