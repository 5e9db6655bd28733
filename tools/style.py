"""Finds seven dense constructs that have a plainer form: `python -m tools.style [FILE …]`.

Without files it reads the files that `plain` names in `[tool.style]` of pyproject.toml, except those of `not_yet`.
`make lint` keeps them free of such constructs. `--list` prints their names. A comment `style: ok, REASON` on one of
its lines makes a construct an exception.
"""

import ast
import io
import re
import sys
import tokenize
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

PARALLEL = "several assignments in one; write one a line"
SPLAT = "a call built from *values; name its arguments"
UNNAMED = "more than three unnamed arguments; name them"
NESTED_CONDITION = "a conditional expression within another; use if or an early return"
TWO_LOOPS = "a comprehension with two loops; write a loop or a function with a name"
TWO_CONDITIONS = "a comprehension with two conditions; write a loop or a function with a name"
TRUTH = "arithmetic on truth; use a conditional expression"
CONDITIONAL_LOOP = "a loop over a conditional expression; give its values a name, or use if"

MAX_UNNAMED = 3
EXCEPTION = re.compile(r"#\s*style: ok\b(?P<reason>, *\S.*)?")
TAKES_EQUALS = frozenset(
    {"chain", "isdisjoint", "max", "min", "print", "product", "Sequential", "union", "update", "zip"}
)
"""Functions of Python and torch that take any number of equal arguments, which have no names."""

COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
SEQUENCES = (ast.Tuple, ast.List)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


def plain_files() -> list[Path]:
    """Return the files that are kept plain, sorted.

    Raises:
        ValueError: A pattern names no file.
    """
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["style"]
    return sorted(files_of(settings["plain"]) - files_of(settings["not_yet"]))


def files_of(patterns: list[str]) -> set[Path]:
    """Return the files that patterns name.

    Raises:
        ValueError: A pattern names no file.
    """
    files = set[Path]()
    for pattern in patterns:
        found = set(ROOT.glob(pattern))
        if not found:
            raise ValueError(f"[tool.style] must name files, got {pattern!r}; remove it")
        files |= found
    return files


def findings(source: str) -> list[tuple[int, str]]:
    """Return the line and the sentence of every dense construct, in order, without the exceptions.

    Args:
        source: The text of a Python file.
    """
    excepted, problems = _exceptions(source)
    used = set[int]()
    for node, problem in _dense(ast.parse(source)):
        lines = set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        if lines & excepted:
            used |= lines
        else:
            problems.append((node.lineno, problem))
    problems += [(line, "an exception without a dense construct; remove it") for line in excepted - used]
    return sorted(problems)


def _exceptions(source: str) -> tuple[set[int], list[tuple[int, str]]]:
    """Return the lines that are exceptions, and the problems with exceptions that give no reason."""
    excepted = set[int]()
    problems = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        exception = EXCEPTION.match(token.string)
        if token.type != tokenize.COMMENT or exception is None:
            continue
        line = token.start[0]
        if exception["reason"] is None:
            problems.append((line, "an exception needs its reason: # style: ok, REASON"))
        else:
            excepted.add(line)
    return excepted, problems


def _dense(tree: ast.Module) -> Iterator[tuple[ast.stmt | ast.expr, str]]:
    """Yield every dense construct with the sentence about it."""
    forwarded = _forwarded(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and _is_parallel(node):
            yield node, PARALLEL
        if isinstance(node, ast.Call):
            yield from _in_call(node, forwarded)
        if isinstance(node, ast.IfExp):
            inner = [part for part in ast.walk(node) if isinstance(part, ast.IfExp)]
            if len(inner) > 1:
                yield node, NESTED_CONDITION
        if isinstance(node, COMPREHENSIONS):
            if len(node.generators) > 1:
                yield node, TWO_LOOPS
            elif len(node.generators[0].ifs) > 1:
                yield node, TWO_CONDITIONS
        if isinstance(node, ast.BinOp) and _is_product_of_truth(node):
            yield node, TRUTH
        if isinstance(node, ast.For) and isinstance(node.iter, ast.IfExp):
            yield node.iter, CONDITIONAL_LOOP
        if isinstance(node, COMPREHENSIONS) and isinstance(node.generators[0].iter, ast.IfExp):
            yield node, CONDITIONAL_LOOP


def _is_parallel(node: ast.Assign) -> bool:
    """Return True if the statement assigns several values to several targets and is not a swap."""
    if not isinstance(node.value, SEQUENCES):
        return False
    values = {ast.unparse(value) for value in node.value.elts}
    for target in node.targets:
        if isinstance(target, SEQUENCES):
            targets = {ast.unparse(each) for each in target.elts}
            if targets != values:
                return True
    return False


def _in_call(node: ast.Call, forwarded: set[ast.Starred]) -> Iterator[tuple[ast.Call, str]]:
    """Yield what is dense in the arguments of a call."""
    name = ast.unparse(node.func).rpartition(".")[2]
    if name in TAKES_EQUALS:
        return
    splats = [argument for argument in node.args if isinstance(argument, ast.Starred)]
    if len(node.args) - len(splats) > MAX_UNNAMED:
        yield node, UNNAMED
    built = [splat for splat in splats if splat not in forwarded]
    if built and len(node.args) + len(node.keywords) > 1:
        yield node, SPLAT


def _forwarded(tree: ast.Module) -> set[ast.Starred]:
    """Return the splats by which a function passes on its own `*args`."""
    found = set[ast.Starred]()
    for function in ast.walk(tree):
        if not isinstance(function, FUNCTIONS) or function.args.vararg is None:
            continue
        name = function.args.vararg.arg
        for node in ast.walk(function):
            if isinstance(node, ast.Starred) and isinstance(node.value, ast.Name) and node.value.id == name:
                found.add(node)
    return found


def _is_product_of_truth(node: ast.BinOp) -> bool:
    """Return True if the expression multiplies by a truth value."""
    return isinstance(node.op, ast.Mult) and (_is_truth(node.left) or _is_truth(node.right))


def _is_truth(node: ast.expr) -> bool:
    """Return True if the expression is a comparison, a negation, a truth constant or a call of `bool`."""
    if isinstance(node, ast.Compare):
        return True
    if isinstance(node, ast.Constant):
        return isinstance(node.value, bool)
    if isinstance(node, ast.UnaryOp):
        return isinstance(node.op, ast.Not) or _is_truth(node.operand)
    return isinstance(node, ast.Call) and ast.unparse(node.func) == "bool"


def main(arguments: list[str]) -> int:
    """Print the findings of the named files, or of the list, and return the exit code."""
    if arguments == ["--list"]:
        for path in plain_files():
            print(path.relative_to(ROOT))
        return 0
    paths = [Path(argument) for argument in arguments] or plain_files()
    clean = True
    for path in paths:
        for line, problem in findings(path.read_text(encoding="utf-8")):
            print(f"{path}:{line}: {problem}")
            clean = False
    return 0 if clean else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
