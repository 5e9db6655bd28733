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

UNUSED_LABELS = {"lost": "is lost", "late": "comes too late to count"}
"""Names of jobs that the server does not take in the legend, by outcome."""

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
    columns: Mapping[str, Sequence[float]], *, client_names: Sequence[str] | None, unseen: Sequence[int]
) -> Figure:
    """Draw how fast the clients' devices are: a panel for each setting with a bar for each client.

    Args:
        columns: Values of the N clients by setting, at least one setting.
        client_names: Names of the N clients. None is their ids.
        unseen: Ids of the clients that never train, which are hatched.
    """
    count = len(next(iter(columns.values())))
    width = float(np.clip(0.3 * count, 4.5, 11)) + 1.0
    title = f"Devices of {figures.clients_text(count)}"
    figure = figures.new_figure(width, 1.35 * len(columns) + 1.0, title)
    panels = list(figure.subplots(len(columns), 1, sharex=True, squeeze=False)[:, 0])
    for index, (axes, (name, values)) in enumerate(zip(panels, columns.items(), strict=True)):
        color = figures.COLOURS[index % len(figures.COLOURS)]
        draw_setting(axes, values, color=color)
        axes.set_ylabel(DEVICE_LABELS.get(name, name))
    figures.label_clients(panels[-1].xaxis, client_names, count)
    panels[-1].set_xlabel("client")
    figures.mark_unseen(figure, panels=panels, unseen=unseen)
    figure.align_ylabels(panels)
    return figure


def draw_setting(axes: Axes, values: Sequence[float], *, color: str) -> None:
    """Draw a bar for each client, and a line at the median.

    Args:
        axes: The panel.
        values: A setting of the devices of the N clients.
        color: Color of the bars.
    """
    count = len(values)
    width = 0.8 if count <= 50 else 1.0
    axes.bar(np.arange(count), values, width, color=color)
    median = float(np.median(values))
    axes.axhline(median, color="black", linewidth=0.9, linestyle="--")
    axes.set_title(f"median {median:.3g}", loc="right", fontsize="small", pad=3)
    axes.set_ylim(bottom=0)
    axes.set_xlim(-0.7, count - 0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params("x", length=0)


def plot_timeline(jobs: Sequence[TimedJob]) -> Figure:
    """Draw a row for each client with a bar for each of its jobs, and above it how many clients are at work.

    The picture shows the first rounds, and of more clients than fit those that are busy most.

    Args:
        jobs: The jobs of a run, in the order of their starts, at least one.
    """
    until = end_of_picture(jobs)
    shown = [job for job in jobs if job.start < until]
    clients = clients_of(shown, until)
    title = title_of(jobs, clients=clients, until=until)
    height = 0.2 * max(len(clients), 6)
    figure = figures.new_figure(9.0, 2.2 + height, title)
    grid = figure.add_gridspec(2, 1, height_ratios=(0.7, height), hspace=0.03)
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
    labels = [drawable(figures.shortened(client)) for client in clients]
    figures.label_places(axes.yaxis, labels, MOST_CLIENTS)
    axes.spines[["top", "right"]].set_visible(False)
    draw_busy(above, jobs, until)
    if stalest:
        add_color_scale(figure, panels=[above, axes], colors=colors, stalest=stalest)
    name_outcomes(figure, shown, fresh=colors(0))
    return figure


def end_of_picture(jobs: Sequence[TimedJob]) -> float:
    """Return the second at which the picture ends: the end of the run, or of the last round with few enough jobs."""
    moments = sorted(end for end in server_steps(jobs) if end > 0)
    starts = np.sort([job.start for job in jobs])
    fitting = [end for end in moments if np.searchsorted(starts, end) <= MOST_JOBS]
    if fitting:
        return fitting[-1]
    if moments:
        return moments[0]
    # An axis from 0 to 0 cannot be drawn.
    return max(job.end for job in jobs) or 1.0


def server_steps(jobs: Sequence[TimedJob]) -> list[float]:
    """Return the second of each server step: in each round the end of the last job that arrived."""
    ends: dict[int, float] = {}
    for job in jobs:
        if job.outcome == "arrived":
            ends[job.round_idx] = max(ends.get(job.round_idx, 0.0), job.end)
    return list(ends.values())


def clients_of(shown: Sequence[TimedJob], until: float) -> list[str]:
    """Return the clients of the rows in the order of their ids: all, or those that are busy most of the time.

    Args:
        shown: The jobs in the picture.
        until: Second at which the picture ends.
    """
    busy: dict[str, float] = {}
    for job in shown:
        busy[job.client] = busy.get(job.client, 0.0) + min(job.end, until) - job.start
    kept = sorted(busy, key=lambda client: busy[client], reverse=True)[:MOST_CLIENTS]
    return sorted(kept, key=natural)


def natural(name: str) -> tuple[int, str]:
    """Return a key that orders names that are numbers by their values, and others behind them by their letters."""
    return (int(name), "") if name.isdecimal() else (10**18, name)


def title_of(jobs: Sequence[TimedJob], *, clients: Sequence[str], until: float) -> str:
    """Return the title: the seconds and the clients that the picture shows, if these are not all.

    Args:
        jobs: The jobs of the run.
        clients: The clients of the rows.
        until: Second at which the picture ends.
    """
    last = max(job.end for job in jobs if job.outcome != "at work" or len(jobs) == 1)
    every = {job.client for job in jobs}
    text = "Clients over simulated time"
    if until < last:
        text += f": the first {until:.4g} of {last:.4g} seconds"
    if len(clients) < len(every):
        text += f", {len(clients)} of {len(every)} clients"
    return text


# --- parts ---


def draw_steps(panels: Sequence[Axes], *, jobs: Sequence[TimedJob], until: float) -> None:
    """Draw a thin line at each server step.

    Args:
        panels: The panels, each of which has the lines.
        jobs: The jobs of the run.
        until: Second at which the picture ends.
    """
    moments = [end for end in server_steps(jobs) if end <= until]
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
    """Draw the bar of a job. A mark shows the end of a job that the server does not take.

    Args:
        axes: The panel.
        job: The job.
        row: Place of the client on the y axis.
        color: Color of the job's staleness, if it arrived.
    """
    width = job.end - job.start
    if job.outcome in MARKS:
        look: dict[str, Any] = {"color": "white", "edgecolor": UNUSED, "hatch": "//////", "linewidth": 0.6}
        axes.barh(y=row, width=width, height=HEIGHT, left=job.start, **look)
        axes.plot([job.end], [row], MARKS[job.outcome], color="black", markersize=4.5, markeredgewidth=1.2, zorder=3)
        return
    # Nobody knows the staleness of a job that is still at work.
    filled = UNFINISHED if job.outcome == "at work" else color
    axes.barh(
        y=row, width=width, height=HEIGHT, left=job.start, color=filled, edgecolor="white", linewidth=0.5, zorder=2
    )


def draw_busy(axes: Axes, jobs: Sequence[TimedJob], until: float) -> None:
    """Draw how many clients are at work over time.

    Args:
        axes: The panel.
        jobs: The jobs of the run.
        until: Second at which the picture ends.
    """
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
    """Add the scale of the staleness beside the panels.

    Args:
        figure: The figure.
        panels: Its panels.
        colors: A color for each staleness.
        stalest: The largest staleness in server steps, ≥ 1.
    """
    from matplotlib.cm import ScalarMappable  # noqa: PLC0415 - slow to import
    from matplotlib.colors import BoundaryNorm  # noqa: PLC0415
    from matplotlib.ticker import MaxNLocator  # noqa: PLC0415

    norm = BoundaryNorm(np.arange(stalest + 2) - 0.5, stalest + 1)
    scale = ScalarMappable(norm=norm, cmap=colors)
    proposed = MaxNLocator(8, integer=True).tick_values(0, stalest)
    ticks = [int(tick) for tick in proposed if 0 <= tick <= stalest]
    bar = figure.colorbar(scale, ax=list(panels), ticks=ticks, fraction=0.03, pad=0.01)
    bar.set_label("staleness (server steps)")
    bar.ax.tick_params(length=0)


def name_outcomes(figure: Figure, shown: Sequence[TimedJob], *, fresh: Any) -> None:
    """Name the looks of the jobs, and the lines of the server's steps, below the panels.

    Args:
        figure: The figure.
        shown: The jobs in the picture.
        fresh: Color of a job without staleness.
    """
    from matplotlib.lines import Line2D  # noqa: PLC0415 - slow to import
    from matplotlib.patches import Patch  # noqa: PLC0415

    outcomes = {job.outcome for job in shown}
    handles: list[Any] = [Patch(facecolor=fresh)]
    labels = ["works, and comes back"]
    if "at work" in outcomes:
        handles.append(Patch(facecolor=UNFINISHED))
        labels.append("still works at the end")
    for outcome, label in UNUSED_LABELS.items():
        if outcome in outcomes:
            bar = Patch(facecolor="white", edgecolor=UNUSED, hatch="//////", linewidth=0.6)
            mark = Line2D([], [], color="none", marker=MARKS[outcome], markeredgecolor="black", markersize=5)
            handles.append((bar, mark))
            labels.append(label)
    handles.append(Line2D([], [], color=STEP, linewidth=1.2))
    labels.append("server step")
    figures.add_legend(figure, handles, labels, place="outside lower center", columns=len(handles))
