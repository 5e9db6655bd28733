"""Measure what a federation on Flower costs beside the simulation: `python tools/measure_flower.py`, some minutes.

CPU seconds of an exchange over a grid in this process, so serialisation only, and bytes on the wire beside the
recorder's; with `--superlink` the clock of a round and the CPU seconds of a message, with two SuperNodes here; with
`--imports` the CPU seconds of an app's start.
"""

import csv
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import psutil
import torch

from fl_lightning import FederatedDataModule, FederatedLoop
from fl_lightning.data import Digits
from fl_lightning.methods import FedAvg
from fl_lightning.nets import Perceptron
from tests.flower.deployed import EXAMPLE, Deployment
from tests.flower.grid import federate
from tests.toys import fit

CLIENTS = 5
ROUNDS = 10
ROUNDS_OVER_LINK = 6
PLAIN = Path(__file__).resolve().parents[1] / "bench" / "plain_flower"
"""The same work by Flower and torch alone."""

HIDDEN = {"5 k": [64], "2 M": [1370, 1370]}


def loop_of(hidden: list[int]) -> FederatedLoop:
    """Make a federation of a perceptron."""
    optimizer = partial(torch.optim.SGD, lr=0.05)
    return FederatedLoop(FedAvg(net=partial(Perceptron, hidden=hidden), optimizer=optimizer), seed=0)


def data() -> FederatedDataModule:
    """Make the data."""
    return FederatedDataModule(Digits(), num_clients=CLIENTS, batch_size=32)


def per_exchange(run: Callable[[int], Any]) -> tuple[float, Any]:
    """CPU seconds of an exchange: of a run of many rounds less one of one round."""
    seconds = []
    for rounds in (1, 1 + ROUNDS):
        begun = time.process_time()
        made = run(rounds)
        seconds.append(time.process_time() - begun)
    return (seconds[1] - seconds[0]) / (ROUNDS * CLIENTS), made


def over_the_grid(hidden: list[int], rounds: int) -> Any:
    """Run a federation over a grid."""
    with tempfile.TemporaryDirectory() as folder:
        return federate(partial(loop_of, hidden), data, Path(folder), rounds=rounds)


def grid() -> None:
    """Print the rows of the table."""
    print("| parameters | CPU per exchange, simulation | over the grid | ratio | bytes on the wire | recorder's |")
    for name, hidden in HIDDEN.items():
        pairs = []
        for _ in range(3):  # by turns: the machine has other work
            plain, loop = per_exchange(lambda rounds, hidden=hidden: fit(None, rounds, data(), loop=loop_of(hidden)))
            remote, made = per_exchange(partial(over_the_grid, hidden))
            pairs.append((remote / plain, plain, remote))
        ratio, plain, remote = sorted(pairs)[1]
        records = [message.content.array_records["fl_lightning"] for message in made[1].log]
        moved = sum(len(part.data) for record in records if "weights" in record for part in record.values())
        recorded = (loop.round_metrics["comm/bytes_down"] + loop.round_metrics["comm/bytes_up"]) * (1 + ROUNDS)
        print(f"| {name} | {plain * 1e3:.1f} ms | {remote * 1e3:.1f} ms | {ratio:.2f} | {moved / recorded:.3f} × | 1 |")


def superlink() -> None:
    """Print the clock of a round of the example, and the CPU seconds of a message beside an app of Flower and torch."""
    with tempfile.TemporaryDirectory() as name, Deployment(Path(name)) as link:
        folder = link.folder
        config = EXAMPLE / "federation.yaml"
        command = [sys.executable, "-m", "fl_lightning", "split", "-c", config, "--output", folder / "parties"]
        subprocess.run(list(map(str, command)), env=link.environment, cwd=folder, check=True)
        for i in range(2):
            link.register(f"node_{i}")
            link.start_node(f"node_{i}", folder / f"parties/client_{i}/data.yaml")
        root = folder / "runs"
        lengths = f"--trainer.max_epochs {ROUNDS_OVER_LINK} --model.evaluate_clients_every 100"
        arguments = f"{lengths} --trainer.default_root_dir {root}"
        settings = {"arguments": arguments, "server_data": folder / "parties/server/data.yaml"}
        run = link.start("run", "flwr", *link.command(**settings))
        times = []
        while run.poll() is None:
            files = list(root.rglob("metrics.csv"))
            if files and len(list(csv.DictReader(files[0].open()))) > len(times):
                times.append(time.monotonic())
            time.sleep(0.05)
        rounds = sorted(after - before for before, after in pairwise(times))
        print(f"{rounds[len(rounds) // 2]:.1f} s a round of one exchange with two nodes")
        # One message more asks each node who it is.
        ours = spent_by_apps(link) / (2 * (ROUNDS_OVER_LINK + 1))
        print(f"{ours:.1f} CPU s of a client app's process for a message")
        for with_torchvision in (False, True):
            before = spent_by_apps(link)
            words = [
                "--run-config",
                f"rounds={ROUNDS_OVER_LINK}",
                "--run-config",
                f"torchvision={str(with_torchvision).lower()}",
            ]
            link.flwr("run", PLAIN, "here", "--stream", *words, timeout=600)
            spent = (spent_by_apps(link) - before) / (2 * ROUNDS_OVER_LINK)
            print(f"{spent:.1f} CPU s of an app of Flower and torch{' with torchvision' * with_torchvision}")


def spent_by_apps(link: Deployment) -> float:
    """Return the CPU seconds of all client apps' processes that have ended."""
    seconds = 0.0
    for i in range(2):
        node = psutil.Process(link.processes[f"node_{i}"].pid)
        for process in node.children(recursive=True):  # they reap the client apps
            times = process.cpu_times()
            seconds += times.children_user + times.children_system
    return seconds


STEP = """
import torch
from sklearn.datasets import load_digits
layer = torch.nn.Linear(64, 10)
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
optimizer.zero_grad()
layer(torch.zeros(2, 64)).sum().backward()
optimizer.step()
"""
"""What an app does after its imports, up to its first step."""


def imports() -> None:
    """Print the CPU seconds of imports and a first step, of fl_lightning's apps and of Flower and torch alone."""
    apps = {"fl_lightning": "import fl_lightning.flower.apps", "Flower and torch": "import flwr.clientapp"}
    seconds: dict[str, list[float]] = {name: [] for name in apps}
    for _ in range(3):
        for name, line in apps.items():
            before = os.times()
            subprocess.run([sys.executable, "-c", f"{line}\n{STEP}"], check=True)
            after = os.times()
            user = after.children_user - before.children_user
            seconds[name].append(user + after.children_system - before.children_system)
    for name, found in seconds.items():
        print(f"{sorted(found)[1]:.1f} CPU s of {name}: imports and a first step, median of 3 by turns")


if __name__ == "__main__":
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    if "--superlink" in sys.argv:
        superlink()
    elif "--imports" in sys.argv:
        imports()
    else:
        grid()
