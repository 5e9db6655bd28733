"""The check of plain style: what it finds, what it leaves, its exceptions and its list."""

from pathlib import Path

import pytest

from tools import style

DENSE = {
    "a, b = 1, 2": style.PARALLEL,
    "self.a, self.b = x, y": style.PARALLEL,
    "a = b, c = 1, 2": style.PARALLEL,
    "[a, b] = 1, 2": style.PARALLEL,
    "a, b = [1, 2]": style.PARALLEL,
    "f(1, *values)": style.SPLAT,
    "f(*values(), a=1)": style.SPLAT,
    "f(*self.values, *others())": style.SPLAT,
    "f(1, 2, 3, 4)": style.UNNAMED,
    "a if b else c if d else e": style.NESTED_CONDITION,
    "a if (b if c else d) else e": style.NESTED_CONDITION,
    "a if b else (1 + (c if d else e))": style.NESTED_CONDITION,
    "max(a if b else c, 1) if d else 2": style.NESTED_CONDITION,
    "[x for row in rows for x in row]": style.TWO_LOOPS,
    "{x: y for row in rows for x, y in row}": style.TWO_LOOPS,
    "sum(x for x in xs if x if y)": style.TWO_CONDITIONS,
    "' (%)' * (scale == 100)": style.TRUTH,
    "bool(x) * 3": style.TRUTH,
    "True * x": style.TRUTH,
    "-(a > b) * 3": style.TRUTH,
    "(not x) * [1]": style.TRUTH,
    "for x in xs if y else ():\n    pass": style.CONDITIONAL_LOOP,
    "[x for x in (xs if y else ())]": style.CONDITIONAL_LOOP,
}

PLAIN = (
    "a, b = b, a",
    "a, b = pair",
    "a = 1, 2",
    "f(1, 2, 3)",
    "f(*values)",
    "f(1, d=4, b=2, c=3)",
    "def f(*args, **kwargs):\n    return g(1, *args, **kwargs)",
    "max(1, 2, 3, 4)",
    "a if b else c",
    "[x for x in xs if x and y]",
    "x * 3",
    "for x in xs:\n    pass",
)


@pytest.mark.parametrize("source", DENSE)
def test_every_dense_construct_is_found(source):
    assert style.findings(source) == [(1, DENSE[source])]


@pytest.mark.parametrize("source", PLAIN)
def test_plain_code_is_left_alone(source):
    assert style.findings(source) == []


def test_another_functions_arguments_are_not_passed_on():
    source = "def f(*args):\n    pass\n\n\ndef g(args):\n    f(1, *args)"
    assert style.findings(source) == [(6, style.SPLAT)]


def test_an_exception_needs_a_reason_and_a_construct():
    assert style.findings("a, b = 1, 2  # style: ok, the pair is one point") == []
    assert style.findings("f(\n    1,\n    2,\n    3,\n    4,\n)  # style: ok, has no names") == []
    assert [line for line, _ in style.findings("a, b = 1, 2  # style: ok")] == [1, 1]
    assert [line for line, _ in style.findings("x = 1\na = 1  # style: ok, nothing here")] == [2]


def test_files_are_named_with_line_and_remedy(tmp_path, capsys):
    file = tmp_path / "dense.py"
    file.write_text("x = 1\na, b = 1, 2\n")
    assert style.main([str(file)]) == 1
    assert capsys.readouterr().out == f"{file}:2: {style.PARALLEL}\n"
    file.write_text("x = 1\n")
    assert style.main([str(file)]) == 0


def test_patterns_name_files_that_exist(tmp_path, monkeypatch):
    monkeypatch.setattr(style, "ROOT", tmp_path)
    (tmp_path / "pyproject.toml").write_text('[tool.style]\nplain = ["gone/*.py"]\nnot_yet = []\n')
    with pytest.raises(ValueError, match=r"must name files, got 'gone/\*\.py'"):
        style.plain_files()


def test_every_file_but_the_tests_themselves_is_kept_plain():
    root = Path(style.__file__).resolve().parents[1]
    folders = ("bench", "examples", "fl_lightning", "tests", "tools")
    files = {path for folder in folders for path in (root / folder).rglob("*.py")}
    tests = {path for path in files if path.name.startswith("test_")}
    assert files - tests <= set(style.plain_files())
    assert not tests & set(style.plain_files())
