"""Draws methods' accuracy beside FedAvg's and counts their local steps: `python -m tools.draw_methods [METHOD …]`.

Each method runs as its shipped `experiment/digits_*`, beside the same file without the method. It writes
docs/images/methods/ and docs/steps.csv; all methods take ten minutes of a core.
"""

import csv
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import chdir, suppress
from functools import cache
from io import BytesIO
from pathlib import Path
from statistics import median
from typing import Any

import torch
import yaml
from matplotlib.figure import Figure
from PIL import Image

from fl_lightning.cli.configs import HOME, small_experiment
from fl_lightning.cli.main import FederatedCLI
from fl_lightning.cli.methods import records
from fl_lightning.members.faults import NonFiniteUpdateError
from fl_lightning.monitors import CostMonitor
from fl_lightning.papers.stored import csv_rows
from fl_lightning.reports.figures import draw_curves, new_figure
from fl_lightning.reports.saved import SavedRun, find_runs, read_run
from fl_lightning.utils.text import folded

Settings = dict[str, Any]
DOCS = Path(__file__).resolve().parents[1] / "docs"
STEPS = DOCS / "steps.csv"
PICTURES = DOCS / "images" / "methods"
COLUMNS = ("method", "beside", "steps")
"""A method, what the rest of its experiment is without it, and the ratio of their local steps in a round."""

PARTS = ("aggregator", "server_module", "server_optimizer", "transforms", "personal")
"""Arguments of the loop that belong to a method."""

KEYS = {
    "global/acc": "global model",
    "local/alma": "clients' own models (ALMA)",
    "local/tuned/alma": "clients' models after fine-tuning",
}
"""The models that have the accuracies that are drawn, by key."""

STEPS_KEY = "cost/steps"
SIZE = (4.2, 2.6)
"""Width and height of a panel in inches."""

DPI = 110
PALETTE = 64
"""Number of colors of a picture."""


def files() -> dict[str, str]:
    """Return the stem of each method's file by its name in the table of methods."""
    stems = dict[str, str]()
    for path in [*HOME.glob("method/*.yaml"), *HOME.glob("experiment/*.yaml")]:
        stem = path.stem.removeprefix("digits_")
        stems[folded(stem)] = stem
    names = [record["method"] for record in records()]
    return {name: stems[folded(name)] for name in names if folded(name) in stems}


def config_of(stem: str) -> Settings:
    """Merge the files of a method's small experiment."""
    merged: Settings = {}
    for name in small_experiment(stem):
        merged = over(merged, yaml.safe_load((HOME / f"{name}.yaml").read_text(encoding="utf-8")))
    return merged


def over(below: Settings, above: Settings) -> Settings:
    """Lay settings over others, also within nested settings."""
    merged = below | above
    for name, value in above.items():
        if isinstance(value, dict) and isinstance(below.get(name), dict):
            merged[name] = over(below[name], value)
    return merged


def without(config: Settings) -> tuple[str, Settings]:
    """Take the method out of a configuration.

    Returns:
        The method that is left, FedAvg or, for clients with nets of their own, Local. The configuration.
    """
    model = {name: value for name, value in config["model"].items() if name not in PARTS}
    model["client"], name = plain_client(model["client"])
    return name, config | {"model": model}


def plain_client(client: Settings) -> tuple[Settings, str]:
    """Replace a method by FedAvg, or Local, within the attacks around it."""
    given = client["init_args"]
    if "client" in given:
        inner, name = plain_client(given["client"])
        return client | {"init_args": given | {"client": inner}}, name
    name = "Local" if given["net"]["class_path"].endswith("HeterogeneousNets") else "FedAvg"
    optimizer = given["optimizer"].get("init_args", {}).get("base") or given["optimizer"]
    kept = {"net": given["net"], "optimizer": optimizer}
    return {"class_path": f"fl_lightning.methods.{name}", "init_args": kept}, name


@cache
def run(config: str) -> SavedRun:
    """Run a YAML in a folder that is removed, and return the run.

    FedAvg among attackers may diverge. Such a run has its rounds until then.
    """
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        Path("run.yaml").write_text(config, encoding="utf-8")
        words = ["fit", "-c", "run.yaml", "--plots.format", "none", "--trainer.enable_progress_bar", "false"]
        with suppress(NonFiniteUpdateError):
            FederatedCLI(words, [CostMonitor()])
        (run_folder,) = find_runs(["runs"])
        return read_run(run_folder)


def draw(runs: Mapping[str, SavedRun]) -> Figure:
    """Draw a panel for each accuracy that the first run has, with the curves of all runs."""
    first = next(iter(runs.values()))
    keys = [key for key in KEYS if len(first.history.curve(key)) > 1]
    width, height = SIZE
    figure = new_figure(width * len(keys), height)
    panels = figure.subplots(1, len(keys), squeeze=False)[0]
    for axes, key in zip(panels, keys, strict=True):
        curves = {name: run.history.curve(key) for name, run in runs.items()}
        rounds = sorted(set().union(*curves.values()))
        values = {}
        for name, curve in curves.items():
            values[name] = [curve.get(round_idx, float("nan")) for round_idx in rounds]
        draw_curves(axes, rounds, values, scale=100.0)
        axes.set(title=KEYS[key], ylabel="accuracy (%)", ylim=(0, 100))
        axes.title.set_fontsize("medium")
        axes.legend(framealpha=0.8, edgecolor="none")
    return figure


def write_picture(figure: Figure, path: Path) -> None:
    """Write a figure with few colours."""
    buffer = BytesIO()
    figure.savefig(buffer, format="png", dpi=DPI)
    picture = Image.open(buffer).convert("RGB").quantize(PALETTE, dither=Image.Dither.NONE)
    path.parent.mkdir(parents=True, exist_ok=True)
    picture.save(path, optimize=True)


def drawn(name: str, stem: str) -> dict[str, str]:
    """Run one method, count its steps, and draw it."""
    config = config_of(stem)
    beside, plain = without(config)
    run_of_method = run(yaml.safe_dump(config))
    plain_run = run(yaml.safe_dump(plain))
    steps = run_of_method.history.curve(STEPS_KEY)
    plain_steps = plain_run.history.curve(STEPS_KEY)
    # Both runs have the same cohort in a round.
    ratio = median(steps[round_idx] / plain_steps[round_idx] for round_idx in steps if round_idx in plain_steps)
    write_picture(draw({name: run_of_method, beside: plain_run}), PICTURES / f"{stem}.png")
    return {"method": name, "beside": beside, "steps": f"{ratio:.2f}"}


def counted() -> dict[str, dict[str, str]]:
    """Read the lines of docs/steps.csv by the method's name. There are none if there is no file."""
    return {row["method"]: row for row in csv_rows(STEPS)}


def main(names: Sequence[str]) -> None:
    """Run methods, and write each as soon as it has run. Without names it runs all."""
    torch.set_num_threads(1)
    known = files()
    rows = counted()
    for name in names or known:
        rows[name] = drawn(name, known[name])
        with STEPS.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows[method] for method in known if method in rows)
        print(*rows[name].values(), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
