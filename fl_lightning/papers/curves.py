"""Logged values over the rounds or over simulated seconds, and the accuracy of each class over the rounds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from fl_lightning.functional.accuracy import prediction_consistency
from fl_lightning.functional.classes import shown_names
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
    labels_of,
    unequal_text,
    unique,
)
from fl_lightning.papers.panels import draw_maps, finish, name_rounds, panels
from fl_lightning.reports.figures import Numbers, draw_line
from fl_lightning.reports.results import LAST_ROUNDS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Line = tuple[Sequence[float], Numbers, Numbers | None]
"""Rounds or seconds, mean, and deviation or None, (T,) each."""

Place = tuple[str, str, str]
"""Names of the row, the column and the line of a curve."""


@dataclass
class Curves(Drawing):
    """Draws values over rounds or simulated seconds: the mean over the seeds, with a band of one standard deviation.

    Three things vary: the method, the case, the value (key). The lines of a panel, the columns and the rows each show
    one of them.

    Args:
        keys: Log keys by their names in the figure.
        line: The thing in which the lines of a panel differ.
        column: The thing in which panels beside each other differ.
        row: The thing in which panels below each other differ.
        value: Name and unit of the values.
        scale: Factor of the values. 100 gives percent.
        clients: Whether the band is the deviation over the clients, logged as `KEY/std`, instead of over the seeds.
        cases: Names of the cases that are drawn. Without names all cases are drawn.
        width: Width of a panel in inches.
        height: Height of a panel in inches.
        over_seconds: Whether the values are drawn over the simulated seconds of runs with `data.devices`.

    Raises:
        ValueError: `clients` and `over_seconds` are both set, or two of `line`, `column` and `row` are equal.
    """

    keys: Mapping[str, str]
    line: Dimension = "method"
    column: Dimension = "case"
    row: Dimension = "key"
    value: str = "accuracy (%)"
    scale: float = 100.0
    clients: bool = False
    cases: Sequence[str] = ()
    width: float = 2.6
    height: float = 2.3
    over_seconds: bool = False

    def __post_init__(self) -> None:
        if self.over_seconds and self.clients:
            raise ValueError(
                "clients is a band over the rounds, and over_seconds draws no rounds; leave out one of them"
            )
        given = (self.line, self.column, self.row)
        if set(given) != {"method", "case", "key"}:
            raise ValueError(f"line, column, row must be method, case and key in some order, got {given}")

    def log_keys(self) -> list[str]:
        return list(filter(None, self.keys.values()))

    def draw(self, series: Sequence[Series]) -> Drawn:
        shown = chosen(series, self.cases)
        lines: dict[Place, Line] = {}
        ends_of_lines: dict[Place, float] = {}
        for runs in map(counted, shown):
            for name, key in self.keys.items():
                line = self.line_of(runs, key)
                if line is None:
                    continue
                names = {"method": runs.method, "case": runs.case, "key": name}
                place = (names[self.row], names[self.column], names[self.line])
                lines[place] = line
                ends_of_lines[place] = self.end_of(runs, key, line)
        if not lines:
            by = "by simulated second (data.devices)" if self.over_seconds else "by round"
            raise ValueError(f"curves need values {by}, and no run has {', '.join(self.log_keys()) or 'enough'}")
        is_shaded = any(std is not None for _, _, std in lines.values())
        caption = self.caption(ends_of_lines, is_shaded)
        return Drawn(self._draw_lines(lines), " ".join(filter(None, (caption, unequal_text(shown)))))

    def _draw_lines(self, lines: Mapping[Place, Line]) -> "Figure":
        """Draw the lines in their panels."""
        rows = unique(row for row, _, _ in lines)
        columns = unique(column for _, column, _ in lines)
        names = unique(name for _, _, name in lines)
        row_names = [self.value]
        if len(rows) > 1:
            row_names = ["\n".join(filter(None, (row, self.value))) for row in rows]
        figure, axes = panels(row_names, columns, width=self.width, height=self.height)
        for (row, column, name), (x, mean, std) in lines.items():
            draw_line(
                axes[rows.index(row), columns.index(column)],
                names.index(name),
                x=x,
                mean=mean,
                std=std,
                label=name,
                in_steps=self.over_seconds,
            )
        if self.over_seconds:
            finish(figure, axes, "simulated seconds")
        else:
            longest = max((x for x, _, _ in lines.values()), key=len)
            name_rounds(axes, [int(round_idx) for round_idx in longest])
            finish(figure, axes)
        return figure

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
        """Compute the line of a value, None if no run has the value.

        Args:
            runs: Runs of the line.
            key: Log key of the value.
        """
        x: Sequence[float]
        if self.over_seconds:
            x, values = runs.group.timed_curves(key)
        else:
            x, values = runs.group.carried_curves(key)
        if not x:
            return None
        std = values.std(0, ddof=1) if len(values) > 1 else None
        if self.clients:
            rounds, deviations = runs.group.carried_curves(f"{key}/std")
            std = deviations.mean(0) if rounds == x else None
        scale = factor_of(runs, key, self.scale)
        return x, scale * values.mean(0), None if std is None else scale * std

    def caption(self, ends_of_lines: Mapping[Place, float], is_shaded: bool) -> str:
        """Describe the ends of the lines.

        Args:
            ends_of_lines: Mean of the last five values of each line.
            is_shaded: Whether a line has a band.
        """
        by_panel: dict[str, dict[str, float]] = {}
        for (row, column, name), value in ends_of_lines.items():
            panel = ": ".join(filter(None, (column, row)))
            by_panel.setdefault(panel, {})[name] = value
        texts = []
        for panel, values in by_panel.items():
            texts.append(": ".join(filter(None, (panel, by_name(values, "{:.3g}")))))
        text = f"Mean of the last five values. {'; '.join(texts)}."
        if not is_shaded:
            return text
        band = "clients" if self.clients else "seeds"
        return f"{text} Band: one standard deviation over the {band}."


class Consistency(Curves):
    """Draws the prediction consistency in a panel for each method and a line for each case.

    It is the cosine between the class-wise accuracies of the global model in successive rounds.

    Source: Lee et al. 2022, arXiv:2106.03097, Sec. 2.2 and Fig. 2b.

    Args:
        cases: Names of the cases that are drawn. Without names all cases are drawn.
    """

    def __init__(self, cases: Sequence[str] = ()) -> None:
        super().__init__(
            keys={"": ""},
            line="case",
            column="method",
            row="key",
            value="prediction consistency (cosine)",
            scale=1.0,
            cases=cases,
        )

    def line_of(self, runs: Series, key: str) -> Line | None:
        rounds, _, table = runs.group.columns(BY_CLASS)
        if len(rounds) < 2:
            return None
        accuracies = torch.from_numpy(np.nan_to_num(table))
        return rounds[1:], prediction_consistency(accuracies).numpy(), None


class ClassMaps(Drawing):
    """Draws class × round maps of the global model's accuracy, in a row for each method and a column for each case.

    Source: Lee et al. 2022, arXiv:2106.03097, Figs. 2a and 10; FedKA, Fig. 1a.

    Args:
        normalised: Whether the maps show each class's share A_c / ΣA in place of its accuracy.
        cases: Names of the cases that are drawn. Without names all cases are drawn.
    """

    def __init__(self, normalised: bool = False, cases: Sequence[str] = ()) -> None:
        self.normalised = normalised
        self.cases = cases

    def draw(self, series: Sequence[Series]) -> Drawn:
        shown = chosen(series, self.cases)
        maps: dict[str, Numbers] = {}
        names: list[str] = []
        described: dict[str, float] = {}
        for label, runs in zip(labels_of(shown), shown, strict=True):
            _, names, table = counted(runs).group.columns(BY_CLASS)
            if self.normalised:
                with np.errstate(invalid="ignore"):
                    shares = table / table.sum(1, keepdims=True)
                maps[label] = shares.T
                described[label] = 100 * float(np.nanstd(shares, axis=1).mean())
            else:
                maps[label] = 100 * table.T
                described[label] = 100 * float(np.abs(np.diff(table, axis=0)).mean())
        figure = draw_maps(
            maps,
            xlabel="round",
            ylabel="class",
            value="share of ΣA" if self.normalised else "accuracy (%)",
            row_names=shown_names(names),
            columns=len(unique(runs.case for runs in shown)),
            limits=(0.0, 0.3) if self.normalised else (0.0, 100.0),
            width=3.4,
        )
        if self.normalised:
            text = "Deviation of the shares over the classes, mean over the rounds, in points"
        else:
            text = "Mean change of a class's accuracy from one round to the next, in points"
        return Drawn(figure, f"{text}: {by_name(described)}.")
