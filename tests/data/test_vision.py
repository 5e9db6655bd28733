import hashlib
import pickle
import socket
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from torchvision import datasets

from fl_lightning import FederatedDataModule
from fl_lightning.data.autoaugment import AutoAugment
from fl_lightning.data.transforms import Compose, CropFlip
from fl_lightning.data.vision import CIFAR10, CIFAR100, MNIST, FashionMNIST


def write_idx(path: Path, array: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes())


@pytest.fixture
def mnist(tmp_path):
    """Both idx data sets, 12 training and 5 test images."""
    rng = np.random.default_rng(0)
    for name in ("MNIST", "FashionMNIST"):
        for part, n in (("train", 12), ("t10k", 5)):
            folder = tmp_path / name / "raw"
            write_idx(folder / f"{part}-images-idx3-ubyte", rng.integers(0, 256, (n, 28, 28), np.uint8))
            write_idx(folder / f"{part}-labels-idx1-ubyte", np.arange(n, dtype=np.uint8) % 10)
    return tmp_path


@pytest.fixture
def cifar(tmp_path, monkeypatch):
    """Both CIFAR layouts with 4 images a file; torchvision is told their md5 sums."""
    rng = np.random.default_rng(0)

    def write(dataset, name, content):
        data = pickle.dumps(content, protocol=2)
        path = tmp_path / dataset.base_folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
        return [name, hashlib.md5(data).hexdigest()]

    for dataset, key, classes in (
        (datasets.CIFAR10, "labels", 10),
        (datasets.CIFAR100, "fine_labels", 100),
    ):
        for listed in ("train_list", "test_list"):
            entries = [
                write(
                    dataset,
                    name,
                    {"data": rng.integers(0, 256, (4, 3072), np.uint8), key: [0, 9, classes - 1, i]},
                )
                for i, (name, _) in enumerate(getattr(dataset, listed))
            ]
            monkeypatch.setattr(dataset, listed, entries)
        meta = dict(dataset.meta)
        names = {meta["key"]: [f"class {c}" for c in range(classes)]}
        meta["md5"] = write(dataset, meta["filename"], names)[1]
        monkeypatch.setattr(dataset, "meta", meta)
    return tmp_path


@pytest.fixture
def offline(monkeypatch):
    def refuse(*args, **kwargs):
        raise OSError("no network here")

    monkeypatch.setattr(socket, "create_connection", refuse)


def first_batch(split, n, generator=None):
    return next(iter(split.batches([torch.arange(n)], generator)))


@pytest.mark.parametrize(("source_class", "dataset"), [(MNIST, datasets.MNIST), (FashionMNIST, datasets.FashionMNIST)])
def test_idx_files(mnist, source_class, dataset):
    source = source_class(str(mnist))
    source.prepare()
    train, test = source.load()
    assert (train.x.shape, test.x.shape, train.x.dtype) == ((12, 1, 28, 28), (5, 1, 28, 28), torch.uint8)
    x, y = first_batch(test, 5)
    stored = dataset(str(mnist), train=False)
    expected = (stored.data[:, None].double() / 255 - source.mean[0]) / source.std[0]
    torch.testing.assert_close(x.double(), expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(y, stored.targets)
    assert train.labels.tolist() == [*range(10), 0, 1]


def test_class_names(mnist, cifar):
    for source, name in (
        (MNIST, None),
        (FashionMNIST, "T-shirt/top"),
        (CIFAR10, "class 0"),
        (CIFAR100, "class 0"),
    ):
        loaded = source(str(mnist))
        loaded.load()
        assert (loaded.class_names and loaded.class_names[0]) == name
        assert loaded.class_names is None or len(loaded.class_names) == loaded.num_classes


@pytest.mark.parametrize(
    ("source_class", "dataset", "n"), [(CIFAR10, datasets.CIFAR10, 20), (CIFAR100, datasets.CIFAR100, 4)]
)
def test_cifar_files(cifar, source_class, dataset, n):
    from torchvision.transforms import functional as tv

    source = source_class(str(cifar))
    train, test = source.load()
    assert (train.x.shape, test.x.shape, train.x.dtype) == ((n, 3, 32, 32), (4, 3, 32, 32), torch.uint8)
    assert train.x.is_contiguous()
    x, y = first_batch(train, 3)
    stored = dataset(str(cifar))
    for i in range(3):
        image, label = stored[i]
        expected = tv.normalize(tv.to_tensor(image), source.mean, source.std)
        torch.testing.assert_close(x[i], expected, atol=1e-5, rtol=1e-5)
        assert y[i] == label


FEDVLS = [[125.3 / 255, 123 / 255, 113.9 / 255], [63 / 255, 62.1 / 255, 66.7 / 255]]


@pytest.mark.parametrize(
    ("given", "mean", "std"),
    [
        ("standard", CIFAR10.mean, CIFAR10.std),
        ("half", (0.5,) * 3, (0.5,) * 3),
        (FEDVLS, *FEDVLS),
        ([[0.4], [0.2]], (0.4,) * 3, (0.2,) * 3),
    ],
)
def test_one_normalisation_holds_for_every_split(cifar, given, mean, std):
    data = FederatedDataModule(
        CIFAR10(str(cifar), normalize=given), num_clients=2, proxy_size=2, transfer_size=2, val_fraction=0.1
    )
    data.setup()
    for name in ("train", "test", "proxy", "transfer", "val", "shared"):
        split = data.split(name)
        x, _ = first_batch(split, 1)
        pixels = split.x[:1].double() / 255
        expected = (pixels - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
        torch.testing.assert_close(x.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("given", ["own", [[0.5]], [[0.5, 0.5], [0.5]], [[0.5], [0.0]]])
def test_wrong_normalisations_are_refused(given):
    with pytest.raises(
        ValueError, match=r"normalize must be standard, half or|std and divisor of Normalize must be > 0"
    ):
        CIFAR10(normalize=given)


@pytest.mark.parametrize("source_class", [MNIST, CIFAR10])
def test_augmentations_touch_training_batches_only(mnist, cifar, source_class):
    plain = source_class(str(mnist)).load()
    seen = []
    for augmentation in ("flip", "crop_flip", "fedntd"):
        train, test = source_class(str(mnist), augmentation=augmentation).load()
        generator = torch.Generator().manual_seed(0)
        assert torch.equal(first_batch(train, 12)[0], first_batch(plain[0], 12)[0])
        assert torch.equal(first_batch(test, 4, generator)[0], first_batch(plain[1], 4)[0])
        seen.append(first_batch(train, 12, generator)[0])
    original = first_batch(plain[0], 12)[0]
    for image, flipped in zip(original, seen[0], strict=True):
        assert torch.equal(flipped, image) or torch.equal(flipped, image.flip(-1))
    assert not torch.equal(seen[0], original)
    black = original.new_tensor([-m / s for m, s in zip(source_class.mean, source_class.std, strict=True)])
    assert torch.isclose(seen[1], black[:, None, None]).any()  # the padding
    assert (seen[2] == 0).all(1).flatten(1).sum(1).min() >= 8 * 8  # a quarter of the square lies inside


def test_autoaugment_stands_between_the_crop_and_the_normalisation(cifar):
    for name, before in (("autoaugment", [CropFlip(4)]), ("autoaugment_only", [])):
        source = CIFAR10(str(cifar), augmentation=name)
        train, _ = source.load()
        x, _ = first_batch(train, 20, torch.Generator().manual_seed(0))
        expected = Compose(*before, AutoAugment(), source.normalize)
        assert torch.equal(x, expected(train.x, torch.Generator().manual_seed(0)))


def test_reflected_padding_holds_colours_of_the_image_only(cifar):
    train, _ = CIFAR10(str(cifar), augmentation="reflect_crop_flip").load()
    train.x.clamp_(min=1)
    x, _ = first_batch(train, 20, torch.Generator().manual_seed(0))
    assert x.amin() >= train.all()[0].amin()


def test_unknown_augmentation():
    with pytest.raises(ValueError, match=r"one of none, flip, crop_flip, .*, fedntd, autoaugment.*, got 'crop'"):
        CIFAR10(augmentation="crop")


@pytest.mark.parametrize(
    ("source_class", "layout"),
    [
        (MNIST, "MNIST/raw/train-images-idx3-ubyte"),
        (FashionMNIST, "FashionMNIST/raw/train-images-idx3-ubyte"),
        (CIFAR10, "cifar-10-batches-py/data_batch_1"),
        (CIFAR100, "cifar-100-python/train"),
    ],
)
def test_missing_data_name_root_layout_and_remedy(tmp_path, offline, source_class, layout):
    root = str(tmp_path)
    with pytest.raises(FileNotFoundError, match="set `download: true`") as refused:
        source_class(root).load()
    assert f"root {root}, which should hold {tmp_path / layout}" in str(refused.value)
    with pytest.raises(FileNotFoundError, match=r"call prepare\(\) first"):
        source_class(root, download=True).load()
    with pytest.raises(OSError, match="could not be downloaded") as refused:
        source_class(root, download=True).prepare()
    assert root in str(refused.value)
    assert "\n" not in str(refused.value)
    source_class(root).prepare()  # nothing to do


def test_one_missing_file_is_named(cifar):
    (cifar / "cifar-10-batches-py" / "data_batch_4").unlink()
    with pytest.raises(FileNotFoundError, match="data_batch_4"):
        CIFAR10(str(cifar)).load()


@pytest.mark.parametrize("name", ["train-images-idx3-ubyte", "t10k-labels-idx1-ubyte", "t10k-images-idx3-ubyte"])
def test_truncated_idx_file_is_named(mnist, name):
    path = mnist / "MNIST" / "raw" / name
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match=rf"{name} is corrupt \(its header promises") as refused:
        MNIST(str(mnist)).load()
    assert "delete it and set `download: true`" in str(refused.value)


def test_download_leaves_what_is_there_and_names_what_is_corrupt(mnist, offline):
    source = MNIST(str(mnist), download=True)
    source.prepare()
    path = mnist / "MNIST" / "raw" / "t10k-images-idx3-ubyte"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match="t10k-images-idx3-ubyte is corrupt"):
        source.prepare()


@pytest.mark.parametrize("content", [b"", b"\0\0", b"<html>not found</html>", b"\0\0\x08\x03\0\0"])
def test_a_file_that_is_no_idx_file_is_named(mnist, content):
    (mnist / "MNIST" / "raw" / "train-labels-idx1-ubyte").write_bytes(content)
    with pytest.raises(ValueError, match="train-labels-idx1-ubyte is corrupt"):
        MNIST(str(mnist)).load()


def test_images_without_labels_are_refused(mnist):
    write_idx(mnist / "MNIST" / "raw" / "train-labels-idx1-ubyte", np.zeros(11, np.uint8))
    with pytest.raises(ValueError, match="holds 12 images and 11 labels"):
        MNIST(str(mnist)).load()


def test_labels_out_of_range_are_refused(mnist):
    write_idx(mnist / "MNIST" / "raw" / "t10k-labels-idx1-ubyte", np.array([0, 1, 10, 3, 4], np.uint8))
    with pytest.raises(ValueError, match="got 10 at index 2 of the test split"):
        MNIST(str(mnist)).load()


@pytest.mark.parametrize("name", ["data_batch_3", "test_batch", "batches.meta"])
def test_cifar_file_with_another_md5_is_named(cifar, name):
    path = cifar / "cifar-10-batches-py" / name
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match=rf"{name} is corrupt \(its md5 is"):
        CIFAR10(str(cifar)).load()


def test_cifar_pickle_that_cannot_be_read(cifar, monkeypatch):
    path = cifar / "cifar-100-python" / "train"
    path.write_bytes(b"junk")
    monkeypatch.setattr(datasets.CIFAR100, "train_list", [["train", hashlib.md5(b"junk").hexdigest()]])
    with pytest.raises(ValueError, match=r"CIFAR100 in .*cifar-100-python could not be read"):
        CIFAR100(str(cifar)).load()
