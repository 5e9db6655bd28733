"""Prints the figures and writes `bench/results/*.csv`; see `bench/README.md`."""

import csv
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from math import isnan
from pathlib import Path

import torch

from bench import parallel, whole
from bench.blocks import MODULES, NOISE, PEERS, USUAL, Block, Figures, figures, in_one_process, interleaved
from bench.startup import startup
from bench.workloads import WORKLOADS, Workload

RESULTS = Path(__file__).parent / "results"
RATIOS = ("ratio", "low", "high", "cpu_ratio", "cpu_low", "cpu_high")
COLUMNS = ("workload", "variant", "s_per_round", "floor_s_per_round", *RATIOS, "peak_rss_mb", "quiet", "blocks")
VARIANTS = [name for name in MODULES if name not in ("floor", *PEERS)]
VARIANTS_OF: dict[str, list[str]] = {
    "tiny": list(USUAL),
    "cnn": ["train", "all"],  # an empty round is the same as that of `tiny`; convolutions are slower in a stack
    "adam": ["train", "train-cohort"],
}
"""Variants that are measured where none is asked for; of other workloads `train`."""

CANNOT = {"FedLab": ("resnet", "personal", "ditto")}
"""Workloads that a peer cannot run: it sends parameters only, and has no method with what clients keep."""

TOLERANCE = 0.01
"""The floor sums in float32 and the package in float64: a sample at the border may fall on the other side."""
HEAD = "workload  variant      ms/round     floor  ratio (middle half)     by CPU (middle half)        MB  quiet blocks"


def main(arguments: Sequence[str] | None = None, results: Path | None = None) -> None:
    """Run the benchmarks that the command line asks for.

    Args:
        arguments: of the command line; None: those of the process.
        results: folder of the tables; None: `bench/results`, and none for a quick run.
    """
    asked = parse(arguments)
    if results is None and not asked.quick:
        results = RESULTS
    chosen = [name for name in PARTS if getattr(asked, name)]
    if not any((chosen, asked.quick, asked.workload, asked.variant)):
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
    print(HEAD)
    for name in asked.workload or WORKLOADS:
        beside_the_floor(
            name, asked.variant or VARIANTS_OF.get(name, ["train"]), asked, results and results / "speed.csv"
        )


def measure_peers(asked: Namespace, results: Path) -> None:
    """Other simulators on the same work, where they are installed."""
    if missing := [name for name in PEERS if find_spec(name.lower()) is None]:
        raise SystemExit(
            f"--peers needs {' and '.join(missing)}; install fedlab==1.3.0 and fluke-fl==0.8.1 beside this package in "
            f"an environment of their own, and run it there"
        )
    print(HEAD)
    for name in asked.workload or WORKLOADS:
        ours = [variant for variant in VARIANTS_OF.get(name, ["train"]) if variant != "empty"]
        peers = [peer for peer in PEERS if name not in CANNOT.get(peer, ())]
        beside_the_floor(name, ours + peers, asked, results / "peers.csv")


def beside_the_floor(name: str, variants: list[str], asked: Namespace, path: Path | None) -> None:
    """Measure variants of a workload in turn with the floor, print their rows and write them to a table."""
    work = asked_size(WORKLOADS[name], asked)
    blocks = in_one_process(work, variants) if asked.quick else interleaved(work, variants, asked.threads)
    check_accuracy(work, blocks)
    found = [figures(work, variant, blocks["floor"], blocks[variant]) for variant in blocks]
    for row in found:
        print(line(row), flush=True)
    if path is not None:
        update(path, COLUMNS, [cells(row) for row in found], keys=2)


def measure_startup(asked: Namespace, results: Path) -> None:
    """Seconds until the package is there."""
    table(results / "startup.csv", ("what", "seconds", "ratio"), startup(asked.repeats or 7, asked.seconds or 25))


def measure_commands(asked: Namespace, results: Path) -> None:
    """CPU seconds of whole commands."""
    from bench import commands  # noqa: PLC0415

    rows = commands.measure(asked.repeats or 3, asked.seconds or 60)
    table(results / "commands.csv", commands.COLUMNS, rows)


def measure_methods(asked: Namespace, results: Path) -> None:
    """The cost of a method's step."""
    from bench import methods  # noqa: PLC0415 - Lightning stays out of the floor's process

    columns = ("method", "s_per_step", "ratio_to_fedavg", "floor", "over_floor")
    table(results / "methods.csv", columns, methods.measure(asked.repeats or 3, asked.seconds or 100))


def measure_kernels(asked: Namespace, results: Path) -> None:
    """Layouts of convolutions and kernels of optimizers, which the package chooses by."""
    from bench import kernels  # noqa: PLC0415

    torch.set_num_threads(asked.threads or 1)
    table(results / "kernels.csv", kernels.COLUMNS, kernels.measure(asked.repeats or 40, asked.seconds or 60))


def measure_costs(asked: Namespace, results: Path) -> None:
    """The cost of a method's round, and the memory of a stateful one on `tiny`."""
    from bench import costs  # noqa: PLC0415

    workloads = asked.workload or list(costs.SIZES)
    for name in workloads:
        table(results / f"costs_{name}.csv", costs.COLUMNS, costs.measure(name, asked.repeats or 1))
    if "tiny" in workloads:
        rows = [row for num_clients in (100, 1000) for row in costs.stateful(num_clients, rounds=200)]
        table(results / "stateful.csv", ("clients and round", "mb", "records_mb"), rows)


def measure_monitors(asked: Namespace, results: Path) -> None:
    """The cost of a monitor."""
    from bench import monitors  # noqa: PLC0415

    columns = ("monitor", "s_per_round", "round_s", "share")
    table(results / "monitors.csv", columns, monitors.measure(asked.repeats or 1))


def measure_parallel(asked: Namespace, results: Path) -> None:
    """One process against two."""
    workloads = asked.workload or list(parallel.ROUNDS)
    for name in workloads:
        seconds = (asked.seconds or 150) / len(workloads)
        table(results / "parallel.csv", parallel.COLUMNS, parallel.measure(name, asked.repeats or 3, seconds))


def measure_scale(asked: Namespace, results: Path) -> None:
    """Rounds by the number of clients."""
    from bench import scale  # noqa: PLC0415

    rows = scale.measure(rounds=asked.rounds or scale.ROUNDS, repeats=asked.repeats or 1)
    table(results / "scale.csv", scale.COLUMNS, rows)


def measure_stays(asked: Namespace, results: Path) -> None:
    """A large module with few steps a client, beside a plain fit."""
    from bench import stays  # noqa: PLC0415

    table(results / "stays.csv", stays.COLUMNS, stays.measure(asked.repeats or 3, asked.seconds or 55))


def measure_clock(asked: Namespace, results: Path) -> None:
    """Late rounds of a module with schedulers, beside early ones."""
    from bench import clock  # noqa: PLC0415

    table(results / "clock.csv", clock.COLUMNS, clock.measure(asked.repeats or 5, asked.seconds or 120))


def measure_parts(asked: Namespace, results: Path) -> None:
    """Where the time of a round goes."""
    from bench import parts  # noqa: PLC0415

    torch.set_num_threads(asked.threads or 1)
    for name in asked.workload or WORKLOADS:
        found = dict(parts.measure(name, asked.repeats or 3, asked.seconds or 60))
        if asked.threads not in (None, 1):
            found = {
                f"{variant}, {asked.threads} threads": of for variant, of in found.items() if "rank" not in variant
            }
        rows = [[name, variant, part, f"{ms:.2f}"] for variant, of in found.items() for part, ms in of.items()]
        update(results / "parts.csv", parts.COLUMNS, rows, keys=3)
        print(f"\n{name + ', ms a round':36}" + "".join(f"{variant:>18}" for variant in found))
        for part in (part for part in parts.PARTS if any(of[part] for of in found.values())):
            print(f"{part:36}" + "".join(f"{of[part]:18.2f}" for of in found.values()))
        print(f"{'all':36}" + "".join(f"{sum(of.values()):18.2f}" for of in found.values()), flush=True)


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


def table(path: Path, columns: Sequence[str], rows: Iterable[tuple[str, *tuple[float, ...]]]) -> None:
    """Print and write each row of a table as it is measured."""
    print("\n" + f"{columns[0]:26}" + "".join(f"{name:>16}" for name in columns[1:]))
    for name, *values in rows:
        print(f"{name:26}" + "".join(f"{value:16.4f}" for value in values), flush=True)
        update(path, columns, [[name, *(f"{value:.4f}" for value in values)]], keys=1)


def parse(arguments: Sequence[str] | None) -> Namespace:
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
    if others := [name for name in asked.workload or [] if name not in known]:
        parser.error(f"--workload must be one of {', '.join(known)} here, got {', '.join(others)}")
    return asked


def measured_by_all(asked: Namespace) -> list[str]:
    """Name the workloads that everything asked for can run."""
    chosen = [name for name in PARTS if getattr(asked, name)]
    of: list[Iterable[str]] = [] if chosen and not (asked.quick or asked.variant) else [WORKLOADS]
    for name in chosen:
        if name == "costs":
            from bench import costs  # noqa: PLC0415 - Lightning stays out of the floor's process

            of.append(costs.SIZES)
        else:
            of.append(parallel.ROUNDS if name == "parallel" else WORKLOADS)
    return [name for name in dict.fromkeys([*WORKLOADS, *parallel.ROUNDS]) if all(name in names for names in of)]


def asked_size(work: Workload, asked: Namespace) -> Workload:
    rounds = asked.rounds or (work.unmeasured + 2 if asked.quick else work.rounds)
    if rounds <= work.unmeasured:
        raise SystemExit(f"--rounds must be above {work.unmeasured} for {work.name}, got {rounds}")
    repeats = asked.repeats or (1 if asked.quick else work.repeats)
    if not work.short:
        repeats = min(repeats, rounds - work.unmeasured)
    return replace(work, rounds=rounds, repeats=repeats, seconds=asked.seconds or work.seconds)


def check_accuracy(work: Workload, blocks: dict[str, list[Block]]) -> None:
    """Whoever does the same work reaches the same accuracy, in the first block or round: later rounding shows.

    Raises:
        AssertionError: naming the variant that does not.
    """
    expected = blocks["floor"][0].accuracy
    for variant, found in blocks.items():
        accuracy = found[0].accuracy
        if not isnan(accuracy) and abs(accuracy - expected) > TOLERANCE:
            raise AssertionError(
                f"{variant} must reach the floor's accuracy on {work.name} ({expected:.4f}), got {accuracy:.4f}"
            )


def line(row: Figures) -> str:
    noisy = "" if row.quiet else f"  (others took more than {100 * NOISE:.0f} % of the machine: measure again)"
    return (
        f"{row.workload:9} {row.variant:12} {1e3 * row.s_per_round:9.2f} {1e3 * row.floor_s_per_round:9.2f} "
        f"{row.ratio:6.3f} ({row.low:.3f} to {row.high:.3f}) "
        f"{row.cpu_ratio:6.3f} ({row.cpu_low:.3f} to {row.cpu_high:.3f}) {row.peak_rss_mb:6.0f}  "
        f"{row.quiet} of {row.blocks}{noisy}"
    )


def cells(row: Figures) -> list[str]:
    """The row's cells under `COLUMNS`."""
    times = (f"{row.s_per_round:.6f}", f"{row.floor_s_per_round:.6f}")
    ratios = (f"{getattr(row, name):.3f}" for name in RATIOS)
    blocks = (f"{row.quiet}", f"{row.blocks}")
    return [row.workload, row.variant, *times, *ratios, f"{row.peak_rss_mb:.0f}", *blocks]


def update(path: Path, columns: Sequence[str], rows: list[list[str]], keys: int) -> None:
    """Write a table; rows that were not measured now, told apart by their first cells, stay as they are."""
    table: dict[tuple[str, ...], list[str]] = {}
    if path.is_file():
        with path.open(newline="", encoding="utf-8") as file:
            table = {tuple(row[:keys]): row for row in list(csv.reader(file))[1:]}
    table |= {tuple(row[:keys]): row for row in rows}
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows(table.values())


if __name__ == "__main__":
    main()
