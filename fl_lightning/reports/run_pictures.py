"""Pictures of a report that runs have prepared: confusion matrices, and what metric objects have drawn."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from fl_lightning.federation.metric_files import FOLDER, name_and_round
from fl_lightning.functional.classes import shown_names
from fl_lightning.metrics.history import BY_CLASS
from fl_lightning.reports.figures import Numbers, plot_confusion
from fl_lightning.reports.page import Picture, SavedPicture
from fl_lightning.reports.saved import Group, SavedRun
from fl_lightning.runs.confusion import CONFUSION, read_matrices
from fl_lightning.utils.round_table import read_cells, reading
from fl_lightning.utils.text import slug

PICTURES = (".png", ".svg")
"""Endings of pictures that a page can hold."""


def confusions_of(groups: Sequence[Group]) -> list[Picture]:
    """Draw as which class the samples of each class are taken in the best and in the last round."""
    pictures = []
    for number, group in enumerate(groups):
        names, totals = summed_confusions(group)
        if not totals:
            continue
        panels = {f"{model} round": table for model, table in totals.items()}
        figure = plot_confusion(panels, names, title=f"{group.label}: confusion matrix")
        caption = caption_of_confusion(group, shown_names(names), totals["last"])
        pictures.append(Picture(f"confusion-{number}", figure, caption, wide=True))
    return pictures


def summed_confusions(group: Group) -> tuple[list[str], dict[str, Numbers]]:
    """Sum the confusion matrices of a group's runs that have the same classes.

    Returns:
        The names of the C classes, and by model (`best`, `last`) the sums (C, C + 1). Both are empty without matrices.
    """
    names: list[str] = []
    totals: dict[str, Numbers] = {}
    for run in group.runs:
        names_of_run, matrices = confusions_of_run(run)
        if not matrices or (names and names != names_of_run):
            continue
        names = names_of_run
        for model, table in matrices.items():
            totals[model] = totals.get(model, 0.0) + table
    return names, totals


def confusions_of_run(run: SavedRun) -> tuple[list[str], dict[str, Numbers]]:
    """Read the confusion matrices of a run.

    Returns:
        As `summed_confusions`. Both are empty if the file is of an earlier round than the last evaluated one, or if
        later rounds of the run are left out.
    """
    path = run.folder / CONFUSION
    evaluated, _, _ = run.history.columns(BY_CLASS)
    if not path.is_file() or not run.is_whole or not evaluated:
        return [], {}
    with reading(path, "a table of confusion matrices, and cannot be read as one"):
        names, matrices = read_matrices(read_cells(path))
    last_round, _ = matrices.get("last", (-1, None))
    if last_round != evaluated[-1] or "best" not in matrices:
        return [], {}
    tables: dict[str, Numbers] = {}
    for model in ("best", "last"):
        _, counts = matrices[model]
        tables[model] = counts.double().numpy()
    return names, tables


def caption_of_confusion(group: Group, names: Sequence[str], last: Numbers) -> str:
    """Describe confusion matrices, and name the class that is most often taken for another one at the end.

    Args:
        group: The runs.
        names: Names of the C classes.
        last: Numbers of samples by class and answer in the last round, (C, C + 1).
    """
    over = f", summed over {len(group.runs)} seeds" if len(group.runs) > 1 else ""
    text = f"As which class the samples of each class are taken, in percent of the class: {group.label}{over}."
    totals = last.sum(axis=1, keepdims=True)
    shares = np.zeros_like(last)
    np.divide(last, totals, out=shares, where=totals > 0)
    mistaken = shares[:, : len(names)]
    np.fill_diagonal(mistaken, 0.0)
    row, column = divmod(int(mistaken.argmax()), len(names))
    share = 100 * mistaken[row, column]
    if share == 0:
        return text
    return f"{text} The largest at the end: {share:.0f} % of class {names[row]} are taken for {names[column]}."


def metric_pictures_of(groups: Sequence[Group]) -> list[SavedPicture | str]:
    """Show what the metric objects of each group have drawn of the last evaluation, for the first run that has it."""
    parts: list[SavedPicture | str] = []
    for group in groups:
        for run in group.runs:
            found = pictures_of_run(group, run)
            if found:
                parts.extend(found)
                break
    return parts


def pictures_of_run(group: Group, run: SavedRun) -> list[SavedPicture | str]:
    """Return the pictures of a run's metrics. They are none if later rounds of the run are left out.

    A run may have been continued without drawing. A sentence then takes the place of the picture.
    """
    if not run.is_whole:
        return []
    which = f"{group.label}, seed {run.seed}" if len(group.runs) > 1 else group.label
    files = sorted((run.folder / FOLDER).glob("*"))
    evaluated = last_rounds(path for path in files if path.suffix == ".npz")
    drawn = last_rounds(path for path in files if path.suffix in PICTURES)
    parts: list[SavedPicture | str] = []
    for name, path in drawn.items():
        if name not in evaluated:
            continue
        _, drawn_round = name_and_round(path)
        _, evaluated_round = name_and_round(evaluated[name])
        if drawn_round == evaluated_round:
            caption = f"{name} after round {drawn_round}: {which}."
            parts.append(SavedPicture(f"{name}-{slug(which)}", path, caption))
        else:
            parts.append(
                f"{name} is not shown: its last picture is of round {drawn_round}, and its last value of round "
                f"{evaluated_round}. Continue the run with --plots.format metrics to draw it."
            )
    return parts


def last_rounds(paths: Iterable[Path]) -> dict[str, Path]:
    """Return the file of the last round of each metric, by the name of the metric. Other files are left out."""
    rounds: dict[str, int] = {}
    found: dict[str, Path] = {}
    for path in paths:
        name, round_idx = name_and_round(path)
        if round_idx is not None and round_idx >= rounds.get(name, 0):
            rounds[name] = round_idx
            found[name] = path
    return found
