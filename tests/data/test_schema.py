"""One schema: the training data decide types, scales, owners and classes, and all other samples are read by it."""

import bz2
import gzip
import importlib
import inspect
import json
import lzma
import pkgutil
import shutil
import zipfile
from collections import namedtuple

import numpy as np
import pytest
import torch
from PIL import Image
from pytorch_lightning import LightningDataModule
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset
from torchvision import datasets
from torchvision.transforms.functional import pil_to_tensor

from fl_lightning import FederatedDataModule, FederatedLoop, data
from fl_lightning.data import DatasetSource, HuggingFace, ImageFolder, PooledSource, Source, TableSource, TensorSource
from fl_lightning.data.datamodules import DataModuleSource
from fl_lightning.data.owners import Elsewhere, Folder, write_set
from fl_lightning.data.schema import UNKNOWN_CLASS
from fl_lightning.data.splits import TensorSplit
from fl_lightning.data.table_schema import TableSchema
from fl_lightning.data.transforms import Normalize, Scale
from fl_lightning.methods import FedAvg, FedCL, FedDFServer
from fl_lightning.nets import Perceptron
from tests.data.test_folders import write as write_image
from tests.data.test_hub import Rows, rows, value
from tests.data.test_tables import Column, Frame
from tests.toys import sgd, trainer


def all_sources():
    """Find all classes of sources in the package."""
    for module in pkgutil.walk_packages(data.__path__, f"{data.__name__}."):
        importlib.import_module(module.name)
    found = []
    waiting = [Source]
    while waiting:
        kind = waiting.pop()
        waiting += kind.__subclasses__()
        if kind.__module__.startswith("fl_lightning.") and not inspect.isabstract(kind):
            found.append(kind)
    return sorted(found, key=lambda kind: kind.__name__)


# --- every source, every place


def named_table(tmp_path, names):
    """A table whose classes have names, and whose numbers lie elsewhere for every order of names."""
    rows = [f"{10 * i + len(names[0])},{name}" for i, name in enumerate(names * 3)]
    tmp_path.mkdir(exist_ok=True)
    path = tmp_path / f"{'-'.join(names)}.csv"
    path.write_text("\n".join(["x,y", *rows]) + "\n")
    return TableSource(path, "y", path)


def named_folder(tmp_path, names):
    root = tmp_path / f"images-{'-'.join(names)}"
    for name in names:
        write_image(root / "train" / name / "0.png")
    return ImageFolder(str(root))


def named_rows(tmp_path, names):
    label = type("ClassLabel", (), {"dtype": "int64", "names": list(names)})()
    features = {"x": type("Sequence", (), {"feature": value("float32")})(), "label": label}
    return HuggingFace({"train": Rows(features, x=[[0.0], [1.0]], label=[0, 1])}, input="x")


def named_set(tmp_path, names):
    root = tmp_path / f"set-{'-'.join(names)}"
    split = TensorSplit(torch.zeros(2, 1), torch.tensor([0, 1]))
    write_set(root, split, torch.arange(2), len(names), names)
    return Folder(root)


def named_module(tmp_path, names):
    class Own(LightningDataModule):
        class_names = names

        def train_dataloader(self):
            return DataLoader(TensorDataset(torch.zeros(2, 1), torch.tensor([0, 1])))

    return DataModuleSource(Own())


def pooled(tmp_path, names):
    source = TensorSource((torch.zeros(2, 1), torch.tensor([0, 1])), (torch.zeros(2, 1), torch.tensor([0, 1])), 2)
    source.class_names = names
    return PooledSource(source, test_share=0.5)


def unnamed(tmp_path, names):
    pair = torch.zeros(2, 1), torch.tensor([0, 1])
    return TensorSource(pair, pair, 2)


def dataset(tmp_path, names):
    return DatasetSource(TensorDataset(torch.zeros(2, 1), torch.tensor([0, 1])))


MAKERS = {
    TableSource: named_table,
    ImageFolder: named_folder,
    HuggingFace: named_rows,
    Folder: named_set,
    DataModuleSource: named_module,
    PooledSource: pooled,
    TensorSource: unnamed,
    DatasetSource: dataset,
}
PLACES = ("transfer", "proxy", "shared", "mine")


def maker_of(kind):
    """Find what makes a source of a class. A class without one must say who has decided its classes."""
    if kind.classes_by:
        pytest.skip(f"{kind.__name__} has the classes of {kind.classes_by}")
    assert kind in MAKERS, f"write a maker of {kind.__name__}, or set its classes_by"
    return MAKERS[kind]


def test_a_source_without_a_maker_is_found():
    class Another(Source):
        def load(self):
            return TensorSplit(torch.zeros(2, 1), torch.tensor([0, 1])), None

    with pytest.raises(AssertionError, match="write a maker of Another, or set its classes_by"):
        maker_of(Another)


@pytest.mark.parametrize("kind", all_sources(), ids=lambda kind: kind.__name__)
def test_one_function_reads_every_source(kind):
    assert kind.read is Source.read
    assert kind.follow in (Source.follow, PooledSource.follow)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", all_sources(), ids=lambda kind: kind.__name__)
def test_further_samples_have_the_class_numbers_of_the_training_data(kind, place, tmp_path):
    make = maker_of(kind)
    training = make(tmp_path, ("left", "right"))
    further = make(tmp_path, ("right", "left"))
    data = FederatedDataModule(training, num_clients=1, extra_splits={place: further})
    data.setup()
    names = training.class_names
    split = data.split(place)
    if names is None:
        assert split.labels.tolist() == data.split("train").labels.tolist()
        return
    own = make(tmp_path / "again", ("right", "left"))
    before, _ = own.read()
    assert [names[label] for label in split.labels] == [own.class_names[label] for label in before.labels]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", all_sources(), ids=lambda kind: kind.__name__)
def test_further_samples_of_a_class_that_is_not_trained_are_refused(kind, place, tmp_path):
    make = maker_of(kind)
    if make in (unnamed, dataset):
        pytest.skip(f"{kind.__name__} has no class names of its own")
    training = make(tmp_path, ("left", "right"))
    data = FederatedDataModule(
        training, num_clients=1, extra_splits={place: make(tmp_path, ("left", "bright"))}, batch_size=1
    )
    if place == "proxy":
        data.setup()
        assert set(data.split("proxy").labels.tolist()) == {UNKNOWN_CLASS, training.class_names.index("left")}
        return
    with pytest.raises(ValueError, match="bright"):
        data.setup()


def test_proxy_samples_of_other_classes_serve_methods_that_do_not_read_labels():
    """FedDF distils on pictures of other classes (CIFAR-100 for CIFAR-10); FedCL estimates with labels."""
    x = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
    train = TensorSource((x, torch.arange(12) % 3), (x, torch.arange(12) % 3))
    further = TensorSource((x, torch.arange(12) % 5), (x, torch.arange(12) % 5))

    def fit(client, server_module=None):
        data = FederatedDataModule(train, num_clients=2, extra_splits={"proxy": further}, batch_size=4)
        run = trainer(1)
        loop = FederatedLoop(client(net=Perceptron, optimizer=sgd()), server_module=server_module, seed=0)
        run.fit(loop, datamodule=data)
        return data

    labels = fit(FedAvg, FedDFServer(distill_steps=2)).split("proxy").labels.tolist()
    assert labels == [0, 1, 2, UNKNOWN_CLASS, UNKNOWN_CLASS] * 2 + [0, 1]
    with pytest.raises(ValueError, match="FedCL reads the labels of the split 'proxy', whose samples must be"):
        fit(FedCL)


def test_labels_without_names_must_be_numbers_of_training_classes():
    training = unnamed(None, None)
    pair = torch.zeros(2, 1), torch.tensor([0, 2])
    data = FederatedDataModule(training, num_clients=1, extra_splits={"transfer": TensorSource(pair, pair)})
    with pytest.raises(ValueError, match=r"data.extra_splits.transfer must have the classes 0 ... 1 .*, got 2; number"):
        data.setup()


def test_a_table_elsewhere_has_the_scale_and_the_words_of_the_training_rows(tmp_path):
    (tmp_path / "train.csv").write_text("x,city,y\n0,Bonn,low\n10,Ulm,high\n")
    (tmp_path / "more.csv").write_text("city,y,x\nUlm,high,5\nKiel,high,20\n")
    training = TableSource(tmp_path / "train.csv", "y", tmp_path / "train.csv")
    further = TableSource(tmp_path / "more.csv", "y", tmp_path / "more.csv")
    data = FederatedDataModule(training, num_clients=1, extra_splits={"transfer": further})
    data.setup()
    assert data.split("transfer").x.tolist() == [[0, 0, 1], [3, 0, 0]]
    assert (data.split("transfer").y.tolist(), training.class_names) == ([0, 0], ("high", "low"))
    for text, sentence in {
        "city,y\nUlm,high\n": "the train table must have the column 'x'",
        "city,y,x\nUlm,high,-\n": "column 'x' must hold a number in every row, got '-' in row 2 of the train table",
        "city,y,x\nUlm,mid,1\n": "must stand in training rows, got 'mid'",
    }.items():
        (tmp_path / "more.csv").write_text(text)
        with pytest.raises(ValueError, match=sentence):
            FederatedDataModule(training, num_clients=1, extra_splits={"transfer": further}).setup()


def test_images_elsewhere_have_the_scale_of_the_training_images(tmp_path):
    training = named_folder(tmp_path, ("a", "b"))
    further = named_folder(tmp_path, ("b", "a"))
    FederatedDataModule(training, num_clients=1, extra_splits={"proxy": further}).setup()
    assert further.normalize == training.normalize
    half = ImageFolder(further.root, normalize="half")
    with pytest.raises(
        ValueError, match=r"normalize of data.extra_splits.proxy must be that of the training data .*; leave"
    ):
        FederatedDataModule(training, num_clients=1, extra_splits={"proxy": half}).setup()


def test_a_schema_is_written_for_other_parties(tmp_path):
    (tmp_path / "a.csv").write_text("x,who,y\n0,07,1\n10,7,0\n")
    (tmp_path / "b.csv").write_text("x,who,y\n5,7,0\n6,8,0\n")
    first = TableSource(tmp_path / "a.csv", "y", tmp_path / "a.csv", ignored=["who"])
    first.read()
    first.schema.table.write(tmp_path / "schema.json")
    assert TableSchema.from_file(tmp_path / "schema.json") == first.schema.table
    other = TableSource(tmp_path / "b.csv", "y", tmp_path / "b.csv", schema_file=tmp_path / "schema.json")
    train, _ = other.read()
    assert (train.x.tolist(), train.y.tolist(), other.schema.digests()) == (
        [[0.0], [pytest.approx(0.2)]],
        [0, 0],
        first.schema.digests(),
    )
    assert train.column("who").tolist() == ["7", "8"]
    alone = TableSource(tmp_path / "b.csv", "y", tmp_path / "b.csv")
    alone.read()
    assert alone.schema.digests() != first.schema.digests()
    (tmp_path / "schema.json").write_text(json.dumps({"features": []}))
    with pytest.raises(ValueError, match=r"must be a schema that schema.write wrote, and is not"):
        other.read()
    with pytest.raises(FileNotFoundError, match="schema_file must be a JSON file"):
        TableSource(tmp_path / "b.csv", "y", schema_file=tmp_path / "none.json").read()


# --- types of a table's columns


def table_of(tmp_path, train, test=None, **settings):
    (tmp_path / "train.csv").write_text(train)
    (tmp_path / "test.csv").write_text(train if test is None else test)
    return TableSource(tmp_path / "train.csv", "y", tmp_path / "test.csv", **settings)


@pytest.mark.parametrize("codes", ["008 250 V27", "250 410 E909", "1 2 A3", "0-9 10-19 5"])
def test_codes_stay_codes_where_a_test_file_has_numbers_only(tmp_path, codes):
    first, second, third = codes.split()
    train = f"c,y\n{first},0\n{second},1\n{third},0\n"
    _, test = table_of(tmp_path, train, f"c,y\n{second},0\n{first},1\n").read()
    assert test.x.sum(1).tolist() == [1, 1]


OWNERS = (
    ["007", "7", "07"],
    ["12345678901234567890", "12345678901234567891"],
    ["1.5", "1.50"],
    ["1e3", "1000"],
    ["-0", "0"],
)
BIG = 2**53


@pytest.mark.parametrize("owners", [*OWNERS, ["9007199254740993", "9007199254740992", "0.5"]])
@pytest.mark.parametrize("read", ["file", "frame"])
def test_owners_stay_apart(tmp_path, owners, read):
    if read == "file":
        rows = "".join(f"{i},{owner},{i % 2}\n" for i, owner in enumerate(owners * 2))
        source = table_of(tmp_path, f"x,who,y\n{rows}", ignored=["who"])
    else:
        count = 2 * len(owners)
        frame = Frame(x=Column(range(count)), who=Column(owners * 2), y=Column([i % 2 for i in range(count)]))
        source = TableSource(frame, "y", frame, ignored=["who"])
    data = FederatedDataModule(source, num_clients=None, by="who")
    data.setup()
    assert sorted(data.client_names) == sorted(owners)
    for client_id, name in enumerate(data.client_names):
        wanted = [i for i, owner in enumerate(owners * 2) if owner == name]
        assert data.client_indices("train", client_id).tolist() == wanted
        assert data.client_indices("test", client_id).tolist() == wanted


def test_an_owner_of_test_rows_that_is_written_in_another_way_is_another_owner(tmp_path):
    source = table_of(tmp_path, "x,who,y\n1,7,0\n2,10,1\n", "x,who,y\n1,007,0\n2,10,1\n", ignored=["who"])
    data = FederatedDataModule(source, num_clients=None, by="who")
    data.setup()
    assert data.client_names == ["7", "10"]  # numbers are in the order of numbers
    with pytest.warns(UserWarning, match="test samples only: 1, with 1 of 2"):
        assert [data.client_indices("test", c).tolist() for c in range(2)] == [[], [1]]


def test_large_whole_numbers_with_gaps_stay_apart():
    frame = Frame(x=Column([1, 2, 3]), who=Column([BIG + 1, BIG, None]), y=Column([0, 1, 0]))
    train, _ = TableSource(frame, "y", frame, ["x"]).read()
    assert train.column("who").tolist() == [str(BIG + 1), str(BIG), ""]


def test_text_of_a_frame_stays_text():
    frame = Frame(code=Column(["8", "250"]), y=Column(["01", "1"]))
    source = TableSource(frame, "y", frame)
    train, _ = source.read()
    assert (train.x.tolist(), source.class_names) == ([[0, 1], [1, 0]], ("01", "1"))
    numbers = Frame(code=Column([8, 250]), y=Column(["1", "01"]))
    _, test = TableSource(frame, "y", numbers).read()  # the training rows decide, whatever the test rows are
    assert test.x.tolist() == [[0, 1], [1, 0]]
    with pytest.raises(ValueError, match="'code' must hold a number in every row, got '8' in row 1 of the test table"):
        TableSource(numbers, "y", frame).read()


@pytest.mark.parametrize("missing", [None, float("nan")])
def test_a_target_that_is_missing_is_named_before_a_feature(missing):
    gaps = Frame(x=Column([1.0, missing, 2.0]), y=Column(["a", missing, "b"]))
    with pytest.raises(ValueError, match=r"column 'y' must hold a class .* in every row, got '' in train; fill in"):
        TableSource(gaps, "y", gaps).read()


ODD = ["-", "--", "1,234.5", "45%", "$5", "< 5", "n.a.", "unknown", "12 kg", "1 234", "12:30", "2024-01-05", "10-19"]


@pytest.mark.parametrize("odd", ODD)
def test_an_odd_value_in_a_column_of_numbers_is_named(tmp_path, odd):
    rows = "".join(f"{i + 0.5},{i % 2}\n" for i in range(48))
    with pytest.raises(
        ValueError, match=r"'x' must hold a number in every row, got .* in row 50 of the train table"
    ) as error:
        table_of(tmp_path, f'x,y\n{rows}"{odd}",1\n').read()
    assert repr(odd) in str(error.value)
    source = table_of(tmp_path, f"x,y\n{rows}", f'x,y\n"{odd}",1\n')
    with pytest.raises(ValueError, match=r"'x' must hold a number in every row, got .* in row 2 of the test table"):
        source.read()


def test_an_odd_value_in_a_target_is_named(tmp_path):
    text = "x,y\n1,0.5\n2,1.5\n3,-\n"
    with pytest.raises(ValueError, match=r"'y' must hold .*, got '-' in row 4 .* or set task: classification"):
        table_of(tmp_path, text).read()
    assert table_of(tmp_path, text, task="classification").read()[0].labels is not None


def test_a_decimal_comma_is_named_and_read(tmp_path):
    text = "x;y\n1,5;a\n-2,5;b\n"
    with pytest.raises(ValueError, match=r"must have its columns between ',', got one column 'x;y'; set sep: ';'"):
        table_of(tmp_path, text).read()
    for values in (text, text.replace("1,5", "45%").replace("-2,5", "5 %"), text.replace("1,5", "1,234.5")):
        with pytest.raises(ValueError, match=r"'x' must hold a number in every row, got .* in row 2 .* and 0 numbers;"):
            table_of(tmp_path, values, sep=";").read()
    dates = "x;y\n12.05.2024;a\n13.05.2024;b\n"
    assert table_of(tmp_path, dates, sep=";").read()[0].x.shape == (2, 2)
    mixed = "x;y\n1,5;a\n2;b\n"
    with pytest.raises(ValueError, match=r"got '1,5' in row 2 .*; set decimal: ','"):
        table_of(tmp_path, mixed, sep=";").read()
    for style in (text, mixed):
        train, _ = table_of(tmp_path, style, sep=";", decimal=",").read()
        assert train.x.flatten().tolist() == pytest.approx([1, -1] if style == text else [-1, 1])


def test_separators_encodings_and_compressions(tmp_path):
    text = "größe\ty\n1\tKöln\n2\tBonn\n"
    plain = text.replace("\t", ",")
    (tmp_path / "a.tsv").write_text(text)
    (tmp_path / "b.csv").write_text(plain, encoding="latin-1")
    (tmp_path / "c.csv").write_text(plain, encoding="utf-16")
    (tmp_path / "d.csv.gz").write_bytes(gzip.compress(plain.encode()))
    (tmp_path / "e.csv").write_bytes(gzip.compress(plain.encode()))
    (tmp_path / "f.csv.bz2").write_bytes(bz2.compress(plain.encode()))
    (tmp_path / "g.csv.xz").write_bytes(lzma.compress(plain.encode()))
    with zipfile.ZipFile(tmp_path / "h.zip", "w") as archive:
        archive.writestr("h.csv", plain)
    read = {
        "a.tsv": {"sep": "\t"},
        "b.csv": {"encoding": "latin-1"},
        "c.csv": {"encoding": "utf-16"},
        "d.csv.gz": {},
        "e.csv": {"compression": "gzip"},
        "f.csv.bz2": {},
        "g.csv.xz": {},
        "h.zip": {},
    }
    for name, settings in read.items():
        source = TableSource(tmp_path / name, "y", tmp_path / name, **settings)
        train, _ = source.read()
        assert (train.x.flatten().tolist(), source.class_names) == ([-1, 1], ("Bonn", "Köln"))
    assert TableSource(tmp_path / "a.tsv", "y", sep=r"\t").read()[0].x.shape[1] == 1
    refused = {
        ("a.tsv", ()): r"got one column .*; set sep: '\\t'",
        ("b.csv", ()): "must be text in UTF-8, which byte .* is not: save it as UTF-8, or set encoding: latin-1",
        ("b.csv", (("encoding", "klingon"),)): "encoding must be one that Python knows, got 'klingon'",
        ("e.csv", ()): "must be text, and it is compressed; set compression: gzip",
        ("d.csv.gz", (("compression", "bz2"),)): "could not be read .*set compression: gzip",
        ("b.csv", (("compression", "gzip"),)): "could not be read .*; set compression: null",
    }
    for (name, settings), sentence in refused.items():
        with pytest.raises(ValueError, match=sentence):
            TableSource(tmp_path / name, "y", **dict(settings)).read()


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"sep": ";;"}, "sep must be one character"),
        ({"decimal": ","}, "decimal must not be the character of sep"),
        ({"compression": "rar"}, "compression must be one of infer, gzip, bz2, xz, zip"),
    ],
)
def test_a_format_that_is_none(settings, sentence):
    with pytest.raises(ValueError, match=sentence):
        TableSource("t.csv", "y", **settings)


def test_nothing_of_a_table_depends_on_its_test_rows(tmp_path):
    train = "x,w,who,y\n1,a,07,0\n2.5,b,7,1\n4,a,9,0\n"
    whole = table_of(tmp_path, train, "x,w,who,y\n1,a,9,0\n", ignored=["who"])
    other = table_of(tmp_path, train, "x,w,who,y\n1e3,7,x y,1\n", ignored=["who"])
    assert whole.read()[0].x.tolist() == other.read()[0].x.tolist()
    assert whole.schema == other.schema


# --- columns of datasets


@pytest.mark.parametrize("form", [list, np.array, torch.tensor])
def test_an_attribute_of_a_tensor_dataset_names_the_owners(form):
    samples = TensorDataset(torch.zeros(4, 2), torch.tensor([0, 1, 0, 1]))
    samples.device = form([3, 5, 3, 5])
    data = FederatedDataModule.from_datasets(samples, samples, by="device")
    data.setup()
    assert data.client_names == ["3", "5"]
    assert [data.client_indices("test", c).tolist() for c in range(2)] == [[0, 2], [1, 3]]
    with pytest.raises(ValueError, match="no column 'site'"):
        FederatedDataModule.from_datasets(samples, samples, by="site")


OWNED = ["007", "7", "07", "7"]


def with_devices(values=OWNED):
    samples = TensorDataset(torch.zeros(4, 2), torch.tensor([0, 1, 0, 1]))
    samples.device = values
    return samples


class Owned(Dataset):
    """Items that name their owner."""

    def __init__(self, make):
        self.make = make

    def __len__(self):
        return len(OWNED)

    def __getitem__(self, index):
        return self.make(torch.zeros(2), index % 2, OWNED[index])


OwnedItem = namedtuple("OwnedItem", ["x", "y", "device"])
HOLDERS = {
    "attribute": with_devices,
    "subset": lambda: Subset(with_devices(), [0, 1, 2, 3]),
    "parts": lambda: ConcatDataset([Subset(with_devices(), [0, 1]), Subset(with_devices(), [2, 3])]),
    "array": lambda: with_devices(np.array(OWNED, dtype=object)),
    "mapping": lambda: Owned(lambda x, y, device: {"x": x, "label": y, "device": device}),
    "named tuple": lambda: Owned(OwnedItem),
    "subset of named tuples": lambda: Subset(Owned(OwnedItem), [0, 1, 2, 3]),
    "series": lambda: with_devices(pytest.importorskip("pandas", reason="pip install pandas").Series(OWNED)),
}


@pytest.mark.parametrize("holder", HOLDERS)
@pytest.mark.parametrize("given", ["datasets", "source", "module"])
def test_owners_are_found_wherever_samples_hold_them(given, holder):
    samples = HOLDERS[holder]()

    class Own(LightningDataModule):
        def train_dataloader(self):
            return DataLoader(samples)

    if given == "datasets":
        data = FederatedDataModule.from_datasets(samples, by="device")
    else:
        source = Own() if given == "module" else DatasetSource(samples)
        data = FederatedDataModule(source, num_clients=None, by="device")
    data.setup()
    assert data.client_names == ["007", "07", "7"]
    assert [data.client_indices("train", client_id).tolist() for client_id in range(3)] == [[0], [2], [1, 3]]


def test_a_server_of_several_owners_has_no_scale_of_its_own(tmp_path):
    source = Elsewhere(tmp_path)
    source.read()
    assert source.schema.digests() == {}


# --- the test samples of a source


def test_the_sets_of_a_folder_have_the_classes_of_its_training_set(tmp_path):
    root = tmp_path / "set"
    split = TensorSplit(torch.zeros(2, 1), torch.tensor([0, 1]), Scale(16))
    write_set(root, split, torch.arange(2), 2, ["left", "right"])
    write_set(root / "test", split, torch.arange(2), 2, ["right", "left"])
    write_set(root / "val", split, torch.arange(2), 2, None)
    source = Folder(root)
    train, test = source.read()
    assert (train.y.tolist(), test.y.tolist(), source.validation.y.tolist()) == ([0, 1], [1, 0], [0, 1])
    assert source.class_names == ("left", "right")
    for names, transform, sentence in (
        (["left", "bright"], Scale(16), "must have classes of the training data .left, right., got 'bright'"),
        (["left", "right"], Scale(255), "test must have the scale of the training set"),
    ):
        shutil.rmtree(root / "test")
        write_set(root / "test", TensorSplit(split.x, split.y, transform), torch.arange(2), 2, names)
        with pytest.raises(ValueError, match=sentence):
            Folder(root).read()


def folder_of(root, names):
    for name in names:
        write_image(root / name / "0.png")
    return datasets.ImageFolder(root, transform=pil_to_tensor)


@pytest.mark.parametrize("among", [list, lambda dataset: Subset(dataset, [0, 1]), lambda d: ConcatDataset([d, d])])
def test_datasets_that_know_their_classes_number_them_alike(tmp_path, among):
    keep = among if among is not list else lambda dataset: dataset
    train = keep(folder_of(tmp_path / "train", "abc"))
    other = keep(folder_of(tmp_path / "test", "bc"))
    source = DatasetSource(train, train)
    source.read()
    assert source.schema.class_names == ("a", "b", "c")
    sentence = "test samples must number their classes as the training samples .a, b, c., got b, c"
    with pytest.raises(ValueError, match=sentence):
        DatasetSource(train, other).read()

    class Own(LightningDataModule):
        def train_dataloader(self):
            return DataLoader(train)

        def test_dataloader(self):
            return DataLoader(other)

    with pytest.raises(ValueError, match=sentence):
        FederatedDataModule(Own(), num_clients=1).setup()
    data = FederatedDataModule(DatasetSource(train), num_clients=1, extra_splits={"transfer": DatasetSource(other)})
    data.setup()
    split = data.split("transfer")
    assert split.labels.tolist() == [train_class + 1 for train_class in DatasetSource(other).read()[0].labels.tolist()]
    assert next(split.batches([torch.arange(len(split))], None))[1].tolist() == split.labels.tolist()


def test_splits_of_a_hub_data_set_have_the_types_of_its_training_rows():
    label = value("int64")
    whole = Rows({"x": type("S", (), {"feature": value("int64")})(), "label": label}, x=[[1], [2]], label=[0, 1])
    numbers = Rows(
        {"x": type("S", (), {"feature": value("float32")})(), "label": label}, x=[[1.0], [2.0]], label=[0, 1]
    )
    HuggingFace({"train": whole, "test": whole}, input="x").read()
    with pytest.raises(
        ValueError, match=r"must have the types of the training rows .whole numbers and classes. in all"
    ):
        HuggingFace({"train": whole, "test": numbers}, input="x").read()


def test_pooled_owners_stay_apart(tmp_path):
    source = table_of(tmp_path, "x,who,y\n1,7,0\n2,8,1\n", "x,who,y\n1,007,0\n2,8,1\n", ignored=["who"])
    data = FederatedDataModule(PooledSource(source, test_share=0.1), num_clients=None, by="who")
    data.setup()
    assert data.client_names == ["007", "7", "8"]


# --- how samples reach the net


SIDE = (2, 4, 4)
UNIT = torch.linspace(0, 1, 6 * 32).view(6, *SIDE)
CLASSES = torch.arange(6) % 2


def pair(x=UNIT, y=CLASSES):
    return x, y


class Pairs(Dataset):
    """Samples that are read item by item, and whose classes only a pass tells: no attribute has their name."""

    def __init__(self, x, y):
        self.inputs = x
        self.numbers = y

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        return self.inputs[index], self.numbers[index]


def as_tensors(x, y):
    return TensorSource((x, y), (x, y))


def as_dataset(x, y):
    return DatasetSource(TensorDataset(x, y))


def as_items(x, y):
    return DatasetSource(Pairs(x, y))


def as_module(x, y):
    class Own(LightningDataModule):
        def train_dataloader(self):
            return DataLoader(Pairs(x, y))

    return DataModuleSource(Own())


def as_rows(x, y):
    features = {"x": type("Sequence", (), {"feature": value(str(x.dtype)[6:])})(), "label": value(str(y.dtype)[6:])}
    return HuggingFace({"train": Rows(features, x=x.numpy(), label=y.tolist())}, input="x")


FORMS = (as_tensors, as_dataset, as_items, as_module, as_rows)
OTHERS = {
    "stored values": (pair((255 * UNIT).round()), "must have the scale of the training samples"),
    "stored values of 16 bits": (pair((65_535 * UNIT).round()), "must have the scale of the training samples"),
    "whole numbers": (pair((255 * UNIT).long()), "must hold float32, as the training data, got whole numbers"),
    "another size": (pair(UNIT[:, :, :2]), "shape of"),
    "other channels": (pair(UNIT[:, :1]), "shape of"),
    "flat": (pair(UNIT.flatten(1)), "shape of"),
    "numbers as targets": (pair(y=CLASSES.float()), "must have classes as targets, as the training data, got numbers"),
    "another class": (pair(y=CLASSES + 1), "must have the classes 0 ... 1 of the training data, got 2"),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("form", FORMS)
def test_further_samples_that_do_not_reach_the_net_as_the_training_samples_are_refused(form, other, place):
    given, sentence = OTHERS[other]
    data = FederatedDataModule(as_items(UNIT, CLASSES), num_clients=1, extra_splits={place: form(*given)})
    if place == "proxy" and other == "another class":
        data.setup()
        assert data.split("proxy").labels.tolist() == [1, UNKNOWN_CLASS] * 3
        assert next(data.split("proxy").batches([torch.arange(2)], None))[1].tolist() == [1, UNKNOWN_CLASS]
        return
    with pytest.raises(ValueError, match=sentence):
        data.setup()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("training", FORMS)
def test_further_samples_that_reach_the_net_as_the_training_samples_are_taken(training, form):
    data = FederatedDataModule(
        training(UNIT, CLASSES), num_clients=1, extra_splits={"proxy": form(UNIT.clone(), CLASSES.clone())}
    )
    data.setup()
    assert data.split("proxy").labels.tolist() == CLASSES.tolist()


def test_float64_is_not_float32_and_a_target_is_no_column():
    for given, sentence in ((pair(UNIT.double()), "got float64; convert them"), (pair(y=CLASSES[:, None]), "targets")):
        data = FederatedDataModule(as_items(UNIT, CLASSES), num_clients=1, extra_splits={"proxy": as_dataset(*given)})
        with pytest.raises(ValueError, match=sentence):
            data.setup()


@pytest.mark.parametrize("split", ["test", "val"])
@pytest.mark.parametrize("other", [name for name in OTHERS if name != "another class"])
@pytest.mark.parametrize("form", [TensorDataset, lambda x, y: ConcatDataset([TensorDataset(x, y)]), Pairs])
def test_the_test_samples_of_a_dataset_reach_the_net_as_its_training_samples(form, other, split):
    given, sentence = OTHERS[other]
    samples = form(*given)
    source = DatasetSource(TensorDataset(UNIT, CLASSES), **{split: samples})
    may_differ = type(samples) is not TensorDataset and other in ("another size", "other channels")
    if type(samples) is Pairs or may_differ:
        source.read()  # samples of a dataset may differ in size, and items of the user's are not read before the fit
        return
    with pytest.raises(ValueError, match=f"the {split} samples of data.source .*{sentence}"):
        source.read()


def test_normalization_is_compared_whatever_the_stored_white_is():
    given = {
        "same": Normalize([0.5], [0.5], divisor=16),
        "other": Normalize([0.4], [0.5], divisor=16),
        "none": Scale(16),
    }
    stored = pair((255 * UNIT).round()), pair((255 * UNIT).round())
    training = TensorSource(*stored, transform=Normalize([0.5], [0.5]))
    for name, transform in given.items():
        few = pair((16 * UNIT).round())
        further = TensorSource(few, few, transform=transform)
        data = FederatedDataModule(training, num_clients=1, extra_splits={"proxy": further})
        if name == "same":
            data.setup()
            continue
        with pytest.raises(ValueError, match=r"data.extra_splits.proxy must be normalized as the training data"):
            data.setup()


def test_a_source_is_read_by_the_place_that_it_has():
    """One object may be two splits, and the source of another data module afterwards."""
    more = as_tensors(UNIT, torch.arange(6) % 3)
    for names in (("proxy", "transfer"), ("transfer", "proxy")):
        data = FederatedDataModule(as_tensors(UNIT, CLASSES), num_clients=1, extra_splits=dict.fromkeys(names, more))
        with pytest.raises(ValueError, match=r"data.extra_splits.transfer must have the classes 0 ... 1"):
            data.setup()
    again = FederatedDataModule(more, num_clients=1)
    again.setup()
    assert (again.num_classes, again.split("train").labels.tolist()) == (3, [0, 1, 2] * 2)


def test_a_split_of_a_users_name_may_not_have_other_classes():
    more = as_tensors(UNIT, torch.arange(6) % 3)
    data = FederatedDataModule(as_tensors(UNIT, CLASSES), num_clients=1, extra_splits={"my_proxy": more})
    with pytest.raises(ValueError, match=r"data.extra_splits.my_proxy must have the classes"):
        data.setup()


def test_items_of_other_forms_are_relabelled():
    Item = namedtuple("Item", ["x", "y", "name"])

    class Items(Pairs):
        def __init__(self, x, y, make):
            super().__init__(x, y)
            self.make = make

        def __getitem__(self, index):
            return self.make(self.inputs[index], int(self.numbers[index]))

    for make in (lambda x, y: Item(x, y, "a"), lambda x, y: {"x": x, "label": y}, lambda x, y: [x, y, x]):
        items = Items(UNIT, torch.arange(6) % 3, make)
        training = DatasetSource(Items(UNIT, CLASSES, make))
        data = FederatedDataModule(training, num_clients=1, extra_splits={"proxy": DatasetSource(items)})
        data.setup()
        assert data.split("proxy").labels.tolist() == [0, 1, UNKNOWN_CLASS] * 2
        batch = next(data.split("proxy").batches([torch.arange(3)], None))
        labels = batch["label"] if isinstance(batch, dict) else batch[1]
        assert labels.tolist() == [0, 1, UNKNOWN_CLASS]
        assert isinstance(items[0], type(data.split("proxy").dataset[0]))


@pytest.mark.parametrize("further", ["folder", "rows"])
@pytest.mark.parametrize("training", ["folder", "rows"])
def test_pictures_elsewhere_are_normalized_as_the_training_pictures(training, further, tmp_path):
    picture = Image.fromarray(np.arange(48, dtype=np.uint8).reshape(4, 4, 3))

    def make(kind, name):
        if kind == "rows":
            return HuggingFace({"train": rows([picture], label=[0])}, input="x")
        path = tmp_path / name / "train" / "a" / "0.png"
        path.parent.mkdir(parents=True)
        picture.save(path)
        return ImageFolder(str(tmp_path / name))

    data = FederatedDataModule(make(training, "one"), num_clients=1, extra_splits={"proxy": make(further, "other")})
    data.setup()
    read = [data.split(name).all()[0] for name in ("train", "proxy")]
    assert torch.allclose(read[0], read[1])


def test_looking_at_samples_draws_nothing_of_the_users():
    def noisy(x, generator):
        return x + torch.randn(x.shape)

    torch.manual_seed(0)
    before = torch.get_rng_state()
    FederatedDataModule(TensorSource(pair(), pair(), transform=noisy), num_clients=1).setup()
    assert torch.equal(torch.get_rng_state(), before)
