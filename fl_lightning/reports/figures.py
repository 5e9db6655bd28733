"""Figures of a federation and of its runs are pure functions that touch neither pyplot nor its backend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fl_lightning.utils.files import write_atomically
from fl_lightning.utils.text import drawable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

Numbers = NDArray[np.float64]
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito's palette: told apart by colour-blind readers."""
STYLES = ("-", "--", "-.", ":")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
GREY = "#d9d9d9"
MOST_LABELS = 40
LARGEST = 1e100
"""Of values that are drawn."""


def plot_partition(
    counts: ArrayLike,
    class_names: Sequence[str],
    title: str | None = None,
    *,
    client_names: Sequence[str] | None = None,
) -> Figure:
    """Draw client × class sample counts as a heat map, with each client's total above and each class's beside it.

    Args:
        counts: training samples of each client and class, (N, C).
        class_names: C names.
        title: None: one that says N, C and the number of samples.
        client_names: N names. None: the numbers of the clients.
    """
    from matplotlib import colormaps  # noqa: PLC0415 - slow to import
    from matplotlib.colors import ListedColormap, PowerNorm  # noqa: PLC0415

    table, name = read_counts(counts, class_names)
    num_clients, num_classes = table.shape
    width = np.clip(0.42 * num_clients, 3.2, 11)
    height = np.clip(0.3 * num_classes, 2.4, 9)
    figure = new_figure(width + 3.0, height + 1.9, title or name)
    ratios = {"width_ratios": (width, 0.8, 0.16), "height_ratios": (0.8, height)}
    grid = figure.add_gridspec(2, 3, **ratios, wspace=0.03, hspace=0.02)
    axes = figure.add_subplot(grid[1, 0])
    norm = PowerNorm(0.5, vmin=0, vmax=max(1.0, table.max(initial=0)))
    shown = np.ma.masked_equal(table.T, 0)
    visible = ListedColormap(colormaps["YlGnBu"](np.linspace(0.15, 1, 256)))  # a cell with one sample must not be white
    image = axes.imshow(shown, aspect="auto", cmap=visible, norm=norm, interpolation="nearest")
    axes.set(xlabel="client", ylabel="class")
    label_clients(axes.xaxis, client_names, num_clients)
    label_places(axes.yaxis, class_names, MOST_LABELS)
    separate(axes, num_clients, num_classes)
    if num_clients <= 20 and num_classes <= 20:
        write_counts(axes, table.T, 0.3 * float(table.max(initial=1)))
    draw_totals(figure.add_subplot(grid[0, 0], sharex=axes), table.sum(1), "x")
    draw_totals(figure.add_subplot(grid[1, 1], sharey=axes), table.sum(0), "y")
    figure.colorbar(image, cax=figure.add_subplot(grid[1, 2]), label="samples of the class at the client")
    return figure


def read_counts(counts: ArrayLike, class_names: Sequence[str]) -> tuple[np.ndarray, str]:
    """Read client × class sample counts: the table (N, C), and a title that says N, C and the number of samples.

    Raises:
        ValueError: another number of names.
    """
    table = np.asarray(counts, dtype=np.float64)
    num_clients, num_classes = table.shape
    check_class_names(class_names, num_classes)
    sizes = f"{num_clients} client{'s' * (num_clients != 1)}, {num_classes} classes"
    return table, f"{int(table.sum()):,} training samples, {sizes}"


def plot_bubbles(
    counts: ArrayLike,
    class_names: Sequence[str],
    title: str | None = None,
    *,
    client_names: Sequence[str] | None = None,
) -> Figure:
    """Draw client × class sample counts as bubbles, whose areas are the counts.

    Args:
        counts: training samples of each client and class, (N, C).
        class_names: C names.
        title: None: one that says N, C and the number of samples.
        client_names: N names. None: the numbers of the clients.
    """
    table, name = read_counts(counts, class_names)
    num_clients, num_classes = table.shape
    width = np.clip(0.42 * num_clients, 3.2, 14)
    height = np.clip(0.3 * num_classes, 2.4, 9)
    figure = new_figure(width + 1.6, height + 1.2, title or name)
    axes = figure.add_subplot()
    clients, classes = np.nonzero(table)
    cell = 72 * min(width / num_clients, height / num_classes)  # points
    areas = table[clients, classes] / max(1.0, table.max(initial=1.0)) * cell**2
    axes.scatter(clients, classes, s=areas, alpha=0.6, linewidths=0)
    axes.set(xlabel="client", ylabel="class", xlim=(-0.7, num_clients - 0.3), ylim=(-0.7, num_classes - 0.3))
    label_clients(axes.xaxis, client_names, num_clients)
    label_places(axes.yaxis, class_names, MOST_LABELS)
    return figure


def plot_accuracy(
    rounds: Sequence[int],
    curves: Mapping[str, Sequence[float]],
    losses: Mapping[str, Sequence[float]] | None = None,
    title: str | None = None,
) -> Figure:
    """Draw accuracies over rounds, one curve per run or split, and where given the losses on a second panel.

    Args:
        rounds: the 0-based round of each value.
        curves: accuracies in [0, 1] by name, up to the last round that has one; NaN where there is none before.
        losses: losses by name, likewise.
        title: None: none.
    """
    panels = [part for part in (curves, losses) if part]
    count = max(1, len(panels))
    figure = new_figure(5.6 * count, 3.8, title)
    for axes, part in zip(figure.subplots(1, count, squeeze=False)[0], panels, strict=False):
        draw_curves(axes, rounds, part, 100.0 if part is curves else 1.0)
        axes.set_ylabel("accuracy (%)" if part is curves else "loss")
        if axes.get_legend_handles_labels()[0]:  # none without a value
            axes.legend(title="last round", alignment="left", framealpha=0.8, edgecolor="none")
    return figure


def plot_sizes(sizes: ArrayLike, title: str | None = None, *, client_names: Sequence[str] | None = None) -> Figure:
    """Draw the number of training samples of each client, where the samples have no classes.

    Args:
        sizes: (N,).
        title: None: one that says N and the number of samples.
        client_names: N names. None: the numbers of the clients.
    """
    counts = np.asarray(sizes, dtype=np.float64)
    clients = f"{len(counts)} client{'s' * (len(counts) != 1)}"
    width = float(np.clip(0.42 * len(counts), 3.2, 11)) + 1.0
    figure = new_figure(width, 3.4, title or f"{int(counts.sum()):,} training samples, {clients}")
    axes = figure.add_subplot()
    draw_totals(axes, counts, "x")
    axes.set_xlabel("client")
    label_clients(axes.xaxis, client_names, len(counts))
    axes.tick_params("x", labelbottom=True)
    return figure


def plot_values(rounds: Sequence[int], curves: Mapping[str, Sequence[float]], title: str | None = None) -> Figure:
    """Draw any logged values over rounds, one panel each, since their units differ.

    Args:
        rounds: the 0-based round of each value.
        curves: values by name, up to the last round that has one; NaN where there is none before. At least one.
        title: None: none.
    """
    columns = min(3, len(curves))
    rows = -(-len(curves) // columns)
    figure = new_figure(3.8 * columns, 2.6 * rows, title)
    places = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes, (name, values) in zip(places, curves.items(), strict=False):
        draw_curves(axes, rounds, {name: values}, 1.0)
        axes.set_title(name, fontsize="medium")
    for axes in places[len(curves) :]:
        axes.set_axis_off()
    return figure


def plot_classwise(
    history: ArrayLike,
    class_names: Sequence[str],
    rounds: Sequence[int] | None = None,
    title: str = "Class-wise accuracy of the global model",
) -> Figure:
    """Draw a class × round heat map of accuracies, with each class's best and last accuracy beside it.

    Args:
        history: A, (T, C), fractions in [0, 1], one row a round; NaN where a class has no samples.
        class_names: C names.
        rounds: the 0-based round of each row, ascending; None: 0 ... T-1.
        title: above the picture.
    """
    table = 100 * np.asarray(history, dtype=np.float64)
    num_rounds, num_classes = table.shape
    check_class_names(class_names, num_classes)
    if not num_rounds:
        raise ValueError("plot_classwise needs at least one round, got none; run a round with validation first")
    x = np.arange(num_rounds) if rounds is None else np.asarray(rounds)
    figure = new_figure(9.0, np.clip(0.3 * num_classes, 2.4, 9) + 1.3, title)
    grid = figure.add_gridspec(1, 3, width_ratios=(6, 0.16, 1.8), wspace=0.06)
    axes = figure.add_subplot(grid[0, 0])
    edges = np.concatenate([[x[0] - 0.5], (x[1:] + x[:-1]) / 2, [x[-1] + 0.5]])
    rows = np.arange(num_classes + 1) - 0.5
    axes.set_facecolor(GREY)
    image = axes.pcolormesh(edges, rows, table.T, cmap="viridis", vmin=0, vmax=100, rasterized=True)
    axes.invert_yaxis()
    axes.set_ylabel("class")
    label_rounds(axes, x)
    label_places(axes.yaxis, class_names, MOST_LABELS)
    figure.colorbar(image, cax=figure.add_subplot(grid[0, 1]), label="accuracy (%)")
    draw_best_and_last(figure.add_subplot(grid[0, 2], sharey=axes), np.fmax.reduce(table), table[-1])
    return figure


# --- parts ----------------------------------------------------------------------------------------


def new_figure(width: float, height: float, title: str | None = None) -> Figure:
    """Create a figure of so many inches, with a title or none, that is drawn by Agg and unknown to pyplot."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415 - slow to import

    from fl_lightning.reports.plain_figure import PlainFigure  # noqa: PLC0415

    figure = PlainFigure(figsize=(float(width), float(height)), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    if title:
        figure.suptitle(title, fontsize="large")
    return figure


def save(figure: Figure, path: Path) -> None:
    """Write a figure in the format of the path's suffix: a viewer finds the old picture or the new one."""
    write_atomically(path, lambda part: figure.savefig(part, format=path.suffix[1:]))


def finite(values: ArrayLike) -> Numbers:
    """Replace what no axis can show, infinite and endlessly large values, by NaN, which is not drawn."""
    table = np.asarray(values, dtype=np.float64)
    return np.where(np.abs(table) <= LARGEST, table, np.nan)


def in_legend(name: str) -> str:
    """Write a name as a label, with a blank before a `_`, since matplotlib leaves such names out of legends."""
    return f" {name}" if name.startswith("_") else name


def check_class_names(class_names: Sequence[str], num_classes: int) -> None:
    """Refuse names that are not one per class."""
    if len(class_names) != num_classes:
        raise ValueError(f"class_names needs one name per class ({num_classes}), got {len(class_names)}")


def label_places(axis: Axis, names: Sequence[str], most: int) -> None:
    """Name the places 0, 1, … of an axis, every k-th where they are too many."""
    step = next(k for k in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 10**9) if len(names) <= k * most)
    places = range(0, len(names), step)
    axis.set_ticks(list(places), [drawable(names[i]) for i in places])
    axis.set_tick_params(length=0 if step == 1 else 3)


def label_clients(axis: Axis, names: Sequence[str] | None, num_clients: int) -> None:
    """Name the places of the clients on an axis, by their numbers if they have no names."""
    label_places(axis, names or [str(client_id) for client_id in range(num_clients)], 25)


def label_rounds(axes: Axes, rounds: Sequence[int] | NDArray[Any]) -> None:
    """Put whole numbers on the axis of rounds."""
    from matplotlib.ticker import MaxNLocator  # noqa: PLC0415 - slow to import

    axes.set_xlabel("round")
    if len(rounds) == 1:
        axes.set_xticks([int(rounds[0])])
    else:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


def tidy(axes: Axes) -> None:
    """Draw a grid below the curves, and no frame above and to the right."""
    axes.grid(True, color=GREY, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def separate(axes: Axes, columns: int, rows: int) -> None:
    """Draw hair lines between cells that are large enough for them."""
    if max(columns, rows) <= 50:
        axes.set_xticks(np.arange(columns + 1) - 0.5, minor=True)
        axes.set_yticks(np.arange(rows + 1) - 0.5, minor=True)
        axes.grid(True, which="minor", color=GREY, linewidth=0.5)
        axes.tick_params(which="minor", length=0)


def write_counts(axes: Axes, table: Numbers, dark: float, size: float = 6.5) -> None:
    """Write counts other than 0 into the cells, in letters of so many points, white from `dark` on."""
    for row, column in zip(*np.nonzero(table), strict=True):
        value = table[row, column]
        text = f"{value:.0f}" if value < 10_000 else f"{value / 1000:.0f}k"
        colour = "white" if value > dark else "black"
        axes.text(column, row, text, ha="center", va="center", fontsize=size, color=colour)


def draw_totals(axes: Axes, totals: Numbers, along: Literal["x", "y"]) -> None:
    """Draw bars with the samples of each place along the x or y axis."""
    from matplotlib.ticker import MaxNLocator  # noqa: PLC0415 - slow to import

    places = np.arange(len(totals))
    size = 0.8 if len(totals) <= 50 else 1.0
    draw, axis = (axes.bar, axes.yaxis) if along == "x" else (axes.barh, axes.xaxis)
    draw(places, totals, size, color="#4d4d4d")
    axes.tick_params(along, labelbottom=False, labelleft=False, bottom=False, left=False)
    axis.set_label_text("samples")
    axis.set_major_locator(MaxNLocator(3))
    axes.tick_params(which="minor", length=0)
    axes.spines[["top", "right"]].set_visible(False)


def draw_best_and_last(axes: Axes, best: Numbers, last: Numbers) -> None:
    """Draw each class's best and last accuracy in %, with a line between them."""
    places = np.arange(len(last))
    size = 5.0 if len(last) <= MOST_LABELS else 2.5
    axes.hlines(places, last, best, color="#999999", linewidth=size / 2.5)
    axes.plot(best, places, "o", color=COLOURS[1], markersize=size, markerfacecolor="white", label="best")
    axes.plot(last, places, "o", color=COLOURS[0], markersize=size, label="last")
    axes.set(xlim=(-5, 105), xlabel="accuracy (%)")
    axes.tick_params(labelleft=False, left=False)
    axes.grid(True, axis="x", color=GREY, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, frameon=False, handletextpad=0.1)


def draw_curves(axes: Axes, rounds: Sequence[int], curves: Mapping[str, Sequence[float]], scale: float) -> None:
    """Draw curves through their finite values, with the last value of each in the legend, on a tidy axis of rounds.

    A last value that no axis can show, NaN or infinite, stands in the legend.
    """
    for i, (name, values) in enumerate(curves.items()):
        scaled = scale * np.asarray(values, dtype=np.float64)
        if not len(scaled):
            continue
        known = ~np.isnan(finite(scaled))
        places = np.asarray(rounds)[: len(scaled)][known]
        last = scaled[-1]
        label = in_legend(f"{name}: " + (f"{last:.1f} %" if scale == 100 else f"{last:.3g}"))
        style = STYLES[i % len(STYLES)]
        marker = "o" if len(places) <= 30 else ""
        colour = COLOURS[i % len(COLOURS)]
        axes.plot(places, scaled[known], style, color=colour, marker=marker, markersize=3.5, label=label)
    label_rounds(axes, rounds)
    tidy(axes)


def draw_line(
    axes: Axes,
    i: int,
    x: ArrayLike,
    mean: Numbers,
    std: Numbers | None = None,
    label: str | None = None,
    every: int | None = None,
    width: float = 1.4,
) -> None:
    """Draw the i-th line of a figure with its colour, style and marker, and a band of one standard deviation.

    Args:
        axes: to draw in.
        i: number of the line: the same look in all panels.
        x: places, (T,).
        mean: values, (T,).
        std: their deviation, (T,); None: no band.
        label: in the legend.
        every: place that has a marker; None: 8 of them at most.
        width: of the line, in points.
    """
    style = STYLES[i % len(STYLES)]
    marker = MARKERS[i % len(MARKERS)]
    places = np.asarray(x, dtype=np.float64)
    look: dict[str, Any] = {"color": COLOURS[i % len(COLOURS)], "linewidth": width, "marker": marker, "markersize": 4}
    named = None if label is None else in_legend(label)
    axes.plot(places, mean, style, label=named, markevery=every or max(1, -(-len(mean) // 8)), **look)
    if std is not None:
        axes.fill_between(places, mean - std, mean + std, color=look["color"], alpha=0.18, linewidth=0)
