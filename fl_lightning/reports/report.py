"""The report of one or several runs: tables and figures from the files in their folders."""

import math
import re
from collections.abc import Iterable, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from fl_lightning.functional.forgetting import forgetting_per_class
from fl_lightning.metrics.history import BY_CLASS, EPSILON, EPSILON_LOCAL, EPSILON_SAMPLES, UNPROTECTED
from fl_lightning.metrics.keys import (
    LOST,
    STALENESS,
    STALENESS_MAX,
    TIME,
    Unit,
    is_in_percent,
    is_of_task,
    percent_factor,
    scope_of,
)
from fl_lightning.reports.comparison_tables import comparison_table, spread, writer
from fl_lightning.reports.comparisons import Band, plot_bands, plot_before_after, plot_forgetting
from fl_lightning.reports.figures import Numbers, plot_classwise, plot_partition
from fl_lightning.reports.page import WARNING, Part, Picture, SavedPicture, Section, drawn, write_page
from fl_lightning.reports.result_tables import Table, TableCell
from fl_lightning.reports.results import (
    bytes_by_round,
    compare,
    direction_in,
    known_metrics,
    mean_of,
    runs_of,
    statistics_of,
    unit_in,
)
from fl_lightning.reports.run_pictures import confusions_of, metric_pictures_of
from fl_lightning.reports.saved import (
    CLASSIFICATION,
    ROUND,
    Counts,
    Group,
    SavedRun,
    classification_round,
    data_differences,
    differing,
    read_columns,
)
from fl_lightning.reports.tasks import tasks_of
from fl_lightning.reports.terminal import AVERAGES
from fl_lightning.reports.time_figures import plot_timeline
from fl_lightning.runs.timeline import TIMELINE, read_timeline
from fl_lightning.utils.files import write_file

MOST_CURVES = 24
"""Largest number of values that are drawn over the rounds, one figure each."""

MOST_GROUPS = 24
"""Largest number of groups in a figure. More cannot be told apart by colour."""

MOST_PARTITIONS = 6
"""Largest number of partitions that are drawn."""

LONGEST_STEM = 100
"""Largest number of characters of a key in the name of its figure's file."""

MEGABYTE = 1e6
PAIRS = (("before", "after"), ("initial", "personalised"))
"""Words in the names of two values that belong together: before and after local training."""

HIDDEN = {
    EPSILON: ("each client", "aggregator"),
    EPSILON_SAMPLES: ("each sample", "client"),
    EPSILON_LOCAL: ("each client from the server", "client"),
}
"""What a privacy guarantee hides, and the part of the model with its settings, by log key."""

NAMES = {
    "global/acc": "accuracy, test split (%)",
    "val/acc": "accuracy, in validation (%)",
    "global/loss": "loss, test split",
    "val/loss": "loss, in validation",
    "global/forgetting": "forgetting F, test split (%)",
    EPSILON: "ε of all rounds so far",
    "local/alma": "ALMA, mean of the clients' own accuracies (%)",
    "local/tuned/alma": "ALMA after fine-tuning (%)",
    "global/acc_tasks": "mean accuracy over the tasks met, test split (%)",
    "val/acc_tasks": "mean accuracy over the tasks met, in validation (%)",
    "global/forgetting_tasks": "forgetting of tasks, test split (%)",
    "val/forgetting_tasks": "forgetting of tasks, in validation (%)",
    STALENESS: "mean staleness (server steps)",
}
"""Labels of axes by log key. Any other key is its own label."""


def write_report(
    groups: Sequence[Group],
    folder: Path,
    forms: Iterable[str] = (),
    *,
    tables: Sequence[Table] | None = None,
    notes: Sequence[str] = (),
    at_seconds: Sequence[float] = (),
) -> Path:
    """Write `report.html` and, on request, each figure as a file.

    Args:
        groups: Groups of runs.
        folder: Folder of the report. It is made if it does not exist.
        forms: Formats of the files in `figures`: `svg`, `png` or `pdf`. Empty writes no files.
        tables: Tables of results. None makes one for every known metric.
        notes: Sentences above the tables.
        at_seconds: Simulated seconds after which the values have a column in the tables that are made.

    Returns:
        The path of the page.
    """
    shown = best_of(groups)
    over_rounds: list[Part] = []
    if len(shown) < len(groups):
        over_rounds.append(
            f"Figures show the {len(shown)} of {len(groups)} groups that are best at the end; tables have all."
        )
    over_rounds.extend(curves_of(shown))
    sections = [
        Section("Results", results_of(groups, tables, notes, at_seconds=at_seconds)),
        Section("Privacy", privacy_of(groups)),
        Section("Over the rounds", over_rounds),
        Section("Tasks", tasks_of(shown)),
        Section("Over simulated time", [*clocks_of(groups), *timed_curves_of(shown), *timelines_of(shown)]),
        Section("Classes", [*scores_of(groups), *classes_of(shown), *confusions_of(shown)]),
        Section("Matrices and curves", metric_pictures_of(shown)),
        Section("Before and after local training", before_after_of(shown)),
        Section("Communication", communication_of(groups, shown)),
        Section("Partition", partitions_of(groups)),
        Section("Settings", settings_of(groups)),
    ]
    sections = [section for section in sections if section.parts]
    for form in forms:
        for section in sections:
            write_figures(section, folder / "figures", form)
    page = folder / "report.html"
    write_page(page, title_of(groups), sections)
    return page


def write_figures(section: Section, folder: Path, form: str) -> None:
    """Write the figures of a section as files of one format. A picture that somebody else has drawn keeps its own."""
    for part in section.parts:
        if isinstance(part, Picture):
            write_file(folder / f"{part.name}.{form}", drawn(part.figure, form))
        elif isinstance(part, SavedPicture):
            write_file(folder / f"{part.name}{part.path.suffix}", part.path.read_bytes())


def title_of(groups: Sequence[Group]) -> str:
    """Join the labels of the groups, by semicolons if a label contains a comma."""
    labels = [group.label for group in groups]
    has_comma = any("," in label for label in labels)
    return ("; " if has_comma else ", ").join(labels)


def best_of(groups: Sequence[Group]) -> Sequence[Group]:
    """Return the groups that figures show: the best ones by the first known metric, in their order.

    They are the first ones if nobody tells whether lower or higher is better.
    """
    key = next(iter(known_metrics(groups)), "")
    direction = direction_in(runs_of(groups), key)

    def rank(group: Group) -> float:
        mean = mean_of([statistics_of(run, key).get("final", math.nan) for run in group.runs])
        if direction is None or not math.isfinite(mean):
            return math.inf
        return mean if direction == "min" else -mean

    best = sorted(groups, key=rank)[:MOST_GROUPS]
    return [group for group in groups if group in best]


def left_out_of(groups: Sequence[Group]) -> list[str]:
    """Return the sentences on runs and files that were left out."""
    sentences: list[str] = []
    for group in groups:
        sentences += group.notes
        for run in group.runs:
            sentences += run.notes
    return sentences


# --- tables ---


def results_of(
    groups: Sequence[Group],
    tables: Sequence[Table] | None,
    notes: Sequence[str],
    *,
    at_seconds: Sequence[float] = (),
) -> list[Table | str]:
    """Return the tables of results, or a warning if the groups have different data."""
    notes = [*notes, *(f"{WARNING}{sentence}." for sentence in left_out_of(groups))]
    differences = data_differences(groups)
    if differences:
        names = ", ".join(f"{setting.name} ({setting.was}, {setting.now})" for setting in differences)
        warning = f"these runs differ in their data or cohorts, so their values do not make one table: {names}."
        return [WARNING + warning, *notes, *(tables or [])]
    if tables is None:
        tables = []
        for key in known_metrics(groups):
            comparison = compare(groups, key, groups[0].label, at_seconds=at_seconds)
            tables.append(comparison_table(comparison))
    return [*notes, *tables]


def settings_of(groups: Sequence[Group]) -> list[Table | str]:
    """Return the table of the settings that differ, with seeds and rounds, and the folders of the runs."""
    header = ["setting", *(group.label for group in groups)]
    rows = []
    different = differing([group.runs[0].settings for group in groups])
    for name, values in different.items():
        rows.append(cells([name, *(value or "–" for value in values)]))
    seeds = [", ".join(run.seed or "?" for run in group.runs) for group in groups]
    rows.append(cells(["seeds", *seeds]))
    rounds = []
    for group in groups:
        counts = sorted({len(run.history) for run in group.runs})
        rounds.append(" or ".join(str(count) for count in counts))
    rows.append(cells(["rounds", *rounds]))
    if len(groups) > 1:
        title = "Settings that differ"
    elif len(groups[0].runs) > 1:
        title = "The runs"
    else:
        title = "The run"
    folders = []
    for group in groups:
        folders.append(f"{group.label}: {', '.join(str(run.folder) for run in group.runs)}")
    return [Table(title, header, rows), "Folders. " + "; ".join(folders)]


def privacy_of(groups: Sequence[Group]) -> list[Table | str]:
    """Return the table of the guarantees of private runs, and what they do not cover."""
    rows = []
    for group in groups:
        settings = group.runs[0].settings
        seed = "a secret one" if settings.get("data.secret_seed") else "in config.yaml: simulated"
        for key, (hidden, owner) in HIDDEN.items():
            rounds, epsilons = group.curves(key)
            if rounds:
                delta = settings.get(f"model.{owner}.delta", "?")
                rows.append(
                    cells([group.label, hidden, f"{epsilons.max():.4g}", f"{delta}", f"{rounds[-1] + 1}", seed])
                )
    if not rows:
        return []
    note = (
        "Whether such a one is in the data, or for local privacy what it has, changes what is released by (ε, δ) only. "
        f"Values whose names begin with {UNPROTECTED} are of the clients as they are, and are not covered."
    )
    header = ["method", "hidden", "ε", "δ", "rounds", "seed of cohorts and noise"]
    return [Table("Differential privacy", header=header, rows=rows, note=note)]


def cells(texts: Iterable[str]) -> list[TableCell]:
    """Make a row of a table."""
    return [TableCell(text) for text in texts]


def file_stem(key: str) -> str:
    """Return the name of a key's file. A plain key stays readable, and no two keys share a name.

    >>> file_stem("global/acc"), file_stem("global-acc")
    ('global-acc', 'global-acc~51f1cd78')
    """
    readable = re.sub(r"[^\w.]+", "-", key, flags=re.ASCII)[:LONGEST_STEM]
    if re.fullmatch(r"[\w.]+(/[\w.]+)*", key, re.ASCII) and len(key) <= LONGEST_STEM:
        return readable
    digest = sha256(key.encode(errors="backslashreplace")).hexdigest()
    return f"{readable}~{digest[:8]}"


# --- figures ---


def axis_label(key: str, unit: Unit) -> str:
    """Name a key and its unit on an axis."""
    percent = " (%)" if is_in_percent(unit) else ""
    return NAMES.get(key, key + percent)


def curves_of(groups: Sequence[Group]) -> list[Picture | str]:
    """Draw each value over the rounds, except values of single classes and tasks, bytes and simulated time."""
    shown = drawn_keys(groups)
    parts: list[Picture | str] = []
    for key in shown[:MOST_CURVES]:
        unit = unit_in(runs_of(groups), key)
        percent = " (%)" if is_in_percent(unit) else ""
        bands: dict[str, Band] = {}
        for group in groups:
            rounds, values = group.carried_curves(key)
            bands[group.label] = Band(rounds, percent_factor(unit) * values)
        last = [f"{label} {band.values[:, -1].mean():.4g}" for label, band in bands.items() if band.x]
        if last:
            caption = f"{scope_of(key)} after each round{bands_text(groups)}. Last: {'; '.join(last)}{percent}."
            if any(run.is_unprotected(key) for run in runs_of(groups)):
                caption += " Of private runs it is unprotected: the guarantee does not cover it."
            figure = plot_bands(bands, axis_label(key, unit))
            parts.append(Picture("curve-" + file_stem(key), figure, caption))
    if len(shown) > MOST_CURVES:
        parts.append(f"Not drawn, but in metrics.csv: {', '.join(shown[MOST_CURVES:])}.")
    return parts


def drawn_keys(groups: Sequence[Group]) -> list[str]:
    """Return the keys that are drawn over the rounds, the known ones first."""
    keys: dict[str, None] = {}
    for run in runs_of(groups):
        keys |= dict.fromkeys(run.history.keys)
    in_maps = [key for key in keys if BY_CLASS in key or is_of_task(key)]
    shown = [key for key in keys if key not in in_maps and not key.startswith(("comm/", TIME))]
    return sorted(shown, key=lambda key: ([*NAMES, key].index(key), key))


def bands_text(groups: Sequence[Group]) -> str:
    """Describe the line and the band of a figure, if a group has several runs."""
    text = ""
    if has_seeds(groups):
        text = ", mean and one standard deviation over the seeds"
    if not all(group.has_equal_rounds for group in groups):
        text += "; a run that ended earlier stands at its last value"
    return text


def clocks_of(groups: Sequence[Group]) -> list[Table]:
    """Return the table of the simulated time of the runs: rounds, seconds, lost clients and staleness."""
    by_label: dict[str, dict[str, str]] = {}
    names: dict[str, None] = {}
    for group in groups:
        runs = [run for run in group.runs if run.clock]
        if runs:
            by_label[group.label] = clock_values(runs)
            names |= dict.fromkeys(by_label[group.label])
    if not by_label:
        return []
    rows = []
    for label, values in by_label.items():
        rows.append(cells([label, *(values.get(name, "–") for name in names)]))
    note = (
        "Mean over the seeds. Lost or late: clients that were sent a model and came to nothing. Staleness: server "
        "steps that passed by an update."
    )
    return [Table("Simulated time", header=["method", *names], rows=rows, note=note)]


def clock_values(runs: Sequence[SavedRun]) -> dict[str, str]:
    """Write the row of some runs in the table of simulated time, by the heading of the column."""
    rounds = mean_of([float(len(run.clock)) for run in runs])
    seconds = mean_of([list(run.clock.values())[-1] for run in runs])
    texts = {
        "rounds": f"{rounds:.6g}",
        "seconds in all": f"{seconds:.4g}",
        "seconds a round": f"{seconds / rounds:.4g}",
    }
    lost = [sum(run.history.curve(LOST).values()) for run in runs if run.history.curve(LOST)]
    if lost:
        texts["lost or late, a round"] = f"{mean_of(lost) / rounds:.4g}"
    staleness = [mean_of(list(run.history.curve(STALENESS).values())) for run in runs if run.history.curve(STALENESS)]
    if staleness:
        texts["mean staleness"] = f"{mean_of(staleness):.4g}"
    largest = [max(run.history.curve(STALENESS_MAX).values()) for run in runs if run.history.curve(STALENESS_MAX)]
    if largest:
        texts["largest staleness"] = f"{max(largest):.4g}"
    return texts


def timed_curves_of(groups: Sequence[Group]) -> list[Picture]:
    """Draw each metric that is compared, and the staleness, over simulated seconds."""
    pictures = []
    keys = known_metrics(groups)
    if any(any(run.history.curve(STALENESS).values()) for run in runs_of(groups)):
        keys.append(STALENESS)
    for key in keys:
        unit = unit_in(runs_of(groups), key)
        bands: dict[str, Band] = {}
        for group in groups:
            seconds, values = group.timed_curves(key)
            bands[group.label] = Band(seconds, percent_factor(unit) * values)
        last = [f"{label} {band.values[:, -1].mean():.4g}" for label, band in bands.items() if band.x]
        if last:
            percent = " (%)" if is_in_percent(unit) else ""
            over = ", mean and one standard deviation over the seeds" if has_seeds(groups) else ""
            caption = (
                f"{scope_of(key)} over simulated seconds{over}. A value holds until the next one. "
                f"Last: {'; '.join(last)}{percent}."
            )
            figure = plot_bands(bands, axis_label(key, unit), "simulated seconds", in_steps=True)
            pictures.append(Picture("time-" + file_stem(key), figure, caption))
    return pictures


def timelines_of(groups: Sequence[Group]) -> list[Picture]:
    """Draw the clients of each group over simulated time, for the first run that has the table of its jobs."""
    pictures = []
    for number, group in enumerate(groups):
        run = next((run for run in group.runs if (run.folder / TIMELINE).is_file()), None)
        jobs = [] if run is None else read_timeline(run.folder / TIMELINE)
        if run is None or not jobs:
            continue
        which = f"{group.label}, seed {run.seed}" if len(group.runs) > 1 else group.label
        caption = (
            f"Each client's work in simulated time: {which}. Above: the number of clients at work. The color of a bar "
            f"is the number of server steps that passed by the update."
        )
        pictures.append(Picture(f"timeline-{number}", plot_timeline(jobs), caption, wide=True))
    return pictures


def has_seeds(groups: Sequence[Group]) -> bool:
    """Return True if a group has several runs."""
    return any(len(group.runs) > 1 for group in groups)


def scores_of(groups: Sequence[Group]) -> list[Table]:
    """Return the table of precision, recall and F1 of the last global models, mean over the runs."""
    rows = []
    header = ["method"]
    for group in groups:
        tables = scores_of_runs(group)
        if not tables:
            continue
        names = [name for name in tables[0] if name not in ("class", "samples")]
        header = ["method"]
        row = [group.label]
        for average in AVERAGES:
            for name in names:
                header.append(f"{average} {name}")
                values = [float(table[name][table["class"] == average][0]) for table in tables]
                row.append(spread(values, writer("share")))
        rows.append(cells(row))
    if not rows:
        return []
    note = "Of the global model after the last round, on the split that is evaluated in every round."
    return [Table("Precision, recall and F1 over the classes, %", header=header, rows=rows, note=note)]


def scores_of_runs(group: Group) -> list[dict[str, Any]]:
    """Read the classification files of the whole runs that have the averages over the classes after the last round.

    A file of 0.2.0 names no round.
    """
    tables = []
    for run in group.runs:
        if not run.is_whole:
            continue
        table = read_columns(run.folder / CLASSIFICATION, ["class"])
        is_of_last_round = classification_round(table) in (None, run.num_rounds - 1)
        table.pop(ROUND, None)
        if is_of_last_round and set(AVERAGES) <= set(table.get("class", ())):
            tables.append(table)
    return tables


def classes_of(groups: Sequence[Group]) -> list[Picture]:
    """Draw the accuracy of each class in each round, and what each class has forgotten."""
    maps: list[Picture] = []
    forgotten: dict[str, Numbers] = {}
    names: list[str] = []
    for number, group in enumerate(groups):
        rounds, class_names, accuracies = group.columns(BY_CLASS)
        if not rounds:
            continue
        names = class_names
        caption = caption_of_classes(group, names, accuracies)
        figure = plot_classwise(accuracies, class_names=names, rounds=rounds, title=f"{group.label}: accuracy by class")
        maps.append(Picture(f"classes-{number}", figure, caption, wide=True))
        forgotten[group.label] = forgetting_of(group, names)
    if not forgotten:
        return []
    comparable = {label: values for label, values in forgotten.items() if values.shape[1] == len(names)}
    worst = []
    for label, values in comparable.items():
        if not np.isnan(values).all():
            worst.append(f"{label} {names[int(np.nanargmax(values.mean(0)))]}")
    caption = (
        "Best accuracy over the rounds minus the last, of each class. "
        f"The class that is forgotten most: {'; '.join(worst)}."
    )
    return [Picture("forgetting-classes", plot_forgetting(comparable, names), caption), *maps]


def caption_of_classes(group: Group, names: Sequence[str], accuracies: Numbers) -> str:
    """Describe the map of accuracies (T, C), and name the class that is lowest at the end."""
    last = accuracies[-1]
    lowest = 0 if np.isnan(last).all() else int(np.nanargmin(last))
    over = f", mean over {len(group.runs)} seeds" if len(group.runs) > 1 else ""
    return (
        f"Accuracy of the global model on each class after each round: {group.label}{over}. "
        f"Lowest at the end: class {names[lowest]}, {100 * last[lowest]:.1f} %."
    )


def forgetting_of(group: Group, names: Sequence[str]) -> Numbers:
    """Return the forgetting of each class, shape (S, C), of the runs with these classes."""
    values = []
    for run in group.runs:
        _, run_names, accuracies = run.history.columns(BY_CLASS)
        if run_names == names:
            values.append(forgetting_per_class(accuracies).numpy())
    return np.stack(values)


def before_after_of(groups: Sequence[Group]) -> list[Picture]:
    """Draw each pair of values before and after local training, in the last round that has them."""
    known: dict[str, None] = {}
    for group in groups:
        for run in group.runs:
            known |= dict.fromkeys((*run.history.keys, *run.clients))
    pictures = []
    for first, second in PAIRS:
        for name in known:
            candidates = [name.replace(first, second), name.replace(f"_{first}", "")]  # loss_after; acc_own
            partners = [other for other in candidates if other in known and other != name]
            if partners:
                pictures.extend(pair_of(groups, name, partners[0], words=(first, second)))
    return pictures


def pair_of(groups: Sequence[Group], before: str, after: str, words: tuple[str, str]) -> list[Picture]:
    """Draw one pair of values, if a group has both.

    Args:
        groups: Groups of runs.
        before: Name of the value before local training.
        after: Name of the value after it.
        words: The two words for before and after.
    """
    label = before.replace(words[0], "").strip("/_ ") or before
    unit = unit_in(runs_of(groups), before)
    scale = percent_factor(unit)
    pairs: dict[str, tuple[Numbers, Numbers]] = {}
    for group in groups:
        was = scale * last(group, before)
        now = scale * last(group, after)
        if 0 < len(was) == len(now):
            pairs[group.label] = (was, now)
    if not pairs:
        return []
    changes = [f"{group} {now.mean() - was.mean():+.3g}" for group, (was, now) in pairs.items()]
    caption = (
        f"{before} and {after}, mean over the clients of the last round that has them. Change: {'; '.join(changes)}."
    )
    figure = plot_before_after(pairs, label + (" (%)" if is_in_percent(unit) else ""), words)
    return [Picture("pair-" + file_stem(before), figure, caption)]


def last(group: Group, name: str) -> Numbers:
    """Return the last known value of each run, shape (S,).

    A value that only the clients have is the mean over the clients of its last round.
    """
    values = []
    for run in group.runs:
        curve = run.history.curve(name)
        if curve:
            values.append(curve[max(curve)])
        elif name in run.clients and "round" in run.clients:
            rounds = run.clients["round"]
            column = run.clients[name]
            known = ~np.isnan(column)
            if known.any():
                of_last_round = known & (rounds == rounds[known].max())
                values.append(float(column[of_last_round].mean()))
    return np.array(values)


def communication_of(groups: Sequence[Group], shown: Sequence[Group]) -> list[Picture | Table]:
    """Return the table of the bytes of a round, and the accuracy of the shown groups over the bytes."""
    rows = [row for row in map(communication_row, groups) if row]
    if not rows:
        return []
    has_sets = any(run.history.curve("comm/bytes_sets") for run in runs_of(groups))
    header = ["method", "to clients, a round", "to the server, a round"]
    if has_sets:
        header.append("sets, once")
    else:
        rows = [[label, down, up, total] for label, down, up, _, total in rows]
    header.append("in all")
    note = "Values of the messages as they are sent; mean over the rounds and seeds."
    if has_sets:
        note += " Sets are the samples that every client receives once."
    if any(counts_unprotected(group) for group in groups):
        note += " Of private runs they are unprotected: they tell how many clients took part."
    table = Table("Communication, MB", header=header, rows=[cells(row) for row in rows], note=note)
    parts: list[Picture | Table] = [table]
    key = next(iter(known_metrics(groups)), "")
    unit = unit_in(runs_of(groups), key)
    bands = {group.label: band_over_bytes(group, key, unit) for group in shown}
    if any(band.x for band in bands.values()):
        caption = f"{scope_of(key)} over the bytes moved in both directions{bands_text(groups)}."
        figure = plot_bands(bands, NAMES.get(key, key), "communication, both directions (MB)")
        parts.append(Picture("communication", figure, caption))
    return parts


def communication_row(group: Group) -> list[str]:
    """Write the row of a group in the table of bytes: down and up in a round, sets, in all. Empty if nobody tells."""
    means: list[float] = []
    for key in ("comm/bytes_down", "comm/bytes_up"):
        curves = [run.history.curve(key) for run in group.runs]
        of_runs = [sum(curve.values()) / len(curve) for curve in curves if curve]
        if not of_runs:
            return []
        means.append(sum(of_runs) / len(of_runs))
    known = [run for run in group.runs if run.history.curve("comm/bytes_down")]
    sets = [sum(run.history.curve("comm/bytes_sets").values()) for run in known]
    totals = [sum(bytes_by_round(run).values()) for run in known]
    means.append(sum(sets) / len(sets))
    means.append(sum(totals) / len(totals))
    return [group.label, *(f"{value / MEGABYTE:.4g}" for value in means)]


def band_over_bytes(group: Group, key: str, unit: Unit) -> Band:
    """Return the values of a key over the bytes that were moved until then, mean over the runs. It may be empty."""
    rounds, scores = group.carried_curves(key)
    moved = [bytes_by_round(run) for run in group.runs]
    if not rounds or not all(moved) or len(scores) != len(moved):
        return Band([], np.zeros((0, 0)))
    places = []
    for round_idx in rounds:
        totals = [sum(value for r, value in of_run.items() if r <= round_idx) for of_run in moved]
        places.append(sum(totals) / len(totals) / MEGABYTE)
    return Band(places, percent_factor(unit) * scores)


def counts_unprotected(group: Group) -> bool:
    """Return True if private runs log bytes, which no guarantee covers."""
    return any(run.is_unprotected("comm/bytes_down") for run in group.runs)


def partitions_of(groups: Sequence[Group]) -> list[Picture | str]:
    """Draw the first few different partitions."""
    partitions: dict[tuple[object, ...], Counts] = {}
    users: dict[tuple[object, ...], list[str]] = {}
    for group in groups:
        for run in group.runs:
            if run.partition is None:
                continue
            identity: tuple[object, ...] = (
                run.partition.table.tobytes(),
                tuple(run.partition.names),
                tuple(run.partition.clients),
                run.partition.unseen,
            )
            partitions.setdefault(identity, run.partition)
            user = group.label if len(group.runs) == 1 else f"{group.label}, seed {run.seed}"
            users.setdefault(identity, []).append(user)
    parts: list[Picture | str] = []
    for number, identity in enumerate(list(partitions)[:MOST_PARTITIONS]):
        partition = partitions[identity]
        caption = caption_of_partition(partition.table, partition.names, users[identity], unseen=partition.unseen)
        figure = plot_partition(
            partition.table, partition.names, client_names=partition.clients, unseen=partition.unseen
        )
        parts.append(Picture(f"partition-{number}", figure, caption, wide=True))
    if len(partitions) > MOST_PARTITIONS:
        parts.append(f"{len(partitions) - MOST_PARTITIONS} further partitions are not drawn; partition.csv has each.")
    return parts


def caption_of_partition(
    table: Numbers, names: Sequence[str], users: Sequence[str], *, unseen: Sequence[int] = ()
) -> str:
    """Describe a partition (N, C) and the runs that use it.

    Args:
        table: Number of samples of each client and class, (N, C).
        names: Names of the C classes.
        users: Names of the runs.
        unseen: Ids of the clients that never train.
    """
    who = "; ".join(users[:3])
    if len(users) > 3:
        who += f" and {len(users) - 3} more"
    classes = (table > 0).sum(1)
    samples = table.sum(1)
    never = ""
    if unseen:
        verb = "never trains" if len(unseen) == 1 else "never train"
        never = f" {len(unseen)} of {len(table)} clients {verb} (data.unseen, hatched)."
    return (
        f"Training samples of each class at each client: {who}. "
        f"A client has {classes.min()} to {classes.max()} of the {len(names)} classes "
        f"and {samples.min():.0f} to {samples.max():.0f} samples.{never}"
    )
