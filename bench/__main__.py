"""Prints the figures and writes `bench/results/*.csv`; see `bench/README.md`."""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from math import isnan
from pathlib import Path

import torch

from bench import parallel, whole
from bench.blocks import MODULES, NOISE, PEERS, USUAL, Block, Figures, figures, in_one_process, interleaved
from bench.startup import startup
from bench.tables import print_and_write, update
from bench.workloads import WORKLOADS, Workload

RESULTS = Path(__file__).parent / "results"
RATIOS = ("ratio", "low", "high", "cpu_ratio", "cpu_low", "cpu_high")
COLUMNS = ("workload", "variant", "s_per_round", "floor_s_per_round", *RATIOS, "peak_rss_mb", "quiet", "blocks")
VARIANTS = [name for name in MODULES if name not in ("floor", *PEERS)]
VARIANTS_OF: dict[str, list[str]] = {
    "tiny": list(USUAL),
    # An empty round is the same as that of `tiny`, and convolutions are slower in a stack.
    "cnn": ["train", "all"],
    "adam": ["train", "train-cohort"],
}
"""Variants that are measured if none is asked for, by workload. Other workloads have `train`."""

CANNOT = {"FedLab": ("resnet", "personal", "ditto")}
"""Workloads that a peer cannot run: it sends parameters only, and has no method with what clients keep."""

TOLERANCE = 0.01
"""Largest difference from the floor's accuracy. Sums in float32 and float64 may differ for a sample at the border."""

HEAD = "workload  variant      ms/round     floor  ratio (middle half)     by CPU (middle half)        MB  quiet blocks"


def main(arguments: Sequence[str] | None = None, results: Path | None = None) -> None:
    """Run the benchmarks that the command line asks for.

    Args:
        arguments: Arguments of the command line. None: those of the process.
        results: Folder of the tables. None: `bench/results`, or no folder for a quick run.

    Raises:
        SystemExit: A part failed, or the arguments are wrong.
    """
    asked = parse(arguments)
    if results is None and not asked.quick:
        results = RESULTS
    chosen = chosen_parts(asked)
    is_whole = not (chosen or asked.quick or asked.workload or asked.variant)
    if is_whole:
        if whole.run_all():
            raise SystemExit(1)
        return
    if asked.quick or asked.variant or not chosen:
        measure_speed(asked, results)
    for name in chosen:
        if results is not None:
            PARTS[name](asked, results)


def measure_speed(asked: Namespace, results: Path | None) -> None:
    """Seconds per round of the variants beside the floor's."""
    path = None if results is None else results / "speed.csv"
    print(HEAD)
    for name in asked.workload or WORKLOADS:
        variants = asked.variant or VARIANTS_OF.get(name, ["train"])
        beside_the_floor(name, variants, asked=asked, path=path)


def measure_peers(asked: Namespace, results: Path) -> None:
    """Other simulators on the same work, where they are installed."""
    missing = [name for name in PEERS if find_spec(name.lower()) is None]
    if missing:
        raise SystemExit(
            f"--peers needs {' and '.join(missing)}; install fedlab==1.3.0 and fluke-fl==0.8.1 beside this package in "
            f"an environment of their own, and run it there"
        )
    print(HEAD)
    for name in asked.workload or WORKLOADS:
        ours = [variant for variant in VARIANTS_OF.get(name, ["train"]) if variant != "empty"]
        peers = [peer for peer in PEERS if name not in CANNOT.get(peer, ())]
        beside_the_floor(name, ours + peers, asked=asked, path=results / "peers.csv")


def beside_the_floor(name: str, variants: list[str], *, asked: Namespace, path: Path | None) -> None:
    """Measure variants of a workload in turn with the floor, print their rows and write them to a table.

    Args:
        name: Name of the workload.
        variants: Names of the variants.
        asked: What the command line asks for.
        path: The table. None writes none.
    """
    work = asked_size(WORKLOADS[name], asked)
    blocks = in_one_process(work, variants) if asked.quick else interleaved(work, variants, asked.threads)
    check_accuracy(work, blocks)
    rows = [figures(work, variant, floor=blocks["floor"], blocks=own) for variant, own in blocks.items()]
    for row in rows:
        print(line(row), flush=True)
    if path is not None:
        update(path, COLUMNS, [cells(row) for row in rows], num_keys=2)


def measure_startup(asked: Namespace, results: Path) -> None:
    """Seconds until the package is there."""
    rows = startup(asked.repeats or 7, asked.seconds or 25)
    print_and_write(results / "startup.csv", ("what", "seconds", "ratio"), rows)


def measure_commands(asked: Namespace, results: Path) -> None:
    """CPU seconds of whole commands."""
    from bench import commands  # noqa: PLC0415

    rows = commands.measure(asked.repeats or 3, asked.seconds or 60)
    print_and_write(results / "commands.csv", commands.COLUMNS, rows)


def measure_methods(asked: Namespace, results: Path) -> None:
    """The cost of a method's step."""
    from bench import methods  # noqa: PLC0415 - Lightning stays out of the floor's process

    columns = ("method", "s_per_step", "ratio_to_fedavg", "floor", "over_floor")
    rows = methods.measure(asked.repeats or 3, asked.seconds or 100)
    print_and_write(results / "methods.csv", columns, rows)


def measure_kernels(asked: Namespace, results: Path) -> None:
    """Layouts of convolutions and kernels of optimizers, which the package chooses by."""
    from bench import kernels  # noqa: PLC0415

    torch.set_num_threads(asked.threads or 1)
    rows = kernels.measure(asked.repeats or 40, asked.seconds or 60)
    print_and_write(results / "kernels.csv", kernels.COLUMNS, rows)


def measure_costs(asked: Namespace, results: Path) -> None:
    """The cost of a method's round, and the memory of a stateful one on `tiny`."""
    from bench import costs  # noqa: PLC0415

    workloads = asked.workload or list(costs.SIZES)
    for name in workloads:
        rows = costs.measure(name, asked.repeats or 1)
        print_and_write(results / f"costs_{name}.csv", costs.COLUMNS, rows)
    if "tiny" in workloads:
        memory = [*costs.stateful(100, rounds=200), *costs.stateful(1000, rounds=200)]
        print_and_write(results / "stateful.csv", ("clients and round", "mb", "records_mb"), memory)


def measure_monitors(asked: Namespace, results: Path) -> None:
    """The cost of a monitor."""
    from bench import monitors  # noqa: PLC0415

    columns = ("monitor", "s_per_round", "round_s", "share")
    print_and_write(results / "monitors.csv", columns, monitors.measure(asked.repeats or 1))


def measure_parallel(asked: Namespace, results: Path) -> None:
    """One process against two."""
    workloads = asked.workload or list(parallel.ROUNDS)
    seconds = (asked.seconds or 150) / len(workloads)
    for name in workloads:
        rows = parallel.measure(name, asked.repeats or 3, seconds)
        print_and_write(results / "parallel.csv", parallel.COLUMNS, rows)


def measure_scale(asked: Namespace, results: Path) -> None:
    """Rounds by the number of clients."""
    from bench import scale  # noqa: PLC0415

    rows = scale.measure(rounds=asked.rounds or scale.ROUNDS, repeats=asked.repeats or 1)
    print_and_write(results / "scale.csv", scale.COLUMNS, rows)


def measure_stays(asked: Namespace, results: Path) -> None:
    """A large module with few steps a client, beside a plain fit."""
    from bench import stays  # noqa: PLC0415

    rows = stays.measure(asked.repeats or 3, asked.seconds or 55)
    print_and_write(results / "stays.csv", stays.COLUMNS, rows)


def measure_clock(asked: Namespace, results: Path) -> None:
    """Late rounds of a module with schedulers, beside early ones."""
    from bench import clock  # noqa: PLC0415

    rows = clock.measure(asked.repeats or 5, asked.seconds or 120)
    print_and_write(results / "clock.csv", clock.COLUMNS, rows)


def measure_parts(asked: Namespace, results: Path) -> None:
    """Where the time of a round goes."""
    from bench import parts  # noqa: PLC0415

    torch.set_num_threads(asked.threads or 1)
    for name in asked.workload or WORKLOADS:
        milliseconds = dict(parts.measure(name, asked.repeats or 3, asked.seconds or 60))
        if asked.threads not in (None, 1):
            milliseconds = with_threads(milliseconds, asked.threads)
        update(results / "parts.csv", parts.COLUMNS, rows_of_parts(name, milliseconds), num_keys=3)
        print_parts(name, milliseconds)


def with_threads(milliseconds: dict[str, dict[str, float]], threads: int) -> dict[str, dict[str, float]]:
    """Name the threads of each variant, and leave out ranks of several processes, which have one thread.

    Args:
        milliseconds: Milliseconds of each part by variant.
        threads: Number of threads of the process.
    """
    named: dict[str, dict[str, float]] = {}
    for variant, by_part in milliseconds.items():
        if "rank" not in variant:
            named[f"{variant}, {threads} threads"] = by_part
    return named


def rows_of_parts(name: str, milliseconds: dict[str, dict[str, float]]) -> list[list[str]]:
    """Return the rows of the parts of a workload.

    Args:
        name: Name of the workload.
        milliseconds: Milliseconds of each part by variant.
    """
    rows: list[list[str]] = []
    for variant, by_part in milliseconds.items():
        for part, value in by_part.items():
            rows.append([name, variant, part, f"{value:.2f}"])
    return rows


def print_parts(name: str, milliseconds: dict[str, dict[str, float]]) -> None:
    """Print the parts of a workload that take time in a variant, with a column for each variant.

    Args:
        name: Name of the workload.
        milliseconds: Milliseconds of each part by variant. All have the same parts.
    """
    variants = list(milliseconds.values())
    # Names with a number of threads are longer than the others.
    width = max(18, 2 + max(len(variant) for variant in milliseconds))
    print_line("\n" + f"{name}, ms a round".ljust(36), [f"{variant:>{width}}" for variant in milliseconds])
    for part in variants[0]:
        if any(by_part[part] for by_part in variants):
            print_line(f"{part:36}", [f"{by_part[part]:{width}.2f}" for by_part in variants])
    print_line(f"{'all':36}", [f"{sum(by_part.values()):{width}.2f}" for by_part in variants])


def print_line(name: str, cells: Iterable[str]) -> None:
    """Print a line of a table at once."""
    print(name + "".join(cells), flush=True)


PARTS: dict[str, Callable[[Namespace, Path], None]] = {
    "startup": measure_startup,
    "commands": measure_commands,
    "methods": measure_methods,
    "kernels": measure_kernels,
    "costs": measure_costs,
    "monitors": measure_monitors,
    "parallel": measure_parallel,
    "scale": measure_scale,
    "stays": measure_stays,
    "clock": measure_clock,
    "peers": measure_peers,
    "parts": measure_parts,
}
"""What is measured besides `measure_speed`, by the option that asks for it alone."""


def parse(arguments: Sequence[str] | None) -> Namespace:
    """Read the command line.

    Raises:
        SystemExit: The arguments are wrong.
    """
    parser = ArgumentParser(prog="python -m bench", description="Seconds per round against a bare PyTorch loop.")
    parser.add_argument("--workload", action="append", help=f"one of {', '.join(WORKLOADS)}; default: all")
    parser.add_argument("--variant", action="append", choices=VARIANTS, help="default: all")
    for name, part in PARTS.items():
        parser.add_argument(f"--{name}", action="store_true", help=f"only: {part.__doc__}")
    parser.add_argument("--rounds", type=int, help="of a block, those before its clock starts included")
    parser.add_argument("--repeats", type=int, help="blocks of each variant")
    parser.add_argument("--seconds", type=float, help="in which turns are begun, at least one; not of costs")
    parser.add_argument("--threads", type=int, help="of each process; default: as many as torch takes")
    parser.add_argument("--quick", action="store_true", help="one short block each, in this process: no measurement")
    asked = parser.parse_args(arguments)
    known = measured_by_all(asked)
    others = [name for name in asked.workload or [] if name not in known]
    if others:
        parser.error(f"--workload must be one of {', '.join(known)} here, got {', '.join(others)}")
    return asked


def chosen_parts(asked: Namespace) -> list[str]:
    """Return the names of the parts that the command line asks for."""
    return [name for name in PARTS if getattr(asked, name)]


def measured_by_all(asked: Namespace) -> list[str]:
    """Return the names of the workloads that everything asked for can run."""
    chosen = chosen_parts(asked)
    known_by = [workloads_of(name) for name in chosen]
    if not chosen or asked.quick or asked.variant:
        known_by.append(WORKLOADS)
    every = dict.fromkeys([*WORKLOADS, *parallel.ROUNDS])
    return [name for name in every if all(name in known for known in known_by)]


def workloads_of(part: str) -> Collection[str]:
    """Return the names of the workloads that a part can run."""
    if part == "costs":
        from bench import costs  # noqa: PLC0415 - Lightning stays out of the floor's process

        return costs.SIZES
    return parallel.ROUNDS if part == "parallel" else WORKLOADS


def asked_size(work: Workload, asked: Namespace) -> Workload:
    """Return a workload with the rounds, the repeats and the seconds that the command line asks for.

    Raises:
        SystemExit: The rounds are not more than those that are not measured.
    """
    usual_rounds = work.unmeasured + 2 if asked.quick else work.rounds
    rounds = asked.rounds or usual_rounds
    if rounds <= work.unmeasured:
        raise SystemExit(f"--rounds must be above {work.unmeasured} for {work.name}, got {rounds}")
    usual_repeats = 1 if asked.quick else work.repeats
    repeats = asked.repeats or usual_repeats
    if not work.short:
        repeats = min(repeats, rounds - work.unmeasured)
    return replace(work, rounds=rounds, repeats=repeats, seconds=asked.seconds or work.seconds)


def check_accuracy(work: Workload, blocks: dict[str, list[Block]]) -> None:
    """Refuse a variant that does not reach the floor's accuracy, and thus does other work.

    The first blocks or rounds are compared, because rounding shows later.

    Args:
        work: The workload.
        blocks: Blocks of the floor and of the variants, by name.

    Raises:
        AssertionError: The accuracy of a variant is another one.
    """
    expected = blocks["floor"][0].accuracy
    for variant, own in blocks.items():
        accuracy = own[0].accuracy
        if not isnan(accuracy) and abs(accuracy - expected) > TOLERANCE:
            raise AssertionError(
                f"{variant} must reach the floor's accuracy on {work.name} ({expected:.4f}), got {accuracy:.4f}"
            )


def line(row: Figures) -> str:
    """Write a row for the terminal, under `HEAD`."""
    noisy = "" if row.quiet else f"  (others took more than {100 * NOISE:.0f} % of the machine: measure again)"
    return (
        f"{row.workload:9} {row.variant:12} {1e3 * row.s_per_round:9.2f} {1e3 * row.floor_s_per_round:9.2f} "
        f"{row.ratio:6.3f} ({row.low:.3f} to {row.high:.3f}) "
        f"{row.cpu_ratio:6.3f} ({row.cpu_low:.3f} to {row.cpu_high:.3f}) {row.peak_rss_mb:6.0f}  "
        f"{row.quiet} of {row.blocks}{noisy}"
    )


def cells(row: Figures) -> list[str]:
    """Write the cells of a row, under `COLUMNS`."""
    ratios = [f"{getattr(row, name):.3f}" for name in RATIOS]
    return [
        row.workload,
        row.variant,
        f"{row.s_per_round:.6f}",
        f"{row.floor_s_per_round:.6f}",
        *ratios,
        f"{row.peak_rss_mb:.0f}",
        f"{row.quiet}",
        f"{row.blocks}",
    ]


if __name__ == "__main__":
    main()
