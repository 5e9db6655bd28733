"""Pictures of simulated time: the devices of the clients, and who works, comes back, is lost or is stale."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fl_lightning.reports import figures
from fl_lightning.runs.timeline import TimedJob
from fl_lightning.utils.text import drawable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap
    from matplotlib.figure import Figure

MOST_JOBS = 160
"""Largest number of jobs in the picture, which shows the first rounds."""

MOST_CLIENTS = 40
"""Largest number of clients in the picture."""

LONGEST_NAME = 16
"""Largest number of characters of a client's name."""

HEIGHT = 0.72
"""Height of a bar. The rows are 1 apart."""

UNUSED = "#bdbdbd"
"""Color of jobs that the server does not take."""

UNFINISHED = "#d9d9d9"
"""Color of jobs that the run ends before."""

STEP = "#c8c8c8"
"""Color of the lines at the server's steps."""

MARKS = {"lost": "x", "late": "|"}
"""Marks at the end of jobs that the server does not take, by outcome."""


DEVICE_LABELS = {
    "step_seconds": "s a step",
    "sample_seconds": "s a sample",
    "down_mbps": "Mbit/s down",
    "up_mbps": "Mbit/s up",
    "latency": "latency (s)",
    "jitter": "jitter σ",
    "dropout": "dropout",
}
"""Labels of axes by the setting of devices."""


def plot_devices(
    columns: Mapping[str, Sequence[float]],
    title: str | None = None,
    *,
    client_names: Sequence[str] | None = None,
    unseen: Sequence[int] = (),
) -> Figure:
    """Draw how fast the clients' devices are: a panel for each setting with a bar for each client.

    Args:
        columns: Values of the N clients by setting, at least one setting.
        title: Title of the figure. None says N.
        client_names: Names of the N clients. None is their ids.
        unseen: Ids of the clients that never train, which are hatched.
    """
    count = len(next(iter(columns.values())))
    width = float(np.clip(0.3 * count, 4.5, 11)) + 1.0
    default_title = f"Devices of {figures.clients_text(count)}"
    figure = figures.new_figure(width, 1.35 * len(columns) + 1.0, title or default_title)
    panels = figure.subplots(len(columns), 1, sharex=True, squeeze=False)[:, 0]
    places = np.arange(count)
    for index, (axes, (name, values)) in enumerate(zip(panels, columns.items(), strict=True)):
        color = figures.COLOURS[index % len(figures.COLOURS)]
        axes.bar(places, values, 0.8 if count <= 50 else 1.0, color=color)
        median = float(np.median(values))
        axes.axhline(median, color="black", linewidth=0.9, linestyle="--")
        axes.set_title(f"median {median:.3g}", loc="right", fontsize="small", pad=3)
        axes.set_ylabel(DEVICE_LABELS.get(name, name))
        axes.set_ylim(bottom=0)
        axes.set_xlim(-0.7, count - 0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params("x", length=0)
    figures.label_clients(panels[-1].xaxis, client_names, count)
    panels[-1].set_xlabel("client")
    figures.mark_unseen(figure, panels=list(panels), unseen=unseen)
    figure.align_ylabels(list(panels))
    return figure


def plot_timeline(jobs: Sequence[TimedJob], title: str | None = None) -> Figure:
    """Draw a row for each client with a bar for each of its jobs, and above it how many clients are at work.

    The picture shows the first rounds, and of more clients than fit those that are busy most.

    Args:
        jobs: The jobs of a run, in the order of their starts, at least one.
        title: Title of the figure. None says what part of the run is shown.
    """
    until = end_of_picture(jobs)
    shown = [job for job in jobs if job.start < until]
    clients = clients_of(shown, until)
    if title is None:
        title = title_of(jobs, clients=clients, until=until)
    figure = figures.new_figure(9.0, 2.2 + 0.2 * max(len(clients), 6), title)
    grid = figure.add_gridspec(2, 1, height_ratios=(0.7, 0.2 * max(len(clients), 6)), hspace=0.03)
    axes = figure.add_subplot(grid[1, 0])
    above = figure.add_subplot(grid[0, 0], sharex=axes)
    draw_steps([axes, above], jobs=jobs, until=until)
    stalest = max((job.staleness for job in shown), default=0)
    colors = staleness_colors(stalest)
    rows = {client: row for row, client in enumerate(clients)}
    for job in shown:
        if job.client in rows:
            draw_job(axes, job, row=rows[job.client], color=colors(job.staleness))
    axes.set(xlabel="simulated seconds", ylabel="client", xlim=(0.0, until), ylim=(len(clients) - 0.4, -0.6))
    figures.label_places(axes.yaxis, [drawable(shortened(client)) for client in clients], MOST_CLIENTS)
    axes.spines[["top", "right"]].set_visible(False)
    draw_busy(above, jobs, until)
    if stalest:
        add_color_scale(figure, panels=[above, axes], colors=colors, stalest=stalest)
    add_legend(figure, shown, fresh=colors(0))
    return figure


def end_of_picture(jobs: Sequence[TimedJob]) -> float:
    """Return the second at which the picture ends: the end of the run, or of the last round with few enough jobs."""
    ends = {job.round_idx: 0.0 for job in jobs if job.round_idx >= 0}
    for job in jobs:
        if job.round_idx >= 0 and job.outcome == "arrived":
            ends[job.round_idx] = max(ends[job.round_idx], job.end)
    moments = sorted(end for end in ends.values() if end > 0)
    starts = np.sort([job.start for job in jobs])
    fitting = [end for end in moments if np.searchsorted(starts, end) <= MOST_JOBS]
    if fitting:
        return fitting[-1]
    return moments[0] if moments else max(job.end for job in jobs) or 1.0


def clients_of(shown: Sequence[TimedJob], until: float) -> list[str]:
    """Return the clients of the rows in the order of their ids: all, or those that are busy most of the time."""
    busy: dict[str, float] = {}
    for job in shown:
        busy[job.client] = busy.get(job.client, 0.0) + min(job.end, until) - job.start
    kept = sorted(busy, key=lambda client: busy[client], reverse=True)[:MOST_CLIENTS]
    return sorted(kept, key=natural)


def natural(name: str) -> tuple[int, str]:
    """Return a key that orders names that are numbers by their values, and others behind them by their letters."""
    return (int(name), "") if name.isdecimal() else (10**18, name)


def title_of(jobs: Sequence[TimedJob], *, clients: Sequence[str], until: float) -> str:
    """Return the title: the seconds and the clients that the picture shows, if these are not all."""
    last = max(job.end for job in jobs if job.outcome != "at work" or len(jobs) == 1)
    every = {job.client for job in jobs}
    text = "Clients over simulated time"
    if until < last:
        text += f": the first {until:.4g} of {last:.4g} seconds"
    if len(clients) < len(every):
        text += f", {len(clients)} of {len(every)} clients"
    return text


def shortened(name: str) -> str:
    """Cut the name of a client to the width of its label."""
    return name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 1]}…"


# --- parts ---


def draw_steps(panels: Sequence[Axes], *, jobs: Sequence[TimedJob], until: float) -> None:
    """Draw a thin line at each server step."""
    ends: dict[int, float] = {}
    for job in jobs:
        if job.outcome == "arrived":
            ends[job.round_idx] = max(ends.get(job.round_idx, 0.0), job.end)
    moments = [end for end in ends.values() if end <= until]
    for axes in panels:
        for moment in moments:
            axes.axvline(moment, color=STEP, linewidth=0.7, zorder=0)


def staleness_colors(stalest: int) -> Colormap:
    """Return one color for each staleness from 0 to the largest one."""
    from matplotlib import colormaps  # noqa: PLC0415 - slow to import
    from matplotlib.colors import ListedColormap  # noqa: PLC0415

    if not stalest:
        return ListedColormap([figures.COLOURS[0]])
    return ListedColormap(colormaps["plasma"](np.linspace(0.05, 0.87, stalest + 1)))


def draw_job(axes: Axes, job: TimedJob, *, row: int, color: Any) -> None:
    """Draw the bar of a job. A cross marks the moment of a loss, a bar that stays open a job that comes too late."""
    width = job.end - job.start
    if job.outcome == "at work":
        # Nobody knows its staleness yet.
        axes.barh(row, width, HEIGHT, left=job.start, color=UNFINISHED, edgecolor="white", linewidth=0.5, zorder=2)
        return
    if job.outcome == "arrived":
        axes.barh(row, width, HEIGHT, left=job.start, color=color, edgecolor="white", linewidth=0.5, zorder=2)
        return
    axes.barh(row, width, HEIGHT, left=job.start, color="white", edgecolor=UNUSED, hatch="//////", linewidth=0.6)
    axes.plot([job.end], [row], MARKS[job.outcome], color="black", markersize=4.5, markeredgewidth=1.2, zorder=3)


def draw_busy(axes: Axes, jobs: Sequence[TimedJob], until: float) -> None:
    """Draw how many clients are at work over time."""
    from matplotlib.ticker import MaxNLocator  # noqa: PLC0415 - slow to import

    changes: dict[float, int] = {0.0: 0}
    for job in jobs:
        changes[job.start] = changes.get(job.start, 0) + 1
        changes[job.end] = changes.get(job.end, 0) - 1
    moments = np.array(sorted(changes))
    counts = np.cumsum([changes[moment] for moment in moments.tolist()])
    within = moments <= until
    x = np.append(moments[within], until)
    y = np.append(counts[within], counts[within][-1])
    axes.fill_between(x, y, step="post", color="#4d4d4d", alpha=0.25, linewidth=0, zorder=1)
    axes.plot(x, y, drawstyle="steps-post", color="#4d4d4d", linewidth=1.2, zorder=2)
    axes.set_ylabel("at work")
    axes.set_ylim(0, 1.15 * max(1, int(y.max())))
    axes.yaxis.set_major_locator(MaxNLocator(2, integer=True))
    axes.tick_params("x", labelbottom=False, length=0)
    axes.spines[["top", "right"]].set_visible(False)


def add_color_scale(figure: Figure, *, panels: Sequence[Axes], colors: Colormap, stalest: int) -> None:
    """Add the scale of the staleness beside the panels."""
    from matplotlib.cm import ScalarMappable  # noqa: PLC0415 - slow to import
    from matplotlib.colors import BoundaryNorm  # noqa: PLC0415
    from matplotlib.ticker import MaxNLocator  # noqa: PLC0415

    norm = BoundaryNorm(np.arange(stalest + 2) - 0.5, stalest + 1)
    scale = ScalarMappable(norm=norm, cmap=colors)
    ticks = [int(tick) for tick in MaxNLocator(8, integer=True).tick_values(0, stalest) if 0 <= tick <= stalest]
    bar = figure.colorbar(scale, ax=list(panels), ticks=ticks, fraction=0.03, pad=0.01)
    bar.set_label("staleness (server steps)")
    bar.ax.tick_params(length=0)


def add_legend(figure: Figure, shown: Sequence[TimedJob], *, fresh: Any) -> None:
    """Name what is drawn, below the panels."""
    from matplotlib.lines import Line2D  # noqa: PLC0415 - slow to import
    from matplotlib.patches import Patch  # noqa: PLC0415

    outcomes = {job.outcome for job in shown}
    handles: list[Any] = [Patch(facecolor=fresh)]
    labels = ["works, and comes back"]
    if "at work" in outcomes:
        handles.append(Patch(facecolor=UNFINISHED))
        labels.append("still works at the end")
    for outcome, label in (("lost", "is lost"), ("late", "comes too late to count")):
        if outcome in outcomes:
            bar = Patch(facecolor="white", edgecolor=UNUSED, hatch="//////", linewidth=0.6)
            mark = Line2D([], [], color="none", marker=MARKS[outcome], markeredgecolor="black", markersize=5)
            handles.append((bar, mark))
            labels.append(label)
    handles.append(Line2D([], [], color=STEP, linewidth=1.2))
    labels.append("server step")
    figure.legend(handles, labels, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=9)
