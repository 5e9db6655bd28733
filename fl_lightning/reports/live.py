"""Curves that answer to the pointer: each panel as Bokeh draws it in a page, with the values of all methods at a place.

The page holds the library, so it needs no network.
"""

from __future__ import annotations

import json
import math
import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from bokeh.embed import json_item
from bokeh.models import ColumnDataSource, CustomJSHover, HoverTool, Range1d
from bokeh.models.renderers import GlyphRenderer
from bokeh.plotting import figure as new_plot
from bokeh.resources import Resources

from fl_lightning.reports import figures
from fl_lightning.reports.comparison_tables import decimals_for, writer_with
from fl_lightning.reports.curves import ROUND, Band, Curves, Panel, has_curve
from fl_lightning.reports.figures import Numbers
from fl_lightning.utils.text import printable

HEIGHT = 280
"""Height of a panel in pixels."""

TEXT = "#7a7a7a"
"""Color of words and ticks, which can be read on white and on black."""

LINES = "#88888840"
"""Color of the grid."""

BLACK = "#000000"
SEEN_ON_BLACK = "#8c8c8c"
"""Color that takes the place of black, since a page may be dark."""

DASHES = ("solid", "dashed", "dotdash", "dotted")
"""Names of the styles of lines, in the order of `figures.STYLES`."""

MARKERS = ("circle", "square", "triangle", "diamond", "inverted_triangle", "plus", "x")
"""Names of the markers, in the order of `figures.MARKERS`."""

MOST_MARKERS = 30
"""Largest number of points of a curve that has markers."""

READ = 'return name + "\u2002" + (line.visible ? value : "hidden");'
"""Script that gives the text of a method at the pointer, from its value there."""

ID = re.compile(r'"(id|root_id)": "(p\d+)"')
"""An id that Bokeh gives a part of a plot. They are counted on from plot to plot."""


class LivePanel(NamedTuple):
    """Has one panel as the page needs it.

    Args:
        title: The case. Empty: there is only one.
        item: What Bokeh draws the panel from, as JSON.
    """

    title: str
    item: Mapping[str, Any]


def color_of(number: int) -> str:
    """Return the color of the method with a number, which is the same on the whole page."""
    color = figures.COLOURS[number % len(figures.COLOURS)]
    return SEEN_ON_BLACK if color == BLACK else color


def library() -> str:
    """Return the library of charts as a script."""
    resources = Resources(mode="inline", components=["bokeh"], minified=True)
    return "\n".join(resources.js_raw)


def live_panels(curves: Curves) -> list[LivePanel]:
    """Make the panels of some curves, which have equal axes."""
    left, right = padded(all_places(curves))
    low, high = padded(all_heights(curves))
    panels = []
    for panel in curves.panels:
        plot: Any = new_plot(
            height=HEIGHT,
            sizing_mode="stretch_width",
            x_range=Range1d(start=left, end=right),
            y_range=Range1d(start=low, end=high),
            x_axis_label=printable(curves.xlabel),
            y_axis_label=printable(curves.ylabel),
            tools="",
            toolbar_location=None,
            output_backend="svg",
        )
        set_colors(plot)
        if curves.xlabel == ROUND:
            plot.xaxis.ticker.min_interval = 1
        lines = draw_lines(plot, panel, curves)
        if lines:
            add_reader(plot, panel, curves, lines=lines)
        panels.append(LivePanel(panel.title, numbered(json_item(plot))))
    return panels


def all_places(curves: Curves) -> list[float]:
    """Return the places of all curves."""
    places: list[float] = []
    for panel in curves.panels:
        for band in panel.bands.values():
            places += band.x
    return places


def all_heights(curves: Curves) -> list[float]:
    """Return the values of all curves and the edges of their bands."""
    heights: list[float] = []
    for panel in curves.panels:
        for band in panel.bands.values():
            if not len(band.x):
                continue
            deviations = np.zeros(len(band.x)) if band.std is None else band.std
            heights += (band.mean - deviations).tolist()
            heights += (band.mean + deviations).tolist()
    return heights


def padded(values: Sequence[float]) -> tuple[float, float]:
    """Return the range of finite values with a twentieth of its length on either side.

    >>> padded([0.0, 10.0, float("nan")]), padded([3.0])
    ((-0.5, 10.5), (2.5, 3.5))
    """
    known = [value for value in values if np.isfinite(value)]
    low = min(known, default=0.0)
    high = max(known, default=1.0)
    pad = 0.05 * (high - low) or 0.5
    return float(low - pad), float(high + pad)


def set_colors(plot: Any) -> None:
    """Give a plot colors that can be read on a light and on a dark page."""
    plot.background_fill_color = None
    plot.border_fill_color = None
    plot.outline_line_color = None
    plot.grid.grid_line_color = LINES
    plot.axis.axis_label_text_color = TEXT
    plot.axis.axis_label_text_font_style = "normal"
    plot.axis.major_label_text_color = TEXT
    plot.axis.axis_line_color = TEXT
    plot.axis.major_tick_line_color = TEXT
    plot.axis.minor_tick_line_color = None


def draw_lines(plot: Any, panel: Panel, curves: Curves) -> dict[str, GlyphRenderer[Any]]:
    """Draw the curve and the band of each method.

    Args:
        plot: Bokeh's plot.
        panel: The curves of the case.
        curves: All of the picture.

    Returns:
        The curves by method. All that belongs to a method has its name, by which the page hides it.
    """
    lines: dict[str, GlyphRenderer[Any]] = {}
    for number, method in enumerate(curves.methods):
        if not has_curve(panel, method):
            continue
        band = panel.bands[method].thinned()
        x = np.asarray(band.x, dtype=np.float64)
        mean = band.mean
        color = color_of(number)
        name = printable(method)
        look = {"line_color": color, "line_width": 2, "line_dash": DASHES[number % len(DASHES)], "name": name}
        draw_band(plot, band, color=color, name=name, in_steps=curves.in_steps)
        if curves.in_steps:
            lines[method] = plot.step(rounded(x), rounded(mean), mode="after", **look)
        else:
            lines[method] = plot.line(rounded(x), rounded(mean), **look)
        if len(x) <= MOST_MARKERS:
            marker = MARKERS[number % len(MARKERS)]
            plot.scatter(rounded(x), rounded(mean), marker=marker, size=6, color=color, name=name)
    return lines


def draw_band(plot: Any, band: Band, *, color: str, name: str, in_steps: bool) -> None:
    """Draw one standard deviation on either side of the mean, if there are several runs.

    Args:
        plot: Bokeh's plot.
        band: The curves of the runs.
        color: Color of the method.
        name: The method.
        in_steps: Whether a value holds until the next one.
    """
    if band.std is None:
        return
    x = rounded(np.asarray(band.x, dtype=np.float64))
    low = rounded(band.mean - band.std)
    high = rounded(band.mean + band.std)
    look = {"fill_color": color, "fill_alpha": 0.15, "name": name}
    if in_steps:
        plot.varea_step(x, low, high, step_mode="after", **look)
    else:
        plot.varea(x, low, high, **look)


def rounded(values: Numbers) -> list[float]:
    """Round values to six significant digits, which keeps a page small."""
    return [float(f"{value:.6g}") for value in values]


def add_reader(plot: Any, panel: Panel, curves: Curves, lines: Mapping[str, GlyphRenderer[Any]]) -> None:
    """Show the values of all methods at the place of the pointer.

    Args:
        plot: Bokeh's plot.
        panel: The curves of the case.
        curves: All of the picture.
        lines: The curves in the plot by method.
    """
    bands = {method: panel.bands[method] for method in lines}
    known: set[float] = set()
    for band in bands.values():
        known |= {*band.thinned().x}
    places = sorted(known)
    columns: dict[str, list[Any]] = {"x": places, "y": [plot.y_range.start] * len(places)}
    formatters: dict[str, Any] = {}
    rows = [f"<div>{curves.xlabel} @x{{0.[000]}}</div>"]
    for number, (method, band) in enumerate(bands.items()):
        columns[f"m{number}"] = texts_at(places, band, in_steps=curves.in_steps)
        formatters[f"@m{number}"] = CustomJSHover(args={"line": lines[method], "name": printable(method)}, code=READ)
        color = lines[method].glyph.line_color
        rows.append(f"<div><span style='color:{color}'>■</span> @m{number}{{custom}}</div>")
    reader = plot.line("x", "y", source=ColumnDataSource(columns), line_alpha=0.0)
    hover = HoverTool(
        renderers=[reader],
        mode="vline",
        line_policy="nearest",
        point_policy="follow_mouse",
        tooltips="".join(rows),
        formatters=formatters,
    )
    plot.add_tools(hover)


def texts_at(places: Sequence[float], band: Band, *, in_steps: bool) -> list[str]:
    """Write the values of a method at some places: mean ± standard deviation, a dash without a value.

    Args:
        places: The places.
        band: All points of the curves of the method, whose places are ascending.
        in_steps: Whether a value holds until the next one.
    """
    means = band.mean
    deviations = np.full(len(means), math.nan) if band.std is None else band.std
    texts: list[str] = []
    for place in places:
        index = bisect_right(band.x, place) - 1
        has_value = index >= 0 and (in_steps or band.x[index] == place)
        texts.append(mean_text(float(means[index]), float(deviations[index])) if has_value else "–")
    return texts


def mean_text(mean: float, std: float) -> str:
    """Write a mean ± the standard deviation, which is NaN of a single run."""
    write = writer_with(decimals_for([mean], [std]))
    return write(mean) if math.isnan(std) else f"{write(mean)} ± {write(std)}"


def numbered(item: Any) -> Any:
    """Number the ids in a plot from 0, so that the same curves have the same bytes in every page."""
    numbers: dict[str, str] = {}

    def renamed(found: re.Match[str]) -> str:
        key, known = found.groups()
        name = numbers.setdefault(known, f"i{len(numbers)}")
        return f'"{key}": "{name}"'

    return json.loads(ID.sub(renamed, json.dumps(item)))
