"""Sources that torchvision, LEAF and MedMNIST give: tiny files of the same layout on disk."""

import hashlib
import json

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.io import savemat
from torchvision import datasets as torchvision_sets

from fl_lightning import FederatedDataModule
from fl_lightning.data import (
    EMNIST,
    FEMNIST,
    KMNIST,
    SVHN,
    CelebA,
    MedMNIST,
    Shakespeare,
)
from fl_lightning.data import medmnist as medmnist_module
from tests.data.test_vision import first_batch, write_idx

RNG = np.random.default_rng(0)


def images(*shape):
    return RNG.integers(0, 256, shape, np.uint8)


# --- torchvision


@pytest.mark.parametrize(("split", "first", "classes"), [("letters", 1, 26), ("balanced", 0, 47)])
def test_emnist_is_upright_and_counts_its_classes_from_0(tmp_path, split, first, classes):
    stored = images(6, 28, 28)
    for part in ("train", "test"):
        path = tmp_path / "EMNIST" / "raw" / f"emnist-{split}-{part}-images-idx3-ubyte"
        write_idx(path, stored)
        write_idx(
            path.with_name(f"emnist-{split}-{part}-labels-idx1-ubyte"), np.arange(first, first + 6, dtype=np.uint8)
        )
    source = EMNIST(split, root=str(tmp_path))
    train, test = source.read()
    assert (source.num_classes, len(source.class_names), train.labels.tolist()) == (
        classes,
        classes,
        [0, 1, 2, 3, 4, 5],
    )
    assert torch.equal(train.x[:, 0], torch.from_numpy(stored).transpose(1, 2))
    x, _ = first_batch(test, 6)
    torch.testing.assert_close(
        (x.mean(), x.std(correction=0)), (torch.tensor(0.0), torch.tensor(1.0)), atol=1e-5, rtol=0
    )


def test_kmnist(tmp_path):
    for part, n in (("train", 12), ("t10k", 5)):
        write_idx(tmp_path / "KMNIST" / "raw" / f"{part}-images-idx3-ubyte", images(n, 28, 28))
        write_idx(tmp_path / "KMNIST" / "raw" / f"{part}-labels-idx1-ubyte", np.arange(n, dtype=np.uint8) % 10)
    source = KMNIST(str(tmp_path), limit=4)
    assert (list(map(len, source.read())), source.class_names[:2]) == ([4, 4], ("o", "ki"))


@pytest.fixture
def svhn(tmp_path, monkeypatch):
    held = dict(torchvision_sets.SVHN.split_list)
    for part, n in (("train", 6), ("test", 3)):
        path = tmp_path / f"{part}_32x32.mat"
        savemat(path, {"X": images(32, 32, 3, n), "y": np.arange(10, 10 - n, -1)[:, None]})
        held[part] = [held[part][0], path.name, hashlib.md5(path.read_bytes()).hexdigest()]
    monkeypatch.setattr(torchvision_sets.SVHN, "split_list", held)
    return tmp_path


def test_svhn(svhn):
    source = SVHN(str(svhn))
    train, test = source.read()
    assert (train.x.shape, test.labels.tolist(), source.num_classes) == ((6, 3, 32, 32), [0, 9, 8], 10)
    (svhn / "test_32x32.mat").write_bytes(b"0")
    with pytest.raises(ValueError, match=r"test_32x32.mat is corrupt \(its md5"):
        source.read()


# --- LEAF


def leaf(folder, by_split):
    """Write LEAF's files: two of the training split, one of the test split."""
    for split, users in by_split.items():
        (folder / split).mkdir(parents=True)
        for number, part in enumerate(np.array_split(sorted(users), 2 if split == "train" else 1)):
            held = {user: users[user] for user in part.tolist()}
            sizes = [len(of["y"]) for of in held.values()]
            content = {"users": list(held), "num_samples": sizes, "user_data": held}
            (folder / split / f"all_data_{number}_{split}_9.json").write_text(json.dumps(content))
    return folder


def test_femnist_by_writer(tmp_path):
    greys = np.linspace(0, 1, 784).tolist()
    train = {"f0_2": {"x": [greys, greys], "y": [61, 3]}, "f0_1": {"x": [greys[::-1]], "y": [0]}}
    root = leaf(tmp_path, {"train": train, "test": {"f0_2": {"x": [greys], "y": [5]}}})
    source = FEMNIST(str(root))
    data = FederatedDataModule(source, num_clients=None, by="writer")
    data.setup()
    assert [data.client_indices("train", c).tolist() for c in range(data.num_clients)] == [[0], [1, 2]]
    assert [data.client_indices("test", c).tolist() for c in range(2)] == [[], [0]]
    split = data.split("train")
    assert (split.x.shape, split.labels.tolist(), source.class_names[61]) == ((3, 1, 28, 28), [0, 61, 3], "z")
    assert split.x[1, 0].flatten().tolist() == [round(255 * grey) for grey in greys]


def test_shakespeare_by_role(tmp_path):
    train = {"HAMLET": {"x": ["To be, or", "o be, or "], "y": [" ", "n"]}, "GHOST": {"x": ["List, lis"], "y": ["t"]}}
    source = Shakespeare(str(leaf(tmp_path, {"train": train, "test": train})))
    split, _ = source.read()
    x, y = first_batch(split, 3)
    assert (x.shape, x.dtype, split.column("role").tolist()) == ((3, 9), torch.int64, ["GHOST", "HAMLET", "HAMLET"])
    assert "".join(source.class_names[i] for i in x[1]) == "To be, or"
    assert [source.class_names[i] for i in y] == ["t", " ", "n"]
    assert not split.augments


def test_leafs_files_are_checked(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"LEAF's femnist was not found in root .*preprocess.sh"):
        FEMNIST(str(tmp_path)).read()
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "a.json").write_text("{}")
    with pytest.raises(ValueError, match=r"a.json must be a file of LEAF's, with user_data of x and y \(KeyError"):
        Shakespeare(str(tmp_path)).read()


@pytest.mark.parametrize(
    ("source", "x", "y", "sentence"),
    [
        (FEMNIST, [255.0] * 784, 3, r"ValueError: grey values lie in \[0, 1\], got 255 to 255"),
        (FEMNIST, [float("nan")] * 784, 3, "grey values"),
        (FEMNIST, [0.5] * 784, "3", r"ValueError: a class is a whole number in \[0, 62\), got '3'"),
        (FEMNIST, [0.5] * 784, 62, "got 62"),
        (Shakespeare, "To be", "or", "ValueError: the next character is one, got 'or'"),
    ],
)
def test_samples_that_are_not_leafs_are_refused(tmp_path, source, x, y, sentence):
    root = leaf(tmp_path, {"train": {"a": {"x": [x], "y": [y]}}})
    with pytest.raises(ValueError, match=f"_train_9.json must be a file of LEAF's, .*{sentence}"):
        source(str(root)).read()


def test_a_file_of_leaf_that_lacks_samples_is_refused(tmp_path):
    root = leaf(tmp_path, {"train": {"HAMLET": {"x": ["To be", "o be,"], "y": ["a", "b"]}}})
    path = root / "train" / "all_data_0_train_9.json"
    path.write_text(path.read_text().replace('"o be,"', '"o be,", "be, o"').replace('"y": ["a", "b"]', '"y": ["a"]'))
    with pytest.raises(
        ValueError, match=r"_train_9.json must be a file of LEAF's, .*num_samples has 2 of HAMLET, .* 1\)"
    ):
        Shakespeare(str(root)).read()


def test_samples_that_leaf_counts_and_does_not_write_are_not_missed(tmp_path):
    root = leaf(tmp_path, {part: {"HAMLET": {"x": ["To be"], "y": ["a"]}} for part in ("train", "test")})
    path = next((root / "test").iterdir())
    content = json.loads(path.read_text())
    content["num_samples"] = [1 + 79]  # as split_data.py writes Shakespeare: test samples that overlap training's
    content["user_data"]["OPHELIA"] = {"x": [], "y": []}  # as older versions write roles with one sample
    path.write_text(json.dumps(content))
    assert list(map(len, Shakespeare(str(root)).read())) == [1, 1]
    content["num_samples"] = [1 + 78]
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="num_samples has 79 of HAMLET, user_data 1"):
        Shakespeare(str(root)).read()


def test_an_owner_in_two_files_of_leaf_is_refused(tmp_path):
    (tmp_path / "train").mkdir()
    for name in ("a", "b"):
        content = {"user_data": {"HAMLET": {"x": ["To be"], "y": [name]}}}
        (tmp_path / "train" / f"{name}.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"must be in one file of .*train, got HAMLET again in .*b.json"):
        Shakespeare(str(tmp_path)).read()


# --- CelebA


@pytest.fixture
def celeba(tmp_path):
    """Six portraits of three celebrities, without lists."""
    (tmp_path / "img_align_celeba").mkdir()
    for i in range(6):
        Image.fromarray(images(10, 8, 3)).save(tmp_path / "img_align_celeba" / f"00000{i}.jpg")
    return tmp_path


def test_celeba_of_leaf(celeba):
    leaf(celeba, {part: {"7": {"x": ["000000.jpg", "000003.jpg"], "y": [1.0, 0.0]}} for part in ("train", "test")})
    source = CelebA(str(celeba), image_size=4)
    train, _ = source.read()
    assert (train.x.shape, train.labels.tolist(), train.column("celebrity").tolist()) == (
        (2, 3, 4, 4),
        [1, 0],
        ["7"] * 2,
    )
    assert source.validation is None


def test_celeba_of_torchvision(celeba, monkeypatch):
    names = [f"00000{i}.jpg" for i in range(6)]
    parts = [0, 0, 0, 1, 2, 2]
    owners = [3, 1, 3, 2, 4, 4]
    lists = {
        "list_eval_partition": [f"{name} {part}" for name, part in zip(names, parts, strict=True)],
        "identity_CelebA": [f"{name} {owner}" for name, owner in zip(names, owners, strict=True)],
        "list_attr_celeba": [
            "6",
            "Bald Smiling ",
            *(f"{name} -1 {'-1' if i % 2 else ' 1'}" for i, name in enumerate(names)),
        ],
    }
    for stem, lines in lists.items():
        (celeba / f"{stem}.txt").write_text("\n".join(lines) + "\n")
    with pytest.raises(ValueError, match=r"list_eval_partition.txt must be the published list \(its md5 is .*copy it"):
        CelebA(str(celeba)).read()
    sums = [("", hashlib.md5(path.read_bytes()).hexdigest(), path.name) for path in celeba.glob("*.txt")]
    monkeypatch.setattr(torchvision_sets.CelebA, "file_list", sums)
    source = CelebA(str(celeba), limit=2)
    train, test = source.read()
    assert list(map(len, (train, test, source.validation))) == [2, 2, 1]
    train, test = CelebA(str(celeba)).read()
    assert (train.labels.tolist(), test.labels.tolist()) == ([1, 0, 1], [1, 0])
    assert (train.column("celebrity").tolist(), test.column("celebrity").tolist()) == ([3, 1, 3], [4, 4])
    with pytest.raises(ValueError, match="attribute must be one of Bald, Smiling, got Hat"):
        CelebA(str(celeba), attribute="Hat").read()


def test_celeba_that_is_absent_is_told_where_it_comes_from(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"img_align_celeba/\*.jpg: unpack img_align_celeba.zip"):
        CelebA(str(tmp_path)).read()
    (tmp_path / "img_align_celeba").mkdir()
    with pytest.raises(FileNotFoundError, match=r"must have .*list_eval_partition.txt: copy it there"):
        CelebA(str(tmp_path)).read()


# --- MedMNIST


@pytest.mark.parametrize(("name", "channels"), [("bloodmnist", 3), ("tissuemnist", 1)])
def test_medmnist_has_its_published_split(tmp_path, monkeypatch, name, channels):
    with pytest.raises(FileNotFoundError, match=f"should hold .*{name}.npz: put it there"):
        MedMNIST(name, str(tmp_path)).read()
    sizes = {"train": 4, "val": 2, "test": 3}
    shape = (28, 28, 3) if channels == 3 else (28, 28)
    held = {f"{part}_images": images(n, *shape) for part, n in sizes.items()}
    held |= {f"{part}_labels": np.arange(n, dtype=np.uint8)[:, None] for part, n in sizes.items()}
    np.savez(tmp_path / f"{name}.npz", **held)
    with pytest.raises(ValueError, match=r"images of .×28×28 uint8, as published, got 4, 2, 3"):
        MedMNIST(name, str(tmp_path)).read()
    monkeypatch.setitem(medmnist_module.PUBLISHED, name, (8, channels, 4, 2, 3))
    with pytest.raises(
        ValueError, match=rf"{name}.npz must have the published md5 \(its md5 is .*, not {medmnist_module.MD5[name]}\)"
    ):
        MedMNIST(name, str(tmp_path)).read()
    with monkeypatch.context() as larger:
        larger.setattr(medmnist_module, "LARGEST_SUMMED", 1)
        MedMNIST(name, str(tmp_path)).read()
    digest = hashlib.md5((tmp_path / f"{name}.npz").read_bytes()).hexdigest()
    monkeypatch.setitem(medmnist_module.MD5, name, digest)
    source = MedMNIST(name, str(tmp_path))
    data = FederatedDataModule(source, num_clients=2)
    data.setup()
    assert (data.evaluated, len(data.split("val")), data.num_classes) == ("val", 2, 8)
    assert data.input_shape == (channels, 28, 28)
    for wrong in (held["test_images"].astype(np.float32), held["test_images"][:, :14]):
        np.savez(tmp_path / f"{name}.npz", **{**held, "test_images": wrong})
        with pytest.raises(ValueError, match=r"must hold 4, 2, 3 images of .×28×28 uint8, as published, got 4, 2, 3"):
            MedMNIST(name, str(tmp_path)).read()
