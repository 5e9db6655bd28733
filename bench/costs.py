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
from bench.workloads import CLASSES, WORKLOADS, Workload
from fl_lightning.client.store import ClientStore
from fl_lightning.data import TensorSource
from tools.measure_methods import Entry, entries
from tools.measurement_runs import LOCAL_SGD
from tools.quiet import silent

COLUMNS = ("method", "s_per_round", "ratio_to_fedavg", "ratio_low", "ratio_high", "mb_down", "mb_up", "peak_mb")
Row = tuple[str, *tuple[float, ...]]
SIZES: dict[str, dict[str, int]] = {
    "tiny": {"rounds": 25, "unmeasured": 5},
    "cnn": {"rounds": 5, "unmeasured": 2, "num_clients": 2, "cohort_size": 2, "client_samples": 100, "local_epochs": 1},
}
"""The workloads with fewer of the same steps, for forty methods. What a client keeps is made in the first rounds."""
NEIGHBOURS = 4
"""Methods that are compared with the same FedAvg, fitted just before them."""
SHARED = 100
"""Samples of the proxy, transfer and shared sets."""
MB = 2**20


class Cost(NamedTuple):
    """Seconds of each measured round, MB sent down and up in the last, MB that the fit needed at most beyond before."""

    seconds: list[float]
    down: float
    up: float
    peak: float


def cost(entry: Entry, work: Workload) -> Cost:
    """Fit a method on a workload."""
    x, y = work.samples()[1]
    shared = TensorSource((x[:SHARED], y[:SHARED]), (x, y), num_classes=CLASSES)
    data = clients_data(work, proxy=shared, transfer=shared, shared=shared)
    federation = entry.federation
    if federation.optimizer is LOCAL_SGD:
        federation = replace(federation, optimizer=work.optimizer)
    loop = federation.around_net(NETS[work.name], local_epochs=work.local_epochs)
    before = resident(reset=True)
    clock, _ = fit(loop, data, work.rounds, limit_val_batches=0, **BARE)
    peak = (resident(peak=True) - before) / MB
    times = [end[0] - begin[0] for begin, end in pairwise(clock[work.unmeasured :])]
    sent = [loop.round_metrics[f"comm/bytes_{way}"] / MB for way in ("down", "up")]
    return Cost(times, sent[0], sent[1], peak)


def resident(reset: bool = False, peak: bool = False) -> int:
    """Bytes of memory of this process, or the most since `reset` (on Linux; elsewhere what it has now)."""
    status = Path("/proc/self/status")
    if reset:
        gc.collect()
        if status.exists():
            ctypes.CDLL(None).malloc_trim(0)
            Path("/proc/self/clear_refs").write_text("5")  # forgets the peak
    if peak and status.exists():
        found = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(found.split()[1]) * 1024
    return int(psutil.Process().memory_info().rss)


def measure(name: str, repeats: int) -> Iterator[Row]:
    """Rows under `COLUMNS` for one workload: every method beside the FedAvg before it and its neighbours.

    Methods that refuse the workload's net are left out.
    """
    work = replace(WORKLOADS[name], **SIZES[name])  # type: ignore[arg-type]
    found = entries()
    with silent():
        cost(found[0], work)  # warms up
        bases: list[Cost] = []
        for k, entry in enumerate(found):
            if k % NEIGHBOURS == 0:
                bases = [cost(found[0], work) for _ in range(repeats)]
            try:
                pairs = [(base, cost(entry, work)) for base in bases]
            except ValueError:  # FedAlign on a net without a last block
                continue
            yield row(entry.name, pairs)


def row(name: str, pairs: list[tuple[Cost, Cost]]) -> Row:
    """Make a method's row of its costs beside FedAvg's in each turn: medians, and the quartiles of the ratio.

    The ratio is that of every round of the method to the FedAvg round of the same number and turn.
    """
    ratios = [mine / its for base, own in pairs for mine, its in zip(own.seconds, base.seconds, strict=True)]
    low, middle, high = quantiles(ratios, n=4, method="inclusive")
    seconds = median(second for _, own in pairs for second in own.seconds)
    rest = zip(*((own.down, own.up, own.peak) for _, own in pairs), strict=True)
    return name, seconds, middle, low, high, *(median(values) for values in rest)


class Memory(Callback):
    """Resident MB after every round."""

    def __init__(self) -> None:
        self.mb: list[float] = []

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.mb.append(resident() / MB)


def stateful(num_clients: int, rounds: int, budget_mb: float = 1.0) -> list[tuple[str, float, float]]:
    """SCAFFOLD with a store of `budget_mb`: rows (clients and round, MB, MB of all records), at four rounds."""
    tiny = WORKLOADS["tiny"]
    work = replace(tiny, rounds=rounds, num_clients=num_clients, client_samples=1)
    scaffold = next(entry for entry in entries() if entry.name == "SCAFFOLD").federation
    watch = Memory()
    with silent(), TemporaryDirectory() as folder:
        store = ClientStore(budget_mb, folder)
        loop = scaffold.around_net(NETS["tiny"], store=store)
        fit(loop, clients_data(work), rounds, watch, limit_val_batches=0, **BARE)
        kept = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file()) / MB
    places = [rounds // 4 * i for i in (1, 2, 3)] + [rounds]
    return [(f"{num_clients}, {at}", watch.mb[at - 1], kept) for at in places]
