"""Pictures of data that change: the table of tasks, the curves of tasks, and which client has which classes when."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fl_lightning.reports import figures
from fl_lightning.reports.figures import Numbers, shortened
from fl_lightning.utils.text import drawable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

MOST_NUMBERED = 25
"""Largest number of rows and of columns of a table of tasks whose cells have numbers."""

MOST_IN_COLUMN = 20
"""Largest number of tasks in one column of a legend."""

MOST_NAMED = 50
"""Largest number of clients with a name on the axis."""

BAR_PIXELS = 20
GAP_PIXELS = 4
"""Height of a client's bar and of the gap above it, in pixels of the picture."""

AWAY_COLOR = "#8c8c8c"
"""Color of the hatches over rounds in which a client is away."""

BEFORE = "before"
"""Name of the column of accuracies before training."""

ABBREVIATIONS = {
    "acc_tasks": "ACC",
    "value_tasks": "mean",
    "forgetting_tasks": "F",
    "backward_transfer": "BWT",
    "forward_transfer": "FWT",
    "learning_accuracy": "LA",
    "value_learned": "learned",
}
"""Measures in the title of a table, by name without the mark of values that are no accuracies."""

OF_VALUE = "value_"
"""Mark of the measures of values that are no accuracies."""


class TaskMatrix(NamedTuple):
    """Has a table of tasks to be drawn.

    Args:
        names: Names of the K tasks.
        table: Accuracies in [0, 1] of each row, or other values, (T, K). NaN is a task without samples.
        trained: Whether a task was trained on since the row before, (T, K) bool.
        rounds: The round after which each row was measured, (T,).
        initial: Accuracies before training, (K,). None: they are not known.
        measures: Measures after the last row, by name.
        are_shares: Whether the values are in [0, 1], and shown in percent.
    """

    names: Sequence[str]
    table: Numbers
    trained: NDArray[np.bool_]
    rounds: Sequence[int]
    initial: Numbers | None = None
    measures: Mapping[str, float] = {}
    are_shares: bool = True


class TrainedSpan(NamedTuple):
    """Has the rounds of one row of a table of tasks, and the tasks that were trained on in them.

    Args:
        first: The first round, from 0.
        last: The last round.
        tasks: Numbers of the tasks.
    """

    first: int
    last: int
    tasks: Sequence[int]


# --- table of tasks ---


def plot_tasks(tables: Mapping[str, TaskMatrix], title: str | None = None) -> Figure:
    """Draw tables of tasks, a row for each task and a column for each stage, framed where a task is trained on.

    Args:
        tables: The tables by the name of the model, at least one.
        title: Title above the picture. None draws no title.
    """
    columns = max(num_columns(matrix) for matrix in tables.values())
    tasks = max(len(matrix.names) for matrix in tables.values())
    first = next(iter(tables.values()))
    longest = max(len(shortened(name)) for name in first.names)
    width = float(np.clip(0.52 * columns, 3.6, 12)) + 1.7 + 0.08 * longest
    height = float(np.clip(0.36 * tasks, 1.2, 9)) + 1.25
    figure = figures.new_figure(width, len(tables) * height + 0.3, title)
    panels = figure.subplots(len(tables), 1, squeeze=False)[:, 0]
    limits = limits_of(list(tables.values()))
    for axes, (model, matrix) in zip(panels, tables.items(), strict=True):
        image = draw_tasks(axes, matrix, limits)
        axes.set_title(panel_title(model, matrix), fontsize="small")
    figure.colorbar(image, ax=list(panels), label=label_of(matrix.are_shares), fraction=0.04, pad=0.02)
    return figure


def label_of(are_shares: bool) -> str:
    """Name values on an axis."""
    return "accuracy (%)" if are_shares else "value"


def limits_of(matrices: Sequence[TaskMatrix]) -> tuple[float, float]:
    """Return the smallest and the largest value of the scale of colors: 0 and 100 % of accuracies."""
    if all(matrix.are_shares for matrix in matrices):
        return 0.0, 100.0
    values = figures.finite(np.concatenate([matrix.table.ravel() for matrix in matrices]))
    if np.isnan(values).all():
        return 0.0, 1.0
    return float(np.nanmin(values)), float(np.nanmax(values))


def num_columns(matrix: TaskMatrix) -> int:
    """Count the columns of a table: its rows, and the accuracies before training if they are known."""
    if matrix.initial is None:
        return len(matrix.rounds)
    return len(matrix.rounds) + 1


def panel_title(model: str, matrix: TaskMatrix) -> str:
    """Name the model of a table, and below it its measures."""
    parts = [text.replace("-", "−", 1) for text in measure_texts(matrix)]
    return f"{model}\n{', '.join(parts)}" if parts else model


def measure_texts(matrix: TaskMatrix) -> list[str]:
    """Return each measure of a table as text, such as `ACC 80.0 %`."""
    texts: list[str] = []
    for name, value in matrix.measures.items():
        short = ABBREVIATIONS.get(name) or ABBREVIATIONS[name.removeprefix(OF_VALUE)]
        texts.append(f"{short} {value_text(value, are_shares=matrix.are_shares)}")
    return texts


def task_texts(matrix: TaskMatrix) -> list[str]:
    """Return the value on each task in the last row of a table as text, such as `0-1 80.0 %`."""
    texts: list[str] = []
    for name, value in zip(matrix.names, matrix.table[-1].tolist(), strict=True):
        texts.append(f"{shortened(name)} {value_text(value, are_shares=matrix.are_shares)}")
    return texts


def value_text(value: float, *, are_shares: bool) -> str:
    """Write a value of a table, a share in percent and NaN as a dash.

    >>> value_text(0.805, are_shares=True), value_text(2.5, are_shares=False), value_text(math.nan, are_shares=True)
    ('80.5 %', '2.5', '-')
    """
    if math.isnan(value):
        return "-"
    return f"{100 * value:.1f} %" if are_shares else f"{value:.3g}"


def draw_tasks(axes: Axes, matrix: TaskMatrix, limits: tuple[float, float]) -> AxesImage:
    """Draw one table of tasks, with its numbers if there is room for them.

    Args:
        axes: The panel.
        matrix: The table.
        limits: Smallest and largest value of the scale of colors.
    """
    scale = 100 if matrix.are_shares else 1
    shown = figures.finite(scale * matrix.table)
    labels = [str(round_idx) for round_idx in matrix.rounds]
    offset = 0
    if matrix.initial is not None:
        before = figures.finite(scale * matrix.initial[np.newaxis])
        shown = np.concatenate([before, shown])
        labels = [BEFORE, *labels]
        offset = 1
    axes.set_facecolor(figures.GREY)
    low, high = limits
    image = axes.imshow(shown.T, cmap="Blues", vmin=low, vmax=high, aspect="auto", interpolation="nearest")
    figures.label_places(axes.xaxis, labels, MOST_NUMBERED)
    figures.label_places(axes.yaxis, [shortened(name) for name in matrix.names], figures.MOST_LABELS)
    axes.set(xlabel="after round", ylabel="task")
    if offset:
        axes.axvline(0.5, color="white", linewidth=3)
    frame_trained(axes, matrix.trained, offset=offset)
    if max(shown.shape) <= MOST_NUMBERED:
        form = ".0f" if matrix.are_shares else ".3g"
        figures.write_values(axes, shown.T, dark=low + 0.6 * (high - low), form=form)
    return image


def frame_trained(axes: Axes, trained: NDArray[np.bool_], *, offset: int) -> None:
    """Frame the cells of tasks that are trained on.

    Args:
        axes: The panel.
        trained: Whether a task is trained on since the row before, (T, K).
        offset: Number of columns before the first row.
    """
    from matplotlib.patches import Rectangle  # noqa: PLC0415 - slow to import

    for row, task in zip(*np.nonzero(trained), strict=True):
        corner = (row + offset - 0.44, task - 0.44)
        frame = Rectangle(corner, 0.88, 0.88, fill=False, edgecolor=figures.COLOURS[1], linewidth=1.4)
        axes.add_patch(frame)


# --- curves of tasks ---


def plot_task_curves(
    rounds: Sequence[int],
    curves: Mapping[str, Numbers],
    *,
    mean: Numbers | None,
    spans: Sequence[TrainedSpan],
    are_shares: bool = True,
    title: str | None = None,
) -> Figure:
    """Draw the accuracy on each task over the rounds, and above it in which rounds each task is trained on.

    Args:
        rounds: The rounds, (T,).
        curves: Accuracies in [0, 1], or other values, by the name of the task, one row for each run, (S, T).
        mean: Average accuracies over the tasks that were met, (S, T). None: they are not drawn.
        spans: The rounds of each stage, and the tasks that are trained on in them. Empty: they are not drawn.
        are_shares: Whether the values are in [0, 1], and shown in percent.
        title: Title above the picture. None draws no title.
    """
    strip = float(np.clip(0.11 * len(curves), 0.35, 1.6))
    figure = figures.new_figure(8.6, 3.6 + strip, title)
    grid = figure.add_gridspec(2, 1, height_ratios=(strip, 3.2), hspace=0.03)
    axes = figure.add_subplot(grid[1, 0])
    above = figure.add_subplot(grid[0, 0], sharex=axes)
    colors = colors_of(len(curves))
    scale = 100 if are_shares else 1
    for index, (name, values) in enumerate(curves.items()):
        style = figures.STYLES[index % len(figures.STYLES)]
        draw_band(axes, rounds, scale * values, color=colors[index], style=style, label=shortened(name))
    if mean is not None:
        draw_band(axes, rounds, scale * mean, color="black", style="-", label="mean of met tasks", width=2.4)
    for span in spans:
        axes.axvline(span.last + 0.5, color=figures.GREY, linewidth=1.0, zorder=0)
    draw_spans(above, spans, colors)
    figures.tidy(axes)
    figures.label_rounds(axes, rounds)
    axes.set(ylabel=label_of(are_shares), xlim=(rounds[0] - 0.5, rounds[-1] + 0.5))
    if are_shares:
        axes.set_ylim(-2, 102)
    handles, names = axes.get_legend_handles_labels()
    columns = math.ceil(len(curves) / MOST_IN_COLUMN)
    figures.add_legend(figure, handles, names, place="outside right center", columns=columns, size=None)
    return figure


def colors_of(count: int) -> list[Any]:
    """Return a color for each of some tasks. Many tasks have the colors of a scale, in their order."""
    from matplotlib import colormaps  # noqa: PLC0415 - slow to import

    # The last color is the black of the mean.
    plain = figures.COLOURS[:-1]
    if count <= len(plain):
        return list(plain[:count])
    return list(colormaps["viridis"](np.linspace(0, 0.95, count)))


def draw_band(
    axes: Axes,
    rounds: Sequence[int],
    values: Numbers,
    *,
    color: Any,
    style: str,
    label: str,
    width: float = 1.4,
) -> None:
    """Draw the mean of some runs over the rounds, with a band of one standard deviation.

    Args:
        axes: The panel.
        rounds: The rounds, (T,).
        values: Values as they are shown, (S, T).
        color: Color of the line.
        style: Style of the line.
        label: Name in the legend.
        width: Width of the line in points.
    """
    shown = figures.finite(values)
    means = shown.mean(0)
    marker = "o" if len(rounds) <= 30 else ""
    name = figures.in_legend(label)
    axes.plot(rounds, means, style, color=color, linewidth=width, marker=marker, markersize=3, label=name)
    if len(shown) > 1:
        deviations = shown.std(0, ddof=1)
        axes.fill_between(rounds, means - deviations, means + deviations, color=color, alpha=0.15, linewidth=0)


def draw_spans(axes: Axes, spans: Sequence[TrainedSpan], colors: Sequence[Any]) -> None:
    """Draw a bar for each task in the rounds in which it is trained on.

    Args:
        axes: The panel, with a task at each place of its y axis.
        spans: The rounds of each stage, and the tasks that are trained on in them.
        colors: The color of each task.
    """
    for span in spans:
        begin_and_length = (span.first - 0.5, span.last - span.first + 1)
        for task in span.tasks:
            axes.broken_barh([begin_and_length], (task - 0.4, 0.8), color=colors[task])
    axes.set(ylim=(len(colors) - 0.4, -0.6), yticks=[])
    axes.set_ylabel("trained", fontsize="small", rotation=0, ha="right", va="center")
    axes.tick_params("x", labelbottom=False, length=0)
    axes.spines[["top", "right", "left", "bottom"]].set_visible(False)


# --- clients, rounds and classes ---


def plot_stages(
    counts: ArrayLike,
    names: Sequence[str],
    *,
    rounds: Sequence[int],
    client_names: Sequence[str],
    kind: str,
    there: NDArray[np.bool_] | None = None,
    title: str | None = None,
) -> Figure:
    """Draw which samples each client has in each round: a bar for each client, colored by the shares of the classes.

    A bar has its whole height in the rounds in which the client has most samples. It is hatched in the rounds in which
    the client is away.

    Args:
        counts: Number of samples of each client, round and class, (N, T, C).
        names: Names of the C classes.
        rounds: The rounds, ascending, (T,).
        client_names: Names of the N clients.
        kind: What the names are of, for the scale.
        there: Whether each client is there in each round, (N, T). None: all are.
        title: Title of the figure. None says N and the rounds.
    """
    table = np.asarray(counts, dtype=np.float64)
    num_clients = len(table)
    last = rounds[-1]
    default_title = f"Training samples of {figures.clients_text(num_clients)} in rounds 0 to {last}"
    height = float(np.clip(0.3 * num_clients, 2.2, 13)) + 1.2
    figure = figures.new_figure(9.4, height, title or default_title)
    axes = figure.add_subplot()
    image = draw_bars(axes, table, last_round=last)
    figures.label_rounds(axes, [0, last] if last else [0])
    figures.label_places(axes.yaxis, [shortened(name) for name in client_names], MOST_NAMED)
    axes.set_ylabel("client")
    axes.spines[["top", "right"]].set_visible(False)
    name_most_samples(axes, table)
    if len(names) > 1:
        bar = figure.colorbar(image, ax=axes, fraction=0.035, pad=0.04, aspect=30)
        labels = [drawable(shortened(name)) for name in names]
        figures.label_places(bar.ax.yaxis, labels, figures.MOST_LABELS)
        bar.ax.minorticks_off()
        bar.set_label(kind)
    if there is not None and not there.all():
        mark_away(figure, axes, there, num_rounds=last + 1)
    return figure


def draw_bars(axes: Axes, counts: Numbers, *, last_round: int) -> AxesImage:
    """Draw a bar for each client, colored in each round by the shares of the classes.

    Args:
        axes: The panel.
        counts: Number of samples of each client, round and class, (N, T, C).
        last_round: The last round of the x axis, which begins with round 0.
    """
    num_clients, _, num_classes = counts.shape
    pixels = bars_of(counts, bar=BAR_PIXELS, gap=GAP_PIXELS)
    colors, norm = class_colors(num_classes)
    return axes.imshow(
        np.ma.masked_less(pixels, 0),
        cmap=colors,
        norm=norm,
        aspect="auto",
        interpolation="nearest",
        extent=(-0.5, last_round + 0.5, num_clients - 0.5, -0.5),
    )


def name_most_samples(axes: Axes, counts: Numbers) -> None:
    """Name the largest number of samples of each client on the right.

    Args:
        axes: The panel, with a client at each place of its y axis.
        counts: Number of samples of each client, round and class, (N, T, C).
    """
    most = counts.sum(2).max(1, initial=0)
    numbers = axes.secondary_yaxis("right")
    figures.label_places(numbers.yaxis, [f"{value:.0f}" for value in most], MOST_NAMED)
    numbers.set_ylabel("samples at most")
    numbers.spines["right"].set_visible(False)


def mark_away(figure: Figure, axes: Axes, there: NDArray[np.bool_], *, num_rounds: int) -> None:
    """Hatch the bars of clients in the rounds in which they are away, with a legend below the panel.

    Args:
        figure: The figure.
        axes: The panel, with a client at each place of its y axis.
        there: Whether each client is there in each of some rounds at equal distances, (N, T).
        num_rounds: Number of rounds of the x axis.
    """
    look = figures.hatched(AWAY_COLOR, "////")
    height = BAR_PIXELS / (BAR_PIXELS + GAP_PIXELS)
    width = num_rounds / there.shape[1]
    for client, of_client in enumerate(there):
        spans = [(begin * width - 0.5, length * width) for begin, length in spans_away(of_client)]
        axes.broken_barh(spans, (client + 0.5 - height, height), **look)
    figures.name_hatches(figure, "away (data.stays)", look)


def spans_away(there: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Return the begin and the length of each row of rounds in which a client is away.

    Args:
        there: Whether the client is there in each round, (T,).

    >>> spans_away(np.array([False, True, True, False, False]))
    [(0, 1), (3, 2)]
    """
    changes = np.diff(np.concatenate([[1], there, [1]]))
    begins = np.flatnonzero(changes == -1)
    ends = np.flatnonzero(changes == 1)
    return [(int(begin), int(end - begin)) for begin, end in zip(begins, ends, strict=True)]


def class_colors(count: int) -> tuple[Any, Any]:
    """Return the colors of some classes, and the scale that gives class c the c-th of them."""
    from matplotlib import colormaps  # noqa: PLC0415 - slow to import
    from matplotlib.colors import BoundaryNorm, ListedColormap  # noqa: PLC0415

    if count <= 20:
        name = "tab10" if count <= 10 else "tab20"
        found = colormaps[name](np.arange(count))
    else:
        found = colormaps["turbo"](np.linspace(0.03, 0.97, count))
    return ListedColormap(found), BoundaryNorm(np.arange(count + 1) - 0.5, count)


def bars_of(counts: Numbers, *, bar: int, gap: int) -> NDArray[np.int64]:
    """Fill the pixels of a bar for each client from below, as many for each class as the share of its samples.

    Args:
        counts: Number of samples of each client, round and class, (N, T, C).
        bar: Height of a bar in pixels, which stands for the most samples of the client.
        gap: Height of the empty pixels above a bar.

    Returns:
        The class of each pixel, (N (bar + gap), T). -1 is empty.

    >>> bars_of(np.array([[[1.0, 1.0], [0.0, 1.0]]]), bar=2, gap=1).tolist()
    [[-1, -1], [1, -1], [0, 1]]
    """
    # The lowest pixel is at 0, so that the smallest number of samples is seen.
    levels = np.arange(bar)[::-1] / bar
    strips: list[NDArray[np.int64]] = []
    for of_client in counts:
        num_rounds, num_classes = of_client.shape
        most = max(1.0, float(of_client.sum(1).max(initial=0)))
        ends = of_client.cumsum(1) / most
        columns = [np.searchsorted(of_round, levels, side="right") for of_round in ends]
        pixels = np.stack(columns, axis=1).astype(np.int64)
        # A level above the last class is empty.
        pixels[pixels == num_classes] = -1
        empty = np.full((gap, num_rounds), -1)
        strips.append(np.concatenate([empty, pixels]))
    return np.concatenate(strips)
