"""Measures the tests, and lists in `tests/long_tests.txt` those whose first case has no place in the short suite.

python -m tools.long_tests             runs all cases of the tests, which takes half an hour on two cores
python -m tools.long_tests FOLDER      stores the seconds there, or takes what an earlier call stored there
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.first_cases import LONG_TESTS, function_of, killers

ROOT = Path(__file__).resolve().parents[1]
FOLDER = "FL_LIGHTNING_TIMES"
"""Variable of the environment that names the folder of what is measured."""

BUDGET = 170.0
"""CPU seconds of the tests of the short suite. Two processes take two minutes more to find the tests."""


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and of the processes that it has waited for."""
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Note the CPU seconds of a test, where this file is a plugin of pytest."""
    before = cpu_seconds()
    result = yield
    line = f"{cpu_seconds() - before:.3f}\t{item.nodeid}\n"
    with (Path(os.environ[FOLDER]) / f"{os.getpid()}.tsv").open("a", encoding="utf-8") as file:
        file.write(line)
    return result


def measure(folder: Path) -> None:
    """Run all cases of the tests.

    Args:
        folder: Where the CPU seconds of each are written.
    """
    environment = {**os.environ, FOLDER: str(folder), "OMP_NUM_THREADS": "1"}
    options = ["-n", "auto", "--dist", "loadfile", "--no-loadscope-reorder", "-m", "not slow and not gpu"]
    command = [sys.executable, "-m", "pytest", "-p", "tools.long_tests", *options]
    subprocess.run(command, cwd=ROOT, env=environment, check=True)


def read_seconds(folder: Path) -> dict[str, float]:
    """Read the CPU seconds of each case, in the order in which a process ran them."""
    seconds: dict[str, float] = {}
    for path in sorted(folder.glob("*.tsv")):
        for line in path.read_text(encoding="utf-8").splitlines():
            text, _, name = line.partition("\t")
            seconds[name] = float(text)
    return seconds


def long_tests(seconds: Mapping[str, float], budget: float) -> list[str]:
    """Return the tests whose first case does not fit, if the shortest ones are taken first.

    Args:
        seconds: CPU seconds of each case, those of a test in their order.
        budget: CPU seconds that the suite may take.
    """
    remaining = budget - sum(seconds.get(name, 0.0) for name in killers())
    first: dict[str, float] = {}
    for name, value in seconds.items():
        if name not in killers():
            first.setdefault(function_of(name), value)
    listed: list[str] = []
    for test in sorted(first, key=lambda test: first[test]):
        remaining -= first[test]
        if remaining < 0:
            listed.append(test)
    return sorted(listed)


def load_or_measure(folder: Path | None) -> dict[str, float]:
    """Return the CPU seconds of each case, and run the cases unless an earlier call has stored the seconds.

    Args:
        folder: Folder that stores the seconds of a whole run. None stores nothing.
    """
    if folder is not None and any(folder.glob("*.tsv")):
        return read_seconds(folder)
    with tempfile.TemporaryDirectory() as temporary:
        measure(Path(temporary))
        if folder is not None:
            shutil.copytree(temporary, folder, dirs_exist_ok=True)
        return read_seconds(Path(temporary))


def main() -> None:
    """Write the list."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else None
    seconds = load_or_measure(folder)
    listed = long_tests(seconds, BUDGET)
    LONG_TESTS.write_text("\n".join(listed) + "\n", encoding="utf-8")
    print(f"{len(listed)} of {len(set(map(function_of, seconds)))} tests are long: {LONG_TESTS}")


if __name__ == "__main__":
    main()
