"""Fragments of the changelog: what they must be, and how a release joins them."""

import datetime

import pytest

from tools import changelog

DAY = datetime.date(2027, 1, 31)


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A project with two versions and two fragments."""
    monkeypatch.setattr(changelog, "ROOT", tmp_path)
    (tmp_path / "changes").mkdir()
    (tmp_path / "changes/.gitkeep").touch()
    (tmp_path / "changes/R-plain.fixed.md").write_text("- A fault,\n  which was found.\n")
    (tmp_path / "changes/R-plain.results.md").write_text("- A number.\n- Another one.\n")
    (tmp_path / "CHANGELOG.md").write_text(
        "# Changelog\n\n## [Unreleased]\n\nSee changes/.\n\n## [0.2.0] - 2026\n\nOld.\n"
    )
    return tmp_path


def test_the_fragments_of_this_checkout_can_be_joined(capsys):
    changelog.main([])
    text = capsys.readouterr().out
    # Just after a release there are none.
    has_fragments = bool(changelog.fragments(changelog.ROOT / "changes"))
    assert text.startswith("###") == has_fragments


def test_a_release_has_the_entries_by_kind_and_the_fragments_go(project):
    changelog.main(["0.3.0"])
    text = (project / "CHANGELOG.md").read_text()
    new = text.split("## [0.3.0] - ")[1].split("\n", 1)[1].split("## [0.2.0]")[0]
    assert new == (
        "\n### Changed results\n\n- A number.\n- Another one.\n\n### Fixed\n\n- A fault,\n  which was found.\n\n"
    )
    assert text.startswith("# Changelog\n\n## [Unreleased]\n\nSee changes/.\n\n## [0.3.0]")
    assert text.endswith("## [0.2.0] - 2026\n\nOld.\n")
    assert [path.name for path in (project / "changes").iterdir()] == [".gitkeep"]


@pytest.mark.parametrize("version", ["0.2.0", "0.3", "next"])
def test_a_wrong_version_is_refused_and_nothing_is_written(project, version):
    before = (project / "CHANGELOG.md").read_text()
    with pytest.raises(ValueError, match=rf"VERSION must be .*, got {version}"):
        changelog.main([version])
    assert (project / "CHANGELOG.md").read_text() == before
    assert len(list((project / "changes").glob("*.md"))) == 2


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("R-plain.md", "- A.", "such as R-plain.changed.md, got R-plain.md"),
        ("R-plain.removed.md", "- A.", "the kinds are results, changed, added, fixed"),
        ("R-new.added.md", "A.", "each entry of R-new.added.md must begin with '- ', got 'A.'"),
    ],
)
def test_a_file_that_is_no_fragment_is_refused(project, name, text, sentence):
    (project / "changes" / name).write_text(text)
    with pytest.raises(ValueError, match=sentence):
        changelog.main([])


def test_a_release_without_fragments_is_refused(project):
    for fragment in (project / "changes").glob("*.md"):
        fragment.unlink()
    before = (project / "CHANGELOG.md").read_text()
    with pytest.raises(ValueError, match="must have a fragment for a release"):
        changelog.main(["0.3.0"])
    assert (project / "CHANGELOG.md").read_text() == before
