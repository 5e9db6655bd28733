"""Runs two rounds of every method's experiment on digits, through the command line, in one process: `make smoke`.

`python tests/smoke/smoke_configs.py PART` runs only the experiments with PART in their file name.
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
    """Return the files of every method's small experiment, and of the experiments without a method, by stem."""
    from fl_lightning.cli.configs import config_names, small_experiment

    found = {}
    for name in config_names():
        if name.startswith("experiment/digits_"):
            found[name.removeprefix("experiment/digits_")] = [name]
    for name in config_names():
        if name.startswith("method/"):
            stem = name.removeprefix("method/")
            found[stem] = small_experiment(stem)
    return found


def smoke(configs: list[str]) -> str | None:
    """Run two rounds, and return what was printed if they failed, else None."""
    from fl_lightning.__main__ import main

    words = ["fit"]
    for config in configs:
        words += ["-c", config]
    words += ["--trainer.max_epochs", "2"]
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            main(words)
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
        # The runs write their folders here.
        os.chdir(folder)
        for stem, files in configs.items():
            start = time.perf_counter()
            problem = smoke(files)
            seconds = time.perf_counter() - start
            result = "ok" if problem is None else "FAILED"
            print(f"{stem:40} {result:6} {seconds:5.1f} s", flush=True)
            if problem is not None:
                failed += 1
                print(problem)
        os.chdir(HERE)
    print(f"smoke: {len(configs) - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
