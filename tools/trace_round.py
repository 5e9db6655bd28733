"""Counts what a reader meets in one round: `python tools/trace_round.py [FOLDER of another checkout]`.

One round of FedAvg with one client and one batch. Counted are Python frames entered in files of `fl_lightning` between
the start and the end of `FederatedLoop.training_step`; a hop is a call that follows one in another file; code lines are
those without blanks, comments and docstrings.
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
BASES = [("client/module.py", "ClientModule")]
BASES += [("aggregation/server_parts.py", name) for name in ("ServerPart", "Aggregator", "ServerModule")]
"""File and name of the classes that a method derives from."""
sys.path.insert(0, str(ROOT))


@cache
def parsed(path: Path) -> ast.Module:
    """The syntax tree of a file."""
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def code_lines(path: Path) -> set[int]:
    """Numbers of the lines of a file that hold code."""
    source = path.read_text(encoding="utf-8")
    skipped = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in skipped:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(parsed(path)):
        texts = [node.value] if isinstance(node, ast.Expr) else []
        for text in texts:
            if isinstance(text, ast.Constant) and isinstance(text.value, str):
                lines -= set(range(text.lineno, (text.end_lineno or text.lineno) + 1))
    return lines


def functions(path: Path) -> dict[str, int]:
    """Code lines of each function of a file, by name and line."""
    lines = code_lines(path)
    found = (n for n in ast.walk(parsed(path)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))
    return {f"{n.name}:{n.lineno}": len(lines & set(range(n.lineno, (n.end_lineno or 0) + 1))) for n in found}


def class_lines(file: str, name: str) -> int:
    """Code lines of a class; 0 where there is none."""
    path = PACKAGE / file
    lines = set[int]()
    for node in ast.parse(path.read_text()).body if path.is_file() else ():
        if isinstance(node, ast.ClassDef) and node.name == name:
            lines = code_lines(path) & set(range(node.lineno, (node.end_lineno or 0) + 1))
    return len(lines)


def entered(file: str, calls: list[tuple[str, str]]) -> int:
    """Code lines of the functions of a file that were called."""
    begun = {int(name.rpartition(":")[2]) for where, name in calls if where == file}
    lines: set[int] = set()
    for node in ast.walk(ast.parse((PACKAGE / file).read_text())):
        if isinstance(node, ast.FunctionDef):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            if first in begun:
                lines |= set(range(first, (node.end_lineno or 0) + 1))
    return len(lines & code_lines(PACKAGE / file))


class Calls:
    """The calls into the package, in order, as (file, function)."""

    def __init__(self) -> None:
        self.found: list[tuple[str, str]] = []

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(str(PACKAGE)):
            file = str(Path(code.co_filename).relative_to(PACKAGE))
            self.found.append((file, f"{code.co_qualname}:{code.co_firstlineno}"))


def trace() -> list[tuple[str, str]]:
    """The calls of the third round (the first ones make what is kept)."""
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

    samples = torch.randn(8, 4), torch.arange(8) % 2
    data = FederatedDataModule(TensorSource(samples, samples), num_clients=1, batch_size=8)
    quiet: dict[str, Any] = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    Trainer(max_epochs=3, accelerator="cpu", num_sanity_val_steps=0, **quiet).fit(Traced(FedAvg()), datamodule=data)
    return calls.found


def used_once(calls: list[tuple[str, str]]) -> list[str]:
    """Functions that are neither a hook, an override nor shared: of a name that is defined once and used once.

    All others that are called would have to be copied, or taken from whoever overrides them, to become fewer.
    """
    defined = Counter[str]()
    used = Counter[str]()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.FunctionDef):
                defined[node.name] += 1
            elif isinstance(node, ast.Name | ast.Attribute):
                used[node.id if isinstance(node, ast.Name) else node.attr] += 1
    found = {(file, name.rpartition(":")[0].rpartition(".")[2]) for file, name in calls}
    return sorted(f"{file} {name}" for file, name in found if defined[name] == 1 and used[name] == 1)


def imports(path: Path, root: str) -> set[str]:
    """Modules of the package that a file imports at module level, `TYPE_CHECKING` ones counted."""
    found: set[str] = set()
    tree = parsed(path)
    inside = {id(n) for f in ast.walk(tree) if isinstance(f, ast.FunctionDef) for n in ast.walk(f)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and id(node) not in inside:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return {name for name in found if name.startswith(root)}


def circles() -> list[list[str]]:
    """Groups of files that import each other in a circle."""
    names = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for path in PACKAGE.rglob("*.py")
    }
    graph = {name: {n for n in imports(path, "fl_lightning") if n in names} - {name} for name, path in names.items()}
    reach = {name: set(targets) for name, targets in graph.items()}
    for middle in names:  # Warshall's transitive closure
        for name in names:
            if middle in reach[name]:
                reach[name] |= reach[middle]
    groups = {frozenset(n for n in names if n in reach[name] and name in reach[n]) for name in names}
    return [sorted(group) for group in groups if len(group) > 1]


def assigned(node: ast.AST) -> set[tuple[str, str]]:
    """(object, attribute) of every assignment to an attribute of a name."""
    found = set()
    for inner in ast.walk(node):
        targets = inner.targets if isinstance(inner, ast.Assign) else [getattr(inner, "target", None)]
        for target in targets if isinstance(inner, ast.Assign | ast.AnnAssign | ast.AugAssign) else []:
            for part in target.elts if isinstance(target, ast.Tuple) else [target]:
                if isinstance(part, ast.Attribute):
                    found.add((ast.unparse(part.value), part.attr))
    return found


def attributes() -> tuple[list[str], list[str]]:
    """Attributes that neither the class nor `__init__` declares, and those of other objects that are assigned."""
    classes: dict[str, tuple[Path, ast.ClassDef]] = {}
    for path in PACKAGE.rglob("*.py"):
        found = (n for n in ast.walk(parsed(path)) if isinstance(n, ast.ClassDef))
        classes |= {node.name: (path, node) for node in found}

    @cache
    def declared(name: str) -> set[str]:
        if name not in classes:
            return set()
        node = classes[name][1]
        own = {a for f in node.body if getattr(f, "name", "") == "__init__" for o, a in assigned(f) if o == "self"}
        for n in node.body:  # fields of a dataclass, and defaults that the class declares
            targets = n.targets if isinstance(n, ast.Assign) else [n.target] if isinstance(n, ast.AnnAssign) else []
            own |= {target.id for target in targets if isinstance(target, ast.Name)}
        return own.union(*(declared(ast.unparse(base)) for base in node.bases))

    late = set()
    foreign = set()
    for name, (path, node) in classes.items():
        for function in (f for f in ast.walk(node) if isinstance(f, ast.FunctionDef) and f.name != "__init__"):
            for owner, attribute in assigned(function):
                place = f"{path.relative_to(PACKAGE)} {name}.{function.name}: {owner}.{attribute}"
                if owner == "self" and attribute not in declared(name) | {"automatic_optimization"}:
                    late.add(place)
    for path in PACKAGE.rglob("*.py"):
        for owner, attribute in assigned(parsed(path)):
            if owner != "self":
                foreign.add(f"{path.relative_to(PACKAGE)}: {owner}.{attribute}")
    return sorted(late), sorted(foreign)


def main() -> None:
    """Print the figures."""
    calls = trace()
    files = list(dict.fromkeys(file for file, _ in calls))
    sizes = {file: len(code_lines(PACKAGE / file)) for file in files}
    inner = sum("comp>" in name for _, name in set(calls))
    print(f"calls {len(calls)}, functions {len(set(calls))}, files {len(files)}")
    print(f"of the functions {inner} are comprehensions, which are frames of their own before Python 3.12 only")
    print(f"used in one place only: {len(used_once(calls))}", *used_once(calls), sep="\n  ")
    print(f"hops {sum(a[0] != b[0] for a, b in pairwise(calls))}")
    for file in files:
        called = sum(call[0] == file for call in calls)
        print(
            f"  {file:32} {sizes[file]:4} code lines, {entered(file, calls):4} of functions entered, {called:3} calls"
        )
    core = {file: size for file, size in sizes.items() if not file.startswith(("nets/", "functional/losses"))}
    print(f"reading core (the files entered but for the net and the loss): {sum(core.values())} in {len(core)} files")
    print(f"functions of these files that are entered: {sum(entered(file, calls) for file in core)} code lines")
    found = [class_lines(*base) for base in BASES]
    whole = sum(sizes.get(file, 0) for file in {f for f, _ in BASES})
    print(f"client base, rule and server module: {sum(found)} code lines, their files {whole}")
    everything = sorted(PACKAGE.rglob("*.py"))
    print(f"code lines of the package: {sum(len(code_lines(path)) for path in everything)} in {len(everything)} files")
    papers = [f"{path.stem} {len(code_lines(path))}" for path in everything if path.parent.name == "methods"]
    print("code lines of the files of methods:", ", ".join(papers))
    longest = max((n, f"{path.relative_to(PACKAGE)} {f}") for path in everything for f, n in functions(path).items())
    print(f"longest function: {longest[1]}, {longest[0]} code lines")
    asserts = sum(isinstance(n, ast.Assert) for path in everything for n in ast.walk(parsed(path)))
    print(f"assert statements: {asserts}")
    found = circles()
    print(f"import circles: {len(found)}", *found)
    late, foreign = attributes()
    print(f"attributes declared neither by the class nor in __init__: {len(late)}", *late, sep="\n  ")
    print(f"assignments to other objects' attributes: {len(foreign)}", *foreign, sep="\n  ")


if __name__ == "__main__":
    main()
