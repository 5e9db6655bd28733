"""A value of the run's end against what is swept."""

from collections.abc import Mapping, Sequence

import numpy as np

from fl_lightning.papers.drawing import Drawing, Drawn, Series, said, unique
from fl_lightning.papers.panels import finish, panels
from fl_lightning.reports.figures import Numbers, draw_line
from fl_lightning.reports.result_tables import Cell, Table
from fl_lightning.reports.results import LAST
from fl_lightning.utils.text import drawable


def ends(one: Series, key: str, last: int = LAST) -> Numbers:
    """Mean of the last values of each run, (S,); NaN where there are none."""
    _, values = one.group.curves(key)
    return values[:, -last:].mean(1) if values.size else np.array([np.nan])


class Sweep(Drawing):
    """A value at the end over the cases, which are the values of one setting; a line for each method.

    Args:
        keys: log keys by the names of their panels.
        xlabel: name of what is swept.
        value: name and unit of the value.
        scale: that it is multiplied by.
        last: rounds at the end that are averaged.
        levels: methods without the setting, drawn as level lines: the case by group.
        groups: panels by name, each with its cases and their names on the x axis; none: one panel with all cases.
    """

    def __init__(
        self,
        keys: Mapping[str, str],
        xlabel: str,
        value: str = "accuracy (%)",
        scale: float = 100.0,
        last: int = LAST,
        levels: Mapping[str, Mapping[str, str]] | None = None,
        groups: Mapping[str, Mapping[str, str]] | None = None,
    ) -> None:
        self.keys, self.xlabel, self.value, self.scale, self.last = keys, xlabel, value, scale, last
        self.levels, self.groups = levels or {}, groups

    def draw(self, series: Sequence[Series]) -> Drawn:
        swept = unique(one.case for one in series if one.method not in self.levels)
        groups = self.groups or {"": {case: case for case in swept}}
        methods = unique(one.method for one in series)
        left = ["\n".join(filter(None, (name, self.value))) if len(self.keys) > 1 else self.value for name in self.keys]
        figure, axes = panels(left, list(groups), width=3.2, sharex=False)  # each group has its own names
        found: dict[str, dict[str, float]] = {}
        for row, (key_name, key) in zip(axes, self.keys.items(), strict=True):
            for place, (group, cases) in zip(row, groups.items(), strict=True):
                for i, method in enumerate(methods):
                    values = self.values(series, method, group, list(cases), key)
                    points = {k: value for k, value in enumerate(values) if value is not None}
                    mean = np.array([value.mean() for value in points.values()])
                    several = all(len(value) > 1 for value in points.values())
                    std = np.array([value.std(ddof=1) for value in points.values()]) if several else None
                    draw_line(place, i, list(points), mean, std, method, every=1)
                    title = ": ".join(filter(None, (group, key_name, method)))
                    names = list(cases.values())
                    found[title] = {names[k]: float(m) for k, m in zip(points, mean, strict=True)}
                    if method in self.levels and len(mean):
                        found[title] = {"": float(mean[0])}
                place.set_xticks(range(len(cases)), list(map(drawable, cases.values())))
        for place in axes[-1]:
            place.set_xlabel(self.xlabel)
        finish(figure, axes)
        text = "; ".join(f"{title}: {said(values, '{:.3g}')}" for title, values in found.items())
        return Drawn(figure, f"{self.value[:1].upper()}{self.value[1:]} at the end. {text}.")

    def values(
        self, series: Sequence[Series], method: str, group: str, cases: Sequence[str], key: str
    ) -> list[Numbers | None]:
        """Values of a method in each case of a group, (S,), in the scale of the figure."""
        own = {one.case: self.scale * ends(one, key, self.last) for one in series if one.method == method}
        level = self.levels.get(method, {}).get(group)
        return [own.get(case if level is None else level) for case in cases]


class EndTable(Drawing):
    """Values at the end as a table: a row for each method and case.

    Args:
        keys: log keys by the names of their columns.
        scale: that they are multiplied by; 100 for percent.
        last: rounds at the end that are averaged.
        highest: columns in which the highest value is best; in the others the lowest.
        cases_as_columns: a row for each method, and for each case the columns.
    """

    def __init__(
        self,
        keys: Mapping[str, str],
        scale: float = 100.0,
        last: int = LAST,
        highest: Sequence[str] = (),
        cases_as_columns: bool = False,
    ) -> None:
        self.keys, self.scale, self.last, self.highest = keys, scale, last, highest
        self.cases_as_columns = cases_as_columns

    def draw(self, series: Sequence[Series]) -> Drawn:
        cases = unique(one.case for one in series) if self.cases_as_columns else [""]
        rows = unique(self.row_of(one) for one in series)
        columns = [(case, name) for case in cases for name in self.keys]
        table = np.full((len(rows), len(columns), 2), np.nan)
        for one in series:
            for name, key in self.keys.items():
                place = columns.index((one.case if self.cases_as_columns else "", name))
                values = self.scale * ends(one, key, self.last)
                table[rows.index(self.row_of(one)), place] = values.mean(), values.std(ddof=1) if len(values) > 1 else 0
        best = {}
        for k, (_, name) in enumerate(columns):
            if not np.isnan(table[:, k, 0]).all():
                best[k] = (np.nanmax if name in self.highest else np.nanmin)(table[:, k, 0])

        def cell(i: int, k: int) -> Cell:
            return Cell(text_of(*table[i, k]), bool(table[i, k, 0] == best.get(k)))

        cells = [[Cell(row), *(cell(i, k) for k in range(len(columns)))] for i, row in enumerate(rows)]
        header = ["", *(", ".join(filter(None, column)) for column in columns)]
        rounds = "the last round" if self.last == 1 else f"the mean of the last {self.last} evaluated rounds"
        seeds = max(len(one.group.runs) for one in series)
        over = f", mean ± sample standard deviation over {seeds} seeds" if seeds > 1 else ""
        return Drawn(Table("", header, cells), f"In %: {rounds}{over}.")

    def row_of(self, one: Series) -> str:
        """Name of the row of a series."""
        return one.method if self.cases_as_columns else one.name


def text_of(mean: float, std: float) -> str:
    """Write a mean with its deviation, where there is one."""
    if np.isnan(mean):
        return "–"
    return f"{mean:.1f} ± {std:.1f}" if std else f"{mean:.1f}"
