"""Rounds and blocks of them: one variant at a time, each in a process of its own that waits while the others run."""

import logging
import os
import pty
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout, suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from statistics import median, quantiles

import psutil
import torch

from bench.workloads import Workload

USUAL = ("train", "train-cohort", "all", "all-cohort", "empty")
"""Variants that are measured where none is asked for."""
PEERS = {"FedLab": "peer_fedlab", "fluke": "peer_fluke"}
"""Other simulators, by the module that runs one."""
MODULES = {"floor": "floor"} | dict.fromkeys(USUAL, "federated") | PEERS
"""Module of each variant: the floor's process never imports Lightning."""


@dataclass(frozen=True)
class Block:
    """Result of one block of rounds, or of one round.

    Args:
        seconds: per round, by the wall clock.
        cpu: seconds per round of CPU of this process.
        others: share of the machine that other processes took meanwhile.
        accuracy: of the global model after the last round; NaN where none is trained.
        peak_rss_mb: largest resident memory of the process so far.
    """

    seconds: float
    cpu: float
    others: float
    accuracy: float
    peak_rss_mb: float


def run_block(work: Workload, variant: str, terminal: str = os.devnull) -> Block:
    """Run a block of `variant` from the first weights on, in this process."""
    run = import_module(f"bench.{MODULES[variant]}").VARIANTS[variant]
    with open(terminal, "w", encoding="utf-8") as screen, redirect_stdout(screen), quiet():
        before = machine()
        readings, accuracy = run(work)
        after = machine()
    first = readings[work.unmeasured]
    last = readings[-1]
    rounds = len(readings) - 1 - work.unmeasured
    seconds, cpu = ((end - begin) / rounds for begin, end in zip(first, last, strict=True))
    return replace(block_between(before, after, accuracy), seconds=seconds, cpu=cpu)


def block_between(before: tuple[float, float, float], after: tuple[float, float, float], accuracy: float) -> Block:
    """Make the result of one round, or of all between two readings of `machine`."""
    wall, busy, own = (b - a for a, b in zip(before, after, strict=True))
    others = max(0.0, busy - own) / (wall * (os.cpu_count() or 1))
    return Block(wall, own, others, accuracy, peak_rss_mb())


def machine() -> tuple[float, float, float]:
    """Wall clock, busy CPU seconds of the whole machine, and those of this process."""
    cpu = psutil.cpu_times()
    ignored = (getattr(cpu, name, 0.0) for name in ("idle", "iowait", "guest", "guest_nice"))
    return time.perf_counter(), sum(cpu) - sum(ignored), time.process_time()


def peak_rss_mb() -> float:
    """VmHWM where there is one: `ru_maxrss` of a child can be that of the process which started it."""
    status = Path("/proc/self/status")
    if status.is_file():
        fields = dict(line.split(":", 1) for line in status.read_text().splitlines())
        return int(fields["VmHWM"].split()[0]) / 1024
    return getrusage(RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 1024)


@contextmanager
def quiet() -> Iterator[None]:
    """Lightning's remarks about the machine and about settings would only be in the way."""
    logger = logging.getLogger("pytorch_lightning")
    level = logger.level
    logger.setLevel(logging.ERROR)
    with warnings.catch_warnings(action="ignore"):
        yield
    logger.setLevel(level)


# --- processes -------------------------------------------------------------------------------------


def serve(connection: Connection, work: Workload, variant: str, threads: int | None, terminal: str) -> None:
    """Run a block, or a round where rounds are long, for every message, until None comes."""
    if threads is not None:
        torch.set_num_threads(threads)
    import_module(f"bench.{MODULES[variant]}")  # while the other processes do so, too
    if not work.short:
        with suppress(NoMoreRoundsError):
            run_block(replace(work, pause=partial(end_round, connection, [])), variant, terminal)
        return
    while connection.recv() is not None:
        connection.send(run_block(work, variant, terminal))


class NoMoreRoundsError(Exception):
    """No further round is asked for."""


def end_round(connection: Connection, begun: list[tuple[float, float, float]], accuracy: float) -> None:
    """Send what the round took that began last, and wait until the next is asked for.

    Args:
        connection: to the process that asks.
        begun: `machine()` at its begin; empty before the first one.
        accuracy: after the round.

    Raises:
        NoMoreRoundsError: none is asked for.
    """
    if begun:
        connection.send(block_between(begun.pop(), machine(), accuracy))
    if connection.recv() is None:
        raise NoMoreRoundsError
    begun.append(machine())


def drain(terminal: int) -> None:
    """Read what is written to the terminal, as a screen would."""
    with suppress(OSError):
        while os.read(terminal, 65536):
            pass


@contextmanager
def worker(work: Workload, variant: str, threads: int | None) -> Iterator[Callable[[], Block]]:
    """A process of its own that runs one block per call."""
    spawn = get_context("spawn")
    here, there = spawn.Pipe()
    screen, terminal = pty.openpty()
    threading.Thread(target=drain, args=(screen,), daemon=True).start()
    arguments = (there, work, variant, threads, os.ttyname(terminal))
    process = spawn.Process(target=serve, args=arguments, daemon=True)
    process.start()
    there.close()

    def block() -> Block:
        here.send(work.name)
        found: Block = here.recv()
        return found

    try:
        yield block
    finally:
        with suppress(OSError):
            here.send(None)
        process.join()
        os.close(terminal)


def interleaved(work: Workload, variants: list[str], threads: int | None) -> dict[str, list[Block]]:
    """Blocks of the floor and of the variants in turn (floor, A, B, floor, A, B), each in its own process.

    The first block of each, or its first rounds where rounds are measured, warm it up and do not count.
    """
    names = ["floor", *variants]
    begin = time.perf_counter()
    with ExitStack() as stack:
        run = {name: stack.enter_context(worker(work, name, threads)) for name in names}
        for block in list(run.values()) * (1 if work.short else work.unmeasured):
            block()
        return in_turn(replace(work, seconds=work.seconds - (time.perf_counter() - begin)), run)


def in_one_process(work: Workload, variants: list[str]) -> dict[str, list[Block]]:
    """Time the blocks within this process: faster to start, but the memory includes that of all earlier blocks."""
    return in_turn(work, {name: partial(run_block, work, name) for name in ["floor", *variants]})


def turns(most: int, seconds: float) -> Iterator[int]:
    """Count turns: `most` of them, or as many as are done within `seconds`, whatever the noise; at least one."""
    begin = time.perf_counter()
    for turn in range(most):
        yield turn
        spent = time.perf_counter() - begin
        if spent + spent / (turn + 1) > seconds:
            return


def in_turn(work: Workload, run: dict[str, Callable[[], Block]]) -> dict[str, list[Block]]:
    blocks: dict[str, list[Block]] = {name: [] for name in run}
    for _ in turns(work.repeats, work.seconds):
        for name, block in run.items():
            blocks[name].append(block())
    return blocks


# --- figures ---------------------------------------------------------------------------------------

NOISE = 0.05
"""Share of the machine that others may take: a block with more is left out as long as quiet ones remain."""


@dataclass(frozen=True)
class Figures:
    """One row of the table.

    Args:
        workload: its name.
        variant: its name.
        s_per_round: median over the blocks.
        floor_s_per_round: median over the floor's blocks beside them.
        ratio: median of the ratios of neighbouring blocks.
        low: lower quartile of these ratios.
        high: upper quartile.
        cpu_ratio: the same ratio in CPU seconds: says more than `ratio` on a busy machine, for one thread.
        cpu_low: lower quartile of that.
        cpu_high: upper quartile.
        peak_rss_mb: of the variant's process.
        quiet: blocks that were not disturbed.
        blocks: all blocks.
    """

    workload: str
    variant: str
    s_per_round: float
    floor_s_per_round: float
    ratio: float
    low: float
    high: float
    cpu_ratio: float
    cpu_low: float
    cpu_high: float
    peak_rss_mb: float
    quiet: int
    blocks: int


def quartiles(values: list[float]) -> tuple[float, float, float]:
    """Lower quartile, median and upper quartile, of one value too."""
    low, middle, high = quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    return low, middle, high


def figures(work: Workload, variant: str, floor: list[Block], blocks: list[Block]) -> Figures:
    """Compare a variant's blocks with the floor's that ran before each of them."""
    pairs = list(zip(floor, blocks, strict=True))
    quiet = [pair for pair in pairs if all(block.others <= NOISE for block in pair)]
    used = quiet or pairs
    low, ratio, high = quartiles([own.seconds / base.seconds for base, own in used])
    cpu_low, cpu_ratio, cpu_high = quartiles([own.cpu / base.cpu for base, own in used])
    return Figures(
        workload=work.name,
        variant=variant,
        s_per_round=median(own.seconds for _, own in used),
        floor_s_per_round=median(base.seconds for base, _ in used),
        ratio=ratio,
        low=low,
        high=high,
        cpu_ratio=cpu_ratio,
        cpu_low=cpu_low,
        cpu_high=cpu_high,
        peak_rss_mb=blocks[-1].peak_rss_mb,
        quiet=len(quiet),
        blocks=len(pairs),
    )
