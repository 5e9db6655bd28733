import pytest

from fl_lightning.utils.files import write_atomically


def test_a_file_is_written_in_one_move_and_its_folder_created(tmp_path):
    path, seen = tmp_path / "new" / "file.txt", []

    def write(part):
        part.write_text("whole")
        seen.append((part.parent, part.name, path.exists()))

    write_atomically(path, write)
    assert seen == [(path.parent, "file.txt.part", False)]
    assert [found.name for found in path.parent.iterdir()] == ["file.txt"]
    assert path.read_text() == "whole"


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_after_an_error_the_file_is_as_it_was(tmp_path, error):
    path = tmp_path / "file.txt"
    path.write_text("old")

    def write(part):
        part.write_text("ne")
        raise error("the first")

    with pytest.raises(error, match="the first"):
        write_atomically(path, write)
    assert [found.name for found in tmp_path.iterdir()] == ["file.txt"]
    assert path.read_text() == "old"
