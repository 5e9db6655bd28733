import os
import random
import zipfile

import pytest
import torch

from fl_lightning.utils.files import check_digest, remove_parts, save_with_digest, write_atomically


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_file_is_replaced_as_a_whole(tmp_path):
    path = tmp_path / "new" / "folder" / "table.csv"
    for content in ("old", "new"):
        write_atomically(path, lambda part, content=content: part.write_text(content))
        assert path.read_text() == content
        assert names(path.parent) == ["table.csv"]


def test_content_is_on_disk_before_it_takes_its_place_and_the_name_after_it(tmp_path, monkeypatch):
    path = tmp_path / "table.csv"
    seen = []

    def fsync(descriptor):
        kind = "folder" if os.path.sameopenfile(descriptor, folder) else "file"
        seen.append((kind, os.fstat(descriptor).st_size if kind == "file" else None, path.exists()))

    folder = os.open(tmp_path, os.O_RDONLY)
    monkeypatch.setattr(os, "fsync", fsync)
    write_atomically(path, lambda part: part.write_text("whole"))
    os.close(folder)
    assert seen == [("file", 5, False), ("folder", None, True)]


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()])
def test_after_an_error_the_old_file_stays_and_no_part_is_left(tmp_path, error):
    path = tmp_path / "table.csv"
    path.write_text("old")

    def fails(part):
        assert part.parent == tmp_path
        part.write_text("half a ro")
        raise error

    with pytest.raises(type(error)):
        write_atomically(path, fails)
    assert path.read_text() == "old"
    assert names(tmp_path) == ["table.csv"]


def test_an_error_before_anything_is_written_is_the_one_that_is_raised(tmp_path):
    def fails(part):
        raise ValueError("no rows")

    with pytest.raises(ValueError, match="no rows"):
        write_atomically(tmp_path / "table.csv", fails)
    assert names(tmp_path) == []


def test_a_part_is_written_beside_the_file_whatever_tmpdir_is(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", "/nowhere")
    save_with_digest({"w": torch.ones(2)}, tmp_path / "a.ckpt")
    assert names(tmp_path) == ["a.ckpt"]


def test_parts_of_killed_processes_are_removed(tmp_path):
    for name in ("last.ckpt", "last.ckpt.12.part", "clients/client_0.safetensors.7.part"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    remove_parts(tmp_path)
    assert names(tmp_path) == ["clients", "last.ckpt"]
    assert names(tmp_path / "clients") == []


CONTENT = {"state_dict": {"w": torch.arange(6.0).reshape(2, 3)}, "epoch": 3, "names": ["a", {"b": None}]}


def test_other_programs_read_a_file_with_a_digest(tmp_path):
    save_with_digest(CONTENT, tmp_path / "a.ckpt")
    assert check_digest(tmp_path / "a.ckpt")
    for mmap in (False, True):
        read = torch.load(tmp_path / "a.ckpt", weights_only=True, mmap=mmap)
        assert torch.equal(read["state_dict"]["w"], CONTENT["state_dict"]["w"])
        assert read["names"] == CONTENT["names"]
    assert zipfile.ZipFile(tmp_path / "a.ckpt").testzip() is None


def test_no_flipped_bit_loads_as_something_else(tmp_path):
    path = tmp_path / "a.ckpt"
    save_with_digest(CONTENT, path)
    whole = path.read_bytes()
    unseen = []
    for bit in random.Random(0).sample(range(len(whole) * 8), 400):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        try:
            check_digest(path)
        except ValueError:
            continue
        unseen.append(bit // 8)
    tail = len(whole) - len(b"fl_lightning sha256 ") - 64 - 2  # the comment's length and mark are not of the content
    assert all(byte >= tail for byte in unseen)
    assert len(unseen) < 40


@pytest.mark.parametrize("keep", [0, 1, 100, 0.5, 0.9])
def test_a_file_that_was_cut_has_no_digest(tmp_path, keep):
    path = tmp_path / "a.ckpt"
    save_with_digest(CONTENT, path)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(keep * len(whole)) if isinstance(keep, float) else keep])
    assert not check_digest(path)


def test_files_of_other_programs_have_no_digest(tmp_path):
    torch.save(CONTENT, tmp_path / "a.pt")
    assert not check_digest(tmp_path / "a.pt")
