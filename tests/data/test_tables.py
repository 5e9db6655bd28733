"""Tables: CSV files, Parquet files and DataFrames."""

import sys

import numpy as np
import pytest
import torch

from fl_lightning import FederatedDataModule
from fl_lightning.data import TableSource, tables
from fl_lightning.data.table_files import cells_of_frame
from tests.data.test_vision import first_batch

TABLE = "age,city,hospital,risk\n50,Bonn,a,low\n60,Köln,b,high\n70,Bonn,b,low\n40,Köln,a,high\n"


def test_a_csv_file_by_column(tmp_path):
    (tmp_path / "train.csv").write_text(TABLE)
    (tmp_path / "test.csv").write_text("age,city,hospital,risk\n55,Ulm,b,high\n")
    source = TableSource(tmp_path / "train.csv", "risk", tmp_path / "test.csv", ignored=["hospital"])
    data = FederatedDataModule(source, num_clients=None, by="hospital")
    data.setup()
    assert (data.num_clients, data.num_classes, source.class_names) == (2, 2, ("high", "low"))
    x, y = first_batch(data.split("train"), 4)
    assert y.tolist() == [1, 0, 1, 0]
    torch.testing.assert_close(x[:, 0], torch.tensor([-0.4472, 0.4472, 1.3416, -1.3416]), atol=1e-4, rtol=0)
    assert x[:, 1:].tolist() == [[1, 0], [0, 1], [1, 0], [0, 1]]
    assert first_batch(data.split("test"), 1)[0].tolist() == [[0, 0, 0]]  # the mean age, and a city nobody knows
    assert data.client_indices("test", 1).tolist() == [0]


def test_a_table_of_numbers_is_regressed_and_split_by_a_share(tmp_path):
    (tmp_path / "all.csv").write_text("x,y\n" + "".join(f"{i},{i / 2}\n" for i in range(10)))
    train, test = TableSource(tmp_path / "all.csv", "y", test_share=0.3).read()
    assert (len(train), len(test), train.y.shape, train.labels) == (7, 3, (7, 1), None)
    assert sorted([*train.column("x"), *test.column("x")]) == list(range(10))


@pytest.mark.parametrize(
    ("text", "arguments", "sentence"),
    [
        (TABLE, {"label": "rsk"}, "the train table must have the column 'rsk', it has age, city, hospital, risk"),
        ("a,b\n1\n", {"label": "b"}, "row 2 of .* must have 2 values as the header, got 1"),
        ("a,b\n", {"label": "b"}, "must have a header and rows, got 2 columns and no row"),
        ("a,b\n1.5,0\nnan,1\n0.1,1\n2.5,0\n", {"label": "b"}, "column 'a' must hold a number in every row"),
        (TABLE, {"label": "risk", "features": []}, "must have a column that the net reads"),
        ("a,b\n1,0\n,1\n2,1\n3,0\n", {"label": "b"}, "column 'a' must hold a number in every row"),
        ("a,b\n1,x\n2,\n3,x\n", {"label": "b"}, "'b' must hold a class .* in every row, got '' in train; fill in"),
        (
            "a,b\n1,0\n2,\n3,1\n",
            {"label": "b"},
            "'b' must hold a finite number in every row, got nan in train; fill in",
        ),
        ("a,b\n1,0.5\n2,inf\n3,1\n", {"label": "b"}, "'b' must hold a finite number in every row, got inf in train"),
        ("a,b,a\n1,0,2\n", {"label": "b"}, "t.csv must name each of its columns once, got 'a' twice"),
        ("a,b\n1,0\n2,1\n3,NA\n", {"label": "b"}, "'b' must hold a finite number in every row, got nan in .*; fill in"),
        ("a,b\n1,0\n?,1\n2,1\n3,0\n", {"label": "b"}, "column 'a' must hold a number in every row"),
        ("a,b\n1,0\n", {"label": "b", "features": ["a", "b"]}, "features must not hold the target, got 'b'"),
        ("a,b\nKöln,0\n", {"label": "b"}, "t.csv must be text in UTF-8, which byte 5 is not: save it as UTF-8"),
    ],
)
def test_a_table_that_is_none_is_refused(tmp_path, text, arguments, sentence):
    (tmp_path / "t.csv").write_text(text, encoding="latin-1" if "UTF-8" in sentence else "utf-8")
    with pytest.raises(ValueError, match=sentence):
        TableSource(tmp_path / "t.csv", **arguments).read()


def test_a_data_frame_is_a_table():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"age": [1.0, 2.0, 3.0, 4.0], "who": ["a", "b", "a", "b"], "y": [0, 1, 1, 0]})
    data = FederatedDataModule(TableSource(frame, "y", frame, ignored=["who"]), num_clients=None, by="who")
    data.setup()
    assert [data.client_indices("train", c).tolist() for c in range(2)] == [[0, 2], [1, 3]]
    frame["day"] = pandas.date_range("2024-01-01", periods=4)
    assert next(iter(TableSource(frame, "y", frame, ["age", "day"]).read())).x.shape == (4, 5)  # dates are words
    gaps = frame.assign(age=[1, None, 2, 3], y=["a", None, "b", "b"])
    for label, sentence in {"y": "got '' in train", "day": "'age' must hold a number in every row"}.items():
        with pytest.raises(ValueError, match=sentence):
            TableSource(gaps, label, gaps).read()
    with pytest.raises(ValueError, match="the train table must name each of its columns once, got 'y' twice"):
        TableSource(pandas.concat([frame, frame[["y"]]], axis=1), "y").read()


def test_a_column_of_names_that_would_not_fit_one_hot_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "LARGEST_ONE_HOT", 60)
    (tmp_path / "t.csv").write_text(TABLE)
    source = TableSource(tmp_path / "t.csv", "risk", tmp_path / "t.csv", features=["city"])
    with pytest.raises(ValueError, match=r"column 'city' must .*, got 2 in 8 rows, which take 0 GB one-hot; ignore it"):
        source.read()


WHOLE = "x,y\n" + "".join(f"{i},{100 * i}\n" for i in range(10))


def test_whole_numbers_are_regressed_where_the_task_says_so(tmp_path):
    (tmp_path / "t.csv").write_text(WHOLE)
    source = TableSource(tmp_path / "t.csv", "y", task="regression", limit=6)
    train, test = source.read()
    assert (len(train), len(test), train.y.shape, train.y.dtype, train.labels) == (6, 2, (6, 1), torch.float32, None)
    assert (source.num_classes, set(train.y.flatten().tolist()) <= {100.0 * i for i in range(10)}) == (None, True)
    with pytest.raises(ValueError, match=r"'y' must stand in training rows, got .* in test; .*or set task: regression"):
        TableSource(tmp_path / "t.csv", "y").read()


def test_whole_numbers_with_a_point_are_classes_where_the_task_says_so(tmp_path):
    (tmp_path / "t.csv").write_text("x,y\n1,2.0\n2,1.0\n3,2.0\n")
    source = TableSource(tmp_path / "t.csv", "y", tmp_path / "t.csv", task="classification")
    assert (source.read()[0].labels.tolist(), source.class_names) == ([1, 0, 1], ("1", "2"))


def test_the_training_rows_decide_whether_numbers_are_classes(tmp_path):
    (tmp_path / "train.csv").write_text("x,y\n1,2\n2,1\n")
    (tmp_path / "test.csv").write_text("x,y\n1,2.5\n")
    with pytest.raises(ValueError, match=r"must stand in training rows, got '2.5' in test; .* or set task: regression"):
        TableSource(tmp_path / "train.csv", "y", tmp_path / "test.csv").read()
    train, test = TableSource(tmp_path / "train.csv", "y", tmp_path / "test.csv", task="regression").read()
    assert (train.y.tolist(), test.y.tolist()) == ([[2.0], [1.0]], [[2.5]])


@pytest.mark.parametrize(
    ("column", "task", "sentence"),
    [
        (
            "low high low",
            "regression",
            "'y' must hold a finite number in every row, got 'low' in train; set task: class",
        ),
        ("1 x 2", "regression", "must hold a finite number in every row, got 'x' in train; set task: classification"),
        ("1 0.5 2", "classification", "must hold a class .*, got 0.5 in train; set task: regression"),
        ("1 '' 2", "regression", "must hold a finite number in every row, got nan in train; fill in what is missing"),
        ("1 2 3", "guess", "task must be one of auto, classification, regression, got 'guess'"),
    ],
)
def test_a_target_that_the_task_does_not_take_is_refused(tmp_path, column, task, sentence):
    rows = (f"{i},{value.strip(chr(39))}" for i, value in enumerate(column.split()))
    (tmp_path / "t.csv").write_text("\n".join(["x,y", *rows]) + "\n")
    with pytest.raises(ValueError, match=sentence):
        TableSource(tmp_path / "t.csv", "y", tmp_path / "t.csv", task=task).read()


def test_a_word_among_the_classes_of_test_rows_is_named(tmp_path):
    (tmp_path / "train.csv").write_text("x,y\n1,0\n2,1\n")
    (tmp_path / "test.csv").write_text("x,y\n1,0\n2,b\n")
    with pytest.raises(ValueError, match="must stand in training rows, got 'b' in test"):
        TableSource(tmp_path / "train.csv", "y", tmp_path / "test.csv").read()


def test_numbers_of_the_test_rows_are_words_where_those_of_training_are(tmp_path):
    (tmp_path / "train.csv").write_text("x,who,y\n1,7,0\n2,a,1\n")
    (tmp_path / "test.csv").write_text("x,who,y\n1,7,0\n")
    source = TableSource(tmp_path / "train.csv", "y", tmp_path / "test.csv", ignored=["who"])
    data = FederatedDataModule(source, num_clients=None, by="who")
    data.setup()
    assert [data.client_indices("test", c).tolist() for c in range(2)] == [[0], []]


class Column(list):
    """A column of a DataFrame."""

    def __init__(self, values, dtype="object"):
        super().__init__(values)
        self.dtype = dtype


class Frame(dict):
    """A DataFrame, as far as a table reads it."""

    columns = property(list)

    def __len__(self):
        return max(len(column) for column in self.values())

    def to_numpy(self):
        raise NotImplementedError


def test_categories_are_words_and_truth_values_numbers():
    whole = Column([2, 1, None], "category")
    truth = Column([np.True_, np.False_, np.True_], "bool")
    columns = cells_of_frame(Frame(a=whole, b=truth), "the train table")
    assert (columns["a"].values, columns["b"].values) == (["2", "1", ""], [1, 0, 1])
    with pytest.raises(ValueError, match="the train table must have rows, got 1 columns and no row"):
        cells_of_frame(Frame(a=Column([])), "the train table")
    train, _ = TableSource(Frame(a=whole, b=truth, y=Column(["x", "y", "x"])), "y", test_share=0.1).read()
    assert train.x.shape == (3, 4)


def test_a_parquet_file_needs_pandas(tmp_path, monkeypatch):
    (tmp_path / "t.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ModuleNotFoundError, match="Parquet files need pandas and pyarrow: pip install pandas pyarrow"):
        TableSource(tmp_path / "t.parquet", "y").read()


def test_a_parquet_file_is_a_table(tmp_path):
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    pandas.DataFrame({"x": [1.0, 2.0], "y": ["a", "b"]}).to_parquet(tmp_path / "t.parquet")
    assert TableSource(tmp_path / "t.parquet", "y", tmp_path / "t.parquet").read()[0].labels.tolist() == [0, 1]
    (tmp_path / "t.parquet").write_bytes(b"rubbish")
    with pytest.raises(ValueError, match=r"t.parquet could not be read \(.*\): write it again"):
        TableSource(tmp_path / "t.parquet", "y").read()


def test_nullable_columns_of_pandas():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"a": pandas.array([1, 2], dtype="Int64"), "b": pandas.Categorical([1, 2]), "y": [0, 1]})
    assert TableSource(frame, "y", frame).read()[0].x.shape == (2, 3)
    frame.loc[0, "a"] = pandas.NA
    with pytest.raises(ValueError, match="'a' must hold a number in every row"):
        TableSource(frame, "y", frame).read()
