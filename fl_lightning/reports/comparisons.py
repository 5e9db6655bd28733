"""Figures that compare groups of runs, narrow enough for a phone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from fl_lightning.reports import figures
from fl_lightning.reports.curves import WIDEST_OF_TWO, WIDTH
from fl_lightning.reports.figures import Numbers
from fl_lightning.utils.text import drawable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_SEPARATED = 40
"""Largest number of classes with a name and with a line between neighbors."""

PLATE = {"facecolor": "white", "edgecolor": "none", "pad": 1.0, "alpha": 0.85}
"""Background of a number on a bar."""


def plot_forgetting(table: Mapping[str, Numbers], class_names: Sequence[str], *, methods: Sequence[str] = ()) -> Figure:
    """Draw what each class forgot: best minus last accuracy, the mean over the runs and one standard deviation.

    Args:
        table: Values of each group by its label, in [0, 1], (S, C). NaN is a class without test samples.
        class_names: Names of the C classes.
        methods: Labels of all groups, whose order decides the look of each. Empty: they are those of the table.
    """
    order = list(methods or table)
    num_classes = len(class_names)
    height = float(np.clip((0.14 + 0.1 * len(table)) * num_classes, 2.0, 14))
    figure = figures.new_figure(WIDTH, height + 0.9 + 0.17 * len(table))
    axes = figure.subplots()
    for number, (label, values) in enumerate(table.items()):
        # The groups of a class lie beside each other, around its place.
        offset = 0.7 * ((number + 0.5) / len(table) - 0.5)
        shown = figures.finite(values)
        axes.errorbar(
            x=100 * shown.mean(0),
            y=np.arange(num_classes) + offset,
            xerr=100 * shown.std(0, ddof=1) if len(shown) > 1 else None,
            label=figures.in_legend(label),
            fmt=figures.MARKERS[order.index(label) % len(figures.MARKERS)],
            color=figures.COLOURS[order.index(label) % len(figures.COLOURS)],
            markersize=4.5,
            elinewidth=1.2,
        )
    axes.set(xlabel="forgetting: best − last accuracy (percentage points)", ylabel="class")
    figures.label_classes(axes.yaxis, class_names)
    axes.set_ylim(num_classes - 0.4, -0.6)
    axes.set_xlim(left=min(0.0, axes.get_xlim()[0]))
    figures.tidy(axes)
    if num_classes <= MOST_SEPARATED:
        for edge in np.arange(num_classes - 1) + 0.5:
            axes.axhline(edge, color=figures.GREY, linewidth=0.5)
    name_groups(figure, axes, len(table))
    return figure


def plot_before_after(pairs: Mapping[str, tuple[Numbers, Numbers]], ylabel: str, names: tuple[str, str]) -> Figure:
    """Draw two bars for each group, before and after local training: mean over the runs and standard deviation.

    Args:
        pairs: Values of each group by its label, each (S,).
        ylabel: Name and unit of the values.
        names: Names of the two bars.
    """
    before, after = names
    figure = figures.new_figure(WIDTH, 0.9 + 0.62 * len(pairs))
    axes = figure.subplots()
    values_before = [pair[0] for pair in pairs.values()]
    draw_bars(axes, values_before, offset=-0.19, label=before, colour=figures.COLOURS[5], hatch="")
    values_after = [pair[1] for pair in pairs.values()]
    draw_bars(axes, values_after, offset=0.19, label=after, colour=figures.COLOURS[0], hatch="////")
    axes.set(xlabel=ylabel)
    axes.set_yticks(range(len(pairs)), [drawable(label) for label in pairs])
    axes.invert_yaxis()
    figures.tidy(axes)
    name_groups(figure, axes, 2)
    return figure


# --- parts ----------------------------------------------------------------------------------------


def draw_bars(axes: Axes, values: Sequence[Numbers], *, offset: float, label: str, colour: str, hatch: str) -> None:
    """Draw a bar for each group with its mean over the runs, and one standard deviation.

    Args:
        axes: The panel.
        values: Values of each group, (S,).
        offset: Distance of a bar from the place of its group on the y axis.
        label: Name of the bars in the legend.
        colour: Color of the bars.
        hatch: Hatches of the bars. Empty: there are none.
    """
    places = np.arange(len(values)) + offset
    shown = [figures.finite(of_group) for of_group in values]
    means = np.array([of_group.mean() for of_group in shown])
    deviations = np.array([of_group.std(ddof=1) if len(of_group) > 1 else 0.0 for of_group in shown])
    axes.barh(places, means, 0.36, facecolor=colour, hatch=hatch, edgecolor="white", label=label)
    varied = deviations != 0
    axes.errorbar(means[varied], places[varied], xerr=deviations[varied], fmt="none", color="black")
    for place, mean in zip(places, means, strict=True):
        axes.text(mean / 2, place, f"{mean:.3g}", ha="center", va="center", fontsize=8, bbox=PLATE)


def name_groups(figure: Figure, axes: Axes, count: int) -> None:
    """Put the legend of several groups above the axes. One group needs no legend.

    Args:
        figure: The figure.
        axes: Its panel.
        count: Number of groups.
    """
    if count > 1:
        handles, names = axes.get_legend_handles_labels()
        longest = max(len(name) for name in names)
        columns = 2 if longest <= WIDEST_OF_TWO else 1
        figures.add_legend(figure, handles, names, place="outside upper left", columns=columns)
