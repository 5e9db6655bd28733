"""Rounds, and blocks of rounds: one variant at a time, each in a process of its own that waits while others run."""

import logging
import os
import pty
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
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
"""Variants that are measured if none is asked for."""

PEERS = {"FedLab": "peer_fedlab", "fluke": "peer_fluke"}
"""Other simulators, with the module that runs each."""

MODULES = {"floor": "floor"} | dict.fromkeys(USUAL, "federated") | PEERS
"""Module of each variant. The floor's process never imports Lightning."""

Machine = tuple[float, float, float]
"""Wall clock, busy CPU seconds of the whole machine, and CPU seconds of this process."""


@dataclass(frozen=True)
class Block:
    """Has the result of one block of rounds, or of one round.

    Args:
        seconds: Seconds per round, by the wall clock.
        cpu: CPU seconds of this process per round.
        others: Share of the machine that other processes took meanwhile, in [0, 1].
        accuracy: Accuracy of the global model after the last round. NaN: no model is trained.
        peak_rss_mb: Largest resident memory of the process so far, in MB.
    """

    seconds: float
    cpu: float
    others: float
    accuracy: float
    peak_rss_mb: float


def run_block(work: Workload, variant: str, terminal: str = os.devnull) -> Block:
    """Run a block of a variant from the first weights on, in this process.

    Args:
        work: The workload.
        variant: Name of the variant.
        terminal: Path that takes what the variant prints.
    """
    run = import_module(f"bench.{MODULES[variant]}").VARIANTS[variant]
    with open(terminal, "w", encoding="utf-8") as screen, redirect_stdout(screen), quiet():
        before = machine()
        readings, accuracy = run(work)
        after = machine()
    rounds = len(readings) - 1 - work.unmeasured
    begin_seconds, begin_cpu = readings[work.unmeasured]
    end_seconds, end_cpu = readings[-1]
    return replace(
        block_between(before, after, accuracy),
        seconds=(end_seconds - begin_seconds) / rounds,
        cpu=(end_cpu - begin_cpu) / rounds,
    )


def block_between(before: Machine, after: Machine, accuracy: float) -> Block:
    """Make the result of one round, or of all rounds between two readings of `machine`."""
    wall, busy, own = (end - begin for begin, end in zip(before, after, strict=True))
    others = max(0.0, busy - own) / (wall * (os.cpu_count() or 1))
    return Block(seconds=wall, cpu=own, others=others, accuracy=accuracy, peak_rss_mb=peak_rss_mb())


def machine() -> Machine:
    """Read the clocks of the machine and of this process."""
    cpu = psutil.cpu_times()
    ignored = [getattr(cpu, name, 0.0) for name in ("idle", "iowait", "guest", "guest_nice")]
    busy = sum(cpu) - sum(ignored)
    return time.perf_counter(), busy, time.process_time()


def peak_rss_mb() -> float:
    """Return the largest resident memory of this process in MB.

    On Linux it is VmHWM, because `ru_maxrss` of a child can be that of the process which started it.
    """
    status = Path("/proc/self/status")
    if status.is_file():
        fields = dict(line.split(":", 1) for line in status.read_text().splitlines())
        return int(fields["VmHWM"].split()[0]) / 1024
    units_of_mb = 2**20 if sys.platform == "darwin" else 1024
    return getrusage(RUSAGE_SELF).ru_maxrss / units_of_mb


@contextmanager
def quiet() -> Iterator[None]:
    """Leave out Lightning's remarks about the machine and about settings."""
    logger = logging.getLogger("pytorch_lightning")
    level = logger.level
    logger.setLevel(logging.ERROR)
    with warnings.catch_warnings(action="ignore"):
        yield
    logger.setLevel(level)


# --- processes -------------------------------------------------------------------------------------


def serve(connection: Connection, *, work: Workload, variant: str, threads: int | None, terminal: str) -> None:
    """Run a block for every message until None comes. If rounds are long, run a round for every message.

    Args:
        connection: Connection to the process that asks.
        work: The workload.
        variant: Name of the variant.
        threads: Number of threads. None: as many as torch takes.
        terminal: Path that takes what the variant prints.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    # The import is done before the first message, while the other processes do theirs.
    import_module(f"bench.{MODULES[variant]}")
    if work.short:
        while connection.recv() is not None:
            connection.send(run_block(work, variant, terminal))
        return
    pause = partial(end_round, connection, [])
    with suppress(NoMoreRoundsError):
        run_block(replace(work, pause=pause), variant, terminal)


class NoMoreRoundsError(Exception):
    """Ends a run, because no further round is asked for."""


def end_round(connection: Connection, begun: list[Machine], accuracy: float) -> None:
    """Send the result of the round that began last, and wait until the next round is asked for.

    Args:
        connection: Connection to the process that asks.
        begun: Reading of `machine` at the beginning of the round, replaced by that of the next. Empty before the
            first round.
        accuracy: Accuracy after the round.

    Raises:
        NoMoreRoundsError: No further round is asked for.
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
    """Start a process of its own for a variant, and yield a function that has it run one block.

    Args:
        work: The workload.
        variant: Name of the variant.
        threads: Number of threads of the process. None: as many as torch takes.
    """
    spawn = get_context("spawn")
    here, there = spawn.Pipe()
    screen, terminal = pty.openpty()
    threading.Thread(target=drain, args=(screen,), daemon=True).start()
    settings = {"work": work, "variant": variant, "threads": threads, "terminal": os.ttyname(terminal)}
    process = spawn.Process(target=serve, args=(there,), kwargs=settings, daemon=True)
    process.start()
    there.close()

    def run() -> Block:
        here.send(work.name)
        block: Block = here.recv()
        return block

    try:
        yield run
    finally:
        with suppress(OSError):
            here.send(None)
        process.join()
        os.close(terminal)


def interleaved(work: Workload, variants: list[str], threads: int | None) -> dict[str, list[Block]]:
    """Measure blocks of the floor and of the variants in turn (floor, A, B, floor, A, B), each in its own process.

    The first block of each process warms it up and does not count. If rounds are long, the first rounds do so.

    Args:
        work: The workload.
        variants: Names of the variants.
        threads: Number of threads of each process. None: as many as torch takes.

    Returns:
        The blocks by variant.
    """
    begin = time.perf_counter()
    with ExitStack() as stack:
        runs: dict[str, Callable[[], Block]] = {}
        for name in ["floor", *variants]:
            runs[name] = stack.enter_context(worker(work, name, threads))
        for _ in range(1 if work.short else work.unmeasured):
            for run in runs.values():
                run()
        spent = time.perf_counter() - begin
        return in_turn(runs, work.repeats, work.seconds - spent)


def in_one_process(work: Workload, variants: list[str]) -> dict[str, list[Block]]:
    """Measure blocks of the floor and of the variants in turn within this process.

    This is faster to start, but the memory includes that of all earlier blocks.
    """
    runs = {name: partial(run_block, work, name) for name in ["floor", *variants]}
    return in_turn(runs, work.repeats, work.seconds)


def turns(max_turns: int, seconds: float) -> Iterator[int]:
    """Yield the numbers of turns: at most `max_turns`, as many as are done within `seconds`, and at least one."""
    begin = time.perf_counter()
    for turn in range(max_turns):
        yield turn
        spent = time.perf_counter() - begin
        if spent + spent / (turn + 1) > seconds:
            return


def in_turn(runs: Mapping[str, Callable[[], Block]], repeats: int, seconds: float) -> dict[str, list[Block]]:
    """Run each variant once a turn.

    Args:
        runs: The runs of a block by variant.
        repeats: Largest number of turns.
        seconds: Seconds within which turns are begun. At least one is.

    Returns:
        The blocks by variant.
    """
    blocks: dict[str, list[Block]] = {name: [] for name in runs}
    for _ in turns(repeats, seconds):
        for name, run in runs.items():
            blocks[name].append(run())
    return blocks


# --- figures ---------------------------------------------------------------------------------------

NOISE = 0.05
"""Largest share of the machine that others may take. Blocks with a larger one are left out if quiet ones remain."""


@dataclass(frozen=True)
class Figures:
    """Has one row of the table.

    Args:
        workload: Name of the workload.
        variant: Name of the variant.
        s_per_round: Median seconds per round over the blocks.
        floor_s_per_round: Median over the floor's blocks beside them.
        ratio: Median of the ratios of neighboring blocks.
        low: Lower quartile of these ratios.
        high: Upper quartile of these ratios.
        cpu_ratio: The same ratio in CPU seconds. On a busy machine it says more than `ratio`, for one thread.
        cpu_low: Lower quartile of the ratios in CPU seconds.
        cpu_high: Upper quartile of the ratios in CPU seconds.
        peak_rss_mb: Largest resident memory of the variant's process, in MB.
        quiet: Number of blocks that were not disturbed.
        blocks: Number of all blocks.
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
    """Return the lower quartile, the median and the upper quartile. Those of one value are the value."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = quantiles(values, n=4, method="inclusive")
    return low, middle, high


def figures(work: Workload, variant: str, *, floor: list[Block], blocks: list[Block]) -> Figures:
    """Compare the blocks of a variant with the floor's blocks before them.

    Args:
        work: The workload.
        variant: Name of the variant.
        floor: Blocks of the floor.
        blocks: Blocks of the variant, in the same turns.
    """
    pairs = list(zip(floor, blocks, strict=True))
    quiet_pairs = [(base, own) for base, own in pairs if max(base.others, own.others) <= NOISE]
    used = quiet_pairs or pairs
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
        quiet=len(quiet_pairs),
        blocks=len(pairs),
    )
