"""Tuning: settings of each method, chosen on held-out training samples, by the server or by the clients."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fl_lightning.cli.classes import may_log_metric_objects
from fl_lightning.experiments.cell import Cell
from fl_lightning.experiments.cell_files import CellFiles, located
from fl_lightning.experiments.cells import Cells
from fl_lightning.experiments.experiment import Experiment, Runs
from fl_lightning.experiments.merging import merge
from fl_lightning.experiments.overrides import (
    SettingPairs,
    as_settings,
    setting_combinations,
    settings_text,
    single_names,
)
from fl_lightning.experiments.running import run_cells
from fl_lightning.federation.clients_evaluation import TUNED
from fl_lightning.federation.effects import is_data
from fl_lightning.metrics.keys import Direction, best_of, direction_of, unknown_direction
from fl_lightning.reports.results import direction_in, mean_of_last
from fl_lightning.reports.saved import TUNING, SavedRun
from fl_lightning.runs.folder import Keep
from fl_lightning.utils.files import write_table

Choices = dict[SettingPairs, list[Cell]]
"""Cells of each seed by candidate."""

Tried = dict[tuple[str, str], Choices]
"""Choices by method and case."""

OF_THE_SERVER = "val/"
"""Beginning of the values of the global model on the server's validation split."""

OF_CLIENTS = "local/"
"""Beginning of the means over the models that clients deploy."""


def tune(
    cells: Cells,
    processes: int,
    output: Path,
    *,
    sources: Sequence[Path] = (),
    table: str = "tuning",
    keep: Keep = "none",
) -> list[str]:
    """Choose settings for each method and case on the samples of the server's validation split.

    They are chosen by what the global model answers (`val/…`), or by what the clients' models answer on their parts of
    these samples (`local/…`).

    Args:
        cells: The cells of the experiment, whose `chosen` is filled.
        processes: Number of cells that are run at once.
        output: Folder of the experiment, of which `tuning` is used.
        sources: Folders of other experiments, whose runs of tuning are taken over.
        table: Name of the csv file in `output` with the scores.
        keep: Checkpoints that stay when a run is complete.

    Returns:
        Sentences that describe what was chosen.

    Raises:
        ValueError: The metric is none of the validation split, a setting must not be tuned, or a method has no
            complete candidate.
    """
    tried = tried_of(cells, output)
    folder = output / TUNING
    if not tried:
        return untuned(cells)
    candidates = cells_of(tried)
    for source in sources:
        if (source / TUNING).is_dir():
            merge(candidates, source / TUNING, folder)
    failed = run_cells(candidates, processes, folder, test=False, keep=keep)
    sentences, lines = choose_candidates(cells, tried, folder=folder, failed=failed)
    write_table(output / f"{table}.csv", lines)
    return [*sentences, *untuned(cells)]


def tried_of(cells: Cells, output: Path) -> Tried:
    """Compose the cells of each candidate of all rows that are tuned, by the names that a folder's `tuning` has.

    Raises:
        ValueError: The metric is none of the validation split, or a setting must not be tuned.
    """
    rows = [runs for runs in cells.experiment.runs if runs.tune]
    tried = Tried()
    for runs in rows:
        metric = metric_of(cells.experiment, runs)
        if not metric.startswith((OF_THE_SERVER, OF_CLIENTS)):
            raise ValueError(
                f"tuning chooses on held-out training samples, so tune_metric must begin with {OF_THE_SERVER} (the "
                f"global model) or {OF_CLIENTS} (the clients' models), got {metric}"
            )
        for name in single_names(runs.tune):
            if is_data(name):
                raise ValueError(f"tune takes settings of the training, got {name}")
    for runs in rows:
        tried_of_row = choices_of(cells, runs)
        check_directions(cells_of(tried_of_row), metric_of(cells.experiment, runs))
        tried |= tried_of_row
    named = iter(located(cells_of(tried), output / TUNING))  # Candidates of two cases may be the same run.
    located_choices = Tried()
    for place, choices in tried.items():
        located_choices[place] = {}
        for candidate, group in choices.items():
            located_choices[place][candidate] = [next(named) for _ in group]
    return located_choices


def metric_of(experiment: Experiment, runs: Runs) -> str:
    """Return the log key by which a row is tuned."""
    return runs.tune_metric or experiment.tune_metric


def metrics_by_place(experiment: Experiment) -> dict[tuple[str, str], str]:
    """Return the log keys by which rows are tuned, by the method's name in the tables and the case."""
    metrics: dict[tuple[str, str], str] = {}
    for runs in experiment.runs:
        if not runs.tune:
            continue
        for method in runs.methods:
            for case in experiment.cases_of(runs):
                metrics[runs.name_of(method), case] = metric_of(experiment, runs)
    return metrics


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
    cells: list[Cell] = []
    for choices in tried.values():
        for group in choices.values():
            cells += group
    return cells


def choose_candidates(
    cells: Cells, tried: Tried, folder: Path, failed: Mapping[str, str]
) -> tuple[list[str], list[list[Any]]]:
    """Choose the best candidate of each method and case, and return sentences and the lines of a table.

    Args:
        cells: The cells of the experiment, whose `chosen` is filled.
        tried: The cells of the candidates.
        folder: Folder of their runs. The runs are complete except those that failed.
        failed: Sentences by the names of cells.

    Returns:
        The sentences; the lines of a table, the first of which is its header. It has a column for each log key.

    Raises:
        ValueError: A method has no complete candidate.
    """
    metrics = metrics_by_place(cells.experiment)
    used = list(dict.fromkeys(metrics[place] for place in tried))
    sentences: list[str] = []
    table: list[list[Any]] = [["method", "case", "settings", *used, "chosen"]]
    for (method, case), choices in tried.items():
        metric = metrics[method, case]
        runs = {candidate: runs_of(folder, group, failed) for candidate, group in choices.items()}
        scores = {candidate: mean_score(of_candidate, metric) for candidate, of_candidate in runs.items()}
        known = {candidate: score for candidate, score in scores.items() if score is not None}
        scored = {candidate: score for candidate, score in known.items() if math.isfinite(score)}
        if not scored:
            reason = why_none(choices, failed, num_diverged=len(known))
            raise ValueError(f"tuning needs {metric} of every seed, and no candidate of {method} has it; {reason}")
        direction = direction_of_candidates(runs, metric)
        best_score = best_of(scored.values(), direction)
        best = next(candidate for candidate, score in scored.items() if score == best_score)
        cells.chosen[method, case] = best
        chosen = ", ".join(filter(None, (case, settings_text(best))))
        rank = f"the {'lowest' if direction == 'min' else 'highest'} of {len(scored)}"
        if len(scored) < len(known):
            rank += f", besides {len(known) - len(scored)} that ended in a value that is not finite"
        after = after_text(choices[best], runs)
        sentences.append(f"Tuned in validation: {chosen} for {method} ({metric} {scored[best]:.4g}, {rank}{after}).")
        for candidate, score in scores.items():
            values = [score if name == metric else None for name in used]
            table.append([method, case, settings_text(candidate), *values, candidate == best])
    return sentences, table


def why_none(choices: Choices, failed: Mapping[str, str], num_diverged: int) -> str:
    """Return why no candidate of a method has a score.

    Args:
        choices: The cells of the candidates.
        failed: Sentences by the names of cells.
        num_diverged: Number of candidates that ended in a value that is not finite.
    """
    for group in choices.values():
        for cell in group:
            if cell.name in failed:
                return failed[cell.name]
    if num_diverged:
        return f"{num_diverged} ended in a value that is not finite; tune over other values"
    return "set tune_metric to a value that the runs log"


def after_text(cells: Sequence[Cell], runs: Mapping[SettingPairs, Sequence[SavedRun]]) -> str:
    """Return after how many rounds a candidate was chosen.

    Args:
        cells: The cells of the candidate.
        runs: The runs of all candidates.
    """
    text = ""
    rounds = max(cell.max_rounds for cell in cells)
    if rounds > 0:
        text = f", after {rounds} round{'' if rounds == 1 else 's'}"
    budgets = {cell.max_seconds for cell in cells} - {None}
    if budgets:
        text += f", within {max(filter(None, budgets)):.12g} simulated seconds"
    if any(cell.max_rounds < cell.all_rounds for cell in cells):
        text += "; with all of them another may be chosen"
    lengths: set[int] = set()
    for of_candidate in runs.values():
        lengths |= {run.num_rounds for run in of_candidate}
    if len(lengths) > 1:
        text += f"; the runs have {min(lengths)} to {max(lengths)} rounds, and count to their own ends"
    return text


def direction_of_candidates(runs: Mapping[SettingPairs, Sequence[SavedRun]], metric: str) -> Direction:
    """Return the direction of the metric in the runs of all candidates.

    Raises:
        ValueError: Nobody tells whether lower or higher is better.
    """
    every: list[SavedRun] = []
    for of_candidate in runs.values():
        every += of_candidate
    direction = direction_in(every, metric)
    if direction is None:
        raise ValueError(unknown_direction(metric))
    return direction


def choices_of(cells: Cells, runs: Runs) -> Tried:
    """Compose the cells of each candidate of a row by method and case, of methods that know one of the settings."""
    tried = Tried()
    metric = metric_of(cells.experiment, runs)
    for method in runs.methods:
        for name, case in cells.experiment.cases_of(runs).items():
            config = cells.composer.compose(method, as_settings(runs.settings), cells.configs_of(case))
            more = held_out(metric, cells.experiment.val_fraction, config)
            known = cells.options_of(runs, method, case)
            given = dict(cells.settings_of(case))
            tuned = {}
            for setting, values in runs.tune.items():
                names = single_names([setting])
                if known.issuperset(names) and not any(name in given for name in names):
                    tuned[setting] = values
            if not tuned:
                continue
            for combination in setting_combinations(tuned):
                candidate = as_settings(combination)
                group = []
                for seed in cells.experiment.tune_seeds or cells.seeds_of(runs):
                    cell = cells.compose(runs, method, name=name, seed=seed, tuned=candidate, more=more)
                    check_logged(metric, cell.config)
                    group.append(cell)
                tried.setdefault((runs.name_of(method), name), {})[candidate] = group
    return tried


def untuned(cells: Cells) -> list[str]:
    """Describe the settings that rows tune and that a case or the command sets, which wins."""
    sentences: list[str] = []
    for runs in cells.experiment.runs:
        for name, case in cells.experiment.cases_of(runs).items():
            given = dict(cells.settings_of(case))
            for setting in single_names(runs.tune):
                if setting in given:
                    rows = ", ".join(runs.name_of(method) for method in runs.methods)
                    place = f"{name}, {rows}" if name else rows
                    sentences.append(f"Not tuned: {place}, over {setting}, which is set to {given[setting]}.")
    return sentences


def held_out(metric: str, val_fraction: float, config: Mapping[str, Any]) -> SettingPairs:
    """Return the settings by which a candidate is judged on held-out training samples.

    Args:
        metric: The log key by which it is judged.
        val_fraction: Share of the training samples that is held out where the configuration holds out none.
        config: The configuration of the candidate without them.
    """
    more: list[tuple[str, str]] = []
    if not config["data"]["val_fraction"]:
        more.append(("data.val_fraction", str(val_fraction)))
    if metric.startswith(OF_CLIENTS):
        more.append(("data.test_on_val", "true"))
    return tuple(more)


def check_logged(metric: str, config: Mapping[str, Any]) -> None:
    """Refuse a metric of the clients' models that a run does not log.

    Args:
        metric: The log key by which the run is judged.
        config: The complete configuration of the run.

    Raises:
        ValueError: The run does not evaluate its clients, or does not fine-tune them.
    """
    for setting, beginning in (("evaluate_clients_every", OF_CLIENTS), ("fine_tuning", f"{TUNED}/")):
        if metric.startswith(beginning) and not config["model"].get(setting):
            raise ValueError(f"tune_metric {metric} needs model.{setting}, which is not set; set it for all runs")


def runs_of(folder: Path, group: Sequence[Cell], failed: Mapping[str, str]) -> list[SavedRun]:
    """Read the runs of a candidate, none if one has failed or has no round within its simulated seconds."""
    files_of = {cell.name: CellFiles.of(cell, folder) for cell in group}
    if any(cell.name in failed or not files_of[cell.name].has_rounds() for cell in group):
        return []
    return [files_of[cell.name].read(cell.max_rounds, cell.directions) for cell in group]


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
