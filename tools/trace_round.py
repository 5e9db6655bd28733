"""Counts the code that a reader meets in one round: `python tools/trace_round.py [FOLDER of another checkout]`.

The round is one of FedAvg with one client and one batch. The tool counts the Python frames that are entered in files of
`fl_lightning` between the start and the end of `FederatedLoop.training_step`. A hop is a call that follows a call in
another file. Code lines are lines without blanks, comments and docstrings.
"""

import ast
import io
import sys
import tokenize
from collections import Counter
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parents[1]).resolve()
PACKAGE = ROOT / "fl_lightning"
BASES = [
    ("client/module.py", "ClientModule"),
    ("aggregation/server_parts.py", "ServerPart"),
    ("aggregation/server_parts.py", "Aggregator"),
    ("aggregation/server_parts.py", "ServerModule"),
]
"""File and name of the classes that a method derives from."""
sys.path.insert(0, str(ROOT))


@cache
def parsed(path: Path) -> ast.Module:
    """Return the syntax tree of a file."""
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def code_lines(path: Path) -> set[int]:
    """Return the numbers of the lines of a file that hold code."""
    source = path.read_text(encoding="utf-8")
    skipped = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in skipped:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(parsed(path)):
        if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Constant):
            continue
        if isinstance(node.value.value, str):
            lines -= lines_of(node)
    return lines


def lines_of(node: ast.stmt) -> set[int]:
    """Return the numbers of the lines of a statement."""
    return set(range(node.lineno, (node.end_lineno or node.lineno) + 1))


def functions(path: Path) -> dict[str, int]:
    """Return the number of code lines of each function of a file, by name and line."""
    lines = code_lines(path)
    found = {}
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found[f"{node.name}:{node.lineno}"] = len(lines & lines_of(node))
    return found


def class_lines(file: str, name: str) -> int:
    """Return the number of code lines of a class, or 0 if the file has no such class."""
    path = PACKAGE / file
    if not path.is_file():
        return 0
    for node in parsed(path).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return len(code_lines(path) & lines_of(node))
    return 0


def entered(file: str, calls: list[tuple[str, str]]) -> int:
    """Return the number of code lines of the functions of a file that were called."""
    begun = {int(name.rpartition(":")[2]) for where, name in calls if where == file}
    lines: set[int] = set()
    for node in ast.walk(parsed(PACKAGE / file)):
        if isinstance(node, ast.FunctionDef):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            if first in begun:
                lines |= set(range(first, (node.end_lineno or 0) + 1))
    return len(lines & code_lines(PACKAGE / file))


class Calls:
    """Notes the calls into the package, in order, as (file, function)."""

    def __init__(self) -> None:
        self.found: list[tuple[str, str]] = []

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(str(PACKAGE)):
            file = str(Path(code.co_filename).relative_to(PACKAGE))
            self.found.append((file, f"{code.co_qualname}:{code.co_firstlineno}"))


def trace() -> list[tuple[str, str]]:
    """Return the calls of the third round. The rounds before it make what later rounds reuse."""
    import torch  # noqa: PLC0415 - after the path is set
    from pytorch_lightning import Trainer  # noqa: PLC0415

    from fl_lightning import FederatedDataModule, FederatedLoop  # noqa: PLC0415
    from fl_lightning.data import TensorSource  # noqa: PLC0415
    from fl_lightning.methods import FedAvg  # noqa: PLC0415

    calls = Calls()

    class Traced(FederatedLoop):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            if self.current_epoch < 2:
                return super().training_step(batch, batch_idx)
            sys.setprofile(calls)
            try:
                return super().training_step(batch, batch_idx)
            finally:
                sys.setprofile(None)

    x = torch.randn(8, 4)
    samples = (x, torch.arange(8) % 2)
    data = FederatedDataModule(TensorSource(samples, samples), num_clients=1, batch_size=8)
    trainer = Trainer(
        max_epochs=3,
        accelerator="cpu",
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Traced(FedAvg()), datamodule=data)
    return calls.found


def used_once(calls: list[tuple[str, str]]) -> list[str]:
    """Return the called functions whose name is defined once and used once in the package.

    They are no hook, no override and not shared. All others that are called would have to be copied, or taken from
    whoever overrides them, to become fewer.
    """
    defined = Counter[str]()
    used = Counter[str]()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.FunctionDef):
                defined[node.name] += 1
            elif isinstance(node, ast.Name):
                used[node.id] += 1
            elif isinstance(node, ast.Attribute):
                used[node.attr] += 1
    found = {(file, name.rpartition(":")[0].rpartition(".")[2]) for file, name in calls}
    return sorted(f"{file} {name}" for file, name in found if defined[name] == used[name] == 1)


def imports(path: Path, root: str) -> set[str]:
    """Return the modules of a package that a file imports at module level, also those under `TYPE_CHECKING`."""
    tree = parsed(path)
    in_functions = set[int]()
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            in_functions |= {id(node) for node in ast.walk(function)}
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and id(node) not in in_functions:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return {name for name in found if name.startswith(root)}


def circles() -> list[list[str]]:
    """Return the groups of modules that import each other in a circle."""
    paths = {}
    for path in PACKAGE.rglob("*.py"):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        paths[name.removesuffix(".__init__")] = path
    reach = {}
    for name, path in paths.items():
        reach[name] = (imports(path, "fl_lightning") & paths.keys()) - {name}
    # This is Warshall's transitive closure.
    for middle in paths:
        for name in paths:
            if middle in reach[name]:
                reach[name] |= reach[middle]
    groups = set[frozenset[str]]()
    for name in paths:
        groups.add(frozenset(other for other in reach[name] if name in reach[other]))
    return [sorted(group) for group in groups if len(group) > 1]


def assigned(tree: ast.AST) -> set[tuple[str, str]]:
    """Return (object, attribute) of every assignment to an attribute within a tree."""
    found = set()
    for node in ast.walk(tree):
        for target in targets_of(node):
            parts = target.elts if isinstance(target, ast.Tuple) else [target]
            for part in parts:
                if isinstance(part, ast.Attribute):
                    found.add((ast.unparse(part.value), part.attr))
    return found


def targets_of(node: ast.AST) -> list[ast.expr]:
    """Return the targets of an assignment, and none of another node."""
    if isinstance(node, ast.Assign):
        return node.targets
    if isinstance(node, ast.AnnAssign | ast.AugAssign):
        return [node.target]
    return []


class Declarations:
    """Knows the classes of the package and the attributes that they declare."""

    def __init__(self) -> None:
        self.classes: dict[str, tuple[Path, ast.ClassDef]] = {}
        for path in PACKAGE.rglob("*.py"):
            for node in ast.walk(parsed(path)):
                if isinstance(node, ast.ClassDef):
                    self.classes[node.name] = (path, node)

    @cache  # noqa: B019 - one object for the whole program
    def declared(self, name: str) -> set[str]:
        """Return the attributes that a class, its `__init__` or a base class of the package declares."""
        if name not in self.classes:
            return set()
        _, node = self.classes[name]
        found = set[str]()
        for statement in node.body:
            if getattr(statement, "name", "") == "__init__":
                found |= {attribute for owner, attribute in assigned(statement) if owner == "self"}
            if isinstance(statement, ast.Assign | ast.AnnAssign):
                # It is a field of a dataclass, or a default.
                found |= {target.id for target in targets_of(statement) if isinstance(target, ast.Name)}
        for base in node.bases:
            found |= self.declared(ast.unparse(base))
        return found

    def late(self) -> list[str]:
        """Return the attributes that a method assigns and nothing declares."""
        found = set()
        for name, (path, node) in self.classes.items():
            known = self.declared(name) | {"automatic_optimization"}
            for function in ast.walk(node):
                if not isinstance(function, ast.FunctionDef) or function.name == "__init__":
                    continue
                for owner, attribute in assigned(function):
                    if owner == "self" and attribute not in known:
                        found.add(f"{path.relative_to(PACKAGE)} {name}.{function.name}: {owner}.{attribute}")
        return sorted(found)


def foreign() -> list[str]:
    """Return the assignments to attributes of other objects."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        for owner, attribute in assigned(parsed(path)):
            if owner != "self":
                found.add(f"{path.relative_to(PACKAGE)}: {owner}.{attribute}")
    return sorted(found)


def main() -> None:
    """Print the figures."""
    calls = trace()
    print_round(calls)
    print_package()


def print_round(calls: list[tuple[str, str]]) -> None:
    """Print the figures of the calls of a round."""
    files = list(dict.fromkeys(file for file, _ in calls))
    sizes = {file: len(code_lines(PACKAGE / file)) for file in files}
    comprehensions = len([name for _, name in set(calls) if "comp>" in name])
    print(f"calls {len(calls)}, functions {len(set(calls))}, files {len(files)}")
    print(
        f"of the functions {comprehensions} are comprehensions, which are frames of their own before Python 3.12 only"
    )
    of_one_use = used_once(calls)
    print(f"used in one place only: {len(of_one_use)}", *of_one_use, sep="\n  ")
    hops = [(before, after) for before, after in pairwise(file for file, _ in calls) if before != after]
    print(f"hops {len(hops)}")
    for file in files:
        called = [where for where, _ in calls if where == file]
        lines = f"{sizes[file]:4} code lines, {entered(file, calls):4} of functions entered"
        print(f"  {file:32} {lines}, {len(called):3} calls")
    core = {file: size for file, size in sizes.items() if not file.startswith(("nets/", "functional/losses"))}
    print(f"reading core (the files entered but for the net and the loss): {sum(core.values())} in {len(core)} files")
    print(f"functions of these files that are entered: {sum(entered(file, calls) for file in core)} code lines")
    bases = sum(class_lines(file, name) for file, name in BASES)
    files_of_bases = sum(sizes.get(file, 0) for file in {file for file, _ in BASES})
    print(f"client base, rule and server module: {bases} code lines, their files {files_of_bases}")


def print_package() -> None:
    """Print the figures of the whole package."""
    paths = sorted(PACKAGE.rglob("*.py"))
    print(f"code lines of the package: {sum(len(code_lines(path)) for path in paths)} in {len(paths)} files")
    papers = [f"{path.stem} {len(code_lines(path))}" for path in paths if path.parent.name == "methods"]
    print("code lines of the files of methods:", ", ".join(papers))
    lengths = []
    for path in paths:
        lengths += [(lines, f"{path.relative_to(PACKAGE)} {name}") for name, lines in functions(path).items()]
    longest, place = max(lengths)
    print(f"longest function: {place}, {longest} code lines")
    asserts = 0
    for path in paths:
        asserts += len([node for node in ast.walk(parsed(path)) if isinstance(node, ast.Assert)])
    print(f"assert statements: {asserts}")
    found = circles()
    print(f"import circles: {len(found)}", *found)
    late = Declarations().late()
    print(f"attributes declared neither by the class nor in __init__: {len(late)}", *late, sep="\n  ")
    others = foreign()
    print(f"assignments to other objects' attributes: {len(others)}", *others, sep="\n  ")


if __name__ == "__main__":
    main()
