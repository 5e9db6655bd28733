"""Shares of a round's time, in the bare loop and in the package, from the calls that a timer finds under way.

`python -m bench --parts`, or `make profile`. The seconds between two ticks go to the part in which the second tick
finds the main thread. Only the ticks slow the program down, a thousand a second.
"""

import signal
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from statistics import mean
from time import perf_counter
from types import FrameType

from bench import parallel
from bench.blocks import run_block, turns
from bench.workloads import WORKLOADS, Workload

COLUMNS = ("workload", "variant", "part", "ms_per_round")
INTERVAL = 1e-3
"""Seconds between two ticks."""

EVALUATION = "evaluation"
OTHERS = "merge with other processes, waiting"
REST = "rest"
PARTS: dict[str, tuple[str, ...]] = {
    OTHERS: ("fl_lightning/distributed/", "torch/distributed/"),
    EVALUATION: ("bench/floor.py evaluate", "pytorch_lightning/loops/evaluation_loop.py"),
    "forward passes and loss": ("torch/nn/", "torch/_functorch/"),
    "backward passes": ("torch/autograd/graph.py", "torch/autograd/__init__.py", "torch/_tensor.py backward"),
    "optimizer": (
        "torch/optim/",
        "fl_lightning/client/unwrapped_step.py",
        "fl_lightning/client/optimizers.py",
        "fl_lightning/engines/building.py",
    ),
    "batches": ("fl_lightning/data/",),
    "guard": ("fl_lightning/aggregation/guard.py",),
    "weights loaded, kept, summed": (
        "bench/floor.py copied",
        "bench/floor.py copy_into",
        "fl_lightning/members/",
        "fl_lightning/aggregation/",
        "fl_lightning/functional/state.py",
        "fl_lightning/client/personal.py",
        "fl_lightning/federation/server.py",
    ),
    "bar, loggers, checkpoints": (
        "pytorch_lightning/loggers/",
        "pytorch_lightning/callbacks/",
        "fl_lightning/runs/",
        "fl_lightning/callbacks/",
        "fl_lightning/federation/checkpoint.py",
    ),
    "package: all else": ("fl_lightning/",),
    "Lightning: all else": ("pytorch_lightning/",),
    REST: (),
}
"""Files or folders of each part, some with the name of a function. The first part that names a file counts.

A tick belongs to the part of the innermost call that has one. A tick within an evaluation belongs to the evaluation,
unless processes exchange something there.
"""

VARIANTS = {
    "tiny": ["floor", "train", "train-cohort", "all", "all-cohort"],
    "adam": ["floor", "train", "train-cohort"],
}
"""Variants by workload. Other workloads have the floor and `train`."""


@cache
def part_of(path: str, function: str) -> str | None:
    """Return the part of a function. None: it has no part.

    Args:
        path: Path of the function's file.
        function: Name of the function.
    """
    # Of a Module's own functions only its call counts, and not those that look at its entries.
    if path.endswith("torch/nn/modules/module.py") and "_call_impl" not in function:
        return None
    call = f"{path} {function}"
    for part, names in PARTS.items():
        if any(f"/{name}" in call for name in names):
            return part
    return None


def part_at(frame: FrameType | None) -> str:
    """Return the part of a call under way."""
    innermost = None
    while frame is not None:
        part = part_of(frame.f_code.co_filename, frame.f_code.co_name)
        innermost = innermost or part
        if innermost == OTHERS:
            return OTHERS
        if part == EVALUATION:
            return EVALUATION
        frame = frame.f_back
    return innermost or REST


class Ticks:
    """Adds up the seconds of each part, from the start of a round to the end of the last.

    Args:
        unmeasured: Number of rounds before that.
        rounds: Number of all rounds.
    """

    def __init__(self, unmeasured: int, rounds: int) -> None:
        self.unmeasured = unmeasured
        self.rounds = rounds
        self.begun = 0
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def pause(self, accuracy: float) -> None:
        """Begin or end the ticks. It is called at the start of every round and after the last."""
        if self.begun == self.unmeasured:
            self.last = perf_counter()
            signal.signal(signal.SIGALRM, self._tick)
            signal.setitimer(signal.ITIMER_REAL, INTERVAL, INTERVAL)
        elif self.begun == self.rounds:
            signal.setitimer(signal.ITIMER_REAL, 0)
        self.begun += 1

    def _tick(self, number: int, frame: FrameType | None) -> None:
        """Give the seconds since the last tick to the part of the call under way."""
        now = perf_counter()
        self.seconds[part_at(frame)] += now - self.last
        self.last = now

    def milliseconds(self) -> dict[str, float]:
        """Return the milliseconds of each part in a round."""
        measured = self.rounds - self.unmeasured
        return {part: 1e3 * self.seconds[part] / measured for part in PARTS}


def measure(name: str, repeats: int, seconds: float) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield the milliseconds of the parts of each variant of a workload, means over turns, and then of two processes.

    Args:
        name: Name of the workload.
        repeats: Largest number of turns.
        seconds: Seconds within which turns are begun.
    """
    work = WORKLOADS[name]
    if not work.short:
        work = replace(work, rounds=work.unmeasured + 2)
    variants = VARIANTS.get(name, ["floor", "train"])
    taken: dict[str, list[dict[str, float]]] = {variant: [] for variant in variants}
    for _ in turns(repeats, seconds):
        for variant in variants:
            taken[variant].append(one_block(work, variant))
    for variant, blocks in taken.items():
        yield variant, {part: mean(block[part] for block in blocks) for part in PARTS}
    if name in ("cnn", "resnet"):
        for rank, milliseconds in enumerate(parallel.parts_of_ranks(name)):
            yield f"rank {rank} of 2", milliseconds


def one_block(work: Workload, variant: str) -> dict[str, float]:
    """Run a block of a variant, and return the milliseconds of each part in a round."""
    ticks = Ticks(work.unmeasured, work.rounds)
    run_block(replace(work, pause=ticks.pause), variant)
    return ticks.milliseconds()
