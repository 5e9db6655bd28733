"""Logged values over the rounds or over simulated seconds, and the accuracy of each class over the rounds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from fl_lightning.functional.accuracy import prediction_consistency
from fl_lightning.metrics.history import BY_CLASS
from fl_lightning.papers.drawing import (
    Dimension,
    Drawing,
    Drawn,
    Series,
    by_name,
    chosen,
    counted,
    ends,
    factor_of,
    unequal_text,
    unique,
)
from fl_lightning.papers.panels import draw_maps, finish, name_rounds, panels
from fl_lightning.reports.figures import Numbers, draw_line
from fl_lightning.reports.results import LAST_ROUNDS

Line = tuple[Sequence[float], Numbers, Numbers | None]
"""Rounds or seconds, (T,), mean and deviation, (T,)."""


@dataclass
class Curves(Drawing):
    """Values over rounds or simulated seconds: the mean over the seeds, with a band of one standard deviation.

    Three things vary: the method, the case, the value (key). One is the line's, one the column's, one the row's.

    Args:
        keys: log keys by their names in the figure.
        line: what the lines of a panel are.
        column: what the panels beside each other are.
        row: what the panels below each other are.
        value: name and unit of the values.
        scale: that they are multiplied by; 100 for percent.
        clients: whether the band is the deviation over the clients, logged as `KEY/std`, instead of that over seeds.
        methods: that are drawn; none named: all.
        cases: likewise.
        width: inches of a panel.
        height: likewise.
        over_seconds: whether the values are drawn over the simulated seconds of runs with `data.devices`.
    """

    keys: Mapping[str, str]
    line: Dimension = "method"
    column: Dimension = "case"
    row: Dimension = "key"
    value: str = "accuracy (%)"
    scale: float = 100.0
    clients: bool = False
    methods: Sequence[str] = ()
    cases: Sequence[str] = ()
    width: float = 2.6
    height: float = 2.3
    over_seconds: bool = False

    def __post_init__(self) -> None:
        if self.over_seconds and self.clients:
            raise ValueError(
                "clients is a band over the rounds, and over_seconds draws no rounds; leave out one of them"
            )
        given = self.line, self.column, self.row
        if set(given) != {"method", "case", "key"}:
            raise ValueError(f"line, column, row must be method, case and key in some order, got {given}")

    def log_keys(self) -> list[str]:
        return list(filter(None, self.keys.values()))

    def draw(self, series: Sequence[Series]) -> Drawn:
        lines: dict[tuple[str, str, str], Line] = {}
        last: dict[tuple[str, str, str], float] = {}
        shown = chosen(series, self.methods, self.cases)
        for runs in map(counted, shown):
            for name, key in self.keys.items():
                place = {"method": runs.method, "case": runs.case, "key": name}
                if line := self.line_of(runs, key):
                    named = (place[self.row], place[self.column], place[self.line])
                    lines[named] = line
                    last[named] = self.end_of(runs, key, line)
        if not lines:
            by = "by simulated second (data.devices)" if self.over_seconds else "by round"
            raise ValueError(f"curves need values {by}, and no run has {', '.join(self.log_keys()) or 'enough'}")
        rows, columns, names = (unique(key[i] for key in lines) for i in range(3))
        left = ["\n".join(filter(None, (name, self.value))) if len(rows) > 1 else self.value for name in rows]
        figure, axes = panels(left, columns, self.width, self.height)
        for (row, column, name), (places, mean, std) in lines.items():
            panel = axes[rows.index(row), columns.index(column)]
            draw_line(panel, names.index(name), places, mean, std=std, label=name, in_steps=self.over_seconds)
        if self.over_seconds:
            finish(figure, axes, "simulated seconds")
        else:
            longest = max((places for places, _, _ in lines.values()), key=len)
            name_rounds(axes, [int(place) for place in longest])
            finish(figure, axes)
        caption = self.caption(lines, last)
        return Drawn(figure, " ".join(filter(None, (caption, unequal_text(shown)))))

    def end_of(self, runs: Series, key: str, line: Line) -> float:
        """Compute the mean of the last five values as tables have it: a run that ended earlier counts to its own end.

        Args:
            runs: Runs of the line.
            key: Log key of the values. Empty if they are computed from several keys.
            line: The line.
        """
        if key:
            return float(factor_of(runs, key, self.scale) * ends(runs, key).mean())
        _, mean, _ = line
        return float(mean[-LAST_ROUNDS:].mean())

    def line_of(self, runs: Series, key: str) -> Line | None:
        """Compute the line of a value, None where it is not known."""
        rounds: Sequence[float]
        if self.over_seconds:
            rounds, values = runs.group.timed_curves(key)
        else:
            rounds, values = runs.group.carried_curves(key)
        if not rounds:
            return None
        std = values.std(0, ddof=1) if len(values) > 1 else None
        if self.clients:
            others, deviations = runs.group.carried_curves(f"{key}/std")
            std = deviations.mean(0) if others == rounds else None
        scale = factor_of(runs, key, self.scale)
        return rounds, scale * values.mean(0), None if std is None else scale * std

    def caption(self, lines: Mapping[tuple[str, str, str], Line], last: Mapping[tuple[str, str, str], float]) -> str:
        """Describe the ends of the lines."""
        parts: dict[str, dict[str, float]] = {}
        for (row, column, name), value in last.items():
            parts.setdefault(": ".join(filter(None, (column, row))), {})[name] = value
        values = "; ".join(": ".join(filter(None, (panel, by_name(ends, "{:.3g}")))) for panel, ends in parts.items())
        band = "clients" if self.clients else "seeds"
        shaded = any(std is not None for _, _, std in lines.values())
        return f"Mean of the last five values. {values}." + f" Band: one standard deviation over the {band}." * shaded


class Consistency(Curves):
    """Prediction consistency: the cosine between the class-wise accuracies of the global model in successive rounds.

    Source: Lee et al. 2022, arXiv:2106.03097, Sec. 2.2 and Fig. 2b.

    Args:
        line: what the lines of a panel are.
        column: what the panels beside each other are.
        cases: that are drawn; none named: all.
    """

    def __init__(self, line: Dimension = "case", column: Dimension = "method", cases: Sequence[str] = ()) -> None:
        super().__init__({"": ""}, line, column, "key", "prediction consistency (cosine)", 1.0, cases=cases)

    def line_of(self, runs: Series, key: str) -> Line | None:
        rounds, _, table = runs.group.columns(BY_CLASS)
        if len(rounds) < 2:
            return None
        return rounds[1:], prediction_consistency(torch.from_numpy(np.nan_to_num(table))).numpy(), None


class ClassMaps(Drawing):
    """Draws class × round maps of the global model's accuracy, in a row for each method and a column for each case.

    Source: Lee et al. 2022, arXiv:2106.03097, Figs. 2a and 10; FedKA, Fig. 1a.

    Args:
        normalised: each class's share A_c / ΣA in place of its accuracy.
        methods: that are drawn; none named: all.
        cases: likewise.
    """

    def __init__(self, normalised: bool = False, methods: Sequence[str] = (), cases: Sequence[str] = ()) -> None:
        self.normalised = normalised
        self.methods = methods
        self.cases = cases

    def draw(self, series: Sequence[Series]) -> Drawn:
        shown = chosen(series, self.methods, self.cases)
        maps = {}
        names = list[str]()
        changes = dict[str, float]()
        spread = dict[str, float]()
        for runs in shown:
            _, names, table = counted(runs).group.columns(BY_CLASS)
            changes[runs.name] = 100 * float(np.abs(np.diff(table, axis=0)).mean())
            with np.errstate(invalid="ignore"):
                shares = table / table.sum(1, keepdims=True)
            spread[runs.name] = 100 * float(np.nanstd(shares, axis=1).mean())
            maps[runs.name] = (shares if self.normalised else 100 * table).T
        value, limits = ("share of ΣA", (0.0, 0.3)) if self.normalised else ("accuracy (%)", (0.0, 100.0))
        columns = len(unique(runs.case for runs in shown))
        figure = draw_maps(maps, "round", "class", value, names, columns, limits, width=3.4)
        text = f"Mean change of a class's accuracy from one round to the next, in points: {by_name(changes)}."
        if self.normalised:
            text = f"Deviation of the shares over the classes, mean over the rounds, in points: {by_name(spread)}."
        return Drawn(figure, text)
