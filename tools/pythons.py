"""Finds the oldest or the newest Python of this machine that setup.cfg names: `python -m tools.pythons oldest|newest`.

`make test-oldest` and `make test-newest` run the tests on them. A name on the path is not enough: pyenv leaves names
there that fail, and Debian has Pythons without `ensurepip`. So every candidate is started.
"""

import configparser
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

Version = tuple[int, int]
"""Major and minor version of a Python, such as (3, 11)."""

PROBE = "import ensurepip, sys, venv; print(*sys.version_info[:2], sys.executable)"
"""What a candidate must be able to run. It imports what `python -m venv` needs."""


def supported() -> set[Version]:
    """Return the versions that the classifiers of setup.cfg name."""
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg", encoding="utf-8")
    found = re.findall(r"Programming Language :: Python :: (\d+)\.(\d+)", settings["metadata"]["classifiers"])
    return {(int(major), int(minor)) for major, minor in found}


def candidates() -> list[str]:
    """Return commands that may be a Python: on the path, of pyenv, and the Python that runs this file."""
    names = [f"{major}.{minor}" for major, minor in sorted(supported())]
    commands = []
    for word in [*names, "3", ""]:
        command = shutil.which(f"python{word}")
        if command is not None:
            commands.append(command)
    pyenv = Path(os.environ.get("PYENV_ROOT") or os.path.expanduser("~/.pyenv"))
    for name in names:
        for path in sorted(pyenv.glob(f"versions/{name}.*/bin/python3")):
            commands.append(str(path))
    commands.append(sys.executable)
    return commands


def probe(command: str) -> tuple[Version, str] | None:
    """Return the version of a Python and its path. None means that no environment can be made with it."""
    try:
        answer = subprocess.run([command, "-c", PROBE], capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    words = answer.stdout.strip().split(maxsplit=2)
    if len(words) != 3:
        return None
    major, minor, path = words
    return (int(major), int(minor)), path


def installed() -> dict[Version, str]:
    """Return the path of a working Python for every version that setup.cfg names and this machine has."""
    versions = supported()
    found: dict[Version, str] = {}
    for command in candidates():
        answer = probe(command)
        if answer is None:
            continue
        version, path = answer
        if version in versions:
            found.setdefault(version, path)
    return found


def main(arguments: list[str]) -> int:
    """Print the path of the Python that is asked for, and return the exit code."""
    if arguments not in (["oldest"], ["newest"]):
        print("tools.pythons takes one word, oldest or newest", file=sys.stderr)
        return 2
    found = installed()
    if not found:
        named = ", ".join(f"{major}.{minor}" for major, minor in sorted(supported()))
        print(f"no Python of {named} with its venv module works on this machine; install one", file=sys.stderr)
        return 1
    version = min(found) if arguments == ["oldest"] else max(found)
    print(found[version])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
