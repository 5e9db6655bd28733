"""Makes `docs/time.csv`, `docs/time_tuning.csv` and their picture from the runs of the comparison by simulated seconds.

fl-lightning reproduce configs/comparison/time.yaml
python -m tools.draw_time reproduced
"""

import csv
import re
import shutil
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from statistics import mean

from fl_lightning.reports.figures import new_figure, save, tidy
from fl_lightning.utils.files import write_table

DOCS = Path(__file__).resolve().parents[1] / "docs"
RUN = re.compile(r"(?P<method>.+?)(-\w+=[\d.]+)*-seed(?P<seed>\d+)-[0-9a-f]{8}")
"""A folder of runs: the row, its tuned values, the seed and a digest."""

LABELS = {"deadline_drop": "deadline, drop", "deadline_cut": "deadline, cut"}
"""Labels of rows whose folders are named otherwise."""

STYLES = {
    "synchronous": ("-", "o"),
    "over-selected": ("--", "s"),
    "deadline, drop": ("-.", "^"),
    "deadline, cut": (":", "v"),
    "FedBuff": ("-", "D"),
    "FedAsync": ("--", "x"),
}
"""Line and marker of each row, in the order of the rows."""

COLUMNS = ("method", "seed", "round", "seconds", "accuracy", "forgetting", "staleness", "lost")
INTERVAL = 30
"""Seconds from one evaluation to the next."""

Curves = Mapping[str, Mapping[int, list[float]]]
"""Accuracies in percent, one for each seed, by row and simulated second."""


def evaluations(folder: Path) -> Iterator[dict[str, str]]:
    """Give a line for each evaluation of each run.

    Args:
        folder: The output of `reproduce`.
    """
    for match, row in evaluated_rounds(folder, RUN):
        method = LABELS.get(match["method"], match["method"])
        yield line_of(row, method=method, seed=match["seed"])


def evaluated_rounds(folder: Path, name: re.Pattern[str]) -> Iterator[tuple[re.Match[str], dict[str, str]]]:
    """Give the row of metrics.csv for each evaluation of the global model, with the match of the run's name.

    Args:
        folder: The output of `reproduce`.
        name: Names of the runs. Others are left out.
    """
    for path in sorted(folder.glob("runs/*/*/metrics.csv")):
        match = name.fullmatch(path.parents[1].name)
        if match is None:
            continue
        with path.open(newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                if row["global/acc"]:
                    yield match, row


def line_of(row: Mapping[str, str], *, method: str, seed: str) -> dict[str, str]:
    """Return the line of an evaluation.

    Args:
        row: The row of its round in metrics.csv.
        method: Label of the run's row.
        seed: Seed of the run.
    """
    return {
        "method": method,
        "seed": seed,
        "round": row["round"],
        "seconds": f"{float(row['time/seconds']):.2f}",
        "accuracy": f"{float(row['global/acc']):.6g}",
        "forgetting": f"{float(row['global/forgetting']):.6g}",
        "staleness": row.get("time/staleness") or "",
        "lost": row.get("time/lost") or "",
    }


def accuracies(lines: Iterable[Mapping[str, str]]) -> Curves:
    """Group the accuracies by row and simulated second.

    Args:
        lines: The lines of `docs/time.csv`.
    """
    curves: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for line in lines:
        # An evaluation is that of the first round that ends after a multiple of the interval, or of the last round.
        moment = int(float(line["seconds"]) / INTERVAL + 0.5) * INTERVAL
        curves[line["method"]][moment].append(100 * float(line["accuracy"]))
    return curves


def draw(curves: Curves, path: Path) -> None:
    """Draw the mean accuracy of each row over simulated seconds, and the range of its seeds.

    Args:
        curves: The accuracies.
        path: The picture.
    """
    figure = new_figure(7.5, 4.2)
    axes = figure.subplots()
    for method, (line, marker) in STYLES.items():
        moments = sorted(curves[method])
        means = [mean(curves[method][moment]) for moment in moments]
        (drawn,) = axes.plot(moments, means, label=method, linestyle=line, marker=marker, markersize=4, linewidth=1.5)
        lowest = [min(curves[method][moment]) for moment in moments]
        highest = [max(curves[method][moment]) for moment in moments]
        axes.fill_between(moments, lowest, highest, color=drawn.get_color(), alpha=0.12, linewidth=0)
    axes.set_xlabel("simulated seconds")
    axes.set_ylabel("accuracy on the test split (%)")
    axes.set_ylim(25, 95)
    axes.legend(frameon=False, loc="lower right")
    tidy(axes)
    save(figure, path)


def main() -> None:
    """Write the csv files of the runs in the folder that is named, and draw them."""
    folder = Path(sys.argv[1])
    order = list(STYLES)
    lines = sorted(evaluations(folder), key=lambda line: (order.index(line["method"]), int(line["seed"])))
    write_table(DOCS / "time.csv", [list(COLUMNS), *([line[name] for name in COLUMNS] for line in lines)])
    shutil.copy(folder / "comparison" / "time-tuning.csv", DOCS / "time_tuning.csv")
    draw(accuracies(lines), DOCS / "images" / "time.png")


if __name__ == "__main__":
    main()
