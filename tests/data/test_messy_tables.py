"""Messy tables are read right, or refused in one sentence that names the place and what to type."""

import gzip
import io
import zipfile

import pytest

from fl_lightning.data import TableSource
from tests.data.test_tables import Column, Frame

PLAIN = "x,y\n1,a\n3,b\n"


def archive(*names):
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as opened:
        for name in names:
            opened.writestr(name, PLAIN)
    return content.getvalue()


def source_of(tmp_path, content, name="t.csv", label="y", **settings):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return TableSource(path, label, path, **settings)


READ = {
    "empty lines": ("\n\nx,y\n\n1,a\n   \n3,b\n\n", {}),
    "separator at the end of all lines": ("x,y,\n1,a,\n3,b,\n", {}),
    "separator at the end of rows": ("x,y\n1,a,\n3,b,\n", {}),
    "returns": (PLAIN.replace("\n", "\r\n"), {}),
    "old returns": (PLAIN.replace("\n", "\r"), {}),
    "mark": ("\ufeff" + PLAIN, {}),
    "mark of UTF-16": (b"\xff\xfe" + PLAIN.encode("utf-16-le"), {"encoding": "utf-16-le"}),
    "archive of macOS": (archive("t.csv", "__MACOSX/._t.csv"), {"name": "t.zip"}),
    "spaces": (PLAIN.replace(",", " "), {"sep": " "}),
    "windows": ("x,y\n1,a\n3,€\n".encode("cp1252"), {"encoding": "cp1252"}),
    "row numbers": (",x,y\n0,1,a\n1,3,b\n", {"ignored": [""]}),
}


@pytest.mark.parametrize("content", READ)
def test_a_messy_table_is_read_right(content, tmp_path):
    given, settings = READ[content]
    train, _ = source_of(tmp_path, given, **settings).read()
    assert (train.x.tolist(), train.y.tolist()) == ([[-1], [1]], [0, 1])


@pytest.mark.parametrize("spellings", ["True false TRUE", "true False true"])
def test_truth_values_are_one_word_in_every_spelling(spellings, tmp_path):
    first, second, third = spellings.split()
    source = source_of(tmp_path, f"x,y\n{first},0\n{second},1\n{third},0\n")
    train, _ = source.read()
    assert source.table.features[0].words == ("False", "True")
    assert train.x.tolist() == [[0, 1], [1, 0], [0, 1]]
    with pytest.raises(ValueError, match="column 'y' must write a class in one way, got 'True' and 'true' in train"):
        source_of(tmp_path, "x,y\n1,True\n2,true\n").read()


REFUSED = {
    "spaces": (PLAIN.replace(",", " "), {}, "set sep: ' '"),
    "colons": (PLAIN.replace(",", ":"), {}, "set sep: ':'"),
    "windows": ("x,y\n1,€\n".encode("cp1252"), {}, "set encoding: cp1252"),
    "UTF-16": (PLAIN.encode("utf-16"), {}, "set encoding: utf-16"),
    "UTF-16 without a mark": (PLAIN.encode("utf-16-le"), {}, "set encoding: utf-16-le"),
    "UTF-32": (PLAIN.encode("utf-32"), {}, "set encoding: utf-32"),
    "cut": (gzip.compress(PLAIN.encode())[:-9], {"name": "t.csv.gz"}, r"could not be read .*; write it again$"),
    "workbook": (archive("xl/workbook.xml"), {"name": "t.xlsx"}, "is a workbook; save it as CSV"),
    "zstd": (b"\x28\xb5\x2f\xfd\x00", {"name": "t.csv.zst"}, "is compressed by zstd; unpack it"),
    "no header": ("1.5,0\n2.5,1\n", {"label": "0"}, "must begin with the names of its columns, got the number '1.5'"),
    "row numbers": (",x,y\n0,1,a\n1,3,b\n", {}, r"must have a name, got ''; name it, or set ignored: \[''\]"),
    "thousands": ('x,y\n"1,000",a\n900,b\n', {}, "'1,000' in row 2 .*; write 1000 for thousands, or set decimal"),
    "points": ("x;y\n1.000;a\n2.500,5;b\n", {"sep": ";", "decimal": ","}, "'1.000' in row 2 .*; write 1000 for thou"),
    "decimal point": ("x;y\n1.5;a\n2.5;b\n", {"sep": ";", "decimal": ","}, "'1.5' in row 2 .*; set decimal: '.'"),
    "underscores": ("x,y\n1_000,a\n2,b\n", {}, "got '1_000' in row 2 of the train table"),
    "another minus": ("x,y\n−1,a\n2,b\n", {}, "got '−1' in row 2 of the train table"),
    "currency": ("x,y\n5 EUR,a\n6 EUR,b\n", {}, "got '5 EUR' in row 2 of the train table"),
    "error of a workbook": ("x,y\n#DIV/0!,a\n2,b\n3,b\n", {}, "got '#DIV/0!' in row 2 of the train table"),
    "missing": ("x,y\n<NA>,a\n2,b\n", {}, "got '<NA>' in row 2 of the train table .*; fill in what is missing"),
    "line after a quote": ('x,t,y\n1.5,"a\nb",a\nfoo,c,b\n', {}, r"got 'foo' in row 4 of the train table \(.*t\.csv\)"),
    "line after none": ("x,y\n\n1.5,a\n\nfoo,b\n", {}, r"got 'foo' in row 5 of the train table"),
    "missing class": ("x,y\n1,a\n2,NaN\n", {}, "must hold a class .*, got 'NaN' in train; .* leave out row 3 of"),
    "missing number": ("x,y\n1,0.5\n2,inf\n", {}, r"got inf in train; .* leave out row 3 of the train table \("),
}


@pytest.mark.parametrize("content", REFUSED)
def test_a_messy_table_is_refused_in_one_sentence(content, tmp_path):
    given, settings, sentence = REFUSED[content]
    with pytest.raises(ValueError, match=sentence) as error:
        source_of(tmp_path, given, **settings).read()
    assert "\n" not in str(error.value)


def test_what_the_sentence_about_words_says_works(tmp_path):
    pandas = pytest.importorskip("pandas", reason="pip install pandas")
    source = source_of(tmp_path, "x,y\n0,a\n1,b\n>3,a\n2,b\n")
    with pytest.raises(ValueError, match=r"for words give pandas.read_csv\(..., dtype={'x': str}\) in place"):
        source.read()
    frame = pandas.read_csv(tmp_path / "t.csv", dtype={"x": str})
    words = TableSource(frame, "y", frame)
    words.read()
    assert words.table.features[0].words == ("0", "1", "2", ">3")


def test_a_cell_with_several_values_is_refused():
    frame = Frame(x=Column([[1, 2], [3, 4]]), y=Column([0, 1]))
    with pytest.raises(ValueError, match=r"'x' must hold one value in every row, got \[1, 2\] in row 1 of the train"):
        TableSource(frame, "y", frame).read()
