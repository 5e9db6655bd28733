"""The table and the picture of clients over simulated time that a run leaves."""

import csv
from itertools import pairwise

import pytest

from fl_lightning.aggregation import FedBuff, Rounds
from fl_lightning.aggregation.timeline import Job, TimedRound, Timeline
from fl_lightning.callbacks import RunPlots
from fl_lightning.data import Devices
from fl_lightning.reports.report import write_report
from fl_lightning.reports.saved import Group, read_run
from fl_lightning.runs.timeline import jobs_of, read_timeline
from tests.callbacks.toy import data, loop, trainer

pytestmark = pytest.mark.filterwarnings("ignore")
DEVICES = {"step_seconds": [0.2, 0.9], "latency": 0.05, "jitter": 0.3, "dropout": 0.2}


def rows(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize(
    "pacing",
    [None, Rounds(deadline=0.9), Rounds(over_selection=0.5), FedBuff(buffer=2, max_staleness=1), FedBuff(buffer=1)],
    ids=["rounds", "deadline", "over-selected", "bounded", "buffer"],
)
def test_the_jobs_of_the_table_are_those_of_the_rounds(tmp_path, pacing):
    timed = data(devices=Devices(**DEVICES), participation=0.5)
    trainer([RunPlots(format="none")], tmp_path, rounds=9).fit(loop(pacing=pacing), datamodule=timed)
    jobs = read_timeline(tmp_path / "timeline.csv")
    for r, row in enumerate(rows(tmp_path / "metrics.csv")):
        arrived = [job for job in jobs if job.round_idx == r and job.outcome == "arrived"]
        others = [job for job in jobs if job.round_idx == r and job.outcome != "arrived"]
        end = float(row["time/seconds"])
        assert len(others) == int(float(row["time/lost"]))
        assert all(job.end <= end for job in others)
        if pacing is not None and pacing.is_asynchronous:
            staleness = [job.staleness for job in arrived]
            assert sum(staleness) / len(staleness) == pytest.approx(float(row["time/staleness"]))
            assert max(staleness) == float(row["time/staleness_max"])
            assert max(job.end for job in arrived) == end
    waits_for_all = pacing is None or (pacing.is_asynchronous and pacing.max_staleness is None)
    if waits_for_all:
        outcomes = {job.outcome for job in jobs}
        assert "lost" in outcomes
        assert "late" not in outcomes
    by_client = {}
    for job in jobs:
        by_client.setdefault(job.client, []).append(job)
    for own in by_client.values():
        for first, second in pairwise(own):
            assert first.end <= second.start  # a client has one job at a time
    assert all(job.round_idx == -1 for job in jobs if job.outcome == "at work")


def test_jobs_that_the_deadline_leaves_out_are_late_and_others_are_lost():
    fates = {0: (1.0, False), 1: (2.0, True), 2: (3.0, True), 3: (3.5, False)}
    jobs = [Job(i, i, 0, 0.0, end, is_lost) for i, (end, is_lost) in fates.items()]

    class OneRound(Timeline):
        def _next(self, round_idx):
            return TimedRound(0.0, 3.0, started=tuple(jobs), arrivals=(jobs[0],), lost=tuple(jobs[1:]))

        def leaving(self, round_idx):
            return []

    names = ["ann", "bob", "eve", "dan"]
    found = {job.client: (job.outcome, job.end) for job in jobs_of(OneRound(), 1, names, deadline=3.0)}
    assert found == {"ann": ("arrived", 1.0), "bob": ("lost", 2.0), "eve": ("late", 3.0), "dan": ("late", 3.0)}
    waited = {job.client: job.outcome for job in jobs_of(OneRound(), 1, names)}
    assert waited == {"ann": "arrived", "bob": "lost", "eve": "lost", "dan": "late"}


def test_a_run_has_the_picture_of_its_clients_over_time(tmp_path):
    timed = data(devices=Devices(**DEVICES), participation=0.5)
    trainer([RunPlots()], tmp_path, rounds=4).fit(loop(pacing=FedBuff(buffer=2)), datamodule=timed)
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")
    write_report([Group("FedBuff", [read_run(tmp_path)])], tmp_path / "out", ["svg"])
    names = {path.name for path in (tmp_path / "out/figures").iterdir()}
    assert {"timeline-0.svg", "time-global-acc.svg"} <= names


def test_without_devices_there_is_no_table_of_jobs(tmp_path):
    trainer([RunPlots(format="none")], tmp_path, rounds=1).fit(loop(), datamodule=data())
    assert not (tmp_path / "timeline.csv").exists()
