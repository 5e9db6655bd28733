import pytest

from fl_lightning.utils.files import write_atomically


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_file_is_replaced_as_a_whole(tmp_path):
    path = tmp_path / "new" / "folder" / "table.csv"
    for content in ("old", "new"):
        write_atomically(path, lambda part, content=content: part.write_text(content))
        assert path.read_text() == content
        assert names(path.parent) == ["table.csv"]


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
