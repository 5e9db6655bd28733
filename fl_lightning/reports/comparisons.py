"""Figures that compare groups of runs, narrow enough for a phone, are pure functions like those of `figures`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from fl_lightning.reports import figures
from fl_lightning.reports.figures import Numbers
from fl_lightning.utils.text import drawable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 4.7
"""Inches; a phone shows letters of such a figure in a readable size."""


class Band(NamedTuple):
    """Curves of one group: x, (T,), and a value for each run and x, (S, T)."""

    x: Sequence[float]
    values: Numbers


def plot_bands(bands: Mapping[str, Band], ylabel: str, xlabel: str = "round", *, in_steps: bool = False) -> Figure:
    """Draw the mean over the runs of each group, with a band of one sample standard deviation.

    Args:
        bands: curves of each group by its label, empty where it has none: a group has the same look in all figures.
        ylabel: name and unit of the values.
        xlabel: name and unit of x; `round` has whole numbers.
        in_steps: whether a value holds until the next one.
    """
    figure = figures.new_figure(WIDTH, 3.2 + 0.17 * len(bands))
    axes = figure.subplots()
    for i, (label, band) in enumerate(bands.items()):
        if band.x:
            x = figures.finite(band.x)
            values = figures.finite(band.values)
            std = values.std(0, ddof=1) if len(values) > 1 else None
            every = max(1, len(x) // 8)
            figures.draw_line(
                axes, i, x, values.mean(0), std=std, label=label, every=every, width=1.5, in_steps=in_steps
            )
    axes.set(xlabel=xlabel, ylabel=ylabel)
    if xlabel == "round":
        figures.label_rounds(axes, [int(r) for r in next(band.x for band in bands.values() if band.x)])
    figures.tidy(axes)
    legend_above(figure, axes, len(bands))
    return figure


def plot_forgetting(table: Mapping[str, Numbers], class_names: Sequence[str]) -> Figure:
    """Draw what each class forgot: best minus last accuracy, the mean over the runs and one standard deviation.

    Args:
        table: values of each group by its label, in [0, 1], (S, C), NaN for a class without test samples.
        class_names: C names.
    """
    height = float(np.clip((0.14 + 0.1 * len(table)) * len(class_names), 2.0, 14))
    figure = figures.new_figure(WIDTH, height + 0.9 + 0.17 * len(table))
    axes = figure.subplots()
    for i, (label, values) in enumerate(table.items()):
        offset = 0.7 * ((i + 0.5) / len(table) - 0.5)
        shown = figures.finite(values)
        mean = 100 * shown.mean(0)
        std = 100 * shown.std(0, ddof=1) if len(shown) > 1 else None
        place = np.arange(len(class_names)) + offset
        colour = figures.COLOURS[i % len(figures.COLOURS)]
        named = figures.in_legend(label)
        look = figures.MARKERS[i % len(figures.MARKERS)]
        axes.errorbar(mean, place, xerr=std, label=named, fmt=look, color=colour, markersize=4.5, elinewidth=1.2)
    axes.set(xlabel="forgetting: best − last accuracy (percentage points)", ylabel="class")
    figures.label_places(axes.yaxis, class_names, 40)
    axes.set_ylim(len(class_names) - 0.4, -0.6)
    axes.set_xlim(left=min(0.0, axes.get_xlim()[0]))
    figures.tidy(axes)
    for edge in np.arange(len(class_names) - 1) + 0.5 if len(class_names) <= 40 else ():
        axes.axhline(edge, color=figures.GREY, linewidth=0.5)
    legend_above(figure, axes, len(table))
    return figure


def plot_before_after(pairs: Mapping[str, tuple[Numbers, Numbers]], ylabel: str, names: tuple[str, str]) -> Figure:
    """Draw two bars for each group, before and after local training: mean over the runs and standard deviation.

    Args:
        pairs: values of each group by its label, each (S,).
        ylabel: name and unit of the values.
        names: of the two bars.
    """
    figure = figures.new_figure(WIDTH, 0.9 + 0.62 * len(pairs))
    axes = figure.subplots()
    for side, hatch in enumerate(("", "////")):
        values = [figures.finite(pair[side]) for pair in pairs.values()]
        places = np.arange(len(pairs)) + 0.38 * (side - 0.5)
        means = [float(v.mean()) for v in values]
        std = [float(v.std(ddof=1)) if len(v) > 1 else 0.0 for v in values]
        colour = figures.COLOURS[(5, 0)[side]]
        name = names[side]
        axes.barh(places, means, 0.36, facecolor=colour, hatch=hatch, edgecolor="white", label=name)
        shown = [k for k, s in enumerate(std) if s]
        axes.errorbar([means[k] for k in shown], places[shown], xerr=[std[k] for k in shown], fmt="none", color="black")
        for place, mean in zip(places, means, strict=True):
            axes.text(mean / 2, place, f"{mean:.3g}", ha="center", va="center", fontsize=8, bbox=PLATE)
    axes.set(xlabel=ylabel)
    axes.set_yticks(range(len(pairs)), list(map(drawable, pairs)))
    axes.invert_yaxis()
    figures.tidy(axes)
    legend_above(figure, axes, 2)
    return figure


PLATE = {"facecolor": "white", "edgecolor": "none", "pad": 1.0, "alpha": 0.85}
"""Background of a number on a bar."""


# --- parts ----------------------------------------------------------------------------------------


def legend_above(figure: Figure, axes: Axes, count: int) -> None:
    """Put the legend of several groups above the axes, where it covers nothing."""
    if count > 1:
        handles, names = axes.get_legend_handles_labels()
        columns = 1 if max(map(len, names)) > 24 else 2
        figure.legend(handles, names, loc="outside upper left", ncols=columns, frameon=False, fontsize=9)
