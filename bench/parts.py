"""Where the time of a round goes, in the bare loop and in the package: what a timer finds under way.

`python -m bench --parts`, or `make profile`. Seconds between two ticks go to the part in which the second one finds the
main thread, so that nothing is slowed down but by the ticks, a thousand a second.
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
"""Files, or folders, of a part, some with the name of a function; the first part counts that has a file's name. A tick
belongs to the part of the innermost call that has one; within an evaluation to that, but for exchanges of processes."""
VARIANTS = {
    "tiny": ["floor", "train", "train-cohort", "all", "all-cohort"],
    "adam": ["floor", "train", "train-cohort"],
}
"""Of a workload; of others the floor and `train`."""


@cache
def part_of(path: str, function: str) -> str | None:
    """Name the part of a function; of a Module's own only the call counts, not what looks at its entries."""
    if path.endswith("torch/nn/modules/module.py") and "_call_impl" not in function:
        return None
    call = f"{path} {function}"
    return next((part for part, names in PARTS.items() for name in names if f"/{name}" in call), None)


def part_at(frame: FrameType | None) -> str:
    """Name the part of a call under way."""
    innermost = None
    while frame is not None:
        part = part_of(frame.f_code.co_filename, frame.f_code.co_name)
        innermost = innermost or part
        if part == EVALUATION or innermost == OTHERS:
            return innermost if innermost == OTHERS else EVALUATION
        frame = frame.f_back
    return innermost or REST


class Ticks:
    """Seconds of each part, from the start of a round on to the end of the last.

    Args:
        unmeasured: rounds before that.
        rounds: all of them.
    """

    def __init__(self, unmeasured: int, rounds: int) -> None:
        self.unmeasured = unmeasured
        self.rounds = rounds
        self.begun = 0
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def pause(self, accuracy: float) -> None:
        """Begin and end: called at the start of every round and after the last."""
        if self.begun == self.unmeasured:
            self.last = perf_counter()
            signal.signal(signal.SIGALRM, self._tick)
            signal.setitimer(signal.ITIMER_REAL, INTERVAL, INTERVAL)
        elif self.begun == self.rounds:
            signal.setitimer(signal.ITIMER_REAL, 0)
        self.begun += 1

    def _tick(self, number: int, frame: FrameType | None) -> None:
        now = perf_counter()
        self.seconds[part_at(frame)] += now - self.last
        self.last = now

    def milliseconds(self) -> dict[str, float]:
        """Give those of each part in a round."""
        return {part: 1e3 * self.seconds[part] / (self.rounds - self.unmeasured) for part in PARTS}


def measure(name: str, repeats: int, seconds: float) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield variants of a workload and the milliseconds of their parts, means over turns; then two processes' ranks.

    There are `repeats` turns, or as many as are done within `seconds`.
    """
    work = WORKLOADS[name]
    work = work if work.short else replace(work, rounds=work.unmeasured + 2)
    taken: dict[str, list[dict[str, float]]] = {variant: [] for variant in VARIANTS.get(name, ["floor", "train"])}
    for _ in turns(repeats, seconds):
        for variant, found in taken.items():
            found.append(one_block(work, variant))
    for variant, found in taken.items():
        yield variant, {part: mean(turn[part] for turn in found) for part in PARTS}
    if name in ("cnn", "resnet"):
        for rank, milliseconds in enumerate(parallel.parts_of_ranks(name)):
            yield f"rank {rank} of 2", milliseconds


def one_block(work: Workload, variant: str) -> dict[str, float]:
    ticks = Ticks(work.unmeasured, work.rounds)
    run_block(replace(work, pause=ticks.pause), variant)
    return ticks.milliseconds()
