"""The report of one or several runs: tables and figures from the files in their folders."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from fl_lightning.functional.classes import shown_names
from fl_lightning.functional.forgetting import forgetting_per_class
from fl_lightning.metrics.history import BY_CLASS, EPSILON, EPSILON_LOCAL, EPSILON_SAMPLES, UNPROTECTED
from fl_lightning.metrics.keys import LOST, STALENESS, STALENESS_MAX, is_in_percent, percent_factor
from fl_lightning.reports.comparison_tables import comparison_table, spread, writer
from fl_lightning.reports.comparisons import plot_before_after, plot_forgetting
from fl_lightning.reports.costs import costs_of
from fl_lightning.reports.curve_pictures import (
    Shown,
    curves_of,
    curves_over_bytes,
    file_stem,
    shown_of,
    timed_curves_of,
)
from fl_lightning.reports.facts import facts_of, title_of
from fl_lightning.reports.figures import Numbers, plot_classwise, plot_partition
from fl_lightning.reports.page import (
    WARNING,
    Fold,
    Methods,
    Page,
    Part,
    Picture,
    SavedPicture,
    Section,
    drawn,
    write_page,
)
from fl_lightning.reports.result_tables import Table, TableCell, is_heading
from fl_lightning.reports.results import Comparison, compare, known_metrics, mean_of, runs_of, unit_in
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
from fl_lightning.reports.summary import summary_table
from fl_lightning.reports.tasks import tasks_of
from fl_lightning.reports.terminal import AVERAGES
from fl_lightning.reports.time_figures import plot_timeline
from fl_lightning.runs.timeline import TIMELINE, read_timeline
from fl_lightning.utils.files import write_file

MOST_PARTITIONS = 6
"""Largest number of partitions that are drawn."""

MOST_MAPS = 12
"""Largest number of groups whose accuracies of classes over the rounds are drawn."""

MOST_MATRICES = 8
"""Largest number of groups whose confusion matrices are drawn."""

MOST_ROWS = 30
"""Largest number of rows of a table that is not folded."""

MOST_OPEN = 2
"""Largest number of large figures of a kind, and of sentences, that are seen before a reader opens the others."""

PAIRS = (("before", "after"), ("initial", "personalised"))
"""Words in the names of two values that belong together: before and after local training."""

HIDDEN = {
    EPSILON: ("each client", "aggregator"),
    EPSILON_SAMPLES: ("each sample", "client"),
    EPSILON_LOCAL: ("each client from the server", "client"),
}
"""What a privacy guarantee hides, and the part of the model with its settings, by log key."""


def write_report(
    groups: Sequence[Group],
    folder: Path,
    forms: Iterable[str] = (),
    *,
    answer: Sequence[Table] | None = None,
    tables: Sequence[Table] | None = None,
    notes: Sequence[str] = (),
    at_seconds: Sequence[float] = (),
    command: str = "",
) -> Path:
    """Write `report.html` and, on request, each figure as a file.

    Args:
        groups: Groups of runs, at least one.
        folder: Folder of the report. It is made if it does not exist.
        forms: Formats of the files in `figures`: `svg`, `png` or `pdf`. Empty writes no files.
        answer: Tables that the page begins with. None makes them of the groups.
        tables: Tables of single metrics, which the page folds. None makes one for every known metric and case.
        notes: Sentences about the runs. A sentence that begins with `WARNING` stands above the tables.
        at_seconds: Simulated seconds after which the values have a column in the tables that are made.
        command: The command that makes the page again. Empty: none is shown.

    Returns:
        The path of the page.
    """
    shown, left_out = shown_of(groups)
    every = distinct(groups)
    drawn_groups = distinct(shown.groups)
    comparisons = {} if answer is not None and tables is not None else comparisons_of(groups, at_seconds=at_seconds)
    if answer is None:
        answer = [summary_table(comparisons)] if comparisons else []
    if tables is None:
        tables = [comparison_table(each) for each in chain.from_iterable(comparisons.values())]
    sections = [
        Section("Results", [*warnings_of(every, notes), *long_tables(answer, best=shown.methods)]),
        Section("Costs", long_tables(costs_of(every), best=shown.methods)),
        Section("Privacy", privacy_of(every)),
        Section("Curves", curve_parts(shown, left_out)),
        Section("Tasks", tasks_of(drawn_groups)),
        Section("Over simulated time", [*clocks_of(every), *timed_curves_of(shown), *timelines_of(drawn_groups)]),
        Section("Classes", classes_of(groups, shown)),
        Section("Matrices and curves", metric_pictures_of(drawn_groups)),
        Section("Before and after local training", before_after_of(drawn_groups)),
        Section("Partition", folded("Further partitions", partitions_of(every))),
        Section("Details", details_of(every, tables, notes)),
    ]
    sections = [section for section in sections if section.parts]
    for form in forms:
        for section in sections:
            write_figures(section.parts, folder / "figures", form)
    path = folder / "report.html"
    page = Page(title=title_of(groups), sections=sections, facts=facts_of(groups), command=command)
    write_page(path, page)
    return path


def distinct(groups: Sequence[Group]) -> list[Group]:
    """Return one group of each set of runs. A method without the settings of the cases has the same runs in all."""
    by_runs: dict[tuple[Path, ...], Group] = {}
    for group in groups:
        by_runs.setdefault(tuple(run.folder for run in group.runs), group)
    return list(by_runs.values())


def write_figures(parts: Sequence[Part], folder: Path, form: str) -> None:
    """Write figures as files of one format. A picture that somebody else has drawn keeps its own."""
    for part in parts:
        match part:
            case Picture():
                write_file(folder / f"{part.name}.{form}", drawn(part.figure, form))
            case SavedPicture():
                write_file(folder / f"{part.name}{part.path.suffix}", part.path.read_bytes())
            case Fold():
                write_figures(part.parts, folder, form)


def folded(what: str, parts: Sequence[Part], *, most: int = MOST_OPEN) -> list[Part]:
    """Fold all parts after the first ones.

    Args:
        what: The folded parts in words, with a capital letter. Their number is added.
        parts: The parts.
        most: Number of the first ones.
    """
    first = list(parts[:most])
    others = parts[most:]
    if not others:
        return first
    return [*first, Fold(f"{what} ({len(others)})", others)]


def left_out_of(groups: Sequence[Group]) -> list[str]:
    """Return the sentences on runs and files that were left out."""
    sentences: list[str] = []
    for group in groups:
        sentences += group.notes
        for run in group.runs:
            sentences += run.notes
    return sentences


# --- tables ---


def warnings_of(groups: Sequence[Group], notes: Sequence[str]) -> list[Part]:
    """Return the sentences that a reader must know before the tables."""
    sentences = [note for note in notes if note.startswith(WARNING)]
    for case, of_case in by_case(groups).items():
        names = ", ".join(f"{found.name} ({found.was}, {found.now})" for found in data_differences(of_case))
        if names:
            where = f" with {case}" if case else ""
            sentences.append(
                f"{WARNING}runs{where} differ in their data or cohorts, so their values are not of one comparison: "
                f"{names}."
            )
    sentences += [f"{WARNING}{sentence}." for sentence in left_out_of(groups)]
    return folded("Further notes", sentences)


def by_case(groups: Sequence[Group]) -> dict[str, list[Group]]:
    """Return the groups of each case, under the names that they have in it."""
    cases: dict[str, list[Group]] = {}
    for group in groups:
        cases.setdefault(group.case, []).append(replace(group, label=group.row))
    return cases


def comparisons_of(groups: Sequence[Group], *, at_seconds: Sequence[float] = ()) -> dict[str, list[Comparison]]:
    """Compare the groups of each case by every known metric. Of a case whose runs differ in their data there is none.

    Args:
        groups: Groups of runs.
        at_seconds: Simulated seconds after which the value is a statistic, too.

    Returns:
        The comparisons by case.
    """
    comparisons: dict[str, list[Comparison]] = {}
    for case, of_case in by_case(groups).items():
        if data_differences(of_case):
            continue
        compared = []
        for key in known_metrics(of_case):
            compared.append(compare(of_case, key, of_case[0].label, case=case, at_seconds=at_seconds))
        if compared:
            comparisons[case] = compared
    return comparisons


def long_tables(tables: Sequence[Table], *, best: Sequence[str]) -> list[Part]:
    """Fold the rows of long tables, and show the rows of the best methods. Headings of rows do not count as rows.

    Args:
        tables: The tables.
        best: Names of the best methods. A table that has rows of no other methods is not folded.
    """
    parts: list[Part] = []
    for table in tables:
        shortened = replace(table, rows=rows_named(table, best))
        count = num_rows(table)
        num_shown = num_rows(shortened)
        if count <= MOST_ROWS or num_shown == count:
            parts.append(table)
            continue
        if num_shown:
            title = f"{table.title or 'The best'}: {num_shown} of {count} rows"
            parts.append(replace(shortened, title=title))
        parts.append(Fold(f"All {count} rows", [table]))
    return parts


def num_rows(table: Table) -> int:
    """Count the rows of a table without the headings of rows."""
    return sum(1 for row in table.rows if not is_heading(row, table))


def rows_named(table: Table, names: Sequence[str]) -> list[Sequence[TableCell]]:
    """Return the rows of a table that have some names, each below its heading.

    Args:
        table: The table.
        names: The names.
    """
    rows: list[Sequence[TableCell]] = []
    heading: Sequence[TableCell] | None = None
    for row in table.rows:
        if is_heading(row, table):
            heading = row
        elif row[0].text in names:
            if heading is not None:
                rows.append(heading)
                heading = None
            rows.append(row)
    return rows


def details_of(groups: Sequence[Group], tables: Sequence[Table], notes: Sequence[str]) -> list[Part]:
    """Fold all tables, the notes and the settings."""
    plain = [note for note in notes if not note.startswith(WARNING)]
    parts: list[Part] = []
    if tables:
        parts.append(Fold("Tables of each metric", tables))
    if plain:
        parts.append(Fold("Notes", plain))
    parts.append(Fold("Settings and folders", settings_of(groups)))
    return parts


def curve_parts(shown: Shown, left_out: Sequence[str]) -> list[Part]:
    """Draw the values over the rounds and over the bytes, and fold all but the metrics that are compared.

    Args:
        shown: The groups that figures show.
        left_out: Sentences on groups that figures do not show.
    """
    compared, further, not_drawn = curves_of(shown)
    parts: list[Part] = [*left_out]
    if len(shown.methods) > 1:
        parts.append(Methods(shown.methods))
    open_pictures = compared or further
    folded_pictures = further if compared else []
    parts += open_pictures
    parts += curves_over_bytes(shown)
    parts += folded("Further values", folded_pictures, most=0)
    if not_drawn:
        parts.append(f"Not drawn, but in metrics.csv: {', '.join(not_drawn)}.")
    return parts if open_pictures else []


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


# --- figures ---


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


def classes_of(groups: Sequence[Group], shown: Shown) -> list[Part]:
    """Return the scores of the classes, what each class has forgotten, and the maps of classes, which are folded."""
    drawn_groups = distinct(shown.groups)
    most = MOST_OPEN if len(drawn_groups) <= MOST_OPEN else 0
    parts: list[Part] = [*long_tables(scores_of(distinct(groups)), best=shown.methods), *forgotten_classes_of(shown)]
    parts += folded("Maps of the accuracy of each class", class_maps_of(drawn_groups[:MOST_MAPS]), most=most)
    parts += folded("Confusion matrices", confusions_of(drawn_groups[:MOST_MATRICES]), most=most)
    if parts and len(drawn_groups) > MOST_MATRICES:
        parts.append("Not all groups have such pictures here; classwise.csv and confusion.csv of a run have them.")
    return parts


def class_maps_of(groups: Sequence[Group]) -> list[Picture]:
    """Draw the accuracy of each class in each round, a picture for each group."""
    maps: list[Picture] = []
    for number, group in enumerate(groups):
        rounds, names, accuracies = group.columns(BY_CLASS)
        if not rounds:
            continue
        caption = caption_of_classes(group, shown_names(names), accuracies)
        figure = plot_classwise(accuracies, class_names=names, rounds=rounds, title=f"{group.label}: accuracy by class")
        maps.append(Picture(f"classes-{number}", figure, caption, wide=True))
    return maps


def forgotten_classes_of(shown: Shown) -> list[Picture]:
    """Draw what each class has forgotten, a picture for each case."""
    pictures: list[Picture] = []
    for number, case in enumerate(shown.cases):
        forgotten: dict[str, Numbers] = {}
        names: list[str] = []
        for group in shown.groups:
            rounds, class_names, _ = group.columns(BY_CLASS)
            if group.case == case and rounds:
                names = class_names
                forgotten[group.row] = forgetting_of(group, class_names)
        comparable = {method: values for method, values in forgotten.items() if values.shape[1] == len(names)}
        if comparable:
            figure = plot_forgetting(comparable, names, methods=shown.methods)
            caption = caption_of_forgetting(comparable, shown_names(names), case)
            pictures.append(Picture(f"forgetting-classes-{number}", figure, caption))
    return pictures


def caption_of_forgetting(forgotten: Mapping[str, Numbers], names: Sequence[str], case: str) -> str:
    """Describe what the classes have forgotten, and name the class that is forgotten most.

    Args:
        forgotten: Forgetting of each class, (S, C), by method.
        names: Names of the C classes.
        case: The case of the picture. Empty: there is only one.
    """
    worst = []
    for method, values in forgotten.items():
        if not np.isnan(values).all():
            worst.append(f"{method} {names[int(np.nanargmax(values.mean(0)))]}")
    where = f", {case}" if case else ""
    return (
        f"Best accuracy over the rounds minus the last, of each class{where}. "
        f"The class that is forgotten most: {'; '.join(worst)}."
    )


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
