"""A GPU's round: `python -m bench.gpu [--device cuda] [--size cnn] [--seconds 510]`, or `make bench-gpu`.

Seconds per client and step, on tensors that lie on the device, of

- `bare`: a loop in plain PyTorch, one client after the other; the ratios are to it;
- `package`, `package-stacked`: a federated fit, one by one and with `model.chunk: K`;
- `stacked`: all clients at once by `vmap`, which groups their convolutions;
- `graph`, `stacked-graph`: the same steps as a CUDA graph;

for 1, 5, 10 and 50 clients in float32, tf32 and bf16-mixed. What the time allows is measured, 10 clients first.
Besides: synchronisations of the host per round, launches per step, and FLOP/s, also over those of a large product.
"""

import csv
import time
import warnings
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

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
    *("device", "precision", "variant", "clients", "s_per_step", "ratio", "syncs_per_round", "launches_per_step"),
    *("tflops", "share_of_limit"),
)
PRECISIONS = {"fp32": "32-true", "tf32": "32-true", "bf16-mixed": "bf16-mixed"}
CLIENTS = (10, 1, 50, 5)
LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch", "cudaMemcpyAsync", "cudaMemsetAsync")
"""How the calls begin that hand work to the device; CUDA's versions add to some of the names."""


class Rounds(Callback):
    """Times the rounds of a fit after the first ones, and counts synchronisations in the last."""

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
    """Context that counts the operations which let the host wait for the device, and keeps the place of each."""

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
        waits = (one for one in self._found or () if "synchroniz" in str(one.message))
        self.places = tuple(f"{one.filename}:{one.lineno}" for one in waits)

    @property
    def number(self) -> int:
        """How many there were."""
        return len(self.places)


def package(case: Case, chunk: int) -> tuple[float, float]:
    """Seconds of a round of a federated fit, and synchronisations in one."""
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
        **BARE,  # type: ignore[arg-type]
    )
    loop = FederatedLoop(FedAvg(module=plain_module(case.work)), local_epochs=case.work.local_epochs, chunk=chunk)
    with quiet():
        trainer.fit(loop, datamodule=clients_data(case.work))
    return min(timer.seconds[case.work.unmeasured :] or timer.seconds), timer.syncs


# --- measures -----------------------------------------------------------------------------------------------------


def wait(device: torch.device) -> None:
    """Let the host wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def seconds_of(run: Round, device: torch.device, repeats: int = 3) -> float:
    """The shortest of some runs, after one that warms up."""
    taken = []
    for _ in range(1 + repeats):
        wait(device)
        began = time.perf_counter()
        run()
        wait(device)
        taken.append(time.perf_counter() - began)
    return min(taken[1:])


def launches_of(run: Round, device: torch.device) -> float:
    """What a round hands to the device: kernels, copies and graphs; NaN on a CPU."""
    if device.type != "cuda":
        return float("nan")
    run()  # what the first round alone does
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        run()
        wait(device)
    return float(sum(one.count for one in found.key_averages() if one.key.startswith(LAUNCHES)))


def flop_of_step(case: Case) -> float:
    """Floating-point operations of a client's step, forward and backward."""
    net = case.work.first_net()
    size = case.work.batch_size
    (x, y), _ = case.work.samples()
    with FlopCounterMode(display=False) as counter:
        F.cross_entropy(net(x[:size]), y[:size]).backward()
    return float(counter.get_total_flops())


def limit(case: Case) -> float:
    """FLOP/s of a large product in the precision."""
    n = 8192 if case.device.type == "cuda" else 256
    dtype = torch.bfloat16 if case.precision == "bf16-mixed" else torch.float32
    a, b = (torch.randn(n, n, device=case.device, dtype=dtype) for _ in range(2))
    return 2 * n**3 / seconds_of(lambda: torch.mm(a, b), case.device)


def variants(case: Case) -> Iterator[tuple[str, Callable[[], tuple[float, float, float]]]]:
    """Yield each variant with what measures it: seconds, synchronisations and launches of a round."""
    once = replace(case, work=replace(case.work, local_epochs=1))  # a trace of all epochs takes longer than the rounds

    def by(make: Callable[[Case], Round]) -> Callable[[], tuple[float, float, float]]:
        def measured() -> tuple[float, float, float]:
            run = make(case)
            seconds = seconds_of(run, case.device)
            with Syncs(case.device) as seen:
                run()
            return seconds, seen.number, launches_of(make(once), case.device) * case.steps / once.steps

        return measured

    yield "bare", by(bare)
    yield "package", lambda: (*package(case, 1), float("nan"))
    yield "stacked", by(stacked)
    yield "package-stacked", lambda: (*package(case, max(2, case.work.cohort_size)), float("nan"))
    if case.device.type == "cuda":
        yield "graph", by(graphed)
        yield "stacked-graph", by(partial(stacked, graph=True))


def rows(device: torch.device, size: str, seconds: float, clients: Sequence[int] = CLIENTS) -> Iterator[list[str]]:
    """Measure as many rows as the time allows."""
    deadline = time.monotonic() + seconds
    named = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    for number in clients:
        for precision in PRECISIONS:
            torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision == "tf32"
            case = Case(replace(SIZES[size], cohort_size=number), device, precision)
            steps = number * case.steps
            flop = flop_of_step(case)
            most = limit(case)
            base = float("nan")
            for variant, measure in variants(case):
                if time.monotonic() > deadline:
                    return
                try:
                    taken, syncs, launches = measure()
                except RuntimeError as error:  # out of memory, or what a graph cannot hold
                    print(f"{precision} {variant} {number}: {str(error).splitlines()[0]}", flush=True)
                    continue
                base = taken if variant == "bare" else base
                speed = flop * steps / taken
                measures = (taken / steps, taken / base, syncs, launches / steps, speed / 1e12, speed / most)
                yield [named, precision, variant, str(number), *(f"{value:.6g}" for value in measures)]


def main(arguments: Sequence[str] | None = None) -> None:
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
        for row in rows(device, asked.size, asked.seconds, asked.clients):
            print(",".join(row), flush=True)
            writer.writerow(row)
            file.flush()


if __name__ == "__main__":
    main()
