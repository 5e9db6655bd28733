"""Counts what a reader meets in one round: `python docs/trace_round.py [FOLDER of another checkout]`.

One round of FedAvg with one client and one batch. Counted are Python frames entered in files of `fl_lightning` between
the start and the end of `FederatedLoop.training_step`; a hop is a call that follows one in another file; code lines are
those without blanks, comments and docstrings.
"""

import ast
import io
import sys
import tokenize
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parents[1]).resolve()
PACKAGE = ROOT / "fl_lightning"
sys.path.insert(0, str(ROOT))


def code_lines(path: Path) -> set[int]:
    """Numbers of the lines of a file that hold code."""
    source = path.read_text(encoding="utf-8")
    skipped = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in skipped:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        texts = [node.value] if isinstance(node, ast.Expr) else []
        for text in texts:
            if isinstance(text, ast.Constant) and isinstance(text.value, str):
                lines -= set(range(text.lineno, (text.end_lineno or text.lineno) + 1))
    return lines


def functions(path: Path) -> dict[str, int]:
    """Code lines of each function of a file, by name and line."""
    lines = code_lines(path)
    found = (n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))
    return {f"{n.name}:{n.lineno}": len(lines & set(range(n.lineno, (n.end_lineno or 0) + 1))) for n in found}


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


def main() -> None:
    """Print the figures."""
    calls = trace()
    files = list(dict.fromkeys(file for file, _ in calls))
    sizes = {file: len(code_lines(PACKAGE / file)) for file in files}
    print(f"calls {len(calls)}, functions {len(set(calls))}, files {len(files)}")
    print(f"hops {sum(a[0] != b[0] for a, b in pairwise(calls))}")
    for file in files:
        print(f"  {file:32} {sizes[file]:4} code lines, {sum(call[0] == file for call in calls):3} calls")
    print(f"code lines of the files entered: {sum(sizes.values())} in {len(sizes)}")
    everything = sorted(PACKAGE.rglob("*.py"))
    print(f"code lines of the package: {sum(len(code_lines(path)) for path in everything)} in {len(everything)} files")
    longest = max(
        (size, f"{path.relative_to(PACKAGE)} {name}") for path in everything for name, size in functions(path).items()
    )
    print(f"longest function: {longest[1]}, {longest[0]} code lines")


if __name__ == "__main__":
    main()
