import shutil
import warnings

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import datasets
from torchvision.transforms.functional import pil_to_tensor

from fl_lightning import FederatedDataModule
from fl_lightning.data.folders import ImageFolder, TinyImageNet
from fl_lightning.data.images import measure

RNG = np.random.default_rng(0)


def write(path, side=6, mode="RGB"):
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.fromarray(RNG.integers(0, 256, (side, side, 3), np.uint8))
    image.convert(mode).save(path)


@pytest.fixture
def folder(tmp_path):
    """CINIC-10's layout: 3 classes of 4, 4 and 2 images."""
    for split, count in (("train", 4), ("valid", 4), ("test", 2)):
        for name in ("bird", "car", "ship"):
            for i in range(count):
                write(tmp_path / split / name / f"{split}-{i}.png")
    return tmp_path


def ids_of(count):
    return [f"n{i:08d}" for i in range(count)]


@pytest.fixture
def tiny(tmp_path):
    """Tiny-ImageNet's layout: 3 classes of 4 training and 2 validation images."""
    root = tmp_path / "tiny-imagenet-200"
    annotations = []
    for c, key in enumerate(ids_of(3)):
        for i in range(4):
            write(root / "train" / key / "images" / f"{key}_{i}.JPEG", mode="L" if i == 1 else "RGB")
        for i in range(2):
            name = f"val_{3 * i + c}.JPEG"
            write(root / "val" / "images" / name)
            annotations.append(f"{name}\t{key}\t0\t32\t44\t62\n")
    (root / "wnids.txt").write_text("\n".join(reversed(ids_of(3))) + "\n")
    words = ["goldfish, Carassius auratus", "crane", "crane, machine", "never asked"]
    (root / "words.txt").write_text("".join(f"{k}\t{v}\n" for k, v in zip(ids_of(4), words, strict=True)))
    (root / "val" / "val_annotations.txt").write_text("".join(sorted(annotations)))
    return tmp_path


def test_image_folder_is_torchvisions(folder):
    source = ImageFolder(str(folder))
    train, test = source.load()
    assert (source.num_classes, source.class_names) == (3, ("bird", "car", "ship"))
    assert (train.x.shape, test.x.shape, train.x.dtype) == ((12, 3, 6, 6), (6, 3, 6, 6), torch.uint8)
    for split, name in ((train, "train"), (test, "test")):
        stored = datasets.ImageFolder(folder / name, pil_to_tensor)
        assert torch.equal(split.x, torch.stack([image for image, _ in stored]))
        assert split.labels.tolist() == stored.targets


def test_validation_images_can_be_joined_to_the_training_images(folder):
    train, test = ImageFolder(str(folder), train_folders=["train", "valid"]).load()
    assert (len(train), len(test)) == (24, 6)
    assert train.labels.bincount().tolist() == [8] * 3


def test_without_a_test_folder_there_is_no_test_split(folder):
    assert len(ImageFolder(str(folder), test_folder="valid").load()[1]) == 12
    shutil.rmtree(folder / "test")
    assert ImageFolder(str(folder)).load()[1] is None
    data = FederatedDataModule(ImageFolder(str(folder)), num_clients=2)
    data.setup()
    assert data.evaluated is None
    with pytest.raises(FileNotFoundError, match=r"there is no folder .*test, which should hold images"):
        ImageFolder(str(folder), test_folder="test").load()


def test_standard_normalisation_is_measured_on_the_training_images(folder):
    train, test = ImageFolder(str(folder)).load()
    pixels = train.x.double() / 255
    mean = pixels.mean((0, 2, 3))
    std = pixels.std((0, 2, 3), correction=0)
    measured = torch.tensor(measure(train.x), dtype=torch.float64)
    torch.testing.assert_close(measured, torch.stack([mean, std]), atol=1e-12, rtol=0)
    for split in (train, test):
        expected = (split.x.double() / 255 - mean[:, None, None]) / std[:, None, None]
        torch.testing.assert_close(split.all()[0].double(), expected, atol=1e-5, rtol=0)
    half = ImageFolder(str(folder), normalize="half").load()[0]
    torch.testing.assert_close(half.all()[0].double(), (pixels - 0.5) / 0.5, atol=1e-5, rtol=0)


def test_augmentation_is_for_training_batches_only(folder):
    train, test = ImageFolder(str(folder), augmentation="autoaugment").load()
    (x, _), *_ = train.batches([torch.arange(12)], torch.Generator().manual_seed(0))
    (z, _), *_ = test.batches([torch.arange(6)], torch.Generator().manual_seed(0))
    assert not torch.equal(x, train.all()[0])
    assert torch.equal(z, test.all()[0])


def test_every_kind_of_image_becomes_rgb_in_silence(folder):
    place = folder / "train" / "bird"
    for mode in ("L", "P", "RGBA", "LA", "1"):
        write(place / f"{mode}.png", mode=mode)
    image = Image.open(place / "P.png")
    image.save(place / "Q.png", transparency=bytes(range(256)))
    with warnings.catch_warnings(action="error"):
        train, _ = ImageFolder(str(folder)).load()
    assert train.x.shape == (18, 3, 6, 6)
    grey = train.x[[path.name for path in sorted(place.iterdir())].index("L.png")]
    assert torch.equal(grey[0], grey[2])


def test_images_are_resized_where_asked(folder):
    write(folder / "test" / "ship" / "z.png", side=11)
    with pytest.raises(ValueError, match=r"one size, got 6×6 of .*bird/train-0.png and 11×11 of .*z.png: set image_s"):
        ImageFolder(str(folder)).load()
    train, test = ImageFolder(str(folder), image_size=5).load()
    assert (train.x.shape, test.x.shape) == ((12, 3, 5, 5), (7, 3, 5, 5))
    with pytest.raises(ValueError, match="image_size must be at least 1, got 0"):
        ImageFolder(str(folder), image_size=0)


DEEP = np.array([[0, 256], [32_768, 65_535]], np.uint16)
KINDS = {
    "16.png": DEEP,
    "16.tif": DEEP,
    "float.tif": (DEEP / 65_535).astype(np.float32),
}


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("among", ["alone", "among images of 8 bits"])
def test_images_of_more_than_8_bits_are_scaled_by_what_their_type_can_hold(name, among, tmp_path):
    place = tmp_path / "train" / "lung"
    place.mkdir(parents=True)
    Image.fromarray(KINDS[name]).save(place / name)
    if among != "alone":
        Image.fromarray(np.array([[0, 1], [128, 255]], np.uint8)).save(place / "8.png")
    train, _ = ImageFolder(str(tmp_path), normalize=[[0.0], [1.0]]).read()
    for x in train.all()[0]:
        for channel in x:
            assert channel.flatten().tolist() == pytest.approx([0, 1 / 256, 0.5, 1], abs=3e-3)
    measured, _ = ImageFolder(str(tmp_path)).read()
    assert measured.all()[0].mean() == pytest.approx(0, abs=1e-5)
    assert measured.all()[0].std(correction=0) == pytest.approx(1, abs=1e-5)
    resized, _ = ImageFolder(str(tmp_path), image_size=4, normalize=[[0.0], [1.0]]).read()
    assert (resized.x.shape[1:], resized.x.max()) == ((3, 4, 4), pytest.approx(255))
    with pytest.raises(ValueError, match="augmentation must be one for images of more than 8 bits, got autoaugment"):
        ImageFolder(str(tmp_path), augmentation="autoaugment").read()


@pytest.mark.parametrize("values", [np.array([[0, 70_000]], np.int32), np.array([[0.0, 1_000.0]], np.float32)])
def test_images_of_which_nothing_tells_what_is_white_are_refused(values, tmp_path):
    (tmp_path / "train" / "a").mkdir(parents=True)
    Image.fromarray(values).save(tmp_path / "train" / "a" / "x.tif")
    with pytest.raises(
        ValueError, match=r"x.tif must have 8 or 16 bits a pixel, or floats in \[0, 1\], got .*; convert"
    ):
        ImageFolder(str(tmp_path)).read()


def test_files_that_are_not_read_are_counted_in_one_line(folder):
    for name in ("a.gif", "b.GIF", "notes.txt", ".hidden"):
        (folder / "train" / "bird" / name).write_bytes(b"x")
    with pytest.warns(UserWarning, match=r"holds 3 files that are not read \(2 of .gif, 1 of .txt\); convert") as told:
        ImageFolder(str(folder)).read()
    assert len(told) == 1


@pytest.mark.parametrize("content", [b"", b"<html>not found</html>", None], ids=["empty", "no image", "cut off"])
def test_a_damaged_image_is_named(folder, content):
    path = folder / "test" / "car" / "test-1.png"
    path.write_bytes(path.read_bytes()[:60] if content is None else content)
    with pytest.raises(ValueError, match=r"car/test-1.png could not be read as an image \(.*\): replace or") as refused:
        ImageFolder(str(folder)).load()
    assert "\n" not in str(refused.value)


def test_folders_that_lack_something(folder):
    with pytest.raises(
        FileNotFoundError, match=r"no folder .*elsewhere/train, .* set root to the folder that holds tr"
    ):
        ImageFolder(str(folder / "elsewhere")).load()
    with pytest.raises(ValueError, match="train_folders must name at least one folder"):
        ImageFolder(str(folder), train_folders=[])
    shutil.rmtree(folder / "test" / "car")
    with pytest.raises(ValueError, match=r"/test has no folder car as .*/train has: add it, or delete the other"):
        ImageFolder(str(folder)).load()
    (folder / "test" / "car").mkdir()
    with pytest.raises(FileNotFoundError, match=r"/test must hold a folder of images for each class \(.*car.*\): add"):
        ImageFolder(str(folder)).load()
    shutil.rmtree(folder / "train")
    (folder / "train").mkdir()
    with pytest.raises(FileNotFoundError, match=r"/train must hold a folder of images for each class"):
        ImageFolder(str(folder)).load()


def test_tiny_imagenet(tiny):
    source = TinyImageNet(str(tiny), normalize="half")
    train, test = source.load()
    assert (source.num_classes, source.class_names) == (3, ("goldfish", "crane", "crane, machine"))
    assert (train.x.shape, test.x.shape, train.x.dtype) == ((12, 3, 6, 6), (6, 3, 6, 6), torch.uint8)
    root = tiny / "tiny-imagenet-200"
    stored = datasets.ImageFolder(root / "train", pil_to_tensor)
    assert torch.equal(train.x, torch.stack([image for image, _ in stored]))
    assert train.labels.tolist() == stored.targets
    grey = train.x[1::4]
    assert torch.equal(grey[:, 0], grey[:, 1])
    for i in range(6):  # validation image i is of class i % 3
        image = pil_to_tensor(Image.open(root / "val" / "images" / f"val_{i}.JPEG").convert("RGB"))
        (place,) = (test.x == image).flatten(1).all(1).nonzero().flatten().tolist()
        assert test.labels[place] == i % 3


@pytest.mark.parametrize("name", ["wnids.txt", "words.txt", "val/val_annotations.txt"])
def test_a_missing_file_of_tiny_imagenet_is_named_with_its_origin(tiny, name):
    path = tiny / "tiny-imagenet-200" / name
    path.unlink()
    with pytest.raises(FileNotFoundError, match=r"unpack tiny-imagenet-200.zip \(http://cs231n") as refused:
        TinyImageNet(str(tiny)).load()
    assert f"root {tiny}, which should hold {path}" in str(refused.value)


def test_damage_to_tiny_imagenet_is_named(tiny):
    root = tiny / "tiny-imagenet-200"
    annotations = root / "val" / "val_annotations.txt"
    ids = root / "wnids.txt"
    lines = annotations.read_text().splitlines(keepends=True)

    def refused(sentence):
        with pytest.raises(ValueError, match=f"{sentence}.*unpack tiny-imagenet-200.zip again"):
            TinyImageNet(str(tiny)).load()

    annotations.write_text("".join(lines[:-1]))
    refused(r"as many images, and .*val_annotations.txt has 1 of n00000002 and 2 of n00000000")
    annotations.write_text("val_0.JPEG\n")
    refused("val_annotations.txt is corrupt, each line must have 2 columns")
    annotations.write_text("".join(lines))
    kept = ids.read_text()
    ids.write_text("n00000000\nn00000001\n")
    refused("val_annotations.txt names n00000002, wnids.txt does not")
    ids.write_text("")
    refused("wnids.txt is corrupt")
    ids.write_text(kept)
    write(root / "val" / "images" / "val_3.JPEG", side=7)
    refused("one size, got 6×6 of .* and 7×7 of .*val_3.JPEG")
    (root / "val" / "images" / "val_3.JPEG").unlink()
    with pytest.raises(ValueError, match=r"val_3.JPEG could not be read as an image \(.*No such file"):
        TinyImageNet(str(tiny)).load()
    shutil.rmtree(root / "train" / ids_of(2)[1])
    refused(r"train/\*/images has 0 of n00000001 and 4 of n00000000")


@pytest.mark.parametrize("source_class", [ImageFolder, TinyImageNet])
def test_settings_are_those_of_the_other_image_sources(source_class):
    with pytest.raises(ValueError, match=r"augmentation must be one of none, .*autoaugment_only, got 'crop'"):
        source_class(augmentation="crop")
    with pytest.raises(ValueError, match="normalize must be standard, half or"):
        source_class(normalize="own")
