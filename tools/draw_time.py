"""Makes `docs/time.csv` and its picture from the runs of the comparison by simulated seconds.

fl-lightning reproduce configs/comparison/time.yaml
python -m tools.draw_time reproduced
"""

import csv
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import mean

from fl_lightning.reports.figures import new_figure, save, tidy
from fl_lightning.utils.files import write_table

DOCS = Path(__file__).resolve().parents[1] / "docs"
RUN = re.compile(r"(?P<method>.+?)(-\w+=[\d.]+)*-seed(?P<seed>\d+)-[0-9a-f]{8}")
"""A folder of runs: the row, its tuned values, the seed and a digest."""

NAMES = {"deadline_drop": "deadline, drop", "deadline_cut": "deadline, cut"}
"""Labels of rows whose folders are named otherwise."""

ORDER = ("synchronous", "over-selected", "deadline, drop", "deadline, cut", "FedBuff", "FedAsync")
COLUMNS = ("method", "seed", "round", "seconds", "accuracy", "forgetting", "staleness", "lost")
EVERY = 30
"""Seconds from one evaluation to the next."""


def evaluations(folder: Path) -> Iterable[dict[str, str]]:
    """Give a line for each evaluation of each run.

    Args:
        folder: The output of `reproduce`.
    """
    for path in sorted(folder.glob("runs/*/*/metrics.csv")):
        named = RUN.fullmatch(path.parents[1].name)
        if named is None:
            continue
        method = NAMES.get(named["method"], named["method"])
        with path.open(newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                if row["global/acc"]:
                    yield line_of(row, method=method, seed=named["seed"])


def line_of(row: Mapping[str, str], *, method: str, seed: str) -> dict[str, str]:
    """Return the line of an evaluation."""
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


def draw(lines: Iterable[Mapping[str, str]], path: Path) -> None:
    """Draw the mean accuracy of each method over simulated seconds, and the range of its seeds.

    Args:
        lines: The lines of `docs/time.csv`.
        path: The picture.
    """
    values: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for line in lines:
        # An evaluation follows the first round that ends after a multiple of the interval.
        moment = int(float(line["seconds"]) / EVERY + 0.5) * EVERY
        values[line["method"]][moment].append(100 * float(line["accuracy"]))
    figure = new_figure(7.5, 4.2)
    axes = figure.subplots()
    for method in ORDER:
        moments = sorted(values[method])
        curve = [mean(values[method][moment]) for moment in moments]
        (drawn,) = axes.plot(moments, curve, label=method, linewidth=1.6)
        low = [min(values[method][moment]) for moment in moments]
        high = [max(values[method][moment]) for moment in moments]
        axes.fill_between(moments, low, high, color=drawn.get_color(), alpha=0.12, linewidth=0)
    axes.set_xlabel("simulated seconds")
    axes.set_ylabel("accuracy on the test split (%)")
    axes.set_ylim(40, 95)
    axes.legend(frameon=False, loc="lower right")
    tidy(axes)
    save(figure, path)


def main() -> None:
    """Write the csv of the runs in the folder that is named, and draw it."""
    lines = sorted(evaluations(Path(sys.argv[1])), key=lambda line: (ORDER.index(line["method"]), int(line["seed"])))
    write_table(DOCS / "time.csv", [list(COLUMNS), *([line[name] for name in COLUMNS] for line in lines)])
    draw(lines, DOCS / "images" / "time.png")


if __name__ == "__main__":
    main()
