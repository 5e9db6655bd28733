"""Makes `docs/changing_data.csv`, `docs/changing_data_tuning.csv` and their picture from the runs of the comparison.

fl-lightning reproduce configs/comparison/changing.yaml
python -m tools.draw_changing reproduced
"""

import re
import shutil
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from statistics import mean

from matplotlib.axes import Axes

from fl_lightning.reports.figures import new_figure, save, tidy
from fl_lightning.utils.files import write_table
from tools.draw_time import evaluated_rounds

DOCS = Path(__file__).resolve().parents[1] / "docs"
CASES = {"split_digits": "split digits", "rotated_MNIST": "rotated MNIST", "split_CIFAR-10": "split CIFAR-10"}
"""The data sets by their names in the folders of runs."""

RUN = re.compile(rf"(?P<method>.+?)-(?P<case>{'|'.join(CASES)})(-\w+=[\d.]+)*-seed(?P<seed>\d+)-[0-9a-f]{{8}}")
"""A folder of runs: the row, the case, its tuned values, the seed and a digest."""

STYLES = {
    "FedAvg": ("-", "o"),
    "SCAFFOLD": ("--", "s"),
    "FedProx": ("-.", "^"),
    "FedNTD": (":", "v"),
    "FedLwF": ("-", "D"),
    "FedEWC": ("--", "x"),
    "ER": ("-", "P"),
    "DER++": ("-.", "*"),
    "cumulative": (":", "o"),
}
"""Line and marker of each row, in the order of the rows."""

MEASURES = {
    "accuracy": "global/acc",
    "acc_tasks": "global/acc_tasks",
    "forgetting_tasks": "global/forgetting_tasks",
    "backward_transfer": "global/backward_transfer",
    "forward_transfer": "global/forward_transfer",
}
"""Keys of metrics.csv by the columns that have their values."""

TASK = "global/acc_task/"
NUM_TASKS = 5
ROUNDS_PER_TASK = 10

Curves = Mapping[tuple[str, str], Mapping[int, list[float]]]
"""Accuracies over the tasks so far in percent, one for each seed, by case and row, and by round."""


def evaluations(folder: Path) -> Iterator[dict[str, str]]:
    """Give a line for each evaluation of each run.

    Args:
        folder: The output of `reproduce`.
    """
    for match, row in evaluated_rounds(folder, RUN):
        yield line_of(row, case=CASES[match["case"]], method=match["method"], seed=match["seed"])


def line_of(row: Mapping[str, str], *, case: str, method: str, seed: str) -> dict[str, str]:
    """Return the line of an evaluation.

    Args:
        row: The row of its round in metrics.csv.
        case: The data set.
        method: Label of the run's row.
        seed: Seed of the run.
    """
    line = {"case": case, "method": method, "seed": seed, "round": row["round"]}
    for column, key in MEASURES.items():
        line[column] = rounded(row.get(key, ""))
    of_tasks = [value for key, value in row.items() if key.startswith(TASK)]
    for number, value in enumerate(of_tasks, start=1):
        line[f"task_{number}"] = rounded(value)
    return line


def rounded(value: str) -> str:
    """Return a value with six digits. Empty: there is none."""
    return f"{float(value):.6g}" if value else ""


def accuracies(lines: Iterable[Mapping[str, str]]) -> Curves:
    """Group the accuracies over the tasks so far by case and row, and by round.

    Args:
        lines: The lines of `docs/changing_data.csv`.
    """
    curves: dict[tuple[str, str], dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for line in lines:
        curves[line["case"], line["method"]][int(line["round"])].append(100 * float(line["acc_tasks"]))
    return curves


def draw(curves: Curves, path: Path) -> None:
    """Draw the mean accuracy over the tasks so far for each row over the rounds, a panel for each data set.

    Args:
        curves: The accuracies.
        path: The picture.
    """
    figure = new_figure(13, 4.2)
    panels = figure.subplots(1, len(CASES), sharey=True)
    for axes, case in zip(panels, CASES.values(), strict=True):
        for task in range(1, NUM_TASKS):
            axes.axvline(task * ROUNDS_PER_TASK - 0.5, color="0.85", linewidth=1, zorder=0)
        draw_rows(axes, case, curves)
        axes.set_title(case)
        axes.set_xlabel("round")
        axes.set_ylim(0, 100)
        tidy(axes)
    panels[0].set_ylabel("accuracy, mean of the tasks so far (%)")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, loc="outside lower center", ncols=len(STYLES))
    save(figure, path)


def draw_rows(axes: Axes, case: str, curves: Curves) -> None:
    """Draw the rows of one data set.

    Args:
        axes: The panel.
        case: The data set.
        curves: The accuracies.
    """
    for method, (line, marker) in STYLES.items():
        if (case, method) not in curves:
            continue
        of_row = curves[case, method]
        rounds = sorted(of_row)
        means = [mean(of_row[round_idx]) for round_idx in rounds]
        axes.plot(rounds, means, label=method, linestyle=line, marker=marker, markersize=3.5, linewidth=1.2)


def main() -> None:
    """Write the csv files of the runs in the folder that is named, and draw them."""
    folder = Path(sys.argv[1])
    cases = list(CASES.values())
    order = list(STYLES)
    lines = sorted(
        evaluations(folder),
        key=lambda line: (cases.index(line["case"]), order.index(line["method"]), int(line["seed"])),
    )
    columns = ["case", "method", "seed", "round", *MEASURES]
    columns += [f"task_{number}" for number in range(1, NUM_TASKS + 1)]
    write_table(DOCS / "changing_data.csv", [columns, *([line[name] for name in columns] for line in lines)])
    shutil.copy(folder / "comparison" / "changing-tuning.csv", DOCS / "changing_data_tuning.csv")
    draw(accuracies(lines), DOCS / "images" / "changing_data.png")


if __name__ == "__main__":
    main()
