"""Measures the costs of a federation on Flower beside the simulation: `python tools/measure_flower.py`, some minutes.

- Without options: the CPU seconds of an exchange over a grid in this process, which only serializes, and the bytes on
  the wire beside the recorder's.
- `--superlink`: the seconds of a round and the CPU seconds of a message, with two SuperNodes on this machine.
- `--imports`: the CPU seconds of an app's start.
"""

import csv
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
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
from tools.measure_tasks import cpu_seconds_of_children

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
    """Measure an exchange by a run of many rounds less a run of one round.

    Returns:
        The CPU seconds of an exchange, and the result of the longer run.
    """
    short, _ = timed(run, 1)
    long, result = timed(run, 1 + ROUNDS)
    return (long - short) / (ROUNDS * CLIENTS), result


def timed(run: Callable[[int], Any], rounds: int) -> tuple[float, Any]:
    """Return the CPU seconds of a run, and its result."""
    begun = time.process_time()
    result = run(rounds)
    return time.process_time() - begun, result


def over_the_grid(hidden: list[int], rounds: int) -> Any:
    """Run a federation over a grid."""
    with tempfile.TemporaryDirectory() as folder:
        return federate(partial(loop_of, hidden), data, Path(folder), rounds=rounds)


def simulated(hidden: list[int], rounds: int) -> Any:
    """Run the same federation in the simulation."""
    return fit(None, rounds, data(), loop=loop_of(hidden))


def grid() -> None:
    """Print the rows of the table."""
    print("| parameters | CPU per exchange, simulation | over the grid | ratio | bytes on the wire | recorder's |")
    for name, hidden in HIDDEN.items():
        pairs = []
        # They run by turns, because the machine has other work.
        for _ in range(3):
            plain, loop = per_exchange(partial(simulated, hidden))
            remote, federated = per_exchange(partial(over_the_grid, hidden))
            pairs.append((remote / plain, plain, remote))
        ratio, plain, remote = sorted(pairs)[1]
        _, grid_of_run = federated
        recorded = (loop.round_metrics["comm/bytes_down"] + loop.round_metrics["comm/bytes_up"]) * (1 + ROUNDS)
        wire = bytes_of_weights(grid_of_run.log) / recorded
        print(f"| {name} | {plain * 1e3:.1f} ms | {remote * 1e3:.1f} ms | {ratio:.2f} | {wire:.3f} × | 1 |")


def bytes_of_weights(messages: Iterable[Any]) -> int:
    """Add up the bytes of the arrays in all messages with weights."""
    size = 0
    for message in messages:
        record = message.content.array_records["fl_lightning"]
        if "weights" in record:
            size += sum(len(part.data) for part in record.values())
    return size


def superlink() -> None:
    """Print the seconds of a round of the example, and the CPU seconds of a message beside plain Flower and torch."""
    with tempfile.TemporaryDirectory() as name, Deployment(Path(name)) as link:
        start_nodes(link)
        print(f"{seconds_of_round(link):.1f} s a round of one exchange with two nodes")
        # One message more asks each node who it is.
        messages = 2 * (ROUNDS_OVER_LINK + 1)
        print(f"{spent_by_apps(link) / messages:.1f} CPU s of a client app's process for a message")
        plain = spent_by_plain_apps(link, torchvision="false")
        print(f"{plain:.1f} CPU s of an app of Flower and torch")
        with_torchvision = spent_by_plain_apps(link, torchvision="true")
        print(f"{with_torchvision:.1f} CPU s of an app of Flower and torch with torchvision")


def start_nodes(link: Deployment) -> None:
    """Split the samples of the example, and start its two nodes."""
    parties = link.folder / "parties"
    command = [sys.executable, "-m", "fl_lightning", "split", "-c", EXAMPLE / "federation.yaml", "--output", parties]
    subprocess.run([str(word) for word in command], env=link.environment, cwd=link.folder, check=True)
    for i in range(2):
        link.register(f"node_{i}")
        link.start_node(f"node_{i}", parties / f"client_{i}" / "data.yaml")


def seconds_of_round(link: Deployment) -> float:
    """Run the example, and return the median of the seconds between the ends of its rounds."""
    root = link.folder / "runs"
    arguments = [
        f"--trainer.max_epochs {ROUNDS_OVER_LINK}",
        "--model.evaluate_clients_every 100",
        f"--trainer.default_root_dir {root}",
    ]
    server_data = link.folder / "parties/server/data.yaml"
    run = link.start("run", "flwr", link.command(arguments=" ".join(arguments), server_data=server_data))
    times = []
    while run.poll() is None:
        files = list(root.rglob("metrics.csv"))
        if files and len(list(csv.DictReader(files[0].open()))) > len(times):
            times.append(time.monotonic())
        time.sleep(0.05)
    rounds = sorted(after - before for before, after in pairwise(times))
    return rounds[len(rounds) // 2]


def spent_by_plain_apps(link: Deployment, torchvision: str) -> float:
    """Return the CPU seconds of a message by the same work without this package.

    Args:
        link: The deployment.
        torchvision: Whether the app imports torchvision, `true` or `false`.
    """
    before = spent_by_apps(link)
    settings = ["--run-config", f"rounds={ROUNDS_OVER_LINK}", "--run-config", f"torchvision={torchvision}"]
    link.flwr(["run", PLAIN, "here", "--stream", *settings], timeout=600)
    return (spent_by_apps(link) - before) / (2 * ROUNDS_OVER_LINK)


def spent_by_apps(link: Deployment) -> float:
    """Return the CPU seconds of all client apps' processes that have ended."""
    seconds = 0.0
    for i in range(2):
        node = psutil.Process(link.processes[f"node_{i}"].pid)
        # The node's children reap the client apps.
        for process in node.children(recursive=True):
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
"""The work of an app after its imports, up to its first step."""


def imports() -> None:
    """Print the CPU seconds of imports and a first step, of fl_lightning's apps and of Flower and torch alone."""
    apps = {"fl_lightning": "import fl_lightning.flower.apps", "Flower and torch": "import flwr.clientapp"}
    seconds: dict[str, list[float]] = {name: [] for name in apps}
    for _ in range(3):
        for name, line in apps.items():
            before = cpu_seconds_of_children()
            subprocess.run([sys.executable, "-c", f"{line}\n{STEP}"], check=True)
            seconds[name].append(cpu_seconds_of_children() - before)
    for name, found in seconds.items():
        median = sorted(found)[1]
        print(f"{median:.1f} CPU s of {name}: imports and a first step, median of 3 by turns")


if __name__ == "__main__":
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    if "--superlink" in sys.argv:
        superlink()
    elif "--imports" in sys.argv:
        imports()
    else:
        grid()
