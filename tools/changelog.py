"""Joins the fragments of `changes/` to a section of CHANGELOG.md: `python -m tools.changelog [VERSION]`.

A fragment is a file `changes/NAME.KIND.md` of one or more entries, each a line that begins with `- `. Without a version
the section is printed. With one it is written below `## [Unreleased]`, with the date of today, and the fragments are
deleted.
"""

import datetime
import re
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
KINDS = {"results": "Changed results", "changed": "Changed", "added": "Added", "fixed": "Fixed"}
"""The kinds of fragments, in the order of a section, with the title of each."""

FRAGMENT = re.compile(rf"[\w-]+\.(?P<kind>{'|'.join(KINDS)})\.md")
VERSION = re.compile(r"\d+\.\d+\.\d+")


def fragments(folder: Path) -> dict[Path, str]:
    """Return the text of each fragment of a folder, sorted by name.

    Args:
        folder: The folder, which holds fragments and nothing else besides hidden files.

    Raises:
        ValueError: A file is no fragment, or has a line that is no part of an entry.
    """
    texts: dict[Path, str] = {}
    for path in sorted(folder.glob("[!.]*")):
        if FRAGMENT.fullmatch(path.name) is None:
            raise ValueError(
                f"a file of changes/ must have a name such as R-plain.changed.md, got {path.name}; "
                f"the kinds are {', '.join(KINDS)}"
            )
        text = path.read_text(encoding="utf-8").strip()
        for line in text.splitlines():
            if not line.startswith(("- ", "  ")):
                raise ValueError(f"each entry of {path.name} must begin with '- ', got {line!r}; begin it so")
        texts[path] = text
    return texts


def section(texts: dict[Path, str]) -> str:
    """Return the entries of fragments below the titles of their kinds, as Markdown."""
    parts = []
    for kind, title in KINDS.items():
        entries = [text for path, text in texts.items() if path.name.endswith(f".{kind}.md")]
        if entries:
            parts.append("\n".join([f"### {title}", "", *entries]))
    return "\n\n".join(parts)


def released(changelog: str, version: str, date: datetime.date, entries: str) -> str:
    """Return a changelog with the section of a new version.

    Args:
        changelog: The text, with a section `[Unreleased]`.
        version: The number of the version, such as 0.3.0.
        date: The day of the release.
        entries: The entries of the version below their titles.

    Raises:
        ValueError: `version` is no number of a version, or has a section already, or there are no entries.
    """
    if not entries:
        raise ValueError("changes/ must have a fragment for a release, and has none; add changes/NAME.KIND.md")
    if VERSION.fullmatch(version) is None:
        raise ValueError(f"VERSION must be three numbers, got {version}; write it as 0.3.0")
    if f"## [{version}]" in changelog:
        raise ValueError(f"VERSION must be new, got {version}, which CHANGELOG.md has; raise it")
    before, after = re.split(r"(?=^## \[\d)", changelog, maxsplit=1, flags=re.MULTILINE)
    return f"{before}## [{version}] - {date.isoformat()}\n\n{entries}\n\n{after}"


def main(arguments: Iterable[str]) -> None:
    """Print the section of the next version, or write it."""
    texts = fragments(ROOT / "changes")
    entries = section(texts)
    versions = list(arguments)
    if not versions:
        print(entries)
        return
    path = ROOT / "CHANGELOG.md"
    today = datetime.datetime.now(tz=datetime.UTC).date()
    text = released(path.read_text(encoding="utf-8"), version=versions[0], date=today, entries=entries)
    path.write_text(text, encoding="utf-8")
    for fragment in texts:
        fragment.unlink()


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except ValueError as error:
        sys.exit(f"make changelog: {error}")
