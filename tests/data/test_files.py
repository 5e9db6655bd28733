"""Fingerprints of files tell folders of other samples apart."""

import os

import pytest

from fl_lightning.data import files
from fl_lightning.data.files import files_digest


def write(folder, texts):
    for name, text in texts.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


TEXTS = {"b/1.png": "cat" * 40, "a/1.png": "dog" * 40, "a/2.png": ""}


@pytest.fixture(params=["small", "many files", "large files"])
def limits(request, monkeypatch):
    """A folder of three files counts as small, as one of many files, or as one of large files."""
    if request.param == "many files":
        monkeypatch.setattr(files, "MOST_FILES", 2)
    if request.param == "large files":
        monkeypatch.setattr(files, "MOST_BYTES", 10)
        monkeypatch.setattr(files, "END_BYTES", 8)


@pytest.mark.parametrize(
    "other",
    [
        {"b/1.png": "cat" * 39 + "cow"},
        {"b/1.png": "cow" + "cat" * 39},
        {"b/1.png": "dog" * 40, "a/1.png": "cat" * 40},
        {"a/2.png": "x"},
        {"c/3.png": ""},
    ],
    ids=str,
)
def test_other_files_have_another_digest(tmp_path, limits, other):
    first = write(tmp_path / "first", TEXTS)
    copy = write(tmp_path / "copy", dict(reversed(TEXTS.items())))
    changed = write(tmp_path / "changed", {**TEXTS, **other})
    assert files_digest(first) == files_digest(copy)
    assert files_digest(first) != files_digest(changed)


def test_of_many_files_some_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MOST_FILES", 10)
    monkeypatch.setattr(files, "NUM_READ", 4)
    texts = {f"{number:03}.txt": "x" for number in range(40)}
    opened = list(files.contents(write(tmp_path, texts), files.sizes_below(tmp_path)))
    assert len(opened) / 2 == 4, "both ends of each file that is read"
    before = files_digest(tmp_path)
    for name in ("000.txt", "030.txt"):
        (tmp_path / name).write_text("y")
        assert files_digest(tmp_path) != before, "they are read at even distances"
        (tmp_path / name).write_text("x")
    assert files_digest(tmp_path) == before


def test_what_cannot_be_read_counts_by_its_name(tmp_path):
    folder = write(tmp_path / "folder", TEXTS)
    before = files_digest(folder)
    (folder / "lost").symlink_to(tmp_path / "gone")
    os.mkfifo(folder / "pipe")
    assert files_digest(folder) not in (None, before)


def test_a_folder_that_is_missing_has_no_digest(tmp_path):
    assert files_digest(tmp_path / "gone") is None
