"""Curves of methods side by side: a panel for each case, equal axes, and one look for a method in all of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fl_lightning.reports import figures
from fl_lightning.reports.figures import Numbers

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 4.7
"""Width of a panel in inches, at which a phone shows letters in a readable size."""

HEIGHT = 2.9
"""Height of a panel in inches."""

MOST_COLUMNS = 2
"""Largest number of panels in a row of a picture."""

WIDEST_OF_TWO = 24
"""Largest number of characters of names that stand in two columns of a legend."""

MOST_POINTS = 200
"""Largest number of points of a drawn curve."""

ROUND = "round"
"""Label of an axis with the numbers of rounds."""


class Band(NamedTuple):
    """Has the curves of the runs of one method.

    Args:
        x: Places of the values, (T,). It is empty if the method has no curve.
        values: A value for each run and place, (S, T).
    """

    x: Sequence[float]
    values: Numbers

    @property
    def mean(self) -> Numbers:
        """Means over the runs, (T,). NaN where a value is not finite or endlessly large."""
        means: Numbers = figures.finite(self.values).mean(axis=0)
        return means

    @property
    def std(self) -> Numbers | None:
        """Sample standard deviations over the runs, (T,), or None of a single run."""
        if len(self.values) < 2:
            return None
        deviations: Numbers = figures.finite(self.values).std(axis=0, ddof=1)
        return deviations

    def thinned(self) -> Band:
        """Leave out points of a long curve, at equal distances, so that `MOST_POINTS` remain, the last one among them.

        >>> len(Band(range(1000), np.zeros((2, 1000))).thinned().x)
        200
        """
        if len(self.x) <= MOST_POINTS:
            return self
        chosen = np.linspace(0, len(self.x) - 1, MOST_POINTS).round().astype(int)
        return Band([self.x[index] for index in chosen], self.values[:, chosen])


@dataclass(frozen=True)
class Panel:
    """Has the curves of one case.

    Attributes:
        title: The case. Empty: there is only one.
        bands: Curves by the method. A method without runs in the case is left out.
    """

    title: str
    bands: Mapping[str, Band]


@dataclass(frozen=True)
class Curves:
    """Has one value of all methods and cases.

    Attributes:
        methods: The methods of the page, in their order, which decides the look of each.
        panels: The panels, at least one curve in all of them.
        ylabel: Name and unit of the values.
        xlabel: Name and unit of x. `ROUND` has whole numbers.
        in_steps: Whether a value holds until the next one.
    """

    methods: Sequence[str]
    panels: Sequence[Panel]
    ylabel: str
    xlabel: str = ROUND
    in_steps: bool = False


def plot_curves(curves: Curves) -> Figure:
    """Draw the mean over the runs of each method, with a band of one sample standard deviation, a panel for each case.

    Args:
        curves: The curves.
    """
    count = len(curves.panels)
    columns = min(count, MOST_COLUMNS)
    rows = math.ceil(count / columns)
    shown = shown_methods(curves)
    figure = figures.new_figure(WIDTH * columns, HEIGHT * rows + 0.3 + 0.17 * math.ceil(len(shown) / columns))
    places = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    for axes, panel in zip(places.flat, curves.panels, strict=False):
        draw_panel(axes, panel, curves)
    for axes in places.flat[count:]:
        axes.set_visible(False)
    name_methods(figure, [places.flat[index] for index in range(count)], shown)
    return figure


def shown_methods(curves: Curves) -> list[str]:
    """Return the methods that have a curve in some panel, in their order."""
    return [method for method in curves.methods if any(has_curve(panel, method) for panel in curves.panels)]


def has_curve(panel: Panel, method: str) -> bool:
    """Return True if a method has a curve in a panel."""
    return method in panel.bands and len(panel.bands[method].x) > 0


def draw_panel(axes: Axes, panel: Panel, curves: Curves) -> None:
    """Draw the curves of one case.

    Args:
        axes: Where they are drawn.
        panel: The curves of the case.
        curves: All of the picture.
    """
    places: list[float] = []
    for number, method in enumerate(curves.methods):
        if has_curve(panel, method):
            band = panel.bands[method].thinned()
            places = [*places, *band.x]
            figures.draw_line(
                axes,
                number,
                x=figures.finite(band.x),
                mean=band.mean,
                label=method,
                std=band.std,
                every=max(1, len(band.x) // 8),
                width=1.5,
                in_steps=curves.in_steps,
            )
    axes.set(xlabel=curves.xlabel, ylabel=curves.ylabel)
    if panel.title:
        axes.set_title(panel.title, fontsize="medium")
    if curves.xlabel == ROUND and places:
        figures.label_rounds(axes, sorted({int(place) for place in places}))
    axes.label_outer()
    figures.tidy(axes)


def name_methods(figure: Figure, panels: Sequence[Axes], names: Sequence[str]) -> None:
    """Put the legend of several methods above the panels. One method needs no legend.

    Args:
        figure: The figure.
        panels: Its panels.
        names: The methods, in their order.
    """
    if len(names) < 2:
        return
    by_name: dict[str, Any] = {}
    for axes in panels:
        handles, labels = axes.get_legend_handles_labels()
        by_name |= dict(zip(labels, handles, strict=True))
    ordered = [figures.in_legend(name) for name in names]
    longest = max(len(name) for name in names)
    columns = 2 if longest <= WIDEST_OF_TWO else 1
    handles = [by_name[name] for name in ordered]
    figures.add_legend(figure, handles, ordered, place="outside upper left", columns=columns)
