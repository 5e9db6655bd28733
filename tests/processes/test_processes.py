"""Clients spread over processes: the numbers of one process, and an end whatever happens."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.processes.cases import CASES, RESTLESS, run_case
from tests.processes.forked import run_script

SCRIPT = Path(__file__).with_name("cases.py")
LAST_BITS = {"train/drift_diversity", "train/gradient_diversity"}
"""Values of sums of float64 vectors, whose last bits depend on the order of the processes."""


def launch(folder, devices, *names, timeout=240):
    return run_script(SCRIPT, str(folder), str(devices), *names, cwd=folder, timeout=timeout)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """What one process gives, and its checkpoints."""
    folder = tmp_path_factory.mktemp("processes")
    threads = torch.get_num_threads()
    for name in CASES:
        run_case(name, folder, 1)
    torch.set_num_threads(threads)
    return folder


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def together(request, alone):
    done = launch(alone, request.param, *CASES)
    assert done.returncode == 0, done.stdout + done.stderr
    return request.param


def read(folder, name, devices):
    return json.loads((folder / f"{name}-{devices}.json").read_text())


@pytest.mark.parametrize("name", CASES)
def test_several_processes_give_the_numbers_of_one(alone, together, name):
    one = read(alone, name, 1)
    many = read(alone, name, together)
    assert many["hash"] == one["hash"]
    if name not in RESTLESS:
        check_rows(many["rows"], one["rows"])
    files = [contents(alone / f"{name}-{devices}") for devices in (1, together)]
    assert files[1] == files[0]
    assert {Path(file).suffix for file in files[0]} == ({".csv", ".npz"} if name == "monitors" else set())


def check_rows(ours, theirs):
    """Fail where the values of rounds differ."""
    assert len(ours) == len(theirs)
    for one, other in zip(map(dict, ours), map(dict, theirs), strict=True):
        for key in LAST_BITS & other.keys():
            assert one.pop(key) == pytest.approx(other.pop(key), rel=1e-12)
        assert json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


def contents(folder):
    """What the tables and arrays in a folder hold."""
    found = {path.name: path.read_text() for path in folder.glob("*.csv")}
    for path in folder.glob("*.npz"):
        with np.load(path) as file:
            found[path.name] = {name: file[name].tolist() for name in file.files}
    return found


@pytest.mark.parametrize("name", CASES)
def test_a_run_goes_on_with_another_number_of_processes(alone, together, name):
    one = read(alone, name, 1)
    many = read(alone, name, together)
    assert many["resumed"] == one["hash"]
    if name not in RESTLESS:
        check_rows(many["resumed_rows"], one["rows"][2:])


def test_the_cases_do_what_they_are_there_for(alone):
    rows = {name: read(alone, name, 1)["rows"] for name in CASES}
    different = ("fedavg", "memory", "gathers", "transforms", "personal", "skips", "all_at_once")
    assert len({read(alone, name, 1)["hash"] for name in different}) == len(different)
    assert [row["train/skipped"] for row in rows["skips"]] == [0, 1, 1, 0]
    assert [row["train/skipped"] for row in rows["all_at_once"]] == [0, 1, 1, 0]
    assert ["local/alma" in row for row in rows["personal"]] == [False, True, False, True]


def slow(*values):
    """tests/processes/test_ends.py has the same way to end by default."""
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        slow("exception", "the disk of client data is gone"),
        slow("gather", "self.all_gather cannot be called in local training, where 2 processes"),
        slow("nan", "returned NaN or infinite values in round 2"),
        slow("rule", "no value is in the middle"),
        slow("kill", None),
    ],
)
def test_trouble_in_one_rank_ends_all_and_leaves_the_last_checkpoint_whole(how, words, tmp_path):
    done = launch(tmp_path, 2, how, timeout=120)
    assert done.returncode != 0
    if words:
        assert words in done.stderr
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert saved["global_step"] == 2
    assert all(value.isfinite().all() for value in saved["state_dict"].values())


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_weights_come_back_from_processes_that_were_started_for_the_fit(method, tmp_path):
    script = SCRIPT.with_name("started.py")
    done = run_script(script, method, cwd=tmp_path, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    said = [line for line in done.stdout.splitlines() if line.endswith(" came back")]  # gloo may speak in between
    assert said == ["net came back", "module came back"]
