"""Figures of a federation and of its runs are pure functions that touch neither pyplot nor its backend."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from fl_lightning.functional.classes import shown_names
from fl_lightning.utils.files import write_atomically
from fl_lightning.utils.text import drawable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

Numbers = NDArray[np.float64]
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#7F3C8D")
"""Okabe and Ito's palette, told apart by colour-blind readers, with a purple in place of its yellow."""
STYLES = ("-", "--", "-.", ":")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
GREY = "#d9d9d9"
MOST_LABELS = 40
MOST_NUMBERED = 20
"""Largest number of classes of a confusion matrix whose cells have numbers."""
UNSEEN_COLOR = "#D55E00"
"""Color of the hatches over clients that never train."""
LARGEST = 1e100
"""Largest magnitude of values that are drawn."""
LEGEND_SIZE = 9
"""Size of the letters in a legend that names several lines, in points."""
LONGEST_NAME = 16
"""Largest number of characters of a name beside an axis or in a legend, if names are cut."""


def plot_partition(
    counts: ArrayLike,
    class_names: Sequence[str],
    title: str | None = None,
    *,
    client_names: Sequence[str] | None = None,
    unseen: Sequence[int] = (),
) -> Figure:
    """Draw client × class sample counts as a heat map, with each client's total above and each class's beside it.

    Args:
        counts: Number of training samples of each client and class, (N, C).
        class_names: Names of the C classes.
        title: Title of the figure. None says N, C and the number of samples.
        client_names: Names of the N clients. None is their ids.
        unseen: Ids of the clients that never train, which are hatched.
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
    # A cell with one sample must not be white.
    visible = ListedColormap(colormaps["YlGnBu"](np.linspace(0.15, 1, 256)))
    image = axes.imshow(shown, aspect="auto", cmap=visible, norm=norm, interpolation="nearest")
    axes.set(xlabel="client", ylabel="class")
    label_clients(axes.xaxis, client_names, num_clients)
    label_classes(axes.yaxis, class_names)
    separate(axes, num_clients, num_classes)
    if num_clients <= 20 and num_classes <= 20:
        write_counts(axes, table.T, dark=0.3 * float(table.max(initial=1)))
    totals = figure.add_subplot(grid[0, 0], sharex=axes)
    draw_totals(totals, totals=table.sum(1), along="x")
    mark_unseen(figure, panels=[axes, totals], unseen=unseen)
    draw_totals(figure.add_subplot(grid[1, 1], sharey=axes), totals=table.sum(0), along="y")
    figure.colorbar(image, cax=figure.add_subplot(grid[1, 2]), label="samples of the class at the client")
    return figure


def read_counts(counts: ArrayLike, class_names: Sequence[str]) -> tuple[np.ndarray, str]:
    """Read client × class sample counts: the table (N, C), and a title that says N, C and the number of samples.

    Args:
        counts: Number of training samples of each client and class, (N, C).
        class_names: Names of the C classes.

    Raises:
        ValueError: The number of names is not C.
    """
    table = np.asarray(counts, dtype=np.float64)
    num_clients, num_classes = table.shape
    check_class_names(class_names, num_classes)
    title = f"{int(table.sum()):,} training samples, {clients_text(num_clients)}, {num_classes} classes"
    return table, title


def clients_text(num_clients: int) -> str:
    """Write a number of clients.

    >>> clients_text(1), clients_text(10)
    ('1 client', '10 clients')
    """
    return "1 client" if num_clients == 1 else f"{num_clients} clients"


def plot_bubbles(
    counts: ArrayLike,
    class_names: Sequence[str],
    *,
    client_names: Sequence[str] | None = None,
    unseen: Sequence[int] = (),
) -> Figure:
    """Draw client × class sample counts as bubbles, whose areas are the counts.

    Args:
        counts: Number of training samples of each client and class, (N, C).
        class_names: Names of the C classes.
        client_names: Names of the N clients. None is their ids.
        unseen: Ids of the clients that never train, which are hatched.
    """
    table, title = read_counts(counts, class_names)
    num_clients, num_classes = table.shape
    width = np.clip(0.42 * num_clients, 3.2, 14)
    height = np.clip(0.3 * num_classes, 2.4, 9)
    figure = new_figure(width + 1.6, height + 1.2, title)
    axes = figure.add_subplot()
    clients, classes = np.nonzero(table)
    # The largest bubble fills its cell, whose width is in points.
    cell = 72 * min(width / num_clients, height / num_classes)
    largest = max(1.0, table.max(initial=1.0))
    areas = table[clients, classes] / largest * cell**2
    axes.scatter(clients, classes, s=areas, color=COLOURS[0], alpha=0.6, linewidths=0)
    name_sizes(figure, axes, counts=round_counts(int(largest)), point_area=cell**2 / largest)
    axes.set(xlabel="client", ylabel="class", xlim=(-0.7, num_clients - 0.3), ylim=(-0.7, num_classes - 0.3))
    mark_unseen(figure, panels=[axes], unseen=unseen)
    label_clients(axes.xaxis, client_names, num_clients)
    label_classes(axes.yaxis, class_names)
    return figure


def plot_accuracy(
    rounds: Sequence[int],
    curves: Mapping[str, Sequence[float]],
    losses: Mapping[str, Sequence[float]] | None = None,
    title: str | None = None,
) -> Figure:
    """Draw accuracies over rounds, one curve per run or split, and losses on a second panel.

    Args:
        rounds: Number of the round of each value, from 0, (T,).
        curves: Accuracies in [0, 1] by name, up to the last round with a value. NaN is an earlier round without one.
        losses: Losses by name, in the same form. None draws no second panel.
        title: Title of the figure. None draws no title.
    """
    panels = [part for part in (curves, losses) if part]
    count = max(1, len(panels))
    figure = new_figure(5.6 * count, 3.8, title)
    places = figure.subplots(1, count, squeeze=False)[0]
    for axes, part in zip(places, panels, strict=False):
        if part is curves:
            draw_curves(axes, rounds=rounds, curves=part, scale=100.0)
            axes.set_ylabel("accuracy (%)")
        else:
            draw_curves(axes, rounds=rounds, curves=part, scale=1.0)
            axes.set_ylabel("loss")
        # A panel without a value has no legend.
        handles, _ = axes.get_legend_handles_labels()
        if handles:
            axes.legend(title="last round", alignment="left", framealpha=0.8, edgecolor="none")
    return figure


def plot_sizes(
    sizes: ArrayLike,
    *,
    client_names: Sequence[str] | None = None,
    unseen: Sequence[int] = (),
) -> Figure:
    """Draw the number of training samples of each client, for samples without classes.

    Args:
        sizes: Number of training samples of each client, (N,).
        client_names: Names of the N clients. None is their ids.
        unseen: Ids of the clients that never train, which are hatched.
    """
    counts = np.asarray(sizes, dtype=np.float64)
    width = float(np.clip(0.42 * len(counts), 3.2, 11)) + 1.0
    title = f"{int(counts.sum()):,} training samples, {clients_text(len(counts))}"
    figure = new_figure(width, 3.4, title)
    axes = figure.add_subplot()
    draw_totals(axes, totals=counts, along="x")
    mark_unseen(figure, panels=[axes], unseen=unseen)
    axes.set_xlabel("client")
    label_clients(axes.xaxis, client_names, len(counts))
    axes.tick_params("x", labelbottom=True)
    return figure


def plot_values(rounds: Sequence[int], curves: Mapping[str, Sequence[float]], title: str | None = None) -> Figure:
    """Draw any logged values over rounds, one panel each, because their units differ.

    Args:
        rounds: Number of the round of each value, from 0, (T,).
        curves: Values by name, up to the last round with a value, at least one curve. NaN is an earlier round without
            a value.
        title: Title of the figure. None draws no title.
    """
    columns = min(3, len(curves))
    rows = math.ceil(len(curves) / columns)
    figure = new_figure(3.8 * columns, 2.6 * rows, title)
    places = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes, (name, values) in zip(places, curves.items(), strict=False):
        draw_curves(axes, rounds=rounds, curves={name: values}, scale=1.0)
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
        history: Accuracy of each class in [0, 1], one row a round, (T, C). NaN is a class without samples.
        class_names: Names of the C classes.
        rounds: Number of the round of each row, from 0 and ascending, (T,). None is 0 … T−1.
        title: Title above the picture.

    Raises:
        ValueError: The history has no round, or the number of names is not C.
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
    label_classes(axes.yaxis, class_names)
    figure.colorbar(image, cax=figure.add_subplot(grid[0, 1]), label="accuracy (%)")
    beside = figure.add_subplot(grid[0, 2], sharey=axes)
    draw_best_and_last(beside, best=np.fmax.reduce(table), last=table[-1])
    return figure


def plot_confusion(matrices: Mapping[str, ArrayLike], class_names: Sequence[str], title: str | None = None) -> Figure:
    """Draw as which class the samples of each class are taken, in percent of the samples of the class.

    Args:
        matrices: Numbers of samples by class (row) and answer (column), (C, C) or (C, C + 1), one panel each by its
            title. The last column of C + 1 is that of answers that are none of the classes.
        class_names: Names of the C classes.
        title: Title above the picture.

    Raises:
        ValueError: There is no matrix, or the number of names is not C.
    """
    tables = {label: np.asarray(counts, dtype=np.float64) for label, counts in matrices.items()}
    if not tables:
        raise ValueError("plot_confusion needs at least one matrix, got none; evaluate a round first")
    num_classes = len(class_names)
    for table in tables.values():
        check_class_names(class_names, len(table))
    side = np.clip(0.36 * num_classes, 2.6, 9)
    figure = new_figure(len(tables) * (side + 0.7) + 1.4, side + 1.7, title)
    panels = figure.subplots(1, len(tables), squeeze=False)[0]
    for axes, (label, table) in zip(panels, tables.items(), strict=True):
        image = draw_confusion(axes, table, class_names)
        axes.set_title(label, fontsize="medium")
    figure.colorbar(image, ax=list(panels), label="share of the class's samples (%)", shrink=0.8)
    return figure


# --- parts ----------------------------------------------------------------------------------------


def new_figure(width: float, height: float, title: str | None = None) -> Figure:
    """Create a figure that is drawn by Agg and unknown to pyplot.

    Args:
        width: Width in inches.
        height: Height in inches.
        title: Title of the figure. None or an empty title draws none.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415 - slow to import

    from fl_lightning.reports.plain_figure import PlainFigure  # noqa: PLC0415

    figure = PlainFigure(figsize=(float(width), float(height)), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    if title:
        figure.suptitle(title, fontsize="large")
    return figure


def plot_metric(metric: Any, value: Any, class_names: Sequence[str]) -> Figure | None:
    """Let a torchmetrics object draw its own value. None is an object that cannot.

    Args:
        metric: The object.
        value: The value, as the object has computed it.
        class_names: Names of the C classes, for objects that take labels of as many.
    """
    from matplotlib.figure import Figure  # noqa: PLC0415 - slow to import

    takes_labels = "labels" in inspect.signature(metric.plot).parameters
    is_by_class = isinstance(value, Tensor) and len(value) == len(class_names)
    labels = {"labels": list(class_names)} if takes_labels and is_by_class else {}
    figure = Figure(figsize=(7, 6), layout="constrained")
    try:
        metric.plot(value, ax=figure.subplots(), **labels)
    except Exception:
        # An object may draw no values of this kind, such as those of several labels.
        return None
    return figure


TRUE_TYPE: dict[Any, Any] = {"pdf.fonttype": 42, "ps.fonttype": 42}
"""Settings of matplotlib by which files embed TrueType letters. Publishers refuse Type 3, which matplotlib embeds."""


def save(figure: Figure, path: Path) -> None:
    """Write a figure in the format of the path's suffix. A viewer finds the old picture or the new one."""
    import matplotlib as mpl  # noqa: PLC0415 - slow to import

    with mpl.rc_context(TRUE_TYPE):
        write_atomically(path, lambda part: figure.savefig(part, format=path.suffix[1:]))


def finite(values: ArrayLike) -> Numbers:
    """Replace values that no axis can show, infinite and endlessly large ones, by NaN. NaN is not drawn."""
    table = np.asarray(values, dtype=np.float64)
    return np.where(np.abs(table) <= LARGEST, table, np.nan)


def in_legend(name: str) -> str:
    """Write a name as a label, with a blank before a `_`, because matplotlib leaves such names out of legends."""
    return f" {name}" if name.startswith("_") else name


def shortened(name: str) -> str:
    """Cut a name to the width of its label.

    >>> shortened("client"), shortened("hospital-of-the-city")
    ('client', 'hospital-of-the…')
    """
    return name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 1]}…"


def add_legend(
    figure: Figure,
    handles: Sequence[Any],
    names: Sequence[str],
    *,
    place: Literal["outside upper left", "outside right center", "outside lower center"],
    columns: int = 1,
    size: float | None = LEGEND_SIZE,
) -> None:
    """Name what a figure shows beside its panels, where the legend covers nothing.

    Args:
        figure: The figure.
        handles: What is named: lines, areas or groups of them.
        names: Their names, in the same order.
        place: Place of the legend, as matplotlib names it.
        columns: Number of columns of the legend, ≥ 1.
        size: Size of the letters in points. None is matplotlib's.
    """
    figure.legend(handles, names, loc=place, ncols=columns, frameon=False, fontsize=size)


def hatched(color: str, hatch: str) -> dict[str, Any]:
    """Return the look of areas that are hatched in a color, as matplotlib's areas take it."""
    return {"facecolor": "none", "edgecolor": color, "hatch": hatch, "linewidth": 0.0}


def round_counts(largest: int) -> list[int]:
    """Return up to three round numbers for a legend of sizes, the largest first.

    Args:
        largest: Largest number that is drawn, ≥ 1.

    >>> round_counts(115), round_counts(37), round_counts(9), round_counts(1)
    ([100, 50, 10], [20, 10, 2], [5, 2, 1], [1])
    """
    if largest < 10:
        return [count for count in (5, 2, 1) if count <= largest]
    power = 10 ** (len(str(largest)) - 1)
    first = next(factor * power for factor in (5, 2, 1) if factor * power <= largest)
    return [first // divisor for divisor in (1, 2, 10) if first % divisor == 0]


def name_sizes(figure: Figure, axes: Axes, *, counts: Sequence[int], point_area: float) -> None:
    """Name the sizes of bubbles in a legend beside the panel.

    Args:
        figure: The figure.
        axes: The panel.
        counts: Numbers of samples whose bubbles are shown.
        point_area: Area of a bubble of one sample, in square points.
    """
    handles = [
        axes.scatter([], [], s=point_area * count, color=COLOURS[0], alpha=0.6, linewidths=0) for count in counts
    ]
    names = [f"{count:,}" for count in counts]
    figure.legend(handles, names, title="samples", loc="outside right center", frameon=False, labelspacing=1.2)


def name_hatches(figure: Figure, name: str, look: Mapping[str, Any]) -> None:
    """Name hatched areas in a legend below the panels.

    Args:
        figure: The figure.
        name: What the hatches mean.
        look: The look of the areas, as of `hatched`.
    """
    from matplotlib.patches import Patch  # noqa: PLC0415 - slow to import

    add_legend(figure, [Patch(**look)], [name], place="outside lower center", size=None)


def check_class_names(class_names: Sequence[str], num_classes: int) -> None:
    """Refuse a number of names other than one per class.

    Raises:
        ValueError: The number of names is another one.
    """
    if len(class_names) != num_classes:
        raise ValueError(f"class_names needs one name per class ({num_classes}), got {len(class_names)}")


def label_places(axis: Axis, names: Sequence[str], most: int) -> None:
    """Name the places 0, 1, … of an axis, every k-th of them if there are too many.

    Args:
        axis: The axis.
        names: Names of the places.
        most: Largest number of names on the axis.
    """
    steps = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 10**9)
    step = next(step for step in steps if len(names) <= step * most)
    places = range(0, len(names), step)
    axis.set_ticks(list(places), [drawable(names[i]) for i in places])
    axis.set_tick_params(length=0 if step == 1 else 3)


def label_classes(axis: Axis, names: Sequence[str]) -> None:
    """Name the places of the classes on an axis."""
    label_places(axis, shown_names(names), MOST_LABELS)


def label_clients(axis: Axis, names: Sequence[str] | None, num_clients: int) -> None:
    """Name the places of the clients on an axis, by their ids if they have no names."""
    ids = [str(client_id) for client_id in range(num_clients)]
    label_places(axis, names=names or ids, most=25)


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
    axes.grid(visible=True, color=GREY, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def separate(axes: Axes, columns: int, rows: int) -> None:
    """Draw thin lines between the cells of a table, unless the cells are too small.

    Args:
        axes: The panel of the table.
        columns: Number of columns.
        rows: Number of rows.
    """
    if max(columns, rows) <= 50:
        axes.set_xticks(np.arange(columns + 1) - 0.5, minor=True)
        axes.set_yticks(np.arange(rows + 1) - 0.5, minor=True)
        axes.grid(visible=True, which="minor", color=GREY, linewidth=0.5)
        axes.tick_params(which="minor", length=0)


def write_counts(axes: Axes, table: Numbers, dark: float, size: float = 6.5) -> None:
    """Write the counts other than 0 into the cells of a table.

    Args:
        axes: The panel of the table.
        table: Counts by row and column.
        dark: Count above which a cell is dark, and its text white.
        size: Size of the letters in points.
    """
    for row, column in zip(*np.nonzero(table), strict=True):
        value = table[row, column]
        text = f"{value:.0f}" if value < 10_000 else f"{value / 1000:.0f}k"
        colour = "white" if value > dark else "black"
        axes.text(column, row, text, ha="center", va="center", fontsize=size, color=colour)


def draw_confusion(axes: Axes, table: Numbers, class_names: Sequence[str]) -> AxesImage:
    """Draw one confusion matrix, with its numbers if there is room for them.

    Args:
        axes: The panel.
        table: Numbers of samples by class and answer, (C, C) or (C, C + 1). A last column without samples is left out.
        class_names: Names of the C classes.
    """
    num_classes = len(class_names)
    totals = table.sum(axis=1, keepdims=True)
    answers = shown_names(class_names)
    if table.shape[1] > num_classes and table[:, -1].any():
        answers.append("none")
    shares = np.full((num_classes, len(answers)), np.nan)
    np.divide(100 * table[:, : len(answers)], totals, out=shares, where=totals > 0)
    axes.set_facecolor(GREY)
    image = axes.imshow(shares, cmap="Blues", vmin=0, vmax=100, interpolation="nearest")
    label_classes(axes.yaxis, class_names)
    label_places(axes.xaxis, answers, MOST_LABELS)
    if max(map(len, answers)) > 2:
        axes.tick_params("x", rotation=90)
    axes.set(xlabel="predicted class", ylabel="class")
    if num_classes <= MOST_NUMBERED:
        # A share that is rounded to 0 is not written.
        written = np.where(shares >= 0.5, shares, np.nan)
        write_values(axes, written, dark=60, form=".0f")
    return image


def write_values(axes: Axes, table: Numbers, *, dark: float, form: str) -> None:
    """Write the numbers of a table into its cells, without those that are NaN.

    Args:
        axes: The panel of the table.
        table: Numbers by row and column.
        dark: Number above which a cell is dark, and its text white.
        form: Format of the numbers.
    """
    for row, column in zip(*np.nonzero(~np.isnan(table)), strict=True):
        value = table[row, column]
        colour = "white" if value > dark else "black"
        axes.text(column, row, f"{value:{form}}", ha="center", va="center", fontsize="small", color=colour)


def mark_unseen(figure: Figure, *, panels: Sequence[Axes], unseen: Sequence[int]) -> None:
    """Hatch the clients that never train, with a legend below the panels, if there are any.

    Args:
        figure: The figure.
        panels: The panels with the clients along the x axis.
        unseen: Ids of these clients.
    """
    if not unseen:
        return
    look = hatched(UNSEEN_COLOR, "///")
    for axes in panels:
        for client_id in unseen:
            axes.axvspan(client_id - 0.5, client_id + 0.5, **look)
    name_hatches(figure, "never trains (data.unseen)", look)


def draw_totals(axes: Axes, totals: Numbers, along: Literal["x", "y"]) -> None:
    """Draw bars with the number of samples of each place along the x or y axis.

    Args:
        axes: The panel.
        totals: Number of samples of each place, (n,).
        along: Axis of the places.
    """
    from matplotlib.ticker import MaxNLocator  # noqa: PLC0415 - slow to import

    places = np.arange(len(totals))
    size = 0.8 if len(totals) <= 50 else 1.0
    axis: Axis
    if along == "x":
        axes.bar(places, totals, size, color="#4d4d4d")
        axis = axes.yaxis
    else:
        axes.barh(places, totals, size, color="#4d4d4d")
        axis = axes.xaxis
    axes.tick_params(along, labelbottom=False, labelleft=False, bottom=False, left=False)
    axis.set_label_text("samples")
    axis.set_major_locator(MaxNLocator(3))
    axes.tick_params(which="minor", length=0)
    axes.spines[["top", "right"]].set_visible(False)


def draw_best_and_last(axes: Axes, best: Numbers, last: Numbers) -> None:
    """Draw each class's best and last accuracy, with a line between them.

    Args:
        axes: The panel.
        best: Best accuracy of each class in %, (C,).
        last: Last accuracy of each class in %, (C,).
    """
    places = np.arange(len(last))
    size = 5.0 if len(last) <= MOST_LABELS else 2.5
    axes.hlines(places, last, best, color="#999999", linewidth=size / 2.5)
    axes.plot(best, places, "o", color=COLOURS[1], markersize=size, markerfacecolor="white", label="best")
    axes.plot(last, places, "o", color=COLOURS[0], markersize=size, label="last")
    axes.set(xlim=(-5, 105), xlabel="accuracy (%)")
    axes.tick_params(labelleft=False, left=False)
    axes.grid(visible=True, axis="x", color=GREY, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, frameon=False, handletextpad=0.1)


def draw_curves(axes: Axes, rounds: Sequence[int], curves: Mapping[str, Sequence[float]], scale: float) -> None:
    """Draw curves through their finite values, with the last value of each in the legend, on a tidy axis of rounds.

    A last value that no axis can show, NaN or infinite, stands in the legend.

    Args:
        axes: The panel.
        rounds: Number of the round of each value, from 0, (T,).
        curves: Values by name, at most T of them.
        scale: Factor of the values. 100 shows them in percent.
    """
    for i, (name, values) in enumerate(curves.items()):
        scaled = scale * np.asarray(values, dtype=np.float64)
        if not len(scaled):
            continue
        known = ~np.isnan(finite(scaled))
        places = np.asarray(rounds)[: len(scaled)][known]
        last = f"{scaled[-1]:.1f} %" if scale == 100 else f"{scaled[-1]:.3g}"
        label = in_legend(f"{name}: {last}")
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
    *,
    label: str,
    std: Numbers | None = None,
    every: int | None = None,
    width: float = 1.4,
    in_steps: bool = False,
) -> None:
    """Draw the i-th line of a figure with its color, style and marker, and a band of one standard deviation.

    Args:
        axes: The panel.
        i: Number of the line, from 0. It decides the look, which is the same in all panels.
        x: Places, (T,).
        mean: Values, (T,).
        label: Name in the legend.
        std: Standard deviations of the values, (T,). None draws no band.
        every: Number of places from one marker to the next. None draws at most 8 markers.
        width: Width of the line in points.
        in_steps: Whether a value holds until the next one.
    """
    places = np.asarray(x, dtype=np.float64)
    colour = COLOURS[i % len(COLOURS)]
    if every is None:
        every = max(1, math.ceil(len(mean) / 8))
    axes.plot(
        places,
        mean,
        STYLES[i % len(STYLES)],
        label=in_legend(label),
        markevery=every,
        color=colour,
        linewidth=width,
        marker=MARKERS[i % len(MARKERS)],
        markersize=4,
        drawstyle="steps-post" if in_steps else "default",
    )
    if std is not None:
        step: Literal["post"] | None = "post" if in_steps else None
        axes.fill_between(places, mean - std, mean + std, step=step, color=colour, alpha=0.18, linewidth=0)
