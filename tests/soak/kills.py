"""Kills runs at random moments and continues them: `python -m tests.soak.kills [NUMBER] [SEED]` (`make soak`).

A run is started through the command line in a forked process (nothing is imported twice), killed with SIGKILL at a
moment drawn uniformly over its length, and continued until it is complete. Weights, the clients' records and
metrics.csv must be those of a run that nobody killed.
"""

import hashlib
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from fl_lightning.__main__ import main
from tests.commands import CONFIGS

ROUNDS = 6
COMMON = f"--trainer.max_epochs {ROUNDS} --model.threads 1 --model.local_epochs 1 --trainer.enable_progress_bar false"
TWO = "--trainer.devices 2 --trainer.strategy"
CASES = {
    "FedAvg": "fedavg",
    "FedNTD": "fedntd",
    "KnFu with files": "knfu --model.store.memory_budget_mb 0",
    "FedCL": "fedcl",
    "server momentum": "fedavg --model.server_optimizer SGD --model.server_optimizer.lr 1 "
    "--model.server_optimizer.momentum 0.9",
    "personal entries": "fedavg --model.personal *head*",
    "2 processes by script": f"fedavg {TWO} client_parallel",
    "2 processes by fork": f"fedavg {TWO} client_parallel_fork",
}


def words(case: str, more: tuple[str, ...] = ()) -> list[str]:
    experiment, *options = CASES[case].split()
    return ["fit", "-c", str(CONFIGS / f"experiment/digits_{experiment}.yaml"), *COMMON.split(), *options, *more]


def start(case: str, folder: Path, environment: Mapping[str, str], more: tuple[str, ...] = ()) -> int:
    """Start a run in a process group of its own; returns its id."""
    child = os.fork()
    if child:
        return child
    try:
        os.setpgid(0, 0)
        os.chdir(folder)
        os.environ.update(environment)
        tempfile.tempdir = None
        with Path("log").open("a") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        if "script" in case:  # Lightning starts the other ranks with the command of this process
            command = [sys.executable, "-m", "fl_lightning", *words(case, more)]
            os.execv(sys.executable, command)
        main(words(case, more))
        os._exit(0)
    except SystemExit as stop:
        os._exit(int(stop.code or 0))
    except BaseException:
        os._exit(70)


def wait(child: int, seconds: float = 600) -> int | None:
    """Wait for the end of a run; None if it takes longer."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    return None


def kill(child: int) -> None:
    """Kill a run with all its processes."""
    try:
        os.killpg(child, signal.SIGKILL)
    except ProcessLookupError:
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def outcome(folder: Path) -> str:
    """Hash weights, records and metrics.csv of the last run in a folder."""
    (last,) = (path for path in folder.rglob("last.ckpt") if rounds_of(path) == ROUNDS)
    saved = torch.load(last, weights_only=True)
    digest = hashlib.sha256((last.parents[1] / "metrics.csv").read_bytes())
    hash_of(saved["state_dict"], digest)
    hash_of(saved["federated"]["store"], digest)  # of records in files the table holds hashes
    return digest.hexdigest()[:16]


def hash_of(value: Any, digest: Any) -> None:
    """Hash a nest of plain values and tensors."""
    if isinstance(value, torch.Tensor):
        digest.update(value.contiguous().numpy().tobytes())
    elif isinstance(value, Mapping):
        for key in sorted(value, key=str):
            digest.update(str(key).encode())
            hash_of(value[key], digest)
    elif isinstance(value, list | tuple):
        for item in value:
            hash_of(item, digest)
    else:
        digest.update(repr(value).encode())


def rounds_of(path: Path) -> int:
    return int(torch.load(path, weights_only=True, mmap=True)["global_step"])


def one(case: str, folder: Path, environment: Mapping[str, str], length: float, draw: random.Random) -> str:
    """Kill one run at a random moment and continue it to its end; returns the hash of what it left, or what failed."""
    child = start(case, folder, environment)
    code = wait(child, draw.uniform(0, length))
    if code is None:
        kill(child)
        found = list(folder.rglob("last.ckpt"))
        code = wait(start(case, folder, environment, ("--ckpt_path", "last") if found else ()))
    if code != 0:
        return f"exit {code}"
    left = [path for path in folder.rglob("*.part")]
    if left:
        return f"left {left[0].name}"
    return outcome(folder)


def soak(number: int, seed: int) -> int:
    """Spread `number` kills over all cases and file systems; returns how many runs ended otherwise."""
    draw = random.Random(seed)
    wrong = 0
    counts = Counter[str]()
    places = [("same file system", Path("/tmp"), "/tmp"), ("other file system", Path("/tmp"), "/dev/shm")]
    expected: dict[str, tuple[str, float]] = {}
    for case in CASES:
        with tempfile.TemporaryDirectory() as name:
            began = time.monotonic()
            code = wait(start(case, Path(name), {"TMPDIR": "/tmp"}))
            assert code == 0, (case, code, Path(name, "log").read_text()[-2000:])
            expected[case] = outcome(Path(name)), time.monotonic() - began
    for i in range(number):
        case, (place, root, temporary) = list(CASES)[i % len(CASES)], places[i // len(CASES) % len(places)]
        with tempfile.TemporaryDirectory(dir=root) as name:
            hashed, length = expected[case]
            found = one(case, Path(name), {"TMPDIR": temporary}, length, draw)
            if found == hashed:
                counts[f"{case}, {place}"] += 1
                print(f"{i + 1} of {number}: {case}, {place}: equal", flush=True)
            else:
                wrong += 1
                print(f"WRONG {case}, {place}: {found}, expected {hashed}\n{Path(name, 'log').read_text()[-1500:]}")
    for key in sorted(counts):
        print(f"{key:45} {counts[key]:4} equal")
    print(f"{number} kills, {number - wrong} equal, {wrong} not")
    return wrong


if __name__ == "__main__":
    torch.set_num_threads(1)
    arguments = [int(word) for word in sys.argv[1:]] + [0] * 2
    sys.exit(bool(soak(arguments[0] or 200, arguments[1])))
