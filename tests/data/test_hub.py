"""Data sets of Hugging Face's `datasets`: the real package where it is there, else a stand-in."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from fl_lightning import FederatedDataModule
from fl_lightning.data import HuggingFace
from fl_lightning.data.hub import as_column
from tests.data.test_vision import first_batch

RNG = np.random.default_rng(0)


def pictures(*modes):
    return [Image.fromarray(RNG.integers(0, 256, (4, 5, 3), np.uint8)).convert(mode) for mode in modes]


def value(dtype):
    return type("Value", (), {"dtype": dtype})()


class Rows:
    """A `datasets.Dataset`: columns of Python values, which a format gives otherwise."""

    def __init__(self, features, given=None, **columns):
        self.columns = columns
        self.column_names = list(columns)
        self.features = features
        self.format = {"type": given}

    def __len__(self):
        return len(next(iter(self.columns.values())))

    def with_format(self, given):
        return Rows(self.features, given, **self.columns)

    def select(self, rows):
        return Rows(self.features, self.format["type"], **{k: [v[i] for i in rows] for k, v in self.columns.items()})

    def __getitem__(self, name):
        return np.array([np.asarray(v) for v in self.columns[name]]) if self.format["type"] else self.columns[name]


def rows(x, label=None, dtype="float32", **columns):
    label = label or [i % 2 for i in range(len(x))]
    features = {
        "x": SimpleNamespace(feature=value(dtype)),
        "label": value("int64"),
        **dict.fromkeys(columns, value("string")),
    }
    return Rows(features, x=x, label=label, **columns)


def read(dataset, **settings):
    train, _ = HuggingFace({"train": dataset}, input="x", **settings).read()
    return train


@pytest.mark.parametrize(
    ("modes", "shape"),
    [("L L", (2, 1, 4, 5)), ("1 1", (2, 1, 4, 5)), ("RGBA P", (2, 3, 4, 5)), ("L RGB", (2, 3, 4, 5))],
)
def test_pictures_of_all_modes_are_grey_or_rgb(modes, shape):
    split = read(rows(pictures(*modes.split())))
    x, _ = first_batch(split, 2)
    assert (split.x.dtype, x.shape, 0.1 < float(x.max()) <= 1) == (torch.uint8, shape, True)


DEEP = np.array([[0, 256], [32_768, 65_535]], np.uint16)


@pytest.mark.parametrize("values", [DEEP, (DEEP / 65_535).astype(np.float32)])
@pytest.mark.parametrize("others", ["", "L", "RGB", "L RGBA"])
def test_pictures_of_more_than_8_bits_are_scaled_by_what_their_type_can_hold(values, others):
    more = [Image.fromarray(np.array([[0, 1], [128, 255]], np.uint8)).convert(mode) for mode in others.split()]
    split = read(rows([Image.fromarray(values), *more]))
    x, _ = first_batch(split, len(split))
    assert x.shape[1] == (3 if "RGB" in others else 1)
    for channel in x.flatten(0, 1):
        assert channel.flatten().tolist() == pytest.approx([0, 1 / 256, 0.5, 1], abs=3e-3)
    with pytest.raises(ValueError, match="row 1 of column 'x' must have 8 or 16 bits a pixel"):
        read(rows([more[0] if more else Image.fromarray(DEEP), Image.fromarray(np.array([[-3.0]], np.float32))]))


def test_a_picture_that_cannot_be_decoded_is_named(tmp_path):
    path = tmp_path / "x.png"
    Image.fromarray(RNG.integers(0, 256, (64, 64, 3), np.uint8)).save(path)
    path.write_bytes(path.read_bytes()[:-4000])
    whole = Image.new("RGB", (64, 64))
    with pytest.raises(ValueError, match=r"row 1 of column 'x' could not be read as an image .*: replace or delete it"):
        read(rows([whole, Image.open(path)]))


def test_a_pgm_file_of_16_bits_has_16_bits(tmp_path):
    path = tmp_path / "x.pgm"
    path.write_bytes(b"P5 2 2 65535\n" + DEEP.astype(">u2").tobytes())
    x, _ = first_batch(read(rows([Image.open(path)])), 1)
    assert x.flatten().tolist() == pytest.approx([0, 1 / 256, 0.5, 1], abs=1e-4)


def test_long_numbers_of_owners_stay_apart_where_some_are_missing():
    assert as_column([2**53 + 1, 2**53, None]).tolist()[:2] == [2**53 + 1, 2**53]


def test_a_format_makes_no_difference():
    plain = rows(pictures("RGB", "RGB"))
    assert torch.equal(read(plain.with_format("numpy")).x, read(plain).x)


@pytest.mark.parametrize(
    ("values", "dtype", "shape", "kind"),
    [
        ([1, 2], "int64", (2, 1), torch.float32),
        ([0.5, 1.5], "float64", (2, 1), torch.float32),
        ([[1, 2], [3, 4]], "int32", (2, 2), torch.int64),
        ([[1.0], [2.0]], "float64", (2, 1), torch.float32),
        ([[True], [False]], "bool", (2, 1), torch.float32),
        ([[[[0, 255]]], [[[1, 2]]]], "uint8", (2, 1, 1, 2), torch.uint8),
    ],
)
def test_numbers_are_a_nets_input(values, dtype, shape, kind):
    split = read(rows(values, dtype=dtype))
    assert (split.x.shape, split.x.dtype) == (shape, kind)
    assert float(first_batch(split, 2)[0].float().max()) == (1.0 if kind == torch.uint8 else float(np.max(values)))


def test_a_single_data_set_is_the_training_split():
    source = HuggingFace(rows([1.0, 2.0, 3.0, 4.0]), input="x")
    data = FederatedDataModule(source, num_clients=2, val_fraction=0.5)
    data.setup()
    assert (len(data.split("train")), len(data.split("val")), data.evaluated) == (4, 2, "val")


def test_a_limit_keeps_the_classes_and_decodes_no_other_pictures():
    decoded = []

    class Picture:
        mode = "L"

        def __init__(self, name):
            self.name = name

        getbands = None

        def __array__(self, dtype=None, copy=None):
            decoded.append(self.name)
            return np.full((2, 2), self.name, np.uint8)

    split = read(rows([Picture(i) for i in range(10)], label=[0] * 8 + [1] * 2), limit=5)
    assert (np.bincount(split.labels).tolist(), decoded) == ([4, 1], split.x[:, 0, 0, 0].tolist())


def test_owners_that_are_missing_are_refused_and_long_texts_are_kept_as_they_are():
    split = rows([[1.0], [2.0]], who=["a", None], text=["x", "y" * 1_000])
    data = FederatedDataModule(HuggingFace({"train": split}, input="x"), num_clients=None, by="who")
    with pytest.raises(
        ValueError, match="'who' must name the owner of every training sample, got none for 1 of 2; fill"
    ):
        data.setup()
    assert as_column(["x", "y" * 1_000]).nbytes < 100
    np.testing.assert_array_equal(as_column([1, None]), [1, np.nan])


@pytest.mark.parametrize(
    ("dataset", "error", "sentence"),
    [
        (
            SimpleNamespace(column_names=["x"]),
            TypeError,
            "data must be a Dataset or a DatasetDict, got SimpleNamespace; a",
        ),
        (
            rows([1.0, None]),
            ValueError,
            "column 'x' must have a value in every row, got none in 1 of 2: filter them out",
        ),
        (rows([1.0, 2.0], label=[0, None]), ValueError, "column 'label' must have a value in every row, got none in 1"),
        (
            rows([1.0, 2.0], label=["a", "b"]),
            ValueError,
            r"one shape, got \(\) <U1; .*class_encode_column numbers words",
        ),
        (rows([[1.0], [1.0, 2.0]]), ValueError, r"one shape, got \(1,\) float64, \(2,\) float64; resize"),
        (rows([[1.0], [None]]), ValueError, r"one shape, got \(1,\) float64, \(1,\) object"),
        (
            rows([1.0, 2.0], label=[0.5, float("nan")]),
            ValueError,
            "'label' must hold finite numbers, got nan as the firs",
        ),
        (
            rows([[1.0], [float("inf")]]),
            ValueError,
            r"'x' must hold finite numbers, got \[inf\] as the first of 1 in 2",
        ),
        (rows([]), ValueError, "the train split of the data set must have samples, got none; name another"),
    ],
)
def test_what_is_no_input_is_refused(dataset, error, sentence):
    with pytest.raises(error, match=sentence):
        read(dataset)


def test_splits_that_differ_in_shape_or_in_the_numbers_of_classes_are_refused():
    grey = rows(pictures("L", "L"))
    coloured = rows(pictures("RGB", "L"))
    with pytest.raises(ValueError, match=r"'x' must have one shape in all splits, got \(1, 4, 5\) in train and \(3, 4"):
        HuggingFace({"train": grey, "test": coloured}, input="x").read()
    for split, names in ((grey, ["cat", "dog"]), (coloured, ["dog"])):  # as class_encode_column numbers each split
        split.features["label"] = SimpleNamespace(names=names)
    with pytest.raises(ValueError, match=r"numbered alike, got \['cat', 'dog'\] in train and \['dog'\] in test; cast"):
        HuggingFace({"train": grey, "test": coloured}, input="x").read()


def test_hugging_face(tmp_path):
    hub = pytest.importorskip("datasets")
    kinds = hub.Features(
        {"image": hub.Image(), "label": hub.ClassLabel(names=["no", "yes"]), "who": hub.Value("string")}
    )
    rows = {"image": pictures("RGB", "RGB", "RGB"), "label": [0, 1, 1], "who": ["b", "a", "b"]}
    split = hub.Dataset.from_dict(rows, features=kinds)
    hub.DatasetDict({"train": split, "test": split}).save_to_disk(str(tmp_path / "saved"))
    source = HuggingFace(str(tmp_path / "saved"))
    data = FederatedDataModule(source, num_clients=None, by="who")
    data.setup()
    assert [data.client_indices("test", c).tolist() for c in range(2)] == [[1], [0, 2]]
    assert (data.num_classes, source.class_names, data.input_shape) == (2, ("no", "yes"), (3, 4, 5))
    with pytest.raises(FileNotFoundError, match=r"a folder that save_to_disk wrote, got .*/other, which does"):
        HuggingFace(str(tmp_path / "other")).read()
    with pytest.raises(ValueError, match="the column 'text', it has"):
        HuggingFace(str(tmp_path / "saved"), input="text").read()
    split.save_to_disk(str(tmp_path / "single"))
    for whole in (str(tmp_path / "single"), split, split.with_format("torch")):
        assert HuggingFace(whole).read()[0].x.shape == (3, 3, 4, 5)
    with pytest.raises(TypeError, match="got IterableDataset; a stream for each client"):
        HuggingFace(split.to_iterable_dataset()).read()
