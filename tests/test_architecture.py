"""docs/architecture.md: the drawing names the files of a round in the order in which a round enters them."""

import re
import sys
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

from fl_lightning.types import Member

ROOT = Path(__file__).resolve().parents[1]
FILE = re.compile(r"[a-z]\w*(?:/\w+)*\.py")


def drawing() -> list[str]:
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    return text.split("```text\n")[1].split("```")[0].splitlines()


@pytest.fixture
def trace_round(monkeypatch):
    """The script of the figures, as a module."""
    monkeypatch.setattr(sys, "argv", ["trace_round.py"])
    monkeypatch.syspath_prepend(str(ROOT))  # so that what the script adds is taken back
    spec = spec_from_file_location("trace_round", ROOT / "tools/trace_round.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow  # reads every file of the package many times; what it traces is compared below
def test_the_figures_of_a_round_are_printed(trace_round, capsys):
    trace_round.main()
    out = capsys.readouterr().out
    assert re.findall(r"^  (\S+\.py) +\d+ code lines", out, re.MULTILINE)[0] == "federation/loop.py"


def test_numbered_files_are_those_that_a_round_enters_in_that_order(trace_round):
    entered = list(dict.fromkeys(file for file, _ in trace_round.trace()))
    numbers = []
    named = []
    for line in drawing():
        if found := re.search(r" (\d+)(?:-(\d+))?  (?=\w+[/.])", line):
            files = FILE.findall(line[found.end() :])
            numbers += range(int(found[1]), int(found[2] or found[1]) + 1)
            named += files
    assert named == entered, "redraw docs/architecture.md: python tools/trace_round.py prints the order"
    assert numbers == list(range(1, len(named) + 1))


def test_every_file_of_the_drawing_exists():
    named = {file for line in drawing() for file in FILE.findall(line)}
    assert len(named) > 20
    assert not [file for file in named if not (ROOT / "fl_lightning" / file).is_file()]


def test_the_rooms_are_the_folders_and_the_files_of_a_round_are_named():
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    rows = [line.split("|") for line in text.split("## Rooms")[1].split("##")[0].splitlines() if line.startswith("| `")]
    named = {room for _, rooms, *_ in rows for room in re.findall(r"`(\w+)(?:/|\.py)`", rooms)}
    rooms = [path for path in (ROOT / "fl_lightning").iterdir() if path.name[0] not in "_."]
    assert named == {path.stem for path in rooms if path.suffix == ".py" or (path / "__init__.py").is_file()}
    (federation,) = (cells for _, rooms, cells, _ in rows if "federation/" in rooms)
    files = {path.name for path in (ROOT / "fl_lightning/federation").glob("*.py")} - {"__init__.py"}
    assert set(re.findall(r"`(\w+\.py)`", federation)) == files


def kinds_of_members(base: type) -> set[str]:
    """Names of the package's classes of members that no other derives from."""
    kinds = [kind for kind in base.__subclasses__() if kind.__module__.startswith("fl_lightning.")]
    below = set().union(*map(kinds_of_members, kinds))
    return below or {base.__name__}


def test_the_table_of_members_names_them_all():
    import_module("fl_lightning.federation.loop")  # which defines all members, or imports them
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1] for line in text.split("## Members")[1].split("\n## ")[0].splitlines() if "|" in line]
    named = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert sorted(named) == sorted(kinds_of_members(Member))
