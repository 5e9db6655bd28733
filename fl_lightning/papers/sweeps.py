"""Drawings of values at the end of runs, over the cases of an experiment, and of the rounds to a target."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from textwrap import fill
from typing import Any

import numpy as np

from fl_lightning.metrics.keys import Direction, best_of, unknown_direction
from fl_lightning.papers.drawing import (
    Drawing,
    Drawn,
    Series,
    by_name,
    check_target_key,
    counted,
    ends,
    factor_of,
    unequal_text,
    unique,
)
from fl_lightning.papers.panels import finish, panels
from fl_lightning.reports.comparison_tables import decimal, spread
from fl_lightning.reports.figures import COLOURS, Numbers, draw_line
from fl_lightning.reports.result_tables import Mark, Table, TableCell
from fl_lightning.reports.results import LAST_ROUNDS, direction_in, rounds_text, rounds_until
from fl_lightning.reports.saved import Group, SavedRun
from fl_lightning.utils.text import drawable


def end_of(series: Sequence[Series], keys: Collection[str], last: int) -> str:
    """Describe the mean that `ends` takes of runs, which may have fewer than `last` values."""
    lengths = []
    for runs in series:
        for key in keys:
            lengths += [len(run.history.curve(key)) for run in runs.group.runs]
    count = min(max(lengths, default=last), last)
    return f"mean of the last {count} values" if count > 1 else "last value"


def direction_of_series(series: Sequence[Series], key: str) -> Direction | None:
    """Return the direction of a key in all runs, or None if nobody tells it."""
    all_runs: list[SavedRun] = []
    for runs in series:
        all_runs += runs.group.runs
    return direction_in(all_runs, key)


@dataclass
class Sweep(Drawing):
    """Draws values at the end of runs against one setting, as a line for each method.

    Every value of the setting is a case of the experiment.

    Args:
        keys: Log keys by the names of their panels.
        xlabel: Name of the setting.
        value: Name and unit of the values.
        scale: Factor of the values. 100 gives percent.
        last: Number of rounds at the end that are averaged.
        levels: Methods without the setting, drawn as horizontal lines. Each has its case by group.
        groups: Panels by name. Each has its cases with their names on the x axis. None makes one
            panel with all cases.
    """

    keys: Mapping[str, str]
    xlabel: str
    value: str = "accuracy (%)"
    scale: float = 100.0
    last: int = LAST_ROUNDS
    levels: Mapping[str, Mapping[str, str]] | None = None
    groups: Mapping[str, Mapping[str, str]] | None = None

    def log_keys(self) -> list[str]:
        return list(self.keys.values())

    def draw(self, series: Sequence[Series]) -> Drawn:
        groups = self.groups
        if not groups:
            levels = self.levels or {}
            swept = unique(runs.case for runs in series if runs.method not in levels)
            groups = {"": {case: case for case in swept}}
        row_names = [self.value]
        if len(self.keys) > 1:
            row_names = ["\n".join(filter(None, (name, self.value))) for name in self.keys]
        figure, axes = panels(
            row_names,
            columns=list(groups),
            width=3.2,
            sharex=False,  # The names on the x axis differ between groups.
        )
        sentences = []
        for row, (key_name, key) in zip(axes, self.keys.items(), strict=True):
            for place, (group, cases) in zip(row, groups.items(), strict=True):
                lines = self._draw_panel(place, series, key=key, group=group, cases=cases)
                for method, values in lines.items():
                    title = ": ".join(filter(None, (group, key_name, method)))
                    sentences.append(f"{title}: {by_name(values, '{:.3g}')}")
        finish(figure, axes, self.xlabel)
        value = self.value[:1].upper() + self.value[1:]
        when = end_of(series, self.keys.values(), self.last)
        rounds = lengths_text(series)
        caption = " ".join(filter(None, (f"{value}, {when}. {'; '.join(sentences)}.", rounds)))
        return Drawn(figure, caption)

    def _draw_panel(
        self,
        place: Any,
        series: Sequence[Series],
        *,
        key: str,
        group: str,
        cases: Mapping[str, str],
    ) -> dict[str, dict[str, float]]:
        """Draw one panel with a line for each method.

        Args:
            place: The axes of the panel.
            series: The runs of the experiment.
            key: Log key of the values.
            group: Name of the panel's group.
            cases: The cases with their names on the x axis.

        Returns:
            By method, the values by their names on the x axis. A horizontal line has one value
            without a name.
        """
        levels = self.levels or {}
        names = list(cases.values())
        lines: dict[str, dict[str, float]] = {}
        for number, method in enumerate(unique(runs.method for runs in series)):
            level_case = levels.get(method, {}).get(group)
            ends_by_case: dict[str, Numbers] = {}
            for runs in series:
                if runs.method == method:
                    ends_by_case[runs.case] = factor_of(runs, key, self.scale) * ends(runs, key, self.last)
            points: dict[int, Numbers] = {}
            for index, case in enumerate(cases):
                drawn_case = case if level_case is None else level_case
                if drawn_case in ends_by_case:
                    points[index] = ends_by_case[drawn_case]
            means = np.array([values.mean() for values in points.values()])
            stds: Numbers | None = None
            if all(len(values) > 1 for values in points.values()):
                stds = np.array([values.std(ddof=1) for values in points.values()])
            draw_line(place, number, x=list(points), mean=means, std=stds, label=method, every=1)
            if method in levels and len(means):
                lines[method] = {"": float(means[0])}
            else:
                lines[method] = {names[index]: float(mean) for index, mean in zip(points, means, strict=True)}
        place.set_xticks(range(len(names)), [drawable(name) for name in names])
        return lines


@dataclass
class EndTable(Drawing):
    """Lists values at the end of runs in a table, with a row for each method and case.

    Args:
        keys: Log keys by the names of their columns.
        scale: Factor of the values. 100 gives percent.
        last: Number of rounds at the end that are averaged.
        cases_as_columns: Whether there is a row for each method, and a group of columns for each case.
    """

    keys: Mapping[str, str]
    scale: float = 100.0
    last: int = LAST_ROUNDS
    cases_as_columns: bool = False

    def log_keys(self) -> list[str]:
        return list(self.keys.values())

    def draw(self, series: Sequence[Series]) -> Drawn:
        values_by_row: dict[str, dict[tuple[str, str], Numbers]] = {}
        columns: dict[tuple[str, str], None] = {}
        for runs in series:
            row = runs.method if self.cases_as_columns else runs.name
            case = runs.case if self.cases_as_columns else ""
            for name, key in self.keys.items():
                of_row = values_by_row.setdefault(row, {})
                of_row[case, name] = np.empty(0)
                if any(run.history.curve(key) for run in runs.group.runs):
                    of_row[case, name] = factor_of(runs, key, self.scale) * ends(runs, key, self.last)
        for values in values_by_row.values():
            columns |= dict.fromkeys(values)
        cells = {row: [TableCell(row)] for row in values_by_row}
        directions = {name: direction_of_series(series, key) for name, key in self.keys.items()}
        for column in columns:
            for row, cell in self._column(values_by_row, column, directions[column[1]]).items():
                cells[row].append(cell)
        header = [""]
        for column in columns:
            header.append(", ".join(filter(None, column)))
        caption = f"In %: {end_of(series, self.keys.values(), self.last)}"
        seeds = max(len(counted(runs).group.runs) for runs in series)
        if seeds > 1:
            caption += f", mean ± sample standard deviation over {seeds} seeds"
        rounds = lengths_text(series)
        sentences = " ".join(filter(None, (f"{caption}.", rounds)))
        return Drawn(Table("", header, list(cells.values())), sentences)

    def _column(
        self,
        values_by_row: Mapping[str, Mapping[tuple[str, str], Numbers]],
        column: tuple[str, str],
        direction: Direction | None,
    ) -> dict[str, TableCell]:
        """Write the cells of one column, the best one in bold if the direction is known."""
        values = {row: of_row.get(column, np.empty(0)) for row, of_row in values_by_row.items()}
        means = {row: float(of_row.mean()) for row, of_row in values.items() if of_row.size}
        best = np.nan
        if direction is not None:
            best = best_of(means.values(), direction)
        cells = {}
        for row, of_row in values.items():
            mark: Mark = "bold" if means.get(row) == best else ""
            cells[row] = TableCell(text_of(of_row), mark)
        return cells


def lengths_text(series: Sequence[Series]) -> str:
    """Name the rounds of the runs that count, and say which count, unless all runs have the same number of rounds."""
    rounds = rounds_text([Group(runs.name, counted(runs).group.runs) for runs in series])
    return " ".join(filter(None, (rounds, unequal_text(series))))


def text_of(values: Numbers) -> str:
    """Write the mean, with the sample standard deviation unless it is 0, and what values are not finite."""
    if not np.isfinite(values).all() or not values.size:
        return spread(values.tolist(), decimal)
    mean = values.mean()
    std = values.std(ddof=1) if len(values) > 1 else 0
    return f"{mean:.1f} ± {std:.1f}" if std else f"{mean:.1f}"


class RoundsToTarget(Drawing):
    """Draws the number of rounds until a value reaches a target, as a bar for each method.

    A bar is the mean over the seeds. A method that misses the target with a seed has no bar.

    Source: Yao and Sun 2020, arXiv:2005.12657, Fig. 2.

    Args:
        targets: Targets in percent, by case. The empty name holds the target of all other cases.
        key: Log key of the value.
        baseline: The method whose number of rounds counts as 100 %.
    """

    def __init__(self, targets: Mapping[str, float], key: str = "global/acc", baseline: str = "FedAvg") -> None:
        self.targets = targets
        self.key = key
        self.baseline = baseline

    def log_keys(self) -> list[str]:
        return [self.key]

    def target_keys(self) -> list[str]:
        return [self.key]

    def draw(self, series: Sequence[Series]) -> Drawn:
        direction = direction_of_series(series, self.key)
        if direction is None:
            raise ValueError(unknown_direction(self.key))
        check_target_key(self.key, direction)
        cases = unique(runs.case for runs in series)
        methods = unique(runs.method for runs in series)
        titles = [", ".join(filter(None, (case, f"target {self.target(case):g} %"))) for case in cases]
        figure, axes = panels(["rounds to the target"], titles, width=3.4, height=2.6)
        sentences = []
        for place, case in zip(axes[0], cases, strict=True):
            by_method = {runs.method: runs for runs in series if runs.case == case}
            reached: dict[str, float] = {}
            missed: dict[str, str] = {}
            for method, runs in by_method.items():
                rounds = self.rounds(runs)
                if rounds is not None:
                    reached[method] = rounds
                else:
                    missed[method] = "never" if runs.is_whole else "not yet"
            draw_bars(place, methods, reached=reached, missed=missed)
            name = ", ".join(filter(None, (case, f"{self.target(case):g} %")))
            sentences.append(f"{name}: {self._sentence(reached, missed)}")
        finish(figure, axes, "method")
        return Drawn(figure, f"Rounds to the target, and as a share of {self.baseline}'s. {'. '.join(sentences)}.")

    def _sentence(self, reached: Mapping[str, float], missed: Mapping[str, str]) -> str:
        """List the rounds of one case, their shares of the baseline's, and who missed the target."""
        parts = [by_name(reached, "{:.0f}")]
        base = reached.get(self.baseline)
        if base:
            shares = {m: 100 * rounds / base for m, rounds in reached.items() if m != self.baseline}
            parts.append(by_name(shares, "{:.0f} %"))
        for word in unique(missed.values()):
            parts.append(f"{word}: {', '.join(method for method in missed if missed[method] == word)}")
        return "; ".join(filter(None, parts))

    def target(self, case: str) -> float:
        """Return the target of a case, in percent."""
        return self.targets.get(case, self.targets.get("", 100.0))

    def rounds(self, runs: Series) -> float | None:
        """Return the mean number of rounds to the target, or None if a run misses it."""
        target = self.target(runs.case) / factor_of(runs, self.key)
        total = 0.0
        for run in runs.group.runs:
            rounds = rounds_until(run, self.key, target)
            if rounds is None:
                return None
            total += rounds
        return total / len(runs.group.runs)


def draw_bars(place: Any, methods: Sequence[str], reached: Mapping[str, float], missed: Mapping[str, str]) -> None:
    """Draw the number of rounds of each method as a bar, or a word instead of one.

    Args:
        place: The axes to draw in.
        methods: The methods on the x axis.
        reached: Rounds of the methods that reached the target.
        missed: Words for the methods that did not.
    """
    for index, method in enumerate(methods):
        height = reached.get(method)
        text = missed.get(method, "")
        if height is not None:
            place.bar(index, height, color=COLOURS[index % len(COLOURS)])
            text = f"{height:.0f}"
        place.text(index, height or 0, text, ha="center", va="bottom", fontsize=8)
    characters = max(8, 60 // len(methods))
    names = [fill(drawable(method), characters) for method in methods]
    place.set_xticks(range(len(methods)), names, fontsize=8)
    place.set_xlim(-0.6, len(methods) - 0.4)  # The same limits where no method has a bar.
