"""Parts of drawings: grids of panels, legends and heat maps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from fl_lightning.reports import figures
from fl_lightning.utils.text import drawable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LEGEND_SPACE = 5.5 * figures.LEGEND_SIZE
"""Width that a name in a legend takes beside its letters, in points: its line, and the gap to the next name."""


def panels(
    rows: Sequence[str],
    columns: Sequence[str],
    width: float = 2.6,
    height: float = 2.3,
    *,
    sharey: Literal["row", "all", "none"] = "row",
    sharex: bool = True,
) -> tuple[Figure, NDArray[Any]]:
    """Create a figure of rows × columns axes, named on its left and above.

    Args:
        rows: Names of the rows. An empty name is not written.
        columns: Names of the columns. An empty name is not written.
        width: Width of a panel in inches.
        height: Height of a panel in inches.
        sharey: The panels that have one y axis: `row`, `all` or `none`.
        sharex: Whether the panels of a column have one x axis, named below the lowest.

    Returns:
        The figure, and its axes, (rows, columns).
    """
    figure = figures.new_figure(max(width * len(columns) + 0.9, 4.2), height * len(rows) + 0.9)
    axes = figure.subplots(len(rows), len(columns), squeeze=False, sharex="col" if sharex else "none", sharey=sharey)
    for place, name in zip(axes[0], columns, strict=True):
        place.set_title(name, fontsize="medium")
    for place, name in zip(axes[:, 0], rows, strict=True):
        place.set_ylabel(name)
    return figure, axes


def name_rounds(axes: NDArray[Any], rounds: Sequence[int]) -> None:
    """Name the x axis of the lowest panels, with whole numbers.

    Args:
        axes: The panels, (rows, columns).
        rounds: Rounds on the axis.
    """
    for place in axes[-1]:
        figures.label_rounds(place, rounds)


def finish(figure: Figure, axes: NDArray[Any], xlabel: str | None = None) -> None:
    """Tidy all panels, name the x axis of the lowest panels, and put one legend with each name once above them.

    Args:
        figure: The figure.
        axes: Its panels, (rows, columns).
        xlabel: Name of the x axis. None leaves it.
    """
    if xlabel is not None:
        for place in axes[-1]:
            place.set_xlabel(xlabel)
    handles: dict[str, Any] = {}
    for place in axes.ravel():
        figures.tidy(place)
        for handle, name in zip(*place.get_legend_handles_labels(), strict=True):
            handles.setdefault(name, handle)
    if len(handles) > 1:
        names = list(handles)
        columns = legend_columns(names, figure.get_figwidth())
        figures.add_legend(figure, list(handles.values()), names, place="outside upper left", columns=columns)


def legend_columns(names: Sequence[str], width: float) -> int:
    """Count the columns of a legend, at least 1, that have room side by side in a figure.

    Args:
        names: Names in the legend.
        width: Width of the figure in inches.
    """
    from matplotlib import rc_context  # noqa: PLC0415 - slow to import
    from matplotlib.textpath import TextPath  # noqa: PLC0415

    with rc_context({"text.parse_math": False}):
        widest = max(TextPath((0, 0), drawable(name), size=figures.LEGEND_SIZE).get_extents().width for name in names)
    return int(np.clip((72 * width - figures.LEGEND_SIZE) / (widest + LEGEND_SPACE), 1, len(names)))


def draw_maps(
    maps: Mapping[str, figures.Numbers],
    *,
    xlabel: str,
    ylabel: str,
    value: str,
    row_names: Sequence[str],
    columns: int | None = None,
    limits: tuple[float, float] | None = None,
    cmap: str = "viridis",
    numbers: bool = False,
    width: float = 2.9,
) -> Figure:
    """Draw heat maps beside each other with one scale.

    Args:
        maps: Values by title, (rows, columns) each. NaN is grey.
        xlabel: Name of the columns. `round` and `client` are numbered from 0.
        ylabel: Name of the rows.
        value: Name and unit of a cell.
        row_names: Names of the rows.
        columns: Number of panels beside each other. None takes up to 4.
        limits: Limits of the scale. None takes the limits of the values.
        cmap: Matplotlib's name of the colors.
        numbers: Whether the values, which are counts, are written into the cells.
        width: Width of a panel in inches.
    """
    beside = min(len(maps), columns or 4)
    below = -(-len(maps) // beside)
    shape = next(iter(maps.values())).shape
    height = np.clip(0.19 * shape[0] + 0.7, 1.6, 4.0)
    figure, axes = panels([ylabel] * below, [""] * beside, width=width, height=float(height), sharey="all")
    known = np.concatenate([table[~np.isnan(table)] for table in maps.values()])
    low, high = limits or (float(known.min()), float(known.max()))
    for place, (title, table) in zip(axes.ravel(), maps.items(), strict=False):
        place.set_facecolor(figures.GREY)
        image = place.imshow(table, aspect="auto", cmap=cmap, vmin=low, vmax=high, interpolation="nearest")
        place.set_title(title, fontsize="medium")
        figures.label_places(place.yaxis, row_names, 20)
        if numbers:
            figures.separate(place, table.shape[1], table.shape[0])
            figures.write_counts(place, table, dark=(low + high) / 2, size=6)
    for place in axes.ravel()[len(maps) :]:
        place.set_axis_off()
    for place in axes[-1]:
        figures.label_rounds(place, range(shape[1]))
        place.set_xlabel(xlabel)
    figure.colorbar(image, ax=axes, label=value, aspect=30, pad=0.02)
    return figure
