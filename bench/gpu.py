"""A GPU's round: `python -m bench.gpu [--device cuda] [--size cnn] [--seconds 510]`, or `make bench-gpu`.

Seconds per client and step, on tensors that lie on the device, of

- `bare`: a loop in plain PyTorch, one client after the other; the ratios are to it;
- `package`, `package-stacked`: a federated fit, one by one and with `model.chunk: K`;
- `stacked`: all clients at once by `vmap`, which groups their convolutions;
- `graph`, `stacked-graph`: the same steps as a CUDA graph;

for 1, 5, 10 and 50 clients in float32, tf32 and bf16-mixed. What the time allows is measured, 10 clients first.
Further columns: synchronizations of the host per round, launches per step, and FLOP/s, also as a share of a large
product's.
"""

import csv
import math
import time
import warnings
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from bench.blocks import quiet
from bench.federated import BARE, clients_data
from bench.methods import plain_module
from bench.ways import SIZES, Case, Round, bare, graphed, stacked
from fl_lightning import FederatedLoop
from fl_lightning.methods import FedAvg

RESULTS = Path(__file__).parent / "results" / "gpu.csv"
COLUMNS = (
    "device",
    "precision",
    "variant",
    "clients",
    "s_per_step",
    "ratio",
    "syncs_per_round",
    "launches_per_step",
    "tflops",
    "share_of_limit",
)
PRECISIONS = {"fp32": "32-true", "tf32": "32-true", "bf16-mixed": "bf16-mixed"}
"""Precisions of the Trainer, by the names in the table."""

CLIENTS = (10, 1, 50, 5)
"""Numbers of clients in a round, in the order in which they are measured."""

LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch", "cudaMemcpyAsync", "cudaMemsetAsync")
"""Beginnings of the names of calls that hand work to the device. Versions of CUDA add to some of the names."""


class Measured(NamedTuple):
    """Has the measurements of a round.

    Args:
        seconds: Seconds of the round.
        syncs: Number of times that the host waits for the device.
        launches: Number of kernels, copies and graphs that are handed to the device. NaN: it is not known.
    """

    seconds: float
    syncs: float
    launches: float


class Rounds(Callback):
    """Times the rounds of a fit, and counts synchronizations in the last round.

    Args:
        case: The clients, and what trains them.
    """

    def __init__(self, case: Case) -> None:
        self.case = case
        self.seconds = list[float]()
        self.syncs = 0.0
        self._seen: Any = nullcontext()

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.current_epoch == self.case.work.rounds - 1:
            self._seen = Syncs(self.case.device)
            self._seen.__enter__()
        wait(self.case.device)
        self._began = time.perf_counter()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        wait(self.case.device)
        if trainer.current_epoch < self.case.work.rounds - 1:
            self.seconds.append(time.perf_counter() - self._began)
            return
        self._seen.__exit__(None, None, None)
        self.syncs = self._seen.number


class Syncs:
    """Counts the operations in a context that let the host wait for the device, and keeps the place of each.

    Args:
        device: The device. On a CPU there are no such operations.

    Attributes:
        places: File and line of each operation, after the context.
    """

    places: tuple[str, ...] = ()

    def __init__(self, device: torch.device) -> None:
        self._on = device.type == "cuda"
        self._warnings = warnings.catch_warnings(record=True)

    def __enter__(self) -> "Syncs":
        self._found = self._warnings.__enter__()
        warnings.simplefilter("always")
        if self._on:
            torch.cuda.set_sync_debug_mode("warn")
        return self

    def __exit__(self, *error: object) -> None:
        if self._on:
            torch.cuda.set_sync_debug_mode("default")
        self._warnings.__exit__(None, None, None)
        warned = self._found or []
        waits = [warning for warning in warned if "synchroniz" in str(warning.message)]
        self.places = tuple(f"{warning.filename}:{warning.lineno}" for warning in waits)

    @property
    def number(self) -> int:
        """Number of the operations."""
        return len(self.places)


def package(case: Case, chunk: int) -> Measured:
    """Measure a round of a federated fit. Its launches are not known.

    Args:
        case: The clients, and what trains them.
        chunk: Number of clients that are trained at once.
    """
    timer = Rounds(case)
    trainer = Trainer(
        accelerator="cpu" if case.device.type == "cpu" else "gpu",
        devices=1,
        precision=PRECISIONS[case.precision],  # type: ignore[arg-type]
        max_epochs=case.work.rounds,
        limit_val_batches=0,
        num_sanity_val_steps=0,
        enable_model_summary=False,
        callbacks=[timer],
        **BARE,
    )
    client = FedAvg(module=plain_module(case.work))
    loop = FederatedLoop(client, local_epochs=case.work.local_epochs, chunk=chunk)
    with quiet():
        trainer.fit(loop, datamodule=clients_data(case.work))
    counted = timer.seconds[case.work.unmeasured :] or timer.seconds
    return Measured(seconds=min(counted), syncs=timer.syncs, launches=math.nan)


# --- measures -----------------------------------------------------------------------------------------------------


def wait(device: torch.device) -> None:
    """Let the host wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def seconds_of(run: Round, device: torch.device, repeats: int = 3) -> float:
    """Return the seconds of the shortest of some runs, after one that warms up.

    Args:
        run: The run.
        device: Device that does its work.
        repeats: Number of runs.
    """
    taken = []
    for _ in range(1 + repeats):
        wait(device)
        began = time.perf_counter()
        run()
        wait(device)
        taken.append(time.perf_counter() - began)
    return min(taken[1:])


def launches_of(run: Round, device: torch.device) -> float:
    """Count the kernels, copies and graphs that a round hands to the device. NaN on a CPU.

    Args:
        run: Runs the round.
        device: The device.
    """
    if device.type != "cuda":
        return math.nan
    # The first round does more than the others.
    run()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        run()
        wait(device)
    calls = [call.count for call in trace.key_averages() if call.key.startswith(LAUNCHES)]
    return float(sum(calls))


def flop_of_step(case: Case) -> float:
    """Count the floating-point operations of a client's step, forward and backward."""
    net = case.work.first_net()
    size = case.work.batch_size
    (x, y), _ = case.work.samples()
    with FlopCounterMode(display=False) as counter:
        F.cross_entropy(net(x[:size]), y[:size]).backward()
    return float(counter.get_total_flops())


def limit(case: Case) -> float:
    """Measure the FLOP/s of a large product in the precision."""
    size = 8192 if case.device.type == "cuda" else 256
    dtype = torch.bfloat16 if case.precision == "bf16-mixed" else torch.float32
    left = torch.randn((size, size), device=case.device, dtype=dtype)
    right = torch.randn((size, size), device=case.device, dtype=dtype)
    return 2 * size**3 / seconds_of(lambda: torch.mm(left, right), case.device)


def variants(case: Case) -> dict[str, Callable[[], Measured]]:
    """Return functions that measure each variant, by its name."""
    stack = max(2, case.work.cohort_size)
    found: dict[str, Callable[[], Measured]] = {
        "bare": partial(measured, case, bare),
        "package": partial(package, case, chunk=1),
        "stacked": partial(measured, case, stacked),
        "package-stacked": partial(package, case, chunk=stack),
    }
    if case.device.type == "cuda":
        found["graph"] = partial(measured, case, graphed)
        found["stacked-graph"] = partial(measured, case, partial(stacked, graph=True))
    return found


def measured(case: Case, make: Callable[[Case], Round]) -> Measured:
    """Measure a round in plain PyTorch.

    Args:
        case: The clients, and what trains them.
        make: Makes the round.
    """
    run = make(case)
    seconds = seconds_of(run, case.device)
    with Syncs(case.device) as seen:
        run()
    # A trace of all epochs takes longer than the rounds.
    one_epoch = replace(case, work=replace(case.work, local_epochs=1))
    launches = launches_of(make(one_epoch), case.device) * case.steps / one_epoch.steps
    return Measured(seconds=seconds, syncs=seen.number, launches=launches)


def rows(device: torch.device, size: str, *, seconds: float, clients: Sequence[int] = CLIENTS) -> Iterator[list[str]]:
    """Yield as many rows under `COLUMNS` as the time allows.

    Args:
        device: The device.
        size: Name of the workload, of `SIZES`.
        seconds: Seconds after which nothing more is begun.
        clients: Numbers of clients in a round.
    """
    deadline = time.monotonic() + seconds
    for number in clients:
        for precision in PRECISIONS:
            if time.monotonic() > deadline:
                return
            use_tf32(precision == "tf32")
            case = Case(replace(SIZES[size], cohort_size=number), device, precision)
            yield from rows_of(case, deadline)


def use_tf32(allowed: bool) -> None:
    """Allow products in TensorFloat-32, or not."""
    torch.backends.cudnn.allow_tf32 = allowed
    torch.backends.cuda.matmul.allow_tf32 = allowed


def rows_of(case: Case, deadline: float) -> Iterator[list[str]]:
    """Yield a row for each variant that is begun before the deadline.

    Args:
        case: The clients, and what trains them.
        deadline: The end, by the monotonic clock.
    """
    named = torch.cuda.get_device_name() if case.device.type == "cuda" else "cpu"
    number = case.work.cohort_size
    steps = number * case.steps
    flop = flop_of_step(case)
    limit_of_device = limit(case)
    base = math.nan
    for variant, measure in variants(case).items():
        if time.monotonic() > deadline:
            return
        try:
            found = measure()
        except RuntimeError as error:
            # The memory is not enough, or a graph cannot hold the step.
            print(f"{case.precision} {variant} {number}: {str(error).splitlines()[0]}", flush=True)
            continue
        if variant == "bare":
            base = found.seconds
        speed = flop * steps / found.seconds
        values = (
            found.seconds / steps,
            found.seconds / base,
            found.syncs,
            found.launches / steps,
            speed / 1e12,
            speed / limit_of_device,
        )
        cells = [f"{value:.6g}" for value in values]
        yield [named, case.precision, variant, str(number), *cells]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what the command line asks for. None: the arguments of the process."""
    parser = ArgumentParser(prog="python -m bench.gpu", description="Seconds per client and step on a GPU.")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--size", choices=list(SIZES), default="cnn")
    parser.add_argument("--seconds", type=float, default=510.0, help="after which nothing more is begun")
    parser.add_argument("--clients", type=int, nargs="+", default=list(CLIENTS))
    parser.add_argument("--output", type=Path, default=RESULTS)
    asked = parser.parse_args(arguments)
    device = torch.device(asked.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit("bench.gpu needs a GPU, and there is none; try it by --device cpu --size small")
    asked.output.parent.mkdir(parents=True, exist_ok=True)
    print(",".join(COLUMNS))
    with asked.output.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for row in rows(device, asked.size, seconds=asked.seconds, clients=asked.clients):
            print(",".join(row), flush=True)
            writer.writerow(row)
            file.flush()


if __name__ == "__main__":
    main()
