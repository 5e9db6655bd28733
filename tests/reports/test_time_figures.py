"""Pictures of simulated time, and the table that the picture of clients over time is drawn from."""

import math

import numpy as np
import pytest
from matplotlib.colors import to_hex

from fl_lightning.reports import figures
from fl_lightning.reports.time_figures import (
    MOST_CLIENTS,
    MOST_JOBS,
    UNFINISHED,
    clients_of,
    draw_busy,
    end_of_picture,
    plot_devices,
    plot_timeline,
)
from fl_lightning.runs.timeline import TimedJob, read_timeline, write_timeline

JOBS = [
    TimedJob("ann", 0.0, 2.0, "arrived", staleness=0, round_idx=0),
    TimedJob("bob", 0.0, 5.0, "arrived", staleness=2, round_idx=2),
    TimedJob("eve", 0.0, 1.5, "lost", round_idx=0),
    TimedJob("ann", 2.0, 3.0, "arrived", staleness=0, round_idx=1),
    TimedJob("eve", 3.0, 5.0, "late", round_idx=2),
    TimedJob("ann", 5.0, 9.0, "at work"),
]


def long_run(num_clients: int, num_jobs: int) -> list[TimedJob]:
    """A run in which one client after the other works for a second, and each step takes two of them."""
    jobs = []
    for number in range(num_jobs):
        start = float(number)
        jobs.append(TimedJob(str(number % num_clients), start, start + 1.0, "arrived", 0, number // 2))
    return jobs


def test_the_table_of_jobs_is_read_as_it_was_written(tmp_path):
    path = tmp_path / "timeline.csv"
    named = [*JOBS, TimedJob("=1+1", 5.0, 5.125, "arrived", staleness=3, round_idx=3)]
    write_timeline(path, named)
    first, *_, last = path.read_text(encoding="utf-8").splitlines()
    assert first == "client,start,end,outcome,staleness,round"
    assert last == "'=1+1,5.0,5.125,arrived,3,3"
    assert [job._replace(client=job.client.lstrip("'")) for job in read_timeline(path)] == named
    assert read_timeline(tmp_path / "none.csv") == []


@pytest.mark.parametrize(
    "line", ["ann,0,1,asleep,,", "ann,2,1,lost,,0", "ann,0,nan,lost,,0", "ann,0,inf,lost,,0", "ann,-1,1,lost,,0", "a,b"]
)
def test_a_table_of_something_else_is_refused(tmp_path, line):
    path = tmp_path / "timeline.csv"
    path.write_text(f"client,start,end,outcome,staleness,round\n{line}\nann,0,1,lost,,0\n", encoding="utf-8")
    if line == "a,b":  # a line that was cut
        assert len(read_timeline(path)) == 1
        return
    with pytest.raises(ValueError, match="must be a table of jobs in simulated time"):
        read_timeline(path)


def bars(figure):
    """Start and end of the bars of each row."""
    (panel,) = (axes for axes in figure.axes if axes.get_ylabel() == "client")
    names = [label.get_text() for label in panel.get_yticklabels()]
    found = {name: [] for name in names}
    for bar in panel.patches:
        row = round(bar.get_y() + bar.get_height() / 2)
        found[names[row]].append((bar.get_x(), bar.get_x() + bar.get_width()))
    return found


def test_each_client_has_a_row_with_its_jobs():
    figure = plot_timeline(JOBS)
    assert bars(figure) == {
        "ann": [(0.0, 2.0), (2.0, 3.0)],  # the last job starts where the picture ends
        "bob": [(0.0, 5.0)],
        "eve": [(0.0, 1.5), (3.0, 5.0)],
    }
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [
        "works, and comes back",
        "is lost",
        "comes too late to count",
        "server step",
    ]
    assert "staleness (server steps)" in {axes.get_ylabel() for axes in figure.axes}


def test_a_job_that_the_run_ends_before_has_no_color_of_staleness():
    jobs = [*JOBS[:5], TimedJob("ann", 4.0, 9.0, "at work")]
    figure = plot_timeline(jobs)
    (panel,) = (axes for axes in figure.axes if axes.get_ylabel() == "client")
    (unfinished,) = (bar for bar in panel.patches if bar.get_x() == 4.0)
    assert to_hex(unfinished.get_facecolor()) == UNFINISHED
    (legend,) = figure.legends
    assert "still works at the end" in [text.get_text() for text in legend.get_texts()]


def test_without_stale_clients_there_is_no_scale_of_staleness():
    figure = plot_timeline(long_run(num_clients=3, num_jobs=8))
    assert "staleness (server steps)" not in {axes.get_ylabel() for axes in figure.axes}
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["works, and comes back", "server step"]


def test_a_long_run_is_shown_up_to_the_end_of_a_round():
    jobs = long_run(num_clients=3, num_jobs=1000)
    until = end_of_picture(jobs)
    assert until == MOST_JOBS  # each job takes a second, and two are a round
    assert len([job for job in jobs if job.start < until]) == MOST_JOBS
    assert "the first 160 of 1000 seconds" in plot_timeline(jobs).get_suptitle()


def test_of_many_clients_the_busiest_have_a_row():
    jobs = long_run(num_clients=MOST_CLIENTS + 5, num_jobs=MOST_CLIENTS + 5)
    jobs[3] = jobs[3]._replace(end=jobs[3].end + 9)
    jobs[7] = jobs[7]._replace(end=jobs[7].start + 0.5)
    shown = clients_of(jobs, until=100.0)
    assert len(shown) == MOST_CLIENTS
    assert "3" in shown
    assert "7" not in shown
    assert shown == sorted(shown, key=int)


def test_the_upper_panel_counts_the_clients_at_work():
    figure = figures.new_figure(4, 2)
    axes = figure.subplots()
    draw_busy(axes, JOBS, until=5.0)
    (line,) = axes.lines
    for moment in np.linspace(0.01, 4.99, 50):
        counted = sum(job.start <= moment < job.end for job in JOBS)
        index = np.searchsorted(line.get_xdata(), moment, side="right") - 1
        assert line.get_ydata()[index] == counted


def test_devices_have_a_panel_for_each_setting_and_a_bar_for_each_client():
    columns = {"step_seconds": [0.1, 0.4, 0.2], "up_mbps": [1.0, 2.0, 9.0]}
    figure = plot_devices(columns, client_names=["ann", "bob", "eve"], unseen=[1])
    first, second = figure.axes
    assert [bar.get_height() for bar in first.containers[0]] == [0.1, 0.4, 0.2]
    assert [bar.get_height() for bar in second.containers[0]] == [1.0, 2.0, 9.0]
    assert [axes.get_ylabel() for axes in (first, second)] == ["s a step", "Mbit/s up"]
    assert [label.get_text() for label in second.get_xticklabels()] == ["ann", "bob", "eve"]
    assert first.lines[0].get_ydata()[0] == pytest.approx(0.2)
    assert math.isclose(second.lines[0].get_ydata()[0], 2.0)
    assert figure.legends
