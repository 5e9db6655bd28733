"""New samples without targets, read by the schema of the training samples."""

import csv
import inspect
from io import BytesIO

import numpy as np
import pytest
import torch
from PIL import Image
from pytorch_lightning import LightningDataModule
from torch.utils.data import DataLoader, TensorDataset

import fl_lightning.data
from fl_lightning import FederatedDataModule
from fl_lightning.data import DataModuleSource, Digits, HuggingFace, ImageFolder, PooledSource, Source, TableSource
from fl_lightning.data.schema import Schema
from fl_lightning.data.stored_schema import schema_of, stored_schema
from tests.data.test_hub import rows as hub_rows

RNG = np.random.default_rng(0)

TRAIN = """age,city,smokes,hospital,risk
50.5,Bonn,yes,a,low
60.5,Köln,no,b,high
70.5,Bonn,no,b,low
40.5,Köln,yes,a,high
"""
TEST = "risk,hospital,smokes,city,age\nlow,c,no,Bonn,45.5\nhigh,c,yes,Köln,90\n"
NEW = "city,note,smokes,age\nBonn,x,no,45.5\nKöln,y,yes,90\n"
"""The rows of TEST without a target, in another order of columns."""


def stored(schema):
    """A schema as a checkpoint gives it back."""
    file = BytesIO()
    torch.save(stored_schema(schema), file)
    return schema_of(torch.load(BytesIO(file.getvalue()), weights_only=True))


def inputs(split):
    return split.all()[0]


def table(folder, train=TRAIN, test=TEST, label="risk", **settings):
    (folder / "train.csv").write_text(train, encoding="utf-8")
    (folder / "test.csv").write_text(test, encoding="utf-8")
    ignored = ["hospital"] if "hospital" in train else []
    return TableSource(folder / "train.csv", label, folder / "test.csv", ignored=ignored, **settings)


def picture(path, size=(5, 4)):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(RNG.integers(0, 256, (size[1], size[0], 3), np.uint8)).save(path)


def images(folder, **settings):
    for name in ("train/cat/0.png", "train/cat/1.png", "train/dog/2.png", "test/cat/3.png", "test/dog/4.png"):
        picture(folder / name)
    return ImageFolder(str(folder), **settings)


def hub_data():
    features = RNG.random((10, 3)).tolist()
    return {"train": hub_rows(features[:8]), "test": hub_rows(features[8:])}


def table_case(folder, **settings):
    source = table(folder, **settings)
    (folder / "new.csv").write_text(NEW, encoding="utf-8")
    return source, folder / "new.csv", "row", [2, 3]


def regression_case(folder):
    source = table(folder, train="x,y\n1,0.5\n2,1.5\n4,2.5\n", test="x,y\n3,9.5\n8,1.5\n", label="y")
    (folder / "new.csv").write_text("x\n3\n\n8\n")
    return source, folder / "new.csv", "row", [2, 4]


def folder_case(folder, **settings):
    return images(folder, **settings), folder / "test", "file", ["cat/3.png", "dog/4.png"]


CASES = {
    "words and numbers": table_case,
    "a regression": regression_case,
    "images": folder_case,
    "images that are resized": lambda folder: folder_case(folder, image_size=3),
    "images that are augmented": lambda folder: folder_case(folder, augmentation="crop_flip", normalize="half"),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_new_samples_are_the_inputs_that_the_test_samples_are(case, tmp_path):
    source, path, column, names = case(tmp_path)
    _, test = source.read()
    schema = stored(source.schema)
    assert schema == source.schema
    for reader in (source, type(source).__new__(type(source))):
        # The second one has never seen a training sample.
        vars(reader).update({name: value for name, value in vars(source).items() if name not in ("table", "schema")})
        new = reader.read_new(path, schema)
        assert torch.equal(inputs(new.split), inputs(test))
        assert (new.column, list(new.names), new.class_names) == (column, names, source.class_names)
        targets = new.split.all()[1]
        assert (targets.shape, targets.dtype) == (test.all()[1].shape, test.all()[1].dtype)
        assert targets.isnan().all() if targets.is_floating_point() else (targets == -1).all()
        assert new.split.labels is None


def test_new_samples_do_not_depend_on_the_training_rows_that_are_there(tmp_path):
    source, path, *_ = table_case(tmp_path)
    source.read()
    schema = stored(source.schema)
    expected = inputs(source.read_new(path, schema).split)
    other = table(
        tmp_path, train=TRAIN.replace("50.5", "5000").replace("Bonn", "Ulm"), test=TEST.replace("Bonn", "Ulm")
    )
    other.read()
    assert torch.equal(inputs(other.read_new(path, schema).split), expected)
    assert not torch.equal(inputs(other.read_new(path, other.schema).split), expected)


def test_rows_of_hugging_face(monkeypatch, tmp_path):
    data = hub_data()
    source = HuggingFace(data, input="x")
    _, test = source.read()
    opened = {"one": data["test"], "dict": {"new": data["test"]}, "several": data, "empty": hub_rows([])}
    opened["wide"] = hub_rows(RNG.random((2, 4)).tolist())
    opened["other"] = hub_rows([[1, 2, 3]], dtype="uint8")
    package = type("datasets", (), {"load_from_disk": staticmethod(lambda path: opened[path.rpartition("/")[2]])})
    monkeypatch.setitem(__import__("sys").modules, "datasets", package)
    for name in ("one", "dict"):
        new = source.read_new(tmp_path / name, stored(source.schema))
        assert torch.equal(inputs(new.split), inputs(test))
        assert (new.column, list(new.names)) == ("row", [0, 1])
    with pytest.raises(ValueError, match=r"--new must be one split, got .* with train, test; name one: .*/train"):
        source.read_new(tmp_path / "several", source.schema)
    with pytest.raises(ValueError, match="--new must have rows, got none"):
        source.read_new(tmp_path / "empty", source.schema)
    with pytest.raises(ValueError, match=r"samples of --new must have the shape of data.source's \(\(3,\)\), got"):
        source.read_new(tmp_path / "wide", source.schema)
    with pytest.raises(ValueError, match="samples of --new must hold float32, as the training data, got whole numbers"):
        source.read_new(tmp_path / "other", source.schema)
    (tmp_path / "x.csv").touch()
    with pytest.raises(ValueError, match=r"--new must be a folder that save_to_disk wrote, got the file .*x.csv"):
        source.read_new(tmp_path / "x.csv", source.schema)


def test_every_source_reads_new_samples_or_says_that_it_does_not(tmp_path):
    names = [name for name in dir(fl_lightning.data) if name[0].isupper() and name != "TYPE_CHECKING"]
    found = [getattr(fl_lightning.data, name) for name in names]
    kinds = [kind for kind in found if inspect.isclass(kind) and issubclass(kind, Source) and kind is not Source]
    readers = {kind.__name__ for kind in kinds if kind.read_new is not Source.read_new}
    assert {"TableSource", "ImageFolder", "HuggingFace"} <= readers
    assert len(kinds) > len(readers)
    for kind in kinds:
        if kind.__name__ not in readers and not inspect.isabstract(kind):
            with pytest.raises(ValueError, match=f"--new needs a source .*, got {kind.__name__}; leave --new out"):
                kind.read_new(kind.__new__(kind), tmp_path, Schema())


def test_a_pooled_source_reads_them_as_its_source(tmp_path):
    source, path, *_ = table_case(tmp_path)
    pooled = PooledSource(source)
    pooled.read()
    assert torch.equal(
        inputs(pooled.read_new(path, pooled.schema).split), inputs(source.read_new(path, source.schema).split)
    )


class Own(LightningDataModule):
    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.zeros(4, 2), torch.zeros(4)), 2)


def test_a_data_module_is_asked_for_its_own_loader(tmp_path):
    with pytest.raises(
        ValueError, match=r"let Own.predict_dataloader give the new samples .*--allow_changes data.source"
    ):
        DataModuleSource(Own()).read_new(tmp_path, Schema())


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("age,smokes\n1,no\n", r"new.csv must have all columns that the net reads, and lacks city; it has age, smokes"),
        ("x\n1\n", "lacks age, city, smokes; it has x"),
        (
            "age,city,smokes\n,Bonn,no\n",
            r"'age' must hold a number in every row, got '' in row 2 of the new table .*; fill",
        ),
        (
            "age,city,smokes\n1,Bonn,no\nNA,Bonn,no\n",
            "got 'NA' in row 3 of the new .* what is missing, or leave out the row",
        ),
        ("age,city,smokes\nold,Bonn,no\n", "got 'old' in row 2 of the new table"),
        ("age,city,smokes\n", "must have a header and rows"),
        (
            "age,city,smokes\n1,Bonn,no\n-1e300,Bonn,no\n",
            "must hold numbers that the net can read, got '-1e300' in row 3 of the new table .*; leave out the row",
        ),
        ("age;city;smokes\n1;Bonn;no\n", "must have its columns between ',', got one column"),
    ],
)
def test_rows_that_cannot_be_read_are_refused(text, sentence, tmp_path):
    source = table(tmp_path)
    source.read()
    (tmp_path / "new.csv").write_text(text)
    with pytest.raises(ValueError, match=sentence):
        source.read_new(tmp_path / "new.csv", source.schema)


def test_words_that_no_training_row_has_are_counted_and_are_none_of_the_words(tmp_path):
    source = table(tmp_path)
    source.read()
    (tmp_path / "new.csv").write_text("age,city,smokes\n1,Ulm,no\n2,,no\n3,Bonn,no\n4,Ulm,no\n", encoding="utf-8")
    with pytest.warns(UserWarning, match="column 'city' of .*new.csv holds '', 'Ulm' in 3 of 4 rows") as warned:
        new = source.read_new(tmp_path / "new.csv", source.schema)
    assert len(warned) == 1
    assert inputs(new.split)[:, 1:3].tolist() == [[0, 0], [0, 0], [1, 0], [0, 0]]


@pytest.mark.parametrize("written", [("True", "False"), ("TRUE", "FALSE"), ("true", "no"), ("yes", "true")])
def test_truth_values_are_spelled_as_training_rows_decide(written, tmp_path, recwarn):
    """A new file may hold one of two words only, which alone would look like a truth value."""
    source = table(
        tmp_path,
        train=TRAIN.replace("yes", written[0]).replace("no", written[1]),
        test=TEST.replace("yes", written[0]).replace("no", written[1]),
    )
    train, _ = source.read()
    words = inputs(train)[:2, 3:]
    for number, word in enumerate(written):
        (tmp_path / "new.csv").write_text(f"age,city,smokes\n1,Bonn,{word}\n")
        assert torch.equal(inputs(source.read_new(tmp_path / "new.csv", source.schema).split)[0, 3:], words[number])
    assert not recwarn.list


def test_images_that_cannot_be_read_are_refused(tmp_path):
    source = images(tmp_path)
    source.read()
    new = tmp_path / "new"
    new.mkdir()
    (new / ".hidden.png").touch()
    with pytest.raises(ValueError, match=r"--new must be an image or a folder of images, got .*new, which holds none"):
        source.read_new(new, source.schema)
    picture(new / "a.png", size=(6, 4))
    with pytest.raises(
        ValueError, match=r"must have 4×5 pixels as the training images, got 4×6 in .*a.png; resize them"
    ):
        source.read_new(new, source.schema)
    picture(new / "b.png")
    with pytest.raises(ValueError, match=r"all images must have one size.*: resize them to 4×5"):
        source.read_new(new, source.schema)
    (new / "a.png").unlink()
    (new / "lost.png").symlink_to("nowhere.png")
    with pytest.raises(ValueError, match=r"lost.png could not be read as an image"):
        source.read_new(new, source.schema)
    (new / "lost.png").unlink()
    (new / "notes.txt").touch()
    with pytest.warns(UserWarning, match=r"new holds 1 files that are not read \(1 of .txt\)"):
        assert list(source.read_new(new, source.schema).names) == ["b.png"]
    (new / "c.png").write_text("no image")
    with pytest.raises(ValueError, match=r"c.png could not be read as an image"):
        source.read_new(new / "c.png", source.schema)


def test_a_folder_is_no_table_and_a_source_of_images_has_none(tmp_path):
    source = table(tmp_path)
    source.read()
    with pytest.raises(ValueError, match="--new must be a CSV or Parquet file, got the folder"):
        source.read_new(tmp_path, source.schema)
    with pytest.raises(ValueError, match="--new needs the schema of a table"):
        source.read_new(tmp_path / "test.csv", Schema())


def test_a_schema_survives_a_checkpoint():
    for source in (Digits(), PooledSource(Digits())):
        source.read()
        assert stored(source.schema) == source.schema


def test_the_data_module_gives_them_in_place_of_the_test_samples(tmp_path):
    source, path, *_ = table_case(tmp_path)
    data = FederatedDataModule(source, num_clients=2)
    with pytest.raises(ValueError, match="predict_new needs the schema of the training samples"):
        data.predict_new(path)
    data.setup()
    with pytest.raises(FileNotFoundError, match="--new must be a file or a folder of new samples, got nowhere"):
        data.predict_new("nowhere")
    with (tmp_path / "new.csv").open(encoding="utf-8") as file:
        assert "risk" not in next(csv.reader(file))
    data.predict_new(path)
    (batch,) = data.predict_dataloader()
    assert batch[0].shape == (2, 5)
    assert batch[1].tolist() == [-1, -1]
    data.predict_new(None)
    (batch,) = data.predict_dataloader()
    assert batch[1].tolist() == [1, 0]
