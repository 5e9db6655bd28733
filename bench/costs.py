"""Costs of each method's round beside FedAvg's: time, bytes, memory; and a stateful method's memory over its rounds."""

import ctypes
import gc
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import psutil
from pytorch_lightning import Callback, LightningModule, Trainer
from torch.optim import SGD

from bench.federated import BARE, NETS, clients_data, fit
from bench.workloads import CLASSES, WORKLOADS, Workload
from fl_lightning.cli.methods import Entry, entries
from fl_lightning.cli.trials import LOCAL_SGD, silent
from fl_lightning.client.store import ClientStore
from fl_lightning.data import TensorSource

COLUMNS = ("method", "s_per_round", "ratio_to_fedavg", "mb_down", "mb_up", "peak_mb")
SIZES: dict[str, dict[str, int]] = {
    "tiny": {"rounds": 25, "unmeasured": 5},
    "cnn": {"rounds": 3, "unmeasured": 1, "cohort_size": 2, "local_epochs": 1},
}
"""The workloads, made small enough for forty methods. A later round is dearer where the first keeps something."""
SHARED = 100
"""Samples of the proxy, transfer and shared sets."""
MB = 2**20


def cost(entry: Entry, work: Workload) -> tuple[float, float, float, float]:
    """Seconds of a round, MB sent down and up in the last, and MB that the fit needed at most beyond those before."""
    x, y = work.samples()[1]
    shared = TensorSource((x[:SHARED], y[:SHARED]), (x, y), num_classes=CLASSES)
    data = clients_data(work, proxy=shared, transfer=shared, shared=shared)
    federation = entry.federation
    if federation.optimizer is LOCAL_SGD:
        sgd = partial(SGD, lr=work.lr, momentum=work.momentum, weight_decay=work.weight_decay)
        federation = replace(federation, optimizer=sgd)
    loop = federation.around_net(NETS[work.name], local_epochs=work.local_epochs)
    before = resident(reset=True)
    clock, _ = fit(loop, data, work.rounds, limit_val_batches=0, **BARE)
    peak = (resident(peak=True) - before) / MB
    times = [end[0] - begin[0] for begin, end in pairwise(clock[work.unmeasured :])]
    sent = [loop.round_metrics[f"comm/bytes_{way}"] / MB for way in ("down", "up")]
    return median(times), sent[0], sent[1], peak


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


def measure(name: str, repeats: int) -> list[tuple[str, *tuple[float, ...]]]:
    """Rows under `COLUMNS` for one workload: every method beside a FedAvg of its own, in turn, medians.

    Methods that refuse the workload's net are left out.
    """
    work = replace(WORKLOADS[name], **SIZES[name])  # type: ignore[arg-type]
    found = entries()
    rows: list[tuple[str, *tuple[float, ...]]] = []
    with silent():
        cost(found[0], work)  # warms up
        for entry in found:
            try:
                pairs = [(cost(found[0], work), cost(entry, work)) for _ in range(repeats)]
            except ValueError:  # FedAlign on a net without a last block
                continue
            ratio = median(own[0] / base[0] for base, own in pairs)
            rows.append((entry.name, *_medians(pairs, ratio)))
    return rows


def _medians(pairs: list[tuple[tuple[float, ...], tuple[float, ...]]], ratio: float) -> tuple[float, ...]:
    seconds, *rest = (median(values) for values in zip(*(own for _, own in pairs), strict=True))
    return seconds, ratio, *rest


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
