"""The tool that draws faults: what it changes, what it leaves, what it makes of the tests, and how a list goes on."""

import ast
import json

import pytest

from tools import mutants

SOURCE = '''"""A module, whose docstring has 1 number."""

from typing import TYPE_CHECKING, Literal, TypeVar

if TYPE_CHECKING:
    import os

T = TypeVar("T")
__all__ = ["clipped"]

LIMIT: int = 3
"""The limit, which is 3."""


def clipped(x: "int", low: int = 0, mode: Literal["a", "b"] = "a") -> int:
    """Return x, at least low."""
    if x < low and mode == "a":
        raise ValueError(f"x must be at least {low + 1}, got {x}")
    return x + LIMIT


def unused(x):
    return -x
'''

TESTS = """from made_up.sums import clipped


def test_that_fails_always():
    assert False


def test_sums():
    assert clipped(4) == 7


def test_that_refuses():
    try:
        clipped(-1)
    except ValueError:
        return
    raise AssertionError
"""


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A checkout with one room, one test file of its own and one of others. Plugins would take most of the time."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    root = tmp_path / "checkout"
    for folder in ("made_up/room", "made_up/runs", "tests/room", "tools", "runs"):
        (root / folder).mkdir(parents=True)
    for file in ("made_up/__init__.py", "made_up/room/__init__.py"):
        (root / file).write_text("")
    (root / "made_up" / "sums.py").write_text(SOURCE)
    (root / "made_up" / "room" / "other.py").write_text("def double(x):\n    return 2 * x\n")
    (root / "tests" / "test_sums.py").write_text(TESTS)
    (root / "tests" / "room" / "test_other.py").write_text(
        "from made_up.room.other import double\n\n\ndef test_double():\n    assert double(1) == 2\n"
    )
    (root / "setup.cfg").write_text("[tool:pytest]\nmarkers =\n    slow: long\n    gpu: card\n")
    return root


def faults(root):
    return mutants.all_faults(root, "made_up")


def test_the_copy_is_whole_but_for_runs_and_caches(checkout, tmp_path):
    """A room of the package may have the name of a folder that is left out at the root."""
    for file in ("made_up/runs/a.py", "runs/b.csv", "made_up/__pycache__/c.pyc", ".git/d"):
        (checkout / file).parent.mkdir(exist_ok=True)
        (checkout / file).write_text("")
    mutants.copy_checkout(checkout, tmp_path / "copy")
    whole, copied = (
        {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()}
        for root in (checkout, tmp_path / "copy")
    )
    assert whole - copied == {"runs/b.csv", "made_up/__pycache__/c.pyc", ".git/d"}
    assert copied <= whole


def test_it_changes_code_only(checkout):
    """No docstring, annotation, name for type checkers or word of a sentence."""
    found = {(fault.line, fault.operator, fault.before, fault.after) for fault in faults(checkout)["."]}
    assert found == {
        (11, "constant changed", "3", "4"),
        (15, "constant changed", "0", "1"),
        (15, "constant changed", '"a"', "'a_'"),
        (17, "branch negated", 'x < low and mode == "a"', "(not (x < low and mode == 'a'))"),
        (17, "and/or swapped", 'x < low and mode == "a"', "(x < low or mode == 'a')"),
        (17, "comparison swapped", "x < low", "x <= low"),
        (17, "comparison swapped", 'mode == "a"', "mode != 'a'"),
        (17, "constant changed", '"a"', "'a_'"),
        (18, "statement deleted", 'raise ValueError(f"x must be at least {low + 1}, got {x}")', "pass"),
        (19, "return value dropped", "return x + LIMIT", "return None"),
        (19, "arithmetic swapped", "x + LIMIT", "(x - LIMIT)"),
        (23, "return value dropped", "return -x", "return None"),
    }


def test_every_fault_of_the_package_leaves_a_file_that_python_reads():
    by_room = mutants.all_faults(mutants.ROOT, "fl_lightning")
    folders = {path.parent.name for path in (mutants.ROOT / "fl_lightning").glob("*/__init__.py")}
    assert by_room.keys() == {*folders, mutants.TOP}
    for fault in mutants.drawn(by_room, seed=1, each=10):
        source = (mutants.ROOT / fault.file).read_text(encoding="utf-8")
        changed = mutants.with_fault(source, fault)
        assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(source)), fault


def test_a_seed_draws_the_same_faults_of_a_room_whatever_the_others_are(checkout):
    by_room = faults(checkout)
    chosen = mutants.drawn(by_room, seed=3, each=4)
    assert chosen == mutants.drawn(by_room, seed=3, each=4)
    assert chosen != mutants.drawn(by_room, seed=4, each=4)
    assert [fault for fault in chosen if fault.room == "."] == mutants.drawn(by_room, seed=3, each=4, rooms=["."])
    everything = mutants.drawn(by_room, seed=3, each=100)
    assert len(everything) == sum(map(len, by_room.values()))


def test_the_nearest_tests_come_first(checkout):
    (inner, *_) = faults(checkout)["room"]
    (top, *_) = faults(checkout)["."]
    order = [mutants.nearest_first(checkout, "made_up", "tests", fault=fault) for fault in (inner, top)]
    assert order[0] == ["tests/room/test_other.py", "tests/test_sums.py"]
    assert order[1] == ["tests/test_sums.py", "tests/room/test_other.py"]


def command(checkout, *arguments):
    return mutants.main([*arguments, "--root", str(checkout), "--package", "made_up"])


def rows(checkout):
    return mutants.read_list(checkout / "tools" / "mutants.csv")


def test_a_run_tells_what_is_noticed_and_goes_on_after_a_stop(checkout, capsys):
    before = {path: path.read_bytes() for path in (checkout / "made_up").rglob("*.py")}
    command(checkout, "draw", "--each", "100")
    by_change = {(fault.operator, fault.after): row for row, fault in enumerate(rows(checkout), 1)}
    swapped = by_change["arithmetic swapped", "(x - LIMIT)"]
    deleted = by_change["statement deleted", "pass"]
    kept = by_change["comparison swapped", "x <= low"]
    command(checkout, "run", "--rows", str(swapped), str(kept))
    found = rows(checkout)
    assert (found[swapped - 1].result, found[swapped - 1].killed_by) == ("killed", "tests/test_sums.py::test_sums")
    assert (found[kept - 1].result, found[kept - 1].killed_by) == ("survived", "")
    assert {fault.result for row, fault in enumerate(found, 1) if row not in (swapped, kept)} == {""}
    assert {path: path.read_bytes() for path in before} == before

    # The file has moved by a line since, and a reason was written into a row.
    path = checkout / "made_up" / "sums.py"
    path.write_text(SOURCE.replace("LIMIT: int", "\nLIMIT: int"))
    excused = [
        mutants.Fault(**{**vars(fault), "equivalent": "" if row == deleted else "made up"})
        for row, fault in enumerate(found, 1)
    ]
    mutants.write_list(checkout / "tools" / "mutants.csv", excused)
    command(checkout, "run")
    again = rows(checkout)[deleted - 1]
    assert (again.line, again.killed_by) == (19, "tests/test_sums.py::test_that_refuses")
    said = capsys.readouterr().out
    assert "tests/test_sums.py::test_that_fails_always fails without a fault, too, and was left out" in said
    assert "all            1 of 1 killed (100 %)" in said


def test_a_fault_that_breaks_the_import_of_conftest_is_noticed(checkout):
    (checkout / "conftest.py").write_text("from made_up.sums import LIMIT\n\nassert LIMIT == 3\n")
    command(checkout, "draw", "--each", "100")
    (row,) = [row for row, fault in enumerate(rows(checkout), 1) if fault.before == "3"]
    command(checkout, "run", "--rows", str(row))
    assert (rows(checkout)[row - 1].result, rows(checkout)[row - 1].killed_by) == ("killed", "pytest")


@pytest.mark.parametrize(
    ("seconds", "result", "killed_by"),
    [("60 * (clipped(4) != 7)", "killed", "no end"), ("60", "timeout", "")],
)
def test_a_fault_without_an_end_is_noticed_if_the_tests_end_without_it(checkout, seconds, result, killed_by):
    (checkout / "tests" / "test_sums.py").write_text(
        f"import time\n\nfrom made_up.sums import clipped\n\n\ndef test_wait():\n    time.sleep({seconds})\n"
    )
    command(checkout, "draw", "--each", "100")
    (row,) = [row for row, fault in enumerate(rows(checkout), 1) if fault.after == "(x - LIMIT)"]
    command(checkout, "run", "--rows", str(row), "--seconds", "3")
    assert (rows(checkout)[row - 1].result, rows(checkout)[row - 1].killed_by) == (result, killed_by)


def test_a_list_of_another_source_is_refused(checkout):
    (fault, *_) = faults(checkout)["."]
    with pytest.raises(ValueError, match=r"line 11 of made_up/sums.py must read '3'; draw a new list"):
        mutants.with_fault("x = 1\n", fault)
    assert mutants.found_again(mutants.Fault(**{**vars(fault), "before": "77"}), checkout, "made_up") is None


MARKED = """
def outer(x, low=1):
    \"\"\"Docstring.\"\"\"
    if x > low:
        x = 2 * x
    else:
        x = 3
    return x
"""


def test_a_mark_stands_before_its_statement_and_changes_nothing():
    marked = mutants.with_marks(MARKED, "a.py", [2, 4, 5])
    lines = [line for line in marked.splitlines() if line]
    mark = "__import__('mutants_marks').mark('a.py:{}')"
    assert lines == [
        mark.format(2),
        "def outer(x, low=1):",
        '    """Docstring."""',
        f"    {mark.format(2)}",
        f"    {mark.format(4)}",
        "    if x > low:",
        f"        {mark.format(5)}",
        "        x = 2 * x",
        "    else:",
        "        x = 3",
        "    return x",
    ]


def test_a_map_holds_the_tests_that_run_a_line_and_others_are_not_tried(checkout, monkeypatch):
    monkeypatch.delenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD")  # the suite runs in several processes
    command(checkout, "draw", "--each", "100")
    command(checkout, "map")
    found = mutants.read_map(checkout / ".mutants_map")
    by_change = {(fault.operator, fault.after): fault for fault in rows(checkout)}
    swapped = by_change["arithmetic swapped", "(x - LIMIT)"]
    assert found[f"{swapped.file}:{swapped.line}"] == ["tests/test_sums.py::test_sums"]
    row = rows(checkout).index(swapped) + 1
    command(checkout, "run", "--rows", str(row))
    assert rows(checkout)[row - 1].killed_by == "tests/test_sums.py::test_sums"


FIXTURE_TESTS = """import pytest

from made_up.room.other import double


@pytest.fixture(scope="module")
def doubled():
    return double(1)


def test_that_does_not_look(doubled):
    assert doubled


def test_that_looks(doubled):
    assert doubled == 2
"""


def test_a_line_that_a_shared_fixture_runs_is_tried_by_all_tests_of_the_file(checkout, monkeypatch):
    monkeypatch.delenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD")
    (checkout / "tests" / "room" / "test_other.py").write_text(FIXTURE_TESTS)
    command(checkout, "draw", "--each", "100")
    command(checkout, "map")
    swapped = next(fault for fault in rows(checkout) if fault.after == "(2 / x)")
    found = mutants.read_map(checkout / ".mutants_map")
    assert found[f"{swapped.file}:{swapped.line}"] == ["tests/room/test_other.py"]


def test_tests_that_fail_for_one_reason_are_found_by_one_run(checkout, monkeypatch):
    failing = "".join(f"\n\ndef test_{number}():\n    assert False\n" for number in range(9))
    path = checkout / "tests" / "test_sums.py"
    path.write_text(TESTS + failing)
    command(checkout, "draw", "--each", "100")
    started = []
    process = mutants.FORKED.Process
    monkeypatch.setattr(mutants.FORKED, "Process", lambda **settings: started.append(0) or process(**settings))
    row = [fault.after for fault in rows(checkout)].index("(x - LIMIT)") + 1
    command(checkout, "run", "--rows", str(row))
    assert rows(checkout)[row - 1].killed_by == "tests/test_sums.py::test_sums"
    assert len(started) == 5


def test_tests_of_a_map_that_are_gone_are_left_out(checkout):
    command(checkout, "draw", "--each", "100")
    row = [fault.after for fault in rows(checkout)].index("(x - LIMIT)")
    place = f"{rows(checkout)[row].file}:{rows(checkout)[row].line}"
    tests = ["test_mine.py::test_written_by_a_test", "tests/test_sums.py::test_sums"]
    (checkout / ".mutants_map").write_text(json.dumps({place: tests}))
    command(checkout, "run", "--rows", str(row + 1))
    assert rows(checkout)[row].killed_by == "tests/test_sums.py::test_sums"


def test_tests_that_cannot_begin_are_no_result(checkout):
    command(checkout, "draw", "--each", "100")
    row = [fault.after for fault in rows(checkout)].index("(x - LIMIT)")
    place = f"{rows(checkout)[row].file}:{rows(checkout)[row].line}"
    (checkout / ".mutants_map").write_text(json.dumps({place: ["tests/test_sums.py::test_gone"]}))
    with pytest.raises(RuntimeError, match="pytest cannot begin without a fault"):
        command(checkout, "run", "--rows", str(row + 1))


def test_without_a_map_no_line_is_known(tmp_path):
    assert mutants.read_map(tmp_path / "none") == {}
