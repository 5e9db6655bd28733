"""The report of one run or several: what it says and shows, from what their folders hold."""

import math
import re
from collections.abc import Iterable, Sequence
from hashlib import sha256
from pathlib import Path

import numpy as np

from fl_lightning.functional.forgetting import forgetting_per_class
from fl_lightning.metrics.history import BY_CLASS, EPSILON, EPSILON_LOCAL, EPSILON_SAMPLES, UNPROTECTED
from fl_lightning.reports.comparison_tables import spread, table_of, writer
from fl_lightning.reports.comparisons import Band, plot_bands, plot_before_after, plot_forgetting
from fl_lightning.reports.figures import Numbers, plot_classwise, plot_partition
from fl_lightning.reports.page import WARNING, Picture, Section, drawn, write_page
from fl_lightning.reports.result_tables import Cell, Table
from fl_lightning.reports.results import compare, in_percent, known_metrics, scope_of, statistics_of
from fl_lightning.reports.saved import CLASSIFICATION, Counts, Group, data_differences, differing, read_columns
from fl_lightning.reports.terminal import AVERAGES
from fl_lightning.runs.value_names import is_lower_better
from fl_lightning.utils.files import write_file

MOST_CURVES = 24
"""Values over the rounds that are drawn, one figure each."""

MOST_GROUPS = 24
"""Groups that figures show: more can be told apart neither by their colours nor in a legend."""

MOST_PARTITIONS = 6
LONGEST_STEM = 100
"""Characters of a key that stand in the name of its figure's file."""

MEGABYTE = 1e6
PAIRS = (("before", "after"), ("initial", "personalised"))
"""Words by which two values are one pair, before and after local training."""

HIDDEN = {
    EPSILON: ("each client", "aggregator"),
    EPSILON_SAMPLES: ("each sample", "client"),
    EPSILON_LOCAL: ("each client from the server", "client"),
}
"""Neighbours that a guarantee hides, by its log key, with the part of the model that has its settings."""

NAMES = {
    "global/acc": "accuracy, test split (%)",
    "val/acc": "accuracy, validation split (%)",
    "global/loss": "loss, test split",
    "val/loss": "loss, validation split",
    "global/forgetting": "forgetting F, test split (%)",
    EPSILON: "ε of all rounds so far",
    "local/alma": "ALMA, mean of the clients' own accuracies (%)",
}
"""Label of a value's axis, by log key; of any other it is the key."""


def write_report(
    groups: Sequence[Group],
    folder: Path,
    forms: Iterable[str] = (),
    tables: Sequence[Table] | None = None,
    notes: Sequence[str] = (),
) -> Path:
    """Write `report.html`, and each figure on its own.

    Args:
        groups: of runs.
        folder: of the report, made where there is none.
        forms: of the figures' files in `figures`: svg, png, pdf; none: they are in the report only.
        tables: of results; None: those of all known metrics.
        notes: sentences above them.

    Returns:
        The path of the page.
    """
    chosen = best_of(groups)
    left_out = f"Figures show the {len(chosen)} of {len(groups)} groups that are best at the end; tables have all."
    sections = [
        Section("Results", results_of(groups, tables, notes)),
        Section("Privacy", privacy_of(groups)),
        Section("Over the rounds", [*[left_out] * (len(chosen) < len(groups)), *curves_of(chosen)]),
        Section("Classes", [*scores_of(groups), *classes_of(chosen)]),
        Section("Before and after local training", before_after_of(chosen)),
        Section("Communication", communication_of(groups, chosen)),
        Section("Partition", partitions_of(groups)),
        Section("Settings", settings_of(groups)),
    ]
    pictures = [part for section in sections for part in section.parts if isinstance(part, Picture)]
    for form in forms:
        for picture in pictures:
            write_file(folder / "figures" / f"{picture.name}.{form}", drawn(picture.figure, form))
    labels = [group.label for group in groups]  # those with several settings have commas of their own
    title = ("; " if any("," in label for label in labels) else ", ").join(labels)
    write_page(folder / "report.html", title, [section for section in sections if section.parts])
    return folder / "report.html"


def best_of(groups: Sequence[Group]) -> Sequence[Group]:
    """Choose the groups that figures show: all, or of many the best by the first known metric, in their order."""
    key = next(iter(known_metrics(groups)), "")
    sign = 1 if is_lower_better(key) else -1

    def rank(group: Group) -> float:
        values = [sign * statistics_of(run, key).get("final", math.nan) for run in group.runs]
        return math.inf if math.isnan(mean := sum(values) / len(values)) else mean

    best = sorted(groups, key=rank)[:MOST_GROUPS]
    return [group for group in groups if group in best]


# --- tables ---------------------------------------------------------------------------------------


def results_of(groups: Sequence[Group], tables: Sequence[Table] | None, notes: Sequence[str]) -> list[Table | str]:
    """Collect notes and tables, which compare the groups by each known metric where their data are the same."""
    if differences := data_differences(groups):
        names = ", ".join(f"{setting.name} ({setting.was}, {setting.now})" for setting in differences)
        warning = f"these runs differ in their data or cohorts, so their values do not make one table: {names}."
        return [WARNING + warning, *notes, *(tables or [])]
    if tables is None:
        tables = [table_of(compare(groups, key, groups[0].label)) for key in known_metrics(groups)]
    return [*notes, *tables]


def settings_of(groups: Sequence[Group]) -> list[Table | str]:
    """List the settings that differ between the groups, with their seeds and folders."""
    header = ["setting", *(group.label for group in groups)]
    rows = [
        [Cell(name), *(Cell(value or "–") for value in values)]
        for name, values in differing([group.runs[0].settings for group in groups]).items()
    ]
    rows.append([Cell("seeds"), *(Cell(", ".join(run.seed or "?" for run in group.runs)) for group in groups)])
    rounds = (" or ".join(map(str, sorted({len(run.history) for run in group.runs}))) for group in groups)
    rows.append([Cell("rounds"), *map(Cell, rounds)])
    title = "Settings that differ" if len(groups) > 1 else "The run" if len(groups[0].runs) == 1 else "The runs"
    folders = [f"{group.label}: {', '.join(str(run.folder) for run in group.runs)}" for group in groups]
    return [Table(title, header, rows), "Folders. " + "; ".join(folders)]


def privacy_of(groups: Sequence[Group]) -> list[Table | str]:
    """List what the guarantees of private runs have cost, and tell what they do not cover."""
    rows = []
    for group in groups:
        settings = group.runs[0].settings
        drawn = "a secret one" if settings.get("data.secret_seed") else "in config.yaml: simulated"
        for key, (whom, owner) in HIDDEN.items():
            rounds, values = group.curves(key)
            if rounds:
                delta = next((v for name, v in settings.items() if name == f"model.{owner}.delta"), "?")
                cells = (group.label, whom, f"{values.max():.4g}", f"{delta}", str(rounds[-1] + 1), drawn)
                rows.append([*map(Cell, cells)])
    if not rows:
        return []
    note = (
        "Whether such a one is in the data, or for local privacy what it has, changes what is released by (ε, δ) only. "
        f"Values whose names begin with {UNPROTECTED} are of the clients as they are, and are not covered."
    )
    header = ["method", "hidden", "ε", "δ", "rounds", "seed of cohorts and noise"]
    return [Table("Differential privacy", header, rows, note)]


def file_stem(key: str) -> str:
    """Name the file of a key: no two keys have one name, and a plain key can be read in it.

    >>> file_stem("global/acc"), file_stem("global-acc")
    ('global-acc', 'global-acc~51f1cd78')
    """
    readable = re.sub(r"[^\w.]+", "-", key, flags=re.ASCII)[:LONGEST_STEM]
    if re.fullmatch(r"[\w.]+(/[\w.]+)*", key, re.ASCII) and len(key) <= LONGEST_STEM:
        return readable
    return f"{readable}~{sha256(key.encode(errors='backslashreplace')).hexdigest()[:8]}"


# --- figures --------------------------------------------------------------------------------------


def curves_of(groups: Sequence[Group]) -> list[Picture | str]:
    """Draw each value over the rounds, but for class-wise ones and bytes."""
    keys = dict.fromkeys(name for group in groups for run in group.runs for name in run.history.names)
    shown = [k for k in keys if BY_CLASS not in k and not k.removeprefix(UNPROTECTED).startswith("comm/")]
    shown.sort(key=lambda key: ([*NAMES, key].index(key), key))
    parts: list[Picture | str] = []
    for key in shown[:MOST_CURVES]:
        scale = 100.0 if in_percent(key) else 1.0
        curves = ((group.label, *group.curves(key)) for group in groups)
        bands = {label: Band(rounds, scale * values) for label, rounds, values in curves}
        if any(band.x for band in bands.values()):
            last = "; ".join(f"{label} {band.values[:, -1].mean():.4g}" for label, band in bands.items() if band.x)
            caption = f"{scope_of(key)} after each round{bands_text(groups)}. Last: {last}{' (%)' * (scale == 100)}."
            figure = plot_bands(bands, NAMES.get(key, key + " (%)" * (scale == 100)))
            parts.append(Picture("curve-" + file_stem(key), figure, caption))
    if len(shown) > MOST_CURVES:
        parts.append(f"Not drawn, but in metrics.csv: {', '.join(shown[MOST_CURVES:])}.")
    return parts


def bands_text(groups: Sequence[Group]) -> str:
    """Describe line and band, where a group has several runs."""
    most = max(len(group.runs) for group in groups)
    return ", mean and one standard deviation over the seeds" if most > 1 else ""


def scores_of(groups: Sequence[Group]) -> list[Table]:
    """Lay out precision, recall and F1 of the last global models, mean over the runs, where these have them."""
    rows, header = [], ["method"]
    for group in groups:
        tables = [read_columns(run.folder / CLASSIFICATION, ["class"]) for run in group.runs if run.is_whole]
        tables = [table for table in tables if {*AVERAGES} <= {*table.get("class", ())}]
        if tables:
            names = [name for name in tables[0] if name not in ("class", "samples")]
            header = ["method", *(f"{average} {name}" for average in AVERAGES for name in names)]
            places = [(average, name) for average in AVERAGES for name in names]
            values = [spread([float(t[n][t["class"] == a][0]) for t in tables], writer("acc")) for a, n in places]
            rows.append([Cell(group.label), *map(Cell, values)])
    if not rows:
        return []
    note = "Of the global model after the last round, on the split that is evaluated in every round."
    return [Table("Precision, recall and F1 over the classes, %", header, rows, note)]


def classes_of(groups: Sequence[Group]) -> list[Picture]:
    """Draw the class × round accuracies of each group, and what each class forgot."""
    maps, forgotten, names = [], {}, list[str]()
    for i, group in enumerate(groups):
        rounds, class_names, table = group.columns(BY_CLASS)
        if not rounds:
            continue
        names = class_names
        worst = int(np.nanargmin(table[-1])) if not np.isnan(table[-1]).all() else 0
        over = f", mean over {len(group.runs)} seeds" if len(group.runs) > 1 else ""
        caption = (
            f"Accuracy of the global model on each class after each round: {group.label}{over}. "
            f"Lowest at the end: class {names[worst]}, {100 * table[-1, worst]:.1f} %."
        )
        title = f"{group.label}: accuracy by class"
        maps.append(Picture(f"classes-{i}", plot_classwise(table, names, rounds, title), caption, wide=True))
        columns = (run.history.columns(BY_CLASS) for run in group.runs)
        forgotten[group.label] = np.stack([forgetting_per_class(c[2]).numpy() for c in columns if c[1] == names])
    if not forgotten:
        return []
    alike = {label: values for label, values in forgotten.items() if values.shape[1] == len(names)}
    most = "; ".join(
        f"{label} {names[int(np.nanargmax(v.mean(0)))]}" for label, v in alike.items() if not np.isnan(v).all()
    )
    caption = f"Best accuracy over the rounds minus the last, of each class. The class that is forgotten most: {most}."
    return [Picture("forgetting-classes", plot_forgetting(alike, names), caption), *maps]


def before_after_of(groups: Sequence[Group]) -> list[Picture]:
    """Draw each pair of values before and after local training that all groups know, in the last round with it."""
    pictures = []
    for first, second in PAIRS:
        known = dict.fromkeys(n for group in groups for run in group.runs for n in (*run.history.names, *run.clients))
        for name in known:
            others = (name.replace(first, second), name.replace(f"_{first}", ""))  # loss_after; acc_own
            other = next((other for other in others if other in known and other != name), None)
            if other is None:
                continue
            label = name.replace(first, "").strip("/_ ") or name
            scale = 100.0 if in_percent(name) or label.startswith("acc_") else 1.0
            values = ((group.label, scale * last(group, name), scale * last(group, other)) for group in groups)
            pairs = {group: (was, now) for group, was, now in values if 0 < len(was) == len(now)}
            if not pairs:
                continue
            change = "; ".join(f"{group} {now.mean() - was.mean():+.3g}" for group, (was, now) in pairs.items())
            caption = f"{name} and {other}, mean over the clients of the last round that has them. Change: {change}."
            figure = plot_before_after(pairs, label + " (%)" * (scale == 100), (first, second))
            pictures.append(Picture("pair-" + file_stem(name), figure, caption))
    return pictures


def last(group: Group, name: str) -> Numbers:
    """Last known value of each run: of its metrics, else the mean over the clients of the last round, (S,)."""
    values = []
    for run in group.runs:
        if curve := run.history.curve(name):
            values.append(curve[max(curve)])
        elif name in run.clients and "round" in run.clients:
            rounds, column = run.clients["round"], run.clients[name]
            known = ~np.isnan(column)
            if known.any():
                values.append(float(column[known & (rounds == rounds[known].max())].mean()))
    return np.array(values)


def communication_of(groups: Sequence[Group], chosen: Sequence[Group]) -> list[Picture | Table]:
    """List what a round moves, and draw the accuracy of the chosen groups over the bytes that were moved."""
    rows, key = [], next(iter(known_metrics(groups)), "")
    bands = {group.label: Band([], np.zeros((0, 0))) for group in chosen}
    for group in groups:
        rounds, down = group.curves("comm/bytes_down")
        up_rounds, up = group.curves("comm/bytes_up")
        if not rounds or rounds != up_rounds:
            continue
        values = [down.mean(), up.mean(), (down + up).sum(1).mean()]
        rows.append([Cell(group.label), *(Cell(f"{value / MEGABYTE:.4g}") for value in values)])
        evaluated, scores = group.curves(key)
        if group in chosen and evaluated and len(scores) == len(down) and set(evaluated) <= set(rounds):
            places = [rounds.index(r) for r in evaluated]
            moved = (down + up).cumsum(1).mean(0)[places] / MEGABYTE
            bands[group.label] = Band([float(x) for x in moved], (100.0 if in_percent(key) else 1.0) * scores)
    if not rows:
        return []
    header = ["method", "to clients, a round", "to the server, a round", "in all"]
    note = "Values of the messages as they are sent; mean over the rounds and seeds."
    if any(f"{UNPROTECTED}comm/bytes_down" in run.history.names for group in groups for run in group.runs):
        note += " Of private runs they are unprotected: they tell how many clients took part."
    parts: list[Picture | Table] = [Table("Communication, MB", header, rows, note)]
    if any(band.x for band in bands.values()):
        caption = f"{scope_of(key)} over the bytes moved in both directions{bands_text(groups)}."
        figure = plot_bands(bands, NAMES.get(key, key), "communication, both directions (MB)")
        parts.append(Picture("communication", figure, caption))
    return parts


def partitions_of(groups: Sequence[Group]) -> list[Picture | str]:
    """Draw the different partitions, the first of them."""
    tables: dict[tuple[object, ...], tuple[Counts, list[str]]] = {}
    for group in groups:
        for run in group.runs:
            if run.partition is not None:
                users = tables.setdefault((run.partition.table.tobytes(), *run.partition.names), (run.partition, []))[1]
                users.append(group.label + f", seed {run.seed}" * (len(group.runs) > 1))
    parts: list[Picture | str] = []
    for i, ((table, names), users) in enumerate(list(tables.values())[:MOST_PARTITIONS]):
        held = (table > 0).sum(1)
        who = "; ".join(users[:3]) + f" and {len(users) - 3} more" * (len(users) > 3)
        caption = (
            f"Training samples of each class at each client: {who}. A client has {held.min()} to {held.max()} of the "
            f"{len(names)} classes and {table.sum(1).min():.0f} to {table.sum(1).max():.0f} samples."
        )
        parts.append(Picture(f"partition-{i}", plot_partition(table, names), caption, wide=True))
    if len(tables) > MOST_PARTITIONS:
        parts.append(f"{len(tables) - MOST_PARTITIONS} further partitions are not drawn; partition.csv has each.")
    return parts
