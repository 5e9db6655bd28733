"""Draws small faults in the package, and finds out which of them the tests notice.

    python -m tools.mutants draw --seed 0 --each 10     # ten faults in every room, into tools/mutants.csv
    python -m tools.mutants map                         # finds the tests that run the lines of these faults
    python -m tools.mutants run                         # runs the tests of all faults without a result
    python -m tools.mutants run --rows 3 17             # runs these again, after a test was written
    python -m tools.mutants score                       # how many were noticed, by room

A fault changes one expression or statement of one file. The tests run on a copy of the checkout, the nearest files
first, and end at the first test that fails. A row of the list is written after each fault, so that a run may be stopped
at any time. If no test can notice a fault, write the reason into the column `equivalent`: the row then does not count.

The tests of a fault come from a map of the tests that run its line, if there is one (`map`, which runs the whole suite
once). Otherwise the order of the test files comes from names: the tests of the module, of its room, and those that name
its classes.
"""

import argparse
import ast
import copy
import csv
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]

KILLED = "killed"
SURVIVED = "survived"
TIMEOUT = "timeout"

TOP = "."
"""The room of the modules at the top of the package."""

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
}

NAMING_CALLS = frozenset({"TypeVar", "NewType", "NamedTuple", "cast"})
"""Calls whose strings are names for type checkers."""

TELLING_CALLS = frozenset({"rank_zero_info", "rank_zero_warn", "rank_zero_debug", "warn", "add_argument"})
"""Calls whose strings are sentences."""

SENTENCE = re.compile(r"\s")
"""A string with a space is a sentence, whose words no test fixes."""

FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+(?: .*?\])?)(?: - |$)", re.MULTILINE)
"""A line of pytest's summary, with the name of the test. The parameters of a test may have spaces."""

BROKEN_ENDS = (2, 3, 4)
"""Exit statuses of pytest if it is interrupted, or cannot begin because conftest.py or what it imports raises."""

ENDLESS = "no end"
"""Stands for a test where the tests do not end with the fault, and end without it."""

WHOLE_RUN = "pytest"
"""Stands for a test where pytest ends without the name of one."""

CACHES = ("__pycache__", ".*_cache")
"""Patterns of folders that the copy does not need, wherever they are."""

LEFT_OUT = (".git", ".venv", "runs", "comparisons", "site", "build", "dist")
"""Folders at the root of the checkout that the copy does not need. A room of the package may have the same name."""

FORKED = multiprocessing.get_context("forkserver")
"""Starts a process for each run of tests. They share what is imported before the checkout is."""

PRELOADED = ("pytest", "torch", "torchmetrics", "pytorch_lightning", "lightning", "jsonargparse", "matplotlib.pyplot")
"""The large packages that tests import. Those that are not installed are left out."""

NEAREST = 3
"""Files whose tests are tried before others that run the line, the file of the fault included."""

OFFERED_FIRST = 12
"""Tests, or files of tests, of the first run of a fault. The others run only if none of these notices it."""


@dataclass(frozen=True)
class Fault:
    """Holds a fault and what the tests made of it: a row of the list.

    Args:
        room: Folder of the package, or `.` for its own modules.
        file: Path of the file, from the root of the checkout.
        line: Number of the line, from 1.
        column: Offset in the line in bytes of UTF-8, from 0.
        operator: Kind of the fault.
        before: The source that is replaced.
        after: The source in its place.
        result: `killed`, `survived`, `timeout` if the tests take too long without the fault, too, or empty before the
            tests ran.
        killed_by: Name of the first test that failed.
        equivalent: The reason why no test can notice the fault. Empty if a test could.
    """

    room: str
    file: str
    line: int
    column: int
    operator: str
    before: str
    after: str
    result: str = ""
    killed_by: str = ""
    equivalent: str = ""

    @property
    def place(self) -> tuple[str, int, int, str, str]:
        """What tells this fault from all others."""
        return self.file, self.line, self.column, self.operator, self.after

    @property
    def change(self) -> tuple[str, str, str, str]:
        """What stays if lines are added above the fault."""
        return self.file, self.operator, self.before, self.after

    def ended(self, result: str, killed_by: str = "") -> "Fault":
        """Return the fault with the result of the tests."""
        return Fault(**{**asdict(self), "result": result, "killed_by": killed_by})


# --- faults of a file ---


class Finder(ast.NodeVisitor):
    """Collects the faults of a file.

    Args:
        source: The text of the file.

    Attributes:
        found: Of each fault the node that is replaced, the operator, and the source before and after.
    """

    def __init__(self, source: str) -> None:
        self._lines = source.encode().splitlines(keepends=True)
        self.found: list[tuple[ast.expr | ast.stmt, str, str, str]] = []

    def add(self, node: ast.expr | ast.stmt, operator: str, after: str) -> None:
        """Keep a fault, unless it leaves the source as it is."""
        before = self._source_of(node)
        if after != before:
            self.found.append((node, operator, before, after))

    def _source_of(self, node: ast.expr | ast.stmt) -> str:
        """Return the source of a node. Python's own function splits the whole file for each node."""
        last = node.end_lineno or node.lineno
        lines = self._lines[node.lineno - 1 : last]
        lines[-1] = lines[-1][: node.end_col_offset]
        lines[0] = lines[0][node.col_offset :]
        return b"".join(lines).decode()

    # --- what is no code ---

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Leave f-strings alone, nearly all of which are sentences."""

    def visit_arg(self, node: ast.arg) -> None:
        """Leave annotations alone."""

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_If(self, node: ast.If) -> None:
        words = ast.unparse(node.test)
        if words == "TYPE_CHECKING" or words.startswith("__name__ =="):
            return
        self.negate(node.test)
        self.generic_visit(node)

    def visit_While(self, node: ast.While) -> None:
        # A negated loop without an end would cost the time limit.
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self.negate(node.test)
        self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self.visit_defaults(node.args)
        for statement in without_docstring(node.body):
            self.visit(statement)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self.visit_defaults(node.args)
        for statement in without_docstring(node.body):
            self.visit(statement)

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self.visit_defaults(node.args)
        self.visit(node.body)

    def visit_defaults(self, arguments: ast.arguments) -> None:
        """Visit the defaults of arguments."""
        for default in [*arguments.defaults, *arguments.kw_defaults]:
            if default is not None:
                self.visit(default)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for statement in without_docstring(node.body):
            self.visit(statement)

    # --- statements ---

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Constant):
            # The docstring of an attribute, or an ellipsis.
            return
        if isinstance(node.value, ast.Call) and last_name(node.value.func) in TELLING_CALLS:
            return
        if not isinstance(node.value, ast.Yield | ast.YieldFrom):
            self.add(node, "statement deleted", "pass")
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        if any(isinstance(target, ast.Name) and target.id == "__all__" for target in node.targets):
            return
        if all(isinstance(target, ast.Attribute | ast.Subscript) for target in node.targets):
            self.add(node, "statement deleted", "pass")
        self.visit(node.value)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.add(node, "statement deleted", "pass")
        self.visit(node.value)

    def visit_Continue(self, node: ast.Continue) -> None:
        self.add(node, "statement deleted", "pass")

    def visit_Break(self, node: ast.Break) -> None:
        self.add(node, "statement deleted", "pass")

    def visit_Raise(self, node: ast.Raise) -> None:
        self.add(node, "statement deleted", "pass")

    def visit_Assert(self, node: ast.Assert) -> None:
        self.visit(node.test)

    def visit_Return(self, node: ast.Return) -> None:
        is_none = isinstance(node.value, ast.Constant) and node.value.value is None
        if node.value is None or is_none:
            return
        self.add(node, "return value dropped", "return None")
        self.visit(node.value)

    # --- expressions ---

    def visit_Call(self, node: ast.Call) -> None:
        if last_name(node.func) in NAMING_CALLS | TELLING_CALLS:
            return
        self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        if last_name(node.value) in {"Literal", "ClassVar", "Callable", "Any"}:
            return
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        if len(node.ops) == 1:
            changed = copy.deepcopy(node)
            changed.ops = [COMPARISONS[type(node.ops[0])]()]
            self.add(node, "comparison swapped", ast.unparse(changed))
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        other = ARITHMETIC.get(type(node.op))
        if other is not None and not (is_text(node.left) or is_text(node.right)):
            changed = copy.deepcopy(node)
            changed.op = other()
            self.add(node, "arithmetic swapped", f"({ast.unparse(changed)})")
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        changed = copy.deepcopy(node)
        changed.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        self.add(node, "and/or swapped", f"({ast.unparse(changed)})")
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            self.add(node, "not dropped", f"bool({ast.unparse(node.operand)})")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        value = node.value
        if isinstance(value, bool):
            self.add(node, "constant changed", str(not value))
        elif isinstance(value, int):
            self.add(node, "constant changed", str(value + 1))
        elif isinstance(value, float):
            self.add(node, "constant changed", repr(value * 2 if value else 1.0))
        elif isinstance(value, str) and not SENTENCE.search(value):
            self.add(node, "constant changed", repr(f"{value}_"))

    def negate(self, test: ast.expr) -> None:
        """Keep the fault that takes the other branch."""
        self.add(test, "branch negated", f"(not ({ast.unparse(test)}))")


def without_docstring(body: list[ast.stmt]) -> list[ast.stmt]:
    """Return the statements of a body after its docstring."""
    first = body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
        return body[1:]
    return body


def last_name(node: ast.expr) -> str:
    """Return the last part of a dotted name."""
    return ast.unparse(node).rpartition(".")[2]


def is_text(node: ast.expr) -> bool:
    """Return True for a literal text, which has no difference."""
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def faults_of(root: Path, package: str, path: Path) -> list[Fault]:
    """Return all faults of a file, in the order of the file.

    Args:
        root: The root of the checkout.
        package: Name of the package's folder.
        path: The file.
    """
    source = path.read_text(encoding="utf-8")
    finder = Finder(source)
    for statement in without_docstring(ast.parse(source).body or [ast.Pass()]):
        finder.visit(statement)
    inner = path.relative_to(root / package)
    room = inner.parts[0] if len(inner.parts) > 1 else TOP
    found: list[Fault] = []
    for node, operator, before, after in finder.found:
        fault = Fault(
            room=room,
            file=path.relative_to(root).as_posix(),
            line=node.lineno,
            column=node.col_offset,
            operator=operator,
            before=before,
            after=after,
        )
        found.append(fault)
    return sorted(found, key=lambda fault: fault.place)


def with_fault(source: str, fault: Fault) -> str:
    """Return the text of a file with a fault in it.

    Args:
        source: The text of the file.
        fault: A fault of this text.

    Raises:
        ValueError: The text is another one.
    """
    lines = source.encode().splitlines(keepends=True)
    start = sum(len(line) for line in lines[: fault.line - 1]) + fault.column
    content = source.encode()
    before = fault.before.encode()
    if content[start : start + len(before)] != before:
        raise ValueError(f"line {fault.line} of {fault.file} must read {fault.before!r}; draw a new list")
    return (content[:start] + fault.after.encode() + content[start + len(before) :]).decode()


def all_faults(root: Path, package: str) -> dict[str, list[Fault]]:
    """Return all faults of a package by room, in the order of the files."""
    by_room: dict[str, list[Fault]] = defaultdict(list)
    for path in sorted((root / package).rglob("*.py")):
        for fault in faults_of(root, package, path):
            by_room[fault.room].append(fault)
    return dict(sorted(by_room.items()))


def drawn(by_room: dict[str, list[Fault]], *, seed: int, each: int, rooms: Sequence[str] = ()) -> list[Fault]:
    """Draw faults of every room, each kind of fault with equal probability.

    Args:
        by_room: All faults.
        seed: Key of the draws. A room's draws do not depend on other rooms.
        each: Number of faults of a room.
        rooms: The rooms. Empty means all.
    """
    chosen: list[Fault] = []
    for room, faults in by_room.items():
        if rooms and room not in rooms:
            continue
        draws = random.Random(f"{seed}/{room}")
        by_operator: dict[str, list[Fault]] = defaultdict(list)
        for fault in faults:
            by_operator[fault.operator].append(fault)
        of_room: list[Fault] = []
        while len(of_room) < each and by_operator:
            operator = draws.choice(sorted(by_operator))
            left = by_operator[operator]
            of_room.append(left.pop(draws.randrange(len(left))))
            if not left:
                del by_operator[operator]
        chosen += sorted(of_room, key=lambda fault: fault.place)
    return chosen


# --- the list ---


def read_list(path: Path) -> list[Fault]:
    """Return the faults of a list, or none without the file."""
    if not path.is_file():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    faults: list[Fault] = []
    for row in rows:
        values: dict[str, Any] = {**row, "line": int(row["line"]), "column": int(row["column"])}
        faults.append(Fault(**values))
    return faults


def write_list(path: Path, faults: Iterable[Fault]) -> None:
    """Write a list in one piece, so that a stop leaves a whole file."""
    beside = path.with_name(f"{path.name}.new")
    with beside.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Fault)], lineterminator="\n")
        writer.writeheader()
        for fault in faults:
            writer.writerow(asdict(fault))
    beside.replace(path)


def found_again(fault: Fault, root: Path, package: str) -> Fault | None:
    """Return a fault where it is now, or None if its source is gone.

    Args:
        fault: A fault of a list, whose lines may have moved.
        root: The root of the checkout.
        package: Name of the package's folder.
    """
    path = root / fault.file
    if not path.is_file():
        return None
    same = [now for now in faults_of(root, package, path) if now.change == fault.change]
    if not same:
        return None
    nearest = min(same, key=lambda now: (abs(now.line - fault.line), abs(now.column - fault.column)))
    return Fault(**{**asdict(fault), "line": nearest.line, "column": nearest.column})


# --- the tests of a fault ---


def test_files(root: Path, tests: str) -> list[str]:
    """Return the test files of a checkout, sorted."""
    return sorted(path.relative_to(root).as_posix() for path in (root / tests).rglob("test_*.py"))


def definitions(path: Path) -> list[str]:
    """Return the names of the classes and functions that a file defines."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)]


def mentions(names: Iterable[str]) -> re.Pattern[str]:
    """Return the pattern of any of some names as a whole word."""
    return re.compile(rf"\b(?:{'|'.join(map(re.escape, names))})\b")


def nearest_first(root: Path, package: str, tests: str, *, fault: Fault) -> list[str]:
    """Return the test files of a checkout, those nearest to a fault first.

    The nearest file has the name of the module. Next come files that name the module or what it defines, those of its
    room first, then files that name what other modules make of these definitions, and all others.

    Args:
        root: The root of the checkout.
        package: Name of the package's folder.
        tests: Name of the folder of tests.
        fault: The fault.
    """
    inner = Path(fault.file).relative_to(package)
    dotted = ".".join(Path(fault.file).with_suffix("").parts)
    own = mentions([dotted, *definitions(root / fault.file)])
    users: list[str] = []
    for path in sorted((root / package).rglob("*.py")):
        if path != root / fault.file and own.search(path.read_text(encoding="utf-8")):
            users += definitions(path)
    of_users = mentions(users or [dotted])

    def distance(file: str) -> tuple[int, int, str]:
        path = Path(file)
        in_room = fault.room in path.parts[1:-1]
        if path.stem == f"test_{inner.stem}" and (in_room or fault.room == TOP):
            return 0, 0, file
        text = (root / file).read_text(encoding="utf-8")
        number = len(own.findall(text))
        if number:
            return (1 if in_room else 2), -number, file
        number = len(of_users.findall(text))
        if number:
            return 3, -number, file
        return (4 if in_room else 5), 0, file

    return sorted(test_files(root, tests), key=distance)


# --- the map of lines ---

MARKS = "mutants_marks"
"""Name of the module of a measured copy that records which test runs which line."""

MARKS_SOURCE = """
import os
from pathlib import Path

FOLDER = Path(__file__).parent / "marks"
SEEN = set()


def mark(line):
    test, _, phase = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")
    if phase == "(setup)":
        # All tests of the file may share what a fixture makes.
        test = test.partition("::")[0]
    if test and (test, line) not in SEEN:
        SEEN.add((test, line))
        write("lines", f"{line}\\t{test}")


def write(name, text):
    with open(FOLDER / f"{name}-{os.getpid()}", "a", encoding="utf-8") as file:
        file.write(text + "\\n")


def pytest_runtest_logreport(report):
    if "PYTEST_XDIST_WORKER" not in os.environ:
        write("seconds", f"{report.duration}\\t{report.nodeid}")
"""
"""The module. A process that a test starts inherits the name of the test."""


class Marker(ast.NodeTransformer):
    """Puts a call before the statements of some lines, which records that a test runs them.

    A default of an argument is marked at the beginning of its function.

    Args:
        file: Path of the file, from the root of the checkout.
        lines: The lines.
    """

    def __init__(self, file: str, lines: Iterable[int]) -> None:
        self._file = file
        self._lines = set(lines)

    def marked(self, body: list[ast.stmt]) -> list[ast.stmt]:
        """Return statements with marks."""
        kept = len(body) - len(without_docstring(body)) if body else 0
        found = body[:kept]
        for statement in body[kept:]:
            found += [self._mark(line) for line in sorted(self._own_lines(statement))]
            found.append(self.visit(statement))
        return found

    def generic_visit(self, node: ast.AST) -> ast.AST:
        for name, value in ast.iter_fields(node):
            if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
                setattr(node, name, self.marked(value))
            elif isinstance(value, list):
                for item in value:
                    if isinstance(item, ast.ExceptHandler | ast.match_case):
                        self.generic_visit(item)
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        defaults = [*node.args.defaults, *node.args.kw_defaults]
        of_defaults: set[int] = set()
        for default in defaults:
            if default is not None:
                of_defaults |= self._lines_in(default)
        self.generic_visit(node)
        kept = len(node.body) - len(without_docstring(node.body))
        node.body[kept:kept] = [self._mark(line) for line in sorted(of_defaults)]
        return node

    def _own_lines(self, statement: ast.stmt) -> set[int]:
        """Return the lines of a statement, without those of the statements in it."""
        lines = self._lines_in(statement)
        for node in ast.walk(statement):
            if node is not statement and isinstance(node, ast.stmt):
                lines -= self._lines_in(node)
        return lines

    def _lines_in(self, node: ast.stmt | ast.expr) -> set[int]:
        last = node.end_lineno or node.lineno
        return self._lines & set(range(node.lineno, last + 1))

    def _mark(self, line: int) -> ast.stmt:
        return ast.parse(f"__import__({MARKS!r}).mark({f'{self._file}:{line}'!r})").body[0]


def with_marks(source: str, file: str, lines: Iterable[int]) -> str:
    """Return the text of a file with marks before some lines.

    Args:
        source: The text of the file.
        file: Path of the file, from the root of the checkout.
        lines: The lines.
    """
    tree = ast.parse(source)
    marker = Marker(file, lines)
    kept = len(tree.body) - len(without_docstring(tree.body)) if tree.body else 0
    while kept < len(tree.body) and ast.unparse(tree.body[kept]).startswith("from __future__"):
        kept += 1
    tree.body[kept:] = marker.marked(tree.body[kept:])
    return ast.unparse(ast.fix_missing_locations(tree))


def write_map(options: argparse.Namespace) -> None:
    """Run the suite on a copy whose faulty lines are marked, and write which tests run them.

    Args:
        options: The options of the command line.
    """
    lines: dict[str, set[int]] = defaultdict(set)
    for fault in read_list(options.list):
        now = found_again(fault, options.root, options.package)
        if now is not None:
            lines[now.file].add(now.line)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copied = Path(folder) / "checkout"
        copy_checkout(options.root, copied)
        (copied / f"{MARKS}.py").write_text(MARKS_SOURCE, encoding="utf-8")
        (copied / "marks").mkdir()
        for file, of_file in lines.items():
            path = copied / file
            path.write_text(with_marks(path.read_text(encoding="utf-8"), file, of_file), encoding="utf-8")
        command = [sys.executable, "-m", "pytest", "-q", "--tb=no", "-p", MARKS, "-m", "not slow and not gpu"]
        command += ["-n", "auto", "--dist", "loadfile", "--no-loadscope-reorder"]
        subprocess.run(command, cwd=copied, env=environment_of(copied), check=False)
        seconds: dict[str, float] = defaultdict(float)
        for duration, test in records(copied / "marks", "seconds"):
            for name in (test, test.partition("::")[0]):
                seconds[name] += float(duration)
        found: dict[str, list[tuple[float, str]]] = defaultdict(list)
        for place, test in records(copied / "marks", "lines"):
            found[place].append((seconds[test], test))
    ordered = {place: spread(tests) for place, tests in sorted(found.items())}
    options.map.write_text(json.dumps(ordered, indent=1), encoding="utf-8")
    print(f"{options.map}: {len(ordered)} of {sum(map(len, lines.values()))} lines are run by tests")


def records(folder: Path, name: str) -> Iterator[tuple[str, str]]:
    """Yield the records of all processes, each once."""
    texts: set[str] = set()
    for path in folder.glob(f"{name}-*"):
        texts.update(path.read_text(encoding="utf-8").splitlines())
    for text in sorted(texts):
        first, _, second = text.partition("\t")
        yield first, second


def spread(tests: Iterable[tuple[float, str]]) -> list[str]:
    """Return tests in the order in which they are tried: one case of each function first, the quick ones first.

    >>> spread([(1, "a.py::f[1]"), (2, "a.py::f[2]"), (3, "b.py::g")])
    ['a.py::f[1]', 'b.py::g', 'a.py::f[2]']
    """
    seen: Counter[str] = Counter()
    ordered: list[tuple[int, float, str]] = []
    for seconds, test in sorted(set(tests)):
        function = test.partition("[")[0]
        ordered.append((seen[function], seconds, test))
        seen[function] += 1
    return [test for _, _, test in sorted(ordered)]


def read_map(path: Path) -> dict[str, list[str]]:
    """Return the tests by `file:line`, empty without a map."""
    if not path.is_file():
        return {}
    found: dict[str, list[str]] = json.loads(path.read_text(encoding="utf-8"))
    return found


def environment_of(copied: Path) -> dict[str, str]:
    """Return the environment in which the tests of a copy run."""
    return {
        **os.environ,
        "PYTHONPATH": str(copied),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
    }


class Tests:
    """Runs tests on a copy of a checkout.

    Args:
        root: The root of the checkout.
        tests: Name of the folder of tests.
        seconds: Time limit of the tests of a fault, > 0.
        lines: The tests by `file:line`. Empty without a map.
        most: Largest number of tests of a fault, or of test files without a map. None means all.

    Attributes:
        copy: The root of the copy.
    """

    def __init__(
        self,
        root: Path,
        *,
        copy_at: Path,
        package: str,
        tests: str,
        seconds: float,
        lines: dict[str, list[str]],
        most: int | None = None,
    ) -> None:
        self.copy = copy_at
        self._package = package
        self._tests = tests
        self._seconds = seconds
        self._lines = lines
        self._most = most
        self._sound: dict[str, bool] = {}
        """Whether a test that failed with a fault passes without one."""
        copy_checkout(root, copy_at)
        start_server(environment_of(copy_at))

    def of(self, fault: Fault) -> Fault:
        """Run the tests of a fault, and return it with the result."""
        path = self.copy / fault.file
        source = path.read_text(encoding="utf-8")
        files = self._files(fault)
        groups = [files[:OFFERED_FIRST], files[OFFERED_FIRST:]]
        changed = with_fault(source, fault)
        try:
            for group in groups:
                ended = self._group(fault, group, source=source, changed=changed)
                if ended is not None:
                    return ended
        finally:
            path.write_text(source, encoding="utf-8")
        return fault.ended(SURVIVED)

    def _files(self, fault: Fault) -> list[str]:
        """Return the tests that run, or the files with them, in order, the doctests of the file itself first."""
        files = nearest_first(self.copy, self._package, self._tests, fault=fault)
        files = [fault.file, *files]
        tests = self._lines.get(f"{fault.file}:{fault.line}")
        if tests is None:
            return files[: self._most]
        # A test that writes tests and runs them is known by these, which are gone.
        known = [test for test in tests if (self.copy / test.partition("::")[0]).is_file()]
        nearest = set(files[:NEAREST])
        known.sort(key=lambda test: test.partition("::")[0] not in nearest)
        return known[: self._most]

    def _group(self, fault: Fault, files: list[str], *, source: str, changed: str) -> Fault | None:
        """Run some files until a test fails that passes without the fault. None if no such test fails.

        Args:
            fault: The fault.
            files: The test files.
            source: The text of the file without the fault.
            changed: The text of the file with the fault.
        """
        path = self.copy / fault.file
        while files:
            path.write_text(changed, encoding="utf-8")
            without = [f"--deselect={test}" for test in self.failing()]
            output = self._pytest([*files, *without])
            if output is None:
                path.write_text(source, encoding="utf-8")
                alone = self._pytest([*files, *without], ends_early=False)
                return fault.ended(TIMEOUT) if alone is None else fault.ended(KILLED, ENDLESS)
            failed = FAILED.search(output)
            if failed is None:
                return None
            test = failed[1]
            if test == WHOLE_RUN:
                path.write_text(source, encoding="utf-8")
                alone = self._pytest(files)
                if alone is None or f"ERROR {WHOLE_RUN}" in alone:
                    raise RuntimeError(f"pytest cannot begin without a fault:\n{alone}")
                return fault.ended(KILLED, test)
            if test not in self._sound:
                path.write_text(source, encoding="utf-8")
                self._judge(test, [*files, *without])
            if self._sound[test]:
                return fault.ended(KILLED, test)
        return None

    def _judge(self, test: str, group: list[str]) -> None:
        """Find out whether a test that failed with a fault passes without one.

        Args:
            test: The test.
            group: The arguments of the run in which the test failed. If it fails without the fault, too, others of the
                group may fail for the same reason: one run finds them all.
        """
        alone = self._pytest([test])
        self._sound[test] = alone is not None and FAILED.search(alone) is None
        if not self._sound[test]:
            whole = self._pytest(group, ends_early=False)
            for failed in FAILED.findall(whole or ""):
                self._sound[failed] = False

    def failing(self) -> list[str]:
        """Return the tests that fail without a fault, too."""
        return [test for test, is_sound in self._sound.items() if not is_sound]

    def _pytest(self, arguments: list[str], *, ends_early: bool = True) -> str | None:
        """Run pytest, and return its output, or None at the time limit.

        Args:
            arguments: Tests, files and options.
            ends_early: Whether the run ends at the first failure.
        """
        options = ["-q", "--tb=no", "-rfE", "-p", "no:cacheprovider", "-W", "ignore", "-m", "not slow and not gpu"]
        if ends_early:
            options.append("-x")
        with tempfile.NamedTemporaryFile(mode="r", encoding="utf-8", errors="replace") as output:
            settings = (self.copy, environment_of(self.copy), [*options, *arguments], output.name)
            process = FORKED.Process(target=tests_of_fork, args=settings)
            process.start()
            process.join(self._seconds)
            has_ended = process.exitcode is not None
            # A test may have left processes of its own behind.
            end_group(process)
            printed = output.read()
        if not has_ended:
            return None
        if process.exitcode in BROKEN_ENDS and not FAILED.search(printed):
            return f"{printed}\nERROR {WHOLE_RUN}"
        return printed


def start_server(environment: dict[str, str]) -> None:
    """Start the process that imports the large packages and forks, unless it runs already.

    Args:
        environment: The environment of the server, which torch reads when it is imported.
    """
    FORKED.set_forkserver_preload(list(PRELOADED))
    kept = dict(os.environ)
    os.environ.update(environment)
    try:
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(kept)


def tests_of_fork(copied: Path, environment: dict[str, str], arguments: list[str], output: str) -> None:
    """Run pytest in this process, which has imported nothing of the checkout yet, and end it.

    Args:
        copied: The root of the copy.
        environment: The environment of the tests.
        arguments: The arguments of pytest.
        output: Path of the file to which pytest prints.
    """
    os.setsid()
    os.chdir(copied)
    os.environ.clear()
    os.environ.update(environment)
    os.dup2(os.open(output, os.O_WRONLY), sys.stdout.fileno())
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
    sys.dont_write_bytecode = True
    sys.path.insert(0, str(copied))
    for name in [name for name in sys.modules if name.partition(".")[0] == "tools"]:
        del sys.modules[name]
    import pytest  # noqa: PLC0415 - the main process does not need it

    sys.argv = [pytest.__file__, *arguments]
    status = pytest.main(arguments)
    sys.stdout.flush()
    os._exit(status)


def end_group(process: BaseProcess) -> None:
    """End a process and all that it started."""
    if process.pid is not None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    process.join()


def copy_checkout(root: Path, target: Path) -> None:
    """Copy a checkout without its history, environments and runs."""
    is_cache = shutil.ignore_patterns(*CACHES)

    def left_out(folder: str, names: list[str]) -> set[str]:
        if Path(folder) == root:
            return {*is_cache(folder, names), *LEFT_OUT}
        return set(is_cache(folder, names))

    shutil.copytree(root, target, ignore=left_out)


@contextmanager
def tests_on_copy(root: Path, **settings: object) -> Iterator[Tests]:
    """Context with the tests on a copy of a checkout in a temporary folder.

    Args:
        root: The root of the checkout.
        settings: Settings of `Tests`.
    """
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        yield Tests(root, copy_at=Path(folder) / "checkout", **settings)  # type: ignore[arg-type]


# --- commands ---


def score(faults: Sequence[Fault]) -> list[str]:
    """Return a line for each room, and one for all: how many of the faults that count were noticed."""
    counted: dict[str, Counter[str]] = defaultdict(Counter)
    for fault in faults:
        result = "equivalent" if fault.equivalent else fault.result or "not run"
        for room in (fault.room, "all"):
            counted[room][result] += 1
    lines: list[str] = []
    for room in sorted(counted, key=lambda name: (name == "all", name)):
        counts = counted[room]
        noticed = counts[KILLED]
        counting = noticed + counts[SURVIVED] + counts[TIMEOUT]
        share = f"{100 * noticed / counting:.0f} %" if counting else "—"
        others = ", ".join(f"{number} {result}" for result, number in sorted(counts.items()) if result != KILLED)
        lines.append(f"{room:14} {noticed} of {counting} killed ({share}){'; ' if others else ''}{others}")
    return lines


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options of a command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.mutants", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("command", choices=("draw", "run", "score", "map"))
    parser.add_argument("--list", type=Path, default=None, help="the list; default tools/mutants.csv of the checkout")
    parser.add_argument("--seed", type=int, default=0, help="key of the draws")
    parser.add_argument("--each", type=int, default=10, help="faults of a room")
    parser.add_argument("--rooms", nargs="*", default=[], help="rooms; default all")
    parser.add_argument("--rows", nargs="*", type=int, default=[], help="rows of the list, from 1, to run again")
    parser.add_argument("--seconds", type=float, default=900.0, help="time limit of the tests of a fault")
    parser.add_argument(
        "--most", type=int, default=None, help="largest number of tests of a fault (without a map: files)"
    )
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout")
    parser.add_argument("--package", default="fl_lightning", help="folder of the package")
    parser.add_argument("--tests", default="tests", help="folder of the tests")
    parser.add_argument("--map", type=Path, default=None, help="map of lines; default .mutants_map of the checkout")
    options = parser.parse_args(arguments)
    options.root = options.root.resolve()
    if options.list is None:
        options.list = options.root / "tools" / "mutants.csv"
    if options.map is None:
        options.map = options.root / ".mutants_map"
    return options


def draw(options: argparse.Namespace) -> None:
    """Draw faults into the list, and keep the results of those that are in it already."""
    known = {fault.place: fault for fault in read_list(options.list)}
    chosen = drawn(
        all_faults(options.root, options.package),
        seed=options.seed,
        each=options.each,
        rooms=options.rooms,
    )
    write_list(options.list, [known.get(fault.place, fault) for fault in chosen])
    print(f"{options.list}: {len(chosen)} faults")


def run(options: argparse.Namespace) -> None:
    """Run the tests of the faults without a result, or of the given rows."""
    faults = read_list(options.list)
    rows = options.rows or [row for row, fault in enumerate(faults, 1) if not (fault.result or fault.equivalent)]
    settings = {
        "package": options.package,
        "tests": options.tests,
        "seconds": options.seconds,
        "lines": read_map(options.map),
        "most": options.most,
    }
    with tests_on_copy(options.root, **settings) as tests:
        for row in rows:
            # The checkout may change while this runs; the copy does not.
            fault = found_again(faults[row - 1], tests.copy, options.package)
            if fault is None:
                print(f"row {row}: its source is gone; draw a new list", flush=True)
                continue
            faults[row - 1] = tests.of(fault)
            write_list(options.list, faults)
            ended = faults[row - 1]
            print(
                f"row {row}: {ended.file}:{ended.line} {ended.operator}: {ended.result} {ended.killed_by}", flush=True
            )
        for test in tests.failing():
            print(f"{test} fails without a fault, too, and was left out")


def main(arguments: Sequence[str]) -> int:
    """Run a command, and return the exit status."""
    options = parsed(arguments)
    if options.command == "map":
        write_map(options)
        return 0
    if options.command == "draw":
        draw(options)
    if options.command == "run":
        run(options)
    for line in score(read_list(options.list)):
        print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
