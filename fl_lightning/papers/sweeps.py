"""Values at the end of the runs against what is swept, and rounds until a value reaches a target."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from textwrap import fill

import numpy as np

from fl_lightning.papers.drawing import Drawing, Drawn, Series, by_name, unique
from fl_lightning.papers.panels import finish, panels
from fl_lightning.reports.figures import COLOURS, Numbers, draw_line
from fl_lightning.reports.result_tables import Cell, Table
from fl_lightning.reports.results import LAST, rounds_until
from fl_lightning.runs.value_names import is_lower_better
from fl_lightning.utils.text import drawable


def ends(runs: Series, key: str, last: int = LAST) -> Numbers:
    """Compute the mean of the last values of each run, (S,), NaN where there are none."""
    _, values = runs.group.curves(key)
    return values[:, -last:].mean(1) if values.size else np.array([np.nan])


def end_of(series: Sequence[Series], keys: Iterable[str], last: int) -> str:
    """Describe what `ends` takes of runs, which may have fewer values."""
    most = max((runs.group.curves(key)[1].shape[-1] for runs in series for key in keys), default=last)
    return f"mean of the last {min(most, last)} values" if min(most, last) > 1 else "last value"


@dataclass
class Sweep(Drawing):
    """Draws a value at the end over the cases, which are the values of one setting, in a line for each method.

    Args:
        keys: log keys by the names of their panels.
        xlabel: name of what is swept.
        value: name and unit of the value.
        scale: that it is multiplied by.
        last: rounds at the end that are averaged.
        levels: methods without the setting, drawn as level lines: the case by group.
        groups: panels by name, each with its cases and their names on the x axis; none: one panel with all cases.
    """

    keys: Mapping[str, str]
    xlabel: str
    value: str = "accuracy (%)"
    scale: float = 100.0
    last: int = LAST
    levels: Mapping[str, Mapping[str, str]] | None = None
    groups: Mapping[str, Mapping[str, str]] | None = None

    def log_keys(self) -> list[str]:
        return list(self.keys.values())

    def draw(self, series: Sequence[Series]) -> Drawn:
        levels = self.levels or {}
        swept = unique(runs.case for runs in series if runs.method not in levels)
        groups = self.groups or {"": {case: case for case in swept}}
        methods = unique(runs.method for runs in series)
        left = ["\n".join(filter(None, (name, self.value))) if len(self.keys) > 1 else self.value for name in self.keys]
        figure, axes = panels(left, list(groups), width=3.2, sharex=False)  # each group has its own names
        ends_by_title: dict[str, dict[str, float]] = {}
        for row, (key_name, key) in zip(axes, self.keys.items(), strict=True):
            for place, (group, cases) in zip(row, groups.items(), strict=True):
                for i, method in enumerate(methods):
                    of_method = [runs for runs in series if runs.method == method]
                    known = {runs.case: self.scale * ends(runs, key, self.last) for runs in of_method}
                    shown = [levels.get(method, {}).get(group, case) for case in cases]
                    points = {k: known[case] for k, case in enumerate(shown) if case in known}
                    mean = np.array([value.mean() for value in points.values()])
                    several = all(len(value) > 1 for value in points.values())
                    std = np.array([value.std(ddof=1) for value in points.values()]) if several else None
                    draw_line(place, i, list(points), mean, std, method, every=1)
                    title = ": ".join(filter(None, (group, key_name, method)))
                    names = list(cases.values())
                    ends_by_title[title] = {names[k]: float(m) for k, m in zip(points, mean, strict=True)}
                    if method in levels and len(mean):
                        ends_by_title[title] = {"": float(mean[0])}
                place.set_xticks(range(len(cases)), list(map(drawable, cases.values())))
        finish(figure, axes, self.xlabel)
        text = "; ".join(f"{title}: {by_name(values, '{:.3g}')}" for title, values in ends_by_title.items())
        when = end_of(series, self.keys.values(), self.last)
        return Drawn(figure, f"{self.value[:1].upper()}{self.value[1:]}, {when}. {text}.")


@dataclass
class EndTable(Drawing):
    """Values at the end as a table: a row for each method and case.

    Args:
        keys: log keys by the names of their columns.
        scale: that they are multiplied by; 100 for percent.
        last: rounds at the end that are averaged.
        cases_as_columns: a row for each method, and for each case the columns.
    """

    keys: Mapping[str, str]
    scale: float = 100.0
    last: int = LAST
    cases_as_columns: bool = False

    def log_keys(self) -> list[str]:
        return list(self.keys.values())

    def draw(self, series: Sequence[Series]) -> Drawn:
        table: dict[str, dict[tuple[str, str], Numbers]] = {}
        for runs in series:
            row, case = (runs.method, runs.case) if self.cases_as_columns else (runs.name, "")
            for name, key in self.keys.items():
                table.setdefault(row, {})[case, name] = self.scale * ends(runs, key, self.last)
        columns = list(dict.fromkeys(column for row in table.values() for column in row))
        cells = {row: [Cell(row)] for row in table}
        for column in columns:
            known = {row: values[column] for row, values in table.items() if column in values}
            means = [mean for values in known.values() if not np.isnan(mean := values.mean())]
            best = (min if is_lower_better(self.keys[column[1]]) else max)(means, default=np.nan)
            for row in table:
                values = known.get(row, np.array([np.nan]))
                cells[row].append(Cell(text_of(values), "bold" if values.mean() == best else ""))
        header = ["", *(", ".join(filter(None, column)) for column in columns)]
        rounds = end_of(series, self.keys.values(), self.last)
        seeds = max(len(runs.group.runs) for runs in series)
        over = f", mean ± sample standard deviation over {seeds} seeds" if seeds > 1 else ""
        return Drawn(Table("", header, list(cells.values())), f"In %: {rounds}{over}.")


def text_of(values: Numbers) -> str:
    """Write the mean with the sample standard deviation, where it is not 0."""
    mean, std = values.mean(), values.std(ddof=1) if len(values) > 1 else 0
    return "–" if np.isnan(mean) else f"{mean:.1f} ± {std:.1f}" if std else f"{mean:.1f}"


class RoundsToTarget(Drawing):
    """Draws bars of the rounds until a value reaches a target, mean over the seeds, none where a method never does.

    Source: Yao and Sun 2020, arXiv:2005.12657, Fig. 2.

    Args:
        targets: in percent, by case; under an empty name that of all other cases.
        key: log key of the value.
        baseline: method whose rounds are 100 %.
    """

    def __init__(self, targets: Mapping[str, float], key: str = "global/acc", baseline: str = "FedAvg") -> None:
        self.targets, self.key, self.baseline = targets, key, baseline

    def log_keys(self) -> list[str]:
        return [self.key]

    def draw(self, series: Sequence[Series]) -> Drawn:
        cases, methods = unique(runs.case for runs in series), unique(runs.method for runs in series)
        titles = [", ".join(filter(None, (case, f"target {self.target(case):g} %"))) for case in cases]
        figure, axes = panels(["rounds to the target"], titles, width=3.4, height=2.6)
        sentences, room = [], max(8, 60 // len(methods))  # letters below a bar
        for place, case in zip(axes[0], cases, strict=True):
            of_case = [runs for runs in series if runs.case == case]
            reached = {runs.method: self.rounds(runs) for runs in of_case}
            lacking = [runs for runs in of_case if reached[runs.method] is None]
            late = {runs.method: "never" if runs.is_whole else "not yet" for runs in lacking}
            for i, method in enumerate(methods):
                if (rounds := reached.get(method)) is not None:
                    place.bar(i, rounds, color=COLOURS[i % len(COLOURS)])
                    place.text(i, rounds, f"{rounds:.0f}", ha="center", va="bottom", fontsize=8)
                else:
                    place.text(i, 0, late.get(method, ""), ha="center", va="bottom", fontsize=8)
            place.set_xticks(range(len(methods)), [fill(drawable(m), room) for m in methods], fontsize=8)
            place.set_xlim(-0.6, len(methods) - 0.4)  # also where no method has a bar
            base = reached.get(self.baseline)
            counts = {method: rounds for method, rounds in reached.items() if rounds is not None}
            shares = {m: 100 * r / base for m, r in counts.items() if base and m != self.baseline}
            by_word = {word: ", ".join(m for m in late if late[m] == word) for word in unique(late.values())}
            others = (f"{word}: {names}" for word, names in by_word.items())
            parts = by_name(counts, "{:.0f}"), by_name(shares, "{:.0f} %"), *others
            name = ", ".join(filter(None, (case, f"{self.target(case):g} %")))
            sentences.append(f"{name}: {'; '.join(filter(None, parts))}")
        finish(figure, axes, "method")
        return Drawn(figure, f"Rounds to the target, and as a share of {self.baseline}'s. {'. '.join(sentences)}.")

    def target(self, case: str) -> float:
        """Target of a case, in percent."""
        return self.targets.get(case, self.targets.get("", 100.0))

    def rounds(self, runs: Series) -> float | None:
        """Count the rounds of a series, from 1, mean over its runs, None where one of them never gets there."""
        rounds = [rounds_until(run, self.key, self.target(runs.case) / 100) for run in runs.group.runs]
        known = [value for value in rounds if value is not None]
        return float(np.mean(known)) if len(known) == len(rounds) else None
