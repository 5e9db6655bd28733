"""Prints the tables of `docs/changing-data.md` from `docs/changing_data.csv`.

python -m tools.changing_tables
"""

import csv
from collections.abc import Mapping, Sequence
from statistics import mean, stdev

import torch

from fl_lightning.functional import intransigence, paired_difference
from tools.draw_changing import CASES, DOCS, NUM_TASKS, ROUNDS_PER_TASK, STYLES

BASELINE = "FedAvg"
REFERENCE = "cumulative"
GAIN = f"ACC − {BASELINE}'s"
COLUMNS = ("accuracy", "ACC", GAIN, "F", "FWT", "intransigence")
FINAL = {"accuracy": "accuracy", "ACC": "acc_tasks", "F": "forgetting_tasks", "FWT": "forward_transfer"}
"""Columns of the csv file by the columns that have their last values."""

Run = Sequence[Mapping[str, str]]
"""The evaluations of a run, by round."""

Runs = Mapping[str, Mapping[int, Run]]
"""The runs of a data set by row and seed."""


def read_runs() -> Mapping[str, Runs]:
    """Read the runs of each data set."""
    runs: dict[str, dict[str, dict[int, list[Mapping[str, str]]]]] = {}
    with (DOCS / "changing_data.csv").open(newline="", encoding="utf-8") as file:
        for line in csv.DictReader(file):
            of_case = runs.setdefault(line["case"], {})
            of_row = of_case.setdefault(line["method"], {})
            of_row.setdefault(int(line["seed"]), []).append(line)
    return runs


def final(run: Run, column: str) -> float:
    """Return a column's last value in percent."""
    return 100 * float(run[-1][column])


def stages(run: Run) -> torch.Tensor:
    """Return the accuracy on each task at the end of each stage, (5, 5), fractions in float64."""
    table = torch.empty(NUM_TASKS, NUM_TASKS, dtype=torch.float64)
    for stage in range(NUM_TASKS):
        end = ROUNDS_PER_TASK * (stage + 1)
        last = [line for line in run if int(line["round"]) < end][-1]
        for task in range(NUM_TASKS):
            table[stage, task] = float(last[f"task_{task + 1}"])
    return table


def intransigence_of(run: Run, reference: Run) -> float:
    """Return a run's intransigence against a cumulative run of the same seed, in percent."""
    first = torch.arange(NUM_TASKS)
    best = stages(reference).diagonal()
    return 100 * float(intransigence(stages(run), best, first))


def spread(values: Sequence[float]) -> str:
    """Format a mean with its standard deviation."""
    return signed(f"{mean(values):.1f} ± {stdev(values):.1f}")


def difference(values: Sequence[float], baseline: Sequence[float]) -> str:
    """Format a paired difference with its 95 % interval. An arrow marks an interval without zero."""
    interval = paired_difference(values, baseline)
    text = f"{interval.mean:+.1f} [{interval.low:+.1f}, {interval.high:+.1f}]"
    if interval.low > 0:
        text += " ↑"
    if interval.high < 0:
        text += " ↓"
    return signed(text)


def signed(text: str) -> str:
    """Write minus signs as the tables have them."""
    return text.replace("-", "−")


def cells(method: str, runs: Runs) -> list[str]:
    """Return a row's cells, in the order of `COLUMNS`.

    Args:
        method: The row.
        runs: The runs of the data set.
    """
    of_row = runs[method]
    seeds = sorted(of_row)
    made: dict[str, str] = {}
    for column, key in FINAL.items():
        made[column] = spread([final(of_row[seed], key) for seed in seeds])
    if method != BASELINE:
        ours = [final(of_row[seed], "acc_tasks") for seed in seeds]
        theirs = [final(runs[BASELINE][seed], "acc_tasks") for seed in seeds]
        made[GAIN] = difference(ours, theirs)
    if method != REFERENCE:
        made["intransigence"] = spread([intransigence_of(of_row[seed], runs[REFERENCE][seed]) for seed in seeds])
    return [made.get(column, "–") for column in COLUMNS]


def print_table(case: str, runs: Runs) -> None:
    """Print the table of a data set in Markdown.

    Args:
        case: The data set.
        runs: Its runs.
    """
    print(f"| {case} | {' | '.join(COLUMNS)} |")
    print(f"| --- |{' ---: |' * len(COLUMNS)}")
    for method in STYLES:
        print(f"| {method} | {' | '.join(cells(method, runs))} |")
    print()


def main() -> None:
    """Print the table of each data set."""
    runs = read_runs()
    for case in CASES.values():
        print_table(case, runs[case])


if __name__ == "__main__":
    main()
