"""Costs of each method's round beside FedAvg's: time, bytes, memory; and a stateful method's memory over its rounds."""

import ctypes
import gc
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles
from tempfile import TemporaryDirectory
from typing import NamedTuple

import psutil
from pytorch_lightning import Callback, LightningModule, Trainer

from bench.federated import BARE, NETS, clients_data, fit
from bench.tables import Row
from bench.workloads import CLASSES, WORKLOADS, Workload
from fl_lightning.client.store import ClientStore
from fl_lightning.data import TensorSource
from tools.measure_methods import Entry, entries
from tools.measurement_runs import LOCAL_SGD
from tools.quiet import silent

COLUMNS = ("method", "s_per_round", "ratio_to_fedavg", "ratio_low", "ratio_high", "mb_down", "mb_up", "peak_mb")
SIZES: dict[str, dict[str, int]] = {
    "tiny": {"rounds": 25, "unmeasured": 5},
    "cnn": {"rounds": 5, "unmeasured": 2, "num_clients": 2, "cohort_size": 2, "client_samples": 100, "local_epochs": 1},
}
"""Workloads with fewer of the same steps, for forty methods. The first rounds make what a client keeps."""

NEIGHBOURS = 4
"""Number of methods that are compared with the same FedAvg, which is fitted just before them."""

SHARED = 100
"""Number of samples of the proxy, transfer and shared sets."""

MB = 2**20

STATUS = Path("/proc/self/status")
"""File of Linux about this process."""


class Cost(NamedTuple):
    """Has the costs of a fit.

    Args:
        seconds: Seconds of each measured round.
        down: MB sent down in the last round.
        up: MB sent up in the last round.
        peak: Largest memory of the fit in MB, beyond that before it.
    """

    seconds: list[float]
    down: float
    up: float
    peak: float


def cost(entry: Entry, work: Workload) -> Cost:
    """Fit a method on a workload.

    Args:
        entry: The method.
        work: The workload.
    """
    _, (x, y) = work.samples()
    shared = TensorSource((x[:SHARED], y[:SHARED]), (x, y), num_classes=CLASSES)
    data = clients_data(work, proxy=shared, transfer=shared, shared=shared)
    federation = entry.federation
    if federation.optimizer is LOCAL_SGD:
        federation = replace(federation, optimizer=work.optimizer)
    loop = federation.around_net(NETS[work.name], local_epochs=work.local_epochs)
    before = release_and_read()
    readings, _ = fit(loop, data, work.rounds, limit_val_batches=0, **BARE)
    return Cost(
        seconds=[end.wall - begin.wall for begin, end in pairwise(readings[work.unmeasured :])],
        down=loop.round_metrics["comm/bytes_down"] / MB,
        up=loop.round_metrics["comm/bytes_up"] / MB,
        peak=(most_resident() - before) / MB,
    )


def resident() -> int:
    """Return the bytes of memory of this process."""
    return int(psutil.Process().memory_info().rss)


def release_and_read() -> int:
    """Give unused memory back, forget the peak so far on Linux, and return the bytes of memory of this process."""
    gc.collect()
    if STATUS.exists():
        ctypes.CDLL(None).malloc_trim(0)
        # The kernel forgets the peak.
        Path("/proc/self/clear_refs").write_text("5")
    return resident()


def most_resident() -> int:
    """Return the largest bytes of memory since `release_and_read`. Without Linux it is the present memory."""
    if not STATUS.exists():
        return resident()
    peak = next(line for line in STATUS.read_text().splitlines() if line.startswith("VmHWM"))
    _, kilobytes, _ = peak.split()
    return int(kilobytes) * 1024


def measure(name: str, repeats: int) -> Iterator[Row]:
    """Yield rows under `COLUMNS` for one workload: every method beside the FedAvg before it and its neighbors.

    A method that refuses the workload's net is left out.

    Args:
        name: Name of the workload.
        repeats: Number of fits of each method.
    """
    work = replace(WORKLOADS[name], **SIZES[name])  # type: ignore[arg-type]
    found = entries()
    fedavg = found[0]
    with silent():
        # The first fit warms up.
        cost(fedavg, work)
        bases: list[Cost] = []
        for number, entry in enumerate(found):
            if number % NEIGHBOURS == 0:
                bases = [cost(fedavg, work) for _ in range(repeats)]
            try:
                pairs = [(base, cost(entry, work)) for base in bases]
            except ValueError:
                # FedAlign refuses a net without a last block.
                continue
            yield row(entry.name, pairs)


def row(name: str, pairs: list[tuple[Cost, Cost]]) -> Row:
    """Make a method's row: medians, and the quartiles of the ratio.

    The ratio is that of every round of the method to the FedAvg round of the same number and turn.

    Args:
        name: Name of the method.
        pairs: Costs of FedAvg and of the method in each turn.
    """
    ratios: list[float] = []
    seconds: list[float] = []
    for base, own in pairs:
        ratios += [mine / its for mine, its in zip(own.seconds, base.seconds, strict=True)]
        seconds += own.seconds
    low, middle, high = quantiles(ratios, n=4, method="inclusive")
    return (
        name,
        median(seconds),
        middle,
        low,
        high,
        median(own.down for _, own in pairs),
        median(own.up for _, own in pairs),
        median(own.peak for _, own in pairs),
    )


class Memory(Callback):
    """Reads the resident MB after every round."""

    def __init__(self) -> None:
        self.mb: list[float] = []

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.mb.append(resident() / MB)


def stateful(num_clients: int, rounds: int, budget_mb: float = 1.0) -> list[tuple[str, float, float]]:
    """Fit SCAFFOLD with a store, and read its memory at four rounds.

    Args:
        num_clients: Number of clients.
        rounds: Number of rounds, ≥ 4.
        budget_mb: Megabytes of records that the store keeps in memory.

    Returns:
        Rows of clients and round, resident MB, and MB of all records.
    """
    tiny = WORKLOADS["tiny"]
    work = replace(tiny, rounds=rounds, num_clients=num_clients, client_samples=1)
    scaffold = next(entry for entry in entries() if entry.name == "SCAFFOLD")
    watch = Memory()
    with silent(), TemporaryDirectory() as folder:
        store = ClientStore(budget_mb, folder)
        loop = scaffold.federation.around_net(NETS["tiny"], store=store)
        fit(loop, clients_data(work), rounds, callbacks=[watch], limit_val_batches=0, **BARE)
        sizes = [path.stat().st_size for path in Path(folder).rglob("*") if path.is_file()]
    records_mb = sum(sizes) / MB
    quarter = rounds // 4
    places = (quarter, 2 * quarter, 3 * quarter, rounds)
    return [(f"{num_clients}, {place}", watch.mb[place - 1], records_mb) for place in places]
