"""Tuning: settings of each method, chosen on the server's validation split."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from fl_lightning.cli.compare.cells import CellFiles
from fl_lightning.cli.compare.grid import Case, Cell, cells_of, described, option_names
from fl_lightning.cli.compare.running import Grid, run_cells
from fl_lightning.reports.results import statistics_of
from fl_lightning.runs.value_names import is_lower_better
from fl_lightning.utils.files import write_table


def tune(grid: Grid, cases: Sequence[Case], candidates: Sequence[Case], val_fraction: float, metric: str) -> list[str]:
    """Choose settings for each method and case on the server's validation split.

    Args:
        grid: whose `chosen` is filled.
        cases: of the grid.
        candidates: settings to choose from.
        val_fraction: share of the training samples that the server holds back where the base has no validation split.
        metric: log key of the validation split; its mean over the last five rounds and the seeds decides.

    Returns:
        Sentences that say what was chosen.

    Raises:
        ValueError: the metric is none of the validation split, or a method has no complete candidate.
    """
    if not metric.startswith("val/"):
        raise ValueError(f"--tune chooses on the validation split, so --tune_metric must begin with val/, got {metric}")
    folder = grid.output / "tuning"
    tried = {(m, case): c for m in grid.methods for case, c in choices_of(grid, m, cases, candidates, val_fraction)}
    cells = (cell for choices in tried.values() for group in choices.values() for cell in group)
    failed = run_cells(cells, grid.processes, folder, test=False)
    notes, rows = [], []
    for (method, case), choices in tried.items():
        scores = {c: mean_score(folder, group, metric) for c, group in choices.items()}
        scored = {c: score for c, score in scores.items() if score is not None}
        if not scored:
            problems = [failed[cell.name] for group in choices.values() for cell in group if cell.name in failed]
            raise ValueError(
                f"--tune needs {metric} of every seed, and no candidate of {method} has it; "
                f"{(problems or ['set --tune_metric to a value of the validation split'])[0]}"
            )
        best = (min if is_lower_better(metric) else max)(scored, key=lambda c: scored[c])
        grid.chosen[method, case] = best
        notes.append(
            f"Tuned on the validation split: {described([*case, *best])} for {method} "
            f"({metric} {scored[best]:.4g}, the {'lowest' if is_lower_better(metric) else 'highest'} of {len(scored)})."
        )
        rows += [[method, described(case), described(c), scores[c], c == best] for c in choices]
    write_table(grid.output / "tuning.csv", [["method", "case", "settings", metric, "chosen"], *rows])
    return notes


def choices_of(
    grid: Grid, method: str, cases: Sequence[Case], candidates: Sequence[Case], val_fraction: float
) -> Iterator[tuple[Case, dict[Case, list[Cell]]]]:
    """Compose the cells of each candidate for a method, case by case, none where it knows none of the settings."""
    config = grid.composer.compose(method)
    known = option_names(config)
    more = [] if config["data"]["val_fraction"] else [("data.val_fraction", str(val_fraction))]
    mine = dict.fromkeys(tuple(setting for setting in candidate if setting[0] in known) for candidate in candidates)
    for case in cases if () not in mine else ():
        yield case, {c: cells_of(grid.composer, method, [*case, *c], grid.seeds, grid.hold, more) for c in mine}


def mean_score(folder: Path, cells: Sequence[Cell], metric: str) -> float | None:
    """Average a metric's mean over the last five rounds over the seeds, None where a seed has none."""
    runs = [CellFiles(folder, cell.name).read() for cell in cells]
    values = [statistics_of(run, metric).get("last five") for run in runs if run is not None]
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if len(known) == len(cells) else None
