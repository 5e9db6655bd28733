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
"""Arguments of the loop that are a method, or its other side."""

KEYS = {
    "global/acc": "global model",
    "local/alma": "clients' own models (ALMA)",
    "local/tuned/alma": "clients' models after fine-tuning",
}
"""Accuracies that are drawn, and what has them."""

STEPS_KEY = "cost/steps"
SIZE = (4.2, 2.6)
DPI = 110
PALETTE = 64
"""Of a panel in inches, pixels per inch, colours."""


def files() -> dict[str, str]:
    """Return the stem of each method's file by its name in the table of methods."""
    files = [path for part in ("method", "experiment") for path in HOME.glob(f"{part}/*.yaml")]
    stems = [path.stem.removeprefix("digits_") for path in files]
    plain = {folded(stem): stem for stem in stems}
    return {r["method"]: plain[folded(r["method"])] for r in records() if folded(r["method"]) in plain}


def config_of(stem: str) -> Settings:
    """Merge the files of a method's small experiment."""
    merged: Settings = {}
    for name in small_experiment(stem):
        merged = over(merged, yaml.safe_load((HOME / f"{name}.yaml").read_text(encoding="utf-8")))
    return merged


def over(below: Settings, above: Settings) -> Settings:
    """Lay settings over others."""
    nested = {n: over(below[n], v) for n, v in above.items() if isinstance(v, dict) and isinstance(below.get(n), dict)}
    return below | above | nested


def without(config: Settings) -> tuple[str, Settings]:
    """Take the method out of a configuration.

    Returns:
        what is left: FedAvg, or Local where clients have nets of their own; the configuration.
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
    """Run a YAML in a folder that is removed.

    A run that diverges, as FedAvg among attackers may, is what it was until then.
    """
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        Path("run.yaml").write_text(config, encoding="utf-8")
        words = ["fit", "-c", "run.yaml", "--plots.format", "none", "--trainer.enable_progress_bar", "false"]
        with suppress(NonFiniteUpdateError):
            FederatedCLI(words, [CostMonitor()])
        (run_folder,) = find_runs(["runs"])
        return read_run(run_folder)


def draw(runs: Mapping[str, SavedRun]) -> Figure:
    """Draw the accuracies that the first of the runs has, those of all in one panel."""
    first = next(iter(runs.values()))
    keys = [key for key in KEYS if len(first.history.curve(key)) > 1]
    figure = new_figure(SIZE[0] * len(keys), SIZE[1])
    for axes, key in zip(figure.subplots(1, len(keys), squeeze=False)[0], keys, strict=True):
        curves = {name: run.history.curve(key) for name, run in runs.items()}
        rounds = sorted(set().union(*curves.values()))
        draw_curves(axes, rounds, {n: [c.get(r, float("nan")) for r in rounds] for n, c in curves.items()}, 100.0)
        axes.set(title=KEYS[key], ylabel="accuracy (%)", ylim=(0, 100))
        axes.title.set_fontsize("medium")
        axes.legend(framealpha=0.8, edgecolor="none")
    return figure


def write_picture(figure: Figure, path: Path) -> None:
    """Write a figure with few colours."""
    buffer = BytesIO()
    figure.savefig(buffer, format="png", dpi=DPI)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.open(buffer).convert("RGB").quantize(PALETTE, dither=Image.Dither.NONE).save(path, optimize=True)


def drawn(name: str, stem: str) -> dict[str, str]:
    """Run one method, count its steps, and draw it."""
    config = config_of(stem)
    beside, plain = without(config)
    runs = {named: run(yaml.safe_dump(settings)) for named, settings in ((name, config), (beside, plain))}
    ours, theirs = (steps_of(runs[named]) for named in (name, beside))
    ratio = median(ours[k] / theirs[k] for k in ours if k in theirs)  # cohorts are the same
    write_picture(draw(runs), PICTURES / f"{stem}.png")
    return dict(zip(COLUMNS, (name, beside, f"{ratio:.2f}"), strict=True))


def steps_of(run: SavedRun) -> Mapping[int, float]:
    """Return the local steps of each round; a private run has them under another key."""
    return run.history.curve(STEPS_KEY)


def counted() -> dict[str, dict[str, str]]:
    """Read what was counted by the method's name."""
    with STEPS.open(encoding="utf-8", newline="") as file:
        return {row["method"]: row for row in csv.DictReader(file)}


def main(names: Sequence[str]) -> None:
    """Run these methods, none named: all, and write each as soon as it has run."""
    torch.set_num_threads(1)
    known = files()
    rows = counted() if STEPS.is_file() else {}
    for name in names or known:
        rows[name] = drawn(name, known[name])
        with STEPS.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows[method] for method in known if method in rows)
        print(*rows[name].values(), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
