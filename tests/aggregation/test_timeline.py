"""Timelines: against a simulation of events, and against the golden cases."""

import json
import random
from pathlib import Path

import pytest

from fl_lightning.aggregation import pacing as P
from fl_lightning.aggregation.timeline import BufferedTimeline
from fl_lightning.data.clients import Cohorts
from fl_lightning.data.devices import Devices, JobTimes, PlannedWork

from .events import buffered, synchronous

GOLDEN = json.loads((Path(__file__).parents[1] / "golden/async_0.json").read_text())
ROUNDS = 6


def times_of(world):
    columns = {name: [device[name] for device in world["devices"]] for name in world["devices"][0]}
    devices = Devices(**columns)
    return JobTimes(
        devices.draw(len(world["devices"]), seed=world["seed"]),
        seed=world["seed"],
        planned=lambda client_id, version: PlannedWork(*world["work"](client_id, version)),
        bytes_down=world["down"],
        bytes_up=world["up"],
    )


def drawn_world(draw):
    """Clients with devices of a few speeds, so that many events come at one time."""
    num_clients = draw.choice([1, 3, 4, 7, 12])
    has = {name: draw.random() < 0.5 for name in ("latency", "jitter", "dropout", "mbps", "sample_seconds")}
    devices = []
    for _ in range(num_clients):
        device = {"step_seconds": draw.choice([0.25, 0.5, 0.5, 2.0])}
        if has["sample_seconds"]:
            device["sample_seconds"] = draw.choice([0.0, 0.125])
        if has["latency"]:
            device["latency"] = draw.choice([0.0, 0.25])
        if has["jitter"]:
            device["jitter"] = draw.choice([0.0, 0.4])
        if has["dropout"]:
            device["dropout"] = draw.choice([0.0, 0.3, 0.6])
        if has["mbps"]:
            device["down_mbps"] = draw.choice([1.0, 4.0])
            device["up_mbps"] = draw.choice([0.5, 2.0])
        devices.append(device)
    batches = [draw.randint(1, 3) for _ in range(num_clients)]
    return {
        "seed": draw.randrange(10**6),
        "devices": devices,
        "work": lambda client_id, version: (batches[client_id], 2 * batches[client_id] + version % 2),
        "down": 125_000,
        "up": 62_500,
    }


@pytest.mark.parametrize("index", range(120))
def test_a_buffer_is_as_the_simulation_says(index):
    draw = random.Random(f"buffered/{index}")
    world = drawn_world(draw)
    num_clients = len(world["devices"])
    slots = draw.randint(1, num_clients + 2)
    settings = {
        "buffer": draw.randint(1, max(1, min(num_clients, 4))),
        "timeout": draw.choice([None, None, 1.5, 3.0]),
        "max_staleness": draw.choice([None, None, 0, 1, 3]),
    }
    if sum(not takes_too_long(world, client_id, settings["timeout"]) for client_id in range(num_clients)) < 4:
        settings["timeout"] = None
    expected, starts = buffered(world, slots=slots, rounds=ROUNDS, **settings)

    def made():
        clients = range(num_clients)
        return BufferedTimeline(times_of(world), seed=world["seed"], clients=clients, concurrency=slots, **settings)

    timeline = made()
    check_rounds(timeline, expected)
    begun = [job for index in range(ROUNDS) for job in timeline.round(index).started]
    assert [(job.client_id, job.version, job.start) for job in begun] == starts[: len(begun)]
    check_leaving(made(), is_bounded=settings["max_staleness"] is not None)


def takes_too_long(world, client_id, timeout):
    duration = times_of(world).duration(client_id, 0)
    return timeout is not None and duration.fixed + 0.7 * duration.computing > timeout


def check_rounds(timeline, expected):
    for index, happened in enumerate(expected):
        found = timeline.round(index)
        assert [(job.client_id, job.version) for job in found.arrivals] == happened["arrivals"]
        assert found.end == pytest.approx(happened["seconds"], rel=1e-12)
        assert len(found.lost) == happened["lost"]


def check_leaving(timeline, is_bounded):
    """Kept are the jobs that really arrive in a later round, and none that is lost, before any later round is known."""
    for index in range(ROUNDS):
        first = timeline.leaving(index)
        assert not any(job.is_lost for job in first)
        back = {job for later in range(index + 1, index + 8) for job in timeline.round(later).arrivals}
        of_version = [job for job in timeline.round(index).started if job in back]
        left = timeline.leaving(index)
        assert left == first
        assert [job for job in left if job in back] == of_version
        if is_bounded:
            assert left == of_version


@pytest.mark.parametrize("index", range(120))
def test_rounds_are_as_the_simulation_says(index):
    draw = random.Random(f"rounds/{index}")
    world = drawn_world(draw)
    num_clients = len(world["devices"])
    deadline = draw.choice([None, 0.75, 1.0, 2.0])
    late = draw.choice(["drop", "cut"]) if deadline else "drop"
    over_selection = draw.choice([0.0, 0.0, 0.5, 1.0])
    cohorts = Cohorts(num_clients, draw.choice([0.5, 1.0]), None, world["seed"])
    asked = (lambda version: cohorts.asked(version, over_selection)) if over_selection else cohorts
    size = cohorts.size if over_selection else None
    expected = synchronous(world, asked=asked, size=size, deadline=deadline, late=late, rounds=ROUNDS)
    pacing = P.Rounds(deadline=deadline, late=late, over_selection=over_selection)
    timeline = pacing.timeline(cohorts, times_of(world))
    for round_idx, happened in enumerate(expected):
        found = timeline.round(round_idx)
        assert sorted((job.client_id, job.version) for job in found.arrivals) == happened["arrivals"]
        assert found.end == pytest.approx(happened["seconds"], rel=1e-12)
        assert len(found.lost) == happened["lost"]
        for job in found.arrivals:
            planned = world["work"](job.client_id, round_idx)[0]
            assert job.share * planned == pytest.approx(happened["batches"][job.client_id])


def golden_world(case):
    sizes = [len(client["y"]) for client in case["clients"]]
    devices = []
    for client_id in range(len(sizes)):
        given = case["devices"].items()
        devices.append({name: value[client_id] if isinstance(value, list) else value for name, value in given})
    return {
        "seed": case["seed"],
        "devices": devices,
        "work": lambda client_id, version: (case["epochs"], case["epochs"] * sizes[client_id]),
        "down": case["bytes_down"],
        "up": case["bytes_up"],
    }


def golden_pacing(case):
    rule = case["rule"]
    if rule["kind"] == "sync":
        given = {name: case[name] for name in ("deadline", "late", "over_selection") if name in case}
        return P.Rounds(**given)
    given = {name: case[name] for name in ("buffer", "timeout", "max_staleness") if name in case}
    given |= {name: rule[name] for name in ("a", "b", "alpha") if name in rule}
    return getattr(P, rule["kind"])(form=rule["staleness"], **given)


@pytest.mark.parametrize("case", GOLDEN, ids=[case["name"] for case in GOLDEN])
def test_golden_schedules(case):
    world = golden_world(case)
    size = case.get("size", case["concurrency"])
    cohorts = Cohorts(len(case["clients"]), 1.0, None, case["seed"], cohort_size=size)
    timeline = golden_pacing(case).timeline(cohorts, times_of(world))
    rounds = [timeline.round(index) for index in range(case["rounds"])]
    for found, expected in zip(rounds, case["expected"]["schedule"], strict=True):
        arrivals = [[job.client_id, job.version] for job in found.arrivals]
        if case["rule"]["kind"] == "sync":
            arrivals.sort()
            batches = {job.client_id: job.share * case["epochs"] for job in found.arrivals}
            assert [batches[client_id] for client_id, _ in arrivals] == pytest.approx(expected["steps"])
        assert arrivals == expected["arrivals"]
        assert found.end == pytest.approx(expected["seconds"], rel=1e-12)
        assert len(found.lost) == expected["lost"]
    begun = [job for found in rounds for job in found.started]
    expected = case["expected"]["starts"]
    assert len(begun) <= len(expected)
    for job, start in zip(begun, expected, strict=False):
        assert (job.client_id, job.version) == (start["client"], start["version"])
        assert job.start == pytest.approx(start["seconds"], rel=1e-12)


def test_a_run_in_which_no_job_arrives_is_refused(monkeypatch):
    monkeypatch.setattr("fl_lightning.aggregation.timeline.MOST_LOST", 50)
    world = drawn_world(random.Random(0))
    settings = {"concurrency": 2, "buffer": 1, "timeout": 1e-6, "max_staleness": None}
    timeline = BufferedTimeline(times_of(world), seed=0, clients=range(len(world["devices"])), **settings)
    with pytest.raises(ValueError, match="a job must come back at some time, but the last 50 were lost; raise"):
        timeline.round(0)
