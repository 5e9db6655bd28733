"""Tuning: settings of each method, chosen on the server's validation split."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fl_lightning.cli.classes import may_log_metric_objects
from fl_lightning.experiments.cells import Cell, CellFiles, Cells, located
from fl_lightning.experiments.composing import SettingPairs, as_settings, setting_combinations, settings_text
from fl_lightning.experiments.experiment import Runs
from fl_lightning.experiments.merging import merge
from fl_lightning.experiments.running import run_cells
from fl_lightning.metrics.keys import Direction, best_of, direction_of, unknown_direction
from fl_lightning.reports.results import direction_in, mean_of_last
from fl_lightning.reports.saved import TUNING, SavedRun, is_data
from fl_lightning.utils.files import write_table

Choices = dict[SettingPairs, list[Cell]]
"""Cells of each seed by candidate."""

Tried = dict[tuple[str, str], Choices]
"""Choices by method and case."""


def tune(cells: Cells, processes: int, output: Path, sources: Sequence[Path] = (), table: str = "tuning") -> list[str]:
    """Choose settings for each method and case on the server's validation split.

    Args:
        cells: whose `chosen` is filled.
        processes: cells at once.
        output: folder of the experiment, of which `tuning` is used.
        sources: folders of other experiments, whose runs there are taken over.
        table: name of the csv file in `output` with the scores.

    Returns:
        Sentences that describe what was chosen.

    Raises:
        ValueError: the metric is none of the validation split, a setting is not to be tuned, or a method has no
            complete candidate.
    """
    tried = tried_of(cells, output)
    folder = output / TUNING
    if not tried:
        return []
    each = cells_of(tried)
    for source in (path / folder.name for path in sources):
        if source.is_dir():
            merge(each, source, folder)
    failed = run_cells(each, processes, folder, test=False)
    sentences, lines = choose_candidates(cells, tried, folder, failed)
    header = ["method", "case", "settings", cells.experiment.tune_metric, "chosen"]
    write_table(output / f"{table}.csv", [header, *lines])
    return sentences


def tried_of(cells: Cells, output: Path) -> Tried:
    """Compose the cells of each candidate of all rows that are tuned, by the names that a folder's `tuning` has.

    Raises:
        ValueError: the metric is none of the validation split, or a setting is not to be tuned.
    """
    rows = [runs for runs in cells.experiment.runs if runs.tune]
    metric = cells.experiment.tune_metric
    if rows and not metric.startswith("val/"):
        raise ValueError(f"tuning chooses on the validation split, so tune_metric must begin with val/, got {metric}")
    if name := next((name for runs in rows for name in runs.tune if is_data(name)), None):
        raise ValueError(f"tune takes settings of the training, got {name}")
    tried = {place: choices for runs in rows for place, choices in choices_of(cells, runs).items()}
    check_directions(cells_of(tried), metric)
    named = iter(located(cells_of(tried), output / TUNING))  # candidates of two cases may be the same run
    return {
        place: {candidate: [next(named) for _ in group] for candidate, group in choices.items()}
        for place, choices in tried.items()
    }


def check_directions(candidates: Sequence[Cell], metric: str) -> None:
    """Refuse a metric whose direction nobody tells, unless a metric object may tell it in the runs.

    Raises:
        ValueError: Nobody tells whether lower or higher is better.
    """
    for cell in candidates:
        may_tell = cell.config["model"].get("metrics") or may_log_metric_objects(cell.config["model"]["client"] or {})
        if direction_of(metric, cell.directions) is None and not may_tell:
            raise ValueError(unknown_direction(metric))


def cells_of(tried: Tried) -> list[Cell]:
    """List the cells of all candidates."""
    return [cell for choices in tried.values() for group in choices.values() for cell in group]


def choose_candidates(
    cells: Cells, tried: Tried, folder: Path, failed: Mapping[str, str]
) -> tuple[list[str], list[list[Any]]]:
    """Choose the best candidate of each method and case, and return sentences and the lines of a table.

    Args:
        cells: whose `chosen` is filled.
        tried: cells of the candidates.
        folder: of their runs, which are complete but for those that failed.
        failed: sentences by the names of cells.

    Returns:
        The sentences; the lines, each with method, case, settings, mean and whether they were chosen.

    Raises:
        ValueError: a method has no complete candidate.
    """
    metric = cells.experiment.tune_metric
    sentences = list[str]()
    table = list[list[Any]]()
    for (method, case), choices in tried.items():
        runs = {candidate: runs_of(folder, group, failed) for candidate, group in choices.items()}
        scores = {candidate: mean_score(of_candidate, metric) for candidate, of_candidate in runs.items()}
        known = {candidate: score for candidate, score in scores.items() if score is not None}
        scored = {candidate: score for candidate, score in known.items() if math.isfinite(score)}
        if not scored:
            problems = [failed[cell.name] for group in choices.values() for cell in group if cell.name in failed]
            if known:
                problems.append(f"{len(known)} ended in a value that is not finite; tune over other values")
            raise ValueError(
                f"tuning needs {metric} of every seed, and no candidate of {method} has it; "
                f"{(problems or ['set tune_metric to a value of the validation split'])[0]}"
            )
        direction = direction_of_candidates(runs, metric)
        best_score = best_of(scored.values(), direction)
        best = next(candidate for candidate, score in scored.items() if score == best_score)
        cells.chosen[method, case] = best
        chosen = ", ".join(filter(None, (case, settings_text(best))))
        rank = f"the {'lowest' if direction == 'min' else 'highest'} of {len(scored)}"
        if len(scored) < len(known):
            rank += f", besides {len(known) - len(scored)} that ended in a value that is not finite"
        rounds = max(cell.max_rounds for cell in choices[best])
        after = f", after {rounds} round{'s' * (rounds > 1)}" if rounds > 0 else ""
        if any(cell.max_rounds < cell.all_rounds for cell in choices[best]):
            after += "; with all of them another may be chosen"
        lengths = sorted({run.num_rounds for of_candidate in runs.values() for run in of_candidate})
        if len(lengths) > 1:
            after += f"; the runs have {lengths[0]} to {lengths[-1]} rounds, and count to their own ends"
        sentences.append(
            f"Tuned on the validation split: {chosen} for {method} ({metric} {scored[best]:.4g}, {rank}{after})."
        )
        table += [
            [method, case, settings_text(candidate), score, candidate == best] for candidate, score in scores.items()
        ]
    return sentences, table


def direction_of_candidates(runs: Mapping[SettingPairs, Sequence[SavedRun]], metric: str) -> Direction:
    """Return the direction of the metric in the runs of all candidates.

    Raises:
        ValueError: Nobody tells whether lower or higher is better.
    """
    every = [run for of_candidate in runs.values() for run in of_candidate]
    direction = direction_in(every, metric)
    if direction is None:
        raise ValueError(unknown_direction(metric))
    return direction


def choices_of(cells: Cells, runs: Runs) -> Tried:
    """Compose the cells of each candidate of a row by method and case, of methods that know one of the settings."""
    choices = Tried()
    for method in runs.methods:
        for name, case in cells.experiment.cases_of(runs).items():
            config = cells.composer.compose(method, as_settings(runs.settings), cells.configs_of(case))
            known = cells.options_of(runs, method, case)
            given = dict(cells.settings_of(case))
            share = str(cells.experiment.val_fraction)
            more = () if config["data"]["val_fraction"] else (("data.val_fraction", share),)
            tuned = {n: values for n, values in runs.tune.items() if n in known and n not in given}
            for candidate in map(as_settings, setting_combinations(tuned) if tuned else ()):
                group = [cells.compose(runs, method, name, s, candidate, more) for s in cells.seeds_of(runs)]
                choices.setdefault((runs.label or method, name), {})[candidate] = group
    return choices


def runs_of(folder: Path, group: Sequence[Cell], failed: Mapping[str, str]) -> list[SavedRun]:
    """Read the runs of a candidate, none if one has failed."""
    if any(cell.name in failed for cell in group):
        return []
    return [CellFiles(folder, cell.name).read(cell.max_rounds, cell.directions) for cell in group]


def mean_score(runs: Sequence[SavedRun], metric: str) -> float | None:
    """Average a metric's mean over the last five rounds over the seeds.

    It is NaN if a run ends in a value that is not finite, and None without runs or if a run has no value.
    """
    curves = [list(run.history.curve(metric).values()) for run in runs]
    if not curves or not all(curves):
        return None
    if not all(math.isfinite(curve[-1]) for curve in curves):
        return math.nan
    return sum(map(mean_of_last, curves)) / len(curves)
