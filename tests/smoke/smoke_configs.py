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

HERE = Path(__file__).resolve().parents[2]


def experiments() -> dict[str, list[str]]:
    """The files of every method's small experiment, and of those that are of no method."""
    from fl_lightning.cli.configs import config_names, small_experiment

    own = {name.partition("digits_")[2]: [name] for name in config_names() if name.startswith("experiment/digits_")}
    methods = (name.partition("/")[2] for name in config_names() if name.startswith("method/"))
    return own | {stem: small_experiment(stem) for stem in methods}


def smoke(configs: list[str]) -> str | None:
    """Run two rounds; what was printed if that failed, else None."""
    from fl_lightning.__main__ import main

    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            main(["fit", *(word for config in configs for word in ("-c", config)), "--trainer.max_epochs", "2"])
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
    configs = {stem: files for stem, files in sorted(experiments().items()) if part in stem}
    if not configs:
        print(f"no experiment of *{part}*", file=sys.stderr)
        return 1
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)  # the run folders go there
        for stem, files in configs.items():
            start = time.perf_counter()
            problem = smoke(files)
            failed += problem is not None
            print(
                f"{stem:40} {'FAILED' if problem else 'ok':6} {time.perf_counter() - start:5.1f} s",
                flush=True,
            )
            if problem:
                print(problem)
        os.chdir(HERE)
    print(f"smoke: {len(configs) - failed} passed, {failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
