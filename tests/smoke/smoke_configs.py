"""Two rounds of every method's experiment on digits, through the command line, in one process.

Run by `make smoke`; `python tests/smoke/smoke_configs.py PART` runs those with PART in their file name.
"""

import contextlib
import io
import os
import sys
import tempfile
import time
import traceback
from pathlib import Path

EXPERIMENTS = Path(__file__).resolve().parents[2] / "configs" / "experiment"


def smoke(config: Path) -> str | None:
    """Run two rounds; what was printed if that failed, else None."""
    from fl_lightning.__main__ import main

    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            main(["fit", "-c", str(config), "--trainer.max_epochs", "2"])
        except SystemExit as stop:
            if not stop.code:
                return None
            traceback.print_exc()
        except Exception:
            traceback.print_exc()
        else:
            return None
    return out.getvalue()


def main() -> int:
    part = sys.argv[1] if len(sys.argv) > 1 else ""
    configs = sorted(path for path in EXPERIMENTS.glob("digits_*.yaml") if part in path.name)
    if not configs:
        print(f"no experiment digits_*{part}*.yaml in {EXPERIMENTS}", file=sys.stderr)
        return 1
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)  # the run folders go there
        for config in configs:
            start = time.perf_counter()
            problem = smoke(config)
            failed += problem is not None
            print(
                f"{config.stem:40} {'FAILED' if problem else 'ok':6} {time.perf_counter() - start:5.1f} s",
                flush=True,
            )
            if problem:
                print(problem)
        os.chdir(EXPERIMENTS)
    print(f"smoke: {len(configs) - failed} passed, {failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
