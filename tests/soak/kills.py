"""Kills runs at random moments and continues them: `python -m tests.soak.kills [NUMBER] [SEED]` (`make soak`).

A forked process starts a run through the command line, so that nothing is imported twice. SIGKILL ends the run at a
moment drawn uniformly over its length, and then the run is continued until it is complete. Weights, the clients'
records and metrics.csv must be those of a run that nobody killed.
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
from typing import Any, NamedTuple

import torch

from fl_lightning.__main__ import main
from tests.commands import CONFIGS
from tests.processes.forked import exit_code

ROUNDS = 6
LONGEST = 600
"""Seconds that a run may take."""

COMMON = f"--trainer.max_epochs {ROUNDS} --model.threads 1 --model.local_epochs 1 --trainer.enable_progress_bar false"
TWO = "--trainer.devices 2 --trainer.strategy"
TEMPORARY = {"same file system": "/tmp", "other file system": "/dev/shm"}
"""Folders of temporary files, as seen from the run's folder in /tmp."""

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
    """Return the command line of a case."""
    experiment, *options = CASES[case].split()
    config = CONFIGS / f"experiment/digits_{experiment}.yaml"
    return ["fit", "-c", str(config), *COMMON.split(), *options, *more]


def start(case: str, folder: Path, environment: Mapping[str, str], more: tuple[str, ...] = ()) -> int:
    """Start a run in a process group of its own, and return its id."""
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
        if "script" in case:
            # Lightning starts the other ranks with the command of this process.
            command = [sys.executable, "-m", "fl_lightning", *words(case, more)]
            os.execv(sys.executable, command)
        main(words(case, more))
        os._exit(0)
    except SystemExit as stop:
        os._exit(int(stop.code or 0))
    except BaseException:
        os._exit(70)


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
    # The table has the hashes of records in files.
    hash_of(saved["federated"]["store"], digest)
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


class Expected(NamedTuple):
    """Holds the hash and the seconds of a run that nobody killed."""

    hashed: str
    seconds: float


def killed_once(case: str, folder: Path, *, environment: Mapping[str, str], seconds: float, draw: random.Random) -> str:
    """Kill one run at a random moment and continue it to its end.

    Args:
        case: Name of the case.
        folder: Folder of the run.
        environment: Further variables of the environment.
        seconds: Length of a whole run.
        draw: Draws the moment.

    Returns:
        The hash of what the run left, or the reason why it failed.
    """
    child = start(case, folder, environment)
    code = exit_code(child, seconds=draw.uniform(0, seconds))
    if code is None:
        kill(child)
        has_checkpoint = any(folder.rglob("last.ckpt"))
        more = ("--ckpt_path", "last") if has_checkpoint else ()
        code = exit_code(start(case, folder, environment, more=more), seconds=LONGEST)
    if code != 0:
        return f"exit {code}"
    parts = list(folder.rglob("*.part"))
    if parts:
        return f"left {parts[0].name}"
    return outcome(folder)


def unkilled(case: str) -> Expected:
    """Run a case to its end."""
    with tempfile.TemporaryDirectory() as name:
        began = time.monotonic()
        code = exit_code(start(case, Path(name), {"TMPDIR": "/tmp"}), seconds=LONGEST)
        assert code == 0, (case, code, Path(name, "log").read_text()[-2000:])
        return Expected(outcome(Path(name)), time.monotonic() - began)


def soak(number: int, seed: int) -> int:
    """Spread `number` kills over all cases and file systems, and return how many runs ended otherwise."""
    draw = random.Random(seed)
    wrong = 0
    counts = Counter[str]()
    expected = {case: unkilled(case) for case in CASES}
    cases = list(CASES)
    places = list(TEMPORARY)
    for i in range(number):
        case = cases[i % len(cases)]
        place = places[i // len(cases) % len(places)]
        with tempfile.TemporaryDirectory(dir="/tmp") as name:
            found = killed_once(
                case,
                Path(name),
                environment={"TMPDIR": TEMPORARY[place]},
                seconds=expected[case].seconds,
                draw=draw,
            )
            if found == expected[case].hashed:
                counts[f"{case}, {place}"] += 1
                print(f"{i + 1} of {number}: {case}, {place}: equal", flush=True)
            else:
                wrong += 1
                log = Path(name, "log").read_text()[-1500:]
                print(f"WRONG {case}, {place}: {found}, expected {expected[case].hashed}\n{log}")
    for key in sorted(counts):
        print(f"{key:45} {counts[key]:4} equal")
    print(f"{number} kills, {number - wrong} equal, {wrong} not")
    return wrong


def number_and_seed(default: int) -> tuple[int, int]:
    """Read the number of trials and the seed, 0 by default, from the command line."""
    given = [int(word) for word in sys.argv[1:]]
    number = given[0] if given else 0
    seed = given[1] if len(given) > 1 else 0
    return number or default, seed


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(bool(soak(*number_and_seed(default=200))))
