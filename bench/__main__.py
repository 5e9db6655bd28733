"""Prints the figures and writes `bench/results/*.csv`; see `bench/README.md`."""

import csv
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import isnan
from pathlib import Path

from bench.blocks import MODULES, NOISE, Block, Figures, figures, in_one_process, interleaved
from bench.startup import startup
from bench.workloads import WORKLOADS, Workload

RESULTS = Path(__file__).parent / "results"
COLUMNS = ("workload", "variant", "s_per_round", "floor_s_per_round", "ratio", "peak_rss_mb")
VARIANTS = [name for name in MODULES if name != "floor"]
TOLERANCE = 0.01
"""The floor sums in float32 and the package in float64: a sample at the border may fall on the other side."""
HEAD = "workload  variant      ms/round     floor  ratio    cpu     MB  quiet blocks"


def main(arguments: Sequence[str] | None = None, results: Path | None = None) -> None:
    """Run the benchmarks that the command line asks for.

    Args:
        arguments: of the command line; None: those of the process.
        results: folder of the tables; None: `bench/results`, and none for a quick run.
    """
    asked = parse(arguments)
    if results is None and not asked.quick:
        results = RESULTS
    parts = any((asked.methods, asked.costs, asked.monitors, asked.parallel))
    whole = not any((parts, asked.quick, asked.workload, asked.variant))
    speed = asked.quick or asked.variant or not parts
    chosen = asked.workload or list(WORKLOADS)
    if speed:
        print(HEAD)
    for name in chosen if speed else ():
        work = asked_size(WORKLOADS[name], asked)
        # an empty round is the same whatever the workload; convolutions are slower in a stack on a CPU
        variants = asked.variant or [v for v in VARIANTS if name == "tiny" or v in ("train", "all")]
        blocks = in_one_process(work, variants) if asked.quick else interleaved(work, variants, asked.threads)
        check_accuracy(work, blocks)
        found = [figures(work, variant, blocks["floor"], blocks[variant]) for variant in blocks]
        for row in found:
            print(line(row), flush=True)
        if results is not None:
            update(results / "speed.csv", COLUMNS, [cells(row) for row in found], keys=2)
    if results is not None and whole:
        print(f"\n{'what':28} {'seconds':>8} {'ratio':>6}")
        times = startup()
        for what, seconds, ratio in times:
            print(f"{what:28} {seconds:8.2f} {ratio:6.2f}")
        rows = [[what, str(seconds), str(ratio)] for what, seconds, ratio in times]
        update(results / "startup.csv", ("what", "seconds", "ratio"), rows, keys=1)
    if results is not None and (asked.methods or whole):
        from bench import methods  # noqa: PLC0415 - Lightning stays out of the floor's process

        steps = methods.measure(asked.repeats or 3)
        table(results / "methods.csv", ("method", "s_per_step", "ratio_to_fedavg", "floor", "over_floor"), steps)
    if results is not None and (asked.costs or whole):
        measure_costs(results, chosen, asked.repeats or 1)
    if results is not None and (asked.monitors or whole):
        from bench import monitors  # noqa: PLC0415

        monitored = monitors.measure(asked.repeats or 1)
        table(results / "monitors.csv", ("monitor", "s_per_round", "round_s", "share"), monitored)
    if results is not None and (asked.parallel or whole):
        from bench import parallel  # noqa: PLC0415

        table(results / "parallel.csv", ("processes", "s_per_round", "speedup"), parallel.measure(asked.repeats or 3))


def measure_costs(results: Path, workloads: Sequence[str], repeats: int) -> None:
    """Write the tables of `bench.costs`; the memory of a stateful method is that on `tiny`."""
    from bench import costs  # noqa: PLC0415

    for name in workloads:
        table(results / f"costs_{name}.csv", costs.COLUMNS, costs.measure(name, repeats))
    if "tiny" in workloads:
        rows = [row for num_clients in (100, 1000) for row in costs.stateful(num_clients, rounds=200)]
        table(results / "stateful.csv", ("clients and round", "mb", "records_mb"), rows)


def table(path: Path, columns: Sequence[str], rows: Iterable[tuple[str, *tuple[float, ...]]]) -> None:
    """Print each row of a table as it is measured, and write them all."""
    print("\n" + f"{columns[0]:26}" + "".join(f"{name:>16}" for name in columns[1:]))
    written = []
    for name, *values in rows:
        print(f"{name:26}" + "".join(f"{value:16.4f}" for value in values), flush=True)
        written.append([name, *(f"{value:.4f}" for value in values)])
    update(path, columns, written, keys=1)


def parse(arguments: Sequence[str] | None) -> Namespace:
    parser = ArgumentParser(prog="python -m bench", description="Seconds per round against a bare PyTorch loop.")
    parser.add_argument("--workload", action="append", choices=list(WORKLOADS), help="default: both")
    parser.add_argument("--variant", action="append", choices=VARIANTS, help="default: all")
    parser.add_argument("--methods", action="store_true", help="only the cost of each method's local step")
    parser.add_argument("--costs", action="store_true", help="only the cost of each method's round")
    parser.add_argument("--monitors", action="store_true", help="only the cost of each monitor")
    parser.add_argument("--parallel", action="store_true", help="only one process against two")
    parser.add_argument("--rounds", type=int, help="of a block, those before its clock starts included")
    parser.add_argument("--repeats", type=int, help="blocks of each variant")
    parser.add_argument("--threads", type=int, help="of each process; default: as many as torch takes")
    parser.add_argument("--quick", action="store_true", help="one short block each, in this process: no measurement")
    return parser.parse_args(arguments)


def asked_size(work: Workload, asked: Namespace) -> Workload:
    rounds = asked.rounds or (work.unmeasured + 2 if asked.quick else work.rounds)
    if rounds <= work.unmeasured:
        raise SystemExit(f"--rounds must be above {work.unmeasured} for {work.name}, got {rounds}")
    return replace(work, rounds=rounds, repeats=asked.repeats or (1 if asked.quick else work.repeats))


def check_accuracy(work: Workload, blocks: dict[str, list[Block]]) -> None:
    """Whoever does the same work reaches the same accuracy.

    Raises:
        AssertionError: naming the variant that does not.
    """
    expected = blocks["floor"][-1].accuracy
    for variant, found in blocks.items():
        accuracy = found[-1].accuracy
        if not isnan(accuracy) and abs(accuracy - expected) > TOLERANCE:
            raise AssertionError(
                f"{variant} must reach the floor's accuracy on {work.name} ({expected:.4f}), got {accuracy:.4f}"
            )


def line(row: Figures) -> str:
    noisy = "" if row.quiet else f"  (others took more than {100 * NOISE:.0f} % of the machine: measure again)"
    return (
        f"{row.workload:9} {row.variant:12} {1e3 * row.s_per_round:9.2f} {1e3 * row.floor_s_per_round:9.2f} "
        f"{row.ratio:6.3f} {row.cpu_ratio:6.3f} {row.peak_rss_mb:6.0f}  {row.quiet} of {row.blocks}{noisy}"
    )


def cells(row: Figures) -> list[str]:
    """The row's cells under `COLUMNS`."""
    times = (f"{row.s_per_round:.6f}", f"{row.floor_s_per_round:.6f}", f"{row.ratio:.3f}")
    return [row.workload, row.variant, *times, f"{row.peak_rss_mb:.0f}"]


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
